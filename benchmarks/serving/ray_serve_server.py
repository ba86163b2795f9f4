"""Ray Serve's gRPC ingress with the same policy: ``python -m benchmarks.serving.ray_serve_server``.

A deployment of one replica answers the frames of edition 2026.06. It checks nothing and batches
nothing: it is what a program on Ray Serve would cost at least. Ray Serve listens on all addresses
of the machine.
"""

import importlib
import logging
import socket
from collections.abc import AsyncIterator
from typing import Any

import grpc
import numpy as np
import ray
import torch
from ray import serve
from ray.serve.config import HTTPOptions, gRPCOptions

from benchmarks.control import stay
from benchmarks.serving.frames import SERVICE
from benchmarks.serving.mlp import mlp
from rlmesh_ray.wire._pb.rlmesh.model.v1 import interaction_pb2 as pb

_MOST_STREAMS = 1000


def add_model_service(servicer: Any, server: Any) -> None:
    """Add the service to a server, as generated code does; Ray Serve calls it by its name."""
    # Requests stay bytes: Ray Serve pickles them, and our generated classes are not for that.
    join = grpc.stream_stream_rpc_method_handler(servicer.Join)
    handlers = grpc.method_handlers_generic_handler(SERVICE, {"Join": join})
    server.add_generic_rpc_handlers((handlers,))


class Policy:
    """The network behind ``Join``."""

    def __init__(self) -> None:
        self._network = mlp()

    async def Join(self, requests: Any) -> AsyncIterator[pb.JoinResponse]:
        """Answer the requests of a stream, one by one."""
        async for frame in requests:
            request = pb.JoinRequest.FromString(frame)
            kind = request.WhichOneof("kind")
            answer = pb.JoinResponse(request_id=request.request_id)
            if kind == "predict":
                rows = np.frombuffer(request.predict.observation.bytes.data, np.float32).reshape(
                    -1, 4
                )
                with torch.inference_mode():
                    actions = self._network(torch.from_numpy(rows.copy())).argmax(1).numpy()
                answer.predict.action.bytes.data = actions.tobytes()
            else:
                getattr(answer, kind).SetInParent()
            yield answer


def main() -> None:
    """Serve until standard input ends."""
    with socket.socket() as grpc_socket, socket.socket() as http_socket:
        grpc_socket.bind(("127.0.0.1", 0))
        http_socket.bind(("127.0.0.1", 0))
        port, http_port = grpc_socket.getsockname()[1], http_socket.getsockname()[1]
    ray.init(
        address="local",
        num_cpus=4,
        include_dashboard=False,
        log_to_driver=False,
        logging_level=logging.ERROR,
    )
    serve.start(
        http_options=HTTPOptions(port=http_port),
        grpc_options=gRPCOptions(
            port=port,
            grpc_servicer_functions=["benchmarks.serving.ray_serve_server.add_model_service"],
        ),
        logging_config={"log_level": "ERROR"},
    )
    serve.run(serve.deployment(max_ongoing_requests=_MOST_STREAMS)(Policy).bind())
    stay(f"127.0.0.1:{port}")
    serve.shutdown()
    ray.shutdown()


if __name__ == "__main__":
    # By its name: Ray would pickle the class of a script with all that it uses.
    importlib.import_module("benchmarks.serving.ray_serve_server").main()
