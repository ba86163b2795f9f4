"""evaluate_on_ray: an evaluation by several processes, for a fleet that one cannot keep busy.

Each worker is an actor with endpoints of its own. It runs chunks of episodes and streams finished
ones back: a worker that dies loses only its unfinished episodes.
"""

import math
import queue
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Unpack

import ray

from rlmesh_ray.actors.placement import OUTSIDE, await_start
from rlmesh_ray.actors.ray_calls import durable
from rlmesh_ray.auth.token_file import TokenSource
from rlmesh_ray.client.channel import ConnectOptions
from rlmesh_ray.errors import (
    AccessDeniedError,
    ConfigurationError,
    EndpointError,
    EvaluationInterruptedError,
    RlmeshError,
)
from rlmesh_ray.evaluation.coordinator import (
    EndpointDirectory,
    News,
    is_fleet,
    resolver_of,
    token_at,
)
from rlmesh_ray.evaluation.options import EvaluationOptions, checked_seed
from rlmesh_ray.evaluation.result import EpisodeResult, EvaluationResult, endpoint_reports
from rlmesh_ray.evaluation.run import evaluate_indices, warn_of_missing_reports
from rlmesh_ray.options import completed, takes_options
from rlmesh_ray.spaces.observation_map import as_observation_map

_POLL_S = 0.5
_END_S = 5.0
_MOST_LOSSES = 3
"""Times that a worker may die in a row, without a finished episode in between."""


@takes_options(EvaluationOptions)
def evaluate_on_ray(
    env: Any,
    model: Any,
    *,
    episodes: int,
    num_workers: int | None = None,
    num_cpus: float = 1.0,
    actor_options: Mapping[str, Any] | None = None,
    start_timeout_s: float = 120.0,
    **options: Unpack[EvaluationOptions],
) -> EvaluationResult:
    """Run episodes as ``evaluate`` does, from several processes on Ray.

    The same seed gives the same episodes. The environment's endpoints are divided among the
    workers; all workers share the model's. Ray restarts a worker that dies: its finished episodes
    count, the others run again.

    Args:
        env: A fleet, an address, or a list of addresses that all nodes can reach.
        model: The same, or a function, which is pickled for the workers.
        episodes: Number of episodes, at least 1.
        num_workers: Number of workers; default: one for each endpoint of the environment. With
            more, several have a session with the same endpoint.
        num_cpus: CPUs that Ray reserves for each worker.
        actor_options: Further options of each worker: ``resources``, ``scheduling_strategy``, ...
        start_timeout_s: How long to wait until all workers run.
        **options: See ``EvaluationOptions``.

    Raises:
        ConfigurationError: An argument is wrong, or cannot be sent to another process.
        CapacityError: The cluster did not place all workers in time.
        EvaluationInterruptedError: No worker is left; holds the finished episodes.
        RlmeshError: As ``evaluate`` raises it.
    """
    given = completed("evaluate_on_ray", EvaluationOptions, options)
    given["seed"] = checked_seed(episodes, given["seed"])
    given["observation_map"] = as_observation_map(given["observation_map"])
    shares = split_endpoints(env, model, num_workers)
    placement = {"num_cpus": num_cpus, **OUTSIDE, **(actor_options or {})}
    silent = EvaluationOptions(**{**given, "on_episode": None, "on_loss": None})
    worker_class: Any = EvaluationWorker
    if callable(model):  # kept until the end: Ray restarts workers with it
        durable_policy = durable("the policy", model)
        shares = [(own, durable_policy) for own, _ in shares]
    workers = [worker_class.options(**placement).remote(*share, silent) for share in shares]
    try:
        starting = [worker.__ray_ready__.remote() for worker in workers]
        await_start(starting, "workers", [placement] * len(workers), start_timeout_s)
        result = _Coordinator(workers, episodes, given).run()
    finally:
        for worker in workers:
            ray.kill(worker)
    warn_of_missing_reports(result)
    return result


@dataclass(frozen=True, slots=True)
class FleetEndpoint:
    """One endpoint of a fleet, as a fleet of one; workers resolve its address themselves."""

    fleet: EndpointDirectory
    token: TokenSource | None
    index: int

    @property
    def resolver(self) -> EndpointDirectory:
        return self

    def __len__(self) -> int:
        return 1

    def address(self, index: int) -> str:
        return self.fleet.address(self.index)


@ray.remote(max_restarts=-1)
class EvaluationWorker:
    def __init__(self, env: Any, model: Any, options: EvaluationOptions) -> None:
        self._env = env
        self._model = model
        self._options = options
        self._has_worked = False

    def run(self, indices: Sequence[int]) -> Iterator[list[News] | EndpointError]:
        """Run episodes; yield results and losses in batches.

        The last item may be the error that has ended the chunk early: this worker has no usable
        endpoint left.
        """
        news: queue.SimpleQueue[News | BaseException | None] = queue.SimpleQueue()
        threading.Thread(target=self._evaluate, args=(indices, news), daemon=True).start()
        while True:
            batch: list[Any] = [news.get()]
            while not news.empty():
                batch.append(news.get())
            last = batch[-1]
            if isinstance(last, News):
                yield batch
                continue
            yield batch[:-1]
            if isinstance(last, EndpointError) and not isinstance(last, AccessDeniedError):
                yield last
            elif last is not None:
                raise last
            return

    def _evaluate(self, indices: Sequence[int], news: "queue.SimpleQueue[Any]") -> None:
        def note(episode: EpisodeResult) -> None:
            self._has_worked = True
            news.put(episode)

        # An endpoint may die between two chunks, and be back in a moment.
        are_known = self._has_worked
        options = EvaluationOptions(**{**self._options, "on_episode": note, "on_loss": news.put})
        try:
            evaluate_indices(self._env, self._model, indices, options, are_known=are_known)
            news.put(None)
        except BaseException as error:  # noqa: BLE001  # raised again where Ray sees it
            news.put(error)


