"""RLMeshEnvRunner gives RLlib's own episodes: for every space, module, connector and batch mode.

Both runners are built in this process from the same config and seed, and asked for the same
samples. What they return is compared to the bit: observations, actions, rewards, infos, module
outputs, endings, cuts and lookbacks; then their spaces, metrics and states.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, ClassVar

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium.spaces import Box, Dict, Discrete, MultiBinary, MultiDiscrete, Space, Tuple
from ray.rllib.algorithms.algorithm_config import AlgorithmConfig
from ray.rllib.algorithms.dqn import DQNConfig
from ray.rllib.algorithms.ppo import PPOConfig
from ray.rllib.algorithms.sac import SACConfig
from ray.rllib.callbacks.callbacks import RLlibCallback
from ray.rllib.connectors.common import flatten_observations
from ray.rllib.connectors.connector_v2 import ConnectorV2
from ray.rllib.connectors.env_to_module import (
    FlattenObservations,
    MeanStdFilter,
    PrevActionsPrevRewards,
)
from ray.rllib.connectors.env_to_module.frame_stacking import FrameStackingEnvToModule
from ray.rllib.core.columns import Columns
from ray.rllib.core.rl_module.apis import ValueFunctionAPI
from ray.rllib.core.rl_module.default_model_config import DefaultModelConfig
from ray.rllib.core.rl_module.rl_module import RLModuleSpec
from ray.rllib.core.rl_module.torch import TorchRLModule
from ray.rllib.env.single_agent_env_runner import SingleAgentEnvRunner
from ray.rllib.env.single_agent_episode import SingleAgentEpisode

from rlmesh_ray import EnvServer
from rlmesh_ray.rllib import RLMeshEnvRunner, configure
from rlmesh_ray.rllib.runner.session_recovery import LIFETIME_SUMS
from rlmesh_ray.testing.envs import EchoEnv
from rlmesh_ray.testing.equality import assert_identical

pytestmark = [
    pytest.mark.usefixtures("local_ray"),
    # RLlib registers the environment of each runner under one and the same name.
    pytest.mark.filterwarnings("ignore:.*Overriding environment:UserWarning"),
    # What training must not do makes equality provable.
    pytest.mark.filterwarnings(
        "ignore:.*begins every sample:rlmesh_ray.errors.ConfigurationWarning"
    ),
]

LANES = 2
COUNTS = ("num_", "episode_return_", "episode_len_", "weights_seq_no")
VECTOR = Box(-2.0, 3.0, (3,), np.float32)
IMAGE = Box(-1.0, 1.0, (42, 42, 1), np.float32)
NESTED = Dict(
    {
        "b": Tuple((Discrete(3), Box(-1.0, 1.0, (2, 2), np.float64))),
        "a": MultiBinary(3),
    }
)
ACTIONS: Space[Any] = Discrete(3)


class FrameAttention(TorchRLModule, ValueFunctionAPI):
    """Attends over the stacked frames of a small image; RLlib's new stack has no attention."""

    def setup(self) -> None:
        height, width, _ = self.observation_space.shape
        self.embed = torch.nn.Linear(height * width, 8)
        self.attention = torch.nn.MultiheadAttention(8, num_heads=2, batch_first=True)
        self.policy = torch.nn.Linear(8, self.action_space.n)
        self.value = torch.nn.Linear(8, 1)

    def _embedding(self, batch: dict[str, Any]) -> torch.Tensor:
        frames = self.embed(batch[Columns.OBS].flatten(1, 2).transpose(1, 2))
        attended: torch.Tensor = self.attention(frames, frames, frames)[0][:, -1]
        return attended

    def _forward(self, batch: dict[str, Any], **_: Any) -> dict[str, Any]:
        embedding = self._embedding(batch)
        return {
            Columns.ACTION_DIST_INPUTS: self.policy(embedding),
            Columns.EMBEDDINGS: embedding,
        }

    def compute_values(self, batch: dict[str, Any], embeddings: Any = None) -> torch.Tensor:
        values: torch.Tensor = self.value(
            self._embedding(batch) if embeddings is None else embeddings
        )
        return values.squeeze(-1)


