"""Worker of one environment endpoint: runs its sessions, and opens new ones when they break."""

import contextlib
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, Protocol

from rlmesh_ray.client.action_player import ActionPlayer
from rlmesh_ray.client.remote_model import RemoteModel, Slots
from rlmesh_ray.client.remote_vector_env import RemoteVectorEnv
from rlmesh_ray.errors import AccessDeniedError, EndpointError, RemoteError, RlmeshError
from rlmesh_ray.evaluation.coordinator import Attempt, Coordinator
from rlmesh_ray.evaluation.lane_loop import LaneLoop
from rlmesh_ray.evaluation.result import EndpointRole, EpisodeResult
from rlmesh_ray.evaluation.session_sources import SessionSource
from rlmesh_ray.spaces.contract import AutoresetMode
from rlmesh_ray.spaces.observation_map import ObservationMap

if TYPE_CHECKING:
    from rlmesh_ray.recording.recorder import Recorder, WriterHandle

# Error codes of an endpoint that has stopped working, unlike those of a failed request.
_BREAKDOWNS = frozenset({"TIMEOUT", "CRASHED", "CANCELLED", "CLOSED"})


class ActionSource(Protocol):
    """The policy of one attempt."""

    address: str
    """Address of its endpoint; empty where it has none."""
    failure: Exception | None
    """Error that the policy has raised, unlike those of the environment."""

    @property
    def policy_version(self) -> int | None:
        """Version of the weights that chose last; None where it is not known."""

    def act(self, observation: Any, slots: Callable[[], Slots]) -> Any:
        """Return a batch of actions."""

    def close(self) -> None:
        """Release all resources. Never raises."""


MakeActionSource = Callable[[Attempt, RemoteVectorEnv], ActionSource]
"""Returns the policy of an attempt; raises EndpointError where its endpoint fails."""


class FunctionActionSource:
    """A function in this process.

    Args:
        function: Maps observations to actions.
        lock: Held during each call, where several workers share the function.
    """

    def __init__(
        self, function: Callable[[Any], Any], lock: contextlib.AbstractContextManager[Any] | None
    ) -> None:
        self.address = ""
        self.policy_version = None
        self.failure: Exception | None = None
        self._function = function
        self._lock = lock

    def act(self, observation: Any, slots: Callable[[], Slots]) -> Any:
        """Call the function."""
        try:
            if self._lock is None:
                return self._function(observation)
            with self._lock:
                return self._function(observation)
        except Exception as error:
            self.failure = error
            raise

    def close(self) -> None:
        """Do nothing."""


class RemoteActionSource:
    """A route at a model's endpoint.

    Args:
        source: The endpoint.
        route_id: Unique id of the route.
        env: The environment that the route is for.
        observation_map: See ``evaluate``.
        execution_horizon: How many actions of each chunk are played; 1: the policy is asked for
            each action.

    Raises:
        EndpointError: The endpoint cannot be reached, or broke.
        RemoteModelError: The policy does not fit the environment.
    """

    def __init__(
        self,
        source: SessionSource[RemoteModel],
        route_id: str,
        env: RemoteVectorEnv,
        observation_map: ObservationMap | None,
        execution_horizon: int,
    ) -> None:
        self.failure: Exception | None = None
        self._source = source
        self._route_id = route_id
        self._model = source.open()
        self.address = source.address
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
            source.release(self._model)
            raise

    @property
    def policy_version(self) -> int | None:
        """Version of the weights that chose last."""
        telemetry = self._model.last_telemetry(self._route_id)
        return (
            None if telemetry is None or telemetry.policy_version < 0 else telemetry.policy_version
        )

    def act(self, observation: Any, slots: Callable[[], Slots]) -> Any:
        """Request a prediction, where a lane has no action of its chunk left."""
        try:
            rows = slots()
            if self._player is None:
                return self._model.predict(observation, route_id=self._route_id, slots=rows)
            for lane in [lane for lane, begins in enumerate(rows.resets) if begins]:
                self._player.begin_episode(lane, rows.episode_ids[lane])
            return self._player.act(observation)
        except Exception as error:
            self.failure = error
            raise

    def close(self) -> None:
        """Close the route, unless the session has broken, and give the session back."""
        if self.failure is None or isinstance(self.failure, RemoteError):
            with contextlib.suppress(RlmeshError):
                self._model.close_route(self._route_id)
        self._source.release(self._model)


