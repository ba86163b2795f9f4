"""Recordings and RLlib: episodes of a training are recorded, and recordings are trained on."""

import atexit
import logging
import os
import pickle
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from ray.data.extensions import ArrowTensorArray
from ray.rllib.algorithms.algorithm_config import AlgorithmConfig
from ray.rllib.connectors.module_to_env import NormalizeAndClipActions
from ray.rllib.core.columns import Columns
from ray.rllib.env.single_agent_episode import SingleAgentEpisode
from ray.rllib.utils import force_list
from ray.rllib.utils.metrics import WEIGHTS_SEQ_NO
from ray.rllib.utils.spaces.space_utils import (
    clip_action,
    get_base_struct_from_space,
    normalize_action,
    unsquash_action,
)

from rlmesh_ray.compat.rllib import connector_of
from rlmesh_ray.errors import ConfigurationError
from rlmesh_ray.options import require_count
from rlmesh_ray.recording.options import AUTO, RENDER, RecordOptions, picture_position
from rlmesh_ray.recording.recorder import Abandoned, Segment, WriterHandle, info_of
from rlmesh_ray.recording.store import Recording, Store, removed_on_error
from rlmesh_ray.rllib.config.rollout_plan import PLAN_KEY
from rlmesh_ray.spaces.batch import coerce, drop_unit_axis, flatten, leaves, unflatten
from rlmesh_ray.spaces.contract import EnvContract
from rlmesh_ray.spaces.gym_conversion import from_gymnasium
from rlmesh_ray.spaces.spec import BoxSpec, DiscreteSpec, SpaceSpec

_LOG = logging.getLogger("rlmesh_ray.recording")
_LAST_WRITES_S = 30.0


def record_episodes(
    config: AlgorithmConfig, record: str | Path | RecordOptions, *, every: int = 1
) -> AlgorithmConfig:
    """Have env runners record episodes: all of evaluation, and of training each ``every``-th.

    A callback takes them from each sample: what steps is not slowed, and the fast path stays.
    Observations are those that RLlib's episodes hold; actions are what the environment got, as
    ``normalize_actions`` and ``clip_actions`` make it of them. Runners on other machines need the
    same folder. Where connectors change the observations' space, a folder with episodes of another
    one is refused by the writer, which logs it.

    Args:
        config: A config after ``rlmesh_ray.rllib.configure``, with one agent and its connectors;
            changed.
        record: The folder, or options.
        every: Which episodes of training each runner records: the first one, and so on.

    Raises:
        ConfigurationError: The config has no endpoints yet, or the folder or the image cannot be
            used.
    """
    require_count("every", every)
    plan = config.env_config.get(PLAN_KEY)
    if plan is None:
        raise ConfigurationError("record_episodes comes after rlmesh_ray.rllib.configure")
    options = RecordOptions.of(record)
    options = replace(options, folder=Path(options.folder).absolute())
    _check_video(options.video, plan.contract)
    store, info = Store(options.folder), info_of(plan.contract)
    if connector_of(config, "env_to_module") is None:
        store.require(info)
    else:  # it may change the observations of episodes
        store.prepare(info)
    callbacks = force_list(config.callbacks_on_sample_end)
    recorder = SampleRecorder(options, plan.contract, every)
    config.callbacks(on_sample_end=[*callbacks, recorder])
    return config


def _check_video(video: str, contract: EnvContract) -> None:
    """Refuse a wrong name, and frames of ``render``, of which RLlib's episodes have none."""
    is_leaf = picture_position(video, contract.observation_space) is not None
    if video == RENDER:
        raise ConfigurationError(
            "video='render' (--record-video): a training's episodes hold no frames of render; "
            "name an image of the observations, or record at the endpoint (serve-env --record)"
        )
    if video == AUTO and contract.render_mode == "rgb_array" and not is_leaf:
        _LOG.warning(
            "no videos are recorded: a training's episodes hold no frames of render; for those "
            "record at the endpoint (serve-env --record)"
        )


