"""Drives endpoints with the clients of the released rlmesh, and writes what happened as JSON.

``python -m tests.peers.rlmesh_released.drive_env TASK ARGUMENTS``, ARGUMENTS being a JSON object.
"""

import json
import sys
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from tests.peers.rlmesh_b3 import world
from tests.peers.rlmesh_released import echo
from tests.peers.rlmesh_released.clients import connect


def play(
    address: str, kind: str, framework: str, seed: Any, count: int = 7, **reset: Any
) -> dict[str, Any]:
    """Play World for ``count`` steps; tell the trace and what is said about the environment."""
    env = connect(address, kind, framework)
    actions = world.actions(5, count) if kind == "env" else world.batches(2, count)
    trace = world.play(env, world.World.observation_space, actions, seed=seed, **reset)
    frame = env.render()
    reported = {
        "id": env.env_contract.id,
        "num_envs": env.env_contract.num_envs,
        "metadata": {key: str(value) for key, value in env.metadata.items()},
        "edition": env.selected_workflow_edition,
        "frame": None if frame is None else np.asarray(frame).tolist(),
        "trace": trace,
    }
    env.close()
    return reported


def echoes(addresses: dict[str, str], kind: str, framework: str) -> dict[str, Any]:
    """Send values of each space; tell the first observation and what came back."""
    reported = {}
    for name, address in addresses.items():
        space = echo.SPACES[name]
        actions = echo.samples(name, 4) if kind == "env" else echo.batches(name, 2, 2)
        env = connect(address, kind, framework)
        seen = [env.reset(seed=5)[0]]
        seen += [env.step(echo.with_unsigned_flags(space, action))[0] for action in actions]
        reported[name] = [world.reported(space, value) for value in seen]
        env.close()
    return reported


def returns_large(address: str) -> bool:
    """Send a large action; tell whether it came back as it was."""
    env = connect(address, "env")
    env.reset()
    echo.LARGE.seed(1)
    action = echo.LARGE.sample()
    observation = env.step(action)[0]
    env.close()
    return np.array_equal(observation, action)


def deeds(
    address: str, doings: list[Any], timeout_s: float | None = None, kind: str = "env"
) -> list[Any]:
    """Do one thing after another with Trouble, also after errors; return the results.

    Args:
        doings: Of each: an action (a list of them for a vector), None for a reset, an object with
            the arguments of a reset, or ``"render INDEX"``.
    """
    env = connect(address, kind, request_timeout_seconds=timeout_s)
    reported = [_outcome(env, doing) for doing in doings]
    env.close()
    return reported


def _outcome(env: Any, doing: Any) -> Any:
    began_s = time.monotonic()
    try:
        match doing:
            case None:
                came = env.reset()
            case dict():
                came = env.reset(**doing)
            case str():
                frame = env.render(env_index=int(doing.removeprefix("render ")))
                came = [None if frame is None else np.asarray(frame).shape]
            case _:
                came = env.step(np.array(doing) if isinstance(doing, list) else doing)
    except Exception as error:  # noqa: BLE001  # the test judges it
        took_s = time.monotonic() - began_s
        return {"error": type(error).__name__, "text": str(error), "took_s": took_s}
    return world.plain(came)


def stays(address: str, kind: str = "env") -> None:
    """Begin an episode and stay until standard input ends; then vanish without a word."""
    env = connect(address, kind)
    env.reset(seed=1)
    sys.stdout.write("ready\n")
    sys.stdout.flush()
    sys.stdin.read()
    env.step(0)


def steps(address: str) -> None:
    """Step CartPole as often as each line says, and answer with the sum of all rewards."""
    env = connect(address, "env")
    env.reset(seed=0)
    rewards = 0.0
    for line in sys.stdin:
        for step in range(int(line)):
            _, reward, terminated, truncated, _ = env.step(step % 2)
            rewards += reward
            if terminated or truncated:
                env.reset()
        sys.stdout.write(f"{rewards}\n")
        sys.stdout.flush()
    env.close()


def refused(address: str, kind: str) -> str:
    """Connect where it must not work; tell why it did not."""
    try:
        connect(address, kind).close()
    except Exception as error:  # noqa: BLE001  # the test judges it
        return f"{type(error).__name__}: {error}"
    return ""


def shuts_down(address: str) -> bool:
    """Ask the endpoint to end; tell whether it will."""
    env = connect(address, "env")
    accepted: bool = env.shutdown()
    env.close()
    return accepted


TASKS: dict[str, Callable[..., Any]] = {
    task.__name__: task
    for task in (play, echoes, returns_large, deeds, stays, steps, refused, shuts_down)
}


def main() -> None:
    name, arguments = sys.argv[1:]
    reported = TASKS[name](**json.loads(arguments))
    if reported is not None:
        sys.stdout.write(json.dumps(reported))


main()
