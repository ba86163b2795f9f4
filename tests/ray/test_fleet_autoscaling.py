"""Nodes come for a fleet's endpoints, and go with them; ``autoscaled_fleet`` tries it."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.slow
def test_an_autoscaler_brings_nodes_for_a_fleet_that_grows_and_takes_them_when_it_shrinks() -> None:
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-m", "tests.ray.autoscaled_fleet"],
        cwd=Path(__file__).parents[2],
        env={**os.environ, "RAY_AUTH_MODE": "disabled"},
        stdout=subprocess.PIPE,
        text=True,
        timeout=500,
        check=True,
    )

    reported = [json.loads(each) for each in done.stdout.splitlines() if each.startswith("{")]
    counts = [(each["what"], each["nodes"], each.get("endpoints")) for each in reported]
    assert counts == [
        ("before", 1, None),
        ("started", 2, 1),
        ("grown", 3, 2),
        ("at the limit", 3, 2),
        ("shrunk", 2, 1),
        ("stopped", 1, None),
    ]
    assert reported[1]["may_grow"]
    assert "raise start_timeout_s" in reported[3]["error"]
