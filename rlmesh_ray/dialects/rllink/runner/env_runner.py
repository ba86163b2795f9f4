"""RLMeshRLlinkEnvRunner: an EnvRunner whose environments run elsewhere, and by themselves.

It listens; simulators connect, act with a copy of the policy (or ask for each action) and send
what has come of it. ``configure_rllink`` puts it into an AlgorithmConfig.
"""

import logging
import time
import uuid
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeVar

import gymnasium
import numpy as np
import torch
from gymnasium.vector.utils import batch_space
from ray.rllib.algorithms.algorithm_config import AlgorithmConfig
from ray.rllib.algorithms.impala import IMPALAConfig
from ray.rllib.algorithms.ppo import PPOConfig
from ray.rllib.core import COMPONENT_RL_MODULE
from ray.rllib.core.columns import Columns
from ray.rllib.env.single_agent_episode import SingleAgentEpisode
from ray.rllib.utils.metrics import WEIGHTS_SEQ_NO

from rlmesh_ray.auth.server_tls import TlsSource
from rlmesh_ray.auth.token_file import ServerToken
from rlmesh_ray.dialects.rllink import wire as m
from rlmesh_ray.dialects.rllink.runner.client_session import (
    BatchedInference,
    ModuleCopy,
    SimulatorSession,
    action_transform_for,
)
from rlmesh_ray.dialects.rllink.runner.listen_plan import (
    RLLINK_KEY,
    RLlinkPlan,
    SampleSpaces,
    client_config,
    weights_extras,
)
from rlmesh_ray.dialects.rllink.runner.sample_queue import (
    ReceivedChunk,
    SampleQueue,
    WeightsVersion,
)
from rlmesh_ray.dialects.rllink.server.connection import RLlinkLimits, RLlinkServer
from rlmesh_ray.dialects.rllink.wire import RAY, Encoding
from rlmesh_ray.errors import ConfigurationError, ConfigurationWarning
from rlmesh_ray.models.onnx.onnx_export import OnnxGraph
from rlmesh_ray.models.rllib.fast_path import as_arrays
from rlmesh_ray.models.rllib.forward import distribution_inputs, distribution_of, exported_module
from rlmesh_ray.options import takes_no_more
from rlmesh_ray.protocol.address import Address, parse_address
from rlmesh_ray.rllib.config.cluster_capacity import capacity_warnings
from rlmesh_ray.rllib.config.config_checks import require_config, require_recordable
from rlmesh_ray.rllib.runner.episode_buffer import EpisodeFactory
from rlmesh_ray.rllib.runner.runner_env import announce_environment
from rlmesh_ray.rllib.runner.sample_recording import RecordingEnvRunner
from rlmesh_ray.server.endpoint.bind_policy import checked_address

ConfigT = TypeVar("ConfigT", bound=AlgorithmConfig)

_LOG = logging.getLogger(__name__)

NUM_STALE_STEPS_LIFETIME = "num_stale_env_steps_dropped_lifetime"
"""Metric: steps that were dropped since the weights that acted were too old."""
NUM_ABANDONED_LIFETIME = "num_episodes_abandoned_lifetime"
"""Metric: episodes whose simulators have gone, or have given them up."""
NUM_SIMULATORS = "num_simulators_per_env_runner"
"""Metric: connections when the metrics were asked for; the mean over the runners."""
_PART_OF_SAMPLE_TIMEOUT = 0.5
_MOST_ROWS = 1024
_OFF_POLICY_STEPS = 50
"""What a message brings where RLlib itself would take step by step."""
_ON_POLICY = (PPOConfig, IMPALAConfig)  # APPO's config is one of IMPALA's
_MOST_LAG = 16
"""Versions of the weights that are kept, for the log-probabilities of what they did."""


def recomputed_outputs(
    module: ModuleCopy, weights: WeightsVersion, chunks: Sequence[m.Chunk]
) -> list[dict[str, m.Array]]:
    """Return, for each chunk, the distributions' inputs and the actions' log-probabilities.

    Args:
        module: Gets the weights.
        weights: The weights that chose the actions.
        chunks: Chunks of these weights that came without outputs; they are computed together.
    """
    acting = module.with_weights(weights)
    obs = torch.as_tensor(np.concatenate([chunk.obs[:-1] for chunk in chunks]))
    actions = torch.as_tensor(np.concatenate([chunk.actions for chunk in chunks]))
    with torch.no_grad():
        # Not all at once: what a network of pixels holds meanwhile would not fit.
        inputs = torch.cat([distribution_inputs(acting, part) for part in obs.split(_MOST_ROWS)])
        logp = acting.get_exploration_action_dist_cls().from_logits(inputs).logp(actions)
    arrays = as_arrays({Columns.ACTION_DIST_INPUTS: inputs, Columns.ACTION_LOGP: logp})
    ends = np.cumsum([len(chunk) for chunk in chunks])
    return [
        {name: arrays[name][end - len(chunk) : end] for name in m.MODEL_OUTPUTS}
        for chunk, end in zip(chunks, ends, strict=True)
    ]


