"""Whole sessions of the released generation at random, held against a plain model."""

import itertools
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from rlmesh_ray.dialects.released.protocol import ENV_RULES
from rlmesh_ray.protocol.env_session import (
    EnvOutcome,
    Failure,
    FailureKind,
    RenderOutcome,
    ResetOutcome,
    SessionState,
    StepOutcome,
)
from rlmesh_ray.protocol.messages import (
    Close,
    Closed,
    Configure,
    Configured,
    EnvErrorCode,
    EnvFailed,
    EnvRequest,
    EnvResponse,
    Render,
    Rendered,
    Reset,
    ResetDone,
    Step,
    StepDone,
)
from tests.unit.dialects.released.released_reference import ReleasedReference, reported
from tests.unit.protocol.counted_session import CountedSession

NUM_LANES = 3
FEW = settings(
    max_examples=40,
    stateful_step_count=40,
    deadline=None,
    derandomize=True,
    suppress_health_check=list(HealthCheck),
)
MANY = settings(FEW, max_examples=600, stateful_step_count=60)

SOUND_LANES = st.lists(st.integers(0, NUM_LANES - 1), unique=True).map(tuple)
LANES = st.one_of(
    st.just(()),
    SOUND_LANES,
    st.just(tuple(range(NUM_LANES))),
    st.lists(st.integers(-1, NUM_LANES), max_size=NUM_LANES + 1).map(tuple),
)
SEEDS = st.lists(st.integers(-9, 9), max_size=NUM_LANES + 1).map(tuple)
IDS = st.lists(st.sampled_from(["", "p", "q"]), max_size=NUM_LANES + 1).map(tuple)
ENDS = st.lists(
    st.sampled_from(["", "", "", "t", "x", "tx"]), min_size=NUM_LANES, max_size=NUM_LANES
)
REWARDS = st.lists(st.integers(-4, 4), min_size=NUM_LANES, max_size=NUM_LANES)
# Requests of that wire have no numbers that could be out of order.
KINDS = [kind for kind in FailureKind if kind is not FailureKind.OUT_OF_ORDER]
FAILURES = st.one_of(*[st.none()] * 12, st.sampled_from(KINDS))


