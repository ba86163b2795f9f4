"""ModelServer under many clients: batches, weights that change, a policy that hangs."""

import asyncio
import os
import subprocess
import sys
import textwrap
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import grpc
import numpy as np
import pytest
import torch
from gymnasium import spaces

from rlmesh_ray import ModelServer, RemoteModel
from rlmesh_ray.client.remote_model import Slots
from rlmesh_ray.errors import (
    ConfigurationError,
    EndpointError,
    EndpointTimeoutError,
    EndpointUnreachableError,
    PolicyError,
    RemoteModelError,
)
from rlmesh_ray.server import model_service, pace
from rlmesh_ray.server.loop import shared_loop
from rlmesh_ray.spaces.contract import AutoresetMode, EnvContract
from rlmesh_ray.spaces.gym import from_gymnasium

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


def wait_for(condition: Callable[[], bool]) -> None:
    while not condition():
        os.sched_yield()


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
        wait_for(lambda: server.statistics().items_waiting == 1)
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
        wait_for(lambda: server.statistics().items_waiting == 5)
        gate.may_pass.set()
        acted = [float(answer.result(PATIENCE_S)[0, 0]) for answer in answers]

    assert acted == [0, 1, 2, 3, 4, 5]
    assert [sorted(batch) for batch in gate.batches] == [[0], [1, 2, 3, 4, 5]]


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
        wait_for(lambda: server.statistics().items_waiting == 1)

        leaving._stream.close()
        wait_for(lambda: server.statistics().items_waiting == 0)
        gate.may_pass.set()
        running.result(PATIENCE_S)
        staying.predict(observation(3))
        with pytest.raises(EndpointError):
            orphan.result(PATIENCE_S)
        leaving.close()

        assert gate.batches == [[1], [3]]
        assert server.statistics().cancelled == 1


def test_each_route_s_answers_keep_its_order_whatever_the_batches() -> None:
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


def test_a_client_may_not_open_routes_without_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model_service, "MAX_ROUTES", 2)
    with ModelServer(Gate(is_open=True)) as server, RemoteModel(server.address) as model:
        for route in "ab":
            model.configure_route(CONTRACT, route_id=route)
        with pytest.raises(RemoteModelError, match="2 routes, which is the limit") as caught:
            model.configure_route(CONTRACT, route_id="c")
        model.configure_route(CONTRACT, route_id="b")  # anew, which takes no more room
        model.close_route("a")
        model.configure_route(CONTRACT, route_id="c")

    assert (caught.value.code, caught.value.is_recoverable) == ("BUSY", True)


class Recording(torch.nn.Module):
    """Returns the first element, and notes in which threads it runs."""

    def __init__(self) -> None:
        super().__init__()
        self.bias = torch.nn.Parameter(torch.zeros(1))
        self.threads: list[str] = []

    def forward(self, observations: torch.Tensor) -> torch.Tensor:
        self.threads.append(threading.current_thread().name)
        return observations[:, :1] + self.bias


