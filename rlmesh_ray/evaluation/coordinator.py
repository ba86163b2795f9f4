"""State that the workers of one evaluation share: episodes, endpoints, results, and one lock."""

import contextlib
import heapq
import inspect
import math
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Generic, Protocol, TypeGuard, TypeVar

from rlmesh_ray.auth.ray_credentials import RayTls
from rlmesh_ray.auth.token_file import TokenSource
from rlmesh_ray.client.channel import ConnectOptions
from rlmesh_ray.client.env.remote_env import RemoteVectorEnv, agents_notice
from rlmesh_ray.client.model.remote_model import RemoteModel
from rlmesh_ray.errors import (
    ConfigurationError,
    ContractMismatchError,
    EvaluationInterruptedError,
    RemoteError,
    RlmeshError,
)
from rlmesh_ray.evaluation.result import (
    EndpointRole,
    EpisodeResult,
    EvaluationResult,
    Loss,
    endpoint_reports,
)
from rlmesh_ray.spaces.contract import EnvContract, space_difference

SessionT = TypeVar("SessionT", bound=RemoteVectorEnv | RemoteModel)

_FIRST_DELAY_S = 0.1
_LONGEST_DELAY_S = 5.0


class EndpointFleet(Protocol):
    """Endpoints that may move, such as an ``EnvFleet``.

    It also has ``tokens``, one for each endpoint, or one ``token`` for all of them.
    """

    @property
    def resolver(self) -> "EndpointDirectory":
        """Where the endpoints are."""


class EndpointDirectory(Protocol):
    """The present address of each endpoint of a fleet, by index."""

    def __len__(self) -> int: ...

    def address(self, index: int, /) -> str:
        """Return an endpoint's address; raises EndpointUnreachableError while it has none."""


class RemoteEndpoint(Generic[SessionT]):
    """One endpoint: its sessions, and whether it works.

    A lost endpoint is due again after 0.1 s, then 0.2 s, and so on, at most every 5 s.

    Args:
        role: Its role.
        source: The caller's open session, which the caller also closes; or returns the connection
            options, and is called for each session.
        connect: Opens a session.
        is_known: Whether it has worked before, so that it may return if it cannot be reached.
    """

    def __init__(
        self,
        role: EndpointRole,
        source: SessionT | Callable[[], ConnectOptions],
        connect: Callable[[ConnectOptions], SessionT],
        *,
        is_known: bool = False,
    ) -> None:
        self.role = role
        self.session: SessionT | None = None if callable(source) else source
        """The caller's session; None: a new one is opened each time."""
        self.address = ""
        """Its address at the last look-up."""
        if self.session is not None:
            self.address = str(getattr(self.session, "address", "an open session"))
        self._find: Any = source  # not called where it is a session
        self._connect = connect
        self.num_users = 0
        self.is_known = is_known
        """Whether it has ever worked."""
        self.is_gone = False
        """Whether it cannot be dialed again."""
        self.down_since_s: float | None = None
        self.retry_s = 0.0
        self.cause: Exception | None = None
        self._num_failures = 0  # in a row

    def open(self) -> SessionT:
        if self.session is not None:
            return self.session
        connect_options: ConnectOptions = self._find()
        self.address = connect_options.address
        return self._connect(connect_options)

    def release(self, session: SessionT) -> None:
        """Give a session back: close it, unless it is the caller's. Never raises."""
        if self.session is None:
            with contextlib.suppress(RlmeshError):
                session.close()

    def is_due(self, now_s: float) -> bool:
        return not self.is_gone and self.retry_s <= now_s

    def reach(self) -> None:
        self.is_known = True
        self.down_since_s, self._num_failures, self.retry_s = None, 0, 0.0

    def lose(self, cause: Exception, now_s: float, *, is_final: bool) -> bool:
        """Record that it has failed; return whether this is the first report of this loss.

        Several users of one endpoint report the same loss; it delays the next try only once.
        ``is_final``: it cannot be dialed again.
        """
        is_first = self.down_since_s is None
        if is_first:
            self.down_since_s = now_s
        if is_first or now_s >= self.retry_s:
            delay_s = _FIRST_DELAY_S * 2 ** min(self._num_failures, 10)
            self.retry_s = now_s + min(_LONGEST_DELAY_S, delay_s)
            self._num_failures += 1
        self.cause = cause
        self.is_gone = self.is_gone or is_final
        return is_first


Endpoints = Sequence[RemoteEndpoint[Any]]
"""Those of one role, at least one."""


