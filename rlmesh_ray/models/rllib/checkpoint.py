"""Loading of RLlib checkpoints: the parts that an RLlib EnvRunner runs, with their saved states.

They are the env-to-module pipeline, the RLModule and the module-to-env pipeline. Ray is not
started.

A folder of an RLModule alone has no connectors. The module gets RLlib's default connectors for its
spaces (actions in a Box are unsquashed, none are clipped): right for a module that was trained with
them, that is, without custom connectors and with RLlib's default settings for actions.

**Loading a checkpoint unpickles it, that is, it runs code**: load only checkpoints that you trust,
from paths that the operator names, never from a path that came over the network.
"""

import json
import logging
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ray
from ray import cloudpickle
from ray.rllib.algorithms.algorithm_config import AlgorithmConfig
from ray.rllib.connectors import env_to_module as to_module
from ray.rllib.connectors.connector_pipeline_v2 import ConnectorPipelineV2
from ray.rllib.core.rl_module.rl_module import RLModule
from ray.rllib.env import INPUT_ENV_SINGLE_SPACES
from ray.rllib.utils.metrics import NUM_ENV_STEPS_SAMPLED_LIFETIME

from rlmesh_ray.errors import ConfigurationError, PolicyError
from rlmesh_ray.files import require_plain_files

logger = logging.getLogger(__name__)

# The metadata files of an Algorithm, and of an RLModule.
_METADATA = ("rllib_checkpoint.json", "metadata.json")


@dataclass(frozen=True, slots=True)
class CheckpointParts:
    """The parts of a checkpoint."""

    module: Any
    env_to_module: Any
    module_to_env: Any
    lookback: int
    """Number of steps before the last observation that pipelines may read."""
    env_steps: int
    """Environment steps of the training; the exploration of some modules depends on it."""
    algorithm: str = ""
    """Name of the Algorithm's class; empty: unknown."""

    @property
    def spaces(self) -> tuple[Any, Any]:
        return (self.env_to_module.input_observation_space, self.env_to_module.input_action_space)


def pieces(*pipelines: Any) -> Iterator[Any]:
    """Yield the connectors of pipelines, also of those inside."""
    for pipeline in pipelines:
        for piece in pipeline.connectors:
            if isinstance(piece, ConnectorPipelineV2):
                yield from pieces(piece)
            else:
                yield piece


def load_checkpoint(checkpoint: Path, device: str) -> CheckpointParts:
    """Load a single-agent checkpoint of the new API stack, ready to act.

    The module is in evaluation mode; filters are not updated.

    Args:
        checkpoint: Folder that ``Algorithm.save_to_path`` (or Tune), ``RLModule.save_to_path`` or
            ``MultiRLModule.save_to_path`` wrote.
        device: Torch's name of the module's device.

    Raises:
        ConfigurationError: The folder is no such checkpoint.
        PolicyError: It could not be unpickled, or built.
    """
    is_algorithm = (checkpoint / _METADATA[0]).is_file()
    modules_folder = checkpoint
    if is_algorithm:
        modules_folder = checkpoint / "learner_group" / "learner" / "rl_module"
        _check_modules(checkpoint, modules_folder)
    elif _module_names(checkpoint):
        _check_modules(checkpoint, checkpoint)
    module_folder = modules_folder / "default_policy"
    try:
        require_plain_files(checkpoint)
        module = RLModule.from_checkpoint(module_folder if module_folder.is_dir() else checkpoint)
        module.eval()
        module.to(device)
        has_rest = is_algorithm and not _lacks_connectors(checkpoint)
        load_rest = _rest_of_checkpoint if has_rest else _rest_by_default
        parts = load_rest(checkpoint, module, device)
    except Exception as error:
        raise _unloadable(checkpoint, error) from error
    _check_pieces(checkpoint, parts)
    return parts


def _lacks_connectors(checkpoint: Path) -> bool:
    """Return whether it is of BC or the like, which have neither runners nor connectors."""
    if (checkpoint / "env_runner").is_dir():
        return False
    constructor = _constructor(checkpoint) or {"class": object}
    return any(each.__name__ == "MARWIL" for each in constructor["class"].__mro__)


def _rest_of_checkpoint(checkpoint: Path, module: Any, device: str) -> CheckpointParts:
    runner = checkpoint / "env_runner"
    # Without a local EnvRunner the Algorithm keeps the connectors itself.
    connectors = runner if runner.is_dir() else checkpoint
    env_to_module = _pipeline(connectors / "env_to_module_connector", device)
    constructor = _constructor(checkpoint)
    return CheckpointParts(
        module=module,
        env_to_module=env_to_module,
        module_to_env=_pipeline(connectors / "module_to_env_connector", device),
        lookback=_lookback(env_to_module, constructor),
        env_steps=_env_steps(runner),
        algorithm=constructor["class"].__name__ if constructor else "",
    )


