"""ModelServiceActor: a policy endpoint, hosted by Ray."""

import logging
import secrets
import weakref
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import ray

from rlmesh_ray.actors.actor_restart import durable
from rlmesh_ray.actors.ray_calls import get_result
from rlmesh_ray.actors.registry.heartbeat import Heartbeat
from rlmesh_ray.actors.registry.registry_actor import shared_registry
from rlmesh_ray.actors.server_actor import ServerActor, default_address
from rlmesh_ray.actors.weight_store import find_weight_store, load_newest, offer, start_weight_store
from rlmesh_ray.auth.ray_credentials import RayTls
from rlmesh_ray.auth.token_file import TokenSource
from rlmesh_ray.errors import ConfigurationError, PolicyError, RlmeshError
from rlmesh_ray.models.loading import as_policy, load_policy
from rlmesh_ray.options import FIRST
from rlmesh_ray.server.batch_queue import DEFAULT_MAX_ROWS
from rlmesh_ray.server.bind_policy import checked_address
from rlmesh_ray.server.error_text import text_of
from rlmesh_ray.server.model_options import DEFAULT_STUCK_AFTER_S
from rlmesh_ray.server.model_server import ModelServer
from rlmesh_ray.spaces.observation_map import ObservationMap

logger = logging.getLogger(__name__)

# Ray restarts an actor, but does not keep the objects alive that the restart needs. The driver
# does, as long as it holds the actor's handle.
_STORES: "weakref.WeakKeyDictionary[Any, Any]" = weakref.WeakKeyDictionary()


@ray.remote(num_cpus=1, max_restarts=-1, concurrency_groups={"weights": 1, "drain": 1, "stop": 1})
class ModelReplica(ServerActor[ModelServer]):
    """The actor behind ``ModelServiceActor``, and one replica of a ``ModelFleet``.

    Methods that may take long have concurrency groups of their own: all others answer while new
    weights wait for a policy that is stuck.

    Args:
        store: Name of the ``WeightStore`` with the newest weights.
        policy: See ``ModelServiceActor``.
        address: See ``ModelServiceActor``.
        token: See ``ModelServiceActor``.
        endpoint_id: See ``ModelServiceActor``.
        fleet: Name of the replica's fleet in the registry; empty: none.
        policy_options: Keyword arguments of ``place_on_device``.
        server_options: Further keyword arguments of ``ModelServer``.
    """

    def __init__(
        self,
        store: str,
        policy: object,
        *,
        address: str | None,
        token: TokenSource | None,
        endpoint_id: str | None,
        fleet: str,
        policy_options: Mapping[str, Any],
        server_options: Mapping[str, Any],
    ) -> None:
        def serve() -> ModelServer:
            self._store = find_weight_store(store)
            place = address or default_address(token)
            checked_address(place, token)  # before the policy is loaded, which may take long
            server = ModelServer(
                place_on_device(policy, **policy_options),
                address=place,
                token=token,
                tls=RayTls(),
                endpoint_id=endpoint_id,
                **server_options,
            )
            try:
                # Before any client can connect: after a restart, too, only the newest weights act.
                load_newest(self._store, server)
                return server.start()
            except BaseException:
                server.stop(0.0)
                raise

        super().__init__(serve, endpoint_id=endpoint_id, fleet=fleet)

    @ray.method(max_task_retries=-1)
    def describe(self) -> dict[str, Any]:
        """Return address, node, process id and policy version."""
        return {**super().describe(), "policy_version": self._running().policy_version}

    @ray.method(max_task_retries=-1)
    def policy_version(self) -> int:
        """Return the version of the weights that act; 0: the policy's original ones."""
        return self._running().policy_version

    @ray.method(concurrency_group="weights")
    def set_weights(self, weights: object, version: int | None = None) -> int:
        """Replace the policy's weights, also for after a restart.

        Args:
            weights: The argument of the policy's ``set_weights``.
            version: Version of these weights, an integer up to 2**63 - 1 that is larger than the
                present one; default: one more than the present one.

        Returns:
            The version that acts from now on.

        Raises:
            PolicyError: The policy refuses the weights; the former ones act on.
            ConfigurationError: The policy cannot take weights, or ``version`` is invalid.
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
        """Load the store's newest weights, if they are newer; return the acting version.

        Raises:
            PolicyError: The policy refuses the weights; the former ones act on.
            ConfigurationError: The policy cannot take weights.
        """
        return self._follow()

    def _leave(self, heartbeat: Heartbeat) -> None:
        """Remove the replica's address from those that the registry returns."""
        heartbeat.suspend()

    def _follow(self) -> int:
        server = self._running()
        newest = get_result(self._store.newest.remote())
        if newest and newest[0].version > server.policy_version:
            server.set_weights(get_result(newest[0].reference), version=newest[0].version)
        return server.policy_version


