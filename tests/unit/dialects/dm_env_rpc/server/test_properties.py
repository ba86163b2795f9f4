"""Properties, asked for in ways that no sensible client has."""

from typing import Any

from gymnasium import spaces

from rlmesh_ray.dialects.dm_env_rpc.server.properties import Properties
from rlmesh_ray.spaces.contract import AutoresetMode, EnvContract
from rlmesh_ray.spaces.gym_conversion import from_gymnasium

SPACE = from_gymnasium(spaces.Discrete(2))
PROPERTIES = Properties(EnvContract("x", SPACE, SPACE, 1, AutoresetMode.NEXT_STEP))


class CountingWorld:
    """Counts how often its name is read."""

    num_reads = 0

    @property
    def name(self) -> str:
        self.num_reads += 1
        return "w"


def test_a_key_that_is_asked_for_many_times_is_read_once() -> None:
    world: Any = CountingWorld()

    keys = ("rlmesh.world.name",) * 1000
    PROPERTIES.read(keys, (world, None))  # type: ignore[arg-type]

    assert world.num_reads == 1


def test_a_node_that_is_listed_many_times_is_listed_once() -> None:
    once, many = (PROPERTIES.list(("rlmesh",) * count, None) for count in (1, 1000))

    assert once == many
    assert [each.key for each in once] == ["rlmesh.contract", "rlmesh.version"]
