"""Ask a policy with openpi's published client, step by step; print what it answers as JSON.

``infer.py HOST PORT KEY HORIZON NUM_STEPS``: the broker asks once for each HORIZON steps.
"""

import json
import sys

import numpy as np
from openpi_client.action_chunk_broker import ActionChunkBroker
from openpi_client.websocket_client_policy import WebsocketClientPolicy


def main(host: str, port: str, key: str, horizon: str, num_steps: str) -> None:
    """Print the metadata, an action a step, and the text of an error."""
    policy = WebsocketClientPolicy(host, int(port), key or None)
    broker = ActionChunkBroker(policy, int(horizon))
    actions = []
    for step in range(int(num_steps)):
        observation = {
            "observation/image": np.zeros((4, 4, 3), np.uint8),
            "observation/state": np.full(2, step, np.float64),
            "prompt": "lift",
        }
        actions.append(broker.infer(observation)["actions"].tolist())
    policy.reset()
    try:
        policy.infer({"observation/state": np.zeros(3)})
        error = ""
    except RuntimeError as caught:
        error = str(caught)
    metadata = {key: repr(value) for key, value in policy.get_server_metadata().items()}
    sys.stdout.write(json.dumps({"metadata": metadata, "actions": actions, "error": error}))


if __name__ == "__main__":
    main(*sys.argv[1:])
