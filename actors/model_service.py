"""ModelServiceActor: a policy endpoint, hosted by Ray."""

import os
from collections.abc import Collection
from typing import Any

import ray

from rlmesh_ray.errors import RlmeshError
from rlmesh_ray.models.loading import load_policy
from rlmesh_ray.server.model_server import ModelServer


@ray.remote(num_cpus=1, max_restarts=-1)
class ModelServiceActor:
    """Serves a policy as ``ModelServer`` does, on whatever node Ray puts it.

    Args:
        policy: A checkpoint as ``rlmesh-ray serve-model`` takes it (a path on the actor's node,
            or ``module:factory``), or whatever ``ModelServer`` takes. **An RLlib checkpoint is
            unpickled: load only what you trust.**
        address: ``HOST:PORT``; default: a free port that only the actor's own node can reach.
        token: What clients must show; required unless the address is loopback.
        accept_edition_texts: See ``EnvServer``.
        explore: For an RLlib checkpoint: sample actions instead of taking the likeliest.
    """

    def __init__(
        self,
        policy: object,
        *,
        address: str = "127.0.0.1:0",
        token: str | None = None,
        accept_edition_texts: Collection[str] = (),
        explore: bool = False,
    ) -> None:
        # Kept and raised by the first call, as what it is; see EnvServiceActor.
        self._failure: RlmeshError | None = None
        try:
            loaded = load_policy(policy, explore=explore) if isinstance(policy, str) else policy
            self._server = ModelServer(
                loaded, address=address, token=token, accept_edition_texts=accept_edition_texts
            ).start()
        except RlmeshError as error:
            self._failure = error

    def address(self) -> str:
        """Return where clients dial it.

        Raises:
            RlmeshError: It could not be started.
        """
        return self._running().address

    def describe(self) -> dict[str, Any]:
        """Return address, node, process id and what has been predicted so far."""
        server = self._running()
        return {
            "address": server.address,
            "node_id": ray.get_runtime_context().get_node_id(),
            "pid": os.getpid(),
            "statistics": server.statistics(),
        }

    def stop(self, grace_s: float = 1.0) -> None:
        """End the sessions and stop listening; kill the actor afterwards."""
        self._running().stop(grace_s)

    def _running(self) -> ModelServer:
        if self._failure is not None:
            raise self._failure
        return self._server
