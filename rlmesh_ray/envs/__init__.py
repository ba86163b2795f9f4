"""Running environments: lanes, the worker process, its shared-memory block."""
