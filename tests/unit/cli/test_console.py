import contextlib
import errno
import io
import json
import math
import sys
import threading
from pathlib import Path

import pytest
from rich.table import Table

from rlmesh_ray.cli import console as console_module
from rlmesh_ray.cli.console import Console, program

Capture = pytest.CaptureFixture[str]


def test_without_json_there_are_no_events(capsys: Capture) -> None:
    Console().event("result", return_mean=1.0)

    assert capsys.readouterr().out == ""


def test_an_event_is_one_line_of_strict_json(capsys: Capture) -> None:
    Console(is_json=True).event(
        "result", mean=math.nan, bounds=[1.0, math.inf], nested={"x": -math.inf}, path=Path("a/b")
    )

    (line,) = capsys.readouterr().out.splitlines()
    assert json.loads(line) == {
        "event": "result",
        "mean": None,
        "bounds": [1.0, None],
        "nested": {"x": None},
        "path": "a/b",
    }


@pytest.mark.parametrize("is_json", [False, True])
def test_text_for_people_goes_to_the_other_stream(is_json: bool, capsys: Capture) -> None:
    console = Console(is_json=is_json)

    console.say("hello")
    console.facts("title", {"name": "value [x]"}, ["inspect HOST:1"])

    captured = capsys.readouterr()
    text, other = (captured.err, captured.out) if is_json else (captured.out, captured.err)
    assert other == ""
    assert "hello" in text
    assert "value [x]" in text
    assert "inspect HOST:1" in text


def test_a_line_is_never_wrapped(capsys: Capture) -> None:
    Console().say("word " * 100)

    assert len(capsys.readouterr().out.splitlines()) == 1


def test_an_error_is_printed_as_text_and_as_an_event(capsys: Capture) -> None:
    Console(is_json=True).error("port 1 is in use " * 20, "AddressError")

    captured = capsys.readouterr()
    assert json.loads(captured.out)["type"] == "AddressError"
    assert captured.err.startswith("error: port 1")
    assert len(captured.err.splitlines()) == 1


def test_an_error_goes_to_standard_error(capsys: Capture) -> None:
    Console().error("port 1 is in use", "AddressError")

    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err == "error: port 1 is in use\n"


@pytest.fixture
def no_path(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")


def test_a_program_on_the_path_is_called_by_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = tmp_path / "rlmesh-ray"
    script.touch(mode=0o755)
    monkeypatch.setenv("PATH", str(tmp_path))

    assert program() == "rlmesh-ray"


@pytest.mark.usefixtures("no_path")
def test_a_program_next_to_python_is_called_by_its_path(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "rlmesh-ray").touch()
    monkeypatch.setattr(sys, "executable", str(tmp_path / "bin" / "python"))

    assert program() == str(tmp_path / "bin" / "rlmesh-ray")

    monkeypatch.chdir(tmp_path)
    assert program() == "bin/rlmesh-ray"


@pytest.mark.usefixtures("no_path")
def test_without_the_script_the_module_is_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))

    assert program() == f"{tmp_path / 'python'} -m rlmesh_ray"


def test_the_output_of_other_code_is_not_mixed_with_events(
    capsys: pytest.CaptureFixture[str],
) -> None:
    console = Console(is_json=True)

    with contextlib.redirect_stdout(sys.stderr):
        sys.stdout.write("output of a library\n")
        console.event("done")

    assert capsys.readouterr() == ('{"event": "done"}\n', "output of a library\n")


def test_text_that_standard_error_does_not_take_is_no_reason_to_fail(
    monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    class Full(io.StringIO):
        def write(self, text: str) -> int:
            raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(sys, "stderr", Full())
    console = Console(is_json=True)

    console.say("for people")
    console.people.print("for people")
    console.error("for people", "Error")
    console.event("result")

    with monkeypatch.context() as patched:
        patched.setattr(sys, "stdout", Full())
        with pytest.raises(OSError, match="No space left"):
            Console().say("for people")
    assert [json.loads(line)["event"] for line in capsys.readouterr().out.splitlines()] == [
        "error",
        "result",
    ]


def test_a_peers_text_is_printed_as_text(capsys: Capture) -> None:
    sent = "[red]:skull:\x1b]0;title\x9b2J"
    console = Console()
    table = Table(sent, title=sent)
    table.add_row(sent)

    for text in (sent, f"second {sent}"):
        console.say(text)
    console.show(table)
    console.facts(sent, {sent: sent}, [sent])
    console.error(sent, "Error")
    console.trace(sent)
    console.people.print(sent)

    captured = capsys.readouterr()
    output = captured.out + captured.err
    assert not {"\x1b", "\x9b"} & set(output)
    assert output.count("[red]:skull:\\x1b") == 12
    assert captured.err.startswith("error: [red]:skull:\\x1b]0;title\\x9b2J\n")


@pytest.mark.parametrize("is_json", [False, True])
def test_what_takes_long_is_said_on_standard_error_when_it_has_changed(
    is_json: bool, monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    monkeypatch.setattr(console_module, "_SILENCE_S", 1e-4)
    states, is_asked = ["0 of 2", "0 of 2", "1 of 2"], threading.Event()

    def doing() -> str:
        if len(states) == 1:
            is_asked.set()
            return states[0]
        return states.pop(0)

    with Console(is_json=is_json).waiting(doing):
        assert is_asked.wait(20)

    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err == "0 of 2 …\n1 of 2 …\n"


def test_nothing_is_said_of_what_is_over_soon_nor_where_programs_read_all(
    monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    with pytest.raises(ValueError, match="in vain"), Console().waiting("loading"):
        raise ValueError("in vain")
    monkeypatch.setattr(console_module, "_SILENCE_S", 0.0)
    console = Console()
    console.has_json_log = True
    threads = threading.active_count()
    with console.waiting("loading"):
        assert threading.active_count() == threads

    assert capsys.readouterr().err == ""
