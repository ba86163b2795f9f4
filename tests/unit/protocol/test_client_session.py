"""What a client may send in one session, and what the replies mean."""

import pickle
from collections.abc import Mapping

import pytest

from rlmesh_ray.errors import (
    ConfigurationError,
    EndpointClosedError,
    EndpointError,
    EndpointLostError,
    EndpointTimeoutError,
    LocalProtocolError,
    RemoteEnvError,
    RemoteModelError,
    RemoteProtocolError,
)
from rlmesh_ray.protocol import capabilities
from rlmesh_ray.protocol.client_session import (
    EnvClientSession,
    Limit,
    ModelClientSession,
    is_still_starting,
    name_limit,
    timeout_error,
)
from rlmesh_ray.protocol.env_session import NOT_STARTED
from rlmesh_ray.protocol.messages import (
    EnvErrorCode,
    EnvFailed,
    ModelErrorCode,
    ModelFailed,
    Rendered,
    ResetDone,
)

ADDRESS = "127.0.0.1:7"
LOST = EndpointTimeoutError("no answer", ADDRESS)


def env_session(offered: Mapping[str, str] | None = None) -> EnvClientSession:
    return EnvClientSession(3, offered or {}, ADDRESS)


def failed(*, is_recoverable: bool) -> EnvFailed:
    message = "no result within 2700 ms"
    return EnvFailed("1", EnvErrorCode.TIMEOUT, message, is_recoverable, "the worker's stack")


REMEDY = "; raise reset_timeout_s (--reset-timeout of train and evaluate)"


@pytest.mark.parametrize(
    ("message", "expected"),
    [
        (
            "no result within 2700 ms: the reset of 2 lanes, of which 1 had been reset",
            "no result within 3 s: the reset of 2 lanes, of which 1 had been reset" + REMEDY,
        ),
        ("no result within 450 ms", "no result within 3 s" + REMEDY),  # what was left of it
        ("no result within 12700 ms", "no result within 12700 ms"),  # of the endpoint's own
        ("the wheel turned for 27 s", "the wheel turned for 27 s"),
        (f"{NOT_STARTED} 2700 ms", f"{NOT_STARTED} 3 s"),
    ],
)
def test_a_timeout_names_the_limit_that_the_user_has_set_and_no_other(
    message: str, expected: str
) -> None:
    error = RemoteEnvError("TIMEOUT", message, True)

    name_limit(error, Limit("reset_timeout_s", 3.0), 0.5)

    assert error.message == expected


@pytest.mark.parametrize(
    ("error", "option", "message"),
    [
        (timeout_error(4.0, ADDRESS), "reset_timeout_s", "no answer within 3 s" + REMEDY),
        (timeout_error(4.0, ADDRESS), "", "no answer within 3 s"),
        (EndpointTimeoutError("not ready", ADDRESS), "reset_timeout_s", "not ready"),
        (EndpointLostError("lost within 3 s", ADDRESS), "reset_timeout_s", "lost within 3 s"),
    ],
)
def test_a_wait_without_an_answer_names_its_limit_alone(
    error: EndpointError, option: str, message: str
) -> None:
    name_limit(error, Limit(option, 3.0))

    assert error.message == message
    assert pickle.loads(pickle.dumps(error)).message == message


def test_a_reply_of_the_expected_kind_is_returned_as_it_is() -> None:
    reply = Rendered("1", b"png")

    assert env_session().accept(reply, "1", Rendered) is reply


@pytest.mark.parametrize("is_recoverable", [True, False])
def test_an_error_ends_the_session_unless_the_endpoint_calls_it_recoverable(
    is_recoverable: bool,
) -> None:
    session = env_session()

    with pytest.raises(RemoteEnvError, match="no result within 2700 ms") as caught:
        session.accept(failed(is_recoverable=is_recoverable), "1", ResetDone)

    assert caught.value.code == "TIMEOUT"
    assert caught.value.is_recoverable == is_recoverable
    assert caught.value.debug_info == "the worker's stack"
    if is_recoverable:
        session.require_open()
    else:
        with pytest.raises(EndpointLostError, match=r"ended with an error .*no result"):
            session.require_open()


