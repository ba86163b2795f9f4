"""The released rlmesh 0.1.0 asks our models: its RemoteModel, in our environments and in its own.

It lives in a virtual environment of its own, which ``make`` builds. Its public clients ask for one
row at a time; grouped requests, which only its platform sends, are made of frames here.
"""

import contextlib
import functools
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import gymnasium
import numpy as np
import pytest

from rlmesh_ray import EnvServer, ModelServer, RemoteModel
from rlmesh_ray.dialects.released.protocol import GroupedPredict, GroupedPredicted
from rlmesh_ray.dialects.released.wire import model as wire
from rlmesh_ray.dialects.released.wire import values
from rlmesh_ray.dialects.released.wire.model import NO_LANE
from rlmesh_ray.models.policy import EpisodeStates, Rows
from rlmesh_ray.protocol.messages import (
    ConfigureRoute,
    ModelErrorCode,
    ModelFailed,
    Predict,
    PredictContext,
    Predicted,
    PredictSlot,
)
from rlmesh_ray.spaces.contract import AutoresetMode, EnvContract
from rlmesh_ray.spaces.gym_conversion import from_gymnasium
from tests.loopback.eventually import eventually
from tests.loopback.ports import plain_channel
from tests.loopback.raw_join import RawJoin
from tests.peers.rlmesh_released.made import make
from tests.peers.rlmesh_released.peer import TIMEOUT_S, drive, driving, serving
from tests.peers.rlmesh_released.torques import HORIZON, torques
from tests.peers.test_released_clients_on_our_endpoints import cartpole_episodes

pytestmark = pytest.mark.slow

_JOIN = "/rlmesh.model.v1.ModelService/Join"


def follow_the_pole(observations: Any) -> Any:
    """Push CartPole's cart towards where the pole falls, as Balance does."""
    return (observations[:, 2] + observations[:, 3] > 0).astype(np.int64)


class Counting:
    """Acts by how often it was asked in the running episode, as Counter does."""

    def __init__(self) -> None:
        self.states: EpisodeStates[list[int]] = EpisodeStates(lambda: [0])

    def check_contract(self, contract: EnvContract) -> None:
        """Take any."""

    def predict(self, contract: EnvContract, rows: Rows) -> Any:
        counts = self.states.of(rows)
        for count in counts:
            count[0] += 1
        return np.array([count[0] % 2 for count in counts])

    def forget(self, route_key: str, env_index: int | None) -> None:
        self.states.forget(route_key, env_index)


class Gate:
    """Follows the pole; when two routes have been seen, it waits until it may go on.

    It does so with the row of one of them: that of the other one shall come behind it.
    """

    def __init__(self) -> None:
        self.is_reached = threading.Event()
        self.may_go_on = threading.Event()
        self.rows_after: list[int] = []
        self._routes: set[str] = set()

    def check_contract(self, contract: EnvContract) -> None:
        """Take any."""

    def predict(self, contract: EnvContract, rows: Rows) -> Any:
        """Return one action a row."""
        if self.is_reached.is_set():
            self.rows_after.append(rows.num_rows)
        self._routes.update(route.route_key for route in rows.routes)
        if len(self._routes) == 2 and rows.num_rows == 1:
            self.is_reached.set()
            self.may_go_on.wait(TIMEOUT_S)
        return follow_the_pole(rows.observations)

    def forget(self, route_key: str, env_index: int | None) -> None:
        """Forget what is not remembered."""


@pytest.fixture(scope="module")
def cartpole() -> Iterator[str]:
    with EnvServer("CartPole-v1") as server:
        yield server.address


def run(model: str, env: str, **options: Any) -> Any:
    """Let its RemoteModel act in an environment."""
    return drive("drive_model", "run_remote", model=model, env=env, **options)


def test_our_policy_acts_for_its_runtime_as_it_does_in_process(cartpole: str) -> None:
    with ModelServer(follow_the_pole) as server:
        reported = run(server.address, cartpole, seeds=[0, 1])

    assert reported["episodes"] == cartpole_episodes([0, 1])


def test_our_policy_acts_in_an_environment_that_its_own_server_has() -> None:
    with (
        ModelServer(follow_the_pole) as server,
        serving("serve_env", "CartPole-v1", "single", 1) as env,
    ):
        reported = run(server.address, env, seeds=[0])

    assert reported["episodes"] == cartpole_episodes([0])


def test_an_execution_horizon_does_not_change_what_our_policy_does(cartpole: str) -> None:
    with ModelServer(follow_the_pole) as server:
        reported = run(server.address, cartpole, seeds=[0], execution_horizon=4)

    assert reported["episodes"] == cartpole_episodes([0])


