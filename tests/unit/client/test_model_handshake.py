import numpy as np
import pytest
from gymnasium import spaces

from rlmesh_ray.client.model_handshake import compressed, horizon_of
from rlmesh_ray.dialects.released.protocol import WIRE_V1
from rlmesh_ray.errors import ConfigurationError
from rlmesh_ray.protocol.capabilities import ACTION_CHUNKS, IMAGE_CODEC, PROTOCOL_V1
from rlmesh_ray.protocol.handshake import HandshakeResponse
from rlmesh_ray.spaces.contract import AutoresetMode, EnvContract
from rlmesh_ray.spaces.gym_conversion import from_gymnasium


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


def test_the_contract_of_a_route_names_the_codec_beside_other_metadata() -> None:
    contract = EnvContract(
        id="Robot-v0",
        observation_space=from_gymnasium(spaces.Box(0, 255, (48, 64, 3), np.uint8)),
        action_space=from_gymnasium(spaces.Discrete(3)),
        num_envs=2,
        autoreset_mode=AutoresetMode.DISABLED,
        metadata={"fps": 30},
    )
    able = answer(PROTOCOL_V1, **{IMAGE_CODEC: "png"})

    assert compressed(contract, "png", able, "here:1").metadata == {"fps": 30, IMAGE_CODEC: "png"}
    with pytest.raises(ConfigurationError, match="here:1 offers png"):
        compressed(contract, "webp", able, "here:1")
    with pytest.raises(ConfigurationError, match=r"here:1 offers none .*leave image_codec out"):
        compressed(contract, "png", answer(PROTOCOL_V1), "here:1")
