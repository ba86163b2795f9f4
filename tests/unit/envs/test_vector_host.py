import io
import os
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import gymnasium
import numpy as np
import pytest
from gymnasium.spaces import Box, Dict, Discrete, Text
from gymnasium.vector import SyncVectorEnv, VectorEnv
from gymnasium.vector.utils import batch_space
from PIL import Image

from rlmesh_ray.envs.commands import (
    RenderCommand,
    ResetCommand,
    ResetReply,
    StepCommand,
    StepReply,
)
from rlmesh_ray.envs.env_source import build, make_source
from rlmesh_ray.envs.lane_vector_env import LaneVectorEnv
from rlmesh_ray.envs.vector_host import VectorHost
from rlmesh_ray.errors import UnsupportedSpaceError
from rlmesh_ray.protocol.env_session import Failure, FailureKind
from rlmesh_ray.spaces.batch import flatten, unflatten
from rlmesh_ray.spaces.contract import AutoresetMode
from rlmesh_ray.spaces.gym_conversion import from_gymnasium
from rlmesh_ray.spaces.validation import (
    WARNING_KEY,
    ConformanceWarning,
    ValidationMode,
    check_rewards,
    coerce_batch,
    warnings_as_texts,
)
from rlmesh_ray.spaces.vector_infos import lane_info
from rlmesh_ray.testing.envs import SPACES, EchoEnv, Fault, FaultyEnv
from rlmesh_ray.testing.equality import assert_identical
from rlmesh_ray.transport.step_buffers import StepBuffers, create_step_buffers


def hosted(
    vector: VectorEnv[Any, Any, Any], validation: ValidationMode = ValidationMode.WARN
) -> tuple[VectorHost, StepBuffers]:
    host = VectorHost(vector, validation, "a name")
    descriptor = create_step_buffers(host.contract)
    buffers = StepBuffers(descriptor, host.contract)
    os.close(descriptor)
    host.bind_buffers(buffers)
    return host, buffers


def lanes(make: Callable[[], gymnasium.Env[Any, Any]], width: int) -> LaneVectorEnv:
    return LaneVectorEnv([make() for _ in range(width)])


def step(host: VectorHost, buffers: StepBuffers, actions: Any) -> StepReply | Failure:
    columns = coerce_batch(host.contract.action_space, actions, host.contract.num_envs)
    for target, column in zip(buffers.actions, columns, strict=True):
        if not isinstance(target, tuple):
            target[...] = column
    return host.step(StepCommand(tuple(c for c in columns if isinstance(c, tuple))))


def warnings_of(reply: object, lane: int) -> list[Any]:
    assert isinstance(reply, (ResetReply, StepReply))
    found: Any = lane_info(reply.infos, lane).get(WARNING_KEY, [])
    assert isinstance(found, list)
    return found


def observation(host: VectorHost, buffers: StepBuffers, reply: object) -> Any:
    assert isinstance(reply, (ResetReply, StepReply))
    texts = iter(reply.text_columns)
    columns = [next(texts) if isinstance(c, tuple) else c for c in buffers.observations]
    return unflatten(host.contract.observation_space, columns)


@pytest.mark.parametrize("space", SPACES.values(), ids=SPACES)
@pytest.mark.parametrize("is_foreign", [False, True])
def test_a_hosted_environment_gives_what_it_gives_in_process(
    space: gymnasium.Space[Any], is_foreign: bool
) -> None:
    bare = SyncVectorEnv([lambda: EchoEnv(space)] * 3)
    bare.action_space.seed(1)
    vector = SyncVectorEnv([lambda: EchoEnv(space)] * 3)
    host, buffers = hosted(vector if is_foreign else lanes(lambda: EchoEnv(space), 3))

    reply = host.reset(ResetCommand(seeds=(1, 2, 3), options={"level": 1}))
    assert isinstance(reply, ResetReply)
    expected: Any = bare.reset(seed=1, options={"level": 1})
    assert_identical((observation(host, buffers, reply), reply.infos), expected)
    for _ in range(12):
        actions = bare.action_space.sample()
        stepped = step(host, buffers, actions)
        assert isinstance(stepped, StepReply)
        results = buffers.results
        flags = (results.rewards, results.terminated, results.truncated)
        assert_identical(
            (observation(host, buffers, stepped), *flags, stepped.infos), bare.step(actions)
        )


