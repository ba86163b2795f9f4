"""Conversion of a module's output to actions, by the rules in ``TorchPolicy``; without torch."""

import sys
from collections.abc import Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from rlmesh_ray.errors import ConformanceError, ContractMismatchError, PolicyError
from rlmesh_ray.models.batch_buckets import PaddedBatch
from rlmesh_ray.models.nesting import describe
from rlmesh_ray.spaces.batch import Leaf, empty_columns, flatten, horizon_hint, leaves, unflatten
from rlmesh_ray.spaces.contract import EnvContract
from rlmesh_ray.spaces.spec import BoxSpec, DiscreteSpec, SpaceSpec
from rlmesh_ray.spaces.validation import has_nan


def zero_observations(contract: EnvContract, num_rows: int) -> Any:
    """Return observations for a trial run of a module: zeros.

    Raises:
        ContractMismatchError: A space of the contract holds text, which no tensor can.
    """
    for leaf in (*leaves(contract.observation_space), *leaves(contract.action_space)):
        if leaf.dtype is None:
            raise ContractMismatchError(
                f"the policy cannot act in {contract.id}: {leaf.name or 'its space'} is text, "
                "which no tensor can hold; serve a Python callable instead"
            )
    spec = contract.observation_space
    return unflatten(spec, empty_columns(spec, num_rows))


class ActionOutput(NamedTuple):
    """A module's output for one leaf of the action space."""

    leaf: Leaf
    column: NDArray[Any]
    num_choices: int
    """Number of logits in a row; 0: the column holds the actions themselves."""


@lru_cache(maxsize=256)
def action_layout(spec: SpaceSpec, horizon: int = 1) -> "ActionLayout":
    return ActionLayout(spec, horizon)


class ActionLayout:
    """The form of a module's output for one action space.

    Args:
        spec: The action space.
        horizon: How many actions the module chooses at once for each row; above 1, its output has
            an axis for them, behind that of the rows.
    """

    def __init__(self, spec: SpaceSpec, horizon: int = 1) -> None:
        self._spec = spec
        self._leaves = leaves(spec)
        self._steps = () if horizon == 1 else (horizon,)

    def outputs(self, result: Any, part: PaddedBatch) -> list[ActionOutput]:
        """Return one output for each leaf of the action space, without those of padding.

        Args:
            result: The module's output: tensors or arrays, nested as the space is.
            part: The rows of its input.

        Raises:
            PolicyError: The output cannot be actions of the action space.
        """
        try:
            parts = flatten(self._spec, result)
        except ConformanceError as error:
            raise PolicyError(
                f"the module's output does not have the structure of the action space: {error}"
            ) from error
        return [_output(*pair, part, self._steps) for pair in zip(self._leaves, parts, strict=True)]

    def check(self, result: Any, part: PaddedBatch) -> None:
        """Check that a module's output in a trial run can be actions.

        The module may not have been made for zeros: infinite, undefined and negative numbers are
        accepted. Fractions prove that it does not choose whole numbers.

        Args:
            result: The module's output.
            part: The rows of its input.

        Raises:
            PolicyError: The output cannot be actions of the action space.
        """
        for leaf, column, num_choices in self.outputs(result, part):
            obstacle = "" if num_choices else _obstacle(leaf, column)
            if obstacle:
                raise _impossible(leaf, column, obstacle)

    def actions(self, result: Any, part: PaddedBatch) -> list[NDArray[Any]]:
        """Return the actions ``(part.num_rows, *leaf.shape)``, an array for each leaf, unpadded.

        With a horizon above 1 they are ``(part.num_rows, horizon, *leaf.shape)``.

        A row whose logits have NaN in them gets an action outside its Discrete, which the server's
        check refuses for this row alone.

        Args:
            result: The module's output.
            part: The rows of its input.

        Raises:
            PolicyError: The output cannot be actions of the action space, or the logits of all rows
                have NaN in them.
        """
        return [_actions(output) for output in self.outputs(result, part)]

    def joined(self, parts: Sequence[Sequence[NDArray[Any]]]) -> Any:
        if len(parts) == 1:
            return unflatten(self._spec, parts[0])
        return unflatten(self._spec, [np.concatenate(own) for own in zip(*parts, strict=True)])


