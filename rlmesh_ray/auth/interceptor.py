"""The door of a gRPC server: who shows no token of the endpoint's is answered nothing else.

It stands before the handlers, and looks at nothing but a call's path and metadata: nothing that a
stranger sends is parsed, decoded or built.
"""

from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any

from rlmesh_ray.auth.token_file import TokenSource
from rlmesh_ray.auth.token_store import TokenStore
from rlmesh_ray.auth.tokens import required_role
from rlmesh_ray.grpc_setup import grpc
from rlmesh_ray.protocol.capabilities import AUTHORIZATION_METADATA_KEY

_SCHEME = "Bearer "
_HOW = "--token-file or the variable RLMESH_RAY_TOKEN of rlmesh-ray, token=… in Python"
_MISSING = "this {} wants a token, and the call shows none; give it one: " + _HOW
_UNKNOWN = "this {} wants another token than the call shows; give it the right one: " + _HOW
_SEVERAL = "this call shows several tokens; show one"


class TokenInterceptor(grpc.aio.ServerInterceptor):  # type: ignore[misc]  # grpc has no types
    """Turns away every call that does not carry a token, as ``Bearer TOKEN`` or alone.

    Args:
        token: The endpoint's, or the file with its tokens.
        kind: What refuses, in messages: ``"endpoint"``, ``"gateway"`` or ``"registrar"``.

    Raises:
        ConfigurationError: ``token`` is nothing that a call can carry, or its file cannot be used.
    """

    def __init__(self, token: TokenSource, kind: str = "endpoint") -> None:
        self._store = TokenStore(token)
        self._kind = kind

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[grpc.RpcMethodHandler]],
        details: grpc.HandlerCallDetails,
    ) -> grpc.RpcMethodHandler:
        """Pass the call on, or replace its handler by the refusal."""
        shown = [
            value
            for key, value in details.invocation_metadata or ()
            if key == AUTHORIZATION_METADATA_KEY
        ]
        if len(shown) > 1:
            return _refusal(grpc.StatusCode.UNAUTHENTICATED, _SEVERAL)
        # Clients of ``rlmesh-wire-v1`` show it alone.
        role = self._store.role_of(str(*shown).removeprefix(_SCHEME).encode())
        if role is None:
            reason = (_UNKNOWN if any(shown) else _MISSING).format(self._kind)
            return _refusal(grpc.StatusCode.UNAUTHENTICATED, reason)
        wanted = required_role(details.method)
        if role < wanted:
            return _refusal(
                grpc.StatusCode.PERMISSION_DENIED,
                f"at this {self._kind} {details.method} wants a token of the role {wanted.label}, "
                f"and this one is a {role.label}'s",
            )
        return await continuation(details)


def _refusal(code: grpc.StatusCode, reason: str) -> grpc.RpcMethodHandler:
    return grpc.stream_stream_rpc_method_handler(partial(_refuse, code, reason))


async def _refuse(
    code: grpc.StatusCode, reason: str, _requests: Any, context: grpc.aio.ServicerContext
) -> None:
    await context.abort(code, reason)
