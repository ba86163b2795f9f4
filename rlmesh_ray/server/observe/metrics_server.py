"""``/metrics`` for Prometheus, without Ray: an HTTP server over endpoints' statistics.

A scrape reads counters, in a separate thread; it asks no worker, so that no step waits for it. A
connection takes a thread only when its request is complete, and ends with the answer.
"""

import asyncio
import contextlib
import logging
from collections.abc import Iterable, Iterator
from typing import Any

from rlmesh_ray.errors import AddressError, ListenError, MissingPackageError, install_command
from rlmesh_ray.protocol.address import Address, parse_address
from rlmesh_ray.server.endpoint.bind_policy import listen_arguments
from rlmesh_ray.server.endpoint.event_loop import in_thread, shared_loop
from rlmesh_ray.server.observe.statistics import RESTARTS, TAGS, Measured, metrics_of, snapshot

_LOG = logging.getLogger(__name__)

MAX_CONNECTIONS = 64
"""At a time; another one replaces the oldest."""
REQUEST_TIMEOUT_S = 10.0
"""How long a client may take to send its request, and then to receive its answer."""
MAX_REQUEST_BYTES = 8 * 1024


class StatisticsCollector:
    """A collector of prometheus_client, over the table of metrics."""

    def __init__(self, measured: Measured) -> None:
        self._measured = measured

    def collect(self) -> Iterable[Any]:
        from prometheus_client import Metric as Family

        families: dict[str, Family] = {}
        for endpoint in self._measured():
            tags = dict(zip(TAGS, (endpoint.endpoint_id, endpoint.fleet), strict=True))
            values = snapshot(endpoint.statistics) | {"restarts": endpoint.restarts}
            metrics = {**metrics_of(type(endpoint.statistics)), "restarts": RESTARTS}
            for name, metric in metrics.items():
                new = Family(metric.name, metric.description, metric.kind.name.lower())
                family = families.setdefault(metric.name, new)
                for series in metric.series:
                    for label, value in series.read(values[name]).items():
                        own = {series.label: label} if series.label else {}
                        family.add_sample(series.exported, tags | own, value)
        return families.values()


@contextlib.contextmanager
def serve_metrics(address: str, measured: Measured) -> Iterator[str]:
    """Serve the metrics of endpoints to Prometheus at ``http://ADDRESS/metrics``.

    A context manager, which yields the address. Every client that reaches it may read the metrics,
    without a token: the names and addresses of endpoints, and counts.

    Args:
        address: ``HOST:PORT`` (port 0: a free one).
        measured: Returns endpoints, with the statistics of an ``EnvServer`` or a ``ModelServer``.
            It is called at each scrape, in a thread.

    Raises:
        MissingPackageError: prometheus_client is not installed.
        AddressError: ``address`` is malformed, a unix socket, in use, or not this machine's.
    """
    try:
        from prometheus_client import CollectorRegistry, make_wsgi_app
    except ImportError as error:
        raise MissingPackageError(
            f"metrics need: {install_command('prometheus')}, or pip install prometheus-client"
        ) from error
    place = parse_address(address)
    if place.path:
        raise AddressError(f"Prometheus cannot dial {address}, a unix socket; write HOST:PORT")
    registry = CollectorRegistry()
    registry.register(StatisticsCollector(measured))
    port = _MetricsPort(make_wsgi_app(registry))
    try:
        bound = shared_loop().run(port.open(place))
    except OSError as error:
        raise ListenError(
            f"cannot serve metrics on {place}: {error}; choose another port, or 0 for a free one"
        ) from error
    if not place.is_local:
        _LOG.warning("metrics at %s can be read from other machines, without a token", place)
    try:
        yield str(Address(place.host, bound))
    finally:
        shared_loop().run(port.close())


class _MetricsPort:
    """Answers one HTTP request per connection by a WSGI application. For the serving loop."""

    def __init__(self, app: Any) -> None:
        self._app = app
        self._connections: dict[asyncio.Task[None], None] = {}
        """The oldest first."""

    async def open(self, place: Address) -> int:
        """Listen; return the port. Raises an OSError."""
        self._server = await asyncio.start_server(
            self._serve, **listen_arguments(place), limit=MAX_REQUEST_BYTES
        )
        return int(self._server.sockets[0].getsockname()[1])

    async def close(self) -> None:
        self._server.close()
        connections = list(self._connections)
        for connection in connections:
            connection.cancel()
        await asyncio.gather(*connections, return_exceptions=True)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._connections[task] = None
        if len(self._connections) > MAX_CONNECTIONS:
            oldest = next(iter(self._connections))
            del self._connections[oldest]
            oldest.cancel()
        try:
            async with asyncio.timeout(REQUEST_TIMEOUT_S):
                head = await reader.readuntil(b"\r\n\r\n")
            answer = await in_thread(_answer, self._app, head)
            async with asyncio.timeout(REQUEST_TIMEOUT_S):
                writer.write(answer)
                await writer.drain()
                writer.close()
                await writer.wait_closed()
        except (OSError, EOFError, TimeoutError, asyncio.LimitOverrunError, asyncio.CancelledError):
            pass  # the client has gone, or has not kept to the limits, or the port is closed
        finally:
            self._connections.pop(task, None)
            writer.transport.abort()


def _answer(app: Any, head: bytes) -> bytes:
    line, *fields = head.decode("latin-1").split("\r\n")
    method, target, *_ = [*line.split(" "), "", ""]
    path, _, query = target.partition("?")
    environ = {"REQUEST_METHOD": method, "PATH_INFO": path, "QUERY_STRING": query}
    for field in fields:
        name, _, value = field.partition(":")
        environ[f"HTTP_{name.upper().replace('-', '_')}"] = value.strip()
    lines: list[str] = []

    def start(status: str, headers: Iterable[tuple[str, str]]) -> None:
        lines.extend([f"HTTP/1.1 {status}", *(f"{name}: {value}" for name, value in headers)])

    try:
        body = b"".join(app(environ, start))
    except Exception:  # noqa: BLE001  # of the user's ``measured``
        _LOG.exception("the metrics cannot be collected")
        lines[:], body = ["HTTP/1.1 500 Internal Server Error"], b""
    lines += [f"Content-Length: {len(body)}", "Connection: close", "", ""]
    return "\r\n".join(lines).encode("latin-1") + body
