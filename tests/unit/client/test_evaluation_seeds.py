import pytest

from rlmesh_ray.cli.main import main
from rlmesh_ray.client.evaluation import check_seeds, evaluate
from rlmesh_ray.errors import ConfigurationError


@pytest.mark.parametrize(
    ("episodes", "seed"), [(1, None), (1, 0), (1, 2**63 - 1), (10, 2**63 - 10)]
)
def test_what_the_wire_can_hold_is_a_seed(episodes: int, seed: int | None) -> None:
    check_seeds(episodes, seed)


@pytest.mark.parametrize(
    ("episodes", "seed", "message"),
    [
        (0, None, "episodes=0 must be at least 1"),
        (20, -4, f"seed=-4 .* -4 to 15; give one from 0 to {2**63 - 20}, or none"),
        (2, 2**63 - 1, f"to {2**63}; give one from 0 to {2**63 - 2}"),
    ],
)
def test_other_seeds_are_refused_before_anything_is_dialed(
    episodes: int, seed: int | None, message: str
) -> None:
    from rlmesh_ray.actors import evaluate_on_ray  # Ray takes its time to import

    for run in (evaluate, evaluate_on_ray):
        with pytest.raises(ConfigurationError, match=message):
            run("nobody:1", "nobody:2", episodes=episodes, seed=seed)


@pytest.mark.parametrize("seed", ["-4", str(2**63)])
def test_on_the_command_line_they_are_wrong_usage(
    seed: str, capsys: pytest.CaptureFixture[str]
) -> None:
    code = main(["evaluate", "--env", "CartPole-v1", "--model", "no:where", "--seed", seed])

    assert code == 2
    assert "--seed: seed=" in (error := capsys.readouterr().err)
    assert "give one from 0 to" in error
