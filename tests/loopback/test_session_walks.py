"""Random sessions with a real endpoint, held against what the edition says of them."""

import random
from collections import Counter

import numpy as np
import pytest

from rlmesh_ray import EnvServer
from rlmesh_ray.compliance.probe import ACTION_SPACE, OBSERVATION_SPACE, REST, ProbeCommand
from rlmesh_ray.protocol.messages import (
    Close,
    EnvFailed,
    EnvRequest,
    EnvResponse,
    MalformedRequest,
    Render,
    Rendered,
    Reset,
    ResetDone,
    Step,
    StepDone,
)
from rlmesh_ray.spaces.batch import stack
from rlmesh_ray.spaces.spec import leaves
from rlmesh_ray.wire.rlmesh_v1 import env as wire
from rlmesh_ray.wire.rlmesh_v1.values import decode_batch, encode_batch
from tests.loopback.ports import plain_channel
from tests.loopback.raw_join import ENV_JOIN, RawJoin
from tests.reference_session import EnvEffect, EnvFailure, ReferenceSession, SimulatedStep

PROBE = "rlmesh_ray.testing.probe_env:RLMeshProbe-v0"
NUM_LANES = 2
MAX_REQUESTS = 30
NONSENSE = b"\xff\xff"
STEPS_LEAF = [leaf.name for leaf in leaves(OBSERVATION_SPACE)].index("steps")
COMMANDS = (
    *[ProbeCommand.GO_ON] * 12,
    *[ProbeCommand.TERMINATE, ProbeCommand.TRUNCATE] * 3,
    ProbeCommand.FAIL,
    ProbeCommand.OBSERVE_OUT_OF_RANGE,
    ProbeCommand.OBSERVE_NAN,
    ProbeCommand.OBSERVE_WRONG_SHAPE,
    ProbeCommand.OBSERVE_INTEGRAL_FLOAT,
    ProbeCommand.OBSERVE_FRACTION,
    ProbeCommand.OBSERVE_DOUBLE,
)
REJECTED = {
    ProbeCommand.OBSERVE_NAN,
    ProbeCommand.OBSERVE_WRONG_SHAPE,
    ProbeCommand.OBSERVE_FRACTION,
}


class Probes:
    """What the probe's lanes do: a step after the end starts the next episode (NEXT_STEP)."""

    def __init__(self) -> None:
        self.num_steps = [0] * NUM_LANES
        self._has_ended = [False] * NUM_LANES

    def reset(self, lanes: tuple[int, ...]) -> None:
        for lane in lanes or range(NUM_LANES):
            self.num_steps[lane], self._has_ended[lane] = 0, False

    def step(self, commands: list[ProbeCommand], rewards: list[float]) -> EnvEffect:
        """Return what happens; the lanes before one that fails have moved on, in vain."""
        trouble: EnvFailure | None = None
        done = []
        for lane, command in enumerate(commands):
            if self._has_ended[lane]:
                self.reset((lane,))
                done.append((0.0, False, False))
                continue
            if command is ProbeCommand.FAIL:
                return EnvFailure.LOST
            self.num_steps[lane] += 1
            trouble = EnvFailure.NON_CONFORMING if command in REJECTED else trouble
            ends = (command is ProbeCommand.TERMINATE, command is ProbeCommand.TRUNCATE)
            self._has_ended[lane] = any(ends)
            done.append((rewards[lane], *ends))
        reward, terminated, truncated = zip(*done, strict=True)
        return trouble or SimulatedStep(reward, terminated, truncated)


