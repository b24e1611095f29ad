"""Talking to a server over HTTP: connections, retries, and what an answer means. Knows nothing of the engine."""
