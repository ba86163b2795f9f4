"""What goes into a module and what comes out: batches of few sizes, actions, NaN; torch-free."""

import sys
from collections.abc import Iterable, Sequence
from functools import lru_cache
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from rlmesh_ray.errors import (
    ConfigurationError,
    ConformanceError,
    ContractMismatchError,
    PolicyError,
    UnsupportedSpaceError,
)
from rlmesh_ray.models.nesting import describe
from rlmesh_ray.models.policy import Rows
from rlmesh_ray.spaces.batch import (
    Column,
    Leaf,
    empty_columns,
    flatten,
    horizon_hint,
    leaves,
    unflatten,
)
from rlmesh_ray.spaces.contract import EnvContract, describe_difference
from rlmesh_ray.spaces.gym_conversion import Space, from_gymnasium, to_gymnasium
from rlmesh_ray.spaces.spec import (
    BoxSpec,
    DiscreteSpec,
    MultiBinarySpec,
    MultiDiscreteSpec,
    SpaceSpec,
)
from rlmesh_ray.spaces.validation import coerce_batch, has_nan

# --- batch buckets --------------------------------------------------------------------------------

# A few batch sizes, for graphs that are compiled or captured once for each size. A batch is padded
# up to the next bucket. A batch that is larger than the largest bucket runs as several, the last of
# them padded: rounding it up would make an unlimited number of sizes.


class PaddedBatch(NamedTuple):
    """A part of a batch that runs at once."""

    rows: slice
    """Its rows in the batch; with a start and a stop."""
    size: int
    """Number of rows that the module gets: those of the batch first, then padding."""

    @property
    def num_rows(self) -> int:
        return int(self.rows.stop - self.rows.start)


class BatchBuckets:
    """Cuts batches into parts of known sizes.

    Args:
        sizes: Row counts, ascending; none: every batch is one part as it is.

    Raises:
        ConfigurationError: The sizes are not ascending, or below 1.
    """

    def __init__(self, sizes: Sequence[int] = ()) -> None:
        self.sizes = tuple(sizes)
        """The row counts."""
        # bool is an int, but not a size.
        are_sizes = all(type(size) is int and size > 0 for size in self.sizes)
        if not are_sizes or any(low >= high for low, high in pairwise(self.sizes)):
            raise ConfigurationError(
                f"buckets={list(self.sizes)} must be ascending row counts, such as [1, 8, 64, 512]"
            )

    def parts(self, num_rows: int) -> list[PaddedBatch]:
        if not self.sizes:
            return [PaddedBatch(slice(0, num_rows), num_rows)]
        largest = self.sizes[-1]
        starts = range(0, num_rows, largest)
        parts = [slice(start, min(start + largest, num_rows)) for start in starts]
        return [
            PaddedBatch(rows, next(size for size in self.sizes if size >= rows.stop - rows.start))
            for rows in parts
        ]


# --- the spaces of an environment -----------------------------------------------------------------


def require_spaces(own: Sequence[Space], contract: EnvContract, known: str, remedy: str) -> None:
    """Compare an environment's spaces with the only ones that a policy is for.

    Args:
        own: The policy's observation and action space of a lane.
        contract: The environment's.
        known: What the policy says of its spaces, such as ``"p.onnx was exported for"``.
        remedy: What to do where they differ.

    Raises:
        ContractMismatchError: They differ.
    """
    found = (contract.observation_space, contract.action_space)
    differences = [
        f"{name}: {_difference(space, spec)}"
        for name, space, spec in zip(("observation_space", "action_space"), own, found, strict=True)
        # Not the specs: a bound of -0.0 is one of 0.0.
        if to_gymnasium(spec) != space
    ]
    if differences:
        raise ContractMismatchError(
            f"{known} other spaces than {contract.id} has: {'; '.join(differences)}; {remedy}"
        )


def spec_of(space: Space) -> SpaceSpec | None:
    """Return the spec of a space; None: no contract can express it, so no route has it."""
    try:
        return from_gymnasium(space)
    except UnsupportedSpaceError:
        return None


def _difference(own: Space, found: SpaceSpec) -> str:
    known = spec_of(own)
    in_detail = describe_difference(known, found) if known is not None else ""
    return in_detail or f"{to_gymnasium(found)} where {own} is expected"


# --- from a module's output to actions -----------------------------------------------------


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
        return array_of(value)
    except (RuntimeError, TypeError) as error:
        raise _impossible(leaf, value, str(error)) from error


