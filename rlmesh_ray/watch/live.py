"""LiveView: what the page shows of endpoints now. It asks only while a page asks it.

Rule 1: nothing is asked twice at the same time, or more often than its pause says, however many
pages are open; they share the last answer. A page that goes away ends its questions.
Rule 2: pictures take a session on average at most ``PICTURE_SHARE`` of its time.

Endpoints come from a source: addresses here, a cluster's registry in ``actors``.
"""

import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Generic, Protocol, TypeVar

from rlmesh_ray.auth.token_file import endpoint_token, registration_token
from rlmesh_ray.client.channel import ConnectOptions
from rlmesh_ray.client.env.observer import EndpointObserver, EndpointStatistics
from rlmesh_ray.errors import CapacityError, EndpointLostError, RlmeshError
from rlmesh_ray.protocol.pool_membership import fleet_name_of_pool
from rlmesh_ray.server.observe.endpoint_status import (
    EndpointStatus,
    RunnerStatus,
    as_fields,
    in_order,
)
from rlmesh_ray.server.observe.statistics import StatisticsPair
from rlmesh_ray.server.observe.statistics_report import statistics_of

PICTURES_PER_S = 5
"""Pictures of a session, at most."""
PICTURE_SHARE = 0.01
"""Largest part of a session's time that pictures may take, with their way here."""
STATISTICS_PERIOD_S = 2.0
_SESSIONS_PERIOD_S = 1.0
_RETRY_S = 2.0
_NUM_AVERAGED = 8
"""How many pauses one long picture is spread over: the first one may load a renderer."""
_TIMEOUT_S = 5.0
_MOST_KEPT = 256
"""Sessions, pictures and connections that are remembered."""
_STATISTICS_TIMEOUT_S = 3.0
_THREADS = 32
_APART_S = 1.0
"""Shortest time between the two statistics that a rate is made of."""

T = TypeVar("T")


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
        return EndpointObserver(
            to.address, token=token, tls=to.tls, timeout_s=_STATISTICS_TIMEOUT_S
        )

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
            lease_left_s=_STATISTICS_TIMEOUT_S,
            sighting=sighting,
            problem=problem,
        )


def _ask(observer: EndpointObserver) -> Sequence[EndpointStatistics] | RlmeshError:
    try:
        return observer.statistics()
    except RlmeshError as error:
        return error


class SharedAnswer(Generic[T]):
    """The last answer to a slow question, which is asked by one thread at a time.

    Args:
        clock: Returns seconds that only grow.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._asking = threading.Lock()
        self._due_s = -1.0
        self.value: T | None = None
        """The last answer; None: there is none yet."""
        self.problem = ""
        """Why the last question has failed; empty: it has not."""

    @property
    def wait_s(self) -> float:
        return max(0.0, self._due_s - self._clock())

    def ask(self, question: Callable[[], T], pause_s: Callable[[float], float]) -> None:
        """Ask, unless it is too early or another thread asks; returns at once then.

        Args:
            question: Returns the answer, or raises RlmeshError.
            pause_s: Returns the pause before the next question, given the duration of this one.
        """
        if not self._asking.acquire(blocking=False):
            return
        try:
            begun_s = self._clock()
            if begun_s < self._due_s:
                return
            try:
                self.value, self.problem = question(), ""
            except RlmeshError as error:
                is_turn_of_another = isinstance(error, CapacityError) and self.value is not None
                self.problem = "" if is_turn_of_another else str(error)
            now_s = self._clock()
            self._due_s = now_s + pause_s(now_s - begun_s)
        finally:
            self._asking.release()


@dataclass(frozen=True, slots=True)
class Picture:
    """A picture of a lane, or why there is none."""

    png: bytes | None
    problem: str
    wait_s: float
    """When to ask for the next one: the pace that the session's share allows."""
    took_s: float
    """How long the last one took."""


@dataclass(frozen=True, slots=True)
class _Drawn:
    """A picture as it came."""

    lane: int
    png: bytes
    took_s: float
    mean_s: float
    """Mean duration of the session's last pictures; see ``mean_after``."""


