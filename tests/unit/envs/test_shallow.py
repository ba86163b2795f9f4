from typing import Any

import numpy as np

from rlmesh_ray.envs.channel import encode
from rlmesh_ray.envs.commands import StepReply
from rlmesh_ray.envs.shallow import MAX_DEPTH, shallow
from rlmesh_ray.testing.equality import assert_identical


def nested(depth: int, *, twice: bool = False) -> Any:
    value: Any = 1
    for level in range(depth):
        inner = (value, value) if twice else [value]
        value = inner if level % 2 else {"d": inner}
    return value


def test_what_is_not_deep_is_kept() -> None:
    lanes = np.empty((1, 2), object)
    lanes[0, 1] = {"a": [np.arange(3, dtype=np.int16), None]}
    reply = StepReply({"lanes": lanes, "set": {1}}, {0: {"x": [b"y"]}}, (("text",),))

    cut = shallow(reply)

    assert_identical(cut.infos, reply.infos)
    assert cut.final_infos == reply.final_infos
    assert cut.text_columns == [["text"]]


def test_what_is_deeper_is_the_name_of_its_class() -> None:
    value = shallow(StepReply({"x": nested(100_000)})).infos["x"]

    for _ in range(MAX_DEPTH - 1):
        (value,) = value.values() if isinstance(value, dict) else value
    assert value in ("<dict>", "<list>")


def test_parts_that_occur_twice_do_not_cost_twice() -> None:
    encode(shallow(StepReply({"x": nested(10_000, twice=True)})))


def test_a_message_that_is_too_deep_for_pickle_is_sent_all_the_same() -> None:
    encode(StepReply({"x": nested(100_000), "y": 1}))
