"""Fleets that get and lose endpoints while they are used."""

import itertools
import os
from collections.abc import Iterator
from typing import Any

import pytest
import ray

from rlmesh_ray import RemoteVectorEnv
from rlmesh_ray.actors import EnvFleet
from rlmesh_ray.actors.env_fleet import EndpointSpec
from rlmesh_ray.actors.registry.endpoint_resolver import owner_name
from rlmesh_ray.actors.registry.registry_actor import find_actor, find_registry
from rlmesh_ray.errors import (
    CapacityError,
    ConfigurationError,
    EndpointError,
    EnvStartError,
)
from tests.loopback.eventually import eventually
from tests.loopback.ports import free_address

pytestmark = pytest.mark.usefixtures("local_ray")


@pytest.fixture(scope="module")
def fleet(local_ray: None) -> Iterator[EnvFleet]:
    """A fleet that each test scales to the size that it needs: few tests need a new endpoint."""
    with EnvFleet("CartPole-v1", num_cpus=0.1, max_sessions=2) as fleet:
        yield fleet


def ids(fleet: EnvFleet) -> list[str]:
    """Of those that may get sessions, as the registry knows them."""
    members = ray.get(find_registry().members.remote(fleet.resolver.fleet))
    return sorted(each.endpoint_id for each in members)


def owner_of(fleet: EnvFleet) -> Any:
    """Return the actor that starts and ends the endpoints of a fleet."""
    return find_actor(owner_name(fleet.resolver.fleet))


def next_id_of(fleet: EnvFleet) -> str:
    """Return the id that the next endpoint gets after the newest, which is still there."""
    prefix, _, number = fleet.resolver.endpoint_ids[-1].rpartition("-")
    return f"{prefix}-{int(number) + 1}"


def open_env(fleet: EnvFleet, index: int) -> RemoteVectorEnv:
    env = RemoteVectorEnv(fleet.addresses[index], token=fleet.tokens[index])
    env.action_space.seed(0)
    return env


def test_a_fleet_that_grows_keeps_what_it_has_and_can_be_used_at_once(fleet: EnvFleet) -> None:
    env = open_env(fleet, 0)
    env.reset(seed=0)
    former = fleet.resolver

    fleet.scale(2)

    assert fleet.resolver.endpoint_ids[:1] == former.endpoint_ids
    assert ids(fleet) == list(fleet.resolver.endpoint_ids)
    assert len(set(fleet.addresses)) == len(set(fleet.tokens)) == len(fleet.actors) == 2
    open_env(fleet, 1).close()
    env.step(env.action_space.sample())
    env.close()


def test_what_cannot_be_is_refused_and_changes_nothing(fleet: EnvFleet) -> None:
    with pytest.raises(ConfigurationError, match="1 or more"):
        fleet.scale(0)

    fleet.scale(2)
    names = [f"full/{index}" for index in range(3)]
    for name in names:
        fleet.resolver.assign(name, 0, "")
    with pytest.raises(CapacityError, match=r"3 sessions do not fit into 1 endpoint.*max_sessions"):
        fleet.scale(1)
    assert len(ids(fleet)) == 2
    fleet.resolver.release(names)


def test_times_that_are_none_start_and_end_nothing(fleet: EnvFleet) -> None:
    fleet.scale(2)
    manager, there, next_id = owner_of(fleet), fleet.resolver.endpoint_ids, next_id_of(fleet)
    no_times: list[Any] = ["3", -1, float("nan"), float("inf"), True]

    for timeout_s, num_endpoints in itertools.product(no_times, (3, 1)):
        with pytest.raises(ConfigurationError, match="must be a finite number"):
            fleet.scale(num_endpoints, timeout_s=timeout_s)

    assert len(ray.get(manager.actors.remote([*there, next_id]))) == 2
    assert ids(fleet) == list(fleet.resolver.endpoint_ids) == list(there)
    for timeout_s in no_times:
        with pytest.raises(ConfigurationError, match="start_timeout_s="):
            EnvFleet("CartPole-v1", start_timeout_s=timeout_s)


@pytest.mark.usefixtures("sessions_move_soon")
def test_sessions_are_asked_to_move_to_new_endpoints_and_away_from_those_that_go(
    fleet: EnvFleet,
) -> None:
    fleet.scale(1)
    resolver = fleet.resolver
    seated = {f"moves/{i}": resolver.assign(f"moves/{i}", 0, "").endpoint_id for i in range(2)}

    def asked() -> tuple[str, ...]:
        return tuple(ray.get(resolver.rebalance(seated)))

    assert asked() == ()
    fleet.scale(2)
    assert eventually(asked)
    (mover,) = asked()
    assignment = resolver.assign(mover, 0, "")
    seated[mover] = assignment.endpoint_id
    assert assignment.endpoint_id == fleet.resolver.endpoint_ids[1]
    RemoteVectorEnv(assignment.address, token=assignment.token).close()
    assert asked() == ()

    fleet.scale(1)
    assert asked() == (mover,)
    assert resolver.assign(mover, 0, "").endpoint_id == resolver.endpoint_ids[0]
    resolver.release(seated)


