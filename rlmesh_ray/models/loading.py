"""Loading of policies: from a checkpoint or factory that the operator names, or from an object.

**Loading runs code**: RLlib checkpoints are unpickled, programs of torch are executed, a factory
is called. So a name or path must never come from the network. RLlib checkpoints are the only files
that are unpickled (see ``load_program``); a factory may run any code. ONNX files have
no code of their own (see ``OnnxFilePolicy``).
"""

import importlib
import json
import os
import re
import shutil
import sys
import tempfile
import zipfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import IO, TYPE_CHECKING, Any

from rlmesh_ray.errors import ConfigurationError, MissingPackageError, PolicyError, install_command
from rlmesh_ray.models.policy import (
    Policy,
    PolicyTraits,
    Rows,
    checked_horizon,
    traits_of,
)
from rlmesh_ray.options import as_horizon, require_inference
from rlmesh_ray.spaces.contract import EnvContract
from rlmesh_ray.spaces.gym_conversion import sampler
from rlmesh_ray.spaces.spec import SpaceSpec

if TYPE_CHECKING:
    import torch


class CallablePolicy:
    """Calls a function: a batch of observations in, a batch of actions out.

    Args:
        function: Takes observations of N lanes and returns N actions, both batched in the form of
            gymnasium's vector environments. It may write into the arrays that it gets.
        horizon: How many actions it returns for each lane: each leaf ``(N, horizon, *action)``; at
            1 without that axis.
    """

    def __init__(self, function: Callable[[Any], object], *, horizon: int = 1) -> None:
        self._function = function
        self.traits = PolicyTraits(
            is_repeatable=True, checks_concurrently=True, kind="function", horizon=horizon
        )

    def check_contract(self, contract: EnvContract) -> None:
        """Accept every contract: whether a function can act on it shows when it runs."""

    def predict(self, contract: EnvContract, rows: Rows) -> object:
        """Return the function's actions.

        Raises:
            PolicyError: The function raised; its own error is the cause.
        """
        try:
            return self._function(rows.observations)
        except Exception as error:
            raise PolicyError(
                f"the policy function raised {type(error).__name__}: {error}"
            ) from error

    def forget(self, route_key: str, env_index: int | None) -> None:
        """Do nothing: a function has no state of lanes."""


class RandomPolicy:
    """Draws each action from the action space: a smoke test, and a baseline for other policies.

    Its generator has a fixed seed, so that the same requests in the same order get the same
    actions. Unbounded parts of a Box are drawn as ``gymnasium.spaces.Box.sample`` draws them.
    """

    traits = PolicyTraits(checks_concurrently=True, kind="random")

    def __init__(self) -> None:
        self._samplers: dict[SpaceSpec, Callable[[int], object]] = {}

    def check_contract(self, contract: EnvContract) -> None:
        """Accept every contract."""

    def predict(self, contract: EnvContract, rows: Rows) -> object:
        spec = contract.action_space
        sample = self._samplers.get(spec) or self._samplers.setdefault(spec, sampler(spec, seed=0))
        return sample(rows.num_rows)

    def forget(self, route_key: str, env_index: int | None) -> None:
        """Do nothing: it has no state of lanes."""


_RANDOM = "random"
_RLLIB_METADATA = "rllib_checkpoint.json"
_FACTORY = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_][\w.]*")
_URL = re.compile(r"[A-Za-z][\w+.-]*://")


@dataclass(frozen=True, slots=True)
class _Options:
    """Options of policies; all but ``horizon`` are for those that run on torch."""

    device: str | None = None
    buckets: Sequence[int] = ()
    inference: str = "auto"
    horizon: int | None = None

    def refuse_for(
        self,
        kind: str,
        why: str = "which runs its own code: leave them out, and set the same in that code",
        impossible_inference: str = "compiled",
    ) -> None:
        asked = {
            "device": self.device not in (None, "cpu"),
            "buckets": bool(self.buckets),
            "inference": self.inference == impossible_inference,
        }
        names = [name for name, is_asked in asked.items() if is_asked]
        if names:
            raise ConfigurationError(f"{' and '.join(names)} cannot be used with {kind}, {why}")


