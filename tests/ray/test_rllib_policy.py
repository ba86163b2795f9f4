"""The served policy against RLlib's own EnvRunner, on the same observations."""

import contextlib
import copy
import gc
import itertools
import shutil
import subprocess
import sys
import textwrap
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch
from ray.rllib.algorithms.dqn import DQNConfig
from ray.rllib.algorithms.ppo import PPOConfig
from ray.rllib.connectors.connector_v2 import ConnectorV2
from ray.rllib.connectors.env_to_module import (
    FlattenObservations,
    MeanStdFilter,
    PrevActionsPrevRewards,
)
from ray.rllib.core.distribution.torch.torch_distribution import TorchCategorical
from ray.rllib.core.rl_module.default_model_config import DefaultModelConfig
from ray.rllib.core.rl_module.rl_module import RLModule
from ray.rllib.env.single_agent_episode import SingleAgentEpisode
from ray.rllib.utils.filter import RunningStat
from torch.nn.modules.module import register_module_forward_pre_hook

from rlmesh_ray.errors import ConfigurationError, ContractMismatchError, PolicyError
from rlmesh_ray.models.loading import load_policy
from rlmesh_ray.models.policy import Policy, RouteRows, Rows, UpdatablePolicy, traits_of
from rlmesh_ray.models.rllib import checkpoint_policy
from rlmesh_ray.models.rllib.checkpoint import load_checkpoint
from rlmesh_ray.models.rllib.checkpoint_policy import RllibPolicy
from rlmesh_ray.protocol.messages import BatchRun, PredictSlot
from rlmesh_ray.protocol.model_session import ContractLanes
from rlmesh_ray.server.model.prediction_batch import PredictionRequest, Route, run_batch
from rlmesh_ray.spaces.contract import AutoresetMode, EnvContract
from rlmesh_ray.spaces.gym_conversion import from_gymnasium, to_gymnasium
from rlmesh_ray.wire.rlmesh_v1 import values
from rlmesh_ray.wire.rlmesh_v1.values import ContractCodecs

pytestmark = pytest.mark.ray
NUM_LANES = 3
exact_policy = partial(RllibPolicy, inference="torch")
"""Loads a policy that acts as RLlib's module does, to the last bit."""


@dataclass
class Event:
    """What one lane saw in one vector step."""

    observation: Any
    action: Any = None
    """The action that led here; None: a reset did."""


class Recorder(gym.Wrapper[Any, Any, Any, Any]):
    """Writes down what RLlib's EnvRunner sends to an environment, and gets."""

    def __init__(self, env: gym.Env[Any, Any]) -> None:
        super().__init__(env)
        self.events: list[Event] = []
        recorders.append(self)

    def reset(self, **kwargs: Any) -> Any:
        observation, info = super().reset(**kwargs)
        self.events.append(Event(observation))
        return observation, info

    def step(self, action: Any) -> Any:
        result = super().step(action)
        self.events.append(Event(result[0], np.array(action)))
        return result


recorders: list[Recorder] = []


@dataclass
class Case:
    """One kind of checkpoint."""

    env: str = "Pendulum-v1"
    env_to_module: Callable[..., Any] | None = None
    environment: dict[str, Any] = field(default_factory=dict)
    model: dict[str, Any] = field(default_factory=dict)
    scale: float = 0.3
    """Of the weights: large ones saturate actions."""
    has_later: bool = False
    """Whether there is another checkpoint of it, with other weights."""


CASES = {
    "discrete": Case("CartPole-v1", has_later=True),
    "normalised": Case(),
    "clipped": Case(environment={"normalize_actions": False, "clip_actions": True}, scale=1.0),
    "raw": Case(environment={"normalize_actions": False, "clip_actions": False}),
    "filtered": Case(env_to_module=lambda env, spaces, device: MeanStdFilter(), has_later=True),
    "recurrent": Case(
        model={"use_lstm": True, "lstm_cell_size": 8, "max_seq_len": 4}, has_later=True
    ),
    "looking back": Case(
        "MountainCar-v0",
        env_to_module=lambda env, spaces, device: [
            PrevActionsPrevRewards(n_prev_actions=3, n_prev_rewards=0),
            FlattenObservations(),
        ],
        scale=1.0,
    ),
}


@dataclass
class Trained:
    """A checkpoint, and what RLlib's EnvRunner did with its policy."""

    checkpoint: Path
    lanes: list[list[Event]]
    contract: EnvContract
    later: Path
    """The same algorithm's checkpoint with other weights and connector states."""
    later_state: dict[str, Any]
    """Its EnvRunner's state."""


