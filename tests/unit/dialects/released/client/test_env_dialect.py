"""A session with a released EnvService, frame by frame."""

import tracemalloc
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from gymnasium import spaces
from hypothesis import given
from hypothesis import strategies as st

from rlmesh_ray.dialects.released.client.env_dialect import ReleasedEnvClientDialect
from rlmesh_ray.dialects.released.wire import values
from rlmesh_ray.errors import CodecError
from rlmesh_ray.protocol.messages import EpisodeRecord, Infos, Reset, ResetDone, Step, StepDone
from rlmesh_ray.spaces.contract import AutoresetMode, EnvContract
from rlmesh_ray.spaces.gym_conversion import from_gymnasium
from rlmesh_ray.wire.rlmesh_v1.limits import max_request_bytes

OBSERVATION = from_gymnasium(
    spaces.Dict({"number": spaces.Box(0, 99, (1,), np.int64), "word": spaces.Text(9)})
)
ACTION = from_gymnasium(spaces.Discrete(9))


def contract(num_envs: int) -> EnvContract:
    return EnvContract("E", OBSERVATION, ACTION, num_envs, AutoresetMode.DISABLED)


class Session:
    """A client dialect, and an endpoint with scripted answers.

    Args:
        num_envs: Width.
    """

    def __init__(self, num_envs: int) -> None:
        self.dialect = ReleasedEnvClientDialect(contract(num_envs))
        self.width = num_envs
        self._count = 0

    def send_reset(self, lanes: Sequence[int] = (), seeds: Sequence[int] = ()) -> Reset:
        self._count += 1
        return self.dialect.reset(Reset(str(self._count), tuple(seeds), {}, 7, tuple(lanes)))

    def answer_reset(self, request: Reset, first: int = 0, infos: Infos | None = None) -> Any:
        count = len(request.env_indices) or self.width
        data = observations(range(first, first + count))
        return self.dialect.reset_result(ResetDone(request.request_id, data, infos or {}, ()))

    def reset(self, lanes: Sequence[int] = (), first: int = 0) -> Any:
        return self.answer_reset(self.send_reset(lanes), first)

    def send_step(self) -> Step:
        self._count += 1
        return self.dialect.step(str(self._count), [np.zeros(self.width, np.int64)], 7)

    def answer_step(
        self,
        request: Step,
        ended: Sequence[int] = (),
        completed: tuple[EpisodeRecord, ...] = (),
        first: int = 0,
        lanes: tuple[int, ...] = (),
    ) -> Any:
        flags = bytes(lane in ended for lane in range(self.width))
        return self.dialect.step_result(
            StepDone(
                request.request_id,
                observations(range(first, first + self.width)),
                [1.0] * self.width,
                flags,
                bytes(self.width),
                {},
                completed,
                (),
                lanes,
            )
        )

    def step(self, ended: Sequence[int] = (), completed: tuple[EpisodeRecord, ...] = ()) -> Any:
        return self.answer_step(self.send_step(), ended, completed)


def observations(numbers: Sequence[int]) -> bytes:
    column = np.array(numbers, np.int64)[:, np.newaxis]
    words = tuple(f"w{number}" for number in numbers)
    return values.encode_batch(OBSERVATION, [column, words], len(numbers))


def record(episode_id: str, lane: int) -> EpisodeRecord:
    return EpisodeRecord(episode_id, lane, 1, 1.0, True, False, 0, 1)


def numbers(result: Any) -> list[int]:
    column, words = result.observation
    assert words == tuple(f"w{number}" for number in column.ravel())
    reported: list[int] = column.ravel().tolist()
    return reported


