"""ModelServer: a policy as an endpoint, without Ray."""

from types import TracebackType
from typing import Self

from rlmesh_ray.models.batcher import BatcherStatistics
from rlmesh_ray.models.loading import as_policy
from rlmesh_ray.server.access import ServerTls
from rlmesh_ray.server.endpoint import Endpoint
from rlmesh_ray.server.model_host import ModelHost
from rlmesh_ray.server.model_service import ModelService


class ModelServer:
    """Serves a policy over gRPC, to many clients at once. Usable as a context manager.

    Args:
        policy: A ``Policy``, a torch module, or a function (a batch of observations in, a batch
            of actions out).
        address: ``HOST:PORT`` (port 0: a free one) or ``unix:PATH``.
        token: What clients must show; required unless ``address`` is loopback.
        tls: Files for TLS.
        max_batch_rows: Most rows in a batch that joins the requests of several routes.

    Raises:
        ConfigurationError: ``policy`` is none of these.
        AddressError: ``address`` is malformed, or open to strangers without a token.
    """

    def __init__(
        self,
        policy: object,
        *,
        address: str = "127.0.0.1:0",
        token: str | None = None,
        tls: ServerTls | None = None,
        max_batch_rows: int = 1024,
    ) -> None:
        self._host = ModelHost(as_policy(policy), max_batch_rows)
        self._endpoint = Endpoint(address, token=token, tls=tls)

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
        self._endpoint.start([ModelService(self._host).handlers()])
        return self

    def wait(self, timeout_s: float | None = None) -> bool:
        """Block until the server has stopped; return whether it has."""
        return self._endpoint.wait(timeout_s)

    def stop(self, grace_s: float = 1.0) -> None:
        """End the sessions, after ``grace_s`` seconds at the most. Idempotent."""
        self._endpoint.stop(grace_s)
        self._host.close()

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.stop()
