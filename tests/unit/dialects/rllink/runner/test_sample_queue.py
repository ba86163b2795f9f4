"""Between simulators and RLlib: who waits, what is dropped, what belongs together."""

import time
import weakref
from concurrent.futures import Future
from typing import Any

import gymnasium
import numpy as np
import pytest

from rlmesh_ray.dialects.rllink import wire as m
from rlmesh_ray.dialects.rllink.runner.client_session import (
    AskedEpisode,
    ChosenAction,
    SimulatorSession,
    action_transform_for,
)
from rlmesh_ray.dialects.rllink.runner.env_runner import EpisodeChain
from rlmesh_ray.dialects.rllink.runner.listen_plan import SampleSpaces
from rlmesh_ray.dialects.rllink.runner.sample_queue import (
    EpisodeProgress,
    ReceivedChunk,
    Rollout,
    SampleQueue,
    WeightsVersion,
)
from rlmesh_ray.errors import ConfigurationError, ConformanceError, RemoteProtocolError

SPACES = SampleSpaces(gymnasium.spaces.Box(-9, 9, (1,)), gymnasium.spaces.Discrete(3))
CONFIG = m.SetConfig(2, True)


class World:
    """An intake, and clients that talk to it."""

    def __init__(
        self, max_lag: int | None = 0, max_bytes: int = 2**20, max_steps: int = 99
    ) -> None:
        self.queue = SampleQueue(max_lag=max_lag, max_bytes=max_bytes, max_steps=max_steps)
        self.questions: list[AskedEpisode] = []
        self.chain = EpisodeChain(SPACES, None, self.queue.weights_of, lookback=1)

    def client(self) -> SimulatorSession:
        inference: Any = self
        return SimulatorSession(self.queue, SPACES, CONFIG, reported, inference)

    def submit(self, episode: AskedEpisode) -> None:
        self.questions.append(episode)

    def publish(self, seq_no: int) -> None:
        self.queue.publish(WeightsVersion(seq_no, {}, {}))

    def sample(self, num_steps: int, wait_s: float = 0.0) -> list[ReceivedChunk]:
        deadline_s = time.monotonic() + wait_s
        return self.queue.take(num_steps=num_steps, num_episodes=None, deadline_s=deadline_s)


def reported(weights: WeightsVersion) -> m.SetState:
    return m.SetState(weights.seq_no)


def chunk(first: int, num_steps: int = 2, **changed: Any) -> m.Chunk:
    return m.Chunk(
        np.arange(first, first + num_steps + 1, dtype=np.float64)[:, None],
        np.ones(num_steps, np.int64),
        np.ones(num_steps),
        changed.get("ends", False),
        changed.get("cut", False),
        changed.get("id"),
    )


def exchange(client: SimulatorSession, *chunks: m.Chunk, seq_no: int | None = None) -> Future[Any]:
    answer = client.receive(m.Episodes(chunks, True, seq_no))
    assert isinstance(answer, Future)
    return answer


# --- who waits ---------------------------------------------------------------------------


def test_weights_are_waited_for_until_there_are_any() -> None:
    world = World()
    answer = world.client().receive(m.GetState())
    assert isinstance(answer, Future)
    assert not answer.done()

    world.publish(7)

    reply = answer.result(0)
    assert isinstance(reply, m.SetState)
    assert reply.weights_seq_no == 7


def test_on_policy_a_client_waits_for_the_next_sample() -> None:
    world = World()
    client = world.client()
    world.publish(1)
    client.receive(m.GetState())

    answer = exchange(client, chunk(0))
    assert len(world.sample(2)) == 1
    assert not answer.done()
    world.publish(2)
    assert not answer.done()  # it would act now, without a request

    assert world.sample(2) == []
    assert answer.result(0).weights_seq_no == 2


