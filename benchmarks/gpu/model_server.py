"""ModelServer with a network on a device: ``python -m benchmarks.gpu.model_server JSON``."""

import sys

from benchmarks.control import stay
from benchmarks.gpu.networks import contract_of, make_network
from benchmarks.gpu.plan import Network, ServedNetwork
from rlmesh_ray.client.model.remote_model import RemoteModel
from rlmesh_ray.models.torch.policy import TorchPolicy
from rlmesh_ray.server.endpoint.gc_tuning import freeze_heap
from rlmesh_ray.server.model.model_server import ModelServer

_COMPILATION_S = 600.0
_MAX_MESSAGE_BYTES = 256 * 2**20
"""More than 2048 frames of 84x84x4 bytes have."""


def main() -> None:
    """Serve what the argument says, until standard input ends."""
    served = ServedNetwork.from_line(sys.argv[1])
    network = Network(served.network)
    policy = TorchPolicy(
        make_network(network),
        device=served.device,
        buckets=served.buckets,
        inference="compiled" if served.compile else "torch",
    )
    with ModelServer(
        policy, max_message_bytes=_MAX_MESSAGE_BYTES, torch_threads=served.torch_threads
    ) as server:
        # The first route compiles the network; no measured client waits for that.
        with RemoteModel(server.address, predict_timeout_s=_COMPILATION_S) as first:
            first.configure_route(contract_of(network, 2))
        freeze_heap()
        stay(server.address)


if __name__ == "__main__":
    main()
