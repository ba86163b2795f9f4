"""The limit of grpc.aio for dm_env_rpc's own client: a server that plays nothing.

``VENV/bin/python -I .../dm_env_rpc_noop_server.py``, in a virtual environment that has dm_env_rpc
and not this package. Each kind of request is known by its first byte, and answered with bytes that
were made beforehand: those of Catch, always the same.
"""

import asyncio
import itertools
import runpy
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import numpy as np
from dm_env_rpc.v1 import dm_env_rpc_pb2 as pb
from dm_env_rpc.v1 import tensor_utils

_HERE = Path(__file__).parent
_STAY = runpy.run_path(str(_HERE.parent / "control.py"))["stay"]
_CATCH = runpy.run_path(str(_HERE / "catch_game.py"))
_SERVER = runpy.run_path(str(_HERE / "dm_env_rpc_server.py"))
_STEP = 0x1A
"""How a Step begins: EnvironmentRequest.step."""


def _answers() -> dict[int, bytes]:
    """Return what each kind of request but Step is answered with, by the tag of its field."""
    specs = _SERVER["catch_specs"]()
    responses: list[Any] = [
        pb.EnvironmentResponse(create_world=pb.CreateWorldResponse(world_name="catch")),
        pb.EnvironmentResponse(join_world=pb.JoinWorldResponse(specs=specs)),
        pb.EnvironmentResponse(reset=pb.ResetResponse(specs=specs)),
        pb.EnvironmentResponse(leave_world=pb.LeaveWorldResponse()),
    ]
    # A request is in the field of the same number as its response.
    return {frame[0]: frame for frame in (each.SerializeToString() for each in responses)}


def _episode() -> list[bytes]:
    """Return the answers to the steps of an episode that is as long as one of Catch."""
    step = pb.StepResponse(state=pb.EnvironmentStateType.RUNNING)
    board = _CATCH["CatchGame"](0).begin()
    for uid, value in ((_SERVER["BOARD"], board), (_SERVER["REWARD"], np.float32(0.0))):
        step.observations[uid].CopyFrom(tensor_utils.pack_tensor(value))
    goes_on = pb.EnvironmentResponse(step=step).SerializeToString()
    step.state = pb.EnvironmentStateType.TERMINATED
    ends = pb.EnvironmentResponse(step=step).SerializeToString()
    return [*[goes_on] * (_CATCH["ROWS"] - 1), ends]


async def _serve() -> None:
    answers, episode = _answers(), _episode()

    async def process(requests: AsyncIterator[bytes], _context: object) -> AsyncIterator[bytes]:
        steps = itertools.cycle(episode)
        async for request in requests:
            yield next(steps) if request[0] == _STEP else answers[request[0]]

    server = grpc.aio.server()
    handlers = {"Process": grpc.stream_stream_rpc_method_handler(process)}
    server.add_generic_rpc_handlers(
        (grpc.method_handlers_generic_handler("dm_env_rpc.v1.Environment", handlers),)
    )
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    await asyncio.to_thread(_STAY, f"127.0.0.1:{port}")
    await server.stop(None)


if __name__ == "__main__":
    asyncio.run(_serve())
