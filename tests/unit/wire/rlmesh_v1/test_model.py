from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from gymnasium import spaces
from hypothesis import given
from hypothesis import strategies as st

from rlmesh_ray.errors import CodecError
from rlmesh_ray.protocol.capabilities import ACTION_CHUNKS
from rlmesh_ray.protocol.handshake import answer_handshake, make_handshake_request
from rlmesh_ray.protocol.messages import (
    BatchRun,
    CloseModel,
    CloseRoute,
    ConfigureRoute,
    MalformedRequest,
    ModelClosed,
    ModelErrorCode,
    ModelFailed,
    ModelRequest,
    ModelResponse,
    Predict,
    PredictContext,
    Predicted,
    PredictSlot,
    RouteClosed,
    RouteConfigured,
)
from rlmesh_ray.spaces.batch import concatenate, stack
from rlmesh_ray.spaces.contract import AutoresetMode, EnvContract
from rlmesh_ray.spaces.gym_conversion import from_gymnasium
from rlmesh_ray.wire._pb.rlmesh.model.v1 import interaction_pb2 as pb
from rlmesh_ray.wire._pb.rlmesh.model.v1 import service_pb2
from rlmesh_ray.wire.rlmesh_v1 import model, values

CONTRACT = EnvContract(
    id="Maze-v0",
    observation_space=from_gymnasium(spaces.Box(0, 1, (2,))),
    action_space=from_gymnasium(spaces.Discrete(4)),
    num_envs=3,
    autoreset_mode=AutoresetMode.DISABLED,
)
CONTEXT = PredictContext(
    "session", "route", "r1", (PredictSlot(0, "e1", 0, True), PredictSlot(5, "", 2**40, False))
)
ROUTE = PredictContext("session", "route", "r1")
REQUESTS: list[ModelRequest] = [
    ConfigureRoute("r1", ROUTE, CONTRACT),
    ConfigureRoute("r1", ROUTE, None),
    Predict("r2", CONTEXT, b"obs"),
    Predict("r2", PredictContext("", "", ""), b""),
    CloseRoute("r3", ROUTE),
    CloseRoute("r3", ROUTE, "done"),
    CloseModel("r4"),
    CloseModel("r4", "done"),
]
RESPONSES: list[ModelResponse] = [
    RouteConfigured("r1"),
    Predicted("r2", CONTEXT, b"action"),
    RouteClosed("r3"),
    ModelClosed("r4"),
    *(ModelFailed("r5", code, "why", True, "trace") for code in ModelErrorCode),
]


@pytest.mark.parametrize("request_", REQUESTS)
def test_a_request_comes_back_equal(request_: ModelRequest) -> None:
    assert model.parse_request(model.pack_request(request_)) == request_


@pytest.mark.parametrize("response", RESPONSES)
def test_a_response_comes_back_equal(response: ModelResponse) -> None:
    assert model.parse_response(model.pack_response(response)) == response


def test_a_route_s_horizon_is_part_of_its_contract_s_metadata() -> None:
    contract = replace(CONTRACT, metadata={"own": 1})
    asked = ConfigureRoute("r1", ROUTE, contract, horizon=8)

    read = model.parse_request(model.pack_request(asked))

    assert isinstance(read, ConfigureRoute)
    assert read.horizon == 8
    assert isinstance(read.contract, EnvContract)
    assert read.contract.metadata == {"own": 1, ACTION_CHUNKS: 8}


@pytest.mark.parametrize("horizon", [0, -1, "8", 8.0, True, None, [8]])
def test_a_horizon_that_is_none_is_malformed(horizon: object) -> None:
    contract = replace(CONTRACT, metadata={ACTION_CHUNKS: horizon})

    read = model.parse_request(model.pack_request(ConfigureRoute("r1", ROUTE, contract)))

    assert isinstance(read, MalformedRequest)
    assert ACTION_CHUNKS in read.reason


