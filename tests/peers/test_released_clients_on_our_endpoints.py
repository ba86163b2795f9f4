"""The released rlmesh 0.1.0 drives our endpoints: its clients, and its native loop.

It lives in a virtual environment of its own, which ``make`` builds, and speaks another generation
than our own clients, over the same paths. What it is known to do otherwise than gymnasium:

* It has no spaces of rank 0, no empty boxes and no texts that may be empty: it refuses them.
* Observations of MultiBinary spaces arrive as uint8, and actions must be uint8.
* Its clients put two keys of their own into infos: ``episode_ids`` and ``completed_episodes``.
"""

import contextlib
import functools
import json
import os
import re
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest
from gymnasium import spaces
from gymnasium.vector import AutoresetMode, SyncVectorEnv

from rlmesh_ray import DmEnvRpcSettings, EnvServer, RemoteEnv, RemoteVectorEnv
from rlmesh_ray.client.channel import ConnectOptions
from rlmesh_ray.client.health import HealthStatus, check_health
from tests.loopback.eventually import eventually
from tests.peers.rlmesh_b3 import world
from tests.peers.rlmesh_b3.world import World
from tests.peers.rlmesh_released import echo
from tests.peers.rlmesh_released.made import make
from tests.peers.rlmesh_released.peer import TIMEOUT_S, drive, driving, serving
from tests.peers.rlmesh_released.trouble import HANG_S, Deed, Trouble

pytestmark = pytest.mark.slow

FRAMEWORKS = ["numpy", "torch"]


def served(name: str, **options: Any) -> EnvServer:
    """Return an endpoint with one of the environments that ``made`` has."""
    return EnvServer(functools.partial(make, name), **options)


def as_it_has_them(reported: Any) -> Any:
    """Return observations and infos as its clients give them, without its own keys."""
    if isinstance(reported, dict):
        own = {"episode_ids", "completed_episodes"}
        return {key: as_it_has_them(part) for key, part in reported.items() if key not in own}
    if isinstance(reported, list | tuple):
        return ["uint8" if part == "int8" else as_it_has_them(part) for part in reported]
    return reported


def cartpole_episodes(seeds: list[int]) -> list[dict[str, Any]]:
    """Play CartPole in this process, with the policy of its models; tell what it tells."""
    env = gymnasium.make("CartPole-v1")
    episodes = []
    for seed in seeds:
        observation, _ = env.reset(seed=seed)
        steps, terminated, truncated = 0, False, False
        while not (terminated or truncated):
            action = int(observation[2] + observation[3] > 0)
            observation, _, terminated, truncated, _ = env.step(action)
            steps += 1
        ended = {"terminated": terminated, "truncated": truncated, "success": None}
        episodes.append({"seed": seed, "steps": steps, "reward": float(steps), **ended})
    return episodes


# --- what its clients see ------------------------------------------------------------------


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_its_client_sees_our_environment_as_it_is_in_process(framework: str) -> None:
    local = World()
    start: dict[str, Any] = {"seed": 3, "options": {"steps": 1}}

    with served("World") as server:
        reported = drive(
            "drive_env", "play", address=server.address, kind="env", framework=framework, **start
        )

    expected = world.play(local, World.observation_space, world.actions(5, 7), **start)
    assert as_it_has_them(reported["trace"]) == as_it_has_them(expected)
    assert sum(len(entry) == 2 for entry in expected) >= 3, "two episodes must end on the way"
    assert reported["frame"] == local.render().tolist()
    assert (reported["num_envs"], reported["edition"]) == (1, "2026.06")


@pytest.mark.parametrize("framework", FRAMEWORKS)
@pytest.mark.parametrize("seed", [3, [3, 4]])
def test_its_client_sees_our_vector_as_it_is_in_process(framework: str, seed: Any) -> None:
    local = SyncVectorEnv([World] * 2)

    with served("World", num_envs=2) as server:
        reported = drive(
            "drive_env", "play", address=server.address, kind="vector", framework=framework,
            seed=seed,
        )  # fmt: skip

    # One seed for a vector is that of the first lane; it counts up from there.
    expected = world.play(local, World.observation_space, world.batches(2, 7), seed=seed)
    assert as_it_has_them(reported["trace"]) == as_it_has_them(expected)
    assert any(True in entry[2] + entry[3] for entry in expected if len(entry) > 2)
    assert reported["metadata"]["autoreset_mode"] == "AutoresetMode.NEXT_STEP"
    assert reported["num_envs"] == 2


