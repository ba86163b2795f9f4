"""Stepping, sampling and growth are measured for real, though not for long."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import typer

from benchmarks.cli.commands import AnyRival, Rival, _known, app
from benchmarks.sampling.plan import Rival as SamplingRival
from benchmarks.stepping.plan import Peer
from rlmesh_ray.cli.console import Console
from rlmesh_ray.errors import ConfigurationError

Capture = pytest.CaptureFixture[str]
VENVS = Path(__file__).parents[2] / ".venvs"
TINY = ["--quick", "--json", "--repetitions", "1", "--seconds", "0.1"]


def bench(*arguments: str, capsys: Capture) -> dict[str, Any]:
    """Return the last event, of a run that went well."""
    code = app([*arguments], prog_name="bench", standalone_mode=False, obj=Console(is_json=True))
    events = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert code == 0
    assert events[0]["event"] == "machine"
    result: dict[str, Any] = events[-1]
    assert result["event"] == "result"
    return result


@pytest.mark.slow
def test_stepping_is_measured(capsys: Capture) -> None:
    result = bench("stepping", *TINY, "--only", "evaluation", "--vs", "sync", capsys=capsys)

    (finding,) = result["findings"]
    assert finding["sides"]["rlmesh-ray"]["median"] > 0
    if sys.platform == "linux":
        assert finding["sides"]["rlmesh-ray"]["cpu_us"]["median"] > 0
    assert finding["comparisons"] == {}


@pytest.mark.nightly
@pytest.mark.timeout(300)
def test_every_row_of_stepping_is_measured_with_all_peers(capsys: Capture) -> None:
    names = ("released", "dm_env_rpc", "simulators")
    python = {name: VENVS / name / "bin" / "python" for name in names}
    for name, path in python.items():
        assert path.exists(), f"run `make .venvs/{name}/.ready` first (`make nightly` does)"

    result = bench(
        "stepping",
        *TINY,
        *(
            "--seconds",
            "0.3",
        ),  # beside another test, single steps may take longer than the tiny time
        *("--released-python", str(python["released"])),
        *("--dm-env-rpc-python", str(python["dm_env_rpc"])),
        capsys=capsys,
    )

    compared = [set(finding["comparisons"]) for finding in result["findings"]]
    in_process, released = {"/ gym sync", "/ gym async"}, {"/ rlmesh 0.1.0"}
    grpc = {"/ gRPC alone"}
    assert compared == [
        *[in_process | grpc] * 4,
        *[released | grpc] * 5,
        in_process,
        *[{"/ EnvPool"}] * 2,
        {"/ lockstep", "/ limit"},
        {"/ dm_env_rpc"},
        {"/ no-op server"},
        {"/ stock client, 1 lane"},
    ]
    assert sum(finding["goal"] is not None for finding in result["findings"]) == 11


@pytest.mark.nightly
@pytest.mark.timeout(300)
def test_sampling_is_measured(capsys: Capture) -> None:
    options = ["--only", "cartpole-8", "--inference", "compiled", "--vs", "bare"]

    result = bench("sampling", *TINY, *options, capsys=capsys)

    assert [each["case"] for each in result["findings"]] == [
        "cartpole-8, compiled, against no policy",
        "cartpole-8, compiled in a shared worker, against no policy",
    ]
    assert all(
        ratio["median"] > 0 for each in result["findings"] for ratio in each["comparisons"].values()
    )
    assert [each["torch_reason"] for each in result["inference"]] == [None, None]


@pytest.mark.nightly
@pytest.mark.timeout(300)
def test_a_runner_is_profiled(capsys: Capture) -> None:
    options = ["--json", "--seconds", "0.1", "--inference", "torch"]

    (profile,) = bench("profile", *options, capsys=capsys)["profiles"]

    assert len(profile["own_time"]) == 20
    assert profile["spans_us"]["forward pass"][1] > 0
    assert "inference=" in profile["torch_reason"]


@pytest.mark.nightly
@pytest.mark.timeout(300)
def test_growth_is_measured_and_drawn(capsys: Capture, tmp_path: Path) -> None:
    plot = tmp_path / "growth.png"

    result = bench("growth", *TINY, "--out", str(plot), capsys=capsys)

    assert result["plot"] == str(plot)
    assert plot.read_bytes().startswith(b"\x89PNG")
    cases = [finding["case"] for finding in result["findings"]]
    assert cases[0] == "1 lane"
    assert cases[-1] == "1,048,576 bytes"


@pytest.mark.ray
@pytest.mark.parametrize(
    ("options", "cause"),
    [
        (["--vs", "torchrl"], r"no torchrl: .*make \.venvs/trainers/\.ready"),
        (["--only", "halfcheetah-64"], "no mujoco"),
    ],
)
def test_what_sampling_lacks_is_said_first(options: list[str], cause: str, capsys: Capture) -> None:
    with pytest.raises(ConfigurationError, match=cause):
        bench("sampling", *options, capsys=capsys)
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize("subject", [["stepping"], pytest.param([], marks=pytest.mark.ray)])
def test_a_peer_that_is_missing_is_said_first(
    subject: list[str], capsys: Capture, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)

    with pytest.raises(ConfigurationError, match=r"make \.venvs/released/\.ready"):
        bench(*subject, "--vs", "released", capsys=capsys)
    assert capsys.readouterr().out == ""


def test_everybody_is_known_to_some_subject() -> None:
    subjects = (Peer, SamplingRival, Rival)

    named = {each.value for kind in subjects for each in _known(kind, AnyRival) or ()}

    known = {each for kind in subjects for each in kind}
    assert named == {each.value for each in AnyRival} == known


@pytest.mark.ray
def test_an_unknown_inference_is_refused(capsys: Capture) -> None:
    with pytest.raises(typer.BadParameter, match="'jax' is not one of auto, torch, compiled"):
        bench("sampling", "--inference", "auto,jax", capsys=capsys)


def test_a_peer_of_another_subject_is_refused(capsys: Capture) -> None:
    with pytest.raises(typer.BadParameter, match="noop"):
        bench("stepping", "--vs", "noop", capsys=capsys)
