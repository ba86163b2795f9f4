"""Import of grpcio with its poll-based I/O, and the options of gRPC channels and servers.

By default gRPC's core ("event engine") reads in threads of its own, which wake each other and the
waiting thread; for small messages those wake-ups dominate. With the older I/O a thread that waits
for a message reads the socket, and only gRPC's backup timer reads for a client that waits for
nothing, as while a runner learns; its period is set so that pings are answered in time, else
sessions would end. To measure: ``python -m benchmarks serving`` and ``stepping``, with and without
``GRPC_EXPERIMENTS=,`` in front, which keeps gRPC's default.

gRPC reads its environment variables once, at its import, so this package imports gRPC through this
module only. Where a program has imported it before, gRPC keeps its default, and is slower.
"""

import contextlib
import ctypes
import os
import sys
import weakref
from collections.abc import Iterator, Mapping
from importlib import metadata
from typing import TypeVar

from rlmesh_ray.errors import ConfigurationError
from rlmesh_ray.options import FORK_REMEDY, KEEPALIVE_TIME_S, KEEPALIVE_TIMEOUT_S

_POLLING_ENGINE = {
    "GRPC_EXPERIMENTS": "-event_engine_client,-event_engine_listener",
    # Period of the backup timer in ms: several times within the 5 s that a ping may take
    # (``KEEPALIVE_TIMEOUT_S``), also on a busy machine. gRPC's default is 5 s.
    "GRPC_CLIENT_CHANNEL_BACKUP_POLL_INTERVAL_MS": "500",
}
_QUIET = {"GRPC_VERBOSITY": "ERROR"}
"""Without it gRPC logs each fork of a process with open calls (Ray's start forks) and each GOAWAY
of a server. Neither is a fault."""
_TESTED_VERSION = "1.85."
"""Prefix of the grpcio versions that these settings were measured with; other versions may not know
the experiments, and log an error for an unknown one."""


def _is_tested_version() -> bool:
    try:
        return sys.platform == "linux" and metadata.version("grpcio").startswith(_TESTED_VERSION)
    except metadata.PackageNotFoundError:  # not installed from a wheel
        return False


@contextlib.contextmanager
def _set(variables: Mapping[str, str]) -> Iterator[None]:
    """Set environment variables within the context, unless the user has set one of them."""
    if any(name in os.environ for name in variables):
        yield
        return
    os.environ.update(variables)
    try:
        yield
    finally:
        # Child processes may use another version of gRPC, as Ray's do.
        for name in variables:
            del os.environ[name]


with _set(_POLLING_ENGINE if _is_tested_version() else {}), _set(_QUIET):
    import grpc as grpc


T = TypeVar("T")

_user_pid = 0
"""The process that has used gRPC; 0: none has. A fork inherits it."""
_kept_in_forks: weakref.WeakSet[object] = weakref.WeakSet()


def is_fork() -> bool:
    return _user_pid not in (0, os.getpid())


def require_no_fork() -> None:
    """Note that this process uses gRPC from now on; in a fork of one that did, refuse it.

    gRPC's threads do not exist in a fork, and its sockets are shared: calls would wait for ever
    there, and break the connections of the parent.
    """
    global _user_pid
    if is_fork():
        raise ConfigurationError(
            f"process {_user_pid} has used gRPC, and this one was forked from it, where gRPC "
            f"cannot work: {FORK_REMEDY}"
        )
    _user_pid = os.getpid()


def keep_in_forks(thing: T) -> T:
    """Return ``thing``, a channel, call or server, which no fork of this process will destroy.

    That would end it for the parent, too, or wait for threads that a fork does not have.
    """
    _kept_in_forks.add(thing)
    return thing


def _keep() -> None:
    for thing in list(_kept_in_forks):
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(thing))


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_keep)

Option = tuple[str, int | str]

_COMMON_OPTIONS: tuple[Option, ...] = (
    # The receiver decides whether a message is too large.
    ("grpc.max_send_message_length", -1),
    # A frozen or unreachable peer is found by pings; keepalive alone takes a minute, since the
    # kernel of a frozen process still acknowledges.
    ("grpc.keepalive_time_ms", KEEPALIVE_TIME_S * 1000),
    ("grpc.keepalive_timeout_ms", KEEPALIVE_TIMEOUT_S * 1000),
    ("grpc.http2.ping_timeout_ms", KEEPALIVE_TIMEOUT_S * 1000),
    ("grpc.http2.max_pings_without_data", 0),
    ("grpc.keepalive_permit_without_calls", 1),
)
_CHANNEL_OPTIONS: tuple[Option, ...] = (
    # A Step that may have been executed is never sent again.
    ("grpc.enable_retries", 0),
    # Who asks again sees soon that a server is back, also after hours: gRPC would wait 2 minutes.
    ("grpc.max_reconnect_backoff_ms", 2_000),
    # Each client has its own connection: one that breaks takes no other with it.
    ("grpc.use_local_subchannel_pool", 1),
)
_SERVER_OPTIONS: tuple[Option, ...] = (
    # Without this a second server shares the port silently.
    ("grpc.so_reuseport", 0),
    ("grpc.http2.min_recv_ping_interval_without_data_ms", 4_000),
    # A busy machine delivers pings in bunches; a session must not end for that.
    ("grpc.http2.max_ping_strikes", 0),
)


def channel_options(max_receive_bytes: int = -1) -> list[Option]:
    """Return the options of a client's channel; -1: it receives messages of any size."""
    received = ("grpc.max_receive_message_length", max_receive_bytes)
    return [*_COMMON_OPTIONS, *_CHANNEL_OPTIONS, received]


def server_options(max_receive_bytes: int) -> list[Option]:
    """Return the options of a server; ``server.endpoint.gate`` adds those of its connections."""
    received = ("grpc.max_receive_message_length", max_receive_bytes)
    return [*_COMMON_OPTIONS, *_SERVER_OPTIONS, received]
