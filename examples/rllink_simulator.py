"""A simulator that runs its own loop: acts with a copy of the policy, and sends its episodes.

    python examples/rllink_simulator.py 127.0.0.1:5555

RLlib learns in ``rllink_training.py``, which is started first, perhaps on another machine. Needs
neither Ray nor torch: ``pip install . onnxruntime``. The pole stands for your own simulator.
"""

import argparse
import os

import gymnasium

from rlmesh_ray import LocalAgent, RLlinkClient
from rlmesh_ray.errors import EndpointLostError

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
parser.add_argument("address", help="HOST:PORT of the training")


def main(arguments: argparse.Namespace) -> None:
    """Simulate until the training hangs up."""
    simulator = gymnasium.make("CartPole-v1")
    num_episodes = 0
    with RLlinkClient(arguments.address, token=os.environ.get("RLMESH_RAY_TOKEN")) as client:
        try:
            agent = LocalAgent(client)
            while True:
                play(simulator, agent)
                num_episodes += 1
        except EndpointLostError:
            print(f"the training is over; {num_episodes} episodes were played")


def play(simulator: gymnasium.Env, agent: LocalAgent) -> None:
    """Play an episode."""
    obs, _ = simulator.reset()
    action = agent.begin(obs)
    while True:
        obs, reward, terminated, truncated, _ = simulator.step(int(action))
        if terminated or truncated:
            agent.end(obs, float(reward), is_truncated=truncated)
            return
        action = agent.step(obs, float(reward))


if __name__ == "__main__":
    main(parser.parse_args())
