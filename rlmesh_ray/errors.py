"""Every error this package raises.

* RlmeshError
    * ConfigurationError: what the caller or operator asked for cannot be done
        * AddressError: an address cannot be used (in use, not loopback without a token, malformed)
        * UnsupportedSpaceError: a space (or value kind) that the contract cannot express
        * ContractMismatchError: two sides disagree about width, spaces or autoreset mode
    * ConformanceError: a value does not conform to its space
    * CodecError: bytes that do not decode
    * ProtocolError: the rules of a session were broken
        * LocalProtocolError: this side broke them; fix the caller
        * RemoteProtocolError: the peer broke them; tell it in band
    * HandshakeRefusedError: the peers do not share a generation or an edition
    * EndpointError: something is wrong with an endpoint or the road to it
        * EndpointUnreachableError: nothing answers at the address
        * EndpointLostError: the session broke or had to be abandoned; its lanes are gone
        * EndpointTimeoutError: no answer in time
        * EndpointClosedError: this side has closed it
        * AccessDeniedError: the endpoint wants another token
        * CapacityError: the endpoint has no free session
        * EvaluationInterruptedError: nobody is left to run an evaluation's episodes
    * RemoteError: the peer answered a request with an in-band error
        * RemoteEnvError: ... from an EnvService
        * RemoteModelError: ... from a ModelService
    * EnvStartError: an environment could not be created; carries the worker's traceback
    * PolicyError: a policy could not be loaded or failed while predicting

* ConfigurationWarning: the only warning; what the caller asked for works, but hardly as meant

Errors travel between Ray processes, so each one keeps all its constructor arguments
in ``args`` and survives pickling.
"""

from typing import Any


class RlmeshError(Exception):
    """Base class of all errors of this package."""


class ConfigurationError(RlmeshError):
    """What the caller or operator asked for cannot be done; says how it can."""


class ConfigurationWarning(UserWarning):
    """What the caller asked for works, but hardly as meant; names the setting."""


class AddressError(ConfigurationError):
    """An address cannot be used: malformed, in use, or not loopback without a token."""


class UnsupportedSpaceError(ConfigurationError):
    """The contract has no way to express this space."""


class ContractMismatchError(ConfigurationError):
    """Two sides disagree about width, spaces or autoreset mode."""


class ConformanceError(RlmeshError):
    """A value does not conform to its space.

    Args:
        kind: Which rule it breaks: ``"structure"``, ``"range"`` or ``"dtype"``.
        path: Where in the space the value stands, such as ``"camera.depth"``; empty at the root.
        reason: What was found and what was expected, as part of a sentence.
        lane: Whose value it is, in a batch; None: not known.
    """

    def __init__(self, kind: str, path: str, reason: str, lane: int | None = None) -> None:
        super().__init__(kind, path, reason, lane)
        self.kind = kind
        self.path = path
        self.reason = reason
        self.lane = lane

    def __str__(self) -> str:
        return f"{self.path or 'value'}: {self.reason}"


class CodecError(RlmeshError):
    """Bytes from a peer do not decode; the message says where."""


class ProtocolError(RlmeshError):
    """The rules of a session were broken.

    Args:
        message: What happened, in one sentence without the ids.
        request_id: Id of the offending request; empty where requests have none.
    """

    def __init__(self, message: str, request_id: str = "") -> None:
        super().__init__(message, request_id)
        self.message = message
        self.request_id = request_id

    def __str__(self) -> str:
        return f"{self.message} (request {self.request_id})" if self.request_id else self.message


class LocalProtocolError(ProtocolError):
    """This side tried something the protocol does not allow now."""


class RemoteProtocolError(ProtocolError):
    """The peer sent something the protocol does not allow now."""


class HandshakeRefusedError(RlmeshError):
    """The peers do not share a generation or an edition.

    Args:
        reason: What the peer said, or what this side found.
        supported_editions: What the peer offers instead; may be empty.
    """

    def __init__(self, reason: str, supported_editions: tuple[str, ...] = ()) -> None:
        super().__init__(reason, supported_editions)
        self.reason = reason
        self.supported_editions = supported_editions

    def __str__(self) -> str:
        if not self.supported_editions:
            return self.reason
        return f"{self.reason} (the peer supports: {', '.join(self.supported_editions)})"


class EndpointError(RlmeshError):
    """Something is wrong with an endpoint or the road to it.

    Args:
        message: What happened and what to do about it.
        address: The endpoint's address; empty when it has none.
    """

    def __init__(self, message: str, address: str = "") -> None:
        super().__init__(message, address)
        self.message = message
        self.address = address

    def __str__(self) -> str:
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
    """The endpoint wants another token, or TLS."""


class CapacityError(EndpointError):
    """The endpoint has no free session."""


class EvaluationInterruptedError(EndpointError):
    """Nobody is left to run an evaluation's episodes; those that are finished are kept.

    Args:
        message: How far it came, what was lost and what to do about it.
        episodes: What is finished: an ``Episode`` each, in the order of their indices.
        causes: What was wrong with each endpoint, in one line each.
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
        message: The peer's own words.
        is_recoverable: Whether the session can go on (after a Reset, on an env stream).
        debug_info: The peer's traceback as text; may be empty.
    """

    def __init__(self, code: str, message: str, is_recoverable: bool, debug_info: str = "") -> None:
        super().__init__(code, message, is_recoverable, debug_info)
        self.code = code
        self.message = message
        self.is_recoverable = is_recoverable
        self.debug_info = debug_info

    def __str__(self) -> str:
        return f"{self.code}: {self.message}"


class RemoteEnvError(RemoteError):
    """An EnvService answered with an error.

    Args:
        code: Name of the wire code, such as ``"TIMEOUT"``.
        message: The peer's own words.
        is_recoverable: Whether the session can go on, after a Reset where episodes were
            interrupted.
        debug_info: The peer's traceback as text; may be empty.
        interrupted_episodes: What the failure has cost: an ``EpisodeRecord`` for each episode
            that was running.
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
    """

    def __init__(self, message: str, traceback_text: str = "") -> None:
        super().__init__(message, traceback_text)
        self.message = message
        self.traceback_text = traceback_text

    def __str__(self) -> str:
        return self.message


class PolicyError(RlmeshError):
    """A policy could not be loaded, or failed while predicting."""
