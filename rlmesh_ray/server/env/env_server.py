"""EnvServer: an environment as an endpoint, without Ray."""

import contextlib
import dataclasses
import pickle
import secrets
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Self, Unpack

from rlmesh_ray.dialects import registry
from rlmesh_ray.envs.env_source import EnvLike, make_source
from rlmesh_ray.errors import ConfigurationError
from rlmesh_ray.options import SHARED_MEMORY, allowed_transports, completed, takes_options
from rlmesh_ray.polling import should_spin
from rlmesh_ray.server.endpoint.endpoint import Endpoint, Server
from rlmesh_ray.server.endpoint.endpoint_options import edition_texts, listening
from rlmesh_ray.server.endpoint.event_loop import shared_loop
from rlmesh_ray.server.endpoint.gate import max_calls
from rlmesh_ray.server.endpoint.handshake_service import ServiceOptions
from rlmesh_ray.server.endpoint.log import logged_as, new_endpoint_id
from rlmesh_ray.server.env.connection_broker import (
    ConnectionBroker,
    bound_sockets,
    checked_data_address,
)
from rlmesh_ray.server.env.env_options import (
    DEFAULT_MAX_SESSIONS,
    DEFAULT_STEP_GRACE_S,
    NEXT_STEP,
    TRUNCATE,
    EnvServerOptions,
    checked_names,
)
from rlmesh_ray.server.env.env_service import EnvService, load_dialect_services
from rlmesh_ray.server.env.worker_pool import WorkerPool
from rlmesh_ray.server.observe.observer_service import StatisticsService
from rlmesh_ray.server.observe.statistics import EnvStatistics
from rlmesh_ray.server.observe.statistics_report import observed_statistics
from rlmesh_ray.spaces.contract import EnvContract
from rlmesh_ray.spaces.validation import ValidationMode
from rlmesh_ray.transport.step_buffers import can_seal, is_fixed_size
from rlmesh_ray.wire.rlmesh_v1.limits import max_request_bytes

if TYPE_CHECKING:
    from rlmesh_ray.recording.options import RecordOptions

_CLOSE_S = 10.0  # several times what the pool takes


