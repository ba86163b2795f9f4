"""Policies that choose several actions at once, over real gRPC."""

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium import spaces

from rlmesh_ray import ModelServer, RemoteModel, Slots
from rlmesh_ray.client.model.remote_model import policy_of
from rlmesh_ray.errors import (
    ConfigurationError,
    LocalProtocolError,
    RemoteModelError,
)
from rlmesh_ray.models.loading import CallablePolicy
from rlmesh_ray.protocol.capabilities import ACTION_CHUNKS
from rlmesh_ray.protocol.gateway_balancer import Target
from rlmesh_ray.protocol.messages import (
    ConfigureRoute,
    ModelErrorCode,
    ModelFailed,
    Predict,
    PredictContext,
    Predicted,
    PredictSlot,
    RouteConfigured,
)
from rlmesh_ray.server.pool.gateway import GatewayServer
from rlmesh_ray.spaces.contract import AutoresetMode, EnvContract
from rlmesh_ray.spaces.gym_conversion import from_gymnasium
from rlmesh_ray.wire.rlmesh_v1 import model as wire
from tests.loopback.eventually import eventually
from tests.loopback.gateway_peers import Listing
from tests.loopback.ports import plain_channel
from tests.loopback.raw_join import MODEL_JOIN, RawJoin

PATIENCE_S = 30.0
HORIZON = 3


def contract(action: gymnasium.Space[Any], *, lanes: int = 2) -> EnvContract:
    """Return the contract of an environment whose observations are pairs of numbers."""
    return EnvContract(
        "Pairs-v0",
        from_gymnasium(spaces.Box(-99.0, 99.0, (2,), np.float32)),
        from_gymnasium(action),
        lanes,
        AutoresetMode.DISABLED,
    )


BOX = contract(spaces.Box(-999.0, 999.0, (1,), np.float32))
OBSERVATIONS = np.array([[1, 0], [5, 0]], np.float32)


class Counting:
    """Chooses the first number of each observation, and counts on from there."""

    horizon = HORIZON

    def __init__(self) -> None:
        self.asked: list[list[float]] = []

    def __call__(self, observations: Any) -> Any:
        self.asked.append(observations[:, 0].tolist())
        steps = np.arange(self.horizon, dtype=np.float32)
        return (observations[:, :1] + steps)[..., None]


@pytest.fixture
def policy() -> Counting:
    return Counting()


@pytest.fixture
def server(policy: Counting) -> Iterator[ModelServer]:
    with ModelServer(policy) as running:
        yield running


@pytest.fixture
def model(server: ModelServer) -> Iterator[RemoteModel]:
    with RemoteModel(server.address) as client:
        yield client


def episodes(*names: str, reset: bool = False) -> Slots:
    """Return the slots of lanes in these episodes."""
    rows = range(len(names))
    return Slots(rows, names, [0 for _ in rows], [reset for _ in rows])


# --- what clients get ------------------------------------------------------------------


def test_a_client_gets_the_chunks_of_all_rows(model: RemoteModel) -> None:
    model.configure_route(BOX)

    chunks = model.predict_chunk(OBSERVATIONS)
    telemetry = model.last_telemetry()

    assert (chunks.dtype, chunks.shape) == (np.float32, (2, HORIZON, 1))
    assert chunks.flags.writeable
    assert chunks[..., 0].tolist() == [[1, 2, 3], [5, 6, 7]]
    assert telemetry is not None
    assert telemetry.batch_rows == 2


def test_a_client_that_takes_one_action_gets_the_first_of_a_new_chunk(
    model: RemoteModel, policy: Counting
) -> None:
    model.configure_route(BOX)

    actions = [model.predict(OBSERVATIONS).tolist() for _ in range(2)]

    assert actions == [[[1], [5]]] * 2
    assert policy.asked == [[1, 5]] * 2


