"""Serve environments of your own: a Dict observation, a wrapper, and an Atari game.

    python examples/own_environments.py

steps the Dict environment through an endpoint. From the command line, in this folder:

    rlmesh-ray serve-env own_environments:rover --num-envs 8 --env-kwargs '{"max_steps": 100}'
    rlmesh-ray serve-env own_environments:pong --num-envs 8    # pip install ale-py opencv-python

A factory may return a gymnasium Env or VectorEnv, an RLlib MultiAgentEnv or a PettingZoo
ParallelEnv, with any wrappers.
"""

from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces
from gymnasium.wrappers import AtariPreprocessing, FrameStackObservation, TimeLimit

from rlmesh_ray import EnvServer, RemoteVectorEnv


class Rover(gymnasium.Env[Any, Any]):
    """Drives along a line; sees a picture of it and how full the battery is."""

    observation_space = spaces.Dict(
        {
            "battery": spaces.Box(0.0, 1.0, (1,)),
            "camera": spaces.Box(0, 255, (1, 16, 3), np.uint8),
        }
    )
    action_space = spaces.Discrete(3)  # back, stay, forth

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        """Start at a random place with a full battery."""
        super().reset(seed=seed)
        self.place = int(self.np_random.integers(16))
        self.battery = 1.0
        return self.observation(), {}

    def step(self, action: Any) -> Any:
        """Drive; the reward is 1 at the end of the line."""
        self.place = min(max(self.place + int(action) - 1, 0), 15)
        self.battery = max(self.battery - 0.01, 0.0)
        return self.observation(), float(self.place == 15), self.battery == 0.0, False, {}

    def observation(self) -> dict[str, Any]:
        """Return what it sees."""
        camera = np.zeros((1, 16, 3), np.uint8)
        camera[0, self.place] = 255
        return {"battery": np.array([self.battery], np.float32), "camera": camera}


def rover(max_steps: int = 200) -> gymnasium.Env[Any, Any]:
    """Make a Rover whose episodes are cut off after ``max_steps``."""
    return TimeLimit(Rover(), max_steps)


def pong(frame_skip: int = 4) -> gymnasium.Env[Any, Any]:
    """Make Pong as policies usually see it: four grey frames of 84 x 84."""
    import ale_py

    gymnasium.register_envs(ale_py)
    game = AtariPreprocessing(gymnasium.make("ALE/Pong-v5", frameskip=1), frame_skip=frame_skip)
    return FrameStackObservation(game, 4)


def main() -> None:
    """Serve eight rovers and step them."""
    with EnvServer(rover, num_envs=8, env_kwargs={"max_steps": 50}) as server:
        envs = RemoteVectorEnv(server.address)
        observations, _ = envs.reset(seed=0)
        print({name: array.shape for name, array in observations.items()})
        earned = np.zeros(8)
        for _ in range(40):
            _, rewards, *_ = envs.step(np.full(8, 2))
            earned += rewards
        envs.close()
    print(f"40 steps forth earned {earned.mean():.1f} a lane")


if __name__ == "__main__":
    main()
