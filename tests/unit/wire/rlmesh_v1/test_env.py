from array import array
from collections import OrderedDict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gymnasium import spaces
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import array_shapes, arrays

from rlmesh_ray.errors import CodecError
from rlmesh_ray.protocol.handshake import (
    HandshakeResponse,
    answer_handshake,
    make_handshake_request,
)
from rlmesh_ray.protocol.messages import (
    Close,
    Closed,
    EnvErrorCode,
    EnvFailed,
    EnvRequest,
    EnvResponse,
    EpisodeRecord,
    MalformedRequest,
    Render,
    Rendered,
    Reset,
    ResetDone,
    Step,
    StepDone,
)
from rlmesh_ray.spaces.contract import AutoresetMode, EnvContract
from rlmesh_ray.spaces.gym_conversion import from_gymnasium
from rlmesh_ray.testing.equality import assert_identical
from rlmesh_ray.wire._pb.rlmesh.env.v1 import interaction_pb2 as pb
from rlmesh_ray.wire._pb.rlmesh.env.v1 import service_pb2
from rlmesh_ray.wire.rlmesh_v1 import env
from rlmesh_ray.wire.rlmesh_v1.meta import ARRAY_KEY, MAX_BYTES, MAX_PEER_NODES

EPISODE = EpisodeRecord(
    episode_id="e1",
    env_index=2,
    step_count=7,
    cumulative_reward=1.5,
    terminated=True,
    truncated=False,
    start_timestamp_ns=1_000_000_000,
    end_timestamp_ns=3_500_000_000,
    seed=0,
    final_info={"score": 3},
)
UNSEEDED = EpisodeRecord("e2", 0, 0, 0.0, False, True, 5, 6)
REQUESTS: list[EnvRequest] = [
    Reset("r1"),
    Reset("r2", (1, 2), {"level": 3}, 500, (0, 5)),
    Reset("r3", (-(2**63), 2**63 - 1)),
    Step("r4", b"\x00\x01", 250),
    Step("r5", b"", 0, (1,)),
    Render("r6"),
    Render("r7", b"\x01", 9),
    Close("r8"),
    Close("r9", "done"),
]
RESPONSES: list[EnvResponse] = [
    ResetDone("r1", b"obs", {"a": 1}, ("e1", "e2")),
    ResetDone("r1", b"", {}, ()),
    StepDone("r2", b"obs", array("d", [1.0, -0.5]), b"\x00\x01", b"\x00\x00", {}, (), ("e1", "")),
    StepDone("r2", b"", array("d"), b"", b"", {"k": [1]}, (EPISODE, UNSEEDED), ()),
    Rendered("r3", b"png"),
    Rendered("r3", b""),
    Rendered("r3", None),
    Closed("r4"),
    Closed("r4", (EPISODE,)),
    *(EnvFailed("r5", code, "why", True, "trace", (UNSEEDED,)) for code in EnvErrorCode),
    EnvFailed("", EnvErrorCode.CLOSED, "", False),
]
CONTRACT = EnvContract(
    id="Maze-v0",
    observation_space=from_gymnasium(spaces.Box(0, 1, (2,))),
    action_space=from_gymnasium(spaces.Discrete(4)),
    num_envs=3,
    autoreset_mode=AutoresetMode.NEXT_STEP,
    metadata={"render_fps": 30},
)


@pytest.mark.parametrize("request_", REQUESTS)
def test_a_request_comes_back_equal(request_: EnvRequest) -> None:
    assert env.parse_request(env.pack_request(request_)) == request_


@pytest.mark.parametrize("tag_arrays", [False, True])
@pytest.mark.parametrize("response", RESPONSES)
def test_a_response_comes_back_equal(response: EnvResponse, tag_arrays: bool) -> None:
    assert env.parse_response(env.pack_response(response, tag_arrays=tag_arrays)) == response