class ModelActorFactory:
    """Starts the actors of ``ModelServiceActor``, with the interface of a Ray actor class.

    Args:
        options: Ray's options of each actor (``num_cpus``, ``num_gpus``, ``resources``, ...).
    """

    def __init__(self, options: Mapping[str, Any]) -> None:
        self._options = dict(options)

    def options(self, **options: Any) -> "ModelActorFactory":
        """Return a factory with these options of Ray's added."""
        return ModelActorFactory({**self._options, **options})

    def remote(  # noqa: PLR0913  # the public surface; every option stands alone
        self,
        policy: object,
        *,
        address: str | None = None,
        token: TokenSource | None = None,
        endpoint_id: str | None = None,
        explore: bool = False,
        device: str = "auto",
        buckets: Sequence[int] = (),
        inference: str = "auto",
        horizon: int | None = None,
        chunk_replay: str = FIRST,
        observation_map: ObservationMap | Sequence[str] | Mapping[str, str] | None = None,
        max_batch_rows: int = DEFAULT_MAX_ROWS,
        max_delay_s: float = 0.0,
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
                node, or ``module:factory``), or any policy that ``ModelServer`` takes. **An RLlib
                checkpoint is unpickled: load only what you trust.**
            address: ``HOST:PORT``; default: a free port, with a token at the node's own address,
                without one on loopback.
            token: Token that clients must present, or a ``TokenFile`` on the actor's node; required
                unless ``address`` is loopback.
            endpoint_id: Id in the registry; None: the actor does not announce itself.
            explore: For an RLlib checkpoint: sample actions instead of taking the most likely one.
            device: Device of a checkpoint or a torch module, as torch names it; "auto": the GPU
                that Ray assigned to the actor, if it assigned one.
            buckets: Sizes to which batches are padded, so that the device sees few; for
                checkpoints and torch modules.
            inference: See ``TorchPolicy``.
            horizon: See ``ModelServer``.
            chunk_replay: See ``ModelServer``.
            observation_map: See ``ModelServer``; files of its entries are on the actor's node.
            max_batch_rows: See ``ModelServer``.
            max_delay_s: See ``ModelServer``.
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
            policy_options={
                "explore": explore,
                "device": device,
                "buckets": tuple(buckets),
                "inference": inference,
                "horizon": horizon,
            },
            server_options={
                "chunk_replay": chunk_replay,
                "observation_map": observation_map,
                "max_batch_rows": max_batch_rows,
                "max_delay_s": max_delay_s,
                "max_message_bytes": max_message_bytes,
                "torch_threads": torch_threads,
                "stuck_after_s": stuck_after_s,
                "accept_edition_texts": accept_edition_texts,
                "dialects": dialects,
                "idle_timeout_s": idle_timeout_s,
            },
        )
        _STORES[actor] = stored, durable_policy
        return actor


ModelServiceActor = ModelActorFactory({})
"""Serves a policy as ``ModelServer`` does, on the node that Ray chooses.

``ModelServiceActor.remote(policy)``, or ``ModelServiceActor.options(num_gpus=1).remote(policy)``;
the returned handle has the methods of ``ModelReplica``. When Ray restarts the actor, it serves
again at another port, with the weights that it had: a small actor beside it stores them, as long
as the handle lives.
"""


def place_on_device(
    policy: object,
    device: str,
    *,
    explore: bool = False,
    buckets: Sequence[int] = (),
    inference: str = "auto",
    horizon: int | None = None,
) -> object:
    """Return a policy on its device, loaded first if it is named by a text.

    Args:
        policy: See ``ModelServiceActor``; likewise the others.
        device: A device as torch names it, or "auto".
        explore: For an RLlib checkpoint.
        buckets: Sizes to which batches are padded.
        inference: See ``TorchPolicy``.
        horizon: See ``ModelServer``.

    Raises:
        ConfigurationError: The policy or the device does not exist, or the policy cannot run there.
        PolicyError: Loading or moving the policy failed.
    """
    where: str | None = device
    if device == "auto":
        # A factory chooses the device of its policy itself, and ONNX files run on the CPU.
        is_chosen = isinstance(policy, str) and (
            policy.lower().endswith(".onnx") or not Path(policy).expanduser().exists()
        )
        where = "cuda" if ray.get_gpu_ids() and not is_chosen else None
    if isinstance(policy, str):
        return load_policy(
            policy,
            explore=explore,
            device=where,
            buckets=buckets,
            inference=inference,
            horizon=horizon,
        )
    moved = _moved(policy, where, is_automatic=device == "auto")
    if not buckets and inference == "auto" and horizon is None:
        return moved
    return as_policy(moved, horizon=horizon, buckets=buckets, inference=inference)


def _moved(policy: object, where: str | None, *, is_automatic: bool) -> object:
    """Move a policy object to a device, if it has a method ``to``."""
    move = getattr(policy, "to", None)
    if where is None or (is_automatic and move is None):
        return policy
    if move is None:
        raise ConfigurationError(
            f"device={where!r} is for checkpoints and torch modules; a {type(policy).__name__} "
            "chooses its own device: leave device out"
        )
    from rlmesh_ray.models.torch.module import torch_device

    place = torch_device(where)
    try:
        return move(place)
    except Exception as error:  # the device's memory is full, or the operator's own code raised
        raise PolicyError(
            f"the policy could not be moved to {where}: {type(error).__name__}: {text_of(error)}"
        ) from error
