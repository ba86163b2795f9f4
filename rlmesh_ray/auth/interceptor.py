"""TokenInterceptor: authentication and authorization of gRPC calls by bearer token.

It runs before the handlers, on a call's path and metadata only: no message of an unauthenticated
client is decoded.
"""

from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any

from rlmesh_ray.auth.token_file import TokenSource, TokenStore
from rlmesh_ray.auth.tokens import required_role
from rlmesh_ray.grpc_setup import grpc
from rlmesh_ray.protocol.capabilities import AUTHORIZATION_METADATA_KEY

_SCHEME = "Bearer "
_HOW = (
    "--token-file or the variable RLMESH_RAY_TOKEN of rlmesh-ray; in Python token=… is the token "
    "itself, and token=TokenFile(PATH) reads it from a file"
)
_MISSING = "this {} requires a token, and the call carries none; give it one: " + _HOW
_UNKNOWN = "this {} requires another token than the call carries; give it the right one: " + _HOW
_SEVERAL = "this call carries several tokens; send one"


class TokenInterceptor(grpc.aio.ServerInterceptor):  # type: ignore[misc]  # grpc has no types
    """Refuses calls without a valid token in their metadata, as ``Bearer TOKEN`` or alone.

    Args:
        token: The endpoint's token, or its token file.
        kind: Kind of server in messages: ``"endpoint"``, ``"gateway"`` or ``"registrar"``.

    Raises:
        ConfigurationError: The token cannot be carried in metadata, or its file cannot be used.
    """

    def __init__(self, token: TokenSource, kind: str = "endpoint") -> None:
        self._store = TokenStore(token)
        self._kind = kind

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[grpc.RpcMethodHandler]],
        details: grpc.HandlerCallDetails,
    ) -> grpc.RpcMethodHandler:
        """Continue with the call, or replace its handler by the refusal."""
        tokens = [
            value
            for key, value in details.invocation_metadata or ()
            if key == AUTHORIZATION_METADATA_KEY
        ]
        if len(tokens) > 1:
            return _refusal(grpc.StatusCode.UNAUTHENTICATED, _SEVERAL)
        # Clients of ``rlmesh-wire-v1`` send it without the scheme.
        role = self._store.role_of(str(*tokens).removeprefix(_SCHEME).encode())
        if role is None:
            reason = (_UNKNOWN if any(tokens) else _MISSING).format(self._kind)
            return _refusal(grpc.StatusCode.UNAUTHENTICATED, reason)
        required = required_role(details.method)
        if role < required:
            return _refusal(
                grpc.StatusCode.PERMISSION_DENIED,
                f"at this {self._kind} {details.method} requires a token of the role "
                f"{required.label}, and this one has the role {role.label}",
            )
        return await continuation(details)


def _refusal(code: grpc.StatusCode, reason: str) -> grpc.RpcMethodHandler:
    return grpc.stream_stream_rpc_method_handler(partial(_refuse, code, reason))


async def _refuse(
    code: grpc.StatusCode, reason: str, _requests: Any, context: grpc.aio.ServicerContext
) -> None:
    await context.abort(code, reason)
