"""Who observes a session sees it as it is between two steps, and changes nothing in it."""

import contextlib
import io
import os
import signal
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest
from gymnasium import spaces
from gymnasium.vector import SyncVectorEnv
from PIL import Image

from rlmesh_ray import EnvServer, RemoteVectorEnv
from rlmesh_ray.client.channel import ConnectOptions
from rlmesh_ray.client.env.env_client import EnvClient
from rlmesh_ray.client.env.observer import EndpointObserver, ObservedSession
from rlmesh_ray.errors import (
    AccessDeniedError,
    AddressError,
    CapacityError,
    CodecError,
    ConfigurationError,
    EndpointError,
    EndpointLostError,
    RemoteEnvError,
)
from rlmesh_ray.protocol.gateway_balancer import Target
from rlmesh_ray.server.env import env_service
from rlmesh_ray.server.observe import observer_service
from rlmesh_ray.server.pool.gateway import GatewayServer
from rlmesh_ray.testing.envs import EchoEnv
from rlmesh_ray.testing.equality import assert_identical
from rlmesh_ray.wire import observe_v1 as wire
from tests.loopback.client_internals import (
    direct_connection,
    endpoints_give_up_after,
    step_timeout,
    vanish,
)
from tests.loopback.direct_sessions import NOTHING, array, session
from tests.loopback.eventually import eventually
from tests.loopback.lifelike import Lifelike
from tests.loopback.ports import plain_channel
from tests.loopback.released_join import ReleasedJoin

SEED = 7
NUM_LANES = 3
NUM_PICTURES = 40
ACTION_SPACE: Any = spaces.Discrete(5)


# To the endpoint and the worker, both direct connections look alike.
TCP = pytest.param("tcp", marks=pytest.mark.nightly)


@pytest.fixture(name="transport", params=["grpc", "shared_memory", TCP])
def _transport(request: pytest.FixtureRequest) -> str:
    return str(request.param)


class Drawn(Lifelike):
    """Draws its step count. What it does waits for files, if their names are given.

    Args:
        render_gate: For which it waits before it has drawn.
        step_gate: For which it waits in its steps.
    """

    render_mode = "rgb_array"

    def __init__(self, render_gate: str = "", step_gate: str = "") -> None:
        self._render_gate, self._step_gate = render_gate, step_gate

    def step(self, action: Any) -> Any:
        _wait_for(self._step_gate)
        return super().step(action)

    def render(self) -> Any:
        _wait_for(self._render_gate)
        return np.full((6, 8, 3), self._count, np.uint8)


def _wait_for(gate: str) -> None:
    if gate:
        Path(gate).with_suffix(".begun").touch()
        assert eventually(Path(gate).exists, 600.0)


def begun(gate: Path) -> Path:
    """Return the file that shows that an environment waits for ``gate``."""
    return gate.with_suffix(".begun")


def count_in(png: bytes) -> int:
    """Return the number that a picture consists of."""
    (count,) = np.unique(np.asarray(Image.open(io.BytesIO(png))))
    return int(count)


def only(observer: EndpointObserver) -> ObservedSession:
    (observed,) = observer.sessions()
    return observed


@contextlib.contextmanager
def observed(
    env: Any, transport: str, **options: Any
) -> Iterator[tuple[EnvClient, EndpointObserver]]:
    """Yield a session that has been reset, whose steps go by ``transport``, and an observer."""
    with (
        EnvServer(env, **options) as server,
        session(server, transport) as client,
        EndpointObserver(server.address, timeout_s=60.0) as observer,
    ):
        if transport != "grpc":
            direct_connection(client)
        yield client, observer


@pytest.fixture(scope="module")
def drawn() -> Iterator[EnvServer]:
    """Yield a server whose sessions end with their tests."""
    with EnvServer(Drawn) as server:
        yield server


# --- what is seen --------------------------------------------------------------------------------


def echo() -> EchoEnv:
    return EchoEnv(spaces.Box(-1, 1, (3,), np.float32), ACTION_SPACE, render_mode="rgb_array")


