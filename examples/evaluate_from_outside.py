"""Run episodes against a served policy and a served environment, knowing only their addresses.

    rlmesh-ray serve-env CartPole-v1 --num-envs 8 --address 127.0.0.1:5555
    rlmesh-ray serve-model runs/demo/checkpoint --address 127.0.0.1:5556
    python examples/evaluate_from_outside.py --env 127.0.0.1:5555 --model 127.0.0.1:5556

Needs the base install only: neither Ray nor torch.
"""

import argparse

from rlmesh_ray import evaluate

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
parser.add_argument("--env", required=True, help="HOST:PORT of an environment's endpoint")
parser.add_argument("--model", required=True, help="HOST:PORT of a policy's endpoint")
parser.add_argument("--episodes", type=int, default=20)


def main(arguments: argparse.Namespace) -> None:
    """Run the episodes and print what they returned."""
    result = evaluate(arguments.env, arguments.model, episodes=arguments.episodes, seed=0)
    for episode in result.episodes:
        print(f"episode {episode.index}: return {episode.episode_return:g}, {episode.length} steps")
    print(f"mean return {result.return_mean:.2f} over {len(result.episodes)} episodes")


if __name__ == "__main__":
    main(parser.parse_args())
