"""What the observing nodes make of messages."""
