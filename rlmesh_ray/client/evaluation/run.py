"""evaluate: drive environments with a policy and count what it earns."""

import queue
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from rlmesh_ray.client.channel import Dial
from rlmesh_ray.client.evaluation.board import Board, Crew, News, Turn
from rlmesh_ray.client.evaluation.result import Episode, EvaluationResult, Loss, Role
from rlmesh_ray.client.evaluation.seeds import check_seeds
from rlmesh_ray.client.evaluation.sites import Fleet, Place, Site, sites_of
from rlmesh_ray.client.evaluation.worker import Actor, FunctionActor, RemoteActor, Worker
from rlmesh_ray.client.remote_model import RemoteModel
from rlmesh_ray.client.remote_vector_env import RemoteVectorEnv
from rlmesh_ray.credentials.token_file import TokenSource
from rlmesh_ray.errors import ConfigurationError
from rlmesh_ray.options import require_seconds, whole

ActionFn = Callable[[Any], Any]
"""A batch of observations in, a batch of actions out."""

Env = str | Dial | RemoteVectorEnv
"""One endpoint of an environment."""

Model = str | Dial | RemoteModel
"""One endpoint of a policy."""

_POLL_S = 0.5
_END_S = 1.0


@dataclass(frozen=True, slots=True)
class Options:
    """How to evaluate; see ``evaluate``."""

    seed: int | None = None
    token: TokenSource | None = None
    model_token: TokenSource | None = None
    on_episode: Callable[[Episode], None] | None = None
    on_loss: Callable[[Loss], None] | None = None
    env_timeout_s: float = 60.0
    model_timeout_s: float = 60.0
    reconnect_timeout_s: float = 30.0
    max_interruptions: int = 5
    is_known: bool = False
    """Whether the endpoints have worked before: then the first try may fail, too."""

    def __post_init__(self) -> None:
        require_seconds("env_timeout_s", self.env_timeout_s)
        require_seconds("model_timeout_s", self.model_timeout_s)
        require_seconds("reconnect_timeout_s", self.reconnect_timeout_s, may_be_zero=True)
        for name in ("on_episode", "on_loss"):
            if not (getattr(self, name) is None or callable(getattr(self, name))):
                raise ConfigurationError(f"{name}={getattr(self, name)!r:.40} cannot be called")
        if whole("max_interruptions", self.max_interruptions) < 0:
            raise ConfigurationError(
                f"max_interruptions={self.max_interruptions} must be 0 or more"
            )
        if self.seed is not None:
            # Plain from here on: numpy's integers overflow, and no episode could be written down.
            object.__setattr__(self, "seed", whole("seed", self.seed))


def evaluate(  # noqa: PLR0913  # the public surface; every option stands alone
    env: Env | Sequence[Env] | Fleet,
    model: Model | Sequence[Model] | Fleet | ActionFn,
    *,
    episodes: int,
    seed: int | None = None,
    token: TokenSource | None = None,
    model_token: TokenSource | None = None,
    on_episode: Callable[[Episode], None] | None = None,
    on_loss: Callable[[Loss], None] | None = None,
    env_timeout_s: float = 60.0,
    model_timeout_s: float = 60.0,
    reconnect_timeout_s: float = 30.0,
    max_interruptions: int = 5,
) -> EvaluationResult:
    """Run ``episodes`` episodes of ``env`` with the actions of ``model``.

    Episode i always starts with ``seed + i``, in whatever lane and at whatever endpoint it runs,
    so that the result does not depend on widths, on the number of endpoints or on who died.
    Every started episode counts: many lanes do not favour short episodes.

    All endpoints work at once: each environment's endpoint with a session of its own, on a route
    of its own at one of the models' endpoints. When an endpoint dies, hangs or loses its worker,
    the episodes that it interrupts run again from their start, there or elsewhere; no
    finished one is lost. It is dialed again for as long as any other endpoint is at work.

    Args:
        env: An endpoint's address, a ``Dial`` (an address with TLS or another edition text), an
            open RemoteVectorEnv (left open), a list of those, or a fleet, which is asked for its
            addresses each time one is dialed.
        model: The same, with open RemoteModels; or a function of a batch of observations, which
            is called once at a time, for several environments from several threads.
        episodes: How many; at least 1.
        seed: Of the first episode, 0 or more; None lets the environment seed itself.
        token: For the addresses that are given; a fleet brings its own.
        model_token: For those of models; default: ``token``.
        on_episode: Called with each episode as it ends, in the caller's thread.
        on_loss: Called when an endpoint fails, in the caller's thread.
        env_timeout_s: How long to wait for any answer of a dialed environment.
        model_timeout_s: How long to wait for any answer of a dialed model.
        reconnect_timeout_s: How long to wait for endpoints to come back when none is left.
        max_interruptions: How often the same episode may be interrupted: one that kills every
            endpoint that tries it must end somewhere.

    Raises:
        ConfigurationError: An argument is wrong.
        ContractMismatchError: The endpoints serve different environments.
        EvaluationInterruptedError: No endpoint is left to run the rest, or the same episode was
            interrupted too often; holds the finished episodes.
        EndpointError: An endpoint could not be reached in the first place, or wants another
            token.
        RemoteError: An environment or a policy failed by its own fault, or cannot act there.
    """
    check_seeds(episodes, seed)
    options = Options(
        seed=seed,
        token=token,
        model_token=token if model_token is None else model_token,
        on_episode=on_episode,
        on_loss=on_loss,
        env_timeout_s=env_timeout_s,
        model_timeout_s=model_timeout_s,
        reconnect_timeout_s=reconnect_timeout_s,
        max_interruptions=max_interruptions,
    )
    return evaluate_indices(env, model, range(episodes), options)


