"""A client of openpi servers."""