@pytest.mark.parametrize(
    "space", [spaces.Discrete(4), spaces.Dict({"a": spaces.Box(0, 1, (2,)), "b": spaces.Text(9)})]
)
def test_the_steps_of_a_chunk_are_one_batch_of_all_their_rows(space: spaces.Space[Any]) -> None:
    space.seed(0)
    spec = from_gymnasium(space)
    steps = [stack(spec, [space.sample() for _ in range(2)]) for _ in range(3)]
    first, *later = [values.encode_batch(spec, step, 2) for step in steps]

    answered = Predicted("r2", CONTEXT, first, later=tuple(later))
    read = model.parse_response(model.pack_response(answered))

    assert isinstance(read, Predicted)
    for found, expected in zip(
        values.decode_batch(spec, read.action, 6), concatenate(steps), strict=True
    ):
        assert np.array_equal(found, expected)


def test_request_ids_stand_where_the_generation_has_them() -> None:
    request = pb.JoinRequest.FromString(model.pack_request(CloseModel("r1")))
    response = pb.JoinResponse.FromString(model.pack_response(ModelClosed("r1")))

    assert [field.number for field, value in request.ListFields() if value == "r1"] == [20]
    assert [field.number for field, value in response.ListFields() if value == "r1"] == [21]


def test_every_error_code_has_the_number_of_the_schema() -> None:
    codes = set(ModelErrorCode) - {ModelErrorCode.UNSUPPORTED}  # of the other generation
    for code in codes:
        assert pb.ModelErrorCode.Value(f"MODEL_ERROR_CODE_{code.name}") == code.value
    assert len(codes) == len(pb.ModelErrorCode.keys())


@pytest.mark.parametrize(
    "request_",
    [
        Predict("r1", PredictContext("", "", "", (PredictSlot(2**31, "", 0, False),)), b""),
        Predict("r1", ROUTE, None),  # type: ignore[arg-type]
        CloseModel("\ud800"),
    ],
)
def test_a_request_that_the_wire_cannot_carry_is_refused(request_: ModelRequest) -> None:
    with pytest.raises(CodecError, match="has no wire form"):
        model.pack_request(request_)


def test_text_of_an_error_is_made_readable() -> None:
    failure = ModelFailed("r1", ModelErrorCode.INTERNAL, "bad \udc80", False, "trace \udc80")

    back = model.parse_response(model.pack_response(failure))

    assert isinstance(back, ModelFailed)
    assert (back.message, back.debug_info) == ("bad ?", "trace ?")


def test_a_frame_that_does_not_decode_is_unreadable_with_the_reason() -> None:
    request = model.parse_request(b"\xff")

    assert isinstance(request, MalformedRequest)
    assert request.request_id == ""
    assert "no rlmesh.model.v1.JoinRequest" in request.reason


def test_a_frame_without_a_kind_keeps_its_id() -> None:
    request = model.parse_request(pb.JoinRequest(request_id="r7").SerializeToString())

    assert isinstance(request, MalformedRequest)
    assert request.request_id == "r7"
    assert "no kind of request" in request.reason


def test_a_route_with_a_contract_that_makes_no_sense_keeps_its_id() -> None:
    message = pb.JoinRequest(request_id="r7")
    message.configure_route.env_contract.id = "Maze-v0"

    request = model.parse_request(message.SerializeToString())

    assert isinstance(request, MalformedRequest)
    assert request.request_id == "r7"
    assert request.reason.startswith("configure_route: observation space: ")


def test_a_response_without_a_kind_is_refused() -> None:
    with pytest.raises(CodecError, match="no kind of response"):
        model.parse_response(b"")


def test_an_error_code_that_is_not_known_is_unspecified() -> None:
    message = pb.JoinResponse(request_id="r1")
    message.error.code = 99  # type: ignore[assignment]  # enums are open on the wire

    response = model.parse_response(message.SerializeToString())

    assert isinstance(response, ModelFailed)
    assert response.code is ModelErrorCode.UNSPECIFIED


# --- Handshake and Shutdown ------------------------------------------------------------


