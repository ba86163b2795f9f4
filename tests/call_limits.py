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
        Calls("step, 1 lane, gRPC", 100, 19, 97, 57, 34),
        Calls("step, 1 lane, TCP", 68, 16, 0, 63, 24),
        Calls("step, 1 lane, shared memory", 65, 16, 0, 60, 24),
        Calls("step, 64 lanes, gRPC", 105, 19, 98, 59, 34),
        Calls("step, 64 lanes, TCP", 72, 17, 0, 65, 25),
        Calls("step, 64 lanes, shared memory", 69, 17, 0, 62, 25),
        Calls("prediction, 1 row", 76, 16, 109, None, 29),
        Calls("prediction, 32 rows", 76, 16, 111, None, 29),
        Calls("step of a runner, 8 lanes, gRPC", 160, 32),
        Calls("step of a runner, 8 lanes, TCP", 132, 29),
        Calls("step of a runner, 8 lanes, shared memory", 129, 29),
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
