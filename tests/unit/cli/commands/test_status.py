import contextlib
import threading
import time
from typing import Any

import pytest

from rlmesh_ray.cli.commands import status
from rlmesh_ray.cli.console import Console
from rlmesh_ray.cli.main import main


@pytest.fixture
def console(monkeypatch: pytest.MonkeyPatch) -> Console:
    """Console of a command whose registry query is interrupted by Ctrl-C."""

    def interrupted(console: Console, joined: str) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(status, "joined_ray", lambda *_: contextlib.nullcontext(""))
    monkeypatch.setattr(status, "_query", interrupted)
    return Console(is_json=True)


def test_an_interrupted_query_is_no_success(console: Console) -> None:
    with pytest.raises(KeyboardInterrupt):
        status.status(console, status.StatusFlags())


def test_ctrl_c_ends_watching(console: Console) -> None:
    status.status(console, status.StatusFlags(watch=True))


def test_watching_goes_on_until_ctrl_c(console: Console, monkeypatch: pytest.MonkeyPatch) -> None:
    events: list[object] = []
    sleep = time.sleep

    def query(console: Console, joined: str) -> list[Any]:
        events.append("query")
        return []

    def pause(seconds: float) -> None:
        if threading.current_thread() is not threading.main_thread():
            return sleep(seconds)  # of servers that earlier tests have started
        events.append(seconds)
        if events.count(seconds) == 2:
            raise KeyboardInterrupt

    monkeypatch.setattr(status, "_query", query)
    monkeypatch.setattr("time.sleep", pause)

    status.status(console, status.StatusFlags(watch=True))

    assert events == ["query", 3.0, "query", 3.0]


def test_without_ray_the_error_names_the_alternative(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    # As importlib finds nothing in the base install.
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)

    assert main(["status", "--ray-address", "127.0.0.1:1"]) == 1

    error = capsys.readouterr().err
    assert error.startswith("error: status needs ray, which the base install does not have: pip")
    assert error.endswith("use on each endpoint: rlmesh-ray inspect ADDRESS\n")
    assert main(["status", "--dashboard"]) == 0
