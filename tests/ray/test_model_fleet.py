"""Served policies on Ray: found, updated, restarted, drained."""

import copy
import math
import os
import signal
import subprocess
import sys
import textwrap
import threading
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest
import ray
import torch
from ray._private.internal_api import memory_summary

from rlmesh_ray import ListenOptions, RemoteModel, TokenFile
from rlmesh_ray.actors import ModelFleet, ModelServiceActor, NamedModelFleet
from rlmesh_ray.actors.gateway import query_for
from rlmesh_ray.actors.model_actor import WeightStore
from rlmesh_ray.actors.model_fleet import find_replica
from rlmesh_ray.actors.placement import await_start
from rlmesh_ray.errors import (
    AccessDeniedError,
    CapacityError,
    ConfigurationError,
    EndpointError,
    EndpointTimeoutError,
    EndpointUnreachableError,
    PolicyError,
)
from tests.loopback.client_internals import join_stream
from tests.loopback.eventually import eventually
from tests.ray.switch_policy import switch_policy

pytestmark = pytest.mark.usefixtures("local_ray")


@pytest.fixture(scope="module")
def fleet(local_ray: None) -> Iterator[ModelFleet]:
    with ModelFleet(switch_policy(), name="tested", num_replicas=2, num_cpus=0.1) as fleet:
        yield fleet


def connect(fleet: NamedModelFleet, replica: int = 0) -> RemoteModel:
    model = RemoteModel(fleet.addresses[replica], token=fleet.token)
    model.configure_route(gymnasium.make_vec("CartPole-v1", num_envs=2))
    return model


def num_rows_seen() -> Any:
    """Make a module that acts 1 where it sees four rows, by value: workers do not import tests."""

    class NumRowsSeen(torch.nn.Module):
        def forward(self, observations: torch.Tensor) -> torch.Tensor:
            num_rows = len(observations)
            return torch.tensor([[0.0, 1.0 if num_rows == 4 else -1.0]]).repeat(num_rows, 1)

    return NumRowsSeen()


def action(model: RemoteModel) -> int:
    first, second = model.predict(np.zeros((2, 4), np.float32))
    assert first == second
    return int(first)


def predict_for_ever(model: RemoteModel) -> None:
    while True:
        action(model)


def predict_until_it_is_gone(model: RemoteModel) -> None:
    with suppress(EndpointError):
        predict_for_ever(model)


def served_actions(fleet: NamedModelFleet) -> list[int]:
    actions = []
    for replica in range(len(fleet.addresses)):
        with connect(fleet, replica) as model:
            actions.append(action(model))
    return actions


def kill(actor: Any) -> None:
    os.kill(ray.get(actor.describe.remote())["pid"], signal.SIGKILL)


def test_new_weights_reach_every_replica(fleet: ModelFleet) -> None:
    before = fleet.policy_version

    assert fleet.set_weights({"action": 0}) == before + 1
    assert served_actions(fleet) == [0, 0]
    assert fleet.set_weights({"action": 1}, version=before + 10) == before + 10
    assert served_actions(fleet) == [1, 1]

    assert fleet.policy_version == before + 10
    assert ray.get([actor.policy_version.remote() for actor in fleet.actors]) == [before + 10] * 2
    assert [health.is_serving for health in fleet.health()] == [True, True]


def test_weights_may_be_references_wholly_or_in_part(fleet: ModelFleet) -> None:
    for weights in (ray.put({"action": 0}), {"action": ray.put(1)}):
        fleet.set_weights(weights)

    assert served_actions(fleet) == [1, 1]


def test_weights_that_the_policy_refuses_change_nothing(fleet: ModelFleet) -> None:
    version = fleet.set_weights({"action": 1})

    with pytest.raises(PolicyError, match="no action 7"):
        fleet.set_weights({"action": 7})

    assert served_actions(fleet) == [1, 1]
    assert fleet.policy_version == version
    assert fleet.set_weights({"action": 0}) > version


def test_versions_only_grow(fleet: ModelFleet) -> None:
    version = fleet.set_weights({"action": 0})

    with pytest.raises(ConfigurationError, match="not newer than"):
        fleet.set_weights({"action": 1}, version=version)

    assert served_actions(fleet) == [0, 0]


