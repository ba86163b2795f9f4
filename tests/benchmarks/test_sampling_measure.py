from benchmarks.processes import Reading
from benchmarks.record import Record
from benchmarks.sampling.measure import WORKLOAD, findings
from benchmarks.sampling.plan import Rival, SamplingPlan


def test_each_rival_has_a_line_and_a_goal_of_its_own() -> None:
    record = Record(WORKLOAD, lambda _: None)
    for side, speed in (("rlmesh-ray", 90.0), ("RLlib", 20.0), ("no policy", 180.0)):
        record.add("64 lanes", side, 0, speed, "env-steps/s", Reading(speed, (), (), 0, (1,), 0))

    rllib, bare = findings(record, SamplingPlan())

    assert (rllib.comparisons["/ RLlib"].median, rllib.is_met) == (4.5, True)
    assert (bare.comparisons["/ no policy"].median, bare.is_met) == (0.5, False)
    assert len(findings(record, SamplingPlan(rivals=[Rival.BARE]))) == 1
