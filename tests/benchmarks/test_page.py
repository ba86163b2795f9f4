import json
from dataclasses import replace

from benchmarks.findings import Finding
from benchmarks.page import sections, updated
from benchmarks.statistics import Spread

FINDING = Finding(
    "messages",
    "8 routes",
    "messages/s",
    {"rlmesh-ray": Spread((5000.0, 7500.0, 8000.0)), "noop": Spread((10000.0,))},
    {"/ noop": Spread((0.5, 0.75, 0.8))},
)
MACHINE = {
    "date": "2026-11-26 13:40 UTC",
    "cpu": "Some CPU",
    "cores": 2,
    "python": "CPython 3.11",
    "packages": {"grpcio": "1.85"},
    "load_average": 0.5,
}


def result(**fields: object) -> str:
    shared = {"event": "result", "subject": "serving", "is_complete": True, "caveats": []}
    found = {"machine": MACHINE, "steal_percent": 1.5, "findings": [FINDING.as_json()]}
    return json.dumps({**shared, **found, **fields})


def test_a_workload_is_a_section_with_machine_date_disturbances_and_command() -> None:
    ((heading, text),) = sections([result()], "make bench")

    assert heading == "serving: messages, Some CPU"
    machine = "2026-11-26 13:40 UTC, 2 cores of Some CPU, CPython 3.11, grpcio 1.85"
    assert f"{machine}, load before 0.5, steal time 1.5 % of a core, `make bench`" in text
    assert "| 8 routes (messages/s) | 7,500 [6,250, 7,750] | 10,000 | 0.75 [0.625, 0.775] |" in text


def test_processor_time_stands_below_a_rate() -> None:
    sides = {"rlmesh-ray": Spread((5000.0,), (120.0,), (80.0,)), "gym sync": Spread((1.0,), (9.0,))}
    findings = [replace(FINDING, sides=sides, comparisons={}).as_json()]

    ((_, text),) = sections([result(findings=findings)], "make bench")

    assert "| 5,000<br>120 us CPU<br>server 80 | 1<br>9 us CPU |" in text


def test_what_is_not_known_is_named_so() -> None:
    unknown = {**MACHINE, "load_average": None}

    ((_, text),) = sections([result(machine=unknown, steal_percent=None)], "make bench")

    assert "load before unknown, steal time unknown, `make bench`" in text


def test_what_disturbed_a_measurement_is_on_the_page() -> None:
    ((_, text),) = sections([result(caveats=["others were busy"])], "make bench")

    assert "> others were busy" in text


def test_an_interrupted_measurement_and_other_events_are_left_out() -> None:
    lines = [result(is_complete=False), json.dumps({"event": "machine"})]

    assert list(sections(lines, "make bench")) == []


def test_seconds_of_recovery_and_runs_of_learning_are_tables() -> None:
    recovery = result(subject="recovery", p50_s=1.5, p95_s=2.0, worst_s=3.25)
    run = {"sampler": "endpoints", "seed": 1, "env_steps": 40_000, "iterations": 10}
    runs = [{**run, "seconds": 60.0, "return_mean": 475.0}]
    learning = result(subject="learning", tasks=[{"task": "ppo-catch", "runs": runs}])

    (_, of_recovery), (name, of_learning) = sections([recovery, learning], "make bench")

    assert "| 1.50 | 2.00 | 3.25 |" in of_recovery
    assert name == "learning: ppo-catch, Some CPU"
    assert "| endpoints | 1 | 40,000 | 10 | 60 | 475 |" in of_learning


def test_a_section_that_is_measured_again_replaces_the_former_one() -> None:
    first = updated("", {"a: x": "old", "b: y": "kept"})

    second = updated(first, {"a: x": "new", "a: z": "added"})

    assert second.startswith("# Figures\n")
    assert second.endswith("## a: x\n\nnew\n\n## a: z\n\nadded\n\n## b: y\n\nkept\n")