INPUTS: Any = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**63 - 1)
    | st.floats()
    | st.text(st.characters(codec="utf-8"), max_size=9)
    | st.binary(max_size=9)
    | arrays(st.sampled_from(["f2", "f4", ">i4", "u1", "i8", "?", "c8"]), array_shapes(min_dims=0)),
    lambda parts: st.lists(parts, max_size=4) | st.dictionaries(st.text(max_size=5), parts),
    max_leaves=12,
)


def sent(options: Any, **limits: Any) -> Any:
    request = env.parse_request(env.pack_request(Reset("r", options=options), **limits))
    assert isinstance(request, Reset)
    return request.options


def native(value: Any) -> Any:
    """Return ``value`` with the byte order of this machine: the only thing that does not travel."""
    if isinstance(value, dict):
        return {key: native(part) for key, part in value.items()}
    if isinstance(value, list):
        return [native(part) for part in value]
    return value.astype(value.dtype.name) if isinstance(value, np.ndarray) else value


@given(st.dictionaries(st.text(st.characters(codec="utf-8"), max_size=5), INPUTS, max_size=4))
def test_options_arrive_as_they_are(options: dict[str, Any]) -> None:
    assert_identical(sent(options), native(options))


@pytest.mark.parametrize("length", [0, 16_000, 16_385, 32_768, 200_000])
def test_arrays_among_the_options_stay_arrays_whatever_their_size(length: int) -> None:
    state = np.arange(length, dtype=np.float32)

    assert_identical(sent({"state": state}), {"state": state})


def test_a_mapped_file_among_the_options_arrives_as_an_array(tmp_path: Path) -> None:
    state = np.memmap(tmp_path / "state", np.float32, "w+", shape=(2, 3))

    assert_identical(sent({"state": state}), {"state": np.zeros((2, 3), np.float32)})


def test_kinds_of_numbers_text_and_containers_arrive_plain() -> None:
    options = {"a": np.float32(0.1), "b": (1, (2,)), "c": OrderedDict(d=np.str_("e")), "f": b"g"}

    assert sent(options) == {"a": float(np.float32(0.1)), "b": [1, [2]], "c": {"d": "e"}, "f": b"g"}


MOST = 2**20 - 1
LOOP: list[Any] = []
LOOP.append(LOOP)


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"f": lambda: 1}, r"options\['f'\], of type function, cannot be sent .*; give numbers"),
        ({"a": {"s": [{1, 2}]}}, r"options\['a'\]\['s'\]\[0\], of type set, cannot be sent"),
        ({"big": 2**80}, r"options\['big'\] does not fit into 64 bits; give a string"),
        ({"big": np.uint64(2**63)}, r"options\['big'\] does not fit into 64 bits"),
        ({1: 2}, "options has the key 1; give other text"),
        ({"a": {1: 2}}, r"options\['a'\] has the key 1; give other text"),
        ({"\ud800": 2}, r"options has the key '\\ud800'; give other text"),
        ({ARRAY_KEY: 1}, "options has the key 'rlmesh_ray.ndarray'"),
        ({"text": "\ud800"}, r"options\['text'\], of type str, would arrive as '\?'"),
        ({"third": np.longdouble(1) / 3}, r"options\['third'\], of type longdouble, would arrive"),
        ({"t": np.timedelta64(1, "s")}, r"options\['t'\], of type timedelta64, cannot be sent"),
        ({"c": 1j}, r"options\['c'\], of type complex, cannot be sent"),
        (
            {"m": np.ma.masked_array([1, 2], [False, True])},
            r"of type MaskedArray, cannot be sent",
        ),
        ({"o": np.array([None])}, r"\['o'\], of type ndarray, cannot be sent"),
        ({"d": np.array(["2000"], "M8[Y]")}, r"\['d'\], of type ndarray, cannot be sent"),
        ({"x": np.zeros((1,) * 32)}, r"\['x'\], of type ndarray, cannot be sent"),
        ({"loop": LOOP}, r"\['loop'\].*, of type list, cannot be sent or is too deep"),
        ({"l": [0.5] * 16_384}, r"\['l'\]\[16383\]: the options take more than 16384 values"),
        ({"t": "x" * 2**20}, r"\['t'\]: .* 1023 KiB; give an array in place of lists, or the name"),
        ({"a": 1, "x": np.zeros(2**18, np.float32)}, r"\['x'\]: the options take more than"),
        ({"x": np.zeros(MOST - 9, np.uint8), "z": 1}, r"Reset has .*; give less in options\['x'\]"),
    ],
)
def test_options_that_would_not_arrive_as_they_are_are_refused(options: Any, reason: str) -> None:
    with pytest.raises(CodecError, match=reason):
        sent(options, max_bytes=MOST)


