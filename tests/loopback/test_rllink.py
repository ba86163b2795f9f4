"""The port for simulators, over real sockets: who talks, who dawdles, who talks rubbish."""

import asyncio
import contextlib
import logging
import random
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from rlmesh_ray.dialects.rllink import wire as m
from rlmesh_ray.dialects.rllink.client import JSON, RAY, LocalAgent, RemoteAgent, RLlinkClient
from rlmesh_ray.dialects.rllink.server import connection
from rlmesh_ray.dialects.rllink.server.connection import (
    ImmediateOrLaterReply,
    RLlinkConnection,
    RLlinkLimits,
    RLlinkServer,
)
from rlmesh_ray.dialects.rllink.wire import Body, Encoding, framed
from rlmesh_ray.errors import (
    AddressError,
    ConfigurationError,
    EndpointClosedError,
    EndpointLostError,
    EndpointTimeoutError,
    EndpointUnreachableError,
    RemoteError,
    RemoteProtocolError,
)
from rlmesh_ray.server.endpoint.event_loop import shared_loop
from tests.frame_mutation import damaged
from tests.loopback.eventually import eventually

CHUNK = m.Chunk(np.eye(2), np.array([1]), np.array([0.5]), True, False, "e")
PING = framed(JSON.pack_request(m.Ping()))
PONG = b'00000016{"type": "PONG"}'


class Trainer:
    """Answers at once, but for requests that shall wait; records its requests."""

    def __init__(self) -> None:
        self.received: list[m.Request] = []
        self.held: list[Future[m.Reply | None]] = []
        self.is_holding = False
        self.present = 0
        self.changed = threading.Condition()

    def admit(self, peer: str, encoding: Encoding) -> "Trainer":
        assert peer.startswith("127.0.0.1:")
        assert encoding.name in (JSON.name, RAY.name)
        self._note(1)
        return self

    def receive(self, request: m.Request) -> ImmediateOrLaterReply:
        self.received.append(request)
        match request:
            case m.GetConfig():
                return m.SetConfig(500, True)
            case m.LogReturns():
                raise RemoteProtocolError("it was not requested")
            case m.StartEpisode():
                raise ZeroDivisionError
            case m.Episodes(wants_state=False):
                return None
        future: Future[m.Reply | None] = Future()
        if self.is_holding:
            self.held.append(future)
            self._note(0)
        else:
            future.set_result(m.SetState(3, b"model", {"w": np.ones(2, "f4")}))
        return future

    def leave(self) -> None:
        self._note(-1)

    def _note(self, came: int) -> None:
        with self.changed:
            self.present += came
            self.changed.notify_all()

    def wait_until(self, condition: Callable[[], bool]) -> None:
        with self.changed:
            assert self.changed.wait_for(condition, 60)


@pytest.fixture
def trainer() -> Trainer:
    return Trainer()


@pytest.fixture
def serve(trainer: Trainer) -> Iterator[Callable[..., str]]:
    servers: list[RLlinkServer] = []

    def start(*, token: str | None = None, limits: RLlinkLimits | None = None) -> str:
        servers.append(RLlinkServer(trainer.admit, token=token, limits=limits))
        servers[-1].start()
        return servers[-1].address

    yield start
    for server in servers:
        server.stop()


def connect_options(address: str) -> socket.socket:
    host, _, port = address.rpartition(":")
    line = socket.create_connection((host, int(port)), 10)
    line.settimeout(10)
    return line


def everything(line: socket.socket) -> bytes:
    """Read until the other side hangs up."""
    data = b""
    with contextlib.suppress(ConnectionResetError):
        while part := line.recv(4096):
            data += part
    return data


