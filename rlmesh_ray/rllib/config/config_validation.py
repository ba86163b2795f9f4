"""Checks of a config on the driver, for errors that would make runners drop data or fail."""

from collections.abc import Iterator

from ray.rllib.algorithms.algorithm_config import AlgorithmConfig
from ray.rllib.algorithms.impala import IMPALAConfig

from rlmesh_ray.errors import ConfigurationError, ContractMismatchError
from rlmesh_ray.options import require_seconds
from rlmesh_ray.rllib.config.runner_choice import RunnerChoice


def require_config(config: object, env: object = None) -> None:
    """Check that ``configure`` was given an AlgorithmConfig.

    Args:
        config: Its first argument.
        env: Its second argument, which may be the config.

    Raises:
        ConfigurationError: It is none, one of RLlib's old API stack, or not one for torch.
    """
    if not isinstance(config, AlgorithmConfig):
        if isinstance(env, AlgorithmConfig):
            raise ConfigurationError("the arguments are swapped: write configure(config, env)")
        if isinstance(config, type) and issubclass(config, AlgorithmConfig):
            name = config.__name__
            raise ConfigurationError(f"{name} is a class, not a config; give {name}()")
        raise ConfigurationError(
            f"{config!r:.80} is not an AlgorithmConfig of RLlib; give one, such as PPOConfig()"
        )
    if not config.enable_env_runner_and_connector_v2:
        raise ConfigurationError(
            "this config uses RLlib's old API stack; leave api_stack() at its defaults"
        )
    if config.framework_str != "torch":
        raise ConfigurationError(
            f"framework({config.framework_str!r}): RLlib's new API stack trains with torch only; "
            "leave framework() out"
        )


def is_evaluated(config: AlgorithmConfig) -> bool:
    """Return whether RLlib makes evaluation runners for this config."""
    return bool(config.evaluation_interval) or config.evaluation_num_env_runners > 0


def sample_limits(
    config: AlgorithmConfig, reset_timeout_s: float = 0.0
) -> Iterator[tuple[str, float]]:
    """Yield the settings that limit how long RLlib waits for a runner's sample, and their seconds.

    It waits without end for local runners, and for those of IMPALA and APPO. A limit that has
    RLlib's default is raised to twice ``reset_timeout_s``: a runner whose lanes reset for longer
    than the limit would never deliver a sample, since RLlib drops it and asks for another one.
    """
    defaults = type(config)()
    settings = []
    if config.num_env_runners and not isinstance(config, IMPALAConfig):
        settings.append("sample_timeout_s")
    if config.evaluation_num_env_runners:
        settings.append("evaluation_sample_timeout_s")
    for setting in settings:
        limit_s = getattr(config, setting)
        if limit_s is not None:
            is_default = limit_s == getattr(defaults, setting)
            yield setting, float(max(limit_s, 2 * reset_timeout_s) if is_default else limit_s)


def require_deadlines(
    config: AlgorithmConfig, step_timeout_s: float, reset_timeout_s: float
) -> None:
    """Check that a runner gives up an endpoint that hangs before RLlib drops its sample.

    Raises:
        ConfigurationError: RLlib would drop the sample, and ask a runner that is stuck for another
            one.
    """
    require_seconds("step_timeout_s", step_timeout_s)
    require_seconds("reset_timeout_s", reset_timeout_s)
    for setting, limit_s in sample_limits(config, reset_timeout_s):
        if step_timeout_s >= limit_s:
            raise ConfigurationError(
                f"step_timeout_s={step_timeout_s:g} is not below {setting}={limit_s:g}, after "
                "which RLlib drops what a runner samples; lower step_timeout_s, or first set "
                f"{setting} to a multiple of it; docs/how_to/slow_simulators.md has all limits"
            )


def allow_resets(config: AlgorithmConfig, reset_timeout_s: float) -> None:
    """Raise RLlib's limits of a sample as ``sample_limits`` says."""
    for setting, limit_s in sample_limits(config, reset_timeout_s):
        setattr(config, setting, limit_s)


def require_spaces(config: AlgorithmConfig, choice: RunnerChoice) -> None:
    """Compare the spaces in the config with those of the endpoints.

    Raises:
        ContractMismatchError: They differ.
    """
    for name in ("observation_space", "action_space"):
        given, served = getattr(config, name), getattr(choice, name)
        if given is not None and given != served:
            raise ContractMismatchError(
                f"environment({name}={given}) is not what the endpoints serve: {served}; leave it "
                "out, configure takes it from the endpoints"
            )


def require_evaluation_at_endpoints(config: AlgorithmConfig) -> None:
    """Check that evaluation runners sample from the endpoints, too.

    Raises:
        ConfigurationError: ``evaluation_config`` names an environment or EnvRunner, or is a whole
            config, which does so.
    """
    for name in ("env", "env_runner_cls", "observation_space", "action_space"):
        if name in (config.evaluation_config or {}):
            raise ConfigurationError(
                f"evaluation_config sets {name}={config.evaluation_config[name]}, but evaluation "
                "runners sample from the endpoints; put only what differs there, as in "
                "evaluation_config=PPOConfig.overrides(explore=False)"
            )
