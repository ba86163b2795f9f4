"""The wheel must hold what the tree holds."""

import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


def packages_in_tree() -> set[str]:
    dirs = {p.parent.relative_to(ROOT) for p in ROOT.glob("rlmesh_ray/**/__init__.py")}
    dirs |= {
        Path("rlmesh_ray") / p.parent.relative_to(ROOT) for p in ROOT.glob("actors/**/__init__.py")
    }
    return {".".join(d.parts) for d in dirs}


def test_every_package_is_listed() -> None:
    listed = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]

    assert set(listed["packages"]) == packages_in_tree()


def test_actors_has_one_import_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT))

    with pytest.raises(ImportError, match=r"import rlmesh_ray\.actors"):
        __import__("actors")