class EpisodeChain:
    """Makes episodes of chunks, in the order in which they are given.

    Args:
        spaces: Of the samples.
        module: Recomputes log-probabilities; None: the learner needs none.
        weights_of: Returns a version of the weights, or None if it is too old.
        lookback: How many steps of the chunk before an episode holds.
    """

    def __init__(
        self,
        spaces: SampleSpaces,
        module: ModuleCopy | None,
        weights_of: Callable[[int], WeightsVersion | None],
        *,
        lookback: int,
    ) -> None:
        self._maker = EpisodeFactory(spaces.observation, spaces.action)
        self._module = module
        self._weights_of = weights_of
        self._lookback = lookback

    def episodes(self, received: Sequence[ReceivedChunk]) -> list[SingleAgentEpisode]:
        """Return an episode for each chunk, but for those whose weights are too old by now."""
        module = self._module
        if module is None:
            return [self._episode(each, {}) for each in received]
        outputs = {each: each.chunk.model_outputs for each in received if each.chunk.model_outputs}
        missing: dict[int, list[ReceivedChunk]] = {}
        for each in received:
            if each not in outputs:
                missing.setdefault(each.seq_no, []).append(each)
        for seq_no, group in missing.items():
            weights = self._weights_of(seq_no)
            if weights is not None:
                recomputed = recomputed_outputs(module, weights, [each.chunk for each in group])
                outputs.update(zip(group, recomputed, strict=True))
        return [self._episode(each, outputs[each]) for each in received if each in outputs]

    def _episode(
        self, received: ReceivedChunk, outputs: Mapping[str, m.Array]
    ) -> SingleAgentEpisode:
        chunk, progress = received.chunk, received.progress
        # Where a chunk has been dropped, what comes after it is another episode: replay buffers
        # put chunks of one id together, and would find that they do not fit.
        if progress.next_step != received.first_step:
            progress.rllib_id, progress.tail = uuid.uuid4().hex, None
            progress.rllib_began = received.first_step
        whole = replace(chunk, model_outputs=outputs)
        if progress.tail is not None:
            whole = m.joined([progress.tail, whole])
        episode = self._maker.make(
            progress.rllib_id,
            observations=whole.obs,
            infos=[{} for _ in whole.obs],
            actions=whole.actions,
            rewards=whole.rewards,
            extras=whole.model_outputs,
            lookback=len(whole) - len(chunk),
            t_started=received.first_step - progress.rllib_began,
        )
        episode.is_terminated, episode.is_truncated = chunk.is_terminated, chunk.is_truncated
        progress.next_step = received.first_step + len(chunk)
        if self._lookback:
            tail = whole.part(max(0, len(whole) - self._lookback), len(whole))
            # Copies, so that they do not hold all the others.
            progress.tail = m.Chunk(
                tail.obs.copy(),
                tail.actions.copy(),
                tail.rewards.copy(),
                is_terminated=False,
                is_truncated=False,
                model_outputs={name: each.copy() for name, each in tail.model_outputs.items()},
            )
        return episode


