"""How far rollouts are scaled, and on what.

Standard library only: the command line needs it for its help.
"""

import enum
from collections.abc import Sequence
from dataclasses import dataclass

from rlmesh_ray.errors import ConfigurationError


class Part(enum.StrEnum):
    """What of scaling can be measured."""

    RATES = "rates"
    """Env steps a second with 1 to 16 endpoints, on one node and on several."""
    MEMBERSHIP = "membership"
    """How long it takes to join an endpoint, and to lose one."""
    CONTROL = "control"
    """What many endpoints cost the control plane."""


class Transport(enum.StrEnum):
    """How steps travel."""

    MEMORY = "shared memory"
    """Where runner and endpoint are on one machine."""
    MESSAGES = "messages"
    """gRPC over TCP, as between machines."""
    FOUND = "what the nodes allow"
    """On a cluster that runs already: memory or messages, as the nodes lie."""


@dataclass(frozen=True, slots=True)
class Simulation:
    """The environment of each endpoint; see ``sleeping_env.Simulator``."""

    lanes: int = 8
    step_s: float = 0.02
    """Of all lanes together."""
    observation_bytes: int = 4096
    """Of a lane."""

    @property
    def steps_per_s(self) -> float:
        """Env steps of one endpoint whose steps cost nothing but the sleep."""
        return self.lanes / self.step_s


@dataclass(frozen=True, slots=True)
class Setup:
    """The endpoints, nodes and runners of one rate."""

    num_endpoints: int
    num_nodes: int | None
    """None: those of a cluster that runs already."""
    num_runners: int = 1

    @property
    def transport(self) -> Transport:
        """Transport of the steps.

        Several nodes are processes of this one machine, and could share memory. That is
        disabled: nodes of a cluster do not, as a rule.
        """
        if self.num_nodes is None:
            return Transport.FOUND
        return Transport.MEMORY if self.num_nodes == 1 else Transport.MESSAGES

    @property
    def series(self) -> str:
        """What distinguishes it besides the number of endpoints, for people."""
        nodes = "the cluster" if self.num_nodes is None else _counted(self.num_nodes, "node")
        return nodes if self.num_runners == 1 else f"{nodes}, {self.num_runners} runners"

    @property
    def case(self) -> str:
        """Its name, for tables and programs."""
        return f"{self.series}, {_counted(self.num_endpoints, 'endpoint')}"


@dataclass(frozen=True, slots=True)
class ControlSize:
    """How many endpoints are kept together, and how wide."""

    endpoints: int = 100
    lanes: int = 100
    """Of each."""
    fleet: int = 10
    """How many are started as an ``EnvFleet``, with a Ray actor each. The others share few actors,
    since the processes of so many would measure this machine's memory."""
    records: int = 10_000
    """That the registry is given besides, for its own cost."""


@dataclass(frozen=True, slots=True)
class ScalingPlan:
    """What is measured, how often and how long.

    Raises:
        ConfigurationError: It cannot be measured so, or does not show scaling.
    """

    parts: Sequence[Part] = tuple(Part)
    endpoints: Sequence[int] = (1, 2, 4, 8, 16)
    nodes: Sequence[int] = (1, 4)
    runners: Sequence[int] = (1,)
    ray_address: str | None = None
    """Of a cluster that runs already, in place of ``nodes``."""
    repetitions: int = 3
    warm_up_s: float = 2.0
    """Before each measurement; not counted."""
    seconds: float = 6.0
    """Of each measurement, at least."""
    fragment: int = 50
    """Steps a lane in each call of ``sample``: IMPALA's default."""
    simulation: Simulation = Simulation()
    members: int = 4
    """Endpoints of which one is lost, and joined."""
    control: ControlSize = ControlSize()

    def __post_init__(self) -> None:
        for name in ("endpoints", "nodes", "runners"):
            if not all(number >= 1 for number in getattr(self, name)):
                raise ConfigurationError(f"--{name} must be 1 or more")
        if self.ray_address is not None and self.nodes:
            raise ConfigurationError(
                "--nodes are started on this machine; a cluster at --ray-address has its own: "
                "give one of the two"
            )
        if self.ray_address is not None and Part.CONTROL in self.parts:
            raise ConfigurationError(
                "the control plane's processes are read where they run, which may be anywhere on "
                "a cluster at --ray-address: name --only rates or --only membership with it"
            )
        for number in self.runners:
            if not any(self._fits(points, number) for points in self.endpoints):
                raise ConfigurationError(
                    f"--runners {number} need a multiple of {number} --endpoints, at least one "
                    f"each; there are {', '.join(map(str, self.endpoints))}"
                )

    @property
    def setups(self) -> list[Setup]:
        """All that a rate is measured for; the first of each place is the base of its ideal."""
        places = (None,) if self.ray_address is not None else tuple(self.nodes)
        return [Setup(points, place, number) for place in places for points, number in self._sizes]

    @property
    def _sizes(self) -> list[tuple[int, int]]:
        """Endpoints and runners; one runner with one endpoint comes first, asked for or not."""
        sizes = [
            (points, number)
            for number in self.runners
            for points in sorted(self.endpoints)
            if self._fits(points, number)
        ]
        return list(dict.fromkeys([(1, 1), *sizes]))

    @staticmethod
    def _fits(points: int, number: int) -> bool:
        return points >= number and points % number == 0


def _counted(number: int, noun: str) -> str:
    return f"{number:,} {noun}{'' if number == 1 else 's'}"
