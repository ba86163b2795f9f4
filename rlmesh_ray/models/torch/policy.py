"""Policies that are modules of torch, of TorchScript or of torch.export, also with a memory."""

import contextlib
import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple, NoReturn

import numpy as np
import torch

from rlmesh_ray.errors import ConfigurationError, ContractMismatchError, PolicyError
from rlmesh_ray.models.actions import (
    BatchBuckets,
    IsNan,
    PaddedBatch,
    action_layout,
    nan_rows,
    refused_rows,
    zero_observations,
)
from rlmesh_ray.models.nesting import describe, filled, form, mapped
from rlmesh_ray.models.nesting import leaves as tensors_in
from rlmesh_ray.models.onnx.compiled_forward import CompiledForward, InferenceChoice
from rlmesh_ray.models.policy import EpisodeStates, PolicyTraits, Rows
from rlmesh_ray.models.torch.module import (
    SequentialFastPath,
    check_weights,
    compiled,
    is_sequential,
    only_computes,
    padded,
    replace_weights,
    torch_device,
    weights_of,
)
from rlmesh_ray.options import require_inference
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
        ConfigurationError: There is no such device, the buckets are not ascending or too many to
            compile, or the module cannot be compiled.
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
        require_inference(inference)
        # A program from torch.export was traced in one mode and cannot switch.
        with contextlib.suppress(NotImplementedError):
            module.eval()
        if device is not None:
            module.to(torch_device(device))
        self._module: Any = module
        first = next(iter([*module.parameters(), *module.buffers()]), None)
        self._device = torch.device(device or "cpu") if first is None else first.device
        self._buckets = BatchBuckets(buckets)
        self._is_compiled_by_torch = inference == "compiled" and self._device.type != "cpu"
        self._in_torch: Callable[..., Any] = (
            SequentialFastPath(module) if is_sequential(module) else module
        )
        if self._is_compiled_by_torch:
            if isinstance(module, torch.jit.ScriptModule):
                raise ConfigurationError(
                    'TorchScript is compiled already; on CUDA inference is "torch" for it'
                )
            self._in_torch = compiled(module, self._device, self._buckets)
        self._inference = InferenceChoice(
            inference, partial(CompiledForward, module), device=self._device.type
        )
        self._as_chosen = partial(self._inference.run, self._in_torch)
        is_known = not self._is_compiled_by_torch and only_computes(module, self._device)
        self.traits = PolicyTraits(
            is_repeatable=True,
            only_computes=is_known,
            # A trial run of a module without a state does not disturb other calls.
            checks_concurrently=is_known,
            kind=_kind(module),
            horizon=horizon,
            torch_reason=self._inference.torch_reason,
        )

    def check_contract(self, contract: EnvContract) -> None:
        """Run the module on zeros: one row or two, or each size that has to be compiled.

        Raises:
            ContractMismatchError: The module does not accept the contract's observations, or its
                output cannot be actions of the action space.
        """
        layout = action_layout(contract.action_space, self.traits.horizon)
        for part in self._trial_parts(contract.num_envs):
            observations = zero_observations(contract, part.num_rows)
            try:
                layout.outputs(self._tried(self._tensors(observations, part), part), part)
            except (ConfigurationError, PolicyError) as error:
                remedy = (
                    "; it works with one row: export it for any number of rows, or have batches "
                    "cut to one (buckets=[1], --bucket 1)"
                    if part.size > 1 and not self._buckets.sizes
                    else ""
                )
                raise ContractMismatchError(
                    f"the torch module cannot act in {contract.id}: {error}{remedy}"
                ) from error

    def predict(self, contract: EnvContract, rows: Rows) -> object:
        """Choose the greedy actions, in one forward pass for each part.

        Raises:
            PolicyError: The module raised, or its output has another form.
        """
        layout = action_layout(contract.action_space, self.traits.horizon)
        actions = []
        for part in self._buckets.parts(rows.num_rows):
            result = self._run(self._as_chosen, self._tensors(rows.observations, part))
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

        return GreedyForward(self._module, act)

    def get_weights(self) -> dict[str, Any]:
        """Return a copy of the state dict: name -> NumPy array (a tensor for bfloat16)."""
        return weights_of(self._module)

    def set_weights(self, weights: object) -> None:
        """Replace all weights in place; takes what ``get_weights`` returns, tensors as well.

        Raises:
            PolicyError: A name, shape or dtype differs from the module's; nothing has changed.
        """
        replace_weights(check_weights(self._module, weights))
        self._inference.load()

    def _trial_parts(self, num_lanes: int) -> list[PaddedBatch]:
        """Return the parts of a trial run before the first batch of a route.

        They are one row, and two where batches of the route may have several and are not padded: a
        program may have been exported for one. Or they are all sizes that have to be compiled.
        """
        sizes = self._buckets.sizes if self._is_compiled_by_torch else ()
        if not sizes:
            sizes = (1,) if num_lanes == 1 or self._buckets.sizes else (1, 2)
        return [part for size in sizes for part in self._buckets.parts(size)]

    def _tried(self, observations: Any, part: PaddedBatch) -> Any:
        """Return the module's output in a trial run, without its new states."""
        return self._try(observations)

    def _try(self, *inputs: Any) -> Any:
        """Run the module in torch, and compile it if that is wanted.

        Raises:
            ConfigurationError: It cannot be compiled, and ``inference`` is ``"compiled"``.
            PolicyError: The module raised; its own error is the cause.
        """
        given = copy.deepcopy(inputs)  # it may take parts out of a dict
        output = self._run(self._in_torch, *given)
        self._inference.prepare(*inputs)
        return output

    def _run(self, call: Callable[..., Any], *inputs: Any) -> Any:
        """Run the module on the result of ``_tensors``; the next run may overwrite the output.

        Raises:
            PolicyError: The module raised; its own error is the cause.
        """
        try:
            with torch.inference_mode():
                return call(*inputs)
        except Exception as error:
            raise PolicyError(
                f"the module raised {type(error).__name__} on observations "
                f"{describe(inputs[0])}: {error}"
            ) from error

    def _tensors(self, value: Any, part: PaddedBatch) -> Any:
        """Return a part of a batch as tensors ``(part.size, ...)``, padded with zeros."""
        if isinstance(value, np.ndarray):  # as most are
            return self._tensor(value, part)
        return mapped(lambda array: self._tensor(array, part), value)

    def _tensor(self, array: np.ndarray[Any, Any], part: PaddedBatch) -> torch.Tensor:
        rows = array if part.size == len(array) else array[part.rows]
        # Values from the wire are read-only, which a tensor cannot be.
        is_usable = rows.flags.c_contiguous and rows.flags.writeable
        tensor = torch.from_numpy(rows if is_usable else rows.copy())
        if self._device.type != "cpu":
            tensor = tensor.to(self._device)
        return tensor if part.size == len(rows) else padded(tensor, part.size)