def test_on_policy_a_client_goes_on_while_a_sample_lacks_steps_that_no_client_sends() -> None:
    world = World()
    world.publish(1)
    first, second = world.client(), world.client()
    for client in (first, second):
        client.receive(m.GetState())
    done = exchange(first, chunk(0))

    # Four: two are there, and the second client is about to bring two.
    assert len(world.sample(4)) == 1
    assert not done.done()

    # Six: that is not enough.
    again = exchange(second, chunk(0))
    world.sample(6)
    assert done.done()
    assert again.done()


def test_who_brings_steps_without_asking_is_not_waited_for_any_longer() -> None:
    world = World()
    world.publish(1)
    first, second = world.client(), world.client()
    for client in (first, second):
        client.receive(m.GetState())
    done = exchange(first, chunk(0))
    second.receive(m.Episodes((chunk(0, 1),), False))
    second.receive(m.Episodes((chunk(1, 1),), False))

    world.sample(5)

    assert done.done()


def test_who_asks_again_and_again_and_brings_nothing_is_not_counted_on() -> None:
    now_s = 0.0
    queue, rollout = SampleQueue(max_lag=0, max_bytes=99, clock=lambda: now_s), Rollout()
    queue.publish(WeightsVersion(1, {}, {}))
    with queue.lock:
        for _ in range(7):
            queue.begin_rollout(rollout, 50, 1)
            now_s += 1.0

        assert queue.num_expected == 0
        queue.end_rollout(rollout)
        queue.begin_rollout(rollout, 50, 1)
        assert queue.num_expected == 50
        queue.publish(WeightsVersion(2, {}, {}))
        assert queue.num_expected == 0


def test_nothing_is_kept_of_those_who_have_gone_while_they_waited() -> None:
    world = World()
    world.publish(1)
    gone, present = (exchange(world.client(), chunk(0)) for _ in range(2))
    gone.cancel()
    left = weakref.ref(gone)
    del gone

    world.publish(2)

    assert left() is None
    assert not present.done()


def test_all_that_a_chunk_holds_counts_as_waiting() -> None:
    outputs = {"action_logp": np.zeros(2, "f4")}
    pixels = m.Chunk(np.zeros((3, 1), "u1"), np.zeros(2, "i8"), np.zeros(2), True, False, "e",
                     outputs)  # fmt: skip
    for num_bytes, is_full in ((3 + 16 + 16 + 8, False), (3 + 16 + 16 + 8 - 1, True)):
        world = World(max_lag=None, max_bytes=num_bytes)
        world.publish(1)
        world.queue.add([EpisodeProgress().received(pixels, 1)])

        assert world.queue.is_full == is_full
        assert len(world.sample(1)) == 1
        assert not world.queue.is_full


def test_off_policy_no_client_waits() -> None:
    world = World(max_lag=None)
    world.publish(1)

    assert exchange(world.client(), chunk(0)).done()


def test_clients_wait_where_too_much_has_come() -> None:
    world = World(max_lag=None, max_bytes=10)
    world.publish(1)
    client = world.client()

    answer = exchange(client, chunk(0))
    silent = client.receive(m.Episodes((chunk(5),), False))
    assert not answer.done()
    assert isinstance(silent, Future)
    world.sample(4)

    assert answer.done()
    assert silent.result(0) is None


def test_off_policy_a_client_waits_when_it_is_far_ahead() -> None:
    world = World(max_lag=None, max_steps=4)
    world.publish(1)
    client = world.client()

    assert exchange(client, chunk(0)).done()
    answer = exchange(client, chunk(2))
    assert not answer.done()
    world.sample(1)

    assert answer.done()


def test_off_policy_a_sample_is_as_large_as_it_was_asked_for() -> None:
    world = World(max_lag=None)
    world.publish(1)
    client = world.client()
    exchange(client, chunk(0, 5, id="e"), chunk(5, 2, id="e", ends=True))

    samples = [world.chain.episodes(world.sample(3)) for _ in range(3)]

    assert [[len(each) for each in sample] for sample in samples] == [[3], [2, 1], [1]]
    whole, *others = [each for sample in samples for each in sample]
    for other in others:
        whole.concat_episode(other)
    assert whole.get_observations().ravel().tolist() == list(range(8))
    assert whole.is_terminated