def _output(leaf: Leaf, value: Any, part: PaddedBatch, steps: tuple[int, ...]) -> ActionOutput:
    array = _array(leaf, value)
    spec, is_float, before = leaf.spec, array.dtype.kind == "f", (part.size, *steps)
    if isinstance(spec, DiscreteSpec) and is_float and array.shape == (*before, spec.n):
        return ActionOutput(leaf, array[: part.num_rows], spec.n)
    is_shaped = array.shape == (*before, *leaf.shape)
    if is_shaped and (isinstance(spec, BoxSpec) or not is_float):
        return ActionOutput(leaf, array[: part.num_rows], 0)
    raise _misfit(leaf, array, before)


def _array(leaf: Leaf, value: Any) -> NDArray[Any]:
    if isinstance(value, np.ndarray):
        return value
    torch: Any = sys.modules.get("torch")  # without it there are no tensors
    if torch is None or not isinstance(value, torch.Tensor):
        raise PolicyError(
            f"the module returned a {type(value).__name__} where a tensor of actions or "
            "logits is needed; wrap it in a module that returns just that"
        )
    try:
        # NumPy has no bfloat16.
        tensor = value.float() if value.dtype is torch.bfloat16 else value
        array: NDArray[Any] = tensor.detach().cpu().numpy()
    except (RuntimeError, TypeError) as error:
        raise _impossible(leaf, value, str(error)) from error
    return array


def _actions(output: ActionOutput) -> NDArray[Any]:
    leaf, column, num_choices = output
    if not num_choices:
        return column
    # For small arrays NumPy is several times as fast as torch, and breaks ties in the same way.
    choices: NDArray[Any] = column.argmax(axis=-1)
    if has_nan(column):
        # argmax would make a valid action of NaN.
        is_nan = np.isnan(column).any(axis=-1)
        if is_nan.all():
            raise PolicyError("the module's output has NaN in it; are its weights sound?")
        choices[is_nan] = num_choices
    start = leaf.spec.start if isinstance(leaf.spec, DiscreteSpec) else 0
    return choices + start if start else choices


def _obstacle(leaf: Leaf, column: NDArray[Any]) -> str:
    """Return why numbers of such a column cannot be in the leaf's space; empty: they may be."""
    assert leaf.dtype is not None, "text is refused before anything runs"
    kind = column.dtype.kind
    if kind not in "biuf":
        return f"{column.dtype} cannot become {leaf.dtype}"
    if kind == "f" and leaf.dtype.kind != "f":
        fractions = column[np.isfinite(column) & (column != np.trunc(column))]
        if fractions.size:
            return f"{fractions[0]} is not a whole number"
    return ""


def _impossible(leaf: Leaf, value: Any, why: str) -> PolicyError:
    return PolicyError(
        f"the module returned {describe(value)} for {leaf.name or 'the action'}, which cannot be "
        f"actions: {why}"
    )


def _misfit(leaf: Leaf, value: NDArray[Any], before: tuple[int, ...]) -> PolicyError:
    spec, actions_shape = leaf.spec, (*before, *leaf.shape)
    wanted, expected = f"actions {actions_shape}", actions_shape
    if isinstance(spec, DiscreteSpec):
        if value.dtype.kind == "f":
            expected = (*before, spec.n)
        wanted = f"float logits {(*before, spec.n)} or integer actions {actions_shape}"
    elif not isinstance(spec, BoxSpec):
        wanted = f"integer {wanted}"
    more = horizon_hint(value.shape, expected)
    if len(before) > 1:
        more = f" (rows, horizon={before[1]}, …)"
    return PolicyError(
        f"the module returned {describe(value)} for {leaf.name or 'the action'}; "
        f"{type(spec).__name__.removesuffix('Spec')} takes {wanted}{more}"
    )