def as_policy(
    policy: object,
    *,
    horizon: int | None = None,
    buckets: Sequence[int] = (),
    inference: str = "auto",
) -> Policy:
    """Return an object as a policy.

    Args:
        policy: A ``Policy``, which is returned as it is, a ``torch.nn.Module`` (with memory, if it
            has an ``initial_state``; see ``RecurrentTorchPolicy``), or a function: a batch of
            observations in, a batch of actions out.
        horizon: See ``ModelServer``.
        buckets: See ``TorchPolicy``; for modules only.
        inference: See ``TorchPolicy``; for modules only.

    Raises:
        ConfigurationError: It has another type, or cannot use an option.
    """
    return _as_policy(policy, _options(None, buckets, inference, horizon))


def _options(
    device: str | None, buckets: Sequence[int], inference: str, horizon: int | None
) -> _Options:
    require_inference(inference)
    checked = None if horizon is None else as_horizon(horizon)
    return _Options(device, tuple(buckets), inference, checked)


def load_policy(
    checkpoint: str | Path,
    *,
    explore: bool = False,
    device: str | None = None,
    buckets: Sequence[int] = (),
    inference: str = "auto",
    horizon: int | None = None,
) -> Policy:
    """Load the policy that an operator names.

    Args:
        checkpoint: An RLlib checkpoint folder (of an Algorithm, or of an RLModule), a TorchScript
            file, a torch.export file, an ONNX file (``policy.onnx``), ``random`` (see
            ``RandomPolicy``), or ``module:factory``: the module is imported from the current folder
            or the Python path, and ``factory()`` returns what ``as_policy`` takes.
        explore: Whether to sample actions instead of taking the likeliest; for RLlib only.
        device: The device of the module, such as ``"cuda:0"``; None: the CPU, or the device to
            which a factory has moved its module.
        buckets: See ``TorchPolicy``; not for functions and ONNX files.
        inference: See ``TorchPolicy``; not for functions. ONNX files are compiled.
        horizon: How many actions it chooses at once, see ``ModelServer``; default: the attribute
            ``horizon`` of the module, the RLModule or what the factory returns, or 1.

    Raises:
        ConfigurationError: The name does not exist, or is not that of a policy, or the policy
            cannot use an option; the message has the remedy.
        PolicyError: The policy exists, and loading it failed.
    """
    checkpoint = _checked_name(checkpoint)
    path = Path(checkpoint).expanduser()
    options = _options(device, buckets, inference, horizon)
    if path.is_dir():
        return _from_folder(path, explore, options)
    if explore:
        raise ConfigurationError(
            f"explore is for RLlib checkpoints; {checkpoint} chooses its own actions"
        )
    if path.is_file() and path.suffix.lower() == ".onnx":
        options.refuse_for(
            "an ONNX file",
            "which runs in ONNX Runtime on one thread of the CPU: leave them out",
            impossible_inference="torch",
        )
        from rlmesh_ray.models.onnx.onnx_models import OnnxFilePolicy

        return OnnxFilePolicy(path.read_bytes(), str(path), horizon=options.horizon or 1)
    if path.is_file():
        return _torch_policy(load_program(path, device or "cpu"), options)
    if checkpoint == _RANDOM:
        options.refuse_for("the random policy", "which has no module: leave them out")
        checked_horizon(1, options.horizon, "the random policy")
        return RandomPolicy()
    if _FACTORY.fullmatch(checkpoint):
        return _from_factory(checkpoint, options)
    if _URL.match(checkpoint):
        raise ConfigurationError(f"{checkpoint} is not a local path; copy it to this machine first")
    reason = "is neither a file nor a folder" if os.path.exists(path) else "does not exist"
    raise ConfigurationError(f"{checkpoint} {reason}; name {KINDS}")


