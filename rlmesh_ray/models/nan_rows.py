"""NaN in a module's output: requests with such rows are refused, the other requests are answered.

A request is refused as a whole: also the states of its other rows' lanes stay as they were.
"""

from collections.abc import Iterable
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from rlmesh_ray.errors import ConformanceError, PolicyError
from rlmesh_ray.models.policy import Rows
from rlmesh_ray.spaces.batch import Column, Leaf, leaves, unflatten
from rlmesh_ray.spaces.spec import (
    BoxSpec,
    DiscreteSpec,
    MultiBinarySpec,
    MultiDiscreteSpec,
    SpaceSpec,
)
from rlmesh_ray.spaces.validation import coerce_batch, has_nan

IsNan = NDArray[np.bool_]
"""Whether a row has NaN in it, ``(N,) bool``."""


def nan_rows(outputs: Iterable[torch.Tensor]) -> IsNan | None:
    """Return which rows have NaN in any of the outputs; None if none has.

    Args:
        outputs: Each ``(N, ...)``, of any dtype.
    """
    found: IsNan | None = None
    for output in outputs:
        if not output.is_floating_point():
            continue
        # NumPy has no bfloat16, and is several times quicker for small arrays.
        output = output.float() if output.dtype is torch.bfloat16 else output
        column = output.detach().cpu().numpy()
        if has_nan(column):
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


def zeroed(output: torch.Tensor, is_nan: IsNan) -> torch.Tensor:
    """Return a copy with zeros in these rows; integers, which cannot be NaN, stay."""
    if not output.is_floating_point():
        return output
    rows = torch.from_numpy(is_nan).to(output.device)
    return output.masked_fill(rows.view(-1, *[1] * (output.dim() - 1)), 0.0)


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
