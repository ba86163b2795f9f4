"""Clients: environments, vectors and policies behind an address."""
