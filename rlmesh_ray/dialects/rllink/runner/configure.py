"""configure_rllink(): switch an RLlib AlgorithmConfig over to simulators that connect to it."""

import warnings
from typing import Any, TypeVar

import gymnasium
from ray.rllib.algorithms.algorithm_config import AlgorithmConfig
from ray.rllib.algorithms.impala import IMPALAConfig
from ray.rllib.algorithms.ppo import PPOConfig

from rlmesh_ray.auth.server_tls import TlsSource
from rlmesh_ray.auth.token_file import ServerToken
from rlmesh_ray.dialects.rllink.runner.env_runner import RLMeshRLlinkEnvRunner
from rlmesh_ray.dialects.rllink.runner.listen_plan import (
    RLLINK_KEY,
    RLlinkPlan,
    SampleSpaces,
)
from rlmesh_ray.dialects.rllink.server.connection import RLlinkLimits
from rlmesh_ray.errors import ConfigurationError, ConfigurationWarning
from rlmesh_ray.options import takes_no_more
from rlmesh_ray.protocol.address import parse_address
from rlmesh_ray.rllib.config.cluster_capacity import capacity_warnings
from rlmesh_ray.rllib.config.config_checks import require_config, require_recordable
from rlmesh_ray.server.bind_policy import checked_address

ConfigT = TypeVar("ConfigT", bound=AlgorithmConfig)

_ON_POLICY = (PPOConfig, IMPALAConfig)  # APPO's config is one of IMPALA's
_MOST_LAG = 16
"""Versions of the weights that are kept, for the log-probabilities of what they did."""


@takes_no_more(
    service_address="simulators ask for each action at address, with RemoteAgent or in JSON",
    no_token="give token=False",
)
def configure_rllink(  # noqa: PLR0913  # the public surface; every option stands alone
    config: ConfigT,
    *,
    observation_space: gymnasium.Space[Any],
    action_space: gymnasium.Space[Any],
    address: str = "127.0.0.1:5555",
    token: ServerToken = None,
    tls: TlsSource | None = None,
    num_simulators: int = 1,
    max_weights_lag: int | None = None,
    env_steps_per_sample: int | None = None,
    max_waiting_steps: int | None = 1000,
    wait_s: float = 30.0,
    limits: RLlinkLimits | None = None,
    sends_pickled_config: bool = False,
    model_input: str = "obs",
) -> ConfigT:
    """Set up ``config`` to learn from simulators that run their own loop and connect over RLlink.

    A function of its own beside ``configure``: there are no endpoints to find, to size up or to
    assign, and the caller names the spaces, since no simulator is connected yet.

    Args:
        config: Of the new API stack.
        observation_space: What simulators send: a Box.
        action_space: What they take: a Box, or a Discrete that starts at 0.
        address: Where runners listen: the local one there, the i-th remote one i ports above,
            evaluation runners above those. Port 0: free ones; see the runner's ``address``.
        token: What simulators must show; required unless ``address`` is loopback. It becomes part
            of the config, and so of the algorithm's checkpoints; a ``TokenFile`` does not, and must
            be there on the runners' nodes. Without ``tls`` it travels in the clear.
            False: no token on purpose, also where other machines can reach the runners: any client
            may then teach the policy what it likes; runners log that.
        tls: With which files the port speaks TLS, on the runners' nodes; ``RayTls()``: with those
            that Ray uses there.
        num_simulators: How many are expected at each runner: a sample is a rollout fragment of
            each. There may be more or fewer.
        max_weights_lag: How many versions old the weights may be that have acted: steps of older
            ones are counted and dropped. Default: 0 for PPO, APPO and IMPALA, which makes every
            batch one of the present weights, and any age for algorithms that learn off-policy.
        env_steps_per_sample: What one message of a simulator is to bring; default: a rollout
            fragment, or 50 off-policy.
        max_waiting_steps: How far simulators may be ahead of the learner, off-policy: beyond it
            they wait for their answers, so that RLlib learns as often for each step as it is set
            to. None: they never wait, but what they send is learnt from later and later.
        wait_s: How long ``sample`` waits for steps at most, before it returns what there is; half
            of ``sample_timeout_s`` for remote runners, if that is less.
        limits: What a client may ask of the port.
        sends_pickled_config: Whether clients of Ray's own kind get the whole config as a pickle,
            which they execute and require. Every client that may connect can then read it; this
            function's own settings are left out.
        model_input: What the ONNX model calls its input; old clients expect ``"onnx::Gemm_0"``.

    Returns:
        ``config``.

    Raises:
        ConfigurationError: A setting cannot work with simulators, or the cluster can never place
            all actors.
        AddressError: ``address`` is malformed, or needs a token.
    """
    _require_what_simulators_can_do(config)
    checked_address(address, token)
    where = parse_address(address)
    if where.path:
        raise ConfigurationError(f"{address}: RLlink is spoken over TCP; give HOST:PORT")
    SampleSpaces(observation_space, action_space)
    if num_simulators < 1:
        raise ConfigurationError(f"num_simulators={num_simulators} must be at least 1")
    if env_steps_per_sample is not None and env_steps_per_sample < 1:
        raise ConfigurationError(f"env_steps_per_sample={env_steps_per_sample} must be at least 1")
    is_on_policy = isinstance(config, _ON_POLICY)
    if max_weights_lag is None and is_on_policy:
        max_weights_lag = 0
    if max_weights_lag is not None and not 0 <= max_weights_lag <= _MOST_LAG:
        raise ConfigurationError(
            f"max_weights_lag={max_weights_lag} must be from 0 to {_MOST_LAG}, as many versions "
            "of the weights are kept"
        )
    plan = RLlinkPlan(
        where.host,
        where.port,
        token,
        limits or RLlinkLimits(),
        max_weights_lag,
        env_steps_per_sample,
        wait_s,
        max_waiting_steps,
        sends_pickled_config=sends_pickled_config,
        model_input=model_input,
        tls=tls,
    )
    config.environment(
        env=None,
        env_config={**config.env_config, RLLINK_KEY: plan},
        observation_space=observation_space,
        action_space=action_space,
    )
    config.env_runners(env_runner_cls=_runner_class(config), num_envs_per_env_runner=num_simulators)
    for sentence in capacity_warnings(config):
        warnings.warn(sentence, ConfigurationWarning, stacklevel=3)
    return config


def _require_what_simulators_can_do(config: AlgorithmConfig) -> None:
    require_config(config)
    if config.is_multi_agent:
        raise ConfigurationError("RLlink has one agent an episode; leave out multi_agent()")
    for kind in ("env_to_module", "module_to_env"):
        if getattr(config, f"_{kind}_connector") is not None:
            raise ConfigurationError(
                f"env_runners({kind}_connector=...) runs where the policy acts, which is in the "
                "simulators: have them send and take what the module is made for"
            )
    require_recordable(config)
    if config.output and config.output_write_episodes:
        raise ConfigurationError(
            "offline_data(output=...) records whole episodes, which simulators send in parts; set "
            "output_write_episodes=False"
        )


def _runner_class(config: AlgorithmConfig) -> type[Any]:
    wanted: type[Any] | None = config.env_runner_cls
    if wanted is None or not issubclass(wanted, RLMeshRLlinkEnvRunner):
        return RLMeshRLlinkEnvRunner
    return wanted
