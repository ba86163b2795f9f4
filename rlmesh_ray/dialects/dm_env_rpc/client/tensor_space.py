"""Spaces and contract of a world: as this package's servers publish them, else from its specs.

Periods in names nest: ``camera.depth`` is ``Dict(camera=Dict(depth=...))``, with keys in
alphabetical order, since the protocol has no order. A single tensor with the name ``observation``
or ``action`` makes a space without a Dict.
"""

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from typing import Any, NoReturn

import numpy as np

from rlmesh_ray.dialects.dm_env_rpc.client.settings import DmEnvRpcSettings
from rlmesh_ray.dialects.dm_env_rpc.wire.specs import (
    ACTION,
    OBSERVATION,
    AgentSpecs,
    TensorSpec,
    data_type,
    tensor_name,
)
from rlmesh_ray.dialects.dm_env_rpc.wire.tensors import Array, DataType
from rlmesh_ray.errors import UnsupportedSpaceError
from rlmesh_ray.spaces.contract import AutoresetMode, EnvContract
from rlmesh_ray.spaces.leaves import leaves
from rlmesh_ray.spaces.spec import (
    MAX_DEPTH,
    MAX_LANE_BYTES,
    MAX_RANK,
    BoxSpec,
    DictSpec,
    DiscreteSpec,
    LeafSpec,
    MultiBinarySpec,
    MultiDiscreteSpec,
    SpaceSpec,
    TextSpec,
)

_LONGEST_QUOTE = 80
_RENDERING = "rendering"
_MOST_CHOICES = 2**16
"""Integers with a wider range, or more of them, make a Box: learners have an input for each choice
of a Discrete."""

_Tree = dict[str, "TensorSpec | _Tree"]


@dataclass(frozen=True, slots=True)
class TensorSpace:
    """A lane's space, and the tensors of its leaves."""

    space: SpaceSpec
    tensors: tuple[TensorSpec, ...]
    """One a leaf, in the order of ``leaves(space)``."""
    counts_from_zero: bool = False
    """Whether a Discrete or MultiDiscrete holds 0 for the lowest value of its tensor."""

    def shifts(self) -> tuple[Array | None, ...]:
        """Return for each leaf the number to add to its values for its tensor; None: none."""
        return tuple(
            tensor.low
            if self.counts_from_zero and isinstance(leaf.spec, (DiscreteSpec, MultiDiscreteSpec))
            else None
            for leaf, tensor in zip(leaves(self.space), self.tensors, strict=True)
        )


@dataclass(frozen=True, slots=True)
class TensorSpaceOptions:
    """How tensors are converted to a space."""

    bare_name: str
    """A single tensor with this name gets no Dict: ``action`` or ``observation``."""
    chosen: tuple[str, ...] | None = None
    """Names of tensors, each with everything nested in it; None: all."""
    left_out: Collection[str] = ()
    """Names of tensors that are left out unless they are chosen."""
    is_bare: bool = False
    """Whether a single tensor of any name gets no Dict."""
    max_text_length: int = 4096
    are_choices: bool = False
    """Whether vectors of integers make a MultiDiscrete, as in actions, and not a Box."""
    counts_from_zero: bool = False
    """Whether choices are numbered from 0, and not from the server's lowest value."""


def read_space(specs: Sequence[TensorSpec], reading: TensorSpaceOptions, where: str) -> TensorSpace:
    """Return the space of ``specs``.

    Args:
        specs: The specs of all actions, or of all observations.
        reading: How they are converted.
        where: Address of the server and kind of the specs, for messages.

    Raises:
        UnsupportedSpaceError: There is no tensor, a chosen name does not exist or contradicts
            another, or a tensor cannot be converted.
    """
    chosen = _chosen(specs, reading, where)
    if len(chosen) == 1 and (reading.is_bare or chosen[0].name == reading.bare_name):
        space: SpaceSpec = _leaf(chosen[0], reading, where)
        return _checked(TensorSpace(space, tuple(chosen), reading.counts_from_zero), where)
    tree: _Tree = {}
    for spec in chosen:
        _put(tree, spec, where)
    tensors: list[TensorSpec] = []
    space = _dict(tree, reading, where, tensors)
    return _checked(TensorSpace(space, tuple(tensors), reading.counts_from_zero), where)


