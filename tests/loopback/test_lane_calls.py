"""Calls into the lanes of a session, over real gRPC."""

import contextlib
import os
import signal
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc
import gymnasium
import numpy as np
import pytest
from gymnasium import spaces
from gymnasium.vector import SyncVectorEnv
from gymnasium.wrappers import TimeLimit

from rlmesh_ray import EnvServer, RemoteEnv, RemoteVectorEnv
from rlmesh_ray.client.channel import ConnectOptions
from rlmesh_ray.client.env.env_client import EnvClient, shake_hands
from rlmesh_ray.errors import (
    CapacityError,
    CodecError,
    ConfigurationError,
    EndpointClosedError,
    EndpointLostError,
    LocalProtocolError,
    RemoteEnvError,
)
from rlmesh_ray.protocol import capabilities
from rlmesh_ray.wire import lane_calls_v1 as wire
from rlmesh_ray.wire.lane_calls_v1 import CallFailed, LaneCall
from tests.loopback.client_internals import (
    endpoints_give_up_after,
    env_client,
    join_stream,
    vanish,
)
from tests.loopback.ports import plain_channel
from tests.loopback.test_cli import started

ALLOWED = (
    "set_task",
    "task",
    "steps",
    "fail",
    "die",
    "hang",
    "hoard",
    "missing",
    "np_random",
    "spoil",
    "set_wrapper_attr",
)