def _checked_name(checkpoint: object) -> str:
    if not isinstance(checkpoint, str | Path):
        kind = type(checkpoint).__name__
        raise ConfigurationError(f"a {kind} is no name of a policy; name {KINDS}")
    if not str(checkpoint).strip():  # as of a variable that is not set; a Path would be a folder
        raise ConfigurationError(f"the name of the policy is empty; name {KINDS}")
    return str(checkpoint)


def _as_policy(policy: object, options: _Options) -> Policy:
    if isinstance(policy, type):
        raise ConfigurationError(
            f"the policy is the class {policy.__name__} itself; give an instance of it"
        )
    if isinstance(policy, Policy):
        name = f"a {type(policy).__name__}"
        options.refuse_for(name)
        checked_horizon(
            traits_of(policy).horizon, options.horizon, f"{name} (PolicyTraits.horizon)"
        )
        return policy
    # A module object cannot exist without torch having been imported.
    torch_package: Any = sys.modules.get("torch")
    if torch_package is not None and isinstance(policy, torch_package.nn.Module):
        return _torch_policy(policy, options)
    if callable(policy):
        options.refuse_for("a function")
        horizon = checked_horizon(getattr(policy, "horizon", None), options.horizon, "the function")
        return CallablePolicy(policy, horizon=horizon)
    hint = ""
    if isinstance(policy, str | Path):
        hint = "; rlmesh_ray.models.loading.load_policy loads one by a checkpoint's name"
    raise ConfigurationError(
        f"a {type(policy).__name__} is not a policy: give a function (batch of observations in, "
        f"batch of actions out), a torch.nn.Module, or an object with the methods of Policy{hint}"
    )


def _torch_policy(module: Any, options: _Options) -> Policy:
    if hasattr(module, "forward_inference"):
        raise ConfigurationError(
            "the policy is an RLModule, which does not act without its connectors; save the "
            "Algorithm with save_to_path and name that folder (or the module, if it was trained "
            "with RLlib's default connectors)"
        )
    from rlmesh_ray.models.torch.policy import RecurrentTorchPolicy, TorchPolicy

    own, has_state = getattr(module, "horizon", None), hasattr(module, "initial_state")
    horizon = checked_horizon(own, options.horizon, "the module", has_state=has_state)
    given: Any = {
        "device": options.device,
        "buckets": options.buckets,
        "inference": options.inference,
    }
    if has_state:
        return RecurrentTorchPolicy(module, **given)
    return TorchPolicy(module, **given, horizon=horizon)


# --- RLlib -----------------------------------------------------------------------------


def _from_folder(folder: Path, explore: bool, options: _Options) -> Policy:
    # Connectors belong to the policy: a module inside a checkpoint is not a policy.
    is_module_alone = _holds_rl_module(folder) and _outer_checkpoint(folder) is None
    if not (folder / _RLLIB_METADATA).is_file() and not is_module_alone:
        raise ConfigurationError(f"{folder} is not an RLlib checkpoint: {_remedy_for(folder)}")
    try:
        from rlmesh_ray.models.rllib.checkpoint_policy import RllibPolicy
    except ModuleNotFoundError as error:
        raise MissingPackageError(
            f"{folder} needs RLlib, and {error.name} is not installed: {install_command('rllib')}"
        ) from error
    return RllibPolicy(
        folder.resolve(),
        explore=explore,
        device=options.device or "cpu",
        buckets=options.buckets,
        inference=options.inference,
        horizon=options.horizon,
    )


def _outer_checkpoint(folder: Path) -> Path | None:
    outers = (outer for outer in folder.resolve().parents if (outer / _RLLIB_METADATA).is_file())
    return next(outers, None)


def _holds_rl_module(folder: Path) -> bool:
    """Return whether RLModule.save_to_path (or MultiRLModule's) wrote the folder."""
    return (folder / "class_and_ctor_args.pkl").is_file() and any(folder.glob("module_state.*"))