class SampleRecorder:
    """A callback ``on_sample_end``; each process has a writer of its own."""

    def __init__(
        self,
        options: RecordOptions,
        contract: EnvContract,
        every: int,
        new_writer: Callable[[RecordOptions], WriterHandle] = WriterHandle,
    ) -> None:
        self._new_writer = new_writer
        self._arguments = options, contract, every
        self._writer: WriterHandle | None = None
        self._key = ""
        self._num_begun = 0
        self._has_failed = False
        self._chosen: dict[str, None] = {}
        """Ids of running episodes that are recorded, the one last heard of at the end."""

    def __reduce__(self) -> Any:
        return SampleRecorder, self._arguments

    def __call__(
        self, *, env_runner: Any, samples: Sequence[SingleAgentEpisode], **_: object
    ) -> None:
        """Record the chunks of episodes in a sample; never raises."""
        try:
            for chunk in () if self._has_failed else samples:
                self._record(env_runner, chunk)
            while len(self._chosen) > env_runner.num_envs:  # their lanes have others
                self._abandon(next(iter(self._chosen)))
        except Exception as error:  # noqa: BLE001  # what samples must not notice
            self._has_failed = True
            name = type(error).__name__
            _LOG.warning("a runner's episodes are not recorded any more: %s: %s", name, error)

    def close(self) -> None:
        """Have what is left written, when the runner stops: Ray then kills its process."""
        if self._writer is not None:
            atexit.unregister(self.close)
            self._writer.close(_LAST_WRITES_S)
            self._writer = None

    def _record(self, env_runner: Any, chunk: SingleAgentEpisode) -> None:
        begins = chunk.t_started == 0
        is_chosen = begins and self._choose(bool(env_runner.config.in_evaluation))
        if is_chosen or chunk.id_ in self._chosen:
            self._chosen.pop(chunk.id_, None)
            self._chosen[chunk.id_] = None
        if chunk.id_ in self._chosen and len(chunk):
            self._put(env_runner, chunk, begins=begins)
        if chunk.is_done:
            self._chosen.pop(chunk.id_, None)

    def _abandon(self, id_: str) -> None:
        del self._chosen[id_]
        if self._writer is not None:
            self._writer.put(self._key, Abandoned(id_))  # no further segment of it comes

    def _choose(self, is_evaluation: bool) -> bool:
        self._num_begun += 1
        return is_evaluation or (self._num_begun - 1) % self._arguments[2] == 0

    def _put(self, env_runner: Any, chunk: SingleAgentEpisode, *, begins: bool) -> None:
        options, contract, _ = self._arguments
        spaces = chunk.observation_space, chunk.action_space
        observation, action = (from_gymnasium(space) for space in spaces)
        if self._writer is None:
            self._writer = self._new_writer(options)
            atexit.register(self.close)
            contract = replace(contract, observation_space=observation, action_space=action)
            role = "evaluation runner" if env_runner.config.in_evaluation else "env runner"
            endpoint = f"{role} {env_runner.worker_index}"
            self._key = self._writer.new_stream(contract, endpoint)
        fit = None if _is_random(env_runner) else _fit(env_runner)
        segment = _segment(chunk, observation, action, fit, begins=begins)
        if not self._writer.put(self._key, segment, len(pickle.dumps(segment, 5))):
            self._writer.lose(1)
            if begins:  # the writer has nothing of it
                del self._chosen[chunk.id_]
            else:
                self._abandon(chunk.id_)


def _fit(env_runner: Any) -> Callable[[Any, Any], Any] | None:
    """Return what RLlib's connector ``NormalizeAndClipActions`` does to actions, if it is there."""
    pieces = getattr(env_runner._module_to_env, "connectors", ())
    for piece in pieces:
        if isinstance(piece, NormalizeAndClipActions):
            fit: Callable[[Any, Any], Any]
            fit = unsquash_action if piece.normalize_actions else clip_action
            return fit if piece.normalize_actions or piece.clip_actions else None
    return None


def _is_random(env_runner: Any) -> bool:
    """Return whether ``sample`` draws from the action space: episodes hold these actions then."""
    sampling = getattr(env_runner, "sampling", None)
    return sampling is not None and bool(sampling.call.random_actions)


def _segment(
    chunk: SingleAgentEpisode,
    observation: SpaceSpec,
    action: SpaceSpec,
    fit: Callable[[Any, Any], Any] | None,
    *,
    begins: bool,
) -> Segment:
    """Return the rows of a chunk; RLlib repeats the last observation of the former one."""
    first = 0 if begins else 1
    count = len(chunk) + 1 - first
    observations = _columns(observation, chunk.get_observations(), len(chunk) + 1)
    steps = _columns(action, chunk.get_actions(), len(chunk))
    if fit is not None:
        actions = fit(unflatten(action, steps), get_base_struct_from_space(chunk.action_space))
        steps = _columns(action, actions, len(chunk))
    rewards = np.asarray(chunk.get_rewards(), np.float64)
    flags = np.zeros((2, count), np.bool_)
    flags[:, -1] = chunk.is_terminated, chunk.is_truncated
    versions = chunk.get_extra_model_outputs(WEIGHTS_SEQ_NO)
    return Segment(
        chunk.id_,
        [
            *(column[first:] for column in observations),
            *(_after_reset(column, begins=begins) for column in (*steps, rewards)),
            *flags,
        ],
        chunk.get_infos()[first:],
        begins=begins,
        ends=chunk.is_done,
        policy_version=int(versions[-1]),
    )


