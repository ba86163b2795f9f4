"""Endpoints outside of Ray that register themselves, and trainings that use them."""

import contextlib
import json
import logging
import os
import pickle
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest
import ray
from ray.rllib.algorithms.ppo import PPOConfig

from rlmesh_ray import EnvServer, RemoteVectorEnv
from rlmesh_ray.actors import EnvPool
from rlmesh_ray.actors.registry.registry_actor import REGISTRY_NAMESPACE, shared_registry
from rlmesh_ray.auth.client_tls import ClientTls
from rlmesh_ray.auth.server_tls import ServerTls
from rlmesh_ray.auth.token_file import endpoint_token
from rlmesh_ray.client.endpoint_registration import RegistrarOptions, Registration
from rlmesh_ray.errors import (
    AddressError,
    ConfigurationError,
    EndpointTimeoutError,
    EndpointUnreachableError,
    RlmeshError,
)
from rlmesh_ray.protocol.pool_membership import fleet_name_of_pool
from rlmesh_ray.rllib import RLMeshEnvRunner, configure
from rlmesh_ray.server.observe.statistics_report import pack_report
from tests.loopback.certificates import Authority, needs_openssl
from tests.loopback.eventually import eventually
from tests.loopback.ports import free_address
from tests.ray.lost_endpoints import assert_unbroken
from tests.ray.ramps import Stairs

pytestmark = pytest.mark.usefixtures("local_ray")

SECRET = "s3cret"


@pytest.fixture(scope="module")
def pool(local_ray: None) -> Iterator[EnvPool]:
    """A pool that tests leave as they find it: empty."""
    with EnvPool("shared", token=SECRET) as made:
        yield made


@pytest.fixture
def own_pool() -> Iterator[EnvPool]:
    """A pool of this test's own, at a fixed port."""
    with EnvPool("own", address=free_address(), token=SECRET) as made:
        yield made


@contextlib.contextmanager
def simulator(
    pool: EnvPool, endpoint_id: str, env: Callable[[], Any] = Stairs, **options: Any
) -> Iterator[EnvServer]:
    """Serve an environment outside of Ray, and register it, until the block ends."""
    token = options.pop("token", endpoint_token(SECRET, pool.name, endpoint_id))
    dial_tls = options.pop("dial_tls", None)
    with EnvServer(env, token=token, **options) as server:
        host, _, port = server.address.rpartition(":")
        connect_options = RegistrarOptions(pool.address, pool.name, endpoint_id, SECRET, dial_tls)
        report = partial(report_of, server)
        with Registration(connect_options, host=host, port=int(port), report=report):
            yield server


def report_of(server: EnvServer) -> bytes:
    return pack_report(server.statistics())


def can_listen(listener: socket.socket, place: tuple[str, int]) -> bool:
    try:
        listener.bind(place)
        listener.listen()
    except OSError:
        return False
    return True


def names(pool: EnvPool) -> list[str]:
    return [record.endpoint_id.rpartition("/")[2] for record in pool.endpoints]


def registrar_of(pool: EnvPool) -> Any:
    """Return the actor behind a pool."""
    return ray.get_actor(fleet_name_of_pool(pool.name), REGISTRY_NAMESPACE)


def process_of(actor: Any) -> int:
    pid: int = ray.get(actor.__ray_call__.remote(lambda _self: os.getpid()))
    return pid


def refusal(pool: EnvPool, endpoint_id: str, address: str) -> RlmeshError:
    """Return why an endpoint is not let in."""
    host, _, port = address.rpartition(":")
    connect_options = RegistrarOptions(pool.address, pool.name, endpoint_id, SECRET)
    with Registration(connect_options, host=host, port=int(port)) as registration:
        errors: list[RlmeshError] = []

        def is_refused() -> bool:
            try:
                registration.require_not_failed()
            except RlmeshError as error:
                errors.append(error)
            return bool(errors)

        assert eventually(is_refused), "it was let in, or waits"
    return errors[0]


def runner(config: PPOConfig) -> Any:
    return RLMeshEnvRunner(config=config, worker_index=0, num_workers=0)


def ppo(num_lanes: int = 1) -> PPOConfig:
    return PPOConfig().env_runners(num_env_runners=0, num_envs_per_env_runner=num_lanes)


