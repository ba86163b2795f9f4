import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlmesh_ray.errors import CodecError
from rlmesh_ray.protocol.pool_membership import (
    RefusalKind,
    RegistrationAccepted,
    RegistrationRefused,
    RegistrationRequest,
)
from rlmesh_ray.wire import registry_v1 as wire
from rlmesh_ray.wire._pb.rlmesh_ray.registry.v1 import service_pb2 as pb

TEXT = st.text(st.characters(codec="utf-8"), max_size=20)


@given(TEXT, TEXT, TEXT, st.integers(0, 2**32 - 1), TEXT, st.integers(0, 2**64 - 1))
def test_an_arrival_arrives_as_it_is(
    pool: str, endpoint_id: str, host: str, port: int, version: str, former: int
) -> None:
    arrival = RegistrationRequest(pool, endpoint_id, host, port, version, former)

    assert wire.parse_registration(wire.pack_registration(arrival)) == arrival


@pytest.mark.parametrize(
    "answer",
    [
        RegistrationAccepted(7, "192.0.2.7:5555"),
        *(RegistrationRefused(kind, "words") for kind in RefusalKind),
    ],
)
def test_an_answer_arrives_as_it_is(answer: RegistrationAccepted | RegistrationRefused) -> None:
    assert wire.parse_registration_reply(wire.pack_registration_reply(answer)) == answer


def test_the_kinds_of_refusals_have_the_numbers_of_the_schema() -> None:
    names = {f"REFUSAL_KIND_{kind.name}": kind.value for kind in RefusalKind}

    assert names | {"REFUSAL_KIND_UNSPECIFIED": 0} == dict(pb.RefusalKind.items())


def test_a_refusal_of_an_unknown_kind_may_be_tried_again() -> None:
    frame = pb.AttendResponse(refusal=pb.Refusal(kind=9, message="words"))  # type: ignore[arg-type]

    answer = wire.parse_registration_reply(frame.SerializeToString())

    assert answer == RegistrationRefused(RefusalKind.NOT_NOW, "words")


def test_the_longest_names_fit_into_a_request() -> None:
    arrival = RegistrationRequest("p" * 64, "e" * 64, "h" * 253, 65535, "v" * 100)

    assert len(wire.pack_registration(arrival)) < wire.MAX_REQUEST_BYTES / 4


def test_a_port_without_a_field_value_is_refused() -> None:
    with pytest.raises(CodecError, match="no wire form"):
        wire.pack_registration(RegistrationRequest("games", "sim-1", "", -1))


@pytest.mark.parametrize("data", [b"\xff", b"\x0a\x05a"])
def test_garbage_is_no_arrival(data: bytes) -> None:
    with pytest.raises(CodecError, match=r"are no rlmesh_ray\.registry"):
        wire.parse_registration(data)


@pytest.mark.parametrize("data", [b"", b"\xff"])
def test_garbage_is_no_answer(data: bytes) -> None:
    with pytest.raises(CodecError):
        wire.parse_registration_reply(data)
