"""``rlmesh-ray evaluate``: what a policy earns in an environment."""

import contextlib
import sys
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Annotated, Self

import typer
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from rlmesh_ray.cli.console import Console
from rlmesh_ray.cli.logs import muted
from rlmesh_ray.cli.options import (
    DebugFlag,
    EditionText,
    JsonFlag,
    TlsAuthority,
    TokenFile,
    client_tls,
    read_token,
)
from rlmesh_ray.errors import ContractMismatchError
from rlmesh_ray.protocol.address import looks_like_address

if TYPE_CHECKING:
    from rlmesh_ray.client.channel import ClientTls
    from rlmesh_ray.client.evaluation import Episode, EvaluationResult
    from rlmesh_ray.client.remote_model import RemoteModel
    from rlmesh_ray.client.remote_vector_env import RemoteVectorEnv

_MOST_LANES = 8


EnvOption = Annotated[
    str,
    typer.Option("--env", metavar="ENV_OR_ADDRESS", help="A Gymnasium id, or an endpoint."),
]
ModelOption = Annotated[
    str,
    typer.Option(
        "--model",
        metavar="CHECKPOINT_OR_ADDRESS",
        help="What serve-model takes, or an endpoint.",
    ),
]
EpisodesOption = Annotated[int, typer.Option("--episodes", min=1, help="How many.")]
SeedOption = Annotated[
    int | None,
    typer.Option("--seed", help="Of the first episode; episode i starts with seed + i."),
]
LanesOption = Annotated[
    int | None,
    typer.Option("--num-envs", min=1, help="Lanes, for an id.", show_default="at most 8"),
]
ModelTokenFile = Annotated[
    Path | None,
    typer.Option(
        "--model-token-file",
        exists=True,
        dir_okay=False,
        help="File with the model endpoint's token, where it differs.",
    ),
]
ModelEditionText = Annotated[
    str | None,
    typer.Option(
        "--model-edition-text", metavar="NAME_OR_SHA256", help="The same, of the model's endpoint."
    ),
]


def evaluate(  # noqa: PLR0913  # the command line; every option stands alone
    context: typer.Context,
    env: EnvOption,
    model: ModelOption,
    episodes: EpisodesOption = 20,
    seed: SeedOption = None,
    num_envs: LanesOption = None,
    token_file: TokenFile = None,
    model_token_file: ModelTokenFile = None,
    tls_ca: TlsAuthority = None,
    edition_text: EditionText = None,
    model_edition_text: ModelEditionText = None,
    _json: JsonFlag = False,
    _debug: DebugFlag = False,
) -> None:
    """Run episodes and count the returns.

    What is not served yet, an id or a checkpoint, is served for the length of the command.
    """
    from rlmesh_ray.client.evaluation import evaluate as run

    console: Console = context.obj
    _require_address(env, edition_text, "--edition-text")
    _require_address(model, model_edition_text, "--model-edition-text")
    token = read_token(token_file)
    model_token = read_token(model_token_file) if model_token_file else token
    tls = client_tls(tls_ca)
    with contextlib.ExitStack() as stack:
        if looks_like_address(env):
            _check_width(env, num_envs, token, tls, edition_text)
        lanes = num_envs or min(episodes, _MOST_LANES)
        remote_env = stack.enter_context(_dialed_env(env, lanes, token, tls, edition_text))
        remote_model, model_address = stack.enter_context(
            _dialed_model(model, model_token, tls, model_edition_text)
        )
        with _Meter(console, episodes) as meter:
            result = run(
                remote_env, remote_model, episodes=episodes, seed=seed, on_episode=meter.advance
            )
        _tell(console, result, remote_env.address, model_address)


def _require_address(name: str, edition_text: str | None, option: str) -> None:
    """Refuse an option that would be ignored.

    Raises:
        typer.BadParameter: A text is given for what is no endpoint.
    """
    if edition_text is not None and not looks_like_address(name):
        raise typer.BadParameter(
            f"it is for an endpoint, and {name} is none; leave it out", param_hint=option
        )


