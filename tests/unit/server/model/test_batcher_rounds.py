"""The requests of several streams that run together, and the round of the loop in which they do."""

import asyncio
import pickle
import threading
from collections.abc import Callable, Coroutine
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from gymnasium import spaces

from rlmesh_ray.errors import ConfigurationError, ContractMismatchError, PolicyError, RlmeshError
from rlmesh_ray.models.policy import PolicyTraits, Rows
from rlmesh_ray.protocol.messages import BatchRun, PredictSlot
from rlmesh_ray.protocol.model_session import ContractLanes
from rlmesh_ray.server.model import batcher, policy_thread, prediction_batch
from rlmesh_ray.server.model.batcher import Batcher
from rlmesh_ray.server.model.policy_thread import PolicyThread
from rlmesh_ray.server.model.prediction_batch import Actions, PredictionRequest, Route
from rlmesh_ray.spaces.contract import AutoresetMode, EnvContract
from rlmesh_ray.spaces.gym_conversion import from_gymnasium
from rlmesh_ray.wire.rlmesh_v1 import values
from rlmesh_ray.wire.rlmesh_v1.values import ContractCodecs
from tests.unit.server.endpoint.jumping_loop import JumpingLoop

CONTRACT = EnvContract(
    id="Toy-v0",
    observation_space=from_gymnasium(spaces.Box(-10.0, 10.0, (1,), np.float32)),
    action_space=from_gymnasium(spaces.Box(-10.0, 10.0, (1,), np.float32)),
    num_envs=1,
    autoreset_mode=AutoresetMode.DISABLED,
)
CODECS = ContractCodecs.made_by(values.codec, CONTRACT)
ROUTES = {key: Route(key, CONTRACT, CODECS, ContractLanes(1)) for key in "abcdefghij"}
SLOTS = [PredictSlot(0, "", 0, False)]


class InlineThread(PolicyThread):
    """Runs everything in the caller's thread at once.

    The order in which the real one runs things depends on when its thread wakes up.
    """

    is_elsewhere = False
    num_wakeups = 0

    def begin_inline(self) -> bool:
        return not self.is_elsewhere and super().begin_inline()

    def wake(self) -> None:
        self.num_wakeups += 1
        if not self.is_elsewhere:
            self._take_turn()


class IdleThread:
    """In place of the policy's thread: never runs."""

    def __init__(self, **_: object) -> None:
        pass

    def start(self) -> None:
        pass


class Echo:
    """A policy that only computes, and remembers what it was asked; it may refuse all but those."""

    traits = PolicyTraits(only_computes=True)

    def __init__(self) -> None:
        self.batches: list[list[float]] = []
        self.checked: list[tuple[str, int]] = []
        self.forgotten: list[str] = []
        self.refusal: Exception | None = None
        self.meanwhile: Callable[[], object] = lambda: None
        """Called during each batch."""

    def check_contract(self, contract: EnvContract) -> None:
        self.checked.append((contract.id, contract.num_envs))
        if self.refusal is not None:
            raise self.refusal

    def predict(self, contract: EnvContract, rows: Rows) -> object:
        observations = np.asarray(rows.observations)
        self.batches.append(observations[:, 0].tolist())
        self.meanwhile()
        return observations

    def forget(self, route_key: str, env_index: int | None) -> None:
        if self.refusal is not None:
            raise self.refusal
        self.forgotten.append(route_key)


class Stage:
    """A host of an ``Echo`` that has proved quick, and what its clients are answered."""

    def __init__(
        self, max_rows: int = 64, *, max_delay_s: float = 0.0, only_computes: bool = True
    ) -> None:
        self.policy = Echo()
        self.policy.traits = PolicyTraits(only_computes=only_computes)
        self.host = Batcher(self.policy, max_rows, max_delay_s=max_delay_s)
        self.answers: list[object] = []

    async def open(self, *keys: str) -> None:
        for _ in keys:
            await self.host.configure(CONTRACT)

    def send(self, key: str, value: float) -> None:
        """Have a request arrive now, as from a stream."""

        def take(data: bytes) -> None:
            self.host.predict(PredictionRequest(ROUTES[key], data, SLOTS, self.note))

        self.host.submit(take, np.array([value], np.float32).tobytes())

    def counted(self) -> tuple[int, int, int]:
        """Return how many batches, requests and rows the host has counted."""
        statistics = self.host.statistics()
        return statistics.batches, statistics.items, statistics.rows

    def note(self, _: PredictionRequest, result: Actions | RlmeshError, run: BatchRun) -> None:
        self.answers.append(result)


