"""How an endpoint made a prediction, as far as it tells."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class PredictTelemetry:
    """How an endpoint made a prediction."""

    policy_version: int
    """Of the weights that acted; 0 for those that the policy was loaded with, -1 where the
    endpoint does not tell."""
    queue_s: float
    """Time from the request's arrival there to the beginning of its batch."""
    forward_s: float
    """Time that the policy took for the whole batch."""
    batch_rows: int
    """Rows in the batch, those of others included; 0 where the endpoint does not tell."""
    server: str
    """Names the server, as long as it lives; empty where it does not tell."""
