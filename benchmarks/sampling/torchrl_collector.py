"""TorchRLCollector: TorchRL's collector on gymnasium's vector, as a peer of the runners."""

from collections.abc import Mapping
from typing import Any

import gymnasium
import numpy as np
import torch
from tensordict.nn import NormalParamExtractor, TensorDictModule
from torchrl.collectors import Collector
from torchrl.envs import DoubleToFloat, GymWrapper, TransformedEnv
from torchrl.modules import MLP, ProbabilisticActor, TanhNormal

_HIDDEN = [256, 256]
"""As in the default modules of RLlib's PPO and SAC."""


class TorchRLCollector:
    """Samples with a policy as large as RLlib's default module, in this process.

    Args:
        env_id: With vectors as observations, and discrete actions or a box of them.
        num_envs: Lanes.
        env_kwargs: For the environment.
        timesteps: Env steps of each batch; rounded up to whole vector steps.
    """

    torch_inference_reason = "TorchRL knows nothing else"

    def __init__(
        self, env_id: str, num_envs: int, env_kwargs: Mapping[str, Any], timesteps: int
    ) -> None:
        vector = gymnasium.make_vec(
            env_id,
            num_envs,
            vectorization_mode="sync",
            vector_kwargs={"autoreset_mode": gymnasium.vector.AutoresetMode.SAME_STEP},
            **env_kwargs,
        )
        observations = vector.single_observation_space
        assert observations.shape is not None
        env: Any = GymWrapper(vector, categorical_action_encoding=True)
        if observations.dtype == np.float64:
            env = TransformedEnv(env, DoubleToFloat())
        self._collector = Collector(
            env,
            _policy(observations.shape[0], vector.single_action_space, env.action_spec),
            frames_per_batch=-(-timesteps // num_envs) * num_envs,
            total_frames=-1,
        )
        self._batches = iter(self._collector)

    def sample(self, *, num_timesteps: int) -> list[range]:
        """Collect a batch; return as many as there were env steps."""
        del num_timesteps  # it was given beforehand
        return [range(next(self._batches).numel())]

    def get_metrics(self) -> None:
        """There are none."""

    def stop(self) -> None:
        """Let go of the environments."""
        self._collector.shutdown()


def _policy(num_features: int, action_space: gymnasium.Space[Any], spec: Any) -> Any:
    if isinstance(action_space, gymnasium.spaces.Discrete):
        network = MLP(
            num_features, int(action_space.n), num_cells=_HIDDEN, activation_class=torch.nn.Tanh
        )
        module = TensorDictModule(network, ["observation"], ["logits"])
        categorical = torch.distributions.Categorical
        return ProbabilisticActor(
            module, in_keys=["logits"], distribution_class=categorical, spec=spec
        )
    assert isinstance(action_space, gymnasium.spaces.Box)
    network = MLP(
        num_features, 2 * action_space.shape[0], num_cells=_HIDDEN, activation_class=torch.nn.Tanh
    )
    normal = torch.nn.Sequential(network, NormalParamExtractor())
    module = TensorDictModule(normal, ["observation"], ["loc", "scale"])
    return ProbabilisticActor(
        module, in_keys=["loc", "scale"], distribution_class=TanhNormal, spec=spec
    )
