import pytest

from rlmesh_ray.errors import CodecError
from rlmesh_ray.wire._pb.rlmesh.env.v1 import service_pb2
from rlmesh_ray.wire._pb.rlmesh.model.v1 import interaction_pb2 as model_pb
from rlmesh_ray.wire.protobuf import as_utf8, parse


def test_a_frame_becomes_its_message() -> None:
    data = service_pb2.ShutdownRequest(reason="done").SerializeToString()

    assert parse(service_pb2.ShutdownRequest, data).reason == "done"


@pytest.mark.parametrize("data", [b"\xff", b"\x0a\x05ab", b"\x0a\x01\xff"])
def test_what_is_no_frame_is_refused_with_the_name_of_what_was_expected(data: bytes) -> None:
    with pytest.raises(CodecError, match=rf"{len(data)} bytes are no rlmesh\.env\.v1\.Shutdown"):
        parse(service_pb2.ShutdownRequest, data)


def slots(count: int, payload: bytes = b"") -> bytes:
    one = model_pb.PredictContext(slots=[model_pb.PredictSlot(step=1)]).SerializeToString()
    request = model_pb.JoinRequest(request_id="r")
    request.predict.observation.bytes.data = payload
    request.predict.context.MergeFromString(one * count)
    return request.SerializeToString()


def test_a_large_message_has_few_parts() -> None:
    large = bytes(2**22)

    most = parse(model_pb.JoinRequest, slots(2**16, large))
    assert (len(most.predict.context.slots), len(most.predict.observation.bytes.data)) == (
        2**16,
        2**22,
    )
    with pytest.raises(CodecError, match=r"has more than 69632 parts; send less at a time"):
        parse(model_pb.JoinRequest, slots(2**17, large))
    parse(model_pb.JoinRequest, slots(2**17, large), most_parts=None)
    parse(model_pb.JoinRequest, slots(2**17))  # of less than two megabytes


@pytest.mark.parametrize(
    "hidden",
    [
        pytest.param(b"\x0b", id="group"),
        pytest.param(b"\x0f\x01", id="unknown"),
        pytest.param(b"\xff" * 2**22, id="endless"),
        pytest.param(b"\x12\xff\xff\xff\xff\x0f", id="beyond the end"),
    ],
)
def test_parts_of_a_large_message_are_not_hidden_from_the_count(hidden: bytes) -> None:
    many = hidden + slots(2**20)

    with pytest.raises(CodecError):
        parse(model_pb.JoinRequest, many)


@pytest.mark.parametrize(("text", "expected"), [("ab", "ab"), ("ä🎲", "ä🎲"), ("ä\udc80", "ä?")])
def test_text_without_utf8_form_is_made_readable(text: str, expected: str) -> None:
    assert as_utf8(text) == expected