@pytest.mark.parametrize("encoding", [JSON, RAY], ids=["json", "ray"])
def test_a_client_of_either_encoding_is_answered_in_it(
    encoding: Encoding, serve: Callable[..., str], trainer: Trainer
) -> None:
    with RLlinkClient(serve(), encoding=encoding) as client:
        config = client.get_config()
        state = client.exchange([CHUNK], 3)
        client.send([CHUNK])

        assert (config.env_steps_per_sample, config.force_on_policy) == (500, True)
        assert state.weights_seq_no == 3
        assert client.get_state().weights_seq_no == 3
    assert (state.onnx == b"model") == (encoding is JSON)
    assert ("w" in state.weights) == (encoding is RAY)
    first, second = (each for each in trainer.received if isinstance(each, m.Episodes))
    assert (first.wants_state, first.weights_seq_no) == (True, 3)
    assert (second.wants_state, second.weights_seq_no) == (False, None)
    assert second.chunks[0].obs.tolist() == [[1, 0], [0, 1]]


def test_the_bytes_of_the_description_are_spoken(serve: Callable[..., str]) -> None:
    with connect_options(serve()) as line:
        line.sendall(b'00000016{"type": "PING"}')

        assert line.recv(100) == PONG


def test_clients_do_not_wait_for_each_other(serve: Callable[..., str], trainer: Trainer) -> None:
    address = serve()
    trainer.is_holding = True
    waiting = [connect_options(address) for _ in range(3)]
    for line in waiting:
        line.sendall(framed(JSON.pack_request(m.GetState())))
    trainer.wait_until(lambda: len(trainer.held) == 3)

    with RLlinkClient(address) as client:
        assert client.get_config().env_steps_per_sample == 500

    for number, future in enumerate(trainer.held):
        future.set_result(m.SetState(number, b""))
    answers = [line.recv(60) for line in waiting]
    assert sorted(answer[answer.index(b"_no") :][6:7] for answer in answers) == [b"0", b"1", b"2"]
    for line in waiting:
        line.close()


def test_a_client_that_goes_while_it_waits_is_forgotten_at_once(
    serve: Callable[..., str], trainer: Trainer
) -> None:
    trainer.is_holding = True
    with connect_options(serve()) as line:
        line.sendall(framed(JSON.pack_request(m.GetState())))
        trainer.wait_until(lambda: len(trainer.held) == 1)

    trainer.wait_until(lambda: trainer.present == 0)

    assert eventually(trainer.held[0].cancelled)


