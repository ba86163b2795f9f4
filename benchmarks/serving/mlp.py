"""The policy of all sides. Torch alone is imported: another virtual environment runs this, too."""

import torch


def mlp() -> torch.nn.Module:
    """Return a 4-64-64-2 network; the same weights every time."""
    torch.manual_seed(0)
    # One thread for all sides alike, as ModelServer has it by itself: a matrix this small is not
    # worth sharing.
    torch.set_num_threads(1)
    return torch.nn.Sequential(
        torch.nn.Linear(4, 64),
        torch.nn.Tanh(),
        torch.nn.Linear(64, 64),
        torch.nn.Tanh(),
        torch.nn.Linear(64, 2),
    )
