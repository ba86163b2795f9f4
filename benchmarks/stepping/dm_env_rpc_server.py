"""Catch, served by means of dm_env_rpc's own library; runs in a virtual environment of its own.

``VENV/bin/python -I .../dm_env_rpc_server.py``. It must not import this package, which is not
installed there. It does for a step what dm_env_rpc's example of a server does, which is not part
of the published package: a synchronous gRPC server, generated messages, tensors packed by
``tensor_utils``, one stream at a time. One world, no settings.
"""

import runpy
from collections.abc import Iterator
from concurrent import futures
from pathlib import Path
from typing import Any

import grpc
import numpy as np
from dm_env_rpc.v1 import dm_env_rpc_pb2 as pb
from dm_env_rpc.v1 import dm_env_rpc_pb2_grpc, spec_manager, tensor_spec_utils, tensor_utils

_HERE = Path(__file__).parent
_STAY = runpy.run_path(str(_HERE.parent / "control.py"))["stay"]
_CATCH = runpy.run_path(str(_HERE / "catch_game.py"))
_PADDLE, BOARD, REWARD = 1, 1, 2


def _spec(name: str, shape: tuple[int, ...], dtype: type, low: float, high: float) -> Any:
    spec = pb.TensorSpec(
        name=name, shape=shape, dtype=tensor_utils.np_type_to_data_type(np.dtype(dtype))
    )
    tensor_spec_utils.set_bounds(spec, dtype(low), dtype(high))
    return spec


def catch_specs() -> Any:
    """Return the specs of the world."""
    board = (_CATCH["ROWS"], _CATCH["COLUMNS"])
    return pb.ActionObservationSpecs(
        actions={_PADDLE: _spec("paddle", (), np.int8, -1, 1)},
        observations={
            BOARD: _spec("board", board, np.float32, 0, 1),
            REWARD: _spec("reward", (), np.float32, -1, 1),
        },
    )


class _Environment(dm_env_rpc_pb2_grpc.EnvironmentServicer):
    def Process(self, requests: Iterator[Any], _context: Any) -> Iterator[Any]:
        joined = _Joined()
        for request in requests:
            kind = request.WhichOneof("payload")
            response = pb.EnvironmentResponse()
            getattr(response, kind).CopyFrom(getattr(joined, kind)(getattr(request, kind)))
            yield response


class _Joined:
    """The world of one stream; a method a kind of request."""

    def __init__(self) -> None:
        self._game = _CATCH["CatchGame"](0)
        self._actions = spec_manager.SpecManager(catch_specs().actions)
        self._observations = spec_manager.SpecManager(catch_specs().observations)
        self._is_running = False

    def create_world(self, _request: Any) -> Any:
        return pb.CreateWorldResponse(world_name="catch")

    def join_world(self, _request: Any) -> Any:
        return pb.JoinWorldResponse(specs=catch_specs())

    def reset(self, _request: Any) -> Any:
        self._is_running = False
        return pb.ResetResponse(specs=catch_specs())

    def leave_world(self, _request: Any) -> Any:
        return pb.LeaveWorldResponse()

    def step(self, request: Any) -> Any:
        if self._is_running:
            moved = self._actions.unpack(request.actions)
            board, reward, is_down = self._game.move(int(moved.get("paddle", 0)))
        else:
            board, reward, is_down = self._game.begin(), 0.0, False
        self._is_running = not is_down
        state = pb.EnvironmentStateType
        packed = self._observations.pack({"board": board, "reward": np.float32(reward)})
        response = pb.StepResponse(state=state.TERMINATED if is_down else state.RUNNING)
        for uid in request.requested_observations:
            response.observations[uid].CopyFrom(packed[uid])
        return response


def _main() -> None:
    server = grpc.server(futures.ThreadPoolExecutor(max_workers=1))
    dm_env_rpc_pb2_grpc.add_EnvironmentServicer_to_server(_Environment(), server)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    _STAY(f"127.0.0.1:{port}")
    server.stop(None)


if __name__ == "__main__":
    _main()
