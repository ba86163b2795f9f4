"""ModelServiceActor: a policy endpoint, hosted by Ray."""

import logging
import os
import secrets
import threading
import weakref
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import ray

from rlmesh_ray.actors.actor_restart import is_restarted, retry_start
from rlmesh_ray.actors.device_placement import place_on_device
from rlmesh_ray.actors.durable_args import durable
from rlmesh_ray.actors.ray_calls import get_result
from rlmesh_ray.actors.registry.heartbeat import Heartbeat
from rlmesh_ray.actors.registry.registry_actor import shared_registry
from rlmesh_ray.actors.weight_store import find_weight_store, offer, start_weight_store
from rlmesh_ray.auth.ray_credentials import RayTls
from rlmesh_ray.errors import (
    EndpointClosedError,
    EndpointUnreachableError,
    PolicyError,
    RlmeshError,
)
from rlmesh_ray.models.batcher import DEFAULT_MAX_ROWS
from rlmesh_ray.server.bind_policy import checked_address
from rlmesh_ray.server.gc_tuning import freeze_heap
from rlmesh_ray.server.health import Health
from rlmesh_ray.server.log_format import configure_logging_from_environment
from rlmesh_ray.server.model_server import ModelServer
from rlmesh_ray.server.policy_health import DEFAULT_STUCK_AFTER_S

logger = logging.getLogger(__name__)

_SUPERSEDED_GRACE_S = 10.0
"""For the sessions of a replica whose id has gone to another incarnation."""

# Ray restarts an actor, but does not keep alive what the actor needs for that: the driver does, as
# long as it holds the actor.
_STORES: "weakref.WeakKeyDictionary[Any, Any]" = weakref.WeakKeyDictionary()


