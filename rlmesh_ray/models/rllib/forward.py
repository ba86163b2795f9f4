"""The forward pass of an RLModule, in batches of few sizes."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import tree

from rlmesh_ray.errors import ConfigurationError
from rlmesh_ray.models.batch_buckets import BatchBuckets, PaddedBatch
from rlmesh_ray.models.fast_path.module_forward import FastForward
from rlmesh_ray.models.onnx.compiled_forward import CompiledForward
from rlmesh_ray.models.onnx.inference_choice import InferenceChoice
from rlmesh_ray.models.rllib.exported_module import bare_forward
from rlmesh_ray.models.torch.module import compiled
from rlmesh_ray.options import require_inference

# By name, so that DQN is imported for its own checkpoints only.
_DQN = "ray.rllib.algorithms.dqn.torch.default_dqn_torch_rl_module"
_KEPT = {"action_dist_inputs", "state_out"}

Forward = Callable[..., dict[str, Any]]
"""From a batch to outputs; to explore, also the environment steps so far as ``t``."""


class BucketedForward:
    """Runs an RLModule for inference or exploration.

    Args:
        module: The RLModule, on its device, switched to evaluation mode; its parts must not be
            replaced.
        explore: Whether to run its exploration forward pass.
        buckets: Row counts that the module is run with.
        device: Its device.
        inference: See ``TorchPolicy``.

    Raises:
        ConfigurationError: There are more buckets than torch compiles.
    """

    def __init__(
        self,
        module: Any,
        explore: bool,
        buckets: BatchBuckets,
        device: torch.device,
        inference: str,
    ) -> None:
        require_inference(inference)
        module.eval()
        self._explore = explore
        self._buckets = buckets
        self._env_steps = 0
        if inference == "compiled" and device.type != "cpu":
            named = module.forward_exploration if explore else module.forward_inference
            if _gives_logits(module, explore):
                named = partial(_logits, module)
            self._torch: Forward = compiled(named, device, buckets)
        elif _gives_logits(module, explore):
            self._torch = partial(_logits, module)
        else:
            bare = FastForward(module)
            self._torch = bare.explore if explore else bare.infer
        self.inference = InferenceChoice(
            inference, partial(_compiled, module, explore), device=device.type
        )

    def __call__(self, batch: dict[str, Any], env_steps: int) -> dict[str, Any]:
        """Return the module's outputs for a batch of tensors, without those of padding.

        Args:
            batch: Columns of tensors (nested), one batch dimension first.
            env_steps: Environment steps of the training; some modules' exploration depends on it.
        """
        self._env_steps = env_steps
        if not self._buckets.sizes:
            return dict(self._run(batch))
        parts = self._buckets.parts(len(tree.flatten(batch)[0]))
        outputs = [_cut(self._run(_padded(batch, part)), part, len(parts)) for part in parts]
        if len(outputs) == 1:
            return outputs[0]
        joined: dict[str, Any] = tree.map_structure(lambda *of_parts: torch.cat(of_parts), *outputs)
        return joined

    def _run(self, batch: dict[str, Any]) -> dict[str, Any]:
        outputs: dict[str, Any] = self.inference.run(self._in_torch, batch)
        return outputs

    def _in_torch(self, batch: dict[str, Any]) -> dict[str, Any]:
        if self._explore:
            return self._torch(batch, t=self._env_steps)
        return self._torch(batch)


def _compiled(module: Any, explore: bool, batch: dict[str, Any]) -> CompiledForward:
    return CompiledForward(module, batch, call=forward_with_logits(module, explore=explore))


def compiled_forward(module: Any, batch: dict[str, Any], *, explore: bool) -> CompiledForward:
    """Return the forward pass of a module on the CPU, compiled, with the outputs that RLlib's has.

    Args:
        module: A TorchRLModule, with a state or without. Its mode stays as it is.
        batch: An example of its batch, as connectors make it; a time axis keeps its length.
        explore: Whether it explores.

    Raises:
        ConfigurationError: It cannot be compiled; the message has the reason.
        MissingPackageError: onnx or onnxruntime is missing.
    """
    if any(each.device.type != "cpu" for each in module.parameters()):
        raise ConfigurationError("the module is not on the CPU")
    was_training = module.training
    module.eval()
    try:
        return CompiledForward(module, batch, call=bare_forward(module, explore=explore))
    finally:
        module.train(was_training)


def forward_with_logits(module: Any, *, explore: bool) -> Callable[[Any, Any], dict[str, Any]]:
    return _logits if _gives_logits(module, explore) else bare_forward(module, explore=explore)


def _gives_logits(module: Any, explore: bool) -> bool:
    """Return whether a module's inference is run for logits that its own does not return.

    DQN's returns actions only, the best by its Q-values, so NaN in these would be lost. RLlib's
    connectors choose the same actions from logits.
    """
    return not explore and type(module)._forward_inference.__module__ == _DQN


@torch.no_grad()
def _logits(module: Any, batch: dict[str, Any]) -> dict[str, Any]:
    outputs = dict(module.compute_q_values(batch))
    outputs["action_dist_inputs"] = outputs.pop("qf_preds")
    return {key: outputs[key] for key in _KEPT & outputs.keys()}


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
