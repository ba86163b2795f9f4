"""Who gets shared memory, who does not, and what is left of it."""

import contextlib
import io
import os
import select
import shutil
import signal
import socket
import struct
import subprocess
import sys
import threading
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from rlmesh_ray import EnvServer, RemoteEnv
from rlmesh_ray.client.channel import ConnectOptions
from rlmesh_ray.client.env.env_client import EnvClient, shake_hands
from rlmesh_ray.client.join_stream import JoinStream, open_call
from rlmesh_ray.errors import ConfigurationError, EndpointError, RemoteEnvError
from rlmesh_ray.protocol import capabilities
from rlmesh_ray.protocol.messages import Close
from rlmesh_ray.server.env import connection_broker
from rlmesh_ray.testing.envs import SPACES, EchoEnv
from rlmesh_ray.testing.equality import assert_identical
from rlmesh_ray.transport import direct_sockets as frames
from rlmesh_ray.transport.step_buffers import StepBuffers
from rlmesh_ray.wire.rlmesh_v1 import env as env_wire
from tests.loopback.direct_sessions import NOTHING, array, has_direct_connection, served, session
from tests.loopback.eventually import eventually
from tests.loopback.lifelike import Lifelike
from tests.loopback.ports import plain_channel


@pytest.fixture(scope="module")
def lifelike() -> Iterator[EnvServer]:
    """Yield a server whose sessions end with their tests."""
    with EnvServer(Lifelike) as server:
        yield server


