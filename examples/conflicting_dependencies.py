"""Train on a simulator whose dependencies conflict with the trainer's.

    python examples/conflicting_dependencies.py

The trainer has toy_physics 1 loaded, the simulator insists on toy_physics 2. One process cannot
have both, and RLlib gives its EnvRunners no packages of their own; endpoints can have them. Here
both versions are written into a temporary folder, so that nothing needs to be downloaded. With
real packages the fleet is (Ray needs virtualenv for it, on each node):

    packages = ["glider", "toy_physics==2.0"]
    EnvFleet("glider:Glider-v0", actor_options={"runtime_env": {"pip": packages}})

An endpoint can also be started by hand, in a virtual environment of its own that has this package
(``pip install .``) and the simulator's, and join the fleet:

    venv/bin/rlmesh-ray serve-env glider:Glider-v0 --num-envs 8 --address 127.0.0.1:5555
    configure(config, [fleet, "rlmesh://127.0.0.1:5555"])                    # in the trainer

Needs the extra ``rllib``: ``pip install ".[rllib]"``.
"""

import argparse
import importlib
import sys
import tempfile
from pathlib import Path

import ray
from ray.rllib.algorithms.ppo import PPOConfig

from rlmesh_ray.actors import EnvFleet
from rlmesh_ray.rllib import configure

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
parser.add_argument("--endpoints", type=int, default=2, help="how many")
parser.add_argument("--lanes", type=int, default=8, help="environments that each steps at once")
parser.add_argument("--iterations", type=int, default=8)
parser.add_argument("--batch", type=int, default=1024, help="steps of an iteration")

TRAINERS_PHYSICS = """
__version__ = "1.0"

def move(position, push):
    return position + push
"""

SIMULATORS_PHYSICS = """
__version__ = "2.0"

class Body:
    def __init__(self, position):
        self.position = position

    def push(self, force):
        self.position += force
"""

SIMULATOR = """
import gymnasium
import numpy as np
from toy_physics import Body  # which toy_physics 1 does not have

class Glider(gymnasium.Env):
    '''To be held near the origin.'''

    observation_space = gymnasium.spaces.Box(-np.inf, np.inf, (1,), np.float32)
    action_space = gymnasium.spaces.Discrete(3)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.steps, self.body = 0, Body(self.np_random.uniform(-5, 5))
        return self.observe(), {}

    def step(self, action):
        self.steps += 1
        self.body.push(action - 1)
        return self.observe(), -abs(self.body.position), False, self.steps == 20, {}

    def observe(self):
        return np.array([self.body.position], np.float32)

gymnasium.register("Glider-v0", entry_point=Glider)
"""


def write(folder: Path, **modules: str) -> str:
    """Write modules into ``folder``, as an installation would."""
    folder.mkdir()
    for name, source in modules.items():
        (folder / f"{name}.py").write_text(source)
    return str(folder)


def main(arguments: argparse.Namespace, folder: Path) -> None:
    """Show the conflict, then train in spite of it."""
    trainers = write(folder / "trainer", toy_physics=TRAINERS_PHYSICS)
    simulators = write(folder / "simulator", toy_physics=SIMULATORS_PHYSICS, glider=SIMULATOR)

    # As if all were installed side by side: there can be one toy_physics only.
    sys.path += [trainers, simulators]
    physics = importlib.import_module("toy_physics")
    try:
        importlib.import_module("glider")
    except ImportError as error:
        print(f"the trainer has toy_physics {physics.__version__}; the simulator here: {error}")

    ray.init(log_to_driver=False)
    runtime_env = {"env_vars": {"PYTHONPATH": simulators}}
    with EnvFleet(
        "glider:Glider-v0",
        num_endpoints=arguments.endpoints,
        num_envs=arguments.lanes,
        num_cpus=0.5,
        actor_options={"runtime_env": runtime_env},
    ) as fleet:
        config = (
            PPOConfig()
            .training(
                lr=3e-3,
                gamma=0.9,
                train_batch_size_per_learner=arguments.batch,
                minibatch_size=min(256, arguments.batch),
                num_epochs=10,
            )
            .env_runners(num_env_runners=0)
        )
        algorithm = configure(config, fleet).build_algo()
        for iteration in range(1, arguments.iterations + 1):
            mean = algorithm.train()["env_runners"]["episode_return_mean"]
            print(f"iteration {iteration}: mean return {mean:.1f}")
        algorithm.stop()


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as scratch:
        main(parser.parse_args(), Path(scratch))
