"""The fast path of a runner: all lanes of a slot are processed as arrays.

RLlib's default connectors take the batch apart lane by lane and put it together again, which is
most of the time that sampling takes. The results here are the same to the last bit; the fast path
is taken only where that is certain, see ``ineligibility``.
"""

import gc
from collections.abc import Iterable, Sequence
from functools import lru_cache
from operator import itemgetter
from typing import TYPE_CHECKING, Any, NamedTuple

import gymnasium
import numpy as np
import tree
from numpy.typing import NDArray
from ray.rllib.callbacks.callbacks import RLlibCallback
from ray.rllib.connectors.common.flatten_observations import FlattenObservations
from ray.rllib.connectors.env_to_module import EnvToModulePipeline
from ray.rllib.connectors.module_to_env import ModuleToEnvPipeline
from ray.rllib.core.columns import Columns
from ray.rllib.env.single_agent_episode import SingleAgentEpisode
from ray.rllib.utils.metrics import RLMODULE_INFERENCE_TIMER, WEIGHTS_SEQ_NO
from ray.rllib.utils.numpy import flatten_inputs_to_1d_tensor
from ray.rllib.utils.spaces.space_utils import unbatch

from rlmesh_ray.errors import RlmeshError
from rlmesh_ray.models.rllib.fast_path import (
    DEFAULT_ENV_TO_MODULE,
    DEFAULT_MODULE_TO_ENV,
    ArrayConnectors,
    FastForward,
    as_arrays,
    connector_types,
)
from rlmesh_ray.rllib.config.rollout_plan import plan_of
from rlmesh_ray.rllib.runner.autoreset_emulation import SessionBatch
from rlmesh_ray.rllib.runner.episode_buffer import EndedEpisode, EpisodeBuffer
from rlmesh_ray.rllib.runner.sampling_path import SamplingPath, SingleAgentPath
from rlmesh_ray.rllib.runner.session_recovery import truncate
from rlmesh_ray.rllib.runner.slot import Slot, SlotPhase

if TYPE_CHECKING:
    from rlmesh_ray.rllib.runner.env_runner import RLMeshEnvRunner


FAST_PATH_IS_OFF = "configure(fast_path=False) turned it off"
"""The reason why a runner whose plan says so does not take the fast path."""

_EPISODE_CALLBACKS = (
    "on_episode_created",
    "on_episode_start",
    "on_episode_step",
    "on_episode_end",
)
_OBSERVATIONS = (gymnasium.spaces.Box,)
_ACTIONS = (
    gymnasium.spaces.Box,
    gymnasium.spaces.Discrete,
    gymnasium.spaces.MultiDiscrete,
    gymnasium.spaces.MultiBinary,
)
"""Also spaces of which FlattenObservations makes one array, of a batch as of single lanes."""


def ineligibility(runner: "RLMeshEnvRunner") -> str | None:
    """Return why this call of ``sample`` cannot take the fast path; None: it can.

    The fast path has no single episodes between two steps, so nothing may read or write them there.
    """
    if not plan_of(runner.config).fast_path:
        return FAST_PATH_IS_OFF
    if runner.sampling.call.random_actions:
        return "actions are drawn at random"
    if runner.module is None:
        return "there is no module"
    if runner.module.is_stateful():
        return "the module has a state"
    if not runner.episodes_to_numpy:
        return "episodes_to_numpy is off"
    return (
        _custom_connector(runner)
        or _observations(runner)
        or _no_arrays(runner.env.single_action_space, _ACTIONS)
        or _episode_callback(runner)
    )


def flattener_of(runner: Any) -> FlattenObservations | None:
    """Return the FlattenObservations that is the first connector of a runner; None: it is not."""
    first = runner.pipelines[0].connectors[0]
    return first if type(first) is FlattenObservations else None


def _observations(runner: Any) -> str | None:
    flattener = flattener_of(runner)
    if flattener is None:
        return _no_arrays(runner.env.single_observation_space, _OBSERVATIONS)
    if flattener._multi_agent or flattener._as_learner_connector:
        return "FlattenObservations is set up for several agents or for a learner"
    for space in tree.flatten(flattener._input_obs_base_struct):
        if isinstance(space, gymnasium.spaces.Discrete) and space.start != 0:
            return f"FlattenObservations encodes other values than those of {space}"
        reason = _no_arrays(space, _ACTIONS)
        if reason:
            return reason
    return None


