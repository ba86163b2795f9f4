import itertools
from collections.abc import Callable
from dataclasses import replace

import pytest

from rlmesh_ray.errors import LocalProtocolError
from rlmesh_ray.protocol.env_session import (
    EDITION_2026_06_RULES,
    Effect,
    EnvOutcome,
    EnvSession,
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
    EnvErrorCode,
    EnvFailed,
    EnvRequest,
    EnvResponse,
    MalformedRequest,
    Render,
    Rendered,
    Reset,
    ResetDone,
    Step,
    StepDone,
)
from tests.unit.protocol.counted_session import CountedSession

NUM_LANES = 2
REQUESTS = EDITION_2026_06_RULES.requests
KINDS: list[type[EnvRequest]] = [Reset, Step, Render, Close]
LEGAL = [(state, kind) for state, row in REQUESTS.items() for kind in row]
ILLEGAL = [pair for pair in itertools.product(SessionState, KINDS) if pair not in LEGAL]
WORK: list[type[EnvRequest]] = [Reset, Step, Render]
"""What the host has to do something for."""
WORKED_ON = [(state, kind) for state, kind in LEGAL if kind in WORK]
MOVES: dict[SessionState, list[str]] = {
    SessionState.AWAIT_RESET: [],
    SessionState.READY: ["reset"],
    SessionState.ABANDONED: ["reset", "rejected step"],
    SessionState.CLOSED: ["close"],
}


def reset_outcome() -> ResetOutcome:
    return ResetOutcome(b"first", {})


def step_outcome(
    rewards: tuple[float, ...] = (1.0, 1.0), terminated: bytes = b"\0\0", truncated: bytes = b"\0\0"
) -> StepOutcome:
    return StepOutcome(b"next", rewards, terminated, truncated, {}, {0: {"why": "fell"}})


OUTCOMES: dict[type[EnvRequest], EnvOutcome] = {
    Reset: reset_outcome(),
    Step: step_outcome(),
    Render: RenderOutcome(b"png"),
}


def request_of(kind: type[EnvRequest]) -> EnvRequest:
    if kind is Step:
        return Step("r", b"")
    make: Callable[[str], EnvRequest] = kind  # the others need an id only
    return make("r")


def new_session() -> EnvSession:
    ids = map(str, itertools.count())
    return CountedSession(NUM_LANES, lambda: f"episode-{next(ids)}")


def do(
    session: EnvSession, request: EnvRequest, outcome: EnvOutcome, now_ns: int = 0
) -> EnvResponse:
    response = session.receive(request, now_ns)
    return response if response is not None else session.complete(outcome, now_ns)


def session_in(state: SessionState) -> EnvSession:
    session = new_session()
    for move in MOVES[state]:
        if move == "reset":
            do(session, Reset("a"), reset_outcome())
        elif move == "rejected step":
            do(session, Step("b", b""), Failure(FailureKind.BAD_ACTION, "no"))
        else:
            session.receive(Close("c"), 0)
    assert session.state is state
    return session


@pytest.mark.parametrize(("state", "kind"), LEGAL)
def test_a_legal_request_moves_the_session_on(state: SessionState, kind: type[EnvRequest]) -> None:
    session = session_in(state)

    response = do(session, request_of(kind), OUTCOMES.get(kind, reset_outcome()))

    assert session.state is REQUESTS[state][kind]
    assert not isinstance(response, EnvFailed)
    assert response.request_id == "r"


@pytest.mark.parametrize(("state", "kind"), ILLEGAL)
def test_an_illegal_request_is_refused_and_changes_nothing(
    state: SessionState, kind: type[EnvRequest]
) -> None:
    session = session_in(state)
    ids = session.tracker.episode_ids

    response = session.receive(request_of(kind), 0)

    assert isinstance(response, EnvFailed)
    assert response.request_id == "r"
    is_usable = state is SessionState.AWAIT_RESET
    assert response.is_recoverable == is_usable
    assert response.code is (EnvErrorCode.NOT_READY if is_usable else EnvErrorCode.CLOSED)
    assert response.interrupted_episodes == ()
    assert (session.state, session.tracker.episode_ids) == (state, ids)


def test_the_tables_know_every_state_request_and_failure() -> None:
    assert set(REQUESTS) == set(SessionState)
    assert {kind for row in REQUESTS.values() for kind in row} == set(KINDS)
    assert set(EDITION_2026_06_RULES.failures) == set(FailureKind)


