"""ModelServer under many clients: batches, weights that change, a policy that hangs."""

import asyncio
import contextlib
import dataclasses
import json
import math
import os
import subprocess
import sys
import textwrap
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gymnasium import spaces

from rlmesh_ray import ListenOptions, ModelServer, RemoteModel
from rlmesh_ray.cli.main import main
from rlmesh_ray.client.channel import ConnectOptions
from rlmesh_ray.client.health import HealthStatus, check_health
from rlmesh_ray.client.model.remote_model import Slots
from rlmesh_ray.errors import (
    ConfigurationError,
    ContractMismatchError,
    EndpointClosedError,
    EndpointError,
    EndpointLostError,
    EndpointTimeoutError,
    EndpointUnreachableError,
    PolicyError,
    RemoteModelError,
)
from rlmesh_ray.models.loading import as_policy
from rlmesh_ray.models.policy import PolicyTraits, Rows
from rlmesh_ray.models.torch.policy import RecurrentTorchPolicy
from rlmesh_ray.protocol.messages import CloseRoute, Predict
from rlmesh_ray.protocol.model_session import ModelSession
from rlmesh_ray.server.endpoint import endpoint
from rlmesh_ray.server.endpoint.event_loop import shared_loop
from rlmesh_ray.server.model import batcher, model_stream, policy_thread
from rlmesh_ray.server.model.model_stream import ModelStream
from rlmesh_ray.spaces.contract import AutoresetMode, EnvContract
from rlmesh_ray.spaces.gym_conversion import from_gymnasium
from rlmesh_ray.wire.protobuf import MAX_LANES
from tests.loopback.client_internals import num_unanswered, vanish
from tests.loopback.eventually import eventually
from tests.loopback.ports import plain_channel

PATIENCE_S = 30.0
CONTRACT = EnvContract(
    id="Toy-v0",
    observation_space=from_gymnasium(spaces.Box(-10.0, 10.0, (2,), np.float32)),
    action_space=from_gymnasium(spaces.Box(-1e6, 1e6, (1,), np.float32)),
    num_envs=1,
    autoreset_mode=AutoresetMode.NEXT_STEP,
)


def observation(value: float) -> Any:
    return np.array([[value, 0.0]], np.float32)


class Gate:
    """A policy function that shows the batches that it gets, and waits to be let through."""

    def __init__(self, *, is_open: bool = False) -> None:
        self.batches: list[list[float]] = []
        self.entered = threading.Semaphore(0)
        self.may_pass = threading.Event()
        if is_open:
            self.may_pass.set()

    def __call__(self, observations: Any) -> Any:
        self.batches.append(observations[:, 0].tolist())
        self.entered.release()
        assert self.may_pass.wait(PATIENCE_S)
        return observations[:, :1]


@pytest.fixture
def gate() -> Iterator[Gate]:
    made = Gate()
    yield made
    made.may_pass.set()


async def releases() -> list[str]:
    """Return the sessions that have ended, and wait for the policy to forget them."""
    name = ModelStream.release.__qualname__
    return [repr(task) for task in asyncio.all_tasks() if name in repr(task)]


def wait_released(server: ModelServer, *, num_open: int = 0) -> None:
    """Wait until the policy has forgotten all sessions but so many."""
    # A client is done when it has read the last answer; the release begins after that.
    assert eventually(lambda: server.statistics().sessions.open == num_open)
    assert eventually(lambda: not shared_loop().run(releases()))


def weighted(weight: float) -> torch.nn.Module:
    module = torch.nn.Linear(2, 1, bias=False)
    torch.nn.init.constant_(module.weight, weight)
    return module


def weights(weight: float) -> dict[str, Any]:
    return {"weight": np.full((1, 2), weight, np.float32)}


# --- telemetry -------------------------------------------------------------------------


def test_every_answer_tells_which_weights_acted_and_what_it_took(gate: Gate) -> None:
    with (
        ModelServer(gate) as server,
        RemoteModel(server.address) as first,
        RemoteModel(server.address) as second,
        ThreadPoolExecutor() as aside,
    ):
        for model in (first, second):
            model.configure_route(CONTRACT)
        assert first.last_telemetry() is None

        running = aside.submit(first.predict, observation(1))
        assert gate.entered.acquire(timeout=PATIENCE_S)
        waiting = aside.submit(second.predict, observation(2))
        assert eventually(lambda: server.statistics().items_waiting == 1)
        gate.may_pass.set()
        running.result(PATIENCE_S)
        waiting.result(PATIENCE_S)
        early, late = first.last_telemetry(), second.last_telemetry()

    assert early is not None
    assert late is not None
    assert early.policy_version == late.policy_version == 0
    assert early.batch_rows == late.batch_rows == 1
    assert early.server == late.server != ""
    assert early.queue_s >= 0
    # It came while the first one was at the gate, and was heard of before that was opened.
    assert late.queue_s > 0
    assert early.forward_s > 0


# --- batches ---------------------------------------------------------------------------