class Talkative(TorchRLModule, ValueFunctionAPI):
    """Tells more than actions: something nested, a changing dtype, what the environment gets."""

    def setup(self) -> None:
        self.policy = torch.nn.Linear(self.observation_space.shape[0], self.action_space.n)
        self.value = torch.nn.Linear(self.observation_space.shape[0], 1)
        self.num_calls = 0

    def _forward(self, batch: dict[str, Any], **_: Any) -> dict[str, Any]:
        self.num_calls += 1
        first = batch[Columns.OBS][:, :1]
        logits = self.policy(batch[Columns.OBS])
        match self.model_config["tells"]:
            case "nested":
                reported: dict[str, Any] = {"told": {"first": first, "all": batch[Columns.OBS]}}
            case "changing":
                reported = {"told": first.int() if self.num_calls % 7 == 3 else first}
            case "for the environment":
                reported = {Columns.ACTIONS_FOR_ENV: logits.argmin(-1)}
        return {Columns.ACTION_DIST_INPUTS: logits, **reported}

    def compute_values(self, batch: dict[str, Any], embeddings: Any = None) -> torch.Tensor:
        values: torch.Tensor = self.value(batch[Columns.OBS])
        return values.squeeze(-1)


class InfoAsObservation(ConnectorV2):
    """Scales the newest observation by what the infos say of the episode's length."""

    def __call__(self, *, episodes: Any, batch: Any, **_: Any) -> Any:
        for episode in self.single_agent_episode_iterator(episodes, agents_that_stepped_only=False):
            scale = episode.get_infos(-1).get("step", 0) / 10
            self.add_batch_item(
                batch, Columns.OBS, episode.get_observations(-1) * np.float32(scale), episode
            )
        return batch


class OwnFlattening(flatten_observations.FlattenObservations):
    """Flattens, and counts how many it has flattened."""

    def __call__(self, *, episodes: Any, **rest: Any) -> Any:
        self.num_flattened = getattr(self, "num_flattened", 0) + len(episodes)
        return super().__call__(episodes=episodes, **rest)


class OppositeAction(ConnectorV2):
    """Takes the action that is farthest from the one which the module has chosen."""

    def __call__(self, *, batch: Any, **_: Any) -> Any:
        self.foreach_batch_item_change_in_place(
            batch, Columns.ACTIONS, lambda action, *_: 2 - action
        )
        return batch


class ActionsFromThree(ConnectorV2):
    """Adds the start of a Discrete space, which RLlib's action distributions do not know of."""

    def __call__(self, *, batch: Any, **_: Any) -> Any:
        self.foreach_batch_item_change_in_place(
            batch, Columns.ACTIONS, lambda action, *_: action + 3
        )
        return batch


def sees_through(*connectors: Callable[[], ConnectorV2]) -> Callable[[AlgorithmConfig], Any]:
    def change(config: AlgorithmConfig) -> None:
        config.env_runners(
            env_to_module_connector=lambda env, spaces, device: [each() for each in connectors]
        )

    return change


def flattens_without(*keys: str) -> Callable[[AlgorithmConfig], Any]:
    def change(config: AlgorithmConfig) -> None:
        def connector(env: Any, spaces: Any, device: Any) -> ConnectorV2:
            space = env.single_observation_space if env else spaces["__env_single__"][0]
            return FlattenObservations(space, keys_to_remove=[*keys])

        config.env_runners(env_to_module_connector=connector)

    return change


def acts_through(*connectors: Callable[[], ConnectorV2]) -> Callable[[AlgorithmConfig], Any]:
    def change(config: AlgorithmConfig) -> None:
        config.env_runners(
            module_to_env_connector=lambda env, spaces: [each() for each in connectors]
        )

    return change


