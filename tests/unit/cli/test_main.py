import inspect
import io
import json
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.main import get_command

from benchmarks.cli.commands import app as benchmarks
from rlmesh_ray import EnvServer, ListenOptions, ModelServer, __version__, evaluate
from rlmesh_ray.cli.main import app, main, run
from rlmesh_ray.client.channel import ConnectOptions
from rlmesh_ray.models.loading import load_policy
from rlmesh_ray.recording import RecordOptions

Capture = pytest.CaptureFixture[str]
COMMANDS = ["serve-env", "serve-model", "train", "evaluate", "inspect"]
TLS_FILES = "^(?:model_)?tls_.*"
TWO_SCREENS = 80
TOKEN = "TOKEN_FILE"
"""Stands for a file with a token."""
ONLY_IN_THE_COMMAND_LINE = {
    "register", "pool-token-file", "endpoint-id", "advertise", "pool-tls-ca", "leave-time",
    "log-format", "output", "model-edition-text", "model-token-file", "metrics-address", "plot",
    "json", "debug", "help",
}  # fmt: skip


def test_without_a_command_the_help_lists_all_of_them(capsys: Capture) -> None:
    assert main([]) == 0

    text = capsys.readouterr().out
    assert all(command in text for command in COMMANDS)


def test_an_interrupt_whose_report_has_no_reader_is_still_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Unread(io.StringIO):
        def write(self, text: str) -> int:
            raise BrokenPipeError

    interrupted = typer.Typer()

    @interrupted.command()
    def interrupt() -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(sys, "stdout", Unread())

    assert run(interrupted, "own", []) == 130


def test_a_wrong_choice_is_named_in_plain_words(capsys: Capture) -> None:
    assert main(["serve-env", "CartPole-v1", "--validation", "foo"]) == 2

    text = " ".join(capsys.readouterr().err.split())
    assert "Invalid value for '--validation': 'foo' is not one of" in text


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_has_help(command: str, capsys: Capture) -> None:
    assert main([command, "--help"]) == 0

    text = capsys.readouterr().out
    assert "--json" in text
    assert "--debug" in text


@pytest.mark.parametrize("command", COMMANDS)
def test_help_is_short_and_has_groups_of_options(
    command: str, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "100")

    assert main([command, "--help"]) == 0

    text = capsys.readouterr().out
    assert len(text.splitlines()) <= TWO_SCREENS
    assert {"Security", "Output and logging"} <= set(re.findall(r"╭─ ([\w ]+?) ─", text))
    assert "╭─ Options" not in text


@pytest.mark.parametrize(
    "arguments", [*([command] for command in COMMANDS), ["check"], ["pool"], ["bench"]]
)
def test_values_of_options_have_readable_names(arguments: list[str], capsys: Capture) -> None:
    assert main([*arguments, "--help"]) == 0

    options = [line for line in capsys.readouterr().out.splitlines() if " --" in line[:10]]
    assert options
    assert not [line for line in options if "<" in line[:60]]


def test_choices_are_listed_in_the_help(capsys: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "300")

    assert main(["serve-env", "--help"]) == 0
    serving = capsys.readouterr().out
    assert main(["serve-model", "--help"]) == 0
    serving_policies = capsys.readouterr().out
    assert run(benchmarks, "python -m benchmarks", ["serving", "--help"]) == 0
    serving_bench = capsys.readouterr().out

    for text in (serving, serving_policies):
        assert re.search(r"--dialect +DIALECT +.*: rlmesh.protocol.v1, rlmesh-wire-v1", text)
    assert re.search(r"--autoreset +next_step\|disabled ", serving)
    assert re.search(r"--vs +NAME +.* One of noop, noop-uvloop, .*ray-serve\.", serving_bench)


