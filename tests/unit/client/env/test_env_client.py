"""The requests and answers of an EnvClient over a stream that is made up, and what it logs."""

import logging
import threading
from collections.abc import Callable
from typing import Any

import pytest

from rlmesh_ray.client.channel import ConnectOptions
from rlmesh_ray.client.env import env_client
from rlmesh_ray.client.env.env_client import EditionEnvClientDialect, EnvClient, reset_report
from rlmesh_ray.errors import (
    EndpointLostError,
    EndpointTimeoutError,
    RemoteEnvError,
    RlmeshError,
)
from rlmesh_ray.protocol.capabilities import PROTOCOL_V1
from rlmesh_ray.protocol.handshake import HandshakeResponse
from rlmesh_ray.protocol.messages import Close, Closed, EnvErrorCode, EnvFailed, Rendered
from rlmesh_ray.spaces.contract import AutoresetMode, EnvContract
from rlmesh_ray.spaces.spec import DiscreteSpec

OpenOver = Callable[..., EnvClient]
CONTRACT = EnvContract("one", DiscreteSpec(4), DiscreteSpec(2), 1, AutoresetMode.DISABLED)
TIMEOUT_S = 1.0


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


@pytest.fixture
def session_over(monkeypatch: pytest.MonkeyPatch) -> OpenOver:
    """Open a session over a stream that is made up."""
    answer = HandshakeResponse(True, PROTOCOL_V1, PROTOCOL_V1, "", (), {}, contract=CONTRACT)
    dialect: Any = EditionEnvClientDialect(CONTRACT)
    dialect.frames = Frames()
    agreed = answer, CONTRACT, (), dialect
    monkeypatch.setattr(env_client, "connect", lambda *_: (None, agreed))
    monkeypatch.setattr(env_client, "open_call", lambda *_: None)

    def open_over(stream: Any, step_timeout_s: float = TIMEOUT_S) -> EnvClient:
        monkeypatch.setattr(env_client, "JoinStream", lambda *_: stream)
        return EnvClient(ConnectOptions("host:1"), step_timeout_s=step_timeout_s)

    return open_over


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
    outcome: object, error: type[RlmeshError], session_over: OpenOver
) -> None:
    session = session_over(Stream(outcome))
    with pytest.raises(error) as caught:
        session.render()

    for ask in (session.render, session.send_reset, lambda: session.receive_reset("2")):
        with pytest.raises(EndpointLostError) as lost:
            ask()
        assert f"ended with an error ({caught.value})" in str(lost.value)


def test_an_error_of_the_endpoint_that_ends_the_session_closes_its_connection(
    session_over: OpenOver,
) -> None:
    ending, passing = Stream(failed(is_recoverable=False)), Stream(failed(is_recoverable=True))
    for stream in (ending, passing):
        with pytest.raises(RemoteEnvError):
            session_over(stream).render()

    assert (ending.is_closed, passing.is_closed) == (True, False)


@pytest.mark.parametrize(("timeout_s", "waited_s"), [(0.5, 1.0), (1.0, 2.0), (30.0, 31.0)])
def test_an_endpoint_that_is_busy_has_longer_to_answer_than_the_limit_that_the_error_names(
    timeout_s: float, waited_s: float, session_over: OpenOver
) -> None:
    late = EndpointTimeoutError(f"no answer within {waited_s:g} s", "host:1")
    stream = Stream(Rendered("1", None), late)
    session = session_over(stream, timeout_s)

    assert session.render() is None
    with pytest.raises(EndpointTimeoutError, match=f"no answer within {timeout_s:g} s"):
        session.render()
    assert stream.waited_s == [waited_s, waited_s]
    with pytest.raises(EndpointLostError, match=f"no answer within {timeout_s:g} s"):
        session.render()


def test_it_is_closed_also_where_no_thread_starts_unless_gRPC_may_be_locked(
    monkeypatch: pytest.MonkeyPatch, session_over: OpenOver
) -> None:
    def refuse(_: threading.Thread) -> None:
        raise RuntimeError("can't create new thread at interpreter shutdown")

    monkeypatch.setattr(threading.Thread, "start", refuse)
    used, interrupted = Stream(Closed("1", ())), Stream(KeyboardInterrupt())
    session = session_over(interrupted)
    with pytest.raises(KeyboardInterrupt):
        session.render()
    interrupted.sent.clear()

    session_over(used).close()
    session.close()

    assert (used.sent, used.is_closed) == ([Close("1")], True)
    assert (interrupted.sent, interrupted.is_closed) == ([], False)


def test_a_long_wait_for_resets_is_logged_less_and_less_often(
    caplog: pytest.LogCaptureFixture,
) -> None:
    now_s = 50.0
    report = reset_report(8, 300.0, lambda: now_s)
    caplog.set_level(logging.INFO, env_client.__name__)

    for tenth in range(30, 2000):
        now_s = 50.0 + tenth / 10
        report(50.0)

    assert [each.message for each in caplog.records] == [
        f"resetting 8 lane(s): {took} s so far (reset_timeout_s is 300 s)"
        for took in (3, 6, 12, 24, 48, 96, 156)
    ]


def test_many_short_waits_for_resets_are_logged_as_seldom_as_a_long_one(
    caplog: pytest.LogCaptureFixture,
) -> None:
    now_s = 0.0
    report = reset_report(8, 300.0, lambda: now_s)
    caplog.set_level(logging.INFO, env_client.__name__)

    for began_s in range(0, 300, 5):
        for took_s in (3, 4):
            now_s = float(began_s + took_s)
            report(began_s)

    assert len(caplog.records) == 9
