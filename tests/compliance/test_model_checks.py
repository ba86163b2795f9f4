"""What the checks of models and of establishment must not take for broken, and what they see."""

import math
from dataclasses import replace
from typing import Any

import grpc
import gymnasium
import numpy as np
import pytest
from gymnasium import spaces

from rlmesh_ray import EnvServer, ModelServer
from rlmesh_ray.client.channel import ConnectOptions
from rlmesh_ray.client.model.remote_model import contract_of
from rlmesh_ray.compliance.checks import Finding, Verdict
from rlmesh_ray.compliance.model_checks import rows, varied
from rlmesh_ray.compliance.subjects import EnvSubject, ModelSubject
from rlmesh_ray.compliance.suite import check_all, check_clause
from rlmesh_ray.protocol.handshake import HandshakeRequest, HandshakeResponse
from rlmesh_ray.spaces.batch import leaves
from rlmesh_ray.spaces.contract import EnvContract
from rlmesh_ray.spaces.gym_conversion import from_gymnasium
from rlmesh_ray.spaces.validation import Checker, ValidationMode
from tests.compliance.conftest import zeros
from tests.compliance.model_saboteurs import HasOneContractForAllRoutes, InsistsOnItsIds
from tests.compliance.tampering import Sabotage, TamperingServer

CONTRACT = contract_of(gymnasium.make_vec("CartPole-v1", num_envs=2))
FOR_ONE_LANE = replace(CONTRACT, num_envs=1)


# --- models ----------------------------------------------------------------------------


@pytest.mark.parametrize("contract", [CONTRACT, FOR_ONE_LANE], ids=["two lanes", "one lane"])
def test_a_server_that_insists_on_its_ids_breaks_nothing(
    contract: EnvContract, model: ModelServer
) -> None:
    with TamperingServer(model.address, "model", InsistsOnItsIds) as server:
        findings = list(check_all(ModelSubject(ConnectOptions(server.address), contract)))

    assert verdict(findings, "predict.context") is Verdict.HOLDS
    assert not [finding for finding in findings if finding.verdict is Verdict.BROKEN]


def test_one_contract_for_all_routes_is_found_out_where_the_environment_has_one_lane(
    model: ModelServer,
) -> None:
    with TamperingServer(model.address, "model", HasOneContractForAllRoutes) as server:
        subject = ModelSubject(ConnectOptions(server.address), FOR_ONE_LANE)
        finding = check_clause(subject, "route.contract-fixed")

    assert finding.verdict is Verdict.BROKEN


TOSSES = np.random.default_rng(0)


def coin(observations: Any) -> Any:
    return TOSSES.integers(0, 2, len(observations))


@pytest.mark.parametrize(
    ("policy", "reason"), [(zeros, "one action for"), (coin, "does not repeat")]
)
def test_the_order_of_actions_is_not_seen_where_the_policy_does_not_show_it(
    policy: Any, reason: str
) -> None:
    with ModelServer(policy) as server:
        finding = check_clause(
            ModelSubject(ConnectOptions(server.address), CONTRACT), "predict.actions"
        )

    assert finding.verdict is Verdict.NOT_OBSERVABLE
    assert reason in finding.message


def test_a_policy_of_floats_shows_the_order_of_its_actions() -> None:
    contract = contract_of(gymnasium.make_vec("Pendulum-v1", num_envs=2))
    with ModelServer(lambda observations: observations[:, :1]) as server:
        finding = check_clause(
            ModelSubject(ConnectOptions(server.address), contract), "predict.actions"
        )

    assert finding.verdict is Verdict.HOLDS


def test_a_policy_that_cannot_act_is_found_out_once_and_breaks_nothing() -> None:
    contract = contract_of(gymnasium.make_vec("Pendulum-v1", num_envs=2))
    with ModelServer(zeros) as server:
        findings = list(check_all(ModelSubject(ConnectOptions(server.address), contract)))
        num_predictions = server.statistics().batches

    assert not [finding for finding in findings if finding.verdict is Verdict.BROKEN]
    assert verdict(findings, "model.establishment") is Verdict.HOLDS
    (reason,) = {one.message for one in findings if "cannot act" in one.message}
    assert "--env" in reason
    assert num_predictions == 1


def test_nothing_is_asked_of_a_model_after_an_accepted_shutdown() -> None:
    with ModelServer(zeros, allow_shutdown=True) as server:
        subject = ModelSubject(ConnectOptions(server.address), CONTRACT, may_ask_shutdown=True)
        findings = [
            check_clause(subject, clause) for clause in ("shutdown.refusal", "model.close-drains")
        ]

    assert [finding.verdict for finding in findings] == [Verdict.NOT_OBSERVABLE] * 2
    assert "accepted Shutdown" in findings[1].message


def verdict(findings: list[Finding], clause: str) -> Verdict:
    (found,) = (finding.verdict for finding in findings if finding.clause == clause)
    return found


# --- observations ----------------------------------------------------------------------

