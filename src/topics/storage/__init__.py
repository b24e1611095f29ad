"""Bytes that survive: files, frames, the WAL, segments. Knows frames, not what they mean."""
