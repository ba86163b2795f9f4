"""The command line: ``python -m benchmarks``."""
