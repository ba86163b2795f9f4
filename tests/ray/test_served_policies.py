"""A model endpoint against Algorithm.evaluate: the same seeds, the same episodes."""

import dataclasses
import queue
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch
from gymnasium.spaces import Box, Dict, Discrete
from gymnasium.vector.utils import concatenate, create_empty_array
from ray.rllib.algorithms.ppo import PPOConfig
from ray.rllib.connectors.env_to_module import FlattenObservations
from ray.rllib.core.rl_module.default_model_config import DefaultModelConfig

from rlmesh_ray.client.model.remote_model import RemoteModel, Slots, contract_of
from rlmesh_ray.evaluation.run import evaluate
from rlmesh_ray.models.loading import load_policy
from rlmesh_ray.models.torch.policy import RecurrentTorchPolicy
from rlmesh_ray.server.env.env_server import EnvServer
from rlmesh_ray.server.model.model_server import ModelServer
from rlmesh_ray.spaces.gym_conversion import from_gymnasium
from rlmesh_ray.testing.envs import EchoEnv
from tests.loopback.client_internals import vanish

pytestmark = pytest.mark.ray
FIRST_SEED = 100


@dataclass
class Episode:
    """What an environment saw of one episode."""

    observations: list[Any] = field(default_factory=list)
    actions: list[Any] = field(default_factory=list)
    rewards: list[float] = field(default_factory=list)


class SeededEpisodes(gym.Wrapper[Any, Any, Any, Any]):
    """Begins episode i with ``FIRST_SEED + i``, with any seed, and writes it all down."""

    def __init__(self, env: gym.Env[Any, Any]) -> None:
        super().__init__(env)
        self.episodes: list[Episode] = []
        made.append(self)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        observation, info = super().reset(seed=FIRST_SEED + len(self.episodes))
        self.episodes.append(Episode([observation]))
        return observation, info

    def step(self, action: Any) -> Any:
        result = super().step(action)
        episode = self.episodes[-1]
        episode.observations.append(result[0])
        episode.actions.append(np.array(action))
        episode.rewards.append(float(result[1]))
        return result


made: list[SeededEpisodes] = []


@dataclass
class Case:
    """One kind of policy."""

    env: Callable[[], gym.Env[Any, Any]]
    model: dict[str, Any] = field(default_factory=dict)
    env_to_module: Callable[..., Any] | None = None
    num_episodes: int = 4
    is_tolerant: bool = False
    """Whether rounding shows in the actions: in continuous ones, where batches differ in size."""


def echo(observations: gym.Space[Any]) -> Callable[[], gym.Env[Any, Any]]:
    """An environment whose future depends on every bit of every action."""

    class Echo(EchoEnv):
        def step(self, action: Any) -> Any:
            # RLlib sends int32 to a Discrete space of int64; the wire keeps to the space.
            return super().step(np.int64(action))

    return lambda: Echo(observations, Discrete(3), max_length=30)


BOX = Box(-1.0, 1.0, (4,), np.float32)
NESTED = Dict({"b": Dict({"d": Box(-1.0, 1.0, (2, 2), np.float32), "c": Discrete(4)}), "a": BOX})
CASES = {
    "discrete": Case(lambda: gym.make("CartPole-v1")),
    "continuous": Case(
        lambda: gym.make("Pendulum-v1", max_episode_steps=25), num_episodes=3, is_tolerant=True
    ),
    "image": Case(
        echo(Box(0.0, 1.0, (12, 12, 3), np.float32)),
        {"conv_filters": [[4, 4, 2], [8, 3, 2]], "head_fcnet_hiddens": [16]},
    ),
    "dict": Case(echo(NESTED), env_to_module=lambda env, spaces, device: FlattenObservations()),
    "recurrent": Case(echo(BOX), {"use_lstm": True, "lstm_cell_size": 8, "max_seq_len": 4}),
    "recurrent and continuous": Case(
        lambda: gym.make("Pendulum-v1", max_episode_steps=25),
        {"use_lstm": True, "lstm_cell_size": 8, "max_seq_len": 4},
        num_episodes=3,
        is_tolerant=True,
    ),
}
# The others are quick variants: of what is remembered, of structure.
SLOW = {"recurrent and continuous", "discrete"}
NIGHTLY = {"continuous", "image"}


@dataclass
class Evaluated:
    """A checkpoint, and what Algorithm.evaluate did with it."""

    case: Case
    checkpoint: Path
    episodes: list[Episode]


def evaluated(case: Case, folder: Path) -> Evaluated:
    env_id = f"seeded/{folder.name}-v0"
    gym.register(env_id, entry_point=lambda **_: SeededEpisodes(case.env()))
    made.clear()
    algorithm = (
        PPOConfig()
        .environment(env_id)
        .env_runners(num_env_runners=0, env_to_module_connector=case.env_to_module)
        .evaluation(
            evaluation_interval=1,
            evaluation_num_env_runners=0,
            evaluation_duration=case.num_episodes,
            evaluation_duration_unit="episodes",
            evaluation_config=PPOConfig.overrides(explore=False),
        )
        .rl_module(model_config=DefaultModelConfig(fcnet_hiddens=[16], **case.model))
        .debugging(seed=1)
        .build_algo()
    )
    # RLlib's initial weights are so small that most greedy actions are the same.
    torch.manual_seed(9)
    with torch.no_grad():
        for parameter in algorithm.learner_group._learner.module["default_policy"].parameters():
            parameter.normal_(std=0.5)
    algorithm.evaluate()
    algorithm.save_to_path(str(folder))
    algorithm.stop()
    (recorder,) = [env for env in made if env.episodes]
    return Evaluated(case, folder, recorder.episodes[: case.num_episodes])


