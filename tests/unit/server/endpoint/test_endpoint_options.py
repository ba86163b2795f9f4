import inspect
from typing import Any

import pytest

from rlmesh_ray import EnvServer, ListenOptions, ModelServer
from rlmesh_ray.errors import ConfigurationError
from rlmesh_ray.options import declared
from rlmesh_ray.server.endpoint.endpoint_options import listening


def test_the_fields_have_their_declared_defaults_and_texts() -> None:
    shown = inspect.signature(ListenOptions).parameters
    given = ListenOptions()

    assert set(shown) == set(declared(ListenOptions)) == set(vars(given))
    for name, (_, option) in declared(ListenOptions).items():
        # An address that is not given is that of the place: an actor has another one.
        assert shown[name].default == (None if name == "address" else option.default)
        assert f"    {name}: " in (ListenOptions.__doc__ or "")


@pytest.mark.parametrize("address", ["127.0.0.1:7", ListenOptions("127.0.0.1:7", idle_timeout_s=3)])
def test_an_address_alone_listens_as_the_options_with_that_address(address: Any) -> None:
    place, listen = listening("here", address)

    assert place == listen.address == "127.0.0.1:7"
    assert listening("here", None, default="unix:/x") == ("unix:/x", ListenOptions())


@pytest.mark.parametrize(
    ("given", "why"),
    [
        ({"idle_timeout_s": 0}, "idle_timeout_s=0 must be a finite number of seconds"),
        ({"accept_edition_texts": "rlmesh-0.1.0b3"}, "must be several names"),
        ({"accept_edition_texts": ["no such text"]}, "no such text"),
    ],
)
def test_a_wrong_value_is_refused_before_there_is_a_server(given: Any, why: str) -> None:
    with pytest.raises(ConfigurationError, match=why):
        ListenOptions(**given)


def test_an_unknown_option_is_refused_with_the_nearest_name() -> None:
    unknown: Any = {"idle_timeout": 3}

    with pytest.raises(
        TypeError,
        match=r"ListenOptions\(\) got an unexpected keyword argument 'idle_timeout'; "
        "did you mean 'idle_timeout_s'",
    ):
        ListenOptions("127.0.0.1:7", **unknown)


def test_options_with_several_names_are_equal_and_have_a_hash() -> None:
    listed = ListenOptions(accept_edition_texts=["rlmesh-0.1.0b3", "rlmesh-0.1.0b3"])
    single = ListenOptions(accept_edition_texts=("rlmesh-0.1.0b3",))

    assert listed == single
    assert hash(listed) == hash(single)


def test_a_server_refuses_what_only_another_one_serves() -> None:
    with pytest.raises(
        ConfigurationError, match=r"EnvServer takes no openpi='127.0.0.1:0': .*Model"
    ):
        EnvServer("CartPole-v1", address=ListenOptions(openpi="127.0.0.1:0"))
    with pytest.raises(
        ConfigurationError, match=r"ModelServer takes no data_address='127.0.0.1:0'"
    ):
        ModelServer(lambda batch: batch, address=ListenOptions(data_address="127.0.0.1:0"))


@pytest.mark.parametrize("address", ["127.0.0.1:0", "0.0.0.0:0"])
@pytest.mark.parametrize("token", [0, True, b"secret"])
def test_a_token_of_another_type_is_refused_with_what_there_is(address: str, token: Any) -> None:
    for serve in (
        lambda: EnvServer("CartPole-v1", address=address, token=token),
        lambda: ModelServer(lambda batch: batch, address=address, token=token),
    ):
        with pytest.raises(ConfigurationError, match=r"type \w+: give a str .*False .* on purpose"):
            serve()
