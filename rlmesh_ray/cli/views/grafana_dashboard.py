"""Grafana dashboard, generated from the table of metrics.

It shows what Ray exports and what ``/metrics`` has without Ray: names match with and without the
prefix ``ray_``. ``grafana.json`` in the repository is what ``render`` returns; a test holds them
together.
"""

import itertools
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from rlmesh_ray.server import metrics
from rlmesh_ray.server.metrics import HistogramMetric, Metric

_COLUMNS = 24
_SCHEMA = 41  # of Grafana 12; later ones read it, too
_DATASOURCE = {"type": "prometheus", "uid": "${datasource}"}


@dataclass(frozen=True, slots=True)
class Query:
    """A query and its legend."""

    expression: str
    legend: str


@dataclass(frozen=True, slots=True)
class Panel:
    """A panel with one or several queries."""

    title: str
    queries: tuple[Query, ...]
    unit: str = "short"
    """Grafana's name of the unit."""
    width: int = 8


def _series(metric: Metric, *labels: str) -> str:
    """Return a selector of a metric's series, of both origins."""
    name = f'__name__=~"(ray_)?{metric.exported}"'
    return f"{{{','.join((name, *labels))}}}"


def _chosen(metric: Metric) -> str:
    return _series(metric, 'fleet=~"$fleet"', 'endpoint_id=~"$endpoint"')


def _now(metric: Metric, by: str = "endpoint_id") -> str:
    # For a moment after a restart the former process's values are there, too.
    return f"max by ({by}) ({_chosen(metric)})"


def _rate(metric: Metric, by: str = "endpoint_id") -> str:
    return f"sum by ({by}) (rate({_chosen(metric)}[$__rate_interval]))"


def _growth(metric: Metric, by: str = "endpoint_id") -> str:
    return f"sum by ({by}) (increase({_chosen(metric)}[$__rate_interval]))"


def _quantiles(histogram: HistogramMetric, what: str = "") -> tuple[Query, ...]:
    rate = _rate(histogram.bucket, f"{histogram.bucket.label}, endpoint_id")
    return tuple(
        Query(
            f"histogram_quantile({share}, {rate})",
            f"{what}p{round(share * 100)} {{{{endpoint_id}}}}",
        )
        for share in (0.5, 0.99)
    )


_BY_ENDPOINT = "{{endpoint_id}}"

ROWS: tuple[tuple[str, tuple[Panel, ...]], ...] = (
    (
        "Endpoints",
        (
            Panel("Sessions", (Query(_now(metrics.SESSIONS), _BY_ENDPOINT),)),
            Panel(
                "Restarts",
                (
                    Query(_now(metrics.RESTARTS), _BY_ENDPOINT),
                    Query(_growth(metrics.WORKER_RESTARTS), f"workers of {_BY_ENDPOINT}"),
                ),
            ),
            Panel(
                "Sessions lost and refused",
                (
                    Query(_growth(metrics.SESSIONS_LOST), f"lost {_BY_ENDPOINT}"),
                    Query(_growth(metrics.SESSIONS_REFUSED), f"refused {_BY_ENDPOINT}"),
                ),
            ),
            Panel(
                "Errors",
                (
                    Query(
                        _growth(metrics.ERRORS, "endpoint_id, code"), f"{{{{code}}}} {_BY_ENDPOINT}"
                    ),
                ),
            ),
            Panel("Sessions begun", (Query(_growth(metrics.SESSIONS_OPENED), _BY_ENDPOINT),)),
            Panel("Age", (Query(_now(metrics.UPTIME), _BY_ENDPOINT),), unit="s"),
        ),
    ),
    (
        "Environments",
        (
            Panel(
                "Steps of lanes a second",
                (Query(_rate(metrics.ENV_LANE_STEPS), _BY_ENDPOINT),),
                unit="ops",
            ),
            Panel(
                "Vector steps a second",
                (Query(_rate(metrics.ENV_STEPS), _BY_ENDPOINT),),
                unit="ops",
            ),
            Panel("Time of a vector step", _quantiles(metrics.ENV_STEP_SECONDS), unit="s"),
            Panel(
                "Episodes a second", (Query(_rate(metrics.ENV_EPISODES), _BY_ENDPOINT),), unit="ops"
            ),
            Panel("Resets a second", (Query(_rate(metrics.ENV_RESETS), _BY_ENDPOINT),), unit="ops"),
            Panel(
                "Values out of range a second",
                (Query(_rate(metrics.DEVIATIONS), _BY_ENDPOINT),),
                unit="ops",
            ),
            Panel(
                "Sessions by transport",
                (
                    Query(
                        _now(metrics.TRANSPORTS, "endpoint_id, transport"),
                        f"{{{{transport}}}} {_BY_ENDPOINT}",
                    ),
                ),
            ),
        ),
    ),
    (
        "Policies",
        (
            Panel(
                "Predictions a second",
                (Query(_rate(metrics.PREDICTIONS), _BY_ENDPOINT),),
                unit="ops",
            ),
            Panel("Rows a second", (Query(_rate(metrics.ROWS), _BY_ENDPOINT),), unit="ops"),
            Panel(
                "Rows of a batch",
                (
                    Query(
                        f"{_rate(metrics.BATCH_ROWS.total)} / {_rate(metrics.BATCH_ROWS.count)}",
                        f"mean {_BY_ENDPOINT}",
                    ),
                    *_quantiles(metrics.BATCH_ROWS),
                ),
            ),
            Panel("Wait for a batch", _quantiles(metrics.QUEUE_SECONDS), unit="s"),
            Panel("Time of a batch in the policy", _quantiles(metrics.FORWARD_SECONDS), unit="s"),
            Panel("Predictions waiting", (Query(_now(metrics.WAITING), _BY_ENDPOINT),)),
            Panel("Version of the policy", (Query(_now(metrics.POLICY_VERSION), _BY_ENDPOINT),)),
            Panel("Routes", (Query(_now(metrics.ROUTES), _BY_ENDPOINT),)),
            Panel(
                "Compiled (1) or in torch (0)",
                (Query(_now(metrics.COMPILED_INFERENCE), _BY_ENDPOINT),),
            ),
        ),
    ),
)


