"""Teach a policy to choose eight actions at once, serve it, and steer an arm with it in real time.

    python examples/chunked_policy.py --out arm.png

The policy is a small transformer as in ACT: it imitates demonstrations, and each answer has the
actions of the next 8 steps, a chunk. It is served with the latency of a larger one, 20 to 60 ms,
while the arm needs an action each 20 ms and goes on without one. The arm is steered in four ways;
a table says how well each kept pace, and a picture shows why. Torch and matplotlib are in the extra
``rllib``: ``pip install ".[rllib]"``.
"""

import argparse
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import gymnasium
import numpy as np
import torch
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from numpy.typing import NDArray

from rlmesh_ray import ModelServer, RemoteModel

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
parser.add_argument("--out", default="arm.png", help="the picture")
parser.add_argument("--quick", action="store_true", help="train and steer for a moment only")

HORIZON = 8
PERIOD_S = 0.02
WAYS: dict[str, dict[str, Any]] = {
    "one action a request": {"execution_horizon": 1},
    "chunks, no prefetch": {"prefetch": 0},
    "prefetch, newest": {"blend": "newest"},
    "prefetch, mean": {"blend": "mean"},
}
"""Options of ``RemoteModel.actions``."""
COLOURS = ("#009e73", "#d55e00", "#0072b2", "#cc79a7")
STEERED_SEED = 1000
"""No demonstration has it."""

Array = NDArray[Any]


class Arm(gymnasium.Env[Array, Array]):
    """Two joints in a plane, whose tip follows a target that moves at random.

    An action is the angles that the joints go to, in rad. An observation is the joints' angles, the
    target's position (m) and its velocity (m/s).
    """

    LINKS = np.array([0.5, 0.5])
    CENTRE = np.array([0.0, 0.6])

    def __init__(self) -> None:
        self.observation_space = gymnasium.spaces.Box(-10, 10, (6,), np.float32)
        self.action_space = gymnasium.spaces.Box(-2 * np.pi, 2 * np.pi, (2,), np.float32)

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Array, dict[str, Any]]:
        """Begin somewhere."""
        super().reset(seed=seed)
        self.joints = np.array([0.9, 1.3]) + self.np_random.normal(0, 0.4, 2)
        self.target = self.CENTRE + self.np_random.normal(0, 0.1, 2)
        self.velocity = self.np_random.normal(0, 0.3, 2)
        return self._observation(), {}

    def step(self, action: Array) -> tuple[Array, float, bool, bool, dict[str, Any]]:
        """Move for 20 ms; the reward is the distance from the target, negative."""
        self.joints += np.clip(0.5 * (action - self.joints), -0.15, 0.15)
        push = self.np_random.normal(0, 3, 2)  # no policy can foresee it
        self.velocity += PERIOD_S * (push - 9 * (self.target - self.CENTRE) - self.velocity)
        self.target += PERIOD_S * self.velocity
        distance = float(np.linalg.norm(self._tip() - self.target))
        return self._observation(), -distance, False, False, {}

    def _tip(self) -> Array:
        angles = np.cumsum(self.joints)
        return np.array([self.LINKS @ np.cos(angles), self.LINKS @ np.sin(angles)])

    def _observation(self) -> Array:
        return np.concatenate([self.joints, self.target, self.velocity]).astype(np.float32)


def expert(observation: Array) -> Array:
    """Return the angles that bring the tip to where the target will be, by inverse kinematics."""
    joints, target, velocity = observation.reshape(3, 2)
    x, y = target + PERIOD_S * velocity
    first, second = Arm.LINKS
    reach = np.clip(np.hypot(x, y), 0.2, 0.98)
    elbow = np.arccos((reach**2 - first**2 - second**2) / (2 * first * second))
    shoulder = np.arctan2(y, x) - np.arctan2(second * np.sin(elbow), first + second * np.cos(elbow))
    # A joint goes half of its way in a step.
    wanted = 2 * np.array([shoulder, elbow]) - joints
    return wanted.astype(np.float32)


