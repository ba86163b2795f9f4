"""A sleeping policy, served: ``python -m benchmarks.robots.model_server HORIZON MAX_DELAY_S``.

A third argument ``openpi`` announces the port of openpi clients.
"""

import sys
from typing import Any

from benchmarks.control import stay
from benchmarks.robots.policy import SleepingPolicy
from benchmarks.serving.frames import contract
from rlmesh_ray.server.endpoint.gc_tuning import freeze_heap
from rlmesh_ray.server.model.model_server import ModelServer

if __name__ == "__main__":
    policy, max_delay_s = SleepingPolicy(int(sys.argv[1])), float(sys.argv[2])
    openpi: dict[str, Any] = {}
    if "openpi" in sys.argv:
        openpi = {"openpi": "127.0.0.1:0", "openpi_env": contract(1)}
    with ModelServer(policy, max_delay_s=max_delay_s, **openpi) as server:
        freeze_heap()
        stay(server.openpi_address or server.address)
