"""A policy that is a Python function."""

from collections.abc import Callable
from typing import Any

from rlmesh_ray.errors import PolicyError
from rlmesh_ray.models.policy import PolicyTraits, Rows
from rlmesh_ray.spaces.contract import EnvContract


class CallablePolicy:
    """Calls a function: a batch of observations in, a batch of actions out.

    Args:
        function: Takes observations of N lanes and returns N actions, both batched in the form of
            gymnasium's vector environments. The arrays that it gets may be read-only.
    """

    traits = PolicyTraits(is_repeatable=True, checks_concurrently=True, kind="function")

    def __init__(self, function: Callable[[Any], object]) -> None:
        self._function = function

    def check_contract(self, contract: EnvContract) -> None:
        """Accept every contract: whether a function can act on it shows when it runs."""

    def predict(self, contract: EnvContract, rows: Rows) -> object:
        """Return the function's actions.

        Raises:
            PolicyError: The function raised; its own error is the cause.
        """
        try:
            return self._function(rows.observations)
        except Exception as error:
            raise PolicyError(
                f"the policy function raised {type(error).__name__}: {error}"
            ) from error

    def forget(self, route_key: str, env_index: int | None) -> None:
        """Do nothing: a function has no state of lanes."""
