"""Log-probabilities of actions that came without them, by the weights that chose the actions."""

import copy
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from ray.rllib.core.columns import Columns
from ray.rllib.core.rl_module.rl_module import RLModule

from rlmesh_ray.dialects.rllink.runner.weights_version import WeightsVersion
from rlmesh_ray.dialects.rllink.wire import messages as m
from rlmesh_ray.models.fast_path.action_sampling import as_arrays
from rlmesh_ray.models.rllib.exported_module import distribution_inputs

_MOST_ROWS = 1024


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