class Tasked(gymnasium.Env[Any, Any]):
    """Observes its task. An action other than 0 waits until the test opens the other end."""

    observation_space = spaces.Discrete(100)
    action_space = spaces.Discrete(2)

    def __init__(self, pipe: str = "") -> None:
        self.task = 0
        self.steps = 0
        self.pipe = pipe

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        super().reset(seed=seed)
        self.steps = 0
        self.task = int((options or {}).get("task", self.task))
        return self.task, {}

    def step(self, action: Any) -> Any:
        if action:
            self.hang()
        self.steps += 1
        return self.task, 0.0, False, False, {}

    def set_task(self, task: Any) -> dict[str, Any]:
        self.task = int(np.sum(task))
        return {"given": task}

    def fail(self) -> None:
        raise ValueError("no such task")

    def die(self) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    def hang(self) -> None:
        with open(self.pipe) as pipe:
            pipe.read()

    def spoil(self) -> Any:
        """Return an array that can be pickled, but not unpickled."""
        array = np.ma.masked_array([1])
        vars(array).update(_baseclass=int)
        return array

    def hoard(self) -> Any:
        return np.zeros(2**24 // 3 + 99, np.uint8)


@pytest.fixture(scope="module")
def pipe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("calls") / "pipe"
    os.mkfifo(path)
    return path


@pytest.fixture(scope="module")
def endpoint(pipe: Path) -> Iterator[EnvServer]:
    with EnvServer(
        lambda: TimeLimit(Tasked(str(pipe)), 50),
        num_envs=3,
        allow_calls=ALLOWED,
        max_sessions=2,
        token="secret",
        _step_grace_s=0.0,
    ) as server:
        yield server


@pytest.fixture
def client(endpoint: EnvServer) -> Iterator[EnvClient]:
    client = EnvClient(ConnectOptions(endpoint.address, "secret"), step_timeout_s=30.0)
    yield client
    client.close()


def actions(*values: int) -> list[Any]:
    return [np.array(values)]


def tasks(client: EnvClient) -> list[int]:
    """Return what the lanes show in their next observations."""
    return list(client.step(actions(0, 0, 0)).observation[0])


def test_a_call_reaches_every_lane_and_their_episodes_go_on(client: EnvClient) -> None:
    episode_ids = client.reset().episode_ids

    results = client.call("set_task", np.array([3, 4]))

    result = client.step(actions(0, 0, 0))
    assert [list(one["given"]) for one in results] == [[3, 4]] * 3
    assert list(result.observation[0]) == [7, 7, 7]
    assert result.episode_ids == episode_ids


def test_a_call_reaches_the_chosen_lanes(client: EnvClient) -> None:
    client.reset()

    assert client.call("set_task", 5, lanes=[2, 0]) == ({"given": 5}, {"given": 5})
    assert tasks(client) == [5, 0, 5]


def test_a_call_may_come_before_the_first_reset(client: EnvClient) -> None:
    client.call("set_task", 6)

    assert list(client.reset().observation[0]) == [6, 6, 6]


def test_a_call_happens_after_a_step_that_is_in_flight(client: EnvClient, pipe: Path) -> None:
    client.reset()

    with ThreadPoolExecutor(1) as pool:
        pending = client.send_step(actions(1, 0, 0))
        calling = pool.submit(client.call, "steps")
        with open(pipe, "w"):  # returns when the environment is in its step
            was_done = calling.done()

    assert not was_done
    assert calling.result() == (1, 1, 1)
    assert list(client.receive_step(pending).rewards) == [0.0] * 3


def test_a_call_does_not_overtake_a_step_that_is_still_on_its_way(
    endpoint: EnvServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    client = EnvClient(ConnectOptions(endpoint.address, "secret"), transport="grpc")
    client.reset()
    stream = join_stream(client)
    send = stream.send
    on_its_way: list[bytes] = []
    monkeypatch.setattr(stream, "send", on_its_way.append)
    begun = threading.Event()

    def call() -> Any:
        begun.set()
        return client.call("steps")

    with ThreadPoolExecutor(1) as pool:
        pending = client.send_step(actions(0, 0, 0))
        calling = pool.submit(call)
        begun.wait()
        raw_call(client, LaneCall("task"))  # meanwhile the other could overtake
        send(on_its_way[0])

    assert calling.result() == (1, 1, 1)
    client.receive_step(pending)


def test_a_call_needs_the_answer_to_the_first_request(client: EnvClient) -> None:
    pending = client.send_reset()

    with pytest.raises(LocalProtocolError, match="receive the answer to the first request"):
        client.call("task")

    client.receive_reset(pending)
    assert client.call("task") == (0, 0, 0)


def test_what_raises_leaves_the_session_usable(client: EnvClient) -> None:
    episode_ids = client.reset().episode_ids

    with pytest.raises(RemoteEnvError, match="ValueError: no such task") as caught:
        client.call("fail")

    assert caught.value.is_recoverable
    assert "in fail" in caught.value.debug_info
    assert client.step(actions(0, 0, 0)).episode_ids == episode_ids


@pytest.mark.parametrize(
    ("name", "arguments", "lanes", "reason"),
    [
        ("missing", (), (), "AttributeError: .*missing"),
        ("task", (1,), (), "TypeError: 'int' object is not callable"),
        ("set_task", (), (), "TypeError: .* missing 1 required positional argument"),
        ("set_task", ({"level": 1},), (), "TypeError: .*dict"),
        ("hoard", (), (), "it was called, but its result is larger than 16 MiB"),
        ("task", (), (3,), r"lanes \[3\] are not all different and in \[0, 3\)"),
        ("task", (), (1, 1), r"lanes \[1, 1\] are not all different"),
    ],
)
def test_a_wrong_call_is_answered_and_forgiven(
    client: EnvClient, name: str, arguments: Any, lanes: Any, reason: str
) -> None:
    client.reset()

    with pytest.raises(RemoteEnvError, match=reason):
        client.call(name, *arguments, lanes=lanes)

    assert tasks(client) == [0, 0, 0]


def test_what_is_no_data_comes_back_as_text(client: EnvClient) -> None:
    episode_ids = client.reset(seeds=[1, 2, 3]).episode_ids

    results = client.call("np_random")

    assert [text.partition("(")[0] for text in results] == ["Generator"] * 3
    assert client.step(actions(0, 0, 0)).episode_ids == episode_ids


def test_a_reply_that_the_endpoint_cannot_read_is_reported_and_forgiven(
    client: EnvClient, caplog: pytest.LogCaptureFixture
) -> None:
    episode_ids = client.reset().episode_ids

    with pytest.raises(RemoteEnvError, match=r"the endpoint cannot read .*: TypeError") as caught:
        client.call("spoil")

    assert caught.value.is_recoverable
    assert client.step(actions(0, 0, 0)).episode_ids == episode_ids
    assert "cannot read what the environment's process sent: TypeError" in caplog.text


def test_arguments_that_cannot_travel_are_not_sent(client: EnvClient) -> None:
    with pytest.raises(CodecError, match="argument 0, of type set, cannot be sent"):
        client.call("set_task", {1})


def test_what_is_not_allowed_is_not_sent(client: EnvClient) -> None:
    with pytest.raises(ConfigurationError, match=r"only set_task,task.*--allow-call reseed"):
        client.call("reseed", 1)


def raw_call(client: EnvClient, call: LaneCall, *metadata: tuple[str, str]) -> Any:
    """Call without the checks that a client of ours makes."""
    shown = metadata or client.metadata
    with plain_channel(client.address) as channel:
        method = channel.unary_unary(wire.CALL)
        return wire.parse_response(method(wire.pack_call(call), metadata=shown, timeout=20.0))


@pytest.mark.parametrize("name", ["unwrapped", "__class__", "reset", "", "a" * 100_000])
def test_no_client_gets_round_the_list(client: EnvClient, name: str) -> None:
    client.reset()

    answer = raw_call(client, LaneCall(name))

    assert isinstance(answer, CallFailed)
    assert "may not be called; the operator of this endpoint allows set_task" in answer.message
    assert len(answer.message) < 400


def test_no_client_reaches_the_lanes_of_another(client: EnvClient) -> None:
    client.reset()
    token = client.metadata[0]

    for stranger in ("", "0" * 32):
        with pytest.raises(grpc.RpcError) as caught:
            raw_call(client, LaneCall("task"), token, ("rlmesh-ray-session", stranger))
        assert caught.value.code() is grpc.StatusCode.NOT_FOUND


def test_a_call_wants_the_token(client: EnvClient) -> None:
    client.reset()
    session = client.metadata[1]

    for shown in ((), (("authorization", "Bearer other"),)):
        with pytest.raises(grpc.RpcError) as caught:
            raw_call(client, LaneCall("task"), session, *shown)
        assert caught.value.code() is grpc.StatusCode.UNAUTHENTICATED
    assert client.call("task") == (0, 0, 0)  # with the token


def test_garbage_is_refused_and_costs_nothing(client: EnvClient) -> None:
    client.reset()

    with plain_channel(client.address) as channel:
        method = channel.unary_unary(wire.CALL)
        with pytest.raises(grpc.RpcError) as caught:
            method(b"\xff", metadata=client.metadata, timeout=20.0)

    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert tasks(client) == [0, 0, 0]


def test_a_closed_session_is_not_called(client: EnvClient) -> None:
    client.reset()
    another = EnvClient(ConnectOptions(client.address, "secret"))
    another.reset()
    shown = another.metadata
    another.close()

    with pytest.raises(EndpointClosedError):
        another.call("task")
    with pytest.raises(grpc.RpcError) as caught:
        raw_call(client, LaneCall("task"), *shown)
    assert caught.value.code() is grpc.StatusCode.NOT_FOUND


@pytest.mark.slow
def test_the_first_call_reports_a_full_endpoint(endpoint: EnvServer, client: EnvClient) -> None:
    client.reset()
    other, third = (EnvClient(ConnectOptions(client.address, "secret")) for _ in range(2))
    other.reset()

    with pytest.raises(CapacityError, match="all 2 sessions are taken"):
        third.call("task")

    third.close()
    other.close()


def test_a_crash_costs_the_episodes_and_a_reset_starts_over(client: EnvClient) -> None:
    client.call("set_task", 9)
    client.reset()

    with pytest.raises(RemoteEnvError, match="SIGKILL") as crash:
        client.call("die")
    with pytest.raises(RemoteEnvError) as again:
        client.call("task")
    with pytest.raises(RemoteEnvError) as step:
        client.step(actions(0, 0, 0))

    assert {one.value.code for one in (crash, again, step)} == {"CRASHED"}
    assert len(step.value.interrupted_episodes) == 3
    assert list(client.reset().observation[0]) == [0, 0, 0]  # a new environment, without a task


def test_a_call_that_hangs_is_answered_and_a_reset_starts_over(
    client: EnvClient,
) -> None:
    client.call("task")
    client.reset()

    with endpoints_give_up_after(450), pytest.raises(RemoteEnvError, match="no result within"):
        client.call("hang")
    with pytest.raises(RemoteEnvError) as caught:
        client.step(actions(0, 0, 0))

    assert caught.value.code == "CRASHED"  # its worker was killed
    assert list(client.reset().observation[0]) == [0, 0, 0]


@pytest.mark.parametrize("transport", ["grpc", "shared_memory"])
def test_a_call_that_returns_too_late_costs_no_episode(pipe: Path, transport: str) -> None:
    with (
        EnvServer(lambda: Tasked(str(pipe)), allow_calls=ALLOWED) as server,
        contextlib.closing(
            EnvClient(ConnectOptions(server.address), step_timeout_s=30.0, transport=transport)
        ) as client,
    ):
        episode_ids = client.reset().episode_ids
        with (
            endpoints_give_up_after(450),
            pytest.raises(RemoteEnvError, match="no result within"),
        ):
            client.call("hang")
        pipe.write_text("")
        assert client.call("steps") == (0,)  # it waits until the late one has returned

        assert client.step(actions(0)).episode_ids == episode_ids
        assert client.call("steps") == (1,)
        assert client.direct_connector.transport == transport


def test_options_reach_the_lanes_of_a_partial_reset(endpoint: EnvServer) -> None:
    env = RemoteVectorEnv(endpoint.address, token="secret")
    env.reset(options={"task": 1})

    for lane, task in ((0, 10), (2, 30)):
        mask = np.arange(3) == lane
        observation, _ = env.reset(options={"reset_mask": mask, "task": task})

    assert list(observation) == [10, 1, 30]
    assert env.call("task") == env.get_attr("task") == (10, 1, 30)
    assert env.call("steps") == (0, 0, 0)
    env.close()


def test_a_session_may_end_during_a_call(endpoint: EnvServer, pipe: Path) -> None:
    client = EnvClient(ConnectOptions(endpoint.address, "secret"))
    client.reset()
    with ThreadPoolExecutor(1) as pool:
        calling = pool.submit(client.call, "hang")
        with open(pipe, "w"):
            vanish(client)
            with pytest.raises(EndpointLostError, match="not open any more"):
                calling.result(20.0)
    client.close()

    following = EnvClient(ConnectOptions(endpoint.address, "secret"))
    assert list(following.reset().observation[0]) == [0, 0, 0]
    following.close()


def test_nothing_is_allowed_by_default() -> None:
    with EnvServer("CartPole-v1") as server:
        answer = shake_hands(ConnectOptions(server.address))
        env = RemoteEnv(server.address)
        env.reset()
        with pytest.raises(
            ConfigurationError,
            match=r"calls? nothing in its environments.*allow_calls=\('gravity',\)",
        ):
            env.call("gravity")
        with pytest.raises(grpc.RpcError) as caught:
            raw_call(env_client(env), LaneCall("gravity"))
        env.close()

    assert capabilities.LANE_CALLS not in answer.capabilities
    assert caught.value.code() is grpc.StatusCode.UNIMPLEMENTED


def test_a_vector_environment_calls_the_chosen_lanes(endpoint: EnvServer) -> None:
    env = RemoteVectorEnv(endpoint.address, token="secret")
    env.call("set_task", 9, lanes=[1])
    tasks_of_lanes = env.call("task")
    env.close()

    assert tasks_of_lanes == (0, 9, 0)


def test_attributes_are_set_as_in_gymnasiums_vectors(endpoint: EnvServer) -> None:
    local: Any = SyncVectorEnv([Tasked] * 3)
    remote = RemoteVectorEnv(endpoint.address, token="secret")
    for env in (remote, local):
        env.set_attr("task", 7)
        assert env.get_attr("task") == (7, 7, 7)
        env.set_attr("task", (1, 2, 3))
        assert env.get_attr("task") == (1, 2, 3)

    for values, kind, message in (
        ([4, 5], ConfigurationError, r"task has 2 values; give one per lane \(3\)"),
        ([4, 5, {6}], CodecError, "argument 1"),
    ):
        with pytest.raises(kind, match=message):
            remote.set_attr("task", values)
    assert remote.get_attr("task") == (1, 2, 3)
    remote.close()


def test_the_permission_that_setting_an_attribute_takes_is_named() -> None:
    with (
        EnvServer("CartPole-v1", allow_calls=("gravity",)) as server,
        contextlib.closing(RemoteVectorEnv(server.address)) as env,
        pytest.raises(ConfigurationError, match="serve-env --allow-call set_wrapper_attr"),
    ):
        env.set_attr("gravity", 1.6)


@pytest.mark.slow
def test_an_environment_of_ones_own_width_is_called_as_a_whole() -> None:
    def two() -> SyncVectorEnv:
        return SyncVectorEnv([Tasked, Tasked])

    with EnvServer(two, allow_calls=("set_task", "task", "set_wrapper_attr")) as server:
        env = RemoteVectorEnv(server.address)
        env.call("set_task", 4)
        tasks_of_lanes = env.get_attr("task")
        env.set_attr("task", 5)
        with pytest.raises(RemoteEnvError, match="give set_attr one value for all lanes"):
            env.set_attr("task", [6, 7])
        set_tasks = env.get_attr("task")
        env.close()

    assert (tasks_of_lanes, set_tasks) == ((4, 4), (5, 5))


def test_private_names_are_refused_before_anything_starts() -> None:
    with pytest.raises(ConfigurationError, match="not a public attribute"):
        EnvServer("CartPole-v1", allow_calls=("_np_random",))


@pytest.mark.slow
def test_serve_env_lets_clients_call_what_its_command_line_names(tmp_path: Path) -> None:
    arguments = ["CartPole-v1", "--num-envs", "2", "--allow-call", "gravity", "--allow-call", "tau"]
    with started("serve-env", *arguments, folder=tmp_path) as (_, serving):
        env = RemoteVectorEnv(serving["address"])
        values = env.get_attr("gravity"), env.get_attr("tau")
        env.close()

    assert serving["allow_calls"] == ["gravity", "tau"]
    assert values == ((9.8, 9.8), (0.02, 0.02))
