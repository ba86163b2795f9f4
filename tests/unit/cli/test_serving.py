"""How servers live in the command line."""

import gc
from collections.abc import Iterator

import pytest

from rlmesh_ray.cli.console import Console
from rlmesh_ray.cli.serving import serve


class Server:
    """Starts, and has stopped as soon as somebody waits."""

    address = "127.0.0.1:1"

    def start(self) -> None:
        pass

    def wait(self, timeout_s: float | None = None) -> bool:
        return True

    def stop(self, grace_s: float = 1.0) -> None:
        pass


@pytest.fixture
def usual_collector() -> Iterator[None]:
    before = gc.get_threshold()
    yield
    gc.unfreeze()
    gc.set_threshold(*before)


@pytest.mark.usefixtures("usual_collector")
def test_the_collector_leaves_alone_what_is_loaded_when_the_server_says_where_it_is(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("rlmesh_ray.cli.serving.show_log", lambda log_format: None)
    frozen: list[int] = []

    serve(Console(), Server(), lambda: frozen.append(gc.get_freeze_count()))

    assert frozen[0] > 10_000