def test_what_arrives_while_the_policy_is_busy_goes_together(gate: Gate) -> None:
    with (
        ModelServer(gate) as server,
        RemoteModel(server.address) as one,
        RemoteModel(server.address) as other,
        ThreadPoolExecutor(8) as aside,
    ):
        routes = [(model, f"route {n}") for model in (one, other) for n in range(3)]
        for model, route in routes:
            model.configure_route(CONTRACT, route_id=route)

        def ask(number: int) -> Any:
            model, route = routes[number]
            return aside.submit(model.predict, observation(number), route_id=route)

        answers = [ask(0)]
        assert gate.entered.acquire(timeout=PATIENCE_S)
        answers += [ask(number) for number in range(1, 6)]
        assert eventually(lambda: server.statistics().items_waiting == 5)
        gate.may_pass.set()
        acted = [float(answer.result(PATIENCE_S)[0, 0]) for answer in answers]

    assert acted == [0, 1, 2, 3, 4, 5]
    assert [sorted(batch) for batch in gate.batches] == [[0], [1, 2, 3, 4, 5]]


def test_with_a_delay_clients_that_ask_at_once_share_each_batch() -> None:
    gate = Gate(is_open=True)
    with (
        ModelServer(gate, max_delay_s=60.0) as server,
        RemoteModel(server.address) as one,
        RemoteModel(server.address) as other,
        ThreadPoolExecutor() as aside,
    ):
        for model in (one, other):
            model.configure_route(CONTRACT)
        for _ in range(20):
            answers = [aside.submit(one.predict, observation(1))]
            answers.append(aside.submit(other.predict, observation(2)))
            assert [float(each.result(PATIENCE_S)[0, 0]) for each in answers] == [1, 2]

    assert [sorted(batch) for batch in gate.batches] == [[1, 2]] * 20


def test_a_delayed_batch_does_not_wait_for_a_client_that_has_gone() -> None:
    gate = Gate(is_open=True)
    with (
        ModelServer(gate, max_delay_s=60.0) as server,
        RemoteModel(server.address) as staying,
        ThreadPoolExecutor() as aside,
    ):
        staying.configure_route(CONTRACT)
        leaving = RemoteModel(server.address)
        leaving.configure_route(CONTRACT)
        waiting = aside.submit(staying.predict, observation(1))
        assert eventually(lambda: server.statistics().items_waiting == 1)
        leaving.close()

        assert waiting.result(PATIENCE_S).tolist() == [[1]]


def test_requests_of_a_client_that_has_gone_are_never_run(gate: Gate) -> None:
    with (
        ModelServer(gate) as server,
        RemoteModel(server.address) as staying,
        ThreadPoolExecutor() as aside,
    ):
        staying.configure_route(CONTRACT)
        leaving = RemoteModel(server.address)
        leaving.configure_route(CONTRACT)
        running = aside.submit(staying.predict, observation(1))
        assert gate.entered.acquire(timeout=PATIENCE_S)
        orphan = aside.submit(leaving.predict, observation(2))
        assert eventually(lambda: server.statistics().items_waiting == 1)

        vanish(leaving)
        assert eventually(lambda: server.statistics().items_waiting == 0)
        gate.may_pass.set()
        running.result(PATIENCE_S)
        staying.predict(observation(3))
        with pytest.raises(EndpointError):
            orphan.result(PATIENCE_S)
        leaving.close()

        assert gate.batches == [[1], [3]]
        assert server.statistics().cancelled == 1


def test_each_route_s_answers_keep_its_order_in_all_batches() -> None:
    gate = Gate(is_open=True)
    with ModelServer(gate, max_batch_rows=3) as server:

        def drive(number: int) -> list[float]:
            with RemoteModel(server.address) as model:
                model.configure_route(CONTRACT)
                sent = [model.predict(observation(n % 7 - number / 8)) for n in range(40)]
                return [float(action[0, 0]) for action in sent]

        with ThreadPoolExecutor(6) as aside:
            answers = list(aside.map(drive, range(6)))

    for number, got in enumerate(answers):
        assert got == [np.float32(n % 7 - number / 8) for n in range(40)]
    assert max(map(len, gate.batches)) <= 3


def test_a_client_may_not_open_routes_without_end() -> None:
    with ModelServer(Gate(is_open=True)) as server, RemoteModel(server.address) as model:
        for route in ("a", "b", *map(str, range(model_stream.MAX_ROUTES - 2))):
            model.configure_route(CONTRACT, route_id=route)
        with pytest.raises(RemoteModelError, match="1024 routes, which is the limit") as caught:
            model.configure_route(CONTRACT, route_id="c")
        model.configure_route(CONTRACT, route_id="b")  # anew, which takes no more room
        model.close_route("a")
        model.configure_route(CONTRACT, route_id="c")

    assert (caught.value.code, caught.value.is_recoverable) == ("BUSY", True)


