"""What a gateway makes of the end of a call."""

import asyncio
from types import SimpleNamespace
from typing import Any

from rlmesh_ray.grpc_setup import grpc
from rlmesh_ray.server.gateway_calls import GatewayCalls


def test_a_call_that_an_endpoint_ends_while_a_message_is_on_its_way_is_one_to_dial_again() -> None:
    avoided: list[object] = []
    upstreams: Any = SimpleNamespace(note_refused=avoided.append)

    async def is_there() -> bool:
        return False

    upstream: Any = SimpleNamespace(has_gone=is_there)
    ended = GatewayCalls(upstreams, "a.Service")._client_status(
        "client", upstream, grpc.StatusCode.INTERNAL, "Internal error from Core"
    )

    code, details = asyncio.run(ended)

    assert (code, details) == (grpc.StatusCode.UNAVAILABLE, "it has ended the call early")
    assert avoided == [upstream]
