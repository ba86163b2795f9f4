"""Most calls of the package's functions, and files that they cross, per step and per prediction.

``python -m benchmarks calls`` prints what they are, the same in every run. A limit is lowered when
its figure has become smaller, and never raised.
"""

from collections.abc import Iterable
from dataclasses import asdict

from benchmarks.calls.plan import Calls

LIMITS = {
    limit.case: limit
    for limit in (
        # case, client, its files, endpoint, worker, all files
        Calls("step, 1 lane, gRPC", 98, 18, 83, 55, 32),
        Calls("step, 1 lane, TCP", 67, 15, 0, 60, 23),
        Calls("step, 1 lane, shared memory", 64, 15, 0, 57, 23),
        Calls("step, 64 lanes, gRPC", 103, 17, 84, 56, 31),
        Calls("step, 64 lanes, TCP", 71, 15, 0, 61, 23),
        Calls("step, 64 lanes, shared memory", 68, 15, 0, 58, 23),
        Calls("prediction, 1 row", 72, 15, 99, None, 27),
        Calls("prediction, 32 rows", 72, 15, 100, None, 27),
        Calls("step of a runner, 8 lanes, gRPC", 150, 26),
        Calls("step of a runner, 8 lanes, TCP", 121, 23),
        Calls("step of a runner, 8 lanes, shared memory", 118, 23),
    )
}
FILES_OF_A_STEP = LIMITS["step of a runner, 8 lanes, gRPC"].client_files
"""From ``RLMeshEnvRunner.sample`` to the socket and back."""
FILES_OF_A_PREDICTION = LIMITS["prediction, 1 row"].files
"""From ``RemoteModel.predict`` to the policy and back."""


def above_the_limits(found: Iterable[Calls]) -> list[str]:
    """Return what is above its limit, in words."""
    return [
        f"{each.case}: {name} {figure} of {limit or 0} at most"
        for each in found
        for (name, figure), limit in zip(
            asdict(each).items(), asdict(LIMITS[each.case]).values(), strict=True
        )
        if isinstance(figure, int) and figure > (limit or 0)
    ]
