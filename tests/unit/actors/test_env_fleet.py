"""Moves of an endpoint to another node, with fakes in place of Ray."""

import asyncio
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import ray as real_ray

from rlmesh_ray.actors import env_fleet
from rlmesh_ray.actors.env_actor import SerializedEnv
from rlmesh_ray.actors.env_fleet import EndpointOwner, EndpointSpec
from rlmesh_ray.errors import RlmeshError

HERE, THERE = "1" * 56, "2" * 56
"""Nodes, as Ray writes their ids."""


class Method:
    """A method of an actor."""

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
    """A registry whose methods do nothing."""

    def __getattr__(self, name: str) -> Method:
        return Method(self._note)

    async def _note(self, *_arguments: object) -> None:
        pass


class MovableFleet:
    """A manager with one endpoint on the node HERE, whose next actor runs on the node THERE."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, announced: Callable[[], Any]) -> None:
        self.actors: list[FakeActor] = []
        places = iter((HERE, THERE))

        class Owner(EndpointOwner):
            def _actor(_self, *_arguments: object, **_options: object) -> FakeActor:
                self.actors.append(FakeActor(next(places), announced))
                return self.actors[-1]

        def kill(actor: FakeActor) -> None:
            actor.is_alive = False

        monkeypatch.setattr(env_fleet, "shared_registry", FakeRegistry)
        ray = SimpleNamespace(kill=kill, exceptions=real_ray.exceptions)
        monkeypatch.setattr(env_fleet, "ray", ray)
        monkeypatch.setattr("ray._private.state.available_resources_per_node", dict)
        self.manager = Owner("fleet", SerializedEnv(b""))

    async def start(self) -> None:
        await self.manager.start([EndpointSpec("fleet-0", {}, "token", is_movable=True)])

    async def move(self) -> None:
        await self.manager.move_near("fleet-0", THERE)

    @property
    def alive(self) -> list[bool]:
        return [actor.is_alive for actor in self.actors]


def test_the_new_actor_stays_when_its_announcement_fails(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # The registry may have the new record, and the former actor would then end itself.
    async def announced() -> None:
        raise RlmeshError("the announcement may have arrived or not")

    async def run() -> None:
        fleet = MovableFleet(monkeypatch, announced)
        await fleet.start()
        await fleet.move()

        assert fleet.alive == [False, True]
        assert await fleet.manager.actors(["fleet-0"]) == [fleet.actors[1]]

    asyncio.run(run())


def test_an_endpoint_that_retires_during_a_move_leaves_no_actor_behind(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def run() -> None:
        announced_once, goes_on = asyncio.Event(), asyncio.Event()

        async def announced() -> None:
            announced_once.set()
            await goes_on.wait()

        fleet = MovableFleet(monkeypatch, announced)
        await fleet.start()
        moving = asyncio.create_task(fleet.move())
        await asyncio.wait(
            [moving, asyncio.create_task(announced_once.wait())], return_when="FIRST_COMPLETED"
        )
        await fleet.manager.retire(["fleet-0"], 1.0)
        await asyncio.sleep(0)
        goes_on.set()
        await moving
        draining = asyncio.all_tasks() - {asyncio.current_task()}
        await asyncio.gather(*draining)

        assert fleet.alive == [False, False]

    asyncio.run(run())
