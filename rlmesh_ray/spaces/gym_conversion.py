"""Conversion between gymnasium spaces and specs; a round trip gives an equal space."""

import string
from collections import OrderedDict
from collections.abc import Callable
from typing import Any, assert_never

import gymnasium
import numpy as np
from gymnasium import spaces
from gymnasium.vector.utils import concatenate, create_empty_array

from rlmesh_ray.errors import ConfigurationError, UnsupportedSpaceError
from rlmesh_ray.spaces.contract import AutoresetMode, EnvContract
from rlmesh_ray.spaces.spec import (
    DTYPES,
    MAX_COUNTS,
    MAX_DEPTH,
    MAX_LANE_BYTES,
    MAX_PATH_CHARACTERS,
    MAX_RANK,
    PART_CHARACTERS,
    BoxSpec,
    DictSpec,
    DiscreteSpec,
    MultiBinarySpec,
    MultiDiscreteSpec,
    Path,
    SpaceSpec,
    TextSpec,
    TupleSpec,
    leaves,
    parts_of,
    path_name,
)

_INT64_MAX = 2**63 - 1
_ANY_TEXT = TextSpec(0, 4096, "")
"""Spec of a custom space of strings, whose charset and lengths are unknown."""

Space = gymnasium.Space[Any]


def from_gymnasium(space: Space) -> SpaceSpec:
    """Return the spec of ``space``.

    A custom space of strings, such as MiniGrid's MissionSpace, becomes a Text of any characters:
    every value of the space is one of that Text, but not the other way round.

    Raises:
        UnsupportedSpaceError: The contract cannot express the space or a part of it: Graph,
            Sequence, OneOf and other custom spaces, keys that are not strings, a MultiDiscrete that
            does not start at 0, dtypes and sizes that the wire does not have, and more parts than
            clients accept.
    """
    spec = _spec(space, ())
    if _path_characters(spec) > MAX_PATH_CHARACTERS:
        raise UnsupportedSpaceError(
            f"the space {space!r:.80} cannot be served: it has more than "
            f"{MAX_PATH_CHARACTERS // PART_CHARACTERS} parts, or long keys above many parts; make "
            "arrays of parts of the same kind"
        )
    size_bytes = sum(leaf.lane_bytes for leaf in leaves(spec))
    if size_bytes > MAX_LANE_BYTES:
        raise _unsupported(space, (), f"a value has {size_bytes} bytes, more than {MAX_LANE_BYTES}")
    return spec


def _path_characters(spec: SpaceSpec, characters: int = 0) -> int:
    """Return what the parts of a space count as; see ``MAX_PATH_CHARACTERS``."""
    parts = parts_of(spec).items()
    inner = (_path_characters(part, characters + len(key)) for key, part in parts)
    return PART_CHARACTERS + characters + sum(inner)


def require_one_space(side: str, single: Space, batched: Space) -> None:
    """Require that all lanes of a vector have the same bounds; a contract has one space for all.

    Some vectors, such as EnvPool's, give the space of one lane as ``batched``. Raises
    UnsupportedSpaceError, as for gymnasium's ``observation_mode="different"``; ``side`` is
    ``"observation"`` or ``"action"``.
    """
    if _lanes_differ(single, batched):
        raise UnsupportedSpaceError(
            f"the lanes have different bounds in the {side} space {batched!r}, and an endpoint has "
            "one space for all of its lanes: give all lanes the widest bounds, or serve each of "
            "the environments by itself"
        )


def _lanes_differ(single: Space, batched: Space) -> bool:
    if isinstance(single, spaces.Dict) and isinstance(batched, spaces.Dict):
        parts = batched.spaces
        return any(_lanes_differ(part, parts.get(key, part)) for key, part in single.items())
    if isinstance(single, spaces.Tuple) and isinstance(batched, spaces.Tuple):
        return any(map(_lanes_differ, single, batched))
    if isinstance(batched, spaces.Tuple):  # one part for each lane
        return any(part != batched[0] for part in batched)
    if len(batched.shape or ()) != len(single.shape or ()) + 1:
        return False
    bounds: list[Any] = [getattr(batched, name, 0) for name in ("low", "high", "nvec", "start")]
    return any(np.ndim(bound) > 0 and (bound != bound[:1]).any() for bound in bounds)


