"""Real endpoints behind a gateway: its clients cannot tell, until an endpoint goes."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest
from gymnasium import spaces

from rlmesh_ray import (
    DmEnvRpcSettings,
    EnvServer,
    ModelServer,
    RemoteEnv,
    RemoteModel,
    RemoteVectorEnv,
    evaluate,
)
from rlmesh_ray.auth.client_tls import ClientTls
from rlmesh_ray.client.channel import ConnectOptions
from rlmesh_ray.client.env import env_client
from rlmesh_ray.client.health import HealthStatus, check_health
from rlmesh_ray.errors import (
    AccessDeniedError,
    CapacityError,
    EndpointError,
    EndpointLostError,
    EndpointUnreachableError,
    RemoteEnvError,
)
from rlmesh_ray.protocol.gateway_balancer import Target
from rlmesh_ray.server.endpoint.bind_policy import ServerTls
from rlmesh_ray.server.env.env_service import SERVICE as ENV
from rlmesh_ray.server.pool import gateway as gateway_module
from rlmesh_ray.server.pool.gateway import GatewayServer
from tests.loopback.certificates import Authority, needs_openssl
from tests.loopback.eventually import eventually
from tests.loopback.gateway_peers import Listing
from tests.loopback.released_join import ReleasedJoin, shake_hands
from tests.loopback.test_released_env_server import actions

FRONT = "the gateway's own"


class Camera(gymnasium.Env[Any, Any]):
    """Observes 5 MB of noise; raises on action 1; a call can set its word."""

    observation_space = spaces.Box(0, 255, (5_000_000,), np.uint8)
    action_space = spaces.Discrete(2)

    def __init__(self) -> None:
        self.word = ""

    def remember(self, word: str) -> str:
        self.word = word
        return word[::-1]

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        super().reset(seed=seed)
        return self._observe(), {"pid": os.getpid()}

    def step(self, action: Any) -> Any:
        if action == 1:
            raise ValueError("no film")
        return self._observe(), 1.0, False, False, {"word": self.word}

    def _observe(self) -> Any:
        return self.np_random.integers(0, 256, 5_000_000, np.uint8)


def lean(observations: Any) -> Any:
    return (observations[:, 2] > 0).astype(np.int64)


def gateway_to(*servers: EnvServer | ModelServer, **options: Any) -> GatewayServer:
    """Return a gateway to endpoints whose tokens are ``secret 0``, ``secret 1``, and so on."""
    return GatewayServer(listing_of(*servers), token=FRONT, **options)


def listing_of(*servers: EnvServer | ModelServer) -> Listing:
    targets = (
        Target(str(number), 1, server.address, f"secret {number}")
        for number, server in enumerate(servers)
    )
    return Listing(*targets)


@pytest.fixture(autouse=True)
def frequent_checks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gateway_module, "PERIOD_S", 0.2)


@pytest.fixture(scope="module")
def poles() -> Iterator[list[EnvServer]]:
    """Two endpoints, whose steps all go through the gateway."""
    with ExitStack() as stack:
        yield [
            stack.enter_context(
                EnvServer(
                    "CartPole-v1",
                    num_envs=2,
                    token=f"secret {number}",
                    max_sessions=32,
                    transport="grpc",
                )
            )
            for number in range(2)
        ]


@pytest.fixture(scope="module")
def models() -> Iterator[list[ModelServer]]:
    with ModelServer(lean, token="secret 0") as one, ModelServer(lean, token="secret 1") as other:
        yield [one, other]


@pytest.fixture(scope="module")
def gateway(poles: list[EnvServer]) -> Iterator[GatewayServer]:
    with gateway_to(*poles, service=ENV) as running:
        yield running


def trajectory(env: RemoteVectorEnv) -> list[Any]:
    """Return everything that the environment says in a hundred steps."""
    rng = np.random.default_rng(0)
    said: list[Any] = [env.reset(seed=3)[0]]
    for _ in range(100):
        said.extend(env.step(rng.integers(0, 2, 2))[:4])
    env.close()
    return said


def assert_same(said: list[Any], expected: list[Any]) -> None:
    for one, other in zip(said, expected, strict=True):
        np.testing.assert_array_equal(one, other)
        assert np.asarray(one).dtype == np.asarray(other).dtype


def test_an_environment_gives_what_it_gives_directly(
    gateway: GatewayServer, poles: list[EnvServer]
) -> None:
    direct = trajectory(RemoteVectorEnv(poles[0].address, token="secret 0"))

    assert_same(trajectory(RemoteVectorEnv(gateway.address, token=FRONT)), direct)
    other = RemoteVectorEnv(
        f"dm_env_rpc://{gateway.address}", token=FRONT, dm_env_rpc=DmEnvRpcSettings(batched=True)
    )
    assert_same(trajectory(other), direct)


def test_a_policy_and_an_evaluation_give_what_they_give_directly(
    gateway: GatewayServer, poles: list[EnvServer], models: list[ModelServer]
) -> None:
    with gateway_to(*models) as policies:
        observations = np.random.default_rng(0).normal(size=(2, 4)).astype(np.float32)
        with RemoteModel(policies.address, token=FRONT) as model:
            model.configure_route(gymnasium.make_vec("CartPole-v1", num_envs=2))
            chosen = model.predict(observations)
        through = evaluate(gateway.address, policies.address, episodes=4, seed=5, token=FRONT)
    direct = evaluate(
        poles[1].address,
        models[1].address,
        episodes=4,
        seed=5,
        token="secret 1",
    )

    np.testing.assert_array_equal(chosen, lean(observations))
    assert through.episodes == direct.episodes


def test_the_released_generation_passes_without_a_token() -> None:
    with (
        EnvServer("CartPole-v1") as server,
        GatewayServer(lambda: [Target("0", 1, server.address)]) as gateway,
        ReleasedJoin(gateway.address) as released,
        ReleasedJoin(server.address) as direct,
    ):
        assert released.reset(7).observation == direct.reset(7).observation
        action = actions(server, 1)
        assert released.step(action).observation == direct.step(action).observation


def test_the_released_generation_passes_with_the_gateways_token(
    gateway: GatewayServer, poles: list[EnvServer]
) -> None:
    with (
        ReleasedJoin(gateway.address, token=FRONT) as released,
        ReleasedJoin(poles[0].address, token="secret 0") as direct,
    ):
        assert shake_hands(gateway.address, FRONT) == shake_hands(poles[0].address, "secret 0")
        assert released.reset(7, 8).observation == direct.reset(7, 8).observation


def test_large_observations_calls_and_errors_pass() -> None:
    with (
        EnvServer(Camera, token="secret 0", allow_calls=["remember"], transport="grpc") as server,
        gateway_to(server) as gateway,
    ):
        env = RemoteEnv(gateway.address, token=FRONT)
        observation, info = env.reset(seed=0)
        answer = env.call("remember", "lens")
        later, *_, after = env.step(0)

        expected = np.random.default_rng(np.random.PCG64(np.random.SeedSequence(0)))
        np.testing.assert_array_equal(observation, expected.integers(0, 256, 5_000_000, np.uint8))
        np.testing.assert_array_equal(later, expected.integers(0, 256, 5_000_000, np.uint8))
        assert (answer, after["word"]) == ("snel", "lens")
        with pytest.raises(RemoteEnvError, match="no film"):
            env.step(1)
        assert env.reset()[1]["pid"] == info["pid"]
        env.close()


def test_a_client_that_needs_larger_messages_agrees_and_joins_with_one_endpoint(
    gateway: GatewayServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(env_client, "DEFAULT_MESSAGE_BYTES", 1)

    for _ in range(4):
        env = RemoteVectorEnv(gateway.address, token=FRONT)
        env.reset()
        env.close()


def test_on_one_machine_steps_go_past_the_gateway() -> None:
    with EnvServer("CartPole-v1", token="secret 0") as server, gateway_to(server) as gateway:
        env = RemoteEnv(gateway.address, token=FRONT)
        env.reset(seed=0)

        first = env.step(0)
        env.reset(seed=0)

        np.testing.assert_array_equal(env.step(0)[0], first[0])
        assert server.num_sessions == 1
        env.close()


def test_a_gateway_tells_its_own_health(gateway: GatewayServer) -> None:
    connect_options = ConnectOptions(gateway.address, token=FRONT)

    assert check_health(connect_options).is_serving
    assert check_health(connect_options, ENV).is_serving
    assert check_health(connect_options, "no.such.Service").status is HealthStatus.UNKNOWN
    with pytest.raises(AccessDeniedError):
        check_health(ConnectOptions(gateway.address))


def test_a_gateway_serves_while_one_endpoint_does_and_leads_new_clients_there() -> None:
    with (
        EnvServer("CartPole-v1", token="secret 0") as one,
        EnvServer("CartPole-v1", token="secret 1") as other,
        GatewayServer(listing := listing_of(one, other), token=FRONT) as gateway,
    ):
        one.drain(0.0)
        listing.await_looks()

        first, second = (RemoteEnv(gateway.address, token=FRONT) for _ in range(2))
        first.reset()
        second.reset()
        assert (one.num_sessions, other.num_sessions) == (0, 2)
        assert gateway.health().is_serving
        other.drain(0.0)
        assert eventually(lambda: not gateway.health().is_serving)
        assert "none of the 2 endpoints" in gateway.health().reason
        first.close()
        second.close()


def test_twenty_clients_are_spread_evenly(gateway: GatewayServer, poles: list[EnvServer]) -> None:
    assert eventually(lambda: not any(pole.num_sessions for pole in poles))
    with ThreadPoolExecutor(20) as threads:
        connect = partial(RemoteVectorEnv, ConnectOptions(gateway.address, FRONT, timeout_s=90.0))
        envs = list(threads.map(lambda _: connect(), range(20)))

        assert eventually(lambda: sum(pole.num_sessions for pole in poles) == 20)
        # Connections that ended a moment ago still count.
        assert abs(poles[0].num_sessions - poles[1].num_sessions) <= 2
        list(threads.map(RemoteVectorEnv.close, envs))


def test_a_session_ends_at_the_endpoint_when_its_client_is_killed(
    gateway: GatewayServer, poles: list[EnvServer]
) -> None:
    script = f"""
