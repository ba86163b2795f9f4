"""What a prediction cost, as ``OperationTelemetry`` and back.

The edition leaves the metrics' names open; these are this package's own. A reader takes what it
knows and ignores the rest.
"""

import functools
import struct

from rlmesh_ray.protocol.messages import BatchRun
from rlmesh_ray.wire._pb.rlmesh.core.v1.telemetry_pb2 import OperationMetric, OperationTelemetry
from rlmesh_ray.wire.rlmesh_v1.frames import varint

OPERATION = "predict"
POLICY_VERSION = "policy.version"
BATCH_ROWS = "predict.batch_rows"
FORWARD = "predict.forward"
QUEUE = "predict.queue"


def pack_telemetry(run: BatchRun, queue_ns: int) -> bytes:
    """Return how a prediction was made, as the bytes of an ``OperationTelemetry``.

    Written by hand, as the frame around it; a test holds it against the generated code.
    """
    waited = varint(queue_ns)
    # The repeated field goes on where the batch's part of it ends.
    return b"%b\x1a%c%b\x18%b" % (_of_batch(run), len(_QUEUE) + 1 + len(waited), _QUEUE, waited)


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
    return b"".join(
        (
            _of_server(run.component_id),
            _number(_VERSION, run.policy_version),
            _number(_ROWS, run.num_rows),
            _duration(_FORWARD, run.forward_ns),
        )
    )


@functools.lru_cache(maxsize=4)
def _of_server(component_id: str) -> bytes:
    return OperationTelemetry(operation=OPERATION, component_id=component_id).SerializeToString()


_VERSION, _ROWS, _FORWARD, _QUEUE = (
    OperationMetric(name=name).SerializeToString()
    for name in (POLICY_VERSION, BATCH_ROWS, FORWARD, QUEUE)
)


def _number(name: bytes, value: float) -> bytes:
    return _metric(name + b"\x29" + struct.pack("<d", value))  # OperationMetric.number


def _duration(name: bytes, ns: int) -> bytes:
    return _metric(name + b"\x18" + varint(ns))  # OperationMetric.duration_ns


def _metric(body: bytes) -> bytes:
    return b"\x1a" + varint(len(body)) + body  # OperationTelemetry.metrics


def _whole(number: float) -> int:
    # A peer may send NaN or infinity, which are no integers.
    return int(number) if number == number and abs(number) < 2**63 else 0


def _duration_ns(metric: OperationMetric | None) -> int:
    return 0 if metric is None else metric.duration_ns
