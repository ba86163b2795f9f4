"""Steps of a vector become the episodes of its lanes, across the boundaries of blocks."""

from collections import defaultdict
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest

from rlmesh_ray.recording.recorder import (
    FIRST,
    IGNORED,
    STEP,
    Segment,
    StepBlock,
    StepCollector,
    segments,
)
from rlmesh_ray.recording.store import RecordingInfo
from rlmesh_ray.spaces.spec import BoxSpec, DictSpec, DiscreteSpec, TextSpec

SPACE = DictSpec(
    (("at", BoxSpec((), "int64", bytes(8), b"\x7f" * 8)), ("word", TextSpec(0, 9, "")))
)
INFO = RecordingInfo("Count-v0", SPACE, DiscreteSpec(100), 30.0)


@dataclass
class Lanes:
    """Lanes that count their steps; lane ``n`` ends its episodes after ``n + 2`` of them.

    Observations are ``100 * episode + step``, actions one more than the step before.
    """

    num_lanes: int
    autoresets: bool = True
    episode: list[int] = field(default_factory=list)
    step: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.episode, self.step = [0] * self.num_lanes, [0] * self.num_lanes

    @property
    def observations(self) -> list[Any]:
        at = [100 * e + s for e, s in zip(self.episode, self.step, strict=True)]
        return [np.array(at), tuple(map(str, at))]

    @property
    def ended(self) -> list[bool]:
        return [step == lane + 2 for lane, step in enumerate(self.step)]

    def advance(self) -> list[Any]:
        """Step all lanes; return the columns of the row."""
        ended = self.ended
        for lane in range(self.num_lanes):
            if ended[lane]:
                self.episode[lane] += 1
            self.step[lane] = 0 if ended[lane] else self.step[lane] + 1
        terminated = np.array(self.ended)
        rewards = np.array(self.step, np.float64)
        return [*self.observations, np.array(self.step), rewards, terminated, ~terminated & False]


def collected(
    lanes: Lanes, collector: StepCollector, num_steps: int, block_rows: int
) -> list[StepBlock]:
    """Return the blocks of a reset and steps, taken after so many rows each."""
    blocks = []
    everyone = range(lanes.num_lanes)
    collector.add_reset(everyone, [7 + lane for lane in everyone], lanes.observations, {})
    for row in range(1, num_steps + 1):
        if row % block_rows == 0:
            blocks.append(collector.take())
        all_lanes = np.ones(lanes.num_lanes, bool)
        infos = {"row": np.full(lanes.num_lanes, row), "_row": all_lanes}
        collector.add_step(lanes.advance(), infos)
    blocks.append(collector.take())
    return [block for block in blocks if block is not None]


def episodes(blocks: list[StepBlock]) -> dict[int, list[list[Segment]]]:
    """Return the finished episodes of each lane, as lists of segments."""
    running: dict[int, list[Segment]] = {}
    finished = defaultdict(list)
    for block in blocks:
        if block.follows_gap:
            running.clear()
        for segment in segments(block):
            lane = int(segment.episode)
            if segment.begins:
                running[lane] = []
            if lane in running:
                running[lane].append(segment)
                if segment.ends:
                    finished[lane].append(running.pop(lane))
    return finished


def column(episode: list[Segment], index: int) -> list[Any]:
    return [value for segment in episode for value in list(segment.columns[index])]


@pytest.mark.parametrize("block_rows", [1, 2, 5, 100])
def test_lanes_that_reset_themselves_give_whole_episodes(block_rows: int) -> None:
    lanes = Lanes(3)
    collector = StepCollector(INFO, 3, autoresets=True)

    found = episodes(collected(lanes, collector, 40, block_rows))

    for lane in range(3):
        length = lane + 2
        assert len(found[lane]) == 40 // (length + 1) + (40 % (length + 1) == length)
        for number, episode in enumerate(found[lane]):
            expected = [100 * number + step for step in range(length + 1)]
            assert column(episode, 0) == expected
            assert column(episode, 1) == list(map(str, expected))
            assert column(episode, 2)[1:] == list(range(1, length + 1))
            assert column(episode, 3)[1:] == list(range(1, length + 1))
            assert column(episode, 4) == [False] * length + [True]
            assert episode[0].seed == (7 + lane if number == 0 else None)
            rows: list[Any] = [info["row"] for segment in episode for info in segment.infos if info]
            assert rows == list(range(rows[0], rows[0] + len(rows)))


def test_lanes_that_wait_for_a_reset_record_nothing_meanwhile() -> None:
    lanes = Lanes(2)
    collector = StepCollector(INFO, 2, autoresets=False)

    blocks = collected(lanes, collector, 9, 100)

    assert {lane: len(found) for lane, found in episodes(blocks).items()} == {0: 1, 1: 1}