def test_a_connection_that_breaks_when_its_answer_comes_is_no_error_of_ours(
    serve: Callable[..., str],
    trainer: Trainer,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    writers: list[asyncio.StreamWriter] = []

    class Noted(RLlinkConnection):
        def __init__(
            self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, limits: RLlinkLimits
        ) -> None:
            writers.append(writer)
            super().__init__(reader, writer, limits)

    monkeypatch.setattr(connection, "RLlinkConnection", Noted)
    address = serve()
    trainer.is_holding = True

    def answer_and_break() -> None:
        trainer.held[0].set_result(m.SetState(1, b""))
        writers[0].transport.abort()  # as uvloop does when the kernel tells of a reset

    with connect_options(address) as line, caplog.at_level(logging.INFO):
        line.sendall(framed(JSON.pack_request(m.GetState())))
        trainer.wait_until(lambda: len(trainer.held) == 1)
        shared_loop().post(answer_and_break)
        assert eventually(lambda: "has gone" in caplog.text or "exception" in caplog.text)

    assert [record.levelname for record in caplog.records] == ["INFO"], caplog.text
    trainer.wait_until(lambda: trainer.present == 0)


def test_other_clients_are_answered_while_a_large_message_is_read(
    serve: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    is_reading, is_answered = threading.Event(), threading.Event()

    def loads(body: bytes) -> Body:
        if len(body) > 2**16:
            is_reading.set()
            is_answered.wait(20)
        return JSON.loads(body)

    slow = replace(JSON, loads=loads)
    monkeypatch.setattr(connection, "encoding_of", lambda _: slow)
    large = m.Episodes((replace(CHUNK, obs=np.zeros((2, 30_000))),), True, 3)
    address = serve()

    with connect_options(address) as reading, connect_options(address) as other:
        reading.sendall(framed(JSON.pack_request(large)))
        assert is_reading.wait(20)
        other.sendall(PING)
        assert other.recv(100) == PONG

        is_answered.set()
        assert b"SET_STATE" in reading.recv(100)


def test_who_waits_when_the_port_is_closed_is_not_left_waiting(trainer: Trainer) -> None:
    server = RLlinkServer(trainer.admit)
    server.start()
    trainer.is_holding = True
    with connect_options(server.address) as line:
        line.sendall(framed(JSON.pack_request(m.GetState())))
        trainer.wait_until(lambda: len(trainer.held) == 1)

        server.stop()

        assert everything(line) == b""
    assert trainer.held[0].cancelled()
    assert trainer.present == 0


def test_a_slow_sender_is_cut_off_and_harms_no_other_client(
    serve: Callable[..., str], trainer: Trainer
) -> None:
    address = serve(limits=RLlinkLimits(frame_timeout_s=1.0))
    with RLlinkClient(address) as client, connect_options(address) as slow:
        slow.sendall(PING)
        assert slow.recv(100) == PONG
        slow.sendall(b"00000500{")  # and no more

        for _ in range(20):
            assert client.get_state().weights_seq_no == 3
        reported = everything(slow)

        assert b"not complete 1 s after it began" in reported
        assert client.get_state().weights_seq_no == 3
    trainer.wait_until(lambda: trainer.present == 0)


def test_a_client_that_sends_nothing_at_first_is_cut_off(serve: Callable[..., str]) -> None:
    with connect_options(serve(limits=RLlinkLimits(frame_timeout_s=0.1))) as silent:
        assert everything(silent) == b""


def test_between_two_frames_there_is_no_hurry(serve: Callable[..., str]) -> None:
    with RLlinkClient(serve(limits=RLlinkLimits(frame_timeout_s=1.0))) as client:
        time.sleep(1.5)

        assert client.get_state().weights_seq_no == 3


def test_a_client_that_takes_no_answers_is_cut_off(
    serve: Callable[..., str], trainer: Trainer
) -> None:
    address = serve(limits=RLlinkLimits(frame_timeout_s=1.0))
    trainer.is_holding = True
    with connect_options(address) as deaf:
        deaf.sendall(framed(JSON.pack_request(m.GetState())))
        trainer.wait_until(lambda: len(trainer.held) == 1)
        trainer.held[0].set_result(m.SetState(1, random.Random(1).randbytes(2**24)))

        trainer.wait_until(lambda: trainer.present == 0)


@pytest.mark.parametrize(
    ("frame", "why"),
    [
        (b"0000x016", b"no header"),
        (b"99999999", b"are accepted"),
        (b"00000000", b"0 bytes"),
        (b"00000003abc", b"no dialect"),
        (b"00000002{}", b"type is missing"),
        (framed(JSON.pack_request(m.LogReturns("e", 1.0))), b"it was not requested"),
        (framed(RAY.pack_request(m.Ping())), b"keep to the dialect"),
    ],
)
def test_a_client_that_breaks_a_rule_gets_the_reason_and_is_cut_off(
    frame: bytes, why: bytes, serve: Callable[..., str], trainer: Trainer
) -> None:
    with connect_options(serve()) as line:
        line.sendall(PING + frame)

        reported = everything(line)

    assert reported.startswith(PONG)
    assert b'{"type": "ERROR", "message": "' in reported
    assert why in reported
    trainer.wait_until(lambda: trainer.present == 0)


def test_a_fault_of_the_trainers_ends_only_the_conversation_that_met_it(
    serve: Callable[..., str],
) -> None:
    address = serve()
    with RLlinkClient(address) as client, RLlinkClient(address) as other:
        with pytest.raises(RemoteError, match="its log says why"):
            client.start_episode()

        assert other.get_state().weights_seq_no == 3


def test_there_are_no_more_clients_than_allowed(serve: Callable[..., str]) -> None:
    address = serve(limits=RLlinkLimits(max_clients=1))
    with RLlinkClient(address) as client:
        with connect_options(address) as second:
            second.sendall(PING)
            assert everything(second) == b""

        assert client.get_state().weights_seq_no == 3


@pytest.mark.parametrize("token", [None, "s3cret"])
def test_connections_that_send_no_whole_message_keep_no_client_out(
    token: str | None, serve: Callable[..., str]
) -> None:
    address = serve(token=token, limits=RLlinkLimits(max_clients=1, max_strangers=2))
    with contextlib.ExitStack() as stack:
        for _ in range(5):
            stack.enter_context(connect_options(address)).sendall(PING[:-1])

        with RLlinkClient(address, token=token) as client:
            assert client.get_state().weights_seq_no == 3


# --- strangers ---------------------------------------------------------------------------


def test_who_shows_the_token_is_let_in(serve: Callable[..., str]) -> None:
    with RLlinkClient(serve(token="s3cret"), token="s3cret") as client:
        assert client.get_state().weights_seq_no == 3


@pytest.mark.parametrize("token", [None, "other", "s3cre", "ä", "\ud800"])
def test_a_client_without_a_token_gets_the_reason_and_is_cut_off(
    token: str | None, serve: Callable[..., str], trainer: Trainer
) -> None:
    with pytest.raises(RemoteError, match="wants a token"):
        RLlinkClient(serve(token="s3cret"), token=token)

    assert not trainer.received


@pytest.mark.parametrize(
    "frame", [framed(JSON.pack_request(m.GetState())), b"00004097" + b" " * 4097]
)
def test_a_stranger_can_neither_ask_nor_send_much(
    frame: bytes, serve: Callable[..., str], trainer: Trainer
) -> None:
    with connect_options(serve(token="s3cret")) as line:
        line.sendall(frame)

        assert b"ERROR" in everything(line)
    assert not trainer.received


def test_a_port_that_other_machines_can_reach_needs_a_token(trainer: Trainer) -> None:
    with pytest.raises(AddressError, match="give a token"):
        RLlinkServer(trainer.admit, address="0.0.0.0:0")
    with pytest.raises(ConfigurationError, match="printable"):
        RLlinkServer(trainer.admit, token="")
    with pytest.raises(AddressError, match="TCP"):
        RLlinkServer(trainer.admit, address="unix:/tmp/x")


# --- rubbish -----------------------------------------------------------------------------


@pytest.mark.parametrize("num_frames", [1_000, pytest.param(10_000, marks=pytest.mark.slow)])
def test_damaged_frames_stop_no_server(
    num_frames: int, serve: Callable[..., str], trainer: Trainer
) -> None:
    address = serve(limits=RLlinkLimits(frame_timeout_s=5.0, max_message_bytes=4096))
    chance = random.Random(8)
    requests: list[m.Request] = [
        m.Ping(),
        m.GetConfig(),
        m.GetState(),
        m.Episodes((CHUNK,), True, 3),
    ]
    good = {each: [framed(each.pack_request(one)) for one in requests] for each in (JSON, RAY)}
    with RLlinkClient(address) as bystander:
        for number in range(num_frames):
            frames = good[chance.choice((JSON, RAY))]
            # One a connection: after a wrong one the server reads no more.
            with connect_options(address) as line, contextlib.suppress(OSError):
                line.sendall(frames[0] + damaged(chance.choice(frames), chance))
                line.shutdown(socket.SHUT_WR)
                assert everything(line)
            if number % 500 == 0:
                assert bystander.exchange([CHUNK], 3).weights_seq_no == 3

        assert bystander.get_config().env_steps_per_sample == 500
    trainer.wait_until(lambda: trainer.present == 0)


LIGHT = """
import sys
import rlmesh_ray.dialects.rllink.client
heavy = {"ray", "torch", "grpc", "google", "gymnasium", "onnxruntime", "msgpack", "asyncio"}
print(sorted(heavy & set(sys.modules)))
"""


def test_a_simulator_imports_nothing_heavy_before_it_has_a_model() -> None:
    done = subprocess.run(
        [sys.executable, "-c", LIGHT], capture_output=True, text=True, timeout=60, check=True
    )

    assert done.stdout.strip() == "[]"


# --- the client --------------------------------------------------------------------------


def test_the_client_says_when_nothing_listens() -> None:
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        with pytest.raises(EndpointUnreachableError, match="start the training first"):
            RLlinkClient(f"127.0.0.1:{closed.getsockname()[1]}")


def test_the_client_does_not_wait_for_a_server_that_accepts_and_sends_nothing() -> None:
    with socket.create_server(("127.0.0.1", 0)) as mute:
        address = f"127.0.0.1:{mute.getsockname()[1]}"

        with pytest.raises(EndpointTimeoutError):
            RLlinkClient(address, connect_timeout_s=0.1)


def test_a_client_that_only_sends_notices_the_end_of_the_server(serve: Callable[..., str]) -> None:
    with RLlinkClient(serve(limits=RLlinkLimits(frame_timeout_s=1.0))) as client:

        def go_on() -> None:
            deadline_s = time.monotonic() + 10
            while time.monotonic() < deadline_s:
                client.log_returns("e", 1.0)

        with pytest.raises(RemoteError, match="it was not requested"):
            go_on()


def test_an_agent_says_when_it_does_not_know_what_actions_are(serve: Callable[..., str]) -> None:
    with RLlinkClient(serve()) as client:
        for make in (RemoteAgent, LocalAgent):
            with pytest.raises(ConfigurationError, match="the server"):
                make(client)


def keepalive_timers(port: int) -> list[str]:
    """The kernel's connections of which one end is the port, by what they wait for."""
    lines = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
    ends = f":{port:04X}"
    return [
        each[5][:2] for each in lines if each[3] == "01" and ends in each[1][-5:] + each[2][-5:]
    ]


@pytest.mark.skipif(not Path("/proc/net/tcp").exists(), reason="needs Linux")
def test_a_machine_that_vanishes_is_found_by_the_other_one(serve: Callable[..., str]) -> None:
    address = serve()
    with RLlinkClient(address):
        port = int(address.rpartition(":")[2])
        assert eventually(lambda: keepalive_timers(port) == ["02", "02"])


def test_the_client_gives_up_after_its_timeout(serve: Callable[..., str], trainer: Trainer) -> None:
    trainer.is_holding = True
    with RLlinkClient(serve(), timeout_s=0.1) as client:
        with pytest.raises(EndpointTimeoutError, match="no answer in time"):
            client.get_state()
        with pytest.raises(EndpointClosedError):
            client.get_state()


def test_the_client_says_that_the_training_has_ended(trainer: Trainer) -> None:
    server = RLlinkServer(trainer.admit)
    server.start()
    with RLlinkClient(server.address) as client:
        assert server.is_serving
        server.stop()
        server.stop()

        assert not server.is_serving
        with pytest.raises(EndpointLostError):
            client.get_state()


def test_a_server_stops_at_any_moment(trainer: Trainer) -> None:
    for _ in range(40):
        server = RLlinkServer(trainer.admit)
        server.start()
        with RLlinkClient(server.address) as client, contextlib.suppress(EndpointLostError):
            thread = threading.Thread(target=server.stop)
            thread.start()
            while True:
                client.get_state()
        thread.join(60)
        assert not thread.is_alive()


def test_a_port_in_use_is_named(serve: Callable[..., str], trainer: Trainer) -> None:
    address = serve()

    with pytest.raises(AddressError, match="give another port"):
        RLlinkServer(trainer.admit, address=address).start()


@pytest.mark.parametrize(
    ("answer", "error"),
    [
        (b"0000000x", EndpointLostError),
        (b"00000002{}", EndpointLostError),
        (PONG, RemoteProtocolError),
        (b"", EndpointLostError),
    ],
)
def test_a_server_that_talks_rubbish_is_not_believed(answer: bytes, error: type[Exception]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listening:

        def talk() -> None:
            line, _ = listening.accept()
            with line:
                line.recv(100)
                line.sendall(PONG)
                line.recv(100)
                line.sendall(answer)

        thread = threading.Thread(target=talk)
        thread.start()
        with (
            RLlinkClient(f"127.0.0.1:{listening.getsockname()[1]}") as client,
            pytest.raises(error),
        ):
            client.get_state()
        thread.join()
