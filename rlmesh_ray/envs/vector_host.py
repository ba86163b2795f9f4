"""VectorHost: executes the commands of a session on its environment, with conformance checks.

Exceptions of the environment propagate; values of the client or of the environment that violate the
conformance rules are returned as a Failure (edition 2026.06, "Value Conformance").
"""

import io
import logging
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Protocol

import numpy as np
from gymnasium.vector import VectorEnv
from numpy.typing import NDArray

from rlmesh_ray.envs import commands
from rlmesh_ray.envs.env_source import OWN_CODE
from rlmesh_ray.envs.lane_vector_env import (
    LaneVectorEnv,
    MissingAttributeError,
    NoteResets,
    TruncateOnBadValue,
)
from rlmesh_ray.envs.multi_agent import MultiAgentLane
from rlmesh_ray.envs.vector_adapter import VectorEnvAdapter, autoreset_mode, id_of
from rlmesh_ray.errors import ConformanceError
from rlmesh_ray.protocol.env_session import Failure, FailureKind
from rlmesh_ray.spaces.batch import Column, leaves
from rlmesh_ray.spaces.contract import AutoresetMode, EnvContract
from rlmesh_ray.spaces.gym_conversion import from_gymnasium, require_one_space, spec_fields
from rlmesh_ray.spaces.validation import (
    Checker,
    ConformanceWarning,
    ValidationMode,
    WarningCounter,
    check_rewards,
    warnings_info,
)
from rlmesh_ray.transport.step_buffers import StepBuffers


def encode_png(frames: list[NDArray[np.uint8]]) -> bytes:
    """Return a PNG of ``frames``, tiled row by row in a nearly square grid.

    There is at least one. All have one shape, ``(height, width, 3) uint8`` or another that Pillow
    knows.
    """
    # Late: most workers never render.
    from PIL import Image

    stream = io.BytesIO()
    # The default of 6 takes 1.4 times as long for a drawing, and 1.7 times for a camera's picture.
    Image.fromarray(_tiled(frames)).save(stream, format="PNG", compress_level=1)
    return stream.getvalue()


def as_frames(rendered: Any) -> list[NDArray[np.uint8]]:
    """Return the frames in a VectorEnv's render result: a sequence, a batch, or a single frame.

    Raises TypeError for what is not a picture.
    """
    if rendered is None:
        return []
    if isinstance(rendered, np.ndarray) and rendered.ndim == 3:
        return [_pixels(rendered)]
    return [_pixels(np.asarray(frame)) for frame in rendered if frame is not None]


def _pixels(frame: NDArray[Any]) -> NDArray[np.uint8]:
    is_picture = frame.ndim == 2 or (frame.ndim == 3 and frame.shape[2] in (2, 3, 4))
    pixels = frame
    if frame.dtype != np.uint8:
        is_picture &= frame.dtype.kind in "biuf"
        with np.errstate(invalid="ignore"):
            pixels = frame.astype(np.uint8) if is_picture else frame
        is_picture &= np.array_equal(pixels, frame)
    if not is_picture:
        raise TypeError(
            f"render() returned {frame.dtype} of shape {frame.shape}, which is not a picture: "
            "return (height, width, 3) uint8, or whole numbers from 0 to 255"
        )
    return pixels


def _tiled(frames: list[NDArray[np.uint8]]) -> NDArray[np.uint8]:
    num_columns = math.ceil(math.sqrt(len(frames)))
    num_rows = math.ceil(len(frames) / num_columns)
    height, width, *pixel = frames[0].shape
    grid = np.zeros((num_rows * num_columns, height, width, *pixel), np.uint8)
    grid[: len(frames)] = frames
    rows = grid.reshape(num_rows, num_columns, height, width, *pixel).swapaxes(1, 2)
    return rows.reshape(num_rows * height, num_columns * width, *pixel)


_LOG = logging.getLogger(__name__)


class StepObserver(Protocol):
    """Gets the resets and steps of an env worker's session; its methods never raise."""

    def reset(
        self,
        chosen: Sequence[int],
        seeds: Sequence[int | None],
        observations: Sequence[Column],
        infos: Mapping[str, object],
        render: Callable[[], Sequence[Any]],
        /,
    ) -> None:
        """Note a reset of the ``chosen`` lanes; ``render`` returns a frame of each lane."""

    def step(
        self,
        columns: Sequence[Column],
        infos: Mapping[str, object],
        render: Callable[[], Sequence[Any]],
        lanes: Sequence[int],
        /,
    ) -> None:
        """Note a step of ``lanes`` (empty: all).

        The columns are, over all lanes, the observations, the actions, rewards and flags.
        """

    def close(self) -> None:
        """Give what has been noted to who outlives this process, which ends; in a few seconds."""


