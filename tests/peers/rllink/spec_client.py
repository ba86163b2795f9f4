"""A CartPole simulator written from the description of RLlink alone: JSON and ONNX.

It shares no code with this package, and uses none of what the description does not have. Takes
the port, and the name of the model's input.
"""

import base64
import gzip
import json
import socket
import sys
from typing import Any

import gymnasium
import numpy as np
import onnxruntime


def send(line: socket.socket, message: dict[str, Any]) -> None:
    """Write a message."""
    body = json.dumps(message).encode("utf-8")
    line.sendall(str(len(body)).zfill(8).encode("utf-8") + body)


def receive(line: socket.socket, kind: str) -> dict[str, Any]:
    """Read a message."""

    def read(size: int) -> bytes:
        data = b""
        while len(data) < size:
            part = line.recv(size - len(data))
            if not part:
                sys.exit(0)  # the training is over
            data += part
        return data

    message: dict[str, Any] = json.loads(read(int(read(8))))
    assert message["type"] == kind, message
    return message


def session_of(state: dict[str, Any]) -> Any:
    """Load the model."""
    model = gzip.decompress(base64.b64decode(state["onnx_file"]))
    return onnxruntime.InferenceSession(model, providers=["CPUExecutionProvider"])


def main() -> None:
    """Simulate until the server hangs up."""
    line = socket.create_connection(("localhost", int(sys.argv[1])))
    send(line, {"type": "PING"})
    receive(line, "PONG")
    send(line, {"type": "GET_CONFIG"})
    config = receive(line, "SET_CONFIG")
    assert config["force_on_policy"]
    send(line, {"type": "GET_STATE"})
    state = receive(line, "SET_STATE")
    session, random = session_of(state), np.random.default_rng(int(sys.argv[3]))
    env = gymnasium.make("CartPole-v1")
    obs, _ = env.reset()
    episodes = [new_episode(obs)]
    env_steps = 0
    while True:
        (logits,) = session.run(None, {sys.argv[2]: obs[None]})
        odds = np.exp(logits[0] - logits[0].max())
        action = int(random.choice(len(odds), p=odds / odds.sum()))
        obs, reward, terminated, truncated, _ = env.step(action)
        env_steps += 1
        episode = episodes[-1]
        episode["obs"].append(obs.tolist())
        episode["actions"].append(action)
        episode["rewards"].append(float(reward))
        episode["is_terminated"], episode["is_truncated"] = bool(terminated), bool(truncated)
        is_done = terminated or truncated
        if env_steps == config["env_steps_per_sample"]:
            send(
                line,
                {
                    "type": "EPISODES_AND_GET_STATE",
                    "episodes": episodes,
                    "env_steps": env_steps,
                    "weights_seq_no": state["weights_seq_no"],
                },
            )
            state = receive(line, "SET_STATE")
            session, env_steps = session_of(state), 0
            episodes = [] if is_done else [new_episode(obs)]
        if is_done:
            obs, _ = env.reset()
            episodes.append(new_episode(obs))


def new_episode(obs: Any) -> dict[str, Any]:
    """Begin an episode, or go on with one."""
    return {
        "obs": [obs.tolist()],
        "actions": [],
        "rewards": [],
        "is_terminated": False,
        "is_truncated": False,
    }


main()
