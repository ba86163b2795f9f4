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
        Calls("step, 1 lane, gRPC", 53, 13, 59, 40, 25),
        Calls("step, 1 lane, TCP", 33, 10, 0, 39, 16),
        Calls("step, 1 lane, shared memory", 33, 10, 0, 39, 16),
        Calls("step, 64 lanes, gRPC", 60, 14, 59, 40, 26),
        Calls("step, 64 lanes, TCP", 35, 11, 0, 39, 17),
        Calls("step, 64 lanes, shared memory", 35, 11, 0, 39, 17),
        Calls("prediction, 1 row", 47, 12, 67, None, 21),
        Calls("prediction, 32 rows", 47, 12, 67, None, 21),
        Calls("step of a runner, 8 lanes, gRPC", 114, 22),
        Calls("step of a runner, 8 lanes, TCP", 95, 19),
        Calls("step of a runner, 8 lanes, shared memory", 95, 19),
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
