"""A session has one contract: specs that change with a reset are an error, and say how."""

from typing import Any

from rlmesh_ray.errors import ContractMismatchError


def require_unchanged(joined: Any, now: Any, address: str, lane: int) -> None:
    """Compare the specs after a reset with those after the join.

    Args:
        joined: The ``pb.ActionObservationSpecs`` after the join.
        now: After the reset; empty where a server does not send them again, as it should.
        address: For the message.
        lane: Likewise.

    Raises:
        ContractMismatchError: They differ, in a tensor or in a uid.
    """
    if now == joined or not (now.actions or now.observations):
        return
    if _serialized(now) == _serialized(joined):  # bounds that are no numbers equal nothing
        return
    raise ContractMismatchError(
        f"{address} has changed what lane {lane} does or sees with its reset: "
        f"{_difference(joined, now)}; spaces are fixed while a session lasts, so reset with "
        "settings that leave them alone, or join with other ones in a new session"
    )


def _serialized(specs: Any) -> bytes:
    data: bytes = specs.SerializeToString(deterministic=True)
    return data


def _difference(joined: Any, now: Any) -> str:
    for domain in ("actions", "observations"):
        old, new = getattr(joined, domain), getattr(now, domain)
        for uid in sorted({*old, *new}):
            if uid not in new:
                return f"{old[uid].name!r} is gone from its {domain}"
            if uid not in old:
                return f"{new[uid].name!r} is new among its {domain}"
            if old[uid] != new[uid]:
                return f"{new[uid].name!r} is another one among its {domain}"
    return "its specs differ"