def _chosen(
    specs: Sequence[TensorSpec], reading: TensorSpaceOptions, where: str
) -> list[TensorSpec]:
    if reading.chosen is None:
        kept = [spec for spec in specs if not _is_among(spec.name, reading.left_out)]
        if not kept:
            raise UnsupportedSpaceError(f"{where} has none that a space could be made of")
        return kept
    for name in reading.chosen:
        if not any(_is_among(spec.name, (name,)) for spec in specs):
            known = ", ".join(sorted(spec.name for spec in specs)) or "none at all"
            raise UnsupportedSpaceError(f"{where} has no {name!r}, only {known}")
    return [spec for spec in specs if _is_among(spec.name, reading.chosen)]


def _is_among(name: str, names: Collection[str]) -> bool:
    return any(name == one or name.startswith(f"{one}.") for one in names)


def _put(tree: _Tree, spec: TensorSpec, where: str) -> None:
    *parents, last = spec.name.split(".")
    if len(parents) >= MAX_DEPTH:
        _refuse(spec, where, f"it is nested more than {MAX_DEPTH} deep")
    for key in parents:
        inner = tree.setdefault(key, {})
        if not isinstance(inner, dict):
            _contradict(spec, where)
        tree = inner
    if last in tree:
        _contradict(spec, where)
    tree[last] = spec


def _contradict(spec: TensorSpec, where: str) -> NoReturn:
    raise UnsupportedSpaceError(
        f"{where} has {spec.name!r} and another tensor in the same place; choose one of them"
    )


def _dict(
    tree: _Tree, reading: TensorSpaceOptions, where: str, tensors: list[TensorSpec]
) -> DictSpec:
    items: list[tuple[str, SpaceSpec]] = []
    for key, part in sorted(tree.items()):
        if isinstance(part, dict):
            items.append((key, _dict(part, reading, where, tensors)))
        else:
            items.append((key, _leaf(part, reading, where)))
            tensors.append(part)
    return DictSpec(tuple(items))


def _leaf(spec: TensorSpec, reading: TensorSpaceOptions, where: str) -> LeafSpec:
    if len(spec.shape) > MAX_RANK:
        _refuse(spec, where, f"it has more than {MAX_RANK} axes")
    if any(size < 0 for size in spec.shape):
        _refuse(spec, where, f"its shape {list(spec.shape)} varies")
    if spec.dtype is DataType.STRING:
        if spec.shape:
            _refuse(spec, where, f"it holds strings in shape {list(spec.shape)}, not a single one")
        return TextSpec(0, reading.max_text_length, "")
    if spec.dtype in (DataType.PROTO, DataType.INVALID):
        _refuse(spec, where, f"it holds {spec.dtype.name}, which only its server understands")
    if spec.dtype is DataType.BOOL:
        return MultiBinarySpec(spec.shape) if spec.shape else DiscreteSpec(2)
    size_bytes = math.prod(spec.shape) * spec.dtype.numpy.itemsize
    if size_bytes > MAX_LANE_BYTES:
        _refuse(spec, where, f"it has {size_bytes} bytes, more than {MAX_LANE_BYTES}")
    choices = _choices(spec, reading)
    return _box(spec, where) if choices is None else choices


def _choices(spec: TensorSpec, reading: TensorSpaceOptions) -> LeafSpec | None:
    """Return the Discrete or MultiDiscrete of a tensor of integers; None: it makes a Box."""
    dtype = spec.dtype.numpy
    if dtype.kind not in "iu" or spec.low is None or spec.high is None or 0 in spec.shape:
        return None
    low, high = (np.broadcast_to(bound, spec.shape) for bound in (spec.low, spec.high))
    # The whole range of a dtype is no set of choices, and their number does not fit the dtype.
    if int(high.max()) - int(low.min()) >= min(_MOST_CHOICES, np.iinfo(dtype).max):
        return None
    if not spec.shape and not reading.counts_from_zero:
        return DiscreteSpec(int(high) - int(low) + 1, int(low), dtype.name)
    if not spec.shape:
        return DiscreteSpec(int(high) - int(low) + 1)
    if not reading.are_choices or (low.any() and not reading.counts_from_zero):
        return None
    if math.prod(spec.shape) > _MOST_CHOICES:
        return None
    counts = [int(most) - int(least) + 1 for least, most in zip(low.flat, high.flat, strict=True)]
    return MultiDiscreteSpec(tuple(counts), spec.shape)


def _box(spec: TensorSpec, where: str) -> BoxSpec:
    dtype = spec.dtype.numpy
    least, most = (-np.inf, np.inf) if dtype.kind == "f" else _limits(dtype)
    low = np.asarray(least if spec.low is None else spec.low, dtype)
    high = np.asarray(most if spec.high is None else spec.high, dtype)
    if not (low <= high).all():
        _refuse(spec, where, "its bounds contradict each other, or are no numbers")
    return BoxSpec(spec.shape, dtype.name, low.tobytes(), high.tobytes())


