import os
import pickle
from collections.abc import Iterator

import pytest

from rlmesh_ray.envs.line_control import LineControl
from rlmesh_ray.models.batcher import Batcher
from rlmesh_ray.server.counts import EnvCounts, ModelCounts

NUM_LANES = 3


@pytest.fixture
def control() -> Iterator[LineControl]:
    descriptor = LineControl.create(NUM_LANES)
    yield LineControl(descriptor, NUM_LANES)
    os.close(descriptor)


def step_over(control: LineControl, *, num_ended: int = 0) -> None:
    control.begin(control.begun + 1, 0)
    control.count(num_ended)
    control.end()


def test_the_steps_of_open_and_of_ended_sessions_are_summed_up() -> None:
    counts = EnvCounts()
    first, second = counts.open(), counts.open()
    first.note_step(1_000_000, 4, 1)
    first.resets += 1
    second.note_step(3_000_000, 2, 0)
    counts.close(first)

    statistics = counts.statistics()

    assert (statistics.steps, statistics.lane_steps, statistics.episodes) == (2, 6, 1)
    assert statistics.resets == 1
    assert (statistics.sessions.open, statistics.sessions.opened) == (1, 2)
    assert statistics.step_s.total == pytest.approx(0.004)


def test_steps_over_a_line_count_while_it_lasts_and_afterwards(control: LineControl) -> None:
    counts = EnvCounts()
    lanes = counts.open()
    lanes.note_step(1_000_000, NUM_LANES, 0)
    lanes.follow(control, NUM_LANES)
    step_over(control)
    step_over(control, num_ended=2)

    during = counts.statistics()
    counts.settle(lanes)
    step_over(control)  # what nobody hears of any more
    settled = counts.statistics()
    counts.close(lanes)
    after = counts.statistics()

    for statistics in (during, settled, after):
        assert statistics.steps == statistics.step_s.count == 3
        assert statistics.lane_steps == 3 * NUM_LANES
        assert statistics.episodes == 2


def test_a_second_line_adds_to_the_first(control: LineControl) -> None:
    counts = EnvCounts()
    lanes = counts.open()
    for _ in range(2):
        descriptor = LineControl.create(NUM_LANES)
        line = LineControl(descriptor, NUM_LANES)
        os.close(descriptor)
        lanes.follow(line, NUM_LANES)
        step_over(line, num_ended=1)
        counts.settle(lanes)
    counts.settle(lanes)

    assert counts.statistics().steps == lanes.num_steps == 2
    assert counts.statistics().episodes == 2


def test_errors_are_counted_by_code_and_survive_pickling() -> None:
    counts = EnvCounts()
    counts.sessions.note_error("TIMEOUT")
    counts.sessions.note_error("TIMEOUT")
    counts.sessions.note_error("CRASHED")
    counts.note_worker_restart()

    statistics = pickle.loads(pickle.dumps(counts.statistics()))

    assert statistics.errors == {"TIMEOUT": 2, "CRASHED": 1}
    assert statistics.worker_restarts == 1
    assert type(statistics.errors) is dict


def test_a_policy_s_batches_are_counted_by_rows_and_by_time() -> None:
    counts = ModelCounts()
    counts.note_waited(1_000)
    counts.note_waited(2_000_000)
    counts.note_batch(16, 3_000_000)
    counts.sessions.note_opened()

    statistics = counts.statistics(
        Batcher[None](max_rows=1).statistics(), routes=2, policy_version=7
    )

    assert statistics.queue_s.count == 2
    assert statistics.batch_rows.mean == 16
    assert statistics.forward_s.total == pytest.approx(0.003)
    assert (statistics.routes, statistics.policy_version, statistics.sessions.open) == (2, 7, 1)
    assert pickle.loads(pickle.dumps(statistics)) == statistics
