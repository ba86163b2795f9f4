from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from rlmesh_ray.envs.commands import ResetCommand, ResetReply, StepCommand, StepReply
from rlmesh_ray.server.counts import EnvCounts
from rlmesh_ray.server.session_worker import SessionWorker
from rlmesh_ray.spaces.block import Results
from rlmesh_ray.spaces.contract import AutoresetMode

NUM_LANES = 3


@dataclass
class Session:
    """What a worker of three lanes has answered, and what is counted of it."""

    mode: AutoresetMode
    results: Results = field(
        default_factory=lambda: Results(
            np.zeros(NUM_LANES), np.zeros(NUM_LANES, bool), np.zeros(NUM_LANES, bool)
        )
    )

    def __post_init__(self) -> None:
        self._counts = EnvCounts()
        pool: Any = SimpleNamespace(counts=self._counts)
        self._asked = SessionWorker(pool, grace_s=1.0)
        contract = SimpleNamespace(autoreset_mode=self.mode, num_envs=NUM_LANES)
        self._process: Any = SimpleNamespace(results=self.results, contract=contract)

    def step(self, *lanes: int, terminated: tuple[int, ...] = ()) -> None:
        """Step ``lanes``, or all; the flags of the others stay as they are."""
        stepped = list(lanes or range(NUM_LANES))
        self.results.terminated[stepped] = [lane in terminated for lane in stepped]
        self._asked._count(self._process, StepCommand(lanes=lanes), StepReply({}), 1)

    def reset(self, *lanes: int) -> None:
        """Reset ``lanes``, or all; flags stay as they are."""
        self._asked._count(self._process, ResetCommand(lanes=lanes), ResetReply({}), 1)

    @property
    def counted(self) -> tuple[int, int]:
        """Steps of lanes, and episodes."""
        told = self._counts.statistics()
        return told.lane_steps, told.episodes


def test_a_lane_that_is_stepped_alone_leaves_the_flags_of_the_others_uncounted() -> None:
    session = Session(AutoresetMode.DISABLED)
    session.reset(0)  # lane by lane, as they are first used
    session.reset(1)
    session.step(1, terminated=(1,))
    session.reset(1)

    session.step(0)

    assert session.counted == (2, 1)


def test_a_lane_that_stays_over_ends_once_until_it_is_reset() -> None:
    session = Session(AutoresetMode.DISABLED)
    session.reset()
    session.step(terminated=(0, 2))
    session.step(terminated=(0, 1, 2))
    session.reset(2)
    session.step(terminated=(0, 1, 2))
    session.reset()
    session.step(terminated=(0,))

    assert session.counted == (4 * NUM_LANES, 5)


@pytest.mark.parametrize("mode", [AutoresetMode.NEXT_STEP, AutoresetMode.SAME_STEP])
def test_lanes_that_reset_themselves_end_as_often_as_they_say(mode: AutoresetMode) -> None:
    session = Session(mode)
    session.reset()
    session.results.truncated[1] = True
    session.step(terminated=(0,))
    session.step(terminated=(0,))

    assert session.counted == (2 * NUM_LANES, 4)
