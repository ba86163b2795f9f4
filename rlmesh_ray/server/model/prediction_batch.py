"""One batch of predictions: from the observations' bytes to the policy, from its actions to bytes.

Everything that depends on a route's spaces alone is computed once, when the route is opened: for a
batch of a few rows it would take longer than the policy. The requests of a batch may have different
dialects: each is read and answered in its own. They do not share their errors: a batch that fails
is run again request by request, as far as the policy allows that.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import numpy as np

from rlmesh_ray.errors import CodecError, ConformanceError, PolicyError, RlmeshError
from rlmesh_ray.models.policy import ChunkRouteRows, Policy, RouteRows, Rows
from rlmesh_ray.protocol.messages import BatchRun, PredictSlot
from rlmesh_ray.protocol.model_session import RouteLanes
from rlmesh_ray.server.model.policy_thread import as_policy_error
from rlmesh_ray.spaces.batch import (
    chunk_steps,
    coerce,
    flatten,
    horizon_hint,
    split,
    unflatten,
)
from rlmesh_ray.spaces.contract import EnvContract
from rlmesh_ray.spaces.spec import SpaceSpec, leaves
from rlmesh_ray.spaces.validation import structure_checker
from rlmesh_ray.wire.rlmesh_v1.values import ContractCodecs, join_each, split_each

_ROWS = (np.ndarray, list, tuple)

Actions = bytes | tuple[bytes, ...]
"""A request's actions; of a route with a horizon above 1 a batch for each step."""


class Route:
    """An open route, with all that its predictions share.

    Args:
        key: Names the route over all sessions.
        contract: Contract of its environment.
        codecs: Those of the client's dialect; of one dialect and space they are the same objects.
        lanes: Its lanes.
        policy_horizon: How many actions the policy returns for each row.
        horizon: How many of these the client takes, from 1 to ``policy_horizon``.
    """

    def __init__(
        self,
        key: str,
        contract: EnvContract,
        codecs: ContractCodecs,
        lanes: RouteLanes,
        policy_horizon: int = 1,
        horizon: int = 1,
    ) -> None:
        self.key = key
        self.lanes = lanes
        self.policy_horizon = policy_horizon
        self.horizon = horizon
        observations, actions = _shared(contract.observation_space), _shared(contract.action_space)
        self.contract = replace(contract, observation_space=observations, action_space=actions)
        """The route's contract; routes with equal spaces share the space objects."""
        self.group = (observations, actions)
        """Equal for routes whose rows can be in one batch."""
        self.codecs = codecs
        self.observation_checker = structure_checker(observations)
        self.action_checker = structure_checker(actions)
        self.action_leaves = leaves(actions)


@lru_cache(maxsize=256)
def _shared(spec: SpaceSpec) -> SpaceSpec:
    return spec  # the same object for equal spaces: identical objects compare quickly


@dataclass(slots=True, eq=False)
class PredictionRequest:
    """One request of a route: its part of a batch."""

    route: Route
    observation: bytes
    """A batch with one row per slot, as received."""
    slots: Sequence[PredictSlot]
    """At least one."""
    answer: "Callable[[PredictionRequest, Actions | RlmeshError, BatchRun], None]"
    """Takes its actions (or its error) and its batch, in the serving loop, unless the request is
    cancelled before. Must not raise: the other requests of the batch wait for their answers."""
    arrived_ns: int = 0
    """When it was given to the batcher, by ``time.monotonic_ns``."""
    queue_ns: int = 0
    """How long it has waited for its batch."""


def run_batch(
    policy: Policy,
    requests: Sequence[PredictionRequest],
    run: BatchRun,
    *,
    is_repeatable: bool = False,
) -> Sequence[Actions | RlmeshError]:
    """Return each request's actions, or its error. Never raises.

    Args:
        policy: Not in use by another thread.
        requests: At least one, all of one group.
        run: The batch's times are added to it.
        is_repeatable: See ``PolicyTraits``.
    """
    rows = None
    counts = [len(each.slots) for each in requests]
    marks_ns = [time.perf_counter_ns()]
    try:
        rows = _rows(requests, counts)
        marks_ns.append(time.perf_counter_ns())
        # Routes of one group share their spaces: the first one's stand for all.
        actions = policy.predict(requests[0].route.contract, rows)
        marks_ns.append(time.perf_counter_ns())
        # The policy's return value may be anything, and raise when it is read.
        return _answers(requests, counts, actions)
    except BaseException as error:  # noqa: BLE001  # the policy may raise anything
        # Not kept in a variable: with its frames it would keep the observations, too.
        if len(requests) == 1:
            return [as_policy_error(error)]
        if rows is not None and not is_repeatable:
            return [as_policy_error(error)] * len(requests)
    finally:
        # A part that raises has taken its time, too; the parts after it have not begun.
        marks_ns += [time.perf_counter_ns()] * (4 - len(marks_ns))
        began_ns, read_ns, chosen_ns, ended_ns = marks_ns
        run.decode_ns += read_ns - began_ns
        run.forward_ns += chosen_ns - read_ns
        run.encode_ns += ended_ns - chosen_ns
    return [
        answer
        for each in requests
        for answer in run_batch(policy, [each], run, is_repeatable=is_repeatable)
    ]


