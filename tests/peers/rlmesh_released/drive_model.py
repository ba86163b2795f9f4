"""Runs models of the released rlmesh, local and remote ones, and writes what came of it as JSON.

``python -m tests.peers.rlmesh_released.drive_model TASK ARGUMENTS``, ARGUMENTS being a JSON object.
"""

import json
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import rlmesh  # type: ignore[import-not-found]  # of another virtual environment

from tests.peers.rlmesh_released.policies import MODELS


def run(model: str, env: str, settings: dict[str, Any] | None = None, **options: Any) -> Any:
    """Let its native loop run one of its models in an endpoint's environment."""
    return _reported(lambda: MODELS[model](**(settings or {})).run(env, **options))


def run_remote(model: str, env: str, **options: Any) -> Any:
    """Let its session loop run an endpoint's model in an endpoint's environment."""
    return _reported(lambda: rlmesh.run(rlmesh.RemoteModel(model), env, **options))


def run_several(models: list[str], envs: list[str], **options: Any) -> Any:
    """Do ``run_remote`` with each pair, all at once."""
    with ThreadPoolExecutor(len(envs)) as pool:
        return list(
            pool.map(lambda pair: run_remote(*pair, **options), zip(models, envs, strict=True))
        )


def by_hand(model: str, env: str) -> Any:
    """Drive a session step by step, in two episodes of which the first is given up."""
    with rlmesh.RemoteModel(model).session(env) as session:
        actions = []
        for seed, length in ((0, 3), (1, 6)):
            observation, _ = session.reset(seed=seed)
            for _ in range(length):
                action = session.predict(observation)
                observation, *_ = session.step(action)
                actions.append(int(action))
        return {"edition": session.selected_workflow_edition, "actions": actions}


def holds(model: str, env: str) -> None:
    """Begin an episode and stay until standard input ends."""
    session = rlmesh.RemoteModel(model).session(env)
    observation, _ = session.reset(seed=0)
    session.predict(observation)
    sys.stdout.write("ready\n")
    sys.stdout.flush()
    sys.stdin.read()


def _reported(work: Callable[[], Any]) -> Any:
    try:
        result = work()
    except Exception as error:  # noqa: BLE001  # the test judges it
        return {"error": type(error).__name__, "text": str(error)}
    return {
        "episodes": [
            {
                "seed": episode.seed,
                "steps": episode.steps,
                "reward": episode.reward,
                "terminated": episode.terminated,
                "truncated": episode.truncated,
                "success": episode.success,
            }
            for episode in result.episodes
        ],
        "metrics": sorted({f"{row.op} {row.metric}" for row in result.telemetry}),
    }


TASKS: dict[str, Callable[..., Any]] = {
    task.__name__: task for task in (run, run_remote, run_several, by_hand, holds)
}


def main() -> None:
    name, arguments = sys.argv[1:]
    reported = TASKS[name](**json.loads(arguments))
    if reported is not None:
        sys.stdout.write(json.dumps(reported))


main()
