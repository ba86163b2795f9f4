"""What the released generation means: ids from the client, tracked autoresets, subsets."""

import itertools
from collections.abc import Callable
from dataclasses import replace

import pytest

from rlmesh_ray.dialects.released.protocol import ENV_RULES
from rlmesh_ray.protocol.env_session import (
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
    Configure,
    Configured,
    EnvErrorCode,
    EnvFailed,
    EnvRequest,
    EnvResponse,
    MalformedRequest,
    Render,
    Reset,
    ResetDone,
    Step,
    StepDone,
)
from tests.unit.protocol.counted_session import CountedSession

NUM_LANES = 3
REQUESTS = ENV_RULES.requests
KINDS: list[type[EnvRequest]] = [Configure, Reset, Step, Render, Close]
LEGAL = [(state, kind) for state, row in REQUESTS.items() for kind in row]
ILLEGAL = [pair for pair in itertools.product(SessionState, KINDS) if pair not in LEGAL]
WORK: list[type[EnvRequest]] = [Reset, Step, Render]
WORKED_ON = [(state, kind) for state, kind in LEGAL if kind in WORK]
FIRST = ResetOutcome(b"first", {})


def stepped(rewards: str = "111", ends: str = "...", num_lanes: int = NUM_LANES) -> StepOutcome:
    """Return an outcome; ``ends`` has ``t`` (terminated), ``x`` (truncated) or ``.`` by lane."""
    return StepOutcome(
        b"next",
        [float(reward) for reward in rewards[:num_lanes]],
        bytes(end == "t" for end in ends[:num_lanes]),
        bytes(end == "x" for end in ends[:num_lanes]),
        {},
    )


OUTCOMES: dict[type[EnvRequest], EnvOutcome] = {
    Reset: FIRST,
    Step: stepped(),
    Render: RenderOutcome(b"png"),
}


def request_of(kind: type[EnvRequest]) -> EnvRequest:
    if kind is Step:
        return Step("r", b"")
    if kind is Configure:
        return Configure("r", "2026.06")
    make: Callable[[str], EnvRequest] = kind  # the others need an id only
    return make("r")


def new_session(*, autoresets: bool = False, steps_subsets: bool = False) -> EnvSession:
    ids = map(str, itertools.count())
    return CountedSession(
        NUM_LANES,
        lambda: f"minted-{next(ids)}",
        ENV_RULES,
        autoresets=autoresets,
        steps_subsets=steps_subsets,
    )


def do(
    session: EnvSession, request: EnvRequest, outcome: EnvOutcome = FIRST, now_ns: int = 0
) -> EnvResponse:
    response = session.receive(request, now_ns)
    return response if response is not None else session.complete(outcome, now_ns)


def step(
    session: EnvSession,
    outcome: EnvOutcome,
    lanes: tuple[int, ...] = (),
    ids: tuple[str, ...] = (),
) -> StepDone:
    response = do(session, Step("s", b"", env_indices=lanes, episode_ids=ids), outcome)
    assert isinstance(response, StepDone), response
    return response


def refusal(session: EnvSession, request: EnvRequest, outcome: EnvOutcome = FIRST) -> EnvFailed:
    response = do(session, request, outcome)
    assert isinstance(response, EnvFailed), response
    return response


def session_in(state: SessionState) -> EnvSession:
    session = new_session()
    if state in (SessionState.READY, SessionState.ABANDONED):
        do(session, Reset("a", episode_ids=("a", "b", "c")))
    if state is SessionState.ABANDONED:
        do(session, Step("b", b""), Failure(FailureKind.BAD_OBSERVATION, "no"))
    if state is SessionState.CLOSED:
        session.receive(Close("c"), 0)
    assert session.state is state
    return session


# --- the tables ------------------------------------------------------------------------


def test_the_tables_know_every_state_request_and_failure() -> None:
    assert set(REQUESTS) == set(SessionState)
    assert {kind for row in REQUESTS.values() for kind in row} == set(KINDS)
    assert set(ENV_RULES.failures) == set(FailureKind)


@pytest.mark.parametrize(("state", "kind"), LEGAL)
def test_a_legal_request_moves_the_session_on(state: SessionState, kind: type[EnvRequest]) -> None:
    session = session_in(state)

    response = do(session, request_of(kind), OUTCOMES.get(kind, FIRST))

    assert session.state is REQUESTS[state][kind]
    assert not isinstance(response, EnvFailed)
    assert response.request_id == "r"


