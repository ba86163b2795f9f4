"""Which sides are measured in a row, and what is compared with what; nothing is measured here."""

from collections.abc import Sequence
from pathlib import Path

import pytest

from benchmarks.findings import Finding
from benchmarks.peers import Peer as Installed
from benchmarks.processes import Reading
from benchmarks.stepping.measure import Installations, measure
from benchmarks.stepping.plan import Peer, Row, SteppingPlan, rows_of
from benchmarks.stepping.specs import Mode
from benchmarks.stepping.targets import Target
from rlmesh_ray.errors import ConfigurationError

HERE = Path(__file__)
INSTALLED = Installations(*(Installed(each, HERE, f"{each}/.ready") for each in "abc"))
SPEEDS = {
    "rlmesh-ray, shared memory": 95.0,
    "rlmesh-ray, TCP": 64.0,
    "rlmesh-ray, gRPC over TCP": 40.0,
    "rlmesh-ray, gRPC over a unix socket": 45.0,
    "rlmesh-ray": 30.0,
    "gym sync": 100.0,
    "gym async": 10.0,
    "rlmesh 0.1.0": 8.0,
    "dm_env_rpc": 20.0,
    "EnvPool": 100.0,
    "lockstep": 10.0,
    "environment alone": 5.0,
    "gRPC alone": 200.0,
    "rlmesh-ray, stock client": 4.0,
    "no-op server": 5.0,
    "rlmesh-ray, one batched join": 40.0,
}


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch) -> list[Target]:
    """Who was measured, in order; each at its speed."""
    asked: list[Target] = []

    def speed(self: Target) -> Reading:
        asked.append(self)
        return Reading(SPEEDS[self.name], (), (), None, (1.0,), None)

    monkeypatch.setattr(Target, "measure", speed)
    return asked


def findings(*rows: Row, peers: Sequence[Peer] = tuple(Peer)) -> list[Finding]:
    plan = SteppingPlan(rows, peers, repetitions=2)
    found = measure(plan, INSTALLED, lambda _: None)
    return [finding for each in found for finding in each]


def test_each_transport_of_a_vector_environment_has_its_own_goal(measured: list[Target]) -> None:
    memory, tcp, messages, socket = findings(Row.VECTOR)

    assert (memory.case, memory.is_met) == ("64 lanes, shared memory", True)
    assert (tcp.case, tcp.is_met) == ("64 lanes, TCP", False)
    assert (messages.case, messages.is_met) == ("64 lanes, gRPC over TCP", False)
    assert socket.goal is None
    assert memory.comparisons["/ gym async"].median == 9.5
    # The process itself is measured once for all four.
    assert [each.name for each in measured].count("gym sync") == 2
    transports = [each.client_spec.transport for each in measured[:4]]
    assert transports == ["shared_memory", "tcp", "grpc", "grpc"]
    assert [each.server_specs[0].is_socket for each in measured[:4]] == [False, False, False, True]


def test_sides_take_turns(measured: list[Target]) -> None:
    findings(Row.EVALUATION)

    names = [each.name for each in measured]
    first = ["rlmesh-ray, TCP", "rlmesh 0.1.0", "gRPC alone"]
    assert names[:3] == first
    assert sorted(names[3:]) == sorted(first)
    assert names[3] != first[0]


def test_what_goes_over_grpc_stands_beside_grpc_alone(measured: list[Target]) -> None:
    (finding,) = findings(Row.EVALUATION, peers=[Peer.GRPC])

    (alone,) = [each for each in measured if each.name == "gRPC alone"][:1]
    assert alone.client_spec.mode is Mode.ECHO
    assert finding.comparisons["/ gRPC alone"].median == 0.32
    assert finding.goal is None


def test_a_peer_that_was_not_chosen_is_neither_measured_nor_a_goal(
    measured: list[Target],
) -> None:
    (frames,) = findings(Row.FRAMES, peers=[Peer.ASYNC])

    assert set(frames.sides) == {"rlmesh-ray", "gym async"}
    assert frames.goal is None
    assert "gym sync" not in {each.name for each in measured}