def contract_of(env: Any) -> EnvContract:
    """Return the contract of ``env``, or one made from its spaces; raises ConfigurationError."""
    if isinstance(env, EnvContract):
        return env
    contract = getattr(env, "contract", None)
    if isinstance(contract, EnvContract):
        return contract
    if not (hasattr(env, "observation_space") and hasattr(env, "action_space")):
        raise ConfigurationError(
            f"a {type(env).__name__} is not an environment to act in: give the environment, or the "
            "contract that its endpoint has sent (RemoteVectorEnv.contract)"
        )
    is_vector = isinstance(env, gymnasium.vector.VectorEnv)
    spec = getattr(env, "spec", None)
    spec_id = spec.id if spec is not None else type(env).__name__
    return EnvContract(
        id=spec_id,
        observation_space=from_gymnasium(
            env.single_observation_space if is_vector else env.observation_space
        ),
        action_space=from_gymnasium(env.single_action_space if is_vector else env.action_space),
        num_envs=env.num_envs if is_vector else 1,
        autoreset_mode=AutoresetMode.DISABLED,
    )


_SPEC_FIELDS: dict[str, tuple[type, ...]] = {
    "id": (str,),
    "max_episode_steps": (int,),
    "reward_threshold": (int, float),
    "nondeterministic": (bool,),
}
"""The fields of an EnvSpec that a contract has, with the types that they may have."""


def spec_fields(env: Any) -> dict[str, object]:
    """Return what a contract says of the spec of ``env``; empty where it has none with an id."""
    spec = getattr(env, "spec", None)
    if not isinstance(getattr(spec, "id", None), str):
        return {}
    fields = {name: getattr(spec, name, None) for name in _SPEC_FIELDS}
    return {name: value for name, value in fields.items() if value is not None}


def env_spec(
    contract: EnvContract, entry_point: Callable[..., Any] | None = None
) -> gymnasium.envs.registration.EnvSpec | None:
    """Return the environment's spec in a peer's contract; None where it has none.

    ``entry_point`` is what ``make`` calls; None: nothing can be made. A peer may send anything.
    """
    fields: dict[str, Any] = {
        name: value
        for name, value in contract.spec.items()
        if type(value) in _SPEC_FIELDS.get(name, ())
    }
    try:
        return gymnasium.envs.registration.EnvSpec(entry_point=entry_point, **fields)
    except (TypeError, ValueError, gymnasium.error.Error):  # no id, or one that is invalid
        return None


def to_gymnasium(spec: SpaceSpec) -> Space:
    """Return a new space, equal to the one that ``spec`` was made from.

    A Text that allows every character, which gymnasium cannot express, gets the printable ASCII
    characters. Before gymnasium 1.2.1 every Discrete has dtype int64; values that are sent or
    received have the spec's dtype all the same.
    """
    match spec:
        case BoxSpec():
            low, high = (bound.astype(spec.dtype) for bound in spec.bounds())
            return spaces.Box(low, high, spec.shape, np.dtype(spec.dtype).type)
        case DiscreteSpec():
            return _discrete_space(spec)
        case MultiBinarySpec():
            return spaces.MultiBinary(spec.n)
        case MultiDiscreteSpec():
            dtype = np.dtype(spec.dtype)
            return spaces.MultiDiscrete(np.array(spec.nvec, dtype).reshape(spec.shape), dtype.type)
        case TextSpec():
            charset = spec.charset or string.printable
            return spaces.Text(spec.max_length, min_length=spec.min_length, charset=charset)
        case DictSpec():
            # gymnasium sorts the keys of a plain dict.
            return spaces.Dict(OrderedDict((key, to_gymnasium(part)) for key, part in spec.items))
        case TupleSpec():
            return spaces.Tuple([to_gymnasium(part) for part in spec.items])
    assert_never(spec)


def _discrete_space(spec: DiscreteSpec) -> Space:
    if spec.dtype == "int64":
        return spaces.Discrete(spec.n, start=spec.start)
    try:
        return spaces.Discrete(spec.n, start=spec.start, dtype=np.dtype(spec.dtype).type)
    except TypeError:  # gymnasium before 1.2.1
        return spaces.Discrete(spec.n, start=spec.start)