@pytest.mark.parametrize("version", [0, 1.5, math.nan, 2**63, True, "900"])
def test_a_version_is_an_integer_that_clients_can_read(fleet: ModelFleet, version: Any) -> None:
    before = fleet.set_weights({"action": 0})

    with pytest.raises(ConfigurationError, match="must be an integer from 1 to"):
        fleet.set_weights({"action": 1}, version=version)

    assert fleet.policy_version == before
    assert served_actions(fleet) == [0, 0]
    assert fleet.set_weights({"action": 1}) == before + 1


def test_a_killed_replica_comes_back_with_the_last_weights(fleet: ModelFleet) -> None:
    version = fleet.set_weights({"action": 1})
    before = fleet.addresses
    model = connect(fleet)
    kill(fleet.actors[0])

    with pytest.raises(EndpointError):
        predict_for_ever(model)
    model.close()
    described = ray.get(fleet.actors[0].describe.remote())

    assert described["policy_version"] == version
    assert fleet.addresses == [described["address"], before[1]]
    assert described["address"] != before[0]
    assert served_actions(fleet) == [1, 1]


@pytest.mark.slow
def test_a_replica_that_restarts_meanwhile_gets_the_new_weights_too(fleet: ModelFleet) -> None:
    kill(fleet.actors[1])

    version = fleet.set_weights({"action": 0})

    assert ray.get(fleet.actors[1].policy_version.remote()) == version
    assert served_actions(fleet) == [0, 0]


@pytest.mark.slow
def test_versions_go_on_growing_when_those_who_kept_the_weights_are_gone(
    fleet: ModelFleet,
) -> None:
    version = fleet.set_weights({"action": 0})
    ray.kill(find_replica(fleet.name), no_restart=False)

    assert fleet.set_weights({"action": 1}) > version
    assert served_actions(fleet) == [1, 1]


def test_a_drained_replica_is_named_no_more_until_it_restarts(fleet: ModelFleet) -> None:
    fleet.set_weights({"action": 1})
    _, other = fleet.addresses
    with connect(fleet, 0):
        assert not fleet.drain(0.0, replica=0)

    assert fleet.drain(10.0, replica=0)
    assert fleet.addresses == [other]
    assert [health.is_serving for health in fleet.health()] == [False, True]
    assert served_actions(fleet) == [1]

    fleet.restart(0)
    assert served_actions(fleet) == [1, 1]
    assert [health.is_serving for health in fleet.health()] == [True, True]


@pytest.mark.parametrize("replica", [7, -1, True, "0"])
def test_a_replica_that_is_not_there_is_named_with_those_that_are(
    fleet: ModelFleet, replica: Any
) -> None:
    with pytest.raises(ConfigurationError, match="is not one of the fleet's replicas: 0, 1"):
        fleet.drain(1.0, replica=replica)
    with pytest.raises(ConfigurationError, match="is not one of the fleet's replicas: 0, 1"):
        fleet.restart(replica)

    assert len(fleet.addresses) == 2


def test_a_fleet_that_is_sent_somewhere_is_the_same_one_there(fleet: ModelFleet) -> None:
    sent = copy.deepcopy(fleet)

    assert type(sent) is NamedModelFleet
    assert (sent.addresses, sent.token) == (fleet.addresses, fleet.token)


def test_a_fleet_is_closed_to_strangers(fleet: ModelFleet) -> None:
    with pytest.raises(AccessDeniedError):
        RemoteModel(fleet.addresses[0], token="a guess")


@pytest.mark.slow
def test_the_token_of_a_fleet_may_be_a_file(tmp_path: Path) -> None:
    file = TokenFile(tmp_path / "token")
    file.path.write_text("from-the-file\n")
    file.path.chmod(0o600)

    with ModelFleet(switch_policy(), name="filed", num_cpus=0.1, token=file) as fleet:
        connect(fleet).close()
        (target,) = query_for(fleet)()

    assert target.token == "from-the-file"


def test_no_two_fleets_have_one_name(fleet: ModelFleet) -> None:
    with pytest.raises(ConfigurationError, match=r"model fleet .tested. already.*find\('tested'\)"):
        ModelFleet(switch_policy(), name="tested", num_cpus=0.1)

    assert len(fleet.addresses) == 2


