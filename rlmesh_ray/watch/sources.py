"""Where the page's endpoints come from: addresses here, a cluster's registry in ``actors``."""

import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from typing import Protocol

from rlmesh_ray.auth.token_file import endpoint_token, registration_token
from rlmesh_ray.client.channel import ConnectOptions
from rlmesh_ray.client.observer import EndpointObserver, EndpointStatistics
from rlmesh_ray.errors import EndpointLostError, RlmeshError
from rlmesh_ray.protocol.pool_membership import fleet_name_of_pool
from rlmesh_ray.server.endpoint_status import EndpointStatus, RunnerStatus
from rlmesh_ray.server.statistics import StatisticsPair
from rlmesh_ray.server.statistics_report import statistics_of

_TIMEOUT_S = 3.0
_THREADS = 32
_APART_S = 1.0
"""Shortest time between the two statistics that a rate is made of."""


class EndpointSource(Protocol):
    """Endpoints, and how to connect to them. Its methods may block."""

    title: str
    """Names the source for people."""

    def endpoints(self) -> Sequence[EndpointStatus]:
        """Return the present endpoints; no two have the same fleet and id.

        Raises:
            RlmeshError: They are not known now.
        """

    def runners(self) -> Sequence[RunnerStatus]:
        """Return the env runners that use them, as far as the source knows.

        Raises:
            RlmeshError: They are not known now.
        """

    def connect_options(self, endpoint: EndpointStatus) -> ConnectOptions:
        """Return how to connect to one of them.

        Raises:
            RlmeshError: There is no way now.
        """


@dataclass(frozen=True, slots=True)
class WatchedAddress:
    """An address that the operator has named: of an endpoint, or of a pool's registrar."""

    options: ConnectOptions
    """With the token for the endpoint, or for the endpoints of a pool without a secret."""
    pool: str = ""
    """Name of the pool; empty: the address is an endpoint's."""
    secret: str | None = field(default=None, repr=False)
    """Secret of the pool."""

    def observer(self) -> EndpointObserver:
        to, token = self.options, self.options.token
        if self.pool:
            token = None if self.secret is None else registration_token(self.secret)
        return EndpointObserver(to.address, token=token, tls=to.tls, timeout_s=_TIMEOUT_S)

    def member_options(self, endpoint: EndpointStatus) -> ConnectOptions:
        token = self.options.token
        if self.secret is not None:
            token = endpoint_token(self.secret, self.pool, endpoint.endpoint_id)
        return replace(self.options, address=endpoint.address, token=token)


class AddressSource:
    """Endpoints at addresses, without Ray: each is asked for its statistics.

    ``endpoints`` is to be used in one thread at a time.

    Args:
        targets: The addresses.
    """

    def __init__(self, targets: Sequence[WatchedAddress]) -> None:
        self.title = ", ".join(each.options.address for each in targets)
        self._targets = targets
        self._observers = [each.observer() for each in targets]
        self._seen: dict[tuple[str, str], tuple[EndpointStatus, WatchedAddress]] = {}
        self._answered_s: dict[tuple[str, str], float] = {}
        self._threads = ThreadPoolExecutor(_THREADS, "statistics")

    def endpoints(self) -> list[EndpointStatus]:
        """Return the endpoints; one that does not answer is stale, and says why."""
        answers = self._threads.map(_ask, self._observers)
        found = [
            (status, target)
            for target, answer in zip(self._targets, answers, strict=True)
            for status in self._statuses(target, answer)
        ]
        self._seen = {(each.fleet, each.endpoint_id): (each, target) for each, target in found}
        self._answered_s = {key: at for key, at in self._answered_s.items() if key in self._seen}
        return [each for each, _ in self._seen.values()]

    def runners(self) -> tuple[()]:
        return ()

    def connect_options(self, endpoint: EndpointStatus) -> ConnectOptions:
        """Return how to connect to an endpoint.

        Raises:
            EndpointLostError: It has left its pool.
        """
        seen = self._seen.get((endpoint.fleet, endpoint.endpoint_id))
        if seen is None:
            raise EndpointLostError("the endpoint has left its pool", endpoint.address)
        return seen[1].member_options(endpoint)

    def _statuses(
        self, target: WatchedAddress, answer: Sequence[EndpointStatistics] | RlmeshError
    ) -> list[EndpointStatus]:
        fleet, address = target.pool and fleet_name_of_pool(target.pool), target.options.address
        unknown = EndpointStatus(fleet, address, "", address, 0, 0.0, False, 0, None)
        if isinstance(answer, RlmeshError):
            known = [each for each, of in self._seen.values() if of is target] or [unknown]
            return [replace(each, lease_left_s=0.0, problem=str(answer)) for each in known]
        return [self._status(unknown, each) for each in answer]

    def _status(self, unknown: EndpointStatus, answer: EndpointStatistics) -> EndpointStatus:
        endpoint_id, address = answer.endpoint_id or unknown.endpoint_id, unknown.address
        key = unknown.fleet, endpoint_id
        former, _ = self._seen.get(key, (unknown, None))
        restarts, sighting, problem = former.restarts, former.sighting, ""
        try:
            now = statistics_of(answer)
        except RlmeshError as error:
            now, problem = None, str(error)
        if now is None:
            sighting = None
        elif sighting is None or now.uptime_s < time.monotonic() - self._answered_s[key]:
            restarts += sighting is not None
            sighting = StatisticsPair(now)
        else:
            is_apart = now.uptime_s - sighting.now.uptime_s >= _APART_S
            sighting = StatisticsPair(now, sighting.now if is_apart else sighting.before)
        self._answered_s[key] = time.monotonic()
        return replace(
            unknown,
            endpoint_id=endpoint_id,
            address=answer.address or address,
            restarts=max(answer.incarnation - 1, restarts),
            lease_left_s=_TIMEOUT_S,
            sighting=sighting,
            problem=problem,
        )


def _ask(observer: EndpointObserver) -> Sequence[EndpointStatistics] | RlmeshError:
    try:
        return observer.statistics()
    except RlmeshError as error:
        return error
