"""Simulators that others wrote; each is imported where it is made."""

from typing import Any

import gymnasium
import numpy as np


def half_cheetah() -> Any:
    return gymnasium.make("HalfCheetah-v5")


def ant() -> Any:
    return gymnasium.make("Ant-v5")


def hopper() -> Any:
    return gymnasium.make("Hopper-v5")


def lunar_lander() -> Any:
    return gymnasium.make("LunarLander-v3")


def pong() -> Any:
    import ale_py

    gymnasium.register_envs(ale_py)
    game = gymnasium.make("ALE/Pong-v5", frameskip=1)
    return gymnasium.wrappers.AtariPreprocessing(game, grayscale_newaxis=True, scale_obs=True)


def minigrid() -> Any:
    import minigrid

    gymnasium.register_envs(minigrid)
    return gymnasium.make("MiniGrid-Empty-5x5-v0")


def minigrid_flat() -> Any:
    from minigrid.wrappers import FlatObsWrapper

    return gymnasium.wrappers.DtypeObservation(FlatObsWrapper(minigrid()), np.float32)


def highway() -> Any:
    import highway_env

    gymnasium.register_envs(highway_env)
    return gymnasium.wrappers.FlattenObservation(gymnasium.make("highway-fast-v0"))


def fetch() -> Any:
    import gymnasium_robotics

    gymnasium.register_envs(gymnasium_robotics)
    return gymnasium.wrappers.FlattenObservation(gymnasium.make("FetchReach-v4"))


def franka_kitchen() -> Any:
    import gymnasium_robotics

    gymnasium.register_envs(gymnasium_robotics)
    return gymnasium.make("FrankaKitchen-v1")


def dm_control() -> Any:
    import shimmy

    gymnasium.register_envs(shimmy)
    env = gymnasium.make("dm_control/cartpole-balance-v0")
    return gymnasium.wrappers.FlattenObservation(env)


def vizdoom() -> Any:
    from vizdoom import gymnasium_wrapper

    gymnasium.register_envs(gymnasium_wrapper)
    return gymnasium.make("VizdoomBasic-v1")


def rock_paper_scissors() -> Any:
    from pettingzoo.classic import rps_v2

    return rps_v2.parallel_env()


def envpool() -> Any:
    import envpool

    return envpool.make_gymnasium("CartPole-v1", num_envs=2, seed=1)


SINGLE = (
    half_cheetah,
    ant,
    hopper,
    lunar_lander,
    pong,
    minigrid,
    minigrid_flat,
    highway,
    fetch,
    franka_kitchen,
    dm_control,
    vizdoom,
)
"""One lane each; the others are a vector, or have several agents."""
NAMES = (*(factory.__name__ for factory in SINGLE), "rock_paper_scissors", "envpool")
