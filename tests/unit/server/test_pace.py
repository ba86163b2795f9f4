from rlmesh_ray.server.pace import Pace


def noted(took_s: float, count: int, pace: Pace | None = None) -> Pace:
    pace = pace or Pace(only_computes=True)
    for _ in range(count):
        pace.note(took_s)
    return pace


def test_a_policy_must_prove_that_it_is_quick() -> None:
    assert not noted(0.0001, 99).is_quick
    assert noted(0.0001, 100).is_quick


def test_a_policy_that_may_wait_for_something_never_counts_as_quick() -> None:
    assert not noted(0.0001, 1000, Pace(only_computes=False)).is_quick


def test_one_batch_that_was_interrupted_changes_nothing() -> None:
    pace = noted(0.0001, 100)
    pace.note(0.02)

    assert pace.is_quick


def test_a_policy_that_becomes_slow_is_no_longer_quick_and_may_become_quick_again() -> None:
    pace = noted(0.0001, 100)

    assert not noted(0.004, 100, pace).is_quick
    assert noted(0.0001, 100, pace).is_quick


def test_one_batch_that_took_for_ever_counts_for_a_long_time() -> None:
    pace = noted(0.0001, 100)
    pace.note(0.2)

    assert not noted(0.0001, 999, pace).is_quick
    assert noted(0.0001, 1, pace).is_quick