def _remedy_for(folder: Path) -> str:
    for pattern in ("*", "*/*"):
        inner = sorted(folder.glob(f"{pattern}/{_RLLIB_METADATA}"))
        if inner:
            return f"it is a folder that has checkpoints; name one of them: {inner[-1].parent}"
    outer = _outer_checkpoint(folder)
    if outer is not None:
        return f"it is a part of one; name the whole folder: {outer}"
    return (
        f"it has no {_RLLIB_METADATA}; name the folder that Algorithm.save_to_path, "
        "RLModule.save_to_path or a Tune checkpoint wrote"
    )


# --- own code --------------------------------------------------------------------------


def _from_factory(name: str, options: _Options) -> Policy:
    module_name, _, factory_name = name.partition(":")
    factory: Any = _import_module(module_name, name)
    for part in factory_name.split("."):
        if not hasattr(factory, part):
            raise ConfigurationError(
                f"{name}: {module_name} has no {factory_name}; name a function of that module that "
                "returns the policy"
            )
        factory = getattr(factory, part)
    if not callable(factory):
        raise ConfigurationError(
            f"{name} is a {type(factory).__name__}; a function is needed that takes no arguments "
            "and returns the policy"
        )
    try:
        made = factory()
    except (Exception, SystemExit) as error:
        # The operator's own code may raise any error, and may call sys.exit.
        raise PolicyError(
            f"{name}() raised {type(error).__name__}: {error} (it is called without arguments, "
            "and returns the policy)"
        ) from error
    try:
        return _as_policy(made, options)
    except ConfigurationError as error:
        raise ConfigurationError(f"{name}(): {error}") from error


def _import_module(module_name: str, name: str) -> ModuleType:
    here = str(Path.cwd())
    if here not in sys.path:
        # A console script has its own folder there instead, and the operator's code may import
        # other modules from this folder later.
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
    except (Exception, SystemExit) as error:
        # The operator's own code, as above.
        raise PolicyError(
            f"{name}: importing {module_name} raised {type(error).__name__}: {error}"
        ) from error


# --- TorchScript and torch.export files, loaded without unpickling --------------------------------

# Torch's own loaders (in torch 2.13):
#
# * torch.jit.load reads the pickles of a TorchScript file with an interpreter in C++, which
#   supports numbers, tensors and the classes of the file itself, and calls no other code.
# * torch.export.load unpickles. The example inputs, which every file has, and the weights of
#   older files are read with weights_only=True, and when that fails *without it*; weights and
#   constants that the file declares to be pickled, and objects, are unpickled at once. It also
#   loads the machine code of AOTInductor.
#
# So a torch.export file is copied first, without its example inputs and with nothing but the
# program and the plain bytes of tensors; a file that needs more is refused.

KINDS = (
    "an RLlib checkpoint folder, a TorchScript file, a torch.export file, an ONNX file "
    "(policy.onnx), module:factory of your own code, or random"
)
"""The kinds of policies that an operator may name, as text."""
_PROGRAM = "models/model.json"
_EXAMPLES = "data/sample_inputs/model.pt"
# Folder of payloads, its table of contents, and the prefix of the names of plain tensors there.
_PAYLOADS = (
    ("data/weights/", "model_weights_config.json", "weight_"),
    ("data/constants/", "model_constants_config.json", "tensor_"),
)
_LEGACY = ("serialized_exported_program.json", "data/weights/model.pt", "data/constants/model.pt")
_PLAIN = ("archive_format", "archive_version", "byteorder", ".data/version", _PROGRAM)
_AOT = "data/aotinductor/"
_SAVE_AGAIN = "save it again with torch.export.save"


