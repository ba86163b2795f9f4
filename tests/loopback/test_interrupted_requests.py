"""What becomes of a session when its client's thread leaves a request in the middle."""

import contextlib
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rlmesh_ray import EnvServer
from rlmesh_ray.client.channel import ConnectOptions
from rlmesh_ray.client.env.env_client import EnvClient, StepResult
from rlmesh_ray.client.join_stream import JoinStream
from rlmesh_ray.errors import EndpointError, EndpointLostError
from rlmesh_ray.polling import AdaptivePoller
from rlmesh_ray.transport.direct_sockets import EventfdSocket
from tests.loopback.eventually import entered
from tests.loopback.lifelike import Gated

NOTHING = [np.zeros(1, np.int64)]


class Interruption(Exception):
    """What a signal's handler raises, as that of Ctrl-C does."""


@contextlib.contextmanager
def interrupted(has_entered: threading.Event) -> Iterator[None]:
    """Have an exception raised in this thread, which must be the main one, once it is there."""

    def interrupt(*_: object) -> None:
        raise Interruption

    own = threading.get_ident()

    def send() -> None:
        if has_entered.wait(60.0):
            signal.pthread_kill(own, signal.SIGUSR1)

    former = signal.signal(signal.SIGUSR1, interrupt)
    sender = threading.Thread(target=send)
    sender.start()
    try:
        with pytest.raises(Interruption):
            yield
    finally:
        sender.join()
        signal.signal(signal.SIGUSR1, former)


@pytest.mark.parametrize(
    ("transport", "waits"),
    [
        ("shared_memory", (AdaptivePoller, "wait_readable")),
        ("tcp", (AdaptivePoller, "wait_readable")),
        ("grpc", (JoinStream, "receive")),
    ],
)
def test_nothing_is_asked_any_more_after_a_request_that_was_left_in_the_middle(
    tmp_path: Path, transport: str, waits: tuple[type, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    gate = tmp_path / "gate"
    with EnvServer(lambda: Gated(str(gate))) as server:
        client = EnvClient(ConnectOptions(server.address), transport=transport)
        client.reset()
        step = client.send_step(NOTHING)
        with interrupted(entered(monkeypatch, *waits)):
            client.receive_step(step)
        gate.touch()

        # Its answer would be taken for another's, or the step be repeated beside the new one.
        for ask in (client.reset, lambda: client.step(NOTHING)):
            with pytest.raises(EndpointLostError, match="Interruption came in the middle"):
                ask()
        client.close()


def test_closing_a_session_in_mid_step_takes_no_descriptor_from_the_thread_that_waits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    were_open: list[bool] = []
    receive = EventfdSocket.receive

    def note(socket: EventfdSocket, places: Sequence[memoryview], num_received: int) -> int:
        were_open.append(socket.connection.fileno() >= 0)
        return receive(socket, places, num_received)

    monkeypatch.setattr(EventfdSocket, "receive", note)
    with EnvServer(lambda: Gated(str(tmp_path / "gate")), _step_grace_s=0.1) as server:
        client = EnvClient(ConnectOptions(server.address), transport="shared_memory")
        client.reset()
        step = client.send_step(NOTHING)
        outcome: Future[StepResult] = Future()
        is_waiting = entered(monkeypatch, AdaptivePoller, "wait_readable")
        waiter = threading.Thread(target=resolve, args=(outcome, client.receive_step, step))
        waiter.start()
        assert is_waiting.wait(60.0)
        client.close()

        assert isinstance(outcome.exception(30.0), EndpointError)
        assert were_open == [True, True]  # before it waited, and when it woke up
        waiter.join()


def resolve(future: "Future[Any]", function: Callable[..., Any], *arguments: Any) -> None:
    try:
        future.set_result(function(*arguments))
    except EndpointError as error:
        future.set_exception(error)
