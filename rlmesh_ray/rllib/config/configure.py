"""configure(): make an RLlib AlgorithmConfig sample from endpoints."""

import secrets
import warnings
from dataclasses import replace
from typing import TypeVar, Unpack, cast

from ray.rllib.algorithms.algorithm_config import AlgorithmConfig

from rlmesh_ray.actors.env_fleet import EnvFleet
from rlmesh_ray.auth.client_tls import ClientTlsSource
from rlmesh_ray.auth.token_file import TokenSource
from rlmesh_ray.dialects.registry import DialectSettings
from rlmesh_ray.errors import ConfigurationError, ConfigurationWarning
from rlmesh_ray.options import (
    DEFAULT_RESET_TIMEOUT_S,
    DEFAULT_RUNNER_STEP_TIMEOUT_S,
    Group,
    Option,
    completed,
    require_flag,
    require_inference,
    takes_options,
)
from rlmesh_ray.rllib.config.cluster_capacity import capacity_warnings
from rlmesh_ray.rllib.config.config_checks import (
    RunnerChoice,
    allow_resets,
    choose_runner,
    config_warnings,
    environment_warnings,
    is_evaluated,
    require_config,
    require_deadlines,
    require_evaluation_at_endpoints,
    require_module,
    require_recordable,
    require_spaces,
)
from rlmesh_ray.rllib.config.endpoint_sources import (
    KEPT_FLEETS,
    RolloutSource,
    common_contract,
    find_endpoints,
)
from rlmesh_ray.rllib.config.rollout_plan import PLAN_KEY, Access, RolloutPlan
from rlmesh_ray.rllib.config.session_endpoints import RunnerSpec, assign_sessions
from rlmesh_ray.rllib.runner.session_recovery import raise_for_broken_environment
from rlmesh_ray.server.env.env_options import EnvOptions

ConfigT = TypeVar("ConfigT", bound=AlgorithmConfig)