class LiveView:
    """The endpoints of a source, their sessions, and pictures of their lanes.

    For several threads.

    Args:
        source: The endpoints.
        clock: Returns seconds that only grow.
    """

    def __init__(self, source: EndpointSource, clock: Callable[[], float] = time.monotonic) -> None:
        self._source = source
        self._clock = clock
        self._lock = threading.Lock()
        self._known: dict[str, EndpointStatus] = {}
        self._found = SharedAnswer[dict[str, Any]](clock)
        self._kept: OrderedDict[tuple[object, ...], Any] = OrderedDict()

    def endpoints(self) -> dict[str, Any]:
        """Return all endpoints, with the fields of ``as_fields``, a key and a problem each.

        With the env runners that use them, as far as the source knows.
        """
        self._found.ask(self._read, lambda took_s: max(STATISTICS_PERIOD_S, took_s))
        found = self._found.value or {"endpoints": [], "runners": []}
        return {"source": self._source.title, "problem": self._found.problem, **found}

    def sessions(self, key: str) -> dict[str, Any] | None:
        endpoint = self._known.get(key)
        if endpoint is None:
            return None
        answer = self._keep(("sessions", key), lambda: SharedAnswer[list[Any]](self._clock))
        answer.ask(
            lambda: [asdict(each) for each in self._observer("list", endpoint).sessions()],
            lambda took_s: max(_SESSIONS_PERIOD_S, took_s),
        )
        # Those of an endpoint that has failed may be gone, also when it is back.
        sessions = [] if answer.problem else answer.value or []
        return {"sessions": sessions, "problem": answer.problem}

    def picture(self, key: str, session: str, lane: int) -> Picture | None:
        """Return the last picture of a lane, a new one if it is time; None: no such endpoint."""
        endpoint = self._known.get(key)
        if endpoint is None:
            return None
        # All lanes of a session share its pace, so each of them is drawn now and then.
        answer = self._keep(("picture", key, session), lambda: SharedAnswer[_Drawn](self._clock))

        def draw() -> _Drawn:
            observer = self._observer(f"draw {session}", endpoint)
            begun_s = self._clock()
            png = observer.render(session, lane)
            took_s = self._clock() - begun_s
            before_s = answer.value.mean_s if answer.value else 0.0
            return _Drawn(lane, png, took_s, mean_after(before_s, took_s))

        def pause_s(_: float) -> float:
            drawn = answer.value
            return _RETRY_S if answer.problem or not drawn else picture_pause_s(drawn.mean_s)

        answer.ask(draw, pause_s)
        drawn = answer.value
        if drawn is None:
            return Picture(None, answer.problem, answer.wait_s, 0.0)
        png = None if answer.problem or drawn.lane != lane else drawn.png
        return Picture(png, answer.problem, answer.wait_s, drawn.took_s)

    def _read(self) -> dict[str, Any]:
        found = sorted(self._source.endpoints(), key=in_order)
        self._known = {f"{each.fleet} {each.endpoint_id}": each for each in found}
        endpoints = [
            {**as_fields(each), "key": key, "problem": each.problem}
            for key, each in self._known.items()
        ]
        try:
            runners = list(map(asdict, self._source.runners()))
        except RlmeshError:
            runners = []  # the endpoints are known all the same
        return {"endpoints": endpoints, "runners": runners}

    def _observer(self, purpose: str, endpoint: EndpointStatus) -> EndpointObserver:
        """Return a connection for one purpose, for a question that one thread at a time asks."""

        def connect() -> EndpointObserver:
            to = self._source.connect_options(endpoint)
            observer = EndpointObserver(
                to.address, token=to.token, tls=to.tls, timeout_s=_TIMEOUT_S
            )
            try:
                observer.sessions()  # connects, which is no part of the time of a picture
            except BaseException:
                observer.close()
                raise
            return observer

        # Pictures may wait for a step; the connection of lists does not wait with them.
        return self._keep(
            (purpose, endpoint.fleet, endpoint.endpoint_id, endpoint.address), connect
        )

    def _keep(self, name: tuple[object, ...], make: Callable[[], T]) -> T:
        with self._lock:
            found: T | None = self._kept.get(name)
        if found is None:
            found = make()  # may block, so without the lock
        with self._lock:
            kept: T = self._kept.setdefault(name, found)
            dropped: list[Any] = [] if kept is found else [found]
            self._kept.move_to_end(name)
            if len(self._kept) > _MOST_KEPT:
                dropped.append(self._kept.popitem(last=False)[1])
        for each in dropped:
            if isinstance(each, EndpointObserver):
                each.close()
        return kept


def mean_after(mean_s: float, took_s: float) -> float:
    return mean_s + (took_s - mean_s) / _NUM_AVERAGED


def picture_pause_s(took_s: float) -> float:
    return max(1 / PICTURES_PER_S - took_s, took_s / PICTURE_SHARE - took_s)