@pytest.mark.parametrize(
    ("reply", "reason"),
    [
        (Rendered("2", b""), "is for request '2'"),
        (Rendered("1", b""), "Rendered does not answer"),
        (EnvFailed("9", EnvErrorCode.BUSY, "", True), "request '9'"),
    ],
)
def test_a_reply_to_another_request_ends_the_session(
    reply: Rendered | EnvFailed, reason: str
) -> None:
    session = env_session()

    with pytest.raises(RemoteProtocolError, match=reason) as caught:
        session.accept(reply, "1", ResetDone)

    assert caught.value.request_id == "1"
    with pytest.raises(EndpointLostError):
        session.require_open()


def test_only_a_foreign_exception_in_the_middle_of_a_request_ends_the_session() -> None:
    session = env_session()

    session.fail_if_interrupted(LOST)
    session.require_open()
    session.fail_if_interrupted(KeyboardInterrupt())

    with pytest.raises(EndpointLostError, match="KeyboardInterrupt came in the middle"):
        session.require_open()


def test_the_first_error_is_the_one_that_ended_the_session() -> None:
    session = env_session()
    session.fail(LOST)
    session.broken("nonsense", "1")

    with pytest.raises(EndpointLostError, match="no answer") as caught:
        session.require_open()

    assert caught.value.__cause__ is LOST


def test_a_closed_session_says_that_it_is_closed_after_every_kind_of_end() -> None:
    session = env_session()
    session.fail(LOST)
    session.close()

    with pytest.raises(EndpointClosedError):
        session.require_open()


def test_a_reset_names_its_lanes_only_where_the_endpoint_can_reset_some() -> None:
    able = env_session({capabilities.PARTIAL_RESET: ""})

    assert able.lanes_to_reset([2, 0]) == (2, 0)
    assert able.lanes_to_reset([0, 1, 2]) == env_session().lanes_to_reset(range(3)) == ()
    assert env_session().lanes_to_reset(()) == ()
    with pytest.raises(ConfigurationError, match="resets all of its 3 lanes or none"):
        env_session().lanes_to_reset([1])


def test_a_call_needs_the_operators_leave_and_a_session_that_the_endpoint_knows() -> None:
    session = env_session({capabilities.LANE_CALLS: "set_level,score"})

    with pytest.raises(ConfigurationError, match=r"'jump' .* only set_level,score; have its"):
        session.require_call("jump")
    with pytest.raises(ConfigurationError, match=r"lets clients call nothing .*--allow-call score"):
        env_session().require_call("score")
    assert not session.require_call("score")
    session.num_sent = 1
    with pytest.raises(LocalProtocolError, match="receive the answer to the first request"):
        session.require_call("score")
    session.num_received = 1
    assert session.require_call("score")


def test_requests_are_unanswered_until_all_their_replies_have_come() -> None:
    session = env_session()

    session.num_sent = 2
    session.num_received = 1
    assert session.has_unanswered
    session.num_received = 2
    assert not session.has_unanswered


def test_an_environment_that_has_not_started_is_distinguished_from_one_that_hangs() -> None:
    starting = RemoteEnvError("TIMEOUT", f"{NOT_STARTED} 3 s", True)

    assert is_still_starting(starting)
    assert not is_still_starting(RemoteEnvError("TIMEOUT", "no result within 3 s", True))
    assert not is_still_starting(RemoteEnvError("CRASHED", f"{NOT_STARTED} 3 s", True))


def test_a_model_session_that_an_error_has_ended_takes_close_and_nothing_else() -> None:
    session = ModelClientSession(ADDRESS)
    error = session.error_of(
        ModelFailed("1", ModelErrorCode.INTERNAL, "no weights", is_recoverable=False)
    )

    assert isinstance(error, RemoteModelError)
    session.require_open(to_close=True)
    with pytest.raises(EndpointLostError, match="no weights"):
        session.require_open()


def test_a_model_session_whose_stream_is_lost_raises_what_lost_it() -> None:
    session = ModelClientSession(ADDRESS)

    assert session.lose(LOST) is LOST
    for to_close in (False, True):
        with pytest.raises(EndpointTimeoutError, match="no answer"):
            session.require_open(to_close=to_close)


def test_a_stream_that_ends_after_close_is_no_loss() -> None:
    session = ModelClientSession(ADDRESS)
    session.close()

    assert isinstance(session.lose(LOST), EndpointClosedError)
    with pytest.raises(EndpointClosedError):
        session.require_open()
