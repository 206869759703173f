"""What people look at: pictures and lanes drawn from what the robot says. Knows nothing of ROS or of models."""
