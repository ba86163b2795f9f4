"""The real command: as a process of its own where that matters, else in this one."""

import contextlib
import csv
import functools
import json
import logging
import os
import re
import shlex
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc
import gymnasium
import numpy as np
import pytest

from rlmesh_ray import EnvServer, ModelServer, RemoteModel, RemoteVectorEnv
from rlmesh_ray.auth.server_tls import ServerTls
from rlmesh_ray.cli.main import main
from rlmesh_ray.client.channel import ConnectOptions
from rlmesh_ray.client.health import check_health
from rlmesh_ray.client.model.remote_model import policy_of
from rlmesh_ray.models.policy import PolicyTraits, Rows
from rlmesh_ray.protocol.handshake import HandshakeResponse
from rlmesh_ray.recording import load
from rlmesh_ray.spaces.contract import EnvContract
from rlmesh_ray.spaces.gym_conversion import from_gymnasium
from rlmesh_ray.testing.envs import EchoEnv, Fault, FaultyEnv
from rlmesh_ray.wire.rlmesh_v1 import env as wire
from tests.loopback.certificates import Authority, certified, needs_openssl
from tests.loopback.eventually import eventually
from tests.loopback.released_join import ReleasedJoin
from tests.ray.multi_agent_worlds import Climb
from tests.unit.models.onnx.test_onnx_models import looping

LIMIT_S = 240.0
"""Of a command that hangs; one that starts Ray takes a minute where the machine is busy."""
COMMAND = [sys.executable, "-m", "rlmesh_ray"]
POLICY = """
import numpy as np

def balance():
    return lambda observations: (observations[:, 2] + observations[:, 3] > 0).astype(np.int64)

def missing_file():
    open("no.file")
"""

Event = dict[str, Any]
Done = subprocess.CompletedProcess[str]
Run = Callable[..., Done]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Where the commands run: a folder with an operator's own code."""
    (tmp_path / "own_policy.py").write_text(POLICY)
    return tmp_path


def environment(token: str = "") -> dict[str, str]:
    return {**os.environ, "RLMESH_RAY_TOKEN": token}