def test_our_policy_remembers_as_long_as_its_episodes_last(cartpole: str) -> None:
    policy = Counting()
    with ModelServer(policy) as server:
        ours = drive("drive_model", "by_hand", model=server.address, env=cartpole)
        assert eventually(lambda: not len(policy.states))
    with serving("serve_model", "Counter") as address:
        theirs = drive("drive_model", "by_hand", model=address, env=cartpole)

    assert ours == theirs
    assert ours == {"edition": "2026.06", "actions": [1, 0, 1, 1, 0, 1, 0, 1, 0]}


def test_it_gets_the_error_and_the_server_goes_on(cartpole: str) -> None:
    def moody(observations: Any) -> Any:
        if abs(observations[0, 0]) < 1e-9:
            raise RuntimeError("no idea")
        return follow_the_pole(observations)

    with (
        ModelServer(moody) as server,
        EnvServer(functools.partial(make, "Trouble")) as trouble,
    ):
        failed = run(server.address, trouble.address)
        reported = run(server.address, cartpole, seeds=[0])

    assert failed["error"] == "RuntimeError"
    assert reported["episodes"] == cartpole_episodes([0])


@pytest.mark.parametrize(
    ("policy", "text"),
    [
        (lambda observations: 1 / 0, "division by zero"),
        (lambda observations: np.full(len(observations), 7), "7"),
        (lambda observations: np.zeros((len(observations), 3)), "shape"),
    ],
)
def test_it_gets_the_failure_of_our_policy(cartpole: str, policy: Any, text: str) -> None:
    with ModelServer(policy) as server:
        reported = run(server.address, cartpole)

    assert reported["error"] == "RuntimeError"
    assert text in reported["text"]


def test_its_clients_share_batches_with_each_other_and_with_ours(cartpole: str) -> None:
    gate = Gate()
    with (
        ModelServer(gate) as server,
        RemoteModel(server.address) as ours,
        ThreadPoolExecutor(1) as pool,
        contextlib.ExitStack() as theirs,
    ):
        ours.configure_route(gymnasium.make("CartPole-v1"))
        for _ in range(2):
            # Episodes without a waiting client: both act when the gate is reached.
            running = {"model": server.address, "env": cartpole, "episodes": 10_000}
            theirs.enter_context(driving("drive_model", "run_remote", **running))
        try:
            assert gate.is_reached.wait(TIMEOUT_S)
            asked = pool.submit(ours.predict, np.ones((1, 4), np.float32))
            # One of theirs is at the gate; the other one waits behind it, and ours.
            assert eventually(lambda: server.statistics().items_waiting == 2, TIMEOUT_S)
        finally:
            gate.may_go_on.set()

        assert asked.result(TIMEOUT_S).tolist() == [1]
        assert gate.rows_after[0] == 2


def test_a_client_of_its_that_vanishes_leaves_nothing_behind(cartpole: str) -> None:
    policy = Counting()
    with ModelServer(policy) as server:
        with driving("drive_model", "holds", model=server.address, env=cartpole) as client:
            assert client.stdout is not None
            assert client.stdout.readline() == "ready\n"
            assert len(policy.states) == 1
        assert eventually(lambda: not len(policy.states))


# --- chunks of actions ---------------------------------------------------------------------


@pytest.fixture(scope="module")
def pendulum() -> Iterator[str]:
    with EnvServer("Pendulum-v1", autoreset="disabled") as server:
        yield server.address


def pendulum_rewards(seeds: list[int], execution_horizon: int) -> list[float]:
    """Act in this process: several actions of each chunk, one a step."""
    env = gymnasium.make("Pendulum-v1")
    rewards = []
    for seed in seeds:
        observation, _ = env.reset(seed=seed)
        left: list[Any] = []
        total, has_ended = 0.0, False
        while not has_ended:
            left = left or [*torques(observation[np.newaxis])[0][:execution_horizon]]
            observation, reward, terminated, truncated, _ = env.step(left.pop(0))
            total, has_ended = total + float(reward), terminated or truncated
        rewards.append(total)
    return rewards


def rewards_of(reported: Any) -> list[float]:
    return [episode["reward"] for episode in reported["episodes"]]


