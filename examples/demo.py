"""Train CartPole over two endpoints, serve the checkpoint, and evaluate it from outside of Ray.

    python examples/demo.py --out runs/demo

The program of ``make demo``. It writes ``checkpoint/``, ``learning_curve.png`` and
``summary.json``, and ends with 1 if a goal was missed. Needs the extra ``rllib``:
``pip install ".[rllib]"``.
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import ray
from matplotlib.figure import Figure
from ray.rllib.algorithms.ppo import PPOConfig

from rlmesh_ray.actors import EnvFleet, ModelServiceActor
from rlmesh_ray.rllib import configure, train

ENV = "CartPole-v1"
ENDPOINTS, LANES = 2, 16

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
parser.add_argument("--out", type=Path, default=Path("runs/demo"), help="what is written")
parser.add_argument("--goal", type=float, default=475.0, help="mean return to reach")
parser.add_argument("--episodes", type=int, default=20, help="to evaluate")
parser.add_argument("--seed", type=int, default=1, help="of the training")
parser.add_argument("--most-iterations", type=int, default=50, help="after which it gives up")


def main(arguments: argparse.Namespace) -> int:
    """Train, serve and evaluate; return the exit code."""
    start_s = time.perf_counter()
    out: Path = arguments.out
    out.mkdir(parents=True, exist_ok=True)
    shutil.rmtree(out / "checkpoint", ignore_errors=True)
    for name in ("learning_curve.png", "summary.json"):
        (out / name).unlink(missing_ok=True)
    print(f"starting Ray, and {ENDPOINTS} endpoints of {ENV} …", flush=True)
    # Ray reserves a CPU for each actor; these mostly wait.
    cpus = max(ENDPOINTS + 2, os.cpu_count() or 1)
    ray.init("local", num_cpus=cpus, log_to_driver=False, logging_level="error")
    with EnvFleet(ENV, num_endpoints=ENDPOINTS, num_envs=LANES) as fleet:
        endpoints = [place(each) for each in fleet.actors]
        where: dict[str, Any] = {"driver": {"pid": os.getpid()}, "endpoints": endpoints}
        for endpoint in endpoints:
            print(f"endpoint {endpoint['address']}: {LANES} lanes (process {endpoint['pid']})")
        history = learn(fleet, arguments)
        policy = ModelServiceActor.remote(str((out / "checkpoint").resolve()))
        where["policy"] = place(policy)
        print(f"policy   {where['policy']['address']} (process {where['policy']['pid']})")
        outside = evaluate_outside(fleet, where["policy"]["address"], arguments.episodes)
        where["evaluation"] = {"pid": outside["pid"]}
        ray.kill(policy)
    last = history[-1]
    summary = {
        "env": ENV,
        "algo": "PPO",
        "goal": arguments.goal,
        "train_return_mean": last.return_mean,
        "eval_return_mean": outside["return_mean"],
        "eval_return_stderr": outside["return_stderr"],
        "eval_episodes": outside["episodes"],
        "env_steps": last.env_steps,
        "iterations": last.iteration,
        "train_wall_s": last.wall_s,
        "wall_s": time.perf_counter() - start_s,
        "seed": arguments.seed,
        "eval_imported": outside["imported"],
        "where": where,
    }
    (out / "summary.json").write_text(json.dumps(summary, indent=2) + "\n")
    return show(summary, out)


def place(actor: Any) -> dict[str, Any]:
    """Return address and process id of the endpoint that an actor serves."""
    described = ray.get(actor.describe.remote())
    return {"address": described["address"], "pid": described["pid"]}


def learn(fleet: EnvFleet, arguments: argparse.Namespace) -> Sequence[Any]:
    """Train, and draw the learning curve; return the progress after each iteration."""
    config = PPOConfig().training(
        gamma=0.99,
        lambda_=0.9,
        lr=[[0, 1e-3], [150_000, 1e-4]],  # falling, so that the policy stays stable
        clip_param=0.2,
        use_kl_loss=False,
        vf_loss_coeff=0.5,
        vf_clip_param=10_000.0,
        grad_clip=0.5,
        train_batch_size_per_learner=2048,
        minibatch_size=256,
        num_epochs=10,
    )
    # The driver samples from both endpoints, and learns.
    config.env_runners(num_env_runners=0).debugging(seed=arguments.seed, log_level="ERROR")
    # Lockstep: the result must not depend on which session is faster.
    configure(config, fleet, lockstep=True)
    print(f"PPO until the mean return is {arguments.goal:g}:")
    history = []
    for progress in train(
        config,
        stop_return=arguments.goal,
        stop_iters=arguments.most_iterations,
        checkpoint_dir=arguments.out / "checkpoint",
    ):
        history.append(progress)
        print(
            f"iteration {progress.iteration}: {progress.env_steps:,} env steps, mean return "
            f"{progress.return_mean:.1f}, {progress.wall_s:.0f} s",
            flush=True,
        )
    figure = Figure(figsize=(7.0, 4.2), dpi=120, layout="constrained")
    axes = figure.add_subplot(
        title=f"PPO on {ENV}, over {ENDPOINTS} endpoints of {LANES} lanes",
        xlabel="env steps",
        ylabel="mean episode return",
    )
    steps = [progress.env_steps for progress in history]
    axes.plot(steps, [progress.return_mean for progress in history], marker="o", markersize=3)
    axes.axhline(arguments.goal, linestyle="--", color="gray", linewidth=1)
    figure.savefig(arguments.out / "learning_curve.png")
    return history


def evaluate_outside(fleet: EnvFleet, model: str, episodes: int) -> dict[str, Any]:
    """Run the evaluation in another process, which needs neither Ray nor torch; return its result.

    Raises:
        SystemExit: The process failed, or it imported Ray or torch.
    """
    command = ["evaluate", "--env", fleet.addresses[0], "--model", model]
    command += ["--episodes", str(episodes), "--seed", "10000", "--json"]
    print(f"outside  rlmesh-ray {' '.join(command)}", flush=True)
    with subprocess.Popen(
        [sys.executable, "-m", "rlmesh_ray", *command],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "RLMESH_RAY_TOKEN": fleet.tokens[0]},
    ) as process:
        try:
            output, errors = process.communicate(timeout=300.0)
        finally:
            process.kill()
    if process.returncode:
        raise SystemExit(f"the evaluation ended with exit code {process.returncode}: {errors}")
    result: dict[str, Any] = json.loads(output.splitlines()[-1])
    if any(result["imported"].values()):
        raise SystemExit(f"the evaluation imported {result['imported']}; it must need neither")
    return {**result, "pid": process.pid}


def show(summary: dict[str, Any], out: Path) -> int:
    """Print the result, and commands to try next; return the exit code."""
    trained, evaluated = summary["train_return_mean"], summary["eval_return_mean"]
    is_reached = min(trained, evaluated) >= summary["goal"]
    print("done" if is_reached else f"MISSED: a mean return of {summary['goal']:g} was the goal")
    print(f"  in training  {trained:.1f} after {summary['env_steps']:,} env steps")
    print(f"  outside      {evaluated:.1f} over {summary['eval_episodes']} episodes")
    print(f"  time         {summary['wall_s']:.0f} s, {summary['train_wall_s']:.0f} of training")
    print(f"  files        {', '.join(str(path) for path in sorted(out.iterdir()))}")
    print("next:")
    console_script = Path(sys.executable).with_name("rlmesh-ray")
    program = os.path.relpath(console_script) if console_script.exists() else "rlmesh-ray"
    for command in (
        f"serve-model {out / 'checkpoint'}",
        f"serve-env {ENV} --num-envs 8",
        f"evaluate --env {ENV} --model {out / 'checkpoint'} --episodes 20",
        f"train {ENV} --num-endpoints 2 --stop-return 475",
    ):
        print(f"  {program} {command}")
    if not is_reached:
        print(
            f"error: the mean return is {trained:.1f} in training and {evaluated:.1f} outside; "
            f"{summary['goal']:g} was the goal: try another --seed",
            file=sys.stderr,
        )
    return 0 if is_reached else 1


if __name__ == "__main__":
    sys.exit(main(parser.parse_args()))
