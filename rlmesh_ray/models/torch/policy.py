"""A policy that is a torch module without memory: a module, TorchScript, a torch.export program."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

from rlmesh_ray.errors import ConfigurationError, PolicyError
from rlmesh_ray.models.actions import action_layout, zero_observations
from rlmesh_ray.models.policy import PolicyTraits, Rows
from rlmesh_ray.models.torch.module import TorchModule
from rlmesh_ray.spaces.batch import Leaf, flatten, leaves, unflatten
from rlmesh_ray.spaces.contract import EnvContract
from rlmesh_ray.spaces.spec import DiscreteSpec


class LeafAction(NamedTuple):
    """The greedy actions for one leaf of the action space, as tensors."""

    action: torch.Tensor
    """As the environment takes them, ``(N, *leaf.shape)``."""
    values: Callable[[], Sequence[torch.Tensor]] = list
    """Returns what a discrete action was chosen by: for each element of the leaf
    ``(N, choices)``; empty: not known."""


class GreedyForward(NamedTuple):
    """A policy as a function of tensors."""

    module: torch.nn.Module
    """It has the weights."""
    act: Callable[..., Sequence[LeafAction]]
    """From the module, or a copy, and a tensor for each leaf of the observation space, to the
    actions for each leaf of the action space."""


class TorchPolicy:
    """Runs a module on batches of observations, greedily.

    The module gets the observations as tensors of their declared dtypes, one batch dimension
    first, in the structure of the observation space (a tensor, a dict of them, a tuple of them).
    For every leaf of the action space it returns, for N rows,

    * Discrete: logits ``(N, n)`` of a float dtype, of which the largest wins (plus ``start``),
      or the actions themselves, ``(N,)`` integers;
    * all other spaces: the actions themselves, ``(N, *shape)``; of an integer (or bool) dtype
      unless the leaf is a Box.

    With a ``horizon`` above 1, each of these has an axis of that length behind N.

    On a CPU a module that consists of torch's own layers alone has ``PolicyTraits.only_computes``,
    and so has a program of TorchScript or torch.export without loops. A custom ``forward`` might
    wait, so it has not.

    Such layers in a row are called one after the other, without torch's checks in between. Weights
    may change in place and hooks be registered at any time; parts must not be replaced.

    Args:
        module: The module; it is switched to evaluation mode.
        device: The device to move it to, such as ``"cuda:0"``; None: it is not moved.
        buckets: Row counts, ascending. A batch is padded with rows of zeros up to the next one,
            and a larger one runs in several parts, so that the module gets no other sizes.
        inference: How the module is run. ``"torch"``: as it is. ``"compiled"``: on a CPU in ONNX
            Runtime, whose results agree with torch's up to 1e-5; on CUDA through ``torch.compile``,
            with graphs captured for each bucket. ``"auto"``: on a CPU compiled where that is
            possible, else in torch. It is compiled when a contract is checked, not when the first
            client waits for it.
        horizon: How many actions the module chooses at once for each row.

    Raises:
        ConfigurationError: See ``TorchModule``.
    """

    def __init__(
        self,
        module: torch.nn.Module,
        *,
        device: str | None = None,
        buckets: Sequence[int] = (),
        inference: str = "auto",
        horizon: int = 1,
    ) -> None:
        self._module = TorchModule(module, device=device, buckets=buckets, inference=inference)
        only_computes = self._module.only_computes
        self.traits = PolicyTraits(
            is_repeatable=True,
            only_computes=only_computes,
            # A trial run of a module without a state does not disturb other calls.
            checks_concurrently=only_computes,
            kind=self._module.kind,
            horizon=horizon,
            torch_reason=self._module.torch_reason,
        )

    def check_contract(self, contract: EnvContract) -> None:
        """Run the module on zeros: one row or two, or each size that has to be compiled.

        Raises:
            ContractMismatchError: The module does not accept the contract's observations, or its
                output cannot be actions of the action space.
        """
        for part in self._module.trial_parts(contract.num_envs):
            observations = zero_observations(contract, part.num_rows)
            try:
                result = self._module.try_out(self._module.tensors(observations, part))
                action_layout(contract.action_space, self.traits.horizon).check(result, part)
            except (ConfigurationError, PolicyError) as error:
                raise self._module.misfit(error, contract, part) from error

    def predict(self, contract: EnvContract, rows: Rows) -> object:
        """Choose the greedy actions, in one forward pass for each part.

        Raises:
            PolicyError: The module raised, or its output has another form.
        """
        layout = action_layout(contract.action_space, self.traits.horizon)
        actions = []
        for part in self._module.parts(rows.num_rows):
            result = self._module.run(self._module.tensors(rows.observations, part))
            actions.append(layout.actions(result, part))
        return layout.joined(actions)

    def forget(self, route_key: str, env_index: int | None) -> None:
        """Do nothing: the module has no state of lanes."""

    def greedy_forward(self, contract: EnvContract) -> GreedyForward:
        def act(called: Any, *columns: torch.Tensor) -> list[LeafAction]:
            result = called(unflatten(contract.observation_space, columns))
            outputs = flatten(contract.action_space, result)
            parts = zip(leaves(contract.action_space), outputs, strict=True)
            return [_leaf_action(*each) for each in parts]

        return GreedyForward(self._module.module, act)

    def get_weights(self) -> dict[str, Any]:
        """Return a copy of the state dict: name -> NumPy array (a tensor for bfloat16)."""
        return self._module.get_weights()

    def set_weights(self, weights: object) -> None:
        """Replace all weights in place; takes what ``get_weights`` returns, tensors as well.

        Raises:
            PolicyError: A name, shape or dtype differs from the module's; nothing has changed.
        """
        self._module.set_weights(weights)


def _leaf_action(leaf: Leaf, output: torch.Tensor) -> LeafAction:
    if isinstance(leaf.spec, DiscreteSpec) and output.is_floating_point() and output.dim() == 2:
        # As ActionLayout: NaN becomes an action outside of the space.
        is_nan = output.isnan().any(dim=1)
        choice = torch.where(is_nan, leaf.spec.n, output.argmax(dim=1)) + leaf.spec.start
        return LeafAction(choice.to(dtype_of(leaf)), lambda: [output])
    return LeafAction(output.to(dtype_of(leaf)))


def dtype_of(leaf: Leaf) -> torch.dtype:
    dtype: torch.dtype = getattr(torch, str(leaf.dtype))
    return dtype
