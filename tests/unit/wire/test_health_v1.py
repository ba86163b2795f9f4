import pytest

from rlmesh_ray.errors import CodecError
from rlmesh_ray.wire import health_v1 as wire


@pytest.mark.parametrize("service", ["", "rlmesh.env.v1.EnvService"])
def test_a_question_survives_the_wire(service: str) -> None:
    assert wire.parse_request(wire.pack_request(service)) == service


@pytest.mark.parametrize("status", [wire.SERVING, wire.NOT_SERVING, wire.SERVICE_UNKNOWN])
def test_a_status_survives_the_wire(status: int) -> None:
    assert wire.parse_response(wire.pack_response(status)) == status


def test_a_status_of_a_later_version_is_none_of_those_here() -> None:
    known = {wire.SERVING, wire.NOT_SERVING, wire.SERVICE_UNKNOWN}

    assert wire.parse_response(b"\x08\x63") not in known


def test_garbage_is_refused() -> None:
    with pytest.raises(CodecError, match="HealthCheckRequest"):
        wire.parse_request(b"\xff")
    with pytest.raises(CodecError, match="HealthCheckResponse"):
        wire.parse_response(b"\xff")
