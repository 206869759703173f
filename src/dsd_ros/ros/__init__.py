"""What the nodes share: parameters, lifecycle, QoS, images, the DDS channel, bring-up and processes."""
