"""SerializedEnv: an environment and its endpoint's options as bytes, for the endpoint's process."""

from dataclasses import dataclass
from typing import Any, Self, cast

import cloudpickle

from rlmesh_ray.envs.env_source import EnvLike, require_env_name
from rlmesh_ray.errors import ConfigurationError, EnvStartError
from rlmesh_ray.server.env_options import EnvOptions


@dataclass(frozen=True, slots=True)
class SerializedEnv:
    """A Gymnasium id or a factory, and the options of its endpoints, as bytes.

    Processes that pass it on need none of the environment's modules.
    """

    content: bytes

    @classmethod
    def of(cls, env: EnvLike, options: EnvOptions) -> Self:
        """Serialize an environment, and the options that its endpoints get.

        Raises:
            ConfigurationError: The environment cannot be pickled, or a text cannot name one.
        """
        if isinstance(env, str):
            require_env_name(env)
        try:
            return cls(cloudpickle.dumps((env, options)))
        except Exception as error:  # the operator's own code may raise anything
            raise ConfigurationError(
                f"the environment cannot be sent to its endpoints ({type(error).__name__}: "
                f"{error}); give a factory without open files, locks or connections, or an id"
            ) from error

    def unpack(self) -> tuple[Any, EnvOptions]:
        """Return the environment and its options.

        Raises:
            EnvStartError: A module of the environment cannot be imported here.
        """
        try:
            env, options = cloudpickle.loads(self.content)
        except Exception as error:  # the operator's own code may raise anything
            raise EnvStartError(
                f"the environment cannot be loaded on its endpoints' node: {type(error).__name__}: "
                f"{error}; a factory from a module that only the driver can import cannot be used "
                'there: name the environment by an id, "module:Env-v0", or install the module by '
                "runtime_env"
            ) from error
        return env, cast(EnvOptions, options)
