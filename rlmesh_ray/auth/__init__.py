"""Secrets that lie in files (tokens, keys, certificates), as both ends of a line read them."""
