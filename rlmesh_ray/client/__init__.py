"""Shells that connect."""
