"""An endpoint of an environment under raw clients of generation rlmesh-wire-v1."""

import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import psutil
import pytest
from gymnasium import spaces

from rlmesh_ray import EnvServer, RemoteVectorEnv
from rlmesh_ray.dialects.released.wire import env as wire
from rlmesh_ray.dialects.released.wire import values
from rlmesh_ray.protocol.capabilities import EDITION_NAME
from rlmesh_ray.protocol.messages import (
    Close,
    Closed,
    Configure,
    Configured,
    EnvFailed,
    EnvRequest,
    EpisodeRecord,
    Render,
    Rendered,
    Reset,
    ResetDone,
    Step,
    StepDone,
)
from rlmesh_ray.spaces.contract import EnvContract
from rlmesh_ray.wire._pb.rlmesh_wire.env.v1 import interaction_pb2 as pb
from tests.loopback.eventually import eventually
from tests.loopback.released_join import LONG_MS, ReleasedJoin, shake_hands

GO, RAISE, DIE, END, STRAY, NAN, ODD_INFO, WAIT, OUTSIDE = range(9)
DEADLINE_MS = 100
PNG_BEGINS = b"\x89PNG"


class Moody(gymnasium.Env[Any, Any]):
    """Shows how many steps its episode has, from its seed on; does what its action says."""

    metadata = {"render_modes": ["rgb_array"]}  # noqa: RUF012  # as gymnasium has it
    observation_space = spaces.Box(0, 100, (1,), np.float32)
    action_space = spaces.Discrete(OUTSIDE)
    render_mode = "rgb_array"

    def __init__(self, gate: str = "") -> None:
        self._gate = gate
        self._shown = 0.0

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        super().reset(seed=seed)
        self._shown = float(seed or 0)
        return self._observation(), {"pid": os.getpid()}

    def step(self, action: Any) -> Any:
        self._shown += 1.0
        info: dict[str, Any] = {"shown": int(self._shown)}
        match int(action):
            case 1:
                raise ValueError("no mood for it")
            case 2:
                os.kill(os.getpid(), signal.SIGKILL)
            case 4:
                return np.array([200.0], np.float32), 1.0, False, False, info
            case 5:
                return np.array([np.nan], np.float32), 1.0, False, False, info
            case 6:
                info |= {"large": 2**70, "set": {1}, "thing": object(), "list": [1, {2}]}
            case 7:
                Path(self._gate).read_text()
        return self._observation(), 1.0, bool(action == END), False, info

    def render(self) -> Any:
        return np.full((2, 2, 3), self._shown, np.uint8)

    def _observation(self) -> Any:
        return np.array([self._shown], np.float32)


@pytest.fixture(scope="module")
def single() -> Iterator[EnvServer]:
    with EnvServer(Moody) as server:
        yield server


@pytest.fixture(scope="module")
def vector() -> Iterator[EnvServer]:
    with EnvServer(Moody, num_envs=2) as server:
        yield server


@pytest.fixture(scope="module")
def lanes() -> Iterator[EnvServer]:
    with EnvServer(Moody, num_envs=3, autoreset="disabled") as server:
        yield server


def contract_of(server: EnvServer) -> EnvContract:
    assert server.contract is not None
    return server.contract


def actions(server: EnvServer, *each: int) -> bytes:
    column = np.array(each, np.int64)
    return values.encode_batch(contract_of(server).action_space, [column], len(each))


def shown(server: EnvServer, done: ResetDone | StepDone, width: int) -> list[float]:
    space = contract_of(server).observation_space
    (column,) = values.decode_batch(space, done.observation, width)
    assert isinstance(column, np.ndarray)
    return [float(number) for number in column[:, 0]]


def outline(records: tuple[EpisodeRecord, ...]) -> list[tuple[str, int, int, float, bool, bool]]:
    return [
        (
            record.episode_id,
            record.env_index,
            record.step_count,
            record.cumulative_reward,
            record.terminated,
            record.truncated,
        )
        for record in records
    ]


