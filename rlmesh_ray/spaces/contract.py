"""EnvContract: the description of an environment that its endpoint sends in the handshake.

The contract, its spaces and the differences between two of them are described for people, too.
"""

import enum
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from rlmesh_ray.errors import ContractMismatchError
from rlmesh_ray.spaces.spec import (
    BoxSpec,
    DictSpec,
    DiscreteSpec,
    MultiBinarySpec,
    MultiDiscreteSpec,
    SpaceSpec,
    TextSpec,
    TupleSpec,
    parts_of,
)


class AutoresetMode(enum.Enum):
    """When a lane whose episode has ended starts the next one; gymnasium's names and values."""

    NEXT_STEP = "NextStep"
    """The next Step ignores the lane's action and returns the first observation."""
    SAME_STEP = "SameStep"
    """The ending Step already returns the first observation; the last one is in the infos."""
    DISABLED = "Disabled"
    """The lane starts no episode before the next Reset."""

    @property
    def option(self) -> str:
        """The mode as options spell it, such as ``next_step``; texts for people do, too."""
        return self.name.lower()


@dataclass(frozen=True, slots=True)
class EnvContract:
    """Id, spaces, width and modes of an environment; constant during a session."""

    id: str
    """The name that the environment was given as ``module:factory``, or its id in Gymnasium."""
    observation_space: SpaceSpec
    """Observation space of one lane."""
    action_space: SpaceSpec
    """Action space of one lane."""
    num_envs: int
    """Number of lanes."""
    autoreset_mode: AutoresetMode
    render_mode: str = ""
    """Gymnasium's render mode; empty for None."""
    metadata: Mapping[str, object] = field(default_factory=dict)
    spec: Mapping[str, object] = field(default_factory=dict)
    """Fields of gymnasium's EnvSpec of the environment, by name; empty where none are known."""


def require_same_contract(expected: EnvContract, found: EnvContract, address: str) -> None:
    """Require one width, autoreset mode and spaces, as RLlib does; raises ContractMismatchError."""
    differences = [
        f"{name} = {other} where {own} is expected"
        for name, own, other in (
            ("num_envs", expected.num_envs, found.num_envs),
            ("autoreset_mode", expected.autoreset_mode.option, found.autoreset_mode.option),
        )
        if own != other
    ]
    if spaces := space_difference(expected, found):
        differences.append(spaces)
    if differences:
        raise ContractMismatchError(
            f"{address} serves {found.id} with another contract than {expected.id} elsewhere: "
            f"{'; '.join(differences)}; all endpoints of one algorithm must serve the same "
            "environment at the same width"
        )


def space_difference(expected: EnvContract, found: EnvContract) -> str:
    own, other = (
        DictSpec(
            (
                ("observation_space", contract.observation_space),
                ("action_space", contract.action_space),
            )
        )
        for contract in (expected, found)
    )
    return describe_difference(own, other)


# --- descriptions of spaces, and of the differences between two of them ---

_MOST_DIFFERENCES = 4
_MOST_CHARACTERS = 80


def space_lines(spec: SpaceSpec, name: str = "") -> list[str]:
    """Return one line for each leaf: its path in the space, and its kind, shape and bounds."""
    if isinstance(spec, DictSpec | TupleSpec):
        return [
            line
            for key, part in parts_of(spec).items()
            for line in space_lines(part, f"{name}.{key}" if name else key)
        ]
    return [f"{name}: {_leaf_text(spec)}" if name else _leaf_text(spec)]


def describe_difference(expected: SpaceSpec, found: SpaceSpec) -> str:
    """Return how a peer's space differs, as part of a sentence; empty where it does not."""
    first: list[str] = []
    rest = 0
    for path, text in _differences(expected, found, ()):
        if len(first) < _MOST_DIFFERENCES:
            first.append(f"{'.'.join(path)}: {text}" if path else text)
        else:
            rest += 1
    if rest:
        first.append(f"and {rest} more differences")
    return "; ".join(first)


_Path = tuple[str, ...]


