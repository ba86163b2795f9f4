"""Calls into the environments that a worker hosts."""

import re
from collections.abc import Callable
from typing import Any

import gymnasium
import numpy as np
import pytest
from gymnasium import spaces
from gymnasium.vector import SyncVectorEnv, VectorEnv

from rlmesh_ray.envs.commands import CallCommand, CallReply
from rlmesh_ray.envs.lane_vector_env import LaneVectorEnv
from rlmesh_ray.envs.vector_host import VectorHost
from rlmesh_ray.envs.worker_channel import MAX_RESULT_BYTES, encode, encode_reply, limit_reply
from rlmesh_ray.errors import ConfigurationError, RlmeshError
from rlmesh_ray.protocol.env_session import Failure, FailureKind
from rlmesh_ray.spaces.validation import ValidationMode
from rlmesh_ray.wire.rlmesh_v1.meta import MAX_NODES


class Tasked(gymnasium.Env[Any, Any]):
    """Remembers what it was called with."""

    observation_space = spaces.Discrete(2)
    action_space = spaces.Discrete(2)

    def __init__(self, lane: int = 0) -> None:
        self.lane = lane
        self.tasks: list[Any] = []

    def set_task(self, task: Any, weight: float = 1.0) -> tuple[int, float]:
        if task == f"bad for {self.lane}":
            raise ValueError("no such task")
        self.tasks.append(task)
        return self.lane, weight


class Bare(gymnasium.Env[Any, Any]):
    """Has nothing to call."""

    observation_space = spaces.Discrete(2)
    action_space = spaces.Discrete(2)


class Careless(Bare):
    """Its method looks for what is not there."""

    def use(self) -> Any:
        return self.forgotten  # type: ignore[attr-defined]


class Wrapped(gymnasium.Wrapper[Any, Any, Any, Any]):
    speed = 3

    def faster(self) -> int:
        self.speed += 1
        return self.speed


def hosted(vector: VectorEnv[Any, Any, Any]) -> VectorHost:
    return VectorHost(vector, ValidationMode.WARN, "a name")


def called(host: VectorHost, name: str, *arguments: object, lanes: tuple[int, ...] = ()) -> Any:
    reply = host.call(CallCommand(name, arguments, lanes))
    assert isinstance(reply, CallReply)
    return reply.results


def three_lanes() -> tuple[list[Tasked], VectorHost]:
    envs = [Tasked(lane) for lane in range(3)]
    return envs, hosted(LaneVectorEnv(envs))


def test_a_method_is_called_in_every_lane() -> None:
    envs, host = three_lanes()

    assert called(host, "set_task", "a", 0.5) == ((0, 0.5), (1, 0.5), (2, 0.5))
    assert [env.tasks for env in envs] == [["a"]] * 3


def test_chosen_lanes_are_called_in_their_order() -> None:
    envs, host = three_lanes()

    assert called(host, "set_task", "a", lanes=(2, 0)) == ((2, 1.0), (0, 1.0))
    assert [env.tasks for env in envs] == [["a"], [], ["a"]]


def test_lanes_do_not_share_what_they_are_given() -> None:
    envs, host = three_lanes()
    called(host, "set_task", {"level": [1]})

    envs[0].tasks[0]["level"].append(2)

    assert envs[1].tasks == [{"level": [1]}]


def test_what_is_no_method_is_read() -> None:
    _, host = three_lanes()

    assert called(host, "lane") == (0, 1, 2)
    with pytest.raises(TypeError, match="not callable"):
        called(host, "lane", 5)


def test_what_raises_leaves_the_lanes_before_it_called() -> None:
    envs, host = three_lanes()

    with pytest.raises(ValueError, match="no such task"):
        called(host, "set_task", "bad for 1")
    assert [env.tasks for env in envs] == [["bad for 1"], [], []]


@pytest.mark.parametrize("is_foreign", [False, True])
@pytest.mark.parametrize("make", [Tasked, lambda: Wrapped(Tasked())])
def test_an_attribute_that_is_not_there_is_named_and_no_failure_of_the_environment(
    make: Callable[[], Any], is_foreign: bool
) -> None:
    vector = SyncVectorEnv([make] * 2) if is_foreign else LaneVectorEnv([make(), make()])

    answer = hosted(vector).call(CallCommand("set_level", (1,)))

    assert isinstance(answer, Failure)
    assert answer.kind is FailureKind.BAD_REQUEST
    assert re.fullmatch("AttributeError: .*'set_level'", answer.message)
    assert not answer.debug_info


def test_where_one_lane_has_no_such_attribute_none_is_called() -> None:
    first = Tasked()
    host = hosted(LaneVectorEnv([first, Bare()]))

    answer = host.call(CallCommand("set_task", (1,)))

    assert isinstance(answer, Failure)
    assert first.tasks == []


@pytest.mark.parametrize("is_foreign", [False, True])
def test_what_a_method_misses_is_its_own_failure(is_foreign: bool) -> None:
    vector = SyncVectorEnv([Careless]) if is_foreign else LaneVectorEnv([Careless()])

    with pytest.raises(AttributeError, match="forgotten"):
        called(hosted(vector), "use")


def test_wrappers_are_called_too() -> None:
    host = hosted(LaneVectorEnv([Wrapped(Tasked())]))

    assert called(host, "faster") == (4,)
    assert called(host, "speed") == (4,)
    assert called(host, "set_task", 1) == ((0, 1.0),)


def test_a_vector_with_a_call_of_its_own_is_called_as_a_whole() -> None:
    host = hosted(SyncVectorEnv([lambda: Tasked(0), lambda: Tasked(1)]))

    assert called(host, "set_task", "a") == ((0, 1.0), (1, 1.0))
    assert called(host, "lane", lanes=(1, 0)) == (1, 0)
    with pytest.raises(ConfigurationError, match="all of its lanes or none; leave lanes out"):
        called(host, "lane", lanes=(1,))


def test_a_vector_without_a_call_says_so() -> None:
    host = hosted(gymnasium.make_vec("CartPole-v1", 2, vectorization_mode="vector_entry_point"))

    with pytest.raises(ConfigurationError, match=r"has no call\(name, \*args\)"):
        called(host, "gravity")


def test_a_vector_that_gives_too_few_results_is_found_out() -> None:
    class Forgetful(SyncVectorEnv):
        def call(self, name: str, *args: Any, **kwargs: Any) -> Any:
            return super().call(name, *args, **kwargs)[:1]

    with pytest.raises(RlmeshError, match="gave 1 results for 2 lanes"):
        called(hosted(Forgetful([Tasked, Tasked])), "lane")


def test_results_that_have_room_go_as_they_are() -> None:
    reply = CallReply((np.zeros(99_999), {"a": [1]}))

    trimmed = limit_reply(reply)

    assert isinstance(trimmed, CallReply)
    np.testing.assert_array_equal(trimmed.results[0], np.zeros(99_999))
    assert trimmed.results[1] == {"a": [1]}


@pytest.mark.parametrize(
    "result",
    [np.zeros(MAX_RESULT_BYTES + 100, np.uint8), [0] * MAX_NODES, "a" * (MAX_RESULT_BYTES + 100)],
    ids=["an array", "a list", "a text"],
)
def test_results_that_are_too_large_are_a_failure(result: Any) -> None:
    frame = encode_reply(CallReply((1, result)))

    failure = limit_reply(CallReply((1, result)))
    assert isinstance(failure, Failure)
    assert failure.kind is FailureKind.BAD_REQUEST
    assert "it was called, but its result is larger than 16 MiB" in failure.message
    assert frame == encode(failure)
