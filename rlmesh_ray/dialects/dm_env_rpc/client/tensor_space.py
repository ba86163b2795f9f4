"""Spaces and contract of a world: as this package's servers publish them, else from its specs.

Periods in names nest: ``camera.depth`` is ``Dict(camera=Dict(depth=...))``, with keys in
alphabetical order, since the protocol has no order. A single tensor with the name ``observation``
or ``action`` makes a space without a Dict.
"""

import math
from collections.abc import Collection
from dataclasses import dataclass, replace
from typing import NoReturn

import numpy as np

from rlmesh_ray.dialects.dm_env_rpc.client.settings import DmEnvRpcSettings
from rlmesh_ray.dialects.dm_env_rpc.wire.tensors import (
    ACTION,
    OBSERVATION,
    REWARD,
    TERMINATED,
    TRUNCATED,
    AgentSpecs,
    Array,
    DataType,
    TensorSpec,
    data_type,
    tensor_name,
)
from rlmesh_ray.errors import HandshakeRefusedError, UnsupportedSpaceError
from rlmesh_ray.spaces.contract import AutoresetMode, EnvContract
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
    extremes,
    leaves,
)

BATCH_FLAGS = (REWARD, TERMINATED, TRUNCATED)
"""Observations of a batched agent besides those of the environment."""
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


class SpaceReader:
    """Makes a space of the tensors of all actions, or of all observations.

    Args:
        settings: Which tensors, and how they are converted.
        root: ``ACTION`` or ``OBSERVATION``: a single tensor with this name gets no Dict.
        address: The server's, for messages.
    """

    def __init__(self, settings: DmEnvRpcSettings, root: str, address: str) -> None:
        self._settings = settings
        self._root = root
        self._where = f"{address}, {root}s"
        # In actions, vectors of integers make a MultiDiscrete, and not a Box.
        self._are_choices = root == ACTION
        self._counts_from_zero = self._are_choices and settings.choices_from_zero
        self._tensors: list[TensorSpec] = []

    def read(self, specs: Collection[TensorSpec]) -> TensorSpace:
        """Return the space of ``specs``.

        Raises:
            UnsupportedSpaceError: There is no tensor, a chosen name does not exist or contradicts
                another, or a tensor cannot be converted.
        """
        first, *others = chosen = self._chosen(specs)
        if not others and (self._settings.is_bare or first.name == self._root):
            space: SpaceSpec = self._leaf(first)
        else:
            tree: _Tree = {}
            for spec in chosen:
                self._put(tree, spec)
            space = self._dict(tree)
        size_bytes = sum(leaf.lane_bytes for leaf in leaves(space))
        if size_bytes > MAX_LANE_BYTES:
            raise UnsupportedSpaceError(
                f"{self._where}: a value has {size_bytes} bytes, more than {MAX_LANE_BYTES}"
            )
        return TensorSpace(space, tuple(self._tensors), self._counts_from_zero)

    def _chosen(self, specs: Collection[TensorSpec]) -> list[TensorSpec]:
        settings = self._settings
        chosen = settings.actions
        left_out: tuple[str, ...] = ()
        if self._root == OBSERVATION:
            chosen = settings.observations
            left_out = (settings.reward, settings.discount, _RENDERING)
        if chosen is None:
            kept = [spec for spec in specs if not _is_among(spec.name, left_out)]
            if not kept:
                raise UnsupportedSpaceError(f"{self._where} has none that a space could be made of")
            return kept
        for name in chosen:
            if not any(_is_among(spec.name, (name,)) for spec in specs):
                known = ", ".join(sorted(spec.name for spec in specs)) or "none at all"
                raise UnsupportedSpaceError(f"{self._where} has no {name!r}, only {known}")
        return [spec for spec in specs if _is_among(spec.name, chosen)]

    def _put(self, tree: _Tree, spec: TensorSpec) -> None:
        *parents, last = spec.name.split(".")
        if len(parents) >= MAX_DEPTH:
            self._refuse(spec, f"it is nested more than {MAX_DEPTH} deep")
        for key in parents:
            inner = tree.setdefault(key, {})
            if not isinstance(inner, dict):
                self._contradict(spec)
            tree = inner
        if last in tree:
            self._contradict(spec)
        tree[last] = spec

    def _contradict(self, spec: TensorSpec) -> NoReturn:
        raise UnsupportedSpaceError(
            f"{self._where} has {spec.name!r} and another tensor in the same place; choose one of "
            "them"
        )

    def _dict(self, tree: _Tree) -> DictSpec:
        items: list[tuple[str, SpaceSpec]] = []
        for key, part in sorted(tree.items()):
            items.append((key, self._dict(part) if isinstance(part, dict) else self._leaf(part)))
        return DictSpec(tuple(items))

    def _leaf(self, spec: TensorSpec) -> LeafSpec:
        self._tensors.append(spec)
        if len(spec.shape) > MAX_RANK:
            self._refuse(spec, f"it has more than {MAX_RANK} axes")
        if any(size < 0 for size in spec.shape):
            self._refuse(spec, f"its shape {list(spec.shape)} varies")
        if spec.dtype is DataType.STRING:
            if spec.shape:
                reason = f"it holds strings in shape {list(spec.shape)}, not a single one"
                self._refuse(spec, reason)
            return TextSpec(0, self._settings.max_text_length, "")
        if spec.dtype in (DataType.PROTO, DataType.INVALID):
            self._refuse(spec, f"it holds {spec.dtype.name}, which only its server understands")
        if spec.dtype is DataType.BOOL:
            return MultiBinarySpec(spec.shape) if spec.shape else DiscreteSpec(2)
        size_bytes = math.prod(spec.shape) * spec.dtype.numpy.itemsize
        if size_bytes > MAX_LANE_BYTES:
            self._refuse(spec, f"it has {size_bytes} bytes, more than {MAX_LANE_BYTES}")
        choices = self._choices(spec)
        return self._box(spec) if choices is None else choices

    def _choices(self, spec: TensorSpec) -> LeafSpec | None:
        """Return the Discrete or MultiDiscrete of a tensor of integers; None: it makes a Box."""
        dtype = spec.dtype.numpy
        if dtype.kind not in "iu" or spec.low is None or spec.high is None or 0 in spec.shape:
            return None
        low, high = (np.broadcast_to(bound, spec.shape) for bound in (spec.low, spec.high))
        # The whole range of a dtype is no set of choices, and their number does not fit the dtype.
        if int(high.max()) - int(low.min()) >= min(_MOST_CHOICES, np.iinfo(dtype).max):
            return None
        if not spec.shape:
            num_choices = int(high) - int(low) + 1
            if self._counts_from_zero:
                return DiscreteSpec(num_choices)
            return DiscreteSpec(num_choices, int(low), dtype.name)
        if not self._are_choices or (low.any() and not self._counts_from_zero):
            return None
        if math.prod(spec.shape) > _MOST_CHOICES:
            return None
        counts = [
            int(most) - int(least) + 1 for least, most in zip(low.flat, high.flat, strict=True)
        ]
        return MultiDiscreteSpec(tuple(counts), spec.shape)

    def _box(self, spec: TensorSpec) -> BoxSpec:
        dtype = spec.dtype.numpy
        least, most = extremes(dtype)
        low = np.asarray(least if spec.low is None else spec.low, dtype)
        high = np.asarray(most if spec.high is None else spec.high, dtype)
        if not (low <= high).all():
            self._refuse(spec, "its bounds contradict each other, or are no numbers")
        return BoxSpec(spec.shape, dtype.name, low.tobytes(), high.tobytes())

    def _refuse(self, spec: TensorSpec, reason: str) -> NoReturn:
        short = (
            spec.name if len(spec.name) <= _LONGEST_QUOTE else f"{spec.name[:_LONGEST_QUOTE]}..."
        )
        raise UnsupportedSpaceError(
            f"{self._where}: {short!r} cannot be part of a space, since {reason}; leave it out: "
            "name the others in DmEnvRpcSettings(observations=..., actions=...)"
        )