class AttemptEpisodes:
    """The coordinator's episodes, for the lanes of one attempt."""

    def __init__(self, coordinator: Coordinator, attempt: Attempt) -> None:
        self._coordinator = coordinator
        self._attempt = attempt
        self.await_work = coordinator.await_work

    @property
    def is_stopped(self) -> bool:
        """Whether the loop has to stop."""
        return self._coordinator.is_stopped

    @property
    def num_waiting(self) -> int:
        """About how many episodes could be taken."""
        return self._coordinator.num_waiting

    def begin(self) -> None:
        """Record that the first reset was answered."""
        self._coordinator.begin(self._attempt)

    def take(self, lanes: Sequence[int]) -> list[int | None]:
        """Assign an episode to each of ``lanes``, as far as there are any."""
        return self._coordinator.take(self._attempt, lanes)

    def finish(self, ended: Sequence[tuple[int, EpisodeResult]]) -> None:
        """Record the episodes that have ended, given with their lanes."""
        self._coordinator.finish(self._attempt, ended)


class EndpointWorker:
    """Drives one environment's endpoint until no episode is left.

    Args:
        index: Index of the endpoint.
        source: The endpoint.
        make_action_source: Returns the policy of an attempt.
        coordinator: Shared with the other workers.
        seed: Seed of the episode with index 0.
        writer: Records the episodes; None: they are not recorded.
    """

    def __init__(
        self,
        index: int,
        source: SessionSource[RemoteVectorEnv],
        make_action_source: MakeActionSource,
        coordinator: Coordinator,
        seed: int | None,
        writer: "WriterHandle | None" = None,
    ) -> None:
        self._writer = writer
        self._index = index
        self._source = source
        self._make_action_source = make_action_source
        self._coordinator = coordinator
        self._seed = seed
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
            while (attempt := self._coordinator.await_attempt(self._index)) is not None:
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
            self._source.release(env)

    def _run_attempt(self, attempt: Attempt) -> None:
        actor: ActionSource | None = None
        role = EndpointRole.ENV
        try:
            env = self._open()
            role = EndpointRole.MODEL
            actor = self._make_action_source(attempt, env)
            role = EndpointRole.ENV
            self._coordinator.note_open()
            episodes = AttemptEpisodes(self._coordinator, attempt)
            with self._recording(env, actor) as recorder:
                LaneLoop(
                    env,
                    actor.act,
                    episodes,
                    self._seed,
                    actor.address,
                    in_rounds=_needs_rounds(env),
                    recorder=recorder,
                ).run()
        except (EndpointError, RemoteError) as error:
            if actor is not None and actor.failure is error:
                role = EndpointRole.MODEL
            if not self._is_breakdown(attempt, role, error):
                raise
            self._coordinator.lose(attempt, role, error)
            if role is EndpointRole.ENV:
                self.end_session()
        finally:
            if actor is not None:
                actor.close()

    @contextlib.contextmanager
    def _recording(self, env: RemoteVectorEnv, actor: ActionSource) -> "Iterator[Recorder | None]":
        """Yield a recorder of the session; None: nothing is recorded."""
        if self._writer is None:
            yield None
            return
        from rlmesh_ray.recording.recorder import Recorder

        # Each episode begins with a reset of its own.
        recorder = Recorder(
            self._writer,
            env.contract,
            env.address,
            autoresets=False,
            policy_version=lambda: actor.policy_version,
        )
        try:
            yield recorder
        finally:
            recorder.flush()

    def _open(self) -> RemoteVectorEnv:
        env = self._env
        if env is None:
            env = self._source.open()
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
        if role is EndpointRole.MODEL and attempt.model is None:
            return False  # an error of the caller's function
        if isinstance(error, RemoteError):
            return error.code in _BREAKDOWNS
        if isinstance(error, AccessDeniedError):
            # Another endpoint may have taken over the port.
            return self._coordinator.was_reached(attempt, role)
        return True


def _needs_rounds(env: RemoteVectorEnv) -> bool:
    """Return whether lanes can only start together, and ended ones are stepped along."""
    resets_itself = env.contract.autoreset_mode is not AutoresetMode.DISABLED
    return resets_itself and not env.resets_single_lanes
