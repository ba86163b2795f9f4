"""Endpoints keep their place in the registry, lose it, and get it back."""

import json
import os
import signal
import subprocess
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import ray

from rlmesh_ray import RemoteVectorEnv
from rlmesh_ray.actors import EnvFleet, EnvServiceActor
from rlmesh_ray.actors.ray_calls import get_result, is_restarted
from rlmesh_ray.actors.registry.registry_actor import find_registry, shared_registry
from rlmesh_ray.errors import AccessDeniedError, EndpointClosedError, EndpointUnreachableError
from tests.loopback.eventually import eventually

pytestmark = pytest.mark.usefixtures("local_ray")


@pytest.fixture(scope="module")
def fleet(local_ray: None) -> Iterator[EnvFleet]:
    with EnvFleet("CartPole-v1", num_endpoints=2, num_cpus=0.1) as fleet:
        yield fleet


def records(fleet: EnvFleet) -> list[Any]:
    return list(ray.get(find_registry().members.remote(fleet.resolver.fleet)))


def open_env(address: str, token: str | None) -> RemoteVectorEnv:
    return RemoteVectorEnv(address, token=token)


def test_actors_ask_whether_they_were_restarted_without_a_warning_of_ray() -> None:
    class Asking:
        def warned(self) -> list[str]:
            with warnings.catch_warnings(record=True) as seen:
                warnings.simplefilter("always")
                assert not is_restarted()
            return [str(one.message) for one in seen]

    actor: Any = ray.remote(Asking).options(num_cpus=0).remote()

    assert ray.get(actor.warned.remote()) == []


def pid_of(actor: Any) -> int:
    return int(ray.get(actor.__ray_call__.remote(lambda _: os.getpid())))


def restart_registry() -> None:
    registry = find_registry()
    former = pid_of(registry)
    ray.kill(registry, no_restart=False)
    # Ray kills in its own time.
    assert eventually(lambda: pid_of(registry) != former)


def test_a_token_opens_its_own_endpoint_and_no_other(fleet: EnvFleet) -> None:
    first, second = zip(fleet.addresses, fleet.tokens, strict=True)

    open_env(*first).close()
    with pytest.raises(AccessDeniedError):
        open_env(second[0], first[1])
    assert first[1] not in repr(fleet.resolver)
    assert fleet.resolver.secret is not None
    assert fleet.resolver.secret not in repr(fleet.resolver)


def test_an_assignment_opens_the_endpoint_that_it_names(fleet: EnvFleet) -> None:
    assignment = fleet.resolver.assign("sessions/0", 1, "")

    assert (assignment.address, assignment.endpoint_id) == (
        fleet.addresses[1],
        fleet.resolver.endpoint_ids[1],
    )
    open_env(assignment.address, assignment.token).close()
    assert ray.get(fleet.resolver.rebalance({"sessions/0": assignment.endpoint_id})) == ()
    fleet.resolver.release(["sessions/0"])


@pytest.mark.slow
def test_a_registry_that_is_restarted_fills_up_again_with_the_same_incarnations(
    fleet: EnvFleet,
) -> None:
    victim = fleet.resolver.endpoint_ids[0]
    former = {each.endpoint_id: each for each in records(fleet)}
    ray.kill(fleet.actors[0], no_restart=False)
    assert eventually(
        lambda: any(each.incarnation > former[victim].incarnation for each in records(fleet))
    )
    before = set(records(fleet))

    restart_registry()
    assert eventually(lambda: set(records(fleet)) == before)
    open_env(fleet.addresses[0], fleet.tokens[0]).close()


def test_no_session_is_moved_while_a_restarted_registry_does_not_know_its_endpoints(
    fleet: EnvFleet,
) -> None:
    restart_registry()

    gone = dict.fromkeys(("restarts/0", "restarts/1", "restarts/2"), "not heard of yet")
    assert ray.get(fleet.resolver.rebalance(gone)) == ()
    fleet.resolver.release(gone)
    assert eventually(lambda: len(records(fleet)) == 2)
    open_env(fleet.addresses[0], fleet.tokens[0]).close()


@pytest.mark.slow
def test_an_endpoint_whose_id_has_gone_to_another_ends_and_says_so() -> None:
    shared_registry()
    actor_class: Any = EnvServiceActor
    older, newer = (
        actor_class.options(num_cpus=0.1).remote(
            "CartPole-v1", address="127.0.0.1:0", endpoint_id="twins", fleet="twins"
        )
        for _ in range(2)
    )
    address = ray.get(older.address.remote())
    env = open_env(address, None)
    ray.get(newer.address.remote())
    winner, loser = newer, older
    if ray.get(find_registry().lookup.remote("twins")).address == address:
        winner, loser = older, newer
    env.close()

    def is_over() -> bool:
        try:
            get_result(loser.address.remote())
        except EndpointClosedError as error:
            return "started again elsewhere" in str(error)
        return False

    assert eventually(is_over)
    assert ray.get(find_registry().lookup.remote("twins")).address == ray.get(
        winner.address.remote()
    )
    ray.get(winner.stop.remote())
    assert ray.get(find_registry().lookup.remote("twins")) is None
    for actor in older, newer:
        ray.kill(actor)


@pytest.mark.slow
def test_an_endpoint_that_is_not_heard_of_is_not_used_until_it_is_heard_of_again(
    fleet: EnvFleet,
) -> None:
    frozen, other = fleet.resolver.endpoint_ids
    pid = ray.get(fleet.actors[0].describe.remote())["pid"]
    os.kill(pid, signal.SIGSTOP)
    try:
        assert eventually(lambda: ray.get(find_registry().lookup.remote(frozen)) is None)

        with pytest.raises(EndpointUnreachableError, match="not announced"):
            fleet.resolver.address(0)
        assert fleet.resolver.assign("frozen/0", 0, "").endpoint_id == other
        assert ray.get(fleet.resolver.rebalance({"frozen/1": frozen})) == ("frozen/1",)
    finally:
        os.kill(pid, signal.SIGCONT)
    assert eventually(lambda: ray.get(find_registry().lookup.remote(frozen)))
    fleet.resolver.release(["frozen/0", "frozen/1"])


DRIVER = """
import sys, os, json, ray
from rlmesh_ray.actors import EnvFleet

ray.init(sys.argv[1], log_to_driver=False)
fleet = EnvFleet("CartPole-v1", num_cpus=0.1)
print(json.dumps([actor["pid"] for actor in ray.get([a.describe.remote() for a in fleet.actors])]))
sys.stdout.flush()
sys.stdin.readline()
os._exit(1)
"""


def test_nothing_is_left_of_a_fleet_whose_driver_ends_without_stopping_it() -> None:
    command = [sys.executable, "-W", "ignore", "-c", DRIVER]
    address = ray.get_runtime_context().gcs_address
    with subprocess.Popen(
        [*command, address], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as driver:
        assert driver.stdout is not None
        assert driver.stdin is not None
        # Ray's warnings come on the same stdout, also if a driver asks for something else.
        pids = json.loads(next(line for line in driver.stdout if line.startswith("[")))
        workers = [child for pid in pids for child in children(pid)]
        assert workers
        driver.stdin.write("end\n")
        driver.stdin.close()

    assert eventually(lambda: not any(Path(f"/proc/{pid}").exists() for pid in [*pids, *workers]))


def children(pid: int) -> list[int]:
    reported = Path(f"/proc/{pid}/task").glob("*/children")
    return [int(child) for path in reported for child in path.read_text().split()]
