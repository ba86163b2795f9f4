"""evaluate: runs episodes of an environment with a policy."""

import contextlib
import logging
import queue
import secrets
import threading
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Unpack

import numpy as np
from numpy.typing import NDArray

from rlmesh_ray.client.channel import ConnectOptions
from rlmesh_ray.client.env.remote_env import RemoteVectorEnv
from rlmesh_ray.client.model.remote_model import ActionPlayer, RemoteModel, Slots
from rlmesh_ray.errors import (
    AccessDeniedError,
    ConfigurationError,
    EndpointError,
    RemoteError,
    RlmeshError,
)
from rlmesh_ray.evaluation.coordinator import (
    Attempt,
    Coordinator,
    EndpointFleet,
    Endpoints,
    News,
    RemoteEndpoint,
    as_endpoints,
)
from rlmesh_ray.evaluation.options import (
    EvaluationOptions,
    RecordedEvaluationOptions,
    checked_seed,
)
from rlmesh_ray.evaluation.result import (
    EndpointRole,
    EpisodeResult,
    EvaluationResult,
    Loss,
    success_of,
)
from rlmesh_ray.options import completed, takes_options
from rlmesh_ray.spaces.batch import flatten
from rlmesh_ray.spaces.contract import AutoresetMode
from rlmesh_ray.spaces.observation_map import ObservationMap, as_observation_map
from rlmesh_ray.spaces.validation import coerce_batch

if TYPE_CHECKING:
    from rlmesh_ray.recording.recorder import Recorder, WriterHandle


# Error codes of an endpoint that has stopped working, unlike those of a failed request.
_BREAKDOWNS = frozenset({"TIMEOUT", "CRASHED", "CANCELLED", "CLOSED"})


class _FunctionPolicy:
    """A policy that is a function in this process; workers that share it call it under ``lock``."""

    address = ""
    failure: Exception | None = None
    """Error that the policy has raised, unlike those of the environment."""

    def __init__(
        self, function: Callable[[Any], Any], lock: contextlib.AbstractContextManager[Any]
    ) -> None:
        self._function = function
        self._lock = lock

    def version(self) -> int | None:
        """Return the version of the weights that chose last; None where it is not known."""
        return None

    def act(self, observation: Any, slots: Callable[[], Slots]) -> Any:
        try:
            return self.choose(observation, slots)
        except Exception as error:
            self.failure = error
            raise

    def choose(self, observation: Any, _: Callable[[], Slots]) -> Any:
        with self._lock:
            return self._function(observation)

    def close(self) -> None: ...


class _ServedPolicy(_FunctionPolicy):
    """A route at a model's endpoint.

    Args:
        endpoint: The endpoint.
        route_id: Unique id of the route.
        env: The environment that the route is for.
        observation_map: See ``evaluate``.
        execution_horizon: How many actions of each chunk are played; 1: the policy is asked for
            each action.
    """

    def __init__(
        self,
        endpoint: RemoteEndpoint[RemoteModel],
        route_id: str,
        env: RemoteVectorEnv,
        observation_map: ObservationMap | None,
        execution_horizon: int,
    ) -> None:
        self._endpoint = endpoint
        self._route_id = route_id
        self._model = endpoint.open()
        self.address = endpoint.address
        try:
            self._model.configure_route(
                env, route_id=route_id, observation_map=observation_map, horizon=execution_horizon
            )
            self._player = None
            if execution_horizon > 1:
                # No chunk is asked for before it is needed: the result does not depend on time.
                self._player = ActionPlayer(
                    self._model,
                    env,
                    route_id=route_id,
                    execution_horizon=execution_horizon,
                    prefetch=0,
                )
        except BaseException:
            endpoint.release(self._model)
            raise

    def version(self) -> int | None:
        telemetry = self._model.last_telemetry(self._route_id)
        version = -1 if telemetry is None else telemetry.policy_version
        return None if version < 0 else version

    def choose(self, observation: Any, slots: Callable[[], Slots]) -> Any:
        """Request a prediction, where a lane has no action of its chunk left."""
        rows = slots()
        if self._player is None:
            return self._model.predict(observation, route_id=self._route_id, slots=rows)
        for lane in [lane for lane, begins in enumerate(rows.resets) if begins]:
            self._player.begin_episode(lane, rows.episode_ids[lane])
        return self._player.act(observation)

    def close(self) -> None:
        """Close the route, unless the session has broken, and give the session back."""
        if self.failure is None or isinstance(self.failure, RemoteError):
            with contextlib.suppress(RlmeshError):
                self._model.close_route(self._route_id)
        self._endpoint.release(self._model)


