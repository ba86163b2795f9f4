"""The weights that a policy acts with: which they are, and how others take their place."""

from rlmesh_ray.errors import ConfigurationError
from rlmesh_ray.models.policy import Policy, UpdatablePolicy
from rlmesh_ray.server.model_options import version_after


class PolicyWeights:
    """The weights of one policy.

    Args:
        policy: Where they act.
    """

    def __init__(self, policy: Policy) -> None:
        self._policy = policy
        self.version = 0
        """Of the weights that act now; 0 for those that the policy came with."""

    def replace(self, weights: object, version: int | None) -> int:
        """Let the policy act with other weights; in its thread.

        Args:
            weights: In the policy's own form.
            version: Theirs; None: the next one.

        Returns:
            The version that acts now.

        Raises:
            ConfigurationError: ``version`` is not newer than the present one, or the policy's
                weights cannot be replaced.
        """
        if not isinstance(self._policy, UpdatablePolicy):
            raise ConfigurationError(
                f"the weights of a {type(self._policy).__name__} cannot be replaced; serve a torch "
                "module, an RLlib checkpoint, or a policy with get_weights and set_weights"
            )
        newer = version_after(self.version) if version is None else version
        if newer <= self.version:
            raise ConfigurationError(
                f"version {newer} is not newer than version {self.version}, which acts already"
            )
        self._policy.set_weights(weights)
        self.version = newer
        return newer
