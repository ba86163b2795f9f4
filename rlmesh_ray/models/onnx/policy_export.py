"""Export of a whole policy as an ONNX file, proven before it is written.

The graph goes from a batch of observations, as the environment gives them, to the greedy actions,
as the environment takes them. ``OnnxFilePolicy`` runs such files.
"""

import contextlib
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol, runtime_checkable

import numpy as np
import torch
from numpy.typing import NDArray

from rlmesh_ray.errors import ConfigurationError, ConformanceError, PolicyError
from rlmesh_ray.models.actions import zero_observations
from rlmesh_ray.models.loading import load_policy
from rlmesh_ray.models.onnx.compiled_forward import TOLERANCE, difference
from rlmesh_ray.models.onnx.onnx_export import OnnxGraph
from rlmesh_ray.models.onnx.onnx_models import (
    OnnxFilePolicy,
    input_names,
    metadata_of,
    output_names,
)
from rlmesh_ray.models.policy import Policy, RouteRows, Rows, traits_of
from rlmesh_ray.models.torch.module import weight_tensors
from rlmesh_ray.models.torch.policy import GreedyForward
from rlmesh_ray.protocol.messages import PredictSlot
from rlmesh_ray.spaces.batch import Leaf, flatten, leaves, stack, unflatten
from rlmesh_ray.spaces.contract import AutoresetMode, EnvContract
from rlmesh_ray.spaces.gym_conversion import to_gymnasium
from rlmesh_ray.spaces.spec import DiscreteSpec, SpaceSpec
from rlmesh_ray.spaces.validation import coerce_batch

_SEED = 0
_BATCHES = (1, 2, 97, *[100] * 9)
"""Rows of the batches of the proof."""
_LARGEST = 1e6
"""Bounds beyond it are those of a dtype: observations between them are drawn as if unbounded."""
_ROUTE = "proof"


@runtime_checkable
class ExportablePolicy(Policy, Protocol):
    """A policy that can be written as a graph."""

    def greedy_forward(self, contract: EnvContract) -> GreedyForward:
        """Return the policy as a function of tensors.

        Raises:
            ConfigurationError: It is no such function, for the reason in the message.
        """


class ExportProof(NamedTuple):
    """How an exported file was compared with the policy in torch."""

    num_observations: int
    """Observations that were drawn from the space, by a fixed seed."""
    largest_difference: float | None
    """Largest difference of actions in a Box, relative to the largest action or to 1; None: the
    action space has no Box."""
    num_ties: int
    """Observations for which another action of the same value was chosen, up to 1e-5."""

    def __str__(self) -> str:
        text = f"{self.num_observations:,} observations: same actions"
        if self.num_ties:
            text += f", but for {self.num_ties} between equally good ones"
        if self.largest_difference is not None:
            text += f", largest difference {self.largest_difference:.1e}"
        return text