def test_a_module_that_has_proved_quick_runs_in_the_serving_loop_and_acts_the_same(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # However slow the machine is that runs this.
    monkeypatch.setattr(pace, "_QUICK_S", PATIENCE_S)
    monkeypatch.setattr(pace, "_NEVER_S", PATIENCE_S)
    module = Recording()
    with ModelServer(module) as server, RemoteModel(server.address) as model:
        model.configure_route(CONTRACT)
        answers = [float(model.predict(observation(n % 9))[0, 0]) for n in range(150)]
        # Calls go to the policy's thread all the while.
        server.set_weights({"bias": np.ones(1, np.float32)})
        answers.append(float(model.predict(observation(4))[0, 0]))

    assert answers == [n % 9 for n in range(150)] + [5]
    assert set(module.threads[:100]) == {"rlmesh-ray-policy"}
    # Now and then the thread has a last look for work just then, and finds it.
    assert module.threads[120:].count("rlmesh-ray-loop") > 20


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
            wait_for(lambda: server.statistics().items >= num_clients)
            for version in range(1, num_versions + 1):
                assert server.set_weights(weights(version)) == version
            is_over.set()
            histories = [future.result(PATIENCE_S) for future in watching]

        assert server.policy_version == num_versions
    for history in histories:
        # The version that is told is that of the weights that acted, and none goes back.
        assert all(action == version for version, action in history)
        assert history == sorted(history)
        assert history[-1] == (num_versions, num_versions)


def test_weights_that_do_not_fit_change_nothing() -> None:
    with ModelServer(weighted(3.0)) as server, RemoteModel(server.address) as model:
        model.configure_route(CONTRACT)
        with pytest.raises(PolicyError, match="weight"):
            server.set_weights({"weight": np.ones((2, 2), np.float32)})
        with pytest.raises(ConfigurationError, match="not newer than version 0"):
            server.set_weights(weights(5.0), version=0)

        assert model.predict(observation(1.0))[0, 0] == 3.0
        assert server.policy_version == 0
        assert server.set_weights(weights(5.0), version=7) == 7
        assert model.predict(observation(1.0))[0, 0] == 5.0
        assert server.set_weights(weights(6.0)) == 8


def test_a_policy_without_weights_says_so() -> None:
    with (
        ModelServer(Gate(is_open=True)) as server,
        pytest.raises(ConfigurationError, match="serve a torch module, an RLlib checkpoint"),
    ):
        server.set_weights({})


# --- a policy that hangs ---------------------------------------------------------------


def test_health_tells_that_the_policy_is_stuck_and_that_it_is_no_longer(gate: Gate) -> None:
    with (
        ModelServer(gate, stuck_after_s=0.05) as server,
        RemoteModel(server.address) as model,
        ThreadPoolExecutor() as aside,
    ):
        model.configure_route(CONTRACT)
        assert server.health().is_serving
        stuck = aside.submit(model.predict, observation(1))

        wait_for(lambda: not server.health().is_serving)
        assert "the policy has not come back" in server.health().reason
        gate.may_pass.set()
        stuck.result(PATIENCE_S)
        wait_for(lambda: server.health().is_serving)


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
    async def sessions() -> list[str]:
        return [repr(task) for task in asyncio.all_tasks() if "_Conversation.release" in repr(task)]

    with ModelServer(gate) as server:
        model = RemoteModel(server.address)
        model.configure_route(CONTRACT)
        with ThreadPoolExecutor() as aside:
            stuck = aside.submit(model.predict, observation(1))
            assert gate.entered.acquire(timeout=PATIENCE_S)
            model._stream.close()  # its session waits for the policy to forget it
            wait_for(lambda: bool(shared_loop().run(sessions())))
            server.stop(0.0)

            wait_for(lambda: not shared_loop().run(sessions()))
            with pytest.raises(EndpointError):
                stuck.result(PATIENCE_S)
        model.close()


def test_a_policy_that_never_returns_does_not_keep_the_process_from_ending() -> None:
    code = """
        import threading
        import numpy as np
        from gymnasium import spaces
        from rlmesh_ray import ModelServer, RemoteModel
        from tests.loopback.test_serving import CONTRACT, observation

        entered = threading.Event()

        def hang(observations):
            entered.set()
            threading.Event().wait()

        server = ModelServer(hang).start()
        model = RemoteModel(server.address)
        model.configure_route(CONTRACT)
        threading.Thread(target=model.predict, args=(observation(1),), daemon=True).start()
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


# --- drain -----------------------------------------------------------------------------


def test_a_draining_server_finishes_its_sessions_and_takes_no_new_one() -> None:
    with (
        ModelServer(Gate(is_open=True)) as server,
        RemoteModel(server.address) as model,
        ThreadPoolExecutor() as aside,
    ):
        model.configure_route(CONTRACT)
        draining = aside.submit(server.drain, PATIENCE_S)
        wait_for(lambda: not server.health().is_serving)

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
    with ModelServer(gate) as server, grpc.insecure_channel(server.address) as channel:
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
