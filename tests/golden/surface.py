"""Writes anew what programs see of commands and metrics: ``python -m tests.golden.surface``.

It holds what no page of ``docs/reference`` does: the types of options, exit codes with the errors
that belong to them, the values in events of ``--json``, and ``/metrics`` as Prometheus reads it.
Help, defaults, meanings and the names of events are in those pages (``python -m docs.refresh``).

``surface.txt`` is the result; look at the difference before you commit it: it is what has changed
for users.
"""

import contextlib
import enum
import io
import json
import logging
import os
import re
import subprocess
import sys
import tempfile
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Literal, get_args, get_origin
from unittest import mock

import numpy as np
import typer.main

from rlmesh_ray import EnvServer, MeasuredEndpoint, ModelServer, RemoteVectorEnv, serve_metrics
from rlmesh_ray.cli.console import program
from rlmesh_ray.cli.main import app, main
from tests.golden.corpus import HERE

FILE = HERE / "surface.txt"
_FREE = "127.0.0.1:1"
"""An address where nothing listens."""
_SECRET, _OPEN = "secret.token", "open.token"
_POLICY = """
import numpy as np

def balance():
    return lambda observations: (observations[:, 2] + observations[:, 3] > 0).astype(np.int64)

def missing_file():
    open("no.file")
"""
_WRONG: tuple[tuple[str, ...], ...] = (
    ("trane",),
    ("serve-env",),
    ("serve-env", "NoSuchEnv-v0"),
    ("serve-env", "CartPole-v1", "--num-envs", "0"),
    ("serve-env", "CartPole-v1", "--env-kwargs", "{a"),
    ("serve-env", "CartPole-v1", "--validation", "maybe"),
    ("serve-env", "CartPole-v1", "--dialect", "latin"),
    ("serve-env", "CartPole-v1", "--step-grace", "inf"),
    ("serve-env", "CartPole-v1", "--allow-call", "step"),
    ("serve-env", "CartPole-v1", "--no-tokn"),
    ("serve-env", "CartPole-v1", "--address", "0.0.0.0:0"),
    ("serve-env", "CartPole-v1", "--token-file", "no.file"),
    ("serve-env", "CartPole-v1", "--token-file", _OPEN),
    ("serve-env", "CartPole-v1", "--no-token", "--token-file", _SECRET),
    ("serve-env", "CartPole-v1", "--tls-cert", _SECRET),
    ("serve-model", "no/such"),
    ("serve-model", ""),
    ("serve-model", "own_policy:missing_file"),
    ("serve-model", "own_policy:balance", "--max-delay", "500"),
    ("serve-model", "own_policy:balance", "--horizon", "0"),
    ("evaluate", "--env", "CartPole-v1"),
    ("evaluate", "--env", "CartPole-v1", "--model", "own_policy:balance", "--episodes", "0"),
    ("evaluate", "--env", _FREE, "--model", "own_policy:balance"),
    ("compare", "own_policy:balance", "no/such", "--env", "CartPole-v1"),
    ("inspect", "x"),
    ("inspect", _FREE),
    ("inspect", _FREE, "--health"),
    ("inspect", _FREE, "--sessions", "--health"),
    ("check", _FREE),
    ("check", f"dm_env_rpc://{_FREE}"),
    ("train", "CartPole-v1", "--set", "lr"),
    ("train", "CartPole-v1", "--algo", "NoSuch"),
    ("train", "CartPole-v1", "--record-every", "5"),
    ("watch", ""),
    ("bench", _FREE),
)
"""Commands that fail before anything is served, or as nothing is."""


def balance(observations: Any) -> Any:
    """Keep a pole up for a while."""
    return (observations[:, 2] + observations[:, 3] > 0).astype(np.int64)


def options() -> Iterator[str]:
    """Yield each argument and option of each command, with its type."""
    for name, command in typer.main.get_group(app).commands.items():
        params: list[Any] = sorted(command.params, key=lambda each: each.opts)
        for param in params:
            kind = _kind(param.type_descriptor.annotation)
            info = param.type_descriptor.parameter_info
            low, high = ("" if end is None else end for end in (info.min, info.max))
            limits = f" {low}..{high}" if (low, high) != ("", "") else ""
            marks = [("required", param.required), ("repeatable", param.multiple)]
            words = "".join(f", {mark}" for mark, is_set in marks if is_set)
            named = "/".join((*param.opts, *param.secondary_opts))
            yield f"{name} {named}: {kind}{limits}{words}"


def _kind(annotation: Any) -> str:
    if isinstance(annotation, type) and issubclass(annotation, enum.Enum):
        return "|".join(str(each.value) for each in annotation)
    if get_origin(annotation) is Literal:
        return "|".join(get_args(annotation))
    inner = [each for each in get_args(annotation) if each is not type(None)]
    return _kind(inner[0]) if inner else str(annotation.__name__)


def failures() -> Iterator[str]:
    """Yield the exit code, the kind of error and the message of commands that fail."""
    with _folder():
        for arguments in _WRONG:
            code, found = run(*arguments)
            (error,) = [event for event in found if event["event"] == "error"] or [{}]
            line = " ".join(each or "''" for each in arguments)
            yield f"{line}: {code} {error.get('type', '')}: {_plain(error.get('message', ''))}"


def _plain(message: str) -> str:
    """Return a message without this machine's folders, and without gRPC's own words."""
    shown = message.replace(f"{Path.cwd()}/", "").replace(program(), "rlmesh-ray")
    return re.sub(r" \(failed to connect.*", "", shown)


