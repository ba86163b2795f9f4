"""Endpoints that register themselves with a pool, over real gRPC."""

import contextlib
import dataclasses
import json
import logging
import queue
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest

from rlmesh_ray import ModelServer, RemoteEnv
from rlmesh_ray.auth.client_tls import ClientTls
from rlmesh_ray.auth.server_tls import ServerTls
from rlmesh_ray.auth.token_file import endpoint_token, registration_token
from rlmesh_ray.cli.main import main
from rlmesh_ray.client import endpoint_registration as registration_module
from rlmesh_ray.client.channel import ConnectOptions
from rlmesh_ray.client.endpoint_registration import RegistrarOptions, Registration
from rlmesh_ray.errors import (
    AccessDeniedError,
    ConfigurationError,
    EndpointUnreachableError,
    RlmeshError,
)
from rlmesh_ray.protocol.pool_membership import (
    RefusalKind,
    RegistrationAccepted,
    RegistrationRefused,
    RegistrationRequest,
)
from rlmesh_ray.server.observe.counters import EnvCounters
from rlmesh_ray.server.observe.statistics import EnvStatistics
from rlmesh_ray.server.observe.statistics_report import pack_report
from rlmesh_ray.server.pool import pool_admission as registrar_module
from rlmesh_ray.server.pool.pool_admission import Registrar
from rlmesh_ray.wire import registry_v1 as wire
from tests.lane_counts import note_step
from tests.loopback.certificates import Authority, needs_openssl
from tests.loopback.eventually import eventually
from tests.loopback.ports import free_address

SECRET = "s3cret"


class Book:
    """Notes what the registrar does, and raises an error on request."""

    def __init__(self) -> None:
        self.events: queue.Queue[tuple[str, ...]] = queue.Queue()
        self.reported: queue.Queue[tuple[str, EnvStatistics]] = queue.Queue()
        self.present: dict[str, str] = {}
        self.incarnations: dict[str, int] = {}
        self.objection: RlmeshError | None = None
        self.gate = threading.Event()
        self.gate.set()
        self.num_checks = 0
        self.is_full: Callable[[], bool] = lambda: False
        """Whether it can take no report."""

    def check(self, endpoint_id: str, address: str) -> None:
        self.num_checks += 1
        self.gate.wait(20.0)
        if self.objection is not None:
            raise self.objection

    def enter(self, endpoint_id: str, address: str, found: None) -> int:
        self.present[endpoint_id] = address
        self.incarnations[endpoint_id] = self.incarnations.get(endpoint_id, 0) + 1
        self.events.put(("enter", endpoint_id, address))
        return self.incarnations[endpoint_id]

    def remove(self, endpoint_id: str) -> None:
        del self.present[endpoint_id]
        self.events.put(("remove", endpoint_id))

    def note(self, endpoint_id: str, statistics: EnvStatistics) -> None:
        if self.is_full():
            raise ValueError("the ledger is full")
        self.reported.put((endpoint_id, statistics))

    def next(self) -> tuple[str, ...]:
        return self.events.get(timeout=20.0)


@pytest.fixture
def book() -> Book:
    return Book()


@pytest.fixture
def registrar(book: Book) -> Iterator[Registrar]:
    with Registrar("games", book, secret=SECRET, max_endpoints=3) as started:
        yield started


def connect_options(
    registrar: Registrar, endpoint_id: str = "sim-1", **others: Any
) -> RegistrarOptions:
    settings = {"address": registrar.address, "pool": "games", "secret": SECRET, **others}
    return RegistrarOptions(endpoint_id=endpoint_id, **settings)


@contextlib.contextmanager
def registration(
    pool: RegistrarOptions, port: int = 5555, host: str = "127.0.0.1", **more: Any
) -> Iterator[tuple[Registration, "queue.Queue[RegistrationAccepted]"]]:
    reported: queue.Queue[RegistrationAccepted] = queue.Queue()
    with Registration(
        pool, host=host, port=port, version="1", on_registered=reported.put, **more
    ) as started:
        yield started, reported


def failure(started: Registration) -> RlmeshError:
    """Return why a registration has failed for good."""

    def has_failed() -> bool:
        try:
            started.require_not_failed()
        except RlmeshError:
            return True
        return False

    assert eventually(has_failed)
    with pytest.raises(RlmeshError) as caught:
        started.require_not_failed()
    return caught.value