def evaluate_indices(
    env: object, model: object, indices: Sequence[int], options: Options
) -> EvaluationResult:
    """Run the episodes with these indices; as ``evaluate`` otherwise."""
    return _Evaluation(env, model, indices, options).run()


class _Evaluation:
    """A worker for each environment's endpoint, and the board between them."""

    def __init__(
        self, env: object, model: object, indices: Sequence[int], options: Options
    ) -> None:
        self._options = options
        envs = sites_of(env, options.token, RemoteVectorEnv, self._connect_env)
        self._is_threaded = len(envs) > 1
        self._function = model if callable(model) else None
        self._function_lock = threading.Lock() if self._is_threaded else None
        models = None
        self._models: list[Site[RemoteModel]] = []
        if not callable(model):
            self._models = sites_of(model, options.model_token, RemoteModel, self._connect_model)
            models = self._crew(Role.MODEL, self._models)
        self._news: queue.SimpleQueue[News | _End] = queue.SimpleQueue()
        self._board = Board(
            indices,
            self._crew(Role.ENV, envs),
            models,
            options.max_interruptions,
            self._news.put if self._is_threaded else self._deliver,
        )
        self._workers = [
            Worker(place, site, self._hire, self._board, options.seed)
            for place, site in enumerate(envs)
        ]

    def _crew(self, role: Role, sites: Sequence[Place]) -> Crew:
        is_known = self._options.is_known or all(site.is_known for site in sites)
        return Crew(role, sites, self._options.reconnect_timeout_s, is_known=is_known)

    def run(self) -> EvaluationResult:
        """Block until all episodes are finished."""
        if self._is_threaded:
            self._run_threads()
        else:
            # In the caller's thread: a function may depend on it (torch's grad mode does).
            self._workers[0].run()
        return self._board.result()

    def _run_threads(self) -> None:
        threads = [
            threading.Thread(
                target=self._work, args=(worker,), name="rlmesh-ray-evaluate", daemon=True
            )
            for worker in self._workers
        ]
        for thread in threads:
            thread.start()
        try:
            self._deliver_all(len(threads))
        finally:
            self._board.stop()
            self._dismiss(threads)

    def _work(self, worker: Worker) -> None:
        error: BaseException | None = None
        try:
            worker.run()
        except BaseException as caught:  # noqa: BLE001  # raised again in the caller's thread
            error = caught
        self._news.put(_End(error))

    def _deliver_all(self, num_workers: int) -> None:
        """Hand on what happens until all workers have ended."""
        while num_workers:
            try:
                news = self._news.get(timeout=_POLL_S)  # on Windows no signal ends a wait
            except queue.Empty:
                continue
            if not isinstance(news, _End):
                self._deliver(news)
            elif news.error is not None:
                raise news.error
            else:
                num_workers -= 1

    def _dismiss(self, threads: Sequence[threading.Thread]) -> None:
        """Wait for the workers; cut short what they wait for, if need be."""
        for is_last in (False, True):
            end_s = time.monotonic() + _END_S
            for thread in threads:
                thread.join(max(0.0, end_s - time.monotonic()))
            for worker, thread in zip(self._workers, threads, strict=True):
                if thread.is_alive() and not is_last:
                    # In threads of their own: each of those that hang takes seconds.
                    threading.Thread(target=worker.let_go, daemon=True).start()

    def _deliver(self, news: News) -> None:
        if isinstance(news, Loss):
            if self._options.on_loss is not None:
                self._options.on_loss(news)
        elif self._options.on_episode is not None:
            self._options.on_episode(news)

    def _hire(self, turn: Turn, env: RemoteVectorEnv) -> Actor:
        if turn.model is not None:
            return RemoteActor(self._models[turn.model], f"evaluation-{turn.key}", env)
        assert self._function is not None, "without a function every turn has a model"
        return FunctionActor(self._function, self._function_lock)

    def _connect_env(self, dial: Dial) -> RemoteVectorEnv:
        return RemoteVectorEnv(
            dial.address,
            token=dial.token,
            tls=dial.tls,
            connect_timeout_s=dial.timeout_s,
            step_timeout_s=self._options.env_timeout_s,
            edition_text=dial.edition_text,
            dm_env_rpc=dial.dm_env_rpc,
        )

    def _connect_model(self, dial: Dial) -> RemoteModel:
        return RemoteModel(
            dial.address,
            token=dial.token,
            tls=dial.tls,
            connect_timeout_s=dial.timeout_s,
            predict_timeout_s=self._options.model_timeout_s,
            edition_text=dial.edition_text,
        )


@dataclass(frozen=True, slots=True)
class _End:
    """A worker has ended."""

    error: BaseException | None
