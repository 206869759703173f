"""The laboratory of dsd_ros: trains the shipped models, measures, reproduces the papers, breaks things on purpose."""
