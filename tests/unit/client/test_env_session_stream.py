"""The requests and answers of one session, over a stream that is made up."""

import threading
from typing import Any

import pytest

from rlmesh_ray.client.env_session_stream import EnvSessionStream
from rlmesh_ray.errors import (
    EndpointLostError,
    EndpointTimeoutError,
    RemoteEnvError,
    RlmeshError,
)
from rlmesh_ray.protocol.client_session import EnvClientSession, Limit
from rlmesh_ray.protocol.messages import Close, Closed, EnvErrorCode, EnvFailed, Rendered

LIMIT = Limit("step_timeout_s", 1.0)


class Stream:
    """Raises or returns what comes next."""

    def __init__(self, *outcomes: object) -> None:
        self._outcomes = list(outcomes)
        self.is_closed = False
        self.waited_s: list[float] = []
        self.sent: list[Any] = []

    def send(self, frame: Any) -> None:
        self.sent.append(frame)

    def receive(self, timeout_s: float) -> Any:
        self.waited_s.append(timeout_s)
        outcome = self._outcomes.pop(0)
        if isinstance(outcome, BaseException):
            raise outcome
        return outcome

    def close(self) -> None:
        self.is_closed = True


class Frames:
    """Messages that are their own frames."""

    def pack_request(self, request: Any, **_limits: Any) -> Any:
        return request

    def parse_response(self, frame: Any) -> Any:
        return frame


def session_over(stream: Any) -> EnvSessionStream:
    frames: Any = Frames()
    return EnvSessionStream(stream, frames, EnvClientSession(1, {}, "host:1"), 2**20)


def failed(*, is_recoverable: bool) -> EnvFailed:
    return EnvFailed("1", EnvErrorCode.INTERNAL, "broken", is_recoverable, "")


@pytest.mark.parametrize(
    ("outcome", "error"),
    [
        (EndpointTimeoutError("no answer within 1 s", "host:1"), EndpointTimeoutError),
        (failed(is_recoverable=False), RemoteEnvError),
    ],
)
def test_an_error_that_ends_the_session_is_named_by_all_that_follows(
    outcome: object, error: type[RlmeshError]
) -> None:
    session = session_over(Stream(outcome))
    with pytest.raises(error) as caught:
        session.receive("1", Rendered, LIMIT)

    for ask in (session.require_open, lambda: session.receive("2", Rendered, LIMIT)):
        with pytest.raises(EndpointLostError) as lost:
            ask()
        assert f"ended with an error ({caught.value})" in str(lost.value)


def test_an_error_of_the_endpoint_that_ends_the_session_closes_its_connection() -> None:
    ending, passing = Stream(failed(is_recoverable=False)), Stream(failed(is_recoverable=True))
    for stream in (ending, passing):
        with pytest.raises(RemoteEnvError):
            session_over(stream).receive("1", Rendered, LIMIT)

    assert (ending.is_closed, passing.is_closed) == (True, False)


@pytest.mark.parametrize(("timeout_s", "waited_s"), [(0.5, 1.0), (1.0, 2.0), (30.0, 31.0)])
def test_an_endpoint_that_is_busy_has_longer_to_answer_than_the_limit_that_the_error_names(
    timeout_s: float, waited_s: float
) -> None:
    late = EndpointTimeoutError(f"no answer within {waited_s:g} s", "host:1")
    stream = Stream(Rendered("1", None), late)
    session = session_over(stream)

    assert session.receive("1", Rendered, Limit("step_timeout_s", timeout_s)) == Rendered("1", None)
    with pytest.raises(EndpointTimeoutError, match=f"no answer within {timeout_s:g} s"):
        session.receive("2", Rendered, Limit("step_timeout_s", timeout_s))
    assert stream.waited_s == [waited_s, waited_s]
    with pytest.raises(EndpointLostError, match=f"no answer within {timeout_s:g} s"):
        session.require_open()


def test_what_is_left_of_a_limit_is_waited_for_and_the_limit_is_named() -> None:
    stream = Stream(EndpointTimeoutError("no answer within 1.5 s", "host:1"))

    with pytest.raises(EndpointTimeoutError, match="no answer within 10 s"):
        session_over(stream).receive("1", Rendered, Limit("step_timeout_s", 10.0), 0.5)
    assert stream.waited_s == [1.5]


def test_it_is_closed_also_where_no_thread_starts_unless_gRPC_may_be_locked(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refuse(_: threading.Thread) -> None:
        raise RuntimeError("can't create new thread at interpreter shutdown")

    monkeypatch.setattr(threading.Thread, "start", refuse)
    used, interrupted = Stream(Closed("1", ())), Stream(KeyboardInterrupt())
    session = session_over(interrupted)
    with pytest.raises(KeyboardInterrupt):
        session.receive("1", Rendered, LIMIT)

    session_over(used).close()
    session.close()

    assert (used.sent, used.is_closed) == ([Close("1")], True)
    assert (interrupted.sent, interrupted.is_closed) == ([], False)
