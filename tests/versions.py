"""The loopback tests with the lowest versions that pyproject.toml allows, and with the newest.

``make versions`` runs them, on each Python of ``PYTHONS`` that is installed here. Installed are the
base dependencies and the extras of dialects; tests that need torch or Ray are left out. The
environments lie in ``.venvs/versions-*``.
"""

import argparse
import os
import re
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Iterator, Sequence
from pathlib import Path

from packaging.requirements import Requirement
from packaging.specifiers import Specifier
from packaging.version import Version

ROOT = Path(__file__).parents[1]
PYTHONS = ("3.11", "3.13")
KINDS = ("lowest", "newest")
EXTRAS = ("dm-env-rpc", "openpi", "prometheus", "recording", "watch")
TOOLS = ("hypothesis", "msgpack", "psutil", "pytest", "pytest-timeout", "pytest-xdist")
"""What tests need beside the package, at any version; msgpack is for Ray's dialect of RLlink."""
_NEEDS_RLLIB = re.compile(
    r"^(import|from) (torch|ray|rlmesh_ray\.(actors|rllib|models\.(torch|rllib|fast_path)))\b", re.M
)
# The published dm_env_rpc was generated for protobuf 5, which the first versions of 6 warn of, and
# sets the shape of arrays, which NumPy 2.5 warns of.
WARNINGS = (
    "ignore:Protobuf gencode version:UserWarning",
    "ignore:Setting the shape on a NumPy array:DeprecationWarning",
)


def lowest_versions(requirements: Sequence[str], python: str) -> dict[str, str]:
    """Return the lowest version of each distribution that the requirements allow.

    Args:
        requirements: As pyproject.toml has them; several of one name must all hold.
        python: Such as ``"3.11"``, for their conditions.

    Raises:
        ValueError: A requirement has no lower bound.
    """
    environment = {"python_version": python, "python_full_version": f"{python}.0"}
    found: dict[str, str] = {}
    for requirement in map(Requirement, requirements):
        if requirement.marker is not None and not requirement.marker.evaluate(environment):
            continue
        lowest = [one.version for one in requirement.specifier if _is_floor(one)]
        if not lowest:
            raise ValueError(f"{requirement} has no lower bound (>=)")
        known = [found[requirement.name]] if requirement.name in found else []
        found[requirement.name] = max(lowest + known, key=Version)
    return found


def _is_floor(specifier: Specifier) -> bool:
    return specifier.operator in (">=", "==", "~=")


def declared(extra: str = "") -> list[str]:
    """Return the requirements of the base install, or of an extra, from pyproject.toml."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    names: list[str] = project["optional-dependencies"][extra] if extra else project["dependencies"]
    return names


def need_rllib() -> list[str]:
    """Return the files of tests/loopback that import torch or Ray at once."""
    files = sorted((ROOT / "tests" / "loopback").glob("test_*.py"))
    return [str(each.relative_to(ROOT)) for each in files if _NEEDS_RLLIB.search(each.read_text())]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the tests of each combination, say what came of it; return the exit status."""
    parser = argparse.ArgumentParser(description="Run the loopback tests with other versions.")
    parser.add_argument("--python", nargs="+", default=PYTHONS, help="Versions, such as 3.11.")
    parser.add_argument("--kind", nargs="+", default=KINDS, choices=KINDS)
    parser.add_argument("pytest", nargs="*", help="Arguments for pytest; all loopback tests.")
    options = parser.parse_args(arguments)
    outcomes = {
        f"Python {python}, {kind}": _outcome(python, kind, options.pytest)
        for python in options.python
        for kind in options.kind
    }
    _say("", "Left out, since they need torch or Ray:", *need_rllib(), "tests marked ray", "")
    _say(*(f"{name}: {outcome}" for name, outcome in outcomes.items()))
    return int(any(outcome.startswith("FAILED") for outcome in outcomes.values()))


def _outcome(python: str, kind: str, arguments: Sequence[str]) -> str:
    interpreter = _interpreter(python)
    if interpreter is None:
        return f"SKIPPED, there is no python{python} here"
    folder = ROOT / ".venvs" / f"versions-{kind}-{python}"
    _say("", f"Python {python}, {kind} versions, in {folder.relative_to(ROOT)}")
    own = folder / "bin" / "python"
    try:
        if not own.exists():
            _run(interpreter, "-m", "venv", str(folder))
        _run(str(own), "-m", "pip", "install", "--quiet", *_wanted(python, kind, folder))
        _run(str(own), "-m", "pip", "check")
        _run(str(own), *_pytest(arguments))
    except subprocess.CalledProcessError as error:
        return f"FAILED, exit status {error.returncode} of: {' '.join(error.cmd[1:5])} …"
    return "passed"


def _wanted(python: str, kind: str, folder: Path) -> Iterator[str]:
    """Yield what pip is to install, and how."""
    yield from (
        "--disable-pip-version-check",
        "--upgrade",
        "--editable",
        f"{ROOT}[{','.join(EXTRAS)}]",
    )
    yield from TOOLS
    if kind == "lowest":
        constraints = folder / "lowest.txt"
        wanted = [each for extra in ("", *EXTRAS) for each in declared(extra)]
        pins = lowest_versions(wanted, python)
        constraints.write_text("".join(f"{name}=={pins[name]}\n" for name in sorted(pins)))
        yield from ("--constraint", str(constraints))


def _pytest(arguments: Sequence[str]) -> Iterator[str]:
    yield from (
        "-m",
        "pytest",
        "-q",
        "-m",
        "not slow and not nightly and not ray",
        "-p",
        "no:cacheprovider",
    )
    for warning in WARNINGS:
        yield from ("-W", warning)
    yield from (f"--ignore={name}" for name in need_rllib())
    yield from arguments or ("tests/loopback", "-n", "2", "--dist", "loadfile")


def _interpreter(python: str) -> str | None:
    """Return a Python of this version: that of the path, else one of pyenv's."""
    managed = (Path.home() / ".pyenv" / "versions").glob(f"{python}.*/bin/python{python}")
    for found in (shutil.which(f"python{python}"), *map(str, managed)):
        # pyenv has a placeholder in the path for each version, which may not be active.
        works = found and subprocess.run([found, "-c", ""], capture_output=True).returncode == 0
        if works:
            return found
    return None


def _run(*command: str) -> None:
    subprocess.run(command, cwd=ROOT, check=True, env={**os.environ, "PYTHONNOUSERSITE": "1"})


def _say(*lines: str) -> None:
    sys.stdout.write("".join(f"{line}\n" for line in lines))
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())
