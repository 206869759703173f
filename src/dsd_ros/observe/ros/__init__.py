"""The parts of observation that use ROS messages."""