@pytest.fixture
def here(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> Iterator[Run]:
    """Like ``run``, in this process and in ``folder``: without the seconds that a start takes."""
    monkeypatch.chdir(folder)
    monkeypatch.setattr(sys, "path", [*sys.path])  # the command adds the folder
    monkeypatch.delitem(sys.modules, "own_policy", raising=False)
    monkeypatch.setenv("GRPC_VERBOSITY", "NONE")
    loggers = [logging.getLogger(name) for name in ("rlmesh_ray", "grpc", "ray.rllib")]
    before = [(logger.handlers, logger.level) for logger in loggers]
    for logger in loggers:
        logger.handlers = [*logger.handlers]

    def command(*arguments: str, token: str = "", code: int = 0) -> Done:
        monkeypatch.setenv("RLMESH_RAY_TOKEN", token)
        capsys.readouterr()
        actual = main(arguments)
        output = capsys.readouterr()
        assert actual == code, output.err
        return subprocess.CompletedProcess(arguments, actual, output.out, output.err)

    yield command
    for logger, (handlers, level) in zip(loggers, before, strict=True):
        logger.handlers, logger.level = handlers, level


def run(*arguments: str, folder: Path, token: str = "", code: int = 0) -> Done:
    done = subprocess.run(
        [*COMMAND, *arguments],
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        cwd=folder,
        env=environment(token),
        check=False,
    )
    assert done.returncode == code, done.stderr
    return done


def events(text: str) -> list[Event]:
    return [json.loads(line) for line in text.splitlines()]


@contextlib.contextmanager
def started(
    *arguments: str, folder: Path, token: str = ""
) -> Iterator[tuple[subprocess.Popen[str], Event]]:
    """Run a command until the block ends; also return its first event."""
    with subprocess.Popen(
        [*COMMAND, *arguments, "--json"],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        cwd=folder,
        env=environment(token),
    ) as process:
        try:
            assert process.stdout is not None
            yield process, json.loads(process.stdout.readline())
        finally:
            process.kill()


# --- serving ---------------------------------------------------------------------------


def test_serve_env_serves_what_it_says_until_a_signal_ends_it(folder: Path) -> None:
    arguments = [
        "--num-envs", "3", "--env-kwargs", '{"render_mode": "rgb_array"}',
        "--autoreset", "disabled", "--dialect", "rlmesh.protocol.v1", "--dialect", "dm_env_rpc.v1",
        "--address", "0.0.0.0:0", "--no-token", "--record", "recorded", "--record-video", "none",
    ]  # fmt: skip
    with (
        started("serve-env", "CartPole-v1", *arguments, folder=folder) as (process, serving),
        contextlib.closing(RemoteVectorEnv(serving["address"])) as env,
    ):
        observation, _ = env.reset(seed=0)
        for _ in range(12):  # each episode ends: the pole falls within 11 steps
            env.step(np.zeros(3, np.int64))
        with pytest.raises(grpc.RpcError, match="does not speak rlmesh-wire-v1"):
            ReleasedJoin(serving["address"])
        output, wall_s = ended_by(process, signal.SIGTERM)

    assert serving["event"] == "serving"
    assert serving["service"] == "env"
    assert serving["autoreset_mode"] == "Disabled"
    assert serving["env"] == "CartPole-v1"
    assert serving["action_space"] == {"type": "Discrete", "n": 2, "start": 0, "dtype": "int64"}
    assert serving["num_envs"] == 3
    assert serving["render_mode"] == "rgb_array"
    assert observation.shape == (3, 4)
    assert process.returncode == 0
    assert events(output) == [{"event": "stopped", "address": serving["address"]}]
    assert wall_s < 10.0, "although a session was open"
    assert len(load(folder / "recorded").episodes) == 3


def ended_by(process: subprocess.Popen[str], number: signal.Signals) -> tuple[str, float]:
    """Send a process a signal; return the rest of its output, and how long its end took."""
    start_s = time.perf_counter()
    process.send_signal(number)
    output, _ = process.communicate(timeout=LIMIT_S)
    return output, time.perf_counter() - start_s


def test_serve_model_takes_the_number_of_actions_at_once_until_a_signal_ends_it(
    folder: Path,
) -> None:
    options = ["--horizon", "4", "--chunk-replay", "kept"]
    with (
        started("serve-model", "own_policy:balance", *options, folder=folder) as (process, serving),
        RemoteModel(serving["address"]) as model,
    ):
        facts = policy_of(model.answer)
        output, wall_s = ended_by(process, signal.SIGINT)

    assert (facts.horizon, facts.chunk_replay) == (4, "kept")
    assert process.returncode == 0
    assert events(output) == [{"event": "stopped", "address": serving["address"]}]
    assert wall_s < 10.0


def test_serve_model_serves_openpi_clients(folder: Path) -> None:
    observations = np.array([[0, 0, -0.1, 0]], np.float32)
    own = ["own_policy:balance", "--openpi", "127.0.0.1:0", "--openpi-env", "CartPole-v1"]
    with (
        started("serve-model", *own, folder=folder) as (_, serving),
        RemoteModel(f"openpi://{serving['openpi']}") as model,
    ):
        model.configure_route(gymnasium.make("CartPole-v1"))
        actions = [model.predict(sign * observations).tolist() for sign in (1, -1)]

    assert actions == [[0], [1]]


@pytest.mark.slow
def test_a_signal_ends_serve_model_although_its_policy_runs_native_code(
    folder: Path,
) -> None:
    onnx = pytest.importorskip("onnx")
    onnx.save(looping(10**15), folder / "loop.onnx")
    box = gymnasium.spaces.Box(-1, 1, (3,))

    with (
        started("serve-model", "loop.onnx", folder=folder) as (process, serving),
        RemoteModel(serving["address"]) as model,
        ThreadPoolExecutor(1) as aside,
    ):
        asking = aside.submit(model.configure_route, EchoEnv(box))
        options = ConnectOptions(serving["address"])
        assert eventually(lambda: not check_health(options).is_serving)
        output, wall_s = ended_by(process, signal.SIGTERM)
        assert asking.exception(LIMIT_S)

    assert process.returncode == 0
    assert events(output) == [{"event": "stopped", "address": serving["address"]}]
    assert wall_s < 10.0


def test_the_text_of_an_endpoint_does_not_control_the_terminal(here: Run) -> None:
    space = gymnasium.spaces.Dict({"[red]\x1b[2J": gymnasium.spaces.Box(-1, 1, (3,))})

    class Hostile(EchoEnv):
        def reset(self, **kwargs: Any) -> Any:
            raise ValueError("[red]\x1b]0;title\x07")

    with EnvServer(Hostile(space)) as server:
        policy = ("--model", "own_policy:balance")
        shown = here("inspect", server.address)
        failed = here("evaluate", "--env", server.address, *policy, code=1)
        checked = here("check", server.address, "--answer-timeout", "20", code=3)

    assert "[red]\\x1b[2J" in shown.stdout
    assert "[red]\\x1b]0;title" in failed.stderr
    assert "[red]\\x1b]0;title" in checked.stdout
    for done in (shown, failed, checked):
        assert "\x1b" not in done.stdout + done.stderr


# --- what a shell may do to a command --------------------------------------------------


@pytest.mark.parametrize(
    ("redirections", "code"),
    [
        (">&-", 0),
        ("2>&-", 0),
        ("<&-", 0),
        ("<&- >&- 2>&-", 0),
        ("2>/dev/full", 0),
        (">/dev/full", 1),
        ("| true", 1),
    ],
)
def test_standard_streams_may_be_closed_or_full(redirections: str, code: int) -> None:
    command = f"set -o pipefail; {shlex.join(COMMAND)} --help {redirections}"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, check=False)

    errors = "error: cannot write: No space left on device" if "full" in redirections else ""
    assert done.returncode == code
    assert done.stderr.startswith(errors if code else "")
    assert bool(done.stderr) is (redirections == ">/dev/full")


def test_characters_that_a_terminal_lacks_are_escaped(folder: Path) -> None:
    done = subprocess.run(
        [*COMMAND, "inspect", "127.0.0.1:1/µ"],
        capture_output=True,
        env={**environment(), "PYTHONIOENCODING": "ascii"},
        check=False,
    )

    assert b"\\xb5" in done.stderr
    assert b"UnicodeEncodeError" not in done.stderr


@pytest.mark.parametrize(("command", "code"), [("inspect", 130), ("serve-env", 0)])
def test_an_interrupt_while_a_command_is_imported_ends_it_quietly(
    command: str, code: int, tmp_path: Path
) -> None:
    (tmp_path / "typer.py").write_text("""
import signal
try:
    signal.raise_signal(signal.SIGINT)
except BaseException:
    pass  # as libraries do
""")
    path = os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        [*COMMAND, command, "CartPole-v1"],
        capture_output=True,
        text=True,
        env={**environment(), "PYTHONPATH": path},
        check=False,
    )

    assert (done.returncode, done.stdout, done.stderr) == (code, "", "interrupted\n")


