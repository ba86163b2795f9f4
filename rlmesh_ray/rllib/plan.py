"""Which runner talks to which endpoints: decided on the driver, carried in the config."""

from dataclasses import dataclass, field
from typing import Protocol

from rlmesh_ray.client.channel import ClientTls, Dial
from rlmesh_ray.errors import ContractMismatchError
from rlmesh_ray.spaces.contract import EnvContract

PLAN_KEY = "rlmesh_ray"
"""Where the plan stands in ``config.env_config``."""


class Directory(Protocol):
    """Knows where endpoints are now; one that has restarted may be elsewhere."""

    def __len__(self) -> int:
        """How many endpoints there are."""

    def address(self, index: int) -> str:
        """Return where endpoint ``index`` is.

        Raises:
            EndpointUnreachableError: It is not there now; it may come back.
        """


@dataclass(frozen=True, slots=True)
class FixedAddresses:
    """Endpoints that somebody else has started."""

    addresses: tuple[str, ...]

    def __len__(self) -> int:
        return len(self.addresses)

    def address(self, index: int) -> str:
        """Return the address that was given."""
        return self.addresses[index]


@dataclass(frozen=True, slots=True)
class RolloutPlan:
    """How the runners of one algorithm use the endpoints."""

    directory: Directory
    contract: EnvContract
    """What every endpoint promised on the driver, and must still promise to the runner."""
    sessions_per_runner: int
    """Each gives ``contract.num_envs`` lanes."""
    token: str | None = field(default=None, repr=False)  # Tune writes configs into its logs
    tls: ClientTls | None = None
    step_timeout_s: float = 30.0
    edition_text: str | None = None

    @property
    def lanes_per_runner(self) -> int:
        """What RLlib calls ``num_envs_per_env_runner``."""
        return self.sessions_per_runner * self.contract.num_envs

    def endpoints_of(self, worker_index: int) -> tuple[int, ...]:
        """Return the endpoints of a runner: one entry a session.

        Args:
            worker_index: As RLlib counts: remote runners from 1, the local one is 0.
        """
        first = max(worker_index - 1, 0) * self.sessions_per_runner
        return tuple(
            (first + session) % len(self.directory) for session in range(self.sessions_per_runner)
        )

    def dial(self, endpoint: int) -> Dial:
        """Return how to reach an endpoint now."""
        return Dial(
            self.directory.address(endpoint),
            self.token,
            self.tls,
            edition_text=self.edition_text,
        )


def sessions_per_runner(num_endpoints: int, num_runners: int) -> int:
    """Spread endpoints over runners.

    Args:
        num_endpoints: At least 1.
        num_runners: Remote ones; 0: the local runner takes every endpoint.

    Raises:
        ContractMismatchError: There are more endpoints than runners, and not a multiple.
    """
    if num_runners == 0:
        return num_endpoints
    if num_endpoints <= num_runners:
        return 1
    if num_endpoints % num_runners:
        raise ContractMismatchError(
            f"{num_endpoints} endpoints cannot be spread evenly over {num_runners} EnvRunners; "
            f"use a multiple of {num_runners} endpoints, or set num_env_runners to a divisor of "
            f"{num_endpoints}"
        )
    return num_endpoints // num_runners


def require_same_contract(expected: EnvContract, found: EnvContract, address: str) -> None:
    """Compare what RLlib relies on: width, autoreset mode and spaces.

    Raises:
        ContractMismatchError: Something differs; the message names it and both sides.
    """
    for name in ("num_envs", "autoreset_mode", "observation_space", "action_space"):
        ours, theirs = getattr(expected, name), getattr(found, name)
        if ours != theirs:
            raise ContractMismatchError(
                f"{address} serves {found.id} with {name} = {theirs}, but {expected.id} with "
                f"{ours} is expected; all endpoints of one algorithm must serve the same "
                "environment at the same width"
            )