def test_a_fleet_that_was_not_started_is_not_found() -> None:
    with pytest.raises(EndpointUnreachableError, match="'unknown'"):
        ModelFleet.find("unknown")


def test_a_fleet_has_at_least_one_replica() -> None:
    with pytest.raises(ConfigurationError, match="1 or more"):
        ModelFleet(switch_policy(), name="empty", num_replicas=0)


@pytest.mark.parametrize(
    ("addresses", "reason"),
    [
        (["127.0.0.1:7001", "127.0.0.1:7001"], "a port of its own"),
        (["127.0.0.1:7001"], "a list of 2"),
        ("127.0.0.1:7001", "a list of 2"),
    ],
)
def test_each_replica_needs_a_place_of_its_own(addresses: Any, reason: str) -> None:
    with pytest.raises(ConfigurationError, match=reason):
        ModelFleet(switch_policy(), name="crowded", num_replicas=2, addresses=addresses)


def test_a_policy_that_cannot_travel_is_refused() -> None:
    with pytest.raises(ConfigurationError, match=r"cannot be sent to Ray's actors .*name a file"):
        ModelFleet(threading.Lock().acquire, name="at home")


@pytest.mark.slow
def test_a_fleet_that_finds_no_room_says_what_it_needs_and_leaves_its_name() -> None:
    for _ in range(2):
        with pytest.raises(CapacityError, match="needs 1000 CPU, and the cluster has"):
            ModelFleet(switch_policy(), name="giant", num_cpus=1000, start_timeout_s=2.0)


@pytest.mark.slow
def test_replicas_that_have_room_and_do_not_start_are_not_said_to_have_none() -> None:
    class Slow:
        def serve(self) -> None:
            threading.Event().wait()

    actor = ray.remote(num_cpus=0.1)(Slow).remote()
    with pytest.raises(CapacityError, match="start slowly, or die while they start"):
        await_start([actor.serve.remote()], "replicas", [{"num_cpus": 0.1}], 0.5)
    ray.kill(actor)


@pytest.mark.slow
def test_a_stopped_fleet_leaves_its_name_to_the_next() -> None:
    for _ in range(2):
        fleet = ModelFleet(switch_policy(), name="short", num_cpus=0.1)
        fleet.stop()
        fleet.stop()

    with pytest.raises(EndpointUnreachableError, match="'short'"):
        fleet.set_weights({"action": 1})


@pytest.mark.slow
def test_a_policy_too_large_for_an_argument_survives_a_restart() -> None:
    policy = switch_policy()
    policy.ballast = np.zeros(1_000_000)
    with ModelFleet(policy, name="large", num_cpus=0.1) as fleet:
        del policy
        for _ in range(2):
            kill(fleet.actors[0])
            assert ray.get(fleet.actors[0].policy_version.remote()) == 0
            assert served_actions(fleet) == [0]


@pytest.mark.slow
def test_an_actor_s_policy_that_is_too_large_for_an_argument_survives_a_restart() -> None:
    policy = switch_policy()
    policy.ballast = np.zeros(1_000_000)
    actor = ModelServiceActor.options(num_cpus=0.1).remote(policy)
    del policy
    ray.get(actor.set_weights.remote({"action": 1}))

    kill(actor)

    assert ray.get(actor.policy_version.remote()) == 1
    ray.kill(actor)


@pytest.mark.slow
def test_a_replica_that_cannot_serve_at_once_after_a_restart_does_later(tmp_path: Path) -> None:
    ineligibility = tmp_path / "obstacle"

    class Moody:
        """Cannot be put anywhere while there is a certain file."""

        def to(self, device: object) -> Any:
            if ineligibility.exists():
                raise RuntimeError("not now")
            return policy

    policy = switch_policy()
    with ModelFleet(Moody(), name="moody", num_cpus=0.1, device="cpu") as fleet:
        fleet.set_weights({"action": 1})
        (actor,) = fleet.actors
        ineligibility.touch()
        ray.kill(actor, no_restart=False)

        def fails() -> bool:
            try:
                ray.get(actor.address.remote())
            except ray.exceptions.RayTaskError as error:
                return isinstance(error.cause, PolicyError)
            except ray.exceptions.RayActorError:
                pass  # it is still on its way
            return False

        assert eventually(fails)
        ineligibility.unlink()

        assert eventually(lambda: serves_again(fleet))
        assert served_actions(fleet) == [1]


