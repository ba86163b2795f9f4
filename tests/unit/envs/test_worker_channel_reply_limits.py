import pickle
from typing import Any

import numpy as np
import pytest

from rlmesh_ray.envs.commands import RenderReply, ResetReply, StepReply
from rlmesh_ray.envs.worker_channel import (
    MAX_BYTES,
    MAX_TEXT,
    encode_reply,
    limit_reply,
)
from rlmesh_ray.protocol.env_session import Failure, FailureKind
from rlmesh_ray.spaces.validation import WARNING_KEY, ConformanceWarning, warnings_info
from rlmesh_ray.spaces.vector_infos import LEFT_OUT_KEY
from rlmesh_ray.testing.equality import assert_identical
from rlmesh_ray.wire.rlmesh_v1.meta import MAX_NODES

DEPTH = 24
"""Of the wire: deeper containers are text."""


def nested(depth: int, *, twice: bool = False) -> Any:
    value: Any = 1
    for level in range(depth):
        inner = (value, value) if twice else [value]
        value = inner if level % 2 else {"d": inner}
    return value


def kept(infos: dict[Any, Any], max_bytes: int = MAX_BYTES) -> dict[Any, Any]:
    reply = limit_reply(ResetReply(infos), max_bytes)
    assert isinstance(reply, ResetReply)
    return dict(reply.infos)


def sent(reply: Any) -> Any:
    return pickle.loads(encode_reply(reply)[8:])


def test_what_has_room_is_kept() -> None:
    lanes = np.empty((1, 2), object)
    lanes[0, 1] = {"a": [np.arange(3, dtype=np.int16), None]}
    infos: dict[Any, Any] = {
        "lanes": lanes,
        1: True,
        None: -3,
        "list": [0.5, "x", b"y", 1j],
        "big": np.zeros(9999),
    }

    reply = limit_reply(StepReply(infos, {0: {"x": [b"y"]}}, (("text",),)))

    assert isinstance(reply, StepReply)
    # Keys are text, as for a client.
    texts = {**infos, "1": infos[1], "None": infos[None], "list": [0.5, "x", b"y", "1j"]}
    assert_identical(reply.infos, {key: texts[key] for key in sorted(map(str, infos))})
    assert reply.final_infos == {0: {"x": [b"y"]}}
    assert reply.text_columns == (("text",),)


def test_what_is_deeper_is_a_short_text() -> None:
    value = kept({"x": nested(100_000)})["x"]

    for _ in range(DEPTH):
        (value,) = value.values() if isinstance(value, dict) else value
    assert value in ("{'d': [{...}]}", "[{'d': [...]}]")


def test_parts_that_occur_twice_end_as_text_and_cost_no_others() -> None:
    reply = sent(StepReply({"x": nested(10_000, twice=True), "y": [1]}))

    assert reply.infos["y"] == [1]
    assert LEFT_OUT_KEY in reply.infos


def test_a_reply_that_is_too_deep_for_pickle_is_sent_all_the_same() -> None:
    assert sent(StepReply({"x": nested(100_000), "y": 1})).infos["y"] == 1


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ({3}, "{3}"),
        (set(range(1000)), "{0, 1, 2, "),
        (2**70, str(2**70)),
        (10**5000, "<int>"),
        (list(range(MAX_NODES)), "[0, 1, 2, 3, "),
        (dict.fromkeys(range(MAX_NODES)), "{0: None, 1: None, "),
        (np.full(MAX_NODES, None), "<ndarray>"),
        (np.zeros(MAX_BYTES), "<ndarray>"),
        (bytes(MAX_BYTES), f"<{MAX_BYTES} of bytes>"),
        (pytest, "<module 'pytest'"),
    ],
    ids=lambda value: type(value).__name__,
)
def test_what_has_no_room_or_no_form_is_a_short_text(value: Any, expected: str) -> None:
    infos = kept({"x": value, "y": [1]})

    assert infos["x"].startswith(expected)
    assert len(infos["x"]) < 5000
    assert infos["y"] == [1]


def test_of_too_many_keys_the_first_remain_and_the_rest_is_counted() -> None:
    infos = kept(dict.fromkeys(range(100_000), 1))

    assert len(infos) == 8192 + 1
    assert {"0", "1", "8191"} <= infos.keys()
    assert infos[LEFT_OUT_KEY].startswith(f"{100_000 - 8192} entries ")


def test_integers_that_take_long_to_write_share_the_room() -> None:
    texts = kept({"x": [10**4000] * 20_000})["x"]

    assert texts[0] == str(10**4000)
    assert texts[-1] == "<int>"
    assert texts.count(texts[0]) < 500


def test_keys_share_the_room_as_well() -> None:
    keys = kept({"k" * MAX_BYTES: 1, 10**5: 2, 2**70: 3})

    assert keys == {"<str>": 1, str(10**5): 2, str(2**70): 3}


class Broken(dict[str, int]):
    def items(self) -> Any:
        raise RuntimeError("no items")


def test_a_value_that_fails_when_it_is_looked_at_costs_only_itself() -> None:
    assert kept({"x": [Broken(a=1), 2]}) == {"x": ["<Broken>", 2]}


class Unprintable:
    def __repr__(self) -> str:
        raise RuntimeError("no text")


def test_a_key_without_a_text_is_the_name_of_its_class() -> None:
    assert kept({Unprintable(): {Unprintable(): 1}}) == {"<Unprintable>": {"<Unprintable>": 1}}


def test_an_error_keeps_the_start_of_its_message_and_the_end_of_its_traceback() -> None:
    limited = sent(Failure(FailureKind.RAISED, "m" + "x" * 10**6, "x" * 10**6 + "t"))

    assert (limited.message[0], len(limited.message)) == ("m", MAX_TEXT)
    assert (limited.debug_info[-1], len(limited.debug_info)) == ("t", MAX_TEXT)


def test_pictures_are_no_infos() -> None:
    assert sent(RenderReply(bytes(10**6))) == RenderReply(bytes(10**6))


def test_warnings_are_kept_among_infos_that_are_not() -> None:
    warning = ConformanceWarning("action", "range", "", "3.0 is above 1.0")

    reply = sent(ResetReply({"x": nested(100_000), **warnings_info([warning], 1)}))

    assert reply.infos[WARNING_KEY].tolist() == [[warning]]