@pytest.fixture(autouse=True)
def _quick_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batcher, "_NUM_TO_PROVE", 0)
    # However slow the machine is that runs this.
    monkeypatch.setattr(batcher, "_FAST_S", 60.0)
    monkeypatch.setattr(batcher, "_SLOW_S", 60.0)
    monkeypatch.setattr(batcher, "PolicyThread", InlineThread)
    threads = SimpleNamespace(Lock=threading.Lock, Thread=IdleThread)
    monkeypatch.setattr(policy_thread, "threading", threads)


def play(scenario: Callable[[Stage], Coroutine[Any, Any, None]], max_rows: int = 64) -> Stage:
    async def whole() -> Stage:
        stage = Stage(max_rows)
        await scenario(stage)
        return stage

    return asyncio.run(whole())


async def next_round() -> None:
    """Let the loop do what it has to do now, and nothing that this leads to."""
    await asyncio.sleep(0)


def test_a_request_of_the_next_round_joins_those_of_this_one() -> None:
    async def scenario(stage: Stage) -> None:
        await stage.open("a", "b", "c")
        stage.send("a", 1)
        await next_round()
        stage.send("b", 2)
        await next_round()
        assert stage.policy.batches == []  # the third one may be about to come
        await next_round()

    assert play(scenario).policy.batches == [[1, 2]]


def test_a_batch_goes_out_in_the_round_in_which_every_live_route_has_arrived() -> None:
    async def scenario(stage: Stage) -> None:
        await stage.open("a", "b")
        stage.send("a", 1)
        stage.send("b", 2)
        await next_round()
        assert stage.policy.batches == [[1, 2]]
        assert len(stage.answers) == 2

    play(scenario)


def test_eight_requests_do_not_wait_for_more() -> None:
    async def scenario(stage: Stage) -> None:
        await stage.open(*"abcdefghij")
        for value, key in enumerate("abcdefg"):
            stage.send(key, value)
        await next_round()
        assert stage.policy.batches == []
        stage.send("h", 7)
        await next_round()
        assert stage.policy.batches == [[0, 1, 2, 3, 4, 5, 6, 7]]

    play(scenario)


def test_a_lone_route_does_not_wait_for_the_next_round() -> None:
    async def scenario(stage: Stage) -> None:
        await stage.open("a")
        stage.send("a", 1)
        assert stage.policy.batches == [[1]]

    play(scenario)


def test_requests_answered_at_once_count_as_those_that_waited() -> None:
    async def scenario(stage: Stage) -> None:
        await stage.open("a")
        stage.send("a", 1)
        assert stage.answers == [np.float32(1).tobytes()]
        assert stage.counted() == (1, 1, 1)
        await stage.open("b")
        stage.send("a", 2)
        stage.send("b", 3)
        await next_round()
        assert stage.counted() == (2, 3, 3)
        assert not stage.host.statistics().is_busy

    play(scenario)


def test_the_statistics_count_batches_and_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock()
    for module in (batcher, policy_thread, prediction_batch):
        monkeypatch.setattr(module, "time", clock)

    def compute() -> None:
        clock.now_s += 2.0

    async def scenario(stage: Stage) -> None:
        stage.policy.meanwhile = compute
        await stage.open("a", "b", "c")
        stage.send("a", 1)
        await next_round()
        clock.now_s += 1.0
        stage.send("b", 2)
        await next_round()
        waiting = stage.host.statistics()
        assert (waiting.items_waiting, waiting.rows_waiting, waiting.batches) == (2, 2, 0)
        clock.now_s += 10.0
        for _ in range(3):
            await next_round()

        found = stage.host.statistics()
        assert (found.items_waiting, found.batches, found.items, found.rows) == (0, 1, 2, 2)
        assert (found.waited_s, found.longest_wait_s, found.busy_s) == (21.0, 11.0, 2.0)
        assert (found.queue_s.count, found.batch_rows.mean) == (2, 2)
        assert found.forward_s.total == 2.0
        assert pickle.loads(pickle.dumps(found)) == found

    play(scenario)


def test_a_request_that_waits_can_be_cancelled_and_one_that_has_run_cannot() -> None:
    async def scenario(stage: Stage) -> None:
        await stage.open("a", "b")
        asked = [
            PredictionRequest(ROUTES[key], data, SLOTS, stage.note)
            for key, data in (("a", np.float32(1).tobytes()), ("b", np.float32(2).tobytes()))
        ]
        for each in asked:
            assert stage.host.predict(each)
        stage.host.cancel(asked[0])
        for _ in range(2):
            await next_round()
        stage.host.cancel(asked[1])
        assert stage.policy.batches == [[2]]
        assert stage.host.statistics().cancelled == 1

    play(scenario)