def test_chunks_are_nested_as_the_action_space_is() -> None:
    space = spaces.Dict(
        {
            "grip": spaces.Discrete(4),
            "move": spaces.Tuple([spaces.Box(-9, 9, (2, 2)), spaces.MultiBinary(3)]),
            "say": spaces.Text(9),
        }
    )

    def act(observations: Any) -> Any:
        rows = len(observations)
        grip = np.arange(2 * rows).reshape(rows, 2)
        move = np.arange(8.0 * rows).reshape(rows, 2, 2, 2), np.ones((rows, 2, 3), np.int8)
        return {"grip": grip, "move": move, "say": [[f"{row}a", f"{row}b"] for row in range(rows)]}

    with ModelServer(act, horizon=2) as server, RemoteModel(server.address) as model:
        model.configure_route(contract(space))
        chunks, first = model.predict_chunk(OBSERVATIONS), model.predict(OBSERVATIONS)

    assert chunks["grip"].tolist() == [[0, 1], [2, 3]]
    assert chunks["move"][0].tolist() == np.arange(16.0).reshape(2, 2, 2, 2).tolist()
    assert chunks["move"][1].shape == (2, 2, 3)
    assert chunks["say"] == (("0a", "0b"), ("1a", "1b"))
    assert first["grip"].tolist() == [0, 2]
    assert first["say"] == ("0a", "1a")


def test_chunks_of_nothing_and_of_large_integers_are_exact() -> None:
    large = [2**63 + 1, 3]

    def choose(observations: Any) -> Any:
        rows = len(observations)
        none = np.zeros((rows, 2, 0, 2), np.float32)
        return {"none": none, "large": [[large, large]] * rows}

    none = spaces.Box(-1, 1, (0, 2), np.float32)
    action = spaces.Dict(none=none, large=spaces.Box(0, 2**64 - 1, (2,), np.uint64))
    with ModelServer(choose, horizon=2) as server, RemoteModel(server.address) as model:
        model.configure_route(contract(action))
        chunks: Any = model.predict_chunk(OBSERVATIONS)

    assert chunks["none"].shape == (2, 2, 0, 2)
    assert chunks["large"].tolist() == [[large, large]] * 2


def test_a_policy_of_one_action_gives_chunks_of_one() -> None:
    space = spaces.Dict({"go": spaces.Box(-99.0, 99.0, (1,)), "say": spaces.Text(9)})

    def act(observations: Any) -> Any:
        return {"go": observations[:, :1], "say": ["yes", "no"]}

    with ModelServer(act) as server, RemoteModel(server.address) as model:
        model.configure_route(contract(space))
        chunks = model.predict_chunk(OBSERVATIONS)
        assert ACTION_CHUNKS not in model.answer.capabilities
        with pytest.raises(ConfigurationError, match=r"2 actions .* which is 1: lower"):
            model.configure_route(contract(space), horizon=2)

    assert chunks["go"].tolist() == [[[1]], [[5]]]
    assert chunks["say"] == (("yes",), ("no",))


def test_a_route_may_ask_for_fewer_actions(model: RemoteModel) -> None:
    model.configure_route(BOX, route_id="short", horizon=2)
    model.configure_route(BOX, route_id="single", horizon=1)
    model.configure_route(BOX, route_id="whole")

    chunks = {
        route: model.predict_chunk(OBSERVATIONS, route_id=route)[..., 0].tolist()
        for route in ("short", "single", "whole")
    }

    assert chunks == {
        "short": [[1, 2], [5, 6]],
        "single": [[1], [5]],
        "whole": [[1, 2, 3], [5, 6, 7]],
    }


@pytest.mark.parametrize(("horizon", "text"), [(4, "which is 3: lower"), (0, "from 1 to 1024")])
def test_a_horizon_that_the_policy_has_not_is_refused_when_the_route_opens(
    model: RemoteModel, horizon: int, text: str
) -> None:
    with pytest.raises(ConfigurationError, match=text):
        model.configure_route(BOX, horizon=horizon)

    with pytest.raises(LocalProtocolError, match="configure_route first"):
        model.predict_chunk(OBSERVATIONS)


class Forgetful(CallablePolicy):
    """Records the lanes that are passed to ``forget``."""

    def __init__(self) -> None:
        super().__init__(Counting(), horizon=HORIZON)
        self.forgotten: list[Any] = []

    def forget(self, *lane: Any) -> None:
        self.forgotten.append(lane)


def test_an_open_route_is_left_alone_by_a_horizon_that_is_refused() -> None:
    policy = Forgetful()
    with ModelServer(policy) as server, RemoteModel(server.address) as model:
        model.configure_route(BOX, horizon=2)
        model.predict_chunk(OBSERVATIONS)
        policy.forgotten.clear()

        with pytest.raises(ConfigurationError, match="4 actions at once are more than"):
            model.configure_route(BOX, horizon=4)

        assert model.predict_chunk(OBSERVATIONS).shape == (2, 2, 1)
        assert model.predict(OBSERVATIONS).shape == (2, 1)
        assert policy.forgotten == []


