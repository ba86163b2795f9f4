"""What tests do to the parts of a client: cut its connections, shorten its times, count."""

import contextlib
from collections.abc import Iterator

import pytest

from rlmesh_ray import RemoteEnv, RemoteModel, RemoteVectorEnv
from rlmesh_ray.client.env.env_client import EnvClient
from rlmesh_ray.client.join_stream import JoinStream
from rlmesh_ray.client.model.remote_model import ModelSessionStream
from rlmesh_ray.protocol.client_session import Limit
from rlmesh_ray.transport.direct_connection import DirectConnection

Client = EnvClient | RemoteModel


def env_client(env: RemoteEnv | RemoteVectorEnv) -> EnvClient:
    """Return the session of an environment."""
    client = env._client
    assert isinstance(client, EnvClient)
    return client


def join_stream(client: Client) -> JoinStream:
    """Return the stream of the session's requests."""
    return client.stream if isinstance(client, EnvClient) else model_session_stream(client).stream


def model_session_stream(model: RemoteModel) -> ModelSessionStream:
    """Return the requests and answers of a session with a policy."""
    stream = model._session_stream
    assert isinstance(stream, ModelSessionStream)
    return stream


def vanish(client: Client) -> None:
    """End the Join stream without Close, as a client does that is killed."""
    join_stream(client).cancel()


def direct_connection(client: EnvClient) -> DirectConnection:
    """Return the direct connection, which is open."""
    direct = client.direct_connector.connection()
    assert direct is not None
    return direct


def hang_up(client: EnvClient) -> None:
    """Cut the direct connection, which the client finds out at its next use."""
    direct_connection(client).worker_socket.hang_up()


def num_unanswered(client: Client) -> int:
    """Return how many requests on the Join stream wait for their answers."""
    if isinstance(client, RemoteModel):
        return len(model_session_stream(client).awaited)
    session = client.session
    return session.num_sent - session.num_received


@contextlib.contextmanager
def step_timeout(client: EnvClient, timeout_s: float) -> Iterator[None]:
    """Have ``client`` wait so long only for answers, for a while: not while the session starts."""
    before = client.step_limit, client.reset_limit
    client.step_limit = Limit("step_timeout_s", timeout_s)
    client.reset_limit = Limit("reset_timeout_s", timeout_s)
    try:
        yield
    finally:
        client.step_limit, client.reset_limit = before


@contextlib.contextmanager
def endpoints_give_up_after(timeout_ms: int) -> Iterator[None]:
    """Have endpoints answer all clients in time; these wait for it as long as a busy machine takes.

    Args:
        timeout_ms: What requests ask for.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(EnvClient, "_server_timeout_ms", lambda *_: timeout_ms)
        yield
