"""The adapter for Stable-Baselines3; tests/peers/test_trainers.py drives it."""

import importlib
import sys
import types

import pytest

from rlmesh_ray.errors import ConfigurationError


def test_a_missing_stable_baselines3_is_named_with_the_remedy(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "stable_baselines3.common.vec_env.base_vec_env", None)
    monkeypatch.setitem(sys.modules, "stable_baselines3", None)
    monkeypatch.delitem(sys.modules, "rlmesh_ray.sb3", raising=False)

    with pytest.raises(ImportError, match=r"rlmesh_ray\.sb3 needs .*: pip install stable-basel"):
        importlib.import_module("rlmesh_ray.sb3")


def test_what_is_neither_an_address_nor_a_vector_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    module = types.ModuleType("stable_baselines3.common.vec_env.base_vec_env")
    module.VecEnv, module.VecEnvIndices = object, object  # type: ignore[attr-defined]
    for name in (
        "stable_baselines3",
        "stable_baselines3.common",
        "stable_baselines3.common.vec_env",
    ):
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.delitem(sys.modules, "rlmesh_ray.sb3", raising=False)
    sb3 = importlib.import_module("rlmesh_ray.sb3")
    monkeypatch.delitem(sys.modules, "rlmesh_ray.sb3")

    with pytest.raises(ConfigurationError, match="takes the address of an endpoint or a RemoteVec"):
        sb3.RemoteVecEnv(3)