from rlmesh_ray import RemoteVectorEnv
env = RemoteVectorEnv({gateway.address!r}, token={FRONT!r})
env.reset()
print("open", flush=True)
while True:
    env.step([0, 0])
"""
    assert eventually(lambda: not any(pole.num_sessions for pole in poles))
    client = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE)
    assert client.stdout is not None
    with client.stdout:
        client.stdout.readline()
        before = sum(pole.num_sessions for pole in poles)

        client.kill()

        client.wait()
    assert before == 1
    assert eventually(lambda: not any(pole.num_sessions for pole in poles))


def test_who_shows_another_token_reaches_no_endpoint(
    gateway: GatewayServer, poles: list[EnvServer]
) -> None:
    assert eventually(lambda: not any(pole.num_sessions for pole in poles))
    for token in (None, "secret 0", FRONT[:-1]):
        with pytest.raises(AccessDeniedError, match="this gateway requires a"):
            RemoteVectorEnv(gateway.address, token=token)

    assert not any(pole.num_sessions for pole in poles)


def test_an_endpoint_that_is_full_says_so_through_the_gateway() -> None:
    with (
        EnvServer("CartPole-v1", token="secret 0", max_sessions=1) as server,
        gateway_to(server) as gateway,
    ):
        env, second = (RemoteEnv(gateway.address, token=FRONT) for _ in range(2))
        env.reset()
        with pytest.raises(CapacityError, match="all 1 sessions are taken"):
            second.reset()
        second.close()
        env.close()


SERVE = """
import sys
from rlmesh_ray import EnvServer
server = EnvServer("CartPole-v1", token=sys.argv[1], transport="grpc").start()
print(server.address, flush=True)
server.wait()
"""


@pytest.fixture
def processes() -> Iterator[list[subprocess.Popen[str]]]:
    """Two endpoints in processes of their own."""
    started = [
        subprocess.Popen(
            [sys.executable, "-c", SERVE, f"secret {number}"], stdout=subprocess.PIPE, text=True
        )
        for number in range(2)
    ]
    yield started
    for process in started:
        process.kill()
        process.communicate()


def step_for_ever(env: RemoteEnv) -> None:
    while True:
        env.step(0)


def test_when_an_endpoint_is_killed_its_session_is_lost_and_the_same_address_has_another(
    processes: list[subprocess.Popen[str]],
) -> None:
    addresses = [
        process.stdout.readline().strip() for process in processes if process.stdout is not None
    ]
    targets = [
        Target(str(number), 1, address, f"secret {number}")
        for number, address in enumerate(addresses)
    ]
    with GatewayServer(lambda: targets, token=FRONT) as gateway:
        lost, kept = (RemoteEnv(gateway.address, token=FRONT) for _ in range(2))
        before, _ = lost.reset(seed=0)
        kept.reset(seed=0)

        processes[0].send_signal(signal.SIGKILL)
        processes[0].wait()

        with pytest.raises(EndpointLostError, match="dial the gateway again"):
            step_for_ever(lost)
        kept.step(0)
        again = RemoteEnv(gateway.address, token=FRONT)
        np.testing.assert_array_equal(again.reset(seed=0)[0], before)
        for env in (lost, kept, again):
            env.close()
        processes[1].kill()
        processes[1].wait()
        with pytest.raises(EndpointUnreachableError, match="behind"):
            RemoteEnv(gateway.address, token=FRONT)


def test_an_evaluation_goes_on_through_the_same_address_when_an_endpoint_is_lost() -> None:
    with ExitStack() as stack:
        servers = [
            stack.enter_context(EnvServer("CartPole-v1", token=f"secret {number}"))
            for number in range(2)
        ]
        gateway = stack.enter_context(gateway_to(*servers))
        expected = evaluate(servers[1].address, lean, episodes=6, seed=1, token="secret 1")
        ended = 0

        def stop_one(_episode: Any) -> None:
            nonlocal ended
            ended += 1
            if ended == 2:
                servers[0].stop(0.0)

        result = evaluate(
            gateway.address, lean, episodes=6, seed=1, token=FRONT, on_episode=stop_one
        )

    assert result.episodes == expected.episodes


def test_an_error_names_the_gateway_s_address_not_an_endpoint_s(
    gateway: GatewayServer, poles: list[EnvServer]
) -> None:
    with pytest.raises(EndpointError) as caught:
        RemoteModel(gateway.address, token=FRONT)

    assert gateway.address in str(caught.value)
    assert not any(pole.address in str(caught.value) for pole in poles)


@needs_openssl
def test_tls_is_spoken_to_the_clients_and_to_the_endpoints(tmp_path: Path) -> None:
    authority = Authority(tmp_path, "authority")
    own = ServerTls(*authority.sign("endpoint"), client_ca=authority.certificate)
    front = ServerTls(*authority.sign("gateway"))
    shown = ClientTls(authority.certificate, *authority.sign("shown"))
    trusting = ClientTls(authority.certificate)
    with (
        EnvServer("CartPole-v1", token="secret 0", tls=own) as server,
        gateway_to(server, tls=front, endpoint_credentials=shown.credentials) as gateway,
        gateway_to(server) as plain,
    ):
        env = RemoteEnv(gateway.address, token=FRONT, tls=trusting)
        observation, _ = env.reset(seed=0)
        env.close()
        assert check_health(ConnectOptions(gateway.address, token=FRONT, tls=trusting)).is_serving

        np.testing.assert_array_equal(observation, gymnasium.make("CartPole-v1").reset(seed=0)[0])
        with pytest.raises(EndpointUnreachableError):
            RemoteEnv(gateway.address, token=FRONT)
        with pytest.raises(EndpointUnreachableError, match="none of the 1 endpoints"):
            RemoteEnv(plain.address, token=FRONT)
        assert not plain.health().is_serving


@needs_openssl
def test_certificates_that_cannot_be_used_any_more_are_named(tmp_path: Path) -> None:
    authority = Authority(tmp_path, "authority")
    own = ServerTls(*authority.sign("endpoint"))
    missing = ClientTls(tmp_path / "gone.pem")
    with (
        ModelServer(lean, token="secret 0", tls=own) as server,
        gateway_to(server, endpoint_credentials=missing.credentials) as gateway,
    ):
        with pytest.raises(EndpointUnreachableError, match=r"gone\.pem"):
            RemoteModel(gateway.address, token=FRONT)
        assert "gone.pem" in gateway.health().reason