def _spec(space: Space, path: Path) -> SpaceSpec:
    if len(path) > MAX_DEPTH:
        raise _unsupported(space, path, f"it is nested more than {MAX_DEPTH} deep")
    if len(space.shape or ()) > MAX_RANK:
        raise _unsupported(space, path, f"it has more than {MAX_RANK} axes")
    for kind, convert in _CONVERTERS.items():
        if isinstance(space, kind):
            return convert(space, path)
    if not space.shape and np.issubdtype(space.dtype, np.str_):
        return _ANY_TEXT
    supported = ", ".join(kind.__name__ for kind in _CONVERTERS)
    raise _unsupported(
        space,
        path,
        f"supported are {supported}; leave the part out with gymnasium.wrappers.FilterObservation, "
        "or make one of these of it with TransformObservation or TransformAction",
    )


def _box(space: spaces.Box, path: Path) -> BoxSpec:
    dtype = np.dtype(space.dtype)
    if dtype.name not in DTYPES or not dtype.isnative:
        raise _unsupported(space, path, f"dtype {dtype.str} has no wire form")
    little = dtype.newbyteorder("<")
    low, high = space.low.astype(little).tobytes(), space.high.astype(little).tobytes()
    return BoxSpec(space.shape, dtype.name, low, high)


def _discrete(space: "spaces.Discrete[Any]", path: Path) -> DiscreteSpec:
    n, start = int(space.n), int(space.start)
    dtype: np.dtype[Any] = np.dtype(space.dtype)
    if max(n, start + n - 1) > min(_INT64_MAX, np.iinfo(dtype).max):
        raise _unsupported(space, path, f"it goes beyond {dtype}, or beyond int64")
    return DiscreteSpec(n, start, dtype.name)


def _multi_discrete(space: spaces.MultiDiscrete, path: Path) -> MultiDiscreteSpec:
    if space.start.any():
        raise _unsupported(space, path, "the contract has no start for MultiDiscrete; use 0")
    nvec = tuple(map(int, space.nvec.ravel()))
    if max(nvec, default=0) > _INT64_MAX:
        raise _unsupported(space, path, "it goes beyond int64")
    if len(nvec) > MAX_COUNTS:
        raise _unsupported(space, path, f"it has more than {MAX_COUNTS} counts")
    return MultiDiscreteSpec(nvec, space.nvec.shape, np.dtype(space.dtype).name)


def _text(space: spaces.Text, path: Path) -> TextSpec:
    if any(len(char) != 1 for char in space.character_set):
        raise _unsupported(space, path, "its charset holds more than single characters")
    charset = "".join(sorted(space.character_set))
    if not charset:
        raise _unsupported(space, path, "it allows no character, on the wire that means all")
    if not _has_utf8(charset):
        raise _unsupported(space, path, "its charset holds surrogates")
    if space.max_length > _INT64_MAX:
        raise _unsupported(space, path, "its length goes beyond int64")
    return TextSpec(space.min_length, space.max_length, charset)


def _dict(space: spaces.Dict, path: Path) -> DictSpec:
    for key in space.spaces:
        if not isinstance(key, str) or not _has_utf8(key):
            raise _unsupported(space, path, f"key {key!r} is not a UTF-8 string")
    return DictSpec(
        tuple((str(key), _spec(part, (*path, key))) for key, part in space.spaces.items())
    )


_CONVERTERS: dict[type[Space], Callable[[Any, Path], SpaceSpec]] = {
    spaces.Box: _box,
    spaces.Discrete: _discrete,
    spaces.MultiBinary: lambda space, _: MultiBinarySpec(
        space.n if isinstance(space.n, int) else tuple(space.n)
    ),
    spaces.MultiDiscrete: _multi_discrete,
    spaces.Text: _text,
    spaces.Dict: _dict,
    spaces.Tuple: lambda space, path: TupleSpec(
        tuple(_spec(part, (*path, index)) for index, part in enumerate(space.spaces))
    ),
}


def _has_utf8(text: str) -> bool:
    return not any("\ud800" <= char <= "\udfff" for char in text)


def _unsupported(space: Space, path: Path, reason: str) -> UnsupportedSpaceError:
    place = f" at {path_name(path)}" if path else ""
    return UnsupportedSpaceError(f"the space {space!r}{place} cannot be served: {reason}")


def sampler(spec: SpaceSpec, *, seed: int) -> Callable[[int], Any]:
    """Return a function that draws N elements of a space, batched as gymnasium's vectors do.

    Which elements come next does not depend on how many are drawn together.
    """
    space = to_gymnasium(spec)
    space.seed(seed)

    def sample(num: int) -> Any:
        drawn = [space.sample() for _ in range(num)]
        return concatenate(space, drawn, create_empty_array(space, num))

    return sample
