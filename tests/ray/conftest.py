"""Tests in this folder use Ray."""

import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import ray
import torch

from rlmesh_ray.actors.registry import assignment_table
from rlmesh_ray.actors.registry.registry_actor import shared_registry
from rlmesh_ray.client import endpoint_registration
from rlmesh_ray.rllib.runner import assignment_requests
from rlmesh_ray.rllib.runner import slot as slot_module
from tests.ray.lost_endpoints import Fleet, IdleServers

# Small networks on few cores: more threads would wait for each other most of the time.
torch.set_num_threads(1)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if "tests/ray/" in str(item.path):
            item.add_marker(pytest.mark.ray)
            # Ray swallows what the handler of a signal raises in ray.get(): this ends the process.
            own = item.get_closest_marker("timeout")
            limit_s = own.args[0] if own is not None else float(item.config.getini("timeout"))
            item.add_marker(pytest.mark.timeout(limit_s, method="thread"), append=False)


@pytest.fixture(autouse=True)
def impatience(monkeypatch: pytest.MonkeyPatch) -> None:
    """Runners of this process ask and try again often; simulators in it report often."""
    monkeypatch.setattr(assignment_requests, "_ASK_EVERY_S", 0.2)
    monkeypatch.setattr(slot_module, "_FIRST_DELAY_S", 0.05)
    monkeypatch.setattr(slot_module, "_LONGEST_DELAY_S", 0.2)
    monkeypatch.setattr(endpoint_registration, "_REPORT_EVERY_S", 0.3)


@pytest.fixture
def sessions_move_soon(local_ray: None) -> Iterator[None]:
    """The registry balances the load soon after the last new session, and not only after 5 s."""

    def set_quiet_s(_registry: object, quiet_s: float) -> float:
        former_s = assignment_table.QUIET_S
        assignment_table.QUIET_S = quiet_s
        return former_s

    registry = shared_registry()
    former_s = ray.get(registry.__ray_call__.remote(set_quiet_s, 0.2))
    yield
    ray.get(registry.__ray_call__.remote(set_quiet_s, former_s))


@pytest.fixture(autouse=True, scope="module")
def fleets_of_configs_end() -> Iterator[None]:
    """End the fleets that ``configure`` keeps for as long as the process lives: they take CPUs."""
    yield
    endpoints = sys.modules.get("rlmesh_ray.rllib.config.endpoint_sources")
    while endpoints is not None and endpoints.KEPT_FLEETS:
        endpoints.KEPT_FLEETS.pop().stop()


@pytest.fixture
def holder() -> Callable[[int], Any]:
    """Return what starts an actor that holds CPUs."""

    # In here, it travels by value: its process need not import RLlib.
    class Holder:
        def ping(self) -> None:
            """Answer, when there."""

    def start(num_cpus: int) -> Any:
        actor = ray.remote(num_cpus=num_cpus)(Holder).remote()
        ray.get(actor.ping.remote())
        return actor

    return start


@pytest.fixture(scope="module")
def idle_servers() -> Iterator[IdleServers]:
    servers = IdleServers()
    yield servers
    servers.stop()


@pytest.fixture
def fleets(idle_servers: IdleServers) -> Iterator[Callable[..., Fleet]]:
    made: list[Fleet] = []

    def make(*envs: Callable[[], Any]) -> Fleet:
        made.append(Fleet(idle_servers, *envs))
        return made[-1]

    yield make
    for fleet in made:
        fleet.stop()
