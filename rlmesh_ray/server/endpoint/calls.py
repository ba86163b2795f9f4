"""What the handlers of calls share: texts of errors, refusals, and the messages of a stream."""

import asyncio
from collections.abc import AsyncIterator, Callable
from typing import NoReturn, TypeVar

from rlmesh_ray.errors import CodecError
from rlmesh_ray.grpc_setup import grpc

FIRST_MESSAGE_TIMEOUT_S = 60.0
"""How long a stream without a handshake may send nothing before it loses its place."""

T = TypeVar("T")

# --- errors --------------------------------------------------------------------------------------

_MOST_CHARACTERS = 8192


def text_of(error: BaseException) -> str:
    """Return the text of an error, in at most 8192 characters. Never raises.

    Both ``str(error)`` and an f-string run code of the error's own class.
    """
    try:
        return clipped(str(error), _MOST_CHARACTERS)
    except BaseException:  # noqa: BLE001  # the error's own __str__ raised
        return "(its __str__ raised an error, too)"


def clipped(text: str, most: int) -> str:
    """Return ``text``, without its middle if it has more than ``most`` characters."""
    if len(text) <= most:
        return text
    half = most // 2
    return f"{text[:half]} [...] {text[-half:]}"


def parsed(parse: Callable[[bytes], T], data: bytes) -> T | CodecError:
    """Return what ``parse`` makes of ``data``, or its CodecError without a traceback.

    A handler deletes ``data`` before it awaits ``context.abort``: gRPC keeps what that raises, with
    its frames, until the garbage collector looks. A large message would stay as long.
    """
    try:
        return parse(data)
    except CodecError as error:
        return CodecError(str(error))  # the other one has frames with the message, too


async def refuse(
    context: grpc.aio.ServicerContext, code: grpc.StatusCode, message: str
) -> NoReturn:
    """End a call with an error; ``abort`` raises, which gRPC's types do not say."""
    await context.abort(code, message)
    raise AssertionError("abort raises")


# --- messages ------------------------------------------------------------------------------------


async def first_message(
    requests: AsyncIterator[bytes], context: grpc.aio.ServicerContext, *, is_known: bool = False
) -> bytes | None:
    """Take the first message off a stream, or abort its call after a timeout.

    An ``async for`` over ``requests`` then yields the messages after it. There is no timeout for
    a client that ``is_known``: it has shaken hands, and may be building what it needs for the
    session, a policy for example. None: the stream has ended without a message.
    """
    try:
        async with asyncio.timeout(None if is_known else FIRST_MESSAGE_TIMEOUT_S):
            return await anext(aiter(requests), None)
    except TimeoutError:
        silence = f"no message came on this stream for {FIRST_MESSAGE_TIMEOUT_S:g} s"
        reason = f"{silence}; open it when it is needed"
        await refuse(context, grpc.StatusCode.ABORTED, reason)


# The iterators below are classes: a generator that is abandoned is closed in a separate task.


class PrependedStream:
    """All messages of a stream whose first one has been taken off."""

    def __init__(self, first: bytes, rest: AsyncIterator[bytes]) -> None:
        self._first: bytes | None = first
        self._rest = aiter(rest)

    def __aiter__(self) -> AsyncIterator[bytes]:
        return self

    async def __anext__(self) -> bytes:
        first, self._first = self._first, None
        return first if first is not None else await anext(self._rest)


class IdleTimeout:
    """Ends a stream whose client sends nothing for too long. For the serving loop; one per stream.

    Only the time counts in which the stream waits for the next message.

    Args:
        timeout_s: How long the client may send nothing; None: without limit.
        is_active: Returns, when the time is up, whether the client has done something else since
            the previous call, or waits for an answer; then the time begins anew.
    """

    def __init__(
        self, timeout_s: float | None, is_active: Callable[[], bool] = lambda: False
    ) -> None:
        self.has_expired = False
        self._timeout_s = timeout_s
        self._is_active = is_active
        self._loop = asyncio.get_running_loop()
        self._since_s = self._loop.time()
        self._frames: AsyncIterator[bytes]
        self._reader: asyncio.Task[object] | None = None
        self._timer: asyncio.TimerHandle | None = None

    def watch(self, frames: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
        """Return the messages in ``frames``, which end when the client is silent for too long."""
        if self._timeout_s is None:
            return frames
        self._timer = self._loop.call_later(self._timeout_s, self._check, self._timeout_s)
        self._frames = aiter(frames)
        return self

    async def abort_if_expired(self, context: grpc.aio.ServicerContext) -> None:
        if self.has_expired:
            reason = (
                f"no request came for {self._timeout_s:g} s, which ends a session here; the "
                "operator can allow more (idle_timeout_s of ListenOptions, --idle-timeout)"
            )
            await context.abort(grpc.StatusCode.ABORTED, reason)

    def stop(self) -> None:
        if self._timer is not None:
            self._timer.cancel()

    def __aiter__(self) -> AsyncIterator[bytes]:
        return self

    async def __anext__(self) -> bytes:
        self._since_s = self._loop.time()
        reader = self._reader = asyncio.current_task()
        try:
            return await anext(self._frames)
        except asyncio.CancelledError:
            if not self.has_expired or reader is None:
                raise
            # The timer cancelled the reader: it continues as after the last message.
            reader.uncancel()
            raise StopAsyncIteration from None
        finally:
            self._reader = None

    def _check(self, timeout_s: float) -> None:
        now_s = self._loop.time()
        if self._reader is None or self._is_active():
            self._since_s = now_s
        left_s = self._since_s + timeout_s - now_s
        if left_s > 0 or self._reader is None:
            self._timer = self._loop.call_later(left_s, self._check, timeout_s)
            return
        self.has_expired = True
        self._reader.cancel()
