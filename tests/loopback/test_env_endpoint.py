"""EnvServer and its clients over real gRPC."""

import gc
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import psutil
import pytest
from gymnasium import spaces

from rlmesh_ray import EnvServer, RemoteEnv, RemoteVectorEnv
from rlmesh_ray.client.channel import ConnectOptions
from rlmesh_ray.client.env.env_client import EnvClient, shake_hands
from rlmesh_ray.errors import (
    CapacityError,
    CodecError,
    ConfigurationError,
    ConformanceError,
    ContractMismatchError,
    EndpointClosedError,
    EndpointLostError,
    EndpointUnreachableError,
    EnvStartError,
    LocalProtocolError,
    RemoteEnvError,
)
from tests.loopback.eventually import eventually


class Moody(gymnasium.Env[Any, Any]):
    """Does what its action says: 0 goes on, 1 raises, 2 dies, 4 ends the episode."""

    observation_space = spaces.Discrete(1000)
    action_space = spaces.Discrete(5)

    def __init__(self) -> None:
        self.steps = 0

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        super().reset(seed=seed)
        self.steps = 0
        return 0, {"pid": os.getpid(), **(options or {})}

    def step(self, action: Any) -> Any:
        self.steps += 1
        if action == 1:
            raise ValueError("no mood for it")
        if action == 2:
            os.kill(os.getpid(), signal.SIGKILL)
        return self.steps, 1.0, bool(action == 4), False, {}


class TwoEnds(gymnasium.Env[Any, Any]):
    """The action 1 terminates the episode, and 2 truncates it; 0 lets it run."""

    observation_space = spaces.Discrete(3)
    action_space = spaces.Discrete(3)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        super().reset(seed=seed)
        return 0, {}

    def step(self, action: Any) -> Any:
        return int(action), 0.5, bool(action == 1), bool(action == 2), {}


@pytest.fixture(scope="module")
def cartpole() -> Iterator[EnvServer]:
    with EnvServer("CartPole-v1", num_envs=2) as server:
        yield server


@pytest.fixture(scope="module")
def moody() -> Iterator[EnvServer]:
    with EnvServer(Moody) as server:
        yield server


def test_sessions_have_lanes_of_their_own(cartpole: EnvServer) -> None:
    first, second = RemoteVectorEnv(cartpole.address), RemoteVectorEnv(cartpole.address)
    before, _ = first.reset(seed=1)
    second.reset(seed=2)
    second.step(np.array([0, 0]))

    again, _ = first.reset(seed=1)

    np.testing.assert_array_equal(again, before)
    assert eventually(lambda: cartpole.num_sessions == 2)
    first.close()
    second.close()


def test_a_full_endpoint_refuses_clearly_and_serves_again_after_a_close() -> None:
    with EnvServer("CartPole-v1", max_sessions=1) as server:
        first = RemoteEnv(server.address)
        first.reset(seed=0)
        second = RemoteEnv(server.address)
        with pytest.raises(CapacityError, match="all 1 sessions are taken"):
            second.reset()
        second.close()
        first.close()

        third = RemoteEnv(server.address)
        _reset_when_free(third, server.address)


def _reset_when_free(env: RemoteEnv, address: str) -> None:
    """Try until the endpoint has taken the closed session's worker back."""
    for _ in range(100):
        try:
            env.reset(seed=0)
        except CapacityError:
            env.close()
            env = RemoteEnv(address)
        else:
            env.close()
            return
    pytest.fail("the session never became free")


def test_an_environment_that_raises_is_reported_with_its_traceback(moody: EnvServer) -> None:
    env = RemoteEnv(moody.address)
    env.reset()

    with pytest.raises(RemoteEnvError, match="ValueError: no mood for it") as caught:
        env.step(1)

    assert caught.value.code == "INTERNAL"
    assert caught.value.is_recoverable
    assert "no mood for it" in caught.value.debug_info
    assert "Traceback" in caught.value.debug_info
    env.reset()
    assert env.step(0)[0] == 1
    env.close()


def test_a_step_after_an_error_needs_a_reset(moody: EnvServer) -> None:
    env = RemoteEnv(moody.address)
    env.reset()
    with pytest.raises(RemoteEnvError):
        env.step(1)

    with pytest.raises(RemoteEnvError, match="needs a Reset first") as caught:
        env.step(0)

    assert caught.value.code == "NOT_READY"
    env.close()


