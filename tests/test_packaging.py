"""The wheel must hold what the tree holds."""

import tomllib
from importlib.metadata import distributions
from pathlib import Path

import pytest
from packaging.specifiers import SpecifierSet

from tests.versions import declared, lowest_versions

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


def test_the_dashboard_is_in_the_wheel() -> None:
    listed = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]

    assert listed["package-data"]["rlmesh_ray.cli"] == ["grafana.json"]
    assert (ROOT / "rlmesh_ray" / "cli" / "grafana.json").is_file()


def test_actors_has_one_import_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT))

    with pytest.raises(ImportError, match=r"import rlmesh_ray\.actors"):
        __import__("actors")


def test_every_base_dependency_says_its_lowest_version() -> None:
    lowest = lowest_versions(declared(), "3.11")

    assert set(lowest) >= {"grpcio", "gymnasium", "numpy", "protobuf"}
    assert len(lowest) == len({line.split(">=")[0] for line in declared()})


def test_the_lowest_version_is_the_one_of_the_python_at_hand() -> None:
    requirements = ["numpy>=1.26", "numpy>=2.1; python_version >= '3.13'", "rich>=13.9,<20"]

    assert lowest_versions(requirements, "3.11") == {"numpy": "1.26", "rich": "13.9"}
    assert lowest_versions(requirements, "3.13") == {"numpy": "2.1", "rich": "13.9"}


def test_a_dependency_without_a_lowest_version_is_named() -> None:
    with pytest.raises(ValueError, match="typer<2 has no lower bound"):
        lowest_versions(["typer<2"], "3.11")


def test_what_make_installs_installs_with_the_first_python_3_11_too() -> None:
    refusing = {
        f"{each.name} {each.version}: {wanted}"
        for each in distributions()
        if (wanted := each.metadata["Requires-Python"]) and "3.11.0" not in SpecifierSet(wanted)
    }

    assert not refusing