def sighting(endpoint_id: str) -> Any:
    """Return what the registry knows of an endpoint's doings."""
    overview = ray.get(shared_registry().overview.remote())
    (found,) = [each for each in overview if each.endpoint_id.endswith(f"/{endpoint_id}")]
    return found.sighting


# --- who is in -------------------------------------------------------------------------------


def test_endpoints_that_register_are_found_with_their_own_tokens(pool: EnvPool) -> None:
    with simulator(pool, "a") as first, simulator(pool, "b") as second:
        pool.wait(2)
        resolver = pool.resolver

        assignments = [resolver.assign(f"session-{n}", n, "") for n in range(2)]

        # Their order is that of their arrival.
        assert {assignment.address: assignment.token for assignment in assignments} == {
            first.address: endpoint_token(SECRET, pool.name, "a"),
            second.address: endpoint_token(SECRET, pool.name, "b"),
        }
        assert SECRET not in repr(resolver)
        assert SECRET.encode() not in pickle.dumps(resolver)  # nor in a checkpoint
        resolver.release(["session-0", "session-1"])


def test_endpoints_tell_the_cluster_what_they_do(pool: EnvPool) -> None:
    with (
        simulator(pool, "a", num_envs=2) as server,
        contextlib.closing(
            RemoteVectorEnv(server.address, token=endpoint_token(SECRET, pool.name, "a"))
        ) as env,
    ):
        pool.wait(1)
        env.reset()
        for _ in range(5):
            env.step(np.zeros(2, np.int64))

        def is_reported() -> bool:
            seen = sighting("a")
            return seen is not None and seen.now.lane_steps == 10

        assert eventually(is_reported)
        seen = sighting("a").now
        assert (seen.steps, seen.resets, seen.sessions.open) == (5, 1, 1)


def test_waiting_for_endpoints_that_do_not_come_says_how_to_start_them(pool: EnvPool) -> None:
    with pytest.raises(EndpointTimeoutError, match="0 of 1 endpoints have registered") as caught:
        pool.wait(timeout_s=0.1)

    assert f"serve-env ENV --address HOST:0 --register {pool.name}@{pool.address}" in str(
        caught.value
    )


def test_an_empty_pool_cannot_be_trained_on(pool: EnvPool) -> None:
    with pytest.raises(EndpointUnreachableError, match="no endpoint has registered with pool"):
        configure(ppo(), pool)


def test_an_endpoint_with_another_contract_is_kept_out(pool: EnvPool) -> None:
    with (
        simulator(pool, "a"),
        EnvServer(Stairs, num_envs=3, token=endpoint_token(SECRET, pool.name, "b")) as other,
    ):
        pool.wait()

        error = refusal(pool, "b", other.address)

        assert isinstance(error, ConfigurationError)
        assert f"{other.address} serves" in str(error)
        assert "num_envs = 3" in str(error)
        assert names(pool) == ["a"]


def test_when_all_have_left_the_pool_takes_another_contract(pool: EnvPool) -> None:
    with simulator(pool, "a"):
        pool.wait()
    with simulator(pool, "b", num_envs=3):
        pool.wait()

        assert names(pool) == ["b"]


def test_an_endpoint_that_comes_back_may_have_changed_if_it_is_the_only_one(pool: EnvPool) -> None:
    with simulator(pool, "a"):
        pool.wait()
        with simulator(pool, "a", num_envs=3) as second:
            assert eventually(lambda: [r.address for r in pool.endpoints] == [second.address])


def test_an_endpoint_that_does_not_let_the_pool_in_is_kept_out(pool: EnvPool) -> None:
    with EnvServer(Stairs, token="another") as server:
        error = refusal(pool, "a", server.address)

    assert "refuses its pool's token; serve it with the token that is derived" in str(error)


def test_an_endpoint_that_cannot_be_reached_is_reported_so(
    pool: EnvPool, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING)
    connect_options = RegistrarOptions(pool.address, pool.name, "a", SECRET)
    port = int(free_address().rpartition(":")[2])
    with Registration(connect_options, host="127.0.0.1", port=port):
        assert eventually(lambda: "the pool cannot reach the endpoint at" in caplog.text)

    assert not pool.endpoints


# --- pools ------------------------------------------------------------------------------------