def test_a_partial_reset_leaves_the_other_lanes_alone() -> None:
    host, buffers = hosted(lanes(lambda: EchoEnv(SPACES["dict"]), 3))
    before = observation(host, buffers, host.reset(ResetCommand(seeds=(1, 2, 3))))
    before = [np.copy(leaf) for leaf in flatten(host.contract.observation_space, before)]

    reply = host.reset(ResetCommand(seeds=(9,), lanes=(1,)))
    after = flatten(host.contract.observation_space, observation(host, buffers, reply))

    for old, new in zip(before, after, strict=True):
        assert_identical(
            [new[0], new[2]],
            [
                old[0].item() if old.dtype.kind == "U" else old[0],
                old[2].item() if old.dtype.kind == "U" else old[2],
            ],
        )
    assert isinstance(reply, ResetReply)
    assert reply.infos["_length"].tolist() == [False, True, False]  # type: ignore[attr-defined]


def test_an_action_outside_its_domain_never_reaches_the_environment() -> None:
    host, buffers = hosted(lanes(lambda: FaultyEnv(Fault.RAISE), 1))
    host.reset(ResetCommand())

    reply = step(host, buffers, np.array([2]))

    assert isinstance(reply, Failure)
    assert reply.kind is FailureKind.BAD_ACTION
    assert reply.message.startswith("action: ")


@pytest.mark.parametrize("fault", [Fault.NAN, Fault.WRONG_SHAPE])
@pytest.mark.parametrize("at_step", [0, 1])
def test_a_structurally_wrong_observation_is_withheld(fault: Fault, at_step: int) -> None:
    host, buffers = hosted(lanes(lambda: FaultyEnv(fault, at_step), 1), ValidationMode.OFF)

    reply: object = host.reset(ResetCommand())
    if at_step == 1:
        reply = step(host, buffers, np.array([0]))

    assert isinstance(reply, Failure)
    assert reply.kind is FailureKind.BAD_OBSERVATION
    assert reply.message.startswith("observation: ")


def test_under_strict_an_observation_out_of_range_is_withheld() -> None:
    host, buffers = hosted(lanes(lambda: FaultyEnv(Fault.OUT_OF_RANGE), 1), ValidationMode.STRICT)
    host.reset(ResetCommand())

    reply = step(host, buffers, np.array([0]))

    assert isinstance(reply, Failure)
    assert reply.kind is FailureKind.BAD_OBSERVATION


def test_under_warn_an_observation_out_of_range_is_delivered_with_one_warning() -> None:
    host, buffers = hosted(lanes(lambda: FaultyEnv(Fault.OUT_OF_RANGE), 1))
    host.reset(ResetCommand())

    first = step(host, buffers, np.array([0]))
    delivered = buffers.observations[0][0]
    host.reset(ResetCommand())
    second = step(host, buffers, np.array([0]))

    assert isinstance(first, StepReply)
    assert warnings_of(first, 0) == [
        ConformanceWarning("observation", "range", "", "2.0 is above 1.0 (lane 0, element (0,))")
    ]
    assert_identical(delivered, np.array([2.0], np.float32))
    assert isinstance(second, StepReply)
    assert WARNING_KEY not in second.infos


def test_under_off_nothing_is_said_about_ranges() -> None:
    host, buffers = hosted(lanes(lambda: FaultyEnv(Fault.OUT_OF_RANGE), 1), ValidationMode.OFF)
    host.reset(ResetCommand())

    reply = step(host, buffers, np.array([0]))

    assert reply == StepReply({})


BAD_REWARDS = [(Fault.NAN_REWARD, "nan"), (Fault.INFINITE_REWARD, "-inf")]


@pytest.mark.parametrize(("fault", "text"), BAD_REWARDS)
def test_under_warn_a_reward_that_is_not_finite_is_delivered_warned_about_once_and_counted(
    fault: Fault, text: str
) -> None:
    envs = [FaultyEnv(Fault.PRINT, 9), FaultyEnv(fault, 2)]
    host, buffers = hosted(LaneVectorEnv(envs))
    host.reset(ResetCommand())
    step(host, buffers, np.array([0, 0]))
    replies = [step(host, buffers, np.array([0, 0]))]
    counted = [host.warnings.num_found]
    bad = buffers.results.rewards[1]
    host.reset(ResetCommand())
    for _ in range(2):
        replies.append(step(host, buffers, np.array([0, 0])))
        counted.append(host.warnings.num_found)

    warning = ConformanceWarning("reward", "range", "", f"{text} is not finite (lane 1)")
    assert str(bad) == text
    assert [warnings_of(reply, 1) for reply in replies] == [[warning], [], []]
    assert counted == [1, 1, 2]


