"""Endpoints' counts in the metrics of a Ray that exports them: prints one line of JSON.

It holds what a node of Ray exports of the metered endpoints: ``[name, labels, value]`` of each
sample, once all that is wanted is there. The names wanted stand on the command line.
"""

import json
import logging
import re
import sys
import time
import urllib.request
from dataclasses import replace
from typing import Any

import ray

from rlmesh_ray.actors.registry.assignment_table import EndpointRecord
from rlmesh_ray.actors.registry.heartbeat import EndpointMetrics
from rlmesh_ray.server.observe.counters import EnvCounters
from rlmesh_ray.server.observe.statistics import SessionStatistics
from tests.lane_counts import note_step
from tests.model_counts import model_statistics

TIMEOUT_S = 60.0
NUM_STEPS = 5
RECORD = EndpointRecord("seen/metered", 3, "127.0.0.1:1", "metered")
SAMPLE = re.compile(r"^ray_(?P<name>\w+){(?P<labels>.*)} (?P<value>\S+)$")
LABEL = re.compile(r'(\w+)="([^"]*)"')

Sample = tuple[str, dict[str, str], float]


class Metered:
    """Feeds Ray with an environment's and a policy's counts, as two heartbeats do."""

    def __init__(self) -> None:
        env = EnvCounters()
        env.sessions.refused += 1
        env.sessions.lost += 1
        env.sessions.errors["TIMEOUT"] += 1
        env.worker_restarts += 1
        lanes = env.open()
        lanes.resets = 2
        self._lanes = lanes
        self._env, self._look_at_env = EndpointMetrics(RECORD), env.statistics
        self._model = EndpointMetrics(replace(RECORD, endpoint_id="seen/metered-model"))
        self._model_statistics = model_statistics(
            [16],
            forward_ns=1_500_000,
            waited_ns=[30_000],
            items_waiting=1,
            batches=5,
            items=6,
            rows=7,
            sessions=SessionStatistics(1, 1, 1, 1),
            errors={"TIMEOUT": 1},
            routes=2,
            policy_version=9,
            inference="compiled",
        )

    def beat(self, num_steps: int) -> None:
        """Look after as many steps of 30 microseconds, of four lanes, of which one ends.

        Each gives a value that is out of range.
        """
        for _ in range(num_steps):
            note_step(self._lanes, 30_000, 4, 1, 1)
        self._env.feed(self._look_at_env())
        self._model.feed(self._model_statistics)


def scraped(port: int) -> list[Sample]:
    """Return what a node of Ray exports of the metered endpoints."""
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=TIMEOUT_S) as answer:
        lines = answer.read().decode().splitlines()
    samples = [
        (sample["name"], dict(LABEL.findall(sample["labels"])), float(sample["value"]))
        for sample in filter(None, map(SAMPLE.match, lines))
    ]
    return [sample for sample in samples if sample[1].get("fleet") == RECORD.fleet]


def main(wanted: set[str]) -> None:
    """Beat twice, and wait until Ray exports both."""
    ray.init(
        "local",
        num_cpus=1,
        include_dashboard=False,
        log_to_driver=False,
        logging_level=logging.ERROR,
        object_store_memory=100 * 1024 * 1024,
    )
    port = int(ray.nodes()[0]["MetricsExportPort"])
    actor_class: Any = ray.remote(Metered)
    actor = actor_class.options(num_cpus=0).remote()
    ray.get(actor.beat.remote(2))
    ray.get(actor.beat.remote(NUM_STEPS - 2))
    deadline_s = time.monotonic() + TIMEOUT_S
    samples: list[Sample] = []
    while time.monotonic() < deadline_s:
        samples = scraped(port)
        steps = [value for name, _, value in samples if name == "rlmesh_ray_env_steps_total"]
        if steps == [NUM_STEPS] and wanted <= {name for name, _, _ in samples}:
            break
        time.sleep(0.5)
    sys.stdout.write(json.dumps(samples) + "\n")
    ray.shutdown()


if __name__ == "__main__":
    main(set(sys.argv[1:]))
