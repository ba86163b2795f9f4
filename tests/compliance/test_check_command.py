"""``rlmesh-ray check``, as people and programs see it."""

import itertools
import json
import socket
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import grpc
import pytest

from rlmesh_ray import EnvServer, ModelServer
from rlmesh_ray.cli.main import main
from rlmesh_ray.compliance import suite
from rlmesh_ray.compliance.checks import Finding
from rlmesh_ray.compliance.subjects import ModelSubject
from rlmesh_ray.compliance.suite import ENV_CHECKS, MODEL_CHECKS, check_all
from rlmesh_ray.protocol.handshake import HandshakeRequest, HandshakeResponse
from tests.compliance.conftest import zeros
from tests.compliance.env_saboteurs import KeepsTheIdOfAnEndedEpisode, TakesAnyText
from tests.compliance.tampering import Sabotage, TamperingServer


def check(capsys: pytest.CaptureFixture[str], *arguments: str, code: int) -> list[dict[str, Any]]:
    """Run the command; return its events."""
    assert main(["check", *arguments, "--json"]) == code
    return [json.loads(line) for line in capsys.readouterr().out.splitlines()]


@pytest.fixture(scope="module")
def cartpole() -> Any:
    with EnvServer("CartPole-v1", num_envs=2) as server:
        yield server


def test_every_clause_of_an_env_endpoint_is_reported(
    cartpole: EnvServer, capsys: pytest.CaptureFixture[str]
) -> None:
    *findings, result = check(capsys, cartpole.address, code=0)

    assert {finding["clause"] for finding in findings} == set(ENV_CHECKS)
    assert result["event"] == "result"
    assert result["broken"] == []
    assert result["holds"] + result["not_observable"] == len(ENV_CHECKS)
    assert result["holds"] > len(ENV_CHECKS) / 2


def test_a_model_is_checked_in_an_environment_that_fits(
    model: ModelServer, capsys: pytest.CaptureFixture[str]
) -> None:
    *findings, result = check(capsys, model.address, "--env", "CartPole-v1", code=0)

    assert {finding["clause"] for finding in findings} == set(MODEL_CHECKS)
    assert result["broken"] == []


def test_a_broken_clause_is_named_with_what_was_seen(
    cartpole: EnvServer, capsys: pytest.CaptureFixture[str]
) -> None:
    with TamperingServer(cartpole.address, "env", KeepsTheIdOfAnEndedEpisode) as server:
        events = check(capsys, server.address, code=3)

    assert events[-1]["broken"] == ["episodes.empty-id"]
    (finding,) = (event for event in events if event.get("verdict") == "broken")
    assert "at its end" in finding["message"]


def test_people_see_the_clauses_in_the_order_of_the_text_and_a_shared_reason_once(
    cartpole: EnvServer, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["check", cartpole.address]) == 0

    shown = capsys.readouterr().out
    sections = ("Session establishment", "Ordering", "Episode accounting", "Range conformance")
    places = [shown.index(section) for section in sections]
    assert places == sorted(places)
    assert "0 broken" in shown
    assert shown.count("needs the probe environment") == 1
    assert "serve-env rlmesh_ray.testing.probe_env:RLMeshProbe-v0" in shown


def test_an_address_where_nothing_listens_is_an_error_and_no_finding(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))  # bound, but not listening
        (event,) = check(capsys, f"127.0.0.1:{taken.getsockname()[1]}", code=1)

    assert event["event"] == "error"
    assert "nothing answers there" in event["message"]


def test_what_is_broken_stands_right_above_the_sum(
    cartpole: EnvServer, capsys: pytest.CaptureFixture[str]
) -> None:
    with TamperingServer(cartpole.address, "env", TakesAnyText) as server:
        assert main(["check", server.address]) == 3

    *_, heading, clause, says, seen, _, result = capsys.readouterr().out.splitlines()
    assert heading == "Broken:"
    assert clause == "  ✗ env: wire.pin"
    assert says.strip()
    assert "another text of the edition is compatible" in seen
    assert "1 broken" in result


def verdicts(events: list[dict[str, Any]]) -> dict[str, str]:
    return {event["clause"]: event["verdict"] for event in events if event["event"] == "finding"}


