"""The interface of a policy that a ModelServer runs."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Generic, NamedTuple, Protocol, TypeVar, runtime_checkable

from rlmesh_ray.errors import ConfigurationError, PolicyError
from rlmesh_ray.options import as_horizon
from rlmesh_ray.protocol.messages import PredictSlot
from rlmesh_ray.spaces.contract import EnvContract
from rlmesh_ray.spaces.spec import SpaceSpec


class RouteRows(NamedTuple):
    """One route's part of a batch."""

    route_key: str
    """Key of the route, unique over all sessions of the server."""
    slots: Sequence[PredictSlot]
    """One for each row, in the order of the rows."""


class ChunkRouteRows(RouteRows):
    """Likewise of a route whose client takes several actions of each chunk."""

    __slots__ = ()


class Rows(NamedTuple):
    """A batch of observations, and the routes and lanes that they belong to."""

    observations: object
    """Of N lanes, in the form of gymnasium's vector environments (array, dict, tuple, ...).

    The arrays are the policy's own: it may write into them, or keep them.
    """
    routes: Sequence[RouteRows]
    """In the order of the rows: the first route's rows come first. N slots in all."""

    @property
    def num_rows(self) -> int:
        """How many lanes the batch has."""
        return sum([len(route.slots) for route in self.routes])


@runtime_checkable
class Policy(Protocol):
    """Chooses actions, and may keep a state for every lane.

    All methods are called one after the other, and from one thread, unless its ``PolicyTraits``
    allow more. A lane is identified by its route's key and its index. It begins a new episode when
    a slot has ``reset`` set, or another episode id than before; an empty id (of clients of other
    projects, and after an autoreset) does not count as another one. ``EpisodeStates``
    keeps states by these rules.
    """

    def check_contract(self, contract: EnvContract) -> None:
        """Check that the policy can act in an environment; called before its first rows.

        It is called once for the routes of all environments that have the same id, spaces and
        width, and may be called again at any time.

        Raises:
            ContractMismatchError: It cannot, because it needs other spaces.
        """

    def predict(self, contract: EnvContract, rows: Rows) -> object:
        """Choose one action for each row.

        Args:
            contract: The contract of the rows' routes, which have its spaces, but other widths.
            rows: The observations. A lane occurs once.

        Returns:
            Actions for N lanes, batched like the observations: each leaf ``(N, *action)``, or
            ``(N, horizon, *action)`` where the policy's ``horizon`` is above 1. The caller coerces
            dtypes and checks shapes.

        Raises:
            PolicyError: The policy failed; no action was chosen for any row.
        """

    def forget(self, route_key: str, env_index: int | None) -> None:
        """Free the state of one lane of a route, or of the whole route (None), if there is any.

        The key of a route that is forgotten is never used again.
        """


@dataclass(frozen=True, slots=True)
class PolicyTraits:
    """Properties of a policy that a server may rely on; the policy's attribute ``traits``."""

    is_repeatable: bool = False
    """A ``predict`` that raised, or returned no actions for the batch, has changed nothing. So it
    is called again for each route alone, and only the route with the offending rows fails;
    otherwise the whole batch fails. Either way, rows with actions outside of the action space fail
    their own route only."""
    only_computes: bool = False
    """It waits for nothing but this machine's processors, and never loops without end. So a server
    may run it in its serving loop, while it is quick; if it hangs after all, so does the endpoint.
    Otherwise it always runs in a separate thread. The policies of this package set it only where
    all code that runs is torch's or RLlib's; other policies may set it."""
    observation_space: SpaceSpec | None = None
    """The only observation space of a lane that the policy accepts; None: several, or unknown.
    A server accepts no larger messages than batches of it need."""
    action_space: SpaceSpec | None = None
    """The action space of a lane, likewise."""
    kind: str = ""
    """The kind of policy, for display, such as ``"TorchScript"``; empty: the name of its class."""
    algorithm: str = ""
    """The algorithm that trained it, such as ``"PPO"``; empty: unknown."""
    observation_map: tuple[str, ...] = ()
    """Lines of its ``ObservationMap``, for display."""
    horizon: int = 1
    """How many actions it chooses for each row, those of this step and the next ones: a chunk. At
    1, its actions have no axis for them."""
    checks_concurrently: bool = False
    """``check_contract`` may be called in another thread than ``predict``, also while that runs.
    If not, the first route for an environment of a new kind waits for the running batch."""
    torch_reason: Callable[[], str | None] | None = None
    """Returns why its module runs in torch now, or None where it runs compiled; is called from any
    thread. Left out by policies without this choice, such as functions."""


