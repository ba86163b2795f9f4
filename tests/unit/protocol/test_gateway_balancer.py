"""Where a gateway takes connections: evenly, faithfully, and away from what has failed."""

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from rlmesh_ray.protocol.gateway_balancer import (
    AVOIDED_S,
    KEPT_S,
    ConnectionState,
    GatewayBalancer,
    Target,
)

A, B, C = (Target(name, 1, f"127.0.0.1:{port}") for port, name in enumerate("abc", 1))


def routes(*targets: Target) -> GatewayBalancer:
    made = GatewayBalancer()
    made.renew(targets)
    return made


def test_new_connections_are_spread_evenly() -> None:
    made = routes(A, B, C)

    chosen = [made.choose(f"client {number}", 0.0) for number in range(20)]

    assert sorted(Counter(chosen).values()) == [6, 7, 7]


def test_the_first_of_several_equals_is_chosen() -> None:
    assert routes(B, A).choose("client", 0.0) == B


def test_a_connection_stays_where_it_was_taken() -> None:
    made = routes(A, B)
    made.choose("client", 0.0)

    assert made.target_of("client", KEPT_S / 2) == A
    assert made.target_of("other", 0.0) is None


def test_without_endpoints_there_is_nowhere_to_go() -> None:
    assert routes().choose("client", 0.0) is None
    assert routes(A).choose("client", 0.0, without={A}) is None


def test_connections_that_have_ended_count_no_more() -> None:
    made = routes(A, B)
    made.choose("client", 0.0)
    made.end(made.begin("client", A, 0.0), 1.0)

    assert made.choose("at once", 2.0) == B
    assert made.choose("later", 20.0) == A


def test_a_connection_with_a_long_call_counts_on() -> None:
    made = routes(A, B)
    made.begin("client", A, 0.0)

    assert made.choose("later", 10_000.0) == B


def test_an_endpoint_that_has_failed_is_avoided_for_a_while() -> None:
    made = routes(A, B)
    made.fail(A, 0.0)
    for number in range(3):
        made.begin(f"client {number}", B, 0.0)

    assert made.choose("soon", AVOIDED_S - 0.1) == B
    assert made.choose("later", AVOIDED_S + 0.1) == A


def test_an_endpoint_that_has_failed_is_better_than_none() -> None:
    made = routes(A)
    made.fail(A, 0.0)

    assert made.choose("client", 0.0) == A


def test_a_restarted_endpoint_is_not_blamed_for_what_it_was_before() -> None:
    made = routes(A, B)
    made.fail(A, 0.0)
    made.begin("client", B, 0.0)
    again = Target("a", 2, A.address)

    made.renew([again, B])

    assert made.choose("other", 0.0) == again


def test_an_idle_connection_leaves_what_fails_or_is_listed_no_more() -> None:
    for forget in (lambda made: made.renew([B]), lambda made: made.fail(A, 1.0)):
        made = routes(A, B)
        made.choose("client", 0.0)

        forget(made)

        assert made.target_of("client", 1.0) is None


def test_a_connection_with_an_open_call_stays_at_an_endpoint_that_is_listed_no_more() -> None:
    made = routes(A, B)
    made.choose("client", 0.0)
    visit = made.begin("client", A, 0.0)
    made.renew([B])

    during = made.target_of("client", 1.0)
    made.end(visit, 2.0)

    assert during == A
    assert made.target_of("client", 2.0) is None


def test_a_call_that_belongs_to_a_session_goes_where_that_was_agreed_on() -> None:
    made = routes(A, B)
    made.choose("client", 0.0)
    made.fail(A, 1.0)

    assert made.target_of("client", 1.0, is_bound=True) == A
    assert made.target_of("other", 1.0, is_bound=True) is None


def test_a_connection_leaves_an_endpoint_that_is_gone_with_its_open_calls() -> None:
    made = routes(A, B)
    made.choose("client", 0.0)
    visit = made.begin("client", A, 0.0)

    made.fail(A, 1.0)
    made.leave("client", A)
    new = made.choose("client", 1.0)
    made.leave("client", A)  # as the other calls find out
    made.end(visit, 2.0)

    assert new == B
    assert made.target_of("client", 2.0) == B


def test_connections_without_calls_are_forgotten() -> None:
    made = routes(A, B)
    made.choose("idle", 0.0)
    made.begin("busy", A, 0.0)

    made.forget_idle(KEPT_S)

    assert made.target_of("idle", KEPT_S) is None
    assert made.target_of("busy", KEPT_S) == A
    assert made.connections["busy"].idle_s(KEPT_S) == 0.0


def test_a_token_is_not_shown_by_accident() -> None:
    assert "secret" not in repr(Target("a", 1, "127.0.0.1:1", "secret"))


Event = tuple[str, int]


@given(st.lists(st.tuples(st.sampled_from(["new", "end", "fail", "vanish"]), st.integers(0, 5))))
def test_no_new_connection_goes_where_there_is_less_room_or_to_what_has_failed(
    events: list[Event],
) -> None:
    made, now_s, number = routes(A, B, C), 0.0, 0
    open_visits: list[ConnectionState] = []
    for kind, index in events:
        now_s += 6.0  # longer than ended connections count, and than failures are held against
        if kind == "new":
            number += 1
            failed = {target for target in (A, B, C) if made.is_avoided(target, now_s)}
            loads = Counter(visit.target for visit in open_visits)
            target = made.choose(f"client {number}", now_s)
            assert target is not None
            assert target in made.targets
            good = [each for each in made.targets if each not in failed]
            assert not good or loads[target] == min(loads[each] for each in good)
            open_visits.append(made.begin(f"client {number}", target, now_s))
        elif kind == "end" and index < len(open_visits):
            made.end(open_visits.pop(index), now_s)
        elif kind == "fail":
            made.fail((A, B, C)[index % 3], now_s + 5.9)
        elif kind == "vanish":
            made.renew([target for place, target in enumerate((A, B, C)) if place != index])


def test_connections_that_have_come_and_gone_are_not_counted_again_and_again() -> None:
    made = routes(A, B)

    def looked_up(name: str, now_s: float) -> int:
        """Return how often names are looked up for a new connection that comes and goes."""
        before = Name.num_looked_up
        target = made.choose(Name(name), now_s)
        assert target is not None
        made.end(made.begin(Name(name), target, now_s), now_s)
        return Name.num_looked_up - before

    work = [looked_up(f"client {number}", float(number)) for number in range(100)]

    assert max(work[50:]) <= max(work[:50])


def test_a_connection_that_comes_back_counts_again() -> None:
    made = routes(A, B)
    for number in range(2):
        target = made.choose(f"client {number}", 0.0)
        assert target is not None
        made.end(made.begin(f"client {number}", target, 0.0), 0.0)

    assert made.target_of("client 0", 100.0) == A
    assert made.choose("last", 100.0) == B


class Name(str):
    """The name of a connection, which counts how often it is looked up in dictionaries."""

    __slots__ = ()
    num_looked_up = 0

    def __hash__(self) -> int:
        Name.num_looked_up += 1
        return super().__hash__()
