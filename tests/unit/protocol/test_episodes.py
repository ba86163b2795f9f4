"""Two ledgers that share a tally keep one account."""

from itertools import count

from rlmesh_ray.protocol.episodes import EpisodeLedger, Tally

NOW_NS = 10_000


def ledgers() -> tuple[EpisodeLedger, EpisodeLedger]:
    """Return one with two episodes, a step in, and one that has joined it."""
    first = EpisodeLedger(2, map(str, count(1)).__next__)
    first.begin([0, 1], [7, 8], 0)
    first.step([1.0, 2.0], b"\0\0", b"\0\0", {}, NOW_NS)
    tally = Tally.empty(2)
    first.share(tally)
    second = EpisodeLedger(2, str)
    second.join(tally, first.episodes)
    return first, second


def test_what_one_counts_the_other_gives_out() -> None:
    first, second = ledgers()

    second.step([1.0, 2.0], b"\0\0", b"\0\0", {}, NOW_NS)
    records = first.finalize(NOW_NS)

    assert [(one.episode_id, one.step_count, one.cumulative_reward) for one in records] == [
        ("1", 2, 2.0),
        ("2", 2, 4.0),
    ]
    assert [(one.seed, one.terminated, one.truncated) for one in records] == [
        (7, False, False),
        (8, False, False),
    ]


def test_a_record_is_given_out_once_by_whoever_sees_the_end() -> None:
    first, second = ledgers()

    (record,) = second.step([1.0, 2.0], b"\1\0", b"\0\0", {0: {"last": 1}}, NOW_NS)

    assert (record.episode_id, record.step_count, record.final_info) == ("1", 2, {"last": 1})
    assert first.episode_ids == second.episode_ids == ("", "2")
    assert [one.episode_id for one in first.finalize(NOW_NS)] == ["2"]
    assert not second.is_tracking
    assert second.step([1.0, 2.0], b"\1\1", b"\0\0", {}, NOW_NS) == ()


def test_an_account_can_move_again() -> None:
    first, second = ledgers()
    second.step([1.0, 2.0], b"\0\0", b"\0\0", {}, NOW_NS)

    first.share(Tally.empty(2))
    second.step([9.0, 9.0], b"\0\0", b"\0\0", {}, NOW_NS)

    assert [one.cumulative_reward for one in first.finalize(NOW_NS)] == [2.0, 4.0]
