"""ModelServer: a policy as an endpoint, without Ray."""

from collections.abc import Collection
from types import TracebackType
from typing import Self

from rlmesh_ray.models.batcher import BatcherStatistics
from rlmesh_ray.models.loading import as_policy
from rlmesh_ray.protocol.handshake import resolve_text
from rlmesh_ray.server.access import ServerTls
from rlmesh_ray.server.endpoint import Endpoint
from rlmesh_ray.server.model_host import ModelHost
from rlmesh_ray.server.model_service import ModelService
from rlmesh_ray.server.reception import HouseRules
from rlmesh_ray.wire.rlmesh_v1.limits import DEFAULT_MESSAGE_BYTES


class ModelServer:
    """Serves a policy over gRPC, to many clients at once. Usable as a context manager.

    Args:
        policy: A ``Policy``, a torch module, or a function (a batch of observations in, a batch
            of actions out).
        address: ``HOST:PORT`` (port 0: a free one) or ``unix:PATH``.
        token: What clients must show; required unless ``address`` is loopback.
        tls: Files for TLS.
        max_batch_rows: Most rows in a batch that joins the requests of several routes.
        allow_shutdown: Whether a client's Shutdown stops the server, as ``stop`` does.
        stop_on_close: Whether a client's Close stops the server after that client's session. By
            default it ends the session only: other clients may be at work.
        accept_edition_texts: See ``EnvServer``.

    Raises:
        ConfigurationError: ``policy`` is none of these, or an edition text is not known.
        AddressError: ``address`` is malformed, or open to strangers without a token.
    """

    def __init__(  # noqa: PLR0913  # the public surface; every option stands alone
        self,
        policy: object,
        *,
        address: str = "127.0.0.1:0",
        token: str | None = None,
        tls: ServerTls | None = None,
        max_batch_rows: int = 1024,
        allow_shutdown: bool = False,
        stop_on_close: bool = False,
        accept_edition_texts: Collection[str] = (),
    ) -> None:
        self._host = ModelHost(as_policy(policy), max_batch_rows)
        self._endpoint = Endpoint(address, token=token, tls=tls, on_stop=self._host.close)
        self._rules = HouseRules(
            shutdown=self._endpoint.stop_soon if allow_shutdown else None,
            on_close=self._endpoint.stop_soon if stop_on_close else None,
            accept_texts=frozenset(map(resolve_text, accept_edition_texts)),
        )

    @property
    def address(self) -> str:
        """Where clients dial it; only after ``start``."""
        return self._endpoint.address

    def statistics(self) -> BatcherStatistics:
        """Return what has been predicted, in how many batches."""
        return self._host.statistics()

    def start(self) -> Self:
        """Listen. Blocks until clients can connect.

        Raises:
            AddressError: The address is in use or not this machine's.
        """
        service = ModelService(self._host, self._rules, self._endpoint.drain)
        # Which spaces there will be is told within the streams that this limit is for.
        self._endpoint.start([service.handlers()], max_receive_bytes=DEFAULT_MESSAGE_BYTES)
        return self

    def wait(self, timeout_s: float | None = None) -> bool:
        """Block until the server has stopped; return whether it has."""
        return self._endpoint.wait(timeout_s)

    def stop(self, grace_s: float = 1.0) -> None:
        """Answer what is outstanding, then end the sessions. Idempotent; blocks.

        Args:
            grace_s: After how many seconds whatever is not answered yet is cut off.
        """
        self._endpoint.stop(grace_s)

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.stop()
