"""ModelServer and RemoteModel over real gRPC."""

import contextlib
import dataclasses
import gc
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
import torch
from gymnasium import spaces
from numpy.typing import NDArray

from rlmesh_ray import EnvServer, ModelServer, RemoteEnv, RemoteModel, RemoteVectorEnv, Slots
from rlmesh_ray.errors import (
    ConfigurationError,
    ConformanceError,
    EndpointClosedError,
    EndpointError,
    EndpointUnreachableError,
    LocalProtocolError,
    RemoteModelError,
)
from rlmesh_ray.models.policy import Rows
from rlmesh_ray.spaces.contract import AutoresetMode, EnvContract
from rlmesh_ray.spaces.gym_conversion import from_gymnasium
from tests.loopback.eventually import eventually, interrupted_when_locked

NUM_LANES = 4
CONTRACT = EnvContract(
    id="Toy-v0",
    observation_space=from_gymnasium(spaces.Box(-10.0, 10.0, (2,), np.float32)),
    action_space=from_gymnasium(spaces.Discrete(3)),
    num_envs=NUM_LANES,
    autoreset_mode=AutoresetMode.NEXT_STEP,
)


def sign(observations: Any) -> Any:
    """Act on the first element: 0 below zero, 2 above, 1 at zero."""
    return np.sign(observations[:, 0]).astype(np.int64) + 1


def observations(*first: float) -> NDArray[np.float32]:
    return np.array([[value, 0.0] for value in first], np.float32)


@pytest.fixture
def server() -> Iterator[ModelServer]:
    with ModelServer(sign) as running:
        yield running


@pytest.fixture
def model(server: ModelServer) -> Iterator[RemoteModel]:
    with RemoteModel(server.address) as remote:
        yield remote


def test_a_function_is_asked_for_one_action_a_row(model: RemoteModel) -> None:
    model.configure_route(CONTRACT)

    actions = model.predict(observations(-1, 0, 1, 2))

    np.testing.assert_array_equal(actions, [0, 1, 2, 2])
    assert actions.dtype == np.int64


def test_a_torch_module_is_served_as_it_acts_in_process() -> None:
    torch.manual_seed(0)
    module = torch.nn.Sequential(torch.nn.Linear(2, 16), torch.nn.Tanh(), torch.nn.Linear(16, 3))
    batch = np.random.default_rng(0).normal(size=(NUM_LANES, 2)).astype(np.float32)
    with torch.inference_mode():
        expected = module(torch.from_numpy(batch)).argmax(1).numpy()

    with ModelServer(module) as server, RemoteModel(server.address) as model:
        model.configure_route(CONTRACT)
        actions = model.predict(batch)

    np.testing.assert_array_equal(actions, expected)


def test_slots_decide_how_many_rows_there_are(model: RemoteModel) -> None:
    model.configure_route(CONTRACT)
    slots = Slots(env_indices=[2], episode_ids=["e"], steps=[0], resets=[True])

    np.testing.assert_array_equal(model.predict(observations(-3), slots=slots), [0])


class Remembering:
    """Counts, for every lane, how often it was asked since its episode began."""

    def __init__(self) -> None:
        self.counts: dict[tuple[str, int], int] = {}

    def check_contract(self, contract: EnvContract) -> None:
        pass

    def predict(self, contract: EnvContract, rows: Rows) -> object:
        actions = []
        for route in rows.routes:
            for slot in route.slots:
                key = (route.route_key, slot.env_index)
                count = 0 if slot.reset else self.counts.get(key, 0)
                self.counts[key] = count + 1
                actions.append(count % 3)
        return np.array(actions)

    def forget(self, route_key: str, env_index: int | None) -> None:
        self.counts = {key: count for key, count in self.counts.items() if key[0] != route_key}


def test_what_is_no_environment_gets_no_route(model: RemoteModel) -> None:
    with pytest.raises(ConfigurationError, match="a NoneType is not an environment to act in"):
        model.configure_route(None)

    model.configure_route(CONTRACT)


def test_slots_of_unequal_lengths_are_named_before_anything_is_sent(model: RemoteModel) -> None:
    model.configure_route(CONTRACT)
    slots = Slots(env_indices=[0, 1], episode_ids=["e"], steps=[0, 0], resets=[True, True])

    with pytest.raises(ConformanceError, match="2 env_indices, 1 episode_ids"):
        model.predict(observations(-3, 3), slots=slots)

    np.testing.assert_array_equal(model.predict(observations(-3, 0, 3, 3)), [0, 1, 2, 2])


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        (("a", "", 0, True), "env_indices: 'a' is a str, expected int"),
        ((0, None, 0, True), "episode_ids: None is a NoneType, expected str"),
        ((0, "", -3, True), "steps: -3 is below 0"),
        ((0, "", 0.5, True), "steps: 0.5 is a float"),
        ((0, "", torch.tensor(0.5), True), "is a Tensor, expected int"),
        ((np.zeros(2, int), "", 0, True), "is a ndarray, expected int"),
        ((0, "", 0, 1), "resets: 1 is a int, expected bool"),
    ],
)
def test_slots_that_are_none_are_named_before_anything_is_sent(entry: Any, message: str) -> None:
    with pytest.raises(ConformanceError, match=message):
        Slots(*([one] for one in entry)).rows()


