"""What clients said in their handshakes, until their Join arrives."""

import secrets
from collections import OrderedDict

from rlmesh_ray.protocol.handshake import Offer

_CAPACITY = 1024


class Offers:
    """Offers by session id; the oldest are forgotten, so that mere handshakes cost no memory."""

    def __init__(self) -> None:
        self._by_session: OrderedDict[str, Offer] = OrderedDict()

    def remember(self, offer: Offer) -> str:
        """Keep ``offer`` and return a session id that nobody can guess."""
        session_id = secrets.token_hex(16)
        self._by_session[session_id] = offer
        if len(self._by_session) > _CAPACITY:
            self._by_session.popitem(last=False)
        return session_id

    def claim(self, session_id: str) -> Offer | None:
        """Return the offer of ``session_id``, once; None when there is none."""
        return self._by_session.pop(session_id, None)
