"""The client's stream against servers that misbehave."""

import gc
import os
import signal
import threading
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from threading import Event
from types import SimpleNamespace
from typing import Any

import grpc
import pytest
from grpc._channel import _SingleThreadedRendezvous

from rlmesh_ray.client.join_stream import BidiCall, JoinStream, QueuedCall, open_call
from rlmesh_ray.compat.single_threaded_call import SingleThreadedCall
from rlmesh_ray.errors import (
    AccessDeniedError,
    CapacityError,
    EndpointClosedError,
    EndpointError,
    EndpointLostError,
    EndpointTimeoutError,
    EndpointUnreachableError,
)
from tests.loopback.eventually import entered, eventually, interrupted_when_locked
from tests.loopback.ports import plain_channel

PATH = "/test.Service/Join"
Handler = Callable[[Iterator[bytes], Any], Iterator[bytes]]
Listen = Callable[[Handler], str]
Serve = Callable[[Handler], JoinStream]
Begin = Callable[[grpc.Channel, str, tuple[()]], BidiCall]


@pytest.fixture
def listen() -> Iterator[Listen]:
    """Start a server with the given handler and return its address."""
    options = [
        ("grpc.keepalive_time_ms", 100),
        ("grpc.keepalive_timeout_ms", 2000),
        ("grpc.http2.max_pings_without_data", 0),
        ("grpc.http2.min_recv_ping_interval_without_data_ms", 50),
    ]
    server = grpc.server(ThreadPoolExecutor(2), options=options)

    def start(handler: Handler) -> str:
        methods = {"Join": grpc.stream_stream_rpc_method_handler(handler)}
        server.add_generic_rpc_handlers(
            (grpc.method_handlers_generic_handler("test.Service", methods),)
        )
        port = server.add_insecure_port("127.0.0.1:0")
        server.start()
        return f"127.0.0.1:{port}"

    yield start
    server.stop(0).wait()


@pytest.fixture(params=[SingleThreadedCall.begin, QueuedCall], ids=["direct", "queued"])
def begin(request: pytest.FixtureRequest) -> Begin:
    """What begins a call."""
    found: Begin = request.param
    return found


@pytest.fixture
def serve(listen: Listen, begin: Begin) -> Iterator[Serve]:
    """Start a server with the given handler and return a stream to it."""
    streams: list[JoinStream] = []
    channels: list[grpc.Channel] = []

    def start(handler: Handler) -> JoinStream:
        address = listen(handler)
        channels.append(plain_channel(address))
        streams.append(JoinStream(begin(channels[-1], PATH, ()), address))
        return streams[-1]

    yield start
    for stream in streams:
        stream.close()
    for channel in channels:
        channel.close()


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


def test_frames_that_are_not_awaited_are_found_without_waiting(serve: Serve) -> None:
    written = Event()

    def twice(requests: Iterator[bytes], _context: Any) -> Iterator[bytes]:
        for frame in requests:
            yield frame
            yield frame + b"!"
            written.set()

    stream = serve(twice)
    assert not stream.poll()
    for _ in range(3):
        stream.send(b"a")
        assert stream.receive(5.0) == b"a"
        assert written.wait(5.0)
        assert eventually(stream.poll)
        assert stream.receive(5.0) == b"a!"
        assert not stream.poll()
        written.clear()


def test_a_stream_that_ends_has_no_frame_to_find_and_says_how_it_ended(serve: Serve) -> None:
    def leave(requests: Iterator[bytes], context: Any) -> Iterator[bytes]:
        yield next(requests)
        next(requests)
        context.abort(grpc.StatusCode.INTERNAL, "because")

    stream = serve(leave)
    stream.send(b"a")
    assert stream.receive(5.0) == b"a"
    assert not stream.poll()
    stream.send(b"b")

    with pytest.raises(EndpointLostError, match="because"):
        stream.receive(5.0)
    assert not stream.poll()


def test_a_frame_that_is_asked_for_ahead_comes_to_who_waits(serve: Serve) -> None:
    stream = serve(echo)
    for frame in (b"a", b"b"):
        assert not stream.poll()
        stream.send(frame)
        assert stream.receive(5.0) == frame
    assert not stream.poll()
    with pytest.raises(EndpointTimeoutError):
        stream.receive(0.1)


def test_a_mute_server_is_given_up_at_the_deadline(serve: Serve) -> None:
    done = Event()

    def mute(requests: Iterator[bytes], context: Any) -> Iterator[bytes]:
        context.add_callback(done.set)
        done.wait(10.0)
        yield from ()

    stream = serve(mute)
    stream.send(b"a")

    with pytest.raises(EndpointTimeoutError, match=r"no answer within 0\.2 s$"):
        stream.receive(0.2)
    # gRPC would report that the call was "locally cancelled by application".
    with pytest.raises(EndpointTimeoutError, match=r"no answer within 0\.2 s$"):
        stream.receive(5.0)