def model(**settings: Any) -> Callable[[AlgorithmConfig], Any]:
    return lambda config: config.rl_module(
        model_config=DefaultModelConfig(fcnet_hiddens=[8], **settings)
    )


def attention(config: AlgorithmConfig) -> None:
    config.rl_module(rl_module_spec=RLModuleSpec(module_class=FrameAttention))
    sees_through(partial(FrameStackingEnvToModule, num_frames=3))(config)


def talkative(tells: str) -> Callable[[AlgorithmConfig], Any]:
    spec = RLModuleSpec(module_class=Talkative, model_config={"tells": tells})
    return lambda config: config.rl_module(rl_module_spec=spec)


def runner_option(**settings: Any) -> Callable[[AlgorithmConfig], Any]:
    return lambda config: config.env_runners(**settings)


def continuous(**settings: Any) -> Callable[[AlgorithmConfig], Any]:
    return lambda config: config.environment(**settings)


def echo(observations: Space[Any], actions: Space[Any]) -> Callable[[], gymnasium.Env[Any, Any]]:
    """Make a factory of environments in which everything depends on every action.

    The class is made here so that it travels by value: workers do not import tests, nor Ray.
    """

    class Echo(EchoEnv):
        def step(self, action: Any) -> Any:
            def declared(space: Any, value: Any) -> Any:
                if isinstance(value, dict):
                    return {name: declared(space[name], value[name]) for name in space}
                if isinstance(value, tuple):
                    return tuple(map(declared, space, value))
                return np.asarray(value, space.dtype).reshape(space.shape)

            # RLlib's own runner hands int32 to an environment that has declared int64, and an array
            # of shape (1,) to one that has declared ().
            return super().step(declared(self.action_space, action))

    return partial(Echo, observations, actions)


@dataclass(frozen=True, slots=True)
class Case:
    """A row of the table."""

    observations: Space[Any] = field(default_factory=lambda: VECTOR)
    actions: Space[Any] = field(default_factory=lambda: ACTIONS)
    changes: tuple[Callable[[AlgorithmConfig], Any], ...] = (model(),)
    algorithm: type[AlgorithmConfig] = PPOConfig
    batch_mode: str = "truncate_episodes"
    fast_path: bool = True

    def config(self) -> AlgorithmConfig:
        config = self.algorithm().debugging(seed=7)
        config.env_runners(
            num_env_runners=0,
            num_envs_per_env_runner=LANES,
            rollout_fragment_length=9,
            batch_mode=self.batch_mode,
        )
        for change in self.changes:
            change(config)
        return config


WHOLE = "complete_episodes"
FLAT = sees_through(FlattenObservations)
FILTER = sees_through(MeanStdFilter)
FRAMES = sees_through(partial(FrameStackingEnvToModule, num_frames=4))
MEMORY = sees_through(
    partial(PrevActionsPrevRewards, n_prev_actions=2, n_prev_rewards=3), FlattenObservations
)
CONV = model(conv_filters=[[4, 4, 4], [8, 11, 1]])
EVERYTHING = Dict(
    {
        "z": Box(-1.0, 1.0, (), np.float64),
        "scalar": Box(-1.0, 1.0, (), np.float32),
        "large": Box(-1e9, 1e9, (2,), np.float64),
        "choice": Discrete(4),
        "choices": MultiDiscrete([2, 3, 4]),
        "flags": MultiBinary((2, 2)),
        "bytes": Box(0, 255, (2, 2), np.uint8),
        "inner": Tuple((Dict({"b": Discrete(2), "a": IMAGE}), Box(0, 9, (2,), np.int64))),
    }
)
ACT_BOX = Box(np.array([-2.0, 0.0], np.float32), np.array([3.0, 0.5], np.float32))

ACT_SCALAR = Box(-2.0, 3.0, (), np.float32)

