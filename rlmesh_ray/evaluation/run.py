"""evaluate: runs episodes of an environment with a policy."""

import contextlib
import logging
import queue
import secrets
import threading
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Unpack

from rlmesh_ray.client.channel import ConnectOptions
from rlmesh_ray.client.remote_model import RemoteModel
from rlmesh_ray.client.remote_vector_env import RemoteVectorEnv
from rlmesh_ray.errors import ConfigurationError
from rlmesh_ray.evaluation.coordinator import Attempt, Coordinator, News
from rlmesh_ray.evaluation.endpoints import EndpointFleet, Endpoints, RemoteEndpoint, as_endpoints
from rlmesh_ray.evaluation.options import (
    EvaluationOptions,
    RecordedEvaluationOptions,
    checked_seed,
)
from rlmesh_ray.evaluation.result import EndpointRole, EvaluationResult, Loss
from rlmesh_ray.evaluation.worker import ActionSource, EndpointWorker, RemoteActionSource
from rlmesh_ray.options import completed, takes_options
from rlmesh_ray.spaces.observation_map import as_observation_map

if TYPE_CHECKING:
    from rlmesh_ray.recording.recorder import WriterHandle

_LOG = logging.getLogger(__name__)

ActionFn = Callable[[Any], Any]
"""Maps a batch of observations to a batch of actions."""

Env = str | ConnectOptions | RemoteVectorEnv
"""One endpoint of an environment."""

Model = str | ConnectOptions | RemoteModel
"""One endpoint of a policy."""

_POLL_S = 0.5
_END_S = 1.0
_MOST_INTERRUPTIONS = 5
"""How often the same episode may be interrupted, in case it kills every endpoint that runs it."""
_LAST_WRITES_S = 60.0
_PATIENCE_S = 60.0
"""For the writer of a recording to make room: an evaluation loses no episode to a slow one."""
_HAND_OVER_S = 5.0
"""After Ctrl-C or a failure: for the writer to take what it has to write; it goes on alone."""


@takes_options(RecordedEvaluationOptions)
def evaluate(
    env: Env | Sequence[Env] | EndpointFleet,
    model: Model | Sequence[Model] | EndpointFleet | ActionFn,
    *,
    episodes: int,
    **options: Unpack[RecordedEvaluationOptions],
) -> EvaluationResult:
    """Run ``episodes`` episodes of ``env`` with the actions of ``model``.

    Episode i always starts with ``seed + i``, in any lane and at any endpoint: the result does not
    depend on the number of lanes or endpoints, nor on failures. Every started episode counts: many
    lanes do not favour short episodes.

    All endpoints work at once: each environment endpoint with a session of its own, on a route of
    its own at one of the model endpoints. When an endpoint dies, hangs or loses its worker, the
    interrupted episodes run again from their start, there or elsewhere; finished episodes are kept.
    The endpoint is dialed again as long as another one is in use.

    Args:
        env: An endpoint's address, a ``ConnectOptions`` (an address with TLS or another edition
            text), an open RemoteVectorEnv (left open), a list of those, or a fleet, whose addresses
            are looked up for each connection.
        model: The same, with open RemoteModels; or a function of a batch of observations, which
            is never called twice at a time; for several environments from several threads.
        episodes: Number of episodes, at least 1.
        **options: See ``RecordedEvaluationOptions``.

    Raises:
        ConfigurationError: An argument is wrong, or ``execution_horizon`` is more than the policy
            chooses at once.
        ContractMismatchError: The endpoints serve different environments, or the map does not fit.
        EvaluationInterruptedError: No endpoint is left for the remaining episodes, or the same
            episode was interrupted too often; holds the finished episodes.
        EndpointError: An endpoint was never reached, or requires another token.
        RemoteError: An environment or a policy failed by its own fault, or the policy does not fit
            the environment.
    """
    given = completed("evaluate", RecordedEvaluationOptions, options)
    given["seed"] = checked_seed(episodes, given["seed"])
    record = given["record"]
    if record is None:
        result = evaluate_indices(env, model, range(episodes), given)
        warn_of_missing_reports(result)
        return result
    from rlmesh_ray.recording.options import RecordOptions
    from rlmesh_ray.recording.recorder import WriterHandle

    writer = WriterHandle(RecordOptions.of(record), _PATIENCE_S)
    wait_s = _HAND_OVER_S
    try:
        result = evaluate_indices(env, model, range(episodes), given, writer)
        warn_of_missing_reports(result)
        wait_s = _LAST_WRITES_S
        return result
    finally:
        writer.close(wait_s)


def evaluate_indices(
    env: object,
    model: object,
    indices: Sequence[int],
    options: EvaluationOptions,
    writer: "WriterHandle | None" = None,
    *,
    are_known: bool = False,
) -> EvaluationResult:
    """Run the episodes with these indices, and record them; otherwise as ``evaluate``.

    Args:
        env: See ``evaluate``.
        model: See ``evaluate``.
        indices: Indices of the episodes.
        options: All options.
        writer: Records the episodes; None: they are not recorded.
        are_known: Whether the endpoints have worked before, so that a failure of the first try may
            pass.
    """
    return _Evaluation(env, model, indices, options, writer, are_known=are_known).run()


