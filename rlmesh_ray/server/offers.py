"""What clients can do beyond the edition, as their handshakes said, until their Join arrives."""

import secrets
from collections import OrderedDict

from rlmesh_ray.protocol import capabilities
from rlmesh_ray.protocol.handshake import Offer

_CAPACITY = 1024
# What a client offers beyond these is not kept: it may be megabytes of nonsense.
_OPTIONAL = frozenset(
    {
        capabilities.NDARRAY,
        capabilities.NUMBERED_REQUESTS,
        capabilities.SAME_STEP,
        capabilities.SHARED_MEMORY,
    }
)


class Offers:
    """Capabilities by session id; the oldest are forgotten, so that handshakes cost no memory."""

    def __init__(self) -> None:
        self._by_session: OrderedDict[str, frozenset[str]] = OrderedDict()

    def remember(self, offer: Offer) -> str:
        """Keep what ``offer`` can do and return a session id that nobody can guess."""
        session_id = secrets.token_hex(16)
        self._by_session[session_id] = _OPTIONAL & offer.capabilities.keys()
        if len(self._by_session) > _CAPACITY:
            self._by_session.popitem(last=False)
        return session_id

    def claim(self, session_id: str) -> frozenset[str]:
        """Return the capabilities of ``session_id``, once; empty when nobody has that id."""
        return self._by_session.pop(session_id, frozenset())
