"""EnvServiceActor: an environment endpoint, hosted by Ray."""

from dataclasses import dataclass
from typing import Any, Self, Unpack, cast

import cloudpickle
import ray

from rlmesh_ray.actors.server_actor import (
    ACTOR_ADDRESS,
    NOT_OF_ACTORS,
    EndpointActor,
    actor_listening,
)
from rlmesh_ray.auth.ray_credentials import RayTls
from rlmesh_ray.envs.env_source import EnvLike, require_env_name
from rlmesh_ray.errors import ConfigurationError, EnvStartError
from rlmesh_ray.options import takes_options
from rlmesh_ray.server.env.env_options import EnvOptions, EnvServerOptions
from rlmesh_ray.server.env.env_server import EnvServer


@dataclass(frozen=True, slots=True)
class SerializedEnv:
    """A Gymnasium id or a factory, and the options of its endpoints, as bytes.

    Processes that pass it on need none of the environment's modules.
    """

    content: bytes

    @classmethod
    def of(cls, env: EnvLike, options: EnvOptions) -> Self:
        """Pickle an environment, and the options that its endpoints get.

        Raises:
            ConfigurationError: It cannot be pickled, or a text cannot name an environment.
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


@ray.remote(num_cpus=1, max_restarts=-1, concurrency_groups={"drain": 1, "stop": 1})
@takes_options(EnvServerOptions, without=NOT_OF_ACTORS, address=ACTOR_ADDRESS)
class EnvServiceActor(EndpointActor[EnvServer]):
    """Serves an environment as ``EnvServer`` does, on the node that Ray chooses.

    ``EnvServiceActor.remote(env)``, or ``EnvServiceActor.options(num_gpus=1).remote(env)``. When
    Ray restarts the actor, it serves again at another port: look the address up in the registry,
    or ask the actor again.

    Args:
        env: A Gymnasium id or a factory; see ``EnvServer``. A ``SerializedEnv`` has its own
            arguments. A factory of more than 64 KiB survives a restart only while a reference to
            it exists: pass ``ray.put(factory)`` and keep it (an ``EnvFleet`` does).
        endpoint_id: Id in the registry; None: the actor does not announce itself.
        fleet: Name of the endpoint's fleet in the registry; empty: none.
        announces: Whether the first start announces the endpoint; otherwise ``announce`` does.
        **options: Those of ``EnvServerOptions``.
    """

    def __init__(
        self,
        env: EnvLike | SerializedEnv,
        *,
        endpoint_id: str | None = None,
        fleet: str = "",
        announces: bool = True,
        **options: Unpack[EnvServerOptions],
    ) -> None:
        def serve() -> EnvServer:
            hosted, shared = env.unpack() if isinstance(env, SerializedEnv) else (env, EnvOptions())
            given: EnvServerOptions = {**shared, **options}
            _, given["address"] = actor_listening("EnvServiceActor", given, "openpi")
            given["tls"] = RayTls()
            return EnvServer(hosted, _endpoint_id=endpoint_id, **given).start()

        super().__init__(serve, endpoint_id=endpoint_id, fleet=fleet, announces=announces)

    @ray.method(max_task_retries=-1)
    def describe(self) -> dict[str, Any]:
        """Return address, node, process id and number of open sessions."""
        return {**super().describe(), "num_sessions": self._running().num_sessions}