CASES: dict[str, Case] = {
    "defaults, whole episodes": Case(batch_mode=WHOLE),
    "nested observations": Case(NESTED, changes=(model(), FLAT)),
    "LSTM": Case(changes=(model(use_lstm=True, lstm_cell_size=8, max_seq_len=4),)),
    "MeanStdFilter": Case(changes=(model(), FILTER)),
    "continuous actions": Case(actions=ACT_BOX),
    "custom connectors": Case(
        changes=(model(), sees_through(InfoAsObservation), acts_through(OppositeAction))
    ),
}
RARE_CASES: dict[str, Case] = {
    "defaults": Case(),
    "convolutions": Case(IMAGE, changes=(CONV,)),
    "attention over frames": Case(Box(-1.0, 1.0, (3, 4, 1), np.float32), changes=(attention,)),
    "previous actions and rewards": Case(changes=(model(), MEMORY)),
    "unbounded observations": Case(Box(-np.inf, np.inf, (3,), np.float64)),
    "bytes": Case(Box(0, 255, (5,), np.uint8), changes=(model(), FLAT)),
    "image of bytes": Case(Box(0, 255, (6, 6, 3), np.uint8), changes=(model(), FLAT)),
    "discrete observations": Case(Discrete(5), changes=(model(), FLAT)),
    "discrete observations with a start": Case(Discrete(5, start=-2), changes=(model(), FLAT)),
    "multi-discrete observations": Case(MultiDiscrete([2, 3, 4]), changes=(model(), FLAT)),
    "multi-binary observations": Case(MultiBinary(4), changes=(model(), FLAT)),
    "Tuple observations": Case(Tuple((VECTOR, Discrete(3))), changes=(model(), FLAT)),
    "nested observations, filtered": Case(
        NESTED, changes=(model(), sees_through(FlattenObservations, MeanStdFilter))
    ),
    "Dict of everything": Case(EVERYTHING, changes=(model(), FLAT)),
    "Dict observations without some of their keys": Case(
        Dict({"b": MultiBinary(2), "z": Discrete(3), "a": VECTOR}),
        changes=(model(), flattens_without("b")),
    ),
    "flattened observations, no lookback": Case(
        NESTED, changes=(model(), FLAT, runner_option(episode_lookback_horizon=0))
    ),
    "flattened observations, long lookback": Case(
        NESTED, changes=(model(), FLAT, runner_option(episode_lookback_horizon=6))
    ),
    "flattened observations of a module whose outputs change": Case(
        NESTED, changes=(talkative("changing"), FLAT)
    ),
    "flattened observations of a module whose outputs change, whole episodes": Case(
        NESTED, changes=(talkative("changing"), FLAT), batch_mode=WHOLE
    ),
    "observations that a class of one's own flattens": Case(
        NESTED, changes=(model(), sees_through(OwnFlattening))
    ),
    "flattened observations, DQN": Case(NESTED, changes=(FLAT,), algorithm=DQNConfig),
    "nested observations, whole episodes": Case(NESTED, changes=(model(), FLAT), batch_mode=WHOLE),
    "actions with a start": Case(
        actions=Discrete(4, start=3), changes=(model(), acts_through(ActionsFromThree))
    ),
    "multi-discrete actions": Case(actions=MultiDiscrete([3, 2])),
    "nested actions": Case(actions=Dict({"x": Tuple((Discrete(2), ACT_BOX)), "a": Discrete(3)})),
    "continuous actions without an axis": Case(actions=ACT_SCALAR),
    "nested actions without an axis": Case(
        actions=Dict({"x": Tuple((Discrete(2), ACT_SCALAR)), "a": ACT_BOX}),
        changes=(model(), continuous(normalize_actions=False, clip_actions=True)),
    ),
    "continuous actions, clipped": Case(
        actions=ACT_BOX,
        changes=(model(), continuous(normalize_actions=False, clip_actions=True)),
    ),
    "continuous actions, as they are": Case(
        actions=Box(-np.inf, np.inf, (2,), np.float32),
        changes=(model(), continuous(normalize_actions=False, clip_actions=False)),
    ),
    "convolutions over frames": Case(IMAGE, changes=(CONV, FRAMES)),
    "convolutions, whole episodes": Case(IMAGE, changes=(CONV,), batch_mode=WHOLE),
    "LSTM, whole episodes": Case(
        changes=(model(use_lstm=True, lstm_cell_size=8),), batch_mode=WHOLE
    ),
    "LSTM over filtered, remembered things": Case(
        changes=(
            model(use_lstm=True, lstm_cell_size=8, max_seq_len=4),
            sees_through(
                partial(PrevActionsPrevRewards, n_prev_actions=1, n_prev_rewards=1),
                FlattenObservations,
                MeanStdFilter,
            ),
        )
    ),
    "attention over frames, whole episodes": Case(
        Box(-1.0, 1.0, (3, 4, 1), np.float32), changes=(attention,), batch_mode=WHOLE
    ),
    "MeanStdFilter, whole episodes": Case(changes=(model(), FILTER), batch_mode=WHOLE),
    "previous actions and rewards, whole episodes": Case(
        changes=(model(), MEMORY), batch_mode=WHOLE
    ),
    "continuous actions, whole episodes": Case(actions=ACT_BOX, batch_mode=WHOLE),
    "custom connectors, whole episodes": Case(
        changes=(model(), sees_through(InfoAsObservation), acts_through(OppositeAction)),
        batch_mode=WHOLE,
    ),
    "DQN": Case(algorithm=DQNConfig),
    "SAC": Case(actions=ACT_BOX, algorithm=SACConfig),
    "a fragment that RLlib chooses": Case(
        changes=(
            model(),
            runner_option(rollout_fragment_length="auto"),
            lambda config: config.training(train_batch_size_per_learner=22),
        )
    ),
    "a module with nested outputs": Case(changes=(talkative("nested"),)),
    "a module whose outputs change": Case(changes=(talkative("changing"),)),
    "a module whose outputs change, whole episodes": Case(
        changes=(talkative("changing"),), batch_mode=WHOLE
    ),
    "a module that fits its actions": Case(
        changes=(
            talkative("for the environment"),
            continuous(normalize_actions=False, clip_actions=False),
        )
    ),
    "a module whose actions RLlib fits again": Case(changes=(talkative("for the environment"),)),
    "no lookback": Case(changes=(model(), runner_option(episode_lookback_horizon=0))),
    "long lookback": Case(changes=(model(), runner_option(episode_lookback_horizon=6))),
    "episodes that stay lists": Case(changes=(model(), runner_option(episodes_to_numpy=False))),
    "no exploration": Case(changes=(model(), runner_option(explore=False))),
}


