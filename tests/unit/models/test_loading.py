import itertools
import os
import subprocess
import sys
import textwrap
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch

from rlmesh_ray.errors import ConfigurationError, PolicyError
from rlmesh_ray.models.loading import CallablePolicy, as_policy, load_policy
from rlmesh_ray.models.policy import RouteRows, Rows, UpdatablePolicy, traits_of
from rlmesh_ray.models.torch.policy import TorchPolicy
from rlmesh_ray.protocol.messages import PredictSlot
from rlmesh_ray.spaces.contract import AutoresetMode, EnvContract
from rlmesh_ray.spaces.spec import BoxSpec, DiscreteSpec
from tests.odd_files import put

BOX = BoxSpec((3,), "float32", np.zeros(3, "f4").tobytes(), np.ones(3, "f4").tobytes())
CONTRACT = EnvContract("Test-v0", BOX, DiscreteSpec(2), 2, AutoresetMode.DISABLED)
ROWS = Rows(
    np.eye(3, dtype=np.float32)[:2],
    [RouteRows("r", [PredictSlot(lane, "", 0, False) for lane in range(2)])],
)
# Torch would rather have torch.export; files that were written before still have to be served.
torchscript = pytest.mark.filterwarnings(r"ignore:`torch\.jit\.:DeprecationWarning")

own_names = itertools.count()


@pytest.fixture
def module() -> torch.nn.Linear:
    layer = torch.nn.Linear(3, 2)
    with torch.no_grad():
        layer.weight.copy_(torch.tensor([[0.0, 1.0, 0.0], [1.0, 0.0, 0.0]]))
        layer.bias.zero_()
    return layer


@pytest.fixture
def own_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], str]:
    """Write a module of the operator's own into the current folder; returns its name."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    # One name a test: an imported module stays imported.
    name = f"own_{next(own_names)}"

    def write(code: str) -> str:
        (tmp_path / f"{name}.py").write_text(textwrap.dedent(code))
        return name

    return write


# --- what is handed in -----------------------------------------------------------------


def test_a_policy_is_taken_as_it_is() -> None:
    policy = CallablePolicy(len)

    assert as_policy(policy) is policy


def test_a_function_becomes_a_callable_policy() -> None:
    policy = as_policy(lambda observations: [int(row.argmax()) for row in observations])

    assert policy.predict(CONTRACT, ROWS) == [0, 1]


def test_a_torch_module_becomes_a_torch_policy(module: torch.nn.Module) -> None:
    policy = as_policy(module)

    assert isinstance(policy, TorchPolicy)
    assert policy.traits.kind == "torch module Linear"
    assert np.array_equal(np.asarray(policy.predict(CONTRACT, ROWS)), [1, 0])


@pytest.mark.parametrize(
    ("policy", "message"),
    [
        (7, "a int is not a policy"),
        ("checkpoint", "load_policy loads one"),
        (CallablePolicy, "the class CallablePolicy itself"),
    ],
)
def test_anything_else_is_refused_with_a_remedy(policy: object, message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        as_policy(policy)


def test_an_rlmodule_without_its_connectors_is_refused(module: torch.nn.Module) -> None:
    module.register_buffer("forward_inference", None)

    with pytest.raises(ConfigurationError, match="does not act without its connectors"):
        as_policy(module)


def test_neither_torch_nor_ray_is_needed_for_a_function() -> None:
    code = """
        import sys
        sys.modules["torch"] = sys.modules["ray"] = None  # Importing them fails from now on.
        from rlmesh_ray.models.loading import as_policy
        from rlmesh_ray.models.policy import Rows
        assert as_policy(len).predict(None, Rows("abc", [])) == 3
    """

    subprocess.run([sys.executable, "-c", textwrap.dedent(code)], check=True)


# --- files -----------------------------------------------------------------------------


@torchscript
def test_a_torchscript_file_is_loaded(tmp_path: Path, module: torch.nn.Module) -> None:
    file = tmp_path / "policy.pt"
    torch.jit.save(torch.jit.script(module), file)

    policy = load_policy(str(file))

    assert traits_of(policy).kind == "TorchScript"
    assert np.array_equal(np.asarray(policy.predict(CONTRACT, ROWS)), [1, 0])


def test_a_torch_export_file_is_loaded(tmp_path: Path, module: torch.nn.Module) -> None:
    file = tmp_path / "policy.pt2"
    rows = ({0: torch.export.Dim("rows")},)
    torch.export.save(torch.export.export(module, (torch.zeros(2, 3),), dynamic_shapes=rows), file)

    policy = load_policy(str(file))

    assert traits_of(policy).kind == "torch.export"
    assert np.array_equal(np.asarray(policy.predict(CONTRACT, ROWS)), [1, 0])


def test_a_state_dict_is_refused_and_not_unpickled(tmp_path: Path) -> None:
    file, canary = tmp_path / "weights.pt", tmp_path / "canary"
    torch.save(Canary(canary), file)

    with pytest.raises(ConfigurationError, match=r"written by torch\.save.*module:factory"):
        load_policy(str(file))

    assert not canary.exists()


class Canary:
    """Leaves a file behind when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Callable[[Path], None], tuple[Path]]:
        return Path.touch, (self.path,)


