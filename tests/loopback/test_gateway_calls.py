"""What goes through a gateway is what came: bytes, metadata, status, deadlines, cancellation."""

import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import grpc
import pytest

from rlmesh_ray.client.channel import ConnectOptions
from rlmesh_ray.client.health import HealthStatus, check_health
from rlmesh_ray.errors import AddressError, ConfigurationError
from rlmesh_ray.protocol.gateway_balancer import Target
from rlmesh_ray.server.pool import gateway as gateway_module
from rlmesh_ray.server.pool.gateway import GatewayServer
from tests.loopback.eventually import eventually
from tests.loopback.gateway_peers import MEBIBYTE, SERVICE, Listing, Toy
from tests.loopback.ports import plain_channel

FRONT = (("authorization", "Bearer front"),)
WAIT_S = 30.0


@pytest.fixture(autouse=True)
def frequent_checks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gateway_module, "PERIOD_S", 0.2)


@pytest.fixture
def toys() -> Iterator[list[Toy]]:
    made = [Toy("a", "token of a"), Toy("b", "token of b")]
    yield made
    for toy in made:
        toy.stop()


@pytest.fixture
def gateway(toys: list[Toy]) -> Iterator[GatewayServer]:
    targets = [toy.target for toy in toys]
    with GatewayServer(lambda: targets, token="front") as running:
        yield running


@pytest.fixture
def channel(gateway: GatewayServer) -> Iterator[grpc.Channel]:
    with connect_options(gateway) as opened:
        yield opened


def connect_options(gateway: GatewayServer) -> grpc.Channel:
    """Open a connection of its own."""
    options = [("grpc.max_receive_message_length", -1)]
    return plain_channel(gateway.address, options=options)


def stream(channel: grpc.Channel, name: str, *messages: bytes, **options: Any) -> Any:
    options = {"metadata": FRONT, "timeout": WAIT_S, **options}
    return channel.stream_stream(f"/{SERVICE}/{name}")(iter(messages), **options)


def failure(answers: Any) -> Any:
    with pytest.raises(grpc.RpcError) as caught:
        list(answers)
    return caught.value


def seen(toys: list[Toy]) -> Any:
    (call,) = (call for toy in toys for call in toy.seen)
    return call


def test_messages_come_out_as_they_went_in(channel: grpc.Channel, toys: list[Toy]) -> None:
    messages = [b"", b"\0\xff", b"x" * 100_000, b"\n" * 3]

    *echoed, _ = stream(channel, "Echo", *messages)

    assert echoed == messages == seen(toys).messages


def test_calls_of_one_message_pass_too(channel: grpc.Channel, toys: list[Toy]) -> None:
    path, options = f"/{SERVICE}/Name", {"metadata": FRONT, "timeout": WAIT_S}

    # The endpoint answers a stream without messages with one: its name.
    answer = channel.stream_unary(path)(iter(()), **options)
    echoed, name = channel.unary_stream(path)(b"one", **options)

    assert (echoed, name) == (b"one", answer)
    assert answer == b"a"


def test_messages_larger_than_grpcs_default_pass(channel: grpc.Channel) -> None:
    large = bytes(20 * MEBIBYTE)

    echoed, _ = stream(channel, "Echo", large)

    assert echoed == large


def test_a_message_that_is_larger_than_may_be_ends_its_own_call_only(toys: list[Toy]) -> None:
    limited = GatewayServer(lambda: [toys[0].target], max_receive_bytes=1000)
    with limited as gateway, connect_options(gateway) as channel:
        error = failure(stream(channel, "Echo", bytes(1001)))

        assert error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert next(stream(channel, "Echo", bytes(1000))) == bytes(1000)
        assert all(len(message) <= 1000 for call in toys[0].seen for message in call.messages)


def test_a_token_is_replaced_and_all_other_metadata_pass(
    channel: grpc.Channel, toys: list[Toy]
) -> None:
    own = (("mood", "good"), ("mood", "better"), ("bits-bin", b"\0\xff"))

    list(stream(channel, "Echo", metadata=(*FRONT, *own)))

    assert [pair for pair in seen(toys).metadata if pair[0] != "user-agent"] == [
        *own,
        ("authorization", "Bearer token of a"),
        ("rlmesh-ray-gateway", "1"),
    ]