def test_a_cluster_has_one_pool_of_a_name(pool: EnvPool) -> None:
    with pytest.raises(ConfigurationError, match=r"use it \(EnvPool\.find"):
        EnvPool(pool.name, token=SECRET)


def test_a_pool_is_found_by_its_name_and_not_ended_by_who_has_found_it(pool: EnvPool) -> None:
    found = EnvPool.find(pool.name)
    found.stop()

    with simulator(pool, "a"):
        assert names(EnvPool.find(pool.name).wait()) == ["a"]


def test_a_pool_that_was_not_started_is_not_found() -> None:
    with pytest.raises(EndpointUnreachableError, match="rlmesh-ray pool unknown"):
        EnvPool.find("unknown")


@pytest.mark.parametrize(
    ("settings", "kind", "words"),
    [
        ({"name": "a/b"}, ConfigurationError, "is no name"),
        ({"address": "192.0.2.1:7070", "token": SECRET}, AddressError, "cannot listen on"),
    ],
)
def test_an_impossible_pool_is_refused(
    settings: dict[str, Any], kind: type[RlmeshError], words: str
) -> None:
    with pytest.raises(kind, match=words):
        EnvPool(settings.pop("name", "impossible"), **settings)


def test_a_pool_on_all_interfaces_tells_this_nodes_address() -> None:
    with EnvPool("everywhere", address="0.0.0.0:0", token=SECRET) as pool:
        assert pool.address.startswith(f"{ray.util.get_node_ip_address()}:")


def test_endpoints_are_kept_over_a_restart_of_the_registry(pool: EnvPool) -> None:
    with simulator(pool, "a") as server:
        pool.wait()
        registry = shared_registry()
        former = process_of(registry)
        ray.kill(registry, no_restart=False)
        assert eventually(lambda: process_of(registry) != former)

        assert eventually(lambda: names(pool) == ["a"])
        assert pool.resolver.address(0) == server.address


def test_endpoints_come_back_to_a_registrar_that_ray_restarts_until_it_is_stopped(
    own_pool: EnvPool,
) -> None:
    with simulator(own_pool, "a"):
        own_pool.wait()
        ray.kill(registrar_of(own_pool), no_restart=False)

        assert eventually(lambda: [record.incarnation for record in own_pool.endpoints] == [2])
        resolver = own_pool.resolver
        own_pool.stop()
        own_pool.stop()

        with pytest.raises(EndpointUnreachableError):
            resolver.address(0)


@pytest.mark.slow
def test_a_registrar_comes_back_although_its_port_is_still_taken(own_pool: EnvPool) -> None:
    host, _, port = own_pool.address.rpartition(":")
    with simulator(own_pool, "a"):
        own_pool.wait()
        former = process_of(registrar_of(own_pool))
        # Takes the port as soon as it is free, as what is left of a process may hold it.
        with socket.socket() as taken:
            taken.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            os.kill(former, signal.SIGKILL)
            assert eventually(lambda: can_listen(taken, (host, int(port))))
            held_until_s = time.monotonic() + 5.0
            assert eventually(lambda: time.monotonic() > held_until_s)

        # An endpoint that has dialled too early has come more than once.
        assert eventually(lambda: [each.incarnation > 1 for each in own_pool.endpoints] == [True])


def test_a_pool_of_a_ray_that_has_ended_starts_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    pool = EnvPool("outlives", token=SECRET)
    actor = pool.actor
    with monkeypatch.context() as ended:
        ended.setattr(ray, "is_initialized", lambda: False)

        with pytest.raises(EndpointUnreachableError, match="registry of endpoints is gone"):
            _ = pool.endpoints
        pool.stop()

    ray.get(actor.info.remote())  # without a request before
    ray.kill(actor)


def test_leases_are_renewed_for_as_long_as_endpoints_attend(pool: EnvPool) -> None:
    def lease_left_s() -> float:
        overview = ray.get(shared_registry().overview.remote())
        (left_s,) = [
            each.lease_left_s for each in overview if each.endpoint_id == f"pool/{pool.name}/a"
        ]
        return float(left_s)

    with simulator(pool, "a"):
        pool.wait()
        seen_s = [lease_left_s()]

        def has_grown() -> bool:
            seen_s.append(lease_left_s())
            return seen_s[-1] > seen_s[-2]

        assert eventually(has_grown)