@pytest.mark.parametrize(
    "execution_horizon",
    [pytest.param(1, marks=pytest.mark.nightly), 3, pytest.param(5, marks=pytest.mark.nightly)],
)
def test_it_replays_the_chunks_of_our_policy_as_those_of_its_own(
    pendulum: str, execution_horizon: int
) -> None:
    settings = {"seeds": [0, 1], "execution_horizon": execution_horizon}
    with ModelServer(torques, horizon=HORIZON) as server:
        ours = run(server.address, pendulum, **settings)
    with serving("serve_model", "Swings") as address:
        theirs = run(address, pendulum, **settings)
    local = drive("drive_model", "run", model="Swings", env=pendulum, **settings)

    expected = pendulum_rewards([0, 1], execution_horizon)
    assert rewards_of(ours) == rewards_of(theirs) == rewards_of(local) == expected


def test_an_endpoint_that_keeps_chunks_acts_as_its_replay_of_whole_chunks(pendulum: str) -> None:
    with ModelServer(torques, horizon=HORIZON, chunk_replay="kept") as server:
        reported = run(server.address, pendulum, seeds=[0, 1])

    assert rewards_of(reported) == pendulum_rewards([0, 1], HORIZON)


def test_it_is_refused_a_longer_horizon_than_our_policy_s_as_than_its_own(pendulum: str) -> None:
    with ModelServer(torques, horizon=HORIZON) as server:
        ours = run(server.address, pendulum, execution_horizon=6)
    with serving("serve_model", "Swings") as address:
        theirs = run(address, pendulum, execution_horizon=6)

    assert "the policy chooses 5: lower the horizon to 5 or less" in ours["text"]
    assert ours["error"] == theirs["error"]


# --- grouped requests ----------------------------------------------------------------------

CARTPOLE = gymnasium.make("CartPole-v1")
SPEC = EnvContract(
    id="CartPole-v1",
    observation_space=from_gymnasium(CARTPOLE.observation_space),
    action_space=from_gymnasium(CARTPOLE.action_space),
    num_envs=1,
    autoreset_mode=AutoresetMode.DISABLED,
)


def predict(env_id: str, *falls: float) -> Predict:
    """Ask for one row a pole, which falls in the given direction."""
    observations = np.array([[0, 0, fall, 0] for fall in falls], np.float32)
    slots = tuple(PredictSlot(NO_LANE, f"{env_id} {row}", 0, False) for row in range(len(falls)))
    return Predict(
        env_id,
        PredictContext("session", env_id, env_id, slots),
        values.encode_batch(SPEC.observation_space, [observations], len(falls)),
    )


def ask_in_groups(address: str, *groups: Predict) -> list[Any]:
    """Resolve adapters ``a`` and ``b``, ask for all groups at once; return what came of each."""
    with plain_channel(address) as channel:
        stream = RawJoin(channel, _JOIN)
        for env_id in "ab":
            # Its own server works on all requests at once: what needs the adapter has to wait.
            context = PredictContext("session", env_id, env_id)
            stream.ask(wire.pack_request(ConfigureRoute(env_id, context, SPEC)))
        grouped = wire.parse_response(
            stream.ask(wire.pack_request(GroupedPredict("grouped", groups)))
        )
        stream.close()
    assert isinstance(grouped, GroupedPredicted)
    return [
        result_of(group, reported) for group, reported in zip(groups, grouped.results, strict=True)
    ]


def result_of(group: Predict, reported: object) -> Any:
    """Return the actions of one group, or the code of its error."""
    if isinstance(reported, ModelFailed):
        return reported.code
    assert isinstance(reported, Predicted)
    rows = len(group.context.slots)
    (column,) = values.decode_batch(SPEC.action_space, reported.action, rows)
    assert isinstance(column, np.ndarray)
    return column.tolist()


def test_groups_are_answered_as_its_own_server_does_but_in_one_batch() -> None:
    groups = [predict("a", -1, 1), predict("b", 1, 1, -1)]

    with ModelServer(follow_the_pole) as server:
        ours = ask_in_groups(server.address, *groups)
        statistics = server.statistics()
    with serving("serve_model", "Balance") as address:
        theirs = ask_in_groups(address, *groups)

    assert ours == theirs == [[0, 1], [1, 1, 0]]
    assert (statistics.batches, statistics.rows) == (1, 5)


def test_a_group_that_was_not_resolved_is_refused_by_its_name() -> None:
    groups = [predict("a", -1), predict("nobody's", 1)]

    with ModelServer(follow_the_pole) as server:
        ours = ask_in_groups(server.address, *groups)
    with serving("serve_model", "Balance") as address:
        theirs = ask_in_groups(address, *groups)

    assert ours == [[0], ModelErrorCode.NOT_CONFIGURED]
    assert theirs == [[0], ModelErrorCode.INTERNAL]