@takes_options(EnvServerOptions)
class EnvServer(Server):
    """Serves an environment over gRPC: a fixed-width vector of lanes to each session.

    The environment runs in worker processes, one for each session; the first one starts with the
    server, and a spare one ahead of each further session. At the end of a session its environment
    has 5 s to close, then it is killed. On Linux all processes that it has started end then, also
    those that have left its process group; elsewhere those of the group, with the worker's process.
    An environment that hangs costs its own session, not the others: the server continues to serve.
    Usable as a context manager.

    Where the extra ``dm-env-rpc`` is installed, it answers that protocol on the same port; each of
    its worlds is a session.

    Args:
        env: A Gymnasium id (``"CartPole-v1"``, ``"module:Env-v0"``), a factory that returns an
            Env or VectorEnv, or an instance. A factory or instance reaches the worker by pickle.
        **options: Those of ``EnvServerOptions``.

    Raises:
        ConfigurationError: An argument is wrong; the message says which, and how to fix it.
    """

    def __init__(
        self,
        env: EnvLike,
        *,
        _endpoint_id: str | None = None,
        _step_grace_s: float = DEFAULT_STEP_GRACE_S,
        **options: Unpack[EnvServerOptions],
    ) -> None:
        # An actor gives its id in the registry; only tests need another grace time.
        given = completed("EnvServer", EnvServerOptions, options)
        address, listen = listening("EnvServer", given["address"], "openpi")
        endpoint_id = _endpoint_id or new_endpoint_id()
        should_spin()  # refuses a wrong environment variable before anything starts
        record, allowed = given["record"], given["max_sessions"]
        self._source = dataclasses.replace(
            make_source(
                env,
                given["num_envs"],
                given["env_kwargs"],
                autoresets=given["autoreset"] == NEXT_STEP,
            ),
            truncates_on_bad_value=given["on_bad_value"] == TRUNCATE,
            reset_threads=int(given["reset_threads"]),
            observer=None if record is None else _recorder(record, endpoint_id),
        )
        self._max_sessions = _checked_sessions(allowed, self._source.max_sessions)
        self._pool = WorkerPool(
            self._source,
            ValidationMode(given["validation"]),
            self._max_sessions,
            given["sessions_per_worker"],
            _step_grace_s,
        )
        self._endpoint = Endpoint(
            address,
            token=given["token"],
            tls=given["tls"],
            endpoint_id=endpoint_id,
            on_stop=self._close_pool,
        )
        self._service_options = ServiceOptions(
            shutdown=self._endpoint.stop_soon if given["allow_shutdown"] else None,
            accept_texts=edition_texts(listen.accept_edition_texts),
            dialects=registry.enabled_dialects(given["dialects"], registry.env_dialects()),
            idle_timeout_s=listen.idle_timeout_s,
        )
        self._data_address = checked_data_address(address, listen.data_address, given)
        self._options = given
        self._contract: EnvContract | None = None

    @property
    def contract(self) -> EnvContract | None:
        """What the endpoint promises; None before ``start``."""
        return self._contract

    @property
    def num_sessions(self) -> int:
        """How many sessions are open."""
        return self._pool.num_sessions

    def statistics(self) -> EnvStatistics:
        """Return what it has done up to now. From any thread."""
        return self._pool.counts.statistics()

    def start(self) -> Self:
        """Start the first worker, then listen. Blocks until clients can connect.

        Raises:
            EnvStartError: The environment could not be created.
            ListenError: The address is in use or not this machine's.
            LocalProtocolError: It was started or stopped before.
        """
        self._endpoint.require_new()
        self._contract = self._pool.start()
        broker: ConnectionBroker | None = None
        try:
            drain = self._endpoint.drain
            broker = self._broker(self._contract)
            drain.preparations.append(broker.stop)
            service = EnvService(
                self._pool,
                self._contract,
                self._service_options,
                drain,
                broker,
                checked_names(self._options["allow_calls"]),
            )
            idle_timeout_s = self._service_options.idle_timeout_s
            added = [
                make(self._pool, self._contract, drain, idle_timeout_s)
                for make in load_dialect_services(self._service_options.dialects)
            ]
            has_observers = self._options["observers"]
            handlers = service.handlers(has_observers=has_observers)
            handlers += [each.handlers() for each in added]
            if has_observers:
                statistics = StatisticsService(lambda: [observed_statistics(self.statistics())])
                handlers.append(statistics.handlers())
            limits = [each.max_request_bytes for each in added]
            num_streams = max([1, *(each.streams_per_session for each in added)])
            self._endpoint.start(
                handlers,
                max_receive_bytes=max([max_request_bytes(self._contract), *limits]),
                max_calls=max_calls(self._max_sessions, num_streams),
            )
            with logged_as(self._endpoint.endpoint_id):
                shared_loop().run(broker.start())
        except BaseException:
            if broker is not None:
                broker.close_listener()
            self._endpoint.stop(0.0)  # closes the pool, too
            raise
        return self

    def _broker(self, contract: EnvContract) -> ConnectionBroker:
        """Return the broker of direct connections; it listens if they may use TCP."""
        if not is_fixed_size(contract):
            return ConnectionBroker(has_shared_memory=False)
        transports = allowed_transports(self._options["transport"])
        has_shared_memory = SHARED_MEMORY in transports and can_seal()
        if self._data_address is None:
            return ConnectionBroker(has_shared_memory=has_shared_memory)
        bound = bound_sockets(self._data_address.listen)
        return ConnectionBroker(
            has_shared_memory=has_shared_memory,
            sockets=bound,
            port=self._data_address.advertised_port or bound[0].getsockname()[1],
            endpoint=f"{self._endpoint.endpoint_id}/{secrets.token_hex(8)}",
        )

    def _close_pool(self) -> None:
        # A loop that something holds closes it later; workers end with this process at the latest.
        with contextlib.suppress(TimeoutError):
            shared_loop().run(self._pool.close(), _CLOSE_S)


def _checked_sessions(wanted: int | None, possible: int | None) -> int:
    """Return the maximum number of sessions, from the option and the limit of the source.

    Raises:
        ConfigurationError: The option is above what the source can serve.
    """
    if possible is None:
        return wanted or DEFAULT_MAX_SESSIONS
    if wanted is not None and wanted > possible:
        raise ConfigurationError(
            f"max_sessions={wanted}, but an instance can serve only {possible}; "
            "give a factory or a Gymnasium id instead"
        )
    return possible


def _recorder(record: "str | Path | RecordOptions", endpoint_id: str) -> bytes:
    from rlmesh_ray.recording.options import RecordOptions
    from rlmesh_ray.recording.recorder import SessionObserver

    options = RecordOptions.of(record)
    # A worker has the same working folder, until its environment changes it.
    options = dataclasses.replace(options, folder=Path(options.folder).absolute())
    return pickle.dumps(partial(SessionObserver, options, endpoint_id))
