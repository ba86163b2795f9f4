"""Some lanes of a host, while the others stand still."""

import io
import os
from collections.abc import Callable
from typing import Any

import gymnasium
import numpy as np
import pytest
from gymnasium.spaces import Box, Discrete
from gymnasium.vector import AutoresetMode, SyncVectorEnv, VectorEnv
from PIL import Image

from rlmesh_ray.envs.commands import (
    RenderCommand,
    RenderReply,
    ResetCommand,
    ResetReply,
    StepCommand,
    StepReply,
)
from rlmesh_ray.envs.lane_vector_env import LaneVectorEnv
from rlmesh_ray.envs.vector_host import VectorHost
from rlmesh_ray.errors import ConfigurationError
from rlmesh_ray.protocol.env_session import Failure, FailureKind
from rlmesh_ray.spaces.batch import split, stack, unflatten
from rlmesh_ray.spaces.validation import WARNING_KEY, ValidationMode
from rlmesh_ray.spaces.vector_infos import lane_info
from rlmesh_ray.testing.envs import SPACES, EchoEnv, Fault, FaultyEnv
from rlmesh_ray.testing.equality import assert_identical
from rlmesh_ray.transport.step_buffers import StepBuffers, create_step_buffers

Env = gymnasium.Env[Any, Any]


class Rig:
    """A host with its block, driven as an endpoint drives it."""

    def __init__(
        self, vector: VectorEnv[Any, Any, Any], validation: ValidationMode = ValidationMode.WARN
    ) -> None:
        self.host = VectorHost(vector, validation, "a name")
        descriptor = create_step_buffers(self.host.contract)
        self.buffers = StepBuffers(descriptor, self.host.contract)
        os.close(descriptor)
        self.host.bind_buffers(self.buffers)

    def step(self, actions: list[Any], lanes: tuple[int, ...]) -> StepReply | Failure:
        """Step ``lanes``, with one of ``actions`` for each."""
        texts = []
        columns = stack(self.host.contract.action_space, actions)
        for target, column in zip(self.buffers.actions, columns, strict=True):
            if isinstance(target, tuple):
                assert isinstance(column, tuple)
                texts.append(column)
            else:
                target[list(lanes)] = column
        return self.host.step(StepCommand(tuple(texts), lanes))

    def observation(self, reply: object, lane: int) -> Any:
        """Return what is observed in ``lane``."""
        assert isinstance(reply, (ResetReply, StepReply)), reply
        texts = iter(reply.text_columns)
        columns = [next(texts) if isinstance(c, tuple) else c for c in self.buffers.observations]
        own = split(columns, [1] * self.host.contract.num_envs)[lane]
        return unflatten(self.host.contract.observation_space, [column[0] for column in own])


def alone(
    make: Callable[[], Env], width: int = 3, validation: ValidationMode = ValidationMode.WARN
) -> Rig:
    return Rig(LaneVectorEnv([make() for _ in range(width)], autoresets=False), validation)


@pytest.mark.parametrize("space", SPACES.values(), ids=SPACES)
def test_lanes_that_are_stepped_alone_give_what_bare_environments_give(
    space: gymnasium.Space[Any],
) -> None:
    rig = alone(lambda: EchoEnv(space))
    bare = [EchoEnv(space) for _ in range(3)]
    space.seed(5)

    for lane in (2, 0, 1):
        reset = rig.host.reset(ResetCommand(seeds=(lane,), options={"a": 1}, lanes=(lane,)))
        observation, info = bare[lane].reset(seed=lane, options={"a": 1})
        assert_identical(rig.observation(reset, lane), as_stored(rig, observation))
        assert isinstance(reset, ResetReply)
        assert_identical(lane_info(reset.infos, lane), info)
    over: set[int] = set()
    for lanes in [(1,), (0, 2), (2, 1, 0), (0, 1, 2), (0,)] * 3:
        actions = [space.sample() for _ in lanes]
        reply = rig.step(actions, lanes)
        assert isinstance(reply, StepReply), reply
        for lane, action in zip(lanes, actions, strict=True):
            observation, reward, terminated, truncated, info = bare[lane].step(action)
            assert_identical(rig.observation(reply, lane), as_stored(rig, observation))
            results = rig.buffers.results
            flags = (results.terminated[lane], results.truncated[lane])
            assert (results.rewards[lane], *flags) == (reward, terminated, truncated)
            assert_identical(lane_info(reply.infos, lane), info)
            # A step past the end sees the flags again, but no other episode has ended.
            ends = (terminated or truncated) and lane not in over
            assert (lane in reply.final_infos) == ends
            over |= {lane} if ends else set()
        assert all(lane_info(reply.infos, lane) == {} for lane in range(3) if lane not in lanes)


def as_stored(rig: Rig, observation: Any) -> Any:
    spec = rig.host.contract.observation_space
    return unflatten(spec, [column[0] for column in stack(spec, [observation])])


def test_what_other_lanes_hold_is_not_looked_at() -> None:
    rig = alone(lambda: EchoEnv(Discrete(3, start=5)), validation=ValidationMode.STRICT)

    assert isinstance(rig.host.reset(ResetCommand(lanes=(1,))), ResetReply)
    rig.buffers.actions[0][0] = 99  # type: ignore[index]
    assert isinstance(rig.step([np.int64(6)], (1,)), StepReply)


def test_a_wrong_action_names_its_lane_and_reaches_no_environment() -> None:
    rig = alone(lambda: FaultyEnv(Fault.RAISE))
    rig.host.reset(ResetCommand())

    reply = rig.step([np.int64(0), np.int64(7)], (0, 2))

    assert isinstance(reply, Failure)
    assert reply.kind is FailureKind.BAD_ACTION
    assert "lane 2" in reply.message


