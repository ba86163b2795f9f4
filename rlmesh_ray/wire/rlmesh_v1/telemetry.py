"""Telemetry of predictions, as ``OperationTelemetry``.

The edition does not define the metrics' names; these are this package's. A reader ignores unknown
metrics.
"""

import functools
import struct

from rlmesh_ray.protocol.messages import BatchRun
from rlmesh_ray.wire._pb.rlmesh.core.v1.telemetry_pb2 import OperationMetric, OperationTelemetry
from rlmesh_ray.wire.protobuf import varint

OPERATION = "predict"
POLICY_VERSION = "policy.version"
BATCH_ROWS = "predict.batch_rows"
FORWARD = "predict.forward"
QUEUE = "predict.queue"


def pack_telemetry(run: BatchRun, queue_ns: int) -> bytes:
    """Return the bytes of an ``OperationTelemetry`` about a prediction.

    Hand-written, as the frame around it; a test compares it with the generated code.
    """
    forward, waited = varint(run.forward_ns), varint(queue_ns)
    # The metrics are a repeated field; those of the cached part come first.
    return b"%b\x1a%c%b\x18%b\x1a%c%b\x18%b" % (
        _of_policy(run.component_id, run.policy_version, run.num_rows),
        len(_FORWARD) + 1 + len(forward),
        _FORWARD,
        forward,
        len(_QUEUE) + 1 + len(waited),
        _QUEUE,
        waited,
    )


def read_telemetry(message: OperationTelemetry) -> tuple[BatchRun | None, int]:
    """Return the batch of a prediction, and the time in ns that the request had waited.

    The batch is None where the message has no policy version: another implementation sent it.
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


# Equal for all requests of a batch, and for most predictions of a single client.
@functools.lru_cache(maxsize=256)
def _of_policy(component_id: str, policy_version: int, num_rows: int) -> bytes:
    head = OperationTelemetry(operation=OPERATION, component_id=component_id).SerializeToString()
    return head + _number(_VERSION, policy_version) + _number(_ROWS, num_rows)


_VERSION, _ROWS, _FORWARD, _QUEUE = (
    OperationMetric(name=name).SerializeToString()
    for name in (POLICY_VERSION, BATCH_ROWS, FORWARD, QUEUE)
)


def _number(name: bytes, value: float) -> bytes:
    body = name + b"\x29" + struct.pack("<d", value)  # OperationMetric.number
    return b"\x1a%c%b" % (len(body), body)  # OperationTelemetry.metrics


def _whole(number: float) -> int:
    # A peer may send NaN or infinity, which are no integers.
    return int(number) if number == number and abs(number) < 2**63 else 0


def _duration_ns(metric: OperationMetric | None) -> int:
    return 0 if metric is None else metric.duration_ns