# --- trainings --------------------------------------------------------------------------------


def test_a_session_finds_its_endpoint_where_it_has_come_back(pool: EnvPool) -> None:
    with simulator(pool, "a", address=free_address()) as first:
        pool.wait()
        sampler = runner(configure(ppo(), pool))
        chunks = sampler.sample(num_timesteps=10)
        assert first.num_sessions == 1
    with simulator(pool, "a", address=free_address()) as second:
        chunks += sampler.sample(num_timesteps=10)

        assert second.address != first.address
        assert second.num_sessions == 1
        assert sum(map(len, chunks)) == 20
        assert_unbroken(chunks)
        sampler.stop()


@pytest.mark.slow
@pytest.mark.usefixtures("sessions_move_soon")
def test_sessions_move_to_endpoints_that_join_and_away_from_those_that_leave(
    pool: EnvPool,
) -> None:
    chunks = []

    def sample_until(condition: Callable[[], bool]) -> None:
        def sampled() -> bool:
            chunks.extend(sampler.sample(num_timesteps=12))
            return condition()

        assert eventually(sampled)

    with simulator(pool, "b") as stays:
        with simulator(pool, "a") as leaves:
            pool.wait(2)
            sampler = runner(configure(ppo(4), pool))
            sample_until(lambda: leaves.num_sessions == stays.num_sessions == 2)
        with simulator(pool, "c") as joins:
            sample_until(lambda: joins.num_sessions == stays.num_sessions == 2)

            assert_unbroken(chunks)
            assert "a" not in names(pool)
            sampler.stop()


def test_pools_and_addresses_may_be_mixed(pool: EnvPool) -> None:
    with simulator(pool, "a") as ours, EnvServer(Stairs, token="theirs") as theirs:
        pool.wait()
        config = configure(ppo(2), [pool, theirs.address], token="theirs")
        sampler = runner(config)
        sampler.sample(num_timesteps=12)

        assert ours.num_sessions == theirs.num_sessions == 1
        assert SECRET not in repr(config.env_config)
        sampler.stop()


@needs_openssl
def test_everything_may_be_encrypted(tmp_path: Path) -> None:
    authority = Authority(tmp_path, "ours")
    tls = ServerTls(*authority.sign("server"), authority.certificate)
    own = ClientTls(authority.certificate, *authority.sign("client"))
    with (
        EnvPool("encrypted", token=SECRET, tls=tls, endpoint_tls=own) as pool,
        simulator(pool, "a", tls=tls, dial_tls=own) as server,
    ):
        pool.wait()
        sampler = runner(configure(ppo(), pool))

        assert_unbroken(sampler.sample(num_timesteps=5))
        assert server.num_sessions == 1
        sampler.stop()


@contextlib.contextmanager
def command(*arguments: str, folder: Path) -> Iterator["subprocess.Popen[str]"]:
    """Run ``rlmesh-ray`` as a process of its own; kill it when the block ends."""
    with subprocess.Popen(
        [sys.executable, "-m", "rlmesh_ray", *arguments, "--json"],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        cwd=folder,
    ) as process:
        try:
            yield process
        finally:
            process.kill()


def event(process: "subprocess.Popen[str]", kind: str) -> dict[str, Any]:
    """Return the next event of a kind."""
    assert process.stdout is not None
    for line in process.stdout:
        found: dict[str, Any] = json.loads(line)
        if found["event"] == kind:
            return found
        assert found["event"] != "error", found["message"]
    raise AssertionError(f"the command has ended without {kind!r}")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "pool-token").write_text(f"{SECRET}\n")
    (tmp_path / "pool-token").chmod(0o600)
    return tmp_path


@pytest.mark.slow
def test_sessions_move_calmly_away_from_an_endpoint_that_takes_its_time_to_leave(
    pool: EnvPool, folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING)
    arguments = [*served(pool.name, pool.address, "leaves"), "--leave-time", "60"]
    with command(*arguments, folder=folder) as process:
        pool.wait()
        sampler = runner(configure(ppo(2), pool))
        sampler.sample(num_timesteps=8)
        with simulator(pool, "stays", cart_pole):
            pool.wait(2)
            process.send_signal(signal.SIGTERM)

            def has_left() -> bool:
                sampler.sample(num_timesteps=8)
                return process.poll() is not None

            assert eventually(has_left)
            assert process.returncode == 0
            assert "a new session is opened" not in caplog.text
            sampler.stop()


