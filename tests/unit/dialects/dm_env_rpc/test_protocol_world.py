"""Sequences of agents, and when lanes are reset and stepped."""

from collections.abc import Sequence

import pytest

from rlmesh_ray.dialects.dm_env_rpc.protocol import (
    AgentStepReply,
    Code,
    Reply,
    ResetLanes,
    SequencePhase,
    SequenceState,
    StepLanes,
    Work,
    WorkDone,
    World,
    WorldError,
)

RUNNING, TERMINATED, INTERRUPTED = SequenceState
CRASH = WorldError(Code.INTERNAL, "it is gone", is_lost=True)


class Play:
    """A world whose environment answers at once; frames are numbered."""

    def __init__(
        self, slot_lanes: Sequence[int] = (0,), *, resets_itself: bool = False, quorum: int = 1
    ) -> None:
        self.world = World(slot_lanes, resets_itself=resets_itself, quorum=quorum)
        self.num_lanes = max(slot_lanes) + 1
        self.works: list[Work] = []
        self.num_frames = 0

    def join(self, *slots: int) -> "Play":
        for slot in slots:
            self.world.take(slot)
        return self

    def run(self, *over: int, as_state: SequenceState = TERMINATED) -> dict[int, Reply]:
        """Do all work, ending lanes ``over`` in the next step; return the answers."""
        replies: dict[int, Reply] = {}
        while (work := self.world.next_work()) is not None:
            self.works.append(work)
            self.num_frames += 1
            if isinstance(work, ResetLanes):
                self.world.complete(WorkDone(self.num_frames, {}, ()))
            else:
                states = {slot: as_state if slot in over else RUNNING for slot in work.actions}
                ended = [lane in over for lane in range(self.num_lanes)]
                self.world.complete(WorkDone(self.num_frames, states, ended))
            replies |= dict(self.world.replies())
        return replies | dict(self.world.replies())

    def step(self, *slots: int, over: Sequence[int] = ()) -> dict[int, Reply]:
        for slot in slots:
            self.world.step(slot, f"action of {slot}")
        return self.run(*over)


def state_of(reply: Reply) -> SequenceState:
    assert isinstance(reply, AgentStepReply)
    return reply.state


def test_the_first_step_resets_and_ignores_its_action() -> None:
    play = Play().join(0)

    reply = play.step(0)[0]

    assert play.works == [ResetLanes((), None)]
    assert reply == AgentStepReply(RUNNING, 1, is_acted=False)


def test_the_second_step_acts() -> None:
    play = Play().join(0)
    play.step(0)

    reply = play.step(0)[0]

    assert play.works[-1] == StepLanes({0: "action of 0"})
    assert reply == AgentStepReply(RUNNING, 2, is_acted=True)


def test_after_the_end_the_next_step_begins_the_next_sequence() -> None:
    play = Play().join(0)
    play.step(0)

    states = [state_of(play.step(0, over=over)[0]) for over in ([0], [], [])]

    assert states == [TERMINATED, RUNNING, RUNNING]
    assert play.works[2] == ResetLanes((0,), None)


def test_a_truncated_sequence_is_interrupted() -> None:
    play = Play().join(0)
    play.step(0)
    play.world.step(0, None)

    reply = play.run(0, as_state=INTERRUPTED)[0]

    assert state_of(reply) is INTERRUPTED
    assert play.world.phase(0) is SequencePhase.BETWEEN


def test_a_reset_between_sequences_changes_nothing() -> None:
    play = Play().join(0)

    play.world.reset(0)
    play.world.reset(0)
    play.step(0)

    assert play.works == [ResetLanes((), None)]


def test_a_reset_ends_the_own_sequence_only() -> None:
    play = Play((0, 1), resets_itself=True).join(0, 1)
    play.step(0, 1)

    play.world.reset(0)
    replies = play.step(0)
    assert state_of(replies[0]) is RUNNING
    assert play.works[-1] == ResetLanes((0,), None)
    assert play.world.phase(1) is SequencePhase.RUNNING


