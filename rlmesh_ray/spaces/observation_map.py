"""ObservationMap: declared conversion of a client's observations to those that a policy needs.

An entry is ``KEY=SOURCE``. The key is a leaf of the policy's observation space, and the source is a
leaf of the client's, or a verb with sources inside. Texts are parsed, never evaluated.
"""

import copy
import json
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import Any, NamedTuple, NoReturn, Self

import numpy as np
from numpy.typing import NDArray

from rlmesh_ray.errors import ConfigurationError, ConformanceError, ContractMismatchError
from rlmesh_ray.files import read_file
from rlmesh_ray.spaces.batch import unflatten
from rlmesh_ray.spaces.images import resize_images
from rlmesh_ray.spaces.spec import (
    DTYPES,
    MAX_DEPTH,
    MAX_LANE_BYTES,
    BoxSpec,
    DictSpec,
    DiscreteSpec,
    LeafSpec,
    SpaceSpec,
    TextSpec,
    TupleSpec,
    leaves,
    parts_of,
    with_leaves,
)

BARE = "observation"
"""Name of the whole observation, where its space is neither Dict nor Tuple."""
_IMAGE_CHANNELS = (1, 3, 4)
_MOST_NAMES = 24
_TOKEN = re.compile(r'[(),=]|(?:[^\s"(),=]|"[^"]*")+|"')
_KEY = r'(?:[^"/]|"[^"]+")+'
_PATH = re.compile(rf"{_KEY}(?:/{_KEY})*")
_PLAIN_KEY = re.compile(r'[^\s"(),=/]+')
_ANY_LEAF = TextSpec(0, 0, "")

_Parts = tuple[str, ...]
"""Keys of Dicts and positions in Tuples, on the way to a leaf."""
_Bounds = NDArray[Any]
"""Bounds of a Box; of shape ``()`` where they are equal for all elements."""


# --- leaves by their names -------------------------------------------------------------


def _parts(path: Sequence[str | int]) -> _Parts:
    return tuple(map(str, path)) or (BARE,)


def _name(parts: _Parts) -> str:
    return "/".join(part if _PLAIN_KEY.fullmatch(part) else f'"{part}"' for part in parts)


def _known(name: str, space: SpaceSpec) -> str:
    """Return which leaves a space has, as the end of a sentence about one that it lacks."""
    names = [_name(_parts(leaf.path))[:100] for leaf in leaves(space)[:_MOST_NAMES]]
    near = [f"; did you mean {each}?" for each in get_close_matches(name, names, 1)]
    more = ", ..." if len(leaves(space)) > _MOST_NAMES else ""
    return f" has no such leaf (it has {', '.join(names) or 'none'}{more}){''.join(near)}"


def _inside(tree: Any) -> Mapping[str, Any]:
    if isinstance(tree, (DictSpec, TupleSpec)):
        return parts_of(tree)
    if isinstance(tree, (tuple, list)):
        return {str(index): part for index, part in enumerate(tree)}
    return tree if isinstance(tree, Mapping) else {}


def _found(tree: Any, parts: _Parts) -> Any:
    """Return what a space or a batch has at a path, and None where it has nothing.

    Keys may have ``/`` in them: ``a/b`` is ``b`` of ``a``, or else the key ``"a/b"``.
    """
    if parts == (BARE,) and not isinstance(tree, (DictSpec, TupleSpec, Mapping)):
        return tree
    while parts:
        inside = _inside(tree)
        keys = {count: "/".join(parts[:count]) for count in range(1, len(parts) + 1)}
        count = next((count for count, key in keys.items() if key in inside), 0)
        if not count:
            return None
        tree, parts = inside[keys[count]], parts[count:]
    return tree


