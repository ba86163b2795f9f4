"""Peers that are installed in virtual environments of their own, and the scripts that run there."""

import importlib.util
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from rlmesh_ray.errors import ConfigurationError

RELEASED_PYTHON = Path(".venvs/released/bin/python")
DM_ENV_RPC_PYTHON = Path(".venvs/dm_env_rpc/bin/python")
SIMULATORS_PYTHON = Path(".venvs/simulators/bin/python")


@dataclass(frozen=True, slots=True)
class Peer:
    """A virtual environment."""

    name: str
    """What is installed there."""
    python: Path
    ready: str
    """What ``make`` makes."""

    def check(self) -> None:
        """Make sure that it is there.

        Raises:
            ConfigurationError: It is not.
        """
        if not self.python.exists():
            raise ConfigurationError(
                f"{self.python} does not exist: in a checkout of rlmesh-ray, make {self.ready} "
                f"installs {self.name}; or choose other peers with --vs"
            )

    def command(self, script: str) -> Sequence[str]:
        """Return what runs a script of ``benchmarks`` there: ``"serving/released_server.py"``.

        Raises:
            ConfigurationError: The environment is not there.
        """
        self.check()
        # -I: this folder must not be on the other environment's path.
        return [str(self.python), "-I", str(Path(__file__).parent / script)]


def released(python: Path = RELEASED_PYTHON) -> Peer:
    """Return the released rlmesh."""
    return Peer("the released rlmesh", python, f"{RELEASED_PYTHON.parents[1]}/.ready")


def check_extra(module: str, folder: str) -> None:
    """Make sure that a module of a peer can be imported here, from a folder of ``.venvs``.

    Raises:
        ConfigurationError: It is not there.
    """
    if importlib.util.find_spec(module) is None:
        raise ConfigurationError(
            f"this Python has no {module}: in a checkout of rlmesh-ray, make "
            f".venvs/{folder}/.ready installs it into a folder; run the command with "
            f"PYTHONPATH=.venvs/{folder}"
        )


def dm_env_rpc(python: Path = DM_ENV_RPC_PYTHON) -> Peer:
    """Return dm_env_rpc."""
    return Peer("dm_env_rpc", python, f"{DM_ENV_RPC_PYTHON.parents[1]}/.ready")


def simulators(python: Path = SIMULATORS_PYTHON) -> Peer:
    """Return simulators, EnvPool among them, which have this package beside them."""
    return Peer("EnvPool", python, f"{SIMULATORS_PYTHON.parents[1]}/.ready")