def test_a_wrong_observation_names_its_lane() -> None:
    rig = alone(lambda: FaultyEnv(Fault.NAN))
    rig.host.reset(ResetCommand())

    reply = rig.step([np.int64(0)], (1,))

    assert isinstance(reply, Failure)
    assert reply.kind is FailureKind.BAD_OBSERVATION
    assert "lane 1" in reply.message


def test_warnings_of_lanes_stepped_alone_come_once_and_name_the_first_lane() -> None:
    rig = alone(lambda: FaultyEnv(Fault.OUT_OF_RANGE))
    rig.host.reset(ResetCommand())

    first, second = (rig.step([np.int64(0)], (lane,)) for lane in (2, 0))

    assert isinstance(first, StepReply)
    assert isinstance(second, StepReply)
    assert WARNING_KEY not in lane_info(first.infos, 0)
    warnings: Any = lane_info(first.infos, 2)[WARNING_KEY]
    (warning,) = warnings
    assert warning.detail == "2.0 is above 1.0 (lane 2, element (0,))"
    assert WARNING_KEY not in second.infos


def test_a_partial_reset_warns_of_lanes_that_have_begun_only() -> None:
    rig = alone(lambda: EchoEnv(Box(2.0, 3.0, (1,), np.float32)))

    reply = rig.host.reset(ResetCommand(lanes=(0, 1)))

    assert isinstance(reply, ResetReply)
    assert WARNING_KEY not in reply.infos


def test_an_action_is_a_copy_of_its_row() -> None:
    kept: list[Any] = []

    class KeepingEnv(EchoEnv):
        def step(self, action: Any) -> Any:
            kept.append(action)
            return super().step(action)

    rig = alone(lambda: KeepingEnv(SPACES["box"]))
    rig.host.reset(ResetCommand())

    for value in (1.0, 2.0):
        rig.step([np.full((2, 3), value, np.float32)], (1,))

    assert [action[0, 0] for action in kept] == [1.0, 2.0]


def test_only_single_environments_that_do_not_reset_themselves_can_be_stepped_alone() -> None:
    def make() -> Env:
        return EchoEnv(SPACES["discrete"])

    disabled = SyncVectorEnv([make] * 2, autoreset_mode=AutoresetMode.DISABLED)
    vectors = [LaneVectorEnv([make()]), LaneVectorEnv([make(), make()]), disabled]

    assert [Rig(vector).host.steps_subsets for vector in vectors] == [True, False, False]
    assert alone(make).host.steps_subsets


def test_a_foreign_vector_refuses_to_step_some_lanes() -> None:
    rig = Rig(SyncVectorEnv([lambda: EchoEnv(SPACES["discrete"])] * 2))
    rig.host.reset(ResetCommand())

    with pytest.raises(ConfigurationError, match="all of its lanes or none"):
        rig.step([np.int64(0)], (1,))


def test_all_lanes_in_order_are_a_step_like_any_other() -> None:
    make = EchoEnv
    rig = Rig(SyncVectorEnv([lambda: make(SPACES["discrete"])] * 2))
    rig.host.reset(ResetCommand(lanes=(0, 1)))

    assert isinstance(rig.step([np.int64(0), np.int64(1)], (0, 1)), StepReply)


# --- pictures --------------------------------------------------------------------------


def size(reply: RenderReply) -> tuple[int, int] | None:
    if reply.png is None:
        return None
    with Image.open(io.BytesIO(reply.png), formats=["PNG"]) as image:
        return image.size


def drawing() -> Env:
    return EchoEnv(SPACES["discrete"], render_mode="rgb_array")


@pytest.mark.parametrize("is_foreign", [False, True])
def test_a_picture_may_be_of_some_lanes(is_foreign: bool) -> None:
    rig = Rig(SyncVectorEnv([drawing] * 3)) if is_foreign else alone(drawing)
    rig.host.reset(ResetCommand())

    pictures = [rig.host.render(RenderCommand(lanes)) for lanes in [(1,), (2, 0), (), (0, 1, 2)]]

    assert [size(picture) for picture in pictures] == [(8, 6), (16, 6), (16, 12), (16, 12)]


def test_a_picture_is_of_the_lane_that_was_asked_for() -> None:
    rig = alone(drawing)
    rig.host.reset(ResetCommand())
    rig.step([np.int64(0)], (1,))

    shades = []
    for lane in range(3):
        png = rig.host.render(RenderCommand((lane,))).png
        assert png is not None
        with Image.open(io.BytesIO(png), formats=["PNG"]) as image:
            shades.append(image.getpixel((0, 0)))

    assert shades == [(0, 0, 0), (1, 1, 1), (0, 0, 0)]


def test_lanes_that_have_never_been_reset_are_not_drawn() -> None:
    rig = alone(drawing)
    rig.host.reset(ResetCommand(lanes=(1,)))

    assert size(rig.host.render(RenderCommand())) == (8, 6)
    assert rig.host.render(RenderCommand((0, 2))).png is None


@pytest.mark.parametrize("is_wrapped", [False, True])
def test_a_vector_that_draws_one_picture_of_all_gives_that(is_wrapped: bool) -> None:
    class Painter(SyncVectorEnv):
        def render(self) -> Any:
            picture = np.zeros((3, 7, 3), np.uint8)  # as high as there are lanes
            return (picture,) if is_wrapped else picture

    rig = Rig(Painter([drawing] * 3))
    rig.host.reset(ResetCommand())

    assert size(rig.host.render(RenderCommand((1,)))) == (7, 3)
