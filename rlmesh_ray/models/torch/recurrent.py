"""A policy that is a recurrent torch module."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, NoReturn

import numpy as np
import torch

from rlmesh_ray.errors import ConfigurationError, PolicyError
from rlmesh_ray.models.actions import action_layout, zero_observations
from rlmesh_ray.models.batch_buckets import PaddedBatch
from rlmesh_ray.models.lane_states import EpisodeStates
from rlmesh_ray.models.nan_rows import IsNan, nan_rows, refused_rows
from rlmesh_ray.models.nesting import describe, filled, form, leaves, mapped
from rlmesh_ray.models.policy import Rows
from rlmesh_ray.models.torch.policy import TorchPolicy
from rlmesh_ray.spaces.contract import EnvContract


class RecurrentTorchPolicy(TorchPolicy):
    """Runs a module with a recurrent state, one for each lane's episode.

    The module has two methods::

        initial_state() -> state                          # for one lane, without batch dimension
        forward(observations, state) -> (outputs, state)  # both states batched, N rows

    A state is a tensor, or a dict or tuple of tensors (nested as well). ``forward`` gets and
    returns it with one batch dimension first, in the structure, shapes and dtypes of
    ``initial_state`` (an LSTM of torch needs layers first: transpose). Observations and outputs
    are those of ``TorchPolicy``. A state must not depend on other rows than its own.

    Args:
        module: The module; it is switched to evaluation mode.
        device: See ``TorchPolicy``.
        buckets: See ``TorchPolicy``; rows of padding have states of zeros, which are dropped.
        inference: See ``TorchPolicy``.

    Raises:
        ConfigurationError: See ``TorchModule``; or ``initial_state`` returns no state.
        PolicyError: ``initial_state`` raised.
    """

    def __init__(
        self,
        module: torch.nn.Module,
        *,
        device: str | None = None,
        buckets: Sequence[int] = (),
        inference: str = "auto",
    ) -> None:
        super().__init__(module, device=device, buckets=buckets, inference=inference)
        # A trial run takes rows of the table, so it must not run beside a batch.
        self.traits = replace(self.traits, checks_concurrently=False)
        self._initial_state: Any = module.initial_state
        self._table = StateTable(self._initial, self._module.device)
        self._lanes = EpisodeStates(self._table.allocate, self._table.release)

    def check_contract(self, contract: EnvContract) -> None:
        """Run the module on zeros: one row or two, or each size that has to be compiled.

        Raises:
            ContractMismatchError: The module does not accept the contract's observations, or
                returns states that differ from the initial one in form, or its output cannot be
                actions of the action space.
        """
        for part in self._module.trial_parts(contract.num_envs):
            observations = zero_observations(contract, part.num_rows)
            row = self._table.allocate()
            try:
                states = self._table.gather(self._table.index([row] * part.num_rows, part))
                returned = self._module.try_out(self._module.tensors(observations, part), states)
                result, after = _outputs_and_state(returned)
                action_layout(contract.action_space).check(result, part)
                self._table.kept(after, part)
            except (ConfigurationError, PolicyError) as error:
                raise self._module.misfit(error, contract, part) from error
            finally:
                self._table.release(row)

    def predict(self, contract: EnvContract, rows: Rows) -> object:
        """Choose the greedy actions, in one forward pass for each part, and keep the new states.

        The states of a route stay unchanged if the output for one of its rows has NaN in it.

        Raises:
            PolicyError: A lane occurs twice, the module raised, or its output has another form. All
                lanes' states are unchanged.
        """
        layout = action_layout(contract.action_space)
        lanes = self._lanes.of(rows)
        actions, changes = [], []
        is_refused = np.zeros(len(lanes), np.bool_)
        for part in self._module.parts(len(lanes)):
            index = self._table.index(lanes, part)
            returned = self._module.run(
                self._module.tensors(rows.observations, part), self._table.gather(index)
            )
            result, after = _outputs_and_state(returned)
            actions.append(layout.actions(result, part))
            outputs = layout.outputs(result, part)
            is_nan = nan_rows(torch.from_numpy(output.column) for output in outputs)
            if is_nan is not None:
                is_refused[part.rows] = is_nan
            changes.append((part, index, self._table.kept(after, part)))
        if is_refused.any():
            is_refused = refused_rows(is_refused, rows)
        # Only now: if a part fails, the states of all parts must stay unchanged.
        for part, index, states in changes:
            self._keep(index, states, is_refused[part.rows])
        return layout.joined(actions)

    def _keep(self, index: torch.Tensor, states: Sequence[torch.Tensor], is_refused: IsNan) -> None:
        if is_refused.any():
            answered = torch.from_numpy(np.flatnonzero(~is_refused)).to(index.device)
            index, states = index[answered], [leaf[answered] for leaf in states]
        self._table.scatter(index, states)

    def forget(self, route_key: str, env_index: int | None) -> None:
        self._lanes.forget(route_key, env_index)

    def greedy_forward(self, contract: EnvContract) -> NoReturn:
        """Refuse: a graph has no memory.

        Raises:
            ConfigurationError: Always.
        """
        raise ConfigurationError("the module has a memory, which an ONNX file cannot have")

    def _initial(self) -> Any:
        try:
            with torch.inference_mode():
                return self._initial_state()
        except Exception as error:
            raise PolicyError(
                f"the module's initial_state() raised {type(error).__name__}: {error}"
            ) from error


def _outputs_and_state(returned: Any) -> tuple[Any, Any]:
    if not isinstance(returned, tuple) or len(returned) != 2:
        raise PolicyError(
            "the module's forward(observations, state) must return (outputs, state), not a "
            f"{type(returned).__name__}"
        )
    return returned


# --- the states of many lanes -------------------------------------------------------------

# The row that padding reads. It is never written.
_PADDING_ROW = 0
_FIRST_CAPACITY = 16


class StateTable:
    """States of one structure in tensors, a row for each lane, so that batches gather at once.

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
        _require_state(self._like)
        self._form = form(mapped(lambda leaf: leaf[None], self._like))
        self._begin()

    def allocate(self) -> int:
        if self._released:
            row = self._released.pop()
        else:
            row = self._num_rows
            self._num_rows += 1
        self._unset.append(row)
        return row

    def release(self, row: int) -> None:
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
        return filled(self._like, gathered)

    def kept(self, states: Any, part: PaddedBatch) -> list[torch.Tensor]:
        """Copy the module's new states of a part, as the argument for ``scatter``.

        Raises:
            PolicyError: The structure, shapes or dtypes are not those of the initial state.
        """
        found = list(leaves(states))
        if form(states) != self._form or any(leaf.shape[:1] != (part.size,) for leaf in found):
            raise PolicyError(
                f"the module returned the state {describe(states)} for {part.size} rows, but "
                f"initial_state() of one lane is {describe(self._like)}; put one batch dimension "
                "first, and keep its structure and dtypes"
            )
        # The next run may overwrite the output of this one.
        return [leaf[: part.num_rows].clone() for leaf in found]

    def scatter(self, index: torch.Tensor, states: Sequence[torch.Tensor]) -> None:
        for table, leaf in zip(self._tables, states, strict=True):
            table.index_copy_(0, index[: len(leaf)], leaf)

    def _begin(self) -> None:
        self._tables = [
            torch.zeros((_FIRST_CAPACITY, *leaf.shape), dtype=leaf.dtype, device=self._device)
            for leaf in leaves(self._like)
        ]
        self._num_rows = _PADDING_ROW + 1
        self._released: list[int] = []
        self._unset: list[int] = []

    def _initialise(self) -> None:
        if not self._unset:
            return
        self._grow()
        index = torch.tensor(self._unset, device=self._device)
        for table, leaf in zip(self._tables, leaves(self._initial()), strict=True):
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


def _require_state(value: Any) -> None:
    if isinstance(value, torch.Tensor):
        return
    if not isinstance(value, Mapping | tuple) or not value:
        raise ConfigurationError(
            f"the module's initial_state() returned {describe(value)}; it must be a tensor, or a "
            "dict or tuple of tensors, for one lane and without a batch dimension"
        )
    for part in value.values() if isinstance(value, Mapping) else value:
        _require_state(part)
