"""Nothing that a client sends can name a module, a path or a class, whichever field it stands in.

The server and its workers run with an audit hook, which notes all that Python imports, opens,
compiles or runs in which the client's text occurs; and that text is the name of a module that could
be imported, and leaves a trace.
"""

import contextlib
import importlib
import itertools
import os
import pkgutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from dm_env_rpc.v1 import dm_env_rpc_pb2
from dm_env_rpc.v1.extensions.properties_pb2 import PropertyRequest
from google.protobuf.descriptor import Descriptor, FieldDescriptor
from google.protobuf.message_factory import GetMessageClass
from grpc_health.v1 import health_pb2

from rlmesh_ray import RemoteModel, RemoteVectorEnv
from rlmesh_ray.client.channel import ConnectOptions
from rlmesh_ray.client.env.env_client import EnvClient
from rlmesh_ray.client.health import check_health
from rlmesh_ray.errors import RlmeshError
from tests.loopback.dm_env_rpc_stream import DmStream
from tests.loopback.ports import plain_channel
from tests.loopback.served_calls import ended_with

TEXTS = ("canary_module:Env-v0", "canary_module.Env")

HOOK = """
import os, sys
trace = os.open(os.environ["CANARY_TRACE"], os.O_WRONLY | os.O_APPEND)
def hook(event, arguments):
    # Not what only passes a text on: sockets, and the memory of arrays.
    if event in EVENTS and "canary" in repr(arguments) and "CANARY_TRACE" not in repr(arguments):
        os.write(trace, f"{event} {arguments!r:.300}\\n".encode())
EVENTS = {
    "import", "open", "compile", "exec", "pickle.find_class", "marshal.loads", "subprocess.Popen",
    "os.system", "os.exec", "os.posix_spawn", "os.listdir", "os.scandir", "os.remove", "os.rename",
    "os.mkdir", "os.chdir", "os.link", "os.symlink", "os.truncate", "glob.glob", "ctypes.dlopen",
    "socket.getaddrinfo", "socket.connect", "code.__new__", "function.__new__",
}
sys.addaudithook(hook)
"""
CANARY = """
import os
os.write(os.open(os.environ["CANARY_TRACE"], os.O_WRONLY | os.O_APPEND), b"it was imported\\n")
class Env: pass
"""
SERVER = """
import sys
from rlmesh_ray import EnvServer, ModelServer
env = EnvServer("CartPole-v1", num_envs=2, allow_calls=("spec",)).start()
model = ModelServer(lambda observations: [0] * len(observations)).start()
print(env.address, model.address, flush=True)
sys.stdin.read()
"""


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    file = tmp_path / "trace"
    file.touch()
    return file


@pytest.fixture
def served(tmp_path: Path, trace: Path) -> Iterator[tuple[str, str]]:
    """Yield the addresses of an environment and a model, both watched."""
    folder = tmp_path / "importable"
    folder.mkdir()
    (folder / "sitecustomize.py").write_text(HOOK)  # for workers, too
    (folder / "canary_module.py").write_text(CANARY)
    paths = [str(folder), *filter(None, [os.environ.get("PYTHONPATH")])]
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "CANARY_TRACE": str(trace)}
    with subprocess.Popen(
        [sys.executable, "-c", SERVER],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environ, cwd=folder,
    ) as process:  # fmt: skip
        assert process.stdout is not None
        env, model = process.stdout.readline().split()
        yield env, model
        process.communicate(timeout=30)
    assert process.returncode == 0


def filled(kind: Descriptor, text: str, depth: int = 6) -> Iterator[Any]:
    """Yield messages with ``text`` in every field that takes one, each with another choice made."""
    choices = max([len(each.fields) for each in kind.oneofs], default=1)
    for choice in range(choices):
        yield _filled(kind, text, depth, choice)
        for inner in range(1, 12):  # the choices within the choice
            yield _filled(kind, text, depth, choice, inner)


def _filled(kind: Descriptor, text: str, depth: int, *choices: int) -> Any:
    message = GetMessageClass(kind)()
    choice, *inner = choices
    for field in kind.fields:
        oneof = field.containing_oneof
        if oneof is not None and oneof.fields[choice % len(oneof.fields)] is not field:
            continue
        if field.message_type is not None and not depth:
            continue
        _fill(message, field, text, depth, inner or [choice])
    return message


def _fill(message: Any, field: FieldDescriptor, text: str, depth: int, choices: Any) -> None:
    held = getattr(message, field.name)
    entry = field.message_type
    if entry is not None and entry.GetOptions().map_entry:
        value = entry.fields_by_name["value"]
        key = text if entry.fields_by_name["key"].type == FieldDescriptor.TYPE_STRING else 1
        if value.message_type is not None:
            held[key].CopyFrom(_filled(value.message_type, text, depth - 1, *choices))
        else:
            held[key] = _scalar(value, text)
    elif entry is not None:
        inner = _filled(entry, text, depth - 1, *choices)
        held.append(inner) if field.is_repeated else held.CopyFrom(inner)
    elif field.is_repeated:
        held.append(_scalar(field, text))
    else:
        setattr(message, field.name, _scalar(field, text))


def _scalar(field: FieldDescriptor, text: str) -> Any:
    if field.type == FieldDescriptor.TYPE_STRING:
        return text
    return text.encode() if field.type == FieldDescriptor.TYPE_BYTES else 1