class _EndpointWorker:
    """Drives one environment's endpoint until no episode is left."""

    def __init__(
        self, endpoint: RemoteEndpoint[RemoteVectorEnv], evaluation: "_Evaluation"
    ) -> None:
        self._endpoint = endpoint
        self._evaluation = evaluation
        self._coordinator = evaluation.coordinator
        # Kept while only the policy's endpoint breaks.
        self._env: RemoteVectorEnv | None = None
        self._lock = threading.Lock()

    def run(self) -> None:
        """Block until all episodes are finished, here or elsewhere.

        Raises:
            RlmeshError: An error that would repeat at every other endpoint.
            EvaluationInterruptedError: No endpoint is left.
        """
        try:
            while (attempt := self._coordinator.await_attempt(self._endpoint)) is not None:
                try:
                    self._run_attempt(attempt)
                finally:
                    self._coordinator.leave(attempt)
        finally:
            self.end_session()

    def end_session(self) -> None:
        """End the session with the environment, also one that another thread waits for."""
        with self._lock:
            env, self._env = self._env, None
        if env is not None:
            self._endpoint.release(env)

    def _run_attempt(self, attempt: Attempt) -> None:
        policy: _FunctionPolicy | None = None
        role = EndpointRole.ENV
        try:
            env = self._open()
            role = EndpointRole.MODEL
            policy = self._evaluation.policy(attempt, env)
            role = EndpointRole.ENV
            self._coordinator.note_open()
            recorder = self._recorder(env, policy)
            seed = self._evaluation.options["seed"]
            try:
                LaneLoop(env, policy, self._coordinator, attempt, seed, recorder).run()
            finally:
                if recorder is not None:
                    recorder.flush()
        except (EndpointError, RemoteError) as error:
            if policy is not None and policy.failure is error:
                role = EndpointRole.MODEL
            if not self._is_breakdown(attempt, role, error):
                raise
            self._coordinator.lose(attempt, role, error)
            if role is EndpointRole.ENV:
                self.end_session()
        finally:
            if policy is not None:
                policy.close()

    def _recorder(self, env: RemoteVectorEnv, policy: _FunctionPolicy) -> "Recorder | None":
        writer = self._evaluation.writer
        if writer is None:
            return None
        from rlmesh_ray.recording.recorder import Recorder

        # Each episode begins with its own reset.
        return Recorder(
            writer, env.contract, env.address, autoresets=False, policy_version=policy.version
        )

    def _open(self) -> RemoteVectorEnv:
        env = self._env
        if env is None:
            env = self._endpoint.open()
            with self._lock:
                self._env = env
            self._coordinator.agree(env)
        return env

    def _is_breakdown(
        self, attempt: Attempt, role: EndpointRole, error: EndpointError | RemoteError
    ) -> bool:
        """Return whether the endpoint has failed in a way that another one, or a retry, may not."""
        if self._coordinator.is_stopped or error is self._coordinator.refusal:
            return False
        if role not in attempt.endpoints:
            return False  # an error of the caller's function
        if isinstance(error, RemoteError):
            return error.code in _BREAKDOWNS
        if isinstance(error, AccessDeniedError):
            # Another endpoint may have taken over the port.
            return attempt.endpoints[role].is_known
        return True


