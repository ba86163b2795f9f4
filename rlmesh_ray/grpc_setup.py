"""Import of grpcio with its poll-based I/O: a thread that waits for a message reads the socket.

By default gRPC's core ("event engine") reads in threads of its own, which wake each other and the
waiting thread; for small messages those wake-ups dominate. With the older I/O only gRPC's backup
timer reads for a client that waits for nothing, as while a runner learns; its period is set so that
pings are answered in time, else sessions would end.

gRPC reads its environment variables once, at its import, so this package imports gRPC through this
module only. Where a program has imported it before, gRPC keeps its default, and is slower.

To measure: ``python -m benchmarks serving`` and ``stepping``, with and without
``GRPC_EXPERIMENTS=,`` in front, which keeps gRPC's default. The variables are documented in
``doc/environment_variables.md`` and ``src/core/lib/experiments/experiments.yaml`` of
github.com/grpc/grpc.
"""

import contextlib
import os
import sys
from collections.abc import Iterator, Mapping
from importlib import metadata

_POLLING_ENGINE = {
    "GRPC_EXPERIMENTS": "-event_engine_client,-event_engine_listener",
    # Period of the backup timer in ms: several times within the 5 s that a ping may take
    # (client/channel.py), also on a busy machine. gRPC's default is 5 s.
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
    import grpc

__all__ = ["grpc"]
