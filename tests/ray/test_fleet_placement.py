"""Where a fleet's endpoints go on a cluster of several nodes; ``placed_fleets`` tries it."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.slow

Tried = dict[str, dict[str, Any]]


@pytest.fixture(scope="module")
def tried() -> Tried:
    """What was seen, by what was tried."""
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-m", "tests.ray.placed_fleets"],
        cwd=Path(__file__).parents[2],
        stdout=subprocess.PIPE,
        text=True,
        timeout=400,
        check=True,
    )
    lines = [json.loads(each) for each in done.stdout.splitlines() if each.startswith("{")]
    return {line.pop("what"): line for line in lines}


def test_endpoints_are_on_the_nodes_that_were_named_and_stay_there(tried: Tried) -> None:
    assert tried["named nodes"]["nodes"] == ["head", "head"]


def test_endpoints_are_spread_on_request(tried: Tried) -> None:
    assert tried["spread"]["nodes"] == ["head", "left", "right"]


def test_an_endpoint_is_brought_to_the_runner_that_claims_it_first(tried: Tried) -> None:
    assert tried["started"]["nodes"] == ["head", "head", "head"]
    assert tried["brought"]["nodes"] == ["right", "head", "head"]


def test_an_endpoint_is_brought_once(tried: Tried) -> None:
    assert tried["claimed again"]["nodes"] == ["right", "head", "head"]
    assert tried["settled"]["nodes"] == ["right", "head", "head"]
    assert tried["settled"]["incarnations"] == [2, 1, 1]


def test_an_endpoint_in_use_is_not_moved(tried: Tried) -> None:
    assert tried["in use"]["nodes"] == ["right", "head", "head"]


def test_an_endpoint_that_was_brought_somewhere_restarts_there(tried: Tried) -> None:
    assert tried["restarted"]["nodes"] == ["right", "head", "head"]


def test_an_endpoint_stays_where_it_is_when_there_is_no_room(tried: Tried) -> None:
    assert tried["full"]["nodes"] == ["left", "left", "head"]


def test_what_endpoints_need_says_where_they_are(tried: Tried) -> None:
    assert tried["resources"]["nodes"] == ["right"]


def test_an_endpoint_that_was_brought_to_a_node_survives_it(tried: Tried) -> None:
    assert tried["before the loss"]["nodes"] == ["right"]
    (node,) = tried["after the loss"]["nodes"]
    assert node in {"head", "left"}
