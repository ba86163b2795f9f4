"""EnvServer: an environment as an endpoint, without Ray."""

import contextlib
import dataclasses
import pickle
import secrets
from collections.abc import Collection, Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Self

from rlmesh_ray.auth.token_file import TokenSource
from rlmesh_ray.dialects import registry
from rlmesh_ray.envs.env_source import EnvLike, make_source
from rlmesh_ray.options import (
    SHARED_MEMORY,
    allowed_transports,
    as_int,
    as_names,
    require_count,
    require_flag,
    require_seconds,
)
from rlmesh_ray.polling import should_spin
from rlmesh_ray.protocol.address import parse_address
from rlmesh_ray.protocol.handshake import edition_sha256
from rlmesh_ray.server.bind_policy import TlsSource
from rlmesh_ray.server.connection_limits import max_calls
from rlmesh_ray.server.endpoint import Endpoint
from rlmesh_ray.server.env_dialects import load_dialect_services
from rlmesh_ray.server.env_options import (
    DEFAULT_STEP_GRACE_S,
    autoresets,
    bound_sockets,
    checked_data_address,
    checked_sessions,
    truncates_on_bad_value,
)
from rlmesh_ray.server.env_service import EnvService, SessionServices
from rlmesh_ray.server.event_loop import shared_loop
from rlmesh_ray.server.handshake_service import ServiceOptions
from rlmesh_ray.server.health import Health
from rlmesh_ray.server.idle_timeout import checked_idle_timeout
from rlmesh_ray.server.lane_call_service import LaneCallService, checked_names
from rlmesh_ray.server.log_context import logged_as, new_endpoint_id
from rlmesh_ray.server.observer_service import ObserverService, StatisticsService
from rlmesh_ray.server.statistics import EnvStatistics
from rlmesh_ray.server.statistics_report import observed_statistics
from rlmesh_ray.server.ticket_service import TicketService
from rlmesh_ray.server.worker_pool import WorkerPool
from rlmesh_ray.spaces.contract import EnvContract
from rlmesh_ray.spaces.validation import ValidationMode
from rlmesh_ray.transport.anonymous_memory import can_seal
from rlmesh_ray.transport.connection_broker import ConnectionBroker, TcpListener
from rlmesh_ray.transport.step_buffers import is_fixed_size
from rlmesh_ray.wire.rlmesh_v1.limits import max_request_bytes

if TYPE_CHECKING:
    from rlmesh_ray.recording.options import RecordOptions

_CLOSE_S = 10.0  # several times what the pool takes