def test_other_files_are_refused(tmp_path: Path) -> None:
    text, archive = tmp_path / "policy.txt", tmp_path / "policy.zip"
    text.write_text("left")
    with zipfile.ZipFile(archive, "w") as writer:
        writer.writestr("a/readme", "left")

    with pytest.raises(ConfigurationError, match=r"policy\.txt is not a policy; name an RLlib"):
        load_policy(str(text))
    with pytest.raises(ConfigurationError, match=r"policy\.zip is an archive without a policy"):
        load_policy(str(archive))


@torchscript
def test_a_broken_torchscript_file_is_a_policy_error(tmp_path: Path) -> None:
    file = tmp_path / "policy.pt"
    with zipfile.ZipFile(file, "w") as writer:
        writer.writestr("policy/constants.pkl", b"")

    with pytest.raises(PolicyError, match=r"policy\.pt cannot be loaded"):
        load_policy(str(file))


def test_a_torch_file_without_torch_names_the_remedy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "policy.pt"
    with zipfile.ZipFile(file, "w") as writer:
        writer.writestr("policy/constants.pkl", b"")
    monkeypatch.setitem(sys.modules, "torch", None)

    with pytest.raises(ConfigurationError, match=r"needs torch.*pip install torch"):
        load_policy(str(file))


# --- folders ---------------------------------------------------------------------------


def test_a_folder_that_is_no_checkpoint_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match=r"no rllib_checkpoint\.json.*save_to_path"):
        load_policy(str(tmp_path))


@pytest.mark.parametrize("above", [1, 2])
def test_a_folder_of_checkpoints_names_the_newest(tmp_path: Path, above: int) -> None:
    trial = tmp_path / "experiment" / "trial"
    for number in (0, 10, 2):
        folder = trial / f"checkpoint_{number:06}"
        folder.mkdir(parents=True)
        (folder / "rllib_checkpoint.json").write_text("{}")

    with pytest.raises(
        ConfigurationError, match=r"a folder that has checkpoints; .*checkpoint_000010$"
    ):
        load_policy(str((trial, trial.parent)[above - 1]))


def test_a_folder_inside_a_checkpoint_names_the_whole(tmp_path: Path) -> None:
    inner = tmp_path / "learner_group" / "learner" / "default_policy"
    inner.mkdir(parents=True)
    # Even where an RLModule lies, whose connectors lie elsewhere in the checkpoint.
    for file in ("class_and_ctor_args.pkl", "module_state.pkl"):
        (inner / file).touch()
    (tmp_path / "rllib_checkpoint.json").write_text("{}")

    with pytest.raises(
        ConfigurationError, match=f"a part of one; name the whole folder: {tmp_path}$"
    ):
        load_policy(str(inner))


