"""The program of ``make demo``: train, serve and evaluate on this machine.

Trains CartPole over two endpoints on a local Ray, serves the checkpoint from a
ModelServiceActor, and evaluates it from a process without Ray and RLlib.
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlmesh_ray.cli.console import Console, program
from rlmesh_ray.cli.error_reporting import describe, trace
from rlmesh_ray.cli.local_ray import connected_ray, require_rllib
from rlmesh_ray.cli.log_setup import quiet_rllib, set_up
from rlmesh_ray.cli.options.common import TOKEN_VARIABLE
from rlmesh_ray.cli.signals import interrupt_on_sigterm
from rlmesh_ray.cli.views.training_view import StopCriteria, TrainingView, format_duration
from rlmesh_ray.errors import RlmeshError

if TYPE_CHECKING:
    from rlmesh_ray.actors.env_fleet import EnvFleet
    from rlmesh_ray.rllib.checkpoint_folder import TrainingProgress

_ENV = "CartPole-v1"
_NUM_ENDPOINTS = 2
_LANES = 16
_EVALUATION_SEED = 10_000
_EVALUATION_TIMEOUT_S = 300.0


@dataclass(frozen=True, slots=True)
class _DemoOptions:
    out: Path
    goal: float
    episodes: int
    seed: int
    most_iterations: int


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the demo; return the exit code: 0, or 1 when a goal was missed."""
    plan, is_debug = _plan(arguments)
    console = Console()
    set_up(is_debug=is_debug)
    try:
        require_rllib("the demo")
        with interrupt_on_sigterm(), connected_ray(console, _NUM_ENDPOINTS + 2, address="local"):
            return _run(console, plan)
    except KeyboardInterrupt:
        console.say("interrupted", style="yellow")
        return 130
    except Exception as error:  # noqa: BLE001  # the outermost frame: every error ends in one line
        if is_debug:
            console.trace(trace(error))
        console.error(*describe(error))
        return 1


def _plan(arguments: Sequence[str] | None) -> tuple[_DemoOptions, bool]:
    parser = argparse.ArgumentParser(prog="python -m rlmesh_ray.cli.demo", description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("runs/demo"), help="what is written")
    parser.add_argument("--goal", type=float, default=475.0, help="mean return to reach")
    parser.add_argument("--episodes", type=int, default=20, help="to evaluate")
    parser.add_argument("--seed", type=int, default=1, help="of the training")
    parser.add_argument("--most-iterations", type=int, default=50, help="after which it gives up")
    parser.add_argument("--debug", action="store_true", help="show tracebacks")
    given = parser.parse_args(arguments)
    plan = _DemoOptions(given.out, given.goal, given.episodes, given.seed, given.most_iterations)
    return plan, given.debug


def _run(console: Console, plan: _DemoOptions) -> int:
    start_s = time.perf_counter()
    _clear(plan.out)
    from rlmesh_ray.actors import EnvFleet

    console.say(f"starting {_NUM_ENDPOINTS} endpoints of {_ENV} …")
    with EnvFleet(_ENV, num_endpoints=_NUM_ENDPOINTS, num_envs=_LANES) as fleet:
        where = _show_fleet(console, fleet)
        history = _train(console, fleet, plan)
        policy, model = _serve(console, plan.out / "checkpoint")
        where["policy"] = model
        outside = _evaluate(console, fleet, model["address"], plan.episodes)
        where["evaluation"] = {"pid": outside["pid"]}
        _stop(policy)
    summary = {
        "env": _ENV,
        "algo": "PPO",
        "goal": plan.goal,
        "train_return_mean": history[-1].return_mean,
        "eval_return_mean": outside["return_mean"],
        "eval_return_stderr": outside["return_stderr"],
        "eval_episodes": outside["episodes"],
        "env_steps": history[-1].env_steps,
        "iterations": history[-1].iteration,
        "train_wall_s": history[-1].wall_s,
        "wall_s": time.perf_counter() - start_s,
        "seed": plan.seed,
        "eval_imported": outside["imported"],
        "where": where,
    }
    (plan.out / "summary.json").write_text(json.dumps(summary, indent=2) + "\n")
    return _show_summary(console, plan, summary)


def _clear(out: Path) -> None:
    """Remove the files of an earlier run, and no others."""
    out.mkdir(parents=True, exist_ok=True)
    shutil.rmtree(out / "checkpoint", ignore_errors=True)
    for name in ("learning_curve.png", "summary.json"):
        (out / name).unlink(missing_ok=True)


def _show_fleet(console: Console, fleet: "EnvFleet") -> dict[str, Any]:
    import ray

    endpoints = [
        {"address": described["address"], "pid": described["pid"]}
        for described in ray.get([actor.describe.remote() for actor in fleet.actors])
    ]
    for endpoint in endpoints:
        console.say(
            f"endpoint {endpoint['address']}: {_LANES} lanes of {_ENV} a session "
            f"(actor in process {endpoint['pid']})"
        )
    return {"driver": {"pid": os.getpid()}, "endpoints": endpoints}