def next_endpoint(endpoints: Endpoints, now_s: float) -> RemoteEndpoint[Any] | None:
    """Return the endpoint to use next; None where none is due.

    Endpoints that work come before those that failed, then those with the fewest users.
    """
    due = [each for each in endpoints if each.is_due(now_s)]
    return min(due, key=lambda each: (each.down_since_s is not None, each.num_users), default=None)


def next_due_s(endpoints: Endpoints, now_s: float) -> float:
    """Return the earliest retry time; infinity where no endpoint waits for one."""
    waiting = (each.retry_s for each in endpoints if not each.is_gone and each.retry_s > now_s)
    return min(waiting, default=math.inf)


def have_failed(endpoints: Endpoints, now_s: float, patience_s: float) -> bool:
    """Return whether all endpoints are lost for longer than ``patience_s``.

    Where none has ever been reached, one try each is enough: the addresses are wrong, or no
    endpoint was started.
    """
    lost_s = [each.down_since_s for each in endpoints if not each.num_users]
    if len(lost_s) < len(endpoints) or None in lost_s:
        return False
    return not any(each.is_known for each in endpoints) or all(
        each.is_gone or (each.down_since_s is not None and now_s - each.down_since_s >= patience_s)
        for each in endpoints
    )


def as_endpoints(
    role: EndpointRole,
    given: Any,
    token: TokenSource | None,
    connect: Callable[[ConnectOptions], SessionT],
) -> list[RemoteEndpoint[SessionT]]:
    """Return all endpoints that the caller names.

    Args:
        role: Their role.
        given: An address, a ``ConnectOptions``, an open session, a list of those, or a fleet.
        token: Token for plain addresses.
        connect: Opens a session.

    Raises:
        ConfigurationError: ``given`` is none of those, an empty list, or has the same open
            environment twice.
        EndpointError: The fleet's addresses are not known now.
    """
    kind = _KINDS[role]
    if isinstance(given, (list, tuple)):
        found = [each for one in given for each in as_endpoints(role, one, token, connect)]
        if not found:
            raise ConfigurationError(f"no endpoint for the {NAMES[role]}; name at least one")
        opened = [id(each.session) for each in found if each.session is not None]
        if role is EndpointRole.ENV and len({*opened}) < len(opened):
            raise ConfigurationError(
                "the same open RemoteVectorEnv is named twice, and its lanes can run one episode "
                "each; open another one, or name the endpoint's address twice"
            )
        return found
    if isinstance(given, kind):
        return [RemoteEndpoint(role, given, connect)]
    if isinstance(given, (str, ConnectOptions)):
        options = ConnectOptions(given, token) if isinstance(given, str) else given
        return [RemoteEndpoint(role, lambda: options, connect)]
    if is_fleet(given):
        resolver = resolver_of(given)
        finders = [
            partial(_at_fleet, resolver, index, token_at(given, index))
            for index in range(len(resolver))
        ]
        return [RemoteEndpoint(role, find, connect, is_known=True) for find in finders]
    raise ConfigurationError(
        f"{type(given).__name__} is not an endpoint for the {NAMES[role]}; give an address, an "
        f"open {kind.__name__}, a list of those, or a fleet"
    )


def is_fleet(endpoints: object) -> TypeGuard[EndpointFleet]:
    return _has_any(endpoints, "resolver") and _has_any(endpoints, "tokens", "token")


def resolver_of(fleet: EndpointFleet) -> EndpointDirectory:
    """Return the directory of a fleet's endpoints; raises ConfigurationError if it has none."""
    resolver = fleet.resolver
    if not len(resolver):
        raise ConfigurationError("the fleet has no endpoints")
    return resolver


def token_at(fleet: Any, index: int) -> TokenSource | None:
    token: TokenSource | None = fleet.tokens[index] if hasattr(fleet, "tokens") else fleet.token
    return token


def _at_fleet(resolver: EndpointDirectory, index: int, token: TokenSource | None) -> ConnectOptions:
    # Ray hosts the endpoint: where Ray uses TLS, it does, too.
    return ConnectOptions(resolver.address(index), token, RayTls())


def _has_any(fleet: object, *names: str) -> bool:
    # Without evaluating properties: a fleet would look addresses up, and one may be missing.
    nothing = object()
    return any(inspect.getattr_static(fleet, name, nothing) is not nothing for name in names)


NAMES = {EndpointRole.ENV: "environment", EndpointRole.MODEL: "model"}
_KINDS: dict[EndpointRole, Any] = {
    EndpointRole.ENV: RemoteVectorEnv,
    EndpointRole.MODEL: RemoteModel,
}