def test_a_session_runs_from_configure_to_close(single: EnvServer) -> None:
    with ReleasedJoin(single.address, configure=False) as session:
        configured = session.ask(Configure("grpc-req-0", EDITION_NAME))
        fresh = session.reset(7, ids=("e1",))
        moved = session.step(actions(single, GO), ids=("e1",))
        ended = session.step(actions(single, END), ids=("e1",))
        again = session.reset(ids=("e2",))
        closed = session.ask(Close("c", "client close"))

        assert session.receive() is None

    assert isinstance(configured, Configured)
    assert shown(single, fresh, 1) + shown(single, moved, 1) == [7.0, 8.0]
    assert (list(moved.rewards), moved.terminated, moved.truncated) == ([1.0], b"\0", b"\0")
    assert ended.terminated == b"\1"
    (record,) = ended.completed_episodes
    assert outline(ended.completed_episodes) == [("e1", 0, 2, 2.0, True, False)]
    assert (record.seed, record.final_info) == (7, {"shown": 9})
    assert isinstance(again, ResetDone)
    assert isinstance(closed, Closed)
    assert outline(closed.final_episodes) == [("e2", 0, 0, 0.0, False, True)]


def test_infos_of_one_lane_are_its_own_and_those_of_several_are_a_vectors(
    single: EnvServer, lanes: EnvServer
) -> None:
    with ReleasedJoin(single.address) as alone, ReleasedJoin(lanes.address) as together:
        alone.reset()
        together.reset()

        one = alone.step(actions(single, GO)).infos
        all_three = together.step(actions(lanes, GO, GO, GO)).infos
        second = together.step(actions(lanes, GO), lanes=(1,)).infos
        two = together.step(actions(lanes, GO, GO), lanes=(2, 1)).infos

    assert one == {"shown": 1}
    assert all_three == {"shown": [1, 1, 1], "_shown": [True, True, True]}
    assert second == {"shown": 2}
    assert two == {"shown": [2, 3], "_shown": [True, True]}


def test_one_seed_counts_up_over_the_lanes_of_a_vector(vector: EnvServer) -> None:
    with ReleasedJoin(vector.address) as session:
        fresh = session.reset(5)
        closed = session.ask(Close("c"))

    assert shown(vector, fresh, 2) == [5.0, 6.0]
    assert [record.seed for record in closed.final_episodes] == [5, 6]


def test_what_an_autoreset_begins_is_an_episode_with_the_id_that_the_step_names(
    vector: EnvServer,
) -> None:
    with ReleasedJoin(vector.address) as session:
        session.reset(5, ids=("a0", "a1"))
        session.step(actions(vector, END, GO), ids=("a0", "a1"))
        rolled = session.step(actions(vector, GO, GO), ids=("b0", "a1"))
        session.step(actions(vector, GO, GO), ids=("b0", "a1"))
        closed = session.ask(Close("c"))

    assert shown(vector, rolled, 2) == [0.0, 8.0]
    assert list(rolled.rewards) == [0.0, 1.0]
    assert outline(closed.final_episodes) == [
        ("b0", 0, 1, 1.0, False, True),
        ("a1", 1, 3, 3.0, False, True),
    ]