@pytest.mark.usefixtures("measured")
def test_only_the_single_lane_has_a_goal_against_the_released_one() -> None:
    single, *wider = findings(Row.REMOTE)

    assert single.case == "1 lane, TCP"
    assert single.is_met  # 64 / 8
    assert [each.case for each in wider] == ["8 lanes, TCP", "32 lanes, TCP", "128 lanes, TCP"]
    assert not any(each.goal for each in wider)


def test_stragglers_are_held_against_waiting_and_against_the_mean_of_the_environment(
    measured: list[Target],
) -> None:
    (finding,) = findings(Row.STRAGGLERS, peers=[])

    assert finding.sides["limit"].median == 8 * SPEEDS["environment alone"]
    assert finding.comparisons["/ limit"].median == 0.75
    assert finding.is_met  # 30 / 10
    assert [each.num_sessions for each in measured[:2]] == [8, 8]


@pytest.mark.usefixtures("measured")
def test_the_other_protocol_is_there_for_information() -> None:
    (finding,) = findings(Row.CATCH)

    assert finding.comparisons["/ dm_env_rpc"].median == 3.2
    assert finding.goal is None


def test_dm_env_rpc_is_measured_with_its_own_client_and_with_ours(
    measured: list[Target], tmp_path: Path
) -> None:
    stock, batched = findings(Row.DM_ENV_RPC)

    assert stock.comparisons["/ no-op server"].median == 0.8
    assert (stock.is_met, batched.is_met) == (True, False)
    assert batched.comparisons["/ stock client, 1 lane"].median == 10.0
    assert {each.server_specs[0].num_envs for each in measured} == {1, 64}


def test_envpool_is_measured_by_its_own_python_on_both_sides(measured: list[Target]) -> None:
    few, many = findings(Row.ENVPOOL)

    assert (few.is_met, many.is_met) == (True, True)
    assert {each.client[0] for each in measured} == {str(HERE)}
    assert {each.server[0] for each in measured if each.server_specs} == {str(HERE)}


@pytest.mark.parametrize("row", [Row.ENVPOOL, Row.DM_ENV_RPC])
def test_a_row_of_one_peer_is_refused_without_it(row: Row, measured: list[Target]) -> None:
    with pytest.raises(ConfigurationError, match=f"--only {row} needs --vs {row}"):
        findings(row, peers=[Peer.SYNC])
    assert not measured


def test_rows_are_those_in_which_the_chosen_peers_take_part() -> None:
    assert rows_of(tuple(Peer)) == list(Row)
    assert rows_of([Peer.SYNC]) == [Row.VECTOR, Row.FRAMES, Row.STRAGGLERS]
    assert rows_of([Peer.DM_ENV_RPC]) == [Row.STRAGGLERS, Row.CATCH, Row.DM_ENV_RPC]


@pytest.mark.parametrize(
    ("row", "remedy"),
    [
        (Row.REMOTE, "make here/.ready"),
        (Row.CATCH, "make there/.ready"),
        (Row.ENVPOOL, "make elsewhere/.ready"),
    ],
)
def test_what_is_missing_is_said_before_anything_is_measured(
    row: Row, remedy: str, measured: list[Target]
) -> None:
    nowhere = Path("nowhere/python")
    missing = Installations(
        Installed("the one", nowhere, "here/.ready"),
        Installed("the other", nowhere, "there/.ready"),
        Installed("the third", nowhere, "elsewhere/.ready"),
    )
    plan = SteppingPlan([Row.VECTOR, row], tuple(Peer))

    with pytest.raises(ConfigurationError, match=f"nowhere/python does not exist: .*{remedy}"):
        list(measure(plan, missing, lambda _: None))
    assert not measured


def test_parts_that_are_not_needed_may_be_missing(measured: list[Target]) -> None:
    nowhere = Installed("the one", Path("nowhere/python"), "")
    plan = SteppingPlan([Row.VECTOR, Row.REMOTE], [Peer.SYNC], repetitions=1)

    list(measure(plan, Installations(nowhere, nowhere, nowhere), lambda _: None))

    assert measured
