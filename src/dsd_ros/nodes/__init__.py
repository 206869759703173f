"""The ROS 2 nodes, one file per executable."""