@pytest.mark.parametrize(
    ("command", "owners"),
    [
        ("serve-env", [EnvServer, ListenOptions, RecordOptions]),
        ("serve-model", [ModelServer, ListenOptions, load_policy]),
        ("evaluate", [evaluate, EnvServer, load_policy, ConnectOptions, RecordOptions]),
    ],
)
def test_a_flag_is_named_like_the_parameter_of_the_same_thing(
    command: str, owners: list[Callable[..., Any]]
) -> None:
    commands: Any = get_command(app)
    flags = {
        param.opts[0].removeprefix("--")
        for param in commands.commands[command].params
        if param.param_type_name == "option"
    }
    parameters = {name for owner in owners for name in inspect.signature(owner).parameters}
    # One of several values, seconds, a switch that is on by default; files of a token and of TLS.
    forms = [r"\g<0>", r"\g<0>s", r"\g<0>_s"]
    rules = [*((r".+", form) for form in forms), ("^no_", ""), ("_file$", ""), (TLS_FILES, "tls")]
    rules += [("^map$", "observation_map"), ("^record_", "")]

    unlike = {
        flag
        for flag in flags - ONLY_IN_THE_COMMAND_LINE
        if not parameters & {re.sub(rule, form, flag.replace("-", "_")) for rule, form in rules}
    }

    assert not unlike


