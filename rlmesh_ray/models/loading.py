"""Policies from what an operator names or hands in.

**Loading runs code**: RLlib checkpoints are unpickled, TorchScript is executed, a factory is
called. Nothing here is ever to be fed with a name or a path from the network.
"""

import importlib
import re
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

from rlmesh_ray.errors import ConfigurationError, PolicyError
from rlmesh_ray.models.callable_policy import CallablePolicy
from rlmesh_ray.models.policy import Policy

if TYPE_CHECKING:
    import torch

_KINDS = (
    "an RLlib checkpoint folder, a TorchScript file, a torch.export file, or module:factory "
    "of your own code"
)
_RLLIB_METADATA = "rllib_checkpoint.json"
_FACTORY = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_][\w.]*")
_URL = re.compile(r"[A-Za-z][\w+.-]*://")


def as_policy(policy: object) -> Policy:
    """Make a policy of what the operator hands in.

    Args:
        policy: A ``Policy``, which is returned as it is, a ``torch.nn.Module``, or a function:
            a batch of observations in, a batch of actions out.

    Raises:
        ConfigurationError: It is something else.
    """
    if isinstance(policy, type):
        raise ConfigurationError(
            f"the policy is the class {policy.__name__} itself; hand in an instance of it"
        )
    if isinstance(policy, Policy):
        return policy
    # A module object cannot exist without torch having been imported.
    torch_package: Any = sys.modules.get("torch")
    if torch_package is not None and isinstance(policy, torch_package.nn.Module):
        return _torch_policy(policy)
    if callable(policy):
        return CallablePolicy(policy)
    hint = ""
    if isinstance(policy, str | Path):
        hint = "; rlmesh_ray.models.loading.load_policy makes one of a checkpoint's name"
    raise ConfigurationError(
        f"a {type(policy).__name__} is no policy: hand in a function (batch of observations in, "
        f"batch of actions out), a torch.nn.Module, or an object with the methods of Policy{hint}"
    )


def load_policy(checkpoint: str, *, explore: bool = False) -> Policy:
    """Load the policy that an operator names.

    Args:
        checkpoint: An RLlib checkpoint folder, a TorchScript file, a torch.export file, or
            ``module:factory``: the module is imported from the current folder or the Python
            path, and ``factory()`` returns what ``as_policy`` takes.
        explore: Whether to sample actions instead of taking the likeliest; for RLlib only.

    Raises:
        ConfigurationError: The name leads nowhere, or to something else; says what to name.
        PolicyError: The policy is there, and loading it failed.
    """
    path = Path(checkpoint).expanduser()
    if path.is_dir():
        return _from_folder(path, explore)
    if explore:
        raise ConfigurationError(
            f"explore is for RLlib checkpoints; {checkpoint} chooses its own actions"
        )
    if path.is_file():
        return _from_file(path)
    if _FACTORY.fullmatch(checkpoint):
        return _from_factory(checkpoint)
    if _URL.match(checkpoint):
        raise ConfigurationError(f"{checkpoint} is not a local path; copy it to this machine first")
    raise ConfigurationError(f"{checkpoint} does not exist; name {_KINDS}")


# --- RLlib -----------------------------------------------------------------------------


def _from_folder(folder: Path, explore: bool) -> Policy:
    if not (folder / _RLLIB_METADATA).is_file():
        raise ConfigurationError(f"{folder} is no RLlib checkpoint: {_what_instead(folder)}")
    try:
        from rlmesh_ray.models.rllib_policy import RllibPolicy
    except ModuleNotFoundError as error:
        raise ConfigurationError(
            f"{folder} needs RLlib, and {error.name} is not installed: "
            "pip install '.[rllib]' in a checkout of rlmesh-ray"
        ) from error
    return RllibPolicy(folder.resolve(), explore=explore)


