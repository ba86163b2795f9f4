import numpy as np
import pytest

from benchmarks.serving.frames import DIALECTS, EchoedFrames, OurFrames, ReleasedFrames, contract
from benchmarks.serving.protobuf import field, fields
from rlmesh_ray.errors import CodecError, RemoteModelError
from rlmesh_ray.protocol.messages import (
    ConfigureRoute,
    ModelErrorCode,
    ModelFailed,
    Predict,
    PredictContext,
    Predicted,
    RouteConfigured,
)
from rlmesh_ray.wire.rlmesh_v1 import model as wire
from rlmesh_ray.wire.rlmesh_v1 import values

CONTEXT = PredictContext("bench", "r", "id")


def test_our_frames_are_requests_that_a_server_takes() -> None:
    opening = wire.parse_request(OurFrames().opening("r", 3))
    request = wire.parse_request(OurFrames().request("r", 3, "id"))

    assert isinstance(opening, ConfigureRoute)
    assert opening.contract == contract(3)
    assert isinstance(request, Predict)
    assert [slot.env_index for slot in request.context.slots] == [0, 1, 2]
    (rows,) = values.decode_batch(contract(3).observation_space, request.observation, 3)
    assert isinstance(rows, np.ndarray)
    assert rows.shape == (3, 4)
    assert rows.dtype == np.float32


def test_a_prediction_names_its_request() -> None:
    frames, answer = OurFrames(), wire.pack_response(Predicted("id", CONTEXT, b"\0" * 8))

    assert frames.answered(answer) == "id"
    frames.check_opened(wire.pack_response(RouteConfigured("open")))


def test_an_error_is_not_taken_for_a_prediction() -> None:
    failed = ModelFailed("id", ModelErrorCode.INTERNAL, "it broke", is_recoverable=True)

    with pytest.raises(RemoteModelError, match="INTERNAL: it broke"):
        OurFrames().answered(wire.pack_response(failed))


@pytest.mark.parametrize("name", DIALECTS)
@pytest.mark.parametrize("answer", [b"", b"\xff\xff"])
def test_anything_else_is_refused_too(name: str, answer: bytes) -> None:
    with pytest.raises(CodecError):
        DIALECTS[name].answered(answer)
    with pytest.raises(CodecError):
        DIALECTS[name].check_opened(answer)


def test_an_opened_route_is_no_prediction() -> None:
    with pytest.raises(CodecError, match="configure_route came where predict"):
        OurFrames().answered(wire.pack_response(RouteConfigured("open")))


def test_an_echo_answers_for_itself() -> None:
    frames = EchoedFrames()

    frames.check_opened(frames.opening("r", 1))
    assert frames.answered(frames.request("r", 1, "id")) == "id"


def test_released_frames_have_its_numbers() -> None:
    frame = dict(fields(ReleasedFrames().request("r", 2, "id")))

    assert frame[5] == b"id"
    body = list(fields(frame[2]))
    assert [number for number, _ in body] == [1, 2, 3, 3]
    assert len(dict(fields(body[1][1]))[1]) == 2 * 4 * 4


def test_a_released_prediction_names_its_request() -> None:
    frames = ReleasedFrames()

    assert frames.answered(field(2, b"") + field(5, "id") + field(6, 9)) == "id"
    frames.check_opened(field(1, b"") + field(5, "id"))


def test_a_released_error_is_not_taken_for_a_prediction() -> None:
    error = field(10, field(1, 10) + field(2, "not resolved")) + field(5, "id")

    with pytest.raises(RemoteModelError, match="not resolved"):
        ReleasedFrames().answered(error)
