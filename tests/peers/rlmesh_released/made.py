"""The environments of these tests by name, for both sides."""

from typing import Any

import gymnasium

from tests.peers.rlmesh_b3.world import World
from tests.peers.rlmesh_released.echo import Echo
from tests.peers.rlmesh_released.trouble import Trouble


def make(name: str) -> gymnasium.Env[Any, Any]:
    """Return World, Trouble, Picture (Trouble that renders), echo:SPACE or a Gymnasium id."""
    match name.split(":"):
        case ["World"]:
            return World()
        case ["Trouble"]:
            return Trouble()
        case ["Picture"]:
            return Trouble("rgb_array")
        case ["echo", space]:
            return Echo(space)
        case _:
            return gymnasium.make(name)
