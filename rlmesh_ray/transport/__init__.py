"""Transports between a client and its env worker, with exactly-once execution of requests."""