class _ClientLeaf:
    """A leaf of the client's observation space, unchanged."""

    def __init__(self, parts: _Parts) -> None:
        self.parts = parts
        self.text = _name(parts)

    def spec(self, client_space: SpaceSpec) -> LeafSpec:
        """Return the space of one lane's value; raises ContractMismatchError."""
        spec: SpaceSpec | None = _found(client_space, self.parts)
        if spec is None or isinstance(spec, (DictSpec, TupleSpec)):
            raise ContractMismatchError(
                f"the map takes {self.text}, and the client's observation space"
                f"{_known(self.text, client_space)}"
            )
        return spec

    def apply(self, observations: Any) -> Any:
        """Return the column of a batch."""
        column = _found(observations, self.parts)
        if column is None:
            raise ConformanceError("structure", "", f"has no {self.text}")
        return column

    def leaves(self) -> "Iterator[_ClientLeaf]":
        yield self


# --- verbs -----------------------------------------------------------------------------


class _Verb(NamedTuple):
    """A verb. Its functions of boxes and columns take its text, for errors, and its argument."""

    usage: str
    num_arguments: int
    read: Callable[..., Any]
    """Returns the argument that the words of an entry give; ValueError says what is wrong."""
    box: Callable[..., BoxSpec]
    """Returns the space of the result; raises ContractMismatchError."""
    column: Callable[..., NDArray[Any]]
    """Returns the result for a batch."""


class _AppliedVerb:
    """A verb with its sources and arguments; a wrong one raises ConfigurationError."""

    def __init__(self, name: str, sources: "Sequence[_Source]", words: Sequence[str]) -> None:
        self._verb, self._sources = _VERBS[name], sources
        self.text: str = f"{name}({','.join([*(each.text for each in sources), *words])})"
        try:
            self._argument = self._verb.read(*words)
        except ValueError as error:
            raise ConfigurationError(f"{self.text}: {error}") from error

    def spec(self, client_space: SpaceSpec) -> BoxSpec:
        """Return the space of one lane's value; raises ContractMismatchError."""
        boxes = [_as_box(self.text, each.spec(client_space)) for each in self._sources]
        return self._verb.box(self.text, self._argument, *boxes)

    def apply(self, observations: Any) -> Any:
        """Return the column of a batch."""
        columns = [each.apply(observations) for each in self._sources]
        return self._verb.column(self.text, self._argument, *columns)

    def leaves(self) -> Iterator[_ClientLeaf]:
        for source in self._sources:
            yield from source.leaves()


_Source = _ClientLeaf | _AppliedVerb


def _refuse(text: str, problem: str) -> NoReturn:
    raise ContractMismatchError(f"{text}: {problem}")


def _bounded(
    text: str, shape: tuple[int, ...], dtype: np.dtype[Any], low: _Bounds, high: _Bounds
) -> BoxSpec:
    if math.prod(shape) * dtype.itemsize > MAX_LANE_BYTES:
        _refuse(text, f"{dtype} {shape} has more than {MAX_LANE_BYTES} bytes; map a smaller one")
    ends = (end if end.size == 1 else np.broadcast_to(end, shape) for end in (low, high))
    low_bytes, high_bytes = (end.astype(dtype.newbyteorder("<")).tobytes() for end in ends)
    return BoxSpec(shape, dtype.name, low_bytes, high_bytes)


def _as_box(text: str, spec: LeafSpec) -> BoxSpec:
    if isinstance(spec, BoxSpec):
        return spec
    leaf = leaves(spec)[0]
    if leaf.dtype is None:
        _refuse(text, "takes arrays, and its source is a Text; leave the verb out")
    if isinstance(spec, DiscreteSpec):
        low, high = np.array(spec.start), np.array(spec.start + spec.n - 1)
    else:  # MultiDiscrete, or MultiBinary
        nvec = np.array(getattr(spec, "nvec", 2))
        low, high = np.array(0), (nvec if nvec.ndim == 0 else nvec.reshape(leaf.shape)) - 1
    return _bounded(text, leaf.shape, leaf.dtype, low, high)


def _bounds(box: BoxSpec) -> tuple[_Bounds, _Bounds]:
    dtype = np.dtype(box.dtype)
    low, high = (np.frombuffer(end, dtype.newbyteorder("<")) for end in (box.low, box.high))
    shapes = [() if end.size == 1 else box.shape for end in (low, high)]
    return low.astype(dtype).reshape(shapes[0]), high.astype(dtype).reshape(shapes[1])


def _converted(array: NDArray[Any], target: np.dtype[Any]) -> NDArray[Any]:
    with np.errstate(over="ignore"):  # beyond the range of a smaller float is infinity
        return array.astype(target, copy=False)


