"""Shells that accept connections."""