@ray.remote(num_cpus=1, max_restarts=-1, concurrency_groups={"weights": 1, "drain": 1, "stop": 1})
class ModelReplica:
    """The actor behind ``ModelServiceActor``, and one replica of a ``ModelFleet``.

    What may take long has a concurrency group of its own: all other methods answer while new
    weights wait for a policy that is stuck.

    Args:
        store: Name of the ``WeightStore`` that has the newest weights.
        policy: See ``ModelServiceActor``; likewise the others.
    """

    def __init__(  # noqa: PLR0913  # the options of ModelServer, and a few of its own
        self,
        store: str,
        policy: object,
        *,
        address: str | None,
        token: str | None,
        endpoint_id: str | None,
        fleet: str,
        explore: bool,
        device: str,
        buckets: Sequence[int],
        compile: bool,
        max_batch_rows: int,
        max_message_bytes: int | None,
        torch_threads: int,
        stuck_after_s: float,
        accept_edition_texts: Collection[str],
        dialects: Collection[str] | None,
        idle_timeout_s: float | None,
    ) -> None:
        self._heartbeat: Heartbeat | None = None
        # Kept and raised by the first call, as what it is; see EnvServiceActor.
        self._failure: RlmeshError | None = None
        self._endpoint_id = endpoint_id
        self._fleet = fleet

        def serve() -> ModelServer:
            self._store = find_weight_store(store)
            place = address or _default_address(token)
            checked_address(place, token)  # loading the policy may take long
            server = ModelServer(
                place_on_device(policy, device, explore=explore, buckets=buckets, compile=compile),
                address=place,
                token=token,
                tls=RayTls(),
                max_batch_rows=max_batch_rows,
                max_message_bytes=max_message_bytes,
                torch_threads=torch_threads,
                stuck_after_s=stuck_after_s,
                accept_edition_texts=accept_edition_texts,
                dialects=dialects,
                idle_timeout_s=idle_timeout_s,
                endpoint_id=endpoint_id,
            )
            try:
                # Before it can be dialled: nobody meets an older version than before a restart.
                self._take_up(server)
                server.start()
                freeze_heap()
                return server
            except BaseException:
                server.stop(0.0)
                raise

        try:
            configure_logging_from_environment()
            self._server = serve()
        except RlmeshError as error:
            self._failure = error
            if is_restarted():
                trying = threading.Thread(
                    target=self._serve_later, args=[serve, error], daemon=True
                )
                trying.start()
            return
        self._announce()

    @ray.method(max_task_retries=-1)
    def address(self) -> str:
        """Return where clients dial it.

        Raises:
            RlmeshError: It could not be started.
        """
        return self._running().address

    @ray.method(max_task_retries=-1)
    def describe(self) -> dict[str, Any]:
        """Return address, node, process id, policy version and what has been predicted so far."""
        server = self._running()
        return {
            "address": server.address,
            "node_id": ray.get_runtime_context().get_node_id(),
            "pid": os.getpid(),
            "policy_version": server.policy_version,
            "statistics": server.statistics(),
        }

    @ray.method(max_task_retries=-1)
    def policy_version(self) -> int:
        """Return the version of the weights that act; 0: those that it was made with."""
        return self._running().policy_version

    def health(self) -> Health:
        """Return whether it can serve now, and why not; answers while the policy is stuck."""
        return self._running().health()

    @ray.method(concurrency_group="weights")
    def set_weights(self, weights: object, version: int | None = None) -> int:
        """Let new weights act, also after restarts.

        Args:
            weights: What the policy's ``set_weights`` takes.
            version: Of these weights, an integer up to 2**63 - 1 that is larger than the present
                one; default: one more than that.

        Returns:
            The version that acts from now on.

        Raises:
            PolicyError: The policy does not take them; the former ones act on.
            ConfigurationError: The policy cannot take any, or ``version`` is no such integer.
        """
        floor = self._running().policy_version
        offered = get_result(offer(self._store, weights, version, floor))
        try:
            acting = self._follow()
        except RlmeshError:
            get_result(self._store.reject.remote(offered))
            raise
        get_result(self._store.accept.remote(offered))
        return acting

    @ray.method(concurrency_group="weights", max_task_retries=-1)
    def follow(self) -> int:
        """Act with the keeper's newest weights, if they are newer; return the acting version.

        Raises:
            PolicyError: The policy does not take them; the former ones act on.
            ConfigurationError: The policy cannot take any.
        """
        return self._follow()

    @ray.method(concurrency_group="drain")
    def drain(self, timeout_s: float) -> bool:
        """Take no new sessions, and wait until the open ones have ended; return whether they have.

        The registry no longer tells its address.
        """
        server = self._running()
        if self._heartbeat is not None:
            self._heartbeat.suspend()
        return server.drain(timeout_s)

    @ray.method(concurrency_group="stop")
    def stop(self, grace_s: float = 1.0) -> None:
        """End the sessions and stop listening; kill the actor afterwards."""
        server = self._running()
        if self._heartbeat is not None:
            self._heartbeat.end()
        server.stop(grace_s)

    def _announce(self) -> None:
        if self._endpoint_id is not None:
            self._heartbeat = Heartbeat(
                self._endpoint_id,
                self._server.address,
                fleet=self._fleet,
                statistics=self._server.statistics,
                on_superseded=self._end_superseded,
            )

    def _serve_later(self, serve: Callable[[], ModelServer], failure: RlmeshError) -> None:
        self._server = retry_start(serve, failure, self._note_failure)
        self._failure = None
        self._announce()

    def _note_failure(self, failure: RlmeshError) -> None:
        self._failure = failure

    def _end_superseded(self) -> None:
        # As of an EnvServiceActor: another process of this very actor has the id now.
        server = self._running()
        self._failure = EndpointClosedError(
            "this replica has been started anew elsewhere; look its address up in the registry",
            server.address,
        )
        server.drain(_SUPERSEDED_GRACE_S)
        server.stop()

    def _follow(self) -> int:
        server = self._running()
        newest = get_result(self._store.newest.remote())
        if newest and newest[0].version > server.policy_version:
            server.set_weights(get_result(newest[0].reference), version=newest[0].version)
        return server.policy_version

    def _take_up(self, server: ModelServer) -> None:
        """Begin with the newest weights that there are."""
        for stored in get_result(self._store.newest.remote()):
            try:
                server.set_weights(get_result(stored.reference), version=stored.version)
            except (PolicyError, EndpointUnreachableError) as error:
                logger.warning("version %d of the weights is left out: %s", stored.version, error)
            else:
                return

    def _running(self) -> ModelServer:
        if self._failure is not None:
            raise self._failure
        return self._server


