"""Where a hosted policy runs: on the device that its operator names, or that Ray gave the actor."""

from collections.abc import Sequence
from pathlib import Path

import ray

from rlmesh_ray.errors import ConfigurationError, PolicyError
from rlmesh_ray.models.loading import as_policy, load_policy
from rlmesh_ray.server.error_text import text_of


def place_on_device(
    policy: object,
    device: str,
    *,
    explore: bool = False,
    buckets: Sequence[int] = (),
    compile: bool = False,
) -> object:
    """Load the policy where it is named, and put it on its device.

    Args:
        policy: See ``ModelServiceActor``; likewise the others.
        device: As torch names it, or "auto".
        explore: For an RLlib checkpoint.
        buckets: Sizes to which batches are padded.
        compile: Whether torch compiles the module.

    Raises:
        ConfigurationError: The policy or the device is not there, or they do not go together.
        PolicyError: The policy is there, and loading it or moving it failed.
    """
    where: str | None = device
    if device == "auto":
        # A factory puts its policy wherever it likes.
        is_factory = isinstance(policy, str) and not Path(policy).expanduser().exists()
        where = "cuda" if ray.get_gpu_ids() and not is_factory else None
    if isinstance(policy, str):
        return load_policy(policy, explore=explore, device=where, buckets=buckets, compile=compile)
    moved = _moved(policy, where, is_automatic=device == "auto")
    return as_policy(moved, buckets=buckets, compile=compile) if buckets or compile else moved


def _moved(policy: object, where: str | None, *, is_automatic: bool) -> object:
    """Put a policy that was handed in on a device, where it can be moved."""
    move = getattr(policy, "to", None)
    if where is None or (is_automatic and move is None):
        return policy
    if move is None:
        raise ConfigurationError(
            f"device={where!r} is for checkpoints and torch modules; a {type(policy).__name__} "
            "runs where it likes"
        )
    from rlmesh_ray.models.torch.module import torch_device

    place = torch_device(where)
    try:
        return move(place)
    except Exception as error:  # the device's memory is full, or the operator's own code raised
        raise PolicyError(
            f"the policy could not be moved to {where}: {type(error).__name__}: {text_of(error)}"
        ) from error