def test_clients_share_the_policy_s_batches(policy: Counting) -> None:
    entered, may_pass = threading.Event(), threading.Event()

    def waiting(observations: Any) -> Any:
        chunks = policy(observations)
        entered.set()
        assert may_pass.wait(PATIENCE_S)
        return chunks

    with (
        ModelServer(waiting, horizon=HORIZON) as server,
        RemoteModel(server.address) as model,
        ThreadPoolExecutor(3) as pool,
    ):
        for route in "abc":
            model.configure_route(BOX, route_id=route)
        may_pass.set()
        model.predict_chunk(OBSERVATIONS, route_id="b")  # which opens the route for chunks
        entered.clear()
        may_pass.clear()
        first = pool.submit(model.predict, OBSERVATIONS, route_id="a")
        assert entered.wait(PATIENCE_S)
        chunks = pool.submit(model.predict_chunk, OBSERVATIONS, route_id="b")
        actions = pool.submit(model.predict, OBSERVATIONS, route_id="c")
        assert eventually(lambda: server.statistics().items_waiting == 2)
        may_pass.set()

        assert first.result(PATIENCE_S).tolist() == [[1], [5]]
        assert chunks.result(PATIENCE_S).shape == (2, HORIZON, 1)
        assert actions.result(PATIENCE_S).tolist() == [[1], [5]]

    assert [len(rows) for rows in policy.asked] == [2, 2, 4]


def test_a_route_that_opens_again_has_the_new_environment_s_chunks(model: RemoteModel) -> None:
    model.configure_route(BOX)
    model.predict_chunk(OBSERVATIONS)

    model.configure_route(contract(spaces.Box(-999, 999, (1,), np.float64), lanes=1))

    chunks = model.predict_chunk(OBSERVATIONS[:1])
    assert (chunks.dtype, chunks.shape) == (np.float64, (1, HORIZON, 1))


def test_a_closed_route_leaves_none_behind(server: ModelServer, model: RemoteModel) -> None:
    model.configure_route(BOX)
    model.predict(OBSERVATIONS)
    model.predict_chunk(OBSERVATIONS)
    assert server.statistics().routes == 2

    model.close_route()

    assert server.statistics().routes == 0


def test_a_client_of_chunks_alone_has_no_other_route_that_a_delayed_batch_would_await(
    policy: Counting,
) -> None:
    with (
        ModelServer(policy, max_delay_s=60.0) as server,
        RemoteModel(server.address, predict_timeout_s=PATIENCE_S) as model,
    ):
        model.configure_route(BOX)
        chunks = model.predict_chunk(OBSERVATIONS)
        model.close_route()
        assert server.statistics().routes == 0

    assert chunks.shape == (2, HORIZON, 1)


def test_threads_may_ask_for_single_actions_and_for_chunks(model: RemoteModel) -> None:
    model.configure_route(BOX)

    def ask(index: int) -> tuple[int, ...]:
        predict = (model.predict, model.predict_chunk)[index % 2]
        return tuple(predict(OBSERVATIONS).shape)

    with ThreadPoolExecutor(4) as pool:
        shapes = [*pool.map(ask, range(40))]

    assert shapes == [(2, 1), (2, HORIZON, 1)] * 20


def test_single_actions_may_follow_chunks(server: ModelServer, model: RemoteModel) -> None:
    model.configure_route(BOX)
    model.predict_chunk(OBSERVATIONS)
    with pytest.raises(ConfigurationError, match="4 actions at once are more than"):
        model.configure_route(BOX, horizon=4)

    actions = [model.predict(OBSERVATIONS).tolist() for _ in range(2)]

    assert actions == [[[1], [5]]] * 2
    assert model.predict_chunk(OBSERVATIONS).shape == (2, HORIZON, 1)
    assert server.statistics().routes == 2


def test_a_gateway_passes_chunks_on(server: ModelServer) -> None:
    listing = Listing(Target("0", 1, server.address, None))
    with GatewayServer(listing) as gateway, RemoteModel(gateway.address) as model:
        model.configure_route(BOX, horizon=2)
        chunks, actions = model.predict_chunk(OBSERVATIONS), model.predict(OBSERVATIONS)

    assert chunks[..., 0].tolist() == [[1, 2], [5, 6]]
    assert actions.tolist() == [[1], [5]]


