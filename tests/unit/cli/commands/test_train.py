import re

import pytest

from rlmesh_ray.cli import local_ray
from rlmesh_ray.cli.main import main


@pytest.mark.parametrize(
    ("env", "cause"),
    [
        ("127.0.0.1", "is an address without a port"),
        ("localhost", "is an address without a port"),
        ("rlmesh://127.0.0.1", "is not an address; write HOST:PORT"),
        ("127.0.0.1:70000", "is above 65535"),
    ],
)
def test_an_address_that_cannot_be_one_is_refused_before_ray_is_started(
    env: str,
    cause: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(local_ray, "connected_ray", lambda *_, **__: pytest.fail("Ray was started"))

    assert main(["train", env]) == 2

    assert cause in re.sub(r"\s+", " ", capsys.readouterr().err)


def test_an_option_that_does_not_fit_a_running_endpoint_is_named_alone(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["train", "127.0.0.1:1", "--env-kwargs", "{}"]) == 2

    error = capsys.readouterr().err
    assert "--env-kwargs" in error
    assert "--num-envs" not in error