@pytest.mark.parametrize(("fault", "text"), BAD_REWARDS)
def test_under_strict_a_reward_that_is_not_finite_is_refused(fault: Fault, text: str) -> None:
    host, buffers = hosted(lanes(lambda: FaultyEnv(fault, 2), 2), ValidationMode.STRICT)
    host.reset(ResetCommand())
    step(host, buffers, np.array([0, 0]))

    reply = step(host, buffers, np.array([0, 0]))

    assert reply == Failure(
        FailureKind.BAD_OBSERVATION,
        f"reward: {text} is not finite (lane 0), at step 2 of its episode",
    )


class Forgets(EchoEnv):
    """Returns no reward."""

    def step(self, action: Any) -> Any:
        observation, _, terminated, truncated, info = super().step(action)
        return observation, None, terminated, truncated, info


@pytest.mark.parametrize("validation", [ValidationMode.WARN, ValidationMode.STRICT])
def test_none_as_a_reward_is_an_error_of_the_environment(validation: ValidationMode) -> None:
    envs = [EchoEnv(SPACES["box"]), Forgets(SPACES["box"])]
    host, buffers = hosted(LaneVectorEnv(envs), validation)
    host.reset(ResetCommand())

    with pytest.raises(TypeError, match=r"None as the reward.* \(lane 1, at step 1 of its"):
        step(host, buffers, np.zeros_like(buffers.actions[0]))


def test_none_as_a_reward_of_a_lane_that_is_stepped_alone_is_the_same_error() -> None:
    envs = [EchoEnv(SPACES["box"]), Forgets(SPACES["box"])]
    host, _buffers = hosted(LaneVectorEnv(envs, autoresets=False))
    host.reset(ResetCommand())

    assert isinstance(host.step(StepCommand((), (0,))), StepReply)
    with pytest.raises(TypeError, match=r"None as the reward.* \(lane 1, at step 1 of its"):
        host.step(StepCommand((), (1,)))


def test_with_truncation_none_as_a_reward_is_an_error_of_the_environment_too() -> None:
    def forgetful() -> Any:
        return Forgets(SPACES["box"])

    vector = build(replace(make_source(forgetful, 2), truncates_on_bad_value=True))
    host, buffers = hosted(vector)
    host.reset(ResetCommand())

    with pytest.raises(TypeError, match=r"^step\(\) returned None as the reward; return a number$"):
        step(host, buffers, np.zeros_like(buffers.actions[0]))
    assert host.failure_place == " in lane 0, at step 1 of its episode"


class Duel:
    """Agent 1's first reward is infinite; agent "a" always gets 1."""

    possible_agents: Any = ("a", 1)
    observation_spaces: Any = dict.fromkeys(("a", 1), Discrete(2))
    action_spaces = observation_spaces

    def reset(self, **_kwargs: Any) -> Any:
        return {"a": 0, 1: 0}, {}

    def step(self, actions: Any) -> Any:
        rewards = {"a": 1.0, 1: np.inf}
        return {"a": 0, 1: 0}, rewards, {"__all__": False}, {"__all__": False}, {}

    def close(self) -> None: ...


@pytest.mark.parametrize("validation", [ValidationMode.STRICT, ValidationMode.WARN])
@pytest.mark.parametrize("truncates", [False, True])
def test_a_bad_reward_of_an_agent_is_named_with_agent_and_lane(
    validation: ValidationMode, truncates: bool
) -> None:
    source = make_source(Duel, 2)
    host, _buffers = hosted(
        build(replace(source, truncates_on_bad_value=truncates), validation), validation
    )
    host.reset(ResetCommand())

    reply = host.step(StepCommand())

    expected = "inf is not finite (lane 0, agent 1)"
    if truncates or validation is ValidationMode.WARN:
        assert isinstance(reply, StepReply)
        assert warnings_of(reply, 0)[0].text.startswith(f"reward: {expected}")
    else:
        assert isinstance(reply, Failure)
        assert reply.message == f"reward: {expected}, at step 1 of its episode"


