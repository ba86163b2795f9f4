import uuid
from dataclasses import replace

import numpy as np
import pytest
from gymnasium import spaces
from hypothesis import given
from hypothesis import strategies as st

from rlmesh_ray.dialects.released.wire import env as released
from rlmesh_ray.dialects.released.wire import model as released_model
from rlmesh_ray.dialects.released.wire import values as released_values
from rlmesh_ray.protocol.messages import (
    ConfigureRoute,
    EpisodeRecord,
    Predict,
    PredictContext,
    PredictSlot,
    Reset,
    Step,
    StepDone,
)
from rlmesh_ray.spaces.contract import AutoresetMode, EnvContract
from rlmesh_ray.spaces.gym_conversion import Space, from_gymnasium
from rlmesh_ray.testing.strategies import batches, specs
from rlmesh_ray.wire.rlmesh_v1 import env as wire
from rlmesh_ray.wire.rlmesh_v1 import model as model_wire
from rlmesh_ray.wire.rlmesh_v1.limits import (
    MAX_MESSAGE_BYTES,
    max_batch_bytes,
    max_predict_bytes,
    max_request_bytes,
    max_response_bytes,
)
from rlmesh_ray.wire.rlmesh_v1.values import encode_batch

MIB = 2**20


def contract(observation: Space, action: Space, num_envs: int) -> EnvContract:
    return EnvContract(
        "Limits-v0",
        from_gymnasium(observation),
        from_gymnasium(action),
        num_envs,
        AutoresetMode.NEXT_STEP,
    )


@pytest.mark.parametrize("num_lanes", [1, 3])
@given(data=st.data())
def test_no_batch_is_larger_than_the_limit(data: st.DataObject, num_lanes: int) -> None:
    spec = data.draw(specs())

    size = len(encode_batch(spec, data.draw(batches(spec, num_lanes)), num_lanes))

    assert size <= max_batch_bytes(spec, num_lanes)


@pytest.mark.parametrize(
    ("space", "value"),
    [
        (spaces.Box(0, 255, (64, 64, 3), np.uint8), np.zeros((4, 64, 64, 3), np.uint8)),
        (spaces.Dict({"a": spaces.Box(0, 1, (5000,))}), np.zeros((4, 5000), np.float32)),
        (spaces.Tuple([spaces.Box(0, 1, (5000,))]), np.zeros((4, 5000), np.float32)),
    ],
)
def test_the_limit_of_arrays_is_close_to_what_they_take(
    space: Space, value: np.ndarray[tuple[int, ...], np.dtype[np.generic]]
) -> None:
    spec = from_gymnasium(space)

    size = len(encode_batch(spec, [value], 4))

    assert size <= max_batch_bytes(spec, 4) <= 1.01 * size


@pytest.mark.parametrize("text", ["🎲" * 8, "x" * 120], ids=["widest characters", "too long"])
def test_a_text_of_any_length_within_the_slack_arrives(text: str) -> None:
    spec = from_gymnasium(spaces.Text(8))

    assert len(encode_batch(spec, [(text,) * 3], 3)) <= max_batch_bytes(spec, 3)


def test_requests_of_many_lanes_fit() -> None:
    wide = contract(spaces.Discrete(2), spaces.Discrete(2), 50_000)
    seeds, lanes = (-1,) * 50_000, tuple(range(50_000))

    reset = wire.pack_request(Reset("r" * 64, seeds, {"level": [0.5] * 10_000}, 1000, lanes))
    step = wire.pack_request(Step("s" * 64, bytes(8 * 50_000), 1000))

    assert max(len(reset), len(step)) <= max_request_bytes(wide)
    assert max_request_bytes(wide) < 5 * MIB


def test_requests_of_many_lanes_fit_in_the_released_generation_too() -> None:
    wide = contract(spaces.Discrete(2), spaces.Discrete(2), 200_000)
    lanes, ids = tuple(range(200_000)), (str(uuid.UUID(int=1)),) * 200_000
    action = released_values.encode_batch(wide.action_space, [np.zeros(200_000, np.int64)], 200_000)

    reset = released.pack_request(Reset("r" * 64, (-1,) * 200_000, {}, 1000, lanes, ids))
    step = released.pack_request(Step("s" * 64, action, 1000, lanes, ids))

    assert max(len(reset), len(step)) <= max_request_bytes(wide)