def test_a_reset_of_one_lane_leaves_the_episodes_of_the_others() -> None:
    lanes = Lanes(2)
    collector = StepCollector(INFO, 2, autoresets=True)
    collector.add_reset([0, 1], [], lanes.observations, {})
    collector.add_step(lanes.advance(), {})
    lanes.episode[0], lanes.step[0] = 9, 0
    collector.add_reset([0], [3], lanes.observations, {})
    for _ in range(2):
        collector.add_step(lanes.advance(), {})
    block = collector.take()
    assert block is not None

    found = episodes([block])

    assert column(found[0][0], 0) == [900, 901, 902]
    assert found[0][0][0].seed == 3
    assert column(found[1][0], 0) == [0, 1, 2, 3]


def test_lanes_that_are_not_stepped_have_no_row() -> None:
    lanes = Lanes(2)
    collector = StepCollector(INFO, 2, autoresets=False)
    collector.add_reset([0, 1], [], lanes.observations, {})
    for _ in range(2):
        collector.add_step(lanes.advance(), {}, lanes=[0])
    block = collector.take()
    assert block is not None

    found = episodes([block])

    assert [len(column(episode, 0)) for episode in found[0]] == [3]
    assert 1 not in found


def test_a_lane_that_is_due_for_its_reset_begins_with_the_step_that_it_takes_part_in() -> None:
    collector = StepCollector(INFO, 2, autoresets=True)
    lanes = Lanes(2)
    collector.add_reset([0, 1], [], lanes.observations, {})
    for _ in range(2):  # the episode of lane 0 ends
        collector.add_step(lanes.advance(), {})
    collector.add_step([*lanes.advance()[:-2], np.zeros(2, bool), np.zeros(2, bool)], {}, lanes=[1])
    collector.add_step(lanes.advance(), {}, lanes=[0, 1])
    block = collector.take()
    assert block is not None
    assert block.kinds[:, 0].tolist() == [FIRST, STEP, STEP, IGNORED, FIRST]


def test_the_loss_of_a_block_costs_the_episodes_that_it_is_part_of_and_no_others() -> None:
    lanes = Lanes(1)
    collector = StepCollector(INFO, 1, autoresets=True)
    collector.add_reset([0], [], lanes.observations, {})
    kept = []
    num_lost = 0
    for row in range(1, 31):
        collector.add_step(lanes.advance(), {})
        if row % 5 == 0:
            block = collector.take()
            if row == 10:
                num_lost = collector.lose()
            elif block is not None:
                kept.append(block)

    found = episodes(kept)[0]

    assert [block.follows_gap for block in kept] == [False, True, False, False, False]
    assert len(found) + num_lost == 10
    assert [column(episode, 0)[0] // 100 for episode in found] == [0, 1, 4, 5, 6, 7, 8, 9]


def test_a_block_holds_a_bounded_number_of_bytes() -> None:
    info = RecordingInfo("Big-v0", BoxSpec((2**20,), "uint8", b"\0", b"\xff"), DiscreteSpec(2), 1.0)
    collector = StepCollector(info, 1, autoresets=False)
    image = [np.zeros((1, 2**20), np.uint8)]

    collector.add_reset([0], [], image, {})
    is_full = collector.is_full
    block = collector.take()

    assert is_full
    assert block is not None
    assert block.num_bytes < 2**21


def test_infos_and_texts_count_among_the_bytes_of_a_block() -> None:
    lanes = Lanes(2)
    collector = StepCollector(INFO, 2, autoresets=True)
    mask = np.ones(2, np.bool_)
    infos = {"log": np.array(["x" * 100_000] * 2, object), "_log": mask}
    collector.add_reset(range(2), [], lanes.observations, infos)
    num_rows = 1
    while not collector.is_full:
        collector.add_step(lanes.advance(), infos)
        num_rows += 1

    block = collector.take()
    assert block is not None
    assert 100_000 * num_rows < block.num_bytes < 3 * 2**20


def test_of_infos_that_are_too_large_together_only_the_largest_become_text() -> None:
    lanes = Lanes(2)
    collector = StepCollector(INFO, 2, autoresets=True)
    everyone = np.ones(2, np.bool_)
    infos = {
        "camera": np.zeros((2, 2**18), np.uint8),
        "_camera": everyone,
        "speed": np.array([1.5, 2.5]),
        "_speed": everyone,
    }
    collector.add_reset(range(2), [], lanes.observations, infos)

    block = collector.take()
    assert block is not None
    for segment, speed in zip(segments(block), (1.5, 2.5), strict=True):
        (info,) = segment.infos
        assert (info["camera"], info["speed"]) == ("<ndarray>", speed)
        assert "left out or made text" in str(info["rlmesh_ray.left_out"])


def test_pictures_of_consecutive_rows_are_not_copied() -> None:
    lanes = Lanes(2)
    collector = StepCollector(INFO, 2, autoresets=True)
    pictures = np.random.default_rng(0).integers(256, size=(2, 2, 8, 8, 3), dtype=np.uint8)
    collector.add_reset([0, 1], [], lanes.observations, {}, pictures[0])
    collector.add_step(lanes.advance(), {}, pictures[1])
    block = collector.take()

    assert block is not None
    for lane, segment in enumerate(segments(block)):
        assert segment.frames is not None
        np.testing.assert_array_equal(segment.frames, pictures[:, lane])
        assert np.shares_memory(segment.frames, block.frames)
