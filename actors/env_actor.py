"""EnvServiceActor: an environment endpoint, hosted by Ray."""

from collections.abc import Collection, Mapping
from typing import Any

import ray

from rlmesh_ray.actors.serialized_env import SerializedEnv
from rlmesh_ray.actors.server_actor import ServerActor, default_address
from rlmesh_ray.auth.ray_credentials import RayTls
from rlmesh_ray.auth.token_file import TokenSource
from rlmesh_ray.envs.env_source import EnvLike
from rlmesh_ray.server.env_options import DEFAULT_STEP_GRACE_S
from rlmesh_ray.server.env_server import EnvServer


@ray.remote(num_cpus=1, max_restarts=-1, concurrency_groups={"drain": 1, "stop": 1})
class EnvServiceActor(ServerActor[EnvServer]):
    """Serves an environment as ``EnvServer`` does, on the node that Ray chooses.

    ``EnvServiceActor.remote(env)``, or ``EnvServiceActor.options(num_gpus=1).remote(env)``. When
    Ray restarts the actor, it serves again at another port: look the address up in the registry,
    or ask the actor again.

    Args:
        env: A Gymnasium id or a factory; see ``EnvServer``. A ``SerializedEnv`` has its own
            arguments. A factory of more than 64 KiB survives a restart only while a reference to
            it exists: pass ``ray.put(factory)`` and keep it (an ``EnvFleet`` does).
        num_envs: Lanes of each session.
        env_kwargs: Keyword arguments of ``gymnasium.make`` or of the factory.
        autoreset: See ``EnvServer``.
        address: ``HOST:PORT``; default: a free port, with a token at the node's own address,
            without one on loopback.
        token: Token that clients must present, or a ``TokenFile`` on the actor's node; required
            unless ``address`` is loopback.
        endpoint_id: Id in the registry; None: the actor does not announce itself.
        fleet: Name of the endpoint's fleet in the registry; empty: none.
        announces: Whether the first start announces the endpoint; otherwise ``announce`` does.
        max_sessions: See ``EnvServer``.
        sessions_per_worker: See ``EnvServer``.
        validation: See ``EnvServer``.
        on_bad_value: See ``EnvServer``.
        step_grace_s: See ``EnvServer``.
        allow_calls: See ``EnvServer``.
        accept_edition_texts: See ``EnvServer``.
        dialects: See ``EnvServer``.
        idle_timeout_s: See ``EnvServer``.
    """

    def __init__(  # noqa: PLR0913  # the options of EnvServer, and a few of its own
        self,
        env: EnvLike | SerializedEnv,
        *,
        num_envs: int = 1,
        env_kwargs: Mapping[str, object] | None = None,
        autoreset: str = "next_step",
        address: str | None = None,
        token: TokenSource | None = None,
        endpoint_id: str | None = None,
        fleet: str = "",
        announces: bool = True,
        max_sessions: int | None = None,
        sessions_per_worker: int = 1,
        validation: str = "warn",
        on_bad_value: str = "error",
        step_grace_s: float = DEFAULT_STEP_GRACE_S,
        allow_calls: Collection[str] = (),
        accept_edition_texts: Collection[str] = (),
        dialects: Collection[str] | None = None,
        idle_timeout_s: float | None = None,
    ) -> None:
        def serve() -> EnvServer:
            hosted, kwargs = env.unpack() if isinstance(env, SerializedEnv) else (env, env_kwargs)
            return EnvServer(
                hosted,
                num_envs=num_envs,
                env_kwargs=kwargs,
                autoreset=autoreset,
                address=address or default_address(token),
                token=token,
                tls=RayTls(),
                max_sessions=max_sessions,
                sessions_per_worker=sessions_per_worker,
                validation=validation,
                on_bad_value=on_bad_value,
                step_grace_s=step_grace_s,
                allow_calls=allow_calls,
                accept_edition_texts=accept_edition_texts,
                dialects=dialects,
                idle_timeout_s=idle_timeout_s,
                endpoint_id=endpoint_id,
            ).start()

        super().__init__(serve, endpoint_id=endpoint_id, fleet=fleet, announces=announces)

    @ray.method(max_task_retries=-1)
    def describe(self) -> dict[str, Any]:
        """Return address, node, process id and number of open sessions."""
        return {**super().describe(), "num_sessions": self._running().num_sessions}
