"""ModelServiceActor: a policy endpoint, hosted by Ray; and the store of its weights."""

import logging
import secrets
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Unpack, cast

import ray

from rlmesh_ray.actors.placement import OUTSIDE
from rlmesh_ray.actors.ray_calls import durable, get_result
from rlmesh_ray.actors.registry.registry_actor import (
    REGISTRY_NAMESPACE,
    find_actor,
    shared_registry,
)
from rlmesh_ray.actors.server_actor import (
    ACTOR_ADDRESS,
    NOT_OF_ACTORS,
    EndpointActor,
    actor_listening,
)
from rlmesh_ray.auth.ray_credentials import RayTls
from rlmesh_ray.auth.token_file import TokenSource
from rlmesh_ray.errors import (
    ConfigurationError,
    EndpointUnreachableError,
    PolicyError,
    RlmeshError,
)
from rlmesh_ray.models.loading import as_policy, load_policy
from rlmesh_ray.options import completed, declared, takes_options
from rlmesh_ray.server.endpoint.bind_policy import checked_address
from rlmesh_ray.server.endpoint.calls import text_of
from rlmesh_ray.server.endpoint.endpoint_options import listening
from rlmesh_ray.server.model.model_options import (
    ModelActorOptions,
    ModelServerOptions,
    PolicyOptions,
    checked_version,
    version_after,
)
from rlmesh_ray.server.model.model_server import ModelServer

logger = logging.getLogger(__name__)

# Ray restarts an actor, but does not keep the objects alive that the restart needs. The driver
# does, as long as it holds the actor's handle.
_STORES: "weakref.WeakKeyDictionary[Any, Any]" = weakref.WeakKeyDictionary()

_OF_POLICY = declared(PolicyOptions).keys()
"""Options that place the policy; the others are the server's."""
_OF_OTHERS = ("data_address", "openpi")
"""Fields of ``ListenOptions`` that an actor of a policy does not take."""


@ray.remote(num_cpus=1, max_restarts=-1, concurrency_groups={"weights": 1, "drain": 1, "stop": 1})
class ModelReplica(EndpointActor[ModelServer]):
    """The actor behind ``ModelServiceActor``, and one replica of a ``ModelFleet``.

    Methods that may take long have concurrency groups of their own: all others answer while new
    weights wait for a policy that is stuck. ``store`` is the name of the ``WeightStore``; for the
    other arguments see ``ModelServiceActor``.
    """

    # The registry does not name the replica again until it restarts.
    _leaves_by = "suspend"

    def __init__(
        self,
        store: str,
        policy: object,
        *,
        endpoint_id: str | None = None,
        fleet: str = "",
        **options: Unpack[ModelActorOptions],
    ) -> None:
        def serve() -> ModelServer:
            try:
                self._store = find_actor(store)
            except ValueError as error:
                raise EndpointUnreachableError(
                    "the actor that stored the policy's weights has ended, because no program "
                    "holds the fleet, or the handle of a single ModelServiceActor, any more; start "
                    "the fleet again"
                ) from error
            place, listen = actor_listening("ModelServiceActor", options, *_OF_OTHERS)
            # Before the policy is loaded, which may take long.
            checked_address(place, options.get("token"))
            given = {**options, "address": listen, "tls": RayTls()}
            of_policy = {name: given.pop(name) for name in _OF_POLICY & given.keys()}
            placing = completed("ModelServiceActor", PolicyOptions, of_policy)
            of_server = cast(ModelServerOptions, given)
            placed = place_on_device(policy, **placing)
            server = ModelServer(placed, _endpoint_id=endpoint_id, **of_server)
            try:
                # Before any client can connect: after a restart, too, only the newest weights act.
                self._load_newest(server)
                return server.start()
            except BaseException:
                server.stop(0.0)
                raise

        super().__init__(serve, endpoint_id=endpoint_id, fleet=fleet)

    def _load_newest(self, server: ModelServer) -> None:
        for version, reference in get_result(self._store.newest.remote()):
            try:
                server.set_weights(get_result(reference), version=version)
                return
            except (PolicyError, EndpointUnreachableError) as error:
                logger.warning("version %d of the weights is skipped: %s", version, error)

    @ray.method(max_task_retries=-1)
    def describe(self) -> dict[str, Any]:
        """Return address, node, process id and policy version."""
        return {**super().describe(), "policy_version": self._running().policy_version}

    @ray.method(max_task_retries=-1)
    def policy_version(self) -> int:
        return self._running().policy_version

    @ray.method(concurrency_group="weights")
    def set_weights(self, weights: object, version: int | None = None) -> int:
        """Replace the policy's weights, also for after a restart; return the version that acts.

        For arguments and errors see ``NamedModelFleet.set_weights``.
        """
        floor = self._running().policy_version
        offered = get_result(offer(self._store, weights, version, floor))
        try:
            acting = int(self.follow())
        except RlmeshError:
            get_result(self._store.reject.remote(offered))
            raise
        get_result(self._store.accept.remote(offered))
        return acting

    @ray.method(concurrency_group="weights", max_task_retries=-1)
    def follow(self) -> int:
        """Load the store's newest weights, if they are newer; return the acting version."""
        server = self._running()
        for version, reference in get_result(self._store.newest.remote())[:1]:
            if version > server.policy_version:
                server.set_weights(get_result(reference), version=version)
        return server.policy_version


