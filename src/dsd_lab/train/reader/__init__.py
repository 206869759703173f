"""The small text model that answers a question from one document."""