def _what_instead(folder: Path) -> str:
    """Say which folder was probably meant."""
    for pattern, kind in (("*", "a Tune trial"), ("*/*", "a Tune experiment")):
        inner = sorted(folder.glob(f"{pattern}/{_RLLIB_METADATA}"))
        if inner:
            return f"it holds checkpoints, as {kind} does; name one of them: {inner[-1].parent}"
    for outer in folder.resolve().parents:
        if (outer / _RLLIB_METADATA).is_file():
            return f"it is a part of one; name the whole: {outer}"
    return (
        f"it has no {_RLLIB_METADATA}; name the folder that Algorithm.save_to_path, or a Tune "
        "checkpoint, wrote"
    )


# --- torch -----------------------------------------------------------------------------


def _from_file(file: Path) -> Policy:
    load = _file_loader(file)
    try:
        module = load(str(file))
    except Exception as error:
        # Torch raises all kinds of errors here, according to what is broken.
        raise PolicyError(f"{file} cannot be loaded: {error}") from error
    return _torch_policy(module)


def _file_loader(file: Path) -> "Callable[[str], torch.nn.Module]":
    """Tell the kinds of files apart by their tables of contents; nothing is unpickled."""
    if not zipfile.is_zipfile(file):
        raise ConfigurationError(f"{file} is no policy; name {_KINDS}")
    with zipfile.ZipFile(file) as archive:
        names = {name.partition("/")[2] or name for name in archive.namelist()}
    torch_package = _import_torch(file)
    if "models/model.json" in names or "serialized_exported_program.json" in names:
        return lambda path: torch_package.export.load(path).module()
    if "constants.pkl" in names:
        return lambda path: torch_package.jit.load(path, map_location="cpu")
    if "data.pkl" in names:
        raise ConfigurationError(
            f"{file} was written by torch.save: it holds weights (or a pickled module) without "
            "the code that runs them; save it with torch.export.save or torch.jit.save, or write "
            "a module:factory that builds the module and loads the weights"
        )
    raise ConfigurationError(f"{file} is an archive of something else; name {_KINDS}")


def _import_torch(file: Path) -> Any:
    try:
        import torch
        import torch.export
    except ModuleNotFoundError as error:
        raise ConfigurationError(
            f"{file} needs torch, which is not installed: pip install torch"
        ) from error
    return torch


def _torch_policy(module: Any) -> Policy:
    if hasattr(module, "forward_inference"):
        raise ConfigurationError(
            "the policy is an RLModule, which does not act without its connectors; save the "
            "Algorithm with save_to_path and name that folder"
        )
    from rlmesh_ray.models.torch_policy import TorchPolicy

    return TorchPolicy(module)


# --- own code --------------------------------------------------------------------------


def _from_factory(name: str) -> Policy:
    module_name, _, factory_name = name.partition(":")
    factory: Any = _import_module(module_name, name)
    for part in factory_name.split("."):
        if not hasattr(factory, part):
            raise ConfigurationError(f"{name}: {module_name} has no {factory_name}")
        factory = getattr(factory, part)
    if not callable(factory):
        raise ConfigurationError(
            f"{name} is a {type(factory).__name__}; a function is needed that takes no arguments "
            "and returns the policy"
        )
    try:
        made = factory()
    except Exception as error:
        # The operator's own code: whatever it raises is the news.
        raise PolicyError(
            f"{name}() raised {type(error).__name__}: {error} (it is called without arguments, "
            "and returns the policy)"
        ) from error
    try:
        return as_policy(made)
    except ConfigurationError as error:
        raise ConfigurationError(f"{name}(): {error}") from error


def _import_module(module_name: str, name: str) -> ModuleType:
    here = str(Path.cwd())
    if here not in sys.path:
        # A console script has its own folder there instead, and the operator's code may import
        # its neighbours later on.
        sys.path.insert(0, here)
    importlib.invalidate_caches()
    try:
        return importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name is not None and f"{module_name}.".startswith(f"{error.name}."):
            raise ConfigurationError(
                f"{name}: there is no module {error.name} in {here} or on the Python path (nor a "
                "file or folder of that name)"
            ) from error
        raise PolicyError(f"{name}: importing {module_name} failed: {error}") from error
    except Exception as error:
        # The operator's own code, as above.
        raise PolicyError(
            f"{name}: importing {module_name} raised {type(error).__name__}: {error}"
        ) from error
