"""EnvServiceActor: an environment endpoint, hosted by Ray."""

import os
from collections.abc import Collection, Mapping
from typing import Any

import ray

from rlmesh_ray.actors.registry import find_registry
from rlmesh_ray.envs.source import HostedEnv
from rlmesh_ray.errors import RlmeshError
from rlmesh_ray.server.env_server import DEFAULT_STEP_GRACE_S, EnvServer


@ray.remote(num_cpus=1, max_restarts=-1)
class EnvServiceActor:
    """Serves an environment as ``EnvServer`` does, on whatever node Ray puts it.

    When Ray restarts it, it serves again, at another port: look the address up in the registry,
    or ask for it again.

    Args:
        env: A Gymnasium id or a factory; see ``EnvServer``.
        num_envs: Lanes of each session.
        env_kwargs: Passed to ``gymnasium.make``; only with an id.
        autoreset: See ``EnvServer``.
        address: ``HOST:PORT``; default: a free port at the node's own address.
        token: What clients must show; required unless the address is loopback.
        endpoint_id: Under which it announces itself to the registry; None: it does not.
        max_sessions: See ``EnvServer``.
        validation: See ``EnvServer``.
        step_grace_s: See ``EnvServer``.
        allow_calls: See ``EnvServer``.
        accept_edition_texts: See ``EnvServer``.
        speaks: See ``EnvServer``.
    """

    def __init__(  # noqa: PLR0913  # the options of EnvServer, and two of its own
        self,
        env: HostedEnv,
        *,
        num_envs: int = 1,
        env_kwargs: Mapping[str, object] | None = None,
        autoreset: str = "next_step",
        address: str | None = None,
        token: str | None = None,
        endpoint_id: str | None = None,
        max_sessions: int | None = None,
        validation: str = "warn",
        step_grace_s: float = DEFAULT_STEP_GRACE_S,
        allow_calls: Collection[str] = (),
        accept_edition_texts: Collection[str] = (),
        speaks: Collection[str] | None = None,
    ) -> None:
        # An exception here would reach the caller as the text of a dead actor; kept, it is
        # raised by whatever is called first, as what it is.
        self._failure: RlmeshError | None = None
        try:
            self._server = EnvServer(
                env,
                num_envs=num_envs,
                env_kwargs=env_kwargs,
                autoreset=autoreset,
                address=address or f"{ray.util.get_node_ip_address()}:0",
                token=token,
                max_sessions=max_sessions,
                validation=validation,
                step_grace_s=step_grace_s,
                allow_calls=allow_calls,
                accept_edition_texts=accept_edition_texts,
                speaks=speaks,
            ).start()
        except RlmeshError as error:
            self._failure = error
            return
        if endpoint_id is not None:
            ray.get(find_registry().announce.remote(endpoint_id, self._server.address))

    def address(self) -> str:
        """Return where clients dial it.

        Raises:
            RlmeshError: It could not be started.
        """
        return self._running().address

    def describe(self) -> dict[str, Any]:
        """Return address, node, process id and number of open sessions."""
        server = self._running()
        return {
            "address": server.address,
            "node_id": ray.get_runtime_context().get_node_id(),
            "pid": os.getpid(),
            "num_sessions": server.num_sessions,
        }

    def stop(self, grace_s: float = 1.0) -> None:
        """End the sessions and stop listening; kill the actor afterwards."""
        self._running().stop(grace_s)

    def _running(self) -> EnvServer:
        if self._failure is not None:
            raise self._failure
        return self._server