ON_THE_FAST_PATH = {
    "bytes",
    "Dict observations without some of their keys",
    "Dict of everything",
    "discrete observations",
    "flattened observations, DQN",
    "flattened observations, long lookback",
    "flattened observations, no lookback",
    "image of bytes",
    "multi-binary observations",
    "multi-discrete observations",
    "nested observations",
    "nested observations, whole episodes",
    "Tuple observations",
    "a fragment that RLlib chooses",
    "a module that fits its actions",
    "a module whose actions RLlib fits again",
    "continuous actions",
    "continuous actions, as they are",
    "continuous actions, clipped",
    "continuous actions, whole episodes",
    "continuous actions without an axis",
    "convolutions",
    "convolutions, whole episodes",
    "defaults",
    "defaults, whole episodes",
    "DQN",
    "long lookback",
    "multi-discrete actions",
    "no exploration",
    "no lookback",
    "SAC",
    "unbounded observations",
}
"""Cases that take the fast path from the first step to the last."""


def samples(runner: SingleAgentEnvRunner) -> list[list[SingleAgentEpisode]]:
    """Ask in every way in which RLlib asks."""
    taken = [
        runner.sample(),
        runner.sample(),
        runner.sample(num_timesteps=13, explore=False, force_reset=True),
        runner.sample(num_episodes=3, explore=True),
        runner.sample(num_timesteps=11, explore=True),
        runner.sample(num_timesteps=5),
    ]
    runner.env.action_space.seed(5)
    return [*taken, runner.sample(num_timesteps=9, random_actions=True, force_reset=True)]