def test_a_factory_of_the_operators_own_gets_the_keyword_arguments(here: Run, folder: Path) -> None:
    (folder / "own_factory.py").write_text(
        "from gymnasium.envs.classic_control import CartPoleEnv\n"
        "from gymnasium.wrappers import TimeLimit\n"
        "def short(steps):\n"
        "    return TimeLimit(CartPoleEnv(), steps)\n"
    )

    done = here(
        "evaluate", "--env", "own_factory:short", "--env-kwargs", '{"steps": 7}', "--model",
        "own_policy:balance", "--episodes", "2", "--json",
    )  # fmt: skip

    assert events(done.stdout)[-1]["lengths"] == [7, 7]


def test_keyword_arguments_for_a_running_endpoint_are_refused(here: Run) -> None:
    done = here(
        "evaluate", "--env", "127.0.0.1:1", "--model", "own_policy:balance",
        "--env-kwargs", "{}", code=2,
    )  # fmt: skip

    assert "a running endpoint has its own" in done.stderr


# --- evaluating ------------------------------------------------------------------------


def test_evaluate_serves_what_is_not_served_yet_and_finds_the_operators_own_next_to_him(
    folder: Path,
) -> None:
    (folder / "own_env.py").write_text(
        "import gymnasium\n"
        "from gymnasium.envs.classic_control import CartPoleEnv\n"
        "gymnasium.register('Own-v0', entry_point=CartPoleEnv, max_episode_steps=9)\n"
    )
    arguments = ["--env", "own_env:Own-v0", "--model", "own_policy:balance", "--seed", "7"]

    done = run(
        "evaluate", *arguments, "--episodes", "3", "--num-envs", "2", "--json", folder=folder
    )

    *episodes, result = events(done.stdout)
    assert sorted(episode["index"] for episode in episodes) == [0, 1, 2]
    assert {episode["event"] for episode in episodes} == {"episode"}
    assert {episode["index"]: episode["seed"] for episode in episodes} == {0: 7, 1: 8, 2: 9}
    assert result["event"] == "result"
    assert result["episodes"] == 3
    assert result["lengths"] == [9, 9, 9]
    assert result["return_mean"] == pytest.approx(sum(result["returns"]) / 3)
    assert result["return_stderr"] is not None
    assert result["imported"] == {"ray": False, "torch": False}
    assert "mean return" in done.stderr


def balance(observations: Any) -> Any:
    """The policy of the folder, for servers of the tests."""
    return (observations[:, 2] + observations[:, 3] > 0).astype(np.int64)


@pytest.fixture(scope="module")
def cartpole() -> Iterator[EnvServer]:
    with EnvServer("CartPole-v1", num_envs=2) as server:
        yield server


def test_several_endpoints_share_the_work_and_give_what_names_give(
    folder: Path, here: Run, cartpole: EnvServer
) -> None:
    rest = ["--episodes", "6", "--seed", "1", "--output", "episodes.jsonl", "--json"]
    with (
        EnvServer("CartPole-v1") as second,
        ModelServer(balance) as one,
        ModelServer(balance) as other,
    ):
        names = ["--env", cartpole.address, "--env", second.address, "--model", one.address]
        done = here("evaluate", *names, "--model", other.address, *rest)
        fails(here, ["evaluate", *names, *rest[:-1]], "episodes.jsonl", "name another file", code=2)
    by_name = ["--env", "CartPole-v1", "--model", "own_policy:balance"]
    people = here("evaluate", *by_name, *rest[:4], "--output", "by-name.jsonl")

    *episodes, result = events(done.stdout)
    assert events((folder / "episodes.jsonl").read_text()) == episodes
    assert sorted(episode["index"] for episode in episodes) == list(range(6))
    assert {episode["endpoint"] for episode in episodes} <= {cartpole.address, second.address}
    assert {episode["model"] for episode in episodes} <= {one.address, other.address}
    assert {"seed", "episode_return", "length", "terminated", "truncated", "success"} <= set(
        episodes[0]
    )
    assert result["env"] == f"{cartpole.address}, {second.address}"
    assert sum(report["episodes"] for report in result["endpoints"]) == 2 * 6
    assert result["interruptions"] == 0
    assert result["success_rate"] is None
    assert "steps/s" in done.stderr
    assert returns_by_seed(events((folder / "by-name.jsonl").read_text())) == returns_by_seed(
        episodes
    )
    assert "mean return" in people.stdout
    assert "6 episodes" in people.stdout
    # On a busy machine it says what it waits for.
    assert all(line.endswith(" …") for line in people.stderr.splitlines())


def returns_by_seed(episodes: list[Event]) -> dict[int, float]:
    return {episode["seed"]: episode["episode_return"] for episode in episodes}


@contextlib.contextmanager
def once_written(file: Path, then: Callable[[], object]) -> Iterator[None]:
    """Do something, from another thread, as soon as a command has finished an episode."""

    def wait() -> None:
        assert eventually(lambda: file.exists() and file.stat().st_size)
        then()

    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(wait)
        yield
        waiting.result()


