"""Environments whose endpoint compresses the images of the observations, over real gRPC."""

from collections.abc import Iterator
from typing import Any

import grpc
import gymnasium
import numpy as np
import pytest
from gymnasium import spaces

from rlmesh_ray import EnvServer, ModelServer, RemoteEnv, RemoteVectorEnv, evaluate
from rlmesh_ray.cli.main import main
from rlmesh_ray.client.channel import ConnectOptions
from rlmesh_ray.client.env_handshake import shake_hands
from rlmesh_ray.errors import ConfigurationError
from rlmesh_ray.protocol import capabilities
from rlmesh_ray.protocol.gateway_balancer import Target
from rlmesh_ray.server.gateway import GatewayServer
from rlmesh_ray.testing.equality import assert_identical
from tests.loopback.gateway_peers import Listing
from tests.loopback.ports import plain_channel

NUM_LANES = 3
DEADLINE_S = 20.0


class Filmed(gymnasium.Env[Any, Any]):
    """A camera whose picture moves with each step."""

    observation_space = spaces.Dict(
        {
            "camera": spaces.Box(0, 255, (48, 64, 3), np.uint8),
            "stack": spaces.Box(0, 255, (2, 9, 9, 1), np.uint8),
            "joints": spaces.Box(-1.0, 1.0, (7,), np.float32),
        }
    )
    action_space = spaces.Discrete(3)

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        self.steps = 0
        return self._observation(), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        self.steps += 1
        return self._observation(), float(action), self.steps == 4, False, {}

    def _observation(self) -> dict[str, Any]:
        rows, columns = np.mgrid[:48, :64]
        picture = rows * 2 + columns + 3 * self.steps
        return {
            "camera": np.stack([picture, picture // 2, 255 - picture], -1).astype(np.uint8),
            "stack": self.np_random.integers(0, 256, (2, 9, 9, 1), np.uint8),
            "joints": np.full(7, 0.5, np.float32),
        }


@pytest.fixture(scope="module")
def server() -> Iterator[EnvServer]:
    with EnvServer(Filmed, num_envs=NUM_LANES) as server:
        yield server


def walk(env: RemoteVectorEnv) -> list[Any]:
    observed: list[Any] = [env.reset(seed=3)]
    observed += [env.step(np.array([0, 1, 2])) for _ in range(6)]
    return observed


def test_a_lossless_session_is_a_plain_one(server: EnvServer) -> None:
    plain = RemoteVectorEnv(server.address, transport="grpc")
    compressed = RemoteVectorEnv(server.address, image_codec="png")

    assert_identical(walk(compressed), walk(plain))

    plain.close()
    compressed.close()


def test_a_gateway_passes_the_codec_on(server: EnvServer) -> None:
    listing = Listing(Target("0", 1, server.address, None))
    with GatewayServer(listing, token="front") as gateway:
        plain = RemoteVectorEnv(server.address, transport="grpc")
        compressed = RemoteVectorEnv(gateway.address, token="front", image_codec="png")

        assert_identical(walk(compressed), walk(plain))

        plain.close()
        compressed.close()


def test_single_lanes_are_reset(server: EnvServer) -> None:
    env = RemoteVectorEnv(server.address, image_codec="png")
    env.reset(seed=3)
    before = env.step(np.zeros(NUM_LANES, np.int64))[0]["camera"]

    after = env.reset(options={"reset_mask": np.array([False, True, False])})[0]["camera"]

    assert [np.array_equal(*pair) for pair in zip(before, after, strict=True)] == [
        True,
        False,
        True,
    ]
    env.close()


def test_lossy_images_are_close_and_other_leaves_exact() -> None:
    class Camera(Filmed):
        observation_space = spaces.Dict(
            {key: Filmed.observation_space[key] for key in ("camera", "joints")}
        )

        def _observation(self) -> dict[str, Any]:
            observation = super()._observation()
            del observation["stack"]
            return observation

    with EnvServer(Camera) as server:
        env = RemoteEnv(server.address, image_codec="jpeg:95")
        observation, _ = env.reset(seed=0)
        env.close()

    expected, _ = Camera().reset(seed=0)
    assert np.abs(observation["camera"].astype(int) - expected["camera"]).mean() < 4
    np.testing.assert_array_equal(observation["joints"], expected["joints"])


def test_an_evaluation_takes_a_codec(server: EnvServer) -> None:
    seen = []

    def act(observations: Any) -> Any:
        seen.append(observations["camera"])
        return np.ones(len(observations["camera"]), np.int64)

    result = evaluate(server.address, act, episodes=4, seed=1, image_codec="png")

    assert (result.return_mean, seen[0].dtype) == (4.0, np.uint8)
    with pytest.raises(ConfigurationError, match="is not known"):
        evaluate(server.address, act, episodes=1, image_codec="gif")


def test_the_command_takes_a_codec(server: EnvServer, capsys: pytest.CaptureFixture[str]) -> None:
    seen = []

    def act(observations: Any) -> Any:
        seen.append(observations["camera"])
        return np.ones(len(observations["camera"]), np.int64)

    with ModelServer(act) as model:
        names = ["evaluate", "--env", server.address, "--model", model.address, "--episodes", "1"]
        assert main([*names, "--seed", "0", "--image-codec", "jpeg:1"]) == 0
        assert main([*names, "--image-codec", "gif"]) == 2

    assert "image_codec='gif' is not known" in capsys.readouterr().err
    assert (seen[0][0] != Filmed().reset(seed=0)[0]["camera"]).any()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"image_codec": "gif"}, "is not known"),
        ({"image_codec": "jpeg", "transport": "tcp"}, "leave one of them out"),
        ({"image_codec": "jpeg", "transport": "shared_memory"}, "leave one of them out"),
    ],
)
def test_impossible_options_are_refused(
    server: EnvServer, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigurationError, match=message):
        RemoteVectorEnv(server.address, **options)


def test_an_environment_without_images_is_refused() -> None:
    refused = pytest.raises(ConfigurationError, match="the observation space has none")
    with EnvServer("CartPole-v1") as server, refused:
        RemoteEnv(server.address, image_codec="png")


def test_released_endpoints_are_refused() -> None:
    refused = pytest.raises(ConfigurationError, match=r"offers none .*leave image_codec out")
    with EnvServer(Filmed, dialects=["rlmesh-wire-v1"]) as server, refused:
        RemoteEnv(server.address, image_codec="png")


def test_dm_env_rpc_servers_are_refused(server: EnvServer) -> None:
    with pytest.raises(ConfigurationError, match="does not compress images"):
        RemoteEnv(f"dm_env_rpc://{server.address}", image_codec="png")


@pytest.mark.parametrize("option", ["gif", "jpeg:0", "webp"])
def test_a_client_that_names_an_impossible_codec_gets_no_session(
    server: EnvServer, option: str
) -> None:
    session_id = shake_hands(ConnectOptions(server.address)).capabilities[capabilities.SESSION]
    metadata = (
        (capabilities.SESSION_METADATA_KEY, session_id),
        (capabilities.IMAGE_CODEC_METADATA_KEY, option),
    )

    with plain_channel(server.address) as channel:
        call = channel.stream_stream("/rlmesh.env.v1.EnvService/Join")
        with pytest.raises(grpc.RpcError) as raised:
            list(call(iter([b""]), timeout=DEADLINE_S, metadata=metadata))

    assert raised.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert "image_codec" in raised.value.details()