@pytest.mark.parametrize("kind", FailureKind)
@pytest.mark.parametrize(("state", "request_kind"), WORKED_ON)
def test_each_failure_is_answered_as_the_rules_say(
    kind: FailureKind, state: SessionState, request_kind: type[EnvRequest]
) -> None:
    session = session_in(state)
    consequence = EDITION_2026_06_RULES.failures[kind]
    if request_kind is Render and kind in (FailureKind.RAISED, FailureKind.TIMEOUT):
        consequence = replace(consequence, effect=Effect.NONE)
    tracked = [episode_id for episode_id in session.tracker.episode_ids if episode_id]

    response = do(session, request_of(request_kind), Failure(kind, "why", "trace"), 7)

    assert isinstance(response, EnvFailed)
    assert response.request_id == "r"
    assert response.code is consequence.code
    assert (response.message, response.debug_info) == ("why", "trace")
    assert response.is_recoverable == (consequence.effect is not Effect.ABANDON)
    interrupted = [episode.episode_id for episode in response.interrupted_episodes]
    assert interrupted == ([] if consequence.effect is Effect.NONE else tracked)
    expected = {
        Effect.NONE: state,
        Effect.INTERRUPT: SessionState.AWAIT_RESET,
        Effect.ABANDON: SessionState.ABANDONED,
    }
    assert session.state is expected[consequence.effect]
    assert session.tracker.episode_ids == (
        ("", "") if interrupted or not tracked else tuple(tracked)
    )


@pytest.mark.parametrize("late", [*KINDS, MalformedRequest])
@pytest.mark.parametrize(("state", "request_kind"), WORKED_ON)
def test_while_a_request_is_in_progress_nothing_else_is_taken(
    state: SessionState, request_kind: type[EnvRequest], late: type[EnvRequest | MalformedRequest]
) -> None:
    session = session_in(state)
    assert session.receive(request_of(request_kind), 0) is None
    intruder = MalformedRequest("late", "no") if late is MalformedRequest else request_of(late)  # type: ignore[arg-type]

    with pytest.raises(LocalProtocolError, match="in progress"):
        session.receive(intruder, 0)

    response = session.complete(OUTCOMES[request_kind], 0)
    assert not isinstance(response, EnvFailed)
    assert session.state is REQUESTS[state][request_kind]


@pytest.mark.parametrize("outcome_kind", WORK)
@pytest.mark.parametrize(("state", "request_kind"), WORKED_ON)
def test_only_an_outcome_of_its_own_kind_answers_a_request(
    state: SessionState, request_kind: type[EnvRequest], outcome_kind: type[EnvRequest]
) -> None:
    session = session_in(state)
    session.receive(request_of(request_kind), 0)

    if outcome_kind is request_kind:
        assert not isinstance(session.complete(OUTCOMES[outcome_kind], 0), EnvFailed)
        return
    with pytest.raises(LocalProtocolError, match=f"does not answer {request_kind.__name__}"):
        session.complete(OUTCOMES[outcome_kind], 0)


@pytest.mark.parametrize("outcome", [*OUTCOMES.values(), Failure(FailureKind.RAISED, "no")])
@pytest.mark.parametrize("state", SessionState)
def test_an_outcome_without_a_request_is_the_hosts_fault(
    state: SessionState, outcome: EnvOutcome
) -> None:
    session = session_in(state)

    with pytest.raises(LocalProtocolError, match="no request"):
        session.complete(outcome, 0)

    assert session.state is state


@pytest.mark.parametrize("state", SessionState)
def test_an_unreadable_frame_is_answered_and_changes_nothing(state: SessionState) -> None:
    session = session_in(state)
    ids = session.tracker.episode_ids

    response = session.receive(MalformedRequest("r", "not a JoinRequest"), 0)

    assert isinstance(response, EnvFailed)
    assert (response.request_id, response.message) == ("r", "not a JoinRequest")
    assert response.is_recoverable == (state in (SessionState.AWAIT_RESET, SessionState.READY))
    assert (session.state, session.tracker.episode_ids) == (state, ids)


@pytest.mark.parametrize("is_working", [False, True])
@pytest.mark.parametrize("state", SessionState)
def test_an_interrupted_stream_accepts_nothing_more(state: SessionState, is_working: bool) -> None:
    session = session_in(state)
    if is_working and Render in REQUESTS[state]:
        assert session.receive(Render("r"), 0) is None

    session.interrupt(0)

    assert session.state is SessionState.CLOSED
    assert session.tracker.episode_ids == ("", "")
    with pytest.raises(LocalProtocolError, match="no request"):
        session.complete(RenderOutcome(None), 0)


