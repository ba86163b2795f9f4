"""RLlib's episodes out of what simulators have sent."""

import copy
import uuid
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from ray.rllib.core.columns import Columns
from ray.rllib.core.rl_module.rl_module import RLModule
from ray.rllib.env.single_agent_episode import SingleAgentEpisode

from rlmesh_ray.dialects.rllink.runner.sample_queue import (
    EpisodeProgress,
    ReceivedChunk,
    WeightsVersion,
)
from rlmesh_ray.dialects.rllink.runner.sample_validation import SampleSpaces
from rlmesh_ray.dialects.rllink.wire import messages as m
from rlmesh_ray.models.rllib.fast_path import as_arrays
from rlmesh_ray.models.rllib.forward import distribution_inputs
from rlmesh_ray.rllib.runner.episode_buffer import EpisodeFactory

_MOST_ROWS = 1024


@dataclass(slots=True, eq=False)
class _Segment:
    """Chunks that follow each other without a gap: to RLlib, one episode.

    Where a chunk has been dropped, what comes after it is another episode: replay buffers put
    chunks of one id together, and would find that they do not fit.
    """

    id_: str
    num_steps: int
    next_step: int
    """Of the simulator's episode."""
    tail: m.Chunk | None = None
    """The last steps, for episodes that look back."""


class LogpRecomputer:
    """Recomputes log-probabilities and distribution inputs of actions that came without them.

    Args:
        module: The module. It is not changed; a copy of it gets the weights.
    """

    def __init__(self, module: RLModule) -> None:
        self._original = module
        self._module: Any = None
        self._seq_no: int | None = None

    def outputs(
        self, weights: WeightsVersion, chunks: Sequence[m.Chunk]
    ) -> list[dict[str, m.Array]]:
        """Return, for each chunk, the distributions' inputs and the actions' log-probabilities.

        Args:
            weights: The weights that chose the actions.
            chunks: Chunks of these weights; they are computed together.
        """
        if self._module is None:
            self._module = copy.deepcopy(self._original)
        if self._seq_no != weights.seq_no:
            self._module.set_state(dict(weights.state))
            self._seq_no = weights.seq_no
        obs = torch.as_tensor(np.concatenate([chunk.obs[:-1] for chunk in chunks]))
        actions = torch.as_tensor(np.concatenate([chunk.actions for chunk in chunks]))
        with torch.no_grad():
            # Not all at once: what a network of pixels holds meanwhile would not fit.
            rows = [distribution_inputs(self._module, part) for part in obs.split(_MOST_ROWS)]
            inputs = torch.cat(rows)
            kind = self._module.get_exploration_action_dist_cls()
            logp = kind.from_logits(inputs).logp(actions)
        arrays = as_arrays({Columns.ACTION_DIST_INPUTS: inputs, Columns.ACTION_LOGP: logp})
        ends = np.cumsum([len(chunk) for chunk in chunks])[:-1]
        names = {
            m.ACTION_DIST_INPUTS: arrays[Columns.ACTION_DIST_INPUTS],
            m.ACTION_LOGP: arrays[Columns.ACTION_LOGP],
        }
        parts = {name: np.split(values, ends) for name, values in names.items()}
        return [
            {name: parts[name][number] for name in m.MODEL_OUTPUTS} for number in range(len(chunks))
        ]


class EpisodeChain:
    """Makes episodes of chunks, in the order in which they are given.

    Args:
        spaces: Of the samples.
        logp_recomputer: Computes log-probabilities; None: the learner needs none.
        weights_of: Returns a version of the weights, or None if it is too old.
        lookback: How many steps of the chunk before an episode holds.
    """

    def __init__(
        self,
        spaces: SampleSpaces,
        logp_recomputer: LogpRecomputer | None,
        weights_of: Callable[[int], WeightsVersion | None],
        *,
        lookback: int,
    ) -> None:
        self._maker = EpisodeFactory(spaces.observation, spaces.action)
        self._logp_recomputer = logp_recomputer
        self._weights_of = weights_of
        self._lookback = lookback
        self._segments: weakref.WeakKeyDictionary[EpisodeProgress, _Segment] = (
            weakref.WeakKeyDictionary()
        )

    def episodes(self, received: Sequence[ReceivedChunk]) -> list[SingleAgentEpisode]:
        """Return an episode for each chunk, but for those whose weights are too old by now."""
        outputs = self._outputs(received)
        return [
            self._episode(each, outputs[number])
            for number, each in enumerate(received)
            if number in outputs
        ]

    def _outputs(self, received: Sequence[ReceivedChunk]) -> dict[int, Mapping[str, m.Array]]:
        if self._logp_recomputer is None:
            return {number: {} for number in range(len(received))}
        outputs: dict[int, Mapping[str, m.Array]] = {}
        missing: dict[int, list[int]] = {}
        for number, each in enumerate(received):
            if each.chunk.model_outputs:
                outputs[number] = each.chunk.model_outputs
            else:
                missing.setdefault(each.seq_no, []).append(number)
        for seq_no, numbers in missing.items():
            weights = self._weights_of(seq_no)
            if weights is None:
                continue
            chunks = [received[number].chunk for number in numbers]
            thought = self._logp_recomputer.outputs(weights, chunks)
            outputs.update(zip(numbers, thought, strict=True))
        return outputs

    def _episode(
        self, received: ReceivedChunk, outputs: Mapping[str, m.Array]
    ) -> SingleAgentEpisode:
        chunk = received.chunk
        segment = self._segments.get(received.progress)
        if segment is None or segment.next_step != received.first_step:
            segment = _Segment(uuid.uuid4().hex, 0, received.first_step)
            self._segments[received.progress] = segment
        whole = replace(chunk, model_outputs=outputs)
        if segment.tail is not None:
            whole = m.joined([segment.tail, whole])
        lookback = len(whole) - len(chunk)
        episode = self._maker.make(
            segment.id_,
            observations=whole.obs,
            infos=[{} for _ in whole.obs],
            actions=whole.actions,
            rewards=whole.rewards,
            extras=whole.model_outputs,
            lookback=lookback,
            t_started=segment.num_steps,
        )
        episode.is_terminated, episode.is_truncated = chunk.is_terminated, chunk.is_truncated
        segment.num_steps += len(chunk)
        segment.next_step += len(chunk)
        if self._lookback:
            tail = whole.part(max(0, len(whole) - self._lookback), len(whole))
            # Copies, so that they do not hold all the others.
            segment.tail = m.Chunk(
                tail.obs.copy(),
                tail.actions.copy(),
                tail.rewards.copy(),
                is_terminated=False,
                is_truncated=False,
                model_outputs={name: each.copy() for name, each in tail.model_outputs.items()},
            )
        return episode
