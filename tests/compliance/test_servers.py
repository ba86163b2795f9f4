"""Our servers hold every clause, with spaces of all kinds and under every policy."""

from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Any

import gymnasium
import numpy as np
import pytest
from gymnasium.spaces import Box, MultiBinary, MultiDiscrete, Space, Text

from rlmesh_ray import EnvServer, ModelServer
from rlmesh_ray.client.channel import ConnectOptions
from rlmesh_ray.client.model.remote_model import contract_of
from rlmesh_ray.compliance.checks import CLAUSES, Finding, Party, Verdict
from rlmesh_ray.compliance.subjects import EnvSubject, ModelSubject
from rlmesh_ray.compliance.suite import check_all
from rlmesh_ray.protocol.handshake import HandshakeRequest, HandshakeResponse
from rlmesh_ray.spaces.validation import ValidationMode
from rlmesh_ray.testing.envs import EchoEnv
from tests.compliance.conftest import PROBE, leaning
from tests.compliance.model_saboteurs import without_concurrency
from tests.compliance.tampering import Sabotage, TamperingServer


@dataclass(frozen=True)
class Hosted:
    """What an EnvServer shall serve."""

    env: Any
    num_envs: int
    validation: str = "warn"


def echo(space: Space[Any]) -> EchoEnv:
    return EchoEnv(Box(-1.0, 1.0, (3,), np.float32), space, max_length=40)


HOSTED = {
    "the probe": Hosted(PROBE, 2),
    "one lane of the probe, strict": Hosted(PROBE, 1, "strict"),
    "the probe, off": Hosted(PROBE, 3, "off"),
    "Discrete actions": Hosted("CartPole-v1", 2),
    "Box actions": Hosted(partial(echo, Box(-1.0, 1.0, (2,), np.float32)), 2),
    "MultiDiscrete actions": Hosted(partial(echo, MultiDiscrete([3, 4])), 2, "strict"),
    "MultiBinary actions": Hosted(partial(echo, MultiBinary(4)), 1),
    "Text actions": Hosted(partial(echo, Text(3)), 2),
}
# Each takes seconds; these give every clause a chance to hold.
SOON = ("the probe", "one lane of the probe, strict")


class KeepsTheOrder(Sabotage):
    """No saboteur: a model server that answers in the order of arrival, and says so."""

    def __init__(self, memory: dict[str, Any]) -> None:
        super().__init__(memory)
        self.asked: list[str] = []
        self.ready: dict[str, Any] = {}

    def answer(self, _offer: HandshakeRequest, answer: HandshakeResponse) -> HandshakeResponse:
        return without_concurrency(answer)

    def request(self, request: Any) -> Iterable[Any]:
        self.asked.append(request.request_id)
        return [request]

    def response(self, response: Any) -> Iterable[Any]:
        self.ready[response.request_id] = response
        while self.asked and self.asked[0] in self.ready:
            yield self.ready.pop(self.asked.pop(0))


@pytest.fixture(scope="module")
def env_findings() -> Iterator[Callable[[str], list[Finding]]]:
    """Yield what checks a server, once; two of ``SOON`` at a time, since much of it is waiting."""
    checks: dict[str, Future[list[Finding]]] = {}

    def check(name: str) -> list[Finding]:
        hosted = HOSTED[name]
        policy = ValidationMode(hosted.validation)
        with EnvServer(hosted.env, num_envs=hosted.num_envs, validation=policy.value) as server:
            subject = EnvSubject(ConnectOptions(server.address), policy, may_ask_shutdown=True)
            return list(check_all(subject))

    with ThreadPoolExecutor(2) as threads:

        def once(name: str) -> list[Finding]:
            for each in SOON if name in SOON else (name,):
                if each not in checks:
                    checks[each] = threads.submit(check, each)
            return checks[name].result()

        yield once


@pytest.fixture(scope="module")
def model_findings() -> dict[str, list[Finding]]:
    def findings_at(address: str) -> list[Finding]:
        return list(
            check_all(ModelSubject(ConnectOptions(address), contract, may_ask_shutdown=True))
        )

    contract = contract_of(gymnasium.make_vec("CartPole-v1", num_envs=2))
    with (
        ModelServer(leaning) as server,
        TamperingServer(server.address, "model", KeepsTheOrder) as orderly,
    ):
        return {
            "concurrent": findings_at(server.address),
            "in order": findings_at(orderly.address),
        }


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=[] if name in SOON else [pytest.mark.slow]) for name in HOSTED],
)
def test_an_env_server_breaks_no_clause(
    name: str, env_findings: Callable[[str], list[Finding]]
) -> None:
    assert not list(broken(env_findings(name)))


@pytest.mark.parametrize("name", ["concurrent", "in order"])
def test_a_model_server_breaks_no_clause(
    name: str, model_findings: dict[str, list[Finding]]
) -> None:
    assert not list(broken(model_findings[name]))


@pytest.mark.parametrize(
    "clause", [key for key in CLAUSES if CLAUSES[key].binds in (Party.ENV_SERVER, Party.SERVERS)]
)
def test_a_clause_is_seen_to_hold_at_an_env_server(
    clause: str, env_findings: Callable[[str], list[Finding]]
) -> None:
    assert Verdict.HOLDS in verdicts(clause, {name: env_findings(name) for name in SOON})


@pytest.mark.parametrize(
    "clause", [key for key in CLAUSES if CLAUSES[key].binds in (Party.MODEL_SERVER, Party.SERVERS)]
)
def test_a_clause_is_seen_to_hold_at_a_model_server(
    clause: str, model_findings: dict[str, list[Finding]]
) -> None:
    assert Verdict.HOLDS in verdicts(clause, model_findings)


def broken(findings: list[Finding]) -> Iterator[str]:
    for finding in findings:
        if finding.verdict is Verdict.BROKEN:
            yield f"{finding.clause}: {finding.message}"


def verdicts(clause: str, findings: dict[str, list[Finding]]) -> set[Verdict]:
    everything = [one for of_server in findings.values() for one in of_server]
    return {one.verdict for one in everything if one.clause == clause}
