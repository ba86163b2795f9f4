"""The decoders of RegistryService, as functions of bytes; see ``targets``."""

from collections.abc import Iterator

from rlmesh_ray.errors import CodecError, ConfigurationError
from rlmesh_ray.protocol.address import parse_address
from rlmesh_ray.protocol.pool_membership import (
    RefusalKind,
    RegistrationAccepted,
    RegistrationRefused,
    RegistrationRequest,
    validate_registration,
)
from rlmesh_ray.server.observe.counters import EnvCounters
from rlmesh_ray.server.observe.statistics_report import pack_report, parse_report
from rlmesh_ray.wire import registry_v1 as wire
from rlmesh_ray.wire._pb.rlmesh_ray.registry.v1 import service_pb2 as pb
from tests.fuzz.samples import Target
from tests.lane_counts import note_step


def registry_request(data: bytes) -> None:
    """Read what a registrar receives, and look where the endpoint says that it is."""
    try:
        arrival = wire.parse_registration(data)
    except CodecError:
        return
    assert wire.parse_registration(wire.pack_registration(arrival)) == arrival
    try:
        place = validate_registration(arrival, arrival.pool, "192.0.2.7")
    except ConfigurationError:
        return
    assert parse_address(str(place)) == place
    assert not place.path


def registry_request_seeds() -> Iterator[bytes]:
    """Yield arrivals from everywhere."""
    for host in ("", "sim.example", "2001:db8::7", "unix"):
        yield wire.pack_registration(RegistrationRequest("games", "sim-1", host, 5555, "0.1.0"))


def registry_report(data: bytes) -> None:
    """Read what an endpoint tells of itself."""
    try:
        reported = parse_report(data)
    except CodecError:
        return
    assert parse_report(pack_report(reported)) == reported


def registry_report_seeds() -> Iterator[bytes]:
    """Yield what was counted of nothing, and of something."""
    counts = EnvCounters()
    yield pack_report(counts.statistics())
    note_step(counts.open(), 30_000, 4, 1)
    counts.sessions.errors["TIMEOUT"] += 1
    yield pack_report(counts.statistics())


def registry_response(data: bytes) -> None:
    """Read what an endpoint hears from a registrar."""
    try:
        answer = wire.parse_registration_reply(data)
    except CodecError:
        return
    wire.parse_registration_reply(wire.pack_registration_reply(answer))


def registry_response_seeds() -> Iterator[bytes]:
    """Yield answers of every kind."""
    yield wire.pack_registration_reply(RegistrationAccepted(3, "192.0.2.7:5555"))
    for kind in RefusalKind:
        yield wire.pack_registration_reply(RegistrationRefused(kind, "words"))


REGISTRY_TARGETS = {
    "registry_request": Target(registry_request, registry_request_seeds, pb.AttendRequest),
    "registry_report": Target(registry_report, registry_report_seeds, pb.AttendRequest),
    "registry_response": Target(registry_response, registry_response_seeds, pb.AttendResponse),
}
