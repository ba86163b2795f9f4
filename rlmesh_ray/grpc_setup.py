"""gRPC, loaded so that whoever waits for a message reads it from the socket himself.

The newer way of gRPC's core ("event engine") has threads of its own that read, and wake each other
and whoever waits; for small messages that takes longer than all the rest. The older way is still
there. In it nobody reads for a client that waits for nothing, as while a runner learns, but gRPC's
timer, now and then: often enough that pings do not go unanswered, which would end sessions.

gRPC looks into its environment variables once, when it is loaded, so everything here gets gRPC
through this module; where a program has loaded it before, it stays as it is, and slower.

What it gains: ``python -m benchmarks serving`` and ``stepping`` with ``GRPC_EXPERIMENTS=,`` in
front, which leaves gRPC as it is. The variables: ``doc/environment_variables.md`` and
``src/core/lib/experiments/experiments.yaml`` of github.com/grpc/grpc.
"""

import contextlib
import os
import sys
from collections.abc import Iterator, Mapping
from importlib import metadata

_POLLING_ENGINE = {
    "GRPC_EXPERIMENTS": "-event_engine_client,-event_engine_listener",
    # How often the timer reads, in ms: several times within the 5 s that a ping may take
    # (client/channel.py), also on a busy machine. By itself gRPC would do so every 5 s.
    "GRPC_CLIENT_CHANNEL_BACKUP_POLL_INTERVAL_MS": "500",
}
_QUIET = {"GRPC_VERBOSITY": "ERROR"}
"""gRPC notes on standard error whenever a process with open calls forks, as Ray's start does, and
whenever a server says goodbye. Neither is a fault."""
_TESTED_VERSION = "1.85."
"""Of grpcio; others may not know these names, and complain of what they do not know."""


def _is_tested_version() -> bool:
    try:
        return sys.platform == "linux" and metadata.version("grpcio").startswith(_TESTED_VERSION)
    except metadata.PackageNotFoundError:  # it came by another way than a wheel
        return False


@contextlib.contextmanager
def _set(variables: Mapping[str, str]) -> Iterator[None]:
    """Set environment variables meanwhile, unless the user has set one of them."""
    if any(name in os.environ for name in variables):
        yield
        return
    os.environ.update(variables)
    try:
        yield
    finally:
        # Other programs that this one starts may have a gRPC of another version, as Ray has.
        for name in variables:
            del os.environ[name]


with _set(_POLLING_ENGINE if _is_tested_version() else {}), _set(_QUIET):
    import grpc

__all__ = ["grpc"]