def reported(episodes: list[list[SingleAgentEpisode]]) -> list[list[dict[str, Any]]]:
    """Return all that episodes hold; ids become numbers, by which chunks still find together."""
    numbers: dict[str, int] = {}

    def of(episode: SingleAgentEpisode) -> dict[str, Any]:
        state = episode.get_state()
        state["id_"] = numbers.setdefault(state["id_"], len(numbers))
        for name in ("_start_time", "_last_step_time"):
            del state[name]
        state["infos"] = plain(state["infos"])
        return dict(state)

    return [[of(episode) for episode in sample] for sample in episodes]


def counted(metrics: Any, path: tuple[str, ...] = ()) -> dict[tuple[str, ...], Any]:
    """Return what metrics say of anything but time and speed."""
    if isinstance(metrics, dict):
        return {
            name: value
            for key, part in metrics.items()
            for name, value in counted(part, (*path, str(key))).items()
        }
    is_count = path[0].startswith(COUNTS)
    return {path: metrics.peek()} if is_count else {}


def numbers(value: Any) -> Any:
    """Turn tensors into arrays."""
    if isinstance(value, dict):
        return {key: numbers(part) for key, part in value.items()}
    return value.numpy(force=True) if isinstance(value, torch.Tensor) else value


def plain(infos: Any) -> Any:
    """Turn NumPy's scalars into Python's: gymnasium's vector environments make NumPy's of all."""
    if isinstance(infos, dict):
        return {key: plain(part) for key, part in infos.items()}
    if isinstance(infos, list):
        return [plain(part) for part in infos]
    return infos.item() if isinstance(infos, np.generic) else infos


@pytest.fixture
def both() -> Iterator[Callable[[Case], tuple[Any, Callable[[], Any]]]]:
    """Build RLlib's runner, and on demand ours: each seeds what the other would draw from."""
    opened: list[Any] = []

    def build(case: Case) -> tuple[Any, Callable[[], Any]]:
        env = echo(case.observations, case.actions)

        def ours() -> Any:
            server = EnvServer(env, num_envs=LANES).start()
            opened.append(server)
            config = configure(
                case.config(), server.address, fast_path=case.fast_path, inference="torch"
            )
            opened.append(RLMeshEnvRunner(config=config, worker_index=0, num_workers=0))
            return opened[-1]

        config = case.config().environment(lambda _: env())
        opened.append(SingleAgentEnvRunner(config=config, worker_index=0, num_workers=0))
        return opened[-1], ours

    yield build
    for each in reversed(opened):
        each.stop()


def assert_same(
    case: Case,
    both: Callable[[Case], tuple[Any, Callable[[], Any]]],
    *,
    takes_fast_path: bool,
) -> None:
    theirs, build_ours = both(case)
    weights = numbers(theirs.module.get_state())
    expected = samples(theirs)
    expected_metrics = counted(theirs.get_metrics())
    ours = build_ours()
    assert_identical(numbers(ours.module.get_state()), weights, "weights")

    actual = samples(ours)

    assert_identical(reported(actual), reported(expected), "samples")
    assert sum(episode.is_terminated for sample in expected for episode in sample) >= 2
    assert sum(episode.is_truncated for sample in expected for episode in sample) >= 2
    metrics = counted(ours.get_metrics())
    assert [metrics.pop((name,)) for name in LIFETIME_SUMS] == [0, 0, 0]  # RLlib's has none of them
    assert_identical(metrics, expected_metrics, "metrics")
    assert_identical(numbers(ours.get_state()), numbers(theirs.get_state()), "state")
    assert ours.get_spaces() == theirs.get_spaces()
    # The last of these samples has drawn its actions at random; in this one outputs change.
    ours.sample(num_timesteps=8 * LANES, force_reset=True)
    reason = ours.fast_path_disabled_reason
    assert (reason is None) == takes_fast_path, reason