def test_a_client_may_not_claim_lanes_without_end() -> None:
    most = MAX_LANES

    def wide(num_envs: int) -> EnvContract:
        return dataclasses.replace(CONTRACT, num_envs=num_envs)

    with ModelServer(Gate(is_open=True)) as server, RemoteModel(server.address) as model:
        with pytest.raises(
            RemoteModelError, match=f"would have {most + 1} lanes, and {most} are the limit"
        ):
            model.configure_route(wide(most + 1))
        model.configure_route(wide(most - 2), route_id="a")
        with pytest.raises(RemoteModelError) as caught:
            model.configure_route(wide(3), route_id="b")
        model.configure_route(wide(2), route_id="b")
        model.configure_route(wide(most - 2), route_id="a")  # anew, which takes no more room
        with pytest.raises(RemoteModelError):
            model.configure_route(wide(most - 1), route_id="a")
        model.close_route("a")
        model.configure_route(wide(most - 2), route_id="c")

    assert (caught.value.code, caught.value.is_recoverable) == ("BUSY", True)


def test_lanes_that_the_policy_refuses_take_no_room() -> None:
    policy, widest = Remembering(), dataclasses.replace(CONTRACT, num_envs=MAX_LANES)
    with ModelServer(policy) as server, RemoteModel(server.address) as model:
        policy.refused_contracts = 1
        with pytest.raises(RemoteModelError, match="not this one"):
            model.configure_route(widest, route_id="a")

        model.configure_route(widest, route_id="b")


# --- routes that end -------------------------------------------------------------------


class Remembering:
    """A policy that knows every route on which it has acted, until the route is closed."""

    def __init__(self, gate: Gate | None = None) -> None:
        self.known: set[str] = set()
        self.refused_contracts = 0
        self.refusals: list[Exception] = []
        """What it raises when it forgets, one after the other; it forgets all the same."""
        self._gate = gate or Gate(is_open=True)

    def check_contract(self, contract: EnvContract) -> None:
        if self.refused_contracts:
            self.refused_contracts -= 1
            raise ContractMismatchError("not this one")

    def predict(self, contract: EnvContract, rows: Rows) -> object:
        self.known.update(route.route_key for route in rows.routes)
        return self._gate(rows.observations)

    def forget(self, route_key: str, env_index: int | None) -> None:
        self.known.discard(route_key)
        if self.refusals:
            raise self.refusals.pop()


@pytest.fixture
def policy(gate: Gate) -> Remembering:
    """Return a policy that waits at the gate with each of its batches."""
    return Remembering(gate)


@contextlib.contextmanager
def busy(server: ModelServer, gate: Gate) -> Iterator["Future[Any]"]:
    """Keep the policy at a batch of a session of its own until the gate opens, at the end at last.

    Yields:
        The answer that the session waits for.
    """
    gate.may_pass.clear()
    with RemoteModel(server.address) as model, ThreadPoolExecutor() as aside:
        model.configure_route(CONTRACT)
        running = aside.submit(model.predict, observation(1))
        assert gate.entered.acquire(timeout=PATIENCE_S)
        try:
            yield running
        finally:
            gate.may_pass.set()
        assert running.result(PATIENCE_S).tolist() == [[1]]


def test_a_route_is_forgotten_though_its_client_closes_it_and_vanishes_while_the_policy_is_busy(
    gate: Gate, policy: Remembering
) -> None:
    gate.may_pass.set()
    with ModelServer(policy) as server:
        leaving = RemoteModel(server.address)
        leaving.configure_route(CONTRACT)
        leaving.predict(observation(1))
        assert gate.entered.acquire(timeout=PATIENCE_S)
        (left,) = policy.known
        with busy(server, gate) as running:
            leaving.close_route()
            vanish(leaving)
            assert eventually(lambda: server.statistics().sessions.open == 1)
            assert left in policy.known
            assert server.statistics().routes == 1
            assert not running.done()
        # Before the server stops, and with it the policy, which may remember what it likes then.
        wait_released(server)
        assert policy.known == set()
        leaving.close()


def test_what_a_client_that_vanishes_has_running_is_forgotten_after_it_has_run(
    gate: Gate, policy: Remembering
) -> None:
    with ModelServer(policy) as server, ThreadPoolExecutor() as aside:
        leaving = RemoteModel(server.address)
        leaving.configure_route(CONTRACT)
        running = aside.submit(leaving.predict, observation(1))
        assert gate.entered.acquire(timeout=PATIENCE_S)
        vanish(leaving)
        assert eventually(lambda: server.statistics().sessions.open == 0)
        assert len(policy.known) == 1
        gate.may_pass.set()
        wait_released(server)
        with pytest.raises(EndpointError):
            running.result(PATIENCE_S)

        assert policy.known == set()
        leaving.close()


def test_all_routes_of_a_session_end_even_if_the_policy_raises_for_some() -> None:
    policy = Remembering()
    policy.refusals = [ConfigurationError("never"), ValueError("no"), PolicyError("not now")]
    with ModelServer(policy) as server:
        with RemoteModel(server.address) as model:
            for route in "abcd":
                model.configure_route(CONTRACT, route_id=route)
                model.predict(observation(1), route_id=route)
            assert len(policy.known) == 4
        wait_released(server)

        assert policy.known == set()
        assert server.statistics().routes == 0