def array_of(tensor: Any) -> NDArray[Any]:
    """Return a tensor of any device as an array; NumPy has no bfloat16, so that becomes float32."""
    tensor = tensor.float() if str(tensor.dtype) == "torch.bfloat16" else tensor
    array: NDArray[Any] = tensor.detach().cpu().numpy()
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


def _impossible(leaf: Leaf, value: Any, why: str) -> PolicyError:
    return PolicyError(
        f"the module returned {describe(value)} for {leaf.name or 'the action'}, which cannot be "
        f"actions: {why}"
    )


def _misfit(leaf: Leaf, value: NDArray[Any], before: tuple[int, ...]) -> PolicyError:
    spec, actions_shape = leaf.spec, (*before, *leaf.shape)
    wanted, expected = f"actions {actions_shape}", actions_shape
    if isinstance(spec, DiscreteSpec):
        expected = (*before, spec.n) if value.dtype.kind == "f" else actions_shape
        wanted = f"float logits {(*before, spec.n)} or integer actions {actions_shape}"
    elif not isinstance(spec, BoxSpec):
        wanted = f"integer {wanted}"
    steps = f" (rows, horizon={before[1]}, …)" if len(before) > 1 else ""
    more = steps or horizon_hint(value.shape, expected)
    return PolicyError(
        f"the module returned {describe(value)} for {leaf.name or 'the action'}; "
        f"{type(spec).__name__.removesuffix('Spec')} takes {wanted}{more}"
    )


# --- NaN in a module's output ---------------------------------------------------------------------

# Requests with such rows are refused, the other requests are answered. A request is refused as a
# whole: also the states of its other rows' lanes stay as they were.

IsNan = NDArray[np.bool_]
"""Whether a row has NaN in it, ``(N,) bool``."""


def nan_rows(columns: Iterable[NDArray[Any]]) -> IsNan | None:
    """Return which rows have NaN in any of the outputs; None if none has.

    Args:
        columns: The outputs, each ``(N, ...)``, of any dtype.
    """
    found: IsNan | None = None
    for column in columns:
        if column.dtype.kind == "f" and has_nan(column):
            is_nan = np.isnan(column).reshape(len(column), -1).any(axis=1)
            found = is_nan if found is None else found | is_nan
    return found


def refused_rows(is_nan: IsNan, rows: Rows) -> IsNan:
    """Return the rows of all requests that have a row with NaN.

    Args:
        is_nan: Whether a row has NaN, ``(N,) bool``.
        rows: The N rows.
    """
    is_refused = is_nan.copy()
    first = 0
    for route in rows.routes:
        own = is_refused[first : first + len(route.slots)]
        own[:] = own.any()
        first += len(route.slots)
    return is_refused


def refusable(spec: SpaceSpec, actions: object, is_nan: IsNan) -> object:
    """Return the actions with values outside the action space in the rows that have NaN.

    The server's check of actions refuses the requests with those rows, and no others.

    Args:
        spec: The action space.
        actions: A batch of actions for N rows.
        is_nan: Whether a row has NaN.

    Raises:
        PolicyError: All rows have NaN, or all values of the dtype are in the space.
    """
    if is_nan.all():
        raise PolicyError("the module's output has NaN in it; are its weights sound?")
    try:
        columns = coerce_batch(spec, actions, len(is_nan))
    except ConformanceError:
        # The actions do not fit the space in any row, and are refused unchanged.
        return actions
    outside = [value_outside(leaf) for leaf in leaves(spec)]
    if all(value is None for value in outside):
        raise PolicyError(
            f"the module's output has NaN in it for {is_nan.sum()} of {len(is_nan)} rows"
        )
    marked = [_marked(*pair, is_nan) for pair in zip(columns, outside, strict=True)]
    return unflatten(spec, marked)


def value_outside(leaf: Leaf) -> float | None:
    """Return a value outside the leaf's space; None: its dtype has none."""
    match leaf.spec:
        case DiscreteSpec(n=n, start=start):
            return start + n
        case MultiDiscreteSpec() | MultiBinarySpec():
            return -1
        case BoxSpec() if leaf.dtype is not None and leaf.dtype.kind == "f":
            return np.nan
    return None


def _marked(column: Column, outside: float | None, is_nan: IsNan) -> Any:
    if outside is None:
        return column
    marked = np.array(column)
    # In an unsigned dtype -1 becomes the largest number.
    marked[is_nan] = np.array(outside).astype(marked.dtype)
    return marked
