"""A ledger makes records of what another party counts."""

from itertools import count

import numpy as np

from rlmesh_ray.protocol.env_session import EpisodeTracker
from rlmesh_ray.transport.exactly_once import SessionProgress

NOW_NS = 10_000


class Lanes:
    """Two lanes, and two ledgers that read what is counted there."""

    def __init__(self) -> None:
        self.progress = SessionProgress.local(2)
        self.endpoint = EpisodeTracker(2, map(str, count(1)).__next__, self.progress)
        self.worker = EpisodeTracker(2, str, self.progress)
        self.progress.begin(1, 0)
        self.progress.count_reset(())
        self.progress.end()
        self.endpoint.begin([0, 1], [7, 8], 0)
        self.worker.set_episodes(self.endpoint.episodes)

    def step(self, *has_ended: bool) -> None:
        self.progress.begin(self.progress.done + 1, 0)
        self.progress.count_step(np.array([1.0, 2.0]), np.array(has_ended), np.zeros(2, np.bool_))
        self.progress.end()


def test_what_a_worker_has_counted_stands_in_the_endpoint_s_record() -> None:
    lanes = Lanes()

    lanes.step(False, False)
    lanes.step(False, False)
    records = lanes.endpoint.finalize(NOW_NS)

    assert [(one.episode_id, one.step_count, one.cumulative_reward) for one in records] == [
        ("1", 2, 2.0),
        ("2", 2, 4.0),
    ]
    assert [(one.seed, one.terminated, one.truncated) for one in records] == [
        (7, False, False),
        (8, False, False),
    ]


def test_an_episode_whose_end_the_worker_has_reported_is_not_reported_again() -> None:
    lanes = Lanes()

    lanes.step(True, False)
    (record,) = lanes.worker.completed(b"\1\0", b"\0\0", {0: {"last": 1}}, NOW_NS)
    lanes.step(True, False)  # of an episode that is not tracked

    assert (record.episode_id, record.step_count, record.final_info) == ("1", 1, {"last": 1})
    assert lanes.worker.completed(b"\1\0", b"\0\0", {}, NOW_NS) == ()
    assert lanes.endpoint.episode_ids == ("", "2")
    assert [one.episode_id for one in lanes.endpoint.finalize(NOW_NS)] == ["2"]
    assert lanes.endpoint.finalize(NOW_NS) == ()


def test_an_ended_lane_is_reported_once_however_often_the_answer_is_made() -> None:
    lanes = Lanes()
    lanes.step(False, True)

    assert len(lanes.endpoint.completed(b"\0\0", b"\0\1", {}, NOW_NS)) == 1
    assert lanes.endpoint.completed(b"\0\0", b"\0\1", {}, NOW_NS) == ()


def test_what_a_request_has_done_that_does_not_count_is_not_in_the_record() -> None:
    lanes = Lanes()
    lanes.step(False, False)
    lanes.step(True, False)

    records = lanes.endpoint.interrupt([0, 1], NOW_NS, is_before=True)

    assert [(one.episode_id, one.step_count) for one in records] == [("1", 1), ("2", 1)]
