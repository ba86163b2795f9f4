from pathlib import Path

import pytest

from benchmarks.findings import Measurement
from benchmarks.serving import targets
from benchmarks.serving.measure import measure
from benchmarks.serving.plan import Plan, Side
from benchmarks.serving.targets import Bench, Task
from rlmesh_ray.errors import ConfigurationError


def test_routes_are_spread_over_the_client_processes_and_none_is_lost() -> None:
    loads = Bench(client_processes=3).loads(1, "ours", Task(8))

    assert [len(load.routes) for load in loads] == [3, 3, 2]
    assert len({route for load in loads for route in load.routes}) == 8


def test_no_client_process_is_idle() -> None:
    assert len(Bench(client_processes=4).loads(1, "ours", Task(1))) == 1


def test_arrivals_are_spread_as_the_routes_are() -> None:
    loads = Bench(client_processes=2).loads(1, "ours", Task(32, arrivals_per_s=1000.0))

    assert [load.arrivals_per_s for load in loads] == [500.0, 500.0]


def test_clients_have_connections_of_their_own_when_they_shall() -> None:
    together = Bench().loads(1, "ours", Task(64, client_processes=2))
    apart = Bench().loads(1, "ours", Task(64, client_processes=2, has_connection_each=True))

    assert [load.connections for load in together] == [1, 1]
    assert [load.connections for load in apart] == [32, 32]


def test_a_rival_that_is_not_installed_is_reported_with_the_remedy() -> None:
    with pytest.raises(ConfigurationError, match=r"make \.venvs/released/\.ready"):
        Bench(released_python=Path("nowhere/python")).start(Side.RELEASED)
    with pytest.raises(
        ConfigurationError, match=r"no grpc_reflection: .*\.venvs/ray_serve/\.ready"
    ):
        Bench().start(Side.RAY_SERVE)


def test_a_rival_that_is_not_installed_is_reported_before_anything_is_measured() -> None:
    measured: list[Measurement] = []
    plan = Plan(rivals=(Side.NOOP, Side.RELEASED))
    bench = Bench(released_python=Path("nowhere/python"))

    with pytest.raises(ConfigurationError, match="or choose other peers with --vs"):
        next(measure(plan, bench, measured.append))
    assert not measured


def test_a_machine_with_one_core_has_none_to_give_away(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(targets, "usable_cores", lambda: [0])

    with pytest.raises(ConfigurationError, match="two cores"):
        Bench(is_pinned=True)
