"""Serve a checkpoint, and ask it for actions as an outside program would.

    python examples/serve_and_query.py runs/demo/checkpoint --env CartPole-v1

The server and the client share a process here to keep the example short; ``rlmesh-ray
serve-model CHECKPOINT`` serves for real, and the client then needs the base install only.
"""

import argparse

import gymnasium
import numpy as np

from rlmesh_ray import ModelServer, RemoteModel
from rlmesh_ray.models import load_policy

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
parser.add_argument("checkpoint", help="RLlib checkpoint, TorchScript file or module:factory")
parser.add_argument("--env", default="CartPole-v1", help="a Gymnasium id")
parser.add_argument("--lanes", type=int, default=4, help="environments that are driven at once")
parser.add_argument("--steps", type=int, default=200)


def main(arguments: argparse.Namespace) -> None:
    """Serve, ask for actions, step with them."""
    envs = gymnasium.make_vec(arguments.env, num_envs=arguments.lanes)
    earned = np.zeros(arguments.lanes)
    with ModelServer(load_policy(arguments.checkpoint)) as server:
        print("serving on", server.address)
        with RemoteModel(server.address) as model:
            # The policy learns which spaces it meets, and refuses those it was not made for.
            model.configure_route(envs)
            observations, _ = envs.reset(seed=0)
            for _ in range(arguments.steps):
                actions = model.predict(observations)
                observations, rewards, *_ = envs.step(actions)
                earned += rewards
    envs.close()
    print(f"{arguments.steps} steps earned {earned.mean():.1f} a lane; last actions: {actions}")


if __name__ == "__main__":
    main(parser.parse_args())