def _differences(expected: SpaceSpec, found: SpaceSpec, path: _Path) -> Iterator[tuple[_Path, str]]:
    if expected == found:
        return
    if type(expected) is not type(found):
        yield path, _instead(_kind(found), _kind(expected))
    elif isinstance(expected, DictSpec | TupleSpec) and isinstance(found, DictSpec | TupleSpec):
        yield from _part_differences(parts_of(expected), parts_of(found), path)
    else:
        for name, own, other in _leaf_differences(expected, found):
            yield path, f"{name} {_instead(other, own)}"


def _part_differences(
    expected: dict[str, SpaceSpec], found: dict[str, SpaceSpec], path: _Path
) -> Iterator[tuple[_Path, str]]:
    for key in [*expected, *(key for key in found if key not in expected)]:
        if key not in found:
            yield path, f"{key!r} is missing"
        elif key not in expected:
            yield path, f"{key!r} is not expected"
        else:
            yield from _differences(expected[key], found[key], (*path, key))
    if set(expected) == set(found) and list(expected) != list(found):
        yield path, f"the keys stand in the order {_instead(', '.join(found), ', '.join(expected))}"


def _leaf_differences(expected: SpaceSpec, found: SpaceSpec) -> Iterator[tuple[str, str, str]]:
    """Yield each differing attribute of two leaves of one kind: name, expected and found value."""
    for name in expected.__dataclass_fields__:
        own, other = getattr(expected, name), getattr(found, name)
        if own != other and not isinstance(own, bytes):
            yield name, str(own) or "''", str(other) or "''"
    if not (isinstance(expected, BoxSpec) and isinstance(found, BoxSpec)):
        return
    if expected.shape == found.shape:
        yield from _bound_difference("low", expected.bounds()[0], found.bounds()[0])
        yield from _bound_difference("high", expected.bounds()[1], found.bounds()[1])


def _bound_difference(
    name: str, own: NDArray[np.generic], other: NDArray[np.generic]
) -> Iterator[tuple[str, str, str]]:
    # Specs compare bounds as bytes: 0.0 and -0.0 are different bounds.
    is_other = (own != other) | (np.signbit(own) != np.signbit(other))
    places = np.argwhere(is_other)
    if not len(places):
        return
    place = tuple(places[0].tolist())
    is_everywhere = len(places) == own.size and _is_uniform(own) and _is_uniform(other)
    if not is_everywhere:
        name += f"[{', '.join(map(str, place))}]"
    if not is_everywhere and len(places) > 1:
        name += f" (and {len(places) - 1} more of its elements)"
    yield name, str(own[place]), str(other[place])


def _is_uniform(values: NDArray[np.generic]) -> bool:
    return bool((values == values.flat[0]).all())


def _instead(found: str, expected: str) -> str:
    return f"{_cut(found)} where {_cut(expected)} is expected"


def _cut(text: str) -> str:
    return text if len(text) <= _MOST_CHARACTERS else f"{text[: _MOST_CHARACTERS - 3]}..."


def _kind(spec: SpaceSpec) -> str:
    if isinstance(spec, DictSpec | TupleSpec):
        return f"{type(spec).__name__.removesuffix('Spec')} of {', '.join(parts_of(spec))}"
    return _leaf_text(spec)


def _leaf_text(spec: SpaceSpec) -> str:
    match spec:
        case BoxSpec(shape, dtype):
            low, high = spec.bounds()
            if low.size == 0:
                return f"Box {_shape(shape)} {dtype}"
            if len({*low.flat}) > 1 or len({*high.flat}) > 1:
                return f"Box {_shape(shape)} {dtype}, each element with its own bounds"
            return f"Box {_shape(shape)} {dtype} within [{low.flat[0]:g}, {high.flat[0]:g}]"
        case DiscreteSpec(n, start, _):
            return f"Discrete {start}…{start + n - 1}"
        case MultiBinarySpec():
            return f"MultiBinary {_shape(spec.shape)}"
        case MultiDiscreteSpec(nvec, shape, _):
            return f"MultiDiscrete {_shape(shape)} below {', '.join(map(str, nvec))}"
        case TextSpec(shortest, longest, charset):
            letters = f"{len(charset)} characters" if charset else "any character"
            return f"Text of length {shortest}…{longest}, {letters}"
    raise TypeError(f"{type(spec).__name__} is not a leaf")


def _shape(shape: tuple[int, ...]) -> str:
    return f"({', '.join(map(str, shape))})"