@pytest.mark.parametrize(
    ("dialect", "transport"),
    [
        *(("rlmesh.protocol.v1", transport) for transport in ("grpc", "shared_memory", "tcp")),
        ("rlmesh-wire-v1", "auto"),
    ],
)
def test_terminated_and_truncated_stay_apart(dialect: str, transport: str) -> None:
    with EnvServer(TwoEnds, num_envs=3, dialects=[dialect]) as server:
        client = EnvClient(ConnectOptions(server.address), transport=transport)
        client.reset()
        client.step([np.zeros(3, np.int64)])
        result = client.step([np.arange(3)])
        client.close()

    assert result.terminated.tolist() == [False, True, False]
    assert result.truncated.tolist() == [False, False, True]
    records = [
        (each.env_index, each.terminated, each.truncated, each.step_count, each.cumulative_reward)
        for each in result.completed_episodes
    ]
    assert records == [(1, True, False, 2, 1.0), (2, False, True, 2, 1.0)]


def test_the_next_session_sees_nothing_of_the_former_one(moody: EnvServer) -> None:
    first = RemoteEnv(moody.address)
    first.reset()
    first.step(0)
    first.close()

    second = RemoteEnv(moody.address)
    second.reset()

    assert second.step(0)[0] == 1
    second.close()


def test_reset_options_reach_the_environment(moody: EnvServer) -> None:
    env = RemoteEnv(moody.address)

    _, info = env.reset(options={"level": 3, "name": "hill"})

    assert (info["level"], info["name"]) == (3, "hill")
    env.close()


def test_a_partial_reset_does_not_hide_that_the_other_lanes_have_died() -> None:
    with EnvServer(Moody, num_envs=2) as server:
        client = EnvClient(ConnectOptions(server.address))
        pid = int(np.asarray(client.reset().infos["pid"])[0])
        os.kill(pid, signal.SIGKILL)
        assert eventually(lambda: not psutil.pid_exists(pid))

        with pytest.raises(RemoteEnvError) as hidden:
            client.reset(lanes=[0])
        with pytest.raises(RemoteEnvError) as early:
            client.step([np.array([0, 0])])
        client.reset()
        done = client.step([np.array([0, 0])])
        client.close()

    assert hidden.value.code == "CRASHED"
    assert early.value.code == "NOT_READY"
    np.testing.assert_array_equal(done.observation[0], [1, 1])


def test_an_instance_is_served_to_one_session_only() -> None:
    with EnvServer(Moody()) as server:
        env = RemoteEnv(server.address)
        env.reset()
        other = RemoteEnv(server.address)
        with pytest.raises(CapacityError, match="all 1 sessions"):
            other.reset()
        other.close()
        env.close()


def test_a_wrong_action_is_refused_before_it_is_sent(cartpole: EnvServer) -> None:
    env = RemoteVectorEnv(cartpole.address)
    env.reset()

    with pytest.raises(ConformanceError):
        env.step(np.array([0.5, 0.5]))
    with pytest.raises(ConformanceError):
        env.step(np.array([0, 0, 0]))

    env.step(np.array([0, 1]))
    env.close()


class Spoken(Moody):
    """Takes words."""

    action_space = spaces.Text(9)  # type: ignore[assignment]


def test_what_is_no_text_is_refused_before_it_is_sent() -> None:
    with EnvServer(Spoken) as server:
        env = RemoteEnv(server.address)
        env.reset()
        for word in (b"left", 3, ["left"], "\ud800"):
            with pytest.raises(ConformanceError):
                env.step(word)
        with pytest.raises(CodecError, match=r"Step has .* bytes, and the endpoint takes"):
            env.step("x" * 2**21)

        assert env.step(np.str_("left"))[0] == 1
        env.close()


def test_an_action_outside_its_domain_is_never_delivered(cartpole: EnvServer) -> None:
    client = EnvClient(ConnectOptions(cartpole.address))
    client.reset()

    with pytest.raises(RemoteEnvError, match="action") as caught:
        client.step([np.array([0, 2])])

    assert caught.value.code == "INVALID_ACTION"
    assert not caught.value.is_recoverable
    client.close()


class Painter(Moody):
    """Paints its step count as a shade of red."""

    render_mode = "rgb_array"

    def __init__(self) -> None:
        super().__init__()
        self.metadata = {"render_modes": ["rgb_array"], "render_fps": 5}

    def render(self) -> Any:
        picture = np.zeros((4, 6, 3), np.uint8)
        picture[..., 0] = self.steps
        return picture