def test_an_order_is_for_the_next_episode_of_its_lane_and_for_once() -> None:
    play = Play((0, 1), resets_itself=True).join(0, 1)
    play.step(0, 1)
    play.world.reset_options(1, "seed 5")

    play.step(0, 1, over=[1])
    play.step(1)
    assert play.works[-1] == ResetLanes((1,), "seed 5")

    play.step(0, 1, over=[1])
    play.step(1)
    assert play.works[-1] == ResetLanes((1,), None)


def test_the_first_reset_has_the_order_of_the_world_and_is_of_all_lanes() -> None:
    play = Play((0, 1), resets_itself=True).join(0, 1)
    play.world.restart("seed 7")

    play.step(0, 1)

    assert play.works == [ResetLanes((), "seed 7")]


def test_lanes_step_when_all_that_run_have_stepped() -> None:
    play = Play((0, 1), resets_itself=True).join(0, 1)
    play.step(0, 1)

    assert play.step(0) == {}
    assert set(play.step(1)) == {0, 1}
    assert play.works[-1] == StepLanes({0: "action of 0", 1: "action of 1"})


def test_a_lane_between_sequences_delays_no_other_lane() -> None:
    play = Play((0, 1), resets_itself=True).join(0, 1)
    play.step(0, 1)
    play.step(0, 1, over=[1])

    assert set(play.step(0)) == {0}


def test_an_episode_that_a_lane_has_begun_by_itself_is_taken_over() -> None:
    play = Play((0, 1), resets_itself=True).join(0, 1)
    play.step(0, 1)
    play.step(0, 1, over=[1])
    play.step(0)
    num_works = len(play.works)

    reply = play.step(1)[1]

    assert reply == AgentStepReply(RUNNING, play.num_frames, is_acted=False)
    assert len(play.works) == num_works


def test_an_episode_that_has_gone_on_without_its_agent_is_not_taken_over() -> None:
    play = Play((0, 1), resets_itself=True).join(0, 1)
    play.step(0, 1)
    play.step(0, 1, over=[1])
    play.step(0)
    play.step(0)

    play.step(1)

    assert play.works[-1] == ResetLanes((1,), None)


def test_lanes_that_do_not_reset_themselves_are_reset_before_others_step() -> None:
    play = Play((0, 1)).join(0, 1)
    play.step(0, 1)
    play.step(0, 1, over=[1])

    play.step(0)

    assert play.works[-2:] == [ResetLanes((1,), None), StepLanes({0: "action of 0"})]
    # It has been stepped since.
    play.step(1)
    assert play.works[-1] == ResetLanes((1,), None)


def test_who_leaves_is_waited_for_no_longer() -> None:
    play = Play((0, 1), resets_itself=True).join(0, 1)
    play.step(0, 1)
    play.step(0)

    play.world.leave(1)

    assert set(play.run()) == {0}


def test_who_leaves_while_the_lanes_step_gets_no_answer_and_neither_does_the_next() -> None:
    play = Play((0, 1), resets_itself=True).join(0, 1)
    play.step(0, 1)
    play.world.step(0, "a")
    play.world.step(1, "b")
    assert play.world.next_work() is not None

    play.world.leave(1)
    play.world.take(1)
    play.world.step(1, "c")
    play.world.complete(WorkDone(9, {0: RUNNING, 1: RUNNING}, [False, False]))

    assert dict(play.world.replies()) == {0: AgentStepReply(RUNNING, 9, is_acted=True)}
    assert state_of(play.run()[1]) is RUNNING
    assert play.works[-1] == ResetLanes((1,), None)


def test_an_order_leaves_with_the_last_agent_of_its_lane() -> None:
    play = Play().join(0)
    play.step(0)
    play.world.reset(0)
    play.world.reset_options(0, "seed 5")

    play.world.leave(0)
    play.join(0).step(0)

    assert play.works[-1] == ResetLanes((0,), None)


def test_agents_of_a_lane_begin_together() -> None:
    play = Play((0, 0)).join(0, 1)

    assert play.step(0) == {}
    replies = play.step(1)

    assert replies == {slot: AgentStepReply(RUNNING, 1, is_acted=False) for slot in (0, 1)}


