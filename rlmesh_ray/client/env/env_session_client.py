"""Client sessions with environments, in the dialect that the scheme of the address names."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Annotated, Any, Protocol, TypedDict

from rlmesh_ray.auth.client_tls import ClientTlsSource
from rlmesh_ray.auth.token_file import TokenSource
from rlmesh_ray.client.channel import ConnectOptions, as_connect_options
from rlmesh_ray.client.env.env_client import EnvClient, ResetResult, StepResult, shake_hands
from rlmesh_ray.dialects.registry import Dialect, DialectSettings, client_dialect
from rlmesh_ray.errors import ConfigurationError, MissingPackageError, install_command
from rlmesh_ray.options import (
    DEFAULT_RESET_TIMEOUT_S,
    DEFAULT_STEP_TIMEOUT_S,
    TRANSPORTS,
    Group,
    Option,
    allowed_transports,
    completed,
    require_seconds,
)
from rlmesh_ray.polling import WakeupDescriptors, should_spin
from rlmesh_ray.protocol.handshake import HandshakeResponse
from rlmesh_ray.spaces.contract import EnvContract
from rlmesh_ray.spaces.images import AS_THEY_ARE, ImageCodec, ImageOptions, Resize
from rlmesh_ray.spaces.spec import Column
from rlmesh_ray.transport.direct_connection import Pictures


class EnvSessionClient(Protocol):
    """An open session with the lanes of an environment; ``EnvClient`` describes its methods."""

    contract: EnvContract
    """The endpoint's contract."""

    @property
    def answer(self) -> HandshakeResponse:
        """The server's answer to the handshake, with its capabilities."""

    @property
    def address(self) -> str: ...

    def reset(
        self,
        *,
        seeds: Sequence[int] = (),
        options: Mapping[str, object] | None = None,
        lanes: Sequence[int] = (),
    ) -> ResetResult: ...

    def send_reset(
        self,
        *,
        seeds: Sequence[int] = (),
        options: Mapping[str, object] | None = None,
        lanes: Sequence[int] = (),
    ) -> str: ...

    def receive_reset(self, request_id: str) -> ResetResult: ...

    def step(self, action: Sequence[Column]) -> StepResult: ...

    def send_step(self, action: Sequence[Column], *, is_last: bool = True) -> str: ...

    def receive_step(self, request_id: str) -> StepResult: ...

    def wakeup(self) -> WakeupDescriptors | None: ...

    def render(self) -> Pictures | bytes | None: ...

    def call(self, name: str, *arguments: object, lanes: Sequence[int] = ()) -> tuple[Any, ...]: ...

    def close(self) -> None: ...


class ClientOptions(TypedDict, total=False):
    """What ``RemoteEnv`` and ``RemoteVectorEnv`` take."""

    token: Annotated[
        TokenSource | None,
        Option(
            "The token that the endpoint requires, or the file that has it (``TokenFile``).",
            Group.CONNECTION,
        ),
    ]
    tls: Annotated[ClientTlsSource | None, Option("For an endpoint with TLS.", Group.CONNECTION)]
    step_timeout_s: Annotated[
        float,
        Option(
            "How long a request may take; an endpoint that does not answer at all is given up at "
            "most 1 s later.",
            Group.CONNECTION,
            DEFAULT_STEP_TIMEOUT_S,
            require_seconds,
        ),
    ]
    reset_timeout_s: Annotated[
        float,
        Option(
            "How long a reset may take instead: one of all lanes or of some, and a step that "
            "contains resets, such as the one after an episode's end.",
            Group.CONNECTION,
            DEFAULT_RESET_TIMEOUT_S,
            require_seconds,
        ),
    ]
    start_timeout_s: Annotated[
        float,
        Option(
            "How long the environment may take to start, before the first reset or after its "
            "worker died; it does not count against ``reset_timeout_s``. A dm_env_rpc server "
            "starts it while the world is created, within the ``timeout_s`` of "
            "``ConnectOptions``.",
            Group.CONNECTION,
            120.0,
            partial(require_seconds, allow_zero=True),
        ),
    ]
    transport: Annotated[
        str,
        Option(
            'How steps travel. ``"auto"``: through shared memory where both are on one machine '
            "(Linux), else over a TCP connection of their own where the endpoint takes one, else "
            'as gRPC messages. ``"shared_memory"``, ``"tcp"``: so, or not at all. ``"grpc"``: '
            "messages.",
            Group.CONNECTION,
            "auto",
            choices=TRANSPORTS,
        ),
    ]
    dm_env_rpc: Annotated[
        DialectSettings | None,
        Option(
            "For a dm_env_rpc server: what to create and to join, and how to read its answers.",
            Group.CONNECTION,
        ),
    ]
    image_codec: Annotated[
        str | None,
        Option(
            "Has the endpoint compress the images of the observations: without loss "
            '(``"png"``, ``"webp"``), or with (``"jpeg:95"``, ``"webp:80"``), which changes what '
            "is learned from; see ``RemoteModel.configure_route``. Steps travel as gRPC messages "
            "then. None: pixels travel as they are.",
            Group.CONNECTION,
        ),
    ]
    resize: Annotated[
        Resize | None,
        Option(
            "Has the endpoint resize the images: ``(height, width)`` for all of them, or sizes by "
            'the names of leaves, such as ``{"camera": (224, 224)}``. The space of observations is '
            "that of the images that come, and steps travel as gRPC messages. None: their own "
            "size.",
            Group.CONNECTION,
        ),
    ]