def cart_pole() -> Any:
    return gymnasium.make("CartPole-v1")


def served(pool_name: str, address: str, endpoint_id: str) -> list[str]:
    return [
        "serve-env", "CartPole-v1", "--register", f"{pool_name}@{address}",
        "--pool-token-file", "pool-token", "--endpoint-id", endpoint_id,
    ]  # fmt: skip


@pytest.mark.nightly
@pytest.mark.timeout(300)
def test_training_goes_on_while_endpoints_are_killed_and_others_join(
    pool: EnvPool, folder: Path
) -> None:
    def start(endpoint_id: str) -> "subprocess.Popen[str]":
        arguments = served(pool.name, pool.address, endpoint_id)
        return stack.enter_context(command(*arguments, folder=folder))

    with contextlib.ExitStack() as stack:
        first, second = start("first"), start("second")
        pool.wait(2)
        config = ppo(4).training(train_batch_size_per_learner=256, minibatch_size=128, num_epochs=1)
        config.env_runners(num_env_runners=1)
        algorithm = configure(config, pool).build_algo()

        def train() -> dict[str, Any]:
            runners: dict[str, Any] = algorithm.train()["env_runners"]
            assert runners["num_env_steps_sampled"] >= 256
            return runners

        train()
        first.kill()
        assert train()["num_episodes_interrupted_lifetime"] > 0
        assert eventually(lambda: names(pool) == ["second"])
        third, back = start("third"), start("first")
        assert eventually(lambda: set(names(pool)) == {"first", "second", "third"})
        assert eventually(lambda: train().get("num_sessions_moved", 0) > 0)
        second.send_signal(signal.SIGTERM)
        train()
        assert eventually(lambda: set(names(pool)) == {"first", "third"})
        algorithm.stop()
        for process in (third, back, second):
            process.terminate()
            assert process.wait(timeout=30) == 0


def scraped(address: str) -> str:
    with urllib.request.urlopen(f"http://{address}/metrics", timeout=30.0) as answer:
        text: str = answer.read().decode()
    return text


@pytest.mark.slow
def test_the_pool_command_keeps_a_pool_for_trainings_elsewhere(folder: Path) -> None:
    gcs = ray.get_runtime_context().gcs_address
    options = ["--address", "127.0.0.1:0", "--token-file", "pool-token", "--ray-address", gcs]
    options += ["--metrics-address", "127.0.0.1:0"]
    with command("pool", "games", *options, folder=folder) as process:
        started, metrics = event(process, "pool"), event(process, "metrics")
        with command(*served("games", started["address"], "sim-1"), folder=folder) as served_env:
            registered = event(served_env, "registered")
            came = event(process, "came")
            with_it = names(EnvPool.find("games"))
            has_metrics = eventually(
                lambda: (
                    'rlmesh_ray_restarts{endpoint_id="pool/games/sim-1",fleet="pool/games"} 0.0'
                    in scraped(metrics["address"])
                )
            )
            served_env.terminate()
            left = event(process, "left")
        process.send_signal(signal.SIGINT)
        code = process.wait(timeout=30)

    assert has_metrics
    assert came["address"] == registered["address"]
    assert came["endpoint_id"] == left["endpoint_id"] == "pool/games/sim-1"
    assert with_it == ["sim-1"]
    assert code == 0
    with pytest.raises(EndpointUnreachableError):
        EnvPool.find("games")


@pytest.mark.slow
def test_a_pool_ends_with_the_program_that_has_started_it(folder: Path) -> None:
    gcs = ray.get_runtime_context().gcs_address
    options = ["--address", "127.0.0.1:0", "--token-file", "pool-token", "--ray-address", gcs]
    with command("pool", "orphan", *options, folder=folder) as process:
        event(process, "pool")
        EnvPool.find("orphan")
        process.kill()

    def is_gone() -> bool:
        try:
            EnvPool.find("orphan")
        except EndpointUnreachableError:
            return True
        return False

    assert eventually(is_gone)
    EnvPool("orphan").stop()