def _is_among(name: str, names: Collection[str]) -> bool:
    return any(name == one or name.startswith(f"{one}.") for one in names)


def exact_space(
    space: SpaceSpec, specs: Collection[TensorSpec], root: str, width: int | None = None
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


def _are_flags_of(observed: Collection[TensorSpec], width: int) -> bool:
    """Return whether rewards and flags of ``width`` lanes are among the specs: a number a lane."""
    found = {
        spec.name
        for spec in observed
        if spec.shape == (width,)
        and spec.dtype not in (DataType.INVALID, DataType.STRING, DataType.PROTO)
    }
    return width > 0 and found.issuperset(BATCH_FLAGS)


WorldContract = tuple[EnvContract, TensorSpace, TensorSpace]
"""The contract of a session, and the actions and the observations of its lanes."""


def contract_of_world(
    specs: AgentSpecs, published: EnvContract | None, settings: DmEnvRpcSettings, address: str
) -> WorldContract:
    """Return the contract of a session.

    Args:
        specs: An agent's, which is a lane, or all lanes.
        published: The contract that the server publishes; None: it is another server.
        settings: How to convert specs.
        address: The server's, for messages.

    Raises:
        HandshakeRefusedError: The specs of a batched agent do not fit the published contract.
        UnsupportedSpaceError: The specs cannot be converted to spaces.
    """
    if published is not None and not settings.reshapes:
        width = published.num_envs if settings.batched else None
        exact_actions = exact_space(published.action_space, specs.actions.values(), ACTION, width)
        observed = specs.observations.values()
        exact_observations = exact_space(published.observation_space, observed, OBSERVATION, width)
        has_flags = width is None or _are_flags_of(observed, width)
        if exact_actions is not None and exact_observations is not None and has_flags:
            # The dialect has no pictures, and its sequences are NEXT_STEP with any environment.
            contract = replace(
                published,
                num_envs=settings.num_envs if width is None else width,
                autoreset_mode=AutoresetMode.NEXT_STEP,
                render_mode="",
            )
            return contract, exact_actions, exact_observations
    if settings.batched and published is not None:
        raise HandshakeRefusedError(
            "the server's specs for a batch of lanes do not fit its contract, "
            f"{published.id} over {published.num_envs} lanes; join without batched=True"
        )
    actions = SpaceReader(settings, ACTION, address).read(specs.actions.values())
    observations = SpaceReader(settings, OBSERVATION, address).read(specs.observations.values())
    contract = EnvContract(
        id="dm_env_rpc" if published is None else published.id,
        observation_space=observations.space,
        action_space=actions.space,
        num_envs=settings.num_envs,
        autoreset_mode=AutoresetMode.NEXT_STEP,
    )
    return contract, actions, observations