def _rows(requests: Sequence[PredictionRequest], counts: Sequence[int]) -> Rows:
    """Return the observations as the policy takes them; takers of chunks are marked.

    Their arrays are writable and not shared, whether they come from one request or many.

    Raises:
        CodecError: An observation cannot be read, or is not in its space.
    """
    data = [each.observation for each in requests]
    readers = [each.route.codecs.observations for each in requests]
    reader = readers[0]
    # One reader for all is much cheaper; the requests of another dialect have another one.
    if readers.count(reader) == len(readers):
        columns = reader.join(data, counts)
    else:
        columns = join_each(readers, data, counts)
    route = requests[0].route
    try:
        # The policy might remember a value that is not in the space.
        route.observation_checker.check(columns)
    except ConformanceError as error:
        raise CodecError(
            f"the observation does not fit {route.contract.id}'s observation space: "
            f"{error.about('observation')}"
        ) from error
    columns = [
        # A policy may write into its arrays, and not into a view of the message.
        each if isinstance(each, tuple) or each.flags.writeable else each.copy()
        for each in columns
    ]
    kinds = [RouteRows if each.route.horizon == 1 else ChunkRouteRows for each in requests]
    routes = [kind(each.route.key, each.slots) for kind, each in zip(kinds, requests, strict=True)]
    return Rows(unflatten(route.contract.observation_space, columns), routes)


def _answers(
    requests: Sequence[PredictionRequest], counts: Sequence[int], actions: object
) -> Sequence[Actions | RlmeshError]:
    """Return as many actions for each request as its client takes, or the request's error.

    Raises:
        PolicyError: The number of actions differs from that of the rows or the horizon, or their
            structure is not that of the action space.
    """
    route = requests[0].route
    try:
        values = flatten(route.contract.action_space, actions)
        if route.policy_horizon == 1:
            return _step_answers(requests, counts, values)
        num_rows, horizon = sum(counts), route.policy_horizon
        pairs = zip(route.action_leaves, values, strict=True)
        by_leaf = [chunk_steps(leaf, value, num_rows, horizon) for leaf, value in pairs]
    except ConformanceError as error:
        raise _policy_error(route, error) from error
    horizons = [each.route.horizon for each in requests]
    by_step = [
        _step_answers(requests, counts, values)
        for values in list(zip(*by_leaf, strict=True))[: max(horizons)]
    ]
    return [
        _chunk(of_request[:horizon])
        for of_request, horizon in zip(zip(*by_step, strict=True), horizons, strict=True)
    ]


def _step_answers(
    requests: Sequence[PredictionRequest], counts: Sequence[int], values: Sequence[Any]
) -> Sequence[bytes | RlmeshError]:
    """Return each request's actions of one step as bytes, or the request's error.

    Raises:
        PolicyError: The actions of all requests have a wrong dtype or number.
    """
    route, num_rows = requests[0].route, sum(counts)
    pairs = zip(route.action_leaves, values, strict=True)
    try:
        columns = [coerce(leaf, value, num_rows) for leaf, value in pairs]
    except ConformanceError as error:
        is_parted = all(isinstance(each, _ROWS) and len(each) == num_rows for each in values)
        if len(counts) > 1 and is_parted:
            answers = list(_answers_by_request(requests, counts, values))
            if not all(has_wrong_dtype for _, has_wrong_dtype in answers):
                return [answer for answer, _ in answers]
        hint = ""
        if is_parted:
            hint = max(
                horizon_hint(getattr(value, "shape", ()), (num_rows, *leaf.shape))
                for leaf, value in zip(route.action_leaves, values, strict=True)
            )
        raise _policy_error(route, error, hint) from error
    try:  # NaN, or not in the domain of a Discrete
        route.action_checker.check(columns)
    except ConformanceError as error:
        if len(counts) == 1:
            return [_policy_error(route, error)]
        return [answer for answer, _ in _answers_by_request(requests, counts, columns)]
    writers = [each.route.codecs.actions for each in requests]
    writer = writers[0]
    if writers.count(writer) == len(writers):
        return writer.split(columns, counts)
    return split_each(writers, columns, counts)


def _answers_by_request(
    requests: Sequence[PredictionRequest], counts: Sequence[int], values: Sequence[Any]
) -> Iterator[tuple[bytes | RlmeshError, bool]]:
    """Yield each request's answer, by itself, and whether it has a wrong dtype."""
    for request, count, own in zip(requests, counts, split(values, counts), strict=True):
        try:
            (answer,) = _step_answers([request], [count], own)
            yield answer, False
        except PolicyError as error:
            yield error, True


def _policy_error(route: Route, error: ConformanceError, hint: str = "") -> PolicyError:
    return PolicyError(
        f"the policy's actions do not fit {route.contract.id}'s action space: "
        f"{error.about('action')}{hint}"
    )


def _chunk(steps: Sequence[bytes | RlmeshError]) -> Actions | RlmeshError:
    found: list[bytes] = []
    for step in steps:
        if isinstance(step, RlmeshError):
            return step
        found.append(step)
    return found[0] if len(found) == 1 else tuple(found)
