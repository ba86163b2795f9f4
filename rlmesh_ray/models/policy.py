"""What a ModelServer runs: a policy, in values instead of bytes."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol, runtime_checkable

from rlmesh_ray.protocol.messages import PredictSlot
from rlmesh_ray.spaces.contract import EnvContract
from rlmesh_ray.spaces.spec import SpaceSpec


class RouteRows(NamedTuple):
    """One route's part of a batch."""

    route_key: str
    """Names the route; unique over all sessions of the server."""
    slots: Sequence[PredictSlot]
    """One a row, in the order of the rows."""


class Rows(NamedTuple):
    """A batch of observations and whose they are."""

    observations: object
    """N lanes, as gymnasium's vector environments give them (array, dict, tuple, ...).

    Arrays may be read-only. Nobody writes to them later, so a policy may keep them.
    """
    routes: Sequence[RouteRows]
    """In the order of the rows: the first route's rows come first. N slots in all."""

    @property
    def num_rows(self) -> int:
        """How many lanes the batch has."""
        return sum([len(route.slots) for route in self.routes])


@runtime_checkable
class Policy(Protocol):
    """Chooses actions, and may remember something about every lane.

    All methods are called one after the other, and from one thread, unless its ``PolicyTraits``
    allow more. A lane is known by its route's key and its index. Its episode begins anew when a
    slot says ``reset``, or names another episode than before; names may be empty (foreign clients,
    and every episode that an autoreset has begun), and an empty name says nothing.
    ``slots.SlotStates`` keeps state by these rules.
    """

    def check_contract(self, contract: EnvContract) -> None:
        """Say whether the policy can act in an environment; called before its first rows.

        It is called once for the routes of all environments that have the same id, spaces and
        width, and may be called again at any time.

        Raises:
            ContractMismatchError: It cannot, because the spaces are not those it knows.
        """

    def predict(self, contract: EnvContract, rows: Rows) -> object:
        """Choose one action a row.

        Args:
            contract: Of the rows' routes; they agree in its spaces, not in its width.
            rows: What to act on. A lane occurs once.

        Returns:
            Actions for N lanes, batched like the observations. The caller coerces dtypes and
            checks shapes.

        Raises:
            PolicyError: The policy failed; no action was chosen for any row.
        """

    def forget(self, route_key: str, env_index: int | None) -> None:
        """Free what is remembered about one lane of a route, or about the whole route (None).

        A route that is forgotten never comes again: the next one has another key.

        Does nothing when nothing is remembered.
        """


@dataclass(frozen=True, slots=True)
class PolicyTraits:
    """What a server may assume of a policy, which has them as its attribute ``traits``."""

    is_repeatable: bool = False
    """A ``predict`` that raised has changed nothing. So it is asked again for each route alone, and
    only the one fails whose rows it cannot bear; otherwise a whole batch does."""
    only_computes: bool = False
    """It waits for nothing but this machine's processors, and never loops without end. So a server
    may run it in its serving loop, while it is quick; if it hangs after all, so does the endpoint.
    Otherwise it always runs in a thread of its own. The policies here claim it only where the
    code that runs is torch's or RLlib's; a policy of your own may claim it."""
    observation_space: SpaceSpec | None = None
    """Of one lane: the only one that the policy acts on; None: it takes several, or cannot tell.
    A server takes no larger messages than batches of it need."""
    action_space: SpaceSpec | None = None
    """Of one lane, likewise."""
    kind: str = ""
    """What the policy is, for people, such as ``"TorchScript"``; empty: the name of its class."""
    algorithm: str = ""
    """What has trained it, such as ``"PPO"``; empty: not known."""
    checks_concurrently: bool = False
    """``check_contract`` may be called in another thread than ``predict``, also while that runs.
    If not, the first route for an environment of a new kind waits for the running batch."""


def traits_of(policy: Policy) -> PolicyTraits:
    """Return the policy's own traits; nothing is assumed of one that has none."""
    traits = getattr(policy, "traits", None)
    return traits if isinstance(traits, PolicyTraits) else PolicyTraits()


@runtime_checkable
class UpdatablePolicy(Protocol):
    """A policy whose weights can be replaced while it is served.

    Both methods are called between batches, never during one.
    """

    def get_weights(self) -> object:
        """Return a copy of the weights, in the form that ``set_weights`` takes."""

    def set_weights(self, weights: object) -> None:
        """Act with other weights from now on; what is remembered about lanes stays.

        Args:
            weights: All of them, in the policy's own form.

        Raises:
            PolicyError: They do not fit the policy; nothing has changed.
        """