def test_a_step_before_the_first_reset_is_not_ready_and_recoverable() -> None:
    session = new_session()

    response = session.receive(Step("r", b""), 0)

    assert isinstance(response, EnvFailed)
    assert response.code is EnvErrorCode.NOT_READY
    assert response.is_recoverable
    assert response.message == "Step needs a Reset first"


def test_a_reset_gives_every_lane_an_episode_id() -> None:
    response = do(new_session(), Reset("r"), reset_outcome())

    assert isinstance(response, ResetDone)
    assert response.episode_ids == ("episode-0", "episode-1")


def test_an_ended_episode_is_reported_once_with_all_that_is_known_of_it() -> None:
    session = new_session()
    do(session, Reset("a", seeds=(11, 12)), reset_outcome(), now_ns=100)
    do(session, Step("b", b""), step_outcome((0.5, 9.0)), now_ns=150)

    response = do(session, Step("c", b""), step_outcome((1.0, 9.0), terminated=b"\1\0"), 200)

    assert isinstance(response, StepDone)
    (episode,) = response.completed_episodes
    assert (episode.episode_id, episode.env_index, episode.seed) == ("episode-0", 0, 11)
    assert (episode.step_count, episode.cumulative_reward) == (2, 1.5)
    assert (episode.terminated, episode.truncated) == (True, False)
    assert (episode.start_timestamp_ns, episode.end_timestamp_ns) == (100, 200)
    assert episode.final_info == {"why": "fell"}


def test_after_the_end_the_id_stays_empty_until_the_next_explicit_reset() -> None:
    session = new_session()
    do(session, Reset("a"), reset_outcome())
    ended = do(session, Step("b", b""), step_outcome(truncated=b"\0\1"))
    after_autoreset = do(session, Step("c", b""), step_outcome())
    ended_again = do(session, Step("d", b""), step_outcome(truncated=b"\0\1"))
    restarted = do(session, Reset("e", env_indices=(1,)), reset_outcome())

    assert isinstance(ended, StepDone)
    assert isinstance(after_autoreset, StepDone)
    assert isinstance(ended_again, StepDone)
    assert isinstance(restarted, ResetDone)
    assert ended.episode_ids == ("episode-0", "")
    assert after_autoreset.episode_ids == ("episode-0", "")
    assert ended_again.completed_episodes == ()
    assert restarted.episode_ids == ("episode-0", "episode-2")


def test_a_partial_reset_seeds_only_its_lanes() -> None:
    session = session_in(SessionState.READY)
    do(session, Reset("b", seeds=(5,), env_indices=(1,)), reset_outcome())

    closed = session.receive(Close("c"), 0)

    assert isinstance(closed, Closed)
    assert [episode.seed for episode in closed.final_episodes] == [None, 5]


def test_close_reports_the_running_episodes_as_neither_terminated_nor_truncated() -> None:
    session = session_in(SessionState.READY)

    response = session.receive(Close("c"), 9)

    assert isinstance(response, Closed)
    flags = [(episode.terminated, episode.truncated) for episode in response.final_episodes]
    assert flags == [(False, False), (False, False)]


@pytest.mark.parametrize(
    "request_",
    [
        Reset("r", seeds=(1,)),
        Reset("r", seeds=(1, 2, 3)),
        Reset("r", seeds=(1, 2), env_indices=(0,)),
        Reset("r", env_indices=(2,)),
        Reset("r", env_indices=(-1,)),
        Reset("r", env_indices=(0, 0)),
        Step("r", b"", env_indices=(0,)),
    ],
)
def test_wrong_arguments_are_refused_recoverably_and_change_nothing(request_: EnvRequest) -> None:
    session = session_in(SessionState.READY)
    ids = session.tracker.episode_ids

    response = session.receive(request_, 0)

    assert isinstance(response, EnvFailed)
    assert response.code is EnvErrorCode.INVALID_ACTION
    assert response.is_recoverable
    assert (session.state, session.tracker.episode_ids) == (SessionState.READY, ids)


def test_the_first_reset_must_reset_all_lanes() -> None:
    response = new_session().receive(Reset("r", env_indices=(0,)), 0)

    assert isinstance(response, EnvFailed)
    assert response.is_recoverable


def test_render_gives_no_frame_where_there_is_none() -> None:
    response = do(session_in(SessionState.READY), Render("r"), RenderOutcome(None))

    assert response == Rendered("r", None)