@pytest.mark.parametrize("kind", [pytest.param("env", marks=pytest.mark.nightly), "vector"])
def test_every_kind_of_space_keeps_every_bit(kind: str) -> None:
    num_lanes = 1 if kind == "env" else 2
    with contextlib.ExitStack() as stack:
        addresses = {
            name: stack.enter_context(served(f"echo:{name}", num_envs=num_lanes)).address
            for name in echo.SPACES
        }
        reported = [
            drive("drive_env", "echoes", addresses=addresses, kind=kind, framework=framework)
            for framework in FRAMEWORKS
        ]

    for name, space in echo.SPACES.items():
        lanes = [echo.Echo(name).reset(seed=5 + lane)[0] for lane in range(num_lanes)]
        first = lanes[0] if kind == "env" else echo.batched(name, lanes)
        sent = echo.samples(name, 4) if kind == "env" else echo.batches(name, 2, 2)
        expected = [
            world.reported(space, echo.with_unsigned_flags(space, value))
            for value in [first, *sent]
        ]
        for seen in reported:
            # As text, in which zero keeps its sign.
            assert json.dumps(seen[name]) == json.dumps(expected), name


def test_a_message_may_be_larger_than_grpc_takes_by_itself() -> None:
    with served("echo:large") as server:
        assert drive("drive_env", "returns_large", address=server.address) is True


@pytest.mark.parametrize(
    ("space", "reason"),
    [
        (spaces.Box(0, 1, ()), "shape must be set"),
        (spaces.Box(0, 1, (0,)), "must be > 0"),
        (spaces.Text(3, min_length=0), "min_length must be > 0"),
    ],
)
def test_a_space_that_it_lacks_is_refused_by_its_client(
    space: spaces.Space[Any], reason: str
) -> None:
    with EnvServer(functools.partial(Static, space)) as server:
        reported = drive("drive_env", "refused", address=server.address, kind="env")

        assert reason in reported
        with RemoteEnv(server.address) as ours:
            assert ours.observation_space == space


class Static(gymnasium.Env[Any, Any]):
    """Has a space, and nothing happens in it."""

    def __init__(self, space: spaces.Space[Any]) -> None:
        self.observation_space = self.action_space = space

    def step(self, action: Any) -> Any:
        raise NotImplementedError  # no client gets so far


# --- what goes wrong -----------------------------------------------------------------------


@pytest.fixture(scope="module")
def trouble() -> Iterator[EnvServer]:
    with served("Picture") as server:
        yield server


def deeds(server: EnvServer | str, *doings: Any, **options: Any) -> list[Any]:
    """Let its client do one thing after another in Trouble; return what came of each."""
    address = server if isinstance(server, str) else server.address
    reported: list[Any] = drive("drive_env", "deeds", address=address, doings=doings, **options)
    return reported


@pytest.mark.parametrize(
    ("deed", "kind", "text"),
    [
        (Deed.RAISE, "EnvironmentException", r"^\[INTERNAL\] .*the robot fell over"),
        (Deed.EXIT, "EnvironmentException", r"^\[CRASHED\] .*exit code 3"),
        (99, "ValueError", "not in range"),
    ],
)
def test_its_client_gets_a_failure_and_goes_on(
    trouble: EnvServer, deed: int, kind: str, text: str
) -> None:
    _, failed, again, step = deeds(trouble, None, deed, {"seed": 7}, Deed.STEP)

    assert failed["error"] == kind
    assert re.search(text, failed["text"])
    assert again[0] == [7.0, 0.0]
    assert step[0] == [7.0, 1.0]


def test_a_step_without_an_episode_is_refused_and_a_reset_mends_it(trouble: EnvServer) -> None:
    early, _, step = deeds(trouble, Deed.STEP, None, Deed.STEP)

    assert (early["error"], early["text"][:11]) == ("EnvironmentException", "[NOT_READY]")
    assert step[1] == 1.0


