"""Records the golden corpus: ``python -m tests.golden.capture [SESSION ...]``.

Runs real sessions through a relay, most of them with the published packages in their own virtual
environments (``make test-slow`` builds them), and writes what went over. ``tests.golden.reread``
then says what it means. Ids and times differ from run to run, and so do the bytes: record anew
only what has to be.
"""

import platform
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np

from rlmesh_ray import (
    ConnectOptions,
    EnvServer,
    ListenOptions,
    ModelServer,
    RemoteEnv,
    RemoteModel,
    RemoteVectorEnv,
    RlmeshError,
)
from rlmesh_ray.client.model.remote_model import Slots
from tests.golden.corpus import HERE, Frame, Line, write
from tests.golden.relay import Relay, relayed
from tests.peers.rlmesh_b3 import peer as b3
from tests.peers.rlmesh_b3 import world
from tests.peers.rlmesh_released import peer as released
from tests.peers.rlmesh_released.made import make
from tests.peers.rlmesh_released.trouble import Deed

Session = Callable[[], Iterator[Relay]]

_MOST = 16  # frames of a session


@contextmanager
def released_env(*arguments: object) -> Iterator[tuple[str, Relay]]:
    with released.serving("serve_env", *arguments) as server, relayed(server) as both:
        yield both


@contextmanager
def our_env(name: str, num_envs: int, **options: Any) -> Iterator[tuple[str, Relay]]:
    with (
        EnvServer(lambda: make(name), num_envs=num_envs, **options) as server,
        relayed(server.address) as both,
    ):
        yield both


def follow_the_pole(observations: Any) -> Any:
    return (observations[:, 2] + observations[:, 3] > 0).astype(np.int64)


# --- rlmesh-wire-v1: the released package on both sides ------------------------------------


def released_single() -> Iterator[Relay]:
    with released_env("World", "single", 1) as (address, relay):
        released.drive(
            "drive_env", "play", address=address, kind="env", framework="numpy", seed=3, count=4,
            options={"steps": 1, "by": "hand", "weights": [0.5, None]},
        )  # fmt: skip
        yield relay


def released_vector() -> Iterator[Relay]:
    with released_env("Trouble", "vector", 2) as (address, relay):
        doings = [{"seed": [3, 4]}, [0, 8], [0, 0], [5, 0], "render 1", None, [0, 0]]
        released.drive("drive_env", "deeds", address=address, doings=doings, kind="vector")
        yield relay


def released_lanes() -> Iterator[Relay]:
    with released_env("Trouble", "lanes", 2) as (address, relay):
        settings = {"action": int(Deed.SUCCEED)}
        released.drive(
            "drive_model", "run", model="Stubborn", env=address, settings=settings, seeds=[7, 8]
        )
        yield relay


def released_spaces() -> Iterator[Relay]:
    for name in ("boxes", "tuple", "nested"):
        with released_env(f"echo:{name}", "single", 1) as (address, relay):
            released.drive(
                "drive_env", "echoes", addresses={name: address}, kind="env", framework="numpy"
            )
            yield relay


def released_errors() -> Iterator[Relay]:
    # Its client gives up by itself, again and again, until the environment has come back.
    hanging = [None, "render 0", Deed.HANG, None, None, None, None]
    for doings in (hanging, [None, "render 1", Deed.RAISE]):
        with released_env("Picture", "single", 1) as (address, relay):
            released.drive("drive_env", "deeds", address=address, doings=doings, timeout_s=0.5)
            yield relay


def released_model() -> Iterator[Relay]:
    for name, horizon in (("Chunks", 3), ("Raises", 1)):
        with (
            released.serving("serve_env", "CartPole-v1", "single", 1) as env,
            released.serving("serve_model", name) as model,
            relayed(model) as (address, relay),
        ):
            released.drive(
                "drive_model", "run_remote", model=address, env=env, seeds=[3],
                max_episode_steps=5, execution_horizon=horizon,
            )  # fmt: skip
            yield relay


# --- rlmesh-wire-v1: this package on one side ----------------------------------------------


def our_env_under_released() -> Iterator[Relay]:
    with our_env("Picture", 1) as (address, relay):
        doings = [None, "render 0", "render 1", Deed.OBSERVE_BEYOND, Deed.EXIT, None]
        released.drive("drive_env", "deeds", address=address, doings=doings)
        yield relay


def our_lanes_under_released() -> Iterator[Relay]:
    with our_env("Trouble", 2, autoreset="disabled") as (address, relay):
        settings = {"action": int(Deed.SUCCEED)}
        released.drive(
            "drive_model", "run", model="Stubborn", env=address, settings=settings, seeds=[7, 8]
        )
        yield relay


