"""Scaling is measured for real, though not for long, and with few endpoints."""

import json
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from ray.rllib.algorithms.ppo import PPOConfig

from benchmarks.cli.commands import app
from benchmarks.scaling.control_run import registry_cost
from benchmarks.scaling.membership_run import WatchedRunner
from benchmarks.scaling.nodes import endpoints_by_node, require_listener
from benchmarks.scaling.sleeping_env import Simulator
from rlmesh_ray.cli.console import Console
from rlmesh_ray.errors import ConfigurationError
from rlmesh_ray.rllib import configure
from rlmesh_ray.rllib.config.rollout_plan import PLAN_KEY, CombinedResolver
from tests.ray.lost_endpoints import Fleet

Capture = pytest.CaptureFixture[str]


def bench(*arguments: str, capsys: Capture) -> dict[str, Any]:
    """Return the last event, of a run that went well."""
    code = app(
        ["scaling", "--json", *arguments],
        prog_name="bench",
        standalone_mode=False,
        obj=Console(is_json=True),
    )
    events = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert code == 0
    assert events[0]["event"] == "machine"
    result: dict[str, Any] = events[-1]
    assert result["event"] == "result"
    return result


# Not a function of this module, which workers would import with all that it needs.
SIMULATOR = partial(Simulator, num_envs=2, step_s=0.001, observation_bytes=16)


@pytest.mark.usefixtures("local_ray")
def test_a_watched_runner_tells_who_gave_a_step_before_and_after_the_stroke(
    fleets: Callable[..., Fleet],
) -> None:
    fleet = fleets(SIMULATOR, SIMULATOR)
    addresses = [address for address in fleet.board.addresses if address]
    config = configure(PPOConfig().env_runners(num_env_runners=0), addresses)
    plan = config.env_config[PLAN_KEY]
    config.env_config[PLAN_KEY] = replace(plan, resolver=CombinedResolver.of([fleet.board]))
    runner = WatchedRunner(config=config, worker_index=0, num_workers=0)

    def stroke() -> None:
        fleet.lose(1)
        fleet.bring_back(1)

    begun_s = time.time()
    assert begun_s < runner.settle(2, 5) < time.time()
    reported = runner.watch(stroke, runner.sampling.assignments.endpoint_of(1), 5, 0.05)
    runner.stop()

    assert reported["lost"] == [1]
    steps, back_s = reported["steps"], reported["back_s"]
    assert {session for at_s, session in steps if at_s < 0.0} == {0, 1}
    assert back_s > 0.0
    assert back_s in [at_s for at_s, session in steps if session == 1]
    assert {session for at_s, session in steps if at_s >= 0.0} == {0, 1}
    assert steps == sorted(steps)


@pytest.mark.slow
@pytest.mark.usefixtures("local_ray")
def test_the_registry_tells_what_records_and_calls_cost() -> None:
    cost = registry_cost(20, num_lookups=10)

    assert cost["records"] == 20
    assert cost["announces_per_s"] > 0
    assert cost["lookups_per_s"] > 0
    assert cost["memory_mb"] > 1


def test_nodes_are_counted_by_what_they_have() -> None:
    assert endpoints_by_node(["a", "b", "a", "a"]) == [3, 1]


def test_wrong_sizes_are_refused_before_anything_is_started(capsys: Capture) -> None:
    with pytest.raises(ConfigurationError, match="multiple of 3 --endpoints"):
        bench("--endpoints", "4", "--runners", "3", capsys=capsys)
    with pytest.raises(ConfigurationError, match="give one of the two"):
        bench("--nodes", "1", "--ray-address", "10.0.0.1:6379", capsys=capsys)
    assert capsys.readouterr().out == ""


def test_a_cluster_that_is_not_there_is_reported_at_once() -> None:
    with pytest.raises(ConfigurationError, match=r"cannot use the Ray at 127\.0\.0\.1:1"):
        require_listener("127.0.0.1:1")


@pytest.mark.nightly
@pytest.mark.timeout(600)
def test_scaling_is_measured_drawn_and_reported(capsys: Capture, tmp_path: Path) -> None:
    plot = tmp_path / "scaling.png"

    result = bench(
        "--quick",
        *("--endpoints", "2", "--runners", "2", "--nodes", "1", "--nodes", "2"),
        *("--seconds", "0.2", "--fragment", "5", "--control-endpoints", "2"),
        *("--step-ms", "5", "--lanes", "2"),
        *("--only", "rates", "--only", "membership", "--only", "control"),
        *("--out", str(plot)),
        capsys=capsys,
    )

    assert result["is_complete"]
    found = {finding["case"]: finding for finding in result["findings"]}
    rates = [case for case, finding in found.items() if finding["workload"] == "rates"]
    assert len(rates) == 4
    assert "2 nodes, 2 runners, 2 endpoints" in rates
    for case in rates:
        assert found[case]["comparisons"]["/ ideal"]["median"] > 0
    assert found["1 node, 1 endpoint"]["sides"]["sleep alone"]["median"] == 400.0
    assert found["1 node, 1 endpoint"]["comparisons"]["/ ideal"]["median"] == 1.0
    assert len(result["placed"]) == 4
    for placed in result["placed"]:
        assert sum(placed["endpoints_by_node"]) in (1, 2)
        assert placed["one_by_one"] is None
    membership = [each for each in result["findings"] if each["workload"] == "membership"]
    assert len(membership) == 5
    control = [each for each in result["findings"] if each["workload"] == "control"]
    assert found["2 endpoints, 200 lanes: runner, memory"] in control
    assert any("on this one machine" in caveat for caveat in result["caveats"])
    assert plot.read_bytes().startswith(b"\x89PNG")