def test_a_route_ends_though_the_policy_does_not_forget_it_and_the_log_says_so(
    caplog: pytest.LogCaptureFixture,
) -> None:
    policy = Remembering()
    with ModelServer(policy) as server, RemoteModel(server.address) as model:
        model.configure_route(CONTRACT)
        policy.refusals = [ValueError("not now")]
        model.close_route()
        assert server.statistics().routes == 0
        assert eventually(lambda: "failed to forget a route" in caplog.text)

        model.configure_route(CONTRACT)
        assert model.predict(observation(3)).tolist() == [[3]]

    assert "the policy raised ValueError: not now" in caplog.text


# --- routes while the policy is at a batch ----------------------------------------------


def another(contract: EnvContract = CONTRACT) -> EnvContract:
    return dataclasses.replace(contract, id="Other-v0", num_envs=2)


def test_nothing_but_predictions_waits_for_a_batch(gate: Gate) -> None:
    with (
        ModelServer(gate) as server,
        RemoteModel(server.address) as before,
        busy(server, gate) as running,
    ):
        before.configure_route(CONTRACT)
        before.configure_route(another())  # anew
        before.close_route()
        with RemoteModel(server.address) as newcomer:
            newcomer.configure_route(another())
            assert check_health(ConnectOptions(server.address)).is_serving
            assert server.health().is_serving
            assert server.statistics().is_busy
        assert not running.done()


def test_the_routes_of_torchs_own_layers_do_not_wait_for_a_batch_of_theirs(gate: Gate) -> None:
    module = weighted(1.0)

    def hold(_module: Any, inputs: Any) -> None:
        if inputs[0].any():  # which the zeros of a trial are not
            gate(inputs[0].numpy())

    with ModelServer(module) as server:
        handle = module.register_forward_pre_hook(hold)
        with busy(server, gate) as running, RemoteModel(server.address) as newcomer:
            newcomer.configure_route(another())
            newcomer.close_route()
            assert not running.done()
        handle.remove()


def test_only_an_environment_of_a_new_kind_may_wait_for_a_batch(
    gate: Gate, policy: Remembering
) -> None:
    with (
        ModelServer(policy) as server,
        ThreadPoolExecutor() as aside,
        busy(server, gate) as running,
        RemoteModel(server.address) as newcomer,
    ):
        newcomer.configure_route(CONTRACT)
        other = aside.submit(newcomer.configure_route, another(), route_id="other")
        assert eventually(lambda: num_unanswered(newcomer) == 1)
        newcomer.close_route()
        assert not other.done()
        assert not running.done()
        gate.may_pass.set()
        assert other.result(PATIENCE_S) == "other"


class Counter(torch.nn.Module):
    """Counts the steps of each lane's episode; waits at the gate for all but zeros."""

    def __init__(self, gate: Gate) -> None:
        super().__init__()
        self._gate = gate

    def initial_state(self) -> torch.Tensor:
        return torch.zeros((), dtype=torch.float32)

    def forward(self, values: torch.Tensor, steps: torch.Tensor) -> Any:
        if values.any():
            self._gate(values.numpy())
        return steps[:, None] + values[:, :1], steps + 1


@pytest.mark.parametrize("is_closed", [True, False], ids=["closed", "configured anew"])
def test_a_route_begins_fresh_though_one_of_its_name_has_just_ended_beside_a_running_batch(
    gate: Gate, is_closed: bool
) -> None:
    policy = as_policy(Counter(gate))
    assert isinstance(policy, RecurrentTorchPolicy)
    with ModelServer(policy) as server, RemoteModel(server.address) as model:
        model.configure_route(CONTRACT)
        assert [model.predict(observation(0))[0, 0] for _ in range(3)] == [0, 1, 2]
        with busy(server, gate) as running:
            if is_closed:
                model.close_route()
            model.configure_route(CONTRACT)
            assert not running.done()
        assert [model.predict(observation(0))[0, 0] for _ in range(3)] == [0, 1, 2]


def test_a_client_that_opens_and_closes_routes_for_ever_waits_for_a_busy_policy(
    gate: Gate, policy: Remembering
) -> None:
    with (
        ModelServer(policy) as server,
        ThreadPoolExecutor() as aside,
        busy(server, gate),
        RemoteModel(server.address) as flood,
    ):
        for _ in range(model_stream.MAX_ROUTES):
            flood.configure_route(CONTRACT)
            flood.close_route()
        one_too_many = aside.submit(flood.configure_route, CONTRACT)
        assert eventually(lambda: num_unanswered(flood) == 1 or one_too_many.done())
        for _ in range(2):  # by the second answer, that of the one too many would have come
            with pytest.raises(RemoteModelError, match="not configured"):
                flood.close_route("nowhere")
        assert not one_too_many.done()
        gate.may_pass.set()
        assert one_too_many.result(PATIENCE_S) == "default"


# --- faults of this package ------------------------------------------------------------


def broken_receive(session: ModelSession, request: Any) -> Any:
    if isinstance(request, Predict):
        raise KeyError("a fault")
    return whole_receive(session, request)


def broken_complete(session: ModelSession, request: Any, response: Any) -> Any:
    if isinstance(request, Predict):
        raise KeyError("a fault")
    return whole_complete(session, request, response)