def said(caplog: pytest.LogCaptureFixture, words: str) -> bool:
    return eventually(lambda: words in caplog.text)


# --- coming and going --------------------------------------------------------------------


def test_an_endpoint_is_in_the_pool_while_it_is_connected(registrar: Registrar, book: Book) -> None:
    with registration(connect_options(registrar)) as (_, reported):
        assert reported.get(timeout=20.0) == RegistrationAccepted(1, "127.0.0.1:5555")
        assert book.next() == ("enter", "sim-1", "127.0.0.1:5555")
        assert len(book.present) == 1
    # Nothing has to be waited for: an endpoint that has left is out.
    assert book.present == {}
    assert len(book.present) == 0


@pytest.fixture
def frequent_reports(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registration_module, "_REPORT_EVERY_S", 0.01)
    monkeypatch.setattr(registrar_module, "_REPORTS_APART_S", 0.0)


@pytest.mark.usefixtures("frequent_reports")
def test_an_endpoint_tells_again_and_again_what_it_has_done(
    registrar: Registrar, book: Book
) -> None:
    counts = EnvCounters()
    lanes = counts.open()

    def report() -> bytes:
        note_step(lanes, 1000, 2, 0)
        return pack_report(counts.statistics())

    with registration(connect_options(registrar), report=report) as (_, reported):
        reported.get(timeout=20.0)
        first, second = (book.reported.get(timeout=20.0) for _ in range(2))

    assert (first[0], second[0]) == ("sim-1", "sim-1")
    assert 0 < first[1].lane_steps < second[1].lane_steps


@pytest.mark.usefixtures("frequent_reports")
def test_an_endpoint_that_cannot_tell_what_it_has_done_stays_in(
    registrar: Registrar,
    book: Book,
    caplog: pytest.LogCaptureFixture,
) -> None:
    def report() -> bytes:
        raise ValueError("an unexpected error")

    with registration(connect_options(registrar), report=report) as (_, reported):
        reported.get(timeout=20.0)
        assert said(caplog, "an unexpected error")
        assert len(book.present) == 1
        assert book.reported.empty()


@pytest.mark.usefixtures("frequent_reports")
def test_a_registry_that_cannot_store_reports_logs_that_and_keeps_its_endpoints(
    registrar: Registrar,
    book: Book,
    caplog: pytest.LogCaptureFixture,
) -> None:
    sound = pack_report(EnvCounters().statistics())
    book.is_full = lambda: "the ledger is full" not in caplog.text  # until that was said
    with registration(connect_options(registrar), report=lambda: sound):
        assert book.reported.get(timeout=20.0)[0] == "sim-1"
        assert len(book.present) == 1
    assert "cannot be recorded" in caplog.text


def test_an_endpoint_that_reports_nonsense_or_too_much_stays_in_and_its_report_is_ignored(
    registrar: Registrar, book: Book
) -> None:
    sound = pack_report(EnvCounters().statistics())
    channel, call = raw_visit(
        registrar, wire.pack_registration(arrival()), b"\xff", *[sound] * 1000, ends=True
    )

    assert [type(wire.parse_registration_reply(data)) for data in call] == [RegistrationAccepted]
    channel.close()

    assert book.next()[0] == "enter"
    assert book.next() == ("remove", "sim-1")  # all that was said has been read by then
    assert book.reported.qsize() <= 5


def test_an_endpoint_that_does_not_name_its_host_is_where_it_comes_from(
    registrar: Registrar, book: Book
) -> None:
    with registration(connect_options(registrar), host="") as (_, reported):
        assert reported.get(timeout=20.0).address == "127.0.0.1:5555"


def test_an_endpoint_that_comes_back_elsewhere_is_another_incarnation(
    registrar: Registrar, book: Book
) -> None:
    with registration(connect_options(registrar), port=5555) as (_, reported):
        reported.get(timeout=20.0)
    with registration(connect_options(registrar), port=6666) as (_, reported):
        assert reported.get(timeout=20.0) == RegistrationAccepted(2, "127.0.0.1:6666")
        assert book.present == {"sim-1": "127.0.0.1:6666"}


def test_an_endpoint_that_breaks_off_is_out_at_once(registrar: Registrar, book: Book) -> None:
    channel, call = raw_visit(registrar, wire.pack_registration(arrival()))
    assert isinstance(wire.parse_registration_reply(next(call)), RegistrationAccepted)

    channel.close()

    assert book.next()[0] == "enter"
    assert book.next() == ("remove", "sim-1")