def _rest_by_default(checkpoint: Path, module: Any, device: str) -> CheckpointParts:
    config = AlgorithmConfig()
    spaces = {INPUT_ENV_SINGLE_SPACES: (module.observation_space, module.action_space)}
    return CheckpointParts(
        module=module,
        env_to_module=config.build_env_to_module_connector(spaces=spaces, device=device),
        module_to_env=config.build_module_to_env_connector(spaces=spaces),
        lookback=config.episode_lookback_horizon,
        env_steps=0,
    )


def _check_modules(checkpoint: Path, modules_folder: Path) -> None:
    if not modules_folder.is_dir():
        raise ConfigurationError(
            f"{checkpoint} has no RLModule: it is incomplete, or of RLlib's old API stack; name a "
            "folder that Algorithm.save_to_path wrote on the new one"
        )
    names = _module_names(modules_folder)
    if "default_policy" not in names:
        raise ConfigurationError(_multi_agent(checkpoint, f"its modules are {', '.join(names)}"))


def _module_names(modules_folder: Path) -> list[str]:
    return sorted(folder.name for folder in modules_folder.iterdir() if folder.is_dir())


def _multi_agent(checkpoint: Path, reason: str) -> str:
    return (
        f"{checkpoint} is a multi-agent checkpoint ({reason}); only single-agent ones can be "
        "served, whose module is called default_policy"
    )


def _pipeline(folder: Path, device: str) -> Any:
    pipeline = ConnectorPipelineV2.from_checkpoint(folder)
    for piece in pieces(pipeline):
        if isinstance(piece, to_module.NumpyToTensor):
            # Its state has the device of the training.
            piece._device = device
        elif isinstance(piece, to_module.MeanStdFilter):
            piece._update_stats = False
    return pipeline


def _check_pieces(checkpoint: Path, parts: CheckpointParts) -> None:
    for piece in pieces(parts.env_to_module):
        if isinstance(piece, to_module.AgentToModuleMapping):
            raise ConfigurationError(_multi_agent(checkpoint, "it maps agents to modules"))
        if isinstance(piece, to_module.PrevActionsPrevRewards) and piece.n_prev_rewards:
            logger.warning(
                "%s was trained on previous rewards, which clients do not send: it will act as if "
                "each had been 0.0",
                checkpoint,
            )


def _constructor(checkpoint: Path) -> dict[str, Any]:
    """Return the Algorithm's class and config; empty where they cannot be unpickled here."""
    try:
        constructor: dict[str, Any] = _unpickle(checkpoint / "class_and_ctor_args.pkl")
    except (ImportError, AttributeError) as error:
        # The config refers to the environment, which may not be installed here.
        logger.warning("%s: its configuration cannot be read here (%s)", checkpoint, error)
        return {}
    return constructor


def _lookback(env_to_module: Any, constructor: dict[str, Any]) -> int:
    """Return how many steps back pipelines may read: the training's limit, or their options."""
    names = ("num_frames", "n_prev_actions", "n_prev_rewards")
    wanted = [getattr(piece, name, 0) for piece in pieces(env_to_module) for name in names]
    if constructor:
        ctor_args, _ = constructor["ctor_args_and_kwargs"]
        wanted.append(int(ctor_args[0]["episode_lookback_horizon"]))
    # A module with state always reads the last step's.
    return max(1, *wanted)


def _env_steps(runner: Path) -> int:
    state_file = runner / "state.pkl"
    return int(_unpickle(state_file)[NUM_ENV_STEPS_SAMPLED_LIFETIME]) if state_file.is_file() else 0


def _unpickle(file: Path) -> Any:
    with file.open("rb") as stream:
        return cloudpickle.load(stream)


def _unloadable(checkpoint: Path, error: Exception) -> PolicyError:
    cause, written = f"{type(error).__name__}: {error}", _ray_version(checkpoint)
    if written != ray.__version__:
        return PolicyError(
            f"the RLlib checkpoint {checkpoint}, written by Ray {written}, cannot be loaded with "
            f"Ray {ray.__version__} ({cause}); use the Ray version and the Python modules that it "
            "was trained with"
        )
    # RLlib makes a plain RLModule of a class that it cannot import.
    if isinstance(error, ImportError | AttributeError):
        return PolicyError(
            f"the RLlib checkpoint {checkpoint} is damaged, or needs Python modules that are "
            f"missing here ({cause}); copy the whole folder again, or put the modules that it was "
            "trained with on the Python path"
        )
    return PolicyError(
        f"the RLlib checkpoint {checkpoint} is damaged or incomplete ({cause}); copy the whole "
        "folder again, or name another checkpoint"
    )


def _ray_version(checkpoint: Path) -> str:
    try:
        file = next(checkpoint / n for n in _METADATA if (checkpoint / n).is_file())
        return str(json.loads(file.read_text())["ray_version"])
    except (StopIteration, OSError, LookupError, ValueError):
        return "(unknown)"
