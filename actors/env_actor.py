"""EnvServiceActor: an environment endpoint, hosted by Ray."""

from typing import Any, Unpack

import ray

from rlmesh_ray.actors.serialized_env import SerializedEnv
from rlmesh_ray.actors.server_actor import (
    ACTOR_ADDRESS,
    ACTOR_ID,
    NOT_OF_ACTORS,
    ServerActor,
    default_address,
)
from rlmesh_ray.auth.ray_credentials import RayTls
from rlmesh_ray.envs.env_source import EnvLike
from rlmesh_ray.options import takes_options
from rlmesh_ray.server.env_options import EnvOptions, EnvServerOptions
from rlmesh_ray.server.env_server import EnvServer


@ray.remote(num_cpus=1, max_restarts=-1, concurrency_groups={"drain": 1, "stop": 1})
@takes_options(EnvServerOptions, without=NOT_OF_ACTORS, address=ACTOR_ADDRESS, endpoint_id=ACTOR_ID)
class EnvServiceActor(ServerActor[EnvServer]):
    """Serves an environment as ``EnvServer`` does, on the node that Ray chooses.

    ``EnvServiceActor.remote(env)``, or ``EnvServiceActor.options(num_gpus=1).remote(env)``. When
    Ray restarts the actor, it serves again at another port: look the address up in the registry,
    or ask the actor again.

    Args:
        env: A Gymnasium id or a factory; see ``EnvServer``. A ``SerializedEnv`` has its own
            arguments. A factory of more than 64 KiB survives a restart only while a reference to
            it exists: pass ``ray.put(factory)`` and keep it (an ``EnvFleet`` does).
        fleet: Name of the endpoint's fleet in the registry; empty: none.
        announces: Whether the first start announces the endpoint; otherwise ``announce`` does.
        **options: Those of ``EnvServerOptions``.
    """

    def __init__(
        self,
        env: EnvLike | SerializedEnv,
        *,
        fleet: str = "",
        announces: bool = True,
        **options: Unpack[EnvServerOptions],
    ) -> None:
        def serve() -> EnvServer:
            hosted, shared = env.unpack() if isinstance(env, SerializedEnv) else (env, EnvOptions())
            given: EnvServerOptions = {**shared, **options}
            given["address"] = given.get("address") or default_address(given.get("token"))
            given["tls"] = RayTls()
            return EnvServer(hosted, **given).start()

        super().__init__(
            serve, endpoint_id=options.get("endpoint_id"), fleet=fleet, announces=announces
        )

    @ray.method(max_task_retries=-1)
    def describe(self) -> dict[str, Any]:
        """Return address, node, process id and number of open sessions."""
        return {**super().describe(), "num_sessions": self._running().num_sessions}