@pytest.mark.parametrize(("state", "kind"), ILLEGAL)
def test_an_illegal_request_is_refused_and_changes_nothing(
    state: SessionState, kind: type[EnvRequest]
) -> None:
    session = session_in(state)
    ids = session.tracker.episode_ids

    response = refusal(session, request_of(kind))

    is_usable = state is SessionState.AWAIT_RESET
    assert response.is_recoverable == is_usable
    assert response.code is (EnvErrorCode.NOT_READY if is_usable else EnvErrorCode.CLOSED)
    assert (session.state, session.tracker.episode_ids) == (state, ids)


@pytest.mark.parametrize("kind", FailureKind)
@pytest.mark.parametrize(("state", "request_kind"), WORKED_ON)
def test_each_failure_is_answered_as_the_rules_say(
    kind: FailureKind, state: SessionState, request_kind: type[EnvRequest]
) -> None:
    session = session_in(state)
    consequence = ENV_RULES.failures[kind]
    if request_kind is Render and kind in (FailureKind.RAISED, FailureKind.TIMEOUT):
        consequence = replace(consequence, effect=Effect.NONE)
    tracked = [episode_id for episode_id in session.tracker.episode_ids if episode_id]

    response = refusal(session, request_of(request_kind), Failure(kind, "why", "trace"))

    assert (response.code, response.message, response.debug_info) == (
        consequence.code,
        "why",
        "trace",
    )
    assert response.is_recoverable == (consequence.effect is not Effect.ABANDON)
    interrupted = [record.episode_id for record in response.interrupted_episodes]
    assert interrupted == ([] if consequence.effect is Effect.NONE else tracked)
    assert all(record.truncated for record in response.interrupted_episodes)
    expected = {
        Effect.NONE: state,
        Effect.INTERRUPT: SessionState.AWAIT_RESET,
        Effect.INTERRUPT_OWN: SessionState.AWAIT_RESET,
        Effect.ABANDON: SessionState.ABANDONED,
    }
    assert session.state is expected[consequence.effect]


@pytest.mark.parametrize(
    ("kind", "code", "is_recoverable"),
    [
        (FailureKind.BAD_ACTION, EnvErrorCode.INVALID_ACTION, True),
        (FailureKind.BAD_REQUEST, EnvErrorCode.INVALID_ACTION, True),
        (FailureKind.RAISED, EnvErrorCode.INTERNAL, True),
        (FailureKind.CRASHED, EnvErrorCode.CRASHED, True),
        (FailureKind.TIMEOUT, EnvErrorCode.TIMEOUT, True),
        (FailureKind.BAD_OBSERVATION, EnvErrorCode.INTERNAL, False),
    ],
)
def test_only_bad_observations_cannot_be_recovered_from(
    kind: FailureKind, code: EnvErrorCode, is_recoverable: bool
) -> None:
    response = refusal(session_in(SessionState.READY), Step("r", b""), Failure(kind, "why"))

    assert (response.code, response.is_recoverable) == (code, is_recoverable)


def test_a_bad_action_changes_nothing() -> None:
    session = session_in(SessionState.READY)

    refusal(session, Step("r", b""), Failure(FailureKind.BAD_ACTION, "no"))
    done = step(session, stepped(ends="t.."))

    assert [record.step_count for record in done.completed_episodes] == [1]
    assert session.tracker.episode_ids == ("", "b", "c")


@pytest.mark.parametrize("state", SessionState)
def test_an_unreadable_frame_is_answered_and_changes_nothing(state: SessionState) -> None:
    session = session_in(state)

    response = session.receive(MalformedRequest("r", "no"), 0)

    assert isinstance(response, EnvFailed)
    assert response.is_recoverable == (state in (SessionState.AWAIT_RESET, SessionState.READY))
    assert session.state is state


# --- Configure -------------------------------------------------------------------------


@pytest.mark.parametrize("edition", ["2026.06", "", "2026.06-0.1.0-rc.5"])
def test_the_edition_may_be_named_again_and_again(edition: str) -> None:
    session = new_session()

    for _ in range(2):
        assert do(session, Configure("r", edition)) == Configured("r")
        do(session, Reset("a", episode_ids=("a", "b", "c")))

    assert session.tracker.episode_ids == ("a", "b", "c")


