"""The networks of the subject ``gpu``, and observations for them."""

from typing import Any

import numpy as np
import torch

from benchmarks.gpu.plan import Network
from benchmarks.serving.frames import contract, image_contract
from benchmarks.serving.mlp import mlp
from rlmesh_ray.spaces.contract import EnvContract

_NUM_IMAGE_ACTIONS = 6


class ImageNetwork(torch.nn.Module):
    """RLlib's convolutions for frames of 84x84 (filters of its old API stack): 1.0 M parameters.

    Takes ``(N, 84, 84, 4)`` uint8, returns six logits.
    """

    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.Sequential(
            torch.nn.Conv2d(4, 16, 8, stride=4, padding=2),
            torch.nn.ReLU(),
            torch.nn.Conv2d(16, 32, 4, stride=2, padding=2),
            torch.nn.ReLU(),
            torch.nn.Conv2d(32, 256, 11),
            torch.nn.ReLU(),
            torch.nn.Flatten(),
            torch.nn.Linear(256, _NUM_IMAGE_ACTIONS),
        )

    def forward(self, frames: torch.Tensor) -> torch.Tensor:
        """Return the logits."""
        logits: torch.Tensor = self.layers(frames.permute(0, 3, 1, 2).float() / 255)
        return logits


def make_network(network: Network) -> torch.nn.Module:
    """Return a network; the same weights every time."""
    if network is Network.MLP:
        return mlp()
    torch.manual_seed(0)
    return ImageNetwork()


def contract_of(network: Network, rows: int) -> EnvContract:
    """Return the contract of the environments that a network acts in."""
    return contract(rows) if network is Network.MLP else image_contract(rows)


def observations_of(network: Network, rows: int) -> Any:
    """Return a batch of random observations; the same every time."""
    rng = np.random.default_rng(0)
    if network is Network.MLP:
        return rng.normal(size=(rows, 4)).astype(np.float32)
    return rng.integers(0, 256, (rows, 84, 84, 4), np.uint8)
