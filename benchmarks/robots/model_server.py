"""A sleeping policy, served: ``python -m benchmarks.robots.model_server HORIZON MAX_DELAY_S``."""

import sys

from benchmarks.control import stay
from benchmarks.robots.policy import SleepingPolicy
from rlmesh_ray.server.gc_tuning import freeze_heap
from rlmesh_ray.server.model_server import ModelServer

if __name__ == "__main__":
    policy, max_delay_s = SleepingPolicy(int(sys.argv[1])), float(sys.argv[2])
    with ModelServer(policy, max_delay_s=max_delay_s) as server:
        freeze_heap()
        stay(server.address)
