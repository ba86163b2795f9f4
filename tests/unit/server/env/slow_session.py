"""A session without a worker, whose requests, calls and pictures last until a gate is open."""

import asyncio
from types import SimpleNamespace
from typing import Any

from rlmesh_ray.protocol.env_session import Failure, RenderOutcome
from rlmesh_ray.server.env.lane_session import EDITION_DIALECT, LaneSession
from rlmesh_ray.server.observe.counters import EnvCounters
from rlmesh_ray.spaces.contract import AutoresetMode, EnvContract
from rlmesh_ray.spaces.spec import DiscreteSpec


def contract(render_mode: str = "rgb_array") -> EnvContract:
    space = DiscreteSpec(2)
    return EnvContract("id", space, space, 2, AutoresetMode.DISABLED, render_mode)


class SlowSession(LaneSession):
    """Its client has no numbers, and may call ``f``, ``g`` and ``h``."""

    def __init__(self) -> None:
        pool: Any = SimpleNamespace(
            counts=EnvCounters(), steps_subsets=True, release=lambda worker, is_idle: None
        )
        super().__init__(pool, contract(), EDITION_DIALECT, allowed_calls=("f", "g", "h"))
        self.log: list[str] = []
        self.gate = asyncio.Event()
        self.outcome: tuple[object, ...] | Failure = (1,)
        self.picture: RenderOutcome | Failure = RenderOutcome(b"png")
        self.drawn: list[int] = []

    async def _logged(self, name: str) -> None:
        self.log.append(f"{name} begins")
        await self.gate.wait()
        self.log.append(f"{name} ends")

    async def _answer(self, data: bytes, waited_s: float) -> bytes:
        await self._logged(data.decode())
        return data

    async def _call(self, call: Any, deadline: object) -> tuple[object, ...] | Failure:
        await self._logged(call.name)
        return self.outcome

    async def _observe(self, lane: int) -> RenderOutcome | Failure:
        self.drawn.append(lane)
        await self.gate.wait()
        return self.picture