def _no_arrays(
    space: gymnasium.Space[Any], kinds: Sequence[type[gymnasium.Space[Any]]]
) -> str | None:
    if type(space) in kinds:
        return None
    return f"{type(space).__name__} is not a space whose values are arrays"


def _custom_connector(runner: Any) -> str | None:
    flattening = (FlattenObservations, *DEFAULT_ENV_TO_MODULE)
    to_module, to_env = runner.pipelines
    for kind, pipeline, pipeline_type, allowed in (
        ("env_to_module", to_module, EnvToModulePipeline, (DEFAULT_ENV_TO_MODULE, flattening)),
        ("module_to_env", to_env, ModuleToEnvPipeline, (DEFAULT_MODULE_TO_ENV,)),
    ):
        if type(pipeline) is not pipeline_type:
            return f"{type(pipeline).__name__} is not RLlib's own"
        own = connector_types(pipeline)
        if own not in allowed:
            custom = sorted(
                {each.__name__ for each in own} - {each.__name__ for each in allowed[-1]}
            )
            named = f": it has {', '.join(custom)}" if custom else ""
            return f"the {kind} pipeline is not RLlib's default{named}"
    return None


def _episode_callback(runner: Any) -> str | None:
    for name in _EPISODE_CALLBACKS:
        if getattr(runner.config, f"callbacks_{name}"):
            return f"there is a callback {name}"
        for kind in map(type, runner._callbacks):
            if getattr(kind, name) is not getattr(RLlibCallback, name):
                return f"{kind.__name__} has a callback {name}"
    return None


class ActionBatch(NamedTuple):
    """A module's output for all lanes: one row for each lane everywhere."""

    actions: NDArray[Any]
    actions_for_env: NDArray[Any]
    extras: dict[str, Any]
    """The module's other outputs: arrays, with few exceptions."""

    def split(self, widths: Sequence[int]) -> "list[ActionBatch] | None":
        """Return batches of so many lanes each; None: an output has no row for each lane."""
        columns = (self.actions, self.actions_for_env, *self.extras.values())
        if any(not isinstance(c, np.ndarray) or len(c) != sum(widths) for c in columns):
            return None
        ends = np.cumsum(widths).tolist()
        return [
            ActionBatch(
                self.actions[end - width : end],
                self.actions_for_env[end - width : end],
                {name: column[end - width : end] for name, column in self.extras.items()},
            )
            for width, end in zip(widths, ends, strict=True)
        ]


class ArrayPipeline:
    """The module and the connectors of a runner on arrays, for one call of ``sample``.

    Args:
        runner: A runner without an ``ineligibility``.
        explore: Whether the module explores.
    """

    def __init__(self, runner: Any, *, explore: bool) -> None:
        self._explore = explore
        self._inference = runner.inference_choice(explore=explore, draws=True)
        self._forward = FastForward(runner.module, explore=explore)
        to_module, to_env = runner.pipelines
        self._connectors = ArrayConnectors(
            to_module, to_env, runner.module, runner.env.single_action_space, explore=explore
        )
        self.flattener = flattener = flattener_of(runner)
        """Flattens observations before they are stored; None: they are stored as they are."""
        self.observation_space: gymnasium.Space[Any] = (
            flattener.observation_space if flattener else runner.env.single_observation_space
        )
        """Space of one lane's observations, as they are stored."""
        self._num_runners = runner.config.num_env_runners or 1
        self._steps_before = runner.num_env_steps_sampled_lifetime // self._num_runners
        self._timer = runner.metrics.log_time(RLMODULE_INFERENCE_TIMER)

    def flattened(self, observation: Any) -> NDArray[Any]:
        """Return observations as an episode stores them: an array with one row for each lane.

        RLlib's FlattenObservations encodes one lane after the other, with a function that can
        encode a batch as well.
        """
        flattener = self.flattener
        if flattener is None:
            rows: NDArray[Any] = observation
            return rows
        rows = flatten_inputs_to_1d_tensor(
            flattener._remove_keys_from_dict(observation, None), flattener._input_obs_base_struct
        )
        return rows

    def choose(self, observations: NDArray[Any], sampled: int) -> ActionBatch:
        """Run the module, and return its actions.

        Args:
            observations: One row for each lane.
            sampled: Environment steps of this call of ``sample`` so far.
        """
        t = (self._steps_before + sampled) * self._num_runners
        with self._timer:
            arrays = self._inference.run(self._in_torch, observations, t)
        actions_for_env = self._connectors.actions_for_env(arrays)
        arrays.pop(Columns.ACTIONS_FOR_ENV, None)
        return ActionBatch(arrays.pop(Columns.ACTIONS), actions_for_env, arrays)

    def _in_torch(self, observations: NDArray[Any], t: int) -> dict[str, Any]:
        to_module = self._connectors.to_module(observations)
        output = self._forward(to_module, t=t) if self._explore else self._forward(to_module)
        self._connectors.add_actions(output)
        return as_arrays(output)


