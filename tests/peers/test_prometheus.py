"""A real Prometheus scrapes ``/metrics``, and answers all that the dashboard asks."""

import json
import re
import shutil
import subprocess
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import pytest
from prometheus_client import CollectorRegistry, generate_latest

from rlmesh_ray import serve_metrics
from rlmesh_ray.cli.commands.status import DASHBOARD
from rlmesh_ray.server.observe.counters import EnvCounters
from rlmesh_ray.server.observe.metrics_server import StatisticsCollector
from rlmesh_ray.server.observe.statistics import MeasuredEndpoint
from tests.lane_counts import note_step
from tests.loopback.eventually import eventually
from tests.loopback.ports import free_address
from tests.model_counts import model_statistics

PROMETHEUS = shutil.which("prometheus")
TIMEOUT_S = 60.0
UNAVAILABLE = 503
CONFIG = """
global: {{scrape_interval: 1s}}
scrape_configs:
  - {{job_name: rlmesh-ray, static_configs: [{{targets: ["{ours}"]}}]}}
  - {{job_name: ray, static_configs: [{{targets: ["{ray}"]}}]}}
"""

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(PROMETHEUS is None, reason="no prometheus: apt-get install prometheus"),
]


def measured(prefix: str) -> list[MeasuredEndpoint]:
    """An environment and a policy, each of which has done a little."""
    env = EnvCounters()
    env.sessions.errors["TIMEOUT"] += 1
    note_step(env.open(), 30_000, 4, 1, 1)
    return [
        MeasuredEndpoint(f"{prefix}-env", env.statistics(), "games", restarts=1),
        MeasuredEndpoint(
            f"{prefix}-model",
            model_statistics(
                [16],
                forward_ns=1_500_000,
                waited_ns=[1_000],
                routes=2,
                policy_version=9,
                inference="compiled",
            ),
        ),
    ]


def as_ray_exports(endpoints: list[MeasuredEndpoint]) -> str:
    """The text with Ray's prefix, and without the types: Ray's histograms are gauges."""
    registry = CollectorRegistry()
    registry.register(StatisticsCollector(lambda: endpoints))
    lines = generate_latest(registry).decode().splitlines(keepends=True)
    return "".join(f"ray_{line}" for line in lines if not line.startswith("#"))


@pytest.fixture(scope="module")
def ray_address() -> Iterator[str]:
    """Where the metrics are as a node of Ray exports them."""
    text = as_ray_exports(measured("ray")).encode()

    class Exporter(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.end_headers()
            self.wfile.write(text)

        def log_message(self, format: str, *args: Any) -> None:
            """Say nothing."""

    with ThreadingHTTPServer(("127.0.0.1", 0), Exporter) as server:
        Thread(target=server.serve_forever, daemon=True).start()
        yield f"127.0.0.1:{server.server_port}"
        server.shutdown()


@pytest.fixture(scope="module")
def prometheus(ray_address: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The address of a Prometheus that scrapes a server of ours, and what Ray exports."""
    folder: Path = tmp_path_factory.mktemp("prometheus")
    address, endpoints = free_address(), measured("ours")
    with serve_metrics("127.0.0.1:0", lambda: endpoints) as metrics:
        config = folder / "prometheus.yml"
        config.write_text(CONFIG.format(ours=metrics, ray=ray_address))
        assert PROMETHEUS is not None
        with subprocess.Popen(
            [
                PROMETHEUS,
                f"--config.file={config}",
                f"--storage.tsdb.path={folder / 'data'}",
                f"--web.listen-address={address}",
            ],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        ) as process:
            try:
                yield address
            finally:
                process.terminate()


def answers(prometheus: str, expression: str, wanted: set[str]) -> bool:
    """Whether Prometheus has an answer about all these endpoints."""
    query = urllib.parse.urlencode({"query": expression})
    try:
        with urllib.request.urlopen(
            f"http://{prometheus}/api/v1/query?{query}", timeout=TIMEOUT_S
        ) as answer:
            found = json.load(answer)["data"]["result"]
    except urllib.error.URLError as error:
        is_starting = getattr(error, "code", UNAVAILABLE) == UNAVAILABLE
        assert is_starting, f"{expression} is refused"
        return False
    return wanted <= {each["metric"].get("endpoint_id", "") for each in found}


EXPRESSIONS = {
    target["expr"].replace("$fleet", ".*").replace("$endpoint", ".*")
    for panel in json.loads(DASHBOARD.read_text())["panels"]
    if panel["type"] != "row"
    for target in panel["targets"]
}


def test_prometheus_scrapes_both_and_answers_every_query_of_the_dashboard(
    prometheus: str,
) -> None:
    for expression in sorted(EXPRESSIONS):
        # Of models there are no errors and no restarts here.
        is_of_envs = re.search(r"\brlmesh_ray_(env_|errors|restarts)", expression)
        kind = "env" if is_of_envs else "model"
        query = expression.replace("$__rate_interval", "10s")

        wanted = {f"ours-{kind}", f"ray-{kind}"}
        assert eventually(partial(answers, prometheus, query, wanted)), query