def test_lanes_that_do_not_reset_themselves_go_each_its_own_way(lanes: EnvServer) -> None:
    with ReleasedJoin(lanes.address) as session:
        first = session.reset(40, lanes=(1,), ids=("b",))
        others = session.reset(10, 20, lanes=(2, 0), ids=("c", "a"))
        # All at once, as rlmesh's native loop does it.
        session.send(
            Step("s2", actions(lanes, GO), LONG_MS, (2,), ("c",)),
            Step("s0", actions(lanes, END), LONG_MS, (0,), ("a",)),
            Reset("r1", (50,), {}, LONG_MS, (1,), ("b2",)),
            Step("s1", actions(lanes, GO), LONG_MS, (1,), ("b2",)),
        )
        stepped, ended, reset, replaced = (session.receive() for _ in range(4))
        everyone = session.step(actions(lanes, GO, GO, GO))

    assert shown(lanes, first, 1) == [40.0]
    assert shown(lanes, others, 2) == [10.0, 20.0]
    assert isinstance(stepped, StepDone)
    assert (stepped.request_id, stepped.env_indices) == ("s2", (2,))
    assert (shown(lanes, stepped, 1), list(stepped.rewards)) == ([11.0], [1.0])
    assert isinstance(ended, StepDone)
    assert (ended.terminated, ended.truncated) == (b"\1", b"\0")
    assert outline(ended.completed_episodes) == [("a", 0, 1, 1.0, True, False)]
    assert isinstance(reset, ResetDone)
    assert shown(lanes, reset, 1) == [50.0]
    assert isinstance(replaced, StepDone)
    assert outline(replaced.completed_episodes) == [("b", 1, 0, 0.0, False, True)]
    assert shown(lanes, everyone, 3) == [22.0, 52.0, 12.0]


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_a_vector_that_resets_itself_is_stepped_as_a_whole(
    vector: EnvServer, order: tuple[int, ...]
) -> None:
    with ReleasedJoin(vector.address) as session:
        session.reset(1, 2)

        whole = session.step(actions(vector, GO, GO), lanes=order)
        part = session.step(actions(vector, GO), lanes=(0,))
        after = session.step(actions(vector, GO, GO))

    # In their own order all lanes are what a step without indices steps.
    assert isinstance(whole, StepDone if order == (0, 1) else EnvFailed)
    assert isinstance(part, EnvFailed)
    assert (part.code.name, part.is_recoverable) == ("UNSUPPORTED", True)
    assert isinstance(after, StepDone)


def test_a_bad_action_costs_nothing(single: EnvServer) -> None:
    with ReleasedJoin(single.address) as session:
        session.reset()
        refusals = [
            session.step(data)
            for data in (actions(single, OUTSIDE), b"", b"\x0a\x03abc", actions(single, GO) * 2)
        ]
        done = session.step(actions(single, GO))

    assert {(refusal.code.name, refusal.is_recoverable) for refusal in refusals} == {
        ("INVALID_ACTION", True)
    }
    assert shown(single, done, 1) == [1.0]


@pytest.mark.parametrize(("action", "code"), [(RAISE, "INTERNAL"), (DIE, "CRASHED")])
def test_an_environment_that_fails_costs_its_episode_and_no_more(
    single: EnvServer, action: int, code: str
) -> None:
    with ReleasedJoin(single.address) as session:
        session.reset(ids=("e",))
        failed = session.step(actions(single, action))
        early = session.step(actions(single, GO))
        session.reset(3)
        done = session.step(actions(single, GO))

    assert (failed.code.name, failed.is_recoverable) == (code, True)
    assert outline(failed.interrupted_episodes) == [("e", 0, 0, 0.0, False, True)]
    assert (early.code.name, early.is_recoverable) == ("NOT_READY", True)
    assert shown(single, done, 1) == [4.0]


def test_a_lane_that_raises_leaves_the_others_alone(lanes: EnvServer) -> None:
    with ReleasedJoin(lanes.address) as session:
        session.reset(10)
        failed = session.step(actions(lanes, RAISE), lanes=(1,))
        other = session.step(actions(lanes, GO), lanes=(2,))
        again = session.step(actions(lanes, GO), lanes=(1,))

    assert (failed.code.name, failed.is_recoverable) == ("INTERNAL", True)
    assert [record.env_index for record in failed.interrupted_episodes] == [1]
    assert shown(lanes, other, 1) == [13.0]
    assert (again.code.name, again.is_recoverable) == ("NOT_READY", True)


def test_the_stream_ends_well_after_what_nothing_can_mend_and_its_place_is_free() -> None:
    with EnvServer(Moody, max_sessions=1) as server:
        for harm in (Step("h", actions(server, NAN)), Configure("h", "2099.01")):
            with ReleasedJoin(server.address) as session:
                session.reset()

                failed = session.ask(harm)

                assert not failed.is_recoverable
                assert session.receive() is None

        with ReleasedJoin(server.address) as session:
            assert isinstance(session.reset(), ResetDone)


