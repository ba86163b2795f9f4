"""``python -m benchmarks gpu``, on the CPU; and without the device that it is for."""

import json

import pytest
import torch

from benchmarks.cli.commands import app
from rlmesh_ray.cli.console import Console
from rlmesh_ray.errors import ConfigurationError

Capture = pytest.CaptureFixture[str]
TINY = ["--rows", "1", "--rows", "4", "--clients", "2", "--repetitions", "1", "--seconds", "0.1"]


def bench(*arguments: str) -> int:
    console = Console(is_json="--json" in arguments)
    words = ["gpu", *arguments]
    code: int = app(words, prog_name="bench", standalone_mode=False, obj=console)
    return code


@pytest.mark.slow
@pytest.mark.parametrize("network", ["mlp", pytest.param("cnn", marks=pytest.mark.nightly)])
def test_batches_are_compared_with_torch_and_clients_are_measured(
    network: str, capsys: Capture
) -> None:
    code = bench("--device", "cpu", "--network", network, "--no-compile", "--json", *TINY)

    events = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    result = events[-1]
    assert (code, result["event"], result["is_complete"]) == (0, "result", True)
    found = {(each["workload"], each["case"], each["unit"]): each for each in result["findings"]}
    alone = found[f"batches in the process, {network}", "4 rows", "rows/s"]
    assert set(alone["sides"]) == {"torch", "policy", "buckets"}
    ours, theirs = (alone["sides"][name]["values"][0] for name in ("policy", "torch"))
    assert alone["comparisons"]["policy / torch"]["values"] == [ours / theirs]
    served = found[f"served batches, {network}", "1 row", "rows/s"]
    assert list(served["comparisons"]) == ["served / torch"]
    for unit in ("messages/s", "p50, ms", "p99, ms"):
        clients = found[f"clients, {network}", "2 clients", unit]
        assert clients["sides"]["cpu"]["median"] > 0
    assert result["settings"]["device_name"]


@pytest.mark.nightly
def test_compiled_networks_are_measured_too(capsys: Capture) -> None:
    assert bench("--device", "cpu", "--network", "mlp", "--json", *TINY) == 0

    result = json.loads(capsys.readouterr().out.splitlines()[-1])
    compared = {name for each in result["findings"] for name in each["comparisons"]}
    assert {
        "compiled / torch",
        "compiled, buckets / torch",
        "served, compiled, buckets / torch",
        "cpu, compiled, buckets / cpu",
    } <= compared


def test_a_device_that_is_not_there_is_refused_with_a_remedy() -> None:
    if torch.cuda.is_available():
        pytest.skip("a GPU is there")

    with pytest.raises(ConfigurationError, match=r"device=cuda is not available.*install a torch"):
        bench()
