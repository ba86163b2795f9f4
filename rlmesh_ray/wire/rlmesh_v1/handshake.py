"""Messages of Handshake and Shutdown, which EnvService and ModelService share."""

from dataclasses import dataclass
from typing import Any

from rlmesh_ray.protocol.handshake import HandshakeRequest, HandshakeResponse
from rlmesh_ray.spaces.contract import EnvContract
from rlmesh_ray.wire._pb.rlmesh.env.v1 import service_pb2 as env_pb
from rlmesh_ray.wire.protobuf import as_utf8, few, parse
from rlmesh_ray.wire.rlmesh_v1.specs import contract_from_proto, contract_to_proto

MAX_CAPABILITIES = 1024
"""Most capabilities, and most editions, of either side."""


def capabilities_of(message: Any) -> dict[str, str]:
    few(message.capabilities, "capabilities", MAX_CAPABILITIES)
    return dict(message.capabilities)


def editions_of(message: Any) -> tuple[str, ...]:
    return few(message.supported_workflow_editions, "editions", MAX_CAPABILITIES)


@dataclass(frozen=True, slots=True)
class ShutdownRequest:
    """ShutdownRequest of the edition: ask an endpoint to stop."""

    reason: str = ""


@dataclass(frozen=True, slots=True)
class ShutdownResponse:
    """ShutdownResponse of the edition: whether the endpoint will stop."""

    accepted: bool
    message: str = ""


class HandshakeFrames:
    """The frames of Handshake and Shutdown of a service.

    A dialect with other messages has a subclass. Methods that parse raise CodecError. The generated
    messages of the two services differ in field numbers only.
    """

    def __init__(self, service: Any) -> None:
        self._service = service

    def parse_request(self, data: bytes) -> HandshakeRequest:
        message = parse(self._service.HandshakeRequest, data)
        return HandshakeRequest(
            generation=message.protocol_generation,
            client_name=message.client_name,
            client_version=message.client_version,
            editions=editions_of(message),
            capabilities=capabilities_of(message),
            spec_sha256=message.offered_edition_spec_sha256,
            status=message.offered_edition_status,
        )

    def pack_request(self, offer: HandshakeRequest) -> bytes:
        message = self._service.HandshakeRequest(
            protocol_generation=offer.generation,
            client_name=offer.client_name,
            client_version=offer.client_version,
            supported_workflow_editions=offer.editions,
            capabilities=offer.capabilities,
            offered_edition_spec_sha256=offer.spec_sha256,
            offered_edition_status=offer.status,
        )
        return bytes(message.SerializeToString())

    def parse_response(self, data: bytes) -> HandshakeResponse:
        """Return the server's answer, with its ``EnvContract`` if it is compatible and has one.

        Only a compatible answer has a contract (edition 2026.06, "Session Establishment"); an
        invalid one in a refusal must not hide the reason.
        """
        message = parse(self._service.HandshakeResponse, data)
        contract = None
        if self._service is env_pb and message.compatible and message.HasField("env_contract"):
            contract = contract_from_proto(message.env_contract)
        return HandshakeResponse(
            compatible=message.compatible,
            generation=message.server_protocol_generation,
            min_generation=message.min_supported_protocol_generation,
            server_version=message.server_version,
            editions=editions_of(message),
            capabilities=capabilities_of(message),
            selected_edition=message.selected_workflow_edition,
            spec_sha256=message.selected_edition_spec_sha256,
            status=message.selected_edition_status,
            error_message=message.error_message,
            contract=contract,
        )

    def pack_response(self, answer: HandshakeResponse) -> bytes:
        message = self._service.HandshakeResponse(
            compatible=answer.compatible,
            server_protocol_generation=answer.generation,
            min_supported_protocol_generation=answer.min_generation,
            server_version=answer.server_version,
            supported_workflow_editions=answer.editions,
            capabilities=answer.capabilities,
            selected_workflow_edition=answer.selected_edition,
            selected_edition_spec_sha256=answer.spec_sha256,
            selected_edition_status=answer.status,
            error_message=as_utf8(answer.error_message),
        )
        if self._service is env_pb and isinstance(answer.contract, EnvContract):
            message.env_contract.CopyFrom(contract_to_proto(answer.contract))
        return bytes(message.SerializeToString())

    def parse_shutdown_request(self, data: bytes) -> ShutdownRequest:
        return ShutdownRequest(parse(env_pb.ShutdownRequest, data).reason)

    def pack_shutdown_request(self, reason: str = "") -> bytes:
        return env_pb.ShutdownRequest(reason=as_utf8(reason)).SerializeToString()

    def parse_shutdown_response(self, data: bytes) -> ShutdownResponse:
        message = parse(env_pb.ShutdownResponse, data)
        return ShutdownResponse(message.accepted, message.message)

    def pack_shutdown_response(self, *, accepted: bool, message: str = "") -> bytes:
        return env_pb.ShutdownResponse(
            accepted=accepted, message=as_utf8(message)
        ).SerializeToString()
