"""One worker: keeps an environment's endpoint busy, and opens sessions anew when they break."""

import contextlib
import threading
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from rlmesh_ray.client.evaluation.board import Board, Turn
from rlmesh_ray.client.evaluation.lanes import LaneLoop
from rlmesh_ray.client.evaluation.result import Episode, Role
from rlmesh_ray.client.evaluation.sites import Site
from rlmesh_ray.client.remote_model import RemoteModel, Slots
from rlmesh_ray.client.remote_vector_env import RemoteVectorEnv
from rlmesh_ray.errors import AccessDeniedError, EndpointError, RemoteError, RlmeshError
from rlmesh_ray.spaces.contract import AutoresetMode

# What an endpoint answers when it has stopped working, as opposed to having worked and failed.
_BREAKDOWNS = frozenset({"TIMEOUT", "CRASHED", "CANCELLED", "CLOSED"})


class Actor(Protocol):
    """A policy for one worker's turn."""

    address: str
    """Of its endpoint; empty where it has none."""
    failure: Exception | None
    """What it has raised; the environment is innocent of that."""

    def act(self, observation: Any, slots: Callable[[], Slots]) -> Any:
        """Return a batch of actions."""

    def close(self) -> None:
        """Give everything back. Never raises."""


Hire = Callable[[Turn, RemoteVectorEnv], Actor]
"""Get the policy for a turn; raises EndpointError where its endpoint fails."""


class FunctionActor:
    """A function in this process.

    Args:
        function: Observations in, actions out.
        lock: Held while it runs, where several workers share it.
    """

    def __init__(
        self, function: Callable[[Any], Any], lock: contextlib.AbstractContextManager[Any] | None
    ) -> None:
        self.address = ""
        self.failure: Exception | None = None
        self._function = function
        self._lock = lock

    def act(self, observation: Any, slots: Callable[[], Slots]) -> Any:
        """Call it."""
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


class RemoteActor:
    """A route at a model's endpoint.

    Args:
        site: The endpoint.
        route_id: Never used twice.
        env: Whose route it is.

    Raises:
        EndpointError: It cannot be reached, or broke.
        RemoteModelError: The policy cannot act there.
    """

    def __init__(self, site: Site[RemoteModel], route_id: str, env: RemoteVectorEnv) -> None:
        self.failure: Exception | None = None
        self._site = site
        self._route_id = route_id
        self._model = site.open()
        self.address = site.address
        try:
            self._model.configure_route(env, route_id=route_id)
        except BaseException:
            site.release(self._model)
            raise

    def act(self, observation: Any, slots: Callable[[], Slots]) -> Any:
        """Ask for a prediction."""
        try:
            return self._model.predict(observation, route_id=self._route_id, slots=slots())
        except Exception as error:
            self.failure = error
            raise

    def close(self) -> None:
        """Close the route, where it still answers, and give the session back."""
        if self.failure is None:
            with contextlib.suppress(RlmeshError):
                self._model.close_route(self._route_id)
        self._site.release(self._model)


class TurnDesk:
    """The board, as the lanes of one turn see it."""

    def __init__(self, board: Board, turn: Turn) -> None:
        self._board = board
        self._turn = turn
        self.await_work = board.await_work

    @property
    def is_stopped(self) -> bool:
        """Whether to drop everything."""
        return self._board.is_stopped

    @property
    def num_waiting(self) -> int:
        """About how many episodes could be taken."""
        return self._board.num_waiting

    def begin(self) -> None:
        """Note that the first reset was answered."""
        self._board.begin(self._turn)

    def take(self, lanes: Sequence[int]) -> list[int | None]:
        """Give each of ``lanes`` an episode, as far as there are any."""
        return self._board.take(self._turn, lanes)

    def finish(self, ended: Sequence[tuple[int, Episode]]) -> None:
        """Note the episodes that have ended, with their lanes."""
        self._board.finish(self._turn, ended)


class Worker:
    """Drives one environment's endpoint until no episode is left.

    Args:
        place: Of the endpoint.
        site: The endpoint.
        hire: Gets the policy.
        board: Shared with the other workers.
        seed: Of the episode with index 0.
    """

    def __init__(
        self, place: int, site: Site[RemoteVectorEnv], hire: Hire, board: Board, seed: int | None
    ) -> None:
        self._place = place
        self._site = site
        self._hire = hire
        self._board = board
        self._seed = seed
        # Kept while only the policy's endpoint breaks.
        self._env: RemoteVectorEnv | None = None
        self._lock = threading.Lock()

    def run(self) -> None:
        """Block until all episodes are finished, here or elsewhere.

        Raises:
            RlmeshError: What no other endpoint could do better.
            EvaluationInterruptedError: No endpoint is left.
        """
        try:
            while (turn := self._board.await_turn(self._place)) is not None:
                try:
                    self._take_turn(turn)
                finally:
                    self._board.leave(turn)
        finally:
            self.let_go()

    def let_go(self) -> None:
        """End the session with the environment, also one that another thread waits for."""
        with self._lock:
            env, self._env = self._env, None
        if env is not None:
            self._site.release(env)

    def _take_turn(self, turn: Turn) -> None:
        actor: Actor | None = None
        role = Role.ENV
        try:
            env = self._open()
            role = Role.MODEL
            actor = self._hire(turn, env)
            role = Role.ENV
            self._board.note_open()
            desk = TurnDesk(self._board, turn)
            LaneLoop(
                env, actor.act, desk, self._seed, actor.address, in_rounds=_needs_rounds(env)
            ).run()
        except (EndpointError, RemoteError) as error:
            if actor is not None and actor.failure is error:
                role = Role.MODEL
            if not self._is_breakdown(turn, role, error):
                raise
            self._board.lose(turn, role, error)
            if role is Role.ENV:
                self.let_go()
        finally:
            if actor is not None:
                actor.close()

    def _open(self) -> RemoteVectorEnv:
        env = self._env
        if env is None:
            env = self._site.open()
            with self._lock:
                self._env = env
            self._board.agree(env)
        return env

    def _is_breakdown(self, turn: Turn, role: Role, error: EndpointError | RemoteError) -> bool:
        """Tell whether the endpoint has failed, and the same may go well elsewhere or later."""
        if self._board.is_stopped or error is self._board.refusal:
            return False
        if role is Role.MODEL and turn.model is None:
            return False  # the function's own affair
        if isinstance(error, RemoteError):
            return error.code in _BREAKDOWNS
        if isinstance(error, AccessDeniedError):
            # Later on another endpoint may have taken over the port.
            return self._board.was_reached(turn, role)
        return True


def _needs_rounds(env: RemoteVectorEnv) -> bool:
    """Tell whether lanes can only begin together; ended ones may be stepped along meanwhile."""
    resets_itself = env.contract.autoreset_mode is not AutoresetMode.DISABLED
    return resets_itself and not env.resets_single_lanes
