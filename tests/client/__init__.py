"""`topics.Client`, `AsyncClient` and `Worker`: against a real server, and through a proxy that makes trouble."""
