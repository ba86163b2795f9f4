"""The adapter for Stable-Baselines3; tests/peers/test_trainers.py drives it."""

import importlib
import sys

import pytest


def test_a_missing_stable_baselines3_is_named_with_the_remedy(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "stable_baselines3.common.vec_env.base_vec_env", None)
    monkeypatch.setitem(sys.modules, "stable_baselines3", None)
    monkeypatch.delitem(sys.modules, "rlmesh_ray.sb3", raising=False)

    with pytest.raises(ImportError, match=r"rlmesh_ray\.sb3 needs .*: pip install stable-basel"):
        importlib.import_module("rlmesh_ray.sb3")