def shake(algorithm: Any, scale: float, seed: int = 9) -> None:
    """Give the module weights that make its actions depend on all of its input.

    RLlib's initial ones are so small that most greedy actions are the same.
    """
    torch.manual_seed(seed)
    module = algorithm.learner_group._learner.module["default_policy"]
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.normal_(std=scale)
    algorithm.env_runner.module.set_state(module.get_state(inference_only=True))


def train(case: Case, folder: Path) -> Trained:
    env_id = f"recorded/{folder.name}-v0"
    gym.register(env_id, entry_point=lambda **_: Recorder(gym.make(case.env)))
    recorders.clear()
    config = (
        PPOConfig()
        .environment(env_id, **case.environment)
        .env_runners(
            num_env_runners=0,
            num_envs_per_env_runner=NUM_LANES,
            env_to_module_connector=case.env_to_module,
        )
        .training(train_batch_size_per_learner=60, minibatch_size=30, num_epochs=1)
        .rl_module(model_config=DefaultModelConfig(fcnet_hiddens=[16], **case.model))
        .debugging(seed=1)
    )
    algorithm = config.build_algo()
    algorithm.train()
    shake(algorithm, case.scale)
    algorithm.save_to_path(str(folder / "first"))
    for piece in algorithm.env_runner._env_to_module.connectors:
        if isinstance(piece, MeanStdFilter):
            # A served policy does not learn from its clients; RLlib's filters would.
            piece._update_stats = False
    for lane in recorders:
        lane.events.clear()
    algorithm.env_runner.sample(num_episodes=NUM_LANES + 1, explore=False)
    lanes = [[*lane.events] for lane in recorders]
    later = folder / "later"
    later_state = change(algorithm, case, later) if case.has_later else {}
    algorithm.stop()
    env = recorders[0]
    contract = EnvContract(
        case.env,
        from_gymnasium(env.observation_space),
        from_gymnasium(env.action_space),
        NUM_LANES,
        AutoresetMode.NEXT_STEP,
    )
    return Trained(folder / "first", lanes, contract, later, later_state)


def change(algorithm: Any, case: Case, folder: Path) -> dict[str, Any]:
    """Give the algorithm other weights and connector states; return its EnvRunner's state."""
    shake(algorithm, case.scale, seed=10)
    for piece in algorithm.env_runner._env_to_module.connectors:
        if isinstance(piece, MeanStdFilter):
            piece._update_stats = True
    algorithm.env_runner.sample(num_timesteps=50)
    algorithm.save_to_path(str(folder))
    return dict(algorithm.env_runner.get_state())


@pytest.fixture(scope="module")
def trained(local_ray: None, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Trained]:
    done: dict[str, Trained] = {}

    def once(name: str) -> Trained:
        if name not in done:
            done[name] = train(CASES[name], tmp_path_factory.mktemp("checkpoint"))
        return done[name]

    return once


def slot(lane: int, event: Event) -> PredictSlot:
    return PredictSlot(lane, "", 0, reset=event.action is None)


def read_only(array: Any) -> np.ndarray:
    """An array as it comes off the wire."""
    return np.frombuffer(array.tobytes(), array.dtype).reshape(array.shape)


def act(policy: Policy, contract: EnvContract, events: list[Event], routes: list[int]) -> Any:
    """Predict one row a lane; the lanes belong to routes of these widths."""
    slots = [slot(lane, event) for lane, event in enumerate(events)]
    parts = []
    for number, width in enumerate(routes):
        parts.append(RouteRows(f"route {number}", [slots.pop(0) for _ in range(width)]))
    observations = read_only(np.stack([event.observation for event in events]))
    return policy.predict(contract, Rows(observations, parts))


# How actions are clipped and scaled does not depend on the routes; what is remembered does.
@pytest.mark.parametrize(
    ("name", "routes"),
    [
        *((name, [3]) for name in CASES if name not in ("raw", "clipped")),
        ("recurrent", [1, 2]),
        *(pytest.param(name, [3], marks=pytest.mark.slow) for name in ("raw", "clipped")),
        *(
            pytest.param(name, [1, 2], marks=pytest.mark.nightly)
            for name in CASES
            if name != "recurrent"
        ),
    ],
)
def test_the_served_policy_acts_as_rllib_evaluates_it(
    trained: Callable[[str], Trained], name: str, routes: list[int]
) -> None:
    run = trained(name)
    policy = load_policy(str(run.checkpoint), inference="torch")
    policy.check_contract(run.contract)
    vector_steps = list(zip(*run.lanes, strict=True))

    compared = []
    for now, then in itertools.pairwise(vector_steps):
        actions = act(policy, run.contract, list(now), routes)
        for lane, after in enumerate(then):
            if after.action is not None:
                assert np.array_equal(actions[lane], after.action)
                compared.append(after.action.item())

    assert len(compared) > 20
    assert len(set(compared)) > 1
    assert len({event.action is None for lane in run.lanes for event in lane[1:]}) == 2