@pytest.mark.parametrize("edition", ["2099.01", "2026.0", "2026.061", "-2026.06", " "])
@pytest.mark.parametrize("state", [SessionState.AWAIT_RESET, SessionState.READY])
def test_an_unknown_edition_ends_the_session(state: SessionState, edition: str) -> None:
    session = session_in(state)
    tracked = [episode_id for episode_id in session.tracker.episode_ids if episode_id]

    response = refusal(session, Configure("r", edition))

    assert response.code is EnvErrorCode.INVALID_ACTION
    assert not response.is_recoverable
    assert "2026.06" in response.message
    assert [record.episode_id for record in response.interrupted_episodes] == tracked
    assert session.state is SessionState.ABANDONED


# --- ids and seeds ---------------------------------------------------------------------


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (("a", "b", "c"), ("a", "b", "c")),
        ((), ("minted-0", "minted-1", "minted-2")),
        (("a", "", "c"), ("a", "minted-0", "c")),
        (("a",), ("a", "minted-0", "minted-1")),
        (("a", "b", "c", "d"), ("a", "b", "c")),
    ],
)
def test_episodes_have_the_client_s_ids_where_it_gives_any(
    given: tuple[str, ...], expected: tuple[str, ...]
) -> None:
    done = do(new_session(), Reset("r", episode_ids=given))

    assert isinstance(done, ResetDone)
    assert done.episode_ids == expected


def test_ids_of_steps_name_nothing_while_no_episode_begins() -> None:
    session = session_in(SessionState.READY)

    done = step(session, stepped(), ids=("x", "y", "z"))

    assert done.episode_ids == ("a", "b", "c")


def test_one_seed_counts_up_over_the_lanes() -> None:
    session = new_session()
    session.receive(Reset("r", seeds=(5,)), 0)

    assert isinstance(session.pending, Reset)
    assert session.pending.seeds == (5, 6, 7)
    session.complete(FIRST, 0)
    assert [episode and episode.seed for episode in session.tracker.episodes] == [5, 6, 7]


def test_one_seed_for_one_named_lane_is_its_own() -> None:
    session = new_session(steps_subsets=True)

    session.receive(Reset("r", seeds=(5,), env_indices=(1,)), 0)

    assert isinstance(session.pending, Reset)
    assert session.pending.seeds == (5,)


@pytest.mark.parametrize(
    ("seeds", "lanes"),
    [((1, 2), ()), ((1, 2, 3, 4), ()), ((1,), (0, 2)), ((1, 2), (0,)), ((2**63 - 2,), ())],
)
def test_seeds_that_fit_no_lanes_are_refused_recoverably(
    seeds: tuple[int, ...], lanes: tuple[int, ...]
) -> None:
    session = new_session(steps_subsets=True)

    response = refusal(session, Reset("r", seeds=seeds, env_indices=lanes))

    assert (response.code, response.is_recoverable) == (EnvErrorCode.INVALID_ACTION, True)
    assert session.state is SessionState.AWAIT_RESET


# --- autoresets ------------------------------------------------------------------------


def test_the_step_that_resets_a_lane_begins_an_episode_with_the_client_s_id() -> None:
    session = new_session(autoresets=True)
    do(session, Reset("a", seeds=(7, 8, 9), episode_ids=("a", "b", "c")))
    ended = step(session, stepped("123", "t.x"), ids=("a", "b", "c"))

    rolled = step(session, stepped("050"), ids=("d", "b", ""))
    again = step(session, stepped("446", "t.t"))

    assert ended.episode_ids == ("", "b", "")
    assert rolled.completed_episodes == ()
    assert rolled.episode_ids == ("d", "b", "minted-0")
    reported = [
        (record.episode_id, record.seed, record.step_count, record.cumulative_reward)
        for record in (*ended.completed_episodes, *again.completed_episodes)
    ]
    assert reported == [
        ("a", 7, 1, 1.0),
        ("c", 9, 1, 3.0),
        ("d", None, 1, 4.0),
        ("minted-0", None, 1, 6.0),
    ]


@pytest.mark.parametrize("roll", [stepped("100"), stepped("000", "t.."), stepped("000", "x..")])
def test_an_environment_that_rolls_wrongly_ends_the_session(roll: StepOutcome) -> None:
    session = new_session(autoresets=True)
    do(session, Reset("a", episode_ids=("a", "b", "c")))
    step(session, stepped("111", "t.."))

    response = refusal(session, Step("r", b""), roll)

    assert response.request_id == "r"
    assert (response.code, response.is_recoverable) == (EnvErrorCode.INTERNAL, False)
    assert "lane 0" in response.message
    # What has happened in the other lanes on that step does not count.
    reported = [(record.episode_id, record.step_count) for record in response.interrupted_episodes]
    assert reported == [("b", 1), ("c", 1)]
    assert session.state is SessionState.ABANDONED


