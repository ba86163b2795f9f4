"""Which endpoints each session of each runner samples from, unless the registry moves it.

``num_envs_per_env_runner`` is validated here: the sessions of a runner give it these lanes.
"""

import math
from dataclasses import dataclass

from rlmesh_ray.errors import ConfigurationError, ContractMismatchError


@dataclass(frozen=True, slots=True)
class RunnerSpec:
    """The runners of a config and their lanes."""

    num_runners: int
    """At least 1: a local runner that samples counts."""
    lanes: int | None
    """Lanes of each runner; None: those of one session with each of its endpoints."""
    num_evaluation_runners: int | None = None
    """At least 1, likewise; None: there is no evaluation."""
    evaluation_lanes: int | None = None
    """Lanes of each evaluation runner; None: it has as many sessions as a training runner."""


@dataclass(frozen=True, slots=True)
class SessionLayout:
    """The endpoints of one group of runners, and the distribution of its sessions over them.

    The sessions of all runners, counted runner by runner, are assigned to the endpoints in order;
    the numbers of sessions of two endpoints differ by one at most. So a runner has as few endpoints
    as possible, and no two runners share one as long as there are enough.
    """

    num_endpoints: int
    num_runners: int
    sessions_per_runner: int
    first_endpoint: int = 0

    @property
    def num_sessions(self) -> int:
        return self.num_runners * self.sessions_per_runner

    def endpoints_of(self, worker_index: int) -> tuple[int, ...]:
        """Return the endpoints of a runner: one entry for each session.

        Args:
            worker_index: RLlib's index: remote runners from 1, the local one is 0. Runners beyond
                the planned ones begin again at the first.
        """
        first = max(worker_index - 1, 0) % self.num_runners * self.sessions_per_runner
        return tuple(
            self.first_endpoint + (first + session) * self.num_endpoints // self.num_sessions
            for session in range(self.sessions_per_runner)
        )


def max_sessions_per_endpoint(training: SessionLayout, evaluation: SessionLayout | None) -> int:
    counts = [math.ceil(s.num_sessions / s.num_endpoints) for s in (training, evaluation) if s]
    has_own = evaluation is not None and evaluation.first_endpoint > 0
    return max(counts) if has_own else sum(counts)


def assign_sessions(
    runner_spec: RunnerSpec, *, width: int, num_endpoints: int, num_evaluation_endpoints: int = 0
) -> tuple[SessionLayout, SessionLayout | None]:
    """Assign endpoints to the runners that train, and to those that evaluate, if any.

    Args:
        runner_spec: The runners of the config.
        width: Lanes of a session.
        num_endpoints: Number of endpoints for training, at least 1.
        num_evaluation_endpoints: Number of the endpoints after these, which are for evaluation
            only; 0: evaluation runners open their sessions with the endpoints for training.

    Raises:
        ContractMismatchError: Lanes are not a multiple of ``width``, or some endpoints would be
            idle; without ``lanes``: the endpoints cannot be spread evenly.
        ConfigurationError: There are endpoints for evaluation, but there is no evaluation.
    """
    sessions = _sessions_per_runner(runner_spec, num_endpoints, width)
    training = SessionLayout(num_endpoints, runner_spec.num_runners, sessions)
    if runner_spec.num_evaluation_runners is None:
        if num_evaluation_endpoints:
            raise ConfigurationError(
                f"num_evaluation_endpoints={num_evaluation_endpoints}, but nothing is evaluated; "
                "call config.evaluation(evaluation_interval=...) first"
            )
        return training, None
    if runner_spec.evaluation_lanes is not None:
        setting = "num_envs_per_env_runner in evaluation_config"
        sessions = _sessions_for(runner_spec.evaluation_lanes, width, setting)
    evaluation = SessionLayout(
        num_endpoints=num_evaluation_endpoints or num_endpoints,
        num_runners=runner_spec.num_evaluation_runners,
        sessions_per_runner=sessions,
        first_endpoint=num_endpoints if num_evaluation_endpoints else 0,
    )
    if num_evaluation_endpoints > evaluation.num_sessions:
        raise ContractMismatchError(
            f"num_evaluation_endpoints={num_evaluation_endpoints}, but {evaluation.num_runners} "
            f"evaluation runner(s) open only {evaluation.num_sessions} session(s); use at most "
            "as many"
        )
    return training, evaluation


def num_envs_for(runner_spec: RunnerSpec, num_endpoints: int) -> int:
    """Return the width of endpoints with which one session at each gives a runner its lanes.

    Raises:
        ContractMismatchError: There is no such width.
    """
    if runner_spec.lanes is None:
        return 1
    sessions = _spread(num_endpoints, runner_spec.num_runners)
    if runner_spec.lanes % sessions:
        raise ContractMismatchError(
            f"num_envs_per_env_runner={runner_spec.lanes} cannot be spread evenly over the "
            f"{sessions} endpoints of a runner; set it to a multiple of {sessions}, or give "
            "num_envs, the lanes of each session, and leave num_envs_per_env_runner out"
        )
    return runner_spec.lanes // sessions


def _sessions_per_runner(runner_spec: RunnerSpec, num_endpoints: int, width: int) -> int:
    if runner_spec.lanes is None:
        return _spread(num_endpoints, runner_spec.num_runners)
    sessions = _sessions_for(runner_spec.lanes, width, "num_envs_per_env_runner")
    if num_endpoints > sessions * runner_spec.num_runners:
        needed = width * math.ceil(num_endpoints / runner_spec.num_runners)
        raise ContractMismatchError(
            f"num_envs_per_env_runner={runner_spec.lanes} is {sessions} session(s) of {width} "
            f"lane(s) for each of {runner_spec.num_runners} runner(s), which leaves some of "
            f"{num_endpoints} endpoints idle; use {sessions * runner_spec.num_runners} endpoints, "
            f"or set num_envs_per_env_runner={needed}, or leave it out to use all their lanes"
        )
    return sessions


def _spread(num_endpoints: int, num_runners: int) -> int:
    """Return how many endpoints each runner has for itself, or 1 where there are too few."""
    if num_endpoints > num_runners and num_endpoints % num_runners:
        raise ContractMismatchError(
            f"{num_endpoints} endpoints cannot be spread evenly over {num_runners} EnvRunners; "
            f"use a multiple of {num_runners} endpoints, set num_env_runners to a divisor of "
            f"{num_endpoints}, or set num_envs_per_env_runner, the lanes of a runner"
        )
    return max(1, num_endpoints // num_runners)


def _sessions_for(lanes: int, width: int, setting: str) -> int:
    sessions, rest = divmod(lanes, width)
    if rest:
        near = " or ".join(str(width * count) for count in (sessions, sessions + 1) if count)
        raise ContractMismatchError(
            f"{setting} is {lanes}, which is no multiple of {width}, the lanes that a session with "
            f"these endpoints has; set it to {near}, or leave it out to use all their lanes"
        )
    return sessions
