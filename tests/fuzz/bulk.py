"""Large inputs that are mostly one thing: many parts, long keys, deep nesting, or all of them."""

import json
import random
from collections.abc import Iterator
from typing import Any

import msgpack
from google.protobuf.message import DecodeError, Message

from rlmesh_ray.wire._pb.rlmesh.spaces.v1 import spaces_pb2
from tests.fuzz.samples import Target

_DEEP = 24


def bulky_inputs(target: Target, num_bytes: int, chance: random.Random) -> Iterator[bytes]:
    """Yield inputs of some ``num_bytes``, each from another of the target's seeds.

    Args:
        target: Reads them.
        num_bytes: Rough size.
        chance: The same state gives the same inputs.
    """
    seen: set[tuple[str, ...]] = set()
    for seed in target.seeds():
        prefix, own = seed[: target.prefix_bytes], seed[target.prefix_bytes :]
        if target.kind is not None:
            for each in _bulky_messages(target.kind, own, num_bytes // 2, seen):
                yield prefix + each
        elif own[:1] == b"{":
            for value in _bulky_values(json.loads(own), num_bytes, chance):
                yield prefix + json.dumps(value).encode()
        else:
            for value in _bulky_values(msgpack.unpackb(own), num_bytes, chance):
                yield prefix + msgpack.packb(value)


def _bulky_messages(
    kind: type[Message], seed: bytes, num_bytes: int, seen: set[tuple[str, ...]]
) -> Iterator[bytes]:
    """Yield messages with one field enlarged, of each place that is not in ``seen``."""
    message = kind()
    try:
        message.ParseFromString(seed)
    except DecodeError:
        return
    for number, (place, node) in enumerate(_nodes(message, ())):
        for field in node.DESCRIPTOR.fields:
            other = kind.FromString(seed)
            _, own = list(_nodes(other, ()))[number]
            if (*place, field.name) not in seen and _enlarge(own, field, num_bytes // 2):
                seen.add((*place, field.name))
                # Of a Dict of spaces, which may be the one that is above the others.
                for _, outer in _nodes(other, ()):
                    if isinstance(outer, spaces_pb2.DictSpec) and outer.keys and outer is not own:
                        outer.keys[0] = "k" * (num_bytes // 2)
                        break
                yield other.SerializeToString()


def _nodes(message: Message, place: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Yield a message and those in it, each with the names of the fields that lead to it."""
    yield place, message
    for field, value in message.ListFields():
        inner = (*place, field.name)
        if field.message_type is None:
            continue
        if not _is_map(field):
            for part in value[:2] if field.is_repeated else [value]:
                yield from _nodes(part, inner)
        elif field.message_type.fields_by_name["value"].message_type is not None:
            for key in sorted(value)[:2]:
                yield from _nodes(value[key], inner)


def _is_map(field: Any) -> bool:
    return field.message_type is not None and field.message_type.GetOptions().map_entry


def _enlarge(message: Any, field: Any, num_bytes: int) -> bool:
    """Put many small parts or one long part into a field; return whether it can be."""
    own, is_text = getattr(message, field.name), field.type == field.TYPE_STRING
    if _is_map(field):
        _fill_map(own, field.message_type.fields_by_name, num_bytes // 8)
    elif isinstance(message, spaces_pb2.DictSpec) and field.name == "spaces" and own:
        for number in range(num_bytes // (8 + own[0].ByteSize())):
            message.keys.append(f"{number:x}")
            own.add().CopyFrom(own[0])
    elif field.is_repeated and field.message_type is not None:
        for _ in range(num_bytes // 2):
            own.add()
    elif field.is_repeated:
        empty = b"" if field.type == field.TYPE_BYTES else "" if is_text else 0
        own.extend([empty] * (num_bytes // 2))
    elif is_text or field.type == field.TYPE_BYTES:
        setattr(message, field.name, "x" * num_bytes if is_text else bytes(num_bytes))
    else:
        return False
    return True


def _fill_map(own: Any, fields: Any, num_entries: int) -> None:
    has_texts = fields["key"].type == fields["key"].TYPE_STRING
    for number in range(num_entries):
        key = f"{number:x}" if has_texts else number
        if fields["value"].message_type is not None:
            own[key].SetInParent()
        else:
            own[key] = "" if fields["value"].type == fields["value"].TYPE_STRING else 0


def _bulky_values(seed: Any, num_bytes: int, chance: random.Random) -> Iterator[Any]:
    """Yield a map with one of its values, or another one, replaced by a large one."""
    long = "k" * (num_bytes // 2)
    many = num_bytes // 16
    parts = [
        {long: {f"{number:x}": None for number in range(many)}},
        {long: [{f"{number:x}": None for number in range(many // 2)} for _ in range(2)]},
        {f"{number:x}": 0 for number in range(many)},
        [0] * many,
        [[] for _ in range(many)],
        [{} for _ in range(many)],
        [long, *([0] * many)],
        [[long, 1.5]] * 2 + [[0.5] * 8] * (many // 8),
        _nested({f"{number:x}": [] for number in range(many)}, list),
        _nested({long: [0] * many}, dict),
        long,
    ]
    for part in parts:
        if not isinstance(seed, dict):
            yield part
            continue
        yield {**seed, "other": part}
        if seed:
            yield {**seed, chance.choice(sorted(seed, key=str)): part}
        if isinstance(part, dict):
            yield {**seed, **part}


def _nested(value: Any, kind: type) -> Any:
    for _ in range(_DEEP):
        value = [value] if kind is list else {"a": value}
    return value