def _concat_box(text: str, _: object, *boxes: BoxSpec) -> BoxSpec:
    shapes = [box.shape or (1,) for box in boxes]
    found = ", ".join(f"{box.dtype} {box.shape}" for box in boxes)
    if len({box.dtype for box in boxes}) > 1:
        _refuse(text, f"joins arrays of one dtype, not {found}; cast them first")
    if len({(len(shape), shape[:-1]) for shape in shapes}) > 1:
        _refuse(text, f"joins along the last axis, and other axes of {found} differ")
    shape, dtype = (*shapes[0][:-1], sum(own[-1] for own in shapes)), np.dtype(boxes[0].dtype)
    _bounded(text, shape, dtype, np.array(0), np.array(0))  # refuses too large a shape
    low, high = (
        np.concatenate(
            [np.broadcast_to(end, own) for end, own in zip(ends, shapes, strict=True)], -1
        )
        for ends in zip(*map(_bounds, boxes), strict=True)
    )
    return _bounded(text, shape, dtype, low, high)


def _concat(_text: str, _: object, *columns: NDArray[Any]) -> NDArray[Any]:
    return np.concatenate(
        [column[:, np.newaxis] if column.ndim == 1 else column for column in columns], -1
    )


def _dtype(word: str) -> np.dtype[Any]:
    if word not in DTYPES:
        raise ValueError(f"{word} is not a dtype; take one of {', '.join(DTYPES)}")
    return np.dtype(word)


def _cast_box(text: str, target: np.dtype[Any], box: BoxSpec) -> BoxSpec:
    low, high = _bounds(box)
    if target.kind != "f" and low.dtype.kind == "f":
        _refuse(text, f"does not round {low.dtype} to {target}; cast to a float dtype")
    if target.kind != "f" and not all(
        (_converted(each, target) == each).all() for each in (low, high)
    ):
        _refuse(
            text,
            f"{target} does not hold the client's bounds, {low.min()} to {high.max()}; cast to "
            "a wider dtype",
        )
    return _bounded(text, box.shape, target, _converted(low, target), _converted(high, target))


def _cast(text: str, target: np.dtype[Any], column: NDArray[Any]) -> NDArray[Any]:
    cast = _converted(column, target)
    # Values of clients may be out of bounds.
    is_exact = target.kind == "f" or np.can_cast(column.dtype, target)
    if not is_exact and not (cast == column).all():
        wrong = column[cast != column].flat[0]
        raise ConformanceError("dtype", text, f"{wrong} cannot be held by {target}")
    return cast


def _size(*words: str) -> tuple[int, ...]:
    if not all(re.fullmatch("[1-9][0-9]{0,4}", each) for each in words):
        raise ValueError("height and width are whole numbers from 1 to 99999")
    return tuple(map(int, words))


def _resize_box(text: str, size: tuple[int, int], box: BoxSpec) -> BoxSpec:
    shape, (low, high) = box.shape, _bounds(box)
    is_image = len(shape) >= 3 and shape[-1] in _IMAGE_CHANNELS and 0 not in shape
    if box.dtype != "uint8" or not is_image:
        _refuse(
            text,
            "takes uint8 images (..., height, width, channels) with 1, 3 or 4 channels, not "
            f"{box.dtype} {shape}; leave resize out, or put channels(x,last) inside",
        )
    resized = (*shape[:-3], *size, shape[-1])
    return _bounded(text, resized, np.dtype(np.uint8), low.min(), high.max())


def _resize(_text: str, size: tuple[int, int], column: NDArray[Any]) -> NDArray[Any]:
    return resize_images(column, size)


def _place(word: str) -> str:
    if word not in ("first", "last"):
        raise ValueError(f"{word} is neither first nor last")
    return word


def _channels_box(text: str, place: str, box: BoxSpec) -> BoxSpec:
    shape = box.shape
    if len(shape) < 3:
        _refuse(text, f"takes images (..., height, width, channels), not {shape}; leave it out")
    low, high = (end if end.ndim == 0 else _channels(text, place, end) for end in _bounds(box))
    *stack, first, second, third = shape
    order = (third, first, second) if place == "first" else (second, third, first)
    return _bounded(text, (*stack, *order), low.dtype, low, high)