def test_an_rllib_checkpoint_without_rllib_names_the_remedy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "rllib_checkpoint.json").write_text("{}")
    for name in list(sys.modules):
        if name.split(".")[0] in {"ray", "tree"} or name.startswith("rlmesh_ray.models.rllib"):
            monkeypatch.delitem(sys.modules, name)
    monkeypatch.setattr(sys, "path", [])

    with pytest.raises(ConfigurationError, match=r"ray is not installed: pip install .*\[rllib\]"):
        load_policy(str(tmp_path))


# --- own code --------------------------------------------------------------------------


def test_a_factory_s_function_acts(own_code: Callable[[str], str]) -> None:
    name = own_code("def make():\n    return lambda observations: [5] * len(observations)")

    assert load_policy(f"{name}:make").predict(CONTRACT, ROWS) == [5, 5]


def test_a_factory_may_be_an_attribute_of_a_class(own_code: Callable[[str], str]) -> None:
    name = own_code("class Zoo:\n    @staticmethod\n    def make():\n        return len")

    assert load_policy(f"{name}:Zoo.make").predict(CONTRACT, ROWS) == 2


@pytest.mark.parametrize(
    ("code", "factory", "error", "message"),
    [
        ("", "make", ConfigurationError, r"own_\d+ has no make"),
        ("make = 7", "make", ConfigurationError, "make is a int; a function is needed"),
        ("def make():\n return 7", "make", ConfigurationError, r"make\(\): a int is not a policy"),
        ("def make(a):\n return a", "make", PolicyError, r"TypeError.*called without arguments"),
        ("def make():\n return 1 / 0", "make", PolicyError, "raised ZeroDivisionError"),
        ("import absent_thing", "make", PolicyError, "importing .* failed: .*absent_thing"),
        ("1 / 0", "make", PolicyError, "raised ZeroDivisionError"),
        ("def make():\n raise SystemExit(7)", "make", PolicyError, "raised SystemExit: 7"),
        ("raise SystemExit(7)", "make", PolicyError, "raised SystemExit: 7"),
    ],
)
def test_what_is_wrong_with_own_code_is_said(
    own_code: Callable[[str], str], code: str, factory: str, error: type[Exception], message: str
) -> None:
    name = own_code(code)

    with pytest.raises(error, match=message):
        load_policy(f"{name}:{factory}")


