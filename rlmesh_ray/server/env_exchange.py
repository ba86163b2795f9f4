"""One session with an environment: a frame in, a frame out."""

import socket
import time
import uuid
from collections.abc import AsyncIterator, Callable

from rlmesh_ray.protocol.env_rules import State
from rlmesh_ray.protocol.env_session import EnvSession
from rlmesh_ray.protocol.episodes import Episode
from rlmesh_ray.protocol.messages import EnvFailed, EnvTimings, Request, ResetDone
from rlmesh_ray.server.env_dialects import EnvDialect, EnvFrames
from rlmesh_ray.server.env_host import EnvHost
from rlmesh_ray.server.session_worker import SessionWorker
from rlmesh_ray.server.stopwatch import Stopwatch, TimedWorker, WatchedFrames
from rlmesh_ray.server.worker_pool import WorkerPool
from rlmesh_ray.spaces.contract import AutoresetMode, EnvContract
from rlmesh_ray.transport.lent_road import LentRoad


class EnvExchange:
    """Answers the requests of one session, one at a time, in arrival order.

    Args:
        session: Its ordering and accounts.
        host: Of its environment.
        dialect: What the client speaks.
        tag_arrays: Whether the client knows arrays in infos.
    """

    def __init__(
        self, session: EnvSession, host: EnvHost, dialect: EnvDialect, *, tag_arrays: bool
    ) -> None:
        self.host = host
        self.is_over = False
        """Whether the stream ends after the answer that was given last."""
        self._session = session
        self._frames: EnvFrames = dialect.frames
        ends_early = dialect.rules.ends_when_abandoned
        self._last_states = (State.CLOSED, State.ABANDONED) if ends_early else (State.CLOSED,)
        self._tag_arrays = tag_arrays

    @property
    def episodes(self) -> tuple[Episode | None, ...]:
        """The latest of each lane; None: its record has been given out."""
        return self._session.episodes

    def requests(self, frames: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
        """Return the messages of the stream ``frames``, as they are to be taken off it."""
        return frames

    def timeout_s(self, data: bytes) -> float:
        """Return what the request in ``data`` may take; 0: as long as it likes."""
        return getattr(self._frames.parse_request(data), "timeout_ms", 0) / 1000

    async def answer(self, data: bytes, waited_s: float = 0.0) -> bytes:
        """Return the answer to the request in ``data``, which has waited so long for its turn."""
        session = self._session
        request = self._frames.parse_request(data)
        response = session.receive(request, time.time_ns())
        if response is None:
            pending = session.pending
            assert pending is not None, "the session wants it done"
            outcome = await self.host.run(pending, session.begins, waited_s)
            response = session.complete(outcome, time.time_ns())
            if session.state is not State.READY:
                self.host.stop_tracking()
            elif isinstance(response, ResetDone):
                await self.host.track(session.episodes)
        elif isinstance(response, EnvFailed) and isinstance(request, Request):
            self.host.pass_over(request)
        if isinstance(response, EnvFailed):
            self.host.note_error(response.code.name)
        self.is_over = session.state in self._last_states
        return self._frames.pack_response(response, tag_arrays=self._tag_arrays)

    async def lend_road(self, timeout_ms: int, connection: socket.socket | None) -> LentRoad | None:
        """Lend the client a road, between two requests; see ``DirectRoad.lend``."""
        if self._session.state is not State.READY:
            return None
        road = await self.host.lend_road(timeout_ms, connection, tag_arrays=self._tag_arrays)
        if road is not None:
            await self.host.track(self._session.episodes)
        return None if road is None or road.is_cut else road

    def interrupt(self) -> None:
        """Take notice that the stream has ended, in whatever way."""
        self._session.interrupt(time.time_ns())


class TimedExchange(EnvExchange):
    """Tells the client what each of its requests has taken, too.

    Args:
        session: See ``EnvExchange``.
        host: See ``EnvExchange``.
        dialect: See ``EnvExchange``.
        tag_arrays: See ``EnvExchange``.
        watch: What the host's worker tells when it is asked.
    """

    def __init__(
        self,
        session: EnvSession,
        host: EnvHost,
        dialect: EnvDialect,
        *,
        tag_arrays: bool,
        watch: Stopwatch,
    ) -> None:
        super().__init__(session, host, dialect, tag_arrays=tag_arrays)
        assert dialect.timed is not None, "the dialect has a place for times"
        self._timed: Callable[[bytes, EnvTimings], bytes] = dialect.timed
        self._watch = watch

    def requests(self, frames: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
        """Return the messages of the stream ``frames``, as they are to be taken off it."""
        return WatchedFrames(frames, self._watch)

    async def answer(self, data: bytes, waited_s: float = 0.0) -> bytes:
        """Return the answer to the request in ``data``, with what it has taken."""
        self._watch.begin()
        return self._timed(await super().answer(data, waited_s), self._watch.timings())


class Exchanges:
    """Opens the sessions of one endpoint.

    Args:
        pool: Started; where sessions get their workers.
        contract: What the endpoint promises.
        step_grace_s: See ``EnvServer``.
    """

    def __init__(self, pool: WorkerPool, contract: EnvContract, step_grace_s: float) -> None:
        self._pool = pool
        self._contract = contract
        self._step_grace_s = step_grace_s

    @property
    def steps_subsets(self) -> bool:
        """Whether clients may reset and step any lanes alone, where their dialect knows that."""
        is_free = self._contract.autoreset_mode is AutoresetMode.DISABLED
        return is_free and self._pool.steps_subsets

    def open(
        self, dialect: EnvDialect, *, tag_arrays: bool, is_numbered: bool = False
    ) -> EnvExchange:
        """Return a new session, for which there is a place in the pool.

        Args:
            dialect: What its client speaks.
            tag_arrays: Whether its client knows arrays in infos.
            is_numbered: See ``EnvHost``.
        """
        contract = self._contract
        watch = Stopwatch()
        if dialect.timed is None:
            worker = SessionWorker(self._pool, self._step_grace_s, contract.num_envs)
        else:
            worker = TimedWorker(self._pool, self._step_grace_s, contract.num_envs, watch)
        host = EnvHost(worker, contract, dialect, is_numbered=is_numbered)
        session = EnvSession(
            contract.num_envs,
            _new_episode_id,
            worker.counting,
            dialect.rules,
            autoresets=contract.autoreset_mode is AutoresetMode.NEXT_STEP,
            steps_subsets=self.steps_subsets,
        )
        if dialect.timed is None:
            return EnvExchange(session, host, dialect, tag_arrays=tag_arrays)
        return TimedExchange(session, host, dialect, tag_arrays=tag_arrays, watch=watch)


def _new_episode_id() -> str:
    return uuid.uuid4().hex