def test_responses_of_many_lanes_fit() -> None:
    wide = contract(spaces.Box(-1, 1, (10,)), spaces.Discrete(2), 20_000)
    ids = ("f" * 32,) * 20_000
    episodes = tuple(
        EpisodeRecord(
            episode_id=ids[0],
            env_index=lane,
            step_count=2**40,
            cumulative_reward=0.1,
            terminated=True,
            truncated=True,
            start_timestamp_ns=2**60,
            end_timestamp_ns=2**60,
            seed=2**62,
        )
        for lane in range(20_000)
    )
    flags = bytes([1]) * 20_000
    observations = np.zeros((20_000, 10), np.float32)
    done = StepDone(
        "s",
        observations.tobytes(),
        [0.1] * 20_000,
        flags,
        flags,
        {"final_obs": observations, "_final_obs": np.ones(20_000, bool)},
        episodes,
        ids,
    )

    size = len(wire.pack_response(done, tag_arrays=True))

    assert size <= max_response_bytes(wide)


@pytest.mark.parametrize("num_rows", [1, 3])
@given(data=st.data())
def test_no_message_to_a_policy_is_larger_than_the_limit_in_any_generation(
    data: st.DataObject, num_rows: int
) -> None:
    spec = data.draw(specs())
    columns = data.draw(batches(spec, num_rows))
    own = EnvContract("Limits-v0", spec, spec, num_rows, AutoresetMode.NEXT_STEP)
    ids = [str(uuid.UUID(int=row)) for row in range(num_rows)]
    context = PredictContext("s" * 32, "r" * 32, "1")
    slots = tuple(PredictSlot(row, ids[row], 2**40, True) for row in range(num_rows))
    frames = [
        model_wire.pack_request(ConfigureRoute("1", context, own)),
        model_wire.pack_request(
            Predict("1", replace(context, slots=slots), encode_batch(spec, columns, num_rows))
        ),
        released_model.pack_request(ConfigureRoute("1", context, own)),
        released_model.pack_request(
            Predict(
                "1",
                replace(context, slots=slots),
                released_values.encode_batch(spec, columns, num_rows),
            )
        ),
    ]

    # Of these spaces nothing is larger than the allowance for the rest.
    assert max(map(len, frames)) <= max_predict_bytes(spec, num_rows)


@pytest.mark.parametrize("num_rows", [1, 256])
def test_a_contract_with_bounds_for_each_element_fits_and_so_does_a_full_batch(
    num_rows: int,
) -> None:
    low = np.random.default_rng(0).uniform(-2, -1, (600, 600, 3)).astype(np.float32)
    own = contract(spaces.Box(low, -low), spaces.Discrete(2), num_rows)
    spec = own.observation_space
    context = PredictContext("s", "r", "1")

    route = model_wire.pack_request(ConfigureRoute("1", context, own))
    resolve = released_model.pack_request(ConfigureRoute("1", context, own))

    assert max(len(route), len(resolve)) > 8 * MIB
    assert max(len(route), len(resolve)) <= max_predict_bytes(spec, num_rows)
    batch_bytes = num_rows * low.nbytes
    assert batch_bytes <= max_predict_bytes(spec, num_rows) <= max(1.02 * batch_bytes, 26 * MIB)


def test_slots_of_many_rows_fit() -> None:
    spec = from_gymnasium(spaces.Box(-1, 1, (1,)))
    ids = [str(uuid.UUID(int=row)) for row in range(200_000)]
    slots = tuple(PredictSlot(row, ids[row], 10_000, True) for row in range(200_000))

    frame = model_wire.pack_request(
        Predict("1", PredictContext("s", "r", "1", slots), bytes(4 * 200_000))
    )

    assert 10 * MIB < len(frame) <= max_predict_bytes(spec, 200_000)


def test_no_limit_is_beyond_what_a_message_can_be() -> None:
    endless = contract(spaces.Box(-1, 1, (2**20,)), spaces.Text(10**9), 4096)

    assert max_request_bytes(endless) == MAX_MESSAGE_BYTES
    assert max_response_bytes(endless) == MAX_MESSAGE_BYTES
    assert max_predict_bytes(endless.observation_space, 4096) == MAX_MESSAGE_BYTES