def checked(
    checker: Checker, columns: Sequence[Column], lanes: Sequence[int] = ()
) -> list[ConformanceWarning]:
    """Return a warning for each kind and leaf of range violations in a batch.

    ``lanes`` are those of the rows in ``columns``; empty: all. Raises as ``Checker.check``.
    """
    try:
        found = checker.check(columns)
    except ConformanceError as error:
        if not lanes or error.lane is None:
            raise
        lane = lanes[error.lane]
        reason = _with_lane(error.reason, error.lane, lane)
        raise ConformanceError(error.kind, error.path, reason, lane) from error
    warnings = []
    for one in found:
        lane = lanes[one.lane] if lanes else one.lane
        detail = _with_lane(one.detail, one.lane, lane)
        warnings.append(replace(one, detail=detail, lane=lane))
    return warnings


def _with_lane(text: str, row: int, lane: int) -> str:
    return text.replace(f"(lane {row}", f"(lane {lane}")


def rows_of(columns: Sequence[Column], lanes: Sequence[int]) -> list[Column]:
    return [
        tuple(column[lane] for lane in lanes) if isinstance(column, tuple) else column[list(lanes)]
        for column in columns
    ]


class VectorHost:
    """The environment of one session, driven by commands; it owns vector and observer.

    Raises UnsupportedSpaceError for a space that a contract cannot express. For ``name`` see
    ``describe``.
    """

    def __init__(
        self,
        vector: VectorEnv[Any, Any, Any],
        validation: ValidationMode,
        name: str,
        observer: StepObserver | None = None,
    ) -> None:
        self._observer = observer
        self._lanes: LaneVectorEnv | VectorEnvAdapter = (
            vector if isinstance(vector, LaneVectorEnv) else VectorEnvAdapter(vector)
        )
        self._draws = vector.render_mode == "rgb_array"
        self._begun: set[int] = set()
        self._over: set[int] = set()
        self.contract = contract = describe(vector, name)
        self.steps_subsets = isinstance(vector, LaneVectorEnv) and vector.steps_subsets
        """Whether any of its lanes can be stepped alone."""
        self._all_lanes = range(contract.num_envs)
        self._action_checker = Checker(leaves(contract.action_space), validation, "action")
        self._observation_checker = Checker(leaves(contract.observation_space), validation)
        self._validation = validation
        self.warnings = WarningCounter()
        """Counts the values that were out of range, or truncated an episode."""
        self._envs = vector.envs if isinstance(vector, LaneVectorEnv) else ()
        self._truncating = [env for env in self._envs if isinstance(env, TruncateOnBadValue)]
        self._num_steps = 0
        self._began = [0] * contract.num_envs  # ``_num_steps`` at the start of a lane's episode
        self._actions: list[Column] = []
        self._has_texts = any(leaf.dtype is None for leaf in leaves(contract.observation_space))

    def bind_buffers(self, buffers: StepBuffers) -> None:
        self._actions = buffers.actions
        self._lanes.observations, self._lanes.results = buffers.observations, buffers.results

    def note_resets_by(self, note: NoteResets) -> None:
        if isinstance(self._lanes, LaneVectorEnv):
            self._lanes.note_resets = note

    def reset(self, command: commands.ResetCommand) -> commands.ResetReply | Failure:
        lanes = command.lanes or self._all_lanes
        for lane in lanes:
            self._began[lane] = self._num_steps
        infos = self._lanes.reset_lanes(lanes, command.seeds, command.options)
        self._begun.update(lanes)
        self._over.difference_update(lanes)
        # Lanes that have never been reset have no observation to check.
        own = () if len(self._begun) == len(self._all_lanes) else lanes
        try:
            found = self._check_observations(own)
        except ConformanceError as error:
            return self._refused("observation", error)
        if self._observer is not None:
            observations = self._lanes.observations
            self._observer.reset(lanes, command.seeds, observations, infos, self._frames)
        return commands.ResetReply(self._with_warnings(infos, found), self._texts())

    def step(self, command: commands.StepCommand) -> commands.StepReply | Failure:
        lanes = command.lanes
        if lanes and lanes == tuple(self._all_lanes):
            lanes = ()
        actions = self._own_actions(command.text_columns, lanes)
        try:
            found = checked(self._action_checker, actions, lanes)
        except ConformanceError as error:
            return Failure(FailureKind.BAD_ACTION, str(error.about("action")))
        self._num_steps += 1
        if lanes:
            for lane in set(self._all_lanes).difference(lanes):
                self._began[lane] += 1
        infos = self._lanes.step_columns(actions, lanes)
        try:
            found += self._check_observations(lanes)
        except ConformanceError as error:
            return self._refused("observation", error)
        rewards = self._lanes.results.rewards
        if lanes:  # the other lanes' rewards are those of earlier steps
            rewards = np.zeros_like(rewards)
            rewards[list(lanes)] = self._lanes.results.rewards[list(lanes)]
        try:
            bad_rewards = check_rewards(rewards, self._validation)
        except ConformanceError as error:
            return self._refused("reward", error)
        if bad_rewards:
            found += self._reward_warnings(bad_rewards)
        for env in self._truncating:
            found += env.take_found()
        if self._observer is not None:
            self._observer.step(self._columns(actions, lanes), infos, self._frames, lanes)
        return commands.StepReply(
            self._with_warnings(infos, found) if found else infos,
            self._final_infos() if self._lanes.final_infos else {},
            self._texts() if self._has_texts else (),
        )

    def _check_observations(self, lanes: Sequence[int]) -> list[ConformanceWarning]:
        """Write the new observations into the buffers; check those of ``lanes`` (empty: all)."""
        self._lanes.flush()
        columns = self._lanes.observations
        rows = rows_of(columns, lanes) if lanes else columns
        return checked(self._observation_checker, rows, lanes)

    @property
    def failure_place(self) -> str:
        """Lane and step of an exception, as the end of a sentence; empty where unknown."""
        lane = self._lanes.lane_in_progress
        return "" if lane is None else f" in lane {lane}{self._step_of(lane)}"

    def call(self, command: commands.CallCommand) -> commands.CallReply | Failure:
        lanes = command.lanes or self._all_lanes
        try:
            results = self._lanes.call_lanes(command.name, command.arguments, lanes)
        except MissingAttributeError as error:
            return Failure(FailureKind.BAD_REQUEST, f"AttributeError: {error}")
        return commands.CallReply(tuple(results))

    def render(self, command: commands.RenderCommand) -> commands.RenderReply:
        began_s = time.perf_counter()
        frames = self.draw(command.lanes)
        png = encode_png(frames) if frames else None
        return commands.RenderReply(png, time.perf_counter() - began_s)

    def draw(self, lanes: Sequence[int] = ()) -> list[NDArray[np.uint8]]:
        """Return frames of ``lanes`` (empty: all) that have been reset, if the mode has any."""
        begun = [lane for lane in lanes or self._all_lanes if lane in self._begun]
        return as_frames(self._lanes.render_lanes(begun)) if self._draws and begun else []

    def close(self) -> None:
        try:
            if self._observer is not None:  # first: the environment may end the process, or hang
                self._observer.close()
        finally:
            self._lanes.close()

    def _final_infos(self) -> dict[int, dict[str, Any]]:
        infos = self._lanes.final_infos
        if self.contract.autoreset_mode is AutoresetMode.DISABLED:
            # A step after an end reports the flags again, but no further episode has ended.
            infos = {lane: info for lane, info in infos.items() if lane not in self._over}
            self._over.update(infos)
        else:
            is_next = self.contract.autoreset_mode is AutoresetMode.NEXT_STEP
            for lane in infos:
                self._began[lane] = self._num_steps + is_next
        return infos

    def _own_actions(
        self, text_columns: commands.TextColumns, lanes: Sequence[int]
    ) -> list[Column]:
        """Return copies: an environment may keep its action, and the buffers are overwritten."""
        texts = iter(text_columns)
        columns = rows_of(self._actions, lanes) if lanes else self._actions
        return [next(texts) if isinstance(column, tuple) else column.copy() for column in columns]

    def _columns(self, actions: Sequence[Column], lanes: Sequence[int]) -> list[Column]:
        # An environment may have changed its own copies of the actions; texts are in no buffer.
        taken = [
            self._over_all(own, lanes) if isinstance(own, tuple) else column
            for own, column in zip(actions, self._actions, strict=True)
        ]
        results = self._lanes.results
        flags = results.terminated, results.truncated
        return [*self._lanes.observations, *taken, results.rewards, *flags]

    def _over_all(self, texts: tuple[str, ...], lanes: Sequence[int]) -> tuple[str, ...]:
        by_lane = dict(zip(lanes or self._all_lanes, texts, strict=True))
        return tuple(by_lane.get(lane, "") for lane in self._all_lanes)

    def _frames(self) -> list[NDArray[np.uint8]]:
        """Return a frame of each lane; black for those that have never been reset."""
        lanes = sorted(self._begun)
        frames = as_frames(self._lanes.render_lanes(lanes))
        if not frames or len(lanes) == len(self._all_lanes):
            return frames
        by_lane = dict(zip(lanes, frames, strict=True))
        return [by_lane.get(lane, np.zeros_like(frames[0])) for lane in self._all_lanes]

    def _reward_warnings(self, found: Sequence[ConformanceWarning]) -> list[ConformanceWarning]:
        self._require_rewards()
        return [replace(one, detail=self._naming_agents(one.detail, one.lane)) for one in found]

    def _naming_agents(self, reason: str, lane: int | None) -> str:
        """Return ``reason`` about a lane's reward, with the agents whose reward it is."""
        env = self._envs[lane] if lane is not None and self._envs else None
        agents = env.agents_without_reward if isinstance(env, MultiAgentLane) else ""
        return reason.replace(f"(lane {lane}", f"(lane {lane}, {agents}") if agents else reason

    def _require_rewards(self) -> None:
        """Raise TypeError for a reward that is None, which NumPy has converted to NaN."""
        lane = self._lanes.lane_without_reward
        if lane is not None:
            raise TypeError(
                f"step() returned None as the reward; return a number (lane {lane}"
                f"{self._step_of(lane)})"
            )

    def _with_warnings(
        self, infos: dict[str, Any], found: list[ConformanceWarning]
    ) -> dict[str, Any]:
        unreported = self.warnings.unreported(found)
        for warning in unreported:
            _LOG.warning(
                "%s: %s; %s; later ones are counted only (statistics().deviations)",
                self.contract.id,
                warning.text,
                _delivered(warning),
            )
        if not unreported:
            return infos
        return {**infos, **warnings_info(unreported, self.contract.num_envs)}

    def _refused(self, side: str, error: ConformanceError) -> Failure:
        if side == "reward":
            self._require_rewards()
            reason = self._naming_agents(error.reason, error.lane)
            error = ConformanceError(error.kind, error.path, reason, error.lane)
        failure_place = ""
        if error.lane is not None:
            is_same_step = self.contract.autoreset_mode is AutoresetMode.SAME_STEP
            if side == "observation" and is_same_step and error.lane in self._lanes.final_infos:
                failure_place = ", at step 0 of its episode"  # the autoreset began it in this step
            else:
                failure_place = self._step_of(error.lane)
        return Failure(FailureKind.BAD_OBSERVATION, f"{error.about(side)}{failure_place}")

    def _step_of(self, lane: int) -> str:
        return f", at step {max(self._num_steps - self._began[lane], 0)} of its episode"

    def _texts(self) -> commands.TextColumns:
        return tuple([column for column in self._lanes.observations if isinstance(column, tuple)])


def _delivered(warning: ConformanceWarning) -> str:
    if warning.kind != "truncated":
        return "it is delivered nevertheless"
    if warning.side == "reward":
        return "a reward of 0 and the last good observation were delivered instead"
    return "the last good observation was delivered instead"


def describe(vector: VectorEnv[Any, Any, Any], name: str) -> EnvContract:
    """Return the contract of ``vector``; raise ConfigurationError where it cannot be expressed.

    ``name`` is the id of own code (``module:factory``), and of an environment whose spec has none.
    """
    for side in ("observation", "action"):
        single = getattr(vector, f"single_{side}_space")
        require_one_space(side, single, getattr(vector, f"{side}_space", single))
    metadata = {key: value for key, value in vector.metadata.items() if key != "autoreset_mode"}
    return EnvContract(
        id=name if OWN_CODE.fullmatch(name) else id_of(vector) or name,
        observation_space=from_gymnasium(vector.single_observation_space),
        action_space=from_gymnasium(vector.single_action_space),
        num_envs=vector.num_envs,
        autoreset_mode=autoreset_mode(vector),
        render_mode=vector.render_mode or "",
        metadata=metadata,
        spec=spec_fields(vector),
    )