class RLMeshRLlinkEnvRunner(RecordingEnvRunner):
    """Samples from simulators that connect to it, over RLlink.

    ``sample`` waits until enough has come, and not for ever: after ``RLlinkPlan.wait_s``, or half
    of ``sample_timeout_s``, it logs what is missing and returns what there is. For IMPALA and
    APPO, whose learners cannot take nothing, it goes on waiting while nothing is there. On-policy,
    ``num_timesteps`` is met by whole messages, so there may be more; ``num_episodes`` means
    episodes that end. Simulators cannot be reset from here, so ``force_reset`` drops what has come
    instead, and ``random_actions`` does nothing. Callbacks on episodes are not called, for the
    same reason.
    """

    env: Any
    _server: RLlinkServer | None = None
    _queue: SampleQueue
    _chain: EpisodeChain
    _inference: BatchedInference

    def __init__(self, *, config: AlgorithmConfig, **kwargs: Any) -> None:
        plan = config.env_config.get(RLLINK_KEY)
        if not isinstance(plan, RLlinkPlan):
            raise ConfigurationError(
                "this config says nothing of simulators: pass it through "
                "rlmesh_ray.rllib.configure_rllink"
            )
        self._plan = plan
        super().__init__(config=config, **kwargs)
        if self.env is not None:
            self._listen()

    @property
    def address(self) -> str:
        """Where simulators connect; empty for a runner that does not sample."""
        return "" if self._server is None else self._server.address

    # --- what RLlib asks for -------------------------------------------------------------

    def make_env(self) -> None:
        """Make what RLlib sees as the environment: spaces, and how many simulators there may be.

        Raises:
            ConfigurationError: The spaces cannot come over RLlink.
        """
        spaces = SampleSpaces(self.config.observation_space, self.config.action_space)
        self.num_envs = self.config.num_envs_per_env_runner
        # It cannot be stepped.
        self.env = gymnasium.vector.VectorEnv()
        self.env.num_envs = self.num_envs
        self.env.single_observation_space = spaces.observation
        self.env.single_action_space = spaces.action
        self.env.observation_space = batch_space(spaces.observation, self.num_envs)
        self.env.action_space = batch_space(spaces.action, self.num_envs)
        announce_environment(self)

    def set_state(self, state: dict[str, Any]) -> None:
        """Take connector states, counters and weights; simulators get new weights at once."""
        seq_no = int(state.get(WEIGHTS_SEQ_NO, 0))
        is_new = COMPONENT_RL_MODULE in state and (not seq_no or self._weights_seq_no < seq_no)
        super().set_state(state)
        if is_new and self._server is not None:
            self._publish(seq_no)

    def get_metrics(self) -> Any:
        """Return what has been measured since the last call, as RLlib's runner does."""
        if self._server is not None:
            counters = self._queue.take_counters()
            for each in counters.finished:
                self._log_episode_metrics(each.num_steps, each.return_, each.seconds)
            for name, count in (
                (NUM_STALE_STEPS_LIFETIME, counters.num_stale_steps),
                (NUM_ABANDONED_LIFETIME, counters.num_abandoned),
            ):
                self.metrics.log_value(name, count, reduce="lifetime_sum")
            self.metrics.log_value(NUM_SIMULATORS, self._queue.num_clients, window=1)
        return super().get_metrics()

    def assert_healthy(self) -> None:
        """See to it that it can be asked for samples.

        Raises:
            AssertionError: It is not listening.
        """
        super().assert_healthy()
        assert self._server is not None, "it does not listen"
        assert self._server.is_serving, "it does not listen any more"

    def stop(self) -> None:
        """Close the port and all connections."""
        if self._server is not None:
            self._queue.close()
            self._server.stop()
        super().stop()

    def _sample(
        self,
        *,
        num_timesteps: int | None = None,
        num_episodes: int | None = None,
        explore: bool,
        random_actions: bool = False,
        force_reset: bool = False,
    ) -> list[SingleAgentEpisode]:
        """Wait for what simulators send; see the class."""
        if random_actions:
            _LOG.warning("random_actions=True changes nothing: simulators act by themselves")
        if self._queue.weights is None:
            self._publish(self._weights_seq_no)
        if force_reset:
            self._queue.take(num_steps=None, num_episodes=None, deadline_s=0.0)
        self._inference.explore = explore
        config, wait_s = self.config, self._wait_s()
        episodes: list[SingleAgentEpisode] = []
        while True:
            received = self._queue.take(
                num_steps=num_timesteps,
                num_episodes=num_episodes,
                deadline_s=time.monotonic() + wait_s,
            )
            episodes = self._chain.episodes(received)
            num_steps = sum(len(episode) for episode in episodes)
            num_done = sum(episode.is_done for episode in episodes)
            if num_steps < (num_timesteps or 0) or num_done < (num_episodes or 0):
                self._explain(wait_s, num_steps, num_timesteps, num_done, num_episodes)
            # IMPALA's learner cannot take an empty sample: that would end the training.
            must_bring_some = isinstance(config, IMPALAConfig) and not config.in_evaluation
            if episodes or self._queue.is_closed or not must_bring_some:
                break
        if num_steps:
            self._log_env_steps(metric=self._metrics_num_env_steps_sampled, num_steps=num_steps)
        self._increase_sampled_metrics(num_steps, num_done)
        return episodes

    # --- listening -----------------------------------------------------------------------

    def _listen(self) -> None:
        plan, config = self._plan, self.config
        if self.module is None or self.module.is_stateful():
            raise ConfigurationError(
                "simulators need a module without a state; leave out use_lstm, or have the "
                "observation hold what the policy must remember"
            )
        self._spaces = SampleSpaces(config.observation_space, config.action_space)
        self._queue = SampleQueue(
            max_lag=plan.max_weights_lag,
            max_bytes=plan.max_waiting_bytes,
            max_steps=plan.max_waiting_steps,
        )
        has_log_probabilities = distribution_of(self.module) != "epsilon_greedy"
        needs_them = plan.max_weights_lag is not None and has_log_probabilities
        self._chain = EpisodeChain(
            self._spaces,
            ModuleCopy(self.module) if needs_them else None,
            self._queue.weights_of,
            lookback=config.episode_lookback_horizon,
        )
        fit = action_transform_for(
            config.action_space, normalize=config.normalize_actions, clip=config.clip_actions
        )
        self._inference = BatchedInference(
            self._queue, self.module, fit, explore=bool(config.explore)
        )
        self._model: OnnxGraph | ConfigurationError
        try:
            self._model = exported_module(self.module, config.observation_space, plan.model_input)
        except ConfigurationError as error:
            # Ray's clients, and those that ask for actions, need none.
            _LOG.warning("simulators that want a model will be refused: %s", error)
            self._model = error
        self._told = client_config(
            config, plan, self._spaces, self.module, self._steps_per_message()
        )
        port = plan.port_of(
            self.worker_index or 0,
            num_training=config.num_env_runners or 0,
            in_evaluation=bool(config.in_evaluation),
        )
        self._server = RLlinkServer(
            self.admit,
            address=str(Address(plan.host, port)),
            token=False if plan.no_token else plan.token,
            tls=plan.tls,
            limits=plan.limits,
        )
        self._server.start()
        _LOG.info("worker %s listens for simulators on %s", self.worker_index, self._server.address)

    def admit(self, peer: str, encoding: Encoding) -> SimulatorSession:
        """Begin a conversation with a simulator; for the server."""
        _LOG.info("worker %s: a simulator at %s, in %s", self.worker_index, peer, encoding.name)
        state = _arrays if encoding is RAY else self._as_model
        return SimulatorSession(self._queue, self._spaces, self._told, state, self._inference)

    def _publish(self, seq_no: int) -> None:
        former = self._queue.weights
        # RLlib's own number, so that it differs from those of a runner that was restarted; but
        # weights that were set by force must have a number of their own.
        number = seq_no if former is None else max(seq_no, former.seq_no + 1)
        state = self.module.get_state(inference_only=True)
        num_env_steps = int(self.num_env_steps_sampled_lifetime)
        self._queue.publish(
            WeightsVersion(
                number,
                {name: np.array(values) for name, values in state.items()},
                weights_extras(self.module, num_env_steps),
                num_env_steps,
            )
        )

    def _as_model(self, weights: WeightsVersion) -> m.SetState:
        if isinstance(self._model, ConfigurationError):
            raise self._model
        return m.SetState(weights.seq_no, weights.onnx(self._model), extras=weights.extras)

    def _steps_per_message(self) -> int:
        if self._plan.env_steps_per_sample is not None:
            return self._plan.env_steps_per_sample
        fragment = int(self.config.get_rollout_fragment_length(self.worker_index or 0))
        return max(fragment, 1 if self._plan.is_on_policy else _OFF_POLICY_STEPS)

    def _wait_s(self) -> float:
        limit_s = self.config.sample_timeout_s
        if self.config.in_evaluation:
            limit_s = self.config.evaluation_sample_timeout_s
        if not self.worker_index or limit_s is None:
            return self._plan.wait_s
        return min(self._plan.wait_s, _PART_OF_SAMPLE_TIMEOUT * float(limit_s))

    def _explain(
        self,
        wait_s: float,
        num_steps: int,
        num_timesteps: int | None,
        num_done: int,
        num_episodes: int | None,
    ) -> None:
        came, wanted = f"{num_steps} of {num_timesteps} steps", num_timesteps
        if wanted is None:
            came = f"{num_done} of {num_episodes} episodes"
        num_clients = self._queue.num_clients
        _LOG.warning(
            "%s came in %.3g s; %s; %s",
            came,
            wait_s,
            f"simulators connected: {num_clients}" if num_clients else "no simulator is connected",
            f"they connect to {self.address}",
        )


def _arrays(weights: WeightsVersion) -> m.SetState:
    return m.SetState(weights.seq_no, weights=weights.state, extras=weights.extras)


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