def test_observations_that_are_no_numbers_end_its_session(trouble: EnvServer) -> None:
    _, failed, after = deeds(trouble, None, Deed.OBSERVE_NAN, None)

    assert (failed["error"], failed["text"][:10]) == ("EnvironmentException", "[INTERNAL]")
    assert "NaN" in failed["text"]
    assert after["error"] == "ConnectionError"


def test_what_is_out_of_range_is_delivered_with_a_warning_in_its_form(trouble: EnvServer) -> None:
    _, beyond, again = deeds(trouble, None, Deed.OBSERVE_BEYOND, Deed.OBSERVE_BEYOND)

    assert beyond[0] == [*again[0][:1], 1.0]
    (warning,) = beyond[-1]["rlmesh.conformance.warning"]
    assert (warning["kind"], warning["path"]) == ("observation", "$")
    assert warning["detail"].startswith("$: ")
    assert "rlmesh.conformance.warning" not in again[-1], "once a session"


def test_a_deadline_is_met_and_the_session_goes_on(trouble: EnvServer) -> None:
    # Nine resets of a second at most: the environment hangs for less, also on a busy machine.
    _, late, early, *_, mended = deeds(
        trouble, None, Deed.HANG, Deed.STEP, *[None] * 9, timeout_s=1.0
    )

    assert late["error"] == "TimeoutError"
    assert late["took_s"] < HANG_S - 1.0
    # Answered at once, although the environment still hangs.
    assert "[NOT_READY]" in early["text"]
    assert mended[0] == [-1.0, 0.0]


# --- where we do better than its own server ------------------------------------------------


@pytest.fixture(scope="module")
def its_own() -> Iterator[str]:
    with serving("serve_env", "Picture", "single", 1) as address:
        yield address


@pytest.mark.parametrize(
    "deed", [Deed.RAISE, Deed.TELL_A_HUGE_NUMBER, Deed.TELL_AN_OBJECT, "render 3"]
)
def test_what_ends_sessions_of_its_own_server_does_not_end_ours(
    trouble: EnvServer, its_own: str, deed: Any
) -> None:
    ours = deeds(trouble, None, deed, None, Deed.STEP)
    theirs = deeds(its_own, None, deed, None, Deed.STEP)

    assert [type(doing) for doing in ours[2:]] == [list, list]
    assert [doing["error"] for doing in theirs[1:]] == [
        "EnvironmentException", "ConnectionError", "ConnectionError",
    ]  # fmt: skip


def test_infos_that_its_wire_cannot_carry_come_as_text(trouble: EnvServer) -> None:
    _, huge, thing = deeds(trouble, None, Deed.TELL_A_HUGE_NUMBER, Deed.TELL_AN_OBJECT)

    assert huge[-1]["huge"] == str(2**64)
    assert thing[-1]["thing"].startswith("<object object")


def test_after_a_deadline_we_answer_at_once_and_its_own_server_does_not(
    trouble: EnvServer, its_own: str
) -> None:
    doings = [None, Deed.HANG, Deed.STEP]

    ours = deeds(trouble, *doings, timeout_s=1.0)
    theirs = deeds(its_own, *doings, timeout_s=1.0)

    assert ours[2]["error"] == "EnvironmentException"
    assert theirs[2]["error"] == "TimeoutError"


def test_a_process_that_dies_costs_an_episode_and_its_own_server_its_life(
    trouble: EnvServer,
) -> None:
    doings = [None, Deed.EXIT, None, Deed.STEP]

    ours = deeds(trouble, *doings)
    with serving("serve_env", "Trouble", "single", 1) as address:
        theirs = deeds(address, *doings)

    assert ours[3][1] == 1.0
    assert [doing["error"] for doing in theirs[1:]] == ["ConnectionError"] * 3


def test_a_health_request_gets_our_state_and_not_that_of_the_own_server(
    trouble: EnvServer, its_own: str
) -> None:
    assert check_health(ConnectOptions(trouble.address)).status is HealthStatus.SERVING
    assert check_health(ConnectOptions(its_own)).status is HealthStatus.UNKNOWN


# --- sessions ------------------------------------------------------------------------------