def test_an_endpoint_that_dies_leaves_what_is_finished(folder: Path, here: Run) -> None:
    kept = folder / "kept.jsonl"
    with (
        EnvServer("CartPole-v1", num_envs=2) as server,
        once_written(kept, then=lambda: server.stop(0.0)),
    ):
        done = here(
            "evaluate", "--env", server.address, "--model", "own_policy:balance",
            "--episodes", "100000", "--reconnect-timeout", "0.2", "--output", kept.name, "--json",
            code=1,
        )  # fmt: skip

    *episodes, lost, unfinished, error = events(done.stdout)
    assert {episode["event"] for episode in episodes} == {"episode"}
    assert events(kept.read_text()) == episodes
    assert (lost["event"], lost["role"], lost["address"]) == ("lost", "env", server.address)
    assert unfinished["event"] == "unfinished"
    assert unfinished["episodes"] == len(episodes)
    assert error["type"] == "EvaluationInterruptedError"
    assert server.address in error["message"]
    assert f"{len(episodes)} of 100000 episodes" in done.stderr


def test_an_interrupted_evaluation_says_so_and_tells_what_has_finished(
    folder: Path, here: Run
) -> None:
    arguments = [*evaluation("CartPole-v1", "own_policy:balance")[:-1], "100000"]
    me = threading.get_ident()

    with once_written(folder / "made", then=lambda: signal.pthread_kill(me, signal.SIGINT)):
        done = here(*arguments, "--output", "made", "--json", code=130)

    *episodes, unfinished, interrupted = events(done.stdout)
    assert {episode["event"] for episode in episodes} == {"episode"}
    assert unfinished["event"] == "unfinished"
    assert unfinished["episodes"] == len(episodes)
    assert interrupted == {"event": "interrupted"}


# --- inspecting ------------------------------------------------------------------------


def test_inspect_tells_what_an_endpoint_is(here: Run) -> None:
    with (
        EnvServer("Pendulum-v1", num_envs=2) as env,
        ModelServer(lambda observations: observations) as model,
    ):
        (env_event,) = events(here("inspect", env.address, "--json").stdout)
        (model_event,) = events(here("inspect", model.address, "--json").stdout)
        text = here("inspect", f"rlmesh://{env.address}").stdout

    assert env_event["service"] == "env"
    assert env_event["env"] == "Pendulum-v1"
    assert env_event["edition"] == "2026.06"
    assert env_event["generation"] == "rlmesh.protocol.v1"
    assert model_event["service"] == "model"
    assert "rlmesh.model.concurrent_predict.v1" in model_event["capabilities"]
    assert "Box (1) float32 within [-2, 2]" in text


def test_inspect_shows_the_open_sessions_of_an_environment(here: Run) -> None:
    with EnvServer("CartPole-v1", num_envs=2) as server:
        empty = here("inspect", server.address, "--sessions").stdout
        env = RemoteVectorEnv(server.address)
        env.reset(seed=1)
        env.step(np.zeros(2, np.int64))
        number, event = events(here("inspect", server.address, "--sessions", "--json").stdout)
        text = here("inspect", server.address, "--sessions").stdout
        env.close()
    both = here("inspect", "127.0.0.1:1", "--sessions", "--health", code=2).stderr
    with ModelServer(lambda observations: observations) as model:
        refused = here("inspect", model.address, "--sessions", code=2).stderr

    assert "no session is open" in empty
    assert number["count"] == 1
    assert event["event"] == "session"
    assert event["address"] == server.address
    assert event["step_counts"] == [1, 1]
    assert event["cumulative_rewards"] == [1.0, 1.0]
    assert event["name"] in text
    assert event["transport"] in text
    assert "exclude each other" in both
    assert "sessions cannot be observed there" in refused


class Leaning:
    """A policy of the operator's own code, for CartPole alone, whose weights can be replaced."""

    traits = PolicyTraits(
        observation_space=from_gymnasium(gymnasium.spaces.Box(-1.0, 1.0, (4,))),
        action_space=from_gymnasium(gymnasium.spaces.Discrete(2)),
        kind="RLlib checkpoint",
        algorithm="PPO",
    )

    def check_contract(self, contract: EnvContract) -> None:
        """Act anywhere."""

    def predict(self, contract: EnvContract, rows: Rows) -> object:
        return np.zeros(rows.num_rows, np.int64)

    def forget(self, route_key: str, env_index: int | None) -> None:
        """Remember nothing."""

    def get_weights(self) -> object:
        return None

    def set_weights(self, weights: object) -> None:
        """Act as before."""


def test_inspect_tells_what_a_policy_is_and_its_version(here: Run) -> None:
    with ModelServer(Leaning()) as model:
        model.set_weights(None, version=12)
        text = here("inspect", model.address).stdout
        (event,) = events(here("inspect", model.address, "--json").stdout)

    for row in (
        r"policy +RLlib checkpoint ",
        r"algorithm +PPO ",
        r"policy version +12 ",
        r"observation +Box \(4\) float32 within \[-1, 1\] ",
        r"action +Discrete 0…1 ",
    ):
        assert re.search(row, text)
    assert event["policy"]["version"] == 12
    assert event["policy"]["observation_space"] == ["Box (4) float32 within [-1, 1]"]


def test_inspect_tells_how_many_actions_a_policy_chooses_at_once(here: Run) -> None:
    with ModelServer(lambda observations: observations, horizon=8, chunk_replay="kept") as model:
        text = here("inspect", model.address).stdout
        (event,) = events(here("inspect", model.address, "--json").stdout)

    assert re.search(r"horizon +8 actions at once ", text)
    assert re.search(r"chunk replay +kept ", text)
    assert (event["policy"]["horizon"], event["policy"]["chunk_replay"]) == (8, "kept")