def test_threads_open_one_route_for_the_chunks_of_a_route(
    server: ModelServer, model: RemoteModel
) -> None:
    model.configure_route(BOX)

    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(lambda _: model.predict_chunk(OBSERVATIONS).shape, range(8)))

    assert found == [(2, HORIZON, 1)] * 8
    assert server.statistics().routes == 1


def test_chunks_are_the_same_in_the_dialect_of_the_released_rlmesh(policy: Counting) -> None:
    with (
        ModelServer(policy, dialects=["rlmesh-wire-v1"]) as server,
        RemoteModel(server.address) as model,
    ):
        model.configure_route(BOX)
        model.configure_route(BOX, route_id="short", horizon=2)
        chunks = model.predict_chunk(OBSERVATIONS)
        short = model.predict_chunk(OBSERVATIONS, route_id="short")
        first = model.predict(OBSERVATIONS)
        with pytest.raises(ConfigurationError, match="which is 3: lower the horizon"):
            model.configure_route(BOX, horizon=4)

    assert chunks[..., 0].tolist() == [[1, 2, 3], [5, 6, 7]]
    assert short[..., 0].tolist() == [[1, 2], [5, 6]]
    assert first.tolist() == [[1], [5]]


# --- chunks that the endpoint keeps ----------------------------------------------------


def test_an_endpoint_may_keep_chunks_for_clients_that_take_one_action(policy: Counting) -> None:
    with (
        ModelServer(policy, chunk_replay="kept") as server,
        RemoteModel(server.address) as model,
    ):
        model.configure_route(BOX)
        begun = model.predict(OBSERVATIONS, slots=episodes("a", "b", reset=True))
        then = model.predict(OBSERVATIONS + 50, slots=episodes("a", "c"))
        whole = model.predict_chunk(OBSERVATIONS)

    assert begun.tolist() == [[1], [5]]
    assert then.tolist() == [[2], [55]]
    assert whole[..., 0].tolist() == [[1, 2, 3], [5, 6, 7]]
    assert policy.asked == [[1, 5], [55], [1, 5]]


def test_kept_chunks_of_a_module_survive_new_weights() -> None:
    layer = torch.nn.Linear(2, HORIZON)
    module = torch.nn.Sequential(layer, torch.nn.Unflatten(1, (HORIZON, 1)))
    module.horizon = HORIZON  # type: ignore[assignment]  # as an author would
    with torch.no_grad():
        layer.weight.zero_()
        layer.bias.copy_(torch.arange(3.0))
    with (
        ModelServer(module, chunk_replay="kept") as server,
        RemoteModel(server.address) as model,
    ):
        model.configure_route(BOX)
        acted = [model.predict(OBSERVATIONS)[0, 0]]
        weights = {"0.weight": np.zeros((3, 2), "f4"), "0.bias": np.full(3, 9, "f4")}
        version = server.set_weights(weights)
        acted += [model.predict(OBSERVATIONS)[0, 0] for _ in range(3)]

    assert version == 1
    assert acted == [0, 1, 2, 9]


@pytest.mark.parametrize("replay", ["first", "kept"])
def test_the_handshake_tells_the_horizon_and_what_single_clients_get(replay: str) -> None:
    with (
        ModelServer(Counting(), chunk_replay=replay) as server,
        RemoteModel(server.address) as model,
    ):
        facts = policy_of(model.answer)

    assert model.answer.capabilities[ACTION_CHUNKS] == "3"
    assert (facts.horizon, facts.chunk_replay, facts.kind) == (3, replay, "function")


# --- what is refused -------------------------------------------------------------------


@pytest.mark.parametrize(
    ("act", "found"),
    [
        (lambda observations: observations[:, :1], r"shape \(2, 1\)"),
        (lambda observations: np.zeros((2, 4, 1)), r"shape \(2, 4, 1\)"),
        (lambda observations: [[[0.0]] * 3, [[0.0]] * 2], "not an array"),
    ],
)
def test_actions_of_another_shape_are_an_error_with_both_shapes(
    act: Callable[[Any], Any], found: str
) -> None:
    with ModelServer(act, horizon=HORIZON) as server, RemoteModel(server.address) as model:
        model.configure_route(BOX)
        for ask in (model.predict, model.predict_chunk):
            with pytest.raises(RemoteModelError, match=rf"{found}.* expected \(2, 3, 1\) \(rows"):
                ask(OBSERVATIONS)


