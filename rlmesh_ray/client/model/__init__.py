"""Policies behind an address."""
