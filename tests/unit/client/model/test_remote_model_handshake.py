import pytest

from rlmesh_ray.client.model.remote_model import horizon_of
from rlmesh_ray.dialects.released.protocol import WIRE_V1
from rlmesh_ray.protocol.capabilities import ACTION_CHUNKS, PROTOCOL_V1
from rlmesh_ray.protocol.handshake import HandshakeResponse


def answer(generation: str, **capabilities: str) -> HandshakeResponse:
    return HandshakeResponse(True, generation, generation, "", (), capabilities)


@pytest.mark.parametrize(
    ("text", "horizon"),
    [("8", 8), ("1", 1), ("0", 1), ("", 1), ("-3", 1), ("eight", 1), ("2.5", 1), ("9" * 5000, 1)],
)
def test_an_endpoint_of_the_edition_names_the_length_of_chunks(text: str, horizon: int) -> None:
    assert horizon_of(answer(PROTOCOL_V1, **{ACTION_CHUNKS: text})) == horizon


def test_an_endpoint_that_does_not_name_it_has_single_actions() -> None:
    assert horizon_of(answer(PROTOCOL_V1)) == 1


def test_an_endpoint_of_another_generation_does_not_name_it_in_its_handshake() -> None:
    assert horizon_of(answer(WIRE_V1)) is None
