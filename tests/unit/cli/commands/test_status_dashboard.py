import json
import re
from pathlib import Path
from typing import Any

import pytest

from rlmesh_ray.cli.commands.status import DASHBOARD
from rlmesh_ray.cli.main import main
from rlmesh_ray.server.observe.statistics import ALL_METRICS, MetricKind

ROOT = Path(__file__).parents[4]
NAMES = {metric.exported for metric in ALL_METRICS}


def panels() -> list[dict[str, Any]]:
    drawn: list[dict[str, Any]] = json.loads(DASHBOARD.read_text())["panels"]
    return [panel for panel in drawn if panel["type"] != "row"]


def expressions() -> list[str]:
    return [target["expr"] for panel in panels() for target in panel["targets"]]


def test_the_file_in_the_repository_is_what_the_command_prints(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["status", "--dashboard"]) == 0

    assert capsys.readouterr().out == (ROOT / "grafana.json").read_text()


def names_in(expression: str) -> list[str]:
    """The metrics of a query, which match with and without Ray's prefix."""
    return re.findall(r'__name__=~"\(ray_\)\?(\w+)"', expression)


def test_every_query_is_of_an_exported_metric() -> None:
    queried = {name for each in expressions() for name in names_in(each)}

    assert queried
    assert queried <= NAMES


def test_every_exported_metric_is_shown() -> None:
    shown = {name for each in expressions() for name in names_in(each)}
    unseen = {name for name in NAMES - shown if not name.endswith(("_sum", "_count"))}
    # The histogram of their rows counts batches, too.
    assert unseen == {"rlmesh_ray_batches_total"}


def test_counters_are_only_shown_as_rates() -> None:
    for metric in ALL_METRICS:
        if metric.kind is MetricKind.COUNTER:
            for expression in expressions():
                found = re.search(rf"(\w+)\({{[^}}]*{metric.exported}\b", expression)
                assert metric.exported not in expression or (
                    found is not None and found[1] in {"rate", "increase"}
                )


def test_a_quantile_keeps_the_bounds_apart() -> None:
    quantiles = [each for each in expressions() if "histogram_quantile" in each]

    assert len(quantiles) == 8
    assert all("sum by (le, endpoint_id) (rate(" in each for each in quantiles)


def test_panels_have_titles_and_numbers_of_their_own_and_do_not_overlap() -> None:
    drawn = json.loads(DASHBOARD.read_text())["panels"]
    cells = [
        (x, y)
        for place in (panel["gridPos"] for panel in drawn)
        for x in range(place["x"], place["x"] + place["w"])
        for y in range(place["y"], place["y"] + place["h"])
    ]

    assert len(set(cells)) == len(cells)
    assert max(x for x, _ in cells) < 24
    assert len({panel["id"] for panel in drawn}) == len(drawn)
    assert len({panel["title"] for panel in drawn}) == len(drawn)