def test_a_client_that_vanishes_leaves_a_free_place() -> None:
    with EnvServer(Moody, max_sessions=1) as server:
        for _ in range(2):
            with ReleasedJoin(server.address) as session:
                assert isinstance(session.reset(), ResetDone)
        # Also one that has not said a word.
        ReleasedJoin(server.address, configure=False).close()

        with ReleasedJoin(server.address) as session:
            assert isinstance(session.reset(), ResetDone)


def test_requests_may_come_without_waiting_for_answers(single: EnvServer) -> None:
    requests: list[EnvRequest] = [
        Configure("0", EDITION_NAME),
        Reset("1", (7,)),
        *(Step(str(number), actions(single, GO)) for number in range(2, 50)),
        Close("50"),
    ]
    with ReleasedJoin(single.address, configure=False) as session:
        session.send(*requests)
        answers = [session.receive() for _ in requests]

    assert [answer and answer.request_id for answer in answers] == [str(n) for n in range(51)]
    last = answers[-2]
    assert isinstance(last, StepDone)
    assert shown(single, last, 1) == [55.0]


def test_a_deadline_is_met_while_the_environment_is_still_at_it(tmp_path: Path) -> None:
    gate = tmp_path / "gate"
    os.mkfifo(gate)
    with (
        EnvServer(Moody, env_kwargs={"gate": str(gate)}) as server,
        ReleasedJoin(server.address) as session,
    ):
        session.reset(ids=("e",))
        late = session.ask(Step("late", actions(server, WAIT), DEADLINE_MS))
        # The test has not let it go on until now.
        gate.write_text("go on")
        early = session.step(actions(server, GO))
        session.reset(3)
        done = session.step(actions(server, GO))

    assert (late.code.name, late.is_recoverable) == ("TIMEOUT", True)
    assert [record.episode_id for record in late.interrupted_episodes] == ["e"]
    assert early.code.name == "NOT_READY"
    assert shown(server, done, 1) == [4.0]


def test_infos_that_cannot_be_encoded_cost_nothing_but_themselves(single: EnvServer) -> None:
    with ReleasedJoin(single.address) as session:
        session.reset()
        odd = session.step(actions(single, ODD_INFO))
        done = session.step(actions(single, GO))

    assert odd.infos["shown"] == 1
    assert shown(single, done, 1) == [2.0]


def test_values_out_of_range_are_delivered_with_a_warning(single: EnvServer) -> None:
    with ReleasedJoin(single.address) as session:
        session.reset()
        stray = session.step(actions(single, STRAY))

    (warning,) = stray.infos["rlmesh.conformance.warning"]
    assert shown(single, stray, 1) == [200.0]
    assert (warning["path"], warning["kind"]) == ("$", "observation")
    assert warning["detail"].startswith("$: ")


def test_pictures_are_sent_and_lanes_that_are_not_there_refused(lanes: EnvServer) -> None:
    with ReleasedJoin(lanes.address) as session:
        before = session.ask(Render("r0"))
        session.reset(10)
        one = session.ask(Render("r1", env_indices=(1,)))
        everyone = session.ask(Render("r2"))
        refused_lane = session.ask(Render("r3", env_indices=(3,)))
        done = session.step(actions(lanes, GO, GO, GO))

    assert isinstance(before, Rendered)
    assert before.png is None
    assert one.png.startswith(PNG_BEGINS)
    assert everyone.png.startswith(PNG_BEGINS)
    assert one.png != everyone.png
    assert (refused_lane.code.name, refused_lane.is_recoverable) == ("INVALID_ACTION", True)
    assert isinstance(done, StepDone)


def test_frames_that_make_no_sense_are_answered_in_band(single: EnvServer) -> None:
    with ReleasedJoin(single.address) as session:
        session.reset()
        for frame in (b"", b"\xff\xff", b"\x2a\x01x", b"\x12\x02\x0a\x09\x2a\x01x"):
            answer = wire.parse_response(session.ask_frame(frame))
            assert isinstance(answer, EnvFailed)
            assert answer.is_recoverable

        assert shown(single, session.step(actions(single, GO)), 1) == [1.0]