def test_inspect_tells_of_a_function_what_is_known(here: Run) -> None:
    with ModelServer(lambda observations: observations) as model:
        text = here("inspect", model.address).stdout

    assert re.search(r"policy +function ", text)
    assert re.search(r"observation +not known before the policy acts ", text)
    assert "algorithm" not in text


# --- tokens and TLS --------------------------------------------------------------------


def own_file(path: Path, text: str) -> None:
    path.write_text(text)
    path.chmod(0o600)


@pytest.mark.parametrize("mode", [0o640, 0o604])
def test_a_token_file_that_others_may_read_is_refused(folder: Path, here: Run, mode: int) -> None:
    (folder / "token").write_text("s3cret\n")
    (folder / "token").chmod(mode)

    fails(here, ["serve-env", "CartPole-v1", "--token-file", "token"], "chmod 600", code=2)


def test_a_token_opens_the_door_from_a_file_or_the_environment(folder: Path, here: Run) -> None:
    own_file(folder / "token", "s3cret\n")
    with ModelServer(balance, token="s3cret") as server:
        here("inspect", server.address, "--token-file", "token")
        here("inspect", server.address, token="s3cret")
        refused = here("inspect", server.address, token="wrong", code=1)
        fails(here, ["inspect", server.address], server.address, "--token-file")

    assert "token" in refused.stderr


def test_each_endpoint_may_want_a_token_of_its_own(folder: Path, here: Run) -> None:
    own_file(folder / "env-token", "one")
    own_file(folder / "model-token", "two")
    arguments = ["--token-file", "env-token", "--model-token-file", "model-token"]
    with (
        EnvServer("CartPole-v1", token="one") as env,
        ModelServer(lambda observations: [0] * len(observations), token="two") as model,
    ):
        names = ["--env", env.address, "--model", model.address]
        here("evaluate", *names, "--episodes", "1", *arguments)


@needs_openssl
def test_each_endpoint_may_have_tls_of_its_own(folder: Path, here: Run) -> None:
    certificate, key = certified(folder, "ec", "-pkeyopt", "ec_paramgen_curve:P-256")
    tls = ServerTls(certificate, key)

    def names(env: EnvServer, model: ModelServer) -> list[str]:
        return ["evaluate", "--env", env.address, "--model", model.address, "--episodes", "1"]

    with (
        EnvServer("CartPole-v1") as env,
        EnvServer("CartPole-v1", tls=tls) as encrypted_env,
        ModelServer(balance) as model,
        ModelServer(balance, tls=tls) as encrypted_model,
    ):
        mine, its = ("--tls-ca", str(certificate)), ("--model-tls-ca", str(certificate))
        here(*names(encrypted_env, encrypted_model), *mine)
        here(*names(encrypted_env, model), *mine, "--model-tls-ca", "none")
        here(*names(env, encrypted_model), *its)
        env_without = here(*names(env, encrypted_model), *mine, code=1)
        with_it = here(*names(encrypted_env, model), *mine, code=1)
        without = here(*names(env, encrypted_model), code=1)
        no_file = here(*names(env, model), "--model-tls-ca", "no-file.pem", code=2)
        here("inspect", through_dm_env_rpc(encrypted_env.address), *mine)
        refused = here("inspect", encrypted_env.address, code=1)

    for failed, remedy in (
        (env_without, "(without --tls-ca)"),
        (with_it, "(without --tls-ca)"),
        (without, "name its authority (--tls-ca)"),
    ):
        assert remedy in failed.stderr
        assert "the policy's endpoint: --model-token-file, --model-tls-ca" in failed.stderr
    assert "no-file.pem" in no_file.stderr
    assert encrypted_env.address in refused.stderr


@needs_openssl
@pytest.mark.parametrize(
    "command", [pytest.param("serve-env", marks=pytest.mark.ray), "serve-model"]
)
def test_people_see_what_is_served_and_the_hints_work_as_they_stand(
    folder: Path, here: Run, command: str
) -> None:
    certificate, key = certified(folder, "ec", "-pkeyopt", "ec_paramgen_curve:P-256")
    own_file(folder / "a token", "s3cret")
    served = "CartPole-v1" if command == "serve-env" else "own_policy:balance"
    arguments = [
        command, served, "--token-file", "a token", "--tls-cert", str(certificate),
        "--tls-key", str(key),
    ]  # fmt: skip
    output = folder / "output"
    with (
        output.open("w") as file,
        subprocess.Popen(
            [*COMMAND, *arguments], stdout=file, text=True, cwd=folder, env=environment()
        ) as process,
    ):
        try:
            assert eventually(lambda: output.read_text().count("127.0.0.1:") == 3)
            inspect, other = (
                shlex.split(line.strip().partition("rlmesh-ray ")[2])
                for line in output.read_text().splitlines()[-2:]
            )
            here(*inspect)
            if other[0] == "train":
                assert other[1:] == inspect[1:]
            else:
                assert other[:3] == ["evaluate", "--env", "ENV_OR_ADDRESS"]
                here(*other[:2], "CartPole-v1", *other[3:], "--episodes", "1")
        finally:
            process.kill()

    assert "serving on 127.0.0.1:" in output.read_text()
    assert served.removeprefix("own_policy:") in output.read_text()


def through_dm_env_rpc(address: str) -> str:
    return f"dm_env_rpc://{address.removeprefix('rlmesh://')}"