def test_a_client_that_has_gone_is_not_answered() -> None:
    world = World()
    client = world.client()
    answer = client.receive(m.GetState())
    assert isinstance(answer, Future)
    answer.cancel()
    client.leave()

    world.publish(1)

    assert world.queue.num_clients == 0


def test_a_sample_returns_what_there_is_when_its_time_is_over() -> None:
    world = World()
    world.publish(1)
    exchange(world.client(), chunk(0), seq_no=1)

    begun_s = time.monotonic()
    assert len(world.sample(100, wait_s=0.1)) == 1

    assert 0.1 <= time.monotonic() - begun_s < 5


def test_whole_episodes_are_waited_for_where_they_are_asked_for() -> None:
    world = World()
    world.publish(1)
    client = world.client()
    exchange(client, chunk(0, ends=True), chunk(5, cut=True), chunk(9), seq_no=1)

    taken = world.queue.take(num_steps=None, num_episodes=2, deadline_s=time.monotonic() + 100)

    assert [each.chunk.is_done for each in taken] == [True, True, False]


def test_a_closed_intake_lets_go_of_all() -> None:
    world = World()
    answer = world.client().receive(m.GetState())

    world.queue.close()

    assert isinstance(answer, Future)
    assert answer.cancelled()
    assert world.sample(1, wait_s=100) == []


# --- what is dropped ---------------------------------------------------------------------


def seq_nos(received: list[ReceivedChunk]) -> list[int]:
    return [each.seq_no for each in received]


@pytest.mark.parametrize(
    ("max_lag", "kept", "num_stale"), [(0, [3], 6), (1, [2, 3], 4), (None, [1, 2, 3], 2)]
)
def test_steps_of_weights_that_are_too_old_or_unheard_of_are_counted_and_dropped(
    max_lag: int | None, kept: list[int], num_stale: int
) -> None:
    world = World(max_lag)
    for seq_no in (1, 2, 3):
        world.publish(seq_no)
    client = world.client()
    for seq_no in (1, 2, 3, 4):
        client.receive(m.Episodes((chunk(0),), False, seq_no))

    taken = world.sample(6)

    assert seq_nos(taken) == kept
    assert world.queue.take_counters().num_stale_steps == num_stale
    assert world.queue.take_counters().num_stale_steps == 0


def test_steps_of_a_version_that_was_left_out_are_counted_and_dropped() -> None:
    world = World(max_lag=5)
    for seq_no in (1, 4):
        world.publish(seq_no)
    client = world.client()

    for seq_no in (1, 2, 3, 4):
        client.receive(m.Episodes((chunk(0),), False, seq_no))

    assert seq_nos(world.sample(4)) == [1, 4]
    assert world.queue.take_counters().num_stale_steps == 4


def test_what_has_come_becomes_stale_with_new_weights() -> None:
    world = World()
    world.publish(1)
    world.client().receive(m.Episodes((chunk(0),), False, 1))

    world.publish(2)

    assert world.sample(2) == []
    assert world.queue.take_counters().num_stale_steps == 2


def test_who_does_not_say_is_taken_to_act_with_what_he_was_given_last() -> None:
    world = World()
    world.publish(1)
    knowing, ignorant = world.client(), world.client()
    knowing.receive(m.GetState())

    knowing.receive(m.Episodes((chunk(0),), False))
    ignorant.receive(m.Episodes((chunk(0),), False))

    assert seq_nos(world.sample(1)) == [1]
    assert world.queue.take_counters().num_stale_steps == 2


def test_samples_can_be_forgotten() -> None:
    world = World()
    world.publish(1)
    world.client().receive(m.Episodes((chunk(0),), False, 1))

    world.queue.take(num_steps=None, num_episodes=None, deadline_s=0.0)

    assert world.sample(1) == []


