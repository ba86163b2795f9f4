"""dm_env_rpc's own 40 compliance tests, against our endpoint, for four environments."""

import functools
from collections.abc import Callable, Iterator
from typing import Any, ClassVar

import gymnasium
import numpy as np
import pytest
from dm_env_rpc.v1 import connection, tensor_utils
from dm_env_rpc.v1 import dm_env_rpc_pb2 as pb
from dm_env_rpc.v1.compliance import CreateDestroyWorld, JoinLeaveWorld, Reset, ResetWorld, Step
from gymnasium import spaces

from rlmesh_ray import EnvServer
from rlmesh_ray.testing.envs import EchoEnv
from tests.loopback.ports import plain_channel

# The tests themselves put a DOUBLE's least value into a FLOAT, to send what must be refused.
pytestmark = pytest.mark.filterwarnings("ignore:overflow encountered in cast:RuntimeWarning")

_EVERY_KIND = spaces.Dict(
    {
        "arm": spaces.Dict({"pose": spaces.Box(-1.0, 1.0, (2, 3), np.float32)}),
        "bounds": spaces.Box(np.array([-1, 0]), np.array([3, 9]), dtype=np.int16),
        "choice": spaces.Discrete(5, start=-2),
        "many": spaces.MultiDiscrete([3, 4]),
        "flags": spaces.MultiBinary(3),
        "switch": spaces.Box(0, 1, (2,), np.bool_),  # type: ignore[arg-type]
        "free": spaces.Box(-np.inf, np.inf, (2,), np.float64),
        "pixels": spaces.Box(0, 255, (2, 2), np.uint8),
        "level": spaces.Box(0, 255, (), np.uint8),
        "word": spaces.Text(4, min_length=0),
        "pair": spaces.Tuple((spaces.Discrete(2), spaces.Box(-1.0, 1.0, (), np.float16))),
    }
)


def _every_kind() -> gymnasium.Env[Any, Any]:
    return EchoEnv(_EVERY_KIND, max_length=50)


def _pair() -> gymnasium.Env[Any, Any]:
    return EchoEnv(spaces.Box(-1.0, 1.0, (3,), np.float32), max_length=50)


class _Chase:
    """Two agents with different spaces; ends after twenty steps."""

    possible_agents = ("cat", "mouse")

    def __init__(self) -> None:
        self._spaces: dict[str, gymnasium.Space[Any]] = {
            "cat": spaces.Box(-1.0, 1.0, (2,), np.float32),
            "mouse": spaces.Dict({"run": spaces.Discrete(4), "squeak": spaces.MultiBinary(2)}),
        }
        self.observation_spaces = self.action_spaces = self._spaces
        for space in self._spaces.values():
            space.seed(0)
        self._count = 0

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, Any]:
        self._count = 0
        return self._observations(), {}

    def step(self, actions: dict[str, Any], /) -> tuple[Any, ...]:
        self._count += 1
        is_over = self._count >= 20
        rewards = {"cat": 1.0, "mouse": -1.0}
        return (
            self._observations(),
            rewards,
            {"__all__": is_over},
            {"__all__": False},
            {},
        )

    def _observations(self) -> dict[str, Any]:
        return {agent: space.sample() for agent, space in self._spaces.items()}

    def close(self) -> None:
        """Nothing to do."""


SERVERS: dict[str, Callable[[], EnvServer]] = {
    "Simple": lambda: EnvServer("CartPole-v1", max_sessions=1),
    "Dict": lambda: EnvServer(_every_kind),
    "MultiWorld": lambda: EnvServer(_pair, num_envs=2),
    "MultiAgent": lambda: EnvServer(_Chase),
}


SLOW = ("Simple", "MultiWorld")


_running: list[EnvServer] = []


@functools.cache
def started(name: str) -> EnvServer:
    server = SERVERS[name]().start()
    _running.append(server)
    return server


@pytest.fixture(scope="module", autouse=True)
def servers_end() -> Iterator[None]:
    yield
    for server in _running:
        server.stop()
    _running.clear()
    started.cache_clear()


class Connected:
    """A connection to the server of an environment, and a world there."""

    server_name: ClassVar[str]
    connection: Any = None
    world_name: str = ""

    def setUp(self) -> None:
        super().setUp()  # type: ignore[misc]
        channel = plain_channel(started(self.server_name).address)
        self._channel = channel
        self.connection = connection.Connection(channel)
        self.world_name = self.connection.send(pb.CreateWorldRequest()).world_name

    def tearDown(self) -> None:
        super().tearDown()  # type: ignore[misc]
        self.connection.send(pb.LeaveWorldRequest())
        self.connection.send(pb.DestroyWorldRequest(world_name=self.world_name))
        self.connection.close()
        self._channel.close()


class Creating:
    """A connection, without a world."""

    server_name: ClassVar[str]
    connection: Any = None

    required_world_settings: ClassVar[dict[str, Any]] = {}
    invalid_world_settings: ClassVar[dict[str, Any]] = {
        "levelName": tensor_utils.pack_tensor(1),
        "seed": tensor_utils.pack_tensor(-1),
        "missing_actions": tensor_utils.pack_tensor("unknown"),
    }

    @property
    def has_multiple_world_support(self) -> bool:
        return self.server_name != "Simple"

    def setUp(self) -> None:
        super().setUp()  # type: ignore[misc]
        self._channel = plain_channel(started(self.server_name).address)
        self.connection = connection.Connection(self._channel)

    def tearDown(self) -> None:
        super().tearDown()  # type: ignore[misc]
        self.connection.close()
        self._channel.close()


class Joining(Connected):
    """No agent has joined yet."""

    invalid_join_settings: ClassVar[dict[str, Any]] = {
        "class": tensor_utils.pack_tensor("wizard"),
        "lane": tensor_utils.pack_tensor(77),
        "agent": tensor_utils.pack_tensor("dog"),
    }


class Joined(Connected):
    """The connection is joined, unless the test does it."""

    specs: Any = None

    def setUp(self) -> None:
        super().setUp()
        self.specs = self.join_world()

    def join_world(self) -> Any:
        return self.connection.send(pb.JoinWorldRequest(world_name=self.world_name)).specs


class Resetting(Connected):
    """The test joins."""

    def join_world(self) -> Any:
        return self.connection.send(pb.JoinWorldRequest(world_name=self.world_name)).specs


# A class for each environment and each of their five classes of tests.
for _name in SERVERS:
    for _own, _theirs in (
        (Creating, CreateDestroyWorld),
        (Joining, JoinLeaveWorld),
        (Joined, Step),
        (Resetting, Reset),
        (Connected, ResetWorld),
    ):
        _class = f"Test{_name}{_theirs.__name__}"
        _marks = [pytest.mark.slow] if _name in SLOW else []
        globals()[_class] = type(
            _class, (_own, _theirs), {"server_name": _name, "pytestmark": _marks}
        )


def test_all_forty_tests_of_their_suite_are_known() -> None:
    theirs = (CreateDestroyWorld, JoinLeaveWorld, Step, Reset, ResetWorld)

    assert sum(name.startswith("test_") for each in theirs for name in vars(each)) == 40