def test_an_endpoint_comes_back_by_itself_to_a_registrar_that_restarts(
    book: Book, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING)
    first = Registrar("games", book, address=free_address(), secret=SECRET).start()
    with registration(connect_options(first)) as (_, reported):
        reported.get(timeout=20.0)
        first.stop()
        assert said(caplog, "the connection to the registrar has broken; trying again")
        with Registrar("games", book, address=first.address, secret=SECRET):
            assert reported.get(timeout=20.0).incarnation == 2


def test_an_endpoint_waits_for_a_registrar_that_is_not_there_yet(
    book: Book, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING)
    early = Registrar("games", book, address=free_address(), secret=SECRET).start()
    early.stop()
    with registration(connect_options(early)) as (started, reported):
        assert said(caplog, "nothing answers there; check the address and that the server runs")
        with Registrar("games", book, address=early.address, secret=SECRET):
            reported.get(timeout=20.0)
        started.require_not_failed()


def test_closing_does_not_wait_for_a_registrar_that_is_not_there(book: Book) -> None:
    early = Registrar("games", book, address=free_address(), secret=SECRET).start()
    early.stop()
    started = Registration(connect_options(early), host="127.0.0.1", port=5555).start()
    begun_s = time.monotonic()

    started.close()
    started.close()

    assert time.monotonic() - begun_s < 30.0


def test_a_registration_that_never_began_is_closed() -> None:
    pool = RegistrarOptions("127.0.0.1:1", "games", "sim-1")

    Registration(pool, host="127.0.0.1", port=5555).close()


def test_leaving_while_the_registrar_still_looks_leaves_nothing_behind(
    registrar: Registrar, book: Book
) -> None:
    book.gate.clear()
    with registration(connect_options(registrar)):
        pass
    book.gate.set()
    with registration(connect_options(registrar, "sim-2")) as (_, reported):
        reported.get(timeout=20.0)
        assert eventually(lambda: set(book.present) == {"sim-2"})


def test_an_endpoint_stays_in_when_its_callback_raises(
    registrar: Registrar, book: Book, caplog: pytest.LogCaptureFixture
) -> None:
    def tell(_registered: RegistrationAccepted) -> None:
        raise BrokenPipeError("the reader is gone")

    pool = connect_options(registrar)
    with Registration(pool, host="127.0.0.1", port=5555, on_registered=tell) as started:
        assert said(caplog, "the reader is gone")
        with registration(connect_options(registrar, "sim-2")) as (_, reported):
            reported.get(timeout=20.0)

            started.require_not_failed()
            assert book.incarnations == {"sim-1": 1, "sim-2": 1}
            assert set(book.present) == {"sim-1", "sim-2"}
        assert "not in pool" not in caplog.text


def test_endpoints_that_have_gone_are_not_checked_and_checks_stay_limited(book: Book) -> None:
    with Registrar("games", book, secret=SECRET) as registrar:
        book.gate.clear()
        visits = [
            raw_visit(registrar, wire.pack_registration(arrival(f"sim-{number}")))
            for number in range(36)
        ]
        assert eventually(lambda: registrar.num_streams == 36 and book.num_checks == 32)
        for channel, _call in visits:
            channel.close()
        assert eventually(lambda: registrar.num_streams == 0)
        assert book.num_checks == 32
        book.gate.set()
        with registration(connect_options(registrar, "stays")) as (_, reported):
            reported.get(timeout=20.0)

            # The four that had gone before their check were not checked.
            assert book.num_checks == 33
            assert set(book.present) == {"stays"}


# --- two with one id -----------------------------------------------------------------------


def test_of_two_with_one_id_the_newer_one_is_in_and_the_older_one_gets_the_reason(
    registrar: Registrar, book: Book
) -> None:
    with registration(connect_options(registrar), port=5555) as (older, reported):
        reported.get(timeout=20.0)
        with registration(connect_options(registrar), port=6666) as (newer, newer_reports):
            assert newer_reports.get(timeout=20.0).incarnation == 2

            assert "another endpoint, at 127.0.0.1:6666, has registered as 'sim-1'" in str(
                failure(older)
            )
            newer.require_not_failed()
            older.close()
            assert book.present == {"sim-1": "127.0.0.1:6666"}
            assert reported.empty()