class ModelActorFactory:
    """Starts the actors of ``ModelServiceActor``, with the interface of a Ray actor class."""

    def __init__(self, options: Mapping[str, Any]) -> None:
        self._options = dict(options)

    def options(self, **options: Any) -> "ModelActorFactory":
        """Return a factory with these options of Ray's added."""
        return ModelActorFactory({**self._options, **options})

    @takes_options(ModelActorOptions, without=NOT_OF_ACTORS, address=ACTOR_ADDRESS)
    def remote(
        self,
        policy: object,
        *,
        endpoint_id: str | None = None,
        **options: Unpack[ModelActorOptions],
    ) -> Any:
        """Start the actor; return its handle at once.

        Args:
            policy: A checkpoint as ``rlmesh-ray serve-model`` takes it (a path on the actor's
                node, or ``module:factory``), or any policy that ``ModelServer`` takes. **An RLlib
                checkpoint is unpickled: load only what you trust.**
            endpoint_id: Id in the registry; None: the actor does not announce itself.
            **options: Those of ``ModelActorOptions``.
        """
        for name in NOT_OF_ACTORS & options.keys():
            raise TypeError(f"ModelServiceActor.remote() takes no {name!r}")
        completed("ModelServiceActor", ModelActorOptions, options)  # raises here, not there
        listening("ModelServiceActor", options.get("address"), *_OF_OTHERS)
        if endpoint_id is not None:
            shared_registry()
        durable_policy = durable("the policy", policy)
        store = f"weights/{secrets.token_hex(8)}"
        stored = start_weight_store(store)
        actor_class: Any = ModelReplica
        actor = actor_class.options(**self._options).remote(
            store, durable_policy, endpoint_id=endpoint_id, **options
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


@dataclass(frozen=True, slots=True)
class FleetRecord:
    """Endpoint ids and token of a fleet, for programs that find it by its name."""

    endpoint_ids: tuple[str, ...]
    token: TokenSource = field(repr=False)


class WeightStore:
    """Holds the accepted weights of a policy, and those that are on offer.

    Weights are offered, tried by the replicas, and then either accepted, which frees the former
    ones, or rejected. A replica that starts loads the newest that its policy accepts. Each version
    is kept with an ObjectRef of its weights; the store owns the object, which outlives the
    training. A single actor has no ``record``.
    """

    def __init__(self, record: FleetRecord | None = None) -> None:
        self._record = record
        self._accepted: tuple[int, Any] | None = None
        self._offered: tuple[int, Any] | None = None
        self._last_version = 0

    def record(self) -> FleetRecord | None:
        return self._record

    def accepted_version(self) -> int:
        return self._accepted[0] if self._accepted else 0

    def offer(
        self, version: int | None, floor: int, names: Sequence[Any] | None, *parts: object
    ) -> int:
        """Store weights as the present offer, in place of a former offer; return their version.

        Args:
            version: Version of the weights, an integer from 1 to 2**63 - 1; None: the next one.
            floor: The newest version that a replica is known to act with.
            names: Keys of the mapping whose values ``parts`` are; None: ``parts`` is one object.
            parts: Separate arguments, so that Ray resolves those that are references.

        Raises:
            ConfigurationError: ``version`` is invalid, or not newer than the accepted one.
        """
        floor = max(floor, self.accepted_version())
        if version is None:
            version = version_after(max(floor, self._last_version))
        else:
            version = checked_version(version)
        if version <= floor:
            raise ConfigurationError(
                f"version {version} is not newer than {floor}, which the policy acts with: "
                "versions only grow; leave the version out to get the next one"
            )
        self._last_version = max(self._last_version, version)
        weights = parts[0] if names is None else dict(zip(names, parts, strict=True))
        self._offered = version, ray.put(weights)
        return version

    def accept(self, version: int) -> None:
        """Accept an offer, unless a newer one has replaced it."""
        if self._offered is not None and self._offered[0] == version:
            self._accepted, self._offered = self._offered, None

    def reject(self, version: int) -> None:
        if self._offered is not None and self._offered[0] == version:
            self._offered = None

    def newest(self) -> list[tuple[int, Any]]:
        """Return the offer and the accepted weights, as far as there are any, in that order."""
        return [stored for stored in (self._offered, self._accepted) if stored is not None]


def offer(store: Any, weights: object, version: int | None, floor: int = 0) -> Any:
    """Offer weights to a store; return the reference of its answer, the version.

    ``weights`` may be an object reference, or a mapping with references as values.
    """
    if isinstance(weights, Mapping):
        return store.offer.remote(version, floor, list(weights), *weights.values())
    return store.offer.remote(version, floor, None, weights)


def start_weight_store(name: str, record: FleetRecord | None = None) -> Any:
    """Start a store, which lives as long as this handle; ValueError: the name is taken."""
    return (
        ray.remote(WeightStore)
        .options(
            name=name,
            namespace=REGISTRY_NAMESPACE,
            num_cpus=0,
            max_restarts=-1,
            # All its methods are idempotent.
            max_task_retries=-1,
            **OUTSIDE,
        )
        .remote(record)
    )


def place_on_device(
    policy: object,
    device: str,
    *,
    explore: bool = False,
    buckets: Sequence[int] = (),
    inference: str = "auto",
    horizon: int | None = None,
) -> object:
    """Return a policy on its device, loaded first if it is named by a text."""
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
