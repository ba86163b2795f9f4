"""The calls of a step and of a prediction: ``python -m benchmarks.calls.measure SUBJECT``.

It writes a line of JSON for each case. Client and endpoint are threads of this process; those of an
endpoint count only if the process has served nothing before.
"""

import contextlib
import functools
import json
import logging
import operator
import os
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, replace
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from benchmarks.calls.plan import Calls, Subject
from benchmarks.calls.trace import TRACE, Trace, TracedEnv
from rlmesh_ray.client.env.remote_env import RemoteEnv, RemoteVectorEnv
from rlmesh_ray.client.model.remote_model import RemoteModel
from rlmesh_ray.polling import SPIN_VARIABLE
from rlmesh_ray.server.env.env_server import EnvServer
from rlmesh_ray.server.model.model_server import ModelServer
from rlmesh_ray.spaces.gym_conversion import contract_of

WARM_UP, ROUNDS, REPETITIONS = 5, 64, 3
RUNNER_LANES = 8
STEP_S = 3e-4
"""Of a runner's lane: each step takes a while, since the runner works ahead while it waits."""
TRANSPORTS = {"grpc": "gRPC", "tcp": "TCP", "shared_memory": "shared memory"}


def calls_of(subject: Subject) -> Iterator[Calls]:
    """Yield the calls of each case; a process of its own counts them.

    Raises:
        CalledProcessError: It has failed; standard error says why.
    """
    command = [sys.executable, "-m", "benchmarks.calls.measure", subject]
    # How often a wait polls that spins depends on the time.
    environment = {**os.environ, SPIN_VARIABLE: "0"}
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        for line in process.stdout:
            yield Calls(**json.loads(line))
    if process.returncode:
        raise subprocess.CalledProcessError(process.returncode, command)


class _Meter:
    """Counts what is done repeatedly. The threads that live when it is made are the endpoint's."""

    def __init__(self, trace: Trace) -> None:
        self._trace = trace
        self._endpoint = set(threading.enumerate()) - {threading.main_thread()}

    def ends(self, work: Callable[[int], object]) -> tuple[dict[str, int], dict[str, int]]:
        """Return the client's calls of a round, and the endpoint's; ``work`` does many rounds.

        The endpoint may still be ending an earlier session in another thread, which comes on top.
        So of several repetitions each function's smallest count is taken.
        """
        found = [self._ends_once(work) for _ in range(REPETITIONS)]
        client, endpoint = (
            functools.reduce(operator.and_, counts) for counts in zip(*found, strict=True)
        )
        return _per_round(client), _per_round(endpoint)

    def _ends_once(self, work: Callable[[int], object]) -> tuple[Counter[str], Counter[str]]:
        self._trace.start()
        work(ROUNDS)
        client, endpoint = Counter[str](), Counter[str]()
        for thread, counts in self._trace.stop().items():
            (endpoint if thread in self._endpoint else client).update(counts)
        return client, endpoint


def _calls(case: str, *ends: Mapping[str, int]) -> Calls:
    """Return the figures of client, endpoint and worker, as far as these are given."""
    files = [{name.partition(":")[0] for name in counts} for counts in ends]
    numbers = dict(
        zip(("client", "endpoint", "worker"), (sum(each.values()) for each in ends), strict=False)
    )
    total = len(set().union(*files)) if len(ends) > 1 else None
    return Calls(case, client_files=len(files[0]), files=total, **numbers)


def _per_round(counts: Mapping[str, int], rounds: int = ROUNDS) -> dict[str, int]:
    """Return the calls of a round; what is called now and then, as by a timer, is no part of it."""
    rounded = {name: round(count / rounds) for name, count in counts.items()}
    return {name: count for name, count in rounded.items() if count}


def _repeat(function: Callable[[], object], times: int) -> None:
    for _ in range(times):
        function()


def steps() -> Iterator[Calls]:
    """Yield the calls of steps of an environment, and of a vector of them."""
    with (
        Trace() as trace,
        EnvServer(TracedEnv) as single,
        EnvServer(TracedEnv, num_envs=64) as vector,
    ):
        meter = _Meter(trace)
        for transport, name in TRANSPORTS.items():
            with contextlib.closing(RemoteEnv(single.address, transport=transport)) as env:
                yield _step(meter, f"step, 1 lane, {name}", env, np.int64(1))
        for transport, name in TRANSPORTS.items():
            with contextlib.closing(RemoteVectorEnv(vector.address, transport=transport)) as venv:
                yield _step(meter, f"step, 64 lanes, {name}", venv, np.ones(64, np.int64))


def _step(meter: _Meter, case: str, remote: Any, action: Any) -> Calls:
    step = partial(remote.step, action)
    remote.reset(seed=0)
    _repeat(step, WARM_UP)
    remote.reset(options={TRACE: True})
    ends = meter.ends(partial(_repeat, step))
    _, infos = remote.reset(options={TRACE: False})
    text = infos[TRACE]
    worker = json.loads(text if isinstance(text, str) else text[0])
    return _calls(case, *ends, _per_round(worker, REPETITIONS * ROUNDS))


def predictions() -> Iterator[Calls]:
    """Yield the calls of predictions by a function."""
    with Trace() as trace, ModelServer(_stay) as server:
        meter = _Meter(trace)
        for rows, case in ((1, "prediction, 1 row"), (32, "prediction, 32 rows")):
            with contextlib.closing(RemoteModel(server.address)) as model:
                model.configure_route(replace(contract_of(TracedEnv()), num_envs=rows))
                predict = partial(model.predict, np.zeros((rows, 4), np.float32))
                _repeat(predict, WARM_UP)
                yield _calls(case, *meter.ends(partial(_repeat, predict)))


def _stay(observations: NDArray[np.float32]) -> NDArray[np.int64]:
    return np.ones(len(observations), np.int64)


def runner_steps() -> Iterator[Calls]:
    """Yield the calls of steps of a runner with PPO's default module, in its own process."""
    import torch
    from ray.rllib.algorithms.ppo import PPOConfig

    from rlmesh_ray.rllib.config.configure import configure
    from rlmesh_ray.rllib.runner.env_runner import RLMeshEnvRunner

    torch.set_num_threads(1)
    for transport, name in TRANSPORTS.items():
        with (
            EnvServer(
                TracedEnv,
                num_envs=RUNNER_LANES,
                env_kwargs={"step_s": STEP_S},
                transport=transport,
            ) as server,
            Trace() as trace,
        ):
            config = configure(PPOConfig(), server.address, inference="torch")
            config.env_runners(num_env_runners=0, num_envs_per_env_runner=RUNNER_LANES)
            runner = RLMeshEnvRunner(config=config, worker_index=0, num_workers=0)

            def sample(steps: int, runner: RLMeshEnvRunner = runner) -> None:
                runner.sample(num_timesteps=steps * RUNNER_LANES)

            sample(WARM_UP)
            client, _ = _Meter(trace).ends(sample)
            yield _calls(f"step of a runner, {RUNNER_LANES} lanes, {name}", client)
            runner.stop()


def main() -> None:
    """Write the calls of each case of a subject."""
    logging.disable()
    cases = {
        Subject.STEP: steps,
        Subject.PREDICTION: predictions,
        Subject.RUNNER: runner_steps,
    }[Subject(sys.argv[1])]
    for each in cases():
        sys.stdout.write(json.dumps(asdict(each)) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