def _channels(_text: str, place: str, column: NDArray[Any]) -> NDArray[Any]:
    axes = (-1, -3) if place == "first" else (-3, -1)
    return np.ascontiguousarray(np.moveaxis(column, *axes))


_Statistics = tuple[NDArray[np.float64], NDArray[np.float64]]
"""Mean and scale."""


def _statistics(word: str) -> _Statistics:
    file = Path(word.replace('"', "")).expanduser()
    form = 'write {"mean": [...], "scale": [...]}, finite numbers, each scale above 0'
    try:
        saved = json.loads(read_file(file))
        mean, scale = (_constants(saved[key]) for key in ("mean", "scale"))
    except (OSError, ArithmeticError, LookupError, RecursionError, TypeError, ValueError) as e:
        raise ValueError(f"{file} cannot be read ({type(e).__name__}: {e}); {form}") from e
    with np.errstate(over="ignore"):
        ends = [each.astype(np.float32) for each in (mean, scale)]
    if not all(np.isfinite(each).all() for each in ends) or not (ends[1] > 0).all():
        raise ValueError(f"{file} has other numbers; {form}")
    return mean, scale


def _constants(saved: Any) -> NDArray[np.float64]:
    """Return numbers of a file as float64.

    Raises ArithmeticError for one beyond float64; ValueError for what is not a number, such as a
    text or true, and where float64 cannot hold it exactly.
    """
    array = np.array(saved, object)
    for number in array.flat:
        if type(number) not in (int, float) or (type(number) is int and float(number) != number):
            raise ValueError(f"{number!r:.40} is not a number that float64 can hold")
    return array.astype(np.float64)


def _normalise_box(text: str, statistics: _Statistics, box: BoxSpec) -> BoxSpec:
    shape, (low, high), (mean, scale) = box.shape, _bounds(box), statistics
    try:
        is_fit = np.broadcast_shapes(mean.shape, scale.shape, shape) == shape
    except ValueError:
        is_fit = False
    if not is_fit:
        _refuse(
            text,
            f"a mean of shape {mean.shape} and a scale of shape {scale.shape} do "
            f"not broadcast to {shape}; save one number for each element of the last axis",
        )
    low, high = (_normalise(text, statistics, end) for end in (low, high))
    return _bounded(text, shape, low.dtype, low, high)


def _normalise(_text: str, statistics: _Statistics, column: NDArray[Any]) -> NDArray[Any]:
    # Bounds are computed as values are, so that rounding moves no value out of them.
    dtype = np.dtype(np.float64 if column.dtype == np.float64 else np.float32)
    mean, scale = statistics
    with np.errstate(over="ignore"):
        return np.asarray((column.astype(dtype) - mean.astype(dtype)) / scale.astype(dtype))


_CONCAT = "concat"
"""The verb that takes several sources."""
_VERBS = {
    _CONCAT: _Verb("concat(a,b,...)", 0, lambda: None, _concat_box, _concat),
    "cast": _Verb("cast(x,DTYPE)", 1, _dtype, _cast_box, _cast),
    "resize": _Verb("resize(x,HEIGHT,WIDTH)", 2, _size, _resize_box, _resize),
    "channels": _Verb("channels(x,first) or channels(x,last)", 1, _place, _channels_box, _channels),
    "normalise": _Verb("normalise(x,FILE.json)", 1, _statistics, _normalise_box, _normalise),
}


# --- entries ---------------------------------------------------------------------------


