"""The verifier: engine, sessions, server."""
