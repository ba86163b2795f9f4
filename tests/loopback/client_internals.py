"""The private state of clients of this package: tests reach it here, and nowhere else."""

import contextlib
from collections.abc import Iterator

import pytest

from rlmesh_ray import RemoteEnv, RemoteModel, RemoteVectorEnv
from rlmesh_ray.client.env_client import EnvClient
from rlmesh_ray.client.join_stream import JoinStream
from rlmesh_ray.client.model_session_stream import ModelSessionStream
from rlmesh_ray.transport.direct_connection import DirectConnection
from rlmesh_ray.transport.shared_memory import EventfdSocket
from rlmesh_ray.transport.tcp import TcpSocket

Client = EnvClient | RemoteModel


def env_client(env: RemoteEnv | RemoteVectorEnv) -> EnvClient:
    """Return the session of an environment."""
    client = env._client
    assert isinstance(client, EnvClient)
    return client


def join_stream(client: Client) -> JoinStream:
    """Return the stream of the session's requests."""
    return client._stream


def vanish(client: Client) -> None:
    """End the Join stream without Close, as a client does that is killed."""
    join_stream(client).close()


def session_id(client: Client) -> str:
    """Return what names the session in its own calls."""
    return client._session_id


def session_metadata(client: EnvClient) -> tuple[tuple[str, str], ...]:
    """Return what a call into the session shows: the token, if there is one, and the session."""
    return client._metadata


def transport_of(client: EnvClient) -> str:
    """Return the present transport of steps: shared_memory, tcp or grpc."""
    return client._direct_connector.transport


def direct_connection(client: EnvClient) -> DirectConnection:
    """Return the direct connection, which is open."""
    direct = client._direct_connector.connection()
    assert direct is not None
    return direct


def leave_direct_connection(client: EnvClient) -> None:
    """Close the direct connection for good; the session goes on."""
    client._direct_connector.close()


def worker_socket(client: EnvClient) -> EventfdSocket | TcpSocket:
    """Return the client's end of its direct connection, to send what a client never sends."""
    return direct_connection(client)._worker


def hang_up(client: EnvClient) -> None:
    """Cut the direct connection, which the client finds out at its next use."""
    worker_socket(client).hang_up()


def num_messages(client: EnvClient) -> int:
    """Return how many requests the client has sent on its Join stream."""
    return client._session.num_sent


def num_unanswered(client: Client) -> int:
    """Return how many requests on the Join stream wait for their answers."""
    if isinstance(client, RemoteModel):
        stream = client._session_stream
        assert isinstance(stream, ModelSessionStream)
        return len(stream._awaited)
    session = client._session
    return session.num_sent - session.num_received


@contextlib.contextmanager
def step_timeout(client: EnvClient, timeout_s: float) -> Iterator[None]:
    """Have ``client`` wait so long only for answers, for a while: not while the session starts."""
    before_s, client._timeout_s = client._timeout_s, timeout_s
    try:
        yield
    finally:
        client._timeout_s = before_s


@contextlib.contextmanager
def endpoints_give_up_after(timeout_ms: int) -> Iterator[None]:
    """Have endpoints answer all clients in time; these wait for it as long as a busy machine takes.

    Args:
        timeout_ms: What requests ask for.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(EnvClient, "_server_timeout_ms", timeout_ms)
        yield