def _check_width(
    address: str,
    num_envs: int | None,
    token: str | None,
    tls: "ClientTls | None",
    edition_text: str | None,
) -> None:
    """Ask an endpoint what it serves, before a session is opened there.

    Raises:
        ContractMismatchError: Its sessions have another width than was asked for.
        EndpointError: It cannot be reached.
    """
    from rlmesh_ray.client.channel import Dial
    from rlmesh_ray.client.env_client import shake_hands

    contract = shake_hands(Dial(address, token, tls, edition_text=edition_text)).contract
    width = getattr(contract, "num_envs", None)
    if num_envs not in (None, width):
        raise ContractMismatchError(
            f"{address} serves {width} lanes a session, not {num_envs}; leave --num-envs out"
        )


@contextlib.contextmanager
def _dialed_env(
    env: str,
    num_envs: int,
    token: str | None,
    tls: "ClientTls | None",
    edition_text: str | None,
) -> "Iterator[RemoteVectorEnv]":
    """Dial ``env``, serving it first where it is an id."""
    from rlmesh_ray.client.remote_vector_env import RemoteVectorEnv

    if looks_like_address(env):
        with contextlib.closing(
            RemoteVectorEnv(env, token=token, tls=tls, edition_text=edition_text)
        ) as remote:
            yield remote
        return
    from rlmesh_ray.server.env_server import EnvServer

    with (
        EnvServer(env, num_envs=num_envs) as server,
        contextlib.closing(RemoteVectorEnv(server.address)) as remote,
    ):
        yield remote


@contextlib.contextmanager
def _dialed_model(
    model: str, token: str | None, tls: "ClientTls | None", edition_text: str | None
) -> "Iterator[tuple[RemoteModel, str]]":
    """Dial ``model``, serving it first where it is a checkpoint; also return its address."""
    from rlmesh_ray.client.remote_model import RemoteModel

    if looks_like_address(model):
        with RemoteModel(model, token=token, tls=tls, edition_text=edition_text) as remote:
            yield remote, model
        return
    from rlmesh_ray.models.loading import load_policy
    from rlmesh_ray.server.model_server import ModelServer

    with muted():
        policy = load_policy(model)
    with ModelServer(policy) as server, RemoteModel(server.address) as remote:
        yield remote, server.address


class _Meter:
    """Shows the episodes as they end."""

    def __init__(self, console: Console, num_episodes: int) -> None:
        self._console = console
        self._bar = Progress(
            TextColumn("episodes"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeRemainingColumn(),
            TextColumn("{task.fields[last]}"),
            console=console.people,
            disable=not console.people.is_terminal,
            transient=True,
        )
        self._task = self._bar.add_task("episodes", total=num_episodes, last="")

    def __enter__(self) -> Self:
        self._bar.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._bar.stop()

    def advance(self, episode: "Episode") -> None:
        self._bar.update(self._task, advance=1, last=f"return {episode.episode_return:g}")
        self._console.event(
            "episode",
            index=episode.index,
            seed=episode.seed,
            episode_return=episode.episode_return,
            length=episode.length,
            terminated=episode.terminated,
        )


def _tell(
    console: Console, result: "EvaluationResult", env_address: str, model_address: str
) -> None:
    returns, lengths = result.returns, result.lengths
    console.event(
        "result",
        return_mean=result.return_mean,
        return_stderr=result.return_stderr,
        return_min=min(returns),
        return_max=max(returns),
        episodes=len(returns),
        returns=returns,
        lengths=lengths,
        env_steps=sum(lengths),
        wall_s=result.wall_s,
        env=env_address,
        model=model_address,
        # An outside program must not need them; whoever doubts it can look here.
        imported={name: name in sys.modules for name in ("ray", "torch")},
    )
    spread = f" ± {result.return_stderr:.2f} (standard error)" if len(returns) > 1 else ""
    console.facts(
        f"{len(returns)} episodes",
        {
            "mean return": f"{result.return_mean:.2f}{spread}",
            "range": f"{min(returns):g} … {max(returns):g}",
            "mean length": f"{sum(lengths) / len(lengths):.1f} steps",
            "time": f"{result.wall_s:.1f} s, {sum(lengths) / result.wall_s:,.0f} steps/s",
            "environment": env_address,
            "policy": model_address,
        },
        [],
    )