def test_two_of_its_clients_have_an_environment_each() -> None:
    with (
        served("Trouble") as server,
        driving("drive_env", "stays", address=server.address) as other,
    ):
        assert other.stdout is not None
        assert other.stdout.readline() == "ready\n"

        reported = deeds(server, {"seed": 5}, Deed.STEP)

        assert eventually(lambda: server.num_sessions == 1)
        assert reported[1][0] == [5.0, 1.0]


def test_a_client_of_its_that_vanishes_gives_its_place_free() -> None:
    with served("Trouble", max_sessions=1) as server:
        with driving("drive_env", "stays", address=server.address) as other:
            assert other.stdout is not None
            assert other.stdout.readline() == "ready\n"
            (refused,) = deeds(server, None)
        assert eventually(lambda: server.num_sessions == 0)
        begun, step = deeds(server, {"seed": 2}, Deed.STEP)

    assert refused["error"] == "ConnectionError"
    assert "sessions are taken" in refused["text"]
    assert (begun[0], step[0]) == ([2.0, 0.0], [2.0, 1.0])


def test_a_client_of_its_that_closes_gives_its_place_free() -> None:
    with served("Trouble", max_sessions=1) as server:
        for seed in range(3):
            begun, _ = deeds(server, {"seed": seed}, Deed.STEP)
            assert begun[0] == [float(seed), 0.0]
            assert eventually(lambda: server.num_sessions == 0)


def test_it_reaches_a_unix_socket(tmp_path: Path) -> None:
    path = tmp_path / "endpoint"
    with served("Trouble", address=f"unix:{path}"):
        begun, step = deeds(f"unix://{path}", {"seed": 1}, Deed.STEP)

    assert (begun[0], step[0]) == ([1.0, 0.0], [1.0, 1.0])


@pytest.mark.parametrize(
    ("options", "kind", "reason"),
    [
        ({"num_envs": 3}, "env", "serves 3 environments. Use RemoteVectorEnv"),
        ({}, "vector", "num_envs >= 2"),
        ({"dialects": ("rlmesh.protocol.v1",)}, "env", "does not speak rlmesh-wire-v1"),
        ({"token": "secret"}, "env", "requires a token"),
    ],
)
def test_its_client_gets_the_reason_why_it_does_not_fit(
    options: dict[str, Any], kind: str, reason: str
) -> None:
    with served("Trouble", **options) as server:
        reported = drive("drive_env", "refused", address=server.address, kind=kind)

    assert reason in reported


@pytest.mark.parametrize("allowed", [False, True])
def test_its_owner_may_shut_us_down_if_we_allow_it(allowed: bool) -> None:
    with served("Trouble", allow_shutdown=allowed) as server:
        stops = drive("drive_env", "shuts_down", address=server.address)

        assert stops is allowed
        assert server.wait(TIMEOUT_S if allowed else 0.0) is allowed


def test_an_environment_that_resets_within_the_step_is_refused_with_the_reason() -> None:
    vector = functools.partial(SyncVectorEnv, [Trouble] * 2, autoreset_mode=AutoresetMode.SAME_STEP)
    with EnvServer(vector) as server:
        reported = drive("drive_env", "refused", address=server.address, kind="vector")

    assert "SAME_STEP" in reported


@pytest.mark.nightly
def test_ten_thousand_steps_leave_nothing_behind() -> None:
    with (
        served("CartPole-v1") as server,
        driving("drive_env", "steps", address=server.address) as client,
    ):

        def step(count: int) -> float:
            assert client.stdin is not None
            assert client.stdout is not None
            client.stdin.write(f"{count}\n")
            client.stdin.flush()
            return float(client.stdout.readline())

        step(2_000)
        before = resident_bytes()
        rewards = step(10_000)
        after = resident_bytes()

    assert rewards == 12_000
    assert after - before < 2**20, f"{after - before} bytes more"


def resident_bytes() -> int:
    """Return how much memory this process has, with the processes of its environments."""
    own = Path("/proc/self").resolve()
    children = " ".join(path.read_text() for path in own.glob("task/*/children")).split()
    processes = [own, *(Path("/proc", pid) for pid in children)]
    ours = [one for one in processes if b"rlmesh_ray.envs" in (one / "cmdline").read_bytes()]
    assert ours, "the environment runs in a process of its own"
    pages = [int((one / "statm").read_text().split()[1]) for one in [own, *ours]]
    return sum(pages) * os.sysconf("SC_PAGE_SIZE")


