"""ModelServer as ``rlmesh-ray serve-model`` has it: ``python -m rlmesh_ray.bench.our_server``."""

from rlmesh_ray.bench.control import stay
from rlmesh_ray.bench.mlp import mlp
from rlmesh_ray.server.heap import settle_heap
from rlmesh_ray.server.model_server import ModelServer

if __name__ == "__main__":
    with ModelServer(mlp()) as server:
        settle_heap()
        stay(server.address)