def test_a_reset_that_cannot_be_sent_changes_no_episode() -> None:
    session = Session(2)
    session.reset()
    before = session.send_step().episode_ids

    with pytest.raises(CodecError, match="no wire form"):
        session.send_reset(seeds=(2**63, 0))
    for options in ({"a": np.zeros(2)}, {"a": {1}}):
        with pytest.raises(CodecError, match=r"options\['a'\]"):
            session.dialect.reset(Reset("9", (), options, 7))
    just_too_long = {"a": "x" * (max_request_bytes(contract(2)) - 60)}  # with the episodes' ids
    with pytest.raises(CodecError, match="the endpoint takes"):
        session.dialect.reset(Reset("9", (), just_too_long, 7))

    assert session.send_step().episode_ids == before


def test_every_reset_names_its_episodes() -> None:
    session = Session(2)

    first, second = session.send_reset(seeds=(3, 4)), session.send_reset()

    assert first.seeds == (3, 4)
    assert first.env_indices == ()
    assert len({*first.episode_ids, *second.episode_ids}) == 4
    assert session.answer_reset(first).episode_ids == first.episode_ids
    assert session.answer_reset(second).episode_ids == second.episode_ids


def test_a_partial_reset_is_reported_with_the_other_lanes_as_they_were() -> None:
    session = Session(3)
    session.reset(first=10)
    session.answer_step(session.send_step(), first=20)

    request = session.send_reset([2, 0])
    result = session.answer_reset(request, first=30)

    assert len(request.episode_ids) == 2
    assert numbers(result) == [31, 21, 30]
    assert result.episode_ids[2] == request.episode_ids[0]
    assert result.episode_ids[0] == request.episode_ids[1]


def test_what_a_caller_does_to_observations_is_not_sent_later() -> None:
    session = Session(2)
    session.reset(first=10)
    result = session.answer_step(session.send_step(), first=20)
    result.observation[0][...] = 99
    again = session.reset([0], first=30)
    again.observation[0][...] = 99

    assert numbers(session.reset([1], first=40)) == [30, 40]


def test_the_first_reset_may_be_a_partial_one() -> None:
    result = Session(2).reset([1], first=5)

    assert result.observation[0].ravel().tolist() == [0, 5]
    assert result.observation[1] == ("", "w5")
    assert result.episode_ids[0] == ""


def test_a_lane_has_no_episode_from_its_end_to_its_reset() -> None:
    session = Session(2)
    first = session.reset().episode_ids

    ended = session.step([1])
    later = session.step()
    again = session.reset([1])

    assert ended.episode_ids == later.episode_ids == (first[0], "")
    assert ended.terminated.tolist() == [False, True]
    assert again.episode_ids[0] == first[0]
    assert again.episode_ids[1] not in {"", *first}


def test_only_records_of_tracked_episodes_are_reported() -> None:
    session = Session(2)
    first = session.reset().episode_ids
    own = record(first[1], 1)

    ended = session.step([1], (record("stranger", 0), own))
    rolls = session.send_step()
    session.answer_step(rolls)
    autoreset = session.step([1], (record(rolls.episode_ids[1], 1), own))
    renewed = session.reset()
    cut_off = session.step([], (record(first[0], 0),))

    assert ended.completed_episodes == (own,)
    assert autoreset.completed_episodes == ()
    assert renewed.episode_ids == cut_off.episode_ids
    assert cut_off.completed_episodes == ()


def test_records_that_lie_are_not_reported() -> None:
    session = Session(2)
    first = session.reset().episode_ids
    runs_on, of_another_lane, own = record(first[0], 0), record(first[1], 0), record(first[1], 1)

    reported = session.step([1], (runs_on, of_another_lane, record("x", 2**32 - 1), own, own))

    assert reported.completed_episodes == (own,)


def test_a_step_names_what_an_autoreset_begins() -> None:
    session = Session(2)
    first = session.reset().episode_ids
    running = session.send_step()
    session.answer_step(running, [1])

    rolls, goes_on = session.send_step(), session.send_step()
    session.answer_step(rolls)
    session.answer_step(goes_on, [1])
    rolls_again = session.send_step()

    assert running.episode_ids == first
    assert rolls.episode_ids == goes_on.episode_ids
    assert rolls.episode_ids[0] == first[0]
    names = [first[1], rolls.episode_ids[1], rolls_again.episode_ids[1]]
    assert len(set(names)) == 3


