"""Dialects: messages to bytes and back, without I/O."""
