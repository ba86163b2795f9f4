"""State that the workers of one evaluation share: episodes, endpoints, results, and one lock."""

import heapq
import itertools
import threading
import time
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import Any

from rlmesh_ray.client.remote_model import RemoteModel
from rlmesh_ray.client.remote_vector_env import RemoteVectorEnv, agents_notice
from rlmesh_ray.errors import (
    ContractMismatchError,
    EvaluationInterruptedError,
    LocalProtocolError,
    RemoteError,
)
from rlmesh_ray.evaluation.endpoints import (
    NAMES,
    Endpoints,
    RemoteEndpoint,
    have_failed,
    next_due_s,
    next_endpoint,
)
from rlmesh_ray.evaluation.result import (
    EndpointRole,
    EpisodeResult,
    EvaluationResult,
    Loss,
    endpoint_reports,
)
from rlmesh_ray.spaces.contract import EnvContract, space_difference

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


class Schedule:
    """The episodes of one evaluation, by index; without I/O, clock or lock.

    Every index is finished exactly once. A lost index waits again and may be taken by any lane. The
    smallest waiting index is taken first, so that no lane's speed decides which episodes count.

    A session is a group of lanes that are lost together. The key of a lost session must never be
    used again: its late reports are refused.

    Args:
        indices: Distinct indices of the episodes.
    """

    def __init__(self, indices: Iterable[int]) -> None:
        self._waiting = sorted(indices)
        self._running: dict[Hashable, dict[int, int]] = {}
        self._num_left = len(self._waiting)
        self._interruptions: Counter[int] = Counter()

    @property
    def num_waiting(self) -> int:
        """Number of indices that no lane runs."""
        return len(self._waiting)

    @property
    def is_complete(self) -> bool:
        return self._num_left == 0

    def interruptions(self, index: int) -> int:
        """Return how often ``index`` was lost after it had begun."""
        return self._interruptions[index]

    def take(self, session: Hashable, lane: int) -> int | None:
        """Assign an index to ``lane`` of ``session``; None where none waits.

        Raises:
            LocalProtocolError: The lane still runs another one.
        """
        running = self._running.setdefault(session, {})
        if lane in running:
            raise LocalProtocolError(f"lane {lane} still runs episode {running[lane]}")
        if not self._waiting:
            return None
        running[lane] = heapq.heappop(self._waiting)
        return running[lane]

    def finish(self, session: Hashable, lane: int) -> int:
        """Record that ``lane`` has finished its episode; return the index.

        Raises:
            LocalProtocolError: The lane runs no episode, or its session is lost.
        """
        index = self._running.get(session, {}).pop(lane, None)
        if index is None:
            raise LocalProtocolError(f"lane {lane} runs no episode that could end")
        self._num_left -= 1
        return index

    def lose(self, session: Hashable, *, has_begun: bool = True) -> tuple[int, ...]:
        """Reschedule the episodes of a lost session; return their indices, ascending.

        Args:
            session: Key of the session, which may run no episode.
            has_begun: Whether its episodes had begun and were interrupted.
        """
        lost = tuple(sorted(self._running.pop(session, {}).values()))
        for index in lost:
            heapq.heappush(self._waiting, index)
            self._interruptions[index] += has_begun
        return lost


class Attempt:
    """One attempt of one worker: sessions with an environment endpoint and a model endpoint.

    Args:
        key: Unique key of the attempt.
        env: The environment's endpoint.
        model: The model's endpoint; None where the policy is a function.
    """

    def __init__(
        self,
        key: int,
        env: RemoteEndpoint[RemoteVectorEnv],
        model: RemoteEndpoint[RemoteModel] | None,
    ) -> None:
        self.key = key
        self.model = model
        self.endpoints: list[RemoteEndpoint[Any]] = [env] if model is None else [env, model]
        self.has_begun = False

    def endpoint(self, role: EndpointRole) -> RemoteEndpoint[Any]:
        """Return the endpoint with that role; a function has none."""
        return next(each for each in self.endpoints if each.role is role)


