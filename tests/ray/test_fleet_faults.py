"""Fleets when what they stand on is gone, and when they are asked for what cannot be."""

import os
import signal
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import cloudpickle
import gymnasium
import pytest
import ray

from rlmesh_ray import RemoteVectorEnv
from rlmesh_ray.actors import EnvFleet
from rlmesh_ray.actors.registry.endpoint_resolver import owner_name
from rlmesh_ray.actors.registry.registry_actor import find_actor, find_registry
from rlmesh_ray.errors import (
    ConfigurationError,
    EndpointClosedError,
    EndpointUnreachableError,
    EnvStartError,
)
from tests.loopback.eventually import eventually
from tests.ray.test_fleet_registry import restart_registry

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("local_ray")]


@pytest.fixture
def fleet(local_ray: None) -> Iterator[EnvFleet]:
    with EnvFleet("CartPole-v1", num_endpoints=2, num_cpus=0.1) as fleet:
        yield fleet


def pids(fleet: EnvFleet) -> list[int]:
    return [each["pid"] for each in ray.get([actor.describe.remote() for actor in fleet.actors])]


def is_gone(pid: int) -> bool:
    return not Path(f"/proc/{pid}").exists()


def addresses(fleet: EnvFleet) -> list[str]:
    """Return them, or none while they are not known."""
    try:
        return fleet.addresses
    except EndpointUnreachableError:
        return []


def test_a_fleet_survives_a_registry_that_is_lost_for_good(fleet: EnvFleet) -> None:
    before = fleet.addresses

    ray.kill(find_registry())
    assert eventually(lambda: addresses(fleet) == before)
    fleet.scale(3)
    there = pids(fleet)
    fleet.scale(1)
    assert eventually(lambda: is_gone(there[2]))
    fleet.stop()

    assert eventually(lambda: all(map(is_gone, there)))


def test_what_is_stopped_while_it_grows_says_so(fleet: EnvFleet) -> None:
    errors: list[BaseException] = []

    def grow() -> None:
        try:
            fleet.scale(4)
        except EndpointClosedError as error:
            errors.append(error)

    growing = threading.Thread(target=grow)
    manager = find_actor(owner_name(fleet.resolver.fleet))
    growing.start()
    next_id = f"{fleet.resolver.fleet}-2"
    assert eventually(lambda: ray.get(manager.actors.remote([next_id])))
    fleet.stop()
    growing.join()

    assert "has been stopped" in str(errors[0])


def test_a_fleet_whose_manager_has_died_says_what_to_do(fleet: EnvFleet) -> None:
    there = pids(fleet)

    ray.kill(find_actor(owner_name(fleet.resolver.fleet)))

    assert eventually(lambda: all(map(is_gone, there)))
    for number in 3, 1:
        with pytest.raises(EndpointClosedError, match="start a new fleet"):
            fleet.scale(number)
    with pytest.raises(EndpointClosedError, match="start a new fleet"):
        _ = fleet.actors
    fleet.stop()


@pytest.mark.parametrize("by", ["ray", "signal"])
def test_a_simulator_in_a_session_of_its_own_ends_with_the_actor(by: str, tmp_path: Path) -> None:
    class Simulating(gymnasium.Wrapper[Any, Any, Any, Any]):
        def __init__(self) -> None:
            super().__init__(gymnasium.make("CartPole-v1"))
            simulator = subprocess.Popen(["sleep", "1000"], start_new_session=True)
            (tmp_path / str(simulator.pid)).touch()

    with EnvFleet(Simulating, num_cpus=0.1) as fleet:
        (first,) = [int(path.name) for path in tmp_path.iterdir()]
        if by == "ray":
            ray.kill(fleet.actors[0], no_restart=True)
        else:
            os.kill(pids(fleet)[0], signal.SIGKILL)

        assert eventually(lambda: is_gone(first))


def test_a_fleet_that_is_sent_somewhere_says_what_to_send_instead(fleet: EnvFleet) -> None:
    with pytest.raises(ConfigurationError, match="addresses and tokens"):
        cloudpickle.dumps(fleet)


def test_an_endpoint_that_goes_gets_no_session_from_a_registry_that_is_restarted(
    fleet: EnvFleet,
) -> None:
    stays, goes = fleet.resolver.endpoint_ids
    env = RemoteVectorEnv(fleet.addresses[1], token=fleet.tokens[1])
    env.reset(seed=0)
    fleet.scale(1)

    restart_registry()

    def reported() -> dict[str, Any]:
        there = ray.get(find_registry().overview.remote())
        return {each.endpoint_id: each for each in there}

    assert eventually(lambda: {stays, goes} <= reported().keys() and reported()[goes].is_retiring)
    members = ray.get(find_registry().members.remote(fleet.resolver.fleet))
    assert [each.endpoint_id for each in members] == [stays]
    env.close()


class Moody(gymnasium.Wrapper[Any, Any, Any, Any]):
    """Cannot be made while there is a certain file."""

    def __init__(self, ineligibility: Path) -> None:
        if ineligibility.exists():
            raise RuntimeError("not now")
        super().__init__(gymnasium.make("CartPole-v1"))


def test_an_endpoint_that_cannot_serve_at_once_after_a_restart_does_later(
    local_ray: None, tmp_path: Path
) -> None:
    ineligibility = tmp_path / "obstacle"
    with EnvFleet(lambda: Moody(ineligibility), num_cpus=0.1) as fleet:
        (address,), (actor,) = fleet.addresses, fleet.actors
        ineligibility.touch()
        ray.kill(actor, no_restart=False)

        def fails() -> bool:
            try:
                ray.get(actor.address.remote())
            except ray.exceptions.RayTaskError as error:
                return isinstance(error.cause, EnvStartError)
            except ray.exceptions.RayActorError:
                pass  # it is still on its way
            return False

        assert eventually(fails)
        ineligibility.unlink()

        assert eventually(lambda: addresses(fleet) not in ([], [address]))
        RemoteVectorEnv(fleet.addresses[0], token=fleet.tokens[0]).close()


def test_a_failure_is_reported_while_other_requests_wait_for_room() -> None:
    # Who waited for all of them would exceed the time that a test has.
    with pytest.raises(EnvStartError, match="NoSuchEnv"):
        EnvFleet("NoSuchEnv-v0", num_endpoints=3, num_cpus=8, start_timeout_s=600)  # of 16


class Clinging(gymnasium.Wrapper[Any, Any, Any, Any]):
    """Does not end."""

    def __init__(self) -> None:
        super().__init__(gymnasium.make("CartPole-v1"))

    def close(self) -> None:
        threading.Event().wait()


def test_an_endpoint_whose_environment_does_not_end_goes_all_the_same(local_ray: None) -> None:
    with EnvFleet(Clinging, num_endpoints=2, num_cpus=0.1) as fleet:
        there = pids(fleet)
        workers = children(there[1])
        env = RemoteVectorEnv(fleet.addresses[1], token=fleet.tokens[1])
        env.reset(seed=0)

        fleet.scale(1)
        env.close()

        assert eventually(lambda: is_gone(there[1]) and all(map(is_gone, workers)))


def children(pid: int) -> list[int]:
    reported = Path(f"/proc/{pid}/task").glob("*/children")
    return [int(child) for path in reported for child in path.read_text().split()]