@pytest.mark.parametrize(
    ("checkpoint", "message"),
    [
        ("absent_module:make", r"no module absent_module in .* or on the Python path"),
        ("absent/checkpoint", "absent/checkpoint does not exist; name an RLlib checkpoint folder"),
        ("s3://bucket/checkpoint", "not a local path; copy it"),
        ("", "name of the policy is empty; name an RLlib checkpoint folder"),
        (" ", "name of the policy is empty"),
    ],
)
def test_a_name_that_leads_nowhere_is_refused(checkpoint: str, message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        load_policy(checkpoint)


@pytest.mark.parametrize("policy", [len, "module"])
@pytest.mark.parametrize("inference", ["fast", None, np.zeros(2)])
def test_an_unknown_inference_is_refused_for_any_policy(
    policy: Any, inference: Any, module: torch.nn.Module
) -> None:
    with pytest.raises(ConfigurationError, match=r"inference=.* is not one of auto, torch"):
        as_policy(module if policy == "module" else policy, inference=inference)


def test_a_path_is_a_name_and_a_module_is_none(tmp_path: Path, module: torch.nn.Module) -> None:
    with pytest.raises(ConfigurationError, match="nothing does not exist"):
        load_policy(tmp_path / "nothing")
    with pytest.raises(ConfigurationError, match="pipe is neither a file nor a folder"):
        load_policy(put(os.mkfifo, tmp_path / "pipe"))
    with pytest.raises(ConfigurationError, match="a Linear is no name of a policy"):
        load_policy(cast(Any, module))


def test_exploring_is_for_rllib_checkpoints() -> None:
    with pytest.raises(ConfigurationError, match="explore is for RLlib checkpoints"):
        load_policy("module:factory", explore=True)


# --- options ---------------------------------------------------------------------------


def test_a_factory_s_module_gets_the_options(own_code: Callable[[str], str]) -> None:
    name = own_code("""
        import torch

        class Sizes(torch.nn.Module):
            def forward(self, x):
                return torch.full((len(x),), len(x))

        class Counter(Sizes):
            def initial_state(self):
                return torch.zeros(())

            def forward(self, x, state):
                return super().forward(x), state
    """)

    for module in ("Sizes", "Counter"):
        policy = load_policy(f"{name}:{module}", device="cpu", buckets=[1, 8])
        assert np.array_equal(np.asarray(policy.predict(CONTRACT, ROWS)), [8, 8])


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"device": "cuda:0"}, "device cannot"),
        ({"buckets": [1, 2]}, "buckets cannot"),
        ({"inference": "compiled", "buckets": [1]}, "buckets and inference cannot"),
    ],
)
@pytest.mark.parametrize(
    ("made", "kind"), [("len", "a function"), ("CallablePolicy(len)", "a CallablePolicy")]
)
def test_options_that_a_policy_cannot_use_are_refused(
    own_code: Callable[[str], str], made: str, kind: str, options: dict[str, Any], named: str
) -> None:
    name = own_code(f"""
        from rlmesh_ray.models.loading import CallablePolicy

        def make():
            return {made}
    """)

    with pytest.raises(ConfigurationError, match=rf"make\(\): {named} be used with {kind}"):
        load_policy(f"{name}:make", **options)
    load_policy(f"{name}:make", device="cpu")


@torchscript
def test_files_take_new_weights(tmp_path: Path, module: torch.nn.Linear) -> None:
    torch.jit.save(torch.jit.script(module), tmp_path / "policy.pt")
    torch.export.save(torch.export.export(module, (torch.zeros(2, 3),)), tmp_path / "policy.pt2")

    for file in ("policy.pt", "policy.pt2"):
        policy = load_policy(str(tmp_path / file))
        assert isinstance(policy, UpdatablePolicy)
        before = policy.predict(CONTRACT, ROWS)
        policy.set_weights({"weight": -module.weight.detach(), "bias": np.zeros(2, np.float32)})
        after = policy.predict(CONTRACT, ROWS)

        assert np.array_equal(np.asarray(before), [1, 0])
        assert np.array_equal(np.asarray(after), [0, 1])


# --- how many actions at once ----------------------------------------------------------


def test_a_module_says_how_many_actions_it_chooses_at_once(module: torch.nn.Linear) -> None:
    module.horizon = 5  # type: ignore[assignment]  # as an author would

    assert traits_of(as_policy(module)).horizon == 5
    with pytest.raises(ConfigurationError, match="the module says 5 itself"):
        as_policy(module, horizon=4)


def test_what_a_factory_returns_says_it_too(own_code: Callable[[str], str]) -> None:
    name = own_code(
        """
        def make():
            def act(observations):
                return observations

            act.horizon = 5
            return act

        def plain():
            return lambda observations: observations
        """
    )

    assert traits_of(load_policy(f"{name}:make")).horizon == 5
    assert traits_of(load_policy(f"{name}:plain", horizon=3)).horizon == 3
    with pytest.raises(ConfigurationError, match="horizon=0"):
        load_policy(f"{name}:plain", horizon=0)


def test_a_recurrent_module_cannot_choose_several_actions_at_once() -> None:
    class Recurrent(torch.nn.Module):
        def initial_state(self) -> torch.Tensor:
            return torch.zeros(1)

    with pytest.raises(ConfigurationError, match=r"horizon=2 .* recurrent .* state"):
        as_policy(Recurrent(), horizon=2)
