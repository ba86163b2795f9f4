"""Environments behind an address: sessions, their workers, direct connections."""
