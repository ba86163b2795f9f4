"""What ``rlmesh-ray status`` tells of a cluster is what has happened there."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from typing import Any

import gymnasium
import numpy as np
import pytest
import ray

from rlmesh_ray import RemoteModel, RemoteVectorEnv
from rlmesh_ray.actors import EnvServiceActor, ModelServiceActor
from rlmesh_ray.actors.registry.endpoint_resolver import cluster_endpoints
from rlmesh_ray.actors.registry.heartbeat import Heartbeat
from rlmesh_ray.actors.registry.registry_actor import shared_registry
from rlmesh_ray.errors import ConfigurationError
from rlmesh_ray.server.endpoint.log import FORMAT_VARIABLE
from rlmesh_ray.server.observe.endpoint_status import as_fields
from tests.loopback.eventually import eventually

TOKEN = "a token for tests"
TIMEOUT_S = 60.0
STATUS = [sys.executable, "-m", "rlmesh_ray", "status", "--json"]


@pytest.fixture
def registry(local_ray: None) -> Any:
    return shared_registry()


@pytest.fixture
def endpoints(registry: Any) -> Iterator[Callable[..., Any]]:
    started: list[tuple[str, Any]] = []

    def start(kind: Any, served: object, endpoint_id: str, **options: Any) -> Any:
        actor = kind.remote(served, endpoint_id=endpoint_id, token=TOKEN, **options)
        started.append((endpoint_id, actor))
        return actor

    yield start
    for endpoint_id, actor in started:
        ray.kill(actor)
        ray.get(registry.withdraw.remote(endpoint_id))


def reported(registry: Any, endpoint_id: str) -> Any:
    """Return what the registry knows of an endpoint."""
    found = ray.get(registry.overview.remote())
    return next((each for each in found if each.endpoint_id == endpoint_id), None)


def status(*arguments: str) -> list[dict[str, Any]]:
    """Run the command; return what it tells programs."""
    address = ray.get_runtime_context().gcs_address
    command = [*STATUS, "--ray-address", address, *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    events: list[dict[str, Any]] = [json.loads(line) for line in done.stdout.splitlines()]
    assert {event["ray_address"] for event in events if event["event"] == "status"} == {address}
    return events


def drive(address: str, num_steps: int) -> None:
    env = RemoteVectorEnv(address, token=TOKEN)
    try:
        env.reset(seed=1)
        for _ in range(num_steps):
            env.step(np.zeros(env.num_envs, np.int64))
    finally:
        env.close()


def test_endpoints_tell_the_registry_what_they_do(
    registry: Any, endpoints: Callable[..., Any]
) -> None:
    env = endpoints(EnvServiceActor, "CartPole-v1", "seen/env", num_envs=2, fleet="seen")
    policy = endpoints(ModelServiceActor, _policy, "seen/model")
    drive(ray.get(env.address.remote()), 7)
    with RemoteModel(ray.get(policy.address.remote()), token=TOKEN) as model:
        model.configure_route(gymnasium.make("CartPole-v1"))
        model.predict(np.zeros((1, 4), np.float32))

    assert eventually(lambda: _now(registry, "seen/env", "steps") == 7)
    assert eventually(lambda: _now(registry, "seen/model", "items") == 1)
    shown: dict[str, Any] = {each.endpoint_id: as_fields(each) for each in cluster_endpoints()}
    env_shown, model_shown = shown["seen/env"], shown["seen/model"]
    assert (env_shown["service"], env_shown["fleet"]) == ("env", "seen")
    assert (env_shown["steps"], env_shown["lane_steps"], env_shown["restarts"]) == (7, 14, 0)
    assert env_shown["state"] == "live"
    assert env_shown["step_p50_s"] > 0
    assert env_shown["address"] == ray.get(env.address.remote())
    assert (model_shown["service"], model_shown["predictions"]) == ("model", 1)
    assert model_shown["sessions_lost"] == 0
    assert TOKEN not in json.dumps(shown, default=str)


@pytest.mark.slow
def test_a_restarted_endpoint_says_so_and_counts_anew(
    registry: Any, endpoints: Callable[..., Any]
) -> None:
    env = endpoints(EnvServiceActor, "CartPole-v1", "seen/again")
    drive(ray.get(env.address.remote()), 3)
    assert eventually(lambda: _now(registry, "seen/again", "steps") == 3)

    ray.kill(env, no_restart=False)

    assert eventually(lambda: reported(registry, "seen/again").restarts == 1)
    assert eventually(lambda: _now(registry, "seen/again", "steps") == 0)
    (shown,) = [each for each in status() if each.get("endpoint_id") == "seen/again"]
    assert shown["restarts"] == 1


def test_an_endpoint_that_cannot_be_measured_keeps_its_lease(
    registry: Any, caplog: pytest.LogCaptureFixture
) -> None:
    def broken() -> Any:
        raise ZeroDivisionError("an unexpected error")

    def lease_left_s() -> float:
        return float(reported(registry, "seen/odd").lease_left_s)

    heartbeat = Heartbeat("seen/odd", "127.0.0.1:1", statistics=broken, period_s=0.05)
    assert eventually(lambda: "an unexpected error" in caplog.text)
    former_s, later_s = lease_left_s(), lease_left_s()
    while later_s < former_s:  # it gets less and less, unless it is renewed
        former_s, later_s = later_s, lease_left_s()
        assert later_s > 0
    heartbeat.end()


@pytest.mark.nightly
def test_watching_goes_on_until_it_is_interrupted(registry: Any) -> None:
    address = ray.get_runtime_context().gcs_address
    command = [*STATUS, "--watch", "--ray-address", address]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        for _ in range(2):
            while json.loads(process.stdout.readline())["event"] != "status":
                pass
        process.send_signal(signal.SIGINT)
        process.stdout.read()
        assert process.wait(TIMEOUT_S) == 0


def test_it_joins_a_ray_that_runs_and_never_starts_one() -> None:
    environment = {**os.environ, "RAY_ADDRESS": "127.0.0.1:1"}
    done = subprocess.run(STATUS, capture_output=True, text=True, check=False, env=environment)

    assert done.returncode == 1
    assert json.loads(done.stdout)["type"] == "RlmeshError"
    assert "cannot join a Ray at 127.0.0.1:1" in done.stderr
    assert "ray start --head" in done.stderr


def test_a_pool_tells_how_to_start_a_ray_and_starts_none() -> None:
    command = [sys.executable, "-m", "rlmesh_ray", "pool", "games"]
    environment = {**os.environ, "RAY_ADDRESS": "127.0.0.1:1"}
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)

    assert done.returncode == 1
    assert "cannot join a Ray at 127.0.0.1:1" in done.stderr
    assert "ray start --head" in done.stderr
    assert "unset RAY_ADDRESS" not in done.stderr


def test_an_actor_refuses_a_log_format_that_there_is_not(local_ray: None) -> None:
    actor_class: Any = EnvServiceActor
    environment = {"env_vars": {FORMAT_VARIABLE: "yaml"}}
    actor = actor_class.options(runtime_env=environment).remote("CartPole-v1", token=TOKEN)

    with pytest.raises(ConfigurationError, match=FORMAT_VARIABLE):
        ray.get(actor.address.remote())
    ray.kill(actor)


def _now(registry: Any, endpoint_id: str, name: str) -> object:
    statistics = reported(registry, endpoint_id).sighting
    return None if statistics is None else getattr(statistics.now, name)


def _policy(observations: Any) -> Any:
    return np.zeros(len(observations), np.int64)