def test_dm_env_rpc_is_spoken_where_the_address_says_so(folder: Path, here: Run) -> None:
    with EnvServer("CartPole-v1", num_envs=2, max_sessions=3) as server:
        address = through_dm_env_rpc(server.address)
        reported = events(here("inspect", address, "--json").stdout)
        shown = here("inspect", address)
        evaluated = here(*evaluation(address, "own_policy:balance"), "--json")

    assert [(one["service"], one["generation"], one["env"]) for one in reported] == [
        ("env", "dm_env_rpc.v1", "CartPole-v1")
    ]
    assert "dm_env_rpc.v1" in shown.stdout + shown.stderr
    assert "edition" not in shown.stdout + shown.stderr
    assert events(evaluated.stdout)[-1]["return_mean"] >= 1


@needs_openssl
def test_an_endpoint_may_want_certificates_and_ray_may_name_them(
    folder: Path, here: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    ours = Authority(folder, "ours")
    own, client = ours.sign("own"), ours.sign("client")
    tls = ["--tls-cert", str(own[0]), "--tls-key", str(own[1]), "--tls-client-ca", "ours.pem"]
    shown = ["--tls-ca", "ours.pem", "--tls-cert", str(client[0]), "--tls-key", str(client[1])]
    named = ("RAY_TLS_SERVER_CERT", "RAY_TLS_SERVER_KEY", "RAY_TLS_CA_CERT")
    others = ["--idle-timeout", "60", "--no-observers"]
    with started("serve-env", "CartPole-v1", *tls, *others, folder=folder) as (_, serving):
        address = serving["address"]
        here("inspect", address, *shown)
        refused = here("inspect", address, "--tls-ca", "ours.pem", code=1)
        half = here("inspect", address, *shown[:4], code=2)
        unset = here("inspect", address, "--tls-from-ray", code=2)
        for name, value in zip(named, [*client, ours.certificate], strict=True):
            monkeypatch.setenv(name, str(value))
        monkeypatch.setenv("RAY_USE_TLS", "1")
        here("inspect", address, "--tls-from-ray")

    assert "--tls-cert" in refused.stderr
    assert "--tls-key" in half.stderr
    assert "RAY_USE_TLS=1" in unset.stderr


# --- errors ----------------------------------------------------------------------------


def fails(command: Run, arguments: Sequence[str], *words: str, code: int = 1) -> None:
    """Check that ``command`` ends with a line that holds ``words``, and an exit code."""
    done = command(*arguments, "--json", code=code)

    *so_far, line = done.stderr.splitlines()
    assert all(each.endswith(" …") for each in so_far)  # on busy cores it says what it does
    assert line.startswith("error: ")
    for word in words:
        assert word in line
    event = events(done.stdout)[-1]
    assert event["event"] == "error"
    assert f"error: {event['message']}" == line


def evaluation(env: str, model: str) -> list[str]:
    return ["evaluate", "--env", env, "--model", model, "--episodes", "1"]


def test_an_error_is_all_that_a_process_says(folder: Path) -> None:
    arguments = ["serve-env", "Cart-v1"]

    fails(functools.partial(run, folder=folder), arguments, "Cart-v1", "CartPole", code=2)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["serve-env", "own_policy:missing_file"], ["own_policy:missing_file", "No such file"]),
        (["inspect", "127.0.0.1:9"], ["127.0.0.1:9", "nothing answers"]),
        (evaluation("127.0.0.1:9", "own_policy:balance"), ["127.0.0.1:9", "nothing answers"]),
    ],
)
def test_an_error_names_cause_and_remedy(arguments: list[str], words: list[str], here: Run) -> None:
    fails(here, arguments, *words)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["serve-env", "CartPole-v1", "--address", "0.0.0.0:0"], ["--token-file", "127.0.0.1"]),
        (["serve-env", "CartPole-v1", "--address", "here"], ["'here'", "HOST:PORT"]),
        (
            ["serve-env", "CartPole-v1", "--env-kwargs", '{"render": "human"}'],
            ["CartPole-v1", "'render'", "did you mean render_mode?"],
        ),
        (evaluation("Cart-v1", "own_policy:balance"), ["Cart-v1", "CartPole"]),
        (["serve-model", "no/such/folder"], ["no/such/folder", "RLlib checkpoint"]),
        (["serve-model", "own_policy.py"], ["own_policy.py", "TorchScript"]),
        (["serve-model", "own_policy:other"], ["own_policy", "other"]),
        (
            ["serve-model", "own_policy:balance", "--max-message-bytes", "9"],
            ["--max-message-bytes", "9 must be from 65536"],
        ),
        (["serve-model", "own_policy:balance", "--horizon", "0"], ["--horizon", "1"]),
        (
            ["serve-model", "own_policy:balance", "--chunk-replay", "kept"],
            ["needs a policy that chooses several actions", "--horizon"],
        ),
        (["serve-env", "127.0.0.1:5555"], ["is an address", "--address 127.0.0.1:5555"]),
        (["serve-env", "./mine:make"], ["without folder and without .py"]),
        (
            ["serve-env", "CartPole-v1", "--address", "dm_env_rpc://127.0.0.1:0"],
            ["dm_env_rpc://127.0.0.1:0", "write 127.0.0.1:0", "--dialect"],
        ),
        (["serve-model", "127.0.0.1:5555"], ["is an address", "--address 127.0.0.1:5555"]),
        (["inspect", "own_policy.pt"], ["is not an address", "serve-model own_policy.pt"]),
    ],
)
def test_wrong_usage_names_cause_and_remedy(
    arguments: list[str], words: list[str], here: Run
) -> None:
    fails(here, arguments, *words, code=2)