def serves_again(fleet: ModelFleet) -> bool:
    """Whether the first replica serves, and the registry knows it."""
    try:
        return fleet.addresses == [ray.get(fleet.actors[0].address.remote())]
    except ray.exceptions.RayTaskError:
        return False


@pytest.mark.slow
def test_a_fleet_is_found_from_another_driver_and_namespace(fleet: ModelFleet) -> None:
    code = """
        import logging, sys, ray
        from rlmesh_ray.actors import ModelFleet
        ray.init(sys.argv[1], namespace="elsewhere", logging_level=logging.ERROR)
        fleet = ModelFleet.find("tested")
        print(fleet.set_weights({"action": 1}), *fleet.addresses)
    """
    version = fleet.set_weights({"action": 0})
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code), ray.get_runtime_context().gcs_address],
        capture_output=True,
        text=True,
        env={**os.environ, "RAY_AUTH_MODE": "token"},
        check=False,
    )

    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == [str(version + 1), *fleet.addresses]
    # The sender of the weights has gone; they have not.
    kill(fleet.actors[0])
    ray.get(fleet.actors[0].address.remote())
    assert served_actions(fleet) == [1, 1]


@pytest.mark.slow
def test_the_memory_of_former_weights_is_freed(fleet: ModelFleet) -> None:
    # Twice the object store, if nothing were freed; Ray would then write it to disk.
    for number in range(50):
        fleet.set_weights({"action": number % 2, "ballast": np.zeros(1_000_000)})

    used = memory_summary(ray.get_runtime_context().gcs_address, stats_only=True)
    assert "Plasma memory usage" in used
    assert "Spilled" not in used


@pytest.mark.slow
def test_health_tells_that_a_policy_is_stuck_and_everything_else_still_answers() -> None:
    with (
        ModelFleet(switch_policy(), name="stuck", num_cpus=0.1) as fleet,
        connect(fleet) as model,
    ):
        fleet.set_weights({"action": "stuck"})
        predicting = threading.Thread(target=predict_until_it_is_gone, args=[model])
        predicting.start()
        assert eventually(lambda: not fleet.health()[0].is_serving)
        assert "has not come back" in fleet.health()[0].reason
        with pytest.raises(EndpointTimeoutError):
            fleet.set_weights({"action": 1}, timeout_s=1.0)
        assert ray.get(fleet.actors[0].describe.remote())["policy_version"] == 1

        # What it could not take up, it begins with.
        fleet.restart(0)
        assert served_actions(fleet) == [1]
        assert fleet.health()[0].is_serving
        predicting.join()


# --- one actor by itself ---------------------------------------------------------------


@pytest.fixture(scope="module")
def actor(local_ray: None) -> Iterator[Any]:
    actor = ModelServiceActor.options(num_cpus=0.1).remote(
        switch_policy(), endpoint_id="tested alone"
    )
    yield actor
    ray.kill(actor)


@pytest.mark.slow
def test_an_actor_comes_back_with_the_last_weights(actor: Any) -> None:
    version = ray.get(actor.set_weights.remote({"action": 1}, 20))
    kill(actor)

    with RemoteModel(ray.get(actor.address.remote())) as model:
        model.configure_route(gymnasium.make_vec("CartPole-v1", num_envs=2))

        assert version == ray.get(actor.policy_version.remote()) == 20
        assert action(model) == 1


def test_an_actor_keeps_its_weights_when_it_refuses_others(actor: Any) -> None:
    version = ray.get(actor.set_weights.remote({"action": 1}))

    with pytest.raises(PolicyError, match="no action 7"):
        ray.get(actor.set_weights.remote({"action": 7}))
    with pytest.raises(ConfigurationError, match="not newer"):
        ray.get(actor.set_weights.remote({"action": 0}, version))

    assert ray.get(actor.policy_version.remote()) == version
    assert ray.get(actor.health.remote()).is_serving