# --- what belongs together ---------------------------------------------------------------


def test_chunks_of_an_episode_are_one_episode_to_rllib() -> None:
    world = World()
    world.publish(1)
    client = world.client()
    for first, ends in ((0, False), (2, False), (4, True)):
        client.receive(m.Episodes((chunk(first, ends=ends, id="mine"),), False, 1))

    one, two, three = world.chain.episodes(world.sample(1))

    assert one.id_ == two.id_ == three.id_ != "mine"
    assert [each.t_started for each in (one, two, three)] == [0, 2, 4]
    assert [each.is_terminated for each in (one, two, three)] == [False, False, True]
    assert two.get_observations().ravel().tolist() == [2, 3, 4]
    assert two.get_observations(-1, neg_index_as_lookback=True).tolist() == [1]
    for each in (one, two, three):
        each.validate()
    one.concat_episode(two)
    one.concat_episode(three)
    assert one.get_return() == 6
    (finished,) = world.queue.take_counters().finished
    assert (finished.num_steps, finished.return_) == (6, 6.0)


def test_without_an_id_an_episode_goes_on_where_its_last_observation_comes_again() -> None:
    world = World()
    world.publish(1)
    client = world.client()
    client.receive(m.Episodes((chunk(0), chunk(100)), False, 1))
    client.receive(m.Episodes((chunk(2), chunk(102)), False, 1))
    client.receive(m.Episodes((chunk(104), chunk(4)), False, 1))
    client.receive(m.Episodes((chunk(7),), False, 1))

    a, b, a2, b2, b3, a3, other = world.chain.episodes(world.sample(1))

    assert a.id_ == a2.id_ == a3.id_ != b.id_ == b2.id_ == b3.id_
    assert other.t_started == 0
    assert world.queue.take_counters().num_abandoned == 2


def test_after_a_gap_it_is_another_episode() -> None:
    world = World()
    client = world.client()
    world.publish(1)
    client.receive(m.Episodes((chunk(0, id="e"),), False, 1))
    (before,) = world.chain.episodes(world.sample(1))
    world.publish(2)
    client.receive(m.Episodes((chunk(2, id="e"),), False, 1))
    client.receive(m.Episodes((chunk(4, id="e", ends=True),), False, 2))

    (after,) = world.chain.episodes(world.sample(1))

    assert after.id_ != before.id_
    assert after.t_started == 0
    (finished,) = world.queue.take_counters().finished
    assert finished.num_steps == 6


def test_an_id_that_begins_anew_has_given_up_the_episode_before() -> None:
    world = World()
    world.publish(1)
    client = world.client()
    for first in (0, 100):
        client.receive(m.Episodes((chunk(first, id="e"),), False, 1))

    one, other = world.chain.episodes(world.sample(1))

    assert one.id_ != other.id_
    assert world.queue.take_counters().num_abandoned == 1


def test_clients_with_the_same_ids_have_episodes_of_their_own() -> None:
    world = World()
    world.publish(1)
    first, second = world.client(), world.client()
    for client in (first, second, first, second):
        client.receive(m.Episodes((chunk(0, id="e"),), False, 1))
    for client in (first, second):
        client.receive(m.Episodes((chunk(2, id="e", ends=True),), False, 1))

    episodes = world.chain.episodes(world.sample(1))

    assert episodes[2].id_ == episodes[4].id_ != episodes[3].id_ == episodes[5].id_
    assert len(world.queue.take_counters().finished) == 2


def test_a_client_cannot_have_any_number_of_episodes() -> None:
    world = World(max_lag=None)
    client = world.client()

    with pytest.raises(RemoteProtocolError, match="more than 1024 episodes"):
        client.receive(m.Episodes(tuple(chunk(0, id=str(n)) for n in range(1025)), False))


# --- one action after another ------------------------------------------------------------


def decide(world: World, seq_no: int, action: int = 1) -> None:
    question = world.questions.pop()
    with world.queue.lock:
        question.choose(ChosenAction(np.array(action), {"action_logp": np.array(-1.0)}, seq_no))