def test_an_address_in_use_is_named(here: Run) -> None:
    with ModelServer(balance) as server:
        arguments = ["serve-model", "own_policy:balance", "--address", server.address]
        fails(here, arguments, server.address, "in use")


def test_another_width_is_named(here: Run, cartpole: EnvServer) -> None:
    arguments = [*evaluation(cartpole.address, "own_policy:balance"), "--num-envs", "3"]
    fails(here, arguments, "2 lanes", "not 3")


def test_a_service_of_the_other_kind_is_named(here: Run, cartpole: EnvServer) -> None:
    with ModelServer(lambda observations: observations) as server:
        arguments = evaluation(server.address, "own_policy:balance")
        fails(here, arguments, server.address, "an environment or a model")
    arguments = evaluation(cartpole.address, cartpole.address)
    fails(here, arguments, cartpole.address, "an environment or a model")


def test_a_service_that_does_not_speak_dm_env_rpc_is_named(here: Run) -> None:
    with ModelServer(lambda observations: observations) as server:
        arguments = ["inspect", through_dm_env_rpc(server.address)]
        fails(here, arguments, "does not speak dm_env_rpc", "[dm-env-rpc]", "leave out")


@pytest.mark.nightly  # it is waited for, as a server that has just been started
def test_an_absent_dm_env_rpc_server_is_named(here: Run) -> None:
    fails(here, ["inspect", "dm_env_rpc://127.0.0.1:9"], "127.0.0.1:9", "nothing answers")


def test_a_policy_that_fails_is_named(here: Run) -> None:
    arguments = evaluation("Pendulum-v1", "own_policy:balance")

    fails(here, arguments, "model's endpoint", "out of bounds")


@pytest.fixture
def other_generation() -> Iterator[str]:
    """The address of an endpoint that speaks a generation to come."""

    def handshake(_data: bytes, _context: object) -> bytes:
        return wire.HANDSHAKE.pack_response(
            HandshakeResponse(
                False, "rlmesh.protocol.v9", "rlmesh.protocol.v9", "9.1", ("2099.01",)
            )
        )

    server = grpc.server(ThreadPoolExecutor(1))
    handler = grpc.unary_unary_rpc_method_handler(handshake)
    server.add_generic_rpc_handlers(
        (grpc.method_handlers_generic_handler("rlmesh.env.v1.EnvService", {"Handshake": handler}),)
    )
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    yield f"127.0.0.1:{port}"
    server.stop(None).wait()


def test_another_generation_is_named(other_generation: str, here: Run) -> None:
    words = (other_generation, "9.1", "rlmesh.protocol.v9", "rlmesh.protocol.v1", "2099.01")

    fails(here, ["inspect", other_generation], *words)
    fails(here, evaluation(other_generation, "127.0.0.1:1"), *words)