def test_a_lane_that_rolls_wrongly_is_found_behind_lanes_that_go_on() -> None:
    session = new_session(autoresets=True)
    do(session, Reset("a", episode_ids=("a", "b", "c")))
    step(session, stepped("111", "..t"))

    assert "lane 2" in refusal(session, Step("r", b""), stepped("001")).message


def test_a_lane_that_has_ended_may_be_stepped_on_where_nothing_resets_it() -> None:
    session = session_in(SessionState.READY)
    step(session, stepped("111", "t.."))

    on = step(session, stepped("911", "t.."), ids=("d", "", ""))

    assert on.completed_episodes == ()
    assert on.episode_ids == ("", "b", "c")


# --- episodes that are cut off ---------------------------------------------------------


def test_an_episode_that_a_reset_ends_comes_first_with_the_next_step() -> None:
    session = session_in(SessionState.READY)
    step(session, stepped("100"))
    do(session, Reset("b", episode_ids=("d", "e", "f")))
    do(session, Reset("c", episode_ids=("g", "h", "i")))

    done = step(session, stepped("111", "..t"))
    after = step(session, stepped())

    reported = [(record.episode_id, record.step_count) for record in done.completed_episodes]
    assert reported == [("a", 1), ("b", 1), ("c", 1), ("d", 0), ("e", 0), ("f", 0), ("i", 1)]
    assert [record.truncated for record in done.completed_episodes] == [True] * 6 + [False]
    assert not any(record.final_info for record in done.completed_episodes)
    assert after.completed_episodes == ()


def test_an_episode_that_has_ended_is_not_ended_by_a_reset() -> None:
    session = session_in(SessionState.READY)
    step(session, stepped("111", "tt."))
    do(session, Reset("b", episode_ids=("d", "e", "f")))

    assert [record.episode_id for record in step(session, stepped()).completed_episodes] == ["c"]


def test_a_client_that_only_resets_fills_no_memory() -> None:
    session = new_session()
    for number in range(100):
        do(session, Reset("r", episode_ids=tuple(f"{number}-{lane}" for lane in range(3))))

    reported = [record.episode_id for record in step(session, stepped()).completed_episodes]

    assert len(reported) == 100
    assert reported[-1] == "98-2"


def test_close_tells_of_what_runs_and_of_what_resets_have_ended() -> None:
    session = session_in(SessionState.READY)
    do(session, Reset("b", episode_ids=("d", "e", "f")))

    closed = do(session, Close("c"))

    assert isinstance(closed, Closed)
    assert [record.episode_id for record in closed.final_episodes] == list("abcdef")
    assert all(record.truncated and not record.terminated for record in closed.final_episodes)


# --- subsets ---------------------------------------------------------------------------


def test_a_subset_is_answered_as_wide_as_it_is() -> None:
    session = new_session(steps_subsets=True)

    reset = do(session, Reset("a", env_indices=(2, 0), episode_ids=("c", "a")))
    done = step(session, stepped("34", "t.", 2), lanes=(2, 0))

    assert isinstance(reset, ResetDone)
    assert reset.episode_ids == ("c", "a")
    assert (done.env_indices, done.episode_ids) == ((2, 0), ("", "a"))
    (record,) = done.completed_episodes
    assert (record.episode_id, record.env_index, record.cumulative_reward) == ("c", 2, 3.0)
    assert session.tracker.episode_ids == ("a", "", "")


def test_a_subset_s_step_tells_only_of_its_lanes() -> None:
    session = new_session(steps_subsets=True)
    do(session, Reset("a", episode_ids=("a", "b", "c")))
    do(session, Reset("b", env_indices=(0, 1), episode_ids=("d", "e")))

    of_one = step(session, stepped(num_lanes=1), lanes=(1,))
    of_all = step(session, stepped())

    assert [record.episode_id for record in of_one.completed_episodes] == ["b"]
    assert [record.episode_id for record in of_all.completed_episodes] == ["a"]


