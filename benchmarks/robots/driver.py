"""Steps a simulator, asks as openpi clients do, or calls the policy by itself.

``python -m benchmarks.robots.driver``.

It reads a ``DriverJob`` from standard input.
"""

import enum
import itertools
import json
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any, Self

import numpy as np

from benchmarks.load import ClientJob
from benchmarks.robots.cameras import Robot, observation
from benchmarks.robots.policy import SleepingPolicy
from benchmarks.serving.frames import contract
from benchmarks.stepping.stopwatch import Step, time_steps, time_threads
from rlmesh_ray.client.model.remote_model import RemoteModel
from rlmesh_ray.dialects.openpi.wire import pack, unpack
from rlmesh_ray.errors import EndpointError

STEP_S = 1 / 50
"""What a step of the simulator takes."""


class Mode(enum.StrEnum):
    """What is done, and where its actions come from."""

    SIMULATOR = "simulator"
    """The simulator is stepped with an action that it has."""
    ONE_ACTION = "one action"
    """Each step asks the policy."""
    CHUNKS = "chunks"
    """A chunk is asked for when the one before is played."""
    PREFETCH = "prefetch"
    """A chunk is asked for while the one before is played."""
    POLICY = "policy"
    """The policy is called in this process; a step is a row."""
    OPENPI = "openpi"
    """Clients of openpi's protocol, each with a thread, ask again at once."""
    RAW_IMAGES = "raw images"
    """The images of two cameras are sent as they are."""
    SMALL_IMAGES = "small images"
    """They are sent as JPEG, as large as the policy wants them."""


@dataclass(frozen=True, slots=True)
class DriverJob:
    """What a driver process does."""

    mode: Mode
    address: str = ""
    """Of the served policy."""
    rows: int = 1
    """Of each call of the policy in this process; how many openpi clients there are."""
    warm_up_s: float = 1.0
    """See ``ClientJob``."""
    seconds: float = 5.0
    """See ``ClientJob``."""

    def job(self) -> ClientJob:
        """Return the process that does it."""
        command = [sys.executable, "-m", "benchmarks.robots.driver"]
        return ClientJob(command, json.dumps(asdict(self)), self.warm_up_s, self.seconds)

    @classmethod
    def from_line(cls, line: str) -> Self:
        """Return what ``job`` wrote."""
        fields = json.loads(line)
        return cls(**{**fields, "mode": Mode(fields["mode"])})


def main() -> None:
    """Do the work that standard input describes."""
    job = DriverJob.from_line(sys.stdin.readline())
    times = {"warm_up_s": job.warm_up_s, "seconds": job.seconds}
    match job.mode:
        case Mode.SIMULATOR:
            time_steps(_simulated(lambda _: 0), **times)
        case Mode.POLICY:
            time_steps(_policy_step(job.rows), **times)
        case Mode.OPENPI:
            time_threads([_openpi_step(job.address) for _ in range(job.rows)], **times)
        case Mode.RAW_IMAGES | Mode.SMALL_IMAGES:
            with RemoteModel(job.address) as model:
                time_steps(_camera_step(model, is_small=job.mode is Mode.SMALL_IMAGES), **times)
        case mode:
            with RemoteModel(job.address) as model:
                time_steps(_simulated(_remote_actions(model, mode)), **times)


def _remote_actions(model: RemoteModel, mode: Mode) -> Callable[[Any], object]:
    if mode is Mode.ONE_ACTION:
        model.configure_route(contract(1))
        return lambda state: model.predict(state[None])
    prefetch = "auto" if mode is Mode.PREFETCH else 0
    return model.actions(contract(1), prefetch=prefetch).act


def _simulated(act: Callable[[Any], object]) -> Step:
    """Return a step of a simulator: it applies an action for the duration of a step."""
    state = np.zeros(4, np.float32)

    def step() -> int:
        act(state)
        time.sleep(STEP_S)
        return 1

    return step


def _policy_step(rows: int) -> Step:
    policy, observations = SleepingPolicy(1), np.zeros((rows, 4), np.float32)
    return lambda: len(policy(observations))


def _openpi_step(address: str) -> Step:
    from websockets.sync.client import connect

    connection = connect(f"ws://{address}", compression=None)
    connection.recv()  # the server's metadata
    message = pack({"observation": np.zeros(4, np.float32)})

    def step() -> int:
        connection.send(message)
        answer = connection.recv()
        if isinstance(answer, str):
            raise EndpointError(f"no actions came: {answer}")
        return len(unpack(answer)["actions"])

    return step


_SMALL = {name: f"resize({name},224,224)" for name in Robot.observation_space}


def _camera_step(model: RemoteModel, *, is_small: bool) -> Step:
    if is_small:
        model.configure_route(Robot(), image_codec="jpeg:95", observation_map=_SMALL)
    else:
        model.configure_route(Robot())
    observations = itertools.cycle([observation(seed) for seed in range(8)])
    return lambda: len(model.predict(next(observations)))


if __name__ == "__main__":
    main()