def test_requests_may_be_under_way_while_answers_come() -> None:
    session = Session(2)
    session.reset()
    step = session.send_step()
    reset = session.send_reset([1])
    after = session.send_step()

    ended = session.answer_step(step, [1])
    later = session.send_step()
    restarted = session.answer_reset(reset, first=8)
    result = session.answer_step(after)

    assert later.episode_ids == after.episode_ids
    assert ended.episode_ids[1] == ""
    assert restarted.episode_ids[1] == reset.episode_ids[0] == after.episode_ids[1]
    assert result.episode_ids == restarted.episode_ids


def test_a_reset_that_fails_begins_nothing() -> None:
    session = Session(1)
    first = session.reset().episode_ids
    failed = session.send_reset()  # answered with an error, which the dialect does not handle

    assert session.step().episode_ids == first
    again = session.reset()
    assert again.episode_ids not in (first, failed.episode_ids)


def test_no_two_autoresets_begin_an_episode_of_one_name() -> None:
    session = Session(1)
    named = [*session.reset().episode_ids, *session.send_reset().episode_ids]  # the second fails

    for _ in range(3):
        session.step([0])
        rolls = session.send_step()
        session.answer_step(rolls)
        named += rolls.episode_ids

    assert len(set(named)) == 4, "only what a failed reset has named is named again"
    assert named[1] == named[2]


def test_names_are_unique() -> None:
    one, other = (Session(2).send_reset().episode_ids for _ in range(2))

    assert not {*one} & {*other}
    assert {len(name) for name in (*one, *other)} == {32}


def test_a_contract_of_many_lanes_costs_nothing_before_they_are_used() -> None:
    tracemalloc.start()
    try:
        ReleasedEnvClientDialect(contract(2**16))
        _, most = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()

    assert most < 2**14


def test_a_step_that_is_answered_for_other_lanes_breaks_the_protocol() -> None:
    session = Session(2)
    session.reset()

    assert session.answer_step(session.send_step(), lanes=(0, 1)).episode_ids
    with pytest.raises(CodecError, match="of lanes 1, 0 and not of all 2 in order"):
        session.answer_step(session.send_step(), lanes=(1, 0))


def test_an_answer_of_another_width_breaks_the_protocol() -> None:
    session = Session(2)
    session.reset()
    request = session.send_step()

    with pytest.raises(CodecError, match="1 rewards"):
        session.dialect.step_result(
            StepDone(request.request_id, observations([1, 2]), [1.0], b"\0\0", b"\0\0", {}, (), ())
        )
    with pytest.raises(CodecError):
        session.dialect.step_result(
            StepDone(request.request_id, b"", [1.0] * 2, b"\0\0", b"\0\0", {}, (), ())
        )


@given(st.lists(st.tuples(st.sets(st.integers(0, 2)), st.sets(st.integers(0, 2))), max_size=8))
def test_the_account_is_that_of_a_plain_reference(moves: list[tuple[set[int], set[int]]]) -> None:
    session = Session(3)
    expected = list(session.reset().episode_ids)

    for ended, restarted in moves:
        own = tuple(record(expected[lane] or "autoreset", lane) for lane in sorted(ended))
        result = session.step(sorted(ended), own)
        assert result.completed_episodes == tuple(
            each for each in own if each.episode_id in expected
        )
        expected = ["" if lane in ended else name for lane, name in enumerate(expected)]
        assert result.episode_ids == tuple(expected)
        if restarted:
            reported = session.reset(sorted(restarted)).episode_ids
            for lane in restarted:
                assert reported[lane] not in {"", *expected}
                expected[lane] = reported[lane]
            assert reported == tuple(expected)