def test_the_version_is_printed(capsys: Capture) -> None:
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"rlmesh-ray {__version__}\n"

    assert main(["--version", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == {"event": "version", "version": __version__}


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["trane"], ["trane"]),
        (["serve-env"], ["ENV", "serve-env --help"]),
        (["serve-env", "CartPole-v1", "--num-envs", "0"], ["--num-envs"]),
        (["serve-env", "CartPole-v1", "--no-spin"], ["--no-spin: set", "RLMESH_RAY_SPIN=0"]),
        (["serve-model", "no/such", "--no-spin"], ["--no-spin: set", "RLMESH_RAY_SPIN=0"]),
        (
            ["serve-env", "CartPole-v1", "--data-advertise", "1"],
            ["--data-address", "HOST:PORT/ADVERTISED"],
        ),
        (["evaluate", "--env", "a:1", "--model", "a:1", "--env-timeout", "9"], ["--step-timeout"]),
        (["serve-env", "CartPole-v1", "--env-kwargs", "{a"], ["--env-kwargs", "JSON"]),
        (["serve-env", "CartPole-v1", "--validation", "maybe"], ["--validation", "strict"]),
        (["serve-env", "CartPole-v1", "--autoreset", "maybe"], ["--autoreset", "next_step"]),
        (["serve-env", "CartPole-v1", "--dialect", "latin"], ["--dialect", "dm_env_rpc.v1"]),
        (
            ["serve-env", "CartPole-v1", "--step-grace", "9"],
            ["5 s more, and then its worker is killed"],
        ),
        (["serve-env", "CartPole-v1", "--leave-time", "90000"], ["--leave-time", "a day"]),
        (["serve-env", "CartPole-v1", "--leave-time", "nan"], ["--leave-time", "finite"]),
        (["serve-env", "CartPole-v1", "--allow-call", "_x"], ["--allow-call", "names '_x', which"]),
        (["serve-env", "CartPole-v1", "--allow-call", "step"], ["--allow-call", "the session"]),
        (["serve-env", "CartPole-v1", "--tls-cert", __file__], ["--tls-cert and --tls-key"]),
        (["serve-model", "no/such", "--tls-key", __file__], ["--tls-cert and --tls-key"]),
        (["serve-env", "CartPole-v1", "--dialect", "rllink"], ["--dialect", "configure_rllink("]),
        (["serve-model", "no/such", "--dialect", "dm_env_rpc.v1"], ["--dialect", "rlmesh-wire-v1"]),
        (["inspect", "127.0.0.1:1", "--token-file", "no/such/file"], ["no/such/file"]),
        (["evaluate", "--env", "CartPole-v1"], ["--model"]),
        (
            ["check", "dm_env_rpc://127.0.0.1:1"],
            ["edition 2026.06 only", "inspect dm_env_rpc://127.0.0.1:1", "check 127.0.0.1:1"],
        ),
        (
            ["check", "rllink://127.0.0.1:1"],
            ["names no endpoint", "configure_rllink(config, address="],
        ),
        (["inspect", "rllink://127.0.0.1:1"], ["no endpoint", "configure_rllink(config, address="]),
        (["inspect", "127.0.0.1"], ["'127.0.0.1' is not an address"]),
        (["serve-env", "127.0.0.1:1"], ["is an address; give serve-env"]),
        (["serve-env", "CartPole-v1", "--address", "0.0.0.0:0"], ["give a token", "--no-token"]),
        (["serve-env", "CartPole-v1", "--data-address", "x"], ["'x' is not an address"]),
        (["serve-env", "CartPole-v1", "--no-token", "--token-file", TOKEN], ["leave out one of"]),
        (["serve-model", "no/such", "--no-token", "--token-file", TOKEN], ["leave out one of"]),
        (["serve-model", "127.0.0.1:1"], ["is an address; give serve-model"]),
        (["serve-model", "no/such", "--openpi-env", "CartPole-v1"], ["give --openpi HOST:PORT"]),
        (["serve-model", "no/such", "--openpi", "0.0.0.0:1"], ["give a token", "--no-token"]),
        (["serve-model", "no/such", "--address", "openpi://127.0.0.1:1"], ["--openpi 127.0.0.1:1"]),
        (
            ["serve-model", "openpi://127.0.0.1:1", "--device", "cpu"],
            ["RemoteModel('openpi://127.0.0.1:1')", "evaluate --model openpi://127.0.0.1:1"],
        ),
        (
            ["serve-model", "no/such", "--model-token-file", TOKEN],
            ["--model-token-file", "have clients dial openpi://HOST:PORT"],
        ),
        (["check", "openpi://127.0.0.1:1"], ["edition 2026.06 only"]),
        (["serve-model", "no/such"], ["no/such"]),
        (["serve-model", "no/such", "--max-delay", "nan"], ["--max-delay", "finite number"]),
        (["serve-model", "no/such", "--max-delay", "-1"], ["--max-delay", "0 or more"]),
        (["serve-model", "no/such", "--max-delay", "500"], ["--max-delay", "at most 60 seconds"]),
        (["watch", ""], ["TARGET", "names nothing", "HOST:PORT"]),
        (["watch", "a:1", "@127.0.0.1:9"], ["TARGET", "'@127.0.0.1:9' names nothing"]),
        (["bench", "127.0.0.1:1"], ["is an address; bench starts its own endpoint"]),
        (["evaluate", "--env", "a:1", "--model", "a:1", "--output", __file__], ["remove it"]),
        (["train", "127.0.0.1:1", "--num-envs", "4"], ["--num-envs", "endpoint"]),
        (["train", "CartPole-v1", "--set", "lr"], ["--set", "'lr' is not NAME=VALUE"]),
        (["train", "CartPole-v1", "--config", "no/such/file"], ["--config", "no/such/file"]),
        (
            ["train", "CartPole-v1", "--record", ""],
            ["--record", "the name is empty; name a folder"],
        ),
        (["train", "CartPole-v1", "--checkpoint-dir", " "], ["--checkpoint-dir", "name is empty"]),
        (["train", "--resume", ""], ["--resume", "name is empty"]),
        (["train", "--resume", __file__], ["--resume", "is a file; name a folder"]),
        (["train", "CartPole-v1", "--record-every", "5"], ["--record-every", "--record FOLDER"]),
        (["watch", "--folder", ""], ["--folder", "name is empty"]),
        (["serve-model", ""], ["the name of the policy is empty"]),
        (["compare", "a", "b", "--env", "x", "--plot", "/proc/x.png"], ["/proc/x.png cannot be"]),
    ],
)
def test_wrong_usage_is_an_error_in_one_line(
    arguments: list[str], words: list[str], capsys: Capture, monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:  # fmt: skip
    monkeypatch.delenv("RLMESH_RAY_TOKEN", raising=False)
    token = tmp_path / "token"
    token.write_text("s3cret\n")
    token.chmod(0o600)
    arguments = [str(token) if each == TOKEN else each for each in arguments]

    assert main(arguments) == 2

    captured = capsys.readouterr()
    (line,) = captured.err.splitlines()
    assert captured.out == ""
    assert line.startswith("error: ")
    assert all(word in line for word in words)


def test_a_plot_that_cannot_be_drawn_is_refused_before_the_first_episode(
    capsys: Capture, tmp_path: Path
) -> None:
    (tmp_path / "folder.png").mkdir()
    command = ["compare", "a", "b", "--env", "x", "--seed", "-1", "--plot"]

    assert main([*command, str(tmp_path / "folder.png")]) == 2
    assert "folder.png cannot be written (Is a directory)" in capsys.readouterr().err
    assert main([*command, str(tmp_path / "new.png")]) == 2
    assert "seed=-1" in capsys.readouterr().err
    assert not (tmp_path / "new.png").exists()


@pytest.mark.parametrize("option", ["--quux", "--token"])
def test_an_option_that_resembles_no_other_has_no_suggestion(option: str, capsys: Capture) -> None:
    assert main(["serve-env", "CartPole-v1", option]) == 2

    line = capsys.readouterr().err
    assert line.startswith(f"error: No such option: {option}; rlmesh-ray serve-env --help shows")


@pytest.mark.parametrize(
    ("option", "instead"),
    [
        ("--open-to-strangers", "give token=False (--no-token)"),
        ("--speak", "give dialects (--dialect)"),
    ],
)
def test_an_option_that_has_left_says_what_to_use_instead(
    option: str, instead: str, capsys: Capture
) -> None:
    assert main(["serve-env", "CartPole-v1", option]) == 2

    assert f"No such option: {option}: {instead}" in capsys.readouterr().err


def test_a_mistyped_option_has_a_suggestion(capsys: Capture) -> None:
    assert main(["serve-env", "CartPole-v1", "--no-tokn"]) == 2

    assert "No such option: --no-tokn (Possible options: --no-token);" in capsys.readouterr().err


@pytest.mark.parametrize("arguments", [["--json", "inspect"], ["inspect", "--json"]])
def test_wrong_usage_is_an_event(arguments: list[str], capsys: Capture) -> None:
    assert main(arguments) == 2

    event = json.loads(capsys.readouterr().out)
    assert event["event"] == "error"
    assert event["type"] == "UsageError"


@pytest.mark.parametrize("arguments", [["--debug", "inspect", "x"], ["inspect", "x", "--debug"]])
def test_debug_shows_the_traceback(arguments: list[str], capsys: Capture) -> None:
    assert main(arguments) == 2

    assert "Traceback" in capsys.readouterr().err


def test_without_debug_there_is_no_traceback(capsys: Capture) -> None:
    assert main(["inspect", "x"]) == 2

    assert len(capsys.readouterr().err.splitlines()) == 1


def test_help_loads_nothing_heavy() -> None:
    script = (
        "import sys; from rlmesh_ray.cli.main import main; main(['--help']); "
        "print(*sorted({'grpc', 'gymnasium', 'numpy', 'ray', 'torch'} & set(sys.modules)))"
    )

    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True
    )

    assert done.stdout.splitlines()[-1] == ""


@pytest.mark.parametrize("name", ["checkpoint", "learning_curve.png", "progress.csv"])
def test_a_training_does_not_overwrite_another_one(
    name: str, tmp_path: Path, capsys: Capture
) -> None:
    (tmp_path / name).mkdir()

    assert main(["train", "CartPole-v1", "--checkpoint-dir", str(tmp_path)]) == 2

    error = capsys.readouterr().err
    assert f"holds another run already ({name}); name another --checkpoint-dir" in error
    assert (f"--resume {tmp_path}" in error) == (name == "checkpoint")
