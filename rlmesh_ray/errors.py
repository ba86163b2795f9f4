"""The exceptions of this package; docs/reference/errors.md shows them as a tree.

Errors travel between Ray processes, so each one keeps all its constructor arguments
in ``args`` and survives pickling.
"""

from typing import Any


def install_command(extra: str) -> str:
    """Return how to install an extra of this package: the remedy of a ``MissingPackageError``."""
    return f"pip install '.[{extra}]' in a checkout of rlmesh-ray"


def printable(text: str) -> str:
    """Return ``text`` with what may control a terminal escaped: it may be a peer's.

    Lines and tabs stay as they are.
    """
    if text.isprintable():
        return text
    return "".join(
        each if each.isprintable() or each in "\n\t" else each.encode("unicode_escape").decode()
        for each in text
    )


class RlmeshError(Exception):
    """Base class of all errors of this package; their texts are printable."""

    def __str__(self) -> str:
        return printable(self._text())

    def _text(self) -> str:
        """Return the text, which may quote a peer's."""
        return super().__str__()


class ConfigurationError(RlmeshError):
    """An argument or option cannot be honoured; the message names the remedy."""


class ConfigurationWarning(UserWarning):
    """An option works, but probably not as intended; the message names it."""


class AddressError(ConfigurationError):
    """An address cannot be used: malformed, or not loopback without a token."""


class ListenError(AddressError):
    """A server cannot listen at an address: it is in use, or not this machine's."""


class UnsupportedSpaceError(ConfigurationError):
    """The contract has no way to express this space."""


class ContractMismatchError(ConfigurationError):
    """Two contracts differ in width, spaces or autoreset mode."""


class MissingPackageError(ConfigurationError, ImportError):
    """A package that a module, an argument or an option needs is not installed."""


class ConformanceError(RlmeshError):
    """A value does not conform to its space.

    Args:
        kind: The violated rule: ``"structure"``, ``"range"`` or ``"dtype"``.
        path: The leaf's place in the space, such as ``"camera.depth"``; empty at the root.
        reason: What was found and what was expected, as part of a sentence.
        lane: The lane of the value in its batch; None where it is not known.
        root: Name of the whole value, such as ``"action"``; empty where it is not known.
    """

    def __init__(
        self, kind: str, path: str, reason: str, lane: int | None = None, root: str = ""
    ) -> None:
        super().__init__(kind, path, reason, lane, root)
        self.kind = kind
        self.path = path
        self.reason = reason
        self.lane = lane
        self.root = root

    def _text(self) -> str:
        place = ".".join(name for name in (self.root, self.path) if name)
        return f"{place or 'value'}: {self.reason}"

    def about(self, root: str) -> "ConformanceError":
        """Return the error with ``root`` as the name of the whole value."""
        return ConformanceError(self.kind, self.path, self.reason, self.lane, root)


class CodecError(RlmeshError):
    """A value cannot be sent as it is, or bytes from a peer do not decode."""


class ProtocolError(RlmeshError):
    """A message violates the rules of the session.

    Args:
        message: What happened, in one sentence without the ids.
        request_id: Id of the offending request; empty where requests have none.
    """

    def __init__(self, message: str, request_id: str = "") -> None:
        super().__init__(message, request_id)
        self.message = message
        self.request_id = request_id

    def _text(self) -> str:
        request = f" (request {self.request_id})" if self.request_id else ""
        return f"{self.message}{request}"


class LocalProtocolError(ProtocolError):
    """This side sent something that the protocol does not allow in this state."""


class RemoteProtocolError(ProtocolError):
    """The peer sent something that the protocol does not allow in this state."""


class HandshakeRefusedError(RlmeshError):
    """The peers do not share a generation or an edition.

    Args:
        reason: The peer's error message, or what this side found.
        supported_editions: The editions that the peer supports; may be empty.
    """

    def __init__(self, reason: str, supported_editions: tuple[str, ...] = ()) -> None:
        super().__init__(reason, supported_editions)
        self.reason = reason
        self.supported_editions = supported_editions

    def _text(self) -> str:
        editions = ", ".join(self.supported_editions)
        return self.reason + (editions and f" (the peer supports: {editions})")


