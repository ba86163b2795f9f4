"""``rlmesh-ray bench ENV`` measures an environment by itself and through an endpoint."""

import json

import pytest

from rlmesh_ray.cli.main import main

Capture = pytest.CaptureFixture[str]
QUICK = ["--num-envs", "2", "--seconds", "0.05", "--repetitions", "1", "--json"]
ENDPOINT = ["by itself", "shared memory", "TCP", "gRPC messages"]


def events_of(capsys: Capture) -> list[dict[str, object]]:
    return [json.loads(line) for line in capsys.readouterr().out.splitlines()]


def test_an_environment_is_measured_by_itself_and_over_each_transport(
    capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    # As importlib finds nothing in the base install.
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)

    assert main(["bench", "CartPole-v1", *QUICK]) == 0

    *rates, result = events_of(capsys)
    assert [rate["name"] for rate in rates] == ENDPOINT
    for rate in rates:
        assert isinstance(rate["steps_per_s"], float)
        assert rate["steps_per_s"] > 0
        assert rate["steps_per_s_all"] == [rate["steps_per_s"]]
    assert result["event"] == "result"
    assert "limits" in str(result["limit"])


@pytest.mark.slow
def test_an_environment_is_measured_under_a_runner(capsys: Capture) -> None:
    assert main(["bench", "CartPole-v1", *QUICK]) == 0

    rates = [event["name"] for event in events_of(capsys) if event["event"] == "rate"]
    assert rates == [*ENDPOINT, "RLMeshEnvRunner"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["NoSuchEnv-v0"], "module:Env-v0 for one that a package registers"),
        (
            ["no_such_module:make"],
            "or put its folder on PYTHONPATH",
        ),
        (["127.0.0.1:50051"], "is an address; bench starts its own endpoint"),
        (["CartPole-v1", "--env-kwargs", "[]"], "JSON, but not an object"),
        (["CartPole-v1", "--seconds", "0"], "0.0 must be a finite number of seconds above 0"),
    ],
)
def test_what_cannot_be_measured_is_refused_with_the_cause(
    arguments: list[str], message: str, capsys: Capture
) -> None:
    assert main(["bench", *arguments]) in {1, 2}

    assert message in capsys.readouterr().err
