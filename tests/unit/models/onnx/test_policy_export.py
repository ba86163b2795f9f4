"""Modules of torch as ONNX files: what is written, what is proven, and what is refused."""

import itertools
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import pytest
import torch

from rlmesh_ray.errors import ConfigurationError, PolicyError
from rlmesh_ray.models.loading import load_policy
from rlmesh_ray.models.onnx.policy_export import ExportProof, export_policy
from rlmesh_ray.spaces.contract import AutoresetMode, EnvContract
from rlmesh_ray.spaces.spec import (
    BoxSpec,
    DictSpec,
    DiscreteSpec,
    MultiBinarySpec,
    SpaceSpec,
    TupleSpec,
)

Write = Callable[[str], str]
BOX = BoxSpec((3,), "float32", np.array(-1, "<f4").tobytes(), np.array(1, "<f4").tobytes())
own_names = itertools.count()


def contract(observations: SpaceSpec, actions: SpaceSpec) -> EnvContract:
    return EnvContract("Test-v0", observations, actions, 2, AutoresetMode.DISABLED)


@pytest.fixture
def own_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Write:
    """Write the body of a module's forward; returns the name of a factory of the module."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    # One name a test: an imported module stays imported.
    name = f"own_module_{next(own_names)}"

    def write(body: str) -> str:
        code = f"""
            import torch

            class Module(torch.nn.Module):
                def __init__(self):
                    super().__init__()
                    torch.manual_seed(0)
                    self.net = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Tanh())

                def forward(self, x):
                    return {body}
        """
        Path(f"{name}.py").write_text(textwrap.dedent(code))
        return f"{name}:Module"

    return write


def run(file: str, observations: dict[str, Any]) -> list[Any]:
    session = onnxruntime.InferenceSession(file, providers=["CPUExecutionProvider"])
    found: list[Any] = session.run(None, observations)
    return found


NESTED = DictSpec((("left", BOX), ("right", TupleSpec((DiscreteSpec(4), BOX)))))
CASES: dict[str, tuple[str, SpaceSpec, SpaceSpec]] = {
    "logits": ("self.net(x)", BOX, DiscreteSpec(4, start=-1)),
    "choices": ("self.net(x).argmax(1)", BOX, DiscreteSpec(4, dtype="int32")),
    "numbers": ("self.net(x)[:, :3]", BOX, BOX),
    "bits": ("(self.net(x) > 0).int()", BOX, MultiBinarySpec(4)),
    "numbers of 64 bits": (
        "self.net(x.float())[:, :1].double()",
        BoxSpec((3,), "float64", np.array(-np.inf).tobytes(), np.array(np.inf).tobytes()),
        BoxSpec((1,), "float64", np.array(-1.0).tobytes(), np.array(1.0).tobytes()),
    ),
    "nested": (
        "{'a': self.net(x['left'] + x['right'][1]), 'b': x['right'][0]}",
        NESTED,
        DictSpec((("a", DiscreteSpec(4)), ("b", DiscreteSpec(4)))),
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_the_file_acts_as_the_module(own_code: Write, name: str) -> None:
    body, observation, action = CASES[name]
    of_env = contract(observation, action)

    proof = export_policy(own_code(body), "policy.onnx", contract=of_env)

    assert (proof.num_observations, proof.num_ties) == (1000, 0)
    assert (proof.largest_difference is not None) == isinstance(action, BoxSpec)
    policy = load_policy("policy.onnx")
    policy.check_contract(of_env)
    assert policy.traits.observation_space == observation  # type: ignore[attr-defined]


def test_bare_onnx_runtime_takes_observations_as_the_environment_gives_them(
    own_code: Write,
) -> None:
    body, observation, action = CASES["nested"]
    export_policy(own_code(body), "policy.onnx", contract=contract(observation, action))
    rows = np.eye(3, dtype=np.float32)

    a, b = run("policy.onnx", {"left": rows, "right.0": np.array([3, 0, 1]), "right.1": -rows})

    assert (a.dtype, a.shape) == (np.int64, (3,))
    assert b.tolist() == [3, 0, 1]


def test_an_observation_of_nan_gives_an_action_outside_of_its_space(own_code: Write) -> None:
    body, observation, action = CASES["logits"]
    export_policy(own_code(body), "policy.onnx", contract=contract(observation, action))
    rows = np.zeros((2, 3), np.float32)
    rows[1, 1] = np.nan

    (actions,) = run("policy.onnx", {"observation": rows})

    assert actions[0] in range(-1, 3)
    assert actions[1] == 3


def test_names_that_would_occur_twice_are_told_apart(own_code: Write) -> None:
    pair = DictSpec((("y", BOX), ("x.y", BOX)))
    space = DictSpec((("action", BOX), ("1", BOX), ("x.x", pair), ("x", DictSpec((("x", pair),)))))
    body = "self.net(x['action'] + x['1'] + x['x']['x']['y'] - x['x.x']['y'])"

    export_policy(own_code(body), "policy.onnx", contract=contract(space, DiscreteSpec(4)))

    session = onnxruntime.InferenceSession("policy.onnx", providers=["CPUExecutionProvider"])
    assert [each.name for each in session.get_outputs()] == ["action_"]
    names = [each.name for each in session.get_inputs()]
    assert names == ["action", "observation.1", "x.x.y", "x.x.x.y", "x.x.y_", "x.x.x.y_"]


@pytest.mark.filterwarnings(r"ignore:`torch\.jit\.:DeprecationWarning")
@pytest.mark.parametrize("kind", ["script", "export"])
def test_files_of_torch_are_exported(tmp_path: Path, kind: str) -> None:
    module, file = torch.nn.Linear(3, 4).eval(), tmp_path / "policy.pt"
    if kind == "script":
        torch.jit.save(torch.jit.script(module), file)
    else:
        rows = ({0: torch.export.Dim("rows")},)
        program = torch.export.export(module, (torch.zeros(2, 3),), dynamic_shapes=rows)
        torch.export.save(program, file)

    of_env = contract(BOX, DiscreteSpec(4))
    proof = export_policy(str(file), tmp_path / "policy.onnx", contract=of_env)

    assert proof.num_observations == 1000


def test_of_two_actions_of_the_same_value_either_may_be_chosen(own_code: Write) -> None:
    body = "self.net(x)[:, :1] + 1e-7 * torch.rand_like(x[:, :2])"

    proof = export_policy(own_code(body), "policy.onnx", contract=contract(BOX, DiscreteSpec(2)))

    assert proof.num_ties > 0


@pytest.mark.parametrize(
    ("proof", "text"),
    [
        (ExportProof(1000, None, 0), "1,000 observations: same actions"),
        (
            ExportProof(1000, 2.41e-7, 0),
            "1,000 observations: same actions, largest difference 2.4e-07",
        ),
        (
            ExportProof(1000, None, 3),
            "1,000 observations: same actions, but for 3 between equally good ones",
        ),
    ],
)
def test_a_proof_says_what_was_compared(proof: ExportProof, text: str) -> None:
    assert str(proof) == text


def test_a_file_that_would_act_otherwise_is_not_written(own_code: Write) -> None:
    name = own_code("self.net(x) + torch.rand(4)")
    Path("policy.onnx").write_bytes(b"an older one")

    with pytest.raises(PolicyError, match=r"nothing was written: of 1,000 .* than in torch"):
        export_policy(name, "policy.onnx", contract=contract(BOX, DiscreteSpec(4)))

    assert Path("policy.onnx").read_bytes() == b"an older one"
    assert not list(Path().glob("*.part"))


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        ("self.net(x) if x.sum() > 0 else -self.net(x)", "depends on values that only a run has"),
        ("torch.from_numpy(self.net(x).detach().numpy())", "Module cannot be written as ONNX"),
        ("self.bfloat16().net(x.bfloat16()).float()", "it has weights of bfloat16"),
    ],
)
def test_what_no_graph_can_express_is_refused(own_code: Write, body: str, reason: str) -> None:
    with pytest.raises(ConfigurationError, match=f"{reason}.*serve the checkpoint itself"):
        export_policy(own_code(body), "policy.onnx", contract=contract(BOX, DiscreteSpec(4)))


@pytest.mark.parametrize(
    ("code", "reason"),
    [
        ("make = lambda: len", "a function is no module of torch; serve it as it is"),
        (
            """
            import torch
            class make(torch.nn.Module):
                def initial_state(self): return torch.zeros(2)
                def forward(self, x, state): return x, state
            """,
            "the module has a memory",
        ),
    ],
)
def test_functions_and_memories_are_refused(own_code: Write, code: str, reason: str) -> None:
    name = own_code("x").partition(":")[0]
    Path(f"{name}.py").write_text(textwrap.dedent(code))

    with pytest.raises(ConfigurationError, match=reason):
        export_policy(f"{name}:make", "policy.onnx", contract=contract(BOX, BOX))


def test_a_module_needs_the_spaces_of_an_environment(own_code: Write) -> None:
    with pytest.raises(ConfigurationError, match=r"for which spaces it is; .*--env ENV_OR_ADDRESS"):
        export_policy(own_code("self.net(x)"), "policy.onnx")


def test_an_onnx_file_is_not_exported_again() -> None:
    with pytest.raises(ConfigurationError, match=r"policy\.onnx is an ONNX file already"):
        export_policy("policy.onnx", "other.onnx")


@pytest.mark.parametrize(
    ("file", "reason"),
    [("policy.pt", r"does not end with \.onnx"), ("none/policy.onnx", "none does not exist")],
)
def test_where_no_file_can_be_is_refused_first(own_code: Write, file: str, reason: str) -> None:
    with pytest.raises(ConfigurationError, match=reason):
        export_policy("no_such:policy", file)


def test_a_name_that_the_file_system_refuses_is_one_error(own_code: Write) -> None:
    checkpoint, of_env = own_code("self.net(x)"), contract(BOX, DiscreteSpec(4))

    with pytest.raises(ConfigurationError, match=r"cannot be written \(File name too long\)"):
        export_policy(checkpoint, f"{'a' * 300}.onnx", contract=of_env)

    assert not list(Path().glob("*part"))