def test_who_is_out_waits_until_the_others_are() -> None:
    play = Play((0, 0)).join(0, 1)
    play.step(0, 1)
    for slot in (0, 1):
        play.world.step(slot, None)
    # Agent 1 is out, the lane goes on.
    work = play.world.next_work()
    assert isinstance(work, StepLanes)
    play.world.complete(WorkDone(2, {0: RUNNING, 1: TERMINATED}, [False]))
    assert {slot: state_of(reply) for slot, reply in play.world.replies()} == {
        0: RUNNING,
        1: TERMINATED,
    }

    assert play.step(1) == {}
    assert set(play.step(0)) == {0}
    assert play.works[-1] == StepLanes({0: "action of 0"})
    assert set(play.step(0, over=[0])) == {0}
    assert set(play.step(0)) == {0, 1}


def test_no_sequence_begins_before_enough_have_joined() -> None:
    play = Play((0, 0), quorum=2).join(0)

    assert play.step(0) == {}
    play.join(1)
    assert set(play.step(1)) == {0, 1}


def test_a_world_reset_tells_those_who_run_once_and_its_caller_not_at_all() -> None:
    play = Play((0, 1), resets_itself=True).join(0, 1)
    play.step(0, 1)
    play.step(1)

    play.world.restart("seed 3")
    cut = play.world.reset_world(0)

    assert dict(play.world.replies()) == {1: AgentStepReply(INTERRUPTED, 1, is_acted=False)}
    assert not play.world.is_any_cut(cut)
    assert state_of(play.step(0)[0]) is RUNNING
    assert play.works[-1] == ResetLanes((), "seed 3")
    assert state_of(play.step(1)[1]) is RUNNING


def test_a_world_reset_waits_for_agents_that_have_not_stepped() -> None:
    play = Play((0, 1), resets_itself=True).join(0, 1)
    play.step(0, 1)

    cut = play.world.reset_world(None)

    assert cut == {0, 1}
    assert play.world.is_any_cut(cut)
    assert state_of(play.step(0)[0]) is INTERRUPTED
    assert play.world.is_any_cut(cut)
    play.world.leave(1)
    assert not play.world.is_any_cut(cut)


def test_agents_between_sequences_get_no_notice_of_a_world_reset() -> None:
    play = Play((0, 1), resets_itself=True).join(0, 1)

    assert not play.world.reset_world(0)

    assert state_of(play.step(1)[1]) is RUNNING


@pytest.mark.parametrize("how", ["reset", "reset_world"])
def test_two_world_resets_do_not_wait_for_each_other(how: str) -> None:
    play = Play((0, 1), resets_itself=True).join(0, 1)
    play.step(0, 1)

    first = play.world.reset_world(0)
    assert play.world.is_any_cut(first)
    if how == "reset_world":
        assert not play.world.reset_world(1)
    else:
        play.world.reset(1)

    assert not play.world.is_any_cut(first)


def test_a_world_reset_during_a_step_interrupts_with_what_comes_of_it() -> None:
    play = Play((0, 1), resets_itself=True).join(0)
    play.step(0)
    play.world.step(0, "a")
    assert play.world.next_work() is not None

    play.world.restart(None)
    cut = play.world.reset_world(None)
    assert play.world.replies() == []
    play.world.complete(WorkDone(5, {0: RUNNING}, [False, False]))

    assert dict(play.world.replies()) == {0: AgentStepReply(INTERRUPTED, 5, is_acted=True)}
    assert not play.world.is_any_cut(cut)
    play.step(0)
    assert play.works[-1] == ResetLanes((), None)


def test_a_world_reset_during_a_reset_begins_with_the_later_order() -> None:
    play = Play().join(0)
    play.world.restart("seed 1")
    play.world.step(0, None)
    assert play.world.next_work() == ResetLanes((), "seed 1")

    play.world.restart("seed 2")
    play.world.reset_world(None)
    play.world.complete(WorkDone("old", {}, ()))

    assert play.world.next_work() == ResetLanes((), "seed 2")
    play.world.complete(WorkDone("new", {}, ()))
    assert play.run() == {0: AgentStepReply(RUNNING, "new", is_acted=False)}