def warn_of_missing_reports(result: EvaluationResult) -> None:
    """Log how many episodes report neither success nor failure, if others report it."""
    count, reports = len(result.episodes), result.success_reports
    if 0 < reports < count:
        _LOG.warning(
            "%d of %d episodes report neither success nor failure; success_rate counts them as "
            "failures: have the environment give is_success with the last step of every episode",
            count - reports,
            count,
        )


class _Evaluation:
    """One worker for each environment endpoint, and the coordinator that they share."""

    def __init__(
        self,
        env: object,
        model: object,
        indices: Sequence[int],
        options: EvaluationOptions,
        writer: "WriterHandle | None",
        *,
        are_known: bool,
    ) -> None:
        self._options = options
        self._map = as_observation_map(options["observation_map"])
        self._name = secrets.token_hex(4)  # several evaluations may share an open RemoteModel
        has_chunks = options["execution_horizon"] > 1 or getattr(model, "horizon", 1) != 1
        if callable(model) and has_chunks:
            raise ConfigurationError(
                "chunks of actions (execution_horizon=…, an attribute horizon) are for served "
                "policies, and a function is called for each step: serve it (ModelServer), or "
                "leave them out"
            )
        token = options["token"]
        envs = as_endpoints(EndpointRole.ENV, env, token, self._connect_env)
        self._is_threaded = len(envs) > 1
        self._function = model if callable(model) else None
        self._function_lock = threading.Lock() if self._is_threaded else contextlib.nullcontext()
        models: list[RemoteEndpoint[RemoteModel]] = []
        if not callable(model):
            models = as_endpoints(EndpointRole.MODEL, model, token, self._connect_model)
        if are_known:
            everything: Endpoints = [*envs, *models]
            for endpoint in everything:
                endpoint.is_known = True
        self._news: queue.SimpleQueue[News | BaseException | None] = queue.SimpleQueue()
        self._coordinator = Coordinator(
            indices,
            envs,
            models,
            options["reconnect_timeout_s"],
            _MOST_INTERRUPTIONS,
            self._news.put if self._is_threaded else self._deliver,
        )
        self._workers = [
            EndpointWorker(
                endpoint, self._make_action_source, self._coordinator, options["seed"], writer
            )
            for endpoint in envs
        ]

    def run(self) -> EvaluationResult:
        """Block until all episodes are finished."""
        if self._is_threaded:
            self._run_threads()
        else:
            # In the caller's thread: a function may depend on it (torch's grad mode does).
            self._workers[0].run()
        return self._coordinator.result()

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
            self._coordinator.stop()
            self._join_threads(threads)

    def _work(self, worker: EndpointWorker) -> None:
        try:
            worker.run()
            self._news.put(None)
        except BaseException as error:  # noqa: BLE001  # raised again in the caller's thread
            self._news.put(error)

    def _deliver_all(self, num_workers: int) -> None:
        """Call the callbacks in this thread until all workers have ended."""
        while num_workers:
            try:
                news = self._news.get(timeout=_POLL_S)  # on Windows no signal ends a wait
            except queue.Empty:
                continue
            if news is None:
                num_workers -= 1
            elif isinstance(news, BaseException):
                raise news
            else:
                self._deliver(news)

    def _join_threads(self, threads: Sequence[threading.Thread]) -> None:
        """Wait for the workers; end the sessions of those that hang."""
        for is_last in (False, True):
            end_s = time.monotonic() + _END_S
            for thread in threads:
                thread.join(max(0.0, end_s - time.monotonic()))
            for worker, thread in zip(self._workers, threads, strict=True):
                if thread.is_alive() and not is_last:
                    # In threads of their own: each session that hangs takes seconds to end.
                    threading.Thread(target=worker.end_session, daemon=True).start()

    def _deliver(self, news: News) -> None:
        if isinstance(news, Loss):
            if self._options["on_loss"] is not None:
                self._options["on_loss"](news)
        elif self._options["on_episode"] is not None:
            self._options["on_episode"](news)

    def _make_action_source(self, attempt: Attempt, env: RemoteVectorEnv) -> ActionSource:
        mapping = self._map
        if attempt.model is not None:
            return RemoteActionSource(
                attempt.model,
                f"evaluation-{self._name}-{attempt.key}",
                env,
                mapping,
                self._options["execution_horizon"],
            )
        function = self._function
        assert function is not None, "without a function every attempt has a model"
        if mapping is None:
            return ActionSource(function, self._function_lock)
        mapping.space(env.contract.observation_space)  # raises where it does not fit
        return ActionSource(lambda each: function(mapping.apply(each)), self._function_lock)

    def _connect_env(self, connect_options: ConnectOptions) -> RemoteVectorEnv:
        return RemoteVectorEnv(
            connect_options,
            step_timeout_s=self._options["step_timeout_s"],
            reset_timeout_s=self._options["reset_timeout_s"],
            image_codec=self._options["image_codec"],
            resize=self._options["resize"],
        )

    def _connect_model(self, connect_options: ConnectOptions) -> RemoteModel:
        return RemoteModel(
            connect_options.address,
            token=connect_options.token,
            tls=connect_options.tls,
            connect_timeout_s=connect_options.timeout_s,
            predict_timeout_s=self._options["step_timeout_s"],
            edition_text=connect_options.edition_text,
        )
