"""Simulators that ask a ModelService for each action, and report what has come of it.

What they report stands in their observations (``rllink_reports``); the slots of a Predict say where
episodes begin.
"""

import threading
import uuid
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, Protocol

import gymnasium
import numpy as np

from rlmesh_ray.dialects.rllink.runner.episode_recorder import ActionRequest, EpisodeRecorder
from rlmesh_ray.dialects.rllink.runner.sample_queue import SampleQueue
from rlmesh_ray.dialects.rllink.runner.sample_validation import SampleSpaces
from rlmesh_ray.dialects.rllink.runner.step_reports import StepReport, StepReportReader
from rlmesh_ray.dialects.rllink.server.deferred_model import ChosenActions
from rlmesh_ray.dialects.rllink.wire import messages as m
from rlmesh_ray.errors import PolicyError
from rlmesh_ray.models.policy import Rows
from rlmesh_ray.protocol.messages import PredictSlot
from rlmesh_ray.spaces.contract import EnvContract


class GroupInference(Protocol):
    """Chooses actions for simulators that have no policy of their own."""

    def submit_group(self, questions: Sequence[ActionRequest]) -> None:
        """Have questions answered at the same time; does not wait. Under the intake's lock."""


@dataclass(slots=True, eq=False)
class _ReportingLane:
    episode_id: str
    recorder: EpisodeRecorder | None
    """None: its episode has ended."""


class ReportingPolicy:
    """The policy that they ask; see ``server.deferred_model.DeferredPolicy``.

    A lane's episode begins with its first row, with one whose slot says ``reset`` or names another
    episode, and with the one after an end. What a first row reports is ignored, and the answer to
    a last one means nothing. An episode that begins while the one before runs cuts that one short:
    its complete steps are kept, as those of a client that has gone.

    Args:
        queue: Where samples go.
        spaces: What they must fit.
        actor: Chooses the actions.
    """

    def __init__(self, queue: SampleQueue, spaces: SampleSpaces, actor: GroupInference) -> None:
        self._queue = queue
        self._form = StepReportReader(spaces)
        self._actor = actor
        self._routes: dict[str, dict[int, _ReportingLane]] = {}
        self._idle = _idle_action(spaces.action)

    def check_contract(self, contract: EnvContract) -> None:
        """Say whether a simulator reports what is needed, and takes what is chosen.

        Raises:
            ContractMismatchError: It does not.
        """
        self._form.check_contract(contract)

    def choose_actions(self, rows: Rows) -> Future[ChosenActions]:
        """Note what the rows report, and have actions chosen when simulators may go on.

        Raises:
            CodecError: A row does not fit; nothing has changed.
        """
        report = self._form.report(rows.observations, rows.num_rows)
        ((route_key, slots),) = rows.routes
        with self._queue.lock:
            if route_key not in self._routes:
                self._routes[route_key] = {}
                self._queue.num_clients += 1
            lanes = self._routes[route_key]
            recorders = [self._recorder(lanes, slot, report, row) for row, slot in enumerate(slots)]
            questions = [
                None if recorder is None else ActionRequest(recorder, report.obs[row])
                for row, recorder in enumerate(recorders)
            ]
            weights = self._queue.weights
            together = _GroupReply(questions, self._idle, 0 if weights is None else weights.seq_no)
            asked = [question for question in questions if question is not None]
            if asked:
                self._actor.submit_group(asked)
        together.begin()
        return together.choice

    def forget(self, route_key: str, env_index: int | None) -> None:
        """Cut short what is running in a lane, or in all lanes of a route, which ends so."""
        with self._queue.lock:
            lanes = self._routes.get(route_key, {})
            for index in list(lanes) if env_index is None else [env_index]:
                lane = lanes.pop(index, None)
                if lane is not None and lane.recorder is not None:
                    lane.recorder.abandon()
            if env_index is None and self._routes.pop(route_key, None) is not None:
                self._queue.num_clients -= 1
            self._queue.lock.notify_all()

    # --- what comes ----------------------------------------------------------------------

    def _recorder(
        self, lanes: dict[int, _ReportingLane], slot: PredictSlot, report: StepReport, row: int
    ) -> EpisodeRecorder | None:
        """Note what a row reports; return whose action is to be chosen, None after an end."""
        lane = lanes.get(slot.env_index)
        running = None if lane is None else lane.recorder
        if lane is None or running is None or _begins(lane, slot) or not running.is_acting:
            if running is not None:
                running.abandon()
            recorder = EpisodeRecorder(self._queue, slot.episode_id or uuid.uuid4().hex)
            lanes[slot.env_index] = _ReportingLane(slot.episode_id, recorder)
            recorder.see(report.obs[row])
            return recorder
        running.add_reward(float(report.rewards[row]))
        if report.terminated[row] or report.truncated[row]:
            running.end(report.obs[row], is_truncated=not report.terminated[row])
            lane.recorder = None
            return None
        running.see(report.obs[row])
        return running


class _GroupReply:
    """The answers to one request's questions.

    Args:
        questions: One a row, None where nothing is to be chosen.
        idle: What such rows get.
        version: Of the weights, if there are no questions at all.
    """

    def __init__(
        self, questions: Sequence[ActionRequest | None], idle: m.Array, version: int
    ) -> None:
        self.choice: Future[ChosenActions] = Future()
        self._questions = questions
        self._idle = idle
        self._version = version
        self._asked = [question for question in questions if question is not None]
        self._num_left = len(self._asked)
        self._lock = threading.Lock()

    def begin(self) -> None:
        """Wait for the answers, without blocking."""
        self.choice.add_done_callback(self._cancel_if_cancelled)
        for question in self._asked:
            question.future.add_done_callback(self._count)
        if not self._asked:
            self._settle()

    def _count(self, _future: Future[Any]) -> None:
        with self._lock:
            self._num_left -= 1
            is_last = not self._num_left
        if is_last:
            self._settle()

    def _settle(self) -> None:
        if not self.choice.set_running_or_notify_cancel():
            return
        if any(question.future.cancelled() for question in self._asked):
            self.choice.set_exception(PolicyError("the training is over"))
            return
        actions, version = [self._idle] * len(self._questions), self._version
        for row, question in enumerate(self._questions):
            if question is None:
                continue
            error = question.future.exception()
            if error is not None:
                self.choice.set_exception(error)
                return
            answer = question.future.result()
            assert isinstance(answer, m.Action)
            actions[row], version = answer.action, answer.weights_seq_no
        self.choice.set_result(ChosenActions(np.stack(actions), version))

    def _cancel_if_cancelled(self, choice: Future[ChosenActions]) -> None:
        if choice.cancelled():
            for question in self._asked:
                question.future.cancel()


def _begins(lane: _ReportingLane, slot: PredictSlot) -> bool:
    return slot.reset or slot.episode_id not in ("", lane.episode_id)


def _idle_action(space: gymnasium.Space[Any]) -> m.Array:
    """Return an action of the space, for rows that want none."""
    if isinstance(space, gymnasium.spaces.Box):
        zeros: m.Array = np.clip(np.zeros(space.shape, space.dtype), space.low, space.high)
        return zeros
    return np.zeros((), np.int64)
