"""State that the workers of one evaluation share: episodes, endpoints, results, and one lock."""

import itertools
import threading
import time
from collections.abc import Callable, Sequence

from rlmesh_ray.client.remote_base import agents_notice
from rlmesh_ray.client.remote_vector_env import RemoteVectorEnv
from rlmesh_ray.errors import ContractMismatchError, EvaluationInterruptedError, RemoteError
from rlmesh_ray.evaluation.endpoint_availability import EndpointAvailability
from rlmesh_ray.evaluation.episode_schedule import Schedule
from rlmesh_ray.evaluation.result import (
    EndpointCounters,
    EndpointRole,
    EpisodeResult,
    EvaluationResult,
    Loss,
)
from rlmesh_ray.evaluation.session_sources import EndpointPlace
from rlmesh_ray.spaces.contract import EnvContract, space_difference

# Polled: no event marks the end of patience, and on Windows no signal ends a wait.
_POLL_S = 0.5

News = EpisodeResult | Loss


def require_same_environment(
    address: str, own: EnvContract, other: str, first: EnvContract
) -> None:
    """Raise ContractMismatchError if an endpoint serves another environment than the first one."""
    differs = space_difference(first, own)
    if own.id != first.id:
        differs = f"{own.id!r} where {first.id!r} is expected"
    if differs:
        raise ContractMismatchError(
            f"{address} serves another environment than {other}: {differs}; "
            "evaluate them one by one"
        )


class EndpointGroup:
    """The endpoints of one role, and their availability.

    Args:
        role: Role of the endpoints.
        sources: The endpoints, at least one.
        patience_s: See ``EndpointAvailability``.
        is_known: See ``EndpointAvailability``.
    """

    def __init__(
        self,
        role: EndpointRole,
        sources: Sequence[EndpointPlace],
        patience_s: float,
        *,
        is_known: bool,
    ) -> None:
        self.role = role
        self.sources = sources
        self.availability = EndpointAvailability(len(sources), patience_s, is_known=is_known)


class Attempt:
    """One attempt of one worker: sessions with an environment endpoint and a model endpoint.

    Args:
        key: Unique key of the attempt.
        env: Index of the environment's endpoint.
        model: Index of the model's endpoint; None where the policy is a function.
    """

    def __init__(self, key: int, env: int, model: int | None) -> None:
        self.key = key
        self.env = env
        self.model = model
        self.has_begun = False

    def index(self, role: EndpointRole) -> int:
        """Return the index of the endpoint with that role."""
        index = self.env if role is EndpointRole.ENV else self.model
        assert index is not None, "a function is no endpoint"
        return index


class Coordinator:
    """Hands out episodes and endpoints to the workers. Thread-safe.

    Args:
        indices: Indices of the episodes.
        envs: Endpoints of the environment.
        models: Endpoints of the policy; None where it is a function.
        max_interruptions: How often one episode may be interrupted.
        publish: Called with each episode and each loss, in the thread of its worker.
    """

    def __init__(
        self,
        indices: Sequence[int],
        envs: EndpointGroup,
        models: EndpointGroup | None,
        max_interruptions: int,
        publish: Callable[[News], None],
    ) -> None:
        self._num_episodes = len(indices)
        self._schedule = Schedule(indices)
        self._groups = {group.role: group for group in (envs, models) if group is not None}
        self._max_interruptions = max_interruptions
        self._publish = publish
        self._finished: list[EpisodeResult] = []
        self._counters = EndpointCounters()
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

    def await_attempt(self, env: int) -> Attempt | None:
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
        """Start the clock at the first session."""
        with self._changed:
            if self._start_s is None:
                self._start_s = time.perf_counter()

    def begin(self, attempt: Attempt) -> None:
        """Record that both sessions of ``attempt`` work."""
        with self._changed:
            attempt.has_begun = True
            for role, group in self._groups.items():
                group.availability.reach(attempt.index(role))

    def take(self, attempt: Attempt, lanes: Sequence[int]) -> list[int | None]:
        """Assign an episode to each of ``lanes``, as far as there are any."""
        with self._changed:
            return [self._schedule.take(attempt.key, lane) for lane in lanes]

    def finish(self, attempt: Attempt, ended: Sequence[tuple[int, EpisodeResult]]) -> None:
        """Record and publish the episodes that have ended, given with their lanes."""
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
        index = attempt.index(role)
        group = self._groups[role]
        source = group.sources[index]
        with self._changed:
            lost = self._schedule.lose(attempt.key, has_begun=attempt.has_begun)
            is_usable = isinstance(cause, RemoteError) and cause.is_recoverable
            is_final = source.is_final and not is_usable
            is_first = group.availability.lose(index, cause, time.monotonic(), is_final=is_final)
            is_raised = self._ends_with(group)
            self._changed.notify_all()
        if (is_first and not is_raised) or attempt.has_begun:
            interrupted = lost if attempt.has_begun else ()
            self._report(Loss(role, source.address, _one_line(cause), interrupted))
        self._require_progress(lost, cause)

    def leave(self, attempt: Attempt) -> None:
        """Record that ``attempt`` is over."""
        with self._changed:
            for role, group in self._groups.items():
                group.availability.leave(attempt.index(role))
            self._changed.notify_all()

    def was_reached(self, attempt: Attempt, role: EndpointRole) -> bool:
        """Return whether the endpoint with that role has ever worked."""
        with self._changed:
            return self._groups[role].availability.was_reached(attempt.index(role))

    def result(self) -> EvaluationResult:
        """Return the result of the finished episodes."""
        with self._changed:
            wall_s = self._end_s - (self._start_s or self._end_s)
            return EvaluationResult(self._sorted(), wall_s, self._counters.reports())

    def _next_attempt(self, env: int, now_s: float) -> Attempt | None:
        envs, models = self._groups[EndpointRole.ENV], self._groups.get(EndpointRole.MODEL)
        if not self._schedule.num_waiting or not envs.availability.is_due(env, now_s):
            return None
        model = None
        if models is not None:
            model = models.availability.choose(now_s)
            if model is None:
                return None
            models.availability.enter(model)
        envs.availability.enter(env)
        return Attempt(next(self._keys), env, model)

    def _patience(self, now_s: float) -> float:
        """Return how long to wait before the next check."""
        due_s = [group.availability.next_due_s(now_s) for group in self._groups.values()]
        return max(0.01, min([_POLL_S, *(due - now_s for due in due_s)]))

    def _require_usable_endpoints(self, now_s: float) -> None:
        for group in self._groups.values():
            if group.availability.has_failed(now_s):
                causes = group.availability.causes()
                if self._ends_with(group):
                    raise causes[0]
                raise self._interrupted(
                    f"no endpoint of the {_NAMES[group.role]} is left", causes
                ) from causes[-1]

    def _ends_with(self, group: EndpointGroup) -> bool:
        """Return whether the evaluation raises the error of a group that cannot be reached."""
        has_worked = self._finished or group.availability.was_reached(0)
        return len(group.sources) == 1 and not has_worked

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
            self._counters.note(news)
        try:
            self._publish(news)
        except Exception as error:
            self.refusal = error
            raise

    def _sorted(self) -> tuple[EpisodeResult, ...]:
        with self._changed:
            return tuple(sorted(self._finished, key=lambda episode: episode.index))


_NAMES = {EndpointRole.ENV: "environment", EndpointRole.MODEL: "model"}


def _one_line(cause: Exception) -> str:
    return " ".join(str(cause).split())