def _kind(module: torch.nn.Module) -> str:
    if isinstance(module, torch.jit.ScriptModule):
        return "TorchScript"
    if isinstance(module, torch.fx.GraphModule):
        return "torch.export"
    return f"torch module {type(module).__name__}"


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


# --- modules with a memory -----------------------------------------------------------------


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
        ConfigurationError: See ``TorchPolicy``; or ``initial_state`` returns no state.
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
        self._table = StateTable(self._module.initial_state, self._device)
        self._lanes = EpisodeStates(self._table.allocate, self._table.release)

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
        for part in self._buckets.parts(len(lanes)):
            index = self._table.index(lanes, part)
            observations = self._tensors(rows.observations, part)
            returned = self._run(self._as_chosen, observations, self._table.gather(index))
            result, after = _outputs_and_state(returned)
            actions.append(layout.actions(result, part))
            is_nan = nan_rows(output.column for output in layout.outputs(result, part))
            if is_nan is not None:
                is_refused[part.rows] = is_nan
            changes.append((part, index, self._table.checked(after, part)))
        if is_refused.any():
            is_refused = refused_rows(is_refused, rows)
        # Only now: if a part fails, the states of all parts must stay unchanged.
        for part, index, states in changes:
            self._table.keep(index, states, is_refused[part.rows])
        return layout.joined(actions)

    def forget(self, route_key: str, env_index: int | None) -> None:
        self._lanes.forget(route_key, env_index)

    def greedy_forward(self, contract: EnvContract) -> NoReturn:
        """Refuse: a graph has no memory.

        Raises:
            ConfigurationError: Always.
        """
        raise ConfigurationError("the module has a memory, which an ONNX file cannot have")

    def _tried(self, observations: Any, part: PaddedBatch) -> Any:
        row = self._table.allocate()
        try:
            states = self._table.gather(self._table.index([row] * part.num_rows, part))
            result, after = _outputs_and_state(self._try(observations, states))
            self._table.checked(after, part)
        finally:
            self._table.release(row)
        return result


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
        self._like = self._made()
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

    def checked(self, states: Any, part: PaddedBatch) -> list[torch.Tensor]:
        """Copy the module's new states of a part, as the argument for ``keep``.

        Raises:
            PolicyError: The structure, shapes or dtypes are not those of the initial state.
        """
        found = list(tensors_in(states))
        if form(states) != self._form or any(leaf.shape[:1] != (part.size,) for leaf in found):
            raise PolicyError(
                f"the module returned the state {describe(states)} for {part.size} rows, but "
                f"initial_state() of one lane is {describe(self._like)}; put one batch dimension "
                "first, and keep its structure and dtypes"
            )
        # The next run may overwrite the output of this one.
        return [leaf[: part.num_rows].clone() for leaf in found]

    def keep(self, index: torch.Tensor, states: Sequence[torch.Tensor], is_refused: IsNan) -> None:
        """Store the new states of a part's rows, without those of refused rows."""
        index = index[: len(is_refused)]
        if is_refused.any():
            answered = torch.from_numpy(np.flatnonzero(~is_refused)).to(index.device)
            index, states = index[answered], [leaf[answered] for leaf in states]
        for table, leaf in zip(self._tables, states, strict=True):
            table.index_copy_(0, index, leaf)

    def _made(self) -> Any:
        try:
            with torch.inference_mode():
                return self._initial()
        except Exception as error:
            raise PolicyError(
                f"the module's initial_state() raised {type(error).__name__}: {error}"
            ) from error

    def _begin(self) -> None:
        self._tables = [
            torch.zeros((_FIRST_CAPACITY, *leaf.shape), dtype=leaf.dtype, device=self._device)
            for leaf in tensors_in(self._like)
        ]
        self._num_rows = _PADDING_ROW + 1
        self._released: list[int] = []
        self._unset: list[int] = []

    def _initialise(self) -> None:
        if not self._unset:
            return
        while len(self._tables[0]) < self._num_rows:
            self._tables = [torch.cat([table, torch.zeros_like(table)]) for table in self._tables]
        index = torch.tensor(self._unset, device=self._device)
        for table, leaf in zip(self._tables, tensors_in(self._made()), strict=True):
            table[index] = leaf.detach().to(table.device)
        self._unset.clear()


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
