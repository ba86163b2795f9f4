"""Helpers for tests of programs that use this package."""
