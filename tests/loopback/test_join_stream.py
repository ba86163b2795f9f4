"""The client's stream against servers that misbehave."""

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from threading import Event
from typing import Any

import grpc
import pytest

from rlmesh_ray.client.join_stream import JoinStream
from rlmesh_ray.errors import (
    AccessDeniedError,
    CapacityError,
    EndpointClosedError,
    EndpointError,
    EndpointLostError,
    EndpointTimeoutError,
    EndpointUnreachableError,
)

PATH = "/test.Service/Join"
Handler = Callable[[Iterator[bytes], Any], Iterator[bytes]]
Serve = Callable[[Handler], JoinStream]


@pytest.fixture
def serve() -> Iterator[Serve]:
    """Start a server with the given handler and return a stream to it."""
    server = grpc.server(ThreadPoolExecutor(2))
    streams: list[JoinStream] = []
    channels: list[grpc.Channel] = []

    def start(handler: Handler) -> JoinStream:
        methods = {"Join": grpc.stream_stream_rpc_method_handler(handler)}
        server.add_generic_rpc_handlers(
            (grpc.method_handlers_generic_handler("test.Service", methods),)
        )
        port = server.add_insecure_port("127.0.0.1:0")
        server.start()
        channels.append(grpc.insecure_channel(f"127.0.0.1:{port}"))
        streams.append(JoinStream(channels[-1], PATH, (), f"127.0.0.1:{port}"))
        return streams[-1]

    yield start
    for stream in streams:
        stream.close()
    for channel in channels:
        channel.close()
    server.stop(0).wait()


def echo(requests: Iterator[bytes], _context: Any) -> Iterator[bytes]:
    yield from requests


def abort_with(code: grpc.StatusCode) -> Handler:
    def handler(_requests: Iterator[bytes], context: Any) -> Iterator[bytes]:
        context.abort(code, "because")
        yield b""

    return handler


def test_frames_come_back_in_order(serve: Serve) -> None:
    stream = serve(echo)

    for frame in (b"a", b"b", b"c"):
        stream.send(frame)

    assert [stream.receive(5.0) for _ in range(3)] == [b"a", b"b", b"c"]


def test_a_mute_server_is_given_up_at_the_deadline(serve: Serve) -> None:
    done = Event()

    def mute(requests: Iterator[bytes], context: Any) -> Iterator[bytes]:
        context.add_callback(done.set)
        done.wait(10.0)
        yield from ()

    stream = serve(mute)
    stream.send(b"a")

    with pytest.raises(EndpointTimeoutError, match=r"no answer within 0\.2 s"):
        stream.receive(0.2)


def test_a_server_that_ends_the_stream_has_lost_the_session(serve: Serve) -> None:
    def leave(_requests: Iterator[bytes], _context: Any) -> Iterator[bytes]:
        yield b"bye"

    stream = serve(leave)

    assert stream.receive(5.0) == b"bye"
    with pytest.raises(EndpointLostError, match="ended the session"):
        stream.receive(5.0)


@pytest.mark.parametrize(
    ("code", "error"),
    [
        (grpc.StatusCode.UNAUTHENTICATED, AccessDeniedError),
        (grpc.StatusCode.RESOURCE_EXHAUSTED, CapacityError),
        (grpc.StatusCode.DEADLINE_EXCEEDED, EndpointTimeoutError),
        (grpc.StatusCode.UNIMPLEMENTED, EndpointUnreachableError),
        (grpc.StatusCode.UNAVAILABLE, EndpointUnreachableError),
        (grpc.StatusCode.INTERNAL, EndpointLostError),
        (grpc.StatusCode.UNKNOWN, EndpointLostError),
    ],
)
def test_each_status_becomes_an_error_of_ours(
    serve: Serve, code: grpc.StatusCode, error: type[EndpointError]
) -> None:
    stream = serve(abort_with(code))

    with pytest.raises(error) as caught:
        stream.receive(5.0)

    assert type(caught.value) is error
    assert isinstance(caught.value.__cause__, grpc.RpcError)


def test_a_session_that_breaks_after_an_answer_is_lost_not_unreachable(serve: Serve) -> None:
    def break_down(requests: Iterator[bytes], context: Any) -> Iterator[bytes]:
        yield next(requests)
        context.abort(grpc.StatusCode.UNAVAILABLE, "going down")

    stream = serve(break_down)
    stream.send(b"a")
    stream.receive(5.0)

    with pytest.raises(EndpointLostError):
        stream.receive(5.0)


def test_a_closed_stream_refuses_to_send(serve: Serve) -> None:
    stream = serve(echo)
    stream.close()
    stream.close()

    with pytest.raises(EndpointClosedError):
        stream.send(b"a")


FORK = """
import os, threading
from rlmesh_ray.client.join_stream import Deadline

class Call:
    def __init__(self):
        self.cancelled = threading.Event()
    def cancel(self):
        self.cancelled.set()

with Deadline(60.0, Call()):
    pass
if os.fork() == 0:
    call = Call()
    with Deadline(0.2, call):
        os._exit(0 if call.cancelled.wait(20) else 1)
print(os.waitstatus_to_exitcode(os.wait()[1]))
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this platform does not fork")
def test_deadlines_work_in_a_process_that_was_forked() -> None:
    ended = subprocess.run([sys.executable, "-c", FORK], capture_output=True, text=True, check=True)

    assert ended.stdout == "0\n"
