"""Stairs for servers that know environments by their ids in Gymnasium."""

import os
from pathlib import Path

import gymnasium

from tests.ray.ramps import Stairs

LOG_VARIABLE = "STAIRS_LOG"


def logged_stairs(**_kwargs: object) -> Stairs:
    """Return stairs of six steps that log to the file of the process."""
    return Stairs(log=Path(os.environ[LOG_VARIABLE]), length=6)


gymnasium.register("LoggedStairs-v0", logged_stairs)
