"""Trains over endpoints on Ray while calls of Ray's own fail.

``python -m tests.chaos.rpc_training FOLDER NUM_ITERATIONS SEED``, in a process of its own, since
Ray reads its settings once. Each runner writes a history of what it samples into the folder. What
is wrong with that which the algorithm gets is printed, as JSON.
"""

import contextlib
import json
import logging
import os
import sys
import warnings
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import ray
from ray.rllib.algorithms.algorithm import Algorithm
from ray.rllib.algorithms.ppo import PPOConfig, ppo
from ray.rllib.callbacks.callbacks import RLlibCallback
from ray.rllib.env.single_agent_episode import SingleAgentEpisode

from rlmesh_ray.actors import EnvFleet
from rlmesh_ray.errors import ConfigurationWarning, EndpointUnreachableError
from rlmesh_ray.rllib import configure
from tests.chaos.hash_chain import HashChain, Position
from tests.chaos.history import History
from tests.chaos.runners import EpisodeTeller

# Of 100 calls: so many requests are lost, so many replies, and so many connections break meanwhile.
_FAILURES = {
    "num_failures": -1,
    "req_failure_prob": 5,
    "resp_failure_prob": 5,
    "in_flight_failure_prob": 2,
}
_FOLDER = "RLMESH_TEST_HISTORIES"
"""An environment variable that tells runners where to write."""
NUM_LOST = "num_lost"
"""Samples of a runner that did not reach the algorithm: Ray has lost the reply, RLlib goes on."""
DOUBLED = "doubled"
"""Parts of episodes that did so twice, or in another order."""
ENDING = "ending"
"""Why the training ended early; empty: it did not."""
_MOST_STARTS = 10


class Telling(RLlibCallback):
    """Tells a history what a runner samples."""

    def __init__(self) -> None:
        super().__init__()
        history = History(Path(os.environ[_FOLDER]) / f"runner-{os.getpid()}.jsonl")
        self._episodes = EpisodeTeller(history)

    def on_sample_end(self, *, samples: list[SingleAgentEpisode], **_kwargs: Any) -> None:
        for chunk in samples:
            self._episodes.tell(chunk)


class Arrivals:
    """What reaches the algorithm: parts of episodes, whose order is looked at."""

    def __init__(self) -> None:
        self.num_lost = 0
        self.doubled: list[str] = []
        self._positions: dict[str, Position] = {}

    def note(self, chunks: Iterable[SingleAgentEpisode]) -> None:
        """Look at what has come."""
        for chunk in chunks:
            observations = chunk.get_observations()
            first, last = Position.read(observations[0]), Position.read(observations[-1])
            known = self._positions.get(chunk.id_, Position.first(first.incarnation, first.episode))
            if first.step < known.step:
                self.doubled.append(f"episode {chunk.id_}: after {known}, there comes {first}")
            self.num_lost += first != known
            self._positions[chunk.id_] = last


def main(arguments: Sequence[str]) -> None:
    """Train for some iterations."""
    folder, num_iterations, seed = arguments
    os.environ[_FOLDER] = folder
    os.environ.update({"RAY_testing_rpc_failure": json.dumps({"*": _FAILURES})})
    arrivals, sample = Arrivals(), ppo.synchronous_parallel_sample

    def watched_sample(**options: Any) -> Any:
        episodes, results = sample(**options)
        arrivals.note(episodes)
        return episodes, results

    ppo.synchronous_parallel_sample = watched_sample
    ray.init(
        "local",
        num_cpus=8,  # logical
        include_dashboard=False,
        log_to_driver=False,
        logging_level=logging.CRITICAL,
    )
    ending = ""
    with _started_fleet() as fleet:
        config = PPOConfig().env_runners(num_env_runners=2, num_envs_per_env_runner=4)
        config.callbacks(Telling).debugging(seed=int(seed))
        config.training(train_batch_size_per_learner=512, minibatch_size=256, num_epochs=1)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", ConfigurationWarning)
            config = configure(config, fleet)
        try:
            algorithm = _built(config)
            for _ in range(int(num_iterations)):
                algorithm.train()
            # Not stopped: RLlib would wait for ever for a reply that Ray has lost.
        except ray.exceptions.RayError as error:  # RLlib does not survive all that Ray loses
            ending = f"Ray ends the training: {error}"
    ray.shutdown()
    found = {NUM_LOST: arrivals.num_lost, DOUBLED: arrivals.doubled, ENDING: ending}
    sys.stdout.write(f"\n{json.dumps(found)}\n")


def _started_fleet() -> EnvFleet:
    """Start a fleet, again where Ray loses a call that is made only once."""
    for _ in range(_MOST_STARTS):
        with contextlib.suppress(EndpointUnreachableError):
            return EnvFleet(HashChain, num_endpoints=2, num_envs=2, num_cpus=0.1)
    raise TimeoutError(f"the fleet did not start {_MOST_STARTS} times")


def _built(config: PPOConfig) -> Algorithm:
    """Build the algorithm, again where RLlib does not get what it asks its runners for."""
    for _ in range(_MOST_STARTS):
        with contextlib.suppress(ray.exceptions.RayError, IndexError):
            return config.build_algo()
    raise TimeoutError(f"the algorithm was not built {_MOST_STARTS} times")


if __name__ == "__main__":
    main(sys.argv[1:])
