"""The table of dialects: the protocol variants besides the edition's, ``rlmesh.protocol.v1``.

To add a dialect, write its package and add a line to ``DIALECTS``. The core imports no dialect: it
loads modules of the package on first use. Which ones there are follows from the line's fields:

* ``is_generation``: ``server.env_dialect``, ``server.model_dialect``, ``client.env_dialect`` and
  ``client.model_dialect``, each with a ``DIALECT``;
* ``service``: ``server.service``, with an ``ENV_SERVICE``;
* ``client_scheme``: ``client.env_session_client``, with an ``ENV_SESSION_CLIENT``;
* ``serves_models``: ``client``, with a ``MODEL_SESSION``, instead of that, and
  ``server``, with a ``MODEL_PORT``;
* ``runner_scheme``: ``runner``; users call the function of ``rlmesh_ray.rllib`` that ``configure``
  names.
"""

import importlib
import importlib.util
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from rlmesh_ray.errors import ConfigurationError, MissingPackageError, install_command
from rlmesh_ray.options import as_names
from rlmesh_ray.protocol.capabilities import PROTOCOL_V1


@dataclass(frozen=True, slots=True)
class Dialect:
    """One dialect: its name, its package, and how endpoints, clients and runners use it."""

    name: str
    """As handshakes, ``dialects=`` and ``inspect`` show it."""
    package: str
    """Import name."""
    is_generation: bool = False
    """Whether it is a generation of the protocol: its clients call EnvService and ModelService at
    the edition's gRPC paths, with messages of their own."""
    service: str = ""
    """Full name of the gRPC service that it adds to the endpoint of an environment."""
    client_scheme: str = ""
    """Begins the addresses of servers that this package's clients dial in the dialect."""
    serves_models: bool = False
    """Whether its servers serve policies, not environments. A ModelServer then serves it on a port
    of its own, which the option of the dialect's name gives."""
    runner_scheme: str = ""
    """Begins the addresses at which an EnvRunner listens for simulators."""
    configure: str = ""
    """Function of ``rlmesh_ray.rllib`` that has runners listen there."""
    requires: str = ""
    """Module of another distribution, without which the dialect cannot be used."""
    extra: str = ""
    """The extra of this package that installs it."""
    compliance_suite: str = ""
    """Module of another distribution that checks servers of the dialect."""

    @property
    def is_installed(self) -> bool:
        """Whether the module that it requires can be found."""
        return not self.requires or importlib.util.find_spec(self.requires) is not None

    def refusal(self, address: str) -> str:
        """Return why clients cannot dial an address with ``runner_scheme``, and the remedy."""
        return (
            f"{address} names no endpoint: {self.name} simulators connect to the runners, which "
            f"listen; use {self.configure}(config, "
            f"address={address.removeprefix(self.runner_scheme)!r}, observation_space=..., "
            "action_space=...)"
        )

    def require_installed(self) -> None:
        """Make sure that the dialect can be used.

        Raises:
            MissingPackageError: What it requires is not installed.
        """
        if not self.is_installed:
            raise MissingPackageError(
                f"{self.name} needs the package {self.requires}: {install_command(self.extra)}"
            )

    def load(self, module: str) -> Any:
        """Import a module of the dialect's package, given its name there.

        Raises:
            ImportError: It, or what it requires, cannot be imported.
        """
        return importlib.import_module(f"{self.package}.{module}")


DIALECTS: tuple[Dialect, ...] = (
    Dialect("rlmesh-wire-v1", "rlmesh_ray.dialects.released", is_generation=True),
    Dialect(
        "dm_env_rpc.v1",
        "rlmesh_ray.dialects.dm_env_rpc",
        service="dm_env_rpc.v1.Environment",
        client_scheme="dm_env_rpc://",
        requires="dm_env_rpc",
        extra="dm-env-rpc",
        compliance_suite="dm_env_rpc.v1.compliance",
    ),
    Dialect(
        "rllink",
        "rlmesh_ray.dialects.rllink",
        runner_scheme="rllink://",
        configure="configure_rllink",
    ),
    Dialect(
        "openpi",
        "rlmesh_ray.dialects.openpi",
        client_scheme="openpi://",
        serves_models=True,
        requires="websockets",
        extra="openpi",
    ),
)


