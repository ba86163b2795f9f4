from collections import OrderedDict
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlmesh_ray.errors import CodecError
from rlmesh_ray.protocol.messages import EnvErrorCode
from rlmesh_ray.testing.equality import assert_identical
from rlmesh_ray.wire import lane_calls_v1 as wire
from rlmesh_ray.wire._pb.rlmesh_ray.lanes.v1 import service_pb2 as pb
from rlmesh_ray.wire.lane_calls_v1 import CallFailed, LaneCall

VALUES: Any = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**63 - 1)
    | st.floats(allow_nan=False)
    | st.text(st.characters(codec="utf-8"), max_size=9)
    | st.binary(max_size=9),
    lambda parts: st.lists(parts, max_size=4) | st.dictionaries(st.text(max_size=5), parts),
    max_leaves=12,
)


def arrived(*arguments: object) -> tuple[object, ...]:
    return wire.parse_call(wire.pack_call(LaneCall("f", arguments))).arguments


@given(st.lists(VALUES, max_size=4))
def test_arguments_arrive_as_they_are(arguments: list[Any]) -> None:
    assert list(arrived(*arguments)) == arguments


def test_arrays_keep_their_dtype_and_shape() -> None:
    array = np.arange(6, dtype=np.float16).reshape(2, 3)

    assert_identical(arrived(array, {"deep": [array > 2]}), (array, {"deep": [array > 2]}))


def test_tuples_and_kinds_of_dicts_arrive_plain() -> None:
    assert arrived((1, (2,)), OrderedDict(a=np.int8(3))) == ([1, [2]], {"a": 3})


def test_what_else_a_call_says_arrives() -> None:
    call = LaneCall("set_task", (1,), (2, 0), 2**40, 900)

    assert wire.parse_call(wire.pack_call(call)) == call


@pytest.mark.parametrize(
    ("argument", "reason"),
    [
        ({1, 2}, "argument 0, of type set, cannot be sent or is too deep; give numbers"),
        (object(), "argument 0, of type object, cannot be sent"),
        (print, "cannot be sent"),
        ([{"a": 1j}], r"argument 0\[0\]\['a'\], of type complex, cannot be sent"),
        (np.array([None]), "argument 0, of type ndarray, cannot be sent"),
        (np.array(["a"]), "argument 0, of type ndarray, cannot be sent"),
        ({1: 2}, "argument 0 has the key 1; give other text"),
        ({"rlmesh_ray.ndarray": 1}, "argument 0 has the key 'rlmesh_ray.ndarray'"),
        (2**63, "argument 0 does not fit into 64 bits"),
        ("a" * (wire.MAX_ARGUMENT_BYTES + 1), "more than 4096 values or 512 KiB"),
        (b"a" * (wire.MAX_ARGUMENT_BYTES + 1), "512 KiB"),
        (np.zeros(wire.MAX_ARGUMENT_BYTES + 1, np.uint8), "512 KiB"),
        ([0] * wire.MAX_ARGUMENT_VALUES, "give an array in place of lists"),
        ({"a" * (wire.MAX_ARGUMENT_BYTES + 1): 0}, "512 KiB"),
    ],
)
def test_an_argument_that_would_not_arrive_as_it_is_is_refused(argument: Any, reason: str) -> None:
    with pytest.raises(CodecError, match=reason):
        wire.pack_call(LaneCall("f", (argument,)))


def test_what_contains_itself_is_refused() -> None:
    loop: list[Any] = []
    loop.append(loop)

    with pytest.raises(CodecError, match="cannot be sent"):
        wire.pack_call(LaneCall("f", (loop,)))


def test_the_most_and_largest_arguments_arrive() -> None:
    dicts: dict[str, list[int]] = {
        str(number): [] for number in range((wire.MAX_ARGUMENT_VALUES - 1) // 2)
    }
    arrays = [np.zeros(100)] * (wire.MAX_ARGUMENT_VALUES // 4 - 400)
    data = b"x" * wire.MAX_ARGUMENT_BYTES

    assert arrived(dicts) == (dicts,)
    assert all(isinstance(array, np.ndarray) for array in arrived(*arrays))
    assert arrived(data) == (data,)


@pytest.mark.parametrize("lanes", [(-1,), (2**32,), ("a",)])
def test_lanes_that_no_field_can_hold_are_refused(lanes: Any) -> None:
    with pytest.raises(CodecError, match="no wire form"):
        wire.pack_call(LaneCall("f", lanes=lanes))


def test_results_arrive_and_objects_among_them_as_text() -> None:
    results = (None, {"level": 2}, np.arange(2), {3})

    received = wire.parse_response(wire.pack_response(results))

    assert_identical(received, (None, {"level": 2}, np.arange(2), "{3}"))


def test_a_failure_arrives() -> None:
    failure = CallFailed(EnvErrorCode.INTERNAL, "ValueError: no \ud800", "Traceback")

    received = wire.parse_response(wire.pack_response(failure))

    assert received == CallFailed(EnvErrorCode.INTERNAL, "ValueError: no ?", "Traceback")


def test_an_error_code_of_a_later_version_is_unspecified() -> None:
    message = pb.CallResponse()
    message.error.code = 77  # type: ignore[assignment]  # enums are ints

    received = wire.parse_response(message.SerializeToString())

    assert received == CallFailed(EnvErrorCode.UNSPECIFIED, "")


def test_garbage_is_refused() -> None:
    with pytest.raises(CodecError, match="CallRequest"):
        wire.parse_call(b"\xff")
    with pytest.raises(CodecError, match="CallResponse"):
        wire.parse_response(b"\xff")
    with pytest.raises(CodecError, match="neither results nor an error"):
        wire.parse_response(b"")


def test_a_call_with_more_values_than_a_client_sends_is_refused() -> None:
    many = pb.CallRequest(name="f")
    for _ in range(2**14):
        many.arguments.items.add()
    assert len(wire.parse_call(many.SerializeToString()).arguments) == 2**14

    many.arguments.items.add()
    with pytest.raises(CodecError, match="more than 16384 values"):
        wire.parse_call(many.SerializeToString())
    with pytest.raises(CodecError, match="65537 lanes, and 65536 are the limit"):
        wire.parse_call(pb.CallRequest(env_indices=[0] * (2**16 + 1)).SerializeToString())
