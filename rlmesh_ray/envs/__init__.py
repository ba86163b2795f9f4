"""Running environments: lanes, vectors of lanes, and the env worker process."""