class DialectSettings:
    """Base class of the settings that a client takes for servers of one dialect."""

    __slots__ = ()

    scheme: ClassVar[str]
    """The ``client_scheme`` of the dialect."""


def load_generations(module: str) -> dict[str, Any]:
    """Return the ``DIALECT`` of a module of each generation besides the edition's, by its name."""
    return {each.name: each.load(module).DIALECT for each in DIALECTS if each.is_generation}


def client_schemes() -> tuple[str, ...]:
    """Return what begins an address that a client dials in a dialect."""
    return tuple(each.client_scheme for each in DIALECTS if each.client_scheme)


def client_dialect(address: str) -> Dialect | None:
    """Return the dialect that the scheme of an address names; None: the edition's or none."""
    for each in DIALECTS:
        if each.client_scheme and address.startswith(each.client_scheme):
            return each
    return None


def runner_dialect(address: object) -> Dialect | None:
    """Return the dialect in which a runner listens at an address; None: it is no such address."""
    for each in DIALECTS if isinstance(address, str) else ():
        if each.runner_scheme and str(address).startswith(each.runner_scheme):
            return each
    return None


def model_port(name: str) -> Any:
    """Return the ``MODEL_PORT`` of a dialect that a ModelServer serves on a port of its own.

    Raises:
        MissingPackageError: What it requires is not installed.
    """
    dialect = next(each for each in DIALECTS if each.name == name)
    dialect.require_installed()
    return dialect.load("server").MODEL_PORT


def model_dialects() -> tuple[str, ...]:
    """Return the names of the dialects that an endpoint of a policy can serve."""
    return (PROTOCOL_V1, *(each.name for each in DIALECTS if each.is_generation))


def env_dialects() -> tuple[str, ...]:
    """Return the names of the dialects that an endpoint of an environment can serve."""
    return (*model_dialects(), *(each.name for each in DIALECTS if each.service))


def enabled_dialects(dialects: Collection[str] | None, able: Sequence[str]) -> frozenset[str]:
    """Return the names of the dialects that an endpoint serves.

    Args:
        dialects: Names that its operator has chosen; None: every dialect that is installed.
        able: Names of the dialects that an endpoint of its kind can serve.

    Raises:
        ConfigurationError: ``dialects`` is empty, or names what is unknown or not installed.
    """
    missing = {each.name: each.extra for each in DIALECTS if not each.is_installed}
    runners = {each.name: each.configure for each in DIALECTS if each.runner_scheme}
    if dialects is None:
        return frozenset(able) - missing.keys()
    names = as_names("dialects", dialects)
    if not names:
        raise ConfigurationError(f"dialects names nothing; name one or more of {', '.join(able)}")
    for name in names:
        if name in runners:
            raise ConfigurationError(
                f"dialects names {name!r}, which endpoints do not serve: its simulators connect to "
                f"the runners; use {runners[name]}(config, ...)"
            )
        if any(each.name == name and each.serves_models for each in DIALECTS):
            raise ConfigurationError(
                f"dialects names {name!r}, which a policy's endpoint serves on a port of its own: "
                f"ModelServer(..., {name}='HOST:PORT'), serve-model --{name} HOST:PORT"
            )
        if name not in able:
            raise ConfigurationError(
                f"dialects names {name!r}, which is not one of {', '.join(able)}"
            )
        if name in missing:
            raise ConfigurationError(
                f"dialects names {name!r}, which is not installed: {install_command(missing[name])}"
            )
    return frozenset(names)
