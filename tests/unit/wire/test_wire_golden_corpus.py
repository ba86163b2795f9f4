"""What real peers have sent is read as it was, and said again in the same way.

``tests/golden`` holds sessions of both generations that have been recorded between published
packages. A test that fails here after a change of a codec shows what changes for peers.
"""

import json
from pathlib import Path
from typing import Any

import pytest

from rlmesh_ray.dialects.released.wire import handshake as version_detection
from rlmesh_ray.testing.equality import assert_identical
from tests.golden.corpus import GENERATIONS, Frame, files, read
from tests.golden.reader import Reader

SESSIONS = [path for generation in GENERATIONS for path in files(generation)]
MOST_BYTES = 200_000

_DETECTION = {
    "Handshake": version_detection.is_handshake,
    "Join": version_detection.is_request,
    "Shutdown": version_detection.is_shutdown,
}


def session_id(path: Path) -> str:
    return f"{path.parent.name}/{path.stem}"


def as_text(means: Any) -> str:
    """Return what ``==`` would not see, too: the sign of zero."""
    return json.dumps(means, sort_keys=True)


def is_request(frame: Frame) -> bool:
    return frame.way == ">"


@pytest.mark.parametrize("path", SESSIONS, ids=session_id)
def test_frames_of_real_peers_mean_what_they_meant(path: Path) -> None:
    reader = Reader(path.parent.name)

    for line in read(path):
        said = reader.read(line.frame)

        assert as_text(reader.meaning(line.frame, said)) == as_text(line.means)


@pytest.mark.parametrize("path", SESSIONS, ids=session_id)
def test_what_was_said_in_the_same_way_still_is(path: Path) -> None:
    reader = Reader(path.parent.name)
    held = 0

    for line in read(path):
        said = reader.read(line.frame)
        if line.packs:
            assert reader.says_the_same(line.frame, said)
            held += 1

    assert held > 0


@pytest.mark.parametrize("path", SESSIONS, ids=session_id)
def test_what_is_said_again_is_understood_alike(path: Path) -> None:
    reader = Reader(path.parent.name)

    for line in read(path):
        said = reader.read(line.frame)
        copy = reader.packed(line.frame, said)

        assert as_text(reader.meaning(copy, reader.read(copy))) == as_text(line.means)


@pytest.mark.parametrize("path", SESSIONS, ids=session_id)
def test_batches_keep_every_bit(path: Path) -> None:
    reader = Reader(path.parent.name)
    batches = [batch for line in read(path) for batch in reader.batches(reader.read(line.frame))]

    for batch in batches:
        assert_identical(batch.columns_again, batch.columns)
        # The other generation has maps in its batches, and with them no order.
        assert batch.data_again == batch.data or path.parent.name == "rlmesh_v1"
    assert batches


@pytest.mark.parametrize("path", SESSIONS, ids=session_id)
def test_every_request_of_a_real_peer_shows_its_generation(path: Path) -> None:
    is_released = path.parent.name == "rlmesh_wire_v1"

    for line in read(path):
        if is_request(line.frame):
            detect = _DETECTION[line.frame.call.split("/")[1]]
            assert detect(line.frame.data) == is_released


@pytest.mark.parametrize("generation", GENERATIONS)
def test_the_corpus_holds_every_kind_of_message_that_peers_send(generation: str) -> None:
    kinds = {line.means["is"] for path in files(generation) for line in read(path)}

    both = {
        "HandshakeRequest",
        "HandshakeResponse",
        "Reset",
        "ResetDone",
        "Step",
        "StepDone",
        "Close",
        "Closed",
    }
    own = {
        "rlmesh_v1": {"EnvFailed", "ConfigureRoute", "Predict", "Predicted", "CloseRoute"},
        "rlmesh_wire_v1": {
            *("Configure", "Configured", "Render", "Rendered", "EnvFailed", "ModelFailed"),
            *("ConfigureRoute", "RouteConfigured", "Predict", "Predicted"),
            *("ForgetEpisodes", "EpisodesForgotten", "CloseRoute", "RouteClosed"),
        },
    }
    assert kinds >= both | own[generation]


def test_the_corpus_stays_small() -> None:
    assert sum(path.stat().st_size for path in SESSIONS) < MOST_BYTES