def test_answers_tell_what_they_took(single: EnvServer) -> None:
    with ReleasedJoin(single.address) as session:
        session.reset()
        frame = session.ask_frame(wire.pack_request(Step("s", actions(single, GO))))
        reported = pb.JoinResponse.FromString(frame)
        refused = pb.JoinResponse.FromString(session.ask_frame(b"\x2a\x01x"))

    parts = (reported.queue_ns, reported.decode_ns, reported.user_ns, reported.encode_ns)
    assert min(parts) > 0
    assert sum(parts) == reported.endpoint_total_ns
    assert refused.endpoint_total_ns > 0
    assert refused.user_ns == 0


def test_clients_of_both_generations_share_an_endpoint_and_no_state(vector: EnvServer) -> None:
    env = RemoteVectorEnv(vector.address)
    with ReleasedJoin(vector.address) as session:
        released, _ = shown(vector, session.reset(30), 2)
        edition, _ = env.reset(seed=60)
        for number in range(1, 4):
            moved = session.step(actions(vector, GO, GO))
            observation, _, _, _, infos = env.step(np.array([GO, GO]))
            assert shown(vector, moved, 2) == [30.0 + number, 31.0 + number]
            assert moved.infos["shown"] == [30 + number, 31 + number]
            np.testing.assert_array_equal(observation[:, 0], [60.0 + number, 61.0 + number])
            np.testing.assert_array_equal(infos["shown"], [60 + number, 61 + number])
        assert vector.num_sessions == 2
    env.close()

    assert (released, edition[0, 0]) == (30.0, 60.0)


def test_a_partial_reset_does_not_hide_that_the_other_lanes_have_died(lanes: EnvServer) -> None:
    with ReleasedJoin(lanes.address) as session:
        pid = session.reset(10).infos["pid"][0]
        os.kill(pid, signal.SIGKILL)
        assert eventually(lambda: not psutil.pid_exists(pid))
        hidden = session.reset(1, lanes=(0,))
        early = session.step(actions(lanes, GO), lanes=(1,))
        anew = session.reset(1, lanes=(0,))
        done = session.step(actions(lanes, GO), lanes=(0,))

    assert (hidden.code.name, hidden.is_recoverable) == ("CRASHED", True)
    assert [record.env_index for record in hidden.interrupted_episodes] == [0, 1, 2]
    assert early.code.name == "NOT_READY"
    assert isinstance(anew, ResetDone)
    assert shown(lanes, done, 1) == [2.0]


class Reader(gymnasium.Env[Any, Any]):
    """Shows how many characters it has been given to read."""

    observation_space = spaces.Discrete(2**31)
    action_space = spaces.Dict({"text": spaces.Text(20_000, charset="a\U0001f600")})

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        super().reset(seed=seed)
        return 0, {}

    def step(self, action: Any) -> Any:
        return len(action["text"]), 0.0, False, False, {}


def test_the_longest_texts_arrive() -> None:
    with EnvServer(Reader, num_envs=3) as server, ReleasedJoin(server.address) as session:
        contract = contract_of(server)
        session.reset()
        texts = ("\U0001f600" * 20_000,) * 3
        action = values.encode_batch(contract.action_space, [texts], 3)
        done = session.step(action, ids=("0" * 36,) * 3)
        (lengths,) = values.decode_batch(contract.observation_space, done.observation, 3)

    assert list(lengths) == [20_000] * 3


def test_what_single_lanes_can_do_is_reported(
    single: EnvServer, vector: EnvServer, lanes: EnvServer
) -> None:
    reported = [shake_hands(server.address) for server in (single, vector, lanes)]

    assert [answer.capabilities for answer in reported] == [
        {"subset_step": "true"},
        {},
        {"subset_step": "true"},
    ]
    assert [answer.contract for answer in reported] == [
        contract_of(server) for server in (single, vector, lanes)
    ]