def test_what_may_end_an_endpoint_is_sent_only_on_request(
    model: ModelServer, capsys: pytest.CaptureFixture[str]
) -> None:
    usual = check(capsys, model.address, code=0)
    asked = check(capsys, model.address, "--may-end-endpoint", code=0)

    for clause in ("model.close-drains", "shutdown.refusal"):
        assert verdicts(usual)[clause] == "not observable"
        assert verdicts(asked)[clause] == "holds"
        (message,) = (one["message"] for one in usual if one.get("clause") == clause)
        assert "--may-end-endpoint" in message


def test_a_policy_for_another_environment_is_no_fault_of_the_server(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with ModelServer(zeros) as server:
        events = check(capsys, server.address, "--env", "Pendulum-v1", code=1)

    assert events[-1]["broken"] == []
    reasons = {one["message"] for one in events if "cannot act" in one.get("message", "")}
    (reason,) = reasons
    assert "cannot act in Pendulum-v1; name an environment" in reason
    assert "--env" in reason
    assert verdicts(events)["predict.context"] == "not observable"


class RefusesEverybody(Sabotage):
    def answer(self, _offer: HandshakeRequest, answer: HandshakeResponse) -> HandshakeResponse:
        return HandshakeResponse(
            False, answer.generation, "", "9", ("2031.01",), error_message="too old"
        )


def test_an_environment_that_refuses_the_handshake_is_an_error_that_names_it(
    cartpole: EnvServer, model: ModelServer, capsys: pytest.CaptureFixture[str]
) -> None:
    with TamperingServer(cartpole.address, "env", RefusesEverybody) as env:
        *_, event = check(capsys, model.address, "--env", env.address, code=1)

    assert event["type"] == "HandshakeRefusedError"
    assert event["message"].startswith(f"{env.address}: ")
    assert "too old" in event["message"]


def test_an_environment_of_a_model_is_dialed_with_the_same_token(
    capsys: pytest.CaptureFixture[str], tmp_path: Any
) -> None:
    file = tmp_path / "token"
    file.write_text("secret")
    file.chmod(0o600)
    with (
        EnvServer("CartPole-v1", token="secret") as env,
        ModelServer(zeros, token="secret") as model,
    ):
        arguments = ["--env", env.address, "--token-file", str(file)]
        *_, result = check(capsys, model.address, *arguments, code=0)

    assert result["broken"] == []


@pytest.fixture
def always_invalid() -> Iterator[str]:
    """Serve an EnvService whose every call ends with INVALID_ARGUMENT; yield its address."""

    class Handlers(grpc.GenericRpcHandler):
        def service(self, details: grpc.HandlerCallDetails) -> Any:
            if "EnvService" not in details.method:
                return None
            return grpc.unary_unary_rpc_method_handler(refuse)

    def refuse(_data: bytes, context: grpc.ServicerContext) -> bytes:
        context.abort(grpc.StatusCode.INVALID_ARGUMENT, "no")
        raise AssertionError

    server = grpc.server(ThreadPoolExecutor(2))
    server.add_generic_rpc_handlers((Handlers(),))
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    yield f"127.0.0.1:{port}"
    server.stop(None).wait(10.0)


def test_a_service_that_fails_every_call_is_there_and_breaks_the_clauses(
    always_invalid: str, capsys: pytest.CaptureFixture[str]
) -> None:
    *findings, result = check(capsys, always_invalid, code=3)

    assert {finding["service"] for finding in findings} == {"env"}
    assert "session.generation" in result["broken"]


class AnswersNothing(Sabotage):
    def request(self, _request: Any) -> Iterable[Any]:
        return []


def test_a_server_that_does_not_answer_is_waited_for_as_long_as_is_said(
    model: ModelServer, capsys: pytest.CaptureFixture[str]
) -> None:
    with TamperingServer(model.address, "model", AnswersNothing) as server:
        events = check(capsys, server.address, "--answer-timeout", "0.1", code=3)

    (finding,) = (event for event in events if event.get("clause") == "predict.context")
    assert "no answer within 0.1 s" in finding["message"]


def test_what_was_found_before_an_interruption_is_shown(
    model: ModelServer, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(subject: ModelSubject) -> Iterator[Finding]:
        yield from itertools.islice(check_all(subject), 5)
        raise KeyboardInterrupt  # as Ctrl-C does, but always in the same place

    monkeypatch.setattr(suite, "check_all", interrupted)

    *_, result, end = check(capsys, model.address, code=130)

    assert end["event"] == "interrupted"
    assert result["event"] == "result"
    assert result["holds"] == 5
    assert result["unchecked"] == list(MODEL_CHECKS)[5:]
