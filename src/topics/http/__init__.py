"""The wire: /v0 over HTTP. Knows requests and answers; what they mean is the engine's."""