def events() -> Iterator[str]:
    """Yield the events of commands that succeed, with their values' types."""
    yield from _events_of_clients()
    with _folder():
        for arguments in (("serve-env", "CartPole-v1"), ("serve-model", "own_policy:balance")):
            code, found = _run_until_stopped(*arguments, "--metrics-address", "127.0.0.1:0")
            yield f"{arguments[0]}: {code}"
            yield from (_fields(arguments[0], event) for event in found)


def _events_of_clients() -> Iterator[str]:
    with (
        _folder(),
        EnvServer("CartPole-v1", num_envs=2) as env,
        ModelServer(balance) as model,
    ):
        venv = RemoteVectorEnv(env.address)
        venv.reset(seed=1)
        for arguments in (
            ("--version",),
            ("inspect", env.address),
            ("inspect", model.address),
            ("inspect", env.address, "--health"),
            ("inspect", env.address, "--sessions"),
            ("evaluate", "--env", env.address, "--model", model.address, *_EPISODES),
            (*_COMPARE, "--env", env.address, *_EPISODES),
            ("check", model.address, "--env", env.address),
        ):
            code, found = run(*arguments)
            shown = arguments[0]
            yield f"{shown}: {code}"
            yield from dict.fromkeys(_fields(shown, event) for event in found)
        venv.close()


_EPISODES = ("--episodes", "2", "--seed", "0")
_COMPARE = ("compare", "own_policy:balance", "own_policy:balance")


def _fields(command: str, event: dict[str, Any]) -> str:
    name = event.pop("event")
    return f"{command}/{name}: {_type(event)}"


def _type(value: object) -> str:
    match value:
        case dict():
            return f"{{{', '.join(f'{key}: {_type(each)}' for key, each in value.items())}}}"
        case list():
            return f"[{' | '.join(dict.fromkeys(map(_type, value)))}]"
        case bool():
            return "flag"
        case int() | float():
            return "number"
        case None:
            return "null"
    return "text"


def metrics() -> Iterator[str]:
    """Yield what a scrape finds, without its values."""
    with EnvServer("CartPole-v1") as env, ModelServer(balance) as model:
        servers: dict[str, EnvServer | ModelServer] = {"env": env, "model": model}

        def measured() -> list[MeasuredEndpoint]:
            return [MeasuredEndpoint(name, each.statistics()) for name, each in servers.items()]

        with (
            serve_metrics("127.0.0.1:0", measured) as address,
            urllib.request.urlopen(f"http://{address}/metrics", timeout=60.0) as answer,
        ):
            text = answer.read().decode()
    for line in text.splitlines():
        yield line if line.startswith("#") else line.rpartition(" ")[0]


def run(*arguments: str) -> tuple[int, list[dict[str, Any]]]:
    """Run a command in this process; return its exit code and its events."""
    out = io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(io.StringIO()):
        code = main([*arguments, "--json"])
    return code, [json.loads(line) for line in out.getvalue().splitlines()]


def _run_until_stopped(*arguments: str) -> tuple[int, list[dict[str, Any]]]:
    """Run a command that serves, in a process of its own, and stop it when it has metrics."""
    with subprocess.Popen(
        [sys.executable, "-m", "rlmesh_ray", *arguments, "--json"],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    ) as process:
        assert process.stdout is not None
        found = []
        for line in process.stdout:
            found.append(json.loads(line))
            if found[-1]["event"] == "metrics":
                process.terminate()
    return process.returncode, found


@contextlib.contextmanager
def _folder() -> Iterator[None]:
    """Work in a new folder, with an operator's own policy and two token files.

    Commands set up the log, which is put back at the end.
    """
    with (
        tempfile.TemporaryDirectory() as folder,
        contextlib.chdir(folder),
        mock.patch.object(sys, "path", [*sys.path]),
        mock.patch.dict(os.environ),
    ):
        os.environ.pop("RLMESH_RAY_TOKEN", None)
        Path("own_policy.py").write_text(_POLICY)
        for name, mode in ((_SECRET, 0o600), (_OPEN, 0o640)):
            Path(name).write_text("s3cret\n")
            Path(name).chmod(mode)
        loggers = [logging.getLogger(name) for name in ("rlmesh_ray", "grpc", "ray.rllib")]
        before = [(each, [*each.handlers], each.level) for each in loggers]
        try:
            yield
        finally:
            sys.modules.pop("own_policy", None)
            for each, handlers, level in before:
                each.handlers, each.level = handlers, level


SECTIONS: dict[str, Callable[[], Iterator[str]]] = {
    "options": options,
    "failures": failures,
    "events": events,
    "metrics": metrics,
}


def lines(section: str) -> list[str]:
    """Return the lines of a section, as the code has them."""
    return list(SECTIONS[section]())


def held(section: str) -> list[str]:
    """Return the lines of a section, as the file has them."""
    parts = FILE.read_text(encoding="utf-8").split("\n[")
    found = {head.strip("[]"): rest for head, _, rest in (part.partition("\n") for part in parts)}
    return found[section].rstrip("\n").split("\n")


def write(sections: Sequence[str]) -> None:
    """Write the file."""
    text = "\n\n".join("\n".join([f"[{each}]", *lines(each)]) for each in sections)
    FILE.write_text(f"{text}\n", encoding="utf-8")


if __name__ == "__main__":
    write(list(SECTIONS))