@pytest.mark.parametrize("name", CASES)
def test_episodes_are_rllibs_own(name: str, both: Any) -> None:
    assert_same(CASES[name], both, takes_fast_path=name in ON_THE_FAST_PATH)


@pytest.mark.slow
@pytest.mark.parametrize("name", RARE_CASES)
def test_episodes_are_rllibs_own_in_rarer_cases(name: str, both: Any) -> None:
    assert_same(RARE_CASES[name], both, takes_fast_path=name in ON_THE_FAST_PATH)


@pytest.mark.parametrize(
    "name",
    ["defaults, whole episodes", pytest.param("nested observations", marks=pytest.mark.slow)],
)
def test_without_the_fast_path_episodes_are_rllibs_own_as_well(name: str, both: Any) -> None:
    assert name in ON_THE_FAST_PATH

    assert_same(replace(CASES[name], fast_path=False), both, takes_fast_path=False)


class Recorder(RLlibCallback):
    """Writes down who called, about what, and what could be seen at that moment."""

    calls: ClassVar[list[tuple[Any, ...]]] = []

    def on_environment_created(
        self, *, env_runner: Any, env: Any, env_context: Any, **_: Any
    ) -> None:
        seen = (
            env_runner.num_envs,
            env.num_envs,
            env_context.worker_index,
            env_context.num_workers,
        )
        self.calls.append(("on_environment_created", *seen))

    def on_episode_created(self, **reported: Any) -> None:
        self._about_an_episode("on_episode_created", **reported)

    def on_episode_start(self, **reported: Any) -> None:
        self._about_an_episode("on_episode_start", **reported)

    def on_episode_step(self, **reported: Any) -> None:
        self._about_an_episode("on_episode_step", **reported)

    def on_episode_end(self, *, prev_episode_chunks: Any, **reported: Any) -> None:
        self._about_an_episode("on_episode_end", **reported)
        self.calls.append(("chunks before", tuple(len(chunk) for chunk in prev_episode_chunks)))

    def on_sample_end(self, *, samples: Any, **_: Any) -> None:
        self.calls.append(("on_sample_end", tuple(len(episode) for episode in samples)))

    def _about_an_episode(
        self, name: str, *, episode: Any, env_runner: Any, env_index: int, rl_module: Any, **_: Any
    ) -> None:
        is_this_runners = rl_module is env_runner.module
        seen = (episode.is_reset, episode.is_done, episode.is_numpy, episode.t, len(episode))
        newest = tuple(episode.get_observations(-1)) if episode.is_reset else ()
        self.calls.append((name, env_index, is_this_runners, *seen, newest))


@pytest.mark.parametrize(
    "batch_mode", ["truncate_episodes", pytest.param(WHOLE, marks=pytest.mark.slow)]
)
def test_callbacks_come_in_rllibs_order(batch_mode: str, both: Any) -> None:
    def recorded(config: AlgorithmConfig) -> None:
        config.callbacks(
            Recorder,
            on_episode_start=lambda *, env_index, **_: Recorder.calls.append(("also", env_index)),
        )

    Recorder.calls.clear()
    theirs, build_ours = both(Case(changes=(model(), recorded), batch_mode=batch_mode))
    samples(theirs)
    expected = list(Recorder.calls)
    Recorder.calls.clear()

    samples(build_ours())

    assert Recorder.calls == expected
    assert {call[0] for call in expected} == {
        "on_environment_created",
        "on_episode_created",
        "on_episode_start",
        "on_episode_step",
        "on_episode_end",
        "on_sample_end",
        "chunks before",
        "also",
    }
