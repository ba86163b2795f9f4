import contextlib
from types import SimpleNamespace
from typing import Any

import pytest

from rlmesh_ray.cli import status
from rlmesh_ray.cli.console import Console


@pytest.fixture
def context(monkeypatch: pytest.MonkeyPatch) -> Any:
    """What a command gets whose cluster is never heard of: somebody presses Ctrl-C."""

    def interrupted(console: Console) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(status, "joined_ray", lambda address: contextlib.nullcontext())
    monkeypatch.setattr(status, "_look", interrupted)
    return SimpleNamespace(obj=Console(is_json=True))


def test_a_single_look_that_is_interrupted_has_not_succeeded(context: Any) -> None:
    with pytest.raises(KeyboardInterrupt):
        status.status(context)


def test_ctrl_c_is_how_watching_ends(context: Any) -> None:
    status.status(context, watch=True)