def test_headers_arrive_before_the_first_message(channel: grpc.Channel) -> None:
    go_on = threading.Event()

    def messages() -> Iterator[bytes]:
        go_on.wait(WAIT_S)
        yield b"late"

    call = channel.stream_stream(f"/{SERVICE}/HeadersFirst")(
        messages(), metadata=FRONT, timeout=WAIT_S
    )
    headers = [tuple(pair) for pair in call.initial_metadata()]
    go_on.set()

    assert next(call) == b"late"
    assert ("said", "early") in headers
    assert ("bits-bin", b"\0\xff") in headers
    assert list(call)
    assert ("said", "late") in [tuple(pair) for pair in call.trailing_metadata()]


def test_a_status_passes_with_its_words_and_trailing_metadata(channel: grpc.Channel) -> None:
    error = failure(stream(channel, "Refuse"))

    assert error.code() is grpc.StatusCode.DATA_LOSS
    assert error.details() == "no mood for it: ä"
    reported = [tuple(pair) for pair in error.trailing_metadata()]
    assert ("why", "mood") in reported
    assert ("bits-bin", b"\xff\0") in reported


def test_what_no_endpoint_knows_is_refused_as_there(channel: grpc.Channel) -> None:
    error = failure(channel.stream_stream("/no.such.v1.Service/Do")(iter(()), metadata=FRONT))

    assert error.code() is grpc.StatusCode.UNIMPLEMENTED


def test_a_deadline_reaches_the_endpoint(channel: grpc.Channel, toys: list[Toy]) -> None:
    error = failure(stream(channel, "Hang", timeout=1.5))

    assert error.code() is grpc.StatusCode.DEADLINE_EXCEEDED
    assert 0.0 < seen(toys).time_remaining_s < 1.7  # gRPC rounds it up on the way
    assert seen(toys).ended.wait(WAIT_S)


def test_a_call_without_a_deadline_gets_none(channel: grpc.Channel, toys: list[Toy]) -> None:
    list(stream(channel, "Echo", timeout=None))

    # What gRPC says for none.
    remaining_s = seen(toys).time_remaining_s
    assert remaining_s is None or remaining_s > 1e6


def test_a_call_that_the_client_cancels_ends_at_the_endpoint(
    channel: grpc.Channel, toys: list[Toy]
) -> None:
    call = stream(channel, "Hang")
    assert eventually(lambda: any(toy.seen for toy in toys))

    call.cancel()

    assert seen(toys).ended.wait(WAIT_S)


def test_an_endpoint_does_not_run_ahead_of_a_slow_client(
    channel: grpc.Channel, toys: list[Toy]
) -> None:
    call = stream(channel, "Flood")
    next(call)
    # MiB; gRPC lets more be under way on a fast connection: once, 65 were.
    most, num_written = 300, -1
    while num_written != (now := seen(toys).num_written) and now < most:
        num_written = now
        time.sleep(0.5)  # the time in which an endpoint that runs ahead would have come further

    assert now < most
    call.cancel()


@pytest.mark.parametrize(
    "metadata", [(), (("authorization", "Bearer token of a"),), (("authorization", "Bearer no"),)]
)
def test_a_stranger_reaches_no_endpoint(
    metadata: tuple[tuple[str, str], ...], channel: grpc.Channel, toys: list[Toy]
) -> None:
    error = failure(stream(channel, "Echo", b"x", metadata=metadata))

    assert error.code() is grpc.StatusCode.UNAUTHENTICATED
    assert not any(toy.seen for toy in toys)


def test_all_calls_of_a_connection_meet_and_other_connections_go_elsewhere(
    gateway: GatewayServer, toys: list[Toy]
) -> None:
    with connect_options(gateway) as one, connect_options(gateway) as other:
        names = [[list(stream(each, "Name")) for _ in range(3)] for each in (one, other)]

    assert names == [[[b"a"]] * 3, [[b"b"]] * 3]
    # Endpoints know their clients by connections, too.
    assert all(len({call.peer for call in toy.seen}) == 1 for toy in toys)


def test_twenty_clients_at_once_are_spread_evenly(gateway: GatewayServer, toys: list[Toy]) -> None:
    channels = [connect_options(gateway) for _ in range(20)]
    calls = [stream(channel, "Hang") for channel in channels]

    assert eventually(lambda: sum(len(toy.seen) for toy in toys) == 20)

    assert [len(toy.seen) for toy in toys] == [10, 10]
    assert len({call.peer for toy in toys for call in toy.seen}) == 20
    for call, channel in zip(calls, channels, strict=True):
        call.cancel()
        channel.close()


