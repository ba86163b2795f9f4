"""RLlib's episodes out of what simulators have sent."""

import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import numpy as np
import torch
from ray.rllib.core.columns import Columns
from ray.rllib.env.single_agent_episode import SingleAgentEpisode

from rlmesh_ray.dialects.rllink import wire as m
from rlmesh_ray.dialects.rllink.runner.batched_inference import ModuleCopy
from rlmesh_ray.dialects.rllink.runner.sample_queue import ReceivedChunk, WeightsVersion
from rlmesh_ray.dialects.rllink.runner.sample_validation import SampleSpaces
from rlmesh_ray.models.rllib.fast_path import as_arrays
from rlmesh_ray.models.rllib.forward import distribution_inputs
from rlmesh_ray.rllib.runner.episode_buffer import EpisodeFactory

_MOST_ROWS = 1024


def recomputed_outputs(
    module: ModuleCopy, weights: WeightsVersion, chunks: Sequence[m.Chunk]
) -> list[dict[str, m.Array]]:
    """Return, for each chunk, the distributions' inputs and the actions' log-probabilities.

    Args:
        module: Gets the weights.
        weights: The weights that chose the actions.
        chunks: Chunks of these weights that came without outputs; they are computed together.
    """
    acting = module.with_weights(weights)
    obs = torch.as_tensor(np.concatenate([chunk.obs[:-1] for chunk in chunks]))
    actions = torch.as_tensor(np.concatenate([chunk.actions for chunk in chunks]))
    with torch.no_grad():
        # Not all at once: what a network of pixels holds meanwhile would not fit.
        inputs = torch.cat([distribution_inputs(acting, part) for part in obs.split(_MOST_ROWS)])
        logp = acting.get_exploration_action_dist_cls().from_logits(inputs).logp(actions)
    arrays = as_arrays({Columns.ACTION_DIST_INPUTS: inputs, Columns.ACTION_LOGP: logp})
    ends = np.cumsum([len(chunk) for chunk in chunks])
    return [
        {name: arrays[name][end - len(chunk) : end] for name in m.MODEL_OUTPUTS}
        for chunk, end in zip(chunks, ends, strict=True)
    ]


class EpisodeChain:
    """Makes episodes of chunks, in the order in which they are given.

    Args:
        spaces: Of the samples.
        module: Recomputes log-probabilities; None: the learner needs none.
        weights_of: Returns a version of the weights, or None if it is too old.
        lookback: How many steps of the chunk before an episode holds.
    """

    def __init__(
        self,
        spaces: SampleSpaces,
        module: ModuleCopy | None,
        weights_of: Callable[[int], WeightsVersion | None],
        *,
        lookback: int,
    ) -> None:
        self._maker = EpisodeFactory(spaces.observation, spaces.action)
        self._module = module
        self._weights_of = weights_of
        self._lookback = lookback

    def episodes(self, received: Sequence[ReceivedChunk]) -> list[SingleAgentEpisode]:
        """Return an episode for each chunk, but for those whose weights are too old by now."""
        outputs = self._outputs(received)
        return [
            self._episode(each, outputs[number])
            for number, each in enumerate(received)
            if number in outputs
        ]

    def _outputs(self, received: Sequence[ReceivedChunk]) -> dict[int, Mapping[str, m.Array]]:
        if self._module is None:
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
            if weights is not None:
                chunks = [received[number].chunk for number in numbers]
                recomputed = recomputed_outputs(self._module, weights, chunks)
                outputs.update(zip(numbers, recomputed, strict=True))
        return outputs

    def _episode(
        self, received: ReceivedChunk, outputs: Mapping[str, m.Array]
    ) -> SingleAgentEpisode:
        chunk, progress = received.chunk, received.progress
        # Where a chunk has been dropped, what comes after it is another episode: replay buffers
        # put chunks of one id together, and would find that they do not fit.
        if progress.next_step != received.first_step:
            progress.rllib_id, progress.tail = uuid.uuid4().hex, None
            progress.rllib_began = received.first_step
        whole = replace(chunk, model_outputs=outputs)
        if progress.tail is not None:
            whole = m.joined([progress.tail, whole])
        episode = self._maker.make(
            progress.rllib_id,
            observations=whole.obs,
            infos=[{} for _ in whole.obs],
            actions=whole.actions,
            rewards=whole.rewards,
            extras=whole.model_outputs,
            lookback=len(whole) - len(chunk),
            t_started=received.first_step - progress.rllib_began,
        )
        episode.is_terminated, episode.is_truncated = chunk.is_terminated, chunk.is_truncated
        progress.next_step = received.first_step + len(chunk)
        if self._lookback:
            tail = whole.part(max(0, len(whole) - self._lookback), len(whole))
            # Copies, so that they do not hold all the others.
            progress.tail = m.Chunk(
                tail.obs.copy(),
                tail.actions.copy(),
                tail.rewards.copy(),
                is_terminated=False,
                is_truncated=False,
                model_outputs={name: each.copy() for name, each in tail.model_outputs.items()},
            )
        return episode