class _Parser:
    """Reads one entry."""

    def __init__(self, text: str) -> None:
        self._text = text
        self._tokens = _TOKEN.findall(text)[::-1]

    def entry(self) -> tuple[_Parts, _Source]:
        parts = self._path(self._word())
        if self._next() != "=":
            self._refuse("write KEY=SOURCE, such as 'state=concat(agent_pos,gripper)'")
        source = self._source(0)
        if self._tokens:
            self._refuse(f"{self._next()} comes after its end")
        return parts, source

    def _source(self, depth: int) -> _Source:
        word = self._word()
        if self._tokens[-1:] != ["("]:
            return _ClientLeaf(self._path(word))
        if depth > MAX_DEPTH:
            self._refuse(f"{word} is nested more than {MAX_DEPTH} verbs deep")
        if word not in _VERBS:
            near = [f"; did you mean {each}?" for each in get_close_matches(word, _VERBS, 1)]
            verbs = f"there are {', '.join(_VERBS)}, and KEY=NAME renames"
            self._refuse(f"there is no verb {word} ({verbs}){''.join(near)}")
        verb, sources, words = _VERBS[word], list[_Source](), list[str]()
        while (token := self._next()) == ("," if sources else "("):
            if word == _CONCAT or not sources:
                sources.append(self._source(depth + 1))
            else:
                words.append(self._word())
        if token != ")" or len(words) != verb.num_arguments:
            self._refuse(f"write {verb.usage}")
        return _AppliedVerb(word, sources, words)

    def _next(self) -> str:
        return self._tokens.pop() if self._tokens else ""

    def _word(self) -> str:
        token = self._next()
        if token in ("", "(", ")", ",", "="):
            self._refuse(f"a name is expected where it has {token or 'its end'}")
        return token

    def _path(self, word: str) -> _Parts:
        if not _PATH.fullmatch(word) or word.count("/") >= MAX_DEPTH:
            self._refuse(
                f"{word} is not a path; write keys with / between, odd ones in double quotes"
            )
        return tuple(part.replace('"', "") for part in re.findall(_KEY, word))

    def _refuse(self, problem: str) -> NoReturn:
        raise ConfigurationError(f"the map's entry {self._text!r:.200}: {problem}")


def _outline(paths: Sequence[_Parts]) -> SpaceSpec:
    if () in paths:
        return _ANY_LEAF
    keys = dict.fromkeys(path[0] for path in paths)
    inner = {key: [path[1:] for path in paths if path[0] == key] for key in keys}
    return DictSpec(tuple((key, _outline(rest)) for key, rest in inner.items()))


def _shape(spec: SpaceSpec | None) -> str:
    """Return the dtype and shape of a leaf, and ``?`` where it is not known."""
    leaf = leaves(spec)[0] if spec else None
    return f"{leaf.dtype or 'text'} {leaf.shape}" if leaf else "?"