def broken_closing(session: ModelSession, request: Any, response: Any) -> Any:
    if isinstance(request, CloseRoute):
        raise KeyError("a fault")
    return whole_complete(session, request, response)


def predict_and_close(model: RemoteModel) -> None:
    model.predict(observation(1))
    model.close_route()


whole_receive, whole_complete = ModelSession.receive, ModelSession.complete


@pytest.mark.parametrize(
    ("method", "broken"),
    [
        ("receive", broken_receive),
        ("complete", broken_complete),
        ("complete", broken_closing),
    ],
)
def test_a_fault_of_this_package_ends_the_session_that_has_it_and_no_other(
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    method: str,
    broken: Callable[..., Any],
) -> None:
    policy = Remembering()
    with ModelServer(policy) as server, RemoteModel(server.address) as other:
        other.configure_route(CONTRACT)
        model = RemoteModel(server.address)
        model.configure_route(CONTRACT)
        with monkeypatch.context() as patch:
            patch.setattr(ModelSession, method, broken)
            with pytest.raises(EndpointLostError, match="a fault of the server"):
                predict_and_close(model)
        model.close()

        assert other.predict(observation(2)).tolist() == [[2]]
        wait_released(server, num_open=1)
        assert len(policy.known) == 1
    assert "a model session has failed; please report this" in caplog.text


class Unspeakable(Exception):
    """Cannot even be printed."""

    def __str__(self) -> str:
        raise Unspeakable


@pytest.mark.parametrize("error", [Unspeakable, lambda: ValueError("x" * 2**24)])
def test_every_exception_of_a_policy_is_an_answer_and_the_session_goes_on(
    error: Callable[[], Exception],
) -> None:
    def choose(observations: Any) -> Any:
        if observations[0, 0] > 5:
            raise error()
        return observations[:, :1]

    with ModelServer(choose) as server, RemoteModel(server.address) as model:
        model.configure_route(CONTRACT)
        for _ in range(2):
            with pytest.raises(RemoteModelError) as caught:
                model.predict(observation(6))
            assert caught.value.code == "INTERNAL"
            assert len(str(caught.value)) < 10_000
            assert len(caught.value.debug_info) < 100_000
        assert model.predict(observation(1)).tolist() == [[1]]


@pytest.mark.parametrize(
    "options",
    [
        {"torch_threads": 0},
        {"torch_threads": "x"},
        {"max_batch_rows": 1.5},
        {"max_delay_s": math.nan},
        {"address": "foo"},
        {"address": "0.0.0.0:0"},
        {"address": ListenOptions(data_address="127.0.0.1:0")},
    ],
)
def test_a_server_that_is_refused_leaves_no_thread(options: dict[str, Any]) -> None:
    before = set(threading.enumerate())

    with pytest.raises(ConfigurationError):
        ModelServer(Gate(), **options)

    assert set(threading.enumerate()) <= before