@pytest.mark.parametrize(("lanes", "missing"), [((), "[0, 2]"), ((0, 1), "[0]"), ((2,), "[2]")])
def test_a_lane_that_has_never_been_reset_is_not_ready(
    lanes: tuple[int, ...], missing: str
) -> None:
    session = new_session(steps_subsets=True)
    do(session, Reset("a", env_indices=(1,)))

    response = refusal(session, Step("r", b"", env_indices=lanes))

    assert (response.code, response.is_recoverable) == (EnvErrorCode.NOT_READY, True)
    assert missing in response.message
    assert step(session, stepped(num_lanes=1), lanes=(1,)).rewards == [1.0]


def test_what_raises_in_some_lanes_interrupts_only_these() -> None:
    session = new_session(steps_subsets=True)
    do(session, Reset("a", episode_ids=("a", "b", "c")))

    failed = refusal(session, Step("r", b"", env_indices=(1,)), Failure(FailureKind.RAISED, "boom"))

    assert [record.episode_id for record in failed.interrupted_episodes] == ["b"]
    assert failed.is_recoverable
    assert session.tracker.episode_ids == ("a", "", "c")
    assert step(session, stepped(num_lanes=2), lanes=(0, 2)).env_indices == (0, 2)
    response = refusal(session, Step("r", b"", env_indices=(1,)))
    assert response.code is EnvErrorCode.NOT_READY
    do(session, Reset("b", env_indices=(1,)))
    assert step(session, stepped()).completed_episodes == ()


@pytest.mark.parametrize("kind", [FailureKind.CRASHED, FailureKind.TIMEOUT])
def test_a_worker_that_is_gone_takes_all_lanes_along(kind: FailureKind) -> None:
    session = new_session(steps_subsets=True)
    do(session, Reset("a", episode_ids=("a", "b", "c")))

    failed = refusal(session, Step("r", b"", env_indices=(1,)), Failure(kind, "gone"))

    assert [record.episode_id for record in failed.interrupted_episodes] == ["a", "b", "c"]
    assert session.state is SessionState.AWAIT_RESET


@pytest.mark.parametrize(
    "request_", [Reset("r", env_indices=(1,)), Step("r", b"", env_indices=(2, 1, 0))]
)
def test_lanes_that_go_together_are_not_supported_alone(request_: EnvRequest) -> None:
    session = session_in(SessionState.READY)

    response = refusal(session, request_)

    assert (response.code, response.is_recoverable) == (EnvErrorCode.UNSUPPORTED, True)
    assert session.tracker.episode_ids == ("a", "b", "c")


def test_all_lanes_by_name_are_all_lanes() -> None:
    session = new_session(autoresets=True)

    do(session, Reset("a", env_indices=(0, 1, 2), episode_ids=("a", "b", "c")))
    step(session, stepped("111", ".t."), lanes=(0, 1, 2))
    rolled = step(session, stepped("000"), lanes=(0, 1, 2), ids=("", "d", ""))

    assert rolled.episode_ids == ("a", "d", "c")


@pytest.mark.parametrize("lanes", [(3,), (-1,), (0, 0), (0, 1, 2, 3)])
@pytest.mark.parametrize("steps_subsets", [False, True])
def test_lanes_that_are_none_are_refused_recoverably(
    lanes: tuple[int, ...], steps_subsets: bool
) -> None:
    session = new_session(steps_subsets=steps_subsets)
    do(session, Reset("a"))

    for request in (
        Reset("r", env_indices=lanes),
        Step("r", b"", env_indices=lanes),
        Render("r", env_indices=lanes),
    ):
        response = refusal(session, request)
        assert (response.code, response.is_recoverable) == (EnvErrorCode.INVALID_ACTION, True)
    assert session.state is SessionState.READY


@pytest.mark.parametrize(
    "request_",
    [
        Reset("r", env_indices=tuple(range(1, 100_000))),
        Step("r", b"", env_indices=(1,) * 100_000),
        Configure("r", "\0" * 100_000),
    ],
)
def test_a_refusal_does_not_repeat_all_that_the_client_has_said(request_: EnvRequest) -> None:
    session = session_in(SessionState.READY)

    assert len(refusal(session, request_).message) < 1000


def test_a_refusal_names_the_first_of_many_lanes() -> None:
    session = CountedSession(1000, lambda: "minted", ENV_RULES, steps_subsets=True)
    do(session, Reset("a", env_indices=(7,)))

    message = refusal(session, Step("r", b"")).message

    assert "lanes [0, 1, 2, 3, 4, 5, 6, 8," in message
    assert message.endswith("…] first")
    assert len(message) < 200
