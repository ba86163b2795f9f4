"""How an endpoint is brought to another node, with nothing of Ray's but the keeper's own code."""

import asyncio
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import ray as real_ray

from rlmesh_ray.actors import fleet_manager as keeper_module
from rlmesh_ray.actors.fleet_manager import EndpointSpec, FleetManager
from rlmesh_ray.actors.serialized_env import SerializedEnv
from rlmesh_ray.errors import RlmeshError

HERE, THERE = "1" * 56, "2" * 56
"""Nodes, as Ray writes their ids."""


class Method:
    """Of an actor."""

    def __init__(self, run: Callable[..., Any]) -> None:
        self.remote = run


class FakeActor:
    """An endpoint's actor on a node."""

    def __init__(self, node_id: str, announced: Callable[[], Any]) -> None:
        self.is_alive = True
        self._node_id = node_id
        self._announced = announced
        self.describe = Method(self._describe)
        self.announce = Method(self._announce)
        self.drain = Method(self._drain)

    async def _describe(self) -> dict[str, Any]:
        return {"node_id": self._node_id, "num_sessions": 0}

    async def _announce(self) -> None:
        await self._announced()

    async def _drain(self, timeout_s: float) -> bool:
        return True


class FakeRegistry:
    """Takes note of nothing."""

    def __getattr__(self, name: str) -> Method:
        return Method(self._note)

    async def _note(self, *_arguments: object) -> None:
        pass


class Stage:
    """A keeper with one endpoint that is on the node HERE, and whose next one comes to be THERE."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, announced: Callable[[], Any]) -> None:
        self.actors: list[FakeActor] = []
        places = iter((HERE, THERE))

        def start(*_arguments: object, **_options: object) -> FakeActor:
            self.actors.append(FakeActor(next(places), announced))
            return self.actors[-1]

        def kill(actor: FakeActor) -> None:
            actor.is_alive = False

        monkeypatch.setattr(keeper_module, "shared_registry", FakeRegistry)
        ray = SimpleNamespace(kill=kill, exceptions=real_ray.exceptions)
        monkeypatch.setattr(keeper_module, "ray", ray)
        monkeypatch.setattr(FleetManager, "_has_room", lambda *_: True)
        monkeypatch.setattr(FleetManager, "_actor", start)
        self.manager = FleetManager("fleet", SerializedEnv(b""), {})

    async def start(self) -> None:
        await self.manager.start([EndpointSpec("fleet-0", {}, "token", is_movable=True)])

    async def settle(self) -> None:
        await self.manager.move_near("fleet-0", THERE)

    @property
    def alive(self) -> list[bool]:
        return [actor.is_alive for actor in self.actors]


def test_an_endpoint_that_may_have_been_announced_elsewhere_is_not_the_former_one_any_more(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # The registry may know the new one by now, so that the former one would end itself.
    async def announced() -> None:
        raise RlmeshError("nobody knows whether the registry has heard it")

    async def run() -> None:
        stage = Stage(monkeypatch, announced)
        await stage.start()
        await stage.settle()

        assert stage.alive == [False, True]
        assert await stage.manager.actors(["fleet-0"]) == [stage.actors[1]]

    asyncio.run(run())


def test_an_endpoint_that_retires_while_it_is_brought_somewhere_leaves_nobody_behind(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def run() -> None:
        asked, goes_on = asyncio.Event(), asyncio.Event()

        async def announced() -> None:
            asked.set()
            await goes_on.wait()

        stage = Stage(monkeypatch, announced)
        await stage.start()
        settling = asyncio.create_task(stage.settle())
        await asyncio.wait(
            [settling, asyncio.create_task(asked.wait())], return_when="FIRST_COMPLETED"
        )
        await stage.manager.retire(["fleet-0"], 1.0)
        await asyncio.sleep(0)
        goes_on.set()
        await settling
        await asyncio.gather(*stage.manager._draining)

        assert stage.alive == [False, False]

    asyncio.run(run())
