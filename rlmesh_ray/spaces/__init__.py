"""Spaces and values: gymnasium spaces to specs and back, batches as columns, conformance."""