class ModelActorFactory:
    """How ``ModelServiceActor`` is started: as Ray's own classes of actors are.

    Args:
        options: Ray's options for each actor (``num_cpus``, ``num_gpus``, ``resources``, ...).
    """

    def __init__(self, options: Mapping[str, Any]) -> None:
        self._options = dict(options)

    def options(self, **options: Any) -> "ModelActorFactory":
        """Return the same with these options of Ray's, too."""
        return ModelActorFactory({**self._options, **options})

    def remote(  # noqa: PLR0913  # the public surface; every option stands alone
        self,
        policy: object,
        *,
        address: str | None = None,
        token: str | None = None,
        endpoint_id: str | None = None,
        explore: bool = False,
        device: str = "auto",
        buckets: Sequence[int] = (),
        compile: bool = False,
        max_batch_rows: int = DEFAULT_MAX_ROWS,
        max_message_bytes: int | None = None,
        torch_threads: int = 1,
        stuck_after_s: float = DEFAULT_STUCK_AFTER_S,
        accept_edition_texts: Collection[str] = (),
        dialects: Collection[str] | None = None,
        idle_timeout_s: float | None = None,
    ) -> Any:
        """Start the actor; return its handle at once.

        Args:
            policy: A checkpoint as ``rlmesh-ray serve-model`` takes it (a path on the actor's
                node, or ``module:factory``), or whatever ``ModelServer`` takes. **An RLlib
                checkpoint is unpickled: load only what you trust.**
            address: ``HOST:PORT``; default: a free port, at the node's own address with a token,
                without one where only that node can reach it.
            token: What clients must show; required unless the address is loopback.
            endpoint_id: Under which it announces itself to the registry; None: it does not.
            explore: For an RLlib checkpoint: sample actions instead of taking the likeliest.
            device: Where a checkpoint or a torch module runs, as torch names it; "auto": on the
                GPU that Ray gave the actor, if it gave one.
            buckets: Sizes to which batches are padded, so that the device sees few; for
                checkpoints and torch modules.
            compile: Whether torch compiles the module, for each of ``buckets``.
            max_batch_rows: See ``ModelServer``.
            max_message_bytes: See ``ModelServer``.
            torch_threads: See ``ModelServer``.
            stuck_after_s: See ``ModelServer``.
            accept_edition_texts: See ``EnvServer``.
            dialects: See ``ModelServer``.
            idle_timeout_s: See ``ModelServer``.
        """
        if endpoint_id is not None:
            shared_registry()
        durable_policy = durable("the policy", policy)
        store = f"weights/{secrets.token_hex(8)}"
        stored = start_weight_store(store)
        actor_class: Any = ModelReplica
        actor = actor_class.options(**self._options).remote(
            store,
            durable_policy,
            address=address,
            token=token,
            endpoint_id=endpoint_id,
            fleet="",
            explore=explore,
            device=device,
            buckets=tuple(buckets),
            compile=compile,
            max_batch_rows=max_batch_rows,
            max_message_bytes=max_message_bytes,
            torch_threads=torch_threads,
            stuck_after_s=stuck_after_s,
            accept_edition_texts=accept_edition_texts,
            dialects=dialects,
            idle_timeout_s=idle_timeout_s,
        )
        _STORES[actor] = stored, durable_policy
        return actor


ModelServiceActor = ModelActorFactory({})
"""Serves a policy as ``ModelServer`` does, on whatever node Ray puts it.

``ModelServiceActor.remote(policy)``, or ``ModelServiceActor.options(num_gpus=1).remote(policy)``;
``ModelReplica`` has the methods of what this returns. When Ray restarts the actor, it serves
again, at another port and with the weights that it had: a small actor beside it keeps them, as
long as the handle lives that ``remote`` returned.
"""


def _default_address(token: str | None) -> str:
    return "127.0.0.1:0" if token is None else f"{ray.util.get_node_ip_address()}:0"
