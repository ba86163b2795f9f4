"""EnvServiceActor: an environment endpoint, hosted by Ray."""

import os
import threading
from collections.abc import Callable, Collection, Mapping
from typing import Any

import ray

from rlmesh_ray.actors.actor_restart import is_restarted, retry_start
from rlmesh_ray.actors.registry.heartbeat import Heartbeat
from rlmesh_ray.actors.serialized_env import SerializedEnv
from rlmesh_ray.auth.ray_credentials import RayTls
from rlmesh_ray.envs.env_source import EnvLike
from rlmesh_ray.errors import EndpointClosedError, RlmeshError
from rlmesh_ray.server.env_options import DEFAULT_STEP_GRACE_S
from rlmesh_ray.server.env_server import EnvServer
from rlmesh_ray.server.gc_tuning import freeze_heap
from rlmesh_ray.server.log_format import configure_logging_from_environment

_SUPERSEDED_GRACE_S = 10.0
"""For the sessions of an endpoint whose id has gone to another incarnation."""


@ray.remote(num_cpus=1, max_restarts=-1, concurrency_groups={"drain": 1})
class EnvServiceActor:
    """Serves an environment as ``EnvServer`` does, on whatever node Ray puts it.

    When Ray restarts it, it serves again, at another port: look the address up in the registry,
    or ask for it again.

    Args:
        env: A Gymnasium id or a factory; see ``EnvServer``. A ``SerializedEnv`` has its own
            arguments. To be restarted with a factory that holds more than 64 KiB, it needs somebody
            who holds
            that: pass ``ray.put(factory)``, and keep the reference (an ``EnvFleet`` does).
        num_envs: Lanes of each session.
        env_kwargs: Passed to ``gymnasium.make``; only with an id.
        autoreset: See ``EnvServer``.
        address: ``HOST:PORT``; default: a free port at the node's own address.
        token: What clients must show; required unless the address is loopback.
        endpoint_id: Under which it announces itself to the registry; None: it does not.
        fleet: Whose endpoint it is, as the registry shall know it.
        announces: Whether it does so by itself when it is started first, not only by ``announce``.
        max_sessions: See ``EnvServer``.
        validation: See ``EnvServer``.
        on_bad_value: See ``EnvServer``.
        step_grace_s: See ``EnvServer``.
        allow_calls: See ``EnvServer``.
        accept_edition_texts: See ``EnvServer``.
        dialects: See ``EnvServer``.
    """

    def __init__(  # noqa: PLR0913  # the options of EnvServer, and two of its own
        self,
        env: EnvLike | SerializedEnv,
        *,
        num_envs: int = 1,
        env_kwargs: Mapping[str, object] | None = None,
        autoreset: str = "next_step",
        address: str | None = None,
        token: str | None = None,
        endpoint_id: str | None = None,
        fleet: str = "",
        announces: bool = True,
        max_sessions: int | None = None,
        validation: str = "warn",
        on_bad_value: str = "error",
        step_grace_s: float = DEFAULT_STEP_GRACE_S,
        allow_calls: Collection[str] = (),
        accept_edition_texts: Collection[str] = (),
        dialects: Collection[str] | None = None,
    ) -> None:
        # An exception here would reach the caller as the text of a dead actor; kept, it is
        # raised by whatever is called, as what it is.
        self._failure: RlmeshError | None = None
        self._endpoint_id = endpoint_id
        self._fleet = fleet
        self._heartbeat: Heartbeat | None = None
        self._is_restarted = is_restarted()

        def serve() -> EnvServer:
            hosted, kwargs = env.unpack() if isinstance(env, SerializedEnv) else (env, env_kwargs)
            server = EnvServer(
                hosted,
                num_envs=num_envs,
                env_kwargs=kwargs,
                autoreset=autoreset,
                address=address or f"{ray.util.get_node_ip_address()}:0",
                token=token,
                tls=RayTls(),
                max_sessions=max_sessions,
                validation=validation,
                on_bad_value=on_bad_value,
                step_grace_s=step_grace_s,
                allow_calls=allow_calls,
                accept_edition_texts=accept_edition_texts,
                dialects=dialects,
                endpoint_id=endpoint_id,
            ).start()
            freeze_heap()
            return server

        try:
            configure_logging_from_environment()
            self._server = serve()
        except RlmeshError as error:
            self._failure = error
            if self._is_restarted:
                trying = threading.Thread(
                    target=self._serve_later, args=[serve, error], daemon=True
                )
                trying.start()
            return
        if announces or self._is_restarted:
            self.announce()

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

    def announce(self) -> None:
        """Have the registry send clients here, if the endpoint has an id; then keep its lease."""
        server = self._running()
        if self._endpoint_id is not None and self._heartbeat is None:
            self._heartbeat = Heartbeat(
                self._endpoint_id,
                server.address,
                fleet=self._fleet,
                statistics=server.statistics,
                on_superseded=self._end_superseded,
            )

    @ray.method(concurrency_group="drain")
    def drain(self, timeout_s: float) -> bool:
        """Take no new sessions, and wait until the open ones have ended; return whether they have.

        Clients that come are told that the endpoint is draining; the registry sends nobody.
        """
        server = self._running()
        if self._heartbeat is not None:
            self._heartbeat.retire()
        return server.drain(timeout_s)

    def stop(self, grace_s: float = 1.0) -> None:
        """End the sessions and stop listening; kill the actor afterwards."""
        server = self._running()
        if self._heartbeat is not None:
            self._heartbeat.end()
        server.stop(grace_s)

    def _serve_later(self, serve: Callable[[], EnvServer], failure: RlmeshError) -> None:
        self._server = retry_start(serve, failure, self._note_failure)
        self._failure = None
        self.announce()

    def _note_failure(self, failure: RlmeshError) -> None:
        self._failure = failure

    def _end_superseded(self) -> None:
        # If this process ended, Ray might start it anew and let it take the id back.
        server = self._running()
        self._failure = EndpointClosedError(
            f"endpoint {self._endpoint_id} has been started anew elsewhere; look its address up in "
            "the registry",
            server.address,
        )
        server.drain(_SUPERSEDED_GRACE_S)
        server.stop()

    def _running(self) -> EnvServer:
        if self._failure is not None:
            raise self._failure
        return self._server
