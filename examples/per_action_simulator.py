"""A simulator that only asks for actions and reports rewards; RLlib learns from it all the same.

    python examples/per_action_simulator.py 127.0.0.1:5555

For programs that can run no model, in any language: this one needs nothing but Python's
standard library. RLlib learns in ``rllink_training.py``, which is started first; it chooses the
actions, and puts the episodes together. Each message is eight digits that say how long it is, and
JSON:

    {"type": "START_EPISODE"}                                    -> {..., "episode_id": ID}
    {"type": "GET_ACTION", "episode_id": ID, "obs": [...]}       -> {..., "action": ...}
    {"type": "LOG_RETURNS", "episode_id": ID, "reward": 1.0}     no answer
    {"type": "END_EPISODE", "episode_id": ID, "obs": [...], "is_truncated": false}   no answer
"""

import argparse
import json
import math
import os
import random
import socket
from typing import Any

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
parser.add_argument("address", help="HOST:PORT of the training")

Pole = tuple[float, float, float, float]
"""Where the cart is, its speed, the pole's angle, and how fast that changes."""


def main(arguments: argparse.Namespace) -> None:
    """Simulate until the training hangs up."""
    host, _, port = arguments.address.rpartition(":")
    num_episodes = 0
    with socket.create_connection((host, int(port))) as line:
        # Else each question would wait for the acknowledgement of the report before it: 40 ms.
        line.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        try:
            token = os.environ.get("RLMESH_RAY_TOKEN")
            ask(line, {"type": "PING", **({"token": token} if token else {})})
            while True:
                play(line)
                num_episodes += 1
        except ConnectionError:
            print(f"the training is over; {num_episodes} episodes were played")


def play(line: socket.socket) -> None:
    """Play an episode of at most 500 steps."""
    episode = {"episode_id": ask(line, {"type": "START_EPISODE"})["episode_id"]}
    pole: Pole = (
        random.uniform(-0.05, 0.05),
        random.uniform(-0.05, 0.05),
        random.uniform(-0.05, 0.05),
        random.uniform(-0.05, 0.05),
    )
    for _ in range(500):
        answer = ask(line, {"type": "GET_ACTION", "obs": pole, **episode})
        pole = pushed(pole, to_the_right=answer["action"] == 1)
        send(line, {"type": "LOG_RETURNS", "reward": 1.0, **episode})
        if abs(pole[0]) > 2.4 or abs(pole[2]) > math.radians(12):
            send(line, {"type": "END_EPISODE", "obs": pole, **episode})
            return
    send(line, {"type": "END_EPISODE", "obs": pole, "is_truncated": True, **episode})


def pushed(pole: Pole, *, to_the_right: bool) -> Pole:
    """Return the pole a fiftieth of a second later; the same as Gymnasium's CartPole."""
    where, speed, angle, turning = pole
    force = 10.0 if to_the_right else -10.0
    part = (force + 0.05 * turning**2 * math.sin(angle)) / 1.1
    turned = (9.8 * math.sin(angle) - math.cos(angle) * part) / (
        0.5 * (4.0 / 3.0 - 0.1 * math.cos(angle) ** 2 / 1.1)
    )
    pushed_by = part - 0.05 * turned * math.cos(angle) / 1.1
    return (
        where + 0.02 * speed,
        speed + 0.02 * pushed_by,
        angle + 0.02 * turning,
        turning + 0.02 * turned,
    )


def send(line: socket.socket, message: dict[str, Any]) -> None:
    """Send a message."""
    body = json.dumps(message).encode()
    line.sendall(b"%08d" % len(body) + body)


def ask(line: socket.socket, message: dict[str, Any]) -> dict[str, Any]:
    """Send a message, and return the answer."""
    send(line, message)
    answer: dict[str, Any] = json.loads(received(line, int(received(line, 8))))
    if answer["type"] == "ERROR":
        raise SystemExit(answer["message"])
    return answer


def received(line: socket.socket, size: int) -> bytes:
    """Return so many bytes."""
    data = b""
    while len(data) < size:
        part = line.recv(size - len(data))
        if not part:
            raise ConnectionError
        data += part
    return data


if __name__ == "__main__":
    main(parser.parse_args())
