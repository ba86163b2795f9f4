"""Each clause's check fails against a server that breaks just this clause."""

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import gymnasium
import pytest

from rlmesh_ray import EnvServer, ModelServer
from rlmesh_ray.client.channel import ConnectOptions
from rlmesh_ray.client.model.remote_model import contract_of
from rlmesh_ray.compliance.checks import Verdict
from rlmesh_ray.compliance.subjects import EnvSubject, ModelSubject
from rlmesh_ray.compliance.suite import (
    ENV_CHECKS,
    MODEL_CHECKS,
    check_all,
    check_clause,
)
from rlmesh_ray.protocol.messages import Rendered, StepDone
from tests.compliance import env_saboteurs, model_saboteurs
from tests.compliance.tampering import Sabotage, TamperingServer

# A server that cannot be talked to properly breaks what others hold as well.
MOST_BROKEN = 15
LATE = (env_saboteurs.IgnoresDeadlinesOfResets,)
"""They are waited for."""
CONTRACT = contract_of(gymnasium.make_vec("CartPole-v1", num_envs=2))


def test_every_clause_has_a_saboteur() -> None:
    assert set(env_saboteurs.SABOTEURS) == set(ENV_CHECKS)
    assert set(model_saboteurs.SABOTEURS) == set(MODEL_CHECKS)


@pytest.mark.parametrize(
    ("clause", "sabotage"),
    [
        *env_saboteurs.SABOTEURS.items(),
        *(
            pytest.param(*other, marks=[pytest.mark.slow] if other[1] in LATE else [])
            for other in env_saboteurs.OTHERS
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else value.__name__,
)
def test_an_env_server_that_breaks_a_clause_is_found_out(
    clause: str, sabotage: type[Sabotage], probe: EnvServer
) -> None:
    with TamperingServer(probe.address, "env", sabotage) as server:
        finding = check_clause(
            EnvSubject(ConnectOptions(server.address), may_ask_shutdown=True), clause
        )

    assert finding.verdict is Verdict.BROKEN
    assert "makes no sense" not in finding.message


@pytest.mark.parametrize(
    ("clause", "sabotage"),
    [*model_saboteurs.SABOTEURS.items(), *model_saboteurs.OTHERS],
    ids=lambda value: value if isinstance(value, str) else value.__name__,
)
def test_a_model_server_that_breaks_a_clause_is_found_out(
    clause: str, sabotage: type[Sabotage], model: ModelServer
) -> None:
    with TamperingServer(model.address, "model", sabotage) as server:
        subject = ModelSubject(ConnectOptions(server.address), CONTRACT, may_ask_shutdown=True)
        finding = check_clause(subject, clause)

    assert finding.verdict is Verdict.BROKEN
    assert "makes no sense" not in finding.message


class NamesALaneThatIsNotThere(Sabotage):
    def response(self, response: Any) -> Iterable[Any]:
        if isinstance(response, StepDone):
            records = tuple(replace(one, env_index=99) for one in response.completed_episodes)
            response = replace(response, completed_episodes=records)
        return [response]


class AnswersStepsWithPictures(Sabotage):
    def response(self, response: Any) -> Iterable[Any]:
        return [Rendered(response.request_id, None) if isinstance(response, StepDone) else response]


class CutsItsHandshake(Sabotage):
    def answer_frame(self, frame: bytes) -> bytes:
        return frame[:-1] + b"\xff"


@pytest.mark.parametrize(
    "sabotage",
    [
        pytest.param(NamesALaneThatIsNotThere, marks=pytest.mark.nightly),
        pytest.param(AnswersStepsWithPictures, marks=pytest.mark.slow),
        CutsItsHandshake,
    ],
)
def test_a_server_that_makes_no_sense_is_reported_on_to_the_end(
    sabotage: type[Sabotage], probe: EnvServer
) -> None:
    with TamperingServer(probe.address, "env", sabotage) as server:
        findings = list(check_all(EnvSubject(ConnectOptions(server.address))))

    assert [finding.clause for finding in findings] == list(ENV_CHECKS)
    assert any(finding.verdict is Verdict.BROKEN for finding in findings)


@pytest.mark.nightly
# An endpoint that ends with its first session breaks all that is checked after it.
@pytest.mark.parametrize("clause", sorted({*env_saboteurs.SABOTEURS} - {"shutdown.distinct"}))
def test_a_server_that_breaks_one_clause_is_accused_of_few_others(
    clause: str, probe: EnvServer
) -> None:
    with TamperingServer(probe.address, "env", env_saboteurs.SABOTEURS[clause]) as server:
        findings = list(
            check_all(EnvSubject(ConnectOptions(server.address), may_ask_shutdown=True))
        )

    broken = {finding.clause for finding in findings if finding.verdict is Verdict.BROKEN}
    assert clause in broken
    assert len(broken) <= MOST_BROKEN