@dataclass(slots=True, eq=False)
class _Worker:
    """An ``EvaluationWorker``, as the coordinator sees it."""

    actor: Any
    stream: Any = None
    """The answers to its present chunk of episodes; None: it has none."""
    left: set[int] = field(default_factory=set)
    """The episodes of its chunk that it has not finished."""
    num_losses: int = 0
    """How often it has died since its last finished episode."""
    cause: Exception | None = None
    """Why it gets no chunk any more."""


class _Coordinator:
    """Assigns chunks of episodes to the workers and collects their results."""

    def __init__(
        self, actors: Sequence[Any], num_episodes: int, options: EvaluationOptions
    ) -> None:
        self._workers = [_Worker(actor) for actor in actors]
        self._options = options
        self._num_episodes = num_episodes
        self._waiting = list(range(num_episodes))
        self._news: list[News] = []
        self._finished: list[EpisodeResult] = []

    def run(self) -> EvaluationResult:
        start_s = time.perf_counter()
        while len(self._finished) < self._num_episodes:
            self._assign_chunks()
            if not self._receive():
                raise self._interrupted()
        # A moment for the workers to end their sessions.
        end_s = time.monotonic() + _END_S
        while time.monotonic() < end_s and self._receive():
            pass
        wall_s = time.perf_counter() - start_s
        return EvaluationResult(self._episodes(), wall_s, endpoint_reports(self._news))

    def _assign_chunks(self) -> None:
        """Assign each idle worker a chunk: half of an even share, so that all end together."""
        usable = [worker for worker in self._workers if worker.cause is None]
        for worker in usable:
            if worker.stream is None and self._waiting:
                size = math.ceil(len(self._waiting) / (2 * len(usable)))
                chunk, self._waiting = self._waiting[:size], self._waiting[size:]
                worker.left = set(chunk)
                worker.stream = worker.actor.run.options(num_returns="streaming").remote(chunk)

    def _receive(self) -> bool:
        """Wait for an answer of a worker; return False if none has a chunk."""
        busy = {worker.stream: worker for worker in self._workers if worker.stream is not None}
        if not busy:
            return False
        for stream in ray.wait(list(busy), timeout=_POLL_S)[0]:
            worker = busy[stream]
            try:
                news = ray.get(next(stream))
            except StopIteration:
                worker.stream = None
            except ray.exceptions.RayTaskError as error:
                # The text of Ray's error is a traceback of many lines.
                raise error.cause if isinstance(error.cause, RlmeshError) else error from None
            except ray.exceptions.RayError as error:
                worker.stream = None
                worker.num_losses += 1
                if worker.num_losses > _MOST_LOSSES:
                    worker.cause = error
                self._reschedule(worker)
            else:
                self._note(worker, news)
        return True

    def _note(self, worker: _Worker, news: list[News] | EndpointError) -> None:
        if isinstance(news, EndpointError):
            worker.cause = news
            self._reschedule(worker)
            return
        worker.num_losses = 0
        self._news += news
        for one in news:
            told: Any = self._options["on_loss"]
            if isinstance(one, EpisodeResult):
                worker.left.remove(one.index)
                self._finished.append(one)
                told = self._options["on_episode"]
            if told is not None:
                told(one)

    def _reschedule(self, worker: _Worker) -> None:
        """Have other workers run the rest of a chunk, the first episodes first."""
        self._waiting = sorted([*self._waiting, *worker.left])
        worker.left = set()

    def _interrupted(self) -> EvaluationInterruptedError:
        lines = tuple(
            dict.fromkeys(
                line
                for cause in (worker.cause for worker in self._workers)
                if cause is not None
                for line in getattr(cause, "causes", ()) or [str(cause).partition("\n")[0]]
            )
        )
        return EvaluationInterruptedError(
            f"no worker is left after {len(self._finished)} of {self._num_episodes} episodes "
            f"({'; '.join(lines)}); remove the cause and evaluate again",
            self._episodes(),
            lines,
        )

    def _episodes(self) -> tuple[EpisodeResult, ...]:
        return tuple(sorted(self._finished, key=lambda episode: episode.index))


def split_endpoints(env: Any, model: Any, num_workers: int | None) -> list[tuple[Any, Any]]:
    """Return each worker's endpoints: its own share of the environment's, all of the model's."""
    envs = _parts(env)
    models = None if callable(model) else _parts(model)
    for kind, parts in (("environment", envs), ("model", models)):
        if parts == []:
            raise ConfigurationError(f"no endpoint for the {kind}; name at least one")
    count = len(envs) if num_workers is None else num_workers
    if count < 1:
        raise ConfigurationError(f"num_workers={count} must be at least 1")
    assignments = []
    num_before = 0
    for index in range(count):
        own = envs[index::count] or [envs[index % len(envs)]]
        if models is None:
            assignments.append((own, model))
            continue
        # Each worker starts with another model endpoint, so that all of them get equal load.
        first = num_before % len(models)
        assignments.append((own, models[first:] + models[:first]))
        num_before += len(own)
    return assignments


def _parts(endpoints: Any) -> list[Any]:
    if isinstance(endpoints, (list, tuple)):
        return [part for one in endpoints for part in _parts(one)]
    if isinstance(endpoints, (str, ConnectOptions)):
        return [endpoints]
    if is_fleet(endpoints):
        fleet = resolver_of(endpoints)
        places = range(len(fleet))
        return [FleetEndpoint(fleet, token_at(endpoints, index), index) for index in places]
    raise ConfigurationError(
        f"{type(endpoints).__name__} cannot be sent to other processes; give a fleet or addresses"
    )