def test_under_warn_the_log_has_each_kind_and_path_once_in_a_session(
    caplog: pytest.LogCaptureFixture,
) -> None:
    vector = lanes(lambda: FaultyEnv(Fault.NAN_REWARD, 1), 2)
    host = VectorHost(vector, ValidationMode.WARN, "mine")
    buffers = create_step_buffers(host.contract)
    host.bind_buffers(StepBuffers(buffers, host.contract))
    os.close(buffers)
    for _ in range(2):
        host.reset(ResetCommand())
        for _ in range(2):
            host.step(StepCommand())

    (record,) = caplog.records
    assert record.levelname == "WARNING"
    assert record.getMessage().startswith("mine: reward: nan is not finite (lane 0); it is ")


@pytest.mark.parametrize(
    ("fault", "delivered"),
    [
        (Fault.NAN, "the last good observation was delivered instead"),
        (
            Fault.NAN_REWARD,
            "a reward of 0 and the last good observation were delivered instead",
        ),
    ],
)
def test_with_truncation_the_log_says_what_was_delivered_instead(
    fault: Fault, delivered: str, caplog: pytest.LogCaptureFixture
) -> None:
    source = make_source(lambda: FaultyEnv(fault, 1), 2)
    host, _buffers = hosted(build(replace(source, truncates_on_bad_value=True)))
    host.reset(ResetCommand())
    host.step(StepCommand())

    (record,) = caplog.records
    assert "the episode was truncated" in record.getMessage()
    assert f"; {delivered}; later ones are counted only" in record.getMessage()
    assert "nevertheless" not in record.getMessage()


def test_under_off_a_reward_may_be_anything() -> None:
    host, buffers = hosted(lanes(lambda: FaultyEnv(Fault.NAN_REWARD, 1), 2), ValidationMode.OFF)
    host.reset(ResetCommand())

    assert step(host, buffers, np.array([0, 0])) == StepReply({})


def test_rewards_whose_sum_is_too_large_are_finite() -> None:
    assert check_rewards(np.full(2, 1.7e308), ValidationMode.STRICT) == []
    assert check_rewards(np.array([np.inf, -np.inf]), ValidationMode.WARN) != []


def test_a_reward_of_a_lane_that_is_not_stepped_is_not_looked_at() -> None:
    host, buffers = hosted(
        LaneVectorEnv([FaultyEnv(Fault.NAN_REWARD), FaultyEnv(Fault.PRINT, 9)], autoresets=False)
    )
    host.reset(ResetCommand())
    first = host.step(StepCommand((), (0,)))
    num_found = host.warnings.num_found
    other = host.step(StepCommand((), (1,)))

    assert isinstance(first, StepReply)
    assert (num_found, host.warnings.num_found) == (1, 1)
    assert other == StepReply({})
    assert np.isnan(buffers.results.rewards[0])


def test_a_bad_observation_is_named_with_lane_leaf_and_step() -> None:
    class Camera(FaultyEnv):
        def __init__(self, fault: Fault) -> None:
            super().__init__(fault, 3)
            self.observation_space = Dict({"camera": self.observation_space})  # type: ignore[assignment]

        def _outcome(self) -> Any:
            observation, infos = super()._outcome()
            return {"camera": observation}, infos

    vector = LaneVectorEnv([Camera(Fault.PRINT), Camera(Fault.NAN)], autoresets=False)
    host, buffers = hosted(vector)
    host.reset(ResetCommand())
    step(host, buffers, np.array([0, 0]))
    host.reset(ResetCommand(lanes=(1,)))
    replies = [step(host, buffers, np.array([0, 0])) for _ in range(3)]

    assert replies[2] == Failure(
        FailureKind.BAD_OBSERVATION,
        "observation.camera: is NaN (lane 1, element (0,)), at step 3 of its episode",
    )


def test_under_same_step_the_observation_after_an_end_is_of_step_0() -> None:
    class EndsThenNan(FaultyEnv):
        """Ends at step 1; the episode after it begins with NaN."""

        num_resets = 0

        def reset(self, **kwargs: Any) -> Any:
            self.num_resets += 1
            if self.num_resets == 2:
                self._at_step = 0
            return super().reset(**kwargs)

        def step(self, action: Any) -> Any:
            *parts, _, truncated, infos = super().step(action)
            return *parts, True, truncated, infos

    vector = SyncVectorEnv(
        [lambda: EndsThenNan(Fault.NAN, 9)] * 2, autoreset_mode=AutoresetMode.SAME_STEP.value
    )
    host, buffers = hosted(vector)
    host.reset(ResetCommand())

    reply = step(host, buffers, np.array([0, 0]))

    assert isinstance(reply, Failure)
    assert "at step 0 of its episode" in reply.message