def test_as_many_options_as_an_endpoint_takes_are_sent() -> None:
    most: dict[str, Any] = {"l": [1] * (MAX_PEER_NODES - 1)}

    assert sent(most) == most
    with pytest.raises(CodecError, match="more than 16384 values"):
        sent({**most, "a": None})


def test_arrays_are_refused_for_a_peer_that_does_not_know_them() -> None:
    with pytest.raises(CodecError, match=r"options\['a'\]\[0\] is an array, .*; give a list"):
        sent({"a": [np.zeros(2)]}, tag_arrays=False)
    assert sent({"a": [0.0, 0.0]}, tag_arrays=False) == {"a": [0.0, 0.0]}


def test_no_request_is_larger_than_what_the_endpoint_takes() -> None:
    with pytest.raises(CodecError, match=r"Step has .* the endpoint takes 99; give shorter text"):
        env.pack_request(Step("r", bytes(100)), max_bytes=99)


def test_request_ids_stand_where_the_generation_has_them() -> None:
    request = pb.JoinRequest.FromString(env.pack_request(Close("r1")))
    response = pb.JoinResponse.FromString(env.pack_response(Closed("r1"), tag_arrays=False))

    assert [field.number for field, value in request.ListFields() if value == "r1"] == [10]
    assert [field.number for field, value in response.ListFields() if value == "r1"] == [21]


def test_every_error_code_has_the_number_of_the_schema() -> None:
    codes = set(EnvErrorCode) - {EnvErrorCode.UNSUPPORTED}  # of the other generation
    for code in codes:
        assert pb.EnvErrorCode.Value(f"ENV_ERROR_CODE_{code.name}") == code.value
    assert len(codes) == len(pb.EnvErrorCode.keys())


def test_arrays_in_infos_are_lists_without_the_capability_and_arrays_with_it() -> None:
    infos = {"a": np.array([1, 2], np.int16)}
    ended = EpisodeRecord("e", 0, 1, 0.0, True, False, 0, 0, final_info=infos)
    step = StepDone("r1", b"", [0.0], b"\1", b"\0", infos, (ended,), ("",))

    plain = env.parse_response(env.pack_response(step, tag_arrays=False))
    tagged = env.parse_response(env.pack_response(step, tag_arrays=True))

    assert isinstance(plain, StepDone)
    assert plain.infos == plain.completed_episodes[0].final_info == {"a": [1, 2]}
    assert isinstance(tagged, StepDone)
    assert_identical(tagged.infos, infos)
    assert_identical(tagged.completed_episodes[0].final_info, infos)


def test_all_infos_of_a_response_share_what_peers_accept_beside_the_observation() -> None:
    big = {"x": bytes(2**24), "y": 1}
    ended = [EpisodeRecord(f"e{n}", n, 1, 0.0, True, False, 0, 0, final_info=big) for n in range(5)]
    step = StepDone("r1", bytes(10), [0.0] * 5, b"\1" * 5, b"\0" * 5, big, tuple(ended), ("",) * 5)

    frame = env.pack_response(step, tag_arrays=True)
    back = env.parse_response(frame)

    assert len(frame) < MAX_BYTES + 2**12
    assert isinstance(back, StepDone)
    assert back.infos == big
    assert [record.final_info["y"] for record in back.completed_episodes] == [1] * 5


def test_the_duration_of_an_episode_is_in_milliseconds() -> None:
    data = env.pack_response(Closed("r1", (EPISODE,)), tag_arrays=False)

    assert pb.JoinResponse.FromString(data).close.final_episodes[0].duration_ms == 2500