def _train(console: Console, fleet: "EnvFleet", plan: _DemoOptions) -> "list[TrainingProgress]":
    from rlmesh_ray.models.torch.threads import limit_torch_threads
    from rlmesh_ray.rllib import configure
    from rlmesh_ray.rllib.config.presets import ppo_config
    from rlmesh_ray.rllib.training import learning_curve, train

    limit_torch_threads(1)  # as train() does
    config = ppo_config()
    config.debugging(seed=plan.seed)
    quiet_rllib(config)
    # Reproducible: the result must not depend on which session is faster.
    configure(config, fleet, lockstep=True)
    goal = StopCriteria(stop_return=plan.goal, stop_iters=plan.most_iterations)
    console.say(f"PPO through RLMeshEnvRunner, until the mean return is {goal.stop_return:g}:")
    with TrainingView(console, goal) as view:
        run = train(
            config,
            stop_return=goal.stop_return,
            stop_iters=goal.stop_iters,
            checkpoint_dir=plan.out / "checkpoint",
        )
        history = view.follow(run)
    title = f"PPO on {_ENV}, over {_NUM_ENDPOINTS} endpoints of {_LANES} lanes"
    learning_curve(history, plan.out / "learning_curve.png", title=title, goal=plan.goal)
    return history


def _serve(console: Console, checkpoint: Path) -> tuple[Any, dict[str, Any]]:
    import ray

    from rlmesh_ray.actors import ModelServiceActor

    actor_class: Any = ModelServiceActor
    actor = actor_class.remote(str(checkpoint.resolve()))
    described = ray.get(actor.describe.remote())
    address, pid = described["address"], described["pid"]
    console.say(f"policy   {address}: the checkpoint (actor in process {pid})")
    return actor, {"address": address, "pid": pid}


def _evaluate(
    console: Console, fleet: "EnvFleet", model_address: str, episodes: int
) -> dict[str, Any]:
    """Run the evaluation in another process; return its result.

    Raises:
        RlmeshError: The process failed, or it imported Ray or torch.
    """
    command = [sys.executable, "-m", "rlmesh_ray", "evaluate"]
    command += ["--env", fleet.addresses[0], "--model", model_address]
    command += ["--episodes", str(episodes), "--seed", str(_EVALUATION_SEED), "--json"]
    console.say(f"outside  {program()} {' '.join(command[3:])}")
    process = subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, TOKEN_VARIABLE: fleet.tokens[0]},
    )
    try:
        output, errors = process.communicate(timeout=_EVALUATION_TIMEOUT_S)
    finally:
        process.kill()
    if process.returncode != 0:
        raise RlmeshError(f"the evaluation ended with exit code {process.returncode}: {errors}")
    result: dict[str, Any] = json.loads(output.splitlines()[-1])
    if any(result["imported"].values()):
        raise RlmeshError(f"the evaluation imported {result['imported']}; it must need neither")
    return {**result, "pid": process.pid}


def _stop(actor: Any) -> None:
    import ray

    ray.kill(actor)


def _show_summary(console: Console, plan: _DemoOptions, summary: dict[str, Any]) -> int:
    where = summary["where"]
    endpoints = "\n".join(
        f"{endpoint['address']} (process {endpoint['pid']})" for endpoint in where["endpoints"]
    )
    is_reached = min(summary["train_return_mean"], summary["eval_return_mean"]) >= plan.goal
    checkpoint = plan.out / "checkpoint"
    console.facts(
        "done" if is_reached else f"MISSED: a mean return of {plan.goal:g} was the goal",
        {
            "endpoints": endpoints,
            "trainer": f"PPO, RLMeshEnvRunner (process {where['driver']['pid']})",
            "policy": f"{where['policy']['address']} (process {where['policy']['pid']})",
            "evaluation": f"process {where['evaluation']['pid']}, without Ray and torch",
            "training return": f"{summary['train_return_mean']:.1f} after "
            f"{summary['env_steps']:,} env steps, {format_duration(summary['train_wall_s'])}",
            "evaluated return": f"{summary['eval_return_mean']:.1f} over "
            f"{summary['eval_episodes']} episodes",
            "time": format_duration(summary["wall_s"]),
            "files": f"{checkpoint}\n{plan.out / 'learning_curve.png'}\n"
            f"{plan.out / 'summary.json'}",
        },
        [
            f"serve-model {checkpoint}",
            f"serve-env {_ENV} --num-envs 8",
            f"evaluate --env {_ENV} --model {checkpoint} --episodes 20",
            f"train {_ENV} --num-endpoints 2 --stop-return 475",
        ],
    )
    if not is_reached:
        console.error(
            f"the mean return is {summary['train_return_mean']:.1f} in training and "
            f"{summary['eval_return_mean']:.1f} outside; {plan.goal:g} was the goal: try another "
            "--seed",
            "GoalMissed",
        )
    return 0 if is_reached else 1


if __name__ == "__main__":
    sys.exit(main())
