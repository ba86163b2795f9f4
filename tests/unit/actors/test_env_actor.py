"""Serialized environments: round trip and errors."""

import importlib
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

from rlmesh_ray.actors.env_actor import SerializedEnv
from rlmesh_ray.errors import ConfigurationError, EnvStartError


def test_an_environment_survives_the_round_trip() -> None:
    env, options = SerializedEnv.of("CartPole-v1", {"env_kwargs": {"a": 1}}).unpack()

    assert (env, options) == ("CartPole-v1", {"env_kwargs": {"a": 1}})


def test_an_environment_that_cannot_be_pickled_is_refused_in_one_line() -> None:
    lock: Any = threading.Lock()

    with pytest.raises(ConfigurationError, match=r"cannot be sent .*lock.*factory") as caught:
        SerializedEnv.of(lambda: lock, {})

    assert "\n" not in str(caught.value)


def test_a_missing_module_is_named_where_the_environment_is_unpacked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "only_here.py").write_text("def make(): pass\n")
    monkeypatch.syspath_prepend(tmp_path)
    serialized = SerializedEnv.of(importlib.import_module("only_here").make, {})
    monkeypatch.undo()
    monkeypatch.delitem(sys.modules, "only_here")

    with pytest.raises(EnvStartError, match=r"No module named 'only_here'.*module:Env-v0"):
        serialized.unpack()
