"""RLlib's episodes out of what simulators have sent."""

import uuid
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from ray.rllib.env.single_agent_episode import SingleAgentEpisode

from rlmesh_ray.dialects.rllink.runner.chunk_queue import EpisodeProgress, ReceivedChunk
from rlmesh_ray.dialects.rllink.runner.logp_recomputer import LogpRecomputer
from rlmesh_ray.dialects.rllink.runner.sample_validation import SampleSpaces
from rlmesh_ray.dialects.rllink.runner.weights_version import WeightsVersion
from rlmesh_ray.dialects.rllink.wire import messages as m
from rlmesh_ray.rllib.fast_path.episode_factory import EpisodeFactory


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
    """The last steps, for those who look back."""


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
        """Return what the policy had thought of each chunk's actions."""
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
        whole = _joined(segment.tail, chunk, outputs)
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
        segment.tail = _tail(whole, self._lookback)
        return episode


def _tail(chunk: m.Chunk, num_steps: int) -> m.Chunk | None:
    """Return copies of the last steps, so that they do not hold all the others."""
    if not num_steps:
        return None
    return m.Chunk(
        chunk.obs[-num_steps - 1 :].copy(),
        chunk.actions[-num_steps:].copy(),
        chunk.rewards[-num_steps:].copy(),
        False,
        False,
        None,
        {name: values[-num_steps:].copy() for name, values in chunk.model_outputs.items()},
    )


def _joined(tail: m.Chunk | None, chunk: m.Chunk, outputs: Mapping[str, Any]) -> m.Chunk:
    if tail is None:
        parts = (chunk.obs, chunk.actions, chunk.rewards)
        return m.Chunk(*parts, chunk.is_terminated, chunk.is_truncated, None, outputs)
    return m.Chunk(
        np.concatenate([tail.obs[:-1], chunk.obs]),
        np.concatenate([tail.actions, chunk.actions]),
        np.concatenate([tail.rewards, chunk.rewards]),
        chunk.is_terminated,
        chunk.is_truncated,
        None,
        {
            name: np.concatenate([tail.model_outputs[name], values])
            for name, values in outputs.items()
        },
    )
