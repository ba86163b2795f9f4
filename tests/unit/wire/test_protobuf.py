import pytest

from rlmesh_ray.errors import CodecError
from rlmesh_ray.wire._pb.rlmesh.env.v1 import service_pb2
from rlmesh_ray.wire.protobuf import as_utf8, parse


def test_a_frame_becomes_its_message() -> None:
    data = service_pb2.ShutdownRequest(reason="done").SerializeToString()

    assert parse(service_pb2.ShutdownRequest, data).reason == "done"


@pytest.mark.parametrize("data", [b"\xff", b"\x0a\x05ab", b"\x0a\x01\xff"])
def test_what_is_no_frame_is_refused_with_the_name_of_what_was_expected(data: bytes) -> None:
    with pytest.raises(CodecError, match=rf"{len(data)} bytes are no rlmesh\.env\.v1\.Shutdown"):
        parse(service_pb2.ShutdownRequest, data)


@pytest.mark.parametrize(("text", "expected"), [("ab", "ab"), ("ä🎲", "ä🎲"), ("ä\udc80", "ä?")])
def test_text_without_utf8_form_is_made_readable(text: str, expected: str) -> None:
    assert as_utf8(text) == expected
