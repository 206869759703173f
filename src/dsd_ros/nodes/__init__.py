"""ROS 2 nodes: parameters, topics, bring-up; each a thin shell round one of the other rooms."""