def test_steps_are_counted_in_each_episode() -> None:
    class Ends(FaultyEnv):
        """Ends at step 2; the second episode observes NaN at step 1."""

        num_resets = 0

        def reset(self, **kwargs: Any) -> Any:
            self.num_resets += 1
            if self.num_resets == 2:
                self._at_step = 1
            return super().reset(**kwargs)

        def step(self, action: Any) -> Any:
            *parts, _, truncated, infos = super().step(action)
            return *parts, self._step_count == 2, truncated, infos

    host, buffers = hosted(LaneVectorEnv([Ends(Fault.NAN, 99) for _ in range(2)]))
    host.reset(ResetCommand())
    replies = [step(host, buffers, np.array([0, 0])) for _ in range(4)]

    assert isinstance(replies[3], Failure)
    assert "at step 1 of its episode" in replies[3].message


def test_warnings_of_action_and_observation_are_distinguished() -> None:
    space = Box(-1.0, 1.0, (1,), np.float32)

    class Amplifier(EchoEnv):
        def step(self, action: Any) -> Any:
            return action * 2, 0.0, False, False, {}

    host, buffers = hosted(lanes(lambda: Amplifier(space), 1))
    host.reset(ResetCommand())

    reply = step(host, buffers, np.array([[3.0]], np.float32))

    assert isinstance(reply, StepReply)
    assert [warning.side for warning in warnings_of(reply, 0)] == ["action", "observation"]


class Spread(gymnasium.Env[Any, Any]):
    """Lane i leaves the bounds of leaf i in step i + 1; tells so in its own info, if asked to."""

    observation_space = Dict({name: Box(-1.0, 1.0, (), np.float64) for name in "abc"})
    action_space = Discrete(2)

    def __init__(self, lane: int, *, tells: bool) -> None:
        self.lane, self.tells = lane, tells

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        self.count = 0
        return dict.fromkeys("abc", 0.0), {"lane": self.lane}

    def step(self, action: Any) -> Any:
        self.count += 1
        is_stray = self.count == self.lane + 1
        name = "abc"[self.lane]
        info: dict[str, Any] = {"count": self.count}
        if is_stray and self.tells:
            text = f"observation.{name}: 2.0 is above 1.0 (lane {self.lane})"
            info[WARNING_KEY] = [text]
        values = {**dict.fromkeys("abc", 0.0), name: 2.0 * is_stray}
        return values, 0.0, self.count == 4 + self.lane, False, info


@pytest.mark.parametrize(
    ("mode", "is_foreign"),
    [
        (AutoresetMode.NEXT_STEP, False),
        (AutoresetMode.DISABLED, False),
        *((mode, True) for mode in AutoresetMode),
    ],
)
def test_warnings_have_the_form_of_an_info_of_gymnasiums_lanes(
    mode: AutoresetMode, is_foreign: bool
) -> None:
    def vector(*, tells: bool) -> SyncVectorEnv:
        envs = [lambda lane=lane: Spread(lane, tells=tells) for lane in range(3)]
        return SyncVectorEnv(envs, autoreset_mode=mode.value)

    if is_foreign:
        hosted_vector: Any = vector(tells=False)
    else:
        envs = [Spread(lane, tells=False) for lane in range(3)]
        hosted_vector = LaneVectorEnv(envs, autoresets=mode is AutoresetMode.NEXT_STEP)
    host, buffers = hosted(hosted_vector)
    theirs: Any = vector(tells=True)
    reply: Any = host.reset(ResetCommand())
    assert_identical(reply.infos, theirs.reset()[1])

    for number in range(1, 7):
        if mode is AutoresetMode.DISABLED and number == 4:
            break
        reply = step(host, buffers, np.zeros(3, np.int64))
        local = theirs.step(np.zeros(3, np.int64))[4]
        if number > 3:  # a session is warned once of each leaf
            for key in (WARNING_KEY, f"_{WARNING_KEY}"):
                local.pop(key, None)
        assert_identical(warnings_as_texts(reply.infos), local)