class ChunkPolicy(torch.nn.Module):
    """Observations ``(rows, 6)`` -> actions ``(rows, HORIZON, 2)``."""

    horizon = HORIZON

    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.embed = torch.nn.Linear(2, width)
        self.places = torch.nn.Parameter(torch.randn(3, width))
        self.queries = torch.nn.Parameter(torch.randn(HORIZON, width))
        layer = torch.nn.TransformerDecoderLayer(
            width, nhead=4, dim_feedforward=2 * width, dropout=0.0, batch_first=True
        )
        self.decoder = torch.nn.TransformerDecoder(layer, num_layers=1)
        self.head = torch.nn.Linear(width, 2)

    def forward(self, observations: torch.Tensor) -> torch.Tensor:
        """Let a query for each step look at the joints, the target and its velocity."""
        tokens = self.embed(observations.unflatten(1, (3, 2))) + self.places
        queries = self.queries.expand(len(observations), -1, -1)
        chunk: torch.Tensor = observations[:, None, :2] + self.head(self.decoder(queries, tokens))
        return chunk


def demonstrations(num_episodes: int, num_steps: int = 60) -> tuple[torch.Tensor, torch.Tensor]:
    """Return observations of the expert, and the actions that it took from each of them on."""
    arm = Arm()
    observations, chunks = [], []
    for episode in range(num_episodes):
        seen, taken = [], []
        observation, _ = arm.reset(seed=episode)
        for _ in range(num_steps):
            seen.append(observation)
            taken.append(expert(observation))
            observation, *_ = arm.step(taken[-1])
        windows = np.lib.stride_tricks.sliding_window_view(taken, HORIZON, axis=0)
        observations.append(seen[: len(windows)])
        chunks.append(windows.swapaxes(1, 2))
    return torch.tensor(np.concatenate(observations)), torch.tensor(np.concatenate(chunks))


def train(num_updates: int, num_episodes: int) -> ChunkPolicy:
    """Imitate the expert."""
    torch.manual_seed(0)
    policy = ChunkPolicy()
    observations, chunks = demonstrations(num_episodes)
    optimizer = torch.optim.AdamW(policy.parameters(), lr=2e-3)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 2e-3, total_steps=num_updates)
    for _ in range(num_updates):
        rows = torch.randint(len(observations), (128,))
        loss = (policy(observations[rows]) - chunks[rows]).abs().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
    print(f"imitation: an error of {loss:.3f} rad after {num_updates} updates")
    return policy.eval()


def tracking_error(act: Callable[[Array], Array]) -> float:
    """Return the mean distance from the target, in cm, where the arm waits for each action."""
    arm = Arm()
    observation, _ = arm.reset(seed=STEERED_SEED)
    distances = []
    for _ in range(400):
        observation, reward, *_ = arm.step(act(observation))
        distances.append(-reward)
    return 100 * float(np.mean(distances))


class SlowPolicy:
    """The policy as a function that takes as long as a larger one would.

    A module that sleeps would soon be compiled, without its sleep.
    """

    horizon = HORIZON

    def __init__(self, policy: ChunkPolicy) -> None:
        self._policy = policy
        self._random = np.random.default_rng(0)

    def __call__(self, observations: Array) -> Array:
        """Return the chunk of each row, late."""
        time.sleep(self._random.uniform(0.02, 0.06))
        return self.chunks(observations)

    def chunks(self, observations: Array) -> Array:
        """Return the chunk of each row at once."""
        with torch.inference_mode():
            chunks: Array = self._policy(torch.tensor(observations)).numpy()
        return chunks


class Record(NamedTuple):
    """What happened in one way of steering; a row for each action, but for the distances."""

    distances: Array
    """Distance from the target; a row for each step of the arm."""
    at_s: Array
    """When the action was played, by the arm's clock."""
    commands: Array
    """The action."""
    waits_s: Array
    """How long the loop waited for it."""
    latencies_s: Array
    """How long the policy took for its chunk; NaN for all but the first that is played of it."""
    starved: Array
    """Starved steps so far."""
    late: Array
    """Late actions so far."""


