"""ModelServer as ``serve-model`` has it: ``python -m benchmarks.serving.model_server``."""

from benchmarks.control import stay
from benchmarks.serving.mlp import mlp
from rlmesh_ray.server.endpoint.gc_tuning import freeze_heap
from rlmesh_ray.server.model.model_server import ModelServer

if __name__ == "__main__":
    with ModelServer(mlp()) as server:
        freeze_heap()
        stay(server.address)
