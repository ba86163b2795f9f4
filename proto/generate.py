"""Generate rlmesh_ray/wire/_pb from the schemas in this folder.

Run it after every change to a schema. ``--check`` writes nothing and fails when the checked-in
code is not what the schemas give; the tests run that.
"""

import argparse
import re
import sys
import tempfile
from pathlib import Path

from grpc_tools import protoc

SCHEMAS = Path(__file__).parent
TARGET = SCHEMAS.parent / "rlmesh_ray" / "wire" / "_pb"
PACKAGE = "rlmesh_ray.wire._pb"
INIT = '"""Generated from proto/ by proto/generate.py; do not edit."""\n'

# protoc's stubs are not written for strict checking; ours, which use them, are.
STUB_HEADER = "# mypy: ignore-errors\n"

# protoc writes imports as if its output folder were on the path.
_IMPORT = re.compile(r"^from (rlmesh\w*(?:\.\w+)*) import", re.MULTILINE)


def generate(schemas: Path) -> dict[str, str]:
    """Return the generated files by their path below ``_pb``.

    Raises:
        RuntimeError: A schema does not compile; protoc has printed why.
    """
    sources = sorted(str(path.relative_to(schemas)) for path in schemas.rglob("*.proto"))
    with tempfile.TemporaryDirectory() as scratch:
        options = [f"-I{schemas}", f"--python_out={scratch}", f"--pyi_out={scratch}"]
        if protoc.main(["protoc", *options, *sources]) != 0:
            raise RuntimeError("the schemas do not compile")
        files = {
            str(path.relative_to(scratch)): _adapt(path) for path in Path(scratch).rglob("*.py*")
        }
    folders = {parent for name in files for parent in Path(name).parents}
    return files | {str(folder / "__init__.py"): INIT for folder in folders}


def differences(expected: dict[str, str], target: Path) -> list[str]:
    """Return the names of files that are missing, changed or left over below ``target``."""
    present = {str(p.relative_to(target)): p for p in target.rglob("*.py*") if p.suffix != ".pyc"}
    changed = [name for name, path in present.items() if expected.get(name) != _text(path)]
    return sorted({*changed, *(expected.keys() - present.keys())})


def write(expected: dict[str, str], target: Path) -> None:
    """Make the files below ``target`` what they should be."""
    for name in differences(expected, target):
        path = target / name
        if name not in expected:
            path.unlink()
            continue
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(expected[name], encoding="utf-8")


def _adapt(path: Path) -> str:
    header = STUB_HEADER if path.suffix == ".pyi" else ""
    return header + _IMPORT.sub(rf"from {PACKAGE}.\1 import", _text(path))


def _text(path: Path) -> str:
    return path.read_text(encoding="utf-8")


def main() -> int:
    """Run the command line; return the exit code."""
    parser = argparse.ArgumentParser(description="Generate rlmesh_ray/wire/_pb.")
    parser.add_argument("--check", action="store_true", help="write nothing, fail on differences")
    parser.add_argument("--schemas", type=Path, default=SCHEMAS, help="folder of the schemas")
    arguments = parser.parse_args()
    try:
        expected = generate(arguments.schemas)
    except RuntimeError as error:
        print(error, file=sys.stderr)
        return 2
    changed = differences(expected, TARGET)
    if not arguments.check:
        write(expected, TARGET)
    for name in changed:
        print(f"{'differs' if arguments.check else 'wrote'}: {name}", file=sys.stderr)
    if arguments.check and changed:
        print("run: python proto/generate.py", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
