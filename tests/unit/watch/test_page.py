"""Who may read the page, and what it never answers."""

import os
from dataclasses import replace
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

import numpy as np
import pytest

from benchmarks.watching.samples import ManyEndpoints, write_progress
from rlmesh_ray.watch.live import LiveView
from rlmesh_ray.watch.page import page
from rlmesh_ray.watch.runs import RunFolder
from tests.unit.recording.recordings import INFO, cart_pole, written
from tests.watched import LOCAL, fetch

TOKEN = "a token for tests"
ELSEWHERE = {"host": "watch.example:7080"}


def made(folder: Path, token: str | None = None) -> Any:
    return page(LiveView(ManyEndpoints(3)), RunFolder(folder), token)


@pytest.mark.parametrize("host", ["localhost", "127.0.0.1:7080", "[::1]:7080", "LOCALHOST:1"])
def test_names_of_this_machine_are_answered(host: str, tmp_path: Path) -> None:
    assert fetch(made(tmp_path), "/api/runs", headers={"host": host}).status == 200


def test_the_name_that_the_page_listens_at_is_answered(tmp_path: Path) -> None:
    app = page(LiveView(ManyEndpoints(3)), RunFolder(tmp_path), host="127.0.0.2")

    assert fetch(app, "/api/runs", headers={"host": "127.0.0.2:7080"}).status == 200
    assert fetch(app, "/api/runs", headers={"host": "127.0.0.3:7080"}).status == 421


@pytest.mark.parametrize(
    "host", ["evil.example", "evil.example:7080", "127.0.0.1.evil.example", ""]
)
@pytest.mark.parametrize("path", ["/", "/api/endpoints"])
def test_another_name_is_refused_without_a_token(host: str, path: str, tmp_path: Path) -> None:
    reply = fetch(made(tmp_path), path, headers={"host": host})

    assert reply.status == 421
    assert b"--page-token-file" in reply.body


def test_another_sites_page_is_refused(tmp_path: Path) -> None:
    headers = {**LOCAL, "sec-fetch-site": "cross-site"}

    assert fetch(made(tmp_path), "/api/runs", headers=headers).status == 403
    assert fetch(made(tmp_path), "/", headers=headers).status == 200


@pytest.mark.parametrize("shown", ["", "Bearer wrong", f"Basic {TOKEN}", TOKEN])
def test_the_token_is_needed_where_there_is_one(shown: str, tmp_path: Path) -> None:
    headers = {**ELSEWHERE, "authorization": shown}

    assert fetch(made(tmp_path, TOKEN), "/api/endpoints", headers=headers).status == 401


@pytest.mark.parametrize("host", ["watch.example/?", "watch.example/#", "watch.example?is="])
def test_no_name_turns_a_path_into_one_that_needs_no_token(host: str, tmp_path: Path) -> None:
    assert fetch(made(tmp_path, TOKEN), "/api/runs", headers={"host": host}).status == 401


def test_the_token_opens_what_is_below_api_and_the_page_itself_is_no_secret(tmp_path: Path) -> None:
    app = made(tmp_path, TOKEN)
    headers = {**ELSEWHERE, "authorization": f"Bearer {TOKEN}"}

    assert len(fetch(app, "/api/endpoints", headers=headers).json["endpoints"]) == 3
    assert fetch(app, "/", headers=ELSEWHERE).status == 200


@pytest.mark.parametrize(("token", "status"), [(TOKEN, 200), ("wrong", 401), ("", 401)])
def test_the_token_may_be_in_the_query_since_videos_are_asked_for_without_a_header(
    token: str, status: int, tmp_path: Path
) -> None:
    query = urlencode({"token": token})

    assert fetch(made(tmp_path, TOKEN), f"/api/runs?{query}", headers=ELSEWHERE).status == status


def test_a_wrong_token_in_the_header_is_not_saved_by_one_in_the_query(tmp_path: Path) -> None:
    query = urlencode({"token": TOKEN})
    headers = {**ELSEWHERE, "authorization": "Bearer wrong"}

    assert fetch(made(tmp_path, TOKEN), f"/api/runs?{query}", headers=headers).status == 401


@pytest.mark.parametrize(
    "path",
    ["/../page.py", "/..%2fpage.py", "/%2e%2e/page.py", "//etc/passwd", "/static/../../page.py"],
)
def test_only_files_of_the_page_are_served(path: str, tmp_path: Path) -> None:
    assert fetch(made(tmp_path), path).status == 404


@pytest.mark.parametrize("path", ["/", "/watch.js", "/watch.css", "/api/runs", "/missing"])
def test_every_answer_restricts_what_the_browser_loads(path: str, tmp_path: Path) -> None:
    headers = fetch(made(tmp_path), path).headers

    assert headers["content-security-policy"].startswith("default-src 'self';")
    assert headers["x-content-type-options"] == "nosniff"
    assert headers["cross-origin-resource-policy"] == "same-origin"


def test_the_page_loads_nothing_from_elsewhere() -> None:
    static = Path(__file__).parents[3] / "rlmesh_ray" / "watch" / "static"

    for file in static.iterdir():
        text = file.read_text().replace("http://www.w3.org/2000/svg", "")
        assert "//" not in "".join(line.partition("// ")[0] for line in text.splitlines())


def test_numbers_that_json_does_not_have_are_null(tmp_path: Path) -> None:
    write_progress(tmp_path / "one", 2)
    app = made(tmp_path)
    fetch(app, "/api/runs")

    first, second = fetch(app, "/api/curve?run=one").json

    assert first["return_mean"] is None
    assert second["return_mean"] > 20


@pytest.mark.parametrize(
    "path",
    [
        "/api/curve?run=../one",
        "/api/sessions?endpoint=192.0.2.1:5555",
        "/api/picture?endpoint=192.0.2.1:5555&session=s&lane=0",
        "/api/episodes?recording=..&first=-1",
        "/api/episode?recording=one&episode=../one",
        "/api/video?recording=one&episode=../../etc/passwd",
        "/api/nothing",
    ],
)
def test_what_is_not_there_is_not_found(path: str, tmp_path: Path) -> None:
    write_progress(tmp_path / "one", 2)
    app = made(tmp_path)
    fetch(app, "/api/runs")

    assert fetch(app, path).status == 404


def test_no_request_changes_anything(tmp_path: Path) -> None:
    for path in ("/api/endpoints", "/api/runs", "/"):
        assert fetch(made(tmp_path), path, method="POST").status == 405


def test_a_video_is_sent_whole_and_in_parts_and_leaves_no_descriptor(tmp_path: Path) -> None:
    frames = np.zeros((4, 16, 16, 3), np.uint8)
    written(tmp_path / "kept", INFO, replace(cart_pole(3, seed=0), frames=frames))
    whole = (tmp_path / "kept" / "episodes" / "000001.mp4").read_bytes()
    app, path = made(tmp_path), "/api/video?recording=kept&episode=000001"
    fetch(app, "/api/runs")
    before = os.listdir("/proc/self/fd")

    assert fetch(app, path).body == whole
    part = fetch(app, path, headers={**LOCAL, "range": "bytes=5-9"})
    assert fetch(app, path, method="HEAD").headers["content-length"] == str(len(whole))

    assert (part.status, part.body) == (206, whole[5:10])
    assert os.listdir("/proc/self/fd") == before
