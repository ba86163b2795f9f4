"""Images that a RemoteModel resizes and compresses, over real gRPC."""

import dataclasses
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import gymnasium
import numpy as np
import pytest
from gymnasium import spaces
from numpy.typing import NDArray

from rlmesh_ray import ModelServer, RemoteModel, Slots
from rlmesh_ray.errors import ConfigurationError, ConformanceError
from rlmesh_ray.models.policy import PolicyTraits, Rows
from rlmesh_ray.protocol.capabilities import IMAGE_CODEC
from rlmesh_ray.protocol.messages import (
    CloseModel,
    ConfigureRoute,
    ModelErrorCode,
    ModelFailed,
    ModelRequest,
    Predict,
    PredictContext,
    Predicted,
    PredictSlot,
)
from rlmesh_ray.spaces.contract import AutoresetMode, EnvContract
from rlmesh_ray.spaces.gym_conversion import from_gymnasium
from rlmesh_ray.spaces.images import resize_images
from rlmesh_ray.wire.image_codec_v1 import observation_codec
from rlmesh_ray.wire.rlmesh_v1 import model as wire
from tests.loopback.ports import plain_channel

CAMERA = spaces.Box(0, 255, (48, 64, 3), np.uint8)
ROBOT = spaces.Dict({"camera": CAMERA, "joints": spaces.Box(-1.0, 1.0, (7,), np.float32)})
NUM_LANES = 2
SMALL = {"camera": "resize(camera,12,16)", "joints": "joints"}


def contract_of(observation_space: spaces.Space[Any], num_envs: int = NUM_LANES) -> EnvContract:
    return EnvContract(
        id="Robot-v0",
        observation_space=from_gymnasium(observation_space),
        action_space=from_gymnasium(spaces.Box(-np.inf, np.inf, (2,), np.float32)),
        num_envs=num_envs,
        autoreset_mode=AutoresetMode.DISABLED,
    )


class Seeing:
    """Keeps the observations and the contracts that it is asked about."""

    def __init__(self, space: spaces.Space[Any] | None = None) -> None:
        known = None if space is None else from_gymnasium(space)
        self.traits = PolicyTraits(observation_space=known)
        self.contracts: list[EnvContract] = []
        self.seen: list[Any] = []

    def check_contract(self, contract: EnvContract) -> None:
        self.contracts.append(contract)

    def predict(self, contract: EnvContract, rows: Rows) -> object:
        self.seen.append(rows.observations)
        return np.zeros((rows.num_rows, 2), np.float32)

    def forget(self, route_key: str, env_index: int | None) -> None:
        pass


def images(num_rows: int = NUM_LANES, seed: int = 0) -> NDArray[np.uint8]:
    return np.random.default_rng(seed).integers(0, 256, (num_rows, 48, 64, 3), np.uint8)


def robot(num_rows: int = NUM_LANES) -> dict[str, Any]:
    return {"camera": images(num_rows), "joints": np.ones((num_rows, 7), np.float32)}


@pytest.fixture
def policy() -> Seeing:
    return Seeing()


@pytest.fixture
def model(policy: Seeing) -> Iterator[RemoteModel]:
    with ModelServer(policy) as server, RemoteModel(server.address) as remote:
        yield remote


@pytest.mark.parametrize("image_codec", ["png", "webp"])
@pytest.mark.parametrize("is_whole", [True, False])
def test_lossless_images_arrive_as_they_were(
    policy: Seeing, model: RemoteModel, image_codec: str, is_whole: bool
) -> None:
    model.configure_route(contract_of(CAMERA if is_whole else ROBOT), image_codec=image_codec)

    actions = model.predict(images() if is_whole else robot())

    assert actions.shape == (NUM_LANES, 2)
    (seen,) = policy.seen
    np.testing.assert_array_equal(seen if is_whole else seen["camera"], images())
    if not is_whole:
        np.testing.assert_array_equal(seen["joints"], robot()["joints"])


def test_a_policy_is_asked_about_the_images_that_it_gets(
    policy: Seeing, model: RemoteModel
) -> None:
    model.configure_route(contract_of(ROBOT), image_codec="png", observation_map=SMALL)
    model.predict(robot())

    small = spaces.Dict({**ROBOT.spaces, "camera": spaces.Box(0, 255, (12, 16, 3), np.uint8)})
    assert policy.contracts[0].observation_space == from_gymnasium(small)
    np.testing.assert_array_equal(policy.seen[0]["camera"], resize_images(images(), (12, 16)))


def test_lossy_images_are_close(policy: Seeing, model: RemoteModel) -> None:
    rows, columns = np.mgrid[:48, :64]
    smooth = np.repeat((rows * 2 + columns)[None, ..., None], 3, -1).astype(np.uint8)

    model.configure_route(contract_of(CAMERA, 1), image_codec="jpeg:95")
    model.predict(smooth)

    assert np.abs(policy.seen[0].astype(int) - smooth).max() <= 10


def test_a_size_belongs_into_the_map(model: RemoteModel) -> None:
    unchecked: Any = model
    for open_route in (unchecked.configure_route, unchecked.actions):
        with pytest.raises(
            TypeError, match=r"any more: give sizes in the observation_map, such as"
        ):
            open_route(contract_of(ROBOT), resize=(12, 16))