def test_an_offer_comes_back_equal() -> None:
    offer = make_handshake_request("tests", "1.2", {"a": "b"})

    assert model.HANDSHAKE.parse_request(model.HANDSHAKE.pack_request(offer)) == offer


def test_an_answer_comes_back_equal() -> None:
    offer = make_handshake_request("tests", "1.2", {})
    answer = answer_handshake(offer, server_version="3", capabilities={"x": "y"})

    assert model.HANDSHAKE.parse_response(model.HANDSHAKE.pack_response(answer)) == answer


@pytest.mark.parametrize(
    "parse",
    [
        model.HANDSHAKE.parse_request,
        model.HANDSHAKE.parse_response,
        model.HANDSHAKE.parse_shutdown_request,
        model.HANDSHAKE.parse_shutdown_response,
    ],
)
def test_handshake_frames_that_do_not_decode_are_refused(parse: Any) -> None:
    with pytest.raises(CodecError):
        parse(b"\xff")


def test_field_numbers_of_the_handshake_are_those_of_the_generation() -> None:
    assert _numbers(service_pb2.HandshakeRequest) == [1, 2, 3, 4, 6, 7, 8]
    assert _numbers(service_pb2.HandshakeResponse) == [1, 2, 3, 4, 5, 7, 8, 9, 10, 11]


def _numbers(message: Any) -> list[int]:
    return [field.number for field in message.DESCRIPTOR.fields]


def test_shutdown_frames_of_both_services_are_the_same() -> None:
    request = model.HANDSHAKE.pack_shutdown_request("done")
    response = model.HANDSHAKE.pack_shutdown_response(accepted=True, message="bye")

    assert service_pb2.ShutdownRequest.FromString(request).reason == "done"
    assert service_pb2.ShutdownResponse.FromString(response).accepted
    assert service_pb2.ShutdownResponse.FromString(response).message == "bye"


@given(
    st.binary(max_size=300),
    st.text(max_size=300),
    st.one_of(
        st.none(),
        st.builds(
            BatchRun,
            st.integers(0, 2**50),
            st.integers(0, 2**31),
            st.integers(0, 2**63),
            st.text(max_size=40),
        ),
    ),
    st.integers(0, 2**63),
    st.sampled_from([b"", pb.PredictContext(route_id="as it came").SerializeToString()]),
)
def test_a_prediction_written_by_hand_is_what_the_generated_code_reads(
    action: bytes, request_id: str, run: BatchRun | None, queue_ns: int, mirror: bytes
) -> None:
    if not is_encodable(request_id) or (run and not is_encodable(run.component_id)):
        return
    frame = model.pack_response(Predicted(request_id, CONTEXT, action, run, queue_ns, mirror))

    message = pb.JoinResponse.FromString(frame)
    assert message.request_id == request_id
    assert message.predict.action.bytes.data == action
    assert message.predict.context.route_id == ("as it came" if mirror else "route")
    assert len(message.predict.context.slots) == (0 if mirror else 2)
    assert message.HasField("telemetry") == (run is not None)
    if run is not None:
        answer = model.parse_response(frame)
        assert isinstance(answer, Predicted)
        assert answer.run == run
        assert answer.queue_ns == queue_ns
    # Nothing but what the generated code would write.
    assert message.SerializeToString(deterministic=True) == pb.JoinResponse.FromString(
        message.SerializeToString()
    ).SerializeToString(deterministic=True)


def is_encodable(text: str) -> bool:
    return text == text.encode("utf-8", "ignore").decode()


def test_more_slots_than_a_session_has_lanes_are_refused_before_they_are_made() -> None:
    message = pb.JoinRequest(request_id="r")
    message.predict.context.slots.extend([pb.PredictSlot()] * (model.MAX_SLOTS + 1))

    request = model.parse_request(message.SerializeToString())

    assert isinstance(request, MalformedRequest)
    assert request.request_id == "r"
    assert "65537 slots" in request.reason
