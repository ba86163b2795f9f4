"""An environment on its way to an endpoint, through processes that could not make it."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self

import cloudpickle

from rlmesh_ray.envs.env_source import EnvLike
from rlmesh_ray.errors import ConfigurationError, EnvStartError


@dataclass(frozen=True, slots=True)
class SerializedEnv:
    """A Gymnasium id or a factory, and its arguments, as bytes.

    Whoever passes it on needs none of the modules that the environment needs.
    """

    content: bytes

    @classmethod
    def of(cls, env: EnvLike, env_kwargs: Mapping[str, object] | None) -> Self:
        """Pack an environment.

        Raises:
            ConfigurationError: It cannot be pickled.
        """
        try:
            return cls(cloudpickle.dumps((env, env_kwargs)))
        except Exception as error:  # whatever the operator's own code raises
            raise ConfigurationError(
                f"the environment cannot be sent to its endpoints ({type(error).__name__}: "
                f"{error}); give a factory without open files, locks or connections, or an id"
            ) from error

    def unpack(self) -> tuple[Any, Mapping[str, object] | None]:
        """Return the environment and its arguments.

        Raises:
            EnvStartError: What it needs cannot be imported here.
        """
        try:
            env, env_kwargs = cloudpickle.loads(self.content)
        except Exception as error:  # whatever the operator's own code raises
            raise EnvStartError(
                f"the environment cannot be brought to its endpoints: {type(error).__name__}: "
                f"{error}; a factory of a module that only the driver can import stays behind: "
                'name the environment by an id, "module:Env-v0", or have runtime_env bring the '
                "module"
            ) from error
        return env, env_kwargs