# Polled: no event marks the end of patience, and on Windows no signal ends a wait.
_POLL_S = 0.5

News = EpisodeResult | Loss


def require_same_environment(
    address: str, own: EnvContract, other: str, first: EnvContract
) -> None:
    differs = space_difference(first, own)
    if own.id != first.id:
        differs = f"{own.id!r} where {first.id!r} is expected"
    if differs:
        raise ContractMismatchError(
            f"{address} serves another environment than {other}: {differs}; "
            "evaluate them one by one"
        )


@dataclass(slots=True)
class Attempt:
    """One attempt of one worker: sessions with an environment endpoint and a model endpoint."""

    endpoints: dict[EndpointRole, RemoteEndpoint[Any]]
    """By role; without a model's where the policy is a function."""
    running: dict[int, int] = field(default_factory=dict)
    """Index of the episode that each lane runs; they are lost together."""
    has_begun: bool = False


class Coordinator:
    """Hands out episodes and endpoints to the workers. Thread-safe.

    Every index is finished exactly once. A lost index waits again and may be taken by any lane. The
    smallest waiting index is taken first, so that no lane's speed decides which episodes count.

    Args:
        indices: Distinct indices of the episodes.
        envs: Endpoints of the environment.
        models: Endpoints of the policy; none where it is a function.
        patience_s: How long to wait for an endpoint when none is left.
        max_interruptions: How often one episode may be interrupted.
        publish: Called with each episode and each loss, in the thread of its worker.
    """

    def __init__(
        self,
        indices: Sequence[int],
        envs: Endpoints,
        models: Endpoints,
        patience_s: float,
        max_interruptions: int,
        publish: Callable[[News], None],
    ) -> None:
        self._num_episodes = len(indices)
        self._waiting = sorted(indices)  # a heap
        self.interruptions: Counter[int] = Counter()
        """How often each episode was interrupted, by its index."""
        self._groups = [group for group in (envs, models) if group]
        self._models = models
        self._patience_s = patience_s
        self._max_interruptions = max_interruptions
        self._publish = publish
        self._finished: list[EpisodeResult] = []
        self._losses: list[Loss] = []
        self._contract: tuple[str, EnvContract] | None = None
        self._start_s: float | None = None
        self._end_s = 0.0
        self._changed = threading.Condition()
        self.is_stopped = False
        """Whether the workers have to stop."""
        self.refusal: Exception | None = None
        """Error that ``publish`` has raised: never the fault of an endpoint."""

    @property
    def num_waiting(self) -> int:
        """About how many episodes no lane runs; read without the lock."""
        return len(self._waiting)

    @property
    def is_over(self) -> bool:
        return self.is_stopped or len(self._finished) == self._num_episodes

    def stop(self) -> None:
        with self._changed:
            self.is_stopped = True
            self._changed.notify_all()

    def await_attempt(self, env: RemoteEndpoint[RemoteVectorEnv]) -> Attempt | None:
        """Block until the worker of ``env`` should open sessions; None when it is done.

        Raises:
            EndpointError: No endpoint is left for the remaining episodes.
        """
        with self._changed:
            while not self.is_over:
                now_s = time.monotonic()
                self._require_usable_endpoints(now_s)
                attempt = self._next_attempt(env, now_s)
                if attempt is not None:
                    return attempt
                due_s = [next_due_s(group, now_s) - now_s for group in self._groups]
                self._changed.wait(max(0.01, min(_POLL_S, *due_s)))
        return None

    def await_work(self) -> bool:
        """Block until an episode can be taken; False at the end of the evaluation."""
        with self._changed:
            while not self._waiting:
                if self.is_over:
                    return False
                self._changed.wait(_POLL_S)
        return True

    def agree(self, env: RemoteVectorEnv) -> None:
        """Check that all endpoints serve the same environment, of one agent.

        Raises:
            ContractMismatchError: This endpoint does not.
        """
        own = env.contract
        if agents := agents_notice(own):
            raise ContractMismatchError(f"{env.address} cannot be evaluated here: {agents}")
        with self._changed:
            if self._contract is None:
                self._contract = (env.address, own)
            address, first = self._contract
        require_same_environment(env.address, own, address, first)

    def note_open(self) -> None:
        with self._changed:
            if self._start_s is None:
                self._start_s = time.perf_counter()

    def begin(self, attempt: Attempt) -> None:
        with self._changed:
            attempt.has_begun = True
            for endpoint in attempt.endpoints.values():
                endpoint.reach()

    def take(self, attempt: Attempt, lanes: Sequence[int]) -> None:
        """Assign an episode to each of ``lanes``, which are idle, until none is left."""
        with self._changed:
            for lane in lanes[: len(self._waiting)]:
                attempt.running[lane] = heapq.heappop(self._waiting)

    def finish(self, attempt: Attempt, ended: Mapping[int, EpisodeResult]) -> None:
        """Record the episodes that lanes have ended."""
        with self._changed:
            for lane, episode in ended.items():
                del attempt.running[lane]
                self._finished.append(episode)
            if len(self._finished) == self._num_episodes:
                self._end_s = time.perf_counter()
                self._changed.notify_all()
        for episode in ended.values():
            self._report(episode)

    def lose(self, attempt: Attempt, role: EndpointRole, cause: Exception) -> None:
        """Record that the endpoint with that role has failed, and reschedule its episodes.

        Raises:
            EvaluationInterruptedError: An episode was interrupted too often.
        """
        endpoint = attempt.endpoints[role]
        with self._changed:
            lost = tuple(sorted(attempt.running.values()))
            attempt.running.clear()
            for index in lost:
                heapq.heappush(self._waiting, index)
                self.interruptions[index] += attempt.has_begun
            is_usable = isinstance(cause, RemoteError) and cause.is_recoverable
            is_final = endpoint.session is not None and not is_usable
            is_first = endpoint.lose(cause, time.monotonic(), is_final=is_final)
            is_raised = any(endpoint in group and self._ends_with(group) for group in self._groups)
            self._changed.notify_all()
        if (is_first and not is_raised) or attempt.has_begun:
            interrupted = lost if attempt.has_begun else ()
            loss = Loss(role, endpoint.address, _one_line(cause), interrupted)
            self._losses.append(loss)
            self._report(loss)
        self._require_progress(lost, cause)

    def leave(self, attempt: Attempt) -> None:
        with self._changed:
            for endpoint in attempt.endpoints.values():
                endpoint.num_users -= 1
            self._changed.notify_all()

    def result(self) -> EvaluationResult:
        with self._changed:
            wall_s = self._end_s - (self._start_s or self._end_s)
            return EvaluationResult(
                self._sorted(), wall_s, endpoint_reports([*self._finished, *self._losses])
            )

    def _next_attempt(self, env: RemoteEndpoint[RemoteVectorEnv], now_s: float) -> Attempt | None:
        if not self._waiting or not env.is_due(now_s):
            return None
        model = next_endpoint(self._models, now_s)
        if self._models and model is None:
            return None
        endpoints: list[RemoteEndpoint[Any]] = [env] if model is None else [env, model]
        for endpoint in endpoints:
            endpoint.num_users += 1
        return Attempt({each.role: each for each in endpoints})

    def _require_usable_endpoints(self, now_s: float) -> None:
        for group in self._groups:
            if have_failed(group, now_s, self._patience_s):
                causes = [each.cause for each in group if each.cause is not None]
                if self._ends_with(group):
                    raise causes[0]
                raise self._interrupted(
                    f"no endpoint of the {NAMES[group[0].role]} is left", causes
                ) from causes[-1]

    def _ends_with(self, group: Endpoints) -> bool:
        """Return whether the evaluation raises the error of a group that cannot be reached."""
        return len(group) == 1 and not (self._finished or group[0].is_known)

    def _require_progress(self, lost: Sequence[int], cause: Exception) -> None:
        counts = {index: self.interruptions[index] for index in lost}
        most = max(counts.values(), default=0)
        if most > self._max_interruptions:
            # They ran side by side, so none of them can be blamed.
            *others, last = [str(index) for index, count in counts.items() if count == most]
            names = f"episodes {', '.join(others)} and {last}" if others else f"episode {last}"
            verb = "were" if others else "was"
            raise self._interrupted(f"{names} {verb} interrupted {most} times", [cause]) from cause

    def _interrupted(self, what: str, causes: Sequence[Exception]) -> EvaluationInterruptedError:
        lines = tuple(dict.fromkeys(map(_one_line, causes)))
        return EvaluationInterruptedError(
            f"{what} after {len(self._finished)} of {self._num_episodes} episodes "
            f"({'; '.join(lines)}); remove the cause and evaluate again",
            self._sorted(),
            lines,
        )

    def _report(self, news: News) -> None:
        try:
            self._publish(news)
        except Exception as error:
            self.refusal = error
            raise

    def _sorted(self) -> tuple[EpisodeResult, ...]:
        with self._changed:
            return tuple(sorted(self._finished, key=lambda episode: episode.index))


def _one_line(cause: Exception) -> str:
    return " ".join(str(cause).split())