def ask(client: SimulatorSession, obs: float, reward: float = 0.0) -> None:
    client.receive(m.GetAction("e", np.array([obs]), reward))


def test_an_episode_is_put_together_from_questions() -> None:
    world = World()
    world.publish(1)
    client = world.client()
    client.receive(m.StartEpisode("e"))
    ask(client, 0)
    decide(world, 1, action=2)
    client.receive(m.LogReturns("e", 0.5))
    ask(client, 1, reward=1.0)
    decide(world, 1, action=0)
    client.receive(m.EndEpisode("e", np.array([2.0]), 3.0, True))

    (received,) = world.sample(1)

    assert received.chunk.obs.ravel().tolist() == [0, 1, 2]
    assert received.chunk.actions.tolist() == [2, 0]
    assert received.chunk.rewards.tolist() == [1.5, 3.0]
    assert received.chunk.model_outputs["action_logp"].tolist() == [-1.0, -1.0]
    assert received.chunk.is_truncated
    (finished,) = world.queue.take_counters().finished
    assert (finished.num_steps, finished.return_) == (2, 4.5)


def test_steps_count_before_their_episode_ends() -> None:
    world = World()
    world.publish(1)
    client = world.client()
    client.receive(m.StartEpisode("e"))
    for number in range(3):
        ask(client, number, reward=1.0)
        decide(world, 1)

    first = world.sample(2)
    ask(client, 3)

    assert [len(each.chunk) for each in first] == [2]
    (second,) = world.sample(1)
    assert (second.first_step, second.chunk.obs.ravel().tolist()) == (2, [2, 3])


def test_a_step_that_old_weights_have_begun_is_stale() -> None:
    world = World()
    world.publish(1)
    client = world.client()
    client.receive(m.StartEpisode("e"))
    ask(client, 0)
    decide(world, 1)
    world.publish(2)
    ask(client, 1)
    decide(world, 2)
    ask(client, 2)

    taken = world.sample(1)

    assert [(each.seq_no, each.first_step, len(each.chunk)) for each in taken] == [(2, 1, 1)]
    assert world.queue.take_counters().num_stale_steps == 1


def test_a_client_that_goes_leaves_what_it_has_done() -> None:
    world = World()
    world.publish(1)
    client = world.client()
    client.receive(m.StartEpisode("e"))
    ask(client, 0)
    decide(world, 1)
    ask(client, 1)

    client.leave()

    assert [len(each.chunk) for each in world.sample(1)] == [1]
    assert world.queue.take_counters().num_abandoned == 1


def test_an_action_for_an_episode_that_has_gone_meanwhile_is_nobodys() -> None:
    world = World()
    world.publish(1)
    client = world.client()
    client.receive(m.StartEpisode("e"))
    ask(client, 0)
    client.leave()

    decide(world, 1)

    assert world.queue.num_expected == 0
    assert world.sample(1) == []


def test_questions_need_an_episode_that_is_running() -> None:
    client = World().client()

    for request in (
        m.GetAction("e", np.zeros(1)),
        m.LogReturns("e", 1.0),
        m.EndEpisode("e", np.zeros(1)),
    ):
        with pytest.raises(RemoteProtocolError, match="START_EPISODE"):
            client.receive(request)
    client.receive(m.StartEpisode("e"))
    with pytest.raises(RemoteProtocolError, match="running already"):
        client.receive(m.StartEpisode("e"))
    named = client.receive(m.StartEpisode())
    assert isinstance(named, m.EpisodeStarted)
    assert named.episode_id