def test_when_an_endpoint_goes_its_calls_end_and_the_next_one_goes_elsewhere(
    gateway: GatewayServer, channel: grpc.Channel, toys: list[Toy]
) -> None:
    hanging = stream(channel, "Hang")
    assert eventually(lambda: bool(toys[0].seen))

    toys[0].stop()

    error = failure(hanging)
    assert error.code() is grpc.StatusCode.UNAVAILABLE
    assert "dial the gateway again" in error.details()
    assert list(stream(channel, "Name")) == [b"b"]
    assert gateway.health().is_serving


def test_a_refused_call_keeps_its_status_while_messages_are_on_their_way(
    channel: grpc.Channel,
) -> None:
    for _ in range(50):
        error = failure(stream(channel, "Refuse", *[b"more"] * 20))

        assert (error.code(), error.details()) == (grpc.StatusCode.DATA_LOSS, "no mood for it: ä")


def test_nothing_is_sent_twice(channel: grpc.Channel, toys: list[Toy]) -> None:
    error = failure(stream(channel, "Turn"))

    assert error.code() is grpc.StatusCode.UNAVAILABLE
    assert error.details() == "draining: dial another"
    assert sum(len(toy.seen) for toy in toys) == 1
    assert list(stream(channel, "Name")) == [b"b"]  # which the first one asked for


def test_a_call_that_names_a_session_is_taken_to_no_endpoint_that_does_not_know_it(
    channel: grpc.Channel, toys: list[Toy]
) -> None:
    bound = (*FRONT, ("rlmesh-ray-session", "agreed on elsewhere"))

    error = failure(stream(channel, "Echo", metadata=bound))
    list(stream(channel, "Echo"))
    list(stream(channel, "Echo", metadata=bound))

    assert error.code() is grpc.StatusCode.UNAVAILABLE
    assert "dial the gateway again" in error.details()
    assert [len(toy.seen) for toy in toys] == [2, 0]


def test_an_endpoint_that_takes_another_token_is_left_alone(toys: list[Toy]) -> None:
    stranger = Target("a", 1, toys[0].target.address, "of another endpoint")
    with (
        GatewayServer(lambda: [stranger]) as gateway,
        connect_options(gateway) as channel,
    ):
        error = failure(stream(channel, "Echo"))

        assert error.code() is grpc.StatusCode.UNAVAILABLE  # the client's token was right
        assert "does not take the gateway's token" in error.details()
        assert not gateway.health().is_serving
        assert "another token" in gateway.health().reason


def test_an_endpoint_that_does_not_answer_is_passed_over(toys: list[Toy]) -> None:
    absent = Target("absent", 1, "127.0.0.1:1")
    with (
        GatewayServer(lambda: [absent, toys[0].target]) as gateway,
        connect_options(gateway) as channel,
    ):
        assert list(stream(channel, "Name")) == [b"a"]
        assert gateway.health().is_serving


@pytest.mark.parametrize(
    ("targets", "words"),
    [([], "no endpoint behind"), ([Target("absent", 1, "127.0.0.1:1")], "none of the 1 endpoints")],
)
def test_without_endpoints_clients_and_probes_get_the_reason(
    targets: list[Target], words: str
) -> None:
    with GatewayServer(lambda: targets) as gateway, connect_options(gateway) as channel:
        error = failure(stream(channel, "Echo"))

        assert error.code() is grpc.StatusCode.UNAVAILABLE
        assert words in error.details()
        reported = check_health(ConnectOptions(gateway.address))
        assert reported.status is HealthStatus.NOT_SERVING
        assert words in reported.reason


def test_endpoints_that_come_later_are_found(toys: list[Toy]) -> None:
    targets: list[Target] = []
    with GatewayServer(lambda: tuple(targets)) as gateway, connect_options(gateway) as channel:
        failure(stream(channel, "Name"))

        targets.append(toys[1].target)

        assert eventually(lambda: gateway.health().is_serving)
        assert list(stream(channel, "Name")) == [b"b"]


