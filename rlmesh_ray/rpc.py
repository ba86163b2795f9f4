"""gRPC, loaded so that a server reads a message in the thread that waits for it.

The newer way of gRPC's core ("event engine") has threads of its own that read, and wake each other
and whoever waits; for small messages that takes longer than all the rest. The older way is still
there. gRPC looks into its environment variable once, when it is loaded, so everything here gets
gRPC through this module; where a program has loaded it before, it stays as it is, and slower.

For servers only, which always wait. In the older way nobody reads for a client that waits for
nothing, as while a runner learns: pings go unanswered then, and its session is lost.

What it gains: ``rlmesh-ray bench serving`` with ``GRPC_EXPERIMENTS=,`` in front, which leaves gRPC
as it is. The variable and its names: ``doc/environment_variables.md`` and
``src/core/lib/experiments/experiments.yaml`` of github.com/grpc/grpc.
"""

import contextlib
import os
import sys
from collections.abc import Iterator
from importlib import metadata

_EXPERIMENTS = "GRPC_EXPERIMENTS"
_OLDER_WAY = "-event_engine_listener"
_TRIED_WITH = "1.85."
"""Of grpcio; others may not know these names, and complain of what they do not know."""


def _is_tried() -> bool:
    try:
        return sys.platform == "linux" and metadata.version("grpcio").startswith(_TRIED_WITH)
    except metadata.PackageNotFoundError:  # it came by another way than a wheel
        return False


@contextlib.contextmanager
def _older_way() -> Iterator[None]:
    """Have gRPC loaded so meanwhile, unless the user has said how it shall be loaded."""
    if _EXPERIMENTS in os.environ or not _is_tried():
        yield
        return
    os.environ[_EXPERIMENTS] = _OLDER_WAY
    try:
        yield
    finally:
        # Other programs that this one starts may have a gRPC of another version, as Ray has.
        del os.environ[_EXPERIMENTS]


with _older_way():
    import grpc

__all__ = ["grpc"]