def test_one_that_was_cut_off_does_not_take_the_id_from_who_has_got_it_since(
    registrar: Registrar, book: Book
) -> None:
    with registration(connect_options(registrar), port=6666) as (_, reported):
        reported.get(timeout=20.0)
        assert book.next()[0] == "enter"
    with registration(connect_options(registrar), port=7777) as (newer, reported):
        assert reported.get(timeout=20.0).incarnation == 2
        channel, call = raw_visit(
            registrar, wire.pack_registration(dataclasses.replace(arrival(), former_incarnation=1))
        )
        (answer,) = [wire.parse_registration_reply(data) for data in call]
        channel.close()

        assert isinstance(answer, RegistrationRefused)
        assert answer.kind is RefusalKind.REPLACED
        newer.require_not_failed()
        assert book.present == {"sim-1": "127.0.0.1:7777"}


def test_an_endpoint_whose_former_stream_has_not_been_noticed_to_end_comes_back_to_a_full_pool(
    book: Book,
) -> None:
    with Registrar("games", book, secret=SECRET, max_endpoints=1) as registrar:
        request = wire.pack_registration(arrival())
        former_channel, former = raw_visit(registrar, request)
        assert wire.parse_registration_reply(next(former)) == RegistrationAccepted(
            1, "127.0.0.1:5555"
        )

        again = dataclasses.replace(arrival(), former_incarnation=1)
        channel, call = raw_visit(registrar, wire.pack_registration(again))

        assert wire.parse_registration_reply(next(call)) == RegistrationAccepted(
            2, "127.0.0.1:5555"
        )
        (last,) = [wire.parse_registration_reply(data) for data in former]
        assert isinstance(last, RegistrationRefused)
        assert last.kind is RefusalKind.REPLACED
        # The end of the former stream leaves the pool to the new one.
        former_channel.close()
        assert book.present == {"sim-1": "127.0.0.1:5555"}
        channel.close()


def test_a_refused_endpoint_replaces_none(registrar: Registrar, book: Book) -> None:
    with registration(connect_options(registrar)) as (older, reported):
        reported.get(timeout=20.0)
        book.objection = ConfigurationError("another contract")
        with registration(connect_options(registrar), port=6666) as (newer, _):
            failure(newer)

        older.require_not_failed()
        assert book.present == {"sim-1": "127.0.0.1:5555"}


# --- who is not let in ---------------------------------------------------------------------


@pytest.mark.parametrize(
    ("secret", "wanted"), [("secret", "another token"), (None, "a token, and none was given")]
)
def test_who_does_not_know_the_secret_is_not_let_in(
    registrar: Registrar, book: Book, secret: str | None, wanted: str
) -> None:
    with registration(connect_options(registrar, secret=secret)) as (started, _):
        found = failure(started)

    assert isinstance(found, AccessDeniedError)
    assert f"the registrar requires {wanted}: " in str(found)
    assert "--pool-token-file" in str(found)
    assert book.events.empty()


def test_the_secret_itself_opens_nothing_and_never_travels(registrar: Registrar) -> None:
    pool = connect_options(registrar)
    shown = dict(pool.connect_options().metadata)["authorization"]
    naked = ConnectOptions(registrar.address, SECRET)

    assert SECRET not in shown
    with naked.open() as channel, pytest.raises(grpc.RpcError) as caught:
        next(
            channel.stream_stream(wire.ATTEND)(
                iter([wire.pack_registration(arrival())]), metadata=naked.metadata
            )
        )
    assert isinstance(caught.value, grpc.Call)
    assert caught.value.code() is grpc.StatusCode.UNAUTHENTICATED
    assert SECRET not in repr(pool)


