"""The forward pass of an RLModule, in batches of few sizes."""

from collections.abc import Callable
from typing import Any

import torch
import tree

from rlmesh_ray.models.batch_buckets import BatchBuckets, PaddedBatch
from rlmesh_ray.models.fast_path.module_forward import FastForward
from rlmesh_ray.models.torch.module import compiled

# By name, so that DQN is imported for its own checkpoints only.
_DQN = "ray.rllib.algorithms.dqn.torch.default_dqn_torch_rl_module"
_KEPT = {"action_dist_inputs", "state_out"}

Forward = Callable[..., dict[str, Any]]
"""From a batch to outputs; to explore, also the environment steps so far as ``t``."""


class BucketedForward:
    """Runs an RLModule for inference or exploration.

    Args:
        module: The RLModule, on its device; its parts must not be replaced.
        explore: Whether to run its exploration forward pass.
        buckets: Row counts that the module is run with.
        compile: The device to compile for; None: it is not compiled.
    """

    def __init__(
        self, module: Any, explore: bool, buckets: BatchBuckets, compile: torch.device | None
    ) -> None:
        self._explore = explore
        self._buckets = buckets
        self._forward: Forward
        if compile is None:
            bare = FastForward(module)
            self._forward = bare.explore if explore else _with_logits(module) or bare.infer
        elif explore:
            self._forward = compiled(module.forward_exploration, compile, buckets)
        else:
            own = _with_logits(module) or module.forward_inference
            self._forward = compiled(own, compile, buckets)

    def __call__(self, batch: dict[str, Any], env_steps: int) -> dict[str, Any]:
        """Return the module's outputs for a batch of tensors, without those of padding.

        Args:
            batch: Columns of tensors (nested), one batch dimension first.
            env_steps: Environment steps of the training; some modules' exploration depends on it.
        """
        extra = {"t": env_steps} if self._explore else {}
        if not self._buckets.sizes:
            return dict(self._forward(batch, **extra))
        parts = self._buckets.parts(len(tree.flatten(batch)[0]))
        outputs = [
            _cut(self._forward(_padded(batch, part), **extra), part, len(parts)) for part in parts
        ]
        if len(outputs) == 1:
            return outputs[0]
        joined: dict[str, Any] = tree.map_structure(lambda *of_parts: torch.cat(of_parts), *outputs)
        return joined


def _with_logits(module: Any) -> Forward | None:
    """Return an inference pass with logits for a module that has none in its own; else None.

    DQN's returns actions only, the best by its Q-values, so NaN in these would be lost. RLlib's
    connectors choose the same actions from logits.
    """
    if type(module)._forward_inference.__module__ != _DQN:
        return None

    @torch.no_grad()
    def infer(batch: dict[str, Any]) -> dict[str, Any]:
        outputs = dict(module.compute_q_values(batch))
        outputs["action_dist_inputs"] = outputs.pop("qf_preds")
        return {key: outputs[key] for key in _KEPT & outputs.keys()}

    return infer


def _padded(batch: dict[str, Any], part: PaddedBatch) -> dict[str, Any]:
    def padded(column: torch.Tensor) -> torch.Tensor:
        rows = column[part.rows]
        if part.size == part.num_rows:
            return rows
        return torch.cat([rows, rows.new_zeros((part.size - part.num_rows, *rows.shape[1:]))])

    found: dict[str, Any] = tree.map_structure(padded, batch)
    return found


def _cut(outputs: Any, part: PaddedBatch, num_parts: int) -> dict[str, Any]:
    def cut(column: torch.Tensor) -> torch.Tensor:
        rows = column[: part.num_rows]
        # The next part may overwrite the output of this one.
        return rows.clone() if num_parts > 1 else rows

    return {key: tree.map_structure(cut, column) for key, column in outputs.items()}
