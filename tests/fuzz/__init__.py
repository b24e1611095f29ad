"""Hostile input to a real server: nothing that a stranger sends may break it, fill it or hold it."""