def test_a_module_without_chunks_is_refused_when_the_route_opens() -> None:
    with (
        ModelServer(torch.nn.Linear(2, 1), horizon=HORIZON) as server,
        RemoteModel(server.address) as model,
        pytest.raises(RemoteModelError, match=r"float32 \(1, 1\).* takes actions \(1, 3, 1\)"),
    ):
        model.configure_route(BOX)


@pytest.mark.parametrize(
    "policy",
    [
        torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.Unflatten(1, (3, 1))),
        lambda observations: np.zeros((len(observations), 3, 1), np.float32),
    ],
    ids=["module", "function"],
)
def test_the_error_of_chunks_without_a_horizon_has_the_remedy(policy: Any) -> None:
    with (
        ModelServer(policy) as server,
        RemoteModel(server.address) as model,
        pytest.raises(RemoteModelError, match="chooses 3 actions at once, give horizon=3"),
    ):
        model.predict(OBSERVATIONS, route_id=model.configure_route(BOX))


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"horizon": 0}, "horizon=0 must be"),
        ({"horizon": 2}, "says 3 itself"),
        ({"chunk_replay": "last"}, "is not one of first, kept"),
    ],
)
def test_options_that_cannot_be_are_refused_by_the_server(
    options: dict[str, Any], text: str
) -> None:
    with pytest.raises(ConfigurationError, match=text):
        ModelServer(Counting(), **options)


# --- other clients of the edition ------------------------------------------------------

CONTEXT = PredictContext("s", "route", "1", (PredictSlot(0, "", 0, False),))


class Client:
    """A client that writes the edition's frames itself."""

    def __init__(self, address: str) -> None:
        self._channel = plain_channel(address)
        self._join = RawJoin(self._channel, MODEL_JOIN)

    def open(self, horizon: object) -> Any:
        """Open the route; the contract's metadata ask for that many actions."""
        metadata = {} if horizon is None else {ACTION_CHUNKS: horizon}
        asked = EnvContract(
            BOX.id,
            BOX.observation_space,
            BOX.action_space,
            1,
            AutoresetMode.DISABLED,
            metadata=metadata,
        )
        return self._ask(ConfigureRoute("open", CONTEXT, asked))

    def act(self) -> list[float]:
        response = self._ask(Predict("1", CONTEXT, OBSERVATIONS[:1].tobytes()))
        assert isinstance(response, Predicted)
        actions: list[float] = np.frombuffer(response.action, np.float32).tolist()
        return actions

    def close(self) -> None:
        self._join.close()
        self._channel.close()

    def _ask(self, request: ConfigureRoute | Predict) -> Any:
        return wire.parse_response(self._join.ask(wire.pack_request(request)))


@pytest.fixture
def client(server: ModelServer) -> Iterator[Client]:
    made = Client(server.address)
    yield made
    made.close()


@pytest.mark.parametrize(
    ("horizon", "actions"), [(None, [1]), (1, [1]), (2, [1, 2]), (3, [1, 2, 3])]
)
def test_a_route_gets_as_many_actions_as_its_contract_asks_for(
    client: Client, horizon: int | None, actions: list[float]
) -> None:
    assert isinstance(client.open(horizon), RouteConfigured)
    assert client.act() == actions


@pytest.mark.parametrize(
    ("horizon", "text"),
    [
        (4, "wants 4 actions at once, and the policy chooses 3: lower"),
        (0, "is 0; it must be a number of actions"),
        ("all", "is 'all'; it must be a number of actions"),
        (True, "is True; it must be a number of actions"),
    ],
)
def test_a_contract_that_asks_for_no_such_chunks_is_refused(
    client: Client, horizon: object, text: str
) -> None:
    refused = client.open(horizon)

    assert isinstance(refused, ModelFailed)
    assert refused.code is ModelErrorCode.INVALID_REQUEST
    assert text in refused.message
    assert isinstance(client.open(2), RouteConfigured)


def test_an_endpoint_of_single_actions_ignores_that_it_is_asked_for_chunks() -> None:
    with ModelServer(lambda observations: observations[:, :1]) as server:
        client = Client(server.address)
        assert isinstance(client.open(4), RouteConfigured)
        assert client.act() == [1]
        client.close()
