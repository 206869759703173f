"""What crosses the link: message types, codec, channels."""
