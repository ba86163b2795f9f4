"""Environments on their way to an endpoint."""

import importlib
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

from rlmesh_ray.actors.serialized_env import SerializedEnv
from rlmesh_ray.errors import ConfigurationError, EnvStartError


def test_what_is_packed_comes_out() -> None:
    env, env_kwargs = SerializedEnv.of("CartPole-v1", {"a": 1}).unpack()

    assert (env, env_kwargs) == ("CartPole-v1", {"a": 1})


def test_what_cannot_be_packed_is_told_in_one_line() -> None:
    lock: Any = threading.Lock()

    with pytest.raises(ConfigurationError, match=r"cannot be sent .*lock.*factory") as caught:
        SerializedEnv.of(lambda: lock, None)

    assert "\n" not in str(caught.value)


def test_a_module_that_is_not_there_is_named_where_it_is_unpacked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "only_here.py").write_text("def make(): pass\n")
    monkeypatch.syspath_prepend(tmp_path)
    packed = SerializedEnv.of(importlib.import_module("only_here").make, None)
    monkeypatch.undo()
    monkeypatch.delitem(sys.modules, "only_here")

    with pytest.raises(EnvStartError, match=r"No module named 'only_here'.*module:Env-v0"):
        packed.unpack()