def test_the_statistics_are_busy_while_a_lone_route_is_being_answered() -> None:
    async def scenario(stage: Stage) -> None:
        busy: list[bool] = []
        stage.policy.meanwhile = lambda: busy.append(stage.host.statistics().is_busy)
        await stage.open("a")
        stage.send("a", 1)
        assert busy == [True]
        assert not stage.host.statistics().is_busy

    play(scenario)


def test_a_lone_route_waits_while_the_policy_is_at_something_else() -> None:
    async def scenario(stage: Stage) -> None:
        await stage.open("a")
        assert isinstance(stage.host.thread, InlineThread)
        stage.host.thread.is_elsewhere = True
        before = stage.host.thread.num_wakeups
        stage.send("a", 1)
        assert stage.answers == []
        assert stage.host.thread.num_wakeups == before + 1
        assert stage.host.statistics().items_waiting == 1

    play(scenario)


def test_a_lone_request_does_not_overtake_one_that_waits() -> None:
    async def scenario(stage: Stage) -> None:
        await stage.open("a", "b")
        stage.send("a", 1)
        stage.send("b", 2)
        await next_round()
        assert stage.policy.batches == [[1]]  # more than one row is too many
        await stage.host.forget("a")
        stage.send("c", 3)
        await next_round()
        await next_round()

    assert play(scenario, max_rows=1).policy.batches == [[1], [2], [3]]


def test_requests_that_answers_lead_to_are_not_run_one_in_the_other() -> None:
    # As when one frame holds many groups of one route: each begins when the one before is done.
    left = 2000

    async def scenario(stage: Stage) -> None:
        await stage.open("a")
        all_done = asyncio.Event()

        def ask(data: bytes) -> None:
            stage.host.predict(PredictionRequest(ROUTES["a"], data, SLOTS, answer))

        def answer(_: PredictionRequest, result: Actions | RlmeshError, run: BatchRun) -> None:
            nonlocal left
            left -= 1
            if left:
                assert isinstance(result, bytes)
                ask(result)
            else:
                all_done.set()

        stage.host.submit(ask, np.array([1], np.float32).tobytes())
        await asyncio.wait_for(all_done.wait(), 60.0)
        assert stage.counted() == (2000, 2000, 2000)

    play(scenario)


def test_a_lone_request_that_fails_gets_the_error() -> None:
    async def scenario(stage: Stage) -> None:
        await stage.open("a")
        stage.policy.meanwhile = lambda: 1 / 0
        stage.send("a", 1)
        (answer,) = stage.answers
        assert isinstance(answer, PolicyError)
        assert "ZeroDivisionError" in str(answer)

    play(scenario)


def test_requests_do_not_wait_for_a_closed_route() -> None:
    async def scenario(stage: Stage) -> None:
        await stage.open("a", "b")
        await stage.host.forget("b")
        stage.send("a", 1)
        assert stage.policy.batches == [[1]]

    assert play(scenario).policy.forgotten == ["b"]


@pytest.mark.parametrize("refusal", [ConfigurationError("never"), ValueError("no")])
def test_requests_do_not_wait_for_a_closed_route_that_the_policy_fails_to_forget(
    refusal: Exception,
) -> None:
    async def scenario(stage: Stage) -> None:
        await stage.open("a", "b")
        stage.policy.refusal = refusal
        with pytest.raises(RlmeshError, match=str(refusal)):
            await stage.host.forget("b")
        stage.send("a", 1)
        assert stage.policy.batches == [[1]]

    play(scenario)


DELAY_S = 0.5


def play_delayed(
    monkeypatch: pytest.MonkeyPatch,
    scenario: Callable[[Stage, Callable[[], float]], Coroutine[Any, Any, None]],
    *,
    only_computes: bool = True,
) -> None:
    """Play a scenario at an engine with a delay, on a clock that jumps; it also gets the clock."""

    async def whole() -> None:
        now_s = asyncio.get_running_loop().time

        def now_ns() -> int:
            return round(now_s() * 1e9)

        clock = SimpleNamespace(monotonic=now_s, monotonic_ns=now_ns, perf_counter_ns=now_ns)
        monkeypatch.setattr(batcher, "time", clock)
        await scenario(Stage(max_delay_s=DELAY_S, only_computes=only_computes), now_s)

    with asyncio.Runner(loop_factory=JumpingLoop) as runner:
        runner.run(whole())


