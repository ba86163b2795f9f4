"""``rlmesh-ray compare``: the returns of two policies in the same episodes."""

import contextlib
import math
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

import rlmesh_ray
from rlmesh_ray.cli.commands.evaluate import (
    MOST_LANES,
    EnvOption,
    EpisodesOption,
    check_endpoints,
    maps_for,
    run_and_show,
    served_env,
    served_model,
)
from rlmesh_ray.cli.console import Console
from rlmesh_ray.cli.options.common import (
    EPISODES,
    ClientSecurity,
    MadeEnvFlags,
    flag,
    inference_flag,
    map_flag,
    plot_flag,
)
from rlmesh_ray.errors import ContractMismatchError, RemoteModelError
from rlmesh_ray.evaluation.options import checked_seed
from rlmesh_ray.options import INFERENCES

if TYPE_CHECKING:
    from rlmesh_ray.evaluation.result import EpisodeResult, PairedComparison


@dataclass(frozen=True)
class CompareFlags(MadeEnvFlags):
    """What both policies are run with, and the file for the result."""

    inference: Literal[INFERENCES] = inference_flag()  # type: ignore[valid-type]
    map: list[str] | None = map_flag()
    seed: int = flag(
        EPISODES,
        "Seed of the first episode, 0 or more; episode i starts with seed + i.",
        0,
        metavar="SEED",
    )
    plot: Path | None = plot_flag()


def compare(
    console: Console,
    a: Annotated[
        str, typer.Argument(metavar="A", help="A policy: what serve-model takes, or an endpoint.")
    ],
    b: Annotated[str, typer.Argument(metavar="B", help="Another policy.")],
    *,
    env: EnvOption,
    episodes: EpisodesOption = 20,
    flags: CompareFlags,
    security: ClientSecurity,
) -> None:
    """Run the same episodes with the policies A and B, and compare their returns in pairs.

    The mean difference, B minus A, has a 95 % interval (Student's t), and a sentence that says
    whether that contains 0.
    """
    from rlmesh_ray.evaluation.plot import plot_comparison
    from rlmesh_ray.evaluation.result import compare_episodes

    kwargs = flags.kwargs()
    checked_seed(episodes, flags.seed)
    to = security.to("")
    with contextlib.ExitStack() as stack:
        lanes = min(math.ceil(episodes / len(env)), MOST_LANES)
        with console.waiting("starting the environment"):
            envs = [
                stack.enter_context(served_env(replace(to, address=name), lanes, kwargs))
                for name in env
            ]
            first = check_endpoints(envs, None)[0]  # all serve the same environment
        policies = []
        # Both policies are asked before the first episode runs: episodes may take hours.
        with (
            console.waiting("loading the policies, and asking them about a first observation"),
            contextlib.closing(rlmesh_ray.RemoteVectorEnv(first)) as asking,
        ):
            observations, _ = asking.reset(seed=flags.seed)
            for name in (a, b):
                served_map, route_map = maps_for(flags.map, [name])
                policy = stack.enter_context(
                    served_model(replace(to, address=name), flags.inference, served_map)
                )
                _require_answer(name, policy, asking.contract, observations, route_map)
                policies.append((policy, route_map))
        of_a: list[EpisodeResult] = []
        of_b: list[EpisodeResult] = []
        try:
            for (policy, route_map), finished in zip(policies, (of_a, of_b), strict=True):
                run_and_show(
                    console,
                    envs,
                    [policy],
                    episodes,
                    finished=finished,
                    seed=flags.seed,
                    observation_map=route_map,
                )
        finally:
            if of_b:  # also after Ctrl-C: the pairs may have taken hours
                comparison = compare_episodes(of_a, of_b)
                _show(console, comparison, a, b)
                if flags.plot is not None:
                    plot_comparison(comparison, of_a, of_b, flags.plot, (a, b))
                    console.say(f"plot: {flags.plot}")


def _require_answer(
    name: str,
    policy: "rlmesh_ray.ConnectOptions",
    contract: "rlmesh_ray.EnvContract",
    observations: object,
    observation_map: "rlmesh_ray.ObservationMap | None",
) -> None:

    with rlmesh_ray.RemoteModel(policy.address, token=policy.token, tls=policy.tls) as model:
        try:
            model.configure_route(contract, observation_map=observation_map)
            model.predict(observations)
        except (ContractMismatchError, RemoteModelError) as error:
            raise ContractMismatchError(
                f"policy {name} does not fit the environment: {error}; compare policies that "
                "evaluate can run there"
            ) from error


def _show(console: Console, comparison: "PairedComparison", a: str, b: str) -> None:
    difference = comparison.difference
    console.event(
        "comparison",
        a=a,
        b=b,
        seeds=comparison.seeds,
        differences=comparison.differences,
        difference_mean=difference.mean,
        difference_low=difference.low,
        difference_high=difference.high,
        contains_zero=comparison.contains_zero,
        verdict=comparison.verdict,
    )
    title = f"{len(comparison.seeds)} pairs of episodes with the same seeds"
    answer = f"mean return {difference} (Student's t, paired)\n{comparison.verdict}"
    console.facts(title, {"A": a, "B": b, "B - A": answer}, [])
