from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlmesh_ray.dialects.released.server.model_dialect import EpisodeLanes, EpisodeLimit
from rlmesh_ray.errors import CapacityError, CodecError
from rlmesh_ray.protocol.messages import MAX_ID_CHARACTERS, PredictSlot


def rows(*episodes: str) -> list[PredictSlot]:
    """Rows as the translation gives them: without lanes, and without beginnings."""
    return [PredictSlot(-1, episode, 7, False) for episode in episodes]


def places(assign_lanes: Sequence[PredictSlot]) -> list[tuple[int, bool]]:
    return [(slot.env_index, slot.reset) for slot in assign_lanes]


def episode_lanes(limit: int = 100) -> EpisodeLanes:
    return EpisodeLanes(EpisodeLimit(limit))


def test_an_episode_keeps_its_lane_and_begins_once() -> None:
    lanes = episode_lanes()

    first = lanes.assign_lanes(rows("a", "b"))
    again = lanes.assign_lanes(rows("b", "a", "c"))

    assert places(first) == [(0, True), (1, True)]
    assert places(again) == [(1, False), (0, False), (2, True)]
    assert [(slot.episode_id, slot.step) for slot in again] == [("b", 7), ("a", 7), ("c", 7)]


def test_a_lane_that_was_freed_is_used_again_for_an_episode_that_begins() -> None:
    lanes = episode_lanes()
    lanes.assign_lanes(rows("a", "b"))

    assert lanes.lanes_of(["a", "unknown", "a"]) == [0]
    lanes.free(["a", "unknown", "a"])

    assert places(lanes.assign_lanes(rows("c", "b", "a"))) == [(0, True), (1, False), (2, True)]


def test_a_row_is_the_first_of_its_episode_until_one_has_been_answered() -> None:
    lanes = episode_lanes()
    lanes.assign_lanes(rows("old"))

    failed = lanes.assign_lanes(rows("old", "new"))
    lanes.note_failed(failed)
    again = lanes.assign_lanes(rows("old", "new"))

    assert places(failed) == places(again) == [(0, False), (1, True)]
    assert places(lanes.assign_lanes(rows("new"))) == [(1, False)]


def test_an_episode_that_ended_before_it_was_answered_begins_like_any_other() -> None:
    lanes = episode_lanes()
    lanes.note_failed(lanes.assign_lanes(rows("a")))
    lanes.free(["a"])

    assert places(lanes.assign_lanes(rows("b"))) == [(0, True)]
    assert places(lanes.assign_lanes(rows("b"))) == [(0, False)]


@pytest.mark.parametrize(
    ("episodes", "reason"),
    [((), "no episodes"), (("a", ""), "empty episode_id"), (("a", "b", "a"), "twice")],
)
def test_rows_that_would_be_ambiguous_are_refused_and_change_nothing(
    episodes: tuple[str, ...], reason: str
) -> None:
    held = EpisodeLimit(100)
    lanes = EpisodeLanes(held)

    with pytest.raises(CodecError, match=reason):
        lanes.assign_lanes(rows(*episodes))

    assert held.count == 0
    assert places(lanes.assign_lanes(rows("b"))) == [(0, True)]


def test_routes_of_one_session_share_the_room_for_episodes() -> None:
    held = EpisodeLimit(3)
    first, second = EpisodeLanes(held), EpisodeLanes(held)
    first.assign_lanes(rows("a", "b"))

    with pytest.raises(CapacityError, match="would have 4 episodes, and 3 are the limit"):
        second.assign_lanes(rows("a", "b"))
    assert places(second.assign_lanes(rows("a"))) == [(0, True)]  # an id is its route's own
    assert places(first.assign_lanes(rows("a", "b"))) == [(0, False), (1, False)]

    first.free(["a"])
    assert places(second.assign_lanes(rows("a", "b"))) == [(0, False), (1, True)]
    second.clear()
    assert held.count == 1


EPISODES = st.lists(st.sampled_from("abcdef"), min_size=1, max_size=4, unique=True)
DEEDS = st.lists(
    st.tuples(st.sampled_from(["answered", "failed", "ended", "cleared"]), EPISODES), max_size=60
)


@settings(max_examples=200, deadline=None)
@given(DEEDS)
def test_running_episodes_always_have_a_lane_each_and_no_more_than_they_need(
    deeds: list[tuple[str, list[str]]],
) -> None:
    held = EpisodeLimit(4)
    lanes = EpisodeLanes(held)
    running: dict[str, int] = {}
    begun: set[str] = set()
    most = 0

    for deed, episodes in deeds:
        if deed == "ended":
            lanes.free(episodes)
            running = {e: lane for e, lane in running.items() if e not in episodes}
        elif deed == "cleared":
            lanes.clear()
            running.clear()
        elif len({*running, *episodes}) > 4:
            with pytest.raises(CapacityError):
                lanes.assign_lanes(rows(*episodes))
        else:
            assign_lanes = lanes.assign_lanes(rows(*episodes))
            for slot in assign_lanes:
                assert running.setdefault(slot.episode_id, slot.env_index) == slot.env_index
                assert slot.reset == (slot.episode_id not in begun)
            if deed == "failed":
                lanes.note_failed(assign_lanes)
            else:
                begun.update(episodes)
        begun &= running.keys()
        most = max(most, len(running))
        assert held.count == len(running)
        assert len(set(running.values())) == len(running)
        assert all(lane < most for lane in running.values())


def test_an_id_that_would_be_kept_is_refused_when_it_is_long() -> None:
    held = EpisodeLimit(10)
    lanes = EpisodeLanes(held)

    lanes.assign_lanes(rows("x" * MAX_ID_CHARACTERS))
    with pytest.raises(CodecError, match="more than 1024 characters"):
        lanes.assign_lanes(rows("a", "x" * (MAX_ID_CHARACTERS + 1)))

    assert held.count == 1
    assert places(lanes.assign_lanes(rows("a"))) == [(1, True)]