def load_program(file: Path, device: str) -> "torch.nn.Module":
    """Load a file that holds weights and the code that runs them.

    Args:
        file: A file written by ``torch.jit.save`` or ``torch.export.save``.
        device: Torch's name of the device for the module.

    Raises:
        ConfigurationError: The file is of another kind, could only be loaded by unpickling, the
            device is not available, or torch is not installed.
        PolicyError: The file is damaged.
    """
    load = _loader(file)
    try:
        import torch  # noqa: F401  # whether it is there
    except ModuleNotFoundError as error:
        raise MissingPackageError(
            f"{file} needs torch, which is not installed: pip install torch"
        ) from error
    from rlmesh_ray.models.torch.module import torch_device

    torch_device(device)
    try:
        return load(file, device)
    except ConfigurationError:
        raise
    except Exception as error:
        # Torch raises many types of errors here, depending on the damage.
        raise PolicyError(f"{file} cannot be loaded: {error}") from error


def _loader(file: Path) -> "Callable[[Path, str], torch.nn.Module]":
    if not zipfile.is_zipfile(file):
        raise ConfigurationError(f"{file} is not a policy; name {KINDS}")
    with zipfile.ZipFile(file) as archive:
        names = {_inner(name) for name in archive.namelist()}
    if names.intersection(_LEGACY):
        raise ConfigurationError(
            f"{file} was written by an older torch.export, whose weights are pickles; "
            f"{_SAVE_AGAIN} of torch 2.9 or later"
        )
    if _PROGRAM in names:
        return _load_export
    if "constants.pkl" in names:
        return _load_torchscript
    if "data.pkl" in names:
        raise ConfigurationError(
            f"{file} was written by torch.save: it holds weights (or a pickled module) without "
            "the code that runs them; save it with torch.export.save or torch.jit.save, or write "
            "a module:factory that builds the module and loads the weights"
        )
    if any(name.startswith(_AOT) for name in names):
        raise ConfigurationError(
            f"{file} holds machine code of AOTInductor; save the exported program with "
            "torch.export.save, and compile it here"
        )
    raise ConfigurationError(f"{file} is an archive without a policy; name {KINDS}")


def _load_torchscript(file: Path, device: str) -> "torch.nn.Module":
    import torch

    load: Any = torch.jit.load  # untyped
    module: torch.nn.Module = load(str(file), map_location=device)
    return module


def _load_export(file: Path, device: str) -> "torch.nn.Module":
    import torch.export.passes

    with tempfile.TemporaryFile() as copy:
        with zipfile.ZipFile(file) as archive:
            _copy_without_pickles(archive, copy, file)
        copy.seek(0)
        program = torch.export.load(copy)
    if torch.device(device).type != "cpu":
        # The program has the device of each tensor that it makes.
        program = torch.export.passes.move_to_device_pass(program, device)
    module: torch.nn.Module = program.module()
    return module


def _copy_without_pickles(archive: zipfile.ZipFile, copy: IO[bytes], file: Path) -> None:
    members = {_inner(name): name for name in archive.namelist()}
    wanted = [name for name in _PLAIN if name in members]
    for folder, table, prefix in _PAYLOADS:
        contents = json.loads(archive.read(members[folder + table]))
        wanted.append(folder + table)
        wanted += _payloads(contents["config"], folder, prefix, file)
    with zipfile.ZipFile(copy, "w") as cleaned:
        for name in dict.fromkeys(wanted):
            with (
                archive.open(members[name]) as source,
                cleaned.open(f"model/{name}", "w", force_zip64=True) as target,
            ):
                shutil.copyfileobj(source, target)
        # The file must exist; an empty one is not read.
        cleaned.writestr(f"model/{_EXAMPLES}", b"")


def _payloads(config: dict[str, Any], folder: str, prefix: str, file: Path) -> Iterator[str]:
    for name, payload in config.items():
        if payload["use_pickle"] is not False or not payload["path_name"].startswith(prefix):
            raise ConfigurationError(
                f"{file} could only be loaded by unpickling {name} (a tensor subclass or an "
                f"object); keep plain tensors in the module and {_SAVE_AGAIN}, or write a "
                "module:factory that builds the policy"
            )
        yield folder + payload["path_name"]


def _inner(name: str) -> str:
    # All members are in one folder, whose name torch takes from that of the file.
    return name.partition("/")[2] or name