def test_a_client_gets_an_endpoint_that_has_come_since_the_last_list(toys: list[Toy]) -> None:
    lists = iter([[Target("absent", 1, "127.0.0.1:1")]])
    with (
        GatewayServer(lambda: next(lists, [toys[0].target])) as gateway,
        connect_options(gateway) as channel,
    ):
        assert list(stream(channel, "Name")) == [b"a"]


def test_endpoints_are_checked_while_a_list_does_not_come(toys: list[Toy]) -> None:
    is_listed, may_come = threading.Event(), threading.Event()

    def find() -> list[Target]:
        if is_listed.is_set():
            may_come.wait(WAIT_S)
        is_listed.set()
        return [toys[0].target]

    with GatewayServer(find) as gateway:
        assert gateway.health().is_serving

        toys[0].stop()

        assert eventually(lambda: not gateway.health().is_serving, WAIT_S / 2)
        may_come.set()


def test_an_endpoint_that_is_listed_no_more_keeps_its_calls_and_gets_no_others(
    toys: list[Toy],
) -> None:
    listing = Listing(*(toy.target for toy in toys))
    with GatewayServer(listing) as gateway, connect_options(gateway) as channel:
        open_call = stream(channel, "Hang")
        assert eventually(lambda: bool(toys[0].seen))
        del listing.targets[0]

        listing.await_looks()
        during = list(stream(channel, "Name"))
        open_call.cancel()
        assert eventually(lambda: list(stream(channel, "Name")) == [b"b"])

        assert during == [b"a"]


def test_while_the_endpoints_cannot_be_listed_the_known_ones_serve(toys: list[Toy]) -> None:
    answers: list[Callable[[], list[Target]]] = [lambda: [toys[0].target]]

    def broken() -> list[Target]:
        raise ConfigurationError("the fleet is gone")

    with GatewayServer(lambda: answers[0]()) as gateway, connect_options(gateway) as channel:
        answers[0] = broken

        assert list(stream(channel, "Name")) == [b"a"]


def test_who_cannot_list_endpoints_says_why() -> None:
    def broken() -> list[Target]:
        raise ConfigurationError("the fleet is gone")

    with GatewayServer(broken) as gateway, connect_options(gateway) as channel:
        error = failure(stream(channel, "Echo"))

    assert "the fleet is gone" in error.details()


def test_a_stopped_gateway_ends_its_calls_and_not_the_endpoints(toys: list[Toy]) -> None:
    targets = [toys[0].target]
    with GatewayServer(lambda: targets) as gateway:
        channel = connect_options(gateway)
        call = stream(channel, "Hang")
        assert eventually(lambda: bool(toys[0].seen))

        gateway.stop()

        assert failure(call).code() in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.CANCELLED)
        assert toys[0].seen[0].ended.wait(WAIT_S)
        channel.close()
    with GatewayServer(lambda: targets) as again, connect_options(again) as channel:
        assert list(stream(channel, "Name")) == [b"a"]


def test_a_unix_socket_is_refused() -> None:
    with pytest.raises(AddressError, match="unix"):
        GatewayServer(list, address="unix:/tmp/gateway.sock")


def test_a_gateway_for_strangers_is_refused() -> None:
    with pytest.raises(AddressError, match="give a token"):
        GatewayServer(list, address="0.0.0.0:0")


def test_the_watch_goes_on_after_a_look_that_failed(
    toys: list[Toy],
) -> None:
    is_broken = True

    def credentials() -> grpc.ChannelCredentials:
        if is_broken:
            raise RuntimeError("can't start new thread")
        return grpc.local_channel_credentials()

    listing = Listing()
    with GatewayServer(listing, endpoint_credentials=credentials) as gateway:
        listing.targets.append(toys[0].target)
        assert eventually(lambda: "can't start new thread" in gateway.health().reason)

        is_broken = False

        assert eventually(lambda: gateway.health().is_serving)


def test_an_unused_upstream_is_closed_and_opened_again(
    toys: list[Toy], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gateway_module, "_IDLE_S", 1.0)
    listing = Listing(*(toy.target for toy in toys))
    with GatewayServer(listing, token="front") as gateway, connect_options(gateway) as channel:
        list(stream(channel, "Name"))
        failure(stream(channel, "Refuse"))
        assert len({call.peer for call in toys[0].seen}) == 1

        listing.await_looks(8)  # 0.2 s each, at least

        assert list(stream(channel, "Name")) == [b"a"]
        assert len({call.peer for call in toys[0].seen}) == 2