class Noted:
    """An observer that keeps the columns of the last step, and the frames of the last reset."""

    def reset(self, *arguments: Any) -> None:
        self.render = arguments[-1]

    def step(self, columns: Any, *_: Any) -> None:
        self.columns = columns

    def close(self) -> None:
        """Do nothing."""


def test_an_observer_sees_the_texts_of_a_step_of_some_lanes() -> None:
    noted = Noted()
    words = Text(3, charset="abc")
    vector = LaneVectorEnv([EchoEnv(words), EchoEnv(words)], autoresets=False)
    host = VectorHost(vector, ValidationMode.WARN, "a name", noted)
    descriptor = create_step_buffers(host.contract)
    host.bind_buffers(StepBuffers(descriptor, host.contract))
    os.close(descriptor)
    host.reset(ResetCommand())

    host.step(StepCommand((("abc",),), (1,)))
    assert noted.columns[1] == ("", "abc")

    host.step(StepCommand((("a", "bc"),)))
    assert noted.columns[1] == ("a", "bc")


class Painted(EchoEnv):
    """Renders only after a reset, as environments of ``gymnasium.make`` do."""

    shade = 0

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        self.shade = 7
        return super().reset(seed=seed, options=options)

    def render(self) -> Any:
        assert self.shade
        return np.full((2, 2, 3), self.shade, np.uint8)


def test_an_observer_sees_lanes_black_that_have_never_been_reset() -> None:
    noted = Noted()
    space = Box(-1.0, 1.0, (1,), np.float32)
    vector = LaneVectorEnv([Painted(space, render_mode="rgb_array") for _ in range(3)])
    host = VectorHost(vector, ValidationMode.WARN, "a name", noted)
    for lanes_reset, shades in (((1,), [0, 7, 0]), ((2, 0), [7, 7, 7])):
        host.reset(ResetCommand(lanes=lanes_reset))
        assert [frame.max() for frame in noted.render()] == shades


def test_each_kind_of_deviation_is_reported() -> None:
    class Wordy(EchoEnv):
        def _observation(self, digest: int) -> Any:
            return "zzzzz"

    host, _ = hosted(lanes(lambda: Wordy(Text(3, charset="abc")), 1))

    reply = host.reset(ResetCommand())

    assert isinstance(reply, ResetReply)
    assert [warning.kind for warning in warnings_of(reply, 0)] == ["length", "charset"]
    assert reply.text_columns == (("zzzzz",),)


def test_a_vector_s_own_infos_are_not_written_to() -> None:
    own: dict[str, Any] = {}

    class KeepingEnv(SyncVectorEnv):
        def reset(self, **kwargs: Any) -> Any:
            return np.full((1, 1), 9.0, np.float32), own

    host, _ = hosted(KeepingEnv([lambda: EchoEnv(Box(0.0, 1.0, (1,), np.float32))]))

    reply = host.reset(ResetCommand())

    assert isinstance(reply, ResetReply)
    assert WARNING_KEY in reply.infos
    assert own == {}


def test_the_last_infos_of_ended_lanes_are_returned() -> None:
    host, buffers = hosted(lanes(lambda: EchoEnv(SPACES["discrete"], max_length=1), 2))
    host.reset(ResetCommand())

    reply = step(host, buffers, np.array([0, 1]))

    assert isinstance(reply, StepReply)
    assert {lane: infos["step"] for lane, infos in reply.final_infos.items()} == {0: 1, 1: 1}


def test_an_environment_may_keep_its_action() -> None:
    kept: list[Any] = []

    class KeepingEnv(EchoEnv):
        def step(self, action: Any) -> Any:
            kept.append(action)
            return super().step(action)

    space = SPACES["box"]
    host, buffers = hosted(lanes(lambda: KeepingEnv(space), 1))
    host.reset(ResetCommand())

    step(host, buffers, np.full((1, 2, 3), 1.0, np.float32))
    step(host, buffers, np.full((1, 2, 3), 2.0, np.float32))

    assert [action[0, 0] for action in kept] == [1.0, 2.0]


def test_what_the_environment_raises_passes_through() -> None:
    host, buffers = hosted(lanes(lambda: FaultyEnv(Fault.RAISE), 1))
    host.reset(ResetCommand())

    with pytest.raises(ValueError, match="broken"):
        step(host, buffers, np.array([0]))


