from rlmesh_ray.server.batch_collector import LatencyGate


def noted(took_s: float, count: int, latency_gate: LatencyGate | None = None) -> LatencyGate:
    latency_gate = latency_gate or LatencyGate(only_computes=True)
    for _ in range(count):
        latency_gate.note(took_s)
    return latency_gate


def test_a_policy_must_prove_that_it_is_quick() -> None:
    assert not noted(0.0001, 99).is_fast
    assert noted(0.0001, 100).is_fast


def test_a_policy_that_may_wait_for_something_never_counts_as_quick() -> None:
    assert not noted(0.0001, 1000, LatencyGate(only_computes=False)).is_fast


def test_one_batch_that_was_interrupted_changes_nothing() -> None:
    latency_gate = noted(0.0001, 100)
    latency_gate.note(0.02)

    assert latency_gate.is_fast


def test_a_policy_that_becomes_slow_is_no_longer_quick_and_may_become_quick_again() -> None:
    latency_gate = noted(0.0001, 100)

    assert not noted(0.004, 100, latency_gate).is_fast
    assert noted(0.0001, 100, latency_gate).is_fast


def test_one_batch_that_took_for_ever_counts_for_a_long_time() -> None:
    latency_gate = noted(0.0001, 100)
    latency_gate.note(0.2)

    assert not noted(0.0001, 999, latency_gate).is_fast
    assert noted(0.0001, 1, latency_gate).is_fast
