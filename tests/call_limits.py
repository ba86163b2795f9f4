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
        Calls("step, 1 lane, gRPC", 111, 22, 139, 75, 45),
        Calls("step, 1 lane, TCP", 79, 17, 0, 103, 28),
        Calls("step, 1 lane, shared memory", 76, 17, 0, 100, 28),
        Calls("step, 64 lanes, gRPC", 116, 22, 140, 77, 45),
        Calls("step, 64 lanes, TCP", 83, 18, 0, 105, 29),
        Calls("step, 64 lanes, shared memory", 80, 18, 0, 102, 29),
        Calls("prediction, 1 row", 76, 19, 124, None, 34),
        Calls("prediction, 32 rows", 76, 19, 126, None, 34),
        Calls("step of a runner, 8 lanes, gRPC", 174, 36),
        Calls("step of a runner, 8 lanes, TCP", 146, 31),
        Calls("step of a runner, 8 lanes, shared memory", 143, 31),
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