def test_a_plain_checkpoint_asks_nothing_of_the_lanes(
    trained: Callable[[str], Trained],
) -> None:
    run = trained("discrete")
    policy = load_policy(str(run.checkpoint), inference="torch")
    events = [event for lane in run.lanes for event in lane[:5]]
    of_one_lane = [PredictSlot(0, "", 0, reset=False)] * len(events)
    observations = np.stack([event.observation for event in events])

    together = policy.predict(run.contract, Rows(observations, [RouteRows("r", of_one_lane)]))
    alone = [act(policy, run.contract, [event], [1]).item() for event in events]

    assert np.array_equal(np.asarray(together), alone)
    assert len(set(alone)) == 2


def test_a_recurrent_policy_needs_lanes_that_differ(trained: Callable[[str], Trained]) -> None:
    run = trained("recurrent")
    policy = load_policy(str(run.checkpoint), inference="torch")
    observations = np.stack([lane[0].observation for lane in run.lanes[:2]])
    slots = [PredictSlot(0, "", 0, reset=True)] * 2

    with pytest.raises(PolicyError, match="env_index of its own"):
        policy.predict(run.contract, Rows(observations, [RouteRows("r", slots)]))


def test_a_forgotten_lane_begins_anew(trained: Callable[[str], Trained]) -> None:
    run = trained("recurrent")
    policy = load_policy(str(run.checkpoint), inference="torch")
    first, second = run.lanes[0][0], Event(run.lanes[0][0].observation, np.zeros(1))

    of_a_new_episode = act(policy, run.contract, [first], [1])
    of_its_second_step = act(policy, run.contract, [second], [1])
    policy.forget("route 0", 0)
    of_a_forgotten_lane = act(policy, run.contract, [second], [1])

    assert not np.array_equal(of_its_second_step, of_a_new_episode)
    assert np.array_equal(of_a_forgotten_lane, of_a_new_episode)


def test_what_is_remembered_does_not_grow_with_the_episode(
    trained: Callable[[str], Trained],
) -> None:
    run = trained("looking back")
    policy = exact_policy(run.checkpoint)
    slots = [PredictSlot(0, "", 0, reset=False)]
    rows = Rows(run.lanes[0][0].observation[None], [RouteRows("r", slots)])

    for _ in range(100):
        policy.predict(run.contract, rows)

    episodes = [each for each in gc.get_objects() if type(each) is SingleAgentEpisode]
    (kept,) = [len(each.observations.data) for each in episodes if each.t == 99]
    assert kept < 25


def first_steps(run: Trained) -> list[tuple[Event, ...]]:
    """Vector steps until the served episodes have been cut twice."""
    return list(zip(*run.lanes, strict=True))[: 2 * checkpoint_policy.STEPS_BETWEEN_CUTS + 3]


@pytest.mark.parametrize(
    "name",
    [
        "recurrent",
        *(pytest.param(n, marks=pytest.mark.nightly) for n in ("looking back", "filtered")),
    ],
)
def test_a_failed_batch_leaves_the_lanes_as_they_were(
    trained: Callable[[str], Trained], name: str
) -> None:
    run = trained(name)
    policy, undisturbed = (exact_policy(run.checkpoint) for _ in range(2))
    incompatibilities = [Event(np.zeros(7, np.float32), np.zeros(1))] * NUM_LANES

    for now in first_steps(run):
        # Before and after the first step, and before and after the episodes are cut.
        with pytest.raises(PolicyError, match="RLlib module or one of its connectors raised"):
            act(policy, run.contract, incompatibilities, [3])
        actions = act(policy, run.contract, list(now), [3])
        assert np.array_equal(actions, act(undisturbed, run.contract, list(now), [3]))

    assert policy.traits.is_repeatable


class Preach(ConnectorV2):
    """A connector that RLlib knows nothing of."""

    def __call__(self, *, batch: dict[str, Any], **rest: Any) -> dict[str, Any]:
        return batch


def altered(
    monkeypatch: pytest.MonkeyPatch, checkpoint: Path, change: Callable[[Any], object]
) -> RllibPolicy:
    """The policy of a checkpoint with other parts."""

    def load(*arguments: Any) -> Any:
        parts = load_checkpoint(*arguments)
        change(parts)
        return parts

    monkeypatch.setattr(checkpoint_policy, "load_checkpoint", load)
    return exact_policy(checkpoint)