def steer(model: RemoteModel, num_steps: int, options: dict[str, Any]) -> Record:
    """Steer the arm in real time; while an action is missing, the arm keeps the one before."""
    arm = Arm()
    observation, _ = arm.reset(seed=STEERED_SEED)
    action = arm.joints.astype(np.float32)
    telemetry = None
    rows: list[tuple[Any, ...]] = []
    distances: list[float] = []
    with model.actions(arm, **options) as player:
        start_s = time.monotonic()
        while len(distances) < num_steps:
            asked_s = time.monotonic()
            next_action = player.act(observation)
            now_s = time.monotonic()
            while (len(distances) + 1) * PERIOD_S < now_s - start_s:
                distances.append(-arm.step(action)[1])
            action = next_action
            latency_s = np.nan
            latest = model.last_telemetry()
            if latest is not None and latest is not telemetry:  # another chunk has come
                telemetry, latency_s = latest, latest.queue_s + latest.forward_s
            at_s, wait_s, counts = len(distances) * PERIOD_S, now_s - asked_s, player.statistics
            rows.append((at_s, action, wait_s, latency_s, counts.num_starved, counts.num_late))
            observation, reward, *_ = arm.step(action)
            distances.append(-reward)
            time.sleep(max(0.0, start_s + len(distances) * PERIOD_S - time.monotonic()))
    return Record(np.array(distances), *map(np.array, zip(*rows, strict=True)))


def table(records: dict[str, Record]) -> str:
    """Return a line for each way."""
    lines = [f"{'':20}  actions/s  actions  starved  late  latency  distance"]
    for way, record in records.items():
        rate = len(record.commands) / (len(record.distances) * PERIOD_S)
        latency_ms = 1000 * np.nanmedian(record.latencies_s)
        lines.append(
            f"{way:20}  {rate:9.1f}  {len(record.commands):7}  {record.starved[-1]:7}  "
            f"{record.late[-1]:4}  {latency_ms:4.0f} ms  {100 * record.distances.mean():5.1f} cm"
        )
    return "\n".join(lines)


def draw(records: dict[str, Record], path: str) -> None:
    """Draw latency, starved steps, and commands where chunks meet, into a PNG."""
    # Without pyplot, which has global state and needs a display.
    figure = Figure(figsize=(9.0, 9.0), dpi=110, layout="constrained")
    waits, starved, commands = figure.subplots(3, 1)
    for (way, record), colour in zip(records.items(), COLOURS, strict=True):
        style = "--" if way == "prefetch, mean" else "-"
        waits.plot(record.at_s, 1000 * record.latencies_s, ".", color="#cccccc", zorder=0)
        waits.plot(record.at_s, 1000 * record.waits_s, ".", color=colour)
        starved.plot(record.at_s, record.starved, style, color=colour, label=way)
        if way.startswith("prefetch"):
            middle_s = len(record.distances) * PERIOD_S / 2
            shown = (record.at_s >= middle_s) & (record.at_s < middle_s + 1)
            begins = shown & ~np.isnan(record.latencies_s)
            for rows, look in ((shown, f".{style}"), (begins, "o")):
                commands.plot(record.at_s[rows], record.commands[rows, 1], look, color=colour)
    waits.axhline(1000 * PERIOD_S, color="black", linestyle=":", linewidth=1)
    waits.set(title="Wait for each action; grey: the policy's latency; dotted: a step", ylabel="ms")
    starved.set(title="Steps whose action had not come in time, so far", ylabel="starved steps")
    commands.set(title="Second joint; large: the first action of a chunk", ylabel="command, rad")
    commands.set_xlabel("s")
    for axes in (waits, starved, commands):
        axes.grid(alpha=0.3)
    figure.legend(loc="outside lower center", ncols=len(records))
    FigureCanvasAgg(figure).print_png(path)


def main(arguments: argparse.Namespace) -> None:
    """Train, serve, steer in four ways, and show how it went."""
    num_updates, num_episodes, num_steps = (100, 50, 25) if arguments.quick else (1000, 200, 400)
    torch.set_num_threads(1)
    policy = SlowPolicy(train(num_updates, num_episodes))
    of_policy = tracking_error(lambda observation: policy.chunks(observation[None])[0, 0])
    print(
        f"without latency: the expert is {tracking_error(expert):.1f} cm from the target, the "
        f"policy {of_policy:.1f} cm"
    )
    records = {}
    with ModelServer(policy) as server, RemoteModel(server.address) as model:
        for way, options in WAYS.items():
            records[way] = steer(model, num_steps, options)
    print(table(records))
    draw(records, arguments.out)
    print("the picture is", arguments.out)


if __name__ == "__main__":
    main(parser.parse_args())
