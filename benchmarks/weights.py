"""How long a served policy takes for new weights, compiled and in torch, in this process."""

import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import gymnasium
import numpy as np
import torch

from benchmarks.findings import Finding, Goal
from benchmarks.statistics import Spread
from rlmesh_ray.models.policy import RouteRows, Rows
from rlmesh_ray.models.torch.policy import TorchPolicy
from rlmesh_ray.protocol.messages import PredictSlot
from rlmesh_ray.spaces.contract import AutoresetMode, EnvContract
from rlmesh_ray.spaces.gym_conversion import from_gymnasium

COMPILED, TORCH = "compiled", "torch"
_GOAL = Goal("<= 5 ms", 5.0, is_ceiling=True)
_ACTIONS = 6


def _dense() -> torch.nn.Module:
    layers = [torch.nn.Linear(64, 960), torch.nn.Tanh(), torch.nn.Linear(960, 960)]
    return torch.nn.Sequential(*layers, torch.nn.Tanh(), torch.nn.Linear(960, _ACTIONS))


def _convolutional() -> torch.nn.Module:
    relu, conv = torch.nn.ReLU, torch.nn.Conv2d
    layers = [conv(4, 32, 8, 4), relu(), conv(32, 64, 4, 2), relu(), conv(64, 64, 3, 1), relu()]
    head = [torch.nn.Flatten(), torch.nn.Linear(3136, 512), relu(), torch.nn.Linear(512, _ACTIONS)]
    return torch.nn.Sequential(*layers, *head)


_NETWORKS: dict[str, tuple[Callable[[], torch.nn.Module], tuple[int, ...]]] = {
    "dense": (_dense, (64,)),
    "convolutional": (_convolutional, (4, 84, 84)),
}


def measure_weights(repetitions: int) -> Iterator[list[Finding]]:
    """Measure each network; yield what was found.

    A swap is ``set_weights`` and what the first prediction after it takes longer than the second.

    Args:
        repetitions: Swaps of each side, which take turns.
    """
    for name, (make, shape) in _NETWORKS.items():
        contract = EnvContract(
            name,
            from_gymnasium(gymnasium.spaces.Box(-1.0, 1.0, shape, np.float32)),
            from_gymnasium(gymnasium.spaces.Discrete(_ACTIONS)),
            1,
            AutoresetMode.NEXT_STEP,
        )
        rows = Rows(
            np.zeros((1, *shape), np.float32),
            [RouteRows("r", [PredictSlot(0, "", 0, reset=False)])],
        )
        module = make()
        policies = {each: TorchPolicy(make(), inference=each) for each in (COMPILED, TORCH)}
        taken_ms: dict[str, list[float]] = {side: [] for side in policies}
        for policy in policies.values():
            policy.check_contract(contract)
        for repetition in range(repetitions + 1):
            weights = {key: value + repetition / 1e3 for key, value in module.state_dict().items()}
            for side, policy in policies.items():
                took_ms = 1e3 * _swap_s(policy, weights, partial(policy.predict, contract, rows))
                if repetition:  # the first one loads what is loaded once
                    taken_ms[side].append(took_ms)
        sides = {side: Spread(tuple(values)) for side, values in taken_ms.items()}
        million = sum(each.numel() for each in module.parameters()) / 1e6
        case = f"{name}, {million:.1f} M weights"
        yield [Finding("swap", case, "ms", sides, {}, _GOAL, sides[COMPILED])]


def _swap_s(policy: TorchPolicy, weights: dict[str, Any], predict: Callable[[], object]) -> float:
    at_s = [time.perf_counter()]
    policy.set_weights(weights)
    for _ in range(2):
        at_s.append(time.perf_counter())
        predict()
    at_s.append(time.perf_counter())
    return at_s[1] - at_s[0] + max(0.0, at_s[2] - at_s[1] - (at_s[3] - at_s[2]))