@pytest.mark.parametrize("entries", [0, None, "a", iter([0])])
def test_slots_that_are_no_sequences_are_named(entries: Any) -> None:
    with pytest.raises(ConformanceError, match=r"steps: is a .*, expected a sequence"):
        Slots([0], ["a"], entries, [True]).rows()


def test_what_is_no_slots_and_no_route_id_is_named(model: RemoteModel) -> None:
    with pytest.raises(ConfigurationError, match="route_id=5 must be text"):
        model.configure_route(CONTRACT, route_id=5)  # type: ignore[arg-type]
    model.configure_route(CONTRACT)

    with pytest.raises(ConformanceError, match="slots: is a tuple, expected"):
        model.predict(observations(0), slots=([0], ["a"], [0], [True]))  # type: ignore[arg-type]


def test_slots_may_be_arrays() -> None:
    arrays: Any = (np.arange(2), np.array(["a", "b"]), np.array([0, 7]), np.array([True, False]))

    tensors: Any = (torch.arange(2), ["a", "b"], torch.tensor([0, 7]), [True, False])
    assert Slots(*tensors).rows() == Slots(*arrays).rows()
    assert Slots(*arrays).rows() == Slots([0, 1], ["a", "b"], [0, 7], [True, False]).rows()


def test_slots_reach_the_policy_and_routes_do_not_share_state() -> None:
    with ModelServer(Remembering()) as server, RemoteModel(server.address) as model:
        model.configure_route(CONTRACT, route_id="a")
        model.configure_route(CONTRACT, route_id="b")
        start = Slots([0], ["e"], [0], [True])
        later = Slots([0], ["e"], [1], [False])

        answers = [
            int(model.predict(observations(0), route_id=route, slots=slots)[0])
            for route, slots in [("a", start), ("a", later), ("b", start), ("a", later)]
        ]

    assert answers == [0, 1, 0, 2]


def test_closed_routes_and_vanished_clients_leave_nothing_behind() -> None:
    policy = Remembering()
    with ModelServer(policy) as server:
        with RemoteModel(server.address) as model:
            model.configure_route(CONTRACT, route_id="a")
            model.configure_route(CONTRACT, route_id="b")
            model.predict(observations(0, 0, 0, 0), route_id="a")
            model.predict(observations(0, 0, 0, 0), route_id="b")
            model.close_route("a")
            assert eventually(lambda: len(policy.counts) == NUM_LANES)

        assert eventually(lambda: policy.counts == {})


def test_a_client_that_is_dropped_ends_its_session() -> None:
    with ModelServer(Remembering()) as server:
        RemoteModel(server.address).configure_route(CONTRACT)
        gc.collect()

        assert eventually(lambda: server.statistics().sessions.open == 0)