class Walk:
    """One session with random requests."""

    def __init__(self, chance: random.Random, seen: Counter[str]) -> None:
        self._chance = chance
        self._seen = seen
        self._reference = ReferenceSession(NUM_LANES)
        self._probes = Probes()
        self._deed: EnvEffect = None
        """Of the request that was made last, if it reaches the environment."""

    def requests(self) -> list[EnvRequest | MalformedRequest]:
        """Return some requests with their ids; they are sent in one go."""
        count = self._chance.randint(1, MAX_REQUESTS - 1)
        made = [self._request(str(number)) for number in range(count)]
        return [*made, Close(str(count), "done")]

    def judge(self, request: EnvRequest | MalformedRequest, frame: bytes) -> None:
        """Check the answer to the next request."""
        response = wire.parse_response(frame)
        self._seen[type(response).__name__] += 1
        reaches = self._reference.admits(request)
        deed = self._happens(request) if reaches else None
        self._reference.judge(request, response, deed)
        if isinstance(response, EnvFailed):
            self._seen[response.code.name] += 1
        self._judge_observation(response)

    def _request(self, request_id: str) -> EnvRequest | MalformedRequest:
        match self._chance.choices(range(6), (5, 20, 2, 1, 1, 1))[0]:
            case 0:
                return Reset(request_id, *self._reset_arguments())
            case 1:
                return Step(request_id, self._action())
            case 2:
                return Render(request_id)
            case 3:
                return Step(request_id, self._chance.randbytes(5))
            case 4:
                return Step(request_id, self._action(), env_indices=(0,))
        return MalformedRequest("", "nonsense")

    def _reset_arguments(self) -> tuple[tuple[int, ...], dict[str, object], int, tuple[int, ...]]:
        lanes = self._chance.choice(((), (), (), (0,), (1,), (1, 0), (0, 0), (2,), (-1,)))
        count = self._chance.choice((0, 0, len(lanes) or NUM_LANES, 1))
        command = self._chance.choice(
            (*[ProbeCommand.GO_ON] * 8, ProbeCommand.FAIL, ProbeCommand.OBSERVE_NAN)
        )
        seeds = tuple(self._chance.randrange(2**31) for _ in range(count))
        return seeds, {"command": int(command)}, 0, lanes

    def _action(self) -> bytes:
        lanes = [
            {
                **REST,
                "command": int(self._chance.choice(COMMANDS)),
                "box": np.array([self._chance.randrange(-4, 5) / 4, 0], np.float32),
            }
            for _ in range(NUM_LANES)
        ]
        return encode_batch(ACTION_SPACE, stack(ACTION_SPACE, lanes), NUM_LANES)

    def _happens(self, request: EnvRequest | MalformedRequest) -> EnvEffect:
        if isinstance(request, Reset):
            command = request.options["command"]
            if command == ProbeCommand.FAIL:
                return EnvFailure.LOST
            self._probes.reset(request.env_indices)
            return EnvFailure.NON_CONFORMING if command == ProbeCommand.OBSERVE_NAN else None
        if not isinstance(request, Step):
            return None
        if len(request.action) == 5:
            return EnvFailure.NON_CONFORMING
        columns = decode_batch(ACTION_SPACE, request.action, NUM_LANES)
        by_name = dict(zip((leaf.name for leaf in leaves(ACTION_SPACE)), columns, strict=True))
        commands = [ProbeCommand(int(number)) for number in by_name["command"]]
        rewards = [float(box) for box in np.asarray(by_name["box"])[:, 0]]
        return self._probes.step(commands, rewards)

    def _judge_observation(self, response: EnvResponse) -> None:
        if isinstance(response, (ResetDone, StepDone)):
            columns = decode_batch(OBSERVATION_SPACE, response.observation, NUM_LANES)
            counts = np.asarray(columns[STEPS_LEAF])[:, 0]
            assert counts.tolist() == self._probes.num_steps
        if isinstance(response, Rendered):
            has_frame = response.png is not None
            self._seen["frame" if has_frame else "no frame"] += 1


def _frame(request: EnvRequest | MalformedRequest) -> bytes:
    return NONSENSE if isinstance(request, MalformedRequest) else wire.pack_request(request)


@pytest.mark.parametrize(
    "num_sessions", [40, pytest.param(3000, marks=[pytest.mark.nightly, pytest.mark.timeout(3600)])]
)
def test_random_sessions_with_a_real_endpoint_are_as_the_text_says(num_sessions: int) -> None:
    seen: Counter[str] = Counter()
    with (
        EnvServer(PROBE, num_envs=NUM_LANES, max_sessions=1) as server,
        plain_channel(server.address) as channel,
    ):
        for seed in range(num_sessions):
            walk = Walk(random.Random(seed), seen)
            requests = walk.requests()
            with RawJoin(channel, ENV_JOIN) as stream:
                stream.send([_frame(request) for request in requests])
                for request in requests:
                    data = stream.receive()
                    assert data is not None, f"session {seed}: {request} was not answered"
                    walk.judge(request, data)
                assert stream.receive() is None

    for kind in ("ResetDone", "StepDone", "frame", "no frame", "NOT_READY", "CLOSED", "INTERNAL"):
        assert seen[kind] > num_sessions / 40, f"{kind} hardly ever happened"
    assert seen["Closed"] == num_sessions
