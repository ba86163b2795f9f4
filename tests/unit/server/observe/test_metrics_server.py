"""What ``/metrics`` says of endpoints, in Prometheus' text."""

from collections.abc import Sequence

import pytest
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from rlmesh_ray.errors import AddressError
from rlmesh_ray.server.observe.counters import EnvCounters
from rlmesh_ray.server.observe.metrics_server import StatisticsCollector, serve_metrics
from rlmesh_ray.server.observe.statistics import (
    ALL_METRICS,
    EnvStatistics,
    Measured,
    MeasuredEndpoint,
)
from tests.lane_counts import note_step
from tests.model_counts import model_statistics

Samples = dict[tuple[str, str, str], float]


def text_of(measured: Measured) -> str:
    registry = CollectorRegistry()
    registry.register(StatisticsCollector(measured))
    return generate_latest(registry).decode()


def samples(text: str) -> Samples:
    """The values by endpoint, name and the metric's own label."""
    return {
        (
            sample.labels["endpoint_id"],
            sample.name,
            "".join(
                value
                for name, value in sample.labels.items()
                if name not in ("endpoint_id", "fleet")
            ),
        ): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def env_statistics(num_steps: int = 5) -> EnvStatistics:
    """Statistics after steps of 30 microseconds with four lanes, one of which ends each time."""
    counters = EnvCounters()
    counters.sessions.errors["TIMEOUT"] += 1
    lanes = counters.open()
    for _ in range(num_steps):
        note_step(lanes, 30_000, 4, 1, 1)
    return counters.statistics()


def endpoints() -> Sequence[MeasuredEndpoint]:
    return [
        MeasuredEndpoint("env-1", env_statistics(), "games", restarts=2),
        MeasuredEndpoint("model-1", model_statistics([16], policy_version=9, inference="compiled")),
    ]


def test_every_metric_has_the_name_that_ray_exports_it_by_but_for_the_prefix() -> None:
    names = {name for _, name, _ in samples(text_of(endpoints))}

    assert names == {metric.exported for metric in ALL_METRICS}


def test_what_an_environment_counts_is_there_with_its_labels() -> None:
    found = samples(text_of(endpoints))

    def env(name: str, label: str = "") -> float:
        return found["env-1", name, label]

    assert env("rlmesh_ray_env_steps_total") == 5
    assert env("rlmesh_ray_env_lane_steps_total") == 20
    assert env("rlmesh_ray_env_episodes_total") == 5
    assert env("rlmesh_ray_errors_total", "TIMEOUT") == 1
    assert env("rlmesh_ray_restarts") == 2
    assert found["model-1", "rlmesh_ray_policy_version", ""] == 9
    assert ("model-1", "rlmesh_ray_env_steps_total", "") not in found
    assert ("model-1", "rlmesh_ray_restarts", "") not in found


def test_a_policy_runs_compiled_or_in_torch_or_has_no_such_choice() -> None:
    reasons = {"compiled": "", "torch": 'it has "hooks"\n}', "": ""}

    text = text_of(
        lambda: [
            MeasuredEndpoint(name, model_statistics(inference=name, torch_reason=reason))
            for name, reason in reasons.items()
        ]
    )

    lines = [line for line in text.splitlines() if line.startswith("rlmesh_ray_compiled_inference")]
    assert lines == [
        'rlmesh_ray_compiled_inference{endpoint_id="compiled",fleet=""} 1.0',
        'rlmesh_ray_compiled_inference{endpoint_id="torch",fleet=""} 0.0',
    ]
    assert "hooks" not in text


def test_a_histogram_is_one_with_its_empty_buckets() -> None:
    text = text_of(endpoints)
    found = samples(text)

    assert "# TYPE rlmesh_ray_env_step_seconds histogram" in text
    bucket = "rlmesh_ray_env_step_seconds_bucket"
    assert [found["env-1", bucket, le] for le in ("2e-05", "5e-05", "+Inf")] == [0, 5, 5]
    total = found["env-1", "rlmesh_ray_env_step_seconds_sum", ""]
    assert total == pytest.approx(5 * 30e-6)


def test_endpoints_share_a_description() -> None:
    other = MeasuredEndpoint("127.0.0.1:5555", env_statistics(num_steps=1))

    text = text_of(lambda: [*endpoints(), other])

    assert text.count("# HELP rlmesh_ray_env_steps_total ") == 1
    assert 'rlmesh_ray_env_steps_total{endpoint_id="127.0.0.1:5555",fleet=""} 1.0' in text
    assert 'rlmesh_ray_env_steps_total{endpoint_id="env-1",fleet="games"} 5.0' in text


def test_each_scrape_reads_anew() -> None:
    steps = iter((1, 3))
    registry = CollectorRegistry()
    registry.register(
        StatisticsCollector(lambda: [MeasuredEndpoint("env", env_statistics(next(steps)))])
    )

    assert [
        samples(generate_latest(registry).decode())["env", "rlmesh_ray_env_steps_total", ""]
        for _ in range(2)
    ] == [1, 3]


@pytest.mark.parametrize(
    ("address", "words"), [("unix:/tmp/metrics", "HOST:PORT"), ("9464", "HOST:PORT")]
)
def test_an_address_that_prometheus_cannot_dial_is_refused(address: str, words: str) -> None:
    with pytest.raises(AddressError, match=words), serve_metrics(address, endpoints):
        pass