@takes_options(
    EnvOptions,
    num_envs=Option(
        "Lanes of each session. Default: so many that one session at each endpoint gives "
        "``num_envs_per_env_runner``.",
        Group.ENVIRONMENT,
    ),
)
def configure(  # noqa: PLR0913  # the public surface; every option stands alone
    config: ConfigT,
    env: RolloutSource,
    *,
    num_endpoints: int | None = None,
    num_evaluation_endpoints: int | None = None,
    token: TokenSource | None = None,
    tls: ClientTlsSource | None = None,
    step_timeout_s: float = DEFAULT_RUNNER_STEP_TIMEOUT_S,
    reset_timeout_s: float = DEFAULT_RESET_TIMEOUT_S,
    edition_text: str | None = None,
    lockstep: bool = False,
    fast_path: bool = True,
    inference: str = "auto",
    dm_env_rpc: DialectSettings | None = None,
    **options: Unpack[EnvOptions],
) -> ConfigT:
    """Make ``config`` sample from endpoints; all other settings stay unchanged.

    Call it last: the contract of the endpoints (width, spaces, autoreset mode) is read here, on
    the driver, and compared with the settings. A ``ConfigurationWarning`` names each setting that
    probably does not do what was intended.

    ``num_envs_per_env_runner`` must be a multiple of the endpoints' width: each EnvRunner opens
    as many sessions as that takes, spread evenly over its endpoints. Left at 1, it is set to the
    lanes of one session at each of ``num_endpoints / num_env_runners`` endpoints (one at least; the
    local runner, with ``num_env_runners=0``, uses every endpoint). Evaluation runners open
    sessions of their own, in the same number, unless ``evaluation_config`` sets another one.

    Runners take the fast path where they can: they process all lanes of a session as arrays, which
    gives the same episodes in a fraction of the time. They cannot where single episodes are needed
    between two steps (connectors other than FlattenObservations, callbacks on episodes, a module
    with a state); then they take RLlib's per-item path. Each runner logs at INFO which it
    takes, has the reason in ``RLMeshEnvRunner.fast_path_disabled_reason``, and reports 1.0 or 0.0
    as the metric ``lanes_as_arrays``. ``fast_path=False`` turns the fast path off.

    The resources of the config's actors and of the fleets in ``env`` are compared with those of
    the cluster (before Ray runs: with this machine's), since RLlib waits without end, and logs
    nothing, for actors that cannot be placed. A config that can never be placed is refused, unless
    the cluster has an autoscaler; one that cannot be placed now causes a warning. To train on a
    cluster, call ``ray.init`` before ``configure``.

    A learner in this process trains with torch's threads, by default one for each core, of which
    each waits for the slowest: where other processes keep cores busy, call
    ``torch.set_num_threads(1)`` first. ``train`` does so.

    ``config.offline_data(output=...)`` and its options work as with RLlib's own recording runner
    (``RecordingEnvRunner``).

    The functions that make RLlib's modules are called once more here, to check that they accept the
    spaces.

    Args:
        config: A config of RLlib's new API stack.
        env: A Gymnasium id, a factory or its import path ``"module:factory"`` (a fleet of endpoints
            is started on Ray and lives as long as this driver), an ``EnvFleet``, an ``EnvPool`` of
            endpoints that have registered themselves, the address of a running endpoint
            (``"rlmesh://HOST:PORT"``), an ``EnvServer``, which stands for its address, or a list of
            fleets, pools, servers and addresses, which may be mixed. All endpoints must serve the
            same spaces at the same width; their machines and packages may differ. Simulators that
            run their own loop over RLlink are for ``configure_rllink``.
        num_endpoints: For an id or factory: how many to start for training. Default: one for each
            runner.
        num_evaluation_endpoints: Number of endpoints for evaluation runners only. For an id or
            factory they are started in addition, by default one for each evaluation runner if
            ``evaluation_parallel_to_training``, else none; otherwise they are the last ones
            of those given, in the list's order, by default none. With none, evaluation runners open
            their sessions at the endpoints for training.
        token: For addresses: the token of the endpoints. Fleets and pools have their own, and no
            token is sent to an endpoint of another source. Tokens become part of the config, and so
            of the algorithm's checkpoints.
        tls: For addresses whose endpoints use TLS.
        step_timeout_s: Longest wait for an answer of an endpoint. It must be shorter than
            ``sample_timeout_s`` and ``evaluation_sample_timeout_s`` of the config; half of them
            leaves time for the answers of other endpoints.
        reset_timeout_s: Longest wait for a reset of a session's lanes, and for a step that contains
            resets. The config's ``sample_timeout_s`` and ``evaluation_sample_timeout_s``, after
            which RLlib drops what a runner samples, are raised to twice that where they have
            RLlib's defaults.
        edition_text: For addresses: the edition's text that the endpoints implement, where it is
            not this package's, such as ``"rlmesh-0.1.0b3"``; see ``ConnectOptions``.
        lockstep: Step all sessions of a runner together, in RLlib's own order, so that a seed
            gives the same episodes each time. Otherwise each session goes on as soon as its own
            answer has arrived: faster, but how many of a batch's steps come from which session then
            depends on timing. A runner with one session is reproducible in either case.
        fast_path: Whether runners take the fast path where they can. With False they always take
            RLlib's per-item path: for comparison, or to rule the fast path out as a cause.
        inference: How runners run the module of an environment with one agent, also one with a
            state. ``"torch"``: as RLlib does; a seed gives RLlib's own episodes to the last bit.
            ``"compiled"``: in ONNX Runtime, after a proof with an example and drawn inputs; where
            that is impossible the training ends with the reason; several agents are refused here.
            On the fast path NumPy draws the actions, others than torch's, from a generator of the
            runner's own. ``"auto"``: compiled where that is possible, and else in torch, with the
            reason in the log.
        dm_env_rpc: For addresses of dm_env_rpc servers (``"dm_env_rpc://HOST:PORT"``): the worlds
            to create and to join there, their lanes, and how to interpret their tensors.
        **options: For an id or factory: those of ``EnvOptions``, of each endpoint.

    Returns:
        ``config``.

    Raises:
        ConfigurationError: An argument does not fit the kind of ``env``, or a setting cannot work
            with endpoints, or RLlib's default module does not accept the spaces, or the cluster
            can never place all actors.
        ContractMismatchError: The endpoints differ from each other or from the settings, or
            cannot be spread evenly.
        EndpointError: An endpoint cannot be reached.
    """
    require_config(config, env)
    require_flag("lockstep", lockstep)
    require_flag("fast_path", fast_path)
    require_inference(inference)
    require_deadlines(config, step_timeout_s, reset_timeout_s)
    require_evaluation_at_endpoints(config)
    runner_spec = _runner_spec(config)
    given = cast(EnvOptions, {name: each for name, each in options.items() if each is not None})
    completed("configure", EnvOptions, given)
    access = Access(token, tls, edition_text, dm_env_rpc)
    endpoints = find_endpoints(
        config,
        env,
        runner_spec,
        access,
        num_endpoints=num_endpoints,
        num_evaluation_endpoints=num_evaluation_endpoints,
        options=given,
    )
    fleets = [each for each in endpoints.fleets if isinstance(each, EnvFleet)]
    warned = list(capacity_warnings(config, fleets))
    contract = common_contract(endpoints)
    warned += environment_warnings(config, contract)
    training, evaluation = assign_sessions(
        runner_spec,
        width=contract.num_envs,
        num_endpoints=endpoints.num_training,
        num_evaluation_endpoints=endpoints.num_evaluation,
    )
    plan = RolloutPlan(
        resolver=endpoints.resolver,
        contract=contract,
        training=training,
        evaluation=evaluation,
        lanes_asked=runner_spec.lanes,
        access=endpoints.access,
        step_timeout_s=step_timeout_s,
        reset_timeout_s=reset_timeout_s,
        lockstep=lockstep,
        fast_path=fast_path,
        inference=inference,
        plan_id=secrets.token_hex(4),
    )
    choice = choose_runner(config, contract)
    # With several agents, policies that are set later may change the spaces.
    if not choice.is_multi_agent and _former_plan(config) is None:
        require_spaces(config, choice)
    require_module(config, contract, choice)
    if inference == "compiled" and choice.is_multi_agent:
        raise ConfigurationError(
            'inference="compiled" is impossible: the policies of several agents run in torch; use '
            '"auto" or "torch"'
        )
    require_recordable(config, is_multi_agent=choice.is_multi_agent)
    _apply(config, plan, choice)
    warned += config_warnings(config, plan, max_sessions=endpoints.max_sessions)
    for sentence in warned:
        warnings.warn(sentence, ConfigurationWarning, stacklevel=2)
    KEPT_FLEETS.extend(endpoints.fleets)
    return config


