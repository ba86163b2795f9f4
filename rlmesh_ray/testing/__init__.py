"""Environments, comparisons and strategies for tests, also for those of users."""