def test_a_client_that_leaves_before_its_direct_connection_leaves_nothing_to_the_next_session(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    send_fds, num_left = socket.send_fds, 1

    def to_no_peer(to: socket.socket, data: list[bytes], *rest: Any) -> int:
        nonlocal num_left
        if data == [frames.ACCEPTED] and num_left:
            num_left -= 1
            raise BrokenPipeError
        return send_fds(to, data, *rest)

    monkeypatch.setattr(socket, "send_fds", to_no_peer)
    with EnvServer(Lifelike, max_sessions=1) as server:
        first = EnvClient(ConnectOptions(server.address))
        pid: Any = first.reset().infos["pid"]
        assert [array(first.step(NOTHING)).item() for _ in range(3)] == [1, 2, 3]
        assert first.direct_connector.transport != "shared_memory"
        assert num_left == 0
        first.close()

        with session(server) as second:
            begun = second.reset()
            again: Any = begun.infos["pid"]
            assert again.tolist() == pid.tolist()
            assert array(begun).item() == 0
            assert [array(second.step(NOTHING)).item() for _ in range(3)] == [1, 2, 3]


def test_a_worker_that_was_given_a_direct_connection_too_late_goes_on_without_it() -> None:
    with EnvServer(Lifelike, _step_grace_s=600.0) as server:
        client = EnvClient(ConnectOptions(server.address))
        pid = int(client.reset().infos["pid"][0])  # type: ignore[index]
        os.kill(pid, signal.SIGSTOP)
        assert greet(server, client, timeout_ms=50) == (frames.REFUSED, [])
        os.kill(pid, signal.SIGCONT)

        assert [array(client.step(NOTHING)).item() for _ in range(3)] == [1, 2, 3]
        assert client.reset().infos["pid"] == pid
        # On busy cores its first try may come too late, and the next one after a pause.
        assert eventually(lambda: bool(client.step(NOTHING)) and has_direct_connection(client))
        client.close()


def test_spaces_with_text_travel_as_messages() -> None:
    with EnvServer(lambda: EchoEnv(SPACES["text"])) as server:
        assert (
            capabilities.SHARED_MEMORY
            not in shake_hands(ConnectOptions(server.address)).capabilities
        )
        with RemoteEnv(server.address) as env:
            env.reset()
            env.action_space.seed(1)
            env.step(env.action_space.sample())
        with pytest.raises(ConfigurationError, match="offers no shared memory"):
            RemoteEnv(server.address, transport="shared_memory")


def test_a_client_that_requires_a_transport_gets_an_error_when_the_endpoint_gives_none(
    lifelike: EnvServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(of: socket.socket, where: Any) -> None:
        raise ConnectionRefusedError

    client = EnvClient(ConnectOptions(lifelike.address), transport="shared_memory")
    client.reset()
    monkeypatch.setattr(socket.socket, "connect", refuse)  # gRPC has its own
    with pytest.raises(EndpointError, match="shared memory is not accessible"):
        client.step(NOTHING)
    client.close()


def test_an_operator_can_do_without() -> None:
    with EnvServer(Lifelike, transport="grpc") as server:
        client = EnvClient(ConnectOptions(server.address))
        client.reset()
        client.step(NOTHING)
        assert not has_direct_connection(client)
        client.close()


@pytest.mark.skipif(
    os.geteuid() != 0 or shutil.which("unshare") is None, reason="needs a network namespace"
)
def test_who_shares_no_network_with_the_endpoint_gets_messages(tmp_path: Path) -> None:
    program = """
import sys, numpy as np
from rlmesh_ray.client.channel import ConnectOptions
from rlmesh_ray.client.env.env_client import EnvClient
from rlmesh_ray.errors import ConfigurationError
client = EnvClient(ConnectOptions(sys.argv[1]))
client.reset()
print(client.step([np.zeros(1, np.int64)]).rewards.tolist(), client.direct_connector.is_open)
client.close()
try:
    EnvClient(ConnectOptions(sys.argv[1]), transport="shared_memory")
except ConfigurationError as error:
    print(error)
"""
    with EnvServer(Lifelike, address=f"unix:{tmp_path}/endpoint") as server:
        command = ["unshare", "--net", sys.executable, "-c", program, server.address]
        said = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)

    stepped, refused = said.stdout.splitlines()
    assert stepped == "[1.0] False"
    assert "in another container or on another machine" in refused


def test_memory_that_a_client_got_cannot_be_shrunk_and_is_its_own() -> None:
    with EnvServer(Lifelike, max_sessions=1) as server:
        first = EnvClient(ConnectOptions(server.address))
        first.reset()
        descriptors = greet(server, first)[1]
        mine = StepBuffers(descriptors[0], first.contract).observations[0]
        for descriptor in descriptors:
            os.close(descriptor)
        first.close()
        with RemoteEnv(server.address) as env:
            env.reset()
            env.step(0)
            env.step(0)

            assert mine.tolist() == [[0.0]]  # type: ignore[union-attr]


def test_the_block_is_sealed() -> None:
    with EnvServer(Lifelike) as server:
        client = EnvClient(ConnectOptions(server.address))
        client.reset()
        descriptors = greet(server, client)[1]
        with pytest.raises(PermissionError):
            os.ftruncate(descriptors[0], 0)
        for descriptor in descriptors:
            os.close(descriptor)
        client.close()


def greet(server: EnvServer, client: EnvClient, timeout_ms: int = 1000) -> tuple[bytes, list[int]]:
    """Come to the endpoint's broker as ``client`` would."""
    return come(server, frames.HELLO.pack(client.session_id.encode(), timeout_ms))


def come(server: EnvServer, greeting: bytes) -> tuple[bytes, list[int]]:
    name = shake_hands(ConnectOptions(server.address)).capabilities[capabilities.SHARED_MEMORY]
    where = frames.socket_address(name)
    assert where is not None
    with socket.socket(socket.AF_UNIX) as peer:
        peer.settimeout(20.0)
        peer.connect(where)
        peer.sendall(greeting)
        peer.shutdown(socket.SHUT_WR)
        answer, descriptors, _, _ = socket.recv_fds(peer, 1, 8)
    return answer, list(descriptors)


@pytest.mark.parametrize(
    "greeting",
    [
        frames.HELLO.pack(b"0" * 32, 1000),
        b"\xff" * frames.HELLO.size,
        b"GET / HTTP/1.1\r\n\r\n",
        b"",
    ],
)
def test_strangers_get_nothing_at_the_broker(lifelike: EnvServer, greeting: bytes) -> None:
    with session(lifelike) as client:
        answer, descriptors = come(lifelike, greeting)

        assert (answer, descriptors) in [(frames.REFUSED, []), (b"", [])]
        client.step(NOTHING)


def test_a_session_that_is_over_gets_nothing_at_the_broker(lifelike: EnvServer) -> None:
    client = EnvClient(ConnectOptions(lifelike.address))
    client.reset()
    client.close()

    assert greet(lifelike, client) == (frames.REFUSED, [])


def test_who_joins_with_the_session_id_of_another_takes_nothing_from_it(
    lifelike: EnvServer,
) -> None:
    with session(lifelike) as client:
        channel, metadata = plain_channel(client.address), client.metadata
        replay = JoinStream(open_call(channel, "/rlmesh.env.v1.EnvService/Join", metadata), "")
        replay.send(env_wire.pack_request(Close("1")))
        replay.receive(20.0)
        replay.close()

        assert eventually(lambda: lifelike.num_sessions == 1)
        client.step(NOTHING)
        assert has_direct_connection(client)


def test_a_session_without_a_reset_gets_nothing_at_the_broker(lifelike: EnvServer) -> None:
    client = EnvClient(ConnectOptions(lifelike.address))
    client.render()

    assert greet(lifelike, client) == (frames.REFUSED, [])
    client.close()


class Noisy(Lifelike):
    """Draws noise, another one each time.

    Args:
        way: How its pictures are, or what goes wrong.
    """

    render_mode = "rgb_array"

    def __init__(self, way: str = "") -> None:
        self._way = way
        self._num_drawn = 0

    def render(self) -> Any:
        self._num_drawn += 1
        if self._way == "raises":
            raise RuntimeError("no display")
        if self._way == "exits":
            os._exit(3)
        if self._way == "hangs":
            threading.Event().wait()
        return noise(self._num_drawn, self._way)


def noise(number: int, way: str = "") -> Any:
    shape = {"grey": (4, 6), "large": (4800, 4800, 3)}.get(way, (4, 6, 3))
    if way == "large":
        return np.full(shape, number, np.uint8)
    return np.random.default_rng(number).integers(256, size=shape, dtype=np.uint8)


@pytest.fixture(scope="module")
def noisy() -> Iterator[EnvServer]:
    with EnvServer(Noisy, num_envs=2) as server:
        yield server


def test_pictures_are_pixels_over_shared_memory(noisy: EnvServer) -> None:
    with session(noisy) as client:
        drawn = client.render()

        assert_identical(drawn, (noise(1), noise(1)))
        client.step([np.zeros(2, np.int64)])
        assert_identical(client.render(), (noise(2), noise(2)))


@pytest.mark.parametrize("transport", ["tcp", "grpc"])
def test_pictures_are_png_over_what_may_lead_to_another_machine(
    noisy: EnvServer, transport: str
) -> None:
    with session(noisy, transport) as client:
        client.step([np.zeros(2, np.int64)])
        png = client.render()

        assert isinstance(png, bytes)
        with Image.open(io.BytesIO(png), formats=["PNG"]) as image:
            assert_identical(np.array(image), np.concatenate([noise(1), noise(1)], 1))


@pytest.mark.parametrize("way", ["grey", "large"])
def test_other_pictures_are_png_and_drawn_once(way: str) -> None:
    with served(partial(Noisy, way)) as client:
        png = client.render()

        assert isinstance(png, bytes)
        with Image.open(io.BytesIO(png), formats=["PNG"]) as image:
            assert_identical(np.array(image), noise(1, way))


def test_pictures_that_get_lost_are_sent_again_and_not_drawn_again() -> None:
    with served(Noisy) as client:
        direct = client.direct_connector.connection()
        assert direct is not None
        number = client.numbers.next_number
        direct.worker_socket.send(frames.REQUEST.pack(number, 0, frames.RENDER))
        assert select.select([direct.worker_socket.connection], [], [], 60.0)[0]
        direct.close()

        png = client.render()

        assert isinstance(png, bytes)
        with Image.open(io.BytesIO(png), formats=["PNG"]) as image:
            assert_identical(np.array(image), noise(1))
        assert array(client.step(NOTHING)).item() == 1
        assert_identical(client.render(), (noise(2),))


def test_an_environment_that_cannot_draw_says_why_and_goes_on() -> None:
    with served(partial(Noisy, "raises")) as client:
        with pytest.raises(RemoteEnvError, match="no display"):
            client.render()

        assert array(client.step(NOTHING)).item() == 1
        assert has_direct_connection(client)


def test_an_environment_that_ends_its_process_when_it_draws_is_missed() -> None:
    with served(partial(Noisy, "exits")) as client:
        with pytest.raises(RemoteEnvError, match="CRASHED"):
            client.render()

        with pytest.raises(RemoteEnvError, match="NOT_READY"):
            client.step(NOTHING)
        assert array(client.reset()).item() == 0


def test_a_picture_that_is_late_says_so_and_the_session_continues() -> None:
    limited = partial(session, transport="shared_memory", step_timeout_s=0.5)
    with EnvServer(partial(Noisy, "hangs"), _step_grace_s=0.0) as server, limited(server) as client:
        with pytest.raises(RemoteEnvError, match=r"no result within 0\.5 s; raise step_timeout_s"):
            client.render()

        with pytest.raises(RemoteEnvError):
            client.step(NOTHING)
        assert array(client.reset()).item() == 0


@contextlib.contextmanager
def silent_connections(server: EnvServer, count: int) -> Iterator[list[socket.socket]]:
    """Connect to the endpoint's socket for direct connections, and send nothing."""
    with contextlib.ExitStack() as owned:
        peers = [owned.enter_context(socket.socket(socket.AF_UNIX)) for _ in range(count)]
        for peer in peers:
            peer.settimeout(20.0)
            peer.connect(socket_for_direct_connections(server))
        yield peers


def socket_for_direct_connections(server: EnvServer) -> bytes:
    name = shake_hands(ConnectOptions(server.address)).capabilities[capabilities.SHARED_MEMORY]
    where = frames.socket_address(name)
    assert where is not None
    return where


def is_open(peer: socket.socket) -> bool:
    """Whether the other end, which says nothing either, has not closed the connection."""
    return not select.select([peer], [], [], 0.0)[0]


def test_silent_connections_keep_no_client_from_shared_memory() -> None:
    with (
        EnvServer(Lifelike) as server,
        silent_connections(server, 65),
        session(server) as client,
    ):
        client.step(NOTHING)

        assert has_direct_connection(client)


@pytest.fixture
def patient_broker(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have the endpoint close no connection because it has been silent for long."""
    monkeypatch.setattr(connection_broker, "_HELLO_TIMEOUT_S", 600.0)


def test_the_oldest_silent_connection_is_given_up_for_the_newest(patient_broker: None) -> None:
    with EnvServer(Lifelike) as server, silent_connections(server, 17) as peers:
        assert peers[0].recv(1) == b""
        assert all(is_open(peer) for peer in peers[1:])


def peers_are(monkeypatch: pytest.MonkeyPatch, *users: int) -> None:
    """Have the system name these users, by id, as those of the connections that come."""
    getsockopt, left = socket.socket.getsockopt, iter(users)

    def named(of: socket.socket, level: int, option: int, *size: int) -> Any:
        if (level, option) == (socket.SOL_SOCKET, socket.SO_PEERCRED):
            return struct.pack("3i", os.getpid(), next(left), os.getgid())
        return getsockopt(of, level, option, *size)

    monkeypatch.setattr(socket.socket, "getsockopt", named)


def test_silent_connections_of_other_users_take_no_place_of_the_same_user(
    monkeypatch: pytest.MonkeyPatch, patient_broker: None
) -> None:
    peers_are(monkeypatch, os.geteuid(), *[os.geteuid() + 1] * 30, 0)
    with EnvServer(Lifelike) as server, silent_connections(server, 32) as peers:
        # Other users share the 15 places that are left: the last 15 of them, less one for root.
        for peer in peers[1:17]:
            assert peer.recv(1) == b""
        assert all(is_open(peer) for peer in [peers[0], *peers[17:]])


def test_other_users_are_turned_away_where_the_same_user_has_all_places(
    monkeypatch: pytest.MonkeyPatch, patient_broker: None
) -> None:
    peers_are(monkeypatch, *[os.geteuid()] * 16, os.geteuid() + 1)
    with EnvServer(Lifelike) as server, silent_connections(server, 17) as peers:
        assert peers[16].recv(1) == b""
        assert all(is_open(peer) for peer in peers[:16])


OTHER_USER = """
import os, socket, sys
os.setgroups([])
os.setgid(65534)
os.setuid(65534)
peers = [socket.socket(socket.AF_UNIX) for _ in range(100)]
for peer in peers:
    peer.connect(bytes.fromhex(sys.argv[1]))
assert peers[84].recv(1) == b"", "the last one that has to go"
"""


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can start a process of another user")
def test_a_client_of_the_same_user_is_not_given_up_for_a_hundred_of_another(
    patient_broker: None,
) -> None:
    with EnvServer(Lifelike) as server, silent_connections(server, 1) as (ours,):
        script = [sys.executable, "-c", OTHER_USER, socket_for_direct_connections(server).hex()]
        subprocess.run(script, timeout=60, check=True)

        assert is_open(ours)