@pytest.fixture
def _without_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let observers ask as often as they like."""
    monkeypatch.setattr(observer_service, "MAX_A_SECOND", 10**6)
    monkeypatch.setattr(env_service, "MAX_A_SECOND", 10**6)
    monkeypatch.setattr(observer_service, "MOST_SHARE", 1.0)


@pytest.mark.usefixtures("_without_limits")
def test_trajectories_are_what_they_are_without_observers(transport: str) -> None:
    local = SyncVectorEnv([echo] * NUM_LANES)
    local.action_space.seed(SEED)
    is_over = threading.Event()
    num_pictures = 0

    def observe(address: str) -> None:
        nonlocal num_pictures
        with EndpointObserver(address) as observer:
            while not is_over.is_set():
                name = only(observer).name
                assert observer.render(name, num_pictures % NUM_LANES)
                num_pictures += 1

    with EnvServer(echo, num_envs=NUM_LANES) as server, ThreadPoolExecutor(1) as pool:
        remote = RemoteVectorEnv(server.address, transport=transport)
        assert_identical(remote.reset(seed=SEED), local.reset(seed=SEED))
        observing = pool.submit(observe, server.address)
        try:
            while num_pictures < NUM_PICTURES and not observing.done():
                actions = local.action_space.sample()
                assert_identical(remote.step(actions), local.step(actions))
        finally:
            is_over.set()
        observing.result()
        remote.close()
    local.close()


class Blind(Drawn):
    """Observes noise. It renders nothing: how it fails is said by ``fail_by``."""

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        _, info = super().reset(seed=seed, options=options)
        return self.np_random.random(1, np.float32), info

    def step(self, action: Any) -> Any:
        _, *rest = super().step(action)
        return self.np_random.random(1, np.float32), *rest

    def fail_by(self, way: str) -> None:
        self._way = way

    def render(self) -> Any:
        match self._way:
            case "raises":
                raise RuntimeError("no display")
            case "exits":
                sys.exit(3)
            case "has no pygame":
                with pytest.MonkeyPatch.context() as patch:
                    patch.setitem(sys.modules, "pygame", None)
                    return gymnasium.make("CartPole-v1", render_mode="rgb_array").render()
            case "is late":
                return super().render()
        return {"a text": "no picture", "None": None, "an object": object()}.get(
            self._way, np.zeros(7)
        )


@pytest.mark.usefixtures("_without_limits")
def test_looks_that_fail_in_every_way_change_nothing(transport: str, tmp_path: Path) -> None:
    gate = tmp_path / "gate"
    ways = ["raises", "exits", "has no pygame", "a text", "None", "an object", "flat", "is late"]
    with observed(lambda: Blind(str(gate)), transport, allow_calls=["fail_by", "render"]) as (
        client,
        observer,
    ):
        plain = Blind()
        first, name = client.reset(seeds=[SEED]), only(observer).name
        assert_identical(array(first)[0], plain.reset(seed=SEED)[0])
        for number, way in enumerate(ways, 1):
            client.call("fail_by", way)
            if way == "is late":
                with endpoints_give_up_after(100), pytest.raises(RemoteEnvError, match="TIMEOUT"):
                    client.render()
                gate.touch()
                client.call("fail_by", way)  # waits until the late one has returned
            else:
                with contextlib.suppress(RemoteEnvError):
                    assert client.render() is None
                with contextlib.suppress(RemoteEnvError):
                    client.call("render")
                with pytest.raises((EndpointError, ConfigurationError)):
                    observer.render(name)
            assert only(observer).step_counts == (number - 1,)
            assert observer.statistics()

            step = client.step(NOTHING)

            assert_identical(array(step)[0], plain.step(0)[0])
            assert step.episode_ids == first.episode_ids


@pytest.mark.usefixtures("_without_limits")
def test_a_picture_is_of_one_lane_between_two_steps(transport: str) -> None:
    with observed(Drawn, transport, num_envs=2, autoreset="disabled") as (client, observer):
        name = only(observer).name
        for count in range(1, 4):
            client.step([np.zeros(2, np.int64)])
            assert [count_in(observer.render(name, lane)) for lane in (0, 1)] == [count, count]
        client.reset(lanes=[1])

        assert [count_in(observer.render(name, lane)) for lane in (0, 1)] == [3, 0]


def test_a_picture_waits_for_the_step_in_progress(transport: str, tmp_path: Path) -> None:
    gate = tmp_path / "gate"
    with (
        observed(lambda: Drawn("", str(gate)), transport) as (client, observer),
        ThreadPoolExecutor(1) as pool,
    ):
        name = only(observer).name
        pending = client.send_step(NOTHING)
        assert eventually(begun(gate).exists)
        drawing = pool.submit(observer.render, name)
        assert only(observer).num_steps == 0  # the counters wait for no reader
        gate.touch()

        assert array(client.receive_step(pending)).item() == 1
        assert count_in(drawing.result()) == 1


def test_a_list_tells_where_the_lanes_are(transport: str) -> None:
    with observed(Drawn, transport, num_envs=2) as (client, observer):
        began = only(observer)
        client.step([np.array([0, 0])])
        client.step([np.array([0, 1])])
        client.step([np.array([0, 0])])
        now = only(observer)
        episode_ids = client.reset().episode_ids

        assert began.step_counts == (0, 0)
        assert began.num_resets == 1
        assert now.name == began.name
        assert now.since_ns == began.since_ns
        assert now.peer.startswith("ipv4:127.0.0.1:")
        assert now.dialect == "rlmesh.protocol.v1"
        assert now.transport == transport
        assert now.episode_ids == (began.episode_ids[0], "")
        assert now.step_counts == (3, 2)
        assert now.cumulative_rewards == (3.0, 2.0)
        assert (now.num_steps, now.num_lane_steps, now.num_episodes) == (3, 6, 1)
        assert only(observer).episode_ids == episode_ids


def test_sessions_of_the_released_protocol_are_seen_and_drawn_too(drawn: EnvServer) -> None:
    with ReleasedJoin(drawn.address) as join, EndpointObserver(drawn.address) as observer:
        join.reset(ids=("own",))
        seen = only(observer)

        assert (seen.dialect, seen.episode_ids) == ("rlmesh-wire-v1", ("own",))
        assert count_in(observer.render(seen.name)) == 0
    assert eventually(lambda: drawn.num_sessions == 0)


def test_the_oldest_session_comes_first_and_closed_ones_are_gone(drawn: EnvServer) -> None:
    with EndpointObserver(drawn.address) as observer:
        assert observer.sessions() == ()
        with session(drawn, "grpc") as first:
            first.step(NOTHING)
            with session(drawn, "grpc"):
                assert [each.num_steps for each in observer.sessions()] == [1, 0]
            assert [each.num_steps for each in observer.sessions()] == [1]
        assert observer.sessions() == ()


def test_a_list_tells_nothing_that_opens_a_session(drawn: EnvServer) -> None:
    with session(drawn, "shared_memory") as client:
        direct_connection(client)
        with plain_channel(client.address) as channel:
            reported = channel.unary_unary(wire.LIST)(b"", timeout=60.0)
        (seen,) = wire.parse_sessions(reported)

        assert len(client.session_id) > len(seen.name) > 0
        assert client.session_id.encode() not in reported
        assert seen.name not in client.session_id


def test_through_a_gateway_the_sessions_of_an_endpoint_are_seen(drawn: EnvServer) -> None:
    with (
        GatewayServer(lambda: [Target("one", 1, drawn.address)]) as gateway,
        session(drawn, "grpc"),
        EndpointObserver(gateway.address) as observer,
    ):
        assert count_in(observer.render(only(observer).name)) == 0


# --- what is refused -----------------------------------------------------------------------------


def test_who_may_observe() -> None:
    with EnvServer(Drawn, token="secret") as server:
        client = EnvClient(ConnectOptions(server.address, "secret"))
        client.reset()
        for token in (None, "wrong"):
            with (
                EndpointObserver(server.address, token=token) as stranger,
                pytest.raises(AccessDeniedError, match="requires"),
            ):
                stranger.sessions()
        with EndpointObserver(server.address, token="secret") as observer:
            assert observer.render(only(observer).name)
        client.close()


def test_an_operator_can_do_without_observers() -> None:
    with (
        EnvServer(Drawn, observers=False) as server,
        session(server, "grpc"),
        EndpointObserver(server.address) as observer,
    ):
        with pytest.raises(ConfigurationError, match=f"{server.address}: .*--no-observers"):
            observer.sessions()
        with pytest.raises(ConfigurationError, match="--no-observers"):
            observer.render("any")


def test_an_environment_without_pictures_says_how_it_gets_some() -> None:
    why = "render mode none, which gives no pictures; serve"
    with observed(Lifelike, "grpc") as (_, observer), pytest.raises(EndpointError, match=why):
        observer.render(only(observer).name)


def test_what_cannot_be_drawn_is_refused_with_the_reason(drawn: EnvServer) -> None:
    with EndpointObserver(drawn.address) as observer:
        client = EnvClient(ConnectOptions(drawn.address))
        client.render()  # the session begins
        name = only(observer).name

        with pytest.raises(EndpointError, match="has not reset it"):
            observer.render(name)
        client.reset()
        with pytest.raises(EndpointError, match=r"lane 1 is not in \[0, 1\)"):
            observer.render(name, 1)
        with pytest.raises(CodecError, match="no session has a lane -1"):
            observer.render(name, -1)
        with pytest.raises(EndpointLostError, match="no such session is open"):
            observer.render("another")
        client.close()
    with pytest.raises(AddressError):
        EndpointObserver("nowhere")


def test_a_client_that_asks_too_often_gets_an_error() -> None:
    with EnvServer(Drawn) as server, EndpointObserver(server.address) as observer:

        def is_refused() -> bool:
            try:
                observer.sessions()
            except CapacityError as error:
                return "ask less often" in str(error)
            return False

        assert any(is_refused() for _ in range(1000))


# --- accidents -----------------------------------------------------------------------------------


@pytest.mark.parametrize("transport", ["shared_memory", TCP])
def test_a_direct_step_that_hangs_is_late_although_an_observer_waits_behind_it(
    transport: str, tmp_path: Path
) -> None:
    gate = tmp_path / "gate"
    with (
        observed(lambda: Drawn("", str(gate)), transport, _step_grace_s=600.0) as (
            client,
            observer,
        ),
        ThreadPoolExecutor(1) as pool,
    ):
        name = only(observer).name
        with step_timeout(client, 1.0):
            pending = client.send_step(NOTHING)
        assert eventually(begun(gate).exists)
        drawing = pool.submit(observer.render, name)

        with pytest.raises(RemoteEnvError, match="TIMEOUT: no result within 900 ms"):
            client.receive_step(pending)
        with pytest.raises(EndpointError, match=r"no picture to give: .*"):
            drawing.result()
        with pytest.raises(EndpointError, match="still busy with a request that was too late"):
            observer.render(name)
        gate.touch()
        client.reset()

        assert array(client.step(NOTHING)).item() == 1
        assert count_in(observer.render(name)) == 1


def test_an_observer_that_hangs_up_leaves_the_next_request_its_own_answer(
    transport: str, tmp_path: Path
) -> None:
    gate = tmp_path / "gate"
    with (
        observed(lambda: Drawn(str(gate)), transport) as (client, observer),
        plain_channel(client.address) as channel,
    ):
        client.step(NOTHING)
        name = only(observer).name
        drawing = channel.unary_unary(wire.RENDER).future(
            wire.pack_render_request(name, 0), timeout=60.0
        )
        assert eventually(begun(gate).exists)
        pending = client.send_step(NOTHING)
        drawing.cancel()
        with pytest.raises(CapacityError, match="is being rendered"):
            observer.render(name)
        gate.touch()

        assert array(client.receive_step(pending)).item() == 2
        assert array(client.step(NOTHING)).item() == 3
        assert count_in(observer.render(name)) == 3


def test_a_session_that_ends_during_its_picture_is_gone(transport: str, tmp_path: Path) -> None:
    gate = tmp_path / "gate"
    with (
        EnvServer(lambda: Drawn(str(gate)), max_sessions=1) as server,
        EndpointObserver(server.address, timeout_s=60.0) as observer,
        ThreadPoolExecutor(1) as pool,
    ):
        with session(server, transport) as client:
            drawing = pool.submit(observer.render, only(observer).name)
            assert eventually(begun(gate).exists)
            vanish(client)

            with pytest.raises(EndpointLostError, match="no such session is open"):
                drawing.result()
        assert eventually(lambda: server.num_sessions == 0)
        assert observer.sessions() == ()
        gate.touch()
        with session(server, transport) as client:
            assert array(client.step(NOTHING)).item() == 1
            assert count_in(observer.render(only(observer).name)) == 1


class Undrawable(Drawn):
    """Raises where it is drawn after one step, and dies after two."""

    def render(self) -> Any:
        if self._count == 1:
            raise ValueError("there is no display")
        if self._count == 2:
            os.kill(os.getpid(), signal.SIGKILL)
        return super().render()


def test_an_environment_that_cannot_be_drawn_costs_its_session_only_what_it_breaks(
    transport: str,
) -> None:
    with observed(Undrawable, transport) as (client, observer):
        name = only(observer).name
        client.step(NOTHING)
        with pytest.raises(EndpointError, match="ValueError: there is no display"):
            observer.render(name)
        assert array(client.step(NOTHING)).item() == 2
        with pytest.raises(EndpointError, match="the environment's process"):
            observer.render(name)

        with pytest.raises(RemoteEnvError, match="CRASHED"):
            client.step(NOTHING)
        client.reset()
        assert count_in(observer.render(name)) == 0
        assert array(client.step(NOTHING)).item() == 1


def test_a_step_that_waits_for_a_picture_keeps_its_deadline(transport: str, tmp_path: Path) -> None:
    gate = tmp_path / "gate"
    with (
        observed(lambda: Drawn(str(gate)), transport) as (client, observer),
        ThreadPoolExecutor(1) as pool,
    ):
        drawing = pool.submit(observer.render, only(observer).name)
        assert eventually(begun(gate).exists)
        with (
            step_timeout(client, 1.0),
            pytest.raises(RemoteEnvError, match="TIMEOUT: not done: calls or observers") as caught,
        ):
            client.step(NOTHING)
        assert caught.value.is_recoverable
        gate.touch()
        drawing.result(30.0)
        client.reset()

        assert array(client.step(NOTHING)).item() == 1
