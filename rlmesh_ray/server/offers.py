"""What a client can do beyond the edition, as its handshake said, when its Join arrives.

The session id itself says so: an endpoint that kept it would have to forget some of it when clients
shake hands and never come. A client that changes its id lies about nobody but itself.
"""

import secrets

from rlmesh_ray.protocol import capabilities
from rlmesh_ray.protocol.handshake import Offer

# What a client offers beyond these is not kept: it may be megabytes of nonsense.
_OPTIONAL = (
    capabilities.NDARRAY,
    capabilities.NUMBERED_REQUESTS,
    capabilities.SAME_STEP,
    capabilities.SHARED_MEMORY,
    capabilities.DIRECT_TCP,
)
_NUM_DIGITS = 32
_NUM_FLAG_DIGITS = 2


def new_session_id(offer: Offer) -> str:
    """Return a session id that nobody can guess, for a client that can do what ``offer`` says."""
    flags = sum(1 << at for at, name in enumerate(_OPTIONAL) if name in offer.capabilities)
    return f"{flags:0{_NUM_FLAG_DIGITS}x}{secrets.token_hex((_NUM_DIGITS - _NUM_FLAG_DIGITS) // 2)}"


def offered_by(session_id: str) -> frozenset[str]:
    """Return the capabilities of the client with this session id; it may be any text."""
    is_id = len(session_id) == _NUM_DIGITS and set(session_id) <= set("0123456789abcdef")
    flags = int(session_id[:_NUM_FLAG_DIGITS], 16) if is_id else 0
    return frozenset(name for at, name in enumerate(_OPTIONAL) if flags >> at & 1)