class ReleasedWalk(RuleBasedStateMachine):
    """Any requests, any outcomes, of an endpoint of any kind."""

    @initialize(kind=st.sampled_from(["next step", "together", "alone"]))
    def begin(self, kind: str) -> None:
        autoresets, steps_subsets = kind == "next step", kind == "alone"
        minted = itertools.count()
        self._reference = ReleasedReference(NUM_LANES, autoresets, steps_subsets)
        self._session = CountedSession(
            NUM_LANES,
            lambda: f"minted-{next(minted)}",
            ENV_RULES,
            autoresets=autoresets,
            steps_subsets=steps_subsets,
        )

    @rule(lanes=LANES, seeds=SEEDS, ids=IDS, failure=FAILURES)
    def reset(
        self,
        lanes: tuple[int, ...],
        seeds: tuple[int, ...],
        ids: tuple[str, ...],
        failure: FailureKind | None,
    ) -> None:
        request = Reset("r", seeds=seeds, env_indices=lanes, episode_ids=ids)
        refusal = self._reference.allows(lanes)
        allowed = {0, len(lanes)} if lanes else {0, 1, NUM_LANES}
        if not refusal and len(seeds) not in allowed:
            refusal = "INVALID_ACTION"
        response = self._ask(request, ResetOutcome(b"first", {}), failure, refusal)
        if response is None:
            return
        assert isinstance(response, ResetDone)
        # What the host was to do is seen in what the session has noted.
        expected = self._reference.reset(lanes, seeds, ids)
        if expected:
            episodes = [self._session.tracker.episodes[lane] for lane in lanes or range(NUM_LANES)]
            noted = [episode.seed for episode in episodes if episode is not None]
            assert noted == expected
        assert response.episode_ids == self._ids(lanes)

    @rule(lanes=LANES, rewards=REWARDS, ends=ENDS, ids=IDS, failure=FAILURES)
    def step(
        self,
        lanes: tuple[int, ...],
        rewards: list[int],
        ends: list[str],
        ids: tuple[str, ...],
        failure: FailureKind | None,
    ) -> None:
        self._step(lanes, rewards, ends, ids, failure)

    @rule(lanes=SOUND_LANES, rewards=REWARDS, ends=ENDS, ids=IDS)
    def step_as_the_environment_should(
        self, lanes: tuple[int, ...], rewards: list[int], ends: list[str], ids: tuple[str, ...]
    ) -> None:
        if not self._reference.steps_subsets:
            lanes = ()
        if self._reference.autoresets:
            for lane, running in self._reference.lanes.items():
                if running is None:
                    rewards[lane], ends[lane] = 0, ""
        self._step(lanes, rewards, ends, ids, None)

    @rule(lanes=LANES, failure=FAILURES)
    def render(self, lanes: tuple[int, ...], failure: FailureKind | None) -> None:
        refusal = self._reference.allows(lanes).replace("UNSUPPORTED", "")
        request = Render("r", env_indices=lanes)
        response = self._ask(request, RenderOutcome(b"png"), failure, refusal)
        assert response is None or isinstance(response, Rendered)

    @rule(edition=st.sampled_from(["2026.06", "", "2026.06-rc", *["2026.06"] * 5, "2025.01"]))
    def configure(self, edition: str) -> None:
        is_over = self._reference.is_over
        response = self._session.receive(Configure("r", edition), 0)
        if is_over or edition != "2025.01":
            assert isinstance(response, EnvFailed if is_over else Configured)
            return
        assert isinstance(response, EnvFailed)
        assert not response.is_recoverable
        assert [reported(one) for one in response.interrupted_episodes] == self._reference.end()

    @rule(is_meant=st.sampled_from([True] + 7 * [False]))
    def close(self, is_meant: bool) -> None:
        if (
            not is_meant and not self._reference.is_over
        ) or self._session.state is SessionState.CLOSED:
            return
        was_over = self._reference.is_over
        response = self._session.receive(Close("r"), 0)
        assert isinstance(response, Closed)
        expected = [] if was_over else self._reference.end()
        assert [reported(one) for one in response.final_episodes] == expected

    @precondition(lambda self: self._session.state is SessionState.CLOSED)
    @rule(kind=st.sampled_from(["next step", "together", "alone"]))
    def begin_anew(self, kind: str) -> None:
        self.begin(kind)

    @invariant()
    def stands_where_the_model_says(self) -> None:
        if not hasattr(self, "_session"):
            return
        if self._reference.is_over:
            assert self._session.state in (SessionState.ABANDONED, SessionState.CLOSED)
        else:
            expected = SessionState.READY if self._reference.lanes else SessionState.AWAIT_RESET
            assert self._session.state is expected
        assert self._session.tracker.episode_ids == self._reference.ids()

    def _step(
        self,
        lanes: tuple[int, ...],
        rewards: Sequence[int],
        ends: Sequence[str],
        ids: tuple[str, ...],
        failure: FailureKind | None,
    ) -> None:
        reference = self._reference
        refusal = reference.allows(lanes)
        if not reference.lanes or (not refusal and self._lacks(lanes)):
            refusal = "NOT_READY"
        width = len(lanes) or NUM_LANES
        outcome = StepOutcome(
            b"next",
            tuple(map(float, rewards[:width])),
            bytes("t" in end for end in ends[:width]),
            bytes("x" in end for end in ends[:width]),
            {},
        )
        request = Step("r", b"", env_indices=lanes, episode_ids=ids)
        response = self._ask(request, outcome, failure, refusal)
        if response is None:
            return
        over = reference.step(lanes, outcome.rewards, ends, ids)
        if over is None:
            assert isinstance(response, EnvFailed)
            assert (response.code, response.is_recoverable) == (EnvErrorCode.INTERNAL, False)
            assert [reported(one) for one in response.interrupted_episodes] == reference.end()
            return
        assert isinstance(response, StepDone)
        assert [reported(one) for one in response.completed_episodes] == over
        assert (response.env_indices, response.episode_ids) == (lanes, self._ids(lanes))

    def _ask(
        self, request: EnvRequest, outcome: EnvOutcome, failure: FailureKind | None, refusal: str
    ) -> EnvResponse | None:
        """Return the answer to what the environment did; judge everything else here."""
        before = (self._session.state, self._session.tracker.episode_ids)
        response = self._session.receive(request, 0)
        if self._reference.is_over or refusal:
            assert isinstance(response, EnvFailed)
            assert response.is_recoverable != self._reference.is_over
            assert self._reference.is_over or response.code.name == refusal
            assert (self._session.state, self._session.tracker.episode_ids) == before
            return None
        assert response is None
        if failure is None:
            return self._session.complete(outcome, 0)
        failed: Any = self._session.complete(Failure(failure, "why"), 0)
        assert isinstance(failed, EnvFailed)
        lanes: Sequence[int] = getattr(request, "env_indices", ())
        interrupted = self._reference.fail(failure, lanes, is_render=isinstance(request, Render))
        assert [reported(one) for one in failed.interrupted_episodes] == interrupted
        assert failed.is_recoverable == (failure is not FailureKind.BAD_OBSERVATION)
        return None

    def _lacks(self, lanes: Sequence[int]) -> bool:
        return any(lane not in self._reference.lanes for lane in lanes or range(NUM_LANES))

    def _ids(self, lanes: Sequence[int]) -> tuple[str, ...]:
        ids = self._reference.ids()
        return tuple(ids[lane] for lane in lanes) if lanes else ids


def test_a_few_random_sessions_are_as_the_model_says() -> None:
    run_state_machine_as_test(ReleasedWalk, settings=FEW)


@pytest.mark.nightly
@pytest.mark.timeout(900)
def test_many_random_sessions_are_as_the_model_says() -> None:
    run_state_machine_as_test(ReleasedWalk, settings=MANY)