def traits_of(policy: object) -> PolicyTraits:
    traits = getattr(policy, "traits", None)
    return traits if isinstance(traits, PolicyTraits) else PolicyTraits()


def checked_horizon(
    declared: object, given: int | None, what: str, *, has_state: bool = False
) -> int:
    """Return how many actions a policy chooses at once.

    Args:
        declared: The policy's own horizon; None: it has none.
        given: The operator's option, checked; None: left out.
        what: The policy, for messages.
        has_state: Whether it is a recurrent module.

    Raises:
        ConfigurationError: The policy's own is no number of actions, or another than the option, or
            it has a state.
    """
    try:
        horizon = (given or 1) if declared is None else as_horizon(declared)
    except ConfigurationError as error:
        raise ConfigurationError(f"the attribute horizon of {what}: {error}") from error
    if given not in (None, horizon):
        raise ConfigurationError(
            f"horizon={given} was given, and {what} says {horizon} itself: leave the option out, "
            "or change what it says"
        )
    if has_state and horizon > 1:
        raise ConfigurationError(
            f"horizon={horizon} cannot be used with a recurrent module: its state would be that "
            "after one observation, while the client acts several steps on without asking, and may "
            "use fewer actions than it got; serve it with a horizon of 1, or a module without a "
            "state"
        )
    return horizon


@runtime_checkable
class UpdatablePolicy(Protocol):
    """A policy whose weights can be replaced while it is served.

    Both methods are called between batches, never during one.
    """

    def get_weights(self) -> object:
        """Return a copy of the weights, in the form that ``set_weights`` takes."""

    def set_weights(self, weights: object) -> None:
        """Replace the weights; the states of lanes stay.

        Args:
            weights: All weights, in the policy's own form.

        Raises:
            PolicyError: They do not fit the policy; nothing has changed.
        """


# --- the states that a policy keeps for lanes -----------------------------------------------------

S = TypeVar("S")


class EpisodeStates(Generic[S]):
    """One state for the running episode of every lane.

    Args:
        fresh: Makes the initial state of an episode.
        freed: Called with each state that is dropped.
    """

    def __init__(
        self, fresh: Callable[[], S], freed: Callable[[S], object] = lambda state: None
    ) -> None:
        self._fresh = fresh
        self._freed = freed
        self._routes: dict[str, dict[int, tuple[str, S]]] = {}
        """The episode id and the state of each lane, by the route's key and the lane's index."""

    def __len__(self) -> int:
        return sum(len(lanes) for lanes in self._routes.values())

    def of(self, rows: Rows) -> list[S]:
        """Return one state for each row; a new one where an episode begins.

        Raises:
            PolicyError: A lane occurs twice, so that the order of its rows is unknown; nothing
                has changed.
        """
        seen: dict[str, set[int]] = {}
        for route in rows.routes:
            lanes_of_route = seen.setdefault(route.route_key, set())
            lanes_of_route.update([slot.env_index for slot in route.slots])
        if sum(map(len, seen.values())) < rows.num_rows:
            raise PolicyError(
                "a lane occurs twice in one batch, and this policy keeps state for each lane: "
                "give every slot of a Predict an env_index of its own"
            )
        states: list[S] = []
        for route in rows.routes:
            lanes = self._routes.setdefault(route.route_key, {}) if route.slots else {}
            for slot in route.slots:
                entry = lanes.get(slot.env_index)
                if entry is None or slot.reset or slot.episode_id not in ("", entry[0]):
                    if entry is not None:
                        self._freed(entry[1])
                    entry = lanes[slot.env_index] = (slot.episode_id, self._fresh())
                states.append(entry[1])
        return states

    def forget(self, route_key: str, env_index: int | None) -> None:
        lanes = self._routes.get(route_key, {})
        for index in list(lanes) if env_index is None else [env_index]:
            if index in lanes:
                self._freed(lanes.pop(index)[1])
        if not lanes:
            self._routes.pop(route_key, None)