def our_model_under_released() -> Iterator[Relay]:
    with (
        our_env("CartPole-v1", 1) as (env, _),
        ModelServer(follow_the_pole) as server,
        relayed(server.address) as (address, relay),
    ):
        released.drive(
            "drive_model", "run_remote", model=address, env=env, seeds=[3], max_episode_steps=2
        )
        yield relay


def our_clients_of_released() -> Iterator[Relay]:
    with released_env("Trouble", "vector", 2) as (address, relay):
        venv = RemoteVectorEnv(address)
        venv.reset(seed=[3, 4])
        for deeds in ([0, 8], [0, 0]):
            venv.step(np.array(deeds))
        venv.close()
        yield relay
    with released.serving("serve_model", "Balance") as model, relayed(model) as (address, relay):
        with RemoteModel(address) as remote:
            remote.configure_route(gymnasium.make_vec("CartPole-v1", 2))
            remote.predict(np.eye(2, 4, 2, dtype=np.float32))
            remote.close_route()
        yield relay


# --- rlmesh.protocol.v1: this package and 0.1.0b3 ------------------------------------------


def ours_single() -> Iterator[Relay]:
    with our_env("World", 1, transport="grpc") as (address, relay):
        env = RemoteEnv(address)
        start: dict[str, Any] = {"seed": 3, "options": {"steps": 1, "weights": [0.5, None]}}
        world.play(env, env.observation_space, world.actions(5, 4), **start)
        env.render()
        env.close()
        yield relay


def ours_vector() -> Iterator[Relay]:
    with our_env("Trouble", 2, transport="grpc") as (address, relay):
        venv = RemoteVectorEnv(address)
        venv.reset(seed=[3, 4])
        for deeds in ([0, 8], [0, 0], [5, 0]):
            venv.step(np.array(deeds))
        venv.close()
        yield relay


def ours_errors() -> Iterator[Relay]:
    with our_env("Picture", 1, transport="grpc") as (address, relay):
        env = RemoteEnv(address)
        env.reset(seed=1)
        try:
            env.step(Deed.EXIT)
        except RlmeshError:
            env.reset()
        env.close()
        yield relay


def ours_model() -> Iterator[Relay]:
    with ModelServer(follow_the_pole) as server, relayed(server.address) as (address, relay):
        with RemoteModel(address) as model:
            model.configure_route(gymnasium.make_vec("CartPole-v1", 2))
            slots = Slots([0, 1], ["a", "b"], [0, 4], [True, False])
            model.predict(np.eye(2, 4, 2, dtype=np.float32), slots=slots)
            model.close_route()
        yield relay


def b3_client() -> Iterator[Relay]:
    listen = ListenOptions(accept_edition_texts=[b3.EDITION_TEXT])
    with our_env("World", 2, transport="grpc", address=listen) as (address, relay):
        b3.drive(address, "vector")
        yield relay


def b3_servers() -> Iterator[Relay]:
    with b3.serving("serve_env", "World", "1") as server, relayed(server) as (address, relay):
        env = RemoteEnv(ConnectOptions(address, edition_text=b3.EDITION_TEXT))
        world.play(env, env.observation_space, world.actions(5, 3), seed=3)
        env.close()
        yield relay
    with b3.serving("serve_model") as server, relayed(server) as (address, relay):
        with RemoteModel(address, edition_text=b3.EDITION_TEXT) as model:
            model.configure_route(gymnasium.make("CartPole-v1"))
            model.predict(np.ones((1, 4), np.float32), slots=Slots([0], ["a"], [0], [True]))
            model.close_route()
        yield relay


def kept(frames: list[Frame]) -> list[Frame]:
    """Return the beginning and the end of a session, without the name of this machine's system."""
    release = platform.release().encode()
    anonymous = b"6" * len(release)
    some = frames if len(frames) <= _MOST else frames[: _MOST - 2] + frames[-2:]
    return [Frame(one.call, one.way, one.data.replace(release, anonymous)) for one in some]


SESSIONS: dict[str, tuple[Session, ...]] = {
    "rlmesh_wire_v1": (
        *(released_single, released_vector, released_lanes, released_spaces),
        *(released_errors, released_model),
        *(our_env_under_released, our_lanes_under_released, our_model_under_released),
        our_clients_of_released,
    ),
    "rlmesh_v1": (ours_single, ours_vector, ours_errors, ours_model, b3_client, b3_servers),
}


def main() -> None:
    wanted = sys.argv[1:]
    for generation, sessions in SESSIONS.items():
        for session in sessions:
            if not wanted or session.__name__ in wanted:
                record(HERE / generation, session)


def record(folder: Path, session: Session) -> None:
    """Run ``session`` and write what went over its relays, a file each."""
    folder.mkdir(exist_ok=True)
    for number, relay in enumerate(session()):
        lines = [Line(frame, None, packs=False) for frame in kept(relay.frames)]
        write(folder / f"{session.__name__}_{number}.jsonl", lines)


if __name__ == "__main__":
    main()