# --- spaces ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "wrong",
    [
        m.Chunk(np.zeros((2, 2)), np.array([1]), np.ones(1), False, False),
        m.Chunk(np.full((2, 1), np.nan), np.array([1]), np.ones(1), False, False),
        m.Chunk(np.full((2, 1), 1e300), np.array([1]), np.ones(1), False, False),
        m.Chunk(np.zeros((2, 1)), np.array([3]), np.ones(1), False, False),
        m.Chunk(np.zeros((2, 1)), np.array([-1]), np.ones(1), False, False),
        m.Chunk(np.zeros((2, 1)), np.array([0.5]), np.ones(1), False, False),
        m.Chunk(np.zeros((2, 1)), np.array([[1]]), np.ones(1), False, False),
        m.Chunk(np.zeros((2, 1)), np.array([1]), np.full(1, 1e300), False, False),
        m.Chunk(
            np.zeros((2, 1)), np.array([1]), np.ones(1), False, False, None,
            {"action_dist_inputs": np.zeros((1, 2)), "action_logp": np.zeros(1)},
        ),
        m.Chunk(
            np.zeros((2, 1)), np.array([1]), np.ones(1), False, False, None,
            {"action_dist_inputs": np.zeros((1, 3)), "action_logp": np.array([np.inf])},
        ),
    ],
)  # fmt: skip
def test_what_does_not_fit_the_spaces_never_reaches_the_learner(wrong: m.Chunk) -> None:
    world = World(max_lag=None)
    world.publish(1)

    with pytest.raises(ConformanceError):
        world.client().receive(m.Episodes((chunk(0), wrong), False))

    assert world.sample(1) == []


def test_a_reward_that_no_learner_can_hold_is_refused_in_single_steps_too() -> None:
    client = World().client()
    client.receive(m.StartEpisode("e"))

    for request in (
        m.LogReturns("e", 1e300),
        m.GetAction("e", np.zeros(1), -1e300),
        m.EndEpisode("e", np.zeros(1), 1e300),
    ):
        with pytest.raises(ConformanceError, match="reward"):
            client.receive(request)


def test_what_fits_gets_the_dtypes_of_the_spaces() -> None:
    spaces = SampleSpaces(
        gymnasium.spaces.Box(0, 255, (2,), np.uint8), gymnasium.spaces.Box(-1, 1, (1,))
    )

    fitting = spaces.conformed(
        m.Chunk(np.ones((2, 2)), np.array([[3]]), np.ones(1), True, False, None,
                {"action_logp": np.zeros(1)})
    )  # fmt: skip

    assert (fitting.obs.dtype.name, fitting.actions.dtype.name) == ("uint8", "float32")
    assert fitting.actions.tolist() == [[3.0]]  # as drawn, before it is scaled
    assert fitting.model_outputs == {}  # half of it is of no use
    with pytest.raises(ConformanceError, match="uint8"):
        spaces.conformed(m.Chunk(np.full((2, 2), 256), np.array([[3]]), np.ones(1), True, False))


@pytest.mark.parametrize("sent", [(2,), (2, 1)])
def test_actions_without_an_axis_get_the_one_that_learners_need(sent: tuple[int, ...]) -> None:
    number = gymnasium.spaces.Box(-2, 2, ())
    spaces = SampleSpaces(gymnasium.spaces.Box(-9, 9, (1,)), number)

    conformed = spaces.conformed(
        m.Chunk(np.ones((3, 1)), np.ones(sent), np.ones(2), is_terminated=True, is_truncated=False)
    )

    assert conformed.actions.shape == (2, 1)
    fit = action_transform_for(number, normalize=True, clip=False)
    assert fit(np.array([0.5], np.float32)).tolist() == 1.0


@pytest.mark.parametrize(
    ("observation", "action"),
    [
        (gymnasium.spaces.Discrete(3), gymnasium.spaces.Discrete(3)),
        (gymnasium.spaces.Box(0, 1), gymnasium.spaces.Discrete(3, start=1)),
        (gymnasium.spaces.Box(0, 1), gymnasium.spaces.MultiBinary(2)),
        (None, None),
    ],
)
def test_other_spaces_are_refused(observation: Any, action: Any) -> None:
    with pytest.raises(ConfigurationError, match="cannot come over RLlink"):
        SampleSpaces(observation, action)