@pytest.mark.parametrize("address", ["foo", "0.0.0.0:0"])
def test_the_command_refuses_an_address_before_it_loads_the_policy(
    address: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("RLMESH_RAY_TOKEN", raising=False)

    code = main(["serve-model", "/no/such/checkpoint", "--address", address])

    assert code == 2
    assert address in capsys.readouterr().err


class Recording:
    """A policy that notes in which threads it runs."""

    def __init__(self, policy: Any) -> None:
        self._policy = policy
        self.traits = policy.traits
        self.check_contract = policy.check_contract
        self.forget = policy.forget
        self.get_weights = policy.get_weights
        self.set_weights = policy.set_weights
        self.threads: list[str] = []

    def predict(self, contract: EnvContract, rows: Rows) -> object:
        self.threads.append(threading.current_thread().name)
        return self._policy.predict(contract, rows)


@pytest.fixture
def _always_quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Take policies for quick, however slow the machine is that runs them."""
    monkeypatch.setattr(batcher, "_FAST_S", PATIENCE_S)
    monkeypatch.setattr(batcher, "_SLOW_S", PATIENCE_S)


@pytest.mark.usefixtures("_always_quick")
def test_a_module_that_has_proved_quick_runs_in_the_serving_loop_and_acts_the_same() -> None:
    policy = Recording(as_policy(weighted(1.0)))
    with ModelServer(policy) as server, RemoteModel(server.address) as model:
        model.configure_route(CONTRACT)
        answers = [float(model.predict(observation(n % 9))[0, 0]) for n in range(150)]
        # Calls go to the policy's thread all the while.
        server.set_weights(weights(2.0))
        answers.append(float(model.predict(observation(4))[0, 0]))

    assert answers == [n % 9 for n in range(150)] + [8]
    assert set(policy.threads[:100]) == {"rlmesh-ray-policy"}
    # Now and then the thread has a last look for work just then, and finds it.
    assert policy.threads[120:].count("rlmesh-ray-loop") > 20


def test_a_function_never_runs_in_the_serving_loop() -> None:
    threads: list[str] = []

    def first(observations: Any) -> Any:
        threads.append(threading.current_thread().name)
        return observations[:, :1]

    with ModelServer(first) as server, RemoteModel(server.address) as model:
        model.configure_route(CONTRACT)
        for _ in range(150):
            model.predict(observation(1))

    assert set(threads) == {"rlmesh-ray-policy"}


# --- weights ---------------------------------------------------------------------------


def test_weights_are_swapped_between_batches_and_no_request_is_lost() -> None:
    num_clients, num_versions = 4, 30
    is_over = threading.Event()
    with ModelServer(weighted(0.0)) as server:

        def watch(_: int) -> list[tuple[int, float]]:
            seen = []
            with RemoteModel(server.address) as model:
                model.configure_route(CONTRACT)
                is_last = False
                while not is_last:
                    is_last = is_over.is_set()
                    action = float(model.predict(observation(1.0))[0, 0])
                    telemetry = model.last_telemetry()
                    assert telemetry is not None
                    seen.append((telemetry.policy_version, action))
            return seen

        with ThreadPoolExecutor(num_clients) as aside:
            watching = [aside.submit(watch, n) for n in range(num_clients)]
            assert eventually(lambda: server.statistics().items >= num_clients)
            for version in range(1, num_versions + 1):
                assert server.set_weights(weights(version)) == version
            is_over.set()
            histories = [future.result(PATIENCE_S) for future in watching]

        assert server.policy_version == num_versions
    for history in histories:
        # The reported version is that of the weights that acted, and none goes back.
        assert all(action == version for version, action in history)
        assert history == sorted(history)
        assert history[-1] == (num_versions, num_versions)


def test_weights_that_do_not_fit_change_nothing() -> None:
    with ModelServer(weighted(3.0)) as server, RemoteModel(server.address) as model:
        model.configure_route(CONTRACT)
        with pytest.raises(PolicyError, match="weight"):
            server.set_weights({"weight": np.ones((2, 2), np.float32)})

        assert model.predict(observation(1.0))[0, 0] == 3.0
        assert server.policy_version == 0
        assert server.set_weights(weights(5.0), version=7) == 7
        assert model.predict(observation(1.0))[0, 0] == 5.0
        with pytest.raises(ConfigurationError, match="7 is not newer than version 7"):
            server.set_weights(weights(6.0), version=7)
        assert server.set_weights(weights(6.0)) == 8


@pytest.mark.parametrize("version", [0, 1.5, math.nan, 2**63, True, "3"])
def test_weights_get_no_version_that_a_client_could_not_read(version: Any) -> None:
    with ModelServer(weighted(3.0)) as server, RemoteModel(server.address) as model:
        model.configure_route(CONTRACT)
        with pytest.raises(ConfigurationError, match="must be an integer from 1 to"):
            server.set_weights(weights(5.0), version=version)

        assert model.predict(observation(1.0))[0, 0] == 3.0
        assert server.set_weights(weights(4.0), version=2**53) == 2**53
        model.predict(observation(1.0))
        telemetry = model.last_telemetry()
        assert server.set_weights(weights(5.0), version=2**63 - 1) == 2**63 - 1
        with pytest.raises(ConfigurationError, match="no version is left"):
            server.set_weights(weights(6.0))
        assert model.predict(observation(1.0))[0, 0] == 5.0

    assert telemetry is not None
    assert telemetry.policy_version == 2**53


def test_a_server_that_was_stopped_takes_no_weights() -> None:
    with ModelServer(weighted(3.0)) as server:
        pass

    with pytest.raises(EndpointClosedError, match="the server has been stopped"):
        server.set_weights(weights(5.0))


def test_a_policy_without_weights_says_so() -> None:
    with (
        ModelServer(Gate(is_open=True)) as server,
        pytest.raises(ConfigurationError, match="serve a torch module, an RLlib checkpoint"),
    ):
        server.set_weights({})


# --- a policy that hangs ---------------------------------------------------------------


def test_health_tells_that_the_policy_is_stuck_and_that_it_is_no_longer(gate: Gate) -> None:
    with (
        ModelServer(gate, _stuck_after_s=0.05) as server,
        RemoteModel(server.address) as model,
        ThreadPoolExecutor() as aside,
    ):
        model.configure_route(CONTRACT)
        assert server.health().is_serving
        stuck = aside.submit(model.predict, observation(1))

        assert eventually(lambda: not server.health().is_serving)
        assert "the policy has not come back" in server.health().reason
        gate.may_pass.set()
        stuck.result(PATIENCE_S)
        assert eventually(lambda: server.health().is_serving)


def test_other_endpoints_of_the_process_go_on_while_one_policy_hangs(gate: Gate) -> None:
    with (
        ModelServer(gate) as hanging,
        ModelServer(Gate(is_open=True)) as other,
        RemoteModel(hanging.address) as stuck,
        RemoteModel(other.address) as model,
        ThreadPoolExecutor() as aside,
    ):
        stuck.configure_route(CONTRACT)
        model.configure_route(CONTRACT)
        answer = aside.submit(stuck.predict, observation(1))
        assert gate.entered.acquire(timeout=PATIENCE_S)

        assert model.predict(observation(2)).tolist() == [[2]]
        assert not answer.done()
        gate.may_pass.set()
        assert answer.result(PATIENCE_S).tolist() == [[1]]


def test_weights_for_a_policy_that_hangs_are_given_up_and_never_set_later() -> None:
    module = weighted(1.0)
    entered, may_pass = threading.Event(), threading.Event()

    def hang(_module: Any, _args: Any) -> None:
        entered.set()
        assert may_pass.wait(PATIENCE_S)

    with (
        ModelServer(module) as server,
        RemoteModel(server.address) as model,
        ThreadPoolExecutor() as aside,
    ):
        model.configure_route(CONTRACT)
        handle = module.register_forward_pre_hook(hang)
        stuck = aside.submit(model.predict, observation(1))
        assert entered.wait(PATIENCE_S)
        with pytest.raises(EndpointTimeoutError, match="the weights have not been replaced"):
            server.set_weights(weights(2.0), timeout_s=0.01)
        may_pass.set()
        stuck.result(PATIENCE_S)
        handle.remove()

        assert model.predict(observation(1))[0, 0] == 1.0
        assert server.policy_version == 0


def test_a_server_that_stops_leaves_no_session_waiting_for_its_policy(gate: Gate) -> None:
    with ModelServer(gate) as server:
        model = RemoteModel(server.address)
        model.configure_route(CONTRACT)
        with ThreadPoolExecutor() as aside:
            stuck = aside.submit(model.predict, observation(1))
            assert gate.entered.acquire(timeout=PATIENCE_S)
            vanish(model)  # its session waits for the policy to forget it
            assert eventually(lambda: bool(shared_loop().run(releases())))
            server.stop(0.0)

            assert eventually(lambda: not shared_loop().run(releases()))
            with pytest.raises(EndpointError):
                stuck.result(PATIENCE_S)
        model.close()


def test_a_policy_that_never_returns_does_not_keep_the_process_from_ending() -> None:
    code = """
        import threading
        import gymnasium
        import numpy as np
        from rlmesh_ray import ModelServer, RemoteModel

        entered = threading.Event()

        def hang(observations):
            entered.set()
            threading.Event().wait()

        server = ModelServer(hang).start()
        model = RemoteModel(server.address)
        model.configure_route(gymnasium.make("CartPole-v1"))
        observations = np.zeros((1, 4), np.float32)
        threading.Thread(target=model.predict, args=(observations,), daemon=True).start()
        entered.wait()
        server.stop(0.1)
        print("stopped")
    """

    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)],
        capture_output=True,
        text=True,
        timeout=60,
    )

    assert (done.returncode, done.stdout) == (0, "stopped\n")


# --- a policy that hangs in the serving loop -------------------------------------------


class Holding:
    """A policy that counts as quick at once, and waits at its gate in the serving loop only."""

    traits = PolicyTraits(only_computes=True)

    def __init__(self, gate: Callable[[Any], Any]) -> None:
        self._gate = gate
        self.is_armed = False

    def check_contract(self, contract: EnvContract) -> None:
        pass

    def predict(self, contract: EnvContract, rows: Rows) -> object:
        if self.is_armed and threading.current_thread().name == "rlmesh-ray-loop":
            return self._gate(rows.observations)
        return np.asarray(rows.observations)[:, :1]

    def forget(self, route_key: str, env_index: int | None) -> None:
        pass


@contextlib.contextmanager
def held(gate: Gate, **options: Any) -> Iterator[ModelServer]:
    """Return a server whose policy holds the serving loop until the gate is opened."""
    policy = Holding(gate)

    def predict_until_it_holds(model: RemoteModel) -> None:
        # Now and then the policy's own thread has a look for work just then, and finds it.
        with contextlib.suppress(EndpointError):
            while policy.is_armed:
                model.predict(observation(1))

    with ModelServer(policy, **options) as server, ThreadPoolExecutor() as aside:
        model = RemoteModel(server.address)
        model.configure_route(CONTRACT)
        policy.is_armed = True
        predicting = aside.submit(predict_until_it_holds, model)
        try:
            assert gate.entered.acquire(timeout=PATIENCE_S)
            policy.is_armed = False
            yield server
        finally:
            gate.may_pass.set()
            predicting.result(PATIENCE_S)
            model.close()


@pytest.fixture
def _quick_at_once(_always_quick: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batcher, "_NUM_TO_PROVE", 0)


@pytest.mark.usefixtures("_quick_at_once")
def test_health_is_reported_while_a_policy_holds_the_serving_loop_and_by_grpc_afterwards(
    gate: Gate, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(policy_thread, "_BLOCKED_REPORT_S", PATIENCE_S)
    with held(gate, _stuck_after_s=0.05) as server:
        assert eventually(lambda: not server.health().is_serving)
        assert "the policy has not come back" in server.health().reason
        gate.may_pass.set()

        reported = check_health(ConnectOptions(server.address))

    assert reported.status is HealthStatus.NOT_SERVING
    assert "the policy has just held all sessions" in reported.reason


@pytest.mark.usefixtures("_quick_at_once")
def test_nothing_that_has_its_time_takes_longer_while_a_policy_holds_the_serving_loop(
    gate: Gate, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(endpoint, "_LATE_S", 0.05)
    with held(gate) as server:
        assert not server.drain(0.01)
        with pytest.raises(EndpointTimeoutError):
            server.set_weights({}, timeout_s=0.01)
        server.stop(0.01)

        assert server.wait(0.0)
        assert server.health().reason == "it has stopped"
        # All of this came back while the gate was shut.
        assert not gate.may_pass.is_set()


@pytest.mark.slow
def test_serve_model_ends_by_a_signal_though_the_policy_holds_the_serving_loop(
    tmp_path: Path,
) -> None:
    (tmp_path / "holding.py").write_text(
        textwrap.dedent(
            """
            import threading
            from rlmesh_ray.server.model import batcher
            from tests.loopback.test_serving import Holding

            batcher._NUM_TO_PROVE, batcher._FAST_S = 0, 60.0

            def hold(observations):
                print("held", flush=True)
                threading.Event().wait()

            def make():
                policy = Holding(hold)
                policy.is_armed = True
                return policy
            """
        )
    )
    command = [sys.executable, "-m", "rlmesh_ray", "serve-model", "holding:make", "--json"]
    root = str(Path(__file__).parents[2])
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), root])}
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment
    ) as process:
        assert process.stdout is not None
        try:
            address = json.loads(process.stdout.readline())["address"]
            model = RemoteModel(address)
            model.configure_route(CONTRACT)
            with ThreadPoolExecutor() as aside:

                def predict_for_ever() -> None:
                    with contextlib.suppress(EndpointError):
                        while True:
                            model.predict(observation(1))

                predicting = aside.submit(predict_for_ever)
                assert process.stdout.readline() == "held\n"
                process.terminate()
                # The gate alone would keep it for as long as the test may take.
                assert process.wait(PATIENCE_S) == 0
                predicting.result(PATIENCE_S)
            model.close()
        finally:
            process.kill()


# --- drain -----------------------------------------------------------------------------


def test_a_draining_server_finishes_its_sessions_and_takes_no_new_one() -> None:
    with (
        ModelServer(Gate(is_open=True)) as server,
        RemoteModel(server.address) as model,
        ThreadPoolExecutor() as aside,
    ):
        model.configure_route(CONTRACT)
        draining = aside.submit(server.drain, PATIENCE_S)
        assert eventually(lambda: not server.health().is_serving)

        assert model.predict(observation(4)).tolist() == [[4]]
        with pytest.raises(EndpointUnreachableError, match="takes no new sessions"):
            RemoteModel(server.address)
        assert not draining.done()
        model.close()
        assert draining.result(PATIENCE_S)


def test_a_drain_has_its_time() -> None:
    with ModelServer(Gate(is_open=True)) as server, RemoteModel(server.address) as model:
        model.configure_route(CONTRACT)

        assert not server.drain(0.01)


# --- slots -----------------------------------------------------------------------------


def test_the_answer_mirrors_the_context_to_the_last_slot(gate: Gate) -> None:
    from rlmesh_ray.protocol.messages import ConfigureRoute, Predict, PredictContext, PredictSlot
    from rlmesh_ray.wire._pb.rlmesh.model.v1 import interaction_pb2 as pb
    from rlmesh_ray.wire.rlmesh_v1 import model as wire

    gate.may_pass.set()
    slot = PredictSlot(0, "épisode", 2**40, True)
    context = PredictContext("a session", "a route", "7", (slot,))
    frames = [
        wire.pack_request(ConfigureRoute("1", context, CONTRACT)),
        wire.pack_request(Predict("7", context, observation(1).tobytes())),
    ]
    with ModelServer(gate) as server, plain_channel(server.address) as channel:
        join = channel.stream_stream("/rlmesh.model.v1.ModelService/Join")
        _, frame = join(iter(frames))

    answer = pb.JoinResponse.FromString(frame)
    sent = pb.JoinRequest.FromString(frames[1])
    assert answer.predict.context == sent.predict.context
    assert answer.telemetry.operation == "predict"
    names = {metric.name: metric.WhichOneof("value") for metric in answer.telemetry.metrics}
    assert names == {
        "policy.version": "number",
        "predict.batch_rows": "number",
        "predict.forward": "duration_ns",
        "predict.queue": "duration_ns",
    }


def test_slots_of_one_predict_may_be_some_of_the_route_s_lanes() -> None:
    four = EnvContract(
        id=CONTRACT.id,
        observation_space=CONTRACT.observation_space,
        action_space=CONTRACT.action_space,
        num_envs=4,
        autoreset_mode=CONTRACT.autoreset_mode,
    )
    gate = Gate(is_open=True)
    with ModelServer(gate) as server, RemoteModel(server.address) as model:
        model.configure_route(four)
        two = np.concatenate([observation(1), observation(2)])

        assert model.predict(two, slots=Slots([3, 1], ["a", "b"], [0, 5], [True, False])).tolist()

    assert gate.batches == [[1, 2]]