def requests() -> Iterator[tuple[str, Descriptor]]:
    """Yield the path of each call, with the message that it takes, in both generations."""
    for generation, kind in itertools.product(("rlmesh", "rlmesh_wire"), ("env", "model")):
        home = importlib.import_module(f"rlmesh_ray.wire._pb.{generation}.{kind}.v1")
        service = f"{kind}.v1.{kind.capitalize()}Service"
        for module in pkgutil.iter_modules(home.__path__):
            messages = importlib.import_module(f"{home.__name__}.{module.name}").DESCRIPTOR
            for name, message in messages.message_types_by_name.items():
                if name in ("HandshakeRequest", "JoinRequest", "ShutdownRequest"):
                    yield f"/rlmesh.{service}/{name.removesuffix('Request')}", message
    wire = importlib.import_module("rlmesh_ray.wire._pb.rlmesh_wire.core.v1.handshake_pb2")
    for name, message in wire.DESCRIPTOR.message_types_by_name.items():
        if name.endswith("Request"):
            yield f"/rlmesh.env.v1.EnvService/{name.removesuffix('Request')}", message
    lanes = importlib.import_module("rlmesh_ray.wire._pb.rlmesh_ray.lanes.v1.service_pb2")
    yield "/rlmesh_ray.lanes.v1.LaneService/Call", lanes.CallRequest.DESCRIPTOR
    observe = importlib.import_module("rlmesh_ray.wire._pb.rlmesh_ray.observe.v1.service_pb2")
    yield "/rlmesh_ray.observe.v1.ObserverService/Render", observe.RenderRequest.DESCRIPTOR
    yield "/dm_env_rpc.v1.Environment/Process", dm_env_rpc_pb2.EnvironmentRequest.DESCRIPTOR
    yield "/grpc.health.v1.Health/Check", health_pb2.HealthCheckRequest.DESCRIPTOR


def test_the_messages_of_all_protocols_are_filled() -> None:
    kinds = dict(requests())

    assert len(list(requests())) >= 13
    assert any(path.endswith("Process") for path in kinds)
    for path, kind in requests():
        sent = [message.SerializeToString() for message in filled(kind, TEXTS[0])]
        if not path.endswith("Join"):
            assert any(TEXTS[0].encode() in data for data in sent), path


def say_it_everywhere(env: str, model: str, text: str) -> None:
    """Send ``text`` in each field of each message, alone and in sessions that go on."""
    for address in (env, model):
        with plain_channel(address) as channel:
            shown = (("rlmesh-ray-session", text), ("x-anything", text))
            for path, kind in requests():
                for data in {message.SerializeToString() for message in filled(kind, text)}:
                    code, _, _ = ended_with(channel, path, shown, data)
                    assert code is not grpc.StatusCode.DEADLINE_EXCEEDED
    _in_sessions(env, model, text)


def _in_sessions(env: str, model: str, text: str) -> None:
    client = EnvClient(ConnectOptions(env))
    client.reset(options={text: text, "env": text, "path": text, "nested": {"module": [text]}})
    with contextlib.suppress(RlmeshError):
        client.call(text, text)
    client.close()
    with DmStream(env) as stream:
        stream.refused(join_world={"world_name": text})
        named = ("env_id", "entry_point", "path", "seed", "timeout_s")
        for name in (*named, f"options.{text}", "options.path", text):
            stream.send_raw(_setting(name, text))
            stream.receive()
        for kind in ("read_property", "write_property", "list_property"):
            request = dm_env_rpc_pb2.EnvironmentRequest()
            request.extension.Pack(PropertyRequest(**{kind: {"key": text}}))
            stream.send_raw(request.SerializeToString())
            stream.receive()
        stream.join(stream.create(**{f"options.{text}": text, "options.path": text}))
    with contextlib.closing(RemoteVectorEnv(env)) as lanes:
        asked = RemoteModel(model)
        asked.configure_route(lanes, route_id=text)
        observations, _ = lanes.reset(options={"module": text})
        assert len(asked.predict(observations, route_id=text)) == 2
        asked.close()


def _setting(name: str, text: str) -> bytes:
    request = dm_env_rpc_pb2.EnvironmentRequest()
    request.create_world.settings[name].strings.array.append(text)
    data: bytes = request.SerializeToString()
    return data


def test_no_text_of_a_client_is_imported_opened_or_run(
    served: tuple[str, str], trace: Path
) -> None:
    env, model = served
    for text in (*TEXTS, str(trace.parent / "importable" / "canary_module.py")):
        say_it_everywhere(env, model, text)

    assert check_health(ConnectOptions(env)).is_serving
    assert check_health(ConnectOptions(model)).is_serving
    assert trace.read_text() == ""


def test_the_trace_shows_what_the_operator_names(tmp_path: Path, trace: Path) -> None:
    # Else the test above could not fail.
    folder = tmp_path / "importable"
    folder.mkdir()
    (folder / "sitecustomize.py").write_text(HOOK)
    (folder / "canary_module.py").write_text(CANARY)
    environ = {**os.environ, "PYTHONPATH": str(folder), "CANARY_TRACE": str(trace)}
    script = 'from rlmesh_ray import EnvServer; EnvServer("canary_module:CartPole-v1").start()'
    subprocess.run([sys.executable, "-c", script], env=environ, capture_output=True, timeout=60)

    reported = trace.read_text()
    assert "import" in reported
    assert "it was imported" in reported
