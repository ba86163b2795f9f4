"""Gymnasium's video recorder on an endpoint: prints one line of JSON.

``python -m tests.peers.trainers.record_video ADDRESS FOLDER`` records the first episode and prints,
by the video's name, how many frames it holds, their width and height. It needs the packages of
requirements.txt.
"""

import json
import sys
from pathlib import Path

from gymnasium.wrappers.vector import RecordVideo
from moviepy import VideoFileClip

from rlmesh_ray import RemoteVectorEnv


def main(address: str, folder: str) -> dict[str, list[int]]:
    """Record the first of several episodes; return frames, width and height by file."""
    env = RecordVideo(RemoteVectorEnv(address), folder, episode_trigger=_is_first)
    env.reset(seed=0)
    env.action_space.seed(0)
    for _ in range(30):
        env.step(env.action_space.sample())
    env.close()
    return {file.name: _content(file) for file in Path(folder).glob("*.mp4")}


def _is_first(episode: int) -> bool:
    return episode == 0


def _content(file: Path) -> list[int]:
    clip = VideoFileClip(str(file))
    content = [sum(1 for _ in clip.iter_frames()), *clip.size]
    clip.close()
    return content


if __name__ == "__main__":
    sys.stdout.write(json.dumps(main(*sys.argv[1:])) + "\n")
