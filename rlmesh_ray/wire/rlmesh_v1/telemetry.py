"""What a prediction cost, as ``OperationTelemetry`` and back.

The edition leaves the metrics' names open; these are this package's own. A reader takes what it
knows and ignores the rest.
"""

import functools

from rlmesh_ray.protocol.messages import BatchRun
from rlmesh_ray.wire._pb.rlmesh.core.v1.telemetry_pb2 import OperationMetric, OperationTelemetry
from rlmesh_ray.wire.rlmesh_v1.frames import varint

OPERATION = "predict"
POLICY_VERSION = "policy.version"
BATCH_ROWS = "predict.batch_rows"
FORWARD = "predict.forward"
QUEUE = "predict.queue"


_QUEUE_TAG = b"\x1a"  # OperationTelemetry.metrics
_QUEUE_NAME = OperationMetric(name=QUEUE).SerializeToString()


def pack_telemetry(run: BatchRun, queue_ns: int) -> bytes:
    """Return how a prediction was made, as the bytes of an ``OperationTelemetry``."""
    # The repeated field goes on where the batch's part of it ends.
    duration = b"\x18" + varint(queue_ns)  # OperationMetric.duration_ns
    return (
        _of_batch(run)
        + _QUEUE_TAG
        + varint(len(_QUEUE_NAME) + len(duration))
        + _QUEUE_NAME
        + duration
    )


def read_telemetry(message: OperationTelemetry) -> tuple[BatchRun | None, int]:
    """Return how a prediction was made, and how long it had waited in ns.

    None when the message does not tell the policy's version: it is of another's making.
    """
    metrics = {metric.name: metric for metric in message.metrics}
    version = metrics.get(POLICY_VERSION)
    if version is None or version.WhichOneof("value") != "number":
        return None, 0
    run = BatchRun(
        policy_version=_whole(version.number),
        num_rows=_whole(metrics[BATCH_ROWS].number) if BATCH_ROWS in metrics else 0,
        forward_ns=_duration_ns(metrics.get(FORWARD)),
        component_id=message.component_id,
    )
    return run, _duration_ns(metrics.get(QUEUE))


# All requests of a batch have these in common.
@functools.lru_cache(maxsize=4)
def _of_batch(run: BatchRun) -> bytes:
    message = OperationTelemetry(operation=OPERATION, component_id=run.component_id)
    message.metrics.add(name=POLICY_VERSION, number=run.policy_version)
    message.metrics.add(name=BATCH_ROWS, number=run.num_rows)
    message.metrics.add(name=FORWARD, duration_ns=run.forward_ns)
    return message.SerializeToString()


def _whole(number: float) -> int:
    # A peer may send NaN or infinity, which are no integers.
    return int(number) if number == number and abs(number) < 2**63 else 0


def _duration_ns(metric: OperationMetric | None) -> int:
    return 0 if metric is None else metric.duration_ns