def test_requests_with_and_without_a_codec_share_a_batch() -> None:
    policy = Seeing()
    with ModelServer(policy) as server:
        models = [RemoteModel(server.address) for _ in range(4)]
        for model, codec in zip(models, (None, "png", "webp", "png"), strict=True):
            model.configure_route(contract_of(ROBOT, 1), image_codec=codec)

        def ask(at: int) -> None:
            for _ in range(20):
                models[at].predict({**robot(1), "camera": images(1, seed=at)})

        with ThreadPoolExecutor(4) as pool:
            list(pool.map(ask, range(4)))
        for model in models:
            model.close()

    sent = [images(1, seed=at)[0] for at in range(4)]
    arrived = np.concatenate([each["camera"] for each in policy.seen])
    assert len(arrived) == 80
    assert all(any(np.array_equal(row, image) for image in sent) for row in arrived)


def test_a_route_takes_some_of_its_lanes(policy: Seeing, model: RemoteModel) -> None:
    model.configure_route(contract_of(ROBOT, 5), image_codec="png")
    slots = Slots(env_indices=[3], episode_ids=["e"], steps=[0], resets=[True])

    model.predict(robot(1), slots=slots)

    np.testing.assert_array_equal(policy.seen[0]["camera"], images(1))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"image_codec": "gif"}, "is not known"),
        (
            {"image_codec": "png", "observation_map": ["x=resize(camera,9000,9000)"]},
            "map a smaller",
        ),
    ],
)
def test_impossible_options_are_refused_before_anything_is_sent(
    policy: Seeing, model: RemoteModel, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigurationError, match=message):
        model.configure_route(contract_of(ROBOT), **options)

    assert policy.contracts == []


def test_a_space_without_images_needs_no_codec(model: RemoteModel) -> None:
    env = gymnasium.make("CartPole-v1")

    with pytest.raises(ConfigurationError, match="needs an image, and the observation space has"):
        model.configure_route(env, image_codec="jpeg")


def test_a_released_endpoint_takes_images_as_they_are() -> None:
    policy = Seeing()
    server = ModelServer(policy, dialects=["rlmesh-wire-v1"])
    with server, RemoteModel(server.address) as model:
        with pytest.raises(ConfigurationError, match="offers none"):
            model.configure_route(contract_of(ROBOT), image_codec="png")
        model.configure_route(contract_of(ROBOT), observation_map=SMALL)
        model.predict(robot())

    np.testing.assert_array_equal(policy.seen[0]["camera"], resize_images(images(), (12, 16)))


def test_an_observation_of_another_shape_is_refused_here(model: RemoteModel) -> None:
    model.configure_route(contract_of(ROBOT), image_codec="png", observation_map=SMALL)

    with pytest.raises(ConformanceError, match=r"camera: has shape \(2, 12, 16, 3\)"):
        model.predict({**robot(), "camera": np.zeros((2, 12, 16, 3), np.uint8)})


def test_a_damaged_image_is_an_invalid_request(policy: Seeing) -> None:
    contract = dataclasses.replace(contract_of(CAMERA), metadata={IMAGE_CODEC: "png"})
    data = observation_codec(contract).encode([images()], NUM_LANES)
    slots = tuple(PredictSlot(lane, "", 0, False) for lane in range(NUM_LANES))
    requests: tuple[ModelRequest, ...] = (
        ConfigureRoute("1", PredictContext("s", "r", "1"), contract),
        Predict("2", PredictContext("s", "r", "2", slots), data.replace(b"IDAT", b"JDAT")),
        Predict("3", PredictContext("s", "r", "3", slots), data),
        CloseModel("4"),
    )

    with ModelServer(policy) as server, plain_channel(server.address) as channel:
        call = channel.stream_stream("/rlmesh.model.v1.ModelService/Join")
        frames = list(call(map(wire.pack_request, requests), timeout=20.0))

    failed, predicted = map(wire.parse_response, frames[1:3])
    assert isinstance(failed, ModelFailed)
    assert isinstance(predicted, Predicted)
    assert (failed.code, failed.is_recoverable) == (ModelErrorCode.INVALID_REQUEST, True)
    assert "observation: row 0 is not a png image of 64x48 RGB" in failed.message
    assert len(policy.seen) == 1


def test_images_are_mapped_then_resized_and_compressed_for_chunks_of_actions_too() -> None:
    class Steering(Seeing):
        def predict(self, contract: EnvContract, rows: Rows) -> object:
            super().predict(contract, rows)
            return np.ones((rows.num_rows, 3, 2), np.float32)

    policy = Steering()
    policy.traits = PolicyTraits(horizon=3)
    image = np.full((NUM_LANES, 48, 64, 3), 200, np.uint8)
    observation = {"camera": image, "joints": np.zeros((NUM_LANES, 7), np.float32)}
    with ModelServer(policy) as server, RemoteModel(server.address) as model:
        model.configure_route(
            contract_of(ROBOT),
            observation_map={"pixels": "resize(camera,12,16)"},
            image_codec="png",
        )
        chunk = model.predict_chunk(observation)
        action = model.predict(observation)

    assert chunk.shape == (NUM_LANES, 3, 2)
    assert action.shape == (NUM_LANES, 2)
    for seen in policy.seen:
        np.testing.assert_array_equal(seen["pixels"], np.full((NUM_LANES, 12, 16, 3), 200))