SPACES: list[Any] = [
    spaces.Box(-np.inf, np.inf, (3,), np.float32),
    spaces.Box(np.array([5.0, -2.0]), np.array([5.5, -1.0]), dtype=np.float64),
    spaces.Box(0, 255, (4, 4, 3), np.uint8),
    spaces.Box(-(2**63), 2**63 - 1, (2,), np.int64),
    spaces.Box(0, 1, (5,), np.dtype(bool)),  # type: ignore[arg-type]
    spaces.Discrete(3, start=-1),
    spaces.MultiDiscrete(np.array([[2, 3], [4, 5]])),
    spaces.Dict(
        pair=spaces.Tuple((spaces.MultiBinary(4), spaces.Text(5, min_length=2, charset="ab")))
    ),
]


@pytest.mark.parametrize("space", SPACES, ids=str)
def test_observations_for_checks_are_within_their_space_and_differ(space: Any) -> None:
    spec = from_gymnasium(space)

    columns = varied(spec, 32, seed=0)

    assert Checker(leaves(spec), ValidationMode.STRICT).check(columns) == []
    assert any(
        not np.array_equal(rows([column], 0)[0], rows([column], row)[0])
        for column in columns
        for row in range(1, 32)
    )


def test_texts_of_observations_for_checks_are_short_where_the_space_allows_long_ones() -> None:
    (texts,) = varied(from_gymnasium(spaces.Text(10_000)), 32, seed=0)

    assert 1 <= min(map(len, texts)) < max(map(len, texts)) <= 9


# --- establishment ---------------------------------------------------------------------


class HasNaNInItsMetadata(Sabotage):
    def answer(self, _offer: HandshakeRequest, answer: HandshakeResponse) -> HandshakeResponse:
        contract = answer.contract
        if isinstance(contract, EnvContract):
            metadata = {"one": {"limit": math.nan}, "other": [math.nan, 1]}
            answer = replace(answer, contract=replace(contract, metadata=metadata))
        return answer


class ListsItsEditionsInRefusalsOnly(Sabotage):
    def answer(self, _offer: HandshakeRequest, answer: HandshakeResponse) -> HandshakeResponse:
        return replace(answer, editions=()) if answer.compatible else answer


@pytest.mark.parametrize(
    ("clause", "sabotage"),
    [
        ("session.capabilities", HasNaNInItsMetadata),
        ("session.contract-fixed", HasNaNInItsMetadata),
        ("session.highest-edition", ListsItsEditionsInRefusalsOnly),
    ],
)
def test_what_the_text_allows_is_not_broken(clause: str, sabotage: Any) -> None:
    with (
        EnvServer("CartPole-v1") as env,
        TamperingServer(env.address, "env", sabotage) as server,
    ):
        finding = check_clause(EnvSubject(ConnectOptions(server.address)), clause)

    assert finding.verdict is Verdict.HOLDS, finding.message


class SelectsANewerEdition(Sabotage):
    def answer(self, offer: HandshakeRequest, answer: HandshakeResponse) -> HandshakeResponse:
        newer = "2030.01"
        if newer not in offer.editions or not answer.compatible:
            return replace(answer, editions=(*answer.editions, newer))
        return replace(
            answer, selected_edition=newer, spec_sha256="", status="sealed", editions=("2026.06",)
        )

    def offer(self, offer: HandshakeRequest) -> HandshakeRequest:
        is_pinned = "2030.01" in offer.editions and offer.spec_sha256
        # It knows another text by the checksum of its newest edition.
        return replace(offer, spec_sha256="0" * 64) if is_pinned else offer


def test_a_server_with_a_newer_edition_is_not_asked_for_the_checksum_of_ours(
    model: ModelServer,
) -> None:
    with TamperingServer(model.address, "model", SelectsANewerEdition) as server:
        subject = ModelSubject(ConnectOptions(server.address), CONTRACT)
        finding = check_clause(subject, "session.highest-edition")

    assert finding.verdict is Verdict.HOLDS, finding.message


class DeniesShutdown(TamperingServer):
    code = grpc.StatusCode.PERMISSION_DENIED

    def _shutdown(self, _data: bytes, context: grpc.ServicerContext) -> bytes:
        context.abort(self.code, "not here")
        raise AssertionError


class HasNoShutdown(DeniesShutdown):
    code = grpc.StatusCode.UNIMPLEMENTED


class FailsAtShutdown(DeniesShutdown):
    code = grpc.StatusCode.INTERNAL


@pytest.mark.parametrize(
    ("server_class", "expected"),
    [
        (DeniesShutdown, Verdict.HOLDS),
        (HasNoShutdown, Verdict.HOLDS),
        (FailsAtShutdown, Verdict.BROKEN),
    ],
)
def test_a_status_that_says_no_to_shutdown_is_a_refusal(
    server_class: type[TamperingServer], expected: Verdict, model: ModelServer
) -> None:
    with server_class(model.address, "model") as server:
        subject = ModelSubject(ConnectOptions(server.address), CONTRACT, may_ask_shutdown=True)
        finding = check_clause(subject, "shutdown.refusal")

    assert finding.verdict is expected, finding.message


class SaysNothingWhenItRefusesShutdown(Sabotage):
    def shutdown(self, response: Any) -> Any:
        return replace(response, message="")


def test_a_refused_shutdown_needs_no_message(model: ModelServer) -> None:
    with TamperingServer(model.address, "model", SaysNothingWhenItRefusesShutdown) as server:
        subject = ModelSubject(ConnectOptions(server.address), CONTRACT, may_ask_shutdown=True)

        assert check_clause(subject, "shutdown.refusal").verdict is Verdict.HOLDS