def _columns(space: SpaceSpec, values: Any, count: int) -> list[Any]:
    parts = zip(leaves(space), flatten(space, values), strict=True)
    return [coerce(leaf, drop_unit_axis(leaf, part), count) for leaf, part in parts]


def _after_reset(column: Any, *, begins: bool) -> Any:
    """Return a column of steps with a row for the reset, where the chunk has one."""
    if not begins:
        return column
    if isinstance(column, tuple):
        return ("", *column)
    return np.concatenate([np.zeros_like(column[:1]), column])


def offline_data(config: AlgorithmConfig, recording: Recording) -> AlgorithmConfig:
    """Write a recording as rows that RLlib's offline API reads, and have ``config`` read them.

    Args:
        config: An offline algorithm, such as BC; gets the spaces and ``offline_data(input_=...)``.
            Where it has ``normalize_actions``, as by default, the rows have the actions in the
            module's scale.
        recording: One whose observations and actions are an array each. The rows are written to a
            file in ``rllib/`` of its folder, one for each scale, which is replaced when the new
            one is whole.

    Raises:
        ConfigurationError: The spaces have several leaves or text, or number actions from another
            number than 0; or the recording has no episode.
    """
    info = recording.info
    for space in (info.observation_space, info.action_space):
        if len(leaves(space)) != 1 or leaves(space)[0].dtype is None:
            raise ConfigurationError(
                "RLlib's offline API reads one array an observation and an action, and "
                f"{recording.folder} has {space!r:.80}; read it with load(), and flatten it"
            )
    if isinstance(info.action_space, DiscreteSpec) and info.action_space.start:
        raise ConfigurationError(
            f"RLlib's modules number actions from 0, and {recording.folder} has "
            f"{recording.action_space}; record the environment in a wrapper that numbers them so"
        )
    normalize = bool(config.normalize_actions)
    tables = (_rows(recording, each.id, normalize=normalize) for each in recording.episodes)
    first = next(tables, None)
    if first is None:
        raise ConfigurationError(f"{recording.folder} has no episode yet; record some first")
    path = recording.folder / "rllib" / f"{'normalized' if normalize else 'recorded'}.parquet"
    path.parent.mkdir(exist_ok=True)
    temporary = path.with_name(f".{os.getpid()}-{os.urandom(4).hex()}.tmp")
    with removed_on_error(temporary):  # a training may be reading the former file
        with pq.ParquetWriter(temporary, first.schema) as writer:
            for table in chain([first], tables):
                writer.write_table(table)
        temporary.replace(path)
    config.environment(
        observation_space=recording.observation_space, action_space=recording.action_space
    )
    return config.offline_data(input_=[str(path.absolute())], input_read_episodes=False)


def _rows(recording: Recording, id_: str, *, normalize: bool) -> pa.Table:
    episode = recording.episode(id_)
    actions = episode.actions
    if normalize and isinstance(recording.info.action_space, BoxSpec):
        actions = _normalized(actions, recording.action_space)
    if recording.action_space.shape == () and isinstance(recording.info.action_space, BoxSpec):
        actions = actions[:, np.newaxis]  # as RLlib's modules give it; see drop_unit_axis
    count = len(episode.rewards)
    ends = np.zeros((2, count), np.bool_)
    ends[:, -1] = episode.summary.terminated, episode.summary.truncated
    return pa.table(
        {
            Columns.EPS_ID: [id_] * count,
            Columns.T: np.arange(count),
            Columns.OBS: _tensor(episode.observations[:-1]),
            Columns.NEXT_OBS: _tensor(episode.observations[1:]),
            Columns.ACTIONS: _tensor(actions),
            Columns.REWARDS: episode.rewards,
            Columns.TERMINATEDS: ends[0],
            Columns.TRUNCATEDS: ends[1],
        }
    )


def _normalized(actions: Any, space: Any) -> Any:
    """Return the actions that RLlib's ``unsquash_action`` makes these of."""
    if not space.is_bounded():
        return actions
    if np.issubdtype(space.dtype, np.integer):
        return actions - space.low
    with np.errstate(invalid="ignore"):  # 0 / 0, where there is one value only
        normalized = np.asarray(normalize_action(actions, space), space.dtype)
    return np.where(space.high > space.low, normalized, np.zeros_like(normalized))


def _tensor(values: Any) -> Any:
    return values if values.ndim == 1 else ArrowTensorArray.from_numpy(values)