def test_a_frame_that_comes_when_its_wait_is_just_given_up_is_too_late() -> None:
    class Call:
        is_cancelled = is_closed = False

        def __next__(self) -> bytes:
            assert eventually(lambda: self.is_cancelled)
            return b"a"

        def cancel(self) -> None:
            self.is_cancelled = True

        def close(self) -> None:
            self.is_closed = True

    call: Any = Call()
    with pytest.raises(EndpointTimeoutError, match=r"no answer within 0\.1 s"):
        JoinStream(call, "").receive(0.1)

    assert call.is_closed


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


def test_a_stream_keeps_its_channel(listen: Listen, begin: Begin) -> None:
    address = listen(echo)
    stream = JoinStream(begin(plain_channel(address), PATH, ()), address)
    gc.collect()

    stream.send(b"a")
    assert stream.receive(5.0) == b"a"
    stream.close()


def test_one_thread_may_send_while_another_waits(serve: Serve) -> None:
    stream = serve(echo)
    received: list[bytes] = []
    reader = threading.Thread(target=lambda: received.extend(stream.receive(20.0) for _ in "abcd"))
    reader.start()

    for frame in (b"a", b"b", b"c", b"d"):
        stream.send(frame)

    reader.join(20.0)
    assert received == [b"a", b"b", b"c", b"d"]


def test_a_stream_that_is_not_read_answers_the_servers_pings(serve: Serve) -> None:
    is_gone, may_answer = Event(), Event()

    def wait(requests: Iterator[bytes], context: Any) -> Iterator[bytes]:
        context.add_callback(is_gone.set)
        yield next(requests)
        may_answer.wait(20.0)
        yield b"gone" if is_gone.is_set() else b"still there"

    stream = serve(wait)
    stream.send(b"a")
    assert stream.receive(5.0) == b"a"
    assert not is_gone.wait(2.5)  # a ping has 2 s to be answered

    may_answer.set()
    assert stream.receive(5.0) == b"still there"


def test_a_stream_that_is_closed_while_another_thread_waits_ends_there(serve: Serve) -> None:
    has_begun = Event()

    def mute(_requests: Iterator[bytes], context: Any) -> Iterator[bytes]:
        is_gone = Event()
        context.add_callback(is_gone.set)
        has_begun.set()
        is_gone.wait(20.0)
        yield from ()

    stream = serve(mute)
    errors: list[Exception] = []

    def wait() -> None:
        try:
            stream.receive(20.0)
        except EndpointError as error:
            errors.append(error)

    reader = threading.Thread(target=wait)
    reader.start()
    assert has_begun.wait(20.0)
    stream.close()
    reader.join(20.0)

    assert [type(error) for error in errors] == [EndpointClosedError]