def test_only_what_rllib_wrote_counts_as_repeatable_and_as_computing_only(
    trained: Callable[[str], Trained], monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoint = trained("discrete").checkpoint

    def add_hook(parts: Any) -> None:
        parts.module.encoder.register_forward_hook(lambda layer, given, returned: returned)

    def sample_oddly(parts: Any) -> None:
        parts.module.action_dist_cls = type("Odd", (TorchCategorical,), {})

    def claims(policy: RllibPolicy) -> tuple[bool, bool]:
        return policy.traits.is_repeatable, policy.traits.only_computes

    plain = exact_policy(checkpoint, explore=True)
    recurrent = exact_policy(trained("recurrent").checkpoint)
    own_piece = altered(monkeypatch, checkpoint, lambda parts: parts.env_to_module.append(Preach()))
    own_hook = altered(monkeypatch, checkpoint, add_hook)
    own_distribution = altered(monkeypatch, checkpoint, sample_oddly)

    assert claims(plain) == (True, True)
    assert claims(recurrent) == (True, False)
    assert claims(own_piece) == (False, False)
    assert claims(own_hook) == (True, False)
    assert claims(own_distribution) == (True, False)


def test_a_checkpoint_tells_the_observations_that_it_acts_on(
    trained: Callable[[str], Trained],
) -> None:
    run = trained("discrete")

    reported = exact_policy(run.checkpoint).traits.observation_space

    assert reported == run.contract.observation_space


# --- what is no number -----------------------------------------------------------------


def no_numbers(weights: dict[str, Any]) -> dict[str, Any]:
    """The same weights, all of them NaN."""
    module = weights["rl_module"]["default_policy"]
    return weights | {"rl_module": {name: array * np.nan for name, array in module.items()}}


@pytest.mark.parametrize("explore", [False, True])
@pytest.mark.parametrize("name", [pytest.param("discrete", marks=pytest.mark.nightly), "recurrent"])
def test_weights_that_are_nan_do_not_act_until_there_are_others(
    trained: Callable[[str], Trained], name: str, explore: bool
) -> None:
    run = trained(name)
    policy = exact_policy(run.checkpoint, explore=explore)
    of_three, sound = [lane[0] for lane in run.lanes], policy.get_weights()

    policy.set_weights(no_numbers(sound))
    for _ in range(2):
        with pytest.raises(PolicyError, match="NaN in it; are its weights sound"):
            act(policy, run.contract, of_three, [3])
    policy.set_weights(sound)

    assert len(act(policy, run.contract, of_three, [3])) == 3


@pytest.mark.parametrize("buckets", [[], pytest.param([2], marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    "name", ["discrete", "recurrent", pytest.param("looking back", marks=pytest.mark.nightly)]
)
def test_a_request_that_makes_nan_is_refused_alone_and_disturbs_no_memory(
    trained: Callable[[str], Trained], name: str, buckets: list[int]
) -> None:
    run = trained(name)
    policy = exact_policy(run.checkpoint, buckets=buckets)
    undisturbed = exact_policy(run.checkpoint, buckets=buckets)
    space = to_gymnasium(run.contract.action_space)

    for number, now in enumerate(first_steps(run)):
        events = list(now)
        if number % 2:
            # A client of two lanes sends something, and repeats its request with sound numbers.
            bad = Event(np.full_like(now[2].observation, np.inf), now[2].action)
            actions = act(policy, run.contract, [*events[:2], bad], [1, 2])
            assert [action in space for action in actions] == [True, True, False]
            last = act_on_request(policy, run.contract, events[1:])
        else:
            actions = act(policy, run.contract, events, [1, 2])
            last = actions[1:]
        expected = act(undisturbed, run.contract, events, [1, 2])
        assert np.allclose([actions[0], *last], expected, atol=1e-5)


def act_on_request(policy: Policy, contract: EnvContract, events: list[Event]) -> Any:
    """The actions of the second route's lanes, from 1 on."""
    observations = read_only(np.stack([event.observation for event in events]))
    slots = [slot(lane, event) for lane, event in enumerate(events, start=1)]
    return policy.predict(contract, Rows(observations, [RouteRows("route 1", slots)]))


def test_clients_of_an_exploring_recurrent_policy_do_not_fail_for_one_s_infinity(
    trained: Callable[[str], Trained],
) -> None:
    run = trained("recurrent")
    policy, undisturbed = (exact_policy(run.checkpoint, explore=True) for _ in range(2))
    good = run.lanes[0][0].observation

    def part(key: str, observation: Any) -> PredictionRequest:
        slots = [PredictSlot(0, "", 0, reset=False)]
        codecs = ContractCodecs.made_by(values.codec, run.contract)
        route = Route(key, run.contract, codecs, ContractLanes(1))
        return PredictionRequest(route, observation.tobytes(), slots, lambda *_: None)

    of_batch = BatchRun(0, 0, 0)
    run_batch(policy, [part("good", good)], of_batch)
    parts = [part("good", good), part("bad", np.full_like(good, np.inf))]
    answers = run_batch(policy, parts, of_batch, is_repeatable=traits_of(policy).is_repeatable)

    assert isinstance(answers[0], bytes)
    assert isinstance(answers[1], PolicyError)

    for _ in range(2):
        run_batch(undisturbed, [part("good", good)], of_batch)
    then = []
    for each in (policy, undisturbed):
        torch.manual_seed(1)
        then.append(run_batch(each, [part("good", good), part("bad", good)], of_batch))
    assert then[0] == then[1]
    assert all(isinstance(answer, bytes) for answer in then[0])


@pytest.fixture(scope="module")
def q_network(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """DQN's module alone, which chooses its actions itself."""
    folder = tmp_path_factory.mktemp("dqn") / "module"
    spec = DQNConfig().get_default_rl_module_spec()
    spec.observation_space = gym.spaces.Box(-np.inf, np.inf, (4,), np.float32)
    spec.action_space = gym.spaces.Discrete(3)
    spec.model_config = DQNConfig().model_config
    module = spec.build()
    module.save_to_path(folder)
    return folder


def test_nan_among_q_values_is_noticed_and_sound_ones_act_as_rllib_has_it(q_network: Path) -> None:
    policy = exact_policy(q_network)
    space = from_gymnasium(gym.spaces.Box(-np.inf, np.inf, (4,), np.float32))
    actions = from_gymnasium(gym.spaces.Discrete(3))
    contract = EnvContract("Q-v0", space, actions, 64, AutoresetMode.NEXT_STEP)
    observations = np.random.default_rng(0).normal(size=(64, 4)).astype(np.float32)
    events = [Event(row) for row in observations]

    chosen = act(policy, contract, events, [64])
    module: Any = RLModule.from_checkpoint(q_network)
    expected = module.forward_inference({"obs": torch.from_numpy(observations)})["actions"]
    events[7] = Event(np.full(4, np.inf, np.float32))
    with_infinity = act(policy, contract, events, [64])
    policy.set_weights(no_numbers(policy.get_weights()))

    assert np.array_equal(chosen, expected)
    assert len(set(chosen.tolist())) > 1
    assert np.flatnonzero(with_infinity == 3).tolist() == [7]
    with pytest.raises(PolicyError, match="NaN"):
        act(policy, contract, events, [64])


def test_exploring_samples_the_actions(trained: Callable[[str], Trained]) -> None:
    run = trained("normalised")
    policy = load_policy(str(run.checkpoint), explore=True)
    same = [run.lanes[0][0]] * 8

    actions = act(policy, run.contract, same, [8])

    assert len(np.unique(actions)) > 1
    assert actions.min() >= -2.0
    assert actions.max() <= 2.0


def test_an_environment_with_other_spaces_is_refused_and_what_differs_is_named(
    trained: Callable[[str], Trained],
) -> None:
    policy = load_policy(str(trained("discrete").checkpoint))

    with pytest.raises(
        ContractMismatchError,
        match=r"Pendulum-v1 has: .*action_space: Box .*\[-2, 2\] where Discrete 0…1 is expected",
    ):
        policy.check_contract(trained("normalised").contract)


def test_a_checkpoint_tells_its_algorithm_and_spaces(
    trained: Callable[[str], Trained],
) -> None:
    run = trained("discrete")

    traits = traits_of(load_policy(str(run.checkpoint)))

    assert (traits.kind, traits.algorithm) == ("RLlib checkpoint", "PPO")
    assert traits.observation_space == run.contract.observation_space
    assert traits.action_space == run.contract.action_space


def test_a_checkpoint_is_served_without_ray_and_without_its_environment(
    trained: Callable[[str], Trained], tmp_path: Path
) -> None:
    run = trained("filtered")
    checkpoint = shutil.copytree(run.checkpoint, tmp_path / "checkpoint")
    # A pickle of absent_simulator.Env.
    (checkpoint / "class_and_ctor_args.pkl").write_bytes(b"cabsent_simulator\nEnv\n.")
    observation = run.lanes[0][0].observation
    code = f"""
        import numpy as np, ray
        from rlmesh_ray.models.loading import load_policy
        from rlmesh_ray.models.policy import RouteRows, Rows
        from rlmesh_ray.protocol.messages import PredictSlot
        policy = load_policy({str(checkpoint)!r})
        slots = [PredictSlot(0, "", 0, True)]
        rows = Rows(np.array([{observation.tolist()}], np.float32), [RouteRows("r", slots)])
        assert not ray.is_initialized()
        print(policy.predict(None, rows).tolist())
    """

    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)], check=True, capture_output=True, text=True
    )

    expected = act(
        load_policy(str(run.checkpoint), inference="torch"), run.contract, [run.lanes[0][0]], [1]
    )
    assert done.stdout.splitlines()[-1] == str(expected.tolist())
    assert "absent_simulator" in done.stderr


def test_a_checkpoint_that_reads_rewards_is_warned_about(
    local_ray: None, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    case = Case(
        "MountainCar-v0",
        env_to_module=lambda env, spaces, device: [PrevActionsPrevRewards(), FlattenObservations()],
    )
    run = train(case, tmp_path)

    load_policy(str(run.checkpoint), inference="torch")

    assert "trained on previous rewards, which clients do not send" in caplog.text


def test_a_damaged_checkpoint_of_this_ray_is_said_to_be_damaged(
    trained: Callable[[str], Trained], tmp_path: Path
) -> None:
    checkpoint = shutil.copytree(trained("discrete").checkpoint, tmp_path / "checkpoint")
    module = checkpoint / "learner_group/learner/rl_module/default_policy/module_state.pkl"
    module.write_bytes(module.read_bytes()[:100])

    with pytest.raises(PolicyError, match=r"is damaged or incomplete \(.*\); copy the whole"):
        load_policy(str(checkpoint))


def test_a_checkpoint_that_needs_code_that_is_not_here_says_so(
    trained: Callable[[str], Trained], tmp_path: Path
) -> None:
    checkpoint = shutil.copytree(trained("discrete").checkpoint, tmp_path / "checkpoint")
    module = checkpoint / "learner_group/learner/rl_module/default_policy"
    # A pickle of absent_policy.Net.
    (module / "class_and_ctor_args.pkl").write_bytes(b"cabsent_policy\nNet\n.")

    with pytest.raises(PolicyError, match="needs Python modules that are missing"):
        load_policy(str(checkpoint))


@pytest.mark.parametrize(
    ("metadata", "version"), [('{"ray_version": "2.11.0"}', r"2\.11\.0"), ("{", r"\(unknown\)")]
)
def test_a_checkpoint_of_another_ray_says_which_wrote_it(
    trained: Callable[[str], Trained], tmp_path: Path, metadata: str, version: str
) -> None:
    checkpoint = shutil.copytree(trained("discrete").checkpoint, tmp_path / "checkpoint")
    module = checkpoint / "learner_group/learner/rl_module/default_policy/module_state.pkl"
    module.write_bytes(module.read_bytes()[:100])
    (checkpoint / "rllib_checkpoint.json").write_text(metadata)

    with pytest.raises(PolicyError, match=rf"written by Ray {version}, cannot be .* with Ray 2\."):
        load_policy(str(checkpoint))


def history(policy: Policy, run: Trained, num_steps: int = 8) -> list[Any]:
    """What a policy does on the observations that RLlib's EnvRunner had."""
    vector_steps = list(zip(*run.lanes, strict=True))[:num_steps]
    return [act(policy, run.contract, list(now), [NUM_LANES]) for now in vector_steps]


# --- RLModules alone -------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "folder"),
    [
        pytest.param("discrete", "default_policy", marks=pytest.mark.nightly),
        ("normalised", "."),
        ("recurrent", "default_policy"),
    ],
)
def test_an_rlmodule_alone_acts_with_rllib_s_default_connectors(
    trained: Callable[[str], Trained], tmp_path: Path, name: str, folder: str
) -> None:
    run = trained(name)
    # What RLModule.save_to_path, and MultiRLModule's, write.
    module = run.checkpoint / "learner_group" / "learner" / "rl_module" / folder
    alone = load_policy(str(shutil.copytree(module, tmp_path / "module")))

    alone.check_contract(run.contract)
    actions = history(alone, run)

    assert np.array_equal(actions, history(load_policy(str(run.checkpoint)), run))


def test_an_rlmodule_alone_can_explore(trained: Callable[[str], Trained], tmp_path: Path) -> None:
    run = trained("normalised")
    module = run.checkpoint / "learner_group" / "learner" / "rl_module" / "default_policy"
    policy = load_policy(str(shutil.copytree(module, tmp_path / "module")), explore=True)

    actions = act(policy, run.contract, [run.lanes[0][0]] * 8, [8])

    assert len(np.unique(actions)) > 1


def test_several_rlmodules_are_refused(trained: Callable[[str], Trained], tmp_path: Path) -> None:
    run = trained("discrete")
    modules = tmp_path / "modules"
    shutil.copytree(run.checkpoint / "learner_group" / "learner" / "rl_module", modules)
    (modules / "default_policy").rename(modules / "walker")

    with pytest.raises(ConfigurationError, match=r"multi-agent .*its modules are walker"):
        load_policy(str(modules))


def test_a_broken_rlmodule_is_said_to_be_damaged(
    trained: Callable[[str], Trained], tmp_path: Path
) -> None:
    run = trained("discrete")
    module = run.checkpoint / "learner_group" / "learner" / "rl_module" / "default_policy"
    broken = shutil.copytree(module, tmp_path / "module")
    (broken / "module_state.pkl").write_bytes(b"")

    with pytest.raises(PolicyError, match="is damaged or incomplete"):
        load_policy(str(broken))


# --- options ---------------------------------------------------------------------------


@contextlib.contextmanager
def noted_layers() -> Iterator[list[tuple[int, int]]]:
    """Yield the linear layers that run meanwhile: where their weights lie, and their rows."""
    found: list[tuple[int, int]] = []

    def note(module: torch.nn.Module, arguments: tuple[Any, ...]) -> None:
        if isinstance(module, torch.nn.Linear):
            found.append((module.weight.data_ptr(), len(arguments[0])))

    noting = register_module_forward_pre_hook(note)
    try:
        yield found
    finally:
        noting.remove()


@pytest.mark.parametrize("buckets", [[2, 8], pytest.param([2], marks=pytest.mark.nightly)])
@pytest.mark.parametrize(
    "name",
    ["recurrent", *(pytest.param(n, marks=pytest.mark.slow) for n in ("raw", "looking back"))],
)
def test_padding_changes_nothing(
    trained: Callable[[str], Trained], name: str, buckets: list[int]
) -> None:
    run = trained(name)
    policy = load_policy(str(run.checkpoint), buckets=buckets)
    with noted_layers() as layers:
        actions = history(policy, run)
    sizes = {num_rows for _, num_rows in layers}

    assert np.allclose(actions, history(load_policy(str(run.checkpoint)), run), atol=1e-5)
    assert sizes == ({8} if 8 in buckets else {2})


def test_a_device_that_is_not_there_is_refused(trained: Callable[[str], Trained]) -> None:
    if torch.cuda.is_available():
        pytest.skip("a GPU is there")

    with pytest.raises(ConfigurationError, match="device=cuda:0 is not available"):
        load_policy(str(trained("discrete").checkpoint), device="cuda:0")


# --- new weights -----------------------------------------------------------------------


@pytest.mark.parametrize(
    "name", [pytest.param("discrete", marks=pytest.mark.nightly), "filtered", "recurrent"]
)
def test_with_an_env_runner_s_state_it_acts_as_the_later_checkpoint(
    trained: Callable[[str], Trained], name: str
) -> None:
    run = trained(name)
    policy = exact_policy(run.checkpoint)
    assert isinstance(policy, UpdatablePolicy)
    with noted_layers() as layers:
        before = history(policy, run)
    policy.set_weights(run.later_state)
    with noted_layers() as later_layers:
        after = history(policy, run)

    assert np.array_equal(after, history(exact_policy(run.later), run))
    assert not np.array_equal(after, before)
    assert layers
    assert {weights for weights, _ in later_layers} == {weights for weights, _ in layers}


def test_what_get_weights_returns_brings_the_policy_back(
    trained: Callable[[str], Trained],
) -> None:
    run = trained("filtered")
    policy = exact_policy(run.checkpoint)
    before, weights = history(policy, run), policy.get_weights()

    policy.set_weights(run.later_state)
    policy.set_weights(weights)

    assert np.array_equal(history(policy, run), before)


def test_clients_teach_a_filter_nothing_before_and_after_new_weights(
    trained: Callable[[str], Trained],
) -> None:
    run = trained("filtered")
    policy = exact_policy(run.checkpoint)

    for state in ({}, run.later_state):
        if state:
            policy.set_weights(state)
        before = policy.get_weights()
        history(policy, run)
        assert policy.get_weights()["env_to_module_connector"] == before["env_to_module_connector"]
    assert before["env_to_module_connector"] == run.later_state["env_to_module_connector"]


def test_running_episodes_keep_their_states_over_new_weights(
    trained: Callable[[str], Trained],
) -> None:
    run = trained("recurrent")
    policy = exact_policy(run.checkpoint)
    first, second = run.lanes[0][0], Event(run.lanes[0][0].observation, np.zeros(1))

    act(policy, run.contract, [first], [1])
    of_second_step = act(policy, run.contract, [second], [1])
    act(policy, run.contract, [first], [1])
    policy.set_weights(policy.get_weights())

    assert np.array_equal(act(policy, run.contract, [second], [1]), of_second_step)


def meta(array: np.ndarray) -> torch.Tensor:
    return torch.zeros(array.shape, device="meta")


def broken_states(state: dict[str, Any]) -> dict[str, object]:
    module = dict(state["rl_module"])
    name = next(iter(module))
    filters = copy.deepcopy(state["env_to_module_connector"])
    of_lane = filters["MeanStdFilter"][None]
    of_seven = RunningStat((7,)).to_state()
    return {
        "not a mapping": [1],
        "nothing known": {"weights_seq_no": 3},
        "no module state": state | {"rl_module": [1]},
        "a weight without data": state
        | {"rl_module": module | {list(module)[-1]: meta(module[list(module)[-1]])}},
        "a missing weight": state | {"rl_module": {n: w for n, w in module.items() if n != name}},
        "an unknown weight": state | {"rl_module": module | {"unknown": module[name]}},
        "another shape": state | {"rl_module": module | {name: module[name][:1]}},
        "no count": state | {"num_env_steps_sampled_lifetime": "many"},
        "an unknown piece": state | {"env_to_module_connector": {"Unknown": {}}},
        "no connector state": state | {"module_to_env_connector": 7},
        "a broken filter": state
        | {"env_to_module_connector": {"MeanStdFilter": {None: {"shape": None}}}},
        "a filter of other observations": state
        | {
            "env_to_module_connector": {
                "MeanStdFilter": {
                    None: of_lane | {"shape": np.array([7]), "running_stats": [of_seven]}
                }
            }
        },
    }


def test_weights_that_do_not_fit_are_refused_and_nothing_changes(
    trained: Callable[[str], Trained],
) -> None:
    run = trained("filtered")
    policy = exact_policy(run.checkpoint)
    before, actions = policy.get_weights(), history(policy, run)

    for reason, weights in broken_states(run.later_state).items():
        with pytest.raises(PolicyError):
            policy.set_weights(weights)
        after = policy.get_weights()
        assert after["env_to_module_connector"] == before["env_to_module_connector"], reason
        assert np.array_equal(history(policy, run), actions), reason
    policy.set_weights(run.later_state)

    assert not np.array_equal(history(policy, run), actions)


def test_what_only_learning_needs_may_be_there_or_not(trained: Callable[[str], Trained]) -> None:
    run = trained("normalised")
    policy = exact_policy(run.checkpoint)
    whole = policy.get_weights()["rl_module"]["default_policy"]

    policy.set_weights({"rl_module": whole})
    policy.set_weights({"rl_module": {n: w for n, w in whole.items() if not n.startswith("vf.")}})
    with pytest.raises(PolicyError, match=r"missing are pi\."):
        policy.set_weights(
            {"rl_module": {n: w for n, w in whole.items() if not n.startswith("pi.")}}
        )


# --- what is remembered, and for how long ----------------------------------------------


class Name(str):
    """The name of a route or an episode, which can be referred to weakly."""

    __slots__ = ("__weakref__",)


@pytest.mark.parametrize(
    "num_episodes", [pytest.param(300), pytest.param(10_000, marks=pytest.mark.slow)]
)
@pytest.mark.parametrize(
    "name", ["recurrent", pytest.param("looking back", marks=pytest.mark.nightly)]
)
def test_nothing_grows_with_episodes_routes_and_clients(
    trained: Callable[[str], Trained], name: str, num_episodes: int
) -> None:
    run = trained(name)
    policy = exact_policy(run.checkpoint)
    observation = run.lanes[0][0].observation
    known: weakref.WeakSet[Name] = weakref.WeakSet()

    def predict(number: int) -> None:
        stays, leaves, episode = Name("stays"), Name(f"route {number}"), Name(f"{number}")
        known.update({stays, leaves, episode})
        slots = [PredictSlot(lane, episode, 0, reset=False) for lane in range(50)]
        routes = [RouteRows(stays, slots), RouteRows(leaves, slots)]
        policy.predict(run.contract, Rows(np.stack([observation] * 100), routes))

    for number in range(num_episodes // 100):
        predict(number)
        # As for a route that was closed, and for one whose client has vanished.
        policy.forget(f"route {number}", None)

    gc.collect()
    assert set(known) == {"stays", f"{number}"}
    policy.forget("stays", None)
    gc.collect()
    assert not known


def test_checkpoints_of_other_kinds_are_refused(tmp_path: Path) -> None:
    (tmp_path / "rllib_checkpoint.json").write_text("{}")

    with pytest.raises(ConfigurationError, match="has no RLModule"):
        load_policy(str(tmp_path))

    for module in ("walker", "runner"):
        (tmp_path / "learner_group/learner/rl_module" / module).mkdir(parents=True)
    with pytest.raises(ConfigurationError, match=r"multi-agent .* runner, walker"):
        load_policy(str(tmp_path))
