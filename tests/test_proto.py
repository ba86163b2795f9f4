"""The schemas: built and linted by buf, compatible with the last release, and generated from."""

import re
import shutil
import subprocess
import sys
from itertools import pairwise
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
SCHEMAS = ROOT / "proto"
BUF = Path(sys.executable).parent / "buf"


def run(*command: str | Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [str(part) for part in command], cwd=ROOT, capture_output=True, text=True, check=False
    )


def buf(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    return run(BUF if BUF.exists() else shutil.which("buf") or "buf", *arguments)


def generate(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    return run(sys.executable, SCHEMAS / "generate.py", *arguments)


def last_release_with_schemas() -> str | None:
    """Return the newest release tag that this commit comes from and that has schemas."""
    tags = run("git", "tag", "--list", "v*", "--merged", "HEAD", "--sort=-version:refname")
    for tag in tags.stdout.split():
        if run("git", "cat-file", "-e", f"{tag}:proto/buf.yaml").returncode == 0:
            return tag
    return None


@pytest.fixture
def copied_schemas(tmp_path: Path) -> Path:
    return Path(shutil.copytree(SCHEMAS, tmp_path / "proto"))


def edit(schemas: Path, name: str, old: str, new: str) -> None:
    path = schemas / "rlmesh" / name
    text = path.read_text(encoding="utf-8")
    assert old in text
    path.write_text(text.replace(old, new), encoding="utf-8")


def test_the_generated_code_is_what_the_schemas_give() -> None:
    result = generate("--check")

    assert result.returncode == 0, result.stderr


def test_a_changed_schema_is_noticed(copied_schemas: Path) -> None:
    edit(copied_schemas, "env/v1/contract.proto", "uint32 num_envs = 6;", "uint32 num_envs = 8;")

    result = generate("--check", "--schemas", copied_schemas)

    assert result.returncode == 1
    assert result.stderr.splitlines() == [
        "differs: rlmesh/env/v1/contract_pb2.py",
        "run: python proto/generate.py",
    ]


def test_a_schema_that_was_taken_out_is_noticed(copied_schemas: Path) -> None:
    (copied_schemas / "rlmesh" / "model" / "v1" / "service.proto").unlink()

    result = generate("--check", "--schemas", copied_schemas)

    assert result.returncode == 1
    assert "differs: rlmesh/model/v1/service_pb2.py\n" in result.stderr
    assert "differs: rlmesh/model/v1/service_pb2.pyi\n" in result.stderr


def test_a_schema_that_does_not_compile_is_reported(copied_schemas: Path) -> None:
    edit(copied_schemas, "env/v1/contract.proto", "uint32 num_envs = 6;", "uint32 num_envs = ;")

    result = generate("--check", "--schemas", copied_schemas)

    assert result.returncode == 2
    assert "the schemas do not compile" in result.stderr
    assert "Traceback" not in result.stderr


def test_the_schemas_follow_the_style_of_buf() -> None:
    for command in ("build", "lint"):
        result = buf(command, SCHEMAS)

        assert result.returncode == 0, result.stdout + result.stderr


def test_the_schemas_break_no_peer_of_the_last_release() -> None:
    release = last_release_with_schemas()
    if release is None:
        # Nothing was released that could break. What can be held is that the schemas build and
        # are compatible with themselves, which is what a first release will be compared with.
        result = buf("breaking", SCHEMAS, "--against", SCHEMAS)
    else:
        result = buf("breaking", SCHEMAS, "--against", f".git#tag={release},subdir=proto")

    assert result.returncode == 0, f"against {release}:\n{result.stdout}{result.stderr}"


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("  string render_mode = 5;\n", ""),
        ("uint32 num_envs = 6;", "uint64 num_envs = 6;"),
        ("uint32 num_envs = 6;", "uint32 width = 6;"),
        ("AUTORESET_MODE_DISABLED = 3;", "AUTORESET_MODE_OFF = 3;"),
    ],
)
def test_a_breaking_change_is_noticed(copied_schemas: Path, old: str, new: str) -> None:
    edit(copied_schemas, "env/v1/contract.proto", old, new)

    result = buf("breaking", copied_schemas, "--against", SCHEMAS)

    assert result.returncode == 100
    assert "contract.proto" in result.stdout


def test_a_new_field_breaks_no_reader(copied_schemas: Path) -> None:
    edit(
        copied_schemas,
        "env/v1/contract.proto",
        "uint32 num_envs = 6;",
        "uint32 num_envs = 6;\n  string vendor = 20;",
    )

    assert buf("breaking", copied_schemas, "--against", SCHEMAS).returncode == 0


@pytest.mark.parametrize("path", sorted(SCHEMAS.rglob("*.proto")), ids=lambda path: path.stem)
def test_every_message_enum_and_service_is_explained(path: Path) -> None:
    lines = path.read_text(encoding="utf-8").splitlines()

    unexplained = [
        line
        for before, line in pairwise(lines)
        if re.match(r"(message|enum|service) ", line) and not before.startswith("//")
    ]

    assert unexplained == []
