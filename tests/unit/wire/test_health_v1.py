import pytest

from rlmesh_ray.errors import CodecError
from rlmesh_ray.wire import health_v1 as wire
from rlmesh_ray.wire.health_v1 import ServingStatus


@pytest.mark.parametrize("service", ["", "rlmesh.env.v1.EnvService"])
def test_a_question_survives_the_wire(service: str) -> None:
    assert wire.parse_request(wire.pack_request(service)) == service


@pytest.mark.parametrize("status", ServingStatus)
def test_a_status_survives_the_wire(status: ServingStatus) -> None:
    assert wire.parse_response(wire.pack_response(status)) is status


def test_a_status_of_a_later_version_is_unknown() -> None:
    assert wire.parse_response(b"\x08\x63") is ServingStatus.UNKNOWN


def test_garbage_is_refused() -> None:
    with pytest.raises(CodecError, match="HealthCheckRequest"):
        wire.parse_request(b"\xff")
    with pytest.raises(CodecError, match="HealthCheckResponse"):
        wire.parse_response(b"\xff")
