"""Simulator side of RLlink."""
