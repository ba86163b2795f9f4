"""What of the libraries' own chatter reaches the people: little, unless they ask for it."""

import contextlib
import logging
import os
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ray.rllib.algorithms.algorithm_config import AlgorithmConfig

_FORMAT = "%(asctime)s %(levelname)s %(name)s: %(message)s"


def set_up(*, is_debug: bool) -> None:
    """Show everything for debugging; else nothing: what matters comes as an error.

    To be called before gRPC is imported, which reads its setting once.
    """
    if is_debug:
        logging.basicConfig(level=logging.INFO, format=_FORMAT, stream=sys.stderr)
        return
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")
    # With no handler at all Python would print warnings on its own.
    for name in ("rlmesh_ray", "grpc"):
        logging.getLogger(name).addHandler(logging.NullHandler())


def show_warnings() -> None:
    """Show this package's warnings on standard error; for servers, whose log is read."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setLevel(logging.WARNING)
    handler.setFormatter(logging.Formatter(_FORMAT))
    logging.getLogger("rlmesh_ray").addHandler(handler)


def quiet_rllib(config: "AlgorithmConfig") -> None:
    """Keep RLlib's advice about itself away from the progress that people read."""
    if not _is_verbose():
        # Both: the config's level holds from when the algorithm is built.
        logging.getLogger("ray.rllib").setLevel(logging.ERROR)
        config.debugging(log_level="ERROR")


@contextlib.contextmanager
def muted() -> Iterator[None]:
    """Keep warnings of all libraries back; for loading checkpoints, where RLlib has many."""
    if not _is_verbose():
        logging.disable(logging.WARNING)
    try:
        yield
    finally:
        logging.disable(logging.NOTSET)


def _is_verbose() -> bool:
    return logging.getLogger().isEnabledFor(logging.INFO)
