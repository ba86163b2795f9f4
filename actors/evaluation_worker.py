"""EvaluationWorker: one process of an evaluation on Ray, and its share of the endpoints."""

import queue
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import ray

from rlmesh_ray.auth.token_file import TokenSource
from rlmesh_ray.client.channel import ConnectOptions
from rlmesh_ray.errors import AccessDeniedError, ConfigurationError, EndpointError
from rlmesh_ray.evaluation import EpisodeResult, EvaluationOptions, Loss, evaluate_indices
from rlmesh_ray.evaluation.session_sources import EndpointDirectory, is_fleet, resolver_of, token_at


@dataclass(frozen=True, slots=True)
class FleetEndpoint:
    """One endpoint of a fleet, as a fleet of one; workers resolve its address themselves."""

    fleet: EndpointDirectory
    token: TokenSource | None
    index: int

    @property
    def resolver(self) -> EndpointDirectory:
        """Resolver of this one endpoint."""
        return self

    def __len__(self) -> int:
        return 1

    def address(self, index: int) -> str:
        """Return the endpoint's present address.

        Raises:
            EndpointUnreachableError: The endpoint is not announced.
        """
        return self.fleet.address(self.index)


@dataclass(frozen=True, slots=True)
class ChunkSummary:
    """The last item of a chunk's results."""

    failure: EndpointError | None
    """Why the chunk ended early: this worker has no usable endpoint left; None: it did not."""


@ray.remote(max_restarts=-1)
class EvaluationWorker:
    """Runs chunks of episodes at its own endpoints."""

    def __init__(self, env: Any, model: Any, options: EvaluationOptions) -> None:
        self._env = env
        self._model = model
        self._options = options
        self._has_worked = False

    def ready(self) -> bool:
        """Return True, once the actor runs."""
        return True

    def run(self, indices: Sequence[int]) -> Iterator[list[EpisodeResult | Loss] | ChunkSummary]:
        """Run episodes; yield results and losses in batches, and a summary at the end."""
        news: queue.SimpleQueue[EpisodeResult | Loss | ChunkSummary | BaseException] = (
            queue.SimpleQueue()
        )
        thread = threading.Thread(target=self._evaluate, args=(indices, news), daemon=True)
        thread.start()
        while True:
            batch: list[EpisodeResult | Loss] = []
            one = news.get()
            while isinstance(one, (EpisodeResult, Loss)):
                batch.append(one)
                if news.empty():
                    break
                one = news.get()
            if batch:
                yield batch
            if isinstance(one, BaseException):
                raise one
            if isinstance(one, ChunkSummary):
                yield one
                return

    def _evaluate(self, indices: Sequence[int], news: "queue.SimpleQueue[Any]") -> None:
        def note(episode: EpisodeResult) -> None:
            self._has_worked = True
            news.put(episode)

        # An endpoint may die between two chunks, and be back in a moment.
        options = replace(
            self._options, on_episode=note, on_loss=news.put, is_known=self._has_worked
        )
        try:
            evaluate_indices(self._env, self._model, indices, options)
            news.put(ChunkSummary(None))
        except AccessDeniedError as error:
            news.put(error)
        except EndpointError as error:
            news.put(ChunkSummary(error))
        except BaseException as error:  # noqa: BLE001  # raised again where Ray sees it
            news.put(error)


def split_endpoints(env: Any, model: Any, num_workers: int | None) -> list[tuple[Any, Any]]:
    """Return each worker's endpoints: its own share of the environment's, all of the model's.

    Raises:
        ConfigurationError: ``num_workers`` is less than 1, no endpoint is named, or one cannot be
            sent to another process.
        EndpointError: A fleet's endpoints are not known now.
    """
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
    """Return one picklable value for each endpoint."""
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
