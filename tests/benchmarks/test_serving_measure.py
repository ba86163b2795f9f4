from collections.abc import Mapping
from contextlib import nullcontext
from typing import Any

import pytest

from benchmarks.findings import Finding
from benchmarks.processes import Reading
from benchmarks.serving.measure import measure
from benchmarks.serving.plan import ClientKind, Plan, Side, Workload
from benchmarks.serving.targets import Bench, Task


class Canned(Bench):
    """Serves nothing: each side has the same reading in each case."""

    def check(self, side: Side) -> None:
        """Find every side installed."""

    def start(self, side: Side) -> Any:
        return nullcontext(side)

    def take_turns(
        self, servers: Mapping[Side, Any], kind: ClientKind, task: Task
    ) -> Mapping[Side, Reading]:
        del kind, task
        # Answers a second, round trips in us, busy cores of the server and the client.
        known = {
            Side.OURS: Reading(2_500.0, (300, 400, 500), (), 0.5, (0.25,), 0.0),
            Side.RELEASED: Reading(1_000.0, (600, 800, 900), (), 0.5, (0.25,), 0.0),
        }
        return {side: known[side] for side in servers}


def findings(workload: Workload, client: ClientKind = ClientKind.ASYNCIO) -> dict[str, Finding]:
    plan = Plan((workload,), (Side.RELEASED,), repetitions=2, client=client, lone_clients=(client,))
    (found,) = measure(plan, Canned(), lambda _: None)
    return {finding.case: finding for finding in found}


def test_a_lone_client_has_round_trips_and_the_processor_time_of_both_ends() -> None:
    found = findings(Workload.SINGLE, ClientKind.BLOCKING)

    medians = {
        case: [side.median for side in finding.sides.values()] for case, finding in found.items()
    }
    assert medians == {
        "blocking": [400, 800],
        "blocking, p90": [500, 900],
        "blocking, server": [200, 500],
        "blocking, client": [pytest.approx(100), pytest.approx(250)],
    }
    comparisons = {name: each.values for name, each in found["blocking"].comparisons.items()}
    assert comparisons == {"/ released": (0.5, 0.5), "released / ours": (2.0, 2.0)}
    assert (found["blocking"].is_met, found["blocking, server"].is_met) == (True, True)


def test_messages_of_the_blocking_client_are_judged_beside_the_released_rlmesh() -> None:
    found = findings(Workload.MESSAGES, ClientKind.BLOCKING)

    met = {case: finding.is_met for case, finding in found.items()}
    assert met == {
        "1 route": None,
        "8 routes": True,
        "8 routes, server": True,
        "32 routes": False,  # 2.5 times as many, of 3
        "32 routes, server": True,
        "8 routes in one stream": True,
        "32 routes in one stream": True,
    }


def test_messages_of_the_asyncio_client_are_judged_beside_the_noop_server() -> None:
    found = findings(Workload.MESSAGES)

    assert {finding.workload for finding in found.values()} == {"messages"}
    assert all(finding.is_met is None for finding in found.values())
