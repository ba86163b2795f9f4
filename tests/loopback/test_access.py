"""Tokens, on every call of every protocol of a port: who gets in, as whom, and what others see."""

import contextlib
import logging
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc
import gymnasium
import numpy as np
import pytest

from rlmesh_ray import EnvServer, ModelServer, RemoteEnv, RemoteModel, TokenFile
from rlmesh_ray.auth import token_file
from rlmesh_ray.auth.token_file import derive_token
from rlmesh_ray.client.channel import ConnectOptions
from rlmesh_ray.client.env.env_client import EnvClient
from rlmesh_ray.client.env.observer import EndpointObserver
from rlmesh_ray.client.health import check_health
from rlmesh_ray.dialects.rllink import wire as m
from rlmesh_ray.dialects.rllink.client import RLlinkClient
from rlmesh_ray.dialects.rllink.server.connection import RLlinkServer
from rlmesh_ray.errors import (
    AccessDeniedError,
    AddressError,
    CodecError,
    ConfigurationError,
    EndpointUnreachableError,
    RemoteError,
)
from tests.loopback.child_processes import worker_pids
from tests.loopback.eventually import eventually
from tests.loopback.ports import plain_channel
from tests.loopback.served_calls import Metadata, ServedCalls, ended_with

SECRET = "the-fleets-s3cret"
RIGHT = derive_token(SECRET, "fleet/0")
ROTATED_OUT = "s3cret-of-yesterday"
RAYS = "s3cret-of-ray"
WRONG = {
    "wrong": "s3cret-wrong",
    "truncated": RIGHT[:-1],
    "one-too-long": RIGHT + "A",
    "other-case": RIGHT.swapcase(),
    "another-endpoints": derive_token(SECRET, "fleet/1"),
    "another-roles": derive_token(SECRET, "fleet/0", "operator"),
    "the-secret-itself": SECRET,
    "rotated-out": ROTATED_OUT,
    "rays": RAYS,
}
STRANGERS: dict[str, Metadata] = {
    "none": (),
    "empty": (("authorization", ""),),
    "scheme-only": (("authorization", "Bearer "),),
    "other-scheme": (("authorization", f"Basic {RIGHT}"),),
    "other-header": (("x-authorization", f"Bearer {RIGHT}"), ("token", RIGHT)),
    "beside-a-wrong-one": (
        ("authorization", "Bearer s3cret-wrong"),
        ("authorization", f"Bearer {RIGHT}"),
    ),
    **{name: (("authorization", f"Bearer {token}"),) for name, token in WRONG.items()},
    **{f"{name}-alone": (("authorization", token),) for name, token in WRONG.items()},
}