def test_a_failed_step_refuses_and_then_interrupts() -> None:
    play = Play((0, 1), resets_itself=True).join(0, 1)
    play.step(0, 1)
    for slot in (0, 1):
        play.world.step(slot, None)
    assert play.world.next_work() is not None

    play.world.complete(CRASH)

    assert dict(play.world.replies()) == {0: CRASH, 1: CRASH}
    assert play.step(0) == {0: AgentStepReply(INTERRUPTED, 1, is_acted=False)}
    assert state_of(play.step(0)[0]) is RUNNING
    assert play.works[-1] == ResetLanes((), None)


def test_a_refused_step_changes_nothing() -> None:
    play = Play().join(0)
    play.step(0)
    play.world.step(0, None)
    assert play.world.next_work() is not None

    play.world.complete(WorldError(Code.INVALID_ARGUMENT, "odd"))

    assert [type(reply) for _, reply in play.world.replies()] == [WorldError]
    assert play.step(0) == {0: AgentStepReply(RUNNING, 2, is_acted=True)}


def test_a_failed_reset_refuses_those_who_wanted_it_and_cuts_the_others() -> None:
    play = Play((0, 1), resets_itself=True).join(0, 1)
    play.step(0, 1)
    play.world.reset(1)
    play.world.reset_options(1, "seed 5")
    play.world.step(1, None)
    assert play.world.next_work() == ResetLanes((1,), "seed 5")

    play.world.complete(CRASH)

    assert dict(play.world.replies()) == {1: CRASH}
    assert state_of(play.step(0)[0]) is INTERRUPTED
    play.step(1)
    # What was asked for is not forgotten: all lanes, then this one with its seed.
    assert play.works[-2:] == [ResetLanes((), None), ResetLanes((1,), "seed 5")]


def test_unwelcome_autoresets_are_not_taken_over() -> None:
    play = Play((0, 1), resets_itself=True).join(0, 1)
    play.world.restart(None, is_autoreset_welcome=False)
    play.step(0, 1)
    play.step(0, 1, over=[1])
    play.step(0)

    play.step(1)

    assert play.works[-1] == ResetLanes((1,), None)


def test_an_answer_for_who_has_left_does_not_reach_who_comes_next() -> None:
    play = Play((0, 1), quorum=2).join(0, 1)
    play.step(0, 1)
    play.world.leave(1)
    play.world.step(0, None)
    assert play.world.next_work() is not None
    play.world.complete(CRASH)

    play.world.leave(0)
    play.join(0)

    assert play.step(0) == {}


def test_work_that_is_given_up_is_not_held_against_who_has_come_meanwhile() -> None:
    play = Play((0, 1), resets_itself=True).join(0)
    play.step(0)
    play.world.step(0, None)
    assert play.world.next_work() == StepLanes({0: None})
    play.join(1)
    play.world.step(1, None)

    play.world.abandon_work()
    play.world.leave(0)

    assert {slot: state_of(reply) for slot, reply in play.run().items()} == {1: RUNNING}
    assert play.works[-1] == ResetLanes((), None)


def test_work_is_in_vain_when_all_who_wanted_it_have_left() -> None:
    play = Play((0, 1), resets_itself=True).join(0, 1)
    assert not play.world.is_work_unneeded
    play.world.step(0, None)
    assert play.world.next_work() == ResetLanes((), None)
    assert not play.world.is_work_unneeded
    play.world.leave(0)
    assert play.world.is_work_unneeded
    play.world.complete(WorkDone(1, {}, ()))

    play.join(0).step(0, 1)
    for slot in (0, 1):
        play.world.step(slot, None)
    assert play.world.next_work() == StepLanes({0: None, 1: None})
    play.world.leave(0)
    play.join(0)
    play.world.step(0, None)
    assert not play.world.is_work_unneeded
    play.world.leave(1)
    assert play.world.is_work_unneeded
