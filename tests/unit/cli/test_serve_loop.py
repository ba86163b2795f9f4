"""Main loop of the commands that serve."""

import gc
from dataclasses import replace
from typing import Any

import pytest

from rlmesh_ray.cli import serve_loop
from rlmesh_ray.cli.console import Console
from rlmesh_ray.cli.options.common import MonitoringFlags
from rlmesh_ray.server.observe.counters import EnvCounters
from rlmesh_ray.server.observe.statistics import EnvStatistics, SessionStatistics


class StoppingServer:
    """A server that stops as soon as ``wait`` is called.

    Args:
        story: Gets what happens.
    """

    address = "127.0.0.1:1"

    def __init__(self, story: list[str]) -> None:
        self._story = story

    def start(self) -> None:
        self._story.append("starts")

    def wait(self, timeout_s: float | None = None) -> bool:
        return True

    def stop(self, grace_s: float = 1.0) -> None:
        self._story.append("stops")

    def statistics(self) -> EnvStatistics:
        return EnvCounters().statistics()


def test_the_heap_is_frozen_before_the_address_is_announced(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    story: list[str] = []
    monkeypatch.setattr(serve_loop, "show_log", lambda log_format: None)
    monkeypatch.setattr(gc, "set_threshold", lambda *_: None)
    monkeypatch.setattr(gc, "freeze", lambda: story.append("settles"))

    server: Any = StoppingServer(story)
    serve_loop.serve(Console(), server, lambda: story.append("announces"), MonitoringFlags())

    assert story == ["starts", "settles", "announces", "stops"]


def test_the_summary_is_one_line_about_the_endpoint() -> None:
    before = replace(EnvCounters().statistics(), uptime_s=10.0, lane_steps=500)
    sessions = SessionStatistics(open=2, opened=7)
    errors = {"INTERNAL": 1, "TIMEOUT": 2}
    now = replace(before, uptime_s=12.0, lane_steps=4500, sessions=sessions, errors=errors)

    assert serve_loop.summary(before, now) == "2 sessions open (7 so far), 2,000 steps/s, 3 errors"