def test_rewards_may_be_an_array() -> None:
    step = StepDone("r1", b"", np.array([0.5, np.inf]), b"", b"", {}, (), ())  # type: ignore[arg-type]

    back = env.parse_response(env.pack_response(step, tag_arrays=False))

    assert isinstance(back, StepDone)
    assert list(back.rewards) == [0.5, np.inf]


def test_seeds_may_be_numpy_integers() -> None:
    frame = env.pack_request(Reset("r1", (np.int64(3),)))  # type: ignore[arg-type]

    assert env.parse_request(frame) == Reset("r1", (3,))


@pytest.mark.parametrize(
    "request_",
    [
        Reset("r1", (2**63,)),
        Reset("r1", env_indices=(2**31,)),
        Step("r1", b"", 2**63),
        Step("r1", None),  # type: ignore[arg-type]
        Close("\ud800"),
    ],
)
def test_a_request_that_the_wire_cannot_carry_is_refused(request_: EnvRequest) -> None:
    with pytest.raises(CodecError, match=rf"{type(request_).__name__} has no wire form"):
        env.pack_request(request_)


def test_text_of_an_error_is_made_readable() -> None:
    failure = EnvFailed("r1", EnvErrorCode.INTERNAL, "bad \udc80", False, "trace \udc80")

    back = env.parse_response(env.pack_response(failure, tag_arrays=False))

    assert isinstance(back, EnvFailed)
    assert (back.message, back.debug_info) == ("bad ?", "trace ?")


@pytest.mark.parametrize("data", [b"\xff", b"\x0a\x05ab", b"garbage"])
def test_a_frame_that_does_not_decode_is_unreadable_with_the_reason(data: bytes) -> None:
    request = env.parse_request(data)

    assert isinstance(request, MalformedRequest)
    assert request.request_id == ""
    assert "no rlmesh.env.v1.JoinRequest" in request.reason


@pytest.mark.parametrize("data", [b"", pb.JoinRequest(request_id="r7").SerializeToString()])
def test_a_frame_without_a_kind_keeps_its_id(data: bytes) -> None:
    request = env.parse_request(data)

    assert isinstance(request, MalformedRequest)
    assert request.request_id == ("r7" if data else "")
    assert "no kind of request" in request.reason


def test_a_request_with_bad_options_keeps_its_id() -> None:
    message = pb.JoinRequest(request_id="r7")
    message.reset.options.entries["x"].map.entries[ARRAY_KEY].str = "nonsense"

    request = env.parse_request(message.SerializeToString())

    assert isinstance(request, MalformedRequest)
    assert request.request_id == "r7"
    assert request.reason.startswith("reset: ")


@pytest.mark.parametrize(
    "message",
    [
        pb.JoinRequest(step=pb.StepRequest(env_indices=[0] * (2**16 + 1))),
        pb.JoinRequest(reset=pb.ResetRequest(env_indices=[0] * (2**16 + 1))),
        pb.JoinRequest(reset=pb.ResetRequest(seeds=[0] * (2**16 + 1))),
    ],
    ids=["step", "reset", "seeds"],
)
def test_a_request_for_more_lanes_than_there_can_be_is_unreadable(message: pb.JoinRequest) -> None:
    request = env.parse_request(message.SerializeToString())

    assert isinstance(request, MalformedRequest)
    assert "65537" in request.reason
    assert "65536 are the limit" in request.reason


def test_a_response_without_a_kind_is_refused() -> None:
    with pytest.raises(CodecError, match="no kind of response"):
        env.parse_response(b"")


def test_an_error_code_that_is_not_known_is_unspecified() -> None:
    message = pb.JoinResponse(request_id="r1")
    message.error.code = 99  # type: ignore[assignment]  # enums are open on the wire

    response = env.parse_response(message.SerializeToString())

    assert isinstance(response, EnvFailed)
    assert response.code is EnvErrorCode.UNSPECIFIED