def _limits(dtype: np.dtype[Any]) -> tuple[int, int]:
    return int(np.iinfo(dtype).min), int(np.iinfo(dtype).max)


def _refuse(spec: TensorSpec, where: str, reason: str) -> NoReturn:
    raise UnsupportedSpaceError(
        f"{where}: {_short(spec.name)} cannot be part of a space, since {reason}; leave it out: "
        "name the others in DmEnvRpcSettings(observations=..., actions=...)"
    )


def _short(name: str) -> str:
    return repr(name if len(name) <= _LONGEST_QUOTE else f"{name[:_LONGEST_QUOTE]}...")


def _checked(read: TensorSpace, where: str) -> TensorSpace:
    size_bytes = sum(leaf.lane_bytes for leaf in leaves(read.space))
    if size_bytes > MAX_LANE_BYTES:
        raise UnsupportedSpaceError(
            f"{where}: a value has {size_bytes} bytes, more than {MAX_LANE_BYTES}"
        )
    return read


def exact_space(
    space: SpaceSpec, specs: Sequence[TensorSpec], root: str, width: int | None = None
) -> TensorSpace | None:
    """Return ``space`` with its tensors, if ``specs`` are those of our servers for it, else None.

    Args:
        space: A lane's, from a contract.
        specs: The specs of all actions, or of all observations.
        root: ``ACTION`` or ``OBSERVATION``.
        width: Lanes of a batched join, whose tensors have one more axis; None: the join of a lane.
    """
    by_name = {spec.name: spec for spec in specs}
    tensors: list[TensorSpec] = []
    for leaf in leaves(space):
        spec = by_name.get(tensor_name(leaf.path, root))
        shape = leaf.shape if width is None else (width, *leaf.shape)
        if spec is None or spec.shape != shape or spec.dtype is not data_type(leaf):
            return None
        tensors.append(spec)
    return TensorSpace(space, tuple(tensors))


@dataclass(frozen=True, slots=True)
class WorldContract:
    """The contract of a session, and the tensors of its spaces."""

    contract: EnvContract
    actions: TensorSpace
    observations: TensorSpace


def contract_of_world(
    specs: AgentSpecs, published: EnvContract | None, settings: DmEnvRpcSettings, address: str
) -> WorldContract:
    """Return the contract of a session whose lanes are agents.

    Args:
        specs: An agent's.
        published: From ``fetch_contract``.
        settings: How to convert specs.
        address: The server's, for messages.

    Raises:
        UnsupportedSpaceError: The specs cannot be converted to spaces.
    """
    exact = None if published is None or settings.reshapes else _exact(specs, published)
    if exact is not None:
        return replace(exact, contract=replace(exact.contract, num_envs=settings.num_envs))
    actions = read_space(
        tuple(specs.actions.values()),
        TensorSpaceOptions(
            ACTION,
            settings.actions,
            is_bare=settings.is_bare,
            max_text_length=settings.max_text_length,
            are_choices=True,
            counts_from_zero=settings.choices_from_zero,
        ),
        f"{address}, actions",
    )
    observations = read_space(
        tuple(specs.observations.values()),
        TensorSpaceOptions(
            OBSERVATION,
            settings.observations,
            (settings.reward, settings.discount, _RENDERING),
            is_bare=settings.is_bare,
            max_text_length=settings.max_text_length,
        ),
        f"{address}, observations",
    )
    contract = EnvContract(
        id="dm_env_rpc" if published is None else published.id,
        observation_space=observations.space,
        action_space=actions.space,
        num_envs=settings.num_envs,
        autoreset_mode=AutoresetMode.NEXT_STEP,
    )
    return WorldContract(contract, actions, observations)


def _exact(specs: AgentSpecs, published: EnvContract) -> WorldContract | None:
    actions = exact_space(published.action_space, tuple(specs.actions.values()), ACTION)
    observations = exact_space(
        published.observation_space, tuple(specs.observations.values()), OBSERVATION
    )
    if actions is None or observations is None:
        return None
    # The dialect has no pictures, and its sequences are NEXT_STEP with any environment.
    contract = replace(published, autoreset_mode=AutoresetMode.NEXT_STEP, render_mode="")
    return WorldContract(contract, actions, observations)
