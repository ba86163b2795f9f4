import pickle

import pytest

from rlmesh_ray.server.observe.counters import EnvCounters
from rlmesh_ray.transport.exactly_once import EndpointSide, SessionProgress
from tests.lane_counts import note_step

NUM_LANES = 3


def test_the_steps_of_open_and_of_ended_sessions_are_summed_up() -> None:
    counts = EnvCounters()
    first, second = counts.open(), counts.open()
    note_step(first, 1_000_000, 4, 1)
    first.resets += 1
    note_step(second, 3_000_000, 2, 0)
    counts.close(first)

    statistics = counts.statistics()

    assert (statistics.steps, statistics.lane_steps, statistics.episodes) == (2, 6, 1)
    assert statistics.resets == 1
    assert (statistics.sessions.open, statistics.sessions.opened) == (1, 2)
    assert statistics.step_s.total == pytest.approx(0.004)


def test_what_a_worker_notes_counts_while_it_has_the_session_and_afterwards() -> None:
    counts = EnvCounters()
    lanes, progress = counts.open(), SessionProgress.local(NUM_LANES)
    lanes.progress = progress
    progress.count_vector_step(1_000, NUM_LANES, 0, 1)
    progress.count_vector_step(1_000, NUM_LANES, 2)

    during = counts.statistics()
    counts.close(lanes)
    progress.start(0)  # the next session's
    progress.count_vector_step(1_000, NUM_LANES, 1)
    after = counts.statistics()

    for statistics in (during, after):
        assert statistics.steps == statistics.step_s.count == 2
        assert statistics.lane_steps == 2 * NUM_LANES
        assert (statistics.episodes, statistics.deviations) == (2, 1)


def test_a_second_worker_adds_to_the_first() -> None:
    counts = EnvCounters()
    lanes, endpoint = counts.open(), EndpointSide(SessionProgress.local(NUM_LANES))
    for _ in range(2):
        progress = SessionProgress.local(NUM_LANES)
        endpoint.start(1, progress)
        lanes.progress = progress
        progress.count_vector_step(1_000, NUM_LANES, 1)

    assert counts.statistics().steps == lanes.read().num_steps == 2
    assert counts.statistics().episodes == 2


def test_errors_are_counted_by_code_and_survive_pickling() -> None:
    counts = EnvCounters()
    counts.sessions.errors["TIMEOUT"] += 1
    counts.sessions.errors["TIMEOUT"] += 1
    counts.sessions.errors["CRASHED"] += 1
    counts.worker_restarts += 1

    statistics = pickle.loads(pickle.dumps(counts.statistics()))

    assert statistics.errors == {"TIMEOUT": 2, "CRASHED": 1}
    assert statistics.worker_restarts == 1
    assert type(statistics.errors) is dict
