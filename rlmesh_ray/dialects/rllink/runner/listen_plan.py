"""How the runners of one algorithm listen for simulators: decided on the driver."""

from dataclasses import dataclass, field
from typing import Any

from rlmesh_ray.auth.server_tls import TlsSource
from rlmesh_ray.auth.token_file import TokenSource
from rlmesh_ray.dialects.rllink.server.rllink_server import RLlinkLimits
from rlmesh_ray.errors import ConfigurationError

RLLINK_KEY = "rlmesh_ray_rllink"
"""Where the plan stands in ``config.env_config``."""


@dataclass(frozen=True, slots=True)
class RLlinkPlan:
    """Where runners listen, and what they take."""

    host: str
    port: int
    """Of the local runner; runner ``i`` listens on the i-th after it. 0: free ones."""
    token: TokenSource | None = field(default=None, repr=False)  # Tune writes configs into its logs
    limits: RLlinkLimits = field(default_factory=RLlinkLimits)
    max_weights_lag: int | None = 0
    """How many versions old the weights may be that have acted; None: any."""
    env_steps_per_sample: int | None = None
    """What one message of a client is to bring; None: a rollout fragment."""
    wait_s: float = 30.0
    """How long ``sample`` waits for steps at most."""
    max_waiting_steps: int | None = 1000
    """Off-policy: limit of the steps in the queue; clients wait beyond it."""
    max_waiting_bytes: int = 2**30
    """Limit of the bytes in the queue."""
    sends_pickled_config: bool = False
    model_input: str = "obs"
    """What the ONNX model calls its input."""
    tls: TlsSource | None = None
    """With which files runners speak TLS, of the nodes that they are on."""
    no_token: bool = False
    """Whether runners may do without a token where other machines can reach them."""

    @property
    def is_on_policy(self) -> bool:
        """Whether clients must wait for new weights before they go on."""
        return self.max_weights_lag == 0

    def port_of(self, worker_index: int, *, num_training: int, in_evaluation: bool) -> int:
        """Return where a runner listens.

        Args:
            worker_index: As RLlib counts: remote runners from 1, the local one is 0.
            num_training: How many remote runners train; those that evaluate come after them.
            in_evaluation: Whether it is an evaluation runner.
        """
        place = worker_index + (num_training + 1 if in_evaluation else 0)
        return self.port and self.port + place


def rllink_plan_of(config: Any) -> RLlinkPlan:
    """Return the plan that ``configure_rllink`` has put into an AlgorithmConfig.

    Raises:
        ConfigurationError: It has not.
    """
    plan = config.env_config.get(RLLINK_KEY)
    if not isinstance(plan, RLlinkPlan):
        raise ConfigurationError(
            "this config says nothing of simulators: pass it through "
            "rlmesh_ray.rllib.configure_rllink"
        )
    return plan