def test_an_endpoint_that_goes_refuses_who_comes_serves_who_is_there_and_ends_with_him(
    fleet: EnvFleet,
) -> None:
    fleet.scale(2)
    address, token, actor = fleet.addresses[1], fleet.tokens[1], fleet.actors[1]
    pid = ray.get(actor.describe.remote())["pid"]
    env = open_env(fleet, 1)
    env.reset(seed=0)

    fleet.scale(1)

    def is_refused() -> bool:
        try:
            RemoteVectorEnv(address, token=token).close()
        except EndpointError as error:
            return "draining" in str(error)
        return False

    assert eventually(is_refused)
    assert len(fleet.addresses) == 1
    assert len(ids(fleet)) == 1
    env.step(env.action_space.sample())
    env.close()
    assert eventually(lambda: not os.path.exists(f"/proc/{pid}"))


@pytest.mark.slow
def test_an_endpoint_that_goes_does_not_wait_for_ever(fleet: EnvFleet) -> None:
    fleet.scale(2)
    pid = ray.get(fleet.actors[1].describe.remote())["pid"]
    env = open_env(fleet, 1)
    env.reset(seed=0)

    fleet.scale(1, timeout_s=0.1)

    assert eventually(lambda: not os.path.exists(f"/proc/{pid}"))
    with pytest.raises(EndpointError):
        env.step(env.action_space.sample())
    env.close()


@pytest.mark.slow
def test_a_client_that_comes_after_others_have_gone_has_an_identity_of_its_own(
    fleet: EnvFleet,
) -> None:
    fleet.scale(2)
    gone = fleet.resolver.endpoint_ids[1]
    fleet.scale(1)
    fleet.scale(2)

    assert gone not in fleet.resolver.endpoint_ids
    assert len(fleet.addresses) == 2


@pytest.mark.slow
def test_what_has_been_started_stays_where_there_is_no_room_for_the_rest(
    local_ray: None,
) -> None:
    num_cpus = ray.available_resources()["CPU"] / 2.5  # other tests' actors may just be leaving
    with EnvFleet("CartPole-v1", num_cpus=num_cpus) as fleet:
        with pytest.raises(CapacityError, match=r"2 of 3 .* The fleet has 2 endpoint\(s\) now"):
            fleet.scale(4, timeout_s=15)

        assert len(fleet.addresses) == 2
        assert ids(fleet) == list(fleet.resolver.endpoint_ids)
        fleet.scale(2)


@pytest.mark.slow
def test_each_endpoint_may_have_options_of_its_own(local_ray: None, tmp_path: Any) -> None:
    (tmp_path / "only_here.py").write_text(
        "import gymnasium\n"
        'gymnasium.register("Here-v0", "gymnasium.envs.classic_control:CartPoleEnv")\n'
    )
    path = os.pathsep.join([str(tmp_path), *filter(None, [os.environ.get("PYTHONPATH")])])
    with_it: dict[str, Any] = {"runtime_env": {"env_vars": {"PYTHONPATH": path}}}
    env = "only_here:Here-v0"

    with EnvFleet(env, num_cpus=0.1, actor_options=[with_it]) as fleet:
        fleet.scale(2)
        open_env(fleet, 1).close()
    with pytest.raises(EnvStartError, match="only_here"):
        EnvFleet(env, num_cpus=0.1, num_endpoints=2, actor_options=[with_it, {}])


@pytest.mark.slow
def test_an_endpoint_with_an_address_of_its_own_keeps_it_over_restarts(local_ray: None) -> None:
    wanted = [free_address(ray.util.get_node_ip_address()) for _ in range(2)]

    with EnvFleet("CartPole-v1", num_endpoints=2, num_cpus=0.1, addresses=wanted) as fleet:
        assert fleet.addresses == wanted
        pid = ray.get(fleet.actors[0].describe.remote())["pid"]
        ray.kill(fleet.actors[0], no_restart=False)
        assert eventually(lambda: is_served(fleet, pid))
        assert fleet.addresses == wanted
        with pytest.raises(ConfigurationError, match="keeps its size"):
            fleet.scale(3)
    for unusable in [wanted[:1], [wanted[0]] * 2, wanted[0]]:
        with pytest.raises(ConfigurationError, match="addresses="):
            EnvFleet("CartPole-v1", num_endpoints=2, addresses=unusable)


def is_served(fleet: EnvFleet, former_pid: int) -> bool:
    """Whether another process than the former one serves at the fleet's first address."""
    try:
        if ray.get(fleet.actors[0].describe.remote())["pid"] == former_pid:
            return False
        open_env(fleet, 0).close()
    except (EndpointError, ray.exceptions.RayActorError):
        return False
    return True


def test_an_endpoint_whose_end_overtakes_its_start_is_not_started(fleet: EnvFleet) -> None:
    spec = EndpointSpec(f"{fleet.resolver.fleet}-overtaken", {}, "token")
    owner = owner_of(fleet)

    ray.get(owner.end.remote([spec.endpoint_id]))

    assert ray.get(owner.start.remote([spec])) == []
    assert ray.get(owner.actors.remote([spec.endpoint_id])) == []


def test_endpoints_that_are_not_awaited_any_more_are_ended(
    fleet: EnvFleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    fleet.scale(1)
    fleet.scale(2)
    next_id = next_id_of(fleet)
    wait = ray.wait
    starting = []

    def interrupted(references: list[Any], **_: Any) -> Any:
        monkeypatch.setattr(ray, "wait", wait)
        starting.extend(references)
        raise KeyboardInterrupt

    monkeypatch.setattr(ray, "wait", interrupted)
    with pytest.raises(KeyboardInterrupt):
        fleet.scale(3)

    ray.get(starting)  # it may come later than what ends them
    assert ray.get(owner_of(fleet).actors.remote([next_id])) == []
    assert ids(fleet) == list(fleet.resolver.endpoint_ids)
    assert len(fleet.addresses) == 2