@pytest.mark.parametrize(
    ("begin", "waits_in"),
    [
        (SingleThreadedCall.begin, (_SingleThreadedRendezvous, "_consume_next_event")),
        (QueuedCall, (grpc._common, "wait")),
    ],
    indirect=["begin"],
    ids=["direct", "queued"],
)
def test_ctrl_c_while_a_stream_is_read_ends_it_and_nothing_hangs(
    serve: Serve, waits_in: tuple[Any, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def mute(_requests: Iterator[bytes], context: Any) -> Iterator[bytes]:
        is_gone = Event()
        context.add_callback(is_gone.set)
        is_gone.wait(20.0)
        yield from ()

    stream = serve(mute)
    is_waiting = entered(monkeypatch, *waits_in, by=threading.main_thread())

    def interrupt() -> None:
        if is_waiting.wait(20.0):
            signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGUSR1)

    former = signal.signal(signal.SIGUSR1, signal.default_int_handler)
    interrupting = threading.Thread(target=interrupt)
    try:
        interrupting.start()
        with pytest.raises(KeyboardInterrupt):
            stream.receive(20.0)
    finally:
        interrupting.join()
        signal.signal(signal.SIGUSR1, former)

    stream.send(b"a")
    closing = threading.Thread(target=stream.close)
    closing.start()
    closing.join(20.0)
    assert not closing.is_alive()
    with pytest.raises(EndpointClosedError):
        stream.send(b"a")


class Interrupted:
    """A call inside gRPC; what it is asked for next is interrupted by Ctrl-C, before or after."""

    def __init__(self, call: Any, *, is_asked: bool) -> None:
        self._call = call
        self._is_asked = is_asked

    def operate(self, *arguments: Any) -> bool:
        if self._is_asked:
            self._call.operate(*arguments)
        raise KeyboardInterrupt

    def __getattr__(self, name: str) -> Any:
        return getattr(self._call, name)


class InterruptedBefore(SingleThreadedCall):
    """A call that Ctrl-C interrupts before gRPC does what it is asked for."""

    is_asked = False

    def __init__(self, state: Any, call: Any, *more: Any) -> None:
        super().__init__(state, Interrupted(call, is_asked=self.is_asked), *more)


class InterruptedAfter(InterruptedBefore):
    """A call that Ctrl-C interrupts after gRPC has done what it is asked for."""

    is_asked = True


@pytest.mark.parametrize("request_", ["send", "receive", "poll"])
@pytest.mark.parametrize(
    "begin",
    [InterruptedBefore.begin, InterruptedAfter.begin],
    indirect=True,
    ids=["before", "after"],
)
def test_a_stream_that_ctrl_c_has_interrupted_anywhere_can_be_closed(
    serve: Serve, request_: str
) -> None:
    stream = serve(echo)

    with pytest.raises(KeyboardInterrupt):
        stream.send(b"a") if request_ == "send" else getattr(stream, request_)()

    closing = threading.Thread(target=stream.close)
    closing.start()
    closing.join(20.0)
    assert not closing.is_alive()


@pytest.mark.parametrize(
    ("request_", "nth"), [("send", 1), ("receive", 1), ("receive", 2), ("poll", 1)]
)
def test_ctrl_c_while_grpc_locks_a_channel_does_not_leave_it_locked(
    listen: Listen, request_: str, nth: int
) -> None:
    address = listen(echo)
    channel = plain_channel(address)
    stream = JoinStream(open_call(channel, PATH, ()), address)
    answers = []

    def live() -> None:
        other = JoinStream(open_call(channel, PATH, ()), address)
        other.send(b"a")
        answers.append(other.receive())
        other.close()

    if request_ != "send":
        stream.send(b"a")
    with pytest.raises(KeyboardInterrupt), interrupted_when_locked(nth):
        stream.send(b"a") if request_ == "send" else getattr(stream, request_)()
    living = threading.Thread(target=live, daemon=True)
    living.start()
    living.join(20.0)

    assert answers == [b"a"]
    stream.close()
    channel.close()


@pytest.mark.parametrize("is_closed", [True, False])
def test_nothing_is_left_of_streams_that_were_closed_or_dropped(
    listen: Listen, begin: Begin, is_closed: bool
) -> None:
    """What gRPC keeps of a call has a descriptor, and ends with it."""
    address = listen(echo)

    def come_and_go() -> None:
        channel = plain_channel(address)
        passing = JoinStream(begin(channel, PATH, ()), address)
        passing.send(b"a")
        passing.receive(5.0)
        passing.send(b"never read")
        if is_closed:
            passing.close()
            channel.close()

    def num_descriptors() -> int:
        return len(os.listdir("/proc/self/fd"))

    come_and_go()
    before = num_descriptors()
    for _ in range(20):
        come_and_go()

    gc.collect()
    # Connections close in gRPC's own time.
    assert eventually(lambda: num_descriptors() <= before + 4)


def test_a_stream_that_broke_is_freed_with_those_that_waited_for_it(
    listen: Listen, begin: Begin
) -> None:
    """gRPC raises the call itself, and so the call's traceback refers to them."""

    class Session:
        def __init__(self) -> None:
            channel = plain_channel(address)
            self.stream = JoinStream(begin(channel, PATH, ()), address, channel)

        def ask(self) -> None:
            self.stream.send(b"a")
            with pytest.raises(CapacityError):
                self.stream.receive(20.0)

    address = listen(abort_with(grpc.StatusCode.RESOURCE_EXHAUSTED))
    session = Session()
    session.ask()
    dropped = weakref.ref(session)
    del session
    gc.collect()

    assert dropped() is None


def test_a_stream_that_broke_has_closed_its_connection(listen: Listen, begin: Begin) -> None:
    address = listen(abort_with(grpc.StatusCode.RESOURCE_EXHAUSTED))
    channel = plain_channel(address)
    stream = JoinStream(begin(channel, PATH, ()), address, channel)
    with pytest.raises(CapacityError):
        stream.receive(20.0)

    with pytest.raises(ValueError, match="closed channel"):
        channel.unary_unary(PATH)(b"")
    with pytest.raises(CapacityError):  # as often as it is asked
        stream.receive(20.0)


def test_a_call_needs_no_thread_of_grpc_on_linux() -> None:
    with plain_channel("127.0.0.1:1") as channel:
        call = open_call(channel, PATH, ())
        call.close()

    assert type(call) is SingleThreadedCall


class ChangedChannel:
    """A channel of a gRPC whose private parts have changed."""

    def __init__(self, channel: grpc.Channel, error: type[Exception]) -> None:
        def changed(*_: object) -> None:
            raise error("changed")

        self.stream_stream = channel.stream_stream
        self._channel = SimpleNamespace(segregated_call=changed)


@pytest.mark.parametrize("error", [AttributeError, TypeError, ValueError])
def test_a_grpc_that_has_changed_inside_is_used_as_everybody_does(error: type[Exception]) -> None:
    with plain_channel("127.0.0.1:1") as channel:
        changed: Any = ChangedChannel(channel, error)
        call = open_call(changed, PATH, ())
        stream = JoinStream(call, "127.0.0.1:1")

        assert type(call) is QueuedCall
        with pytest.raises(EndpointUnreachableError):
            stream.receive(20.0)
        stream.close()


def test_a_fork_does_not_close_what_its_parent_uses(
    listen: Listen, begin: Begin, monkeypatch: pytest.MonkeyPatch
) -> None:
    call, pid = begin(plain_channel(listen(echo)), PATH, ()), os.getpid()
    stream = JoinStream(call, "")

    monkeypatch.setattr(os, "getpid", lambda: pid + 1)
    del stream
    gc.collect()

    assert not call.has_ended()
    call.close()
