"""TorchScript and torch.export files, loaded without unpickling.

Torch's own loaders (in torch 2.13):

* ``torch.jit.load`` reads the pickles of a TorchScript file with an interpreter in C++, which
  supports numbers, tensors and the classes of the file itself, and calls no other code.
* ``torch.export.load`` unpickles. The example inputs, which every file has, and the weights of
  older files are read with ``weights_only=True``, and when that fails *without it*; weights and
  constants that the file declares to be pickled, and objects, are unpickled at once. It also
  loads the machine code of AOTInductor.

So a torch.export file is copied first, without its example inputs and with nothing but the
program and the plain bytes of tensors; a file that needs more is refused.

A program is code all the same: loading either kind of file may run its code. Load only files that
you trust.
"""

import json
import shutil
import tempfile
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from rlmesh_ray.errors import ConfigurationError, MissingPackageError, PolicyError

if TYPE_CHECKING:
    import torch

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
    _require_torch(file)
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


def _require_torch(file: Path) -> None:
    try:
        import torch  # noqa: F401  # whether it is there
    except ModuleNotFoundError as error:
        raise MissingPackageError(
            f"{file} needs torch, which is not installed: pip install torch"
        ) from error


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
