import inspect
import pickle

import pytest

from rlmesh_ray import errors

CLASSES = [
    value
    for value in vars(errors).values()
    if isinstance(value, type) and issubclass(value, Exception)
]


def example(kind: type[errors.RlmeshError]) -> errors.RlmeshError:
    """Make one with a distinct value for every constructor argument."""
    values = {"is_recoverable": True, "supported_editions": ("2026.06",)}
    if kind.__init__ is Exception.__init__:
        return kind("what happened")
    names = [name for name in inspect.signature(kind.__init__).parameters if name != "self"]
    if names == ["args", "kwargs"]:
        return kind("what happened")
    return kind(*(values.get(name, f"the {name}") for name in names))


@pytest.mark.parametrize("kind", CLASSES, ids=lambda kind: kind.__name__)
def test_errors_survive_the_trip_between_processes(kind: type[errors.RlmeshError]) -> None:
    error = example(kind)

    copy = pickle.loads(pickle.dumps(error))

    assert type(copy) is kind
    assert str(copy) == str(error)
    assert vars(copy) == vars(error)


@pytest.mark.parametrize("kind", CLASSES, ids=lambda kind: kind.__name__)
def test_every_error_says_what_happened(kind: type[errors.RlmeshError]) -> None:
    error = example(kind)

    said = error.reason if isinstance(error, errors.ConformanceError) else error.args[0]
    assert str(said) in str(error)


def test_a_value_out_of_its_space_is_named_by_its_place() -> None:
    root = errors.ConformanceError("range", "", "7 is above 2")
    leaf = errors.ConformanceError("range", "arm.angle", "7 is above 2", 1)

    assert str(root) == "value: 7 is above 2"
    assert str(leaf) == "arm.angle: 7 is above 2"
    assert str(root.about("action")) == "action: 7 is above 2"
    assert str(leaf.about("action")) == "action.arm.angle: 7 is above 2"
    assert (leaf.about("action").path, leaf.about("action").lane) == ("arm.angle", 1)


def test_an_error_names_its_request_where_there_is_one() -> None:
    assert str(errors.RemoteProtocolError("the answer is empty", "7")).endswith(" (request 7)")
    assert str(errors.RemoteProtocolError("the answer is empty")) == "the answer is empty"


def test_a_text_is_printable_whatever_a_peer_has_sent() -> None:
    sent = "\x1b]0;title\x07 \x9b2J \r\u202e\u200b\ud800 é µ 猫 [red]\n\tnext"

    assert errors.printable(sent) == (
        "\\x1b]0;title\\x07 \\x9b2J \\r\\u202e\\u200b\\ud800 é µ 猫 [red]\n\tnext"
    )


@pytest.mark.parametrize("kind", CLASSES, ids=lambda kind: kind.__name__)
def test_the_text_of_an_error_is_printable(kind: type[errors.RlmeshError]) -> None:
    if not issubclass(kind, errors.RlmeshError):
        pytest.skip("its text is this side's")
    error = example(kind)
    sent = (each + "\x1b[2J" if isinstance(each, str) else each for each in error.args)

    assert "\x1b" not in str(kind(*sent))
