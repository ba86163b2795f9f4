"""Environments behind an address: single ones, vectors, observers."""