class Coordinator:
    """Hands out episodes and endpoints to the workers. Thread-safe.

    Args:
        indices: Indices of the episodes.
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
        self._schedule = Schedule(indices)
        self._groups = [group for group in (envs, models) if group]
        self._models = models
        self._patience_s = patience_s
        self._max_interruptions = max_interruptions
        self._publish = publish
        self._finished: list[EpisodeResult] = []
        self._news: list[News] = []
        self._keys = itertools.count()
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
        return self._schedule.num_waiting

    def stop(self) -> None:
        """Make every worker stop."""
        with self._changed:
            self.is_stopped = True
            self._changed.notify_all()

    def await_attempt(self, env: RemoteEndpoint[RemoteVectorEnv]) -> Attempt | None:
        """Block until the worker of ``env`` should open sessions; None when it is done.

        Raises:
            EndpointError: No endpoint is left for the remaining episodes.
        """
        with self._changed:
            while not (self.is_stopped or self._schedule.is_complete):
                now_s = time.monotonic()
                self._require_usable_endpoints(now_s)
                attempt = self._next_attempt(env, now_s)
                if attempt is not None:
                    return attempt
                self._changed.wait(self._patience(now_s))
        return None

    def await_work(self) -> bool:
        """Block until an episode can be taken; False at the end of the evaluation."""
        with self._changed:
            while not self._schedule.num_waiting:
                if self.is_stopped or self._schedule.is_complete:
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
            for endpoint in attempt.endpoints:
                endpoint.reach()

    def take(self, attempt: Attempt, lanes: Sequence[int]) -> list[int | None]:
        """Assign an episode to each of ``lanes``, as far as there are any."""
        with self._changed:
            return [self._schedule.take(attempt.key, lane) for lane in lanes]

    def finish(self, attempt: Attempt, ended: Sequence[tuple[int, EpisodeResult]]) -> None:
        with self._changed:
            for lane, episode in ended:
                self._schedule.finish(attempt.key, lane)
                self._finished.append(episode)
            if self._schedule.is_complete:
                self._end_s = time.perf_counter()
                self._changed.notify_all()
        for _, episode in ended:
            self._report(episode)

    def lose(self, attempt: Attempt, role: EndpointRole, cause: Exception) -> None:
        """Record that the endpoint with that role has failed, and reschedule its episodes.

        Raises:
            EvaluationInterruptedError: An episode was interrupted too often.
        """
        endpoint = attempt.endpoint(role)
        with self._changed:
            lost = self._schedule.lose(attempt.key, has_begun=attempt.has_begun)
            is_usable = isinstance(cause, RemoteError) and cause.is_recoverable
            is_final = endpoint.session is not None and not is_usable
            is_first = endpoint.lose(cause, time.monotonic(), is_final=is_final)
            is_raised = any(endpoint in group and self._ends_with(group) for group in self._groups)
            self._changed.notify_all()
        if (is_first and not is_raised) or attempt.has_begun:
            interrupted = lost if attempt.has_begun else ()
            self._report(Loss(role, endpoint.address, _one_line(cause), interrupted))
        self._require_progress(lost, cause)

    def leave(self, attempt: Attempt) -> None:
        with self._changed:
            for endpoint in attempt.endpoints:
                endpoint.num_users -= 1
            self._changed.notify_all()

    def result(self) -> EvaluationResult:
        with self._changed:
            wall_s = self._end_s - (self._start_s or self._end_s)
            return EvaluationResult(self._sorted(), wall_s, endpoint_reports(self._news))

    def _next_attempt(self, env: RemoteEndpoint[RemoteVectorEnv], now_s: float) -> Attempt | None:
        if not self._schedule.num_waiting or not env.is_due(now_s):
            return None
        model = next_endpoint(self._models, now_s)
        if self._models and model is None:
            return None
        attempt = Attempt(next(self._keys), env, model)
        for endpoint in attempt.endpoints:
            endpoint.num_users += 1
        return attempt

    def _patience(self, now_s: float) -> float:
        due_s = [next_due_s(group, now_s) for group in self._groups]
        return max(0.01, min([_POLL_S, *(due - now_s for due in due_s)]))

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
        counts = {index: self._schedule.interruptions(index) for index in lost}
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
        with self._changed:
            self._news.append(news)
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