# --- training --------------------------------------------------------------------------


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> tuple[list[Event], Path]:
    """The events of a short training over two endpoints, and its folder."""
    folder = tmp_path_factory.mktemp("train")
    done = subprocess.run(
        [*COMMAND, "train", "CartPole-v1", "--num-endpoints", "2", "--num-envs", "4",
         "--stop-iters", "2", "--stop-return", "1000", "--seed", "1",
         "--set", "train_batch_size_per_learner=256",
         "--record", "recorded", "--record-every", "3", "--evaluate-every", "2",
         "--checkpoint-every", "1", "--keep", "2", "--track", "tensorboard",
         "--checkpoint-dir", "made", "--json"],
        capture_output=True, text=True, timeout=280, cwd=folder, check=False,
        # A Ray that runs on this machine is not the test's.
        env={**environment(), "RAY_ADDRESS": "local"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return events(done.stdout), folder / "made"


@pytest.mark.nightly
@pytest.mark.ray
def test_what_remote_runners_say_of_lost_sessions_is_shown_for_debugging(folder: Path) -> None:
    def break_down() -> FaultyEnv:
        return FaultyEnv(Fault.EXIT, at_step=100)

    with EnvServer(break_down, num_envs=8) as server:
        options = ["--stop-iters", "1", "--num-env-runners", "1", "--json"]
        done = run("--debug", "train", server.address, *options, folder=folder)

    assert events(done.stdout)[-1]["sessions_lost"] >= 1
    assert "the environment's process ended with exit code 3" in done.stderr


@pytest.mark.slow
@pytest.mark.ray
def test_a_training_that_is_interrupted_keeps_what_was_trained_and_goes_on(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RAY_ADDRESS", "local")
    with EnvServer("CartPole-v1", num_envs=8, token="s3cret") as server:
        own_file(folder / "token", "s3cret")
        process = subprocess.Popen(
            [*COMMAND, "train", server.address, "--checkpoint-dir", "made", "--json",
             "--set", "train_batch_size_per_learner=512", "--token-file", "token",
             "--record", "kept ones", "--record-every", "3"],
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=folder,
            env=environment(),
        )  # fmt: skip
        assert process.stdout is not None
        for line in process.stdout:
            if json.loads(line)["event"] == "progress":
                break

        process.terminate()
        output, errors = process.communicate(timeout=LIMIT_S)
        former = rows(folder / "made")
        # The endpoint may have moved: what goes on is told its address again.
        later = ["--stop-iters", str(len(former) + 1), "--token-file", "token", "--json"]
        resumed = run("train", server.address, "--resume", "made", *later, folder=folder)

    assert process.returncode == 130
    *_, result, last = events(output)
    assert (result["event"], result["interrupted"]) == ("result", True)
    assert Path(folder, result["checkpoint"], "rllib_checkpoint.json").is_file()
    assert Path(folder, result["learning_curve"]).is_file()
    assert last == {"event": "interrupted"}
    assert "once more ends at once" in errors
    again = "train --resume made --token-file token --record 'kept ones' --record-every 3"
    assert again in errors
    assert "SIGTERM" not in errors
    assert "s3cret" not in (folder / "made" / "run.json").read_text()
    (begun,) = (event for event in events(resumed.stdout) if event["event"] == "training")
    (progress,) = (event for event in events(resumed.stdout) if event["event"] == "progress")
    assert begun["iterations_before"] == len(former)
    assert progress["iteration"] == len(former) + 1
    assert progress["env_steps"] > int(former[-1]["env_steps"])
    assert rows(folder / "made")[:-1] == former


def rows(folder: Path) -> list[dict[str, str]]:
    """Return the iterations of a training in its ``progress.csv``."""
    with (folder / "progress.csv").open(newline="") as file:
        return list(csv.DictReader(file))


@pytest.mark.slow
@pytest.mark.ray
def test_train_evaluates_records_and_keeps_what_its_options_ask_for(
    trained: tuple[list[Event], Path],
) -> None:
    _, folder = trained

    runners = Counter(each.endpoint for each in load(folder.parent / "recorded").episodes)
    first, second = rows(folder)
    assert runners["evaluation runner 0"] == 10
    assert 1 < runners["env runner 0"] < (int(first["episodes"]) + int(second["episodes"])) / 2
    evaluated = [row["evaluation_return_mean"] != "nan" for row in (first, second)]
    assert evaluated == [False, True]
    assert list(folder.glob("events.out.tfevents.*"))
    assert len(list(folder.glob("checkpoint-*"))) == 2


@pytest.mark.slow
@pytest.mark.ray
def test_train_tells_how_it_goes_and_where_the_files_are(
    trained: tuple[list[Event], Path],
) -> None:
    reported, folder = trained

    kinds = [event["event"] for event in reported]
    assert kinds == ["ray", "training", "progress", "progress", "result"]
    assert reported[0]["started"] is True
    assert len(reported[1]["endpoints"]) == 2
    assert [event["iteration"] for event in reported[2:4]] == [1, 2]
    assert reported[3]["env_steps"] > reported[2]["env_steps"] > 0
    assert reported[2]["time_left_s"] == pytest.approx(reported[2]["wall_s"])
    assert reported[4]["reached"] is False
    assert (folder / "checkpoint" / "rllib_checkpoint.json").is_file()
    assert (folder / "learning_curve.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.slow
@pytest.mark.ray
def test_a_checkpoint_acts_where_it_was_trained_and_nowhere_else(
    trained: tuple[list[Event], Path], here: Run
) -> None:
    checkpoint = str(trained[1] / "checkpoint")

    done = here(*evaluation("CartPole-v1", checkpoint), "--json")

    assert events(done.stdout)[-1]["return_mean"] >= 1
    fails(here, evaluation("Pendulum-v1", checkpoint), "Pendulum-v1", "Discrete 0…1 is expected")


@pytest.mark.slow
@pytest.mark.ray
def test_a_folder_that_is_no_checkpoint_names_the_one_inside(
    trained: tuple[list[Event], Path], here: Run
) -> None:
    _, folder = trained

    fails(here, ["serve-model", str(folder)], "checkpoint", str(folder / "checkpoint"), code=2)


# That a fleet fails with the cause, and that causes become one line, is tested in parts, too.
@pytest.mark.nightly
@pytest.mark.ray
def test_train_on_an_unknown_environment_is_reported_in_one_line(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RAY_ADDRESS", "local")

    done = run("train", "Cart-v1", "--json", folder=folder, code=2)

    assert events(done.stdout)[-1]["type"] == "EnvStartError"
    assert "CartPole" in events(done.stdout)[-1]["message"]


@pytest.mark.ray
def test_train_on_nothing_is_reported_in_one_line(
    here: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RAY_ADDRESS", "127.0.0.1:1")

    done = here("train", "CartPole-v1", code=1)

    assert "127.0.0.1:1" in done.stderr
    assert "RAY_ADDRESS" in done.stderr


@pytest.mark.ray
def test_train_on_an_endpoint_that_does_not_fit_is_refused_before_ray_is_started(
    here: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RAY_ADDRESS", "127.0.0.1:1")
    with ModelServer(lambda observations: observations) as server:
        fails(here, ["train", server.address], server.address, "an environment or a model")
    with EnvServer("CartPole-v1", token="s3cret") as server:
        fails(here, ["train", server.address], server.address, "--token-file")
    fails(here, ["train", "127.0.0.1:9"], "127.0.0.1:9: nothing answers there")
    with EnvServer(Climb) as server:
        done = here("train", server.address, code=2)

    assert "one policy for one agent, and each lane of " in done.stderr
    assert "config.multi_agent(...)" in done.stderr


@pytest.mark.ray
def test_an_unknown_algorithm_is_named(here: Run) -> None:
    fails(here, ["train", "CartPole-v1", "--algo", "XPO"], "'XPO'", "PPO", code=2)