def test_render_gives_a_picture_where_the_mode_has_one() -> None:
    with EnvServer(Painter) as server:
        env = RemoteEnv(server.address)
        env.reset(seed=0)
        env.step(0)

        picture = env.render()

        assert env.render_mode == "rgb_array"
        assert env.metadata["render_fps"] == 5
        assert isinstance(picture, np.ndarray)
        assert picture.shape == (4, 6, 3)
        assert picture[0, 0].tolist() == [1, 0, 0]
        env.close()


def test_render_gives_nothing_where_the_mode_has_none(cartpole: EnvServer) -> None:
    env = RemoteVectorEnv(cartpole.address)
    env.reset()

    assert env.render() is None
    env.close()


def test_a_single_lane_client_refuses_a_wider_endpoint(cartpole: EnvServer) -> None:
    with pytest.raises(ContractMismatchError, match="use RemoteVectorEnv"):
        RemoteEnv(cartpole.address)


def test_a_closed_client_says_so(cartpole: EnvServer) -> None:
    env = EnvClient(ConnectOptions(cartpole.address))
    env.close()
    env.close()

    with pytest.raises(EndpointClosedError):
        env.reset()


def test_nothing_listening_is_named_with_the_address() -> None:
    with pytest.raises(EndpointUnreachableError, match=r"127\.0\.0\.1:1: nothing answers"):
        RemoteEnv(ConnectOptions("127.0.0.1:1", timeout_s=5.0))


def test_a_stopped_endpoint_ends_its_sessions() -> None:
    server = EnvServer("CartPole-v1").start()
    env = RemoteEnv(server.address)
    env.reset()

    server.stop(grace_s=0.0)

    with pytest.raises(EndpointLostError):
        env.step(0)
    env.close()


def test_a_unix_socket_serves_as_well(tmp_path: Path) -> None:
    path = tmp_path / "env.sock"
    with EnvServer("CartPole-v1", address=f"unix:{path}") as server:
        env = RemoteEnv(server.address)
        env.reset(seed=0)
        env.close()

    assert not path.exists()


def test_the_handshake_tells_the_contract_without_a_session(cartpole: EnvServer) -> None:
    answer = shake_hands(ConnectOptions(cartpole.address))

    assert answer.contract == cartpole.contract
    assert answer.selected_edition == "2026.06"
    assert eventually(lambda: cartpole.num_sessions == 0)


@pytest.mark.parametrize(
    ("env", "error"),
    [("NoSuchEnv-v0", EnvStartError), ("no_such_module:Env-v0", EnvStartError)],
)
def test_an_unknown_environment_is_named_in_one_line(env: str, error: type[Exception]) -> None:
    with pytest.raises(error, match=env.split(":")[0]) as caught:
        EnvServer(env).start()

    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "options",
    [
        {"num_envs": 0},
        {"max_sessions": 0},
        {"sessions_per_worker": 0},
        {"validation": "maybe"},
        {"address": "x"},
    ],
)
def test_wrong_options_are_refused_at_once(options: dict[str, Any]) -> None:
    with pytest.raises(ConfigurationError):
        EnvServer("CartPole-v1", **options)


@pytest.mark.parametrize(
    "mask", [[False, False], [True], [1, 0], [[True, False]]], ids=["none", "short", "int", "deep"]
)
def test_a_mask_that_chooses_no_lanes_is_refused(cartpole: EnvServer, mask: list[object]) -> None:
    env = RemoteVectorEnv(cartpole.address)
    env.reset()

    with pytest.raises(ConformanceError, match="reset_mask"):
        env.reset(options={"reset_mask": np.array(mask)})

    env.close()


def test_seeds_may_be_numpy_integers(cartpole: EnvServer) -> None:
    env = RemoteVectorEnv(cartpole.address)
    expected, _ = env.reset(seed=3)

    np.testing.assert_array_equal(env.reset(seed=np.int64(3))[0], expected)  # type: ignore[arg-type]
    np.testing.assert_array_equal(env.reset(seed=np.array([3, 4]))[0], expected)  # type: ignore[arg-type]
    env.close()


def test_waiting_for_a_step_that_was_not_sent_is_refused_at_once(cartpole: EnvServer) -> None:
    env = RemoteVectorEnv(cartpole.address)
    env.reset()

    with pytest.raises(LocalProtocolError, match="without step_async"):
        env.step_wait()

    env.close()


def test_a_vector_that_could_not_be_opened_leaves_no_noise_behind(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(EndpointUnreachableError):
        RemoteVectorEnv("127.0.0.1:1")
    gc.collect()

    assert capsys.readouterr().err == ""
