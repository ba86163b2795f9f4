"""What clients saw of hash chains while faults were injected, as lines of JSON, and its checker."""

import json
import threading
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

from tests.chaos.hash_chain import Position, action_at

_MOST_SHOWN = 20


class History:
    """Written while trials run, by several threads; one lane's records are in their order.

    Args:
        path: Of the file, written anew.
    """

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file: IO[str] = path.open("w", buffering=1)  # its process may be killed
        self._lock = threading.Lock()

    def began(self, lane: str, observation: Iterable[float]) -> None:
        """An episode has begun: a reset of any kind was answered."""
        self._write(lane, "began", observation=observation)

    def continued(self, lane: str, observation: Iterable[float]) -> None:
        """More of an episode has come: its last observation again, before its next step."""
        self._write(lane, "continued", observation=observation)

    def stepped(  # what a step returns
        self,
        lane: str,
        action: int,
        observation: Iterable[float],
        reward: float,
        *,
        terminated: bool,
        truncated: bool,
    ) -> None:
        """A step was answered."""
        self._write(
            lane,
            "stepped",
            action=int(action),
            observation=observation,
            reward=float(reward),
            ends=[bool(terminated), bool(truncated)],
        )

    def marked(self, lane: str, number: int, observation: Iterable[float]) -> None:
        """A call that marks the lane was answered."""
        self._write(lane, "marked", number=number, observation=observation)

    def lost(self, lane: str, cause: str) -> None:
        """The client got the news that the lane's episode is over without its end."""
        self._write(lane, "lost", cause=cause)

    def predicted(self, lane: str, observation: Iterable[float], action: int) -> None:
        """A served policy that does what ``action_at`` says was asked, and answered."""
        self._write(lane, "predicted", observation=observation, action=int(action))

    def wrong(self, what: str) -> None:
        """Something was seen that must not be."""
        self._write("", "wrong", what=what)

    def note(self, text: str) -> None:
        """Something was measured that belongs into the scoreboard."""
        self._write("", "noted", text=text)

    def fault(self, kind: str) -> None:
        """A fault was injected."""
        self._write("", "fault", fault=kind)

    def take_over(self, path: Path) -> None:
        """Append another history."""
        with path.open() as lines, self._lock:
            self._file.writelines(line for line in lines if line.endswith("\n"))

    def close(self) -> None:
        """Write what is not yet in the file."""
        self._file.close()

    def _write(self, lane: str, event: str, **parts: Any) -> None:
        if "observation" in parts:
            parts["observation"] = [float(word) for word in parts["observation"]]
        line = json.dumps({"lane": lane, "event": event, **parts}) + "\n"
        with self._lock:
            self._file.write(line)


@dataclass
class Verdict:
    """What a checker found in a history."""

    num_steps: int = 0
    num_episodes: int = 0
    num_lost: int = 0
    num_faults: int = 0
    causes: Counter[str] = field(default_factory=Counter)
    """Of the episodes that were lost."""
    notes: list[str] = field(default_factory=list)
    violations: list[str] = field(default_factory=list)


class Checker:
    """Follows each lane through its records."""

    def __init__(self) -> None:
        self.verdict = Verdict()
        self._positions: dict[str, Position] = {}
        """Of the lanes whose episode runs."""
        self._begun: set[tuple[int, int]] = set()
        """Incarnation and episode of all that have begun."""
        self._latest: dict[int, int] = {}
        """By incarnation: its last episode."""

    def check(self, records: Iterable[dict[str, Any]]) -> Verdict:
        """Return what is in ``records``, and what should not be."""
        for number, record in enumerate(records, 1):
            problem = getattr(self, f"_{record['event']}")(record)
            if problem:
                self._positions.pop(record["lane"], None)
                self.verdict.violations.append(f"record {number}, lane {record['lane']}: {problem}")
        return self.verdict

    def _began(self, record: dict[str, Any]) -> str:
        position = Position.read(record["observation"])
        own = position.incarnation, position.episode
        is_known, latest = own in self._begun, self._latest.get(position.incarnation, 0)
        self._begun.add(own)
        self._latest[position.incarnation] = max(latest, position.episode)
        self._positions[record["lane"]] = position
        self.verdict.num_episodes += 1
        if position != Position.first(*own):
            return f"an episode begins with {position}"
        if is_known:
            return f"{position} has begun before"
        return f"{position} begins after episode {latest}" if position.episode < latest else ""

    def _stepped(self, record: dict[str, Any]) -> str:
        before = self._positions.get(record["lane"])
        if before is None:
            return "a step was answered where no episode runs"
        wanted, seen = before.after(record["action"]), Position.read(record["observation"])
        self._positions[record["lane"]] = seen
        self.verdict.num_steps += 1
        if seen != wanted:
            return f"action {record['action']} leads from {before} to {wanted}, not to {seen}"
        ends = [seen.is_terminated, seen.is_truncated]
        if (record["reward"], record["ends"]) != (seen.reward, ends):
            return f"{seen} gives {seen.reward} and ends {ends}, not {record}"
        if any(ends):
            del self._positions[record["lane"]]
        return ""

    def _continued(self, record: dict[str, Any]) -> str:
        known, seen = self._positions.get(record["lane"]), Position.read(record["observation"])
        return "" if known == seen else f"what followed {known} goes on from {seen}"

    def _marked(self, record: dict[str, Any]) -> str:
        before, seen = self._positions.get(record["lane"]), Position.read(record["observation"])
        wanted = before and before.marked(record["number"])
        self._positions[record["lane"]] = seen
        return "" if seen == wanted else f"a mark leads from {before} to {wanted}, not to {seen}"

    def _lost(self, record: dict[str, Any]) -> str:
        self._positions.pop(record["lane"], None)
        self.verdict.causes[record["cause"]] += 1
        self.verdict.num_lost += 1
        return ""

    def _predicted(self, record: dict[str, Any]) -> str:
        self.verdict.num_steps += 1
        wanted = action_at(Position.read(record["observation"]))
        return "" if record["action"] == wanted else f"the policy wants {wanted}, not {record}"

    def _wrong(self, record: dict[str, Any]) -> str:
        return str(record["what"])

    def _noted(self, record: dict[str, Any]) -> str:
        self.verdict.notes.append(record["text"])
        return ""

    def _fault(self, _record: dict[str, Any]) -> str:
        self.verdict.num_faults += 1
        return ""


def check_file(path: Path) -> Verdict:
    """Return what is in the history in a file, and what should not be."""
    with path.open() as lines:
        return Checker().check(map(json.loads, lines))


def shown(violations: Sequence[str]) -> str:
    """Return some of the violations, a line each."""
    rest = len(violations) - _MOST_SHOWN
    lines = [*violations[:_MOST_SHOWN], *([f"and {rest} more"] if rest > 0 else [])]
    return "".join(f"{line}\n" for line in lines)
