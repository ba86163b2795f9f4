"""What a handshake has said is known when the Join arrives."""

import pytest

from rlmesh_ray.protocol import capabilities
from rlmesh_ray.protocol.capabilities import PROTOCOL_V1
from rlmesh_ray.protocol.handshake import HandshakeRequest
from rlmesh_ray.server.endpoint.handshake_service import capabilities_of_session, new_session_id


def offer(*names: str) -> HandshakeRequest:
    return HandshakeRequest(PROTOCOL_V1, "test", "1", (), dict.fromkeys(names, ""))


def test_an_offer_is_known_however_many_handshakes_come_after_it() -> None:
    session_id = new_session_id(offer(capabilities.NUMBERED_REQUESTS, "of another client"))
    others = {new_session_id(offer()) for _ in range(2000)}

    assert capabilities_of_session(session_id) == {capabilities.NUMBERED_REQUESTS}
    assert len(others - {session_id}) == 2000
    assert {capabilities_of_session(each) for each in others} == {frozenset()}


@pytest.mark.parametrize("text", ["", "f" * 31, "g" * 32, "ff", "\u0661" * 32, "F" * 32])
def test_a_stranger_has_offered_nothing(text: str) -> None:
    assert capabilities_of_session(text) == frozenset()