class EnvServer:
    """Serves an environment over gRPC: a fixed-width vector of lanes to each session.

    The environment runs in worker processes, one a session; the first one starts with the
    server and the others when a session needs one. At the end of a session its environment has
    5 s to close, then it is killed. All processes that it has started end with it; on Linux those
    that have left its process group, too. Usable as a context manager.

    Where the extra ``dm-env-rpc`` is installed, it answers that protocol on the same port; each of
    its worlds is a session.

    Args:
        env: A Gymnasium id (``"CartPole-v1"``, ``"module:Env-v0"``), a factory that returns an
            Env or VectorEnv, or an instance. A factory or instance reaches the worker by pickle.
        num_envs: Lanes of each session. One lane resets only when told to (autoreset mode
            DISABLED), several as ``autoreset`` says; a VectorEnv keeps its own width and mode.
        address: ``HOST:PORT`` (port 0: a free one) or ``unix:PATH``.
        env_kwargs: Passed to ``gymnasium.make``, or to the factory.
        autoreset: What several lanes do on the step after an episode's end, where they are single
            environments: ``"next_step"``, they reset; ``"disabled"``, nothing by themselves. Then
            clients that know how (rlmesh 0.1.0) may step each of them alone.
        max_sessions: How many sessions may be open at once. Default: 16, or 1 for an instance,
            which cannot be made twice.
        sessions_per_worker: How many sessions share an env worker's process. With 1 they step at
            the same time, each on a processor of its own. A runner with several sessions gains
            from one process for all of them where a step takes less time than the runner's own
            work, or processors are few. A crash, or a step that is killed because it is late, then
            interrupts the episodes of all sessions of the process.
        token: What clients must show, or a ``TokenFile``; required unless ``address`` is loopback.
        tls: Files for TLS; ``RayTls()``: those that Ray uses.
        no_token: Whether the endpoint may listen without a token where other machines can reach
            it; the log then warns what that means.
        validation: What happens to values out of range: ``"warn"``, ``"strict"`` or ``"off"``
            (edition 2026.06, "Range conformance"). So it is with rewards that are not finite.
        on_bad_value: What happens where an observation would be refused (NaN, an element outside
            its domain; with ``validation="strict"`` also one out of range) or a reward is not
            finite. ``"error"``: what the edition says; the former costs a client its session.
            ``"truncate"``: the episode ends in that lane, truncated, with its last good
            observation, a reward of 0 in place of one that is not finite, and the cause under
            ``"rlmesh_ray.bad_value"`` in the info. For single environments, whose observations
            are then checked one by one.
        reset_threads: How many of a session's lanes are reset at the same time, each in a thread of
            the worker; for single environments that are slow to reset and do not depend on the
            thread that uses them. Results are those of resets one after the other.
        step_grace_s: How many seconds an environment may go on after a deadline has passed and
            its request has been answered with TIMEOUT. Its result is dropped. If it finishes in
            time, its process serves the next Reset; if not, the process is killed.
        allow_calls: Names of methods and attributes of the environment, or of its wrappers, that
            clients may call and read in the lanes of their own sessions, such as ``("set_task",)``
            for a curriculum; see ``EnvClient.call``. Every client of the endpoint may use them.
        observers: Whether a client with any token of the endpoint may observe its sessions, with
            pictures of their lanes, and read its statistics; see
            ``client.observer.EndpointObserver``.
        allow_shutdown: Whether a client's Shutdown stops the server, as ``stop`` does.
        accept_edition_texts: Other texts of the provisional edition whose clients to serve, by
            sha256 or by name (``"rlmesh-0.1.0b3"``): only if you accept what they differ in.
        transport: What steps may travel by, besides gRPC messages, which are slower:
            ``"shared_memory"`` (clients on this machine, on Linux), ``"tcp"`` (a connection of
            their own, without TLS), ``"auto"`` (both) or ``"grpc"`` (nothing). Where spaces hold
            text it is messages.
        data_address: ``HOST:PORT`` for those TCP connections. Default: a free port at the host of
            ``address``.
        data_advertise: The port for them that clients are told, where it is mapped to another one,
            as from a container. Default: that of ``data_address``.
        dialects: Names of the dialects to enable: ``"rlmesh.protocol.v1"``, ``"rlmesh-wire-v1"``
            (the released rlmesh 0.1.0), ``"dm_env_rpc.v1"``. Default: all that are installed.
        idle_timeout_s: Seconds without a request after which a session ends; the client's next
            request raises that. Default: never, since a learner may work for minutes.
        endpoint_id: Its name in the log. Default: a random one.
        spin: Whether the endpoint and its workers stay awake for up to 1.5 ms where the next
            request or result usually comes sooner; with False every wait sleeps at once, and
            leaves its processor to others. None: as the environment variable RLMESH_RAY_SPIN
            says (0 or 1), and True without it.
        record: Folder for the episodes of all sessions, or ``RecordOptions``; None: they are not
            recorded.

    Raises:
        ConfigurationError: An argument is wrong; the message says which and how to mend it.
    """

    def __init__(  # noqa: PLR0913  # the public surface; every option stands alone
        self,
        env: EnvLike,
        *,
        num_envs: int = 1,
        address: str = "127.0.0.1:0",
        env_kwargs: Mapping[str, object] | None = None,
        autoreset: str = "next_step",
        max_sessions: int | None = None,
        sessions_per_worker: int = 1,
        token: TokenSource | None = None,
        tls: TlsSource | None = None,
        no_token: bool = False,
        validation: str = "warn",
        on_bad_value: str = "error",
        reset_threads: int = 1,
        step_grace_s: float = DEFAULT_STEP_GRACE_S,
        allow_calls: Collection[str] = (),
        observers: bool = True,
        allow_shutdown: bool = False,
        accept_edition_texts: Collection[str] = (),
        transport: str = "auto",
        data_address: str | None = None,
        data_advertise: int | None = None,
        dialects: Collection[str] | None = None,
        idle_timeout_s: float | None = None,
        endpoint_id: str | None = None,
        spin: bool | None = None,
        record: "str | Path | RecordOptions | None" = None,
    ) -> None:
        endpoint_id = endpoint_id or new_endpoint_id()
        require_seconds("step_grace_s", step_grace_s, allow_zero=True)
        self._step_grace_s = step_grace_s
        require_count("reset_threads", reset_threads)
        require_flag("observers", observers)
        require_flag("allow_shutdown", allow_shutdown)
        self._transports = allowed_transports(transport)
        self._allow_calls = checked_names(allow_calls)
        self._has_observers = observers
        enabled = registry.enabled_dialects(dialects, registry.env_dialects())
        self._source = dataclasses.replace(
            make_source(env, num_envs, env_kwargs, autoresets=autoresets(autoreset)),
            truncates_on_bad_value=truncates_on_bad_value(on_bad_value),
            reset_threads=as_int("reset_threads", reset_threads),
            spin=should_spin(spin),
            observer=None if record is None else _recorder(record, endpoint_id),
        )
        allowed = checked_sessions(max_sessions, self._source.max_sessions)
        require_count("sessions_per_worker", sessions_per_worker)
        self._pool = WorkerPool(
            self._source, ValidationMode.from_option(validation), allowed, sessions_per_worker
        )
        self._max_sessions = allowed
        self._endpoint = Endpoint(
            address,
            token=token,
            tls=tls,
            no_token=no_token,
            endpoint_id=endpoint_id,
            on_stop=self._close_pool,
        )
        self._options = ServiceOptions(
            shutdown=self._endpoint.stop_soon if allow_shutdown else None,
            accept_texts=frozenset(
                map(edition_sha256, as_names("accept_edition_texts", accept_edition_texts))
            ),
            dialects=enabled,
            idle_timeout_s=checked_idle_timeout(idle_timeout_s),
        )
        self._data_address = checked_data_address(
            parse_address(address),
            data_address,
            data_advertise,
            self._transports,
            has_tls=tls is not None,
            token=token,
            no_token=no_token,
        )
        self._data_advertise = data_advertise
        self._contract: EnvContract | None = None

    @property
    def address(self) -> str:
        """Where clients dial it; only after ``start``."""
        return self._endpoint.address

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
            calls = LaneCallService(self._allow_calls, self._contract.num_envs, drain)
            observers = ObserverService(self._contract)
            broker = self._broker(self._contract)
            drain.add_preparation(broker.stop)
            service = EnvService(
                self._pool,
                self._contract,
                self._step_grace_s,
                self._options,
                drain,
                SessionServices(observers, calls, broker),
            )
            added = [
                make(
                    self._pool,
                    self._contract,
                    self._step_grace_s,
                    drain,
                    self._options.idle_timeout_s,
                )
                for make in load_dialect_services(self._options.dialects)
            ]
            handlers = [
                service.handlers(),
                *calls.handlers(),
                *TicketService(broker).handlers(),
                *(each.handlers() for each in added),
            ]
            if self._has_observers:
                statistics = StatisticsService(lambda: [observed_statistics(self.statistics())])
                handlers += [observers.handlers(), statistics.handlers()]
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

    def wait(self, timeout_s: float | None = None) -> bool:
        """Block until the server has stopped; return whether it has."""
        return self._endpoint.wait(timeout_s)

    def health(self) -> Health:
        """Tell whether a new client would be served now, as ``grpc.health.v1`` tells it.

        An environment that hangs costs its own session, not the others: the server serves on.
        """
        return self._endpoint.health()

    def drain(self, timeout_s: float | None = None) -> bool:
        """Refuse new sessions, for good, and wait until the open ones have ended; then ``stop``.

        Args:
            timeout_s: How long to wait; None: as long as it takes.

        Returns:
            Whether no session is open any more.
        """
        return self._endpoint.finish_sessions(timeout_s)

    def stop(self, grace_s: float = 1.0) -> None:
        """Answer what is outstanding, then end the sessions and the workers. Idempotent; blocks.

        Args:
            grace_s: After how many seconds outstanding requests are cancelled.
        """
        self._endpoint.stop(grace_s)

    def _broker(self, contract: EnvContract) -> ConnectionBroker:
        """Return the broker of direct connections; it listens if they may use TCP."""
        if not is_fixed_size(contract):
            return ConnectionBroker(has_shared_memory=False)
        listener = None
        if self._data_address is not None:
            bound = bound_sockets(self._data_address)
            port = self._data_advertise or bound[0].getsockname()[1]
            name = f"{self._endpoint.endpoint_id}/{secrets.token_hex(8)}"
            listener = TcpListener(bound, port, name)
        has_shared_memory = SHARED_MEMORY in self._transports and can_seal()
        return ConnectionBroker(has_shared_memory=has_shared_memory, listener=listener)

    def _close_pool(self) -> None:
        # A loop that something holds closes it later; workers end with this process at the latest.
        with contextlib.suppress(TimeoutError):
            shared_loop().run(self._pool.close(), _CLOSE_S)

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(self, *_: object) -> None:
        self.stop()


def _recorder(record: "str | Path | RecordOptions", endpoint_id: str) -> bytes:
    """Return a pickled callable that makes the recorder of an env worker."""
    from rlmesh_ray.recording.options import RecordOptions
    from rlmesh_ray.recording.recorder import SessionObserver

    options = RecordOptions.of(record)
    # A worker has the same working folder, until its environment changes it.
    options = dataclasses.replace(options, folder=Path(options.folder).absolute())
    return pickle.dumps(partial(SessionObserver, options, endpoint_id))