def export_policy(
    checkpoint: str, file: str | Path, *, contract: EnvContract | None = None
) -> ExportProof:
    """Write a policy as an ONNX file, after a proof that the file acts as the policy does.

    The file needs neither torch nor Ray: ``load_policy`` and ``rlmesh-ray serve-model`` take it,
    and so does ONNX Runtime in any language. Its inputs have the names of the observation space's
    leaves (``observation``, if the space is a single one), its outputs those of the action space's
    after ``action``. Where an observation leads to NaN, the action is outside of its space.

    Args:
        checkpoint: See ``load_policy``; not a function, and nothing with a memory. An RLlib
            checkpoint may have FlattenObservations and MeanStdFilter before RLlib's default
            connectors.
        file: Where to write it; the name ends with ``.onnx``. A file that exists is replaced.
        contract: The environment's, for a module of torch; an RLlib checkpoint has its own spaces.

    Returns:
        How many observations were compared, and with which difference.

    Raises:
        ConfigurationError: The policy cannot be written as ONNX, or not there.
        ContractMismatchError: It cannot act in the contract's environment.
        MissingPackageError: onnx or onnxruntime is missing.
        PolicyError: It could not be loaded, or the file would act otherwise; nothing is written.
    """
    target = _checked_target(file)
    if checkpoint.lower().endswith(".onnx"):
        raise ConfigurationError(f"{checkpoint} is an ONNX file already; serve it as it is")
    policy = load_policy(checkpoint, device="cpu", inference="torch")
    if not isinstance(policy, ExportablePolicy):
        raise ConfigurationError(
            f"{checkpoint} cannot be exported: a {traits_of(policy).kind or type(policy).__name__} "
            "is no module of torch; serve it as it is"
        )
    contract = contract or _own_contract(policy, checkpoint)
    policy.check_contract(contract)
    try:
        if traits_of(policy).horizon > 1:
            raise ConfigurationError("it chooses several actions at once, and an exported file one")
        greedy = policy.greedy_forward(contract)
        model = _serialized(policy, greedy, contract)
    except ConfigurationError as error:
        raise ConfigurationError(
            f"{checkpoint} cannot be exported: {error}; serve the checkpoint itself"
        ) from error
    proof = _prove(policy, greedy, OnnxFilePolicy(model, str(target)), contract)
    _write(target, model)
    return proof


def _checked_target(file: str | Path) -> Path:
    target = Path(file).expanduser()
    if target.suffix.lower() != ".onnx":
        raise ConfigurationError(
            f"{target} does not end with .onnx, by which serve-model knows such files; name it "
            f"{target.with_suffix('.onnx')}"
        )
    if not target.parent.is_dir():
        raise ConfigurationError(f"the folder {target.parent} does not exist; make it first")
    return target


def _write(target: Path, model: bytes) -> None:
    part = target.with_name(f".{os.getpid()}.part")
    try:
        part.write_bytes(model)
        part.replace(target)
    except OSError as error:
        with contextlib.suppress(OSError):
            part.unlink(missing_ok=True)
        raise ConfigurationError(
            f"{target} cannot be written ({error.strerror or error}); name another file"
        ) from error


def _own_contract(policy: Policy, checkpoint: str) -> EnvContract:
    traits = traits_of(policy)
    if traits.observation_space is None or traits.action_space is None:
        raise ConfigurationError(
            f"{checkpoint} does not say for which spaces it is; name its environment: --env "
            "ENV_OR_ADDRESS (contract=)"
        )
    return EnvContract(
        checkpoint, traits.observation_space, traits.action_space, 1, AutoresetMode.NEXT_STEP
    )


def _serialized(policy: Policy, greedy: GreedyForward, contract: EnvContract) -> bytes:
    observation_space, action_space = contract.observation_space, contract.action_space
    zeros = flatten(observation_space, zero_observations(contract, 2))
    examples = map(torch.from_numpy, zeros)
    graph = OnnxGraph(
        greedy.module,
        lambda module, *given: tuple(each.action for each in greedy.act(module, *given)),
        dict(zip(input_names(observation_space), examples, strict=True)),
        output_names(observation_space, action_space),
    )
    tensors = weight_tensors(greedy.module)
    if any(tensor.dtype == torch.bfloat16 for tensor in tensors.values()):
        raise ConfigurationError("it has weights of bfloat16, which NumPy does not have")
    weights = {name: tensor.numpy() for name, tensor in tensors.items()}
    algorithm = traits_of(policy).algorithm
    return graph.serialized(weights, metadata_of(observation_space, action_space, algorithm))


# --- the proof -----------------------------------------------------------------------------