class LaneLoop:
    """Runs episodes until there are none left.

    A lane without an episode is reset and stepped with the others, and does not count.

    Args:
        env: The session; episodes that its lanes run are dropped.
        policy: Chooses the actions, one row per lane.
        coordinator: Hands out the episodes.
        attempt: The session.
        seed: Seed of the episode with index 0; None lets the environment seed itself.
        recorder: Records the episodes; it was made with ``autoresets=False``.
    """

    def __init__(
        self,
        env: RemoteVectorEnv,
        policy: _FunctionPolicy,
        coordinator: Coordinator,
        attempt: Attempt,
        seed: int | None,
        recorder: "Recorder | None" = None,
    ) -> None:
        self._recorder = recorder
        self._env = env
        self._policy = policy
        self._coordinator = coordinator
        self._attempt = attempt
        self._seed = seed
        resets_itself = env.contract.autoreset_mode is not AutoresetMode.DISABLED
        # Where the endpoint resets all lanes or none, they start together only: those that have
        # ended are stepped along until the longest episode ends.
        self._in_rounds = resets_itself and not env.resets_single_lanes
        width = env.num_envs
        self._lanes = range(width)
        self._ids = [""] * width
        self._num_resets = 0
        self._returns = np.zeros(width)
        self._lengths = np.zeros(width, np.int64)

    def run(self) -> None:
        """Block until no episode is left, or the evaluation is stopped."""
        env, coordinator = self._env, self._coordinator
        returns, lengths = self._returns, self._lengths
        chosen = self._refill(np.ones(env.num_envs, np.bool_))
        if chosen is None:
            return
        observation = self._reset(chosen)
        coordinator.begin(self._attempt)
        while not coordinator.is_stopped:
            actions = self._policy.act(observation, self._slots)
            observation, rewards, terminated, truncated, infos = env.step(actions)
            if self._recorder is not None:
                self._record(actions, observation, (rewards, terminated, truncated), infos)
            returns += rewards
            lengths += 1
            ended = terminated | truncated
            if ended.any():
                self._collect(ended, terminated, truncated, infos)
            elif not coordinator.num_waiting or len(self._attempt.running) == env.num_envs:
                continue
            chosen = self._refill(ended)
            if chosen is None:
                return
            if chosen.any():
                observation = self._reset(chosen)

    def _collect(
        self,
        ended: NDArray[np.bool_],
        terminated: NDArray[np.bool_],
        truncated: NDArray[np.bool_],
        infos: dict[str, Any],
    ) -> None:
        running = self._attempt.running
        finished = {}
        for lane in np.flatnonzero(ended).tolist():
            if lane in running:
                finished[lane] = EpisodeResult(
                    index=running[lane],
                    seed=self._seed_of(running[lane]),
                    episode_return=float(self._returns[lane]),
                    length=int(self._lengths[lane]),
                    terminated=bool(terminated[lane]),
                    truncated=bool(truncated[lane]),
                    success=success_of(infos, lane),
                    endpoint=self._env.address,
                    model=self._policy.address,
                )
        self._coordinator.finish(self._attempt, finished)

    def _refill(self, ended: NDArray[np.bool_]) -> NDArray[np.bool_] | None:
        """Assign episodes to idle lanes; return a mask of lanes to reset, None at the end."""
        running = self._attempt.running
        if self._in_rounds:
            if running:
                return np.zeros_like(ended)
            ended = np.ones_like(ended)
        while True:
            idle = [lane for lane in self._lanes if lane not in running]
            self._coordinator.take(self._attempt, idle)
            if running:
                ended[[lane for lane in idle if lane in running]] = True
                return ended
            if not self._coordinator.await_work():
                return None
            # A lane that has ended must be reset before the next step, also without an episode.
            ended = np.ones_like(ended)

    def _reset(self, chosen: NDArray[np.bool_]) -> Any:
        running = self._attempt.running
        self._returns[chosen] = 0.0
        self._lengths[chosen] = 0
        for lane in np.flatnonzero(chosen).tolist():
            self._num_resets += 1
            index = running.get(lane)
            self._ids[lane] = f"idle-{self._num_resets}" if index is None else f"episode-{index}"
        options = None if chosen.all() else {"reset_mask": chosen}
        seeds = None
        if self._seed is not None:
            seeds = [self._seed_of(running.get(lane, 0)) for lane in self._lanes]
        observation, infos = self._env.reset(seed=seeds, options=options)
        if self._recorder is not None:
            lanes = [lane for lane in np.flatnonzero(chosen).tolist() if lane in running]
            own = [self._seed_of(running[lane]) for lane in lanes]
            columns = flatten(self._env.contract.observation_space, observation)
            self._recorder.reset(lanes, own, columns, infos, self._env.render)
        return observation

    def _record(
        self,
        actions: Any,
        observation: Any,
        results: Sequence[NDArray[Any]],
        infos: dict[str, Any],
    ) -> None:
        assert self._recorder is not None, "called where there is one"
        contract = self._env.contract
        columns = flatten(contract.observation_space, observation)
        columns += coerce_batch(contract.action_space, actions, contract.num_envs)
        self._recorder.step([*columns, *results], infos, self._env.render)

    def _seed_of(self, index: int) -> int | None:
        return None if self._seed is None else self._seed + index

    def _slots(self) -> Slots:
        return Slots(
            env_indices=self._lanes,
            episode_ids=self._ids.copy(),
            steps=self._lengths.tolist(),
            resets=(self._lengths == 0).tolist(),
        )


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
"""After Ctrl-C or a failure: for the writer to take what it has to write, alone from then on."""


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

    All endpoints work at the same time: each environment endpoint has its own session, and its own
    route at one of the model endpoints. When an endpoint dies, hangs or loses its worker, the
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
    writer = None
    wait_s = _HAND_OVER_S
    if given["record"] is not None:
        from rlmesh_ray.recording.options import RecordOptions
        from rlmesh_ray.recording.recorder import WriterHandle

        writer = WriterHandle(RecordOptions.of(given["record"]), _PATIENCE_S)
    try:
        result = evaluate_indices(env, model, range(episodes), given, writer)
        warn_of_missing_reports(result)
        wait_s = _LAST_WRITES_S
        return result
    finally:
        if writer is not None:
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

    ``are_known``: the endpoints have worked before, so a failure of the first try may be temporary.
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
        self.options = options
        self.writer = writer
        self._map = as_observation_map(options["observation_map"])
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
        everything: Endpoints = [*envs, *models]
        for endpoint in everything:
            endpoint.is_known = endpoint.is_known or are_known
        self._news: queue.SimpleQueue[News | BaseException | None] = queue.SimpleQueue()
        self.coordinator = Coordinator(
            indices,
            envs,
            models,
            options["reconnect_timeout_s"],
            _MOST_INTERRUPTIONS,
            self._news.put if self._is_threaded else self._deliver,
        )
        self._workers = [_EndpointWorker(endpoint, self) for endpoint in envs]

    def run(self) -> EvaluationResult:
        if self._is_threaded:
            self._run_threads()
        else:
            # In the caller's thread: a function may depend on it (torch's grad mode does).
            self._workers[0].run()
        return self.coordinator.result()

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
            self.coordinator.stop()
            self._join_threads(threads)

    def _work(self, worker: _EndpointWorker) -> None:
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
                    # In separate threads: each session that hangs takes seconds to end.
                    threading.Thread(target=worker.end_session, daemon=True).start()

    def _deliver(self, news: News) -> None:
        told: Any = self.options["on_episode"]
        if isinstance(news, Loss):
            told = self.options["on_loss"]
        if told is not None:
            told(news)

    def policy(self, attempt: Attempt, env: RemoteVectorEnv) -> _FunctionPolicy:
        mapping = self._map
        if EndpointRole.MODEL in attempt.endpoints:
            return _ServedPolicy(
                attempt.endpoints[EndpointRole.MODEL],
                # Several evaluations may share an open RemoteModel.
                f"evaluation-{secrets.token_hex(8)}",
                env,
                mapping,
                self.options["execution_horizon"],
            )
        function = self._function
        assert function is not None, "without a function every attempt has a model"
        if mapping is None:
            return _FunctionPolicy(function, self._function_lock)
        mapping.space(env.contract.observation_space)  # raises where it does not fit
        return _FunctionPolicy(lambda each: function(mapping.apply(each)), self._function_lock)

    def _connect_env(self, connect_options: ConnectOptions) -> RemoteVectorEnv:
        return RemoteVectorEnv(
            connect_options,
            step_timeout_s=self.options["step_timeout_s"],
            reset_timeout_s=self.options["reset_timeout_s"],
            image_codec=self.options["image_codec"],
            resize=self.options["resize"],
        )

    def _connect_model(self, connect_options: ConnectOptions) -> RemoteModel:
        return RemoteModel(connect_options, predict_timeout_s=self.options["step_timeout_s"])
