"""Without a private part of gRPC, Ray or RLlib."""

import sys
from typing import Any

import pytest


@pytest.fixture
def without(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Take a module, or an attribute of one, away."""

    def take_away(module: str, name: str = "") -> None:
        if name:
            monkeypatch.delattr(sys.modules[module], name)
        else:
            monkeypatch.setitem(sys.modules, module, None)

    return take_away