@pytest.mark.parametrize(("width", "size"), [(1, (8, 6)), (3, (16, 12))])
def test_rendering_tiles_the_lanes(width: int, size: tuple[int, int]) -> None:
    host, _ = hosted(lanes(lambda: EchoEnv(SPACES["box"], render_mode="rgb_array"), width))
    host.reset(ResetCommand())

    png = host.render(RenderCommand()).png

    assert png is not None
    with Image.open(io.BytesIO(png), formats=["PNG"]) as image:
        assert image.size == size


def test_there_is_no_frame_before_the_first_reset() -> None:
    host, _ = hosted(lanes(lambda: EchoEnv(SPACES["box"], render_mode="rgb_array"), 1))

    assert host.render(RenderCommand()).png is None


@pytest.mark.parametrize("mode", [None, "human", "ansi"])
def test_there_is_no_frame_in_other_render_modes(mode: str | None) -> None:
    host, _ = hosted(lanes(lambda: EchoEnv(SPACES["box"], render_mode=mode), 1))
    host.reset(ResetCommand())

    assert host.render(RenderCommand()).png is None


def test_the_contract_describes_the_environment() -> None:
    vector = LaneVectorEnv(
        [gymnasium.make("CartPole-v1", render_mode="rgb_array") for _ in range(2)]
    )

    contract = VectorHost(vector, ValidationMode.WARN, "unused").contract

    assert contract.id == "CartPole-v1"
    assert contract.observation_space == from_gymnasium(vector.single_observation_space)
    assert contract.action_space == from_gymnasium(vector.single_action_space)
    assert contract.num_envs == 2
    assert contract.autoreset_mode is AutoresetMode.NEXT_STEP
    assert contract.render_mode == "rgb_array"
    assert contract.metadata == {"render_modes": ["human", "rgb_array"], "render_fps": 50}
    assert contract.spec == {
        "id": "CartPole-v1",
        "max_episode_steps": 500,
        "reward_threshold": 475.0,
        "nondeterministic": False,
    }


@pytest.mark.parametrize(
    ("name", "env_id"),
    [
        ("course:make", "course:make"),
        ("course:Course.make", "course:Course.make"),
        ("gymnasium:CartPole-v1", "CartPole-v1"),
        ("make", "CartPole-v1"),
        ("functools.partial(<function make>, {'a': 1})", "CartPole-v1"),
    ],
)
def test_own_code_that_is_given_by_name_keeps_its_name(name: str, env_id: str) -> None:
    vector = LaneVectorEnv([gymnasium.make("CartPole-v1")])

    contract = VectorHost(vector, ValidationMode.WARN, name).contract

    assert (contract.id, contract.spec["id"]) == (env_id, "CartPole-v1")


def up_to(*highs: float, mode: Any) -> SyncVectorEnv:
    """Return lanes whose observations are in [0, high]."""
    envs = [EchoEnv(Box(0.0, high, (1,), np.float32)) for high in highs]
    for env in envs:
        env.action_space = Discrete(2)
    makers: list[Any] = [lambda env=env: env for env in envs]
    return SyncVectorEnv(makers, observation_mode=mode)


def test_lanes_of_different_bounds_are_refused() -> None:
    with pytest.raises(UnsupportedSpaceError, match="give all lanes the widest bounds"):
        VectorHost(up_to(1.0, 2.0, 3.0, mode="different"), ValidationMode.STRICT, "a name")


def test_lanes_that_are_given_the_widest_bounds_are_served() -> None:
    widest = Box(0.0, 3.0, (1,), np.float32)
    vector = up_to(1.0, 2.0, 3.0, mode=(batch_space(widest, 3), widest))

    contract = VectorHost(vector, ValidationMode.STRICT, "a name").contract

    assert contract.observation_space == from_gymnasium(widest)


@pytest.mark.parametrize("spec", [None, object()], ids=["no spec", "a spec without an id"])
def test_a_contract_without_an_id_has_the_source_s_name(spec: Any) -> None:
    vector = lanes(lambda: EchoEnv(SPACES["box"]), 1)
    vector.spec = spec

    contract = VectorHost(vector, ValidationMode.WARN, "a name").contract

    assert contract.id == "a name"
    assert contract.render_mode == ""
    assert contract.autoreset_mode is AutoresetMode.DISABLED


def test_closing_closes_the_environment() -> None:
    vector = lanes(lambda: EchoEnv(SPACES["box"]), 1)

    VectorHost(vector, ValidationMode.WARN, "a name").close()

    assert vector.closed
