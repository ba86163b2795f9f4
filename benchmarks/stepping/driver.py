"""Steps environments: ``python -m benchmarks.stepping.driver``; reads a ``ClientSpec``."""

import itertools
import sys
from collections.abc import Callable, Iterator
from typing import Any

import gymnasium
from gymnasium.vector.utils import batch_space

from benchmarks.serving.frames import JOIN
from benchmarks.stepping.environments import local_vector
from benchmarks.stepping.specs import ClientSpec, Mode
from benchmarks.stepping.stopwatch import Step, time_in_bulk, time_steps, time_threads
from rlmesh_ray.client.channel import ConnectOptions
from rlmesh_ray.client.env.remote_env import RemoteEnv, RemoteVectorEnv
from rlmesh_ray.client.join_stream import JoinStream, open_call
from rlmesh_ray.dialects.dm_env_rpc.client.settings import DmEnvRpcSettings
from rlmesh_ray.evaluation.run import evaluate
from rlmesh_ray.protocol import messages
from rlmesh_ray.wire.rlmesh_v1.env import pack_step

_SEED = 0
_NUM_ACTIONS = 256
"""Drawn beforehand, and used again and again: drawing them would be part of every step."""
_ACTION_BYTES = 8
"""Of CartPole."""
_PATIENCE_S = 60.0
"""For a session's worker to start, where many start at once."""


def main() -> None:
    """Do the work that standard input describes."""
    client_spec = ClientSpec.from_line(sys.stdin.readline())
    times = {"warm_up_s": client_spec.warm_up_s, "seconds": client_spec.seconds}
    match client_spec.mode:
        case Mode.SYNC | Mode.ASYNC:
            venv = local_vector(
                client_spec.env,
                client_spec.num_envs,
                client_spec.env_kwargs,
                has_processes=client_spec.mode is Mode.ASYNC,
            )
            time_steps(_vector_step(venv), **times)
        case Mode.VECTOR:
            remotes = [_remote_vector(address, client_spec) for address in client_spec.addresses]
            step = _vector_step(*remotes) if len(remotes) == 1 else _lockstep(remotes)
            time_steps(step, **times)
        case Mode.SESSIONS:
            remotes = [_remote_vector(address, client_spec) for address in client_spec.addresses]
            time_threads([_vector_step(remote) for remote in remotes], **times)
        case Mode.SINGLE:
            time_steps(_single_step(_remote(client_spec)), **times)
        case Mode.EVALUATION:
            time_in_bulk(
                _evaluation(_remote_vector(client_spec.addresses[0], client_spec)), **times
            )
        case Mode.BATCHED:
            settings = DmEnvRpcSettings(batched=True)
            address = f"dm_env_rpc://{client_spec.addresses[0]}"
            remote = RemoteVectorEnv(_patient(address), dm_env_rpc=settings)
            time_steps(_vector_step(remote), **times)
        case Mode.ECHO:
            time_steps(_echo(client_spec), **times)


# --- clients ---------------------------------------------------------------------------


def _patient(address: str) -> ConnectOptions:
    return ConnectOptions(address, timeout_s=_PATIENCE_S)


def _remote_vector(address: str, client_spec: ClientSpec) -> RemoteVectorEnv:
    return RemoteVectorEnv(_patient(address), transport=client_spec.transport)


def _remote(client_spec: ClientSpec) -> RemoteEnv:
    address = client_spec.addresses[0]
    return RemoteEnv(_patient(address), transport=client_spec.transport)


# --- what is timed ---------------------------------------------------------------------


def _vector_step(venv: gymnasium.vector.VectorEnv[Any, Any, Any]) -> Step:
    num_envs = venv.num_envs
    actions = _actions(batch_space(venv.single_action_space, num_envs))  # EnvPool's is of one lane
    venv.reset(seed=_SEED)

    def step() -> int:
        venv.step(next(actions))
        return num_envs

    return step


def _lockstep(remotes: list[RemoteVectorEnv]) -> Step:
    actions = [_actions(remote.action_space) for remote in remotes]
    for remote in remotes:
        remote.reset(seed=_SEED)
    num_envs = sum(remote.num_envs for remote in remotes)

    def step() -> int:
        for remote, drawn in zip(remotes, actions, strict=True):
            remote.step_async(next(drawn))
        for remote in remotes:
            remote.step_wait()
        return num_envs

    return step


def _single_step(env: gymnasium.Env[Any, Any]) -> Step:
    actions = _actions(env.action_space)
    env.reset(seed=_SEED)

    def step() -> int:
        _, _, terminated, truncated, _ = env.step(next(actions))
        if terminated or truncated:
            env.reset()
        return 1

    return step


def _echo(client_spec: ClientSpec) -> Step:
    connect_options = ConnectOptions(client_spec.addresses[0], timeout_s=_PATIENCE_S)
    call = open_call(connect_options.open(), JOIN, connect_options.metadata)
    stream = JoinStream(call, connect_options.address)
    frame = pack_step(messages.Step("1", bytes(client_spec.num_envs * _ACTION_BYTES), 1000))

    def step() -> int:
        stream.send(frame)
        stream.receive(_PATIENCE_S)
        return client_spec.num_envs

    return step


def _evaluation(remote: RemoteVectorEnv) -> Callable[[int], int]:
    def work(episodes: int) -> int:
        return sum(evaluate(remote, _follow_the_pole, episodes=episodes).lengths)

    return work


def _follow_the_pole(observations: Any) -> Any:
    """Push the cart to where the pole of CartPole falls; ``released_driver`` does the same."""
    return (observations[:, 3] > 0).astype("int64")


def _actions(space: gymnasium.Space[Any]) -> Iterator[Any]:
    space.seed(_SEED)
    return itertools.cycle([space.sample() for _ in range(_NUM_ACTIONS)])


if __name__ == "__main__":
    main()
