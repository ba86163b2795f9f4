"""A policy whose weights can be seen in its actions."""

from typing import Any


def switch_policy() -> Any:
    """Make a policy for CartPole that always does what its weights say.

    The class is made here so that it travels by value: workers do not import tests.
    """
    import threading

    import numpy as np

    from rlmesh_ray.errors import PolicyError

    class Switch:
        action: Any = 0

        def check_contract(self, contract: Any) -> None: ...

        def predict(self, contract: Any, rows: Any) -> Any:
            if self.action == "stuck":
                threading.Event().wait()
            return np.full(rows.num_rows, self.action)

        def forget(self, route_key: str, env_index: int | None) -> None: ...

        def get_weights(self) -> Any:
            return {"action": self.action}

        def set_weights(self, weights: Any) -> None:
            if weights["action"] not in (0, 1, "stuck"):
                raise PolicyError(f"there is no action {weights['action']}")
            self.action = weights["action"]

    return Switch()