class EndpointError(RlmeshError):
    """An endpoint, or the connection to it, fails.

    Args:
        message: What happened and what to do about it.
        address: The endpoint's address; empty where there is none.
    """

    def __init__(self, message: str, address: str = "") -> None:
        super().__init__(message, address)
        self.message = message
        self.address = address

    def _text(self) -> str:
        return f"{self.address}: {self.message}" if self.address else self.message


class EndpointUnreachableError(EndpointError):
    """Nothing answers at the address."""


class EndpointLostError(EndpointError):
    """The session broke, or had to be abandoned; its lanes and their episodes are gone."""


class EndpointTimeoutError(EndpointError):
    """No answer in time; whether the request took effect is unknown."""


class EndpointClosedError(EndpointError):
    """This side has closed the session."""


class AccessDeniedError(EndpointError):
    """The endpoint requires another token, or TLS."""


class CapacityError(EndpointError):
    """The endpoint has no free session."""


class EvaluationInterruptedError(EndpointError):
    """No endpoint is left to run an evaluation's episodes; finished episodes are kept.

    Args:
        message: How far the evaluation came, what was lost and what to do about it.
        episodes: The finished episodes, each an ``EpisodeResult``, in the order of their indices.
        causes: The failure of each endpoint, in one line each.
    """

    def __init__(
        self, message: str, episodes: tuple[Any, ...] = (), causes: tuple[str, ...] = ()
    ) -> None:
        super().__init__(message)
        self.args = (message, episodes, causes)
        self.episodes = episodes
        self.causes = causes


class RemoteError(RlmeshError):
    """The peer answered a request with an in-band error.

    Args:
        code: Name of the wire code, such as ``"TIMEOUT"``.
        message: The error message that the peer sent.
        is_recoverable: Whether the session can go on (after a Reset, on an env stream).
        debug_info: The peer's traceback as text; may be empty.
    """

    def __init__(self, code: str, message: str, is_recoverable: bool, debug_info: str = "") -> None:
        super().__init__(code, message, is_recoverable, debug_info)
        self.code = code
        self.message = message
        self.is_recoverable = is_recoverable
        self.debug_info = debug_info

    def _text(self) -> str:
        return f"{self.code}: {self.message}"


class RemoteEnvError(RemoteError):
    """An EnvService answered with an error.

    It has the arguments of ``RemoteError``, and ``interrupted_episodes``: an ``EpisodeRecord`` for
    each running episode that the failure ended. If there are any, and the error is recoverable, the
    session can go on after a Reset.
    """

    def __init__(
        self,
        code: str,
        message: str,
        is_recoverable: bool,
        debug_info: str = "",
        interrupted_episodes: tuple[Any, ...] = (),
    ) -> None:
        super().__init__(code, message, is_recoverable, debug_info)
        self.args = (*self.args, interrupted_episodes)
        self.interrupted_episodes = interrupted_episodes


class RemoteModelError(RemoteError):
    """A ModelService answered with an error."""


class EnvStartError(RlmeshError):
    """An environment could not be created.

    Args:
        message: The cause and the remedy, in one line.
        traceback_text: The worker's traceback; may be empty.
        is_wrong_usage: Whether its name or an argument cannot be honoured; False: it has failed.
    """

    def __init__(
        self, message: str, traceback_text: str = "", is_wrong_usage: bool = False
    ) -> None:
        super().__init__(message, traceback_text, is_wrong_usage)
        self.message = message
        self.traceback_text = traceback_text
        self.is_wrong_usage = is_wrong_usage

    def _text(self) -> str:
        return self.message


class PolicyError(RlmeshError):
    """A policy could not be loaded, or failed while predicting."""