@pytest.fixture(scope="module")
def runs(local_ray: None, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Evaluated]:
    done: dict[str, Evaluated] = {}

    def once(name: str) -> Evaluated:
        if name not in done:
            done[name] = evaluated(CASES[name], tmp_path_factory.mktemp("evaluated"))
        return done[name]

    return once


def played(model: RemoteModel, case: Case, num_lanes: int) -> list[Episode]:
    """Play the case's episodes as an outside program does: lanes run one after the other."""
    envs = [case.env() for _ in range(num_lanes)]
    model.configure_route(dataclasses.replace(contract_of(envs[0]), num_envs=num_lanes))
    space = envs[0].observation_space
    waiting: Iterator[int] = iter(range(case.num_episodes))
    episodes = [Episode() for _ in range(case.num_episodes)]
    running = dict(zip(range(num_lanes), waiting, strict=False))
    for lane, index in running.items():
        episodes[index].observations.append(envs[lane].reset(seed=FIRST_SEED + index)[0])
    while running:
        now = [episodes[index] for index in running.values()]
        slots = Slots(
            env_indices=list(running),
            episode_ids=[f"episode-{index}" for index in running.values()],
            steps=[len(episode.actions) for episode in now],
            resets=[not episode.actions for episode in now],
        )
        observations = [episode.observations[-1] for episode in now]
        batch = concatenate(space, observations, create_empty_array(space, len(now)))
        actions = model.predict(batch, slots=slots)
        for (lane, index), action in zip(list(running.items()), actions, strict=True):
            observation, reward, terminated, truncated, _ = envs[lane].step(action)
            episodes[index].observations.append(observation)
            episodes[index].actions.append(np.array(action))
            episodes[index].rewards.append(float(reward))
            if terminated or truncated:
                del running[lane]
                following = next(waiting, None)
                if following is not None:
                    running[lane] = following
                    first = envs[lane].reset(seed=FIRST_SEED + following)[0]
                    episodes[following].observations.append(first)
    model.close_route()
    return episodes


@pytest.mark.parametrize("num_lanes", [1, 3])
@pytest.mark.parametrize(
    "name",
    [
        pytest.param(
            name,
            marks=[pytest.mark.slow] * (name in SLOW) + [pytest.mark.nightly] * (name in NIGHTLY),
        )
        for name in CASES
    ],
)
def test_a_served_policy_acts_episode_by_episode_as_algorithm_evaluate_does(
    runs: Callable[[str], Evaluated], name: str, num_lanes: int
) -> None:
    run = runs(name)

    with (
        ModelServer(load_policy(str(run.checkpoint), inference="torch")) as server,
        RemoteModel(server.address) as model,
    ):
        episodes = played(model, run.case, num_lanes)

    # One lane at a time, RLlib's batches have one row, as ours have: then every bit is the same.
    tolerance = 1e-4 if run.case.is_tolerant and num_lanes > 1 else 0.0
    for ours, theirs in zip(episodes, run.episodes, strict=True):
        assert len(ours.actions) == len(theirs.actions)
        assert np.allclose(ours.actions, theirs.actions, rtol=0, atol=tolerance)
        assert np.allclose(ours.rewards, theirs.rewards, rtol=0, atol=10 * tolerance)
    actions = np.concatenate([episode.actions for episode in run.episodes])
    assert len(actions) > 20
    assert len(np.unique(actions)) > 1


@pytest.mark.slow
@pytest.mark.parametrize("name", ["discrete", "recurrent", "dict"])
def test_our_evaluate_earns_what_algorithm_evaluate_earns(
    runs: Callable[[str], Evaluated], name: str
) -> None:
    run = runs(name)

    with (
        EnvServer(run.case.env, num_envs=3) as env_server,
        ModelServer(load_policy(str(run.checkpoint), inference="torch")) as server,
    ):
        result = evaluate(
            env_server.address,
            server.address,
            episodes=run.case.num_episodes,
            seed=FIRST_SEED,
        )

    assert result.returns == [sum(episode.rewards) for episode in run.episodes]
    assert result.lengths == [len(episode.actions) for episode in run.episodes]


class Counter(torch.nn.Module):
    """Counts the steps of each lane's episode."""

    def initial_state(self) -> torch.Tensor:
        return torch.zeros((), dtype=torch.int64)

    def forward(self, x: torch.Tensor, steps: torch.Tensor) -> Any:
        return steps, steps + 1


class Forgets(RecurrentTorchPolicy):
    """Says when it has forgotten a route."""

    def __init__(self) -> None:
        super().__init__(Counter())
        self.forgotten: queue.Queue[str] = queue.Queue()

    def forget(self, route_key: str, env_index: int | None) -> None:
        super().forget(route_key, env_index)
        self.forgotten.put(route_key)


def test_neither_closed_routes_nor_vanished_clients_leave_state_behind() -> None:
    policy = Forgets()
    contract = dataclasses.replace(contract_of(gym.make("Pendulum-v1")), num_envs=3)
    contract = dataclasses.replace(contract, action_space=from_gymnasium(Discrete(99)))
    observations = np.zeros((3, 3), np.float32)
    forgotten: set[str] = set()

    with ModelServer(policy) as server:
        for number in range(1, 6):
            closing, vanishing = RemoteModel(server.address), RemoteModel(server.address)
            for model in (closing, vanishing):
                for route in ("a", "b"):
                    model.configure_route(contract, route_id=route)
                    assert model.predict(observations, route_id=route).tolist() == [0, 0, 0]
                    assert model.predict(observations, route_id=route).tolist() == [1, 1, 1]
            vanish(vanishing)
            closing.close_route("a")
            closing.close()
            forgotten |= {policy.forgotten.get(timeout=60) for _ in range(4)}
            vanishing.close()
            assert len(forgotten) == 4 * number, "each route, once"