def test_many_clients_get_their_own_answers(server: ModelServer) -> None:
    failures: list[object] = []

    def ask(value: float) -> None:
        with RemoteModel(server.address) as model:
            model.configure_route(CONTRACT)
            for _ in range(50):
                actions = model.predict(observations(value, value, -value, -value))
                expected = [2, 2, 0, 0] if value > 0 else [0, 0, 2, 2]
                if actions.tolist() != expected:
                    failures.append(actions)

    threads = [threading.Thread(target=ask, args=((-1.0) ** n,)) for n in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    assert failures == []
    assert server.statistics().items == 8 * 50


def test_threads_may_share_a_client(model: RemoteModel) -> None:
    answers: dict[str, list[int]] = {}
    for route in "ab":
        model.configure_route(CONTRACT, route_id=route)

    def ask(route: str, value: float) -> None:
        answers[route] = [
            int(model.predict(observations(value, 0, 0, 0), route_id=route)[0]) for _ in range(50)
        ]

    threads = [
        threading.Thread(target=ask, args=arguments) for arguments in [("a", -1.0), ("b", 1.0)]
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    assert answers == {"a": [0] * 50, "b": [2] * 50}


def test_a_policy_that_raises_is_reported_and_serves_on() -> None:
    def picky(batch: Any) -> Any:
        if batch[0, 0] > 5:
            raise ValueError("too much")
        return sign(batch)

    with ModelServer(picky) as server, RemoteModel(server.address) as model:
        model.configure_route(CONTRACT)
        with pytest.raises(RemoteModelError, match="too much") as caught:
            model.predict(observations(9, 0, 0, 0))

        assert caught.value.code == "INTERNAL"
        assert caught.value.is_recoverable
        assert "Traceback" in caught.value.debug_info
        np.testing.assert_array_equal(model.predict(observations(1, 1, 1, 1)), [2, 2, 2, 2])


def test_actions_that_do_not_fit_the_space_never_leave_the_server() -> None:
    with (
        ModelServer(lambda batch: np.zeros((len(batch), 7))) as server,
        RemoteModel(server.address) as model,
    ):
        model.configure_route(CONTRACT)

        with pytest.raises(RemoteModelError, match="do not fit Toy-v0's action space"):
            model.predict(observations(0, 0, 0, 0))


def test_an_observation_that_is_in_no_space_never_reaches_the_policy() -> None:
    asked = []

    def curious(batch: Any) -> Any:
        asked.append(batch)
        return sign(batch)

    with ModelServer(curious) as server, RemoteModel(server.address) as model:
        model.configure_route(CONTRACT)
        with pytest.raises(RemoteModelError, match=r"observation space: .*NaN") as caught:
            model.predict(observations(0, np.nan, 0, 0))

        assert (caught.value.code, caught.value.is_recoverable) == ("INVALID_REQUEST", True)
        assert asked == []
        # Out of range is another matter, and inf is in this one's range or out of it.
        assert model.predict(observations(-11, 11, 0, np.inf)).tolist() == [0, 2, 1, 2]


@pytest.mark.parametrize("action", [-1, 3])
def test_actions_outside_their_domain_never_leave_the_server(action: int) -> None:
    with (
        ModelServer(lambda batch: np.full(len(batch), action)) as server,
        RemoteModel(server.address) as model,
    ):
        model.configure_route(CONTRACT)

        with pytest.raises(RemoteModelError, match=f"action space: action: {action} is") as caught:
            model.predict(observations(0, 0, 0, 0))

        assert (caught.value.code, caught.value.is_recoverable) == ("INTERNAL", True)


class Leaving:
    """A policy that raises what would end a loop, in one of its methods."""

    def __init__(self, place: str, kind: type[BaseException]) -> None:
        self._place, self._kind = place, kind

    def check_contract(self, contract: EnvContract) -> None:
        self._maybe_leave("check_contract")

    def predict(self, contract: EnvContract, rows: Rows) -> object:
        self._maybe_leave("predict")
        return np.ones(rows.num_rows, np.int64)

    def forget(self, route_key: str, env_index: int | None) -> None:
        self._maybe_leave("forget")

    def _maybe_leave(self, place: str) -> None:
        if place == self._place:
            raise self._kind("enough")


def live_through_a_route(address: str) -> None:
    with RemoteModel(address) as model:
        model.configure_route(CONTRACT)
        model.predict(observations(1, 2, 3, 4))
        model.close_route()


@pytest.mark.parametrize("kind", [SystemExit, KeyboardInterrupt, StopIteration])
@pytest.mark.parametrize("place", ["check_contract", "predict", "forget"])
def test_a_policy_that_exits_ends_no_session(place: str, kind: type[BaseException]) -> None:
    error = pytest.raises(RemoteModelError, match=f"raised {kind.__name__}: enough")
    with ModelServer(Leaving(place, kind)) as leaving, ModelServer(sign) as other:
        for _ in range(2):
            # What a policy remembers is no client's concern.
            with contextlib.nullcontext() if place == "forget" else error:
                live_through_a_route(leaving.address)
        with RemoteModel(other.address) as model:
            model.configure_route(CONTRACT)
            assert model.predict(observations(1, -1, 0, 0)).tolist() == [2, 0, 1, 1]


@pytest.mark.parametrize("nth", [1, 2])
def test_ctrl_c_in_a_prediction_blocks_no_other_thread(model: RemoteModel, nth: int) -> None:
    ended = threading.Event()
    model.configure_route(CONTRACT)

    def predict() -> None:
        with contextlib.suppress(EndpointError):  # the session may be lost
            model.predict(observations(1, 2, 3, 4))
        ended.set()

    # It locks no Condition now: one that comes in again is interrupted there, and fails the test.
    with contextlib.suppress(KeyboardInterrupt), interrupted_when_locked(nth):
        model.predict(observations(1, 2, 3, 4))
    threading.Thread(target=predict, daemon=True).start()

    assert ended.wait(20.0)


def test_a_policy_that_diverges_for_one_client_fails_that_client_only() -> None:
    may_act = threading.Event()
    torque = dataclasses.replace(CONTRACT, action_space=CONTRACT.observation_space)

    def diverging(batch: Any) -> Any:
        may_act.wait(20.0)
        return np.where(batch > 5, np.float32(np.nan), batch)

    with (
        ModelServer(diverging) as server,
        RemoteModel(server.address) as first,
        RemoteModel(server.address) as good,
        RemoteModel(server.address) as bad,
        ThreadPoolExecutor() as aside,
    ):
        for model in (first, good, bad):
            model.configure_route(torque)
        # While the first one is being answered, the other two come to wait for one batch.
        answers = [aside.submit(first.predict, observations(0, 0, 0, 0))]
        assert eventually(lambda: server.statistics().is_busy)
        answers += [aside.submit(good.predict, observations(1, 1, 1, 1))]
        answers += [aside.submit(bad.predict, observations(9, 1, 1, 1))]
        assert eventually(lambda: server.statistics().items_waiting == 2)
        may_act.set()

        assert answers[1].result(20.0)[:, 0].tolist() == [1, 1, 1, 1]
        with pytest.raises(RemoteModelError, match="NaN") as caught:
            answers[2].result(20.0)
        assert server.statistics().batches == 2
    assert caught.value.code == "INTERNAL"


def test_a_module_for_other_spaces_is_refused_when_the_route_is_configured() -> None:
    with (
        ModelServer(torch.nn.Linear(5, 3)) as server,
        RemoteModel(server.address) as model,
        pytest.raises(RemoteModelError, match="cannot act in Toy-v0"),
    ):
        model.configure_route(CONTRACT)


def test_a_route_without_lanes_is_refused_when_it_is_configured(model: RemoteModel) -> None:
    with pytest.raises(RemoteModelError, match="num_envs = 0; set it to the number") as caught:
        model.configure_route(dataclasses.replace(CONTRACT, num_envs=0))

    assert (caught.value.code, caught.value.is_recoverable) == ("INVALID_REQUEST", True)
    model.configure_route(CONTRACT)
    np.testing.assert_array_equal(model.predict(observations(-1, 0, 1, 2)), [0, 1, 2, 2])


@pytest.mark.parametrize(
    ("env_indices", "reason"),
    [
        ([0, 0], "twice"),
        ([0, NUM_LANES], "num_envs = 4"),
        ([-1, 0], "num_envs = 4"),
        ([], "no slots"),
    ],
)
def test_slots_that_name_no_lane_of_their_own_are_refused(
    model: RemoteModel, env_indices: list[int], reason: str
) -> None:
    model.configure_route(CONTRACT)
    count = len(env_indices)
    slots = Slots(env_indices, ["e"] * count, [0] * count, [True] * count)

    with pytest.raises(RemoteModelError, match=reason) as caught:
        model.predict(observations(*[0.0] * count).reshape(count, 2), slots=slots)

    assert caught.value.code == "INVALID_REQUEST"
    assert caught.value.is_recoverable


def test_an_unconfigured_route_is_refused_without_asking(model: RemoteModel) -> None:
    with pytest.raises(LocalProtocolError, match="configure_route first"):
        model.predict(observations(0, 0, 0, 0))


def test_a_wrong_observation_is_refused_before_it_is_sent(model: RemoteModel) -> None:
    model.configure_route(CONTRACT)

    with pytest.raises(ConformanceError):
        model.predict(np.zeros((NUM_LANES, 3), np.float32))


def test_one_clients_close_does_not_end_the_service(server: ModelServer) -> None:
    first, second = RemoteModel(server.address), RemoteModel(server.address)
    second.configure_route(CONTRACT)

    first.close()

    assert not server.wait(0.3)
    second.predict(observations(0, 0, 0, 0))
    second.close()


def test_a_closed_client_says_so(server: ModelServer) -> None:
    model = RemoteModel(server.address)
    model.configure_route(CONTRACT)
    model.close()

    with pytest.raises(EndpointClosedError):
        model.predict(observations(0, 0, 0, 0))


def test_a_stopped_server_is_noticed() -> None:
    server = ModelServer(sign).start()
    model = RemoteModel(server.address)
    model.configure_route(CONTRACT)

    server.stop(grace_s=0.0)

    with pytest.raises(EndpointError):
        model.predict(observations(0, 0, 0, 0))
    model.close()


def test_an_env_client_at_a_model_endpoint_gets_an_error(server: ModelServer) -> None:
    with pytest.raises(EndpointUnreachableError, match="environment or a model"):
        RemoteEnv(server.address)


def test_a_route_is_configured_from_anything_with_a_contract() -> None:
    with (
        ModelServer(lambda batch: np.zeros(len(batch), np.int64)) as server,
        RemoteModel(server.address) as model,
        EnvServer("CartPole-v1", num_envs=2) as env_server,
    ):
        env = RemoteVectorEnv(env_server.address)
        model.configure_route(env)
        observation, _ = env.reset(seed=0)

        assert model.predict(observation).shape == (2,)
        env.close()
