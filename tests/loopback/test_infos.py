"""The session goes on with all infos of an environment."""

import contextlib
import enum
import threading
from collections import OrderedDict, namedtuple
from collections.abc import Callable, Iterator
from typing import Any

import gymnasium
import numpy as np
import pytest
from gymnasium import spaces

from rlmesh_ray import EnvServer, RemoteEnv, RemoteVectorEnv
from rlmesh_ray.testing.equality import assert_identical


class Unprintable:
    def __repr__(self) -> str:
        raise RuntimeError("no text")


class Unpicklable:
    def __init__(self) -> None:
        self.lock = threading.Lock()

    def __repr__(self) -> str:
        return "a lock of mine"


class Color(enum.Enum):
    RED = 1


Point = namedtuple("Point", "x y")


def _itself_in_a_list() -> Any:
    own: list[Any] = [1]
    own.append(own)
    return own


def _itself_in_a_dict() -> Any:
    own: dict[str, Any] = {"n": 1}
    own["self"] = own
    return own


def _itself_in_an_array() -> Any:
    own = np.empty(1, object)
    own[0] = own
    return own


def _nested(depth: int, *, twice: bool = False) -> Any:
    value: Any = "x"
    for _ in range(depth):
        value = [value, value] if twice else {"d": value}
    return value


PLAIN: dict[str, Any] = {
    "none": None,
    "flag": True,
    "integer": -3,
    "float": 0.5,
    "nan": float("nan"),
    "infinity": float("inf"),
    "text": "ä漢🎲\0",
    "bytes": b"\xff\0",
    "empty": {},
    "nested": {"a": {"b": [1, {"c": None}]}},
    "array": np.arange(6, dtype=np.int16).reshape(2, 3),
    "flags": np.array([True, False]),
    "complex": np.array([1j]),
    "no elements": np.zeros((2, 0), np.float16),
}
"""Comes back as it is."""

ODD: dict[str, tuple[Callable[[], Any], Any]] = {
    "numpy float": (lambda: np.float32(0.5), 0.5),
    "numpy integer": (lambda: np.uint8(7), 7),
    "numpy flag": (lambda: np.bool_(True), True),
    "numpy text": (lambda: np.str_("x"), "x"),
    "date": (lambda: np.datetime64("2026-06-01"), "2026-06-01"),
    "big integer": (lambda: 2**70, str(2**70)),
    "huge integer": (lambda: 10**5000, "<int>"),
    "tuple": (lambda: (1, (2,)), [1, [2]]),
    "named tuple": (lambda: Point(1, 2), [1, 2]),
    "ordered dict": (lambda: OrderedDict(b=1, a=2), {"a": 2, "b": 1}),
    "set": (lambda: {3}, "{3}"),
    "class": (lambda: Color, "<enum 'Color'>"),
    "member": (lambda: Color.RED, "<Color.RED: 1>"),
    "unpicklable": (Unpicklable, "a lock of mine"),
    "unprintable": (Unprintable, "<Unprintable>"),
    "keys": (lambda: {1: "a", None: "b", (1, 2): "c"}, {"(1, 2)": "c", "1": "a", "None": "b"}),
    "surrogate": (lambda: "a\udc80", "a?"),
    "surrogate key": (lambda: {"a\udc80": 1}, {"a?": 1}),
    "itself in a list": (_itself_in_a_list, [1, "[1, [1, [...]]]"]),
    "itself in a dict": (
        _itself_in_a_dict,
        {"n": 1, "self": "{'n': 1, 'self': {'n': 1, 'self': {...}}}"},
    ),
}
"""Arrives in another form."""

ANY: dict[str, Callable[[], Any]] = {
    "itself in an array": _itself_in_an_array,
    "generator": lambda: (number for number in range(3)),
    "function": lambda: _nested,
    "module": lambda: threading,
    "deep": lambda: _nested(90),
    "deeper than Python counts": lambda: _nested(100_000),
    "twice as large with each level": lambda: _nested(60, twice=True),
    "megabytes of text": lambda: "x" * 2**22,
    "more text than fits into a frame": lambda: "x" * (2**26 + 2**20),
    "structured array": lambda: np.zeros(2, "i4,f4"),
    "array of texts": lambda: np.array(["a", "bc"]),
    "array of dates": lambda: np.array(["2026-06-01", "NaT"], "M8[D]"),
    "big-endian array": lambda: np.arange(3, dtype=">i4"),
    "long double": lambda: np.longdouble("1e4000"),
}
"""Arrives in some form, or not at all."""


class OddInfos(gymnasium.Env[Any, Any]):
    """Gives the infos that the reset's options name."""

    def __init__(self) -> None:
        self.observation_space = spaces.Discrete(2)
        self.action_space = spaces.Discrete(2)
        self._name = ""

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        self._name = (options or {}).get("name", "")
        return 0, self._infos()

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        return 1, 0.0, bool(action), False, self._infos()

    def _infos(self) -> dict[str, Any]:
        if self._name in PLAIN:
            return {"value": PLAIN[self._name], "last": 1}
        if self._name in ODD:
            return {"value": ODD[self._name][0](), "last": 1}
        return {"value": ANY[self._name](), "last": 1} if self._name else {}


Sessions = list[RemoteEnv]


@pytest.fixture(scope="module")
def sessions() -> Iterator[Sessions]:
    """Yield a session with each transport; tests share them, and no infos end them."""
    with EnvServer(OddInfos) as server, contextlib.ExitStack() as opened:
        yield [
            opened.enter_context(RemoteEnv(server.address, transport=transport))
            for transport in ("grpc", "shared_memory", "tcp")
        ]


@pytest.fixture(scope="module")
def lanes() -> Iterator[RemoteVectorEnv]:
    """Yield a session with two lanes."""
    with EnvServer(OddInfos, num_envs=2) as server:
        envs = RemoteVectorEnv(server.address)
        yield envs
        envs.close()


def _all_infos(sessions: Sessions, name: str) -> list[dict[str, Any]]:
    """Return what a reset, a step and the end of an episode tell; the session must go on."""
    infos = []
    for env in sessions:
        _, first = env.reset(options={"name": name})
        infos += [first, env.step(0)[-1], env.step(1)[-1]]
        env.reset(options={"name": ""})
        assert env.step(0)[0] == 1
    return infos


@pytest.mark.parametrize("name", PLAIN)
def test_what_the_wire_can_express_comes_back_as_it_is(sessions: Sessions, name: str) -> None:
    for infos in _all_infos(sessions, name):
        assert_identical(infos["value"], PLAIN[name])


@pytest.mark.parametrize("name", ODD)
def test_what_it_cannot_express_becomes_something_that_it_can(
    sessions: Sessions, name: str
) -> None:
    for infos in _all_infos(sessions, name):
        assert_identical(infos["value"], ODD[name][1])


@pytest.mark.parametrize("name", ANY)
def test_nothing_in_infos_ends_a_session_or_hides_what_stands_beside_it(
    sessions: Sessions, name: str
) -> None:
    for infos in _all_infos(sessions, name):
        assert infos["last"] == 1


@pytest.mark.parametrize("name", [*PLAIN, *ODD, *ANY])
def test_nothing_in_the_infos_of_lanes_ends_a_session(lanes: RemoteVectorEnv, name: str) -> None:
    _, first = lanes.reset(options={"name": name})
    ended = lanes.step(np.array([0, 1]))[-1]
    lanes.reset(options={"name": ""})
    observation = lanes.step(np.array([0, 0]))[0]

    assert_identical(first["last"], np.array([1, 1]))
    assert_identical(ended["last"], np.array([1, 1]))
    assert observation.tolist() == [1, 1]
