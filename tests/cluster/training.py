"""The cluster's driver: PPO over endpoints that fill all nodes, until a lost node is replaced.

One JSON object a line goes to stdout: where the runner is; then, after each iteration, how many
steps there are and where the endpoints are. Ends by itself some iterations after endpoints have
been away and are all back, and with an error when that takes too long.

    python training.py --endpoints 3 --within-s 200
"""

import argparse
import json
import time
from collections import defaultdict
from typing import Any

import numpy as np
import ray
from ray.rllib.algorithms.ppo import PPOConfig

from rlmesh_ray.actors import EnvFleet
from rlmesh_ray.rllib import configure

BATCH = 600
_ITERATIONS_AFTERWARDS = 3
_PATIENCE_S = 0.5

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
parser.add_argument("--endpoints", type=int, required=True, help="one CPU each")
parser.add_argument("--within-s", type=float, required=True)


class Ledger:
    """Holds the chunks of episodes that have arrived against each other."""

    def __init__(self) -> None:
        self.num_steps = 0
        self.num_gaps = 0
        self._lengths: dict[str, int] = defaultdict(int)
        self._last: dict[str, Any] = {}

    def __deepcopy__(self, _memo: object) -> "Ledger":
        return self  # RLlib copies configs

    def enter(self, *, samples: list[Any], **_: Any) -> None:
        """Note one sample; RLlib calls this as ``on_sample_end``."""
        for chunk in samples:
            first, *_rest, last = chunk.get_observations()
            known = self._lengths[chunk.id_]
            if chunk.t_started != known or (known and (first != self._last[chunk.id_]).any()):
                self.num_gaps += 1
            self._lengths[chunk.id_] += len(chunk)
            self._last[chunk.id_] = np.array(last)
            self.num_steps += len(chunk)


class Whereabouts:
    """Where a fleet's endpoints are."""

    def __init__(self, fleet: EnvFleet) -> None:
        self._actors = fleet.actors
        self._asked = [actor.describe.remote() for actor in self._actors]
        self._known = [dict(answer) for answer in ray.get(self._asked)]

    def look(self) -> list[dict[str, Any] | None]:
        """Return each endpoint's node, address and number of sessions; None: its node is lost.

        Who does not answer at once is where it has been.
        """
        answered, _ = ray.wait(self._asked, num_returns=len(self._asked), timeout=_PATIENCE_S)
        for index, reference in enumerate(self._asked):
            if reference in answered:
                self._known[index] = _answer(reference) or self._known[index]
                self._asked[index] = self._actors[index].describe.remote()
        alive = {node["NodeID"] for node in ray.nodes() if node["Alive"]}
        return [each if each["node_id"] in alive else None for each in self._known]


def _answer(reference: Any) -> dict[str, Any] | None:
    try:
        return dict(ray.get(reference))
    except ray.exceptions.RayError:
        return None


def tell(**facts: Any) -> None:
    """Write one line."""
    print(json.dumps(facts), flush=True)  # noqa: T201  # this is a program


def main(arguments: argparse.Namespace) -> None:
    """Train until what was lost is back and of use."""
    ray.init(log_to_driver=False)
    deadline_s = time.monotonic() + arguments.within_s
    with EnvFleet("CartPole-v1", num_endpoints=arguments.endpoints, num_envs=4) as fleet:
        ledger = Ledger()
        config = PPOConfig().env_runners(num_env_runners=0)
        config.training(train_batch_size_per_learner=BATCH, minibatch_size=200, num_epochs=2)
        config.callbacks(on_sample_end=ledger.enter)
        algorithm = configure(config, fleet).build_algo()
        whereabouts = Whereabouts(fleet)
        tell(runner=ray.get_runtime_context().get_node_id(), endpoints=whereabouts.look())
        were_away, left = False, _ITERATIONS_AFTERWARDS
        while left:
            if time.monotonic() > deadline_s:
                raise TimeoutError("no node has been lost and replaced in time")
            reported = algorithm.train()["env_runners"]
            there = whereabouts.look()
            in_use = all(each and each["num_sessions"] for each in there)
            were_away = were_away or None in there
            left -= were_away and in_use
            tell(
                iteration=algorithm.iteration,
                steps=ledger.num_steps,
                reported_steps=reported["num_env_steps_sampled_lifetime"],
                gaps=ledger.num_gaps,
                mean_return=reported.get("episode_return_mean"),
                endpoints=there,
            )
        algorithm.stop()


if __name__ == "__main__":
    main(parser.parse_args())