@pytest.mark.parametrize("version", [0, math.nan, 2**70])
def test_an_actor_takes_no_version_that_clients_could_not_read(actor: Any, version: Any) -> None:
    before = ray.get(actor.policy_version.remote())

    with pytest.raises(ConfigurationError, match="must be an integer from 1 to"):
        ray.get(actor.set_weights.remote({"action": 1}, version))

    assert ray.get(actor.policy_version.remote()) == before


@pytest.mark.slow
@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"device": "tpu"}, "device=tpu cannot run policies; available are"),
        ({"address": "nowhere"}, "is not an address"),
        *(
            pytest.param(options, reason, marks=pytest.mark.nightly)
            for options, reason in [
                ({"torch_threads": 0}, "torch_threads=0 must be a whole number"),
                ({"buckets": [0]}, "buckets"),
                ({"horizon": 0}, "horizon=0"),
                ({"chunk_replay": "kept"}, "chunk_replay"),
                ({"observation_map": ["a"]}, "KEY=SOURCE"),
                ({"address": ListenOptions(openpi="127.0.0.1:0")}, "takes no openpi="),
                ({"max_message_bytes": 9}, "max_message_bytes=9"),
            ]
        ),
    ],
)
def test_an_actor_that_cannot_serve_says_why(options: dict[str, Any], reason: str) -> None:
    def serve() -> str:
        # What fits no policy and no node is refused here, before there is an actor.
        actor = ModelServiceActor.options(num_cpus=0.1).remote(torch.nn.Linear(4, 2), **options)
        return str(ray.get(actor.address.remote()))

    with pytest.raises(ConfigurationError, match=reason):
        serve()


@pytest.mark.slow
def test_a_fleet_pads_batches_and_ends_idle_sessions_as_configured() -> None:
    with (
        ModelFleet(
            num_rows_seen(),
            name="padded",
            buckets=[4],
            address=ListenOptions(idle_timeout_s=2.0),
            num_cpus=0.1,
        ) as fleet,
        connect(fleet) as model,
    ):
        padded = action(model)
        assert eventually(join_stream(model).has_ended)
        with pytest.raises(EndpointError, match=r"no request came for 2 s"):
            action(model)

    assert padded == 1


@pytest.mark.slow
def test_a_policy_without_weights_cannot_be_given_any() -> None:
    def left(observations: Any) -> Any:
        return np.zeros(len(observations), np.int64)

    actor = ModelServiceActor.options(num_cpus=0.1).remote(left)

    with pytest.raises(ConfigurationError):
        ray.get(actor.set_weights.remote({"action": 1}))
    ray.kill(actor)


# --- the weight store, without replicas ------------------------------------------------


def newest(store: WeightStore) -> list[tuple[int, Any]]:
    return [(version, ray.get(reference)) for version, reference in store.newest()]


def test_an_offer_stands_before_what_was_accepted_until_it_is_tried() -> None:
    store = WeightStore()
    store.accept(store.offer(None, 0, None, "first"))

    second = store.offer(None, 0, ["name"], "second")
    assert newest(store) == [(2, {"name": "second"}), (1, "first")]
    store.accept(second)
    assert newest(store) == [(2, {"name": "second"})]


def test_a_rejected_offer_is_forgotten_and_its_number_is_not_given_again() -> None:
    store = WeightStore()
    store.accept(store.offer(5, 0, None, "first"))

    store.reject(store.offer(None, 0, None, "second"))

    assert newest(store) == [(5, "first")]
    assert store.offer(None, 0, None, "third") == 7


def test_a_weight_store_takes_possible_versions_only() -> None:
    store = WeightStore()
    for version in (0, 1.5, math.nan, 2**63, True):
        with pytest.raises(ConfigurationError, match="must be an integer from 1 to"):
            store.offer(version, 0, None, "weights")  # type: ignore[arg-type]

    store.accept(store.offer(2**63 - 1, 0, None, "last"))
    with pytest.raises(ConfigurationError, match="no version is left"):
        store.offer(None, 0, None, "one more")
    assert newest(store) == [(2**63 - 1, "last")]


def test_an_offer_that_a_newer_one_has_replaced_cannot_be_accepted() -> None:
    store = WeightStore()
    first = store.offer(None, 0, None, "first")
    second = store.offer(None, 0, None, "second")

    store.accept(first)
    store.reject(first)

    assert newest(store) == [(second, "second")]
    assert store.accepted_version() == 0
