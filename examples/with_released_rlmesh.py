"""Use what rlmesh-ray serves from a program that has the released rlmesh, and nothing of ours.

Serve an environment and a policy, from where rlmesh-ray is (CHECKPOINT: what ``rlmesh-ray train``
or ``make demo`` has written):

    rlmesh-ray serve-env CartPole-v1 --address 127.0.0.1:5555
    rlmesh-ray serve-model CHECKPOINT --address 127.0.0.1:5556

In another virtual environment, ``pip install rlmesh==0.1.0 gymnasium numpy`` and

    python examples/with_released_rlmesh.py 127.0.0.1:5555 127.0.0.1:5556

No option says which rlmesh is which: both ends find out. Without the second address a policy of
rlmesh's own acts, in its own loop.
"""

import argparse
import sys

import rlmesh  # type: ignore[import-not-found]  # of the other virtual environment
import rlmesh.numpy  # type: ignore[import-not-found]  # likewise

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
parser.add_argument("env", help="HOST:PORT of the environment")
parser.add_argument("model", nargs="?", help="HOST:PORT of the policy")
parser.add_argument("--episodes", type=int, default=5)


class FollowThePole(rlmesh.numpy.Model):
    """Pushes the cart of CartPole towards where the pole falls."""

    workflow_edition = "2026.06"

    def predict(self, observation):  # type: ignore[no-untyped-def]  # as rlmesh has it
        """Return the action for one observation."""
        return int(observation[2] + observation[3] > 0)


def main(env: str, model: str | None, episodes: int) -> None:
    """Run episodes and print the result of each."""
    seeds = list(range(episodes))
    if model is None:
        result = FollowThePole().run(env, seeds=seeds)
    else:
        result = rlmesh.run(rlmesh.RemoteModel(model), env, seeds=seeds)
    for episode in result.episodes:
        sys.stdout.write(f"seed {episode.seed}: {episode.steps} steps, reward {episode.reward:g}\n")


if __name__ == "__main__":
    arguments = parser.parse_args()
    main(arguments.env, arguments.model, arguments.episodes)