def _prove(
    policy: Policy, greedy: GreedyForward, model: OnnxFilePolicy, contract: EnvContract
) -> ExportProof:
    space = to_gymnasium(contract.observation_space)
    space.seed(_SEED)
    random = np.random.default_rng(_SEED)
    parts = leaves(contract.action_space)
    largest: float | None = None
    num_ties = num_wrong = 0
    for num_rows in _BATCHES:
        columns = _drawn(contract.observation_space, space, random, num_rows)
        expected, found = (_acted(each, contract, columns, num_rows) for each in (policy, model))
        is_other = np.zeros(num_rows, np.bool_)
        for leaf, own, other in zip(parts, expected, found, strict=True):
            if leaf.dtype is not None and leaf.dtype.kind == "f":
                largest = max(largest or 0.0, difference(own, other))
            else:
                is_other |= (own != other).reshape(num_rows, -1).any(axis=1)
        if is_other.any():
            rows = [column[is_other] for column in columns]
            pairs = zip(expected, found, strict=True)
            chosen = [(own[is_other], other[is_other]) for own, other in pairs]
            are_ties = _are_ties(greedy, parts, rows, chosen)
            num_ties += int(are_ties.sum())
            num_wrong += int((~are_ties).sum())
    if num_wrong or (largest or 0.0) > TOLERANCE:
        by = "" if largest is None else f" (largest difference {largest:.1e})"
        raise PolicyError(
            f"nothing was written: of {sum(_BATCHES):,} observations {num_wrong} lead to other "
            f"actions than in torch{by}; serve the checkpoint itself"
        )
    return ExportProof(sum(_BATCHES), largest, num_ties)


def _drawn(
    spec: SpaceSpec, space: Any, random: np.random.Generator, num_rows: int
) -> list[NDArray[Any]]:
    columns = []
    for column in stack(spec, [space.sample() for _ in range(num_rows)]):
        drawn = np.asarray(column)
        if drawn.dtype.kind == "f":
            unbounded = random.standard_normal(drawn.shape).astype(drawn.dtype)
            drawn = np.where(np.abs(drawn) > _LARGEST, unbounded, drawn)
        columns.append(drawn)
    return columns


def _acted(
    policy: Policy, contract: EnvContract, columns: Sequence[NDArray[Any]], num_rows: int
) -> list[NDArray[Any]]:
    slots = [PredictSlot(lane, "", 0, reset=True) for lane in range(num_rows)]
    observations = unflatten(contract.observation_space, columns)
    actions = policy.predict(contract, Rows(observations, [RouteRows(_ROUTE, slots)]))
    policy.forget(_ROUTE, None)
    try:
        acted = coerce_batch(contract.action_space, actions, num_rows)
    except ConformanceError as error:
        raise PolicyError(f"the policy's actions are not of its action space: {error}") from error
    return [np.asarray(column) for column in acted]


def _are_ties(
    greedy: GreedyForward,
    parts: Sequence[Leaf],
    observations: Sequence[NDArray[Any]],
    chosen: Sequence[tuple[NDArray[Any], NDArray[Any]]],
) -> NDArray[np.bool_]:
    """Return for which observations two actions have the same value, up to the tolerance.

    Args:
        greedy: The policy.
        parts: Leaves of the action space.
        observations: The observations, for each leaf of their space.
        chosen: For each leaf of the action space the two actions.
    """
    with torch.no_grad():
        actions = greedy.act(greedy.module, *map(torch.from_numpy, observations))
    are_ties = np.ones(len(observations[0]), np.bool_)
    rows = np.arange(len(are_ties))
    for leaf, action, pair in zip(parts, actions, chosen, strict=True):
        if leaf.dtype is None or leaf.dtype.kind == "f":
            continue
        start = leaf.spec.start if isinstance(leaf.spec, DiscreteSpec) else 0
        own, other = (each.reshape(len(rows), -1).astype(np.int64) - start for each in pair)
        of_elements = action.values()
        if not of_elements:
            are_ties &= (own == other).all(axis=1)
        for element, tensor in enumerate(of_elements):
            values = tensor.numpy()
            best, taken = (values[rows, each[:, element]] for each in (own, other))
            are_ties &= np.abs(best - taken) <= TOLERANCE * np.maximum(1.0, np.abs(best))
    return are_ties
