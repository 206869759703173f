"""The robot's half of a decode: the drafter and the session that drives its rounds."""