def render() -> str:
    """Return the dashboard as JSON for Grafana's import."""
    dashboard = {
        "uid": "rlmesh-ray",
        "title": "rlmesh-ray",
        "description": "Endpoints of environments and policies: rlmesh-ray status --dashboard.",
        "tags": ["rlmesh-ray", "ray"],
        "schemaVersion": _SCHEMA,
        "version": 1,
        "editable": True,
        "refresh": "10s",
        "time": {"from": "now-30m", "to": "now"},
        "templating": {"list": list(_variables())},
        "panels": list(_panels()),
    }
    return json.dumps(dashboard, indent=2) + "\n"


def _variables() -> Iterator[dict[str, object]]:
    yield {"name": "datasource", "label": "Prometheus", "type": "datasource", "query": "prometheus"}
    yield _choice("fleet", f"label_values({_series(metrics.SESSIONS)}, fleet)")
    of_fleet = _series(metrics.SESSIONS, 'fleet=~"$fleet"')
    yield _choice("endpoint", f"label_values({of_fleet}, endpoint_id)")


def _choice(name: str, query: str) -> dict[str, object]:
    return {
        "name": name,
        "label": name.capitalize(),
        "type": "query",
        "datasource": _DATASOURCE,
        "definition": query,
        "query": {"query": query, "refId": name},
        "refresh": 2,  # whenever the time range changes
        "multi": True,
        "includeAll": True,
        "allValue": ".*",
        "current": {"text": "All", "value": "$__all"},
        "sort": 1,
    }


def _panels() -> Iterator[dict[str, object]]:
    ids = itertools.count(1)
    top = 0
    for title, panels in ROWS:
        place = {"h": 1, "w": _COLUMNS, "x": 0, "y": top}
        yield {"id": next(ids), "type": "row", "title": title, "gridPos": place, "panels": []}
        top += 1
        left = 0
        for panel in panels:
            if left + panel.width > _COLUMNS:
                top, left = top + 8, 0
            place = {"h": 8, "w": panel.width, "x": left, "y": top}
            yield _drawn(panel, next(ids), place)
            left += panel.width
        top += 8


def _drawn(panel: Panel, number: int, place: dict[str, int]) -> dict[str, object]:
    return {
        "id": number,
        "type": "timeseries",
        "title": panel.title,
        "datasource": _DATASOURCE,
        "gridPos": place,
        "fieldConfig": {
            "defaults": {"unit": panel.unit, "min": 0, "custom": {"fillOpacity": 5}},
            "overrides": [],
        },
        "options": {
            "legend": {"displayMode": "list", "placement": "bottom", "showLegend": True},
            "tooltip": {"mode": "multi", "sort": "desc"},
        },
        "targets": _targets(panel.queries),
    }


def _targets(queries: Sequence[Query]) -> list[dict[str, object]]:
    return [
        {
            "refId": chr(ord("A") + position),
            "datasource": _DATASOURCE,
            "expr": query.expression,
            "legendFormat": query.legend,
        }
        for position, query in enumerate(queries)
    ]
