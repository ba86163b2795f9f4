"""ReferenceSession: an independent model of one env session of edition 2026.06.

It is written from the edition's text and not from ``protocol.env_session``, so that tests can
compare the two, and any server with it: pass it each request, the environment's effect, and the
response.
"""

import enum
from collections.abc import Sequence
from dataclasses import dataclass

from rlmesh_ray.protocol.messages import (
    Close,
    Closed,
    EnvErrorCode,
    EnvFailed,
    EnvRequest,
    EnvResponse,
    EpisodeRecord,
    MalformedRequest,
    Render,
    Rendered,
    Reset,
    ResetDone,
    Step,
    StepDone,
)


@dataclass(frozen=True, slots=True)
class SimulatedStep:
    """The environment has taken a step; one entry for each lane."""

    rewards: tuple[float, ...]
    terminated: tuple[bool, ...]
    truncated: tuple[bool, ...]


class EnvFailure(enum.Enum):
    """The environment could not execute a request."""

    LOST = enum.auto()
    """A deadline passed, it raised, or its process ended: the running episodes are lost."""
    NON_CONFORMING = enum.auto()
    """A value violates the structural rules ("Structural conformance")."""
    REFUSED = enum.auto()
    """It refused the arguments, or could not render; nothing has changed."""


EnvEffect = SimulatedStep | EnvFailure | None
"""Effect of a request on the environment; None for a successful Reset or Render."""


@dataclass(slots=True)
class _Running:
    episode_id: str
    seed: int | None
    num_steps: int = 0
    total_reward: float = 0.0


class ReferenceSession:
    """Validates the responses of one session.

    Args:
        num_lanes: Width of the vector.
    """

    def __init__(self, num_lanes: int) -> None:
        self._num_lanes = num_lanes
        self._running: list[_Running | None] = [None] * num_lanes
        self._seen_ids: set[str] = set()
        self.is_started = False
        """Whether every lane has been reset since the start, or since the last loss."""
        self.is_abandoned = False
        """Whether a response was a non-recoverable error."""
        self.is_closed = False

    @property
    def episode_ids(self) -> tuple[str, ...]:
        """Id of each lane's tracked episode; empty where there is none."""
        return tuple(running.episode_id if running else "" for running in self._running)

    def admits(self, request: EnvRequest | MalformedRequest) -> bool:
        """Return whether ``request`` reaches the environment (Close: whether it is legal)."""
        if isinstance(request, Close):
            return not self.is_closed
        if self.is_closed or self.is_abandoned:
            return False
        if isinstance(request, Step):
            return self.is_started and not request.env_indices
        return isinstance(request, Render) or (
            isinstance(request, Reset) and self._makes_sense(request)
        )

    def judge(
        self, request: EnvRequest | MalformedRequest, response: EnvResponse, effect: EnvEffect
    ) -> None:
        """Check the one response to ``request``.

        Args:
            request: The next request, in the order of the stream.
            response: Its response.
            effect: Its effect on the environment, if it got there.

        Raises:
            AssertionError: The text does not allow this response.
        """
        assert response.request_id == request.request_id, "another id than the request's"
        if not self.admits(request):
            self._judge_refusal(request, response)
        elif isinstance(request, Close):
            assert isinstance(response, Closed), response
            self._judge_cut_off(response.final_episodes)
            self.is_closed = True
        elif isinstance(effect, EnvFailure):
            self._judge_trouble(response, effect)
        elif isinstance(request, Reset):
            self._judge_reset(request, response)
        elif isinstance(request, Step):
            assert isinstance(effect, SimulatedStep)
            self._judge_step(response, effect)
        else:
            assert isinstance(response, Rendered), response

    def _makes_sense(self, request: Reset) -> bool:
        lanes = request.env_indices or tuple(range(self._num_lanes))
        are_lanes = set(lanes) <= set(range(self._num_lanes)) and len(set(lanes)) == len(lanes)
        is_enough = self.is_started or len(lanes) == self._num_lanes
        return are_lanes and is_enough and len(request.seeds) in (0, len(lanes))

    def _judge_refusal(self, request: EnvRequest | MalformedRequest, response: EnvResponse) -> None:
        assert isinstance(response, EnvFailed), response
        is_usable = not self.is_abandoned and not self.is_closed
        assert response.is_recoverable == is_usable, "recoverable, or not, against the text"
        assert not response.interrupted_episodes, "a refused request interrupts nothing"
        if isinstance(request, Step) and is_usable and not self.is_started:
            assert response.code is EnvErrorCode.NOT_READY, "Step before Reset"

    def _judge_trouble(self, response: EnvResponse, trouble: EnvFailure) -> None:
        assert isinstance(response, EnvFailed), response
        is_rejection = trouble is EnvFailure.NON_CONFORMING
        assert response.is_recoverable != is_rejection, "recoverable, or not, against the text"
        if trouble is EnvFailure.REFUSED:
            assert not response.interrupted_episodes, "nothing has happened"
            return
        self._judge_cut_off(response.interrupted_episodes)
        self.is_started = False
        self.is_abandoned = is_rejection

    def _judge_reset(self, request: Reset, response: EnvResponse) -> None:
        assert isinstance(response, ResetDone), response
        assert len(response.episode_ids) == self._num_lanes
        lanes = request.env_indices or tuple(range(self._num_lanes))
        for lane, episode_id in enumerate(response.episode_ids):
            if lane not in lanes:
                assert episode_id == self.episode_ids[lane], "a lane that was not reset"
                continue
            assert episode_id, "a lane that was reset has no id"
            assert episode_id not in self._seen_ids, "an id for the second time"
            self._seen_ids.add(episode_id)
            seed = request.seeds[lanes.index(lane)] if request.seeds else None
            self._running[lane] = _Running(episode_id, seed)
        self.is_started = True

    def _judge_step(self, response: EnvResponse, effect: SimulatedStep) -> None:
        assert isinstance(response, StepDone), response
        assert tuple(response.rewards) == effect.rewards
        assert tuple(map(bool, response.terminated)) == effect.terminated
        assert tuple(map(bool, response.truncated)) == effect.truncated
        ended: list[tuple[int, _Running]] = []
        for lane, running in enumerate(self._running):
            if running is None:
                continue
            running.num_steps += 1
            running.total_reward += effect.rewards[lane]
            if effect.terminated[lane] or effect.truncated[lane]:
                ended.append((lane, running))
                self._running[lane] = None
        _judge_records(response.completed_episodes, ended, effect)
        assert tuple(response.episode_ids) == self.episode_ids

    def _judge_cut_off(self, records: Sequence[EpisodeRecord]) -> None:
        running = [(lane, own) for lane, own in enumerate(self._running) if own is not None]
        _judge_records(records, running, None)
        self._running = [None] * self._num_lanes


def _judge_records(
    records: Sequence[EpisodeRecord],
    expected: Sequence[tuple[int, _Running]],
    effect: SimulatedStep | None,
) -> None:
    assert [record.env_index for record in records] == [lane for lane, _ in expected]
    for record, (lane, running) in zip(records, expected, strict=True):
        cause = (effect.terminated[lane], effect.truncated[lane]) if effect else (False, False)
        assert record.episode_id == running.episode_id
        assert record.seed == running.seed
        assert record.step_count == running.num_steps
        assert record.cumulative_reward == running.total_reward
        assert (record.terminated, record.truncated) == cause
        assert record.start_timestamp_ns <= record.end_timestamp_ns