@dataclass(frozen=True, slots=True)
class DialectEnvClient:
    """A dialect's client for environments: ``ENV_SESSION_CLIENT`` of its module of this name."""

    open: Callable[[ConnectOptions, float, float], EnvSessionClient]
    """Opens a session, given how many seconds to wait for a step, and for a reset."""
    probe: Callable[[ConnectOptions], HandshakeResponse]
    """Returns what a session would be."""


def open_env_session(
    connect_options: ConnectOptions,
    *,
    step_timeout_s: float,
    reset_timeout_s: float = DEFAULT_RESET_TIMEOUT_S,
    start_timeout_s: float = 120.0,
    transport: str = "auto",
    images: ImageOptions = AS_THEY_ARE,
) -> EnvSessionClient:
    """Open a session; the options are those of ``ClientOptions``.

    Raises:
        ConfigurationError: An argument is for another dialect than the address names, or is
            impossible in that dialect.
        RlmeshError: As ``EnvClient`` or the dialect's client does.
    """
    wanted = allowed_transports(transport)
    should_spin()  # refuses a wrong environment variable before anything is opened
    if images.image_codec is not None:
        ImageCodec.from_option(images.image_codec)
    if images.names and transport not in ("auto", "grpc"):
        raise ConfigurationError(
            f"{images.names} changes the images in gRPC messages, and transport={transport!r} "
            "carries pixels as they are: leave one of them out"
        )
    dialect = _dialect(connect_options)
    if dialect is None:
        return EnvClient(
            connect_options,
            images=images,
            step_timeout_s=step_timeout_s,
            reset_timeout_s=reset_timeout_s,
            start_timeout_s=start_timeout_s,
            transport="grpc" if images.names else transport,
        )
    if images.names:
        raise ConfigurationError(
            f"{connect_options.address}: {dialect.name} sends images as they are; leave "
            f"{images.names} out"
        )
    if len(wanted) == 1:
        raise ConfigurationError(
            f"{connect_options.address}: {dialect.name} carries everything in messages; leave "
            "transport out"
        )
    client = _lane_client(dialect, connect_options)
    return client.open(connect_options, step_timeout_s, reset_timeout_s)


def open_client_session(
    owner: str, address: str | ConnectOptions, options: ClientOptions
) -> EnvSessionClient:
    given = completed(owner, ClientOptions, options)
    return open_env_session(
        as_connect_options(
            address,
            token=given["token"],
            tls=given["tls"],
            dialect_settings=given["dm_env_rpc"],
        ),
        step_timeout_s=given["step_timeout_s"],
        reset_timeout_s=given["reset_timeout_s"],
        start_timeout_s=given["start_timeout_s"],
        transport=given["transport"],
        images=ImageOptions(given["image_codec"], given["resize"]),
    )


def probe_endpoint(connect_options: ConnectOptions) -> HandshakeResponse:
    """Ask an endpoint what a session with it would be; raises as ``open_env_session`` does.

    A dm_env_rpc server is joined for a moment: it describes itself only to those who join.
    """
    dialect = _dialect(connect_options)
    if dialect is None:
        return shake_hands(connect_options)
    return _lane_client(dialect, connect_options).probe(connect_options)


def _dialect(connect_options: ConnectOptions) -> Dialect | None:
    """Return the dialect that the address names; None: the edition's."""
    address, settings = connect_options.address, connect_options.dialect_settings
    if settings is not None and not address.startswith(settings.scheme):
        raise ConfigurationError(
            f"{address} is no {settings.scheme} address, which {type(settings).__name__} is for"
        )
    return client_dialect(address)


def _lane_client(dialect: Dialect, connect_options: ConnectOptions) -> DialectEnvClient:
    if dialect.serves_models:
        raise ConfigurationError(
            f"{connect_options.address} is a policy, since {dialect.name} serves nothing else; "
            "give the address of an environment"
        )
    if connect_options.edition_text is not None:
        raise ConfigurationError(
            f"{connect_options.address}: {dialect.name} has no editions; leave out edition_text"
        )
    try:
        client: DialectEnvClient = dialect.load("client.env_session_client").ENV_SESSION_CLIENT
    except ImportError as error:
        raise MissingPackageError(
            f"{connect_options.address}: the messages of {dialect.name} are not installed "
            f"({error}); {install_command(dialect.extra)}"
        ) from error
    return client