def test_a_delayed_batch_leaves_when_the_delay_is_over(monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario(stage: Stage, now_s: Callable[[], float]) -> None:
        ran_s: list[float] = []
        stage.policy.meanwhile = lambda: ran_s.append(now_s())
        await stage.open("a", "b", "c")
        begun_s = now_s()
        stage.send("a", 1)
        await asyncio.sleep(0.3)
        stage.send("b", 2)
        await asyncio.sleep(0.1)
        assert stage.answers == []
        await asyncio.sleep(0.2)
        assert stage.policy.batches == [[1, 2]]
        assert ran_s == [pytest.approx(begun_s + DELAY_S)]
        # The next one has a delay of its own.
        stage.send("c", 3)
        await asyncio.sleep(0.4)
        assert len(stage.answers) == 2
        await asyncio.sleep(0.2)
        assert stage.policy.batches == [[1, 2], [3]]

    play_delayed(monkeypatch, scenario)


def test_a_delayed_batch_leaves_as_soon_as_each_route_has_asked(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def scenario(stage: Stage, now_s: Callable[[], float]) -> None:
        await stage.open("a", "b")
        begun_s = now_s()
        stage.send("a", 1)
        await next_round()
        await next_round()
        assert stage.policy.batches == []
        stage.send("b", 2)
        await next_round()
        await next_round()
        assert stage.policy.batches == [[1, 2]]
        # The timer of that batch does not end the delay of the next one.
        await asyncio.sleep(0.4)
        stage.send("a", 3)
        await asyncio.sleep(0.4)
        assert stage.policy.batches == [[1, 2]]
        await asyncio.sleep(0.2)
        assert stage.policy.batches == [[1, 2], [3]]
        assert now_s() == pytest.approx(begun_s + 1.0)

    play_delayed(monkeypatch, scenario)


def test_a_lone_route_is_not_delayed(monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario(stage: Stage, now_s: Callable[[], float]) -> None:
        await stage.open("a")
        stage.send("a", 1)
        assert stage.policy.batches == [[1]]

    play_delayed(monkeypatch, scenario)


def test_a_batch_that_waited_for_the_policy_s_thread_is_delayed_when_that_is_free(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def scenario(stage: Stage, now_s: Callable[[], float]) -> None:
        await stage.open("a", "b", "c")

        def ask_once() -> None:
            if len(stage.policy.batches) == 1:
                stage.send("c", 4)

        stage.policy.meanwhile = ask_once
        for value, key in enumerate("abc", start=1):
            stage.send(key, value)
        await asyncio.sleep(0.4)
        assert stage.policy.batches == [[1, 2, 3]]
        await asyncio.sleep(0.2)
        assert stage.policy.batches == [[1, 2, 3], [4]]

    play_delayed(monkeypatch, scenario, only_computes=False)  # it runs in its thread


def test_a_policy_checks_equal_environments_once() -> None:
    async def scenario(stage: Stage) -> None:
        await stage.open("a", "b")
        await stage.host.configure(replace(CONTRACT, metadata={"version": np.zeros(2)}))
        await stage.host.configure(replace(CONTRACT, num_envs=2))
        await stage.host.configure(replace(CONTRACT, id="Other-v0"))

    assert play(scenario).policy.checked == [("Toy-v0", 1), ("Toy-v0", 2), ("Other-v0", 1)]


def test_a_refused_environment_is_checked_again() -> None:
    async def scenario(stage: Stage) -> None:
        stage.policy.refusal = ContractMismatchError("not this one")
        for _ in range(2):
            with pytest.raises(ContractMismatchError):
                await stage.open("a")
        stage.policy.refusal = None
        await stage.open("a", "b")
        assert len(stage.policy.checked) == 3
        assert stage.host.statistics().routes == 2

    play(scenario)


def test_the_number_of_remembered_environments_is_limited() -> None:
    upwards = range(1, 66)

    async def scenario(stage: Stage) -> None:
        for width in (*upwards, 65, 2, 1):
            await stage.host.configure(replace(CONTRACT, num_envs=width))

    assert [width for _, width in play(scenario).policy.checked] == [*upwards, 1]


# --- a policy that has held the serving loop -------------------------------------------


class Clock:
    """A clock that the test sets."""

    def __init__(self) -> None:
        self.now_s = 1000.0

    def monotonic(self) -> float:
        return self.now_s

    def monotonic_ns(self) -> int:
        return int(self.now_s * 1e9)

    perf_counter_ns = monotonic_ns


def test_a_policy_that_has_blocked_the_loop_is_unhealthy_for_a_moment_afterwards(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock = Clock()
    for module in (batcher, policy_thread, prediction_batch):
        monkeypatch.setattr(module, "time", clock)

    async def scenario(stage: Stage) -> None:
        await stage.open("a")
        stage.send("a", 1)
        assert stage.host.health().is_serving

        def hang() -> None:
            clock.now_s += 45.0

        stage.policy.meanwhile = hang
        stage.send("a", 2)
        health = stage.host.health()
        assert not health.is_serving
        assert health.reason == "the policy has just held all sessions for 45 s"
        clock.now_s += 2.1
        assert stage.host.health().is_serving

    play(scenario)
