"""What goes over a road: the capability ``rlmesh_ray.shared_memory.v1`` on the wire.

A road is a socket between a client and the worker that steps its lanes, with an eventfd at each end
(``EventfdSocket``), and a ``Block`` that both map. Only Step travels over it, and only its success
comes back; everything else happens on the session's Join stream, whose rules stay in force. A
request has a number; its request id on the stream would be that number in decimal.

* Greeting, client to endpoint, on the endpoint's socket for roads: the session id, then the
  timeout of the client's steps. Answered with one byte: 1 and four descriptors (the block, the
  socket, the worker's eventfd, the client's), or 0, and there is none.
* Request, client to worker: number and timeout. The actions lie in the block.
* Answer, worker to client: the number, DONE or HANDED_OVER, and the size of what follows. DONE:
  the results lie in the block, and what follows, if anything, is a JoinResponse of the edition
  whose StepResponse has all that does not lie there. HANDED_OVER: the client sends the same
  request, under its id, on the stream, and gets the answer there.

When a road ends without an answer, the client does as after HANDED_OVER. The worker executes each
number once, whether it comes over the road or from the endpoint: for a request that the road has
begun, the endpoint answers with what became of it.
"""

import struct
from dataclasses import dataclass
from typing import Self

SESSION_ID_BYTES = 32
"""A session id in ASCII."""
SOCKET_PREFIX = b"\0rlmesh-ray-roads-"
"""Of the endpoint's socket, in the abstract namespace; what follows is the capability's value."""
SOCKET_NAME_LENGTH = 32
"""Hexadecimal digits."""

ACCEPTED, REFUSED = b"\1", b"\0"
DONE, HANDED_OVER = 0, 1
NUM_DESCRIPTORS = 4

_GREETING = struct.Struct(f"<{SESSION_ID_BYTES}sQ")
_REQUEST = struct.Struct("<QQ")
_ANSWER = struct.Struct("<QII")

GREETING_BYTES = _GREETING.size
REQUEST_BYTES = _REQUEST.size
ANSWER_BYTES = _ANSWER.size

pack_request = _REQUEST.pack
"""Number, timeout in ms (0: none) -> bytes."""
unpack_request = _REQUEST.unpack
pack_answer = _ANSWER.pack
"""Number, DONE or HANDED_OVER, how many bytes follow -> bytes."""
unpack_answer = _ANSWER.unpack


@dataclass(frozen=True, slots=True)
class Greeting:
    """What a client says first."""

    session_id: str
    timeout_ms: int

    def pack(self) -> bytes:
        """Return the bytes."""
        return _GREETING.pack(self.session_id.encode("ascii"), self.timeout_ms)

    @classmethod
    def unpack(cls, data: bytes) -> Self:
        """Return what ``data``, of the right size, says; whatever it is, it is some text."""
        session_id, timeout_ms = _GREETING.unpack(data)
        return cls(session_id.decode("ascii", "replace"), timeout_ms)


def socket_address(name: str) -> bytes | None:
    """Return where an endpoint that has told ``name`` listens; None: it is no such name."""
    is_name = len(name) == SOCKET_NAME_LENGTH and set(name) <= set("0123456789abcdef")
    return SOCKET_PREFIX + name.encode() if is_name else None
