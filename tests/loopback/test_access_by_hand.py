"""Calls that no client of gRPC would make: none gets in, and none closes the port for others."""

from collections.abc import Iterator

import numpy as np
import pytest

from rlmesh_ray import EnvServer, RemoteEnv
from tests.loopback.eventually import eventually
from tests.loopback.http2_frames import Headers, call_by_hand
from tests.loopback.served_calls import ServedCalls

CHECK = b"/grpc.health.v1.Health/Check"
OK, UNIMPLEMENTED, UNAUTHENTICATED = b"0", b"12", b"16"
RIGHT = (b"authorization", b"Bearer s3cret")


@pytest.fixture(scope="module")
def served() -> Iterator[tuple[EnvServer, ServedCalls]]:
    with pytest.MonkeyPatch.context() as patched:
        calls = ServedCalls(patched)
        with EnvServer("CartPole-v1", token="s3cret") as server:
            yield server, calls


@pytest.fixture
def server(served: tuple[EnvServer, ServedCalls]) -> EnvServer:
    return served[0]


@pytest.fixture
def calls(served: tuple[EnvServer, ServedCalls]) -> ServedCalls:
    served[1].entered.clear()
    return served[1]


@pytest.mark.parametrize(
    "headers",
    [
        [(b"Authorization", b"Bearer s3cret")],
        [(b"authorization-bin", b"QmVhcmVyIHMzY3JldA")],
        [RIGHT, RIGHT],
        [RIGHT, (b"authorization", b"s3cret")],
        [(b"authorization", b"Bearer s3cret, Bearer s3cret")],
        [(b"authorization", b"Bearer s3cret ")],
        [(b"authorization", b"\tBearer s3cret")],
        [(b"authorization", b"bearer s3cret")],
        [(b"authorization", b"Bearer s3\0cret")],
        [(b"authorization", b"Bearer \xff\xfe")],
        [(b"authorization", "Bearer s3cret\u00e9".encode())],
        [(b"authorization", b"Bearer " + b"s" * 8000)],
        [(b"cookie", b"authorization=Bearer s3cret")],
    ],
)
def test_a_token_in_another_form_admits_no_client(
    headers: Headers, server: EnvServer, calls: ServedCalls
) -> None:
    assert call_by_hand(server.address, CHECK, headers) != OK
    assert calls.entered == []
    assert call_by_hand(server.address, CHECK, [RIGHT]) == OK


@pytest.mark.parametrize(
    "path",
    [
        b"//rlmesh.env.v1.EnvService/Join",
        b"/rlmesh.env.v1.EnvService/Join/",
        b"/rlmesh.env.v1.EnvService/../Join",
        b"/rlmesh.env.v1.EnvService/join",
        b"/rlmesh.env.v1.EnvService/Join?x",
        b"/rlmesh.env.v1.EnvService%2fJoin",
        b"/grpc.health.v1.Health/../../rlmesh.env.v1.EnvService/Join",
        b"/grpc.health.v1.Health/Shutdown",
        b"/",
        b"*",
    ],
)
def test_a_path_in_another_form_leads_nowhere(
    path: bytes, server: EnvServer, calls: ServedCalls
) -> None:
    assert call_by_hand(server.address, path) == UNAUTHENTICATED
    assert call_by_hand(server.address, path, [RIGHT]) == UNIMPLEMENTED
    assert calls.entered == []


def test_a_stranger_cannot_close_the_port_with_a_malformed_path() -> None:
    with EnvServer("CartPole-v1", token="s3cret", max_sessions=3) as server:
        # Each of them began before another blow.
        sessions = []
        for _ in range(3):
            env = RemoteEnv(server.address, token="s3cret", transport="grpc")
            env.reset()
            sessions.append(env)
            call_by_hand(server.address, b"/\xff")
            assert eventually(lambda: _is_serving(server))
            assert server.health().is_serving
        for env in sessions:
            env.step(np.int64(0))
        assert server.num_sessions == 3
        for env in sessions:
            env.close()
        assert eventually(lambda: server.num_sessions == 0)


def _is_serving(server: EnvServer) -> bool:
    try:
        return call_by_hand(server.address, CHECK, [RIGHT]) == OK
    except OSError:
        return False
