"""Replay of a queue into another database with PySpark Structured Streaming."""
