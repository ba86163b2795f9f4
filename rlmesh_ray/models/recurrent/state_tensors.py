"""The states of many lanes in tensors, one row for each lane, so that batches gather at once."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch

from rlmesh_ray.errors import ConfigurationError, PolicyError
from rlmesh_ray.models.actions import describe
from rlmesh_ray.models.batch_buckets import PaddedBatch

# The row that padding reads. It is never written.
_PADDING_ROW = 0
_FIRST_CAPACITY = 16


class StateTable:
    """Holds states of one structure.

    The tables have at most twice as many rows as there were lanes at the same time; released rows
    are used again, and when all of them are released, the memory is freed.

    Args:
        initial: Returns the initial state of an episode: a tensor, or a dict or tuple of such,
            without a batch dimension.
        device: The device of the states.

    Raises:
        ConfigurationError: ``initial`` returns another type.
    """

    def __init__(self, initial: Callable[[], Any], device: torch.device) -> None:
        self._initial = initial
        self._device = device
        self._like = initial()
        self._begin()

    def allocate(self) -> int:
        """Return a row with the initial state."""
        if self._released:
            row = self._released.pop()
        else:
            row = self._num_rows
            self._num_rows += 1
        self._unset.append(row)
        return row

    def release(self, row: int) -> None:
        """Free a row."""
        self._released.append(row)
        is_last = len(self._released) == self._num_rows - 1  # apart from the padding's
        if is_last and len(self._tables[0]) > _FIRST_CAPACITY:
            self._begin()

    def index(self, rows: Sequence[int], part: PaddedBatch) -> torch.Tensor:
        """Return the index of a part's rows, ``(part.size,) int64``; all of its padding is one row.

        Args:
            rows: The rows of the whole batch, from ``allocate``.
            part: The part of the batch.
        """
        index = np.full(part.size, _PADDING_ROW, np.int64)
        index[: part.num_rows] = rows[part.rows]
        return torch.from_numpy(index).to(self._device)

    def gather(self, index: torch.Tensor) -> Any:
        """Return the states at an index, batched, with zeros for padding."""
        self._initialise()
        gathered = (table.index_select(0, index) for table in self._tables)
        return _nested(self._like, gathered)

    def kept(self, states: Any, part: PaddedBatch) -> list[torch.Tensor]:
        """Copy the module's new states of a part, as the argument for ``scatter``.

        Raises:
            PolicyError: The structure, shapes or dtypes are not those of the initial state.
        """
        try:
            found = _leaves(states) if _alike(self._like, states) else []
        except ConfigurationError:
            found = []
        wanted = [((part.size, *table.shape[1:]), table.dtype) for table in self._tables]
        if [(tuple(leaf.shape), leaf.dtype) for leaf in found] != wanted:
            raise PolicyError(
                f"the module returned the state {describe(states)} for {part.size} rows, but "
                f"initial_state() of one lane is {describe(self._like)}; put one batch dimension "
                "first, and keep its structure and dtypes"
            )
        # The next run may overwrite the output of this one.
        return [leaf[: part.num_rows].clone() for leaf in found]

    def scatter(self, index: torch.Tensor, states: Sequence[torch.Tensor]) -> None:
        """Store the result of ``kept`` for the part of an index, without its padding."""
        for table, leaf in zip(self._tables, states, strict=True):
            table.index_copy_(0, index[: len(leaf)], leaf)

    def _begin(self) -> None:
        """Make small tables without lanes."""
        self._tables = [
            torch.zeros((_FIRST_CAPACITY, *leaf.shape), dtype=leaf.dtype, device=self._device)
            for leaf in _leaves(self._like)
        ]
        self._num_rows = _PADDING_ROW + 1
        self._released: list[int] = []
        self._unset: list[int] = []

    def _initialise(self) -> None:
        if not self._unset:
            return
        self._grow()
        index = torch.tensor(self._unset, device=self._device)
        for table, leaf in zip(self._tables, _leaves(self._initial()), strict=True):
            table[index] = leaf.detach().to(table.device)
        self._unset.clear()

    def _grow(self) -> None:
        capacity = len(self._tables[0])
        if self._num_rows <= capacity:
            return
        while capacity < self._num_rows:
            capacity *= 2
        self._tables = [
            torch.cat([table, table.new_zeros((capacity - len(table), *table.shape[1:]))])
            for table in self._tables
        ]


def _leaves(state: Any) -> list[torch.Tensor]:
    if isinstance(state, torch.Tensor):
        return [state]
    parts = state.values() if isinstance(state, Mapping) else state
    if not isinstance(state, Mapping | tuple) or not state:
        raise ConfigurationError(
            f"the module's initial_state() returned {describe(state)}; it must be a tensor, or a "
            "dict or tuple of tensors, for one lane and without a batch dimension"
        )
    return [leaf for part in parts for leaf in _leaves(part)]


def _alike(like: Any, state: Any) -> bool:
    """Return whether the structures are equal, including the order of a dict's keys."""
    if isinstance(like, torch.Tensor):
        return isinstance(state, torch.Tensor)
    if isinstance(like, Mapping):
        if not isinstance(state, Mapping) or list(like) != list(state):
            return False
        like, state = tuple(like.values()), tuple(state.values())
    return (
        isinstance(state, tuple)
        and len(like) == len(state)
        and all(_alike(*pair) for pair in zip(like, state, strict=True))
    )


def _nested(like: Any, leaves: Iterator[torch.Tensor]) -> Any:
    if isinstance(like, torch.Tensor):
        return next(leaves)
    if isinstance(like, Mapping):
        return {key: _nested(part, leaves) for key, part in like.items()}
    return tuple(_nested(part, leaves) for part in like)