# --- its native loop -----------------------------------------------------------------------


def run(server: EnvServer, model: str, **options: Any) -> Any:
    """Let its native loop run one of its models in the endpoint's environment."""
    return drive("drive_model", "run", model=model, env=server.address, **options)


def test_its_loop_plays_the_episodes_that_the_environment_has_in_process() -> None:
    with served("CartPole-v1") as server:
        reported = run(server, "Balance", seeds=[0, 1, 2])

    assert reported["episodes"] == cartpole_episodes([0, 1, 2])


def test_its_loop_drives_lanes_each_by_itself() -> None:
    with served("CartPole-v1", num_envs=3, autoreset="disabled") as server:
        reported = run(server, "Balance", seeds=[0, 1, 2, 3, 4, 5])

    by_seed = sorted(reported["episodes"], key=lambda episode: episode["seed"])
    assert by_seed == cartpole_episodes([0, 1, 2, 3, 4, 5])


def test_its_loop_drives_a_vector_that_resets_itself() -> None:
    with served("Trouble", num_envs=2) as server:
        reported = run(server, "Stubborn", episodes=5)

    assert reported["episodes"] == [
        {"seed": None, "steps": 5, "reward": 15.0, "terminated": False, "truncated": True,
         "success": None}
    ] * 5  # fmt: skip


def test_its_loop_learns_of_success_and_cuts_episodes_off() -> None:
    with served("Trouble") as server:
        succeeds = run(server, "Stubborn", settings={"action": Deed.SUCCEED}, seeds=[5])
        cut_off = run(server, "Stubborn", episodes=2, max_episode_steps=2)

    assert [(end["steps"], end["success"]) for end in succeeds["episodes"]] == [(1, True)]
    assert [(end["steps"], end["truncated"]) for end in cut_off["episodes"]] == [(2, True)] * 2


def test_its_loop_times_us() -> None:
    with served("Trouble") as server:
        reported = run(server, "Stubborn")

    for metric in ("total", "decode", "user", "encode", "queue"):
        assert f"env.step endpoint.{metric}" in reported["metrics"]


def test_its_loop_tells_why_the_environment_failed() -> None:
    with served("Trouble") as server:
        reported = run(server, "Stubborn", settings={"action": Deed.RAISE})

    assert reported["error"] == "EnvironmentException"
    assert "the robot fell over" in reported["text"]


# --- everybody at once ---------------------------------------------------------------------


def test_clients_of_three_protocols_share_an_endpoint() -> None:
    with (
        served("Trouble", num_envs=2) as server,
        contextlib.closing(RemoteVectorEnv(server.address)) as ours,
        contextlib.closing(
            RemoteVectorEnv(
                f"dm_env_rpc://{server.address}", dm_env_rpc=DmEnvRpcSettings(num_envs=2)
            )
        ) as dm_env_rpc,
    ):
        plays: list[Callable[[], list[Any]]] = [
            functools.partial(three_steps, ours),
            functools.partial(three_steps, dm_env_rpc),
            functools.partial(deeds, server, {"seed": 3}, *[[Deed.STEP] * 2] * 3, kind="vector"),
        ]
        with ThreadPoolExecutor(3) as pool:
            seen = list(pool.map(lambda play: play(), plays))

    expected = [[[3.0, float(step)], [4.0, float(step)]] for step in range(4)]
    assert seen[0] == expected
    assert [moment[0] for moment in seen[2]] == expected
    # dm_env_rpc has no seeds.
    assert [[lane[1] for lane in moment] for moment in seen[1]] == [[n, n] for n in range(4)]


def three_steps(venv: RemoteVectorEnv) -> list[Any]:
    """Play as the driver does; return the observations."""
    seen = [venv.reset(seed=[3, 4])[0]]
    seen += [venv.step(np.array([Deed.STEP] * 2))[0] for _ in range(3)]
    return [observation.tolist() for observation in seen]
