"""RLlib learns from a simulator that only asks a ModelService for actions and reports rewards.

    python examples/per_action_through_model_service.py train                     # here
    python examples/per_action_through_model_service.py simulate 127.0.0.1:5600   # anywhere

Any client of the protocol can simulate, in any language; this one is ours for Python, and it
neither has nor runs a model. With each question it says what its last action has led to, also at
the end of an episode, where the answer means nothing. PPO chooses the actions, and the training
puts the episodes together. A port that other machines can reach needs a token; here it comes
from the variable RLMESH_RAY_TOKEN.
"""

import argparse
import os
from typing import Any

import gymnasium
import numpy as np
from gymnasium.spaces import Box, Dict, Discrete

from rlmesh_ray import AutoresetMode, EnvContract, RemoteModel, Slots, from_gymnasium
from rlmesh_ray.errors import EndpointError

OBSERVATIONS = Box(-np.inf, np.inf, (4,))
ACTIONS: gymnasium.Space[Any] = Discrete(2)

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
roles = parser.add_subparsers(dest="role", required=True)
training = roles.add_parser("train")
training.add_argument("--address", default="127.0.0.1:5600", help="where to listen, HOST:PORT")
training.add_argument("--iterations", type=int, default=30)
training.add_argument("--batch", type=int, default=2048, help="steps of an iteration")
simulating = roles.add_parser("simulate")
simulating.add_argument("address", help="HOST:PORT of the training")


def train(arguments: argparse.Namespace) -> None:
    """Train and print the mean returns."""
    import ray
    from ray.rllib.algorithms.ppo import PPOConfig

    from rlmesh_ray.rllib import configure_rllink

    ray.init(log_to_driver=False)
    config = PPOConfig().training(
        lr=1e-3,
        train_batch_size_per_learner=arguments.batch,
        minibatch_size=min(256, arguments.batch),
        num_epochs=8,
    )
    config.env_runners(num_env_runners=0)
    configure_rllink(
        config,
        observation_space=OBSERVATIONS,
        action_space=ACTIONS,
        address="127.0.0.1:0",  # for simulators of the other kinds; see rllink_training.py
        service_address=arguments.address,
        token=os.environ.get("RLMESH_RAY_TOKEN"),
    )
    algorithm = config.build_algo()
    print(f"listening on {algorithm.env_runner.service_address}", flush=True)
    for iteration in range(1, arguments.iterations + 1):
        runners = algorithm.train()["env_runners"]
        mean = runners.get("episode_return_mean", float("nan"))
        print(f"iteration {iteration}: mean return {mean:.1f}", flush=True)
    algorithm.stop()


def simulate(arguments: argparse.Namespace) -> None:
    """Simulate until the training hangs up."""
    report = Dict(
        observation=OBSERVATIONS,
        reward=Box(-np.inf, np.inf, ()),
        terminated=Discrete(2),
        truncated=Discrete(2),
    )
    contract = EnvContract(
        id="CartPole",
        observation_space=from_gymnasium(report),
        action_space=from_gymnasium(ACTIONS),
        num_envs=1,
        autoreset_mode=AutoresetMode.DISABLED,
    )
    env = gymnasium.make("CartPole-v1")
    num_episodes = 0
    # Answers wait while the training learns.
    with RemoteModel(
        arguments.address, token=os.environ.get("RLMESH_RAY_TOKEN"), predict_timeout_s=600.0
    ) as model:
        try:
            model.configure_route(contract)
            while True:
                play(model, env, str(num_episodes))
                num_episodes += 1
        except EndpointError:
            print(f"the training is over; {num_episodes} episodes were played")


def play(model: RemoteModel, env: gymnasium.Env[Any, Any], episode_id: str) -> None:
    """Play an episode."""
    obs, _ = env.reset()
    reward: Any = 0.0
    terminated = truncated = False  # not looked at: nothing has happened yet
    for step in range(1_000_000):
        report = {
            "observation": obs[None],
            "reward": np.array([reward], np.float32),
            "terminated": np.array([int(terminated)]),
            "truncated": np.array([int(truncated)]),
        }
        slots = Slots([0], [episode_id], [step], [step == 0])
        action = model.predict(report, slots=slots)[0]
        if terminated or truncated:
            return
        obs, reward, terminated, truncated, _ = env.step(action)


if __name__ == "__main__":
    chosen = parser.parse_args()
    train(chosen) if chosen.role == "train" else simulate(chosen)