def _apply(config: AlgorithmConfig, plan: RolloutPlan, choice: RunnerChoice) -> None:
    allow_resets(config, plan.reset_timeout_s)
    config.environment(
        # The endpoints are the environment: RLlib must not make another one.
        env=None,
        env_config={**config.env_config, PLAN_KEY: plan},
        # With several agents the spaces are those of their policies: RLlib gets them from runners.
        observation_space=None if choice.is_multi_agent else choice.observation_space,
        action_space=None if choice.is_multi_agent else choice.action_space,
    )
    config.env_runners(
        env_runner_cls=choice.runner_class, num_envs_per_env_runner=plan.lanes_per_runner
    )
    former = config.callbacks_on_train_result or []
    callbacks = [former] if callable(former) else list(former)
    if raise_for_broken_environment not in callbacks:
        config.callbacks(on_train_result=[*callbacks, raise_for_broken_environment])


def _former_plan(config: AlgorithmConfig) -> RolloutPlan | None:
    plan = config.env_config.get(PLAN_KEY)
    return plan if isinstance(plan, RolloutPlan) else None


def _runner_spec(config: AlgorithmConfig) -> RunnerSpec:
    lanes: int | None = int(config.num_envs_per_env_runner)
    former = _former_plan(config)
    if former is not None and lanes == former.lanes_per_runner:
        lanes = former.lanes_asked
    runner_spec = RunnerSpec(
        max(1, int(config.num_env_runners or 0)), None if lanes == 1 else lanes
    )
    if not is_evaluated(config):
        return runner_spec
    own_lanes = (config.evaluation_config or {}).get("num_envs_per_env_runner")
    return replace(
        runner_spec,
        num_evaluation_runners=max(1, int(config.evaluation_num_env_runners)),
        evaluation_lanes=None if own_lanes is None else int(own_lanes),
    )
