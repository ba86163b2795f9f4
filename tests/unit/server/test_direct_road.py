"""How an endpoint lends a road, without a worker."""

import asyncio
import socket
from types import SimpleNamespace
from typing import Any

from rlmesh_ray.envs.commands import AttachCommand, Command
from rlmesh_ray.protocol.outcomes import Failure, FailureKind
from rlmesh_ray.server.direct_road import DirectRoad
from rlmesh_ray.transport.lent_road import LentRoad


def test_a_worker_has_as_long_to_take_a_road_as_a_step_has() -> None:
    ours, theirs = socket.socketpair()
    asked: list[tuple[Command, int]] = []

    async def call_aside(command: Command, timeout_ms: int) -> Failure:
        asked.append((command, timeout_ms))
        return Failure(FailureKind.CRASHED, "")

    worker: Any = SimpleNamespace(
        process=SimpleNamespace(lend_tcp=lambda connection: LentRoad((), connection)),
        progress=object(),
        endpoint=SimpleNamespace(is_at_rest=True),
        call_aside=call_aside,
    )

    async def lend() -> None:
        assert await DirectRoad(worker).lend(45_000, ours, tag_arrays=True) is None

    asyncio.run(lend())

    assert asked == [(AttachCommand(tag_arrays=True, num_descriptors=1), 45_000)]
    with theirs:
        assert theirs.recv(1) == b""
