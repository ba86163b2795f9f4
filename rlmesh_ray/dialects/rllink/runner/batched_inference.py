"""Batched inference for simulators that cannot run a policy."""

import copy
import threading
from collections.abc import Callable, Sequence
from typing import Any

import gymnasium
import numpy as np
import torch
from ray.rllib.connectors.module_to_env.get_actions import GetActions
from ray.rllib.core.columns import Columns
from ray.rllib.core.rl_module.rl_module import RLModule
from ray.rllib.utils.spaces.space_utils import (
    clip_action,
    get_base_struct_from_space,
    unsquash_action,
)

from rlmesh_ray.dialects.rllink.runner.episode_recorder import ActionRequest, ChosenAction
from rlmesh_ray.dialects.rllink.runner.sample_queue import SampleQueue
from rlmesh_ray.dialects.rllink.runner.weights_version import WeightsVersion
from rlmesh_ray.dialects.rllink.wire import messages as m
from rlmesh_ray.models.fast_path.action_sampling import ActionSampler, as_arrays

_MOST_ROWS = 1024


def action_transform_for(
    action_space: gymnasium.Space[Any], *, normalize: bool, clip: bool
) -> Callable[[m.Array], m.Array]:
    """Return what RLlib does with a drawn action before the environment gets it.

    Args:
        action_space: What it must fit.
        normalize: ``config.normalize_actions``.
        clip: ``config.clip_actions``.
    """
    struct = get_base_struct_from_space(action_space)

    def fit(action: m.Array) -> m.Array:
        if normalize:
            action = unsquash_action(action, struct)
        elif clip:
            action = clip_action(action, struct)
        # RLlib's modules give a Box of shape () an axis.
        return np.asarray(action).reshape(action_space.shape)

    return fit


class BatchedInference:
    """A copy of the policy in a thread of its own, so that it answers while others learn.

    The thread begins with the first question.

    Args:
        queue: Says when simulators may go on, and with which weights.
        module: For its form; not changed.
        fit: From ``action_transform_for``.
        explore: Whether actions are drawn.
    """

    def __init__(
        self,
        queue: SampleQueue,
        module: RLModule,
        fit: Callable[[m.Array], m.Array],
        *,
        explore: bool,
    ) -> None:
        self.explore = explore
        self._queue = queue
        self._module: Any = copy.deepcopy(module)
        self._fit = fit
        drawing = GetActions()
        self._drawing = ActionSampler(self._module, drawing._get_actions)
        self._asked: list[Sequence[ActionRequest]] = []
        self._seq_no: int | None = None
        self._thread: threading.Thread | None = None

    def ask(self, request: ActionRequest) -> None:
        """Have a request answered when simulators may go on; under the queue's lock."""
        self.submit_group([request])

    def submit_group(self, questions: Sequence[ActionRequest]) -> None:
        """Have requests answered together; under the queue's lock.

        They are, even if there is room for some of them only: the simulator needs all answers to go
        on, so that to wait for room would be a deadlock.
        """
        self._asked.append(questions)
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="rllink-acting", daemon=True)
            self._thread.start()
        self._queue.lock.notify_all()

    def _run(self) -> None:
        while True:
            with self._queue.lock:
                while not self._queue.is_closed and not self._num_answerable:
                    self._queue.lock.wait()
                count = self._num_answerable
                asked = [each for group in self._asked[:count] for each in group]
                self._asked = self._asked[count:]
                weights = self._queue.weights
            if self._queue.is_closed or weights is None:
                for request in asked:
                    request.future.cancel()
                for request in (each for group in self._asked for each in group):
                    request.future.cancel()
                return
            present = [each for each in asked if each.future.set_running_or_notify_cancel()]
            if present:
                self._answer(present, weights)

    @property
    def _num_answerable(self) -> int:
        """How many groups."""
        if not self._asked or self._queue.weights is None:
            return 0
        most, num_rows = min(self._queue.room, _MOST_ROWS), 0
        for number, group in enumerate(self._asked):
            if num_rows >= most:
                return number
            num_rows += len(group)
        return len(self._asked)

    def _answer(self, asked: Sequence[ActionRequest], weights: WeightsVersion) -> None:
        try:
            decisions = self._decide([request.obs for request in asked], weights)
            actions = [self._fit(decision.action) for decision in decisions]
        except Exception as error:  # noqa: BLE001  # the module's own code; clients are told
            if len(asked) == 1:
                asked[0].future.set_exception(error)
                return
            for request in asked:  # only some of them may fail
                self._answer([request], weights)
            return
        for request, decision, action in zip(asked, decisions, actions, strict=True):
            with self._queue.lock:
                request.recorder.decide(decision)
            request.future.set_result(
                m.Action(request.recorder.episode_id, action, decision.seq_no)
            )

    def _decide(self, obs: Sequence[m.Array], weights: WeightsVersion) -> list[ChosenAction]:
        if self._seq_no != weights.seq_no:
            self._module.set_state(dict(weights.state))
            self._seq_no = weights.seq_no
        batch = {Columns.OBS: torch.as_tensor(np.stack(obs).astype(np.float32))}
        with torch.no_grad():
            if self.explore:
                output = self._module.forward_exploration(batch, t=weights.num_env_steps)
            else:
                output = self._module.forward_inference(batch)
            self._drawing.add_to(output, explore=self.explore)
        arrays = as_arrays({name: output[name] for name in _KEPT if name in output})
        kept = {name: arrays[name] for name in m.MODEL_OUTPUTS if name in arrays}
        outputs = kept if len(kept) == len(m.MODEL_OUTPUTS) else {}
        return [
            ChosenAction(
                seen,
                arrays[Columns.ACTIONS][row],
                {name: values[row] for name, values in outputs.items()},
                weights.seq_no,
            )
            for row, seen in enumerate(obs)
        ]


_KEPT = (Columns.ACTIONS, *m.MODEL_OUTPUTS)
