"""One process of an evaluation on Ray, and the endpoints that it drives."""

import queue
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import ray

from rlmesh_ray.client.channel import Dial
from rlmesh_ray.client.evaluation import Episode, Loss, Options, evaluate_indices
from rlmesh_ray.client.evaluation.sites import Directory, directory_of, is_fleet, token_at
from rlmesh_ray.credentials.token_file import TokenSource
from rlmesh_ray.errors import AccessDeniedError, ConfigurationError, EndpointError


@dataclass(frozen=True, slots=True)
class Share:
    """One endpoint of a fleet, as a fleet of its own; travels to a worker and finds it there."""

    fleet: Directory
    token: TokenSource | None
    place: int

    @property
    def directory(self) -> Directory:
        """Where it is."""
        return self

    def __len__(self) -> int:
        return 1

    def address(self, index: int) -> str:
        """Return where it is now.

        Raises:
            EndpointUnreachableError: It is away.
        """
        return self.fleet.address(self.place)


@dataclass(frozen=True, slots=True)
class Summary:
    """The end of a chunk."""

    failure: EndpointError | None
    """Why it ended early: no endpoint of this worker is left."""


@ray.remote(max_restarts=-1)
class EvaluationWorker:
    """Runs chunks of episodes at its own endpoints."""

    def __init__(self, env: Any, model: Any, options: Options) -> None:
        self._env = env
        self._model = model
        self._options = options
        self._has_worked = False

    def ready(self) -> bool:
        """Answer."""
        return True

    def run(self, indices: Sequence[int]) -> Iterator[list[Episode | Loss] | Summary]:
        """Run episodes; yield what has happened since the last time, and a summary at the end."""
        news: queue.SimpleQueue[Episode | Loss | Summary | BaseException] = queue.SimpleQueue()
        thread = threading.Thread(target=self._evaluate, args=(indices, news), daemon=True)
        thread.start()
        while True:
            batch: list[Episode | Loss] = []
            one = news.get()
            while isinstance(one, (Episode, Loss)):
                batch.append(one)
                if news.empty():
                    break
                one = news.get()
            if batch:
                yield batch
            if isinstance(one, BaseException):
                raise one
            if isinstance(one, Summary):
                yield one
                return

    def _evaluate(self, indices: Sequence[int], news: "queue.SimpleQueue[Any]") -> None:
        def note(episode: Episode) -> None:
            self._has_worked = True
            news.put(episode)

        # An endpoint may die between two chunks, and be back in a moment.
        options = replace(
            self._options, on_episode=note, on_loss=news.put, is_known=self._has_worked
        )
        try:
            evaluate_indices(self._env, self._model, indices, options)
            news.put(Summary(None))
        except AccessDeniedError as error:
            news.put(error)
        except EndpointError as error:
            news.put(Summary(error))
        except BaseException as error:  # noqa: BLE001  # raised again where Ray sees it
            news.put(error)


def shares_of(env: Any, model: Any, num_workers: int | None) -> list[tuple[Any, Any]]:
    """Return the endpoints of each worker: its own of the environment, all of the model.

    Raises:
        ConfigurationError: ``num_workers`` is less than 1, no endpoint is named, or one cannot be
            sent.
        EndpointError: A fleet cannot tell of its endpoints.
    """
    envs = _parts(env)
    models = None if callable(model) else _parts(model)
    for kind, parts in (("environment", envs), ("model", models)):
        if parts == []:
            raise ConfigurationError(f"no endpoint for the {kind}; name at least one")
    count = len(envs) if num_workers is None else num_workers
    if count < 1:
        raise ConfigurationError(f"num_workers={count} must be at least 1")
    shares = []
    num_before = 0
    for place in range(count):
        own = envs[place::count] or [envs[place % len(envs)]]
        if models is None:
            shares.append((own, model))
            continue
        # Each worker begins with another one, so that together they load all of them evenly.
        first = num_before % len(models)
        shares.append((own, models[first:] + models[:first]))
        num_before += len(own)
    return shares


def _parts(endpoints: Any) -> list[Any]:
    """Return one part for each endpoint; each can be sent to another process."""
    if isinstance(endpoints, (list, tuple)):
        return [part for one in endpoints for part in _parts(one)]
    if isinstance(endpoints, (str, Dial)):
        return [endpoints]
    if is_fleet(endpoints):
        fleet = directory_of(endpoints)
        places = range(len(fleet))
        return [Share(fleet, token_at(endpoints, place), place) for place in places]
    raise ConfigurationError(
        f"{type(endpoints).__name__} cannot be sent to other processes; give a fleet or addresses"
    )
