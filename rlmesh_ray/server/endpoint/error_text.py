"""Texts of errors that foreign code raised, whose ``__str__`` may raise as well; refusals."""

from collections.abc import Callable
from typing import NoReturn, TypeVar

from rlmesh_ray.errors import CodecError
from rlmesh_ray.grpc_setup import grpc

T = TypeVar("T")

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
    context: "grpc.aio.ServicerContext", code: "grpc.StatusCode", message: str
) -> NoReturn:
    """End a call with an error; ``abort`` raises, which gRPC's types do not say."""
    await context.abort(code, message)
    raise AssertionError("abort raises")
