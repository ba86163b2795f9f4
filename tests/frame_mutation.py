"""Seeded mutation of frames, for fuzzing: valid protobuf of another content, and damaged bytes."""

import random
from collections.abc import Iterator
from typing import Any

from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import DecodeError, Message

_MAX_DEPTH = 40
_INTEGERS = (0, 1, -1, 2, 3, 255, 2**31 - 1, -(2**31), 2**32 - 1, 2**63 - 1, -(2**63), 2**64 - 1)
_DOUBLES = (0.0, -0.0, 1.0, -2.5, 1e308, float("inf"), float("-inf"), float("nan"), 5e-324)
_TEXTS = ("", "0", "a", "é漢🎲", "\0", "a/../b", "x" * 300, "\u202e", "{}", "None")
_RANGES = {
    FieldDescriptor.CPPTYPE_INT32: (-(2**31), 2**31 - 1),
    FieldDescriptor.CPPTYPE_ENUM: (-(2**31), 2**31 - 1),
    FieldDescriptor.CPPTYPE_INT64: (-(2**63), 2**63 - 1),
    FieldDescriptor.CPPTYPE_UINT32: (0, 2**32 - 1),
    FieldDescriptor.CPPTYPE_UINT64: (0, 2**64 - 1),
}


def mutate_frame(kind: type[Message], frame: bytes, chance: random.Random) -> bytes:
    """Return another valid frame: fields are set, cleared, duplicated, or replaced by others.

    Args:
        kind: Message type of ``frame``; if it does not parse, its bytes are damaged instead.
        frame: The frame to change.
        chance: Random generator; the same state gives the same frame.
    """
    message = kind()
    try:
        message.ParseFromString(frame)
    except DecodeError:
        return damaged(frame, chance)
    for _ in range(chance.randint(1, 3)):
        _mutate(message, chance)
    return message.SerializeToString(deterministic=True)


def damaged(frame: bytes, chance: random.Random) -> bytes:
    """Return ``frame`` with flipped bits, inserted or removed bytes, or truncated."""
    data = bytearray(frame)
    for _ in range(chance.randint(1, 3)):
        position = chance.randrange(len(data) + 1)
        match chance.randrange(4):
            case 0 if position < len(data):
                data[position] ^= 1 << chance.randrange(8)
            case 1:
                data[position:position] = chance.randbytes(chance.randint(1, 4))
            case 2:
                del data[position : position + chance.randint(1, 4)]
            case _:
                del data[position:]
    return bytes(data)


def _mutate(root: Message, chance: random.Random) -> None:
    nodes = list(_nodes(root, 0))
    message, depth = chance.choice([node for node in nodes if node[0].DESCRIPTOR.fields])
    field: Any = chance.choice(message.DESCRIPTOR.fields)
    is_map = field.message_type is not None and field.message_type.GetOptions().map_entry
    if chance.random() < 0.15:
        message.ClearField(field.name)
    elif is_map:
        _mutate_map(message, field, nodes, chance)
    elif field.is_repeated:
        _mutate_repeated(message, field, nodes, chance)
    elif field.message_type is not None:
        if depth < _MAX_DEPTH:
            _graft(getattr(message, field.name), nodes, chance)
    else:
        setattr(message, field.name, _scalar(field, nodes, chance))


def _nodes(message: Message, depth: int) -> Iterator[tuple[Message, int]]:
    yield message, depth
    for field, value in message.ListFields():
        if field.message_type is None:
            continue
        if field.message_type.GetOptions().map_entry:
            of_map = field.message_type.fields_by_name["value"].message_type is not None
            parts: list[Any] = [value[key] for key in sorted(value)] if of_map else []
        else:
            parts = list(value) if field.is_repeated else [value]
        for part in parts:
            yield from _nodes(part, depth + 1)


def _mutate_map(message: Message, field: Any, nodes: Any, chance: random.Random) -> None:
    entries = getattr(message, field.name)
    key_field, value_field = field.message_type.fields
    key = _scalar(key_field, nodes, chance)
    if entries and chance.random() < 0.4:
        del entries[chance.choice(sorted(entries))]
    elif value_field.message_type is not None:
        _graft(entries[key], nodes, chance)
    else:
        entries[key] = _scalar(value_field, nodes, chance)


def _mutate_repeated(message: Message, field: Any, nodes: Any, chance: random.Random) -> None:
    items = getattr(message, field.name)
    if items and chance.random() < 0.3:
        del items[chance.randrange(len(items))]
    elif field.message_type is not None:
        _graft(items.add(), nodes, chance)
    elif items and chance.random() < 0.3:
        items.append(chance.choice(list(items)))
    else:
        items.extend([_scalar(field, nodes, chance)] * chance.choice((1, 1, 1, 2, 40)))


def _graft(target: Message, nodes: Any, chance: random.Random) -> None:
    """Replace ``target`` by a copy of another message of its type, if there is one."""
    target.SetInParent()
    others = [other for other, _ in nodes if type(other) is type(target) and other is not target]
    if others and chance.random() < 0.7:
        copy = type(target)()
        copy.CopyFrom(chance.choice(others))
        if copy.ByteSize() < 2**14:
            target.CopyFrom(copy)


def _scalar(field: Any, nodes: Any, chance: random.Random) -> Any:
    kind = field.cpp_type
    if kind in _RANGES:
        low, high = _RANGES[kind]
        number = chance.choice((*_INTEGERS, *range(20)))
        return min(max(number, low), high)
    if kind == FieldDescriptor.CPPTYPE_BOOL:
        return chance.random() < 0.5
    if kind in (FieldDescriptor.CPPTYPE_DOUBLE, FieldDescriptor.CPPTYPE_FLOAT):
        return chance.choice(_DOUBLES)
    if field.type == FieldDescriptor.TYPE_BYTES:
        return chance.choice((b"", bytes(chance.randint(1, 40)), chance.randbytes(8), b"\xff" * 8))
    return chance.choice((*_TEXTS, *_texts(nodes)))


def _texts(nodes: Any) -> list[str]:
    """Return the texts in the message itself: ids, keys, names."""
    found: list[str] = []
    for message, _ in nodes:
        for field, value in message.ListFields():
            if isinstance(value, str):
                found.append(value)
            elif field.message_type is not None and field.message_type.GetOptions().map_entry:
                found += [key for key in value if isinstance(key, str)]
    return sorted(found)