class FastPath(SamplingPath):
    """Does what ``SingleAgentPath`` does, with the same episodes, without a loop over lanes.

    Episodes are built while no result has arrived, and at the end of ``sample``. Where it cannot
    continue, ``SingleAgentPath`` takes over in the middle of the running episodes.

    Args:
        runner: A runner without an ``ineligibility``, in a call of ``sample`` that resets it.
    """

    def __init__(self, runner: "RLMeshEnvRunner") -> None:
        self._runner = runner
        self._sampling = runner.sampling
        self._buffers: dict[Slot, EpisodeBuffer] = {}
        self._ended: list[EndedEpisode] = []
        self._begin_call()

    def _begin_call(self) -> None:
        self._pipeline = ArrayPipeline(self._runner, explore=self._sampling.call.explore)
        self._was_training = getattr(self._runner.module, "training", False)
        self._num_sent = 0

    def resume(self) -> None:
        reason = ineligibility(self._runner)
        if reason:
            self._leave(reason)
        else:
            self._begin_call()

    # --- from observations to actions -----------------------------------------------------

    def act_on(self, idle: Sequence[Slot]) -> None:
        """Choose for several slots in one forward pass, which costs little more than for one.

        It is for half of all slots at most, so that the environments of the others work meanwhile.
        """
        most = max(len(self._sampling.slots) // 2, 1)
        for first in range(0, len(idle), most):
            together = self._within_budget(idle[first : first + most])
            if not together:
                return
            for number, chosen in enumerate(self._choose(together)):
                if not self._send(together[number], chosen):
                    self._sampling.path.act_on([*together[number + 1 :], *idle[first + most :]])
                    return

    def _within_budget(self, idle: Sequence[Slot]) -> list[Slot]:
        taken: list[Slot] = []
        call = self._sampling.call
        in_flight = call.in_flight
        for slot in idle:
            if not call.is_open:
                break
            slot.num_in_flight = self._num_running(slot)
            call.in_flight += slot.num_in_flight
            taken.append(slot)
        call.in_flight = in_flight
        return taken

    def _choose(self, together: Sequence[Slot]) -> Iterable[ActionBatch]:
        pipeline, sampled = self._pipeline, self._sampling.call.timesteps
        if len(together) == 1:
            return (pipeline.choose(together[0].to_module, sampled),)
        joined = np.concatenate([slot.to_module for slot in together])
        batches = pipeline.choose(joined, sampled).split([len(slot.lanes) for slot in together])
        return batches or (pipeline.choose(slot.to_module, sampled) for slot in together)

    def _num_running(self, slot: Slot) -> int:
        """Return how many timesteps a step brings: a lane that has ended starts anew instead."""
        return len(slot.lanes) - self._buffers[slot].num_over

    def _send(self, slot: Slot, chosen: ActionBatch) -> bool:
        """Send the actions for a slot, and keep them for the episodes.

        Returns:
            Whether the fast path continues: the module's output must be arrays whose kind stays.
        """
        call = self._sampling.call
        columns = {
            Columns.ACTIONS: chosen.actions,
            **chosen.extras,
            WEIGHTS_SEQ_NO: _filled(len(chosen.actions), call.weights_seq_no),
        }
        if not self._buffers[slot].takes(columns):
            path = self._leave("the module's output is not arrays of unchanging dtype and shape")
            to_env = {
                Columns.ACTIONS: chosen.actions,
                Columns.ACTIONS_FOR_ENV: chosen.actions_for_env,
                **{name: unbatch(column) for name, column in chosen.extras.items()},
            }
            path.send(slot, to_env)
            return False
        slot.extras = columns
        call.in_flight += slot.num_in_flight
        slot.step(chosen.actions_for_env)
        self._num_sent += 1
        return True

    # --- from results to episodes ---------------------------------------------------------

    def add_resets(self, slot: Slot, batch: SessionBatch) -> None:
        observation = self._pipeline.flattened(batch.observation)
        self._buffers[slot] = EpisodeBuffer(
            observation,
            batch.infos,
            lookback=self._runner.config.episode_lookback_horizon,
            observation_space=self._pipeline.observation_space,
            action_space=self._runner.env.single_action_space,
        )
        slot.to_module = observation

    def add_steps(self, slot: Slot, batch: SessionBatch) -> None:
        assert slot.extras is not None, "what _send has left there"
        buffer, call = self._buffers[slot], self._sampling.call
        call.timesteps += self._num_running(slot)
        slot.to_module = batch.observation = self._pipeline.flattened(batch.observation)
        buffer.add(batch, slot.extras)
        call.episodes += buffer.num_over

    def interrupt(self, slot: Slot, cause: RlmeshError) -> int:
        buffer = self._buffers.pop(slot, None)
        if buffer is None:
            return 0  # its episodes have not begun
        chunks = self._cut(buffer)
        for chunk in chunks:
            truncate(chunk, cause)
        self._sampling.call.interrupted += chunks
        for episode_id in buffer.running_ids:
            self._runner.forget_chunks(episode_id)
        return len(buffer.running_ids)

    def work_ahead(self) -> bool:
        return any(buffer.make_one() for buffer in self._buffers.values())

    def conclude(self, *, continues: bool) -> list[SingleAgentEpisode]:
        chunks: list[SingleAgentEpisode] = []
        was_enabled = gc.isenabled()
        gc.disable()  # many objects are made, all of which stay
        try:
            for buffer in self._buffers.values():
                chunks += self._cut(buffer)
        finally:
            if was_enabled:
                gc.enable()
        self._return_ended()
        if not continues:
            return []
        for chunk in chunks:
            self._runner.keep_chunk(chunk)
        return chunks

    def _cut(self, buffer: EpisodeBuffer) -> list[SingleAgentEpisode]:
        ended, chunks = buffer.cut()
        self._ended += ended
        return chunks

    def _return_ended(self) -> None:
        self._ended.sort(key=itemgetter(0))
        call = self._sampling.call
        call.returned += [episode for _, episode in self._ended][: call.num_episodes]
        self._ended = []

    # --- back to RLlib's per-item path ----------------------------------------------------

    def _leave(self, reason: str) -> SingleAgentPath:
        path = SingleAgentPath(self._runner)
        self._runner.take_path(path, reason)
        self.finish()
        for slot in self._sampling.slots:
            buffer = self._buffers.pop(slot, None)
            if buffer is not None:
                self._hand_over(slot, buffer, path)
        self._return_ended()
        return path

    def _hand_over(self, slot: Slot, buffer: EpisodeBuffer, path: SingleAgentPath) -> None:
        lanes = slot.lanes
        over = buffer.is_over.tolist()
        ended, running = buffer.hand_over()
        self._ended += ended
        self._sampling.episodes[lanes.start : lanes.stop] = running
        if slot.phase is SlotPhase.STEPPING:  # path.add_steps will take its result
            columns = dict(slot.extras or {})
            del columns[WEIGHTS_SEQ_NO]
            slot.actions, slot.extras = columns.pop(Columns.ACTIONS), columns
        # Without the connector that a buffer's observations have passed already, if any.
        pipeline, _ = self._runner.pipelines
        connectors = pipeline.connectors
        pipeline.connectors = [one for one in connectors if one is not self._pipeline.flattener]
        try:
            path.prepare(slot, {})
        finally:
            pipeline.connectors = connectors
        for lane, is_over in zip(lanes, over, strict=True):
            if is_over:
                self._runner.begin_episode(lane)

    def finish(self) -> None:
        module = self._runner.module
        if self._was_training and not module.training:
            module.train()  # as RLlib's forward pass leaves it; see FastForward
        self._was_training = False
        if self._num_sent:
            self._runner.count_attempts(self._num_sent)
            self._num_sent = 0


@lru_cache(maxsize=16)
def _filled(count: int, number: int) -> NDArray[np.int64]:
    """Return an array of equal numbers, to be read only."""
    return np.full(count, number)
