"""Environments whose endpoint compresses or resizes the images of the observations, over gRPC."""

from collections.abc import Iterator
from typing import Any

import grpc
import gymnasium
import numpy as np
import pytest
from gymnasium import spaces
from gymnasium.vector import AutoresetMode, SyncVectorEnv

from rlmesh_ray import EnvServer, ModelServer, RemoteEnv, RemoteVectorEnv, evaluate
from rlmesh_ray.cli.main import main
from rlmesh_ray.client.channel import ConnectOptions
from rlmesh_ray.client.env.env_client import shake_hands
from rlmesh_ray.errors import ConfigurationError
from rlmesh_ray.protocol import capabilities
from rlmesh_ray.protocol.gateway_balancer import Target
from rlmesh_ray.server.pool.gateway import GatewayServer
from rlmesh_ray.spaces.images import resize_images
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


@pytest.mark.parametrize("image_codec", [None, "png"])
def test_the_endpoint_resizes_images_and_the_space_says_so(
    server: EnvServer, image_codec: str | None
) -> None:
    plain = RemoteVectorEnv(server.address, transport="grpc")
    small = RemoteVectorEnv(
        server.address, image_codec=image_codec, resize={"camera": (12, 20), "stack": (9, 9)}
    )

    camera = spaces.Box(0, 255, (12, 20, 3), np.uint8)
    assert small.single_observation_space == spaces.Dict(
        {**Filmed.observation_space.spaces, "camera": camera}
    )
    for (expected, *rest), (found, *same) in zip(walk(plain), walk(small), strict=True):
        expected["camera"] = resize_images(expected["camera"], (12, 20))
        assert_identical((found, *same), (expected, *rest))

    plain.close()
    small.close()


def test_a_resized_picture_shows_what_it_has_shown(server: EnvServer) -> None:
    env = RemoteVectorEnv(server.address, resize={"camera": (12, 16)})
    red = env.reset(seed=3)[0]["camera"][0, ..., 0].astype(int)
    env.close()

    # Each pixel is about the mean of 4 x 4: those of the first are rows and columns 0 to 3.
    rows, columns = np.mgrid[1.5:48:4, 1.5:64:4]
    assert np.abs(red - (rows * 2 + columns)).max() <= 4


def test_images_may_grow_beyond_a_message_of_their_own_size(server: EnvServer) -> None:
    env = RemoteVectorEnv(server.address, resize={"camera": (5000, 2000)})
    assert env.reset(seed=0)[0]["camera"].shape == (NUM_LANES, 5000, 2000, 3)
    env.close()


@pytest.mark.parametrize(
    ("resize", "message"),
    [
        ({"joints": (4, 4)}, r"is not an image: it is a Box of float32, not a Box of uint8"),
        ({"wrist": (4, 4)}, r"names no leaf of the observation space: it has 'camera'"),
        ((4,), r"must be \(height, width\)"),
        ("policy", r"must be \(height, width\)"),
        ((16000, 16000), r"bytes of pixels.*smaller resize"),
    ],
)
def test_sizes_that_no_image_can_have_are_refused(
    server: EnvServer, resize: Any, message: str
) -> None:
    with pytest.raises(ConfigurationError, match=message):
        RemoteVectorEnv(server.address, resize=resize)


def test_lanes_that_reset_within_a_step_are_not_resized() -> None:
    def make() -> SyncVectorEnv:
        return SyncVectorEnv([Filmed] * 2, autoreset_mode=AutoresetMode.SAME_STEP)

    refused = pytest.raises(ConfigurationError, match="SAME_STEP puts into infos: leave it out, or")
    with EnvServer(make) as server, refused:
        RemoteVectorEnv(server.address, resize=(8, 8))


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

    result = evaluate(server.address, act, episodes=4, seed=1, image_codec="png", resize=(8, 8))

    assert (result.return_mean, seen[0].shape[1:]) == (4.0, (8, 8, 3))
    with pytest.raises(ConfigurationError, match="is not an image"):
        evaluate(server.address, act, episodes=1, resize={"joints": (8, 8)})
    with pytest.raises(ConfigurationError, match="is not known"):
        evaluate(server.address, act, episodes=1, image_codec="gif")


def test_the_command_takes_a_codec(server: EnvServer, capsys: pytest.CaptureFixture[str]) -> None:
    seen = []

    def act(observations: Any) -> Any:
        seen.append(observations["camera"])
        return np.ones(len(observations["camera"]), np.int64)

    with ModelServer(act) as model:
        names = ["evaluate", "--env", server.address, "--model", model.address, "--episodes", "1"]
        small = ["--image-codec", "jpeg:1", "--resize", "24x32"]
        assert main([*names, "--seed", "0", *small]) == 0
        assert main([*names, "--image-codec", "gif"]) == 2
        assert main([*names, "--resize", "24"]) == 2

    errors = capsys.readouterr().err
    assert "'gif' is not known" in errors
    assert "'24' is no height and width, such as 224x224" in errors
    exact = resize_images(Filmed().reset(seed=0)[0]["camera"], (24, 32))
    assert seen[0].shape[1:] == (24, 32, 3)
    assert (seen[0][0] != exact).any()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"image_codec": "gif"}, "is not known"),
        ({"image_codec": "jpeg", "transport": "tcp"}, "leave one of them out"),
        ({"image_codec": "jpeg", "transport": "shared_memory"}, "leave one of them out"),
        ({"resize": (8, 8), "transport": "tcp"}, "resize changes .*leave one of them out"),
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


OPTIONS: list[dict[str, Any]] = [{"image_codec": "png"}, {"resize": (8, 8)}]


@pytest.mark.parametrize("option", OPTIONS)
def test_released_endpoints_are_refused(option: dict[str, Any]) -> None:
    refused = pytest.raises(
        ConfigurationError, match=rf"offers none .*leave {next(iter(option))} out"
    )
    with EnvServer(Filmed, dialects=["rlmesh-wire-v1"]) as server, refused:
        RemoteEnv(server.address, **option)


@pytest.mark.parametrize("option", OPTIONS)
def test_dm_env_rpc_servers_are_refused(server: EnvServer, option: dict[str, Any]) -> None:
    with pytest.raises(ConfigurationError, match=f"as they are; leave {next(iter(option))} out"):
        RemoteEnv(f"dm_env_rpc://{server.address}", **option)


@pytest.mark.parametrize(
    ("key", "option", "message"),
    [
        (capabilities.IMAGE_CODEC_METADATA_KEY, "gif", "image_codec"),
        (capabilities.IMAGE_CODEC_METADATA_KEY, "jpeg:0", "image_codec"),
        (capabilities.IMAGE_CODEC_METADATA_KEY, "webp", "image_codec"),
        (capabilities.IMAGE_SIZES_METADATA_KEY, "8x8", "each of the 2 images"),
        (capabilities.IMAGE_SIZES_METADATA_KEY, "8x8,16000x16000", "bytes of pixels"),
    ],
)
def test_a_client_that_names_impossible_images_gets_no_session(
    server: EnvServer, key: str, option: str, message: str
) -> None:
    session_id = shake_hands(ConnectOptions(server.address)).capabilities[capabilities.SESSION]
    metadata = (
        (capabilities.SESSION_METADATA_KEY, session_id),
        (key, option),
    )

    with plain_channel(server.address) as channel:
        call = channel.stream_stream("/rlmesh.env.v1.EnvService/Join")
        with pytest.raises(grpc.RpcError) as raised:
            list(call(iter([b""]), timeout=DEADLINE_S, metadata=metadata))

    assert raised.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert message in raised.value.details()
