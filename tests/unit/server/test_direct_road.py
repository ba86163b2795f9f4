"""How an endpoint lends a road, without a worker."""

import asyncio
from types import SimpleNamespace
from typing import Any

from rlmesh_ray.envs.commands import AttachCommand, Command
from rlmesh_ray.protocol.outcomes import Failure, FailureKind
from rlmesh_ray.server.direct_road import DirectRoad
from rlmesh_ray.server.session_worker import Deadline


def test_a_worker_has_as_long_to_take_the_line_as_a_step_has() -> None:
    asked: list[tuple[Command, Deadline]] = []

    async def call(command: Command, deadline: Deadline) -> Failure:
        asked.append((command, deadline))
        return Failure(FailureKind.TIMEOUT, "")

    worker: Any = SimpleNamespace(
        process=object(), progress=object(), is_finishing=False, call=call
    )

    async def lend() -> None:
        assert await DirectRoad(worker).lend(45_000, tag_arrays=True) is None

    asyncio.run(lend())

    ((command, deadline),) = asked
    assert command == AttachCommand(tag_arrays=True)
    assert deadline.timeout_ms == 45_000