@pytest.fixture(autouse=True)
def rays_token(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_AUTH_TOKEN", RAYS)


@pytest.fixture(autouse=True)
def looks_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have servers notice that a file has changed with the next call."""
    monkeypatch.setattr(token_file, "_LOOK_AGAIN_S", 0.0)


@pytest.fixture
def tokens(tmp_path: Path) -> Callable[..., TokenFile]:
    """Return what replaces the endpoints' token file as a whole."""
    file = tmp_path / "tokens"

    def write(*lines: str) -> TokenFile:
        new = tmp_path / "tokens.new"
        new.write_text("\n".join(lines))
        new.chmod(0o600)
        new.rename(file)
        return TokenFile(file)

    return write


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> ServedCalls:
    return ServedCalls(monkeypatch)


def zeros(observations: Any) -> Any:
    return np.zeros(len(observations), np.int64)


@contextlib.contextmanager
def env_server(token: Any) -> Iterator[EnvServer]:
    with EnvServer("CartPole-v1", token=token, allow_calls=("spec",), allow_shutdown=True) as made:
        yield made


@contextlib.contextmanager
def model_server(token: Any) -> Iterator[ModelServer]:
    with ModelServer(zeros, token=token, allow_shutdown=True) as made:
        yield made


@pytest.mark.parametrize("serve", [env_server, model_server])
def test_no_call_of_any_protocol_is_answered_to_strangers(
    serve: Any,
    calls: ServedCalls,
    tokens: Callable[..., TokenFile],
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.DEBUG)
    source = tokens(RIGHT, ROTATED_OUT)
    with serve(source) as server, plain_channel(server.address) as channel:
        shown = (("authorization", f"Bearer {ROTATED_OUT}"),)
        first = ended_with(channel, "/grpc.health.v1.Health/Check", shown)
        tokens(RIGHT)
        calls.entered.clear()
        workers = worker_pids()
        # A new call is tried without a change here; so is one that is not served.
        for path in [*calls.paths, "/no.such/Call", "/"]:
            for metadata in STRANGERS.values():
                code, _, answers = ended_with(channel, path, metadata)

                assert code is grpc.StatusCode.UNAUTHENTICATED, (path, metadata)
                assert answers == []

        assert first[0] is grpc.StatusCode.OK
        assert calls.entered == []
        assert worker_pids() == workers
        assert getattr(server, "num_sessions", 0) == 0
        for shown in ((("authorization", f"Bearer {RIGHT}"),), (("authorization", RIGHT),)):
            assert ended_with(channel, "/grpc.health.v1.Health/Check", shown)[0].name == "OK"
    for token in (RIGHT, *WRONG.values()):
        assert token not in caplog.text


def test_all_protocols_of_the_port_are_among_the_calls_that_were_tried(calls: ServedCalls) -> None:
    with env_server(RIGHT), model_server(RIGHT):
        assert {
            "/rlmesh.env.v1.EnvService/Handshake",
            "/rlmesh.env.v1.EnvService/Join",
            "/rlmesh.env.v1.EnvService/Shutdown",
            "/rlmesh.model.v1.ModelService/Join",
            "/rlmesh_ray.lanes.v1.LaneService/Call",
            "/rlmesh_ray.observe.v1.ObserverService/List",
            "/rlmesh_ray.observe.v1.ObserverService/Render",
            "/dm_env_rpc.v1.Environment/Process",
            "/grpc.health.v1.Health/Check",
            "/grpc.health.v1.Health/Watch",
        } <= set(calls.paths)


class NoSimulators:
    """Notes who was let in."""

    def __init__(self) -> None:
        self.admitted: list[str] = []

    def admit(self, peer: str, dialect: object) -> "NoSimulators":
        self.admitted.append(peer)
        return self

    def receive(self, request: m.Request) -> m.Reply:
        return m.SetConfig(1, True)

    def leave(self) -> None:
        pass


def test_rllink_lets_no_stranger_in_either(
    tokens: Callable[..., TokenFile], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    host = NoSimulators()
    server = RLlinkServer(host.admit, token=tokens(RIGHT, ROTATED_OUT, "s3cret-probe probe"))
    server.start()
    try:
        RLlinkClient(server.address, token=ROTATED_OUT).close()
        source = tokens(RIGHT, "s3cret-probe probe")
        admitted = len(host.admitted)
        for token in (None, f"Bearer {RIGHT}", *WRONG.values()):
            with pytest.raises(RemoteError, match="token"):
                RLlinkClient(server.address, token=token)
        with pytest.raises(CodecError, match="token must be a text of 1 to 256"):
            RLlinkClient(server.address, token="")
        with pytest.raises(RemoteError, match="role client, and this one is a probe's"):
            RLlinkClient(server.address, token="s3cret-probe")
        assert len(host.admitted) == admitted == 1
        with RLlinkClient(server.address, token=source) as client:
            assert client.get_config().env_steps_per_sample == 1
    finally:
        server.stop()
    for token in (RIGHT, "s3cret-probe", *WRONG.values()):
        assert token not in caplog.text


# --- roles -----------------------------------------------------------------------------


@pytest.mark.parametrize("serve", [env_server, model_server])
def test_each_role_may_do_what_it_is_for_and_nothing_more(
    serve: Any, calls: ServedCalls, tokens: Callable[..., TokenFile]
) -> None:
    source = tokens("the-probe probe", "the-client client", "the-operator operator")
    with (
        serve(source) as server,
        plain_channel(server.address) as channel,
    ):
        calls.entered.clear()
        (shutdown,) = (path for path in calls.paths if path.endswith("/Shutdown"))
        denied: dict[str, set[str]] = {"probe": set(), "client": set(), "operator": set()}
        for role, paths in denied.items():
            shown = (("authorization", f"Bearer the-{role}"),)
            for path in calls.paths:
                if path.endswith("/Watch") or (path, role) == (shutdown, "operator"):
                    continue  # the call would not end, or the endpoint would
                calls.entered.clear()
                code, details, _ = ended_with(channel, path, shown, b"\xff")
                if code is grpc.StatusCode.PERMISSION_DENIED:
                    paths.add(path.rpartition("/")[2])
                    assert calls.entered == []
                    assert f"this one has the role {role}" in details
                    assert "requires a token of the role" in details

    sessions = {"Join"} | ({"Call", "OpenTcp", "Process"} if serve is env_server else set())
    assert denied == {"probe": {*sessions, "Shutdown"}, "client": {"Shutdown"}, "operator": set()}


def test_a_probe_asks_for_health_and_observes_and_a_client_has_sessions(
    tokens: Callable[..., TokenFile],
) -> None:
    source = tokens("the-probe probe", "the-client client")
    with env_server(source) as server:
        assert check_health(ConnectOptions(server.address, "the-probe")).is_serving
        with EndpointObserver(server.address, token="the-probe") as observer:
            assert observer.sessions() == ()
        with pytest.raises(AccessDeniedError, match="requires a token of the role client"):
            RemoteEnv(server.address, token="the-probe").reset()
        env = RemoteEnv(server.address, token=source)
        env.reset()
        env.close()


@pytest.mark.parametrize(
    ("token", "words"),
    [
        (
            None,
            "this endpoint requires a token, and the call carries none; give it one: --token-file",
        ),
        (
            "other",
            "this endpoint requires another token than the call carries; give it the right one: ",
        ),
    ],
)
def test_who_is_turned_away_learns_how_to_give_a_token(token: str | None, words: str) -> None:
    with model_server("the-token") as server, pytest.raises(AccessDeniedError) as refused:
        RemoteModel(server.address, token=token)

    assert words in refused.value.message
    assert "RLMESH_RAY_TOKEN" in refused.value.message
    assert "token=TokenFile(PATH) reads it from a file" in refused.value.message
    assert "the-token" not in str(refused.value)


# --- rotation --------------------------------------------------------------------------


def test_a_session_outlives_its_token(tokens: Callable[..., TokenFile]) -> None:
    source = tokens("old")
    with env_server(source) as server:
        env = EnvClient(ConnectOptions(server.address, source))
        env.reset()
        tokens("old", "new")
        env.step([np.zeros(1, np.int64)])
        tokens("new")
        env.step([np.zeros(1, np.int64)])

        with pytest.raises(AccessDeniedError):
            RemoteEnv(server.address, token="old")
        # A call of its own shows what stands in the file now.
        assert env.call("spec")
        env.reset()
        env.close()
        later = RemoteEnv(server.address, token=source)
        later.reset()
        later.close()


def test_a_client_whose_file_is_bad_just_now_says_so_and_may_try_again(
    tokens: Callable[..., TokenFile],
) -> None:
    source = tokens("new")
    with env_server("new") as server:
        source.path.chmod(0o644)
        with pytest.raises(EndpointUnreachableError, match=r"no token to send.*chmod 600"):
            RemoteEnv(server.address, token=source)
        tokens("new")
        env = RemoteEnv(server.address, token=source)
        env.reset()
        env.close()


@pytest.mark.slow
def test_a_rotation_under_many_calls_fails_none(tokens: Callable[..., TokenFile]) -> None:
    source = tokens("token-0")
    failures: list[Exception] = []
    is_over = threading.Event()
    counts = [0] * 100

    def ask(number: int, model: str) -> None:
        try:
            while not is_over.is_set():
                assert check_health(ConnectOptions(model, source)).is_serving
                counts[number] += 1
        except Exception as error:  # noqa: BLE001  # reported below
            failures.append(error)

    with model_server(source) as server, ThreadPoolExecutor(100) as pool:
        asking = [pool.submit(ask, number, server.address) for number in range(100)]
        try:
            for number in range(1, 4):
                before = list(counts)
                # New clients, new servers: first both count, then the clients change, then one.
                tokens(f"token-{number - 1}", f"token-{number}")
                _wait_for_progress(counts, before, asking)
                tokens(f"token-{number}", f"token-{number - 1}")
                before = list(counts)
                _wait_for_progress(counts, before, asking)
                tokens(f"token-{number}")
        finally:
            is_over.set()

    assert failures == []


def _wait_for_progress(counts: list[int], before: list[int], asking: list[Any]) -> None:
    """Wait until each thread has begun a call, and ended it, since ``before``."""
    assert eventually(
        lambda: (
            all(count >= old + 2 for count, old in zip(counts, before, strict=True))
            or any(each.done() for each in asking)
        )
    )


def test_a_model_session_outlives_its_token_too(tokens: Callable[..., TokenFile]) -> None:
    source = tokens("old")
    env = gymnasium.make_vec("CartPole-v1", num_envs=1)
    with model_server(source) as server:
        model = RemoteModel(server.address, token=source)
        model.configure_route(env)
        tokens("new")

        observations, _ = env.reset()
        assert model.predict(observations) == [0]
        model.close()


# --- what does not start ---------------------------------------------------------------


@pytest.mark.parametrize("token", [True, 1, 0, b"s3cret"])
def test_only_a_text_and_false_say_what_token_clients_need(token: Any) -> None:
    with pytest.raises(ConfigurationError, match=r"give a str or a TokenFile|give a token"):
        EnvServer("CartPole-v1", address="0.0.0.0:0", token=token)


@pytest.mark.parametrize("kind", ["env", "model", "rllink"])
def test_rays_own_token_opens_no_endpoint(kind: str) -> None:
    with pytest.raises(ConfigurationError, match="Ray's own token") as caught:
        _make(kind, token=RAYS)
    assert RAYS not in str(caught.value)


@pytest.mark.parametrize("kind", ["env", "model", "rllink"])
def test_nothing_listens_for_others_without_a_token(kind: str) -> None:
    with pytest.raises(AddressError, match="give a token"):
        _make(kind, address="0.0.0.0:0")


def _make(kind: str, **options: Any) -> object:
    if kind == "env":
        return EnvServer("CartPole-v1", **options)
    return (
        ModelServer(zeros, **options)
        if kind == "model"
        else RLlinkServer(NoSimulators().admit, **options)
    )


def test_an_endpoint_may_listen_without_a_token_and_logs_a_warning(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with ModelServer(zeros, address="0.0.0.0:0", token=False) as server:
        assert check_health(ConnectOptions(server.address)).is_serving

    (warning,) = [each for each in caplog.records if each.levelno == logging.WARNING]
    assert "has no token" in warning.getMessage()


def test_an_rllink_port_may_listen_without_a_token_and_logs_a_warning(
    caplog: pytest.LogCaptureFixture,
) -> None:
    server = RLlinkServer(NoSimulators().admit, address="0.0.0.0:0", token=False)
    server.start()
    try:
        _, _, port = server.address.rpartition(":")
        with RLlinkClient(f"127.0.0.1:{port}") as client:
            assert client.get_config().env_steps_per_sample == 1
    finally:
        server.stop()

    (warning,) = [each for each in caplog.records if each.levelno == logging.WARNING]
    assert "has no token" in warning.getMessage()


@pytest.mark.parametrize("options", [{"token": RIGHT}, {}])
def test_an_endpoint_with_a_token_or_on_loopback_logs_no_warning(
    options: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    address = "0.0.0.0:0" if options else "127.0.0.1:0"
    with ModelServer(zeros, address=address, **options):
        pass

    assert [each for each in caplog.records if each.levelno >= logging.WARNING] == []


def test_a_policy_is_dialed_as_connect_options_say_unless_an_option_says_more() -> None:
    with ModelServer(zeros, token=RIGHT) as server:
        known = ConnectOptions(server.address, RIGHT)
        wrong = ConnectOptions(server.address, WRONG["another-roles"])
        with RemoteModel(known) as model, RemoteModel(wrong, token=RIGHT):
            assert model.address == server.address
        with pytest.raises(AccessDeniedError):
            RemoteModel(wrong)