def test_any_nonzero_flag_is_set() -> None:
    message = pb.JoinResponse()
    message.step.terminated_mask, message.step.truncated_mask = b"\x00\xff\x00", b"\x02\x00\x01"

    response = env.parse_response(message.SerializeToString())

    assert isinstance(response, StepDone)
    assert (response.terminated, response.truncated) == (b"\x00\x01\x00", b"\x01\x00\x01")


def test_telemetry_is_skipped() -> None:
    message = pb.JoinResponse.FromString(env.pack_response(Closed("r1"), tag_arrays=False))
    message.telemetry.operation = "close"
    message.telemetry.metrics.add(name="close", duration_ns=5)

    assert env.parse_response(message.SerializeToString()) == Closed("r1")


# --- Handshake -------------------------------------------------------------------------


def answer(contract: Any = CONTRACT) -> HandshakeResponse:
    offer = make_handshake_request("tests", "1.2", {"a": "b"})
    return answer_handshake(offer, server_version="3", capabilities={"x": ""}, contract=contract)


def test_an_offer_comes_back_equal() -> None:
    offer = make_handshake_request("tests", "1.2", {"a": "b"})

    assert env.HANDSHAKE.parse_request(env.HANDSHAKE.pack_request(offer)) == offer


def test_an_answer_comes_back_equal_with_its_contract() -> None:
    assert env.HANDSHAKE.parse_response(env.HANDSHAKE.pack_response(answer())) == answer()


def test_an_answer_may_have_no_contract() -> None:
    refused = HandshakeResponse(False, "g", "g0", "1", ("2026.06",), error_message="no \udc80")

    back = env.HANDSHAKE.parse_response(env.HANDSHAKE.pack_response(refused))

    assert back == HandshakeResponse(False, "g", "g0", "1", ("2026.06",), error_message="no ?")


def test_an_answer_with_a_contract_that_makes_no_sense_is_refused() -> None:
    message = service_pb2.HandshakeResponse.FromString(env.HANDSHAKE.pack_response(answer()))
    message.env_contract.action_space.discrete.n = 0

    with pytest.raises(CodecError, match=r"action space: .* n=0"):
        env.HANDSHAKE.parse_response(message.SerializeToString())


def test_an_offer_with_very_many_capabilities_or_editions_is_refused() -> None:
    for many in (
        service_pb2.HandshakeRequest(capabilities={str(number): "" for number in range(1025)}),
        service_pb2.HandshakeRequest(supported_workflow_editions=["x"] * 1025),
    ):
        with pytest.raises(CodecError, match=r"1025 \w+, and 1024 are the limit"):
            env.HANDSHAKE.parse_request(many.SerializeToString())


@pytest.mark.parametrize(
    "parse",
    [
        env.HANDSHAKE.parse_request,
        env.HANDSHAKE.parse_response,
        env.HANDSHAKE.parse_shutdown_request,
        env.HANDSHAKE.parse_shutdown_response,
    ],
)
def test_handshake_frames_that_do_not_decode_are_refused(parse: Any) -> None:
    with pytest.raises(CodecError):
        parse(b"\xff")


def test_field_numbers_of_the_handshake_are_those_of_the_generation() -> None:
    assert _numbers(service_pb2.HandshakeRequest) == [1, 2, 3, 4, 6, 7, 8]
    assert _numbers(service_pb2.HandshakeResponse) == [1, 2, 3, 4, 5, 6, 8, 9, 10, 11, 12]


def _numbers(message: Any) -> list[int]:
    return [field.number for field in message.DESCRIPTOR.fields]


# --- Shutdown --------------------------------------------------------------------------


def test_a_shutdown_request_comes_back_equal() -> None:
    assert (
        env.HANDSHAKE.parse_shutdown_request(
            env.HANDSHAKE.pack_shutdown_request("done \udc80")
        ).reason
        == "done ?"
    )


@pytest.mark.parametrize("accepted", [False, True])
def test_a_shutdown_response_comes_back_equal(accepted: bool) -> None:
    frame = env.HANDSHAKE.pack_shutdown_response(accepted=accepted, message="because")

    response = env.HANDSHAKE.parse_shutdown_response(frame)

    assert (response.accepted, response.message) == (accepted, "because")