@pytest.mark.parametrize(("secret", "words"), [("", "printable"), ("rays-own", "Ray's own")])
def test_a_pool_s_secret_is_neither_empty_nor_ray_s_own(
    secret: str, words: str, book: Book, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RAY_AUTH_TOKEN", "rays-own")

    with pytest.raises(ConfigurationError, match=words):
        Registrar("games", book, address="0.0.0.0:0", secret=secret)


def test_an_empty_secret_is_refused_before_anything_is_dialed() -> None:
    with pytest.raises(ConfigurationError, match="printable"):
        RegistrarOptions("127.0.0.1:7070", "games", "sim-1", "")


def test_a_wrong_pool_is_reported_by_name(registrar: Registrar, book: Book) -> None:
    with registration(connect_options(registrar, pool="toys")) as (started, _):
        found = failure(started)

    assert isinstance(found, ConfigurationError)
    assert f"{registrar.address}: this registrar serves the pool 'games', not 'toys'" in str(found)
    assert book.events.empty()


def test_an_unusable_address_is_reported(registrar: Registrar) -> None:
    with registration(connect_options(registrar), host="0.0.0.0") as (started, _):
        assert "--advertise HOST:PORT" in str(failure(started))


def test_an_endpoint_that_the_pool_cannot_reach_is_reported_and_tried_again(
    registrar: Registrar, book: Book, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING)
    book.objection = EndpointUnreachableError("the pool cannot reach it", "127.0.0.1:5555")
    with registration(connect_options(registrar)) as (_, reported):
        assert said(caplog, "the pool cannot reach it; trying again")
        book.objection = None
        reported.get(timeout=20.0)


def test_a_full_pool_takes_the_next_one_when_another_leaves(
    registrar: Registrar, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING)
    with contextlib.ExitStack() as stack:
        others = contextlib.ExitStack()
        for number in range(3):
            place = registration(connect_options(registrar, f"sim-{number}"))
            others.enter_context(place)[1].get(timeout=20.0)
        stack.enter_context(others)
        _, reported = stack.enter_context(registration(connect_options(registrar, "late")))
        assert said(caplog, "the pool is full: it has 3 endpoints")
        others.close()
        reported.get(timeout=20.0)


def test_an_endpoint_is_no_registrar(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING)
    with ModelServer(len, token=registration_token(SECRET)) as server:
        pool = RegistrarOptions(server.address, "games", "sim-1", SECRET)
        with registration(pool):
            assert said(caplog, "not the service that was asked for")


@pytest.mark.parametrize(
    "settings", [{"pool": "a/b"}, {"endpoint_id": ""}, {"address": "127.0.0.1:0"}]
)
def test_what_cannot_be_registered_is_refused_at_once(settings: dict[str, str]) -> None:
    arguments = {"address": "127.0.0.1:7070", "pool": "games", "endpoint_id": "sim-1", **settings}

    with pytest.raises(ConfigurationError):
        RegistrarOptions(arguments["address"], arguments["pool"], arguments["endpoint_id"])


# --- peers of other kinds --------------------------------------------------------------------


def arrival(endpoint_id: str = "sim-1") -> RegistrationRequest:
    return RegistrationRequest("games", endpoint_id, "127.0.0.1", 5555)


def raw_visit(registrar: Registrar, *frames: bytes, ends: bool = False) -> tuple[Any, Any]:
    """Dial the registrar; say ``frames`` and then nothing, or end."""
    own = connect_options(registrar).connect_options()
    channel = own.open()
    no_answer = threading.Event()

    def words() -> Iterator[bytes]:
        yield from frames
        if not ends:
            no_answer.wait(30.0)

    return channel, channel.stream_stream(wire.ATTEND)(words(), metadata=own.metadata)


@pytest.mark.parametrize(
    ("frames", "words"),
    [
        ((), "no registration request came"),
        ((b"\xff",), "are no rlmesh_ray.registry.v1.AttendRequest"),
        ((b"",), "'games', not ''"),
    ],
)
def test_a_client_that_sends_nonsense_gets_an_error_and_ends(
    registrar: Registrar, book: Book, frames: tuple[bytes, ...], words: str
) -> None:
    channel, call = raw_visit(registrar, *frames, ends=not frames)

    (answer,) = [wire.parse_registration_reply(data) for data in call]
    channel.close()

    assert isinstance(answer, RegistrationRefused)
    assert answer.kind is RefusalKind.NOT_LIKE_THIS
    assert words in answer.message
    assert book.events.empty()


def test_who_says_nothing_at_all_loses_the_place(
    registrar: Registrar, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(registrar_module, "_REQUEST_TIMEOUT_S", 0.05)
    channel, call = raw_visit(registrar)

    (answer,) = [wire.parse_registration_reply(data) for data in call]
    channel.close()

    assert "no registration request came for 0.05 s" in str(answer)


def test_a_message_that_is_too_long_ends_its_own_call_only(
    registrar: Registrar, book: Book
) -> None:
    with registration(connect_options(registrar)) as (started, reported):
        reported.get(timeout=20.0)
        channel, call = raw_visit(registrar, bytes(wire.MAX_REQUEST_BYTES + 1))
        with pytest.raises(grpc.RpcError) as caught:
            next(call)
        channel.close()

        assert isinstance(caught.value, grpc.Call)
        assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        started.require_not_failed()
        assert len(book.present) == 1


def test_many_come_and_go_at_once_and_no_session_is_left(book: Book) -> None:
    with Registrar("games", book, secret=SECRET) as registrar:
        with contextlib.ExitStack() as stack:
            for number in range(40):
                pool = connect_options(registrar, f"sim-{number}")
                stack.enter_context(Registration(pool, host="127.0.0.1", port=1000 + number))
            assert eventually(lambda: len(book.present) == 40)
            assert book.present == {f"sim-{n}": f"127.0.0.1:{1000 + n}" for n in range(40)}

        assert book.present == {}


# --- TLS -------------------------------------------------------------------------------------


@needs_openssl
def test_a_registrar_with_mutual_tls_takes_endpoints_with_certificates_and_no_others(
    book: Book, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING)
    ours, theirs = Authority(tmp_path, "ours"), Authority(tmp_path, "theirs")
    tls = ServerTls(*ours.sign("server"), ours.certificate)
    client = ours.sign("client")
    with Registrar("games", book, secret=SECRET, tls=tls) as registrar:
        for other, words in {
            None: "if the endpoint uses TLS, name its authority",
            ClientTls(theirs.certificate, *client): "not signed by the authority",
            ClientTls(ours.certificate): "not in pool games",
            ClientTls(tmp_path / "missing.pem"): "missing.pem",
        }.items():
            caplog.clear()
            with registration(connect_options(registrar, tls=other)):
                assert said(caplog, words)
        assert book.events.empty()

        with simulator(
            registrar, tmp_path, "--pool-tls-ca", str(ours.certificate),
            "--tls-cert", str(client[0]), "--tls-key", str(client[1]),
            "--advertise", "sim.example:0",
        ) as started:  # fmt: skip
            registered, port = started.event(), started.address.rpartition(":")[2]

    assert (registered["event"], registered["address"]) == ("registered", f"sim.example:{port}")


# --- serve-env --register --------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Simulator:
    """A process of ``serve-env --register``."""

    process: "subprocess.Popen[str]"
    address: str
    """Where it serves."""

    def event(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        event: dict[str, Any] = json.loads(self.process.stdout.readline())
        return event


@contextlib.contextmanager
def simulator(
    registrar: Registrar | str, folder: Path, *options: str, secret: str = SECRET
) -> Iterator[Simulator]:
    """Run an endpoint as an operator does; kill it when the block ends."""
    file = folder / f"pool-token-{secret}"
    file.write_text(f"{secret}\n")
    file.chmod(0o600)
    name = registrar if isinstance(registrar, str) else f"games@{registrar.address}"
    command = [
        sys.executable, "-m", "rlmesh_ray", "serve-env", "CartPole-v1", "--json",
        "--register", name, "--pool-token-file", str(file), *options,
    ]  # fmt: skip
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    ) as process:
        try:
            assert process.stdout is not None
            yield Simulator(process, json.loads(process.stdout.readline())["address"])
        finally:
            process.send_signal(signal.SIGCONT)
            process.kill()


def test_serve_env_registers_and_leaves_the_pool_while_its_sessions_still_have_time(
    registrar: Registrar, book: Book, tmp_path: Path
) -> None:
    options = ["--endpoint-id", "sim-1", "--leave-time", "60"]
    with simulator(registrar, tmp_path, *options) as started:
        registered = started.event()
        assert book.next() == ("enter", "sim-1", started.address)
        env = RemoteEnv(started.address, token=endpoint_token(SECRET, "games", "sim-1"))
        env.reset()
        while (reported := book.reported.get(timeout=20.0)[1]).resets == 0:
            pass
        started.process.send_signal(signal.SIGTERM)

        assert book.next() == ("remove", "sim-1")
        env.step(0)
        env.close()
        stopped = started.event()
        code = started.process.wait(timeout=20)

    assert reported.sessions.open == 1
    assert registered == {
        "event": "registered",
        "pool": "games",
        "registrar": registrar.address,
        "endpoint_id": "sim-1",
        "incarnation": 1,
        "address": started.address,
    }
    assert (stopped["event"], code) == ("stopped", 0)


def test_the_token_of_one_endpoint_opens_no_other(registrar: Registrar, tmp_path: Path) -> None:
    own = tmp_path / "own-token"
    own.write_text("of-its-users\n")
    own.chmod(0o600)
    options = ["--endpoint-id", "sim-1", "--token-file", str(own), "--address", "0.0.0.0:0"]
    with simulator(registrar, tmp_path, *options) as started:
        assert started.event()["address"] == started.address, "as the registrar sees it"
        for token in (endpoint_token(SECRET, "games", "sim-1"), "of-its-users"):
            RemoteEnv(started.address, token=token).close()
        others = [endpoint_token(SECRET, "games", "sim-2"), registration_token(SECRET), SECRET]
        for token in others:
            with pytest.raises(AccessDeniedError):
                RemoteEnv(started.address, token=token)


def test_what_the_pool_refuses_for_good_ends_the_command_with_the_reason(
    registrar: Registrar, book: Book, tmp_path: Path
) -> None:
    with simulator(registrar, tmp_path, "--endpoint-id", "sim-1") as older:
        older.event()
        with registration(connect_options(registrar), port=6666) as (_, reported):
            assert reported.get(timeout=20.0).incarnation == 2
            stopped, error = older.event(), older.event()
            code = older.process.wait(timeout=20)

            assert (stopped["event"], error["event"], code) == ("stopped", "error", 1)
            assert "has registered as 'sim-1'" in error["message"]
            assert book.present == {"sim-1": "127.0.0.1:6666"}


@pytest.mark.slow
def test_an_endpoint_that_is_frozen_is_out_and_comes_back_by_itself(
    registrar: Registrar, book: Book, tmp_path: Path
) -> None:
    with simulator(registrar, tmp_path, "--endpoint-id", "sim-1") as started:
        started.event()
        started.process.send_signal(signal.SIGSTOP)
        assert eventually(lambda: not book.present)
        started.process.send_signal(signal.SIGCONT)

        assert started.event()["incarnation"] == 2


def test_an_endpoint_of_another_program_is_in_the_pool_while_it_answers(
    registrar: Registrar, book: Book, tmp_path: Path
) -> None:
    (tmp_path / "pool-token").write_text(SECRET)
    (tmp_path / "pool-token").chmod(0o600)
    address = free_address()
    host, port = address.split(":")
    command = [
        sys.executable, "-m", "rlmesh_ray", "register", f"games@{registrar.address}", address,
        "--pool-token-file", str(tmp_path / "pool-token"), "--endpoint-id", "engine", "--json",
    ]  # fmt: skip
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        started = Simulator(process, address)
        awaited = started.event()
        for incarnation in (1, 2):
            with socket.create_server((host, int(port))):
                assert started.event()["incarnation"] == incarnation
                assert book.present == {"engine": address}
            assert started.event()["event"] == "away"
            assert book.present == {}
        process.send_signal(signal.SIGINT)
        _, said = process.communicate(timeout=20)

    assert (awaited["event"], awaited["address"]) == ("awaited", address)
    assert f"nothing answers at {address} yet" in said
    assert process.returncode == 0


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["games", "127.0.0.1:5000"], "'games' names no pool: write POOL@HOST:PORT"),
        (["games@127.0.0.1:7070", "127.0.0.1:0"], "name the endpoint's own port"),
        (["games@127.0.0.1:7070", "0.0.0.0:5000"], "is no address that clients can dial"),
        (["games@127.0.0.1:7070", "[::]:5000"], "is no address that clients can dial"),
    ],
)
def test_what_register_cannot_use_is_named_without_options_that_it_lacks(
    arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    code = main(["register", *arguments])

    assert code == 2
    reported = capsys.readouterr().err
    assert words in reported
    assert "--register" not in reported
    assert "--advertise" not in reported


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--register", "games"], "write POOL@HOST:PORT"),
        (["--register", "games@nowhere"], "'nowhere' is not an address"),
        (["--register", "g/m@127.0.0.1:7070"], "pool='g/m' is no name"),
        (["--register", "games@127.0.0.1:7070", "--endpoint-id", "a b"], "endpoint-id='a b'"),
        (["--register", "games@127.0.0.1:7070", "--address", "unix:here"], "in place of a unix"),
        (["--advertise", "192.0.2.7:0"], "add --register"),
    ],
)
def test_options_that_make_no_sense_are_refused(
    options: list[str],
    words: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("GRPC_VERBOSITY", "NONE")
    code = main(["serve-env", "CartPole-v1", *options])

    assert code == 2
    assert words in capsys.readouterr().err
