"""Validation of the arguments of a request, before it is executed."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from rlmesh_ray.protocol.env_rules import EnvRules
from rlmesh_ray.protocol.handshake import quoted
from rlmesh_ray.protocol.messages import Configure, EnvErrorCode, EnvRequest, Render, Reset, Step

_MOST_LISTED = 32
_LARGEST_SEED = 2**63 - 1  # an int64 field


@dataclass(frozen=True, slots=True)
class InvalidRequest:
    """Error code and message of a refused request."""

    code: EnvErrorCode
    message: str
    is_final: bool = False
    """Whether the refusal ends the session."""


class RequestValidator:
    """Validates the arguments of the requests of one session.

    Args:
        num_lanes: Width of the session's vector.
        rules: The rules of the session's dialect.
        steps_subsets: Whether the endpoint can reset and step any of its lanes alone.
    """

    def __init__(self, num_lanes: int, rules: EnvRules, *, steps_subsets: bool) -> None:
        self._num_lanes = num_lanes
        self._rules = rules
        self._steps_subsets = steps_subsets

    def check(self, request: EnvRequest, begun: Collection[int]) -> InvalidRequest | None:
        """Return why ``request`` is invalid, or None.

        Args:
            request: A request of a legal kind.
            begun: The lanes that have been reset since the session's start or since their loss.
        """
        if isinstance(request, Step):
            is_plain = not request.env_indices and len(begun) == self._num_lanes
            return None if is_plain else self._check_step(request, begun)
        match request:
            case Reset():
                return self._check_reset(request, begun)
            case Render() if request.env_indices:
                return self._check_lanes("Render", request.env_indices)
            case Configure():
                return self._check_edition(request.edition)
        return None

    def _check_step(self, request: Step, begun: Collection[int]) -> InvalidRequest | None:
        lanes = request.env_indices
        if lanes:
            if not self._rules.subsets_are_advertised:
                return _invalid("Step.env_indices is reserved by edition 2026.06; step all lanes")
            error = self._check_subset("Step", lanes)
            if error is not None:
                return error
        missing = [lane for lane in lanes or range(self._num_lanes) if lane not in begun]
        if not missing:
            return None
        return InvalidRequest(
            EnvErrorCode.NOT_READY, f"Step needs a Reset of the lanes {_listed(missing)} first"
        )

    def _check_reset(self, request: Reset, begun: Collection[int]) -> InvalidRequest | None:
        lanes = request.env_indices
        if lanes:
            error = self._check_subset("Reset", lanes)
            if error is not None:
                return error
            is_first_of_all = not begun and not self._rules.subsets_are_advertised
            if is_first_of_all and len(lanes) < self._num_lanes:
                return _invalid(
                    "the first Reset (and the first after an interruption) must reset all lanes"
                )
        return self._check_seeds(request.seeds, len(lanes))

    def _check_subset(self, kind: str, lanes: Sequence[int]) -> InvalidRequest | None:
        error = self._check_lanes(kind, lanes)
        is_possible = self._steps_subsets or not self._rules.subsets_are_advertised
        if error is not None or is_possible or lanes == tuple(range(self._num_lanes)):
            return error
        return InvalidRequest(
            EnvErrorCode.UNSUPPORTED,
            f"{kind}.env_indices {_listed(lanes)}: this endpoint's lanes go together (it does not "
            "offer the capability subset_step); leave env_indices out, or serve single "
            "environments that do not reset themselves",
        )

    def _check_lanes(self, kind: str, lanes: Sequence[int]) -> InvalidRequest | None:
        if len(lanes) > self._num_lanes:  # first: there may be a million of them
            return _invalid(
                f"{kind}.env_indices has {len(lanes)} entries; there are {self._num_lanes} lanes"
            )
        if any(not 0 <= lane < self._num_lanes for lane in lanes):
            return _invalid(
                f"{kind}.env_indices {_listed(lanes)} are not all in [0, {self._num_lanes})"
            )
        if len(set(lanes)) != len(lanes):
            return _invalid(f"{kind}.env_indices {_listed(lanes)} name a lane twice")
        return None

    def _check_seeds(self, seeds: Sequence[int], num_named: int) -> InvalidRequest | None:
        wanted = num_named or self._num_lanes
        if self._rules.spreads_one_seed and len(seeds) == 1 and not num_named:
            if seeds[0] + wanted - 1 > _LARGEST_SEED:
                return _invalid(
                    f"Reset.seeds {list(seeds)}: the seeds of {wanted} lanes, counted up from it, "
                    "exceed int64; give one a lane"
                )
            return None
        if not seeds or len(seeds) == wanted:
            return None
        return _invalid(f"Reset.seeds has {len(seeds)} entries; give none or one a lane ({wanted})")

    def _check_edition(self, edition: str) -> InvalidRequest | None:
        # Release candidates append their own version to the edition's name.
        if not edition or edition.partition("-")[0] in self._rules.editions:
            return None
        supported = ", ".join(sorted(self._rules.editions))
        return InvalidRequest(
            EnvErrorCode.INVALID_ACTION,
            f"edition {quoted(edition)!r} is not supported here; configure {supported}",
            is_final=True,
        )


def _listed(lanes: Sequence[int]) -> str:
    first = ", ".join(map(str, lanes[:_MOST_LISTED]))
    return f"[{first}, …]" if len(lanes) > _MOST_LISTED else f"[{first}]"


def _invalid(message: str) -> InvalidRequest:
    return InvalidRequest(EnvErrorCode.INVALID_ACTION, message)