class ObservationMap:
    """Makes the observations that a policy needs from those that a client has.

    A source is a leaf of the client's observation space (a path with ``/``; Tuples have
    positions), or one of these verbs, which nest:

    * ``concat(a,b,...)`` joins along the last axis; a scalar counts as one element.
    * ``cast(x,DTYPE)`` converts to a dtype that holds all values within the bounds.
    * ``resize(x,HEIGHT,WIDTH)`` scales uint8 images ``(..., height, width, channels)``.
    * ``channels(x,first)`` moves the last axis of images before height and width, and
      ``channels(x,last)`` moves it back.
    * ``normalise(x,FILE.json)`` is ``(x - mean) / scale``. The file has ``"mean"`` and ``"scale"``,
      numbers or lists that broadcast to the shape of ``x``, and is read now.

    A space that is neither Dict nor Tuple has one leaf, ``observation``. A key with spaces,
    ``=``, ``,``, parentheses or ``/`` in it stands in double quotes.

    Args:
        entries: Texts ``KEY=SOURCE``, or a dict of keys and sources.

    Raises:
        ConfigurationError: An entry has another form, or a file cannot be used.
    """

    def __init__(self, entries: Sequence[str] | Mapping[str, str]) -> None:
        self._texts = _texts(entries)
        self._entries: dict[_Parts, _Source] = {}
        for text in self._texts:
            parts, source = _Parser(text).entry()
            if any(parts[: len(other)] == other[: len(parts)] for other in self._entries):
                raise ConfigurationError(
                    f"the map has two entries for {_name(parts)} or a part of it; leave one of them"
                )
            self._entries[parts] = source
        is_bare = set(self._entries) == {(BARE,)} and not self._texts[0].lstrip().startswith('"')
        # The Dicts and Tuples of the mapped space; its leaves have no meaning.
        self._outline = _ANY_LEAF if is_bare else _outline(list(self._entries))
        self._sources = [self._entries[_parts(leaf.path)] for leaf in leaves(self._outline)]

    def space(self, client_space: SpaceSpec) -> SpaceSpec:
        """Return the space of the mapped observations.

        Args:
            client_space: Observation space of one lane of the client.

        Raises:
            ContractMismatchError: The map does not fit it.
        """
        return with_leaves(self._outline, [each.spec(client_space) for each in self._sources])

    def apply(self, observations: Any) -> Any:
        """Return a batch of mapped observations, in the form of gymnasium's vector environments.

        Args:
            observations: A batch of the client's observation space; its arrays ``(N, *shape)`` have
                the dtypes of the space.

        Raises:
            ConformanceError: A leaf is missing, or a ``cast`` cannot hold a number.
        """
        return unflatten(self._outline, [source.apply(observations) for source in self._sources])

    def completed(self, policy_space: SpaceSpec, client_space: SpaceSpec) -> Self:
        """Return the map to the structure of a policy's space.

        A leaf without an entry is the client's leaf of the same path.

        Args:
            policy_space: Observation space that the policy acts on.
            client_space: Observation space of one lane of the client.

        Raises:
            ConfigurationError: The key of an entry is not a leaf of the policy's space, or two
                entries name the same leaf.
            ContractMismatchError: The client has no leaf of that path.
        """
        given: dict[str, _Source] = {}
        for parts, own in self._entries.items():
            if given.setdefault("/".join(parts), own) is not own:
                raise ConfigurationError(
                    f"the map has two entries for {'/'.join(parts)} of the policy's observation "
                    "space, with quotes and without; leave one of them"
                )
        wanted = [_parts(leaf.path) for leaf in leaves(policy_space)]
        for key in sorted(given.keys() - {"/".join(parts) for parts in wanted}):
            raise ConfigurationError(
                f"the map has an entry for {key}, and the policy's observation space"
                f"{_known(key, policy_space)}"
            )
        complete = copy.copy(self)
        complete._outline, complete._sources = policy_space, []
        for parts in wanted:
            name, source = _name(parts), given.get("/".join(parts))
            if source is None and _found(client_space, parts) is None:
                raise ContractMismatchError(
                    f"the map leaves {name} open: add an entry {name}=SOURCE, for the client's "
                    f"observation space{_known(name, client_space)}"
                )
            complete._sources.append(source or _ClientLeaf(parts))
        return complete

    def lines(
        self, client_space: SpaceSpec | None = None, mapped_space: SpaceSpec | None = None
    ) -> list[str]:
        """Return one line for each key, for display: its source, and shapes before and after.

        Args:
            client_space: Observation space of the client; None: not known.
            mapped_space: What ``space`` returns for it, or the policy's space; None: not known.
        """
        lines = []
        for leaf, source in zip(leaves(self._outline), self._sources, strict=True):
            parts = _parts(leaf.path)
            before = ", ".join(
                _shape(client_space and each.spec(client_space)) for each in source.leaves()
            )
            after = _shape(mapped_space and _found(mapped_space, parts))
            lines.append(f"{_name(parts)} = {source.text}: {before} -> {after}")
        return lines

    def __repr__(self) -> str:
        return f"ObservationMap({list(self._texts)!r})"


def as_observation_map(value: Any) -> ObservationMap | None:
    return value if value is None or isinstance(value, ObservationMap) else ObservationMap(value)


def _texts(entries: Any) -> tuple[str, ...]:
    if isinstance(entries, Mapping) and _are_texts([*entries, *entries.values()]):
        entries = ["=".join(entry) for entry in entries.items()]
    is_list = isinstance(entries, Sequence) and not isinstance(entries, str)
    if not is_list or not entries or not _are_texts(entries):
        raise ConfigurationError(
            f"an observation map takes texts KEY=SOURCE or a dict, not {entries!r:.80}; write "
            'such as ["observation/image=pixels"]'
        )
    return tuple(entries)


def _are_texts(values: Sequence[object]) -> bool:
    return all(isinstance(value, str) for value in values)
