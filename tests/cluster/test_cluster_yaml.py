"""cluster.yaml is what `ray up` takes, by Ray's validator, and kuberay.yaml fits the project."""

import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml  # it comes with Ray
from packaging.requirements import Requirement

pytestmark = pytest.mark.ray

PROJECT = Path(__file__).parents[2]
TEXT = (PROJECT / "cluster.yaml").read_text()


def prepared(config: dict[str, Any]) -> dict[str, Any]:
    from ray.autoscaler._private.util import prepare_config, validate_config

    config = prepare_config(config)
    validate_config(config)
    return dict(config)


def test_the_cluster_of_own_machines_has_all_workers_that_are_listed() -> None:
    config = prepared(yaml.safe_load(TEXT))

    (node_type,) = config["available_node_types"].values()
    assert (
        node_type["min_workers"] == config["max_workers"] == len(config["provider"]["worker_ips"])
    )


def test_the_cloud_variant_is_valid_without_its_comment_signs() -> None:
    commented = TEXT[TEXT.index("# provider:") :].splitlines()
    variant = yaml.safe_load("\n".join(line.removeprefix("# ") for line in commented))

    assert prepared({**yaml.safe_load(TEXT), **variant})["max_workers"] == 8


def test_all_that_the_build_needs_is_mounted() -> None:
    project = tomllib.loads((PROJECT / "pyproject.toml").read_text())
    mounts = yaml.safe_load(TEXT)["file_mounts"]
    sources = {name.partition(".")[0] for name in project["tool"]["setuptools"]["packages"]}
    sources |= set(project["tool"]["setuptools"]["package-dir"].values())
    named = {project["project"]["readme"], *project["project"]["license-files"]}

    assert sources | named | {"pyproject.toml", "constraints.txt"} == set(mounts.values())
    assert all(target == f"~/rlmesh-ray/{source}" for target, source in mounts.items())


def test_the_cluster_on_kubernetes_runs_a_ray_that_the_project_takes() -> None:
    project = tomllib.loads((PROJECT / "pyproject.toml").read_text())
    (ray,) = (
        requirement
        for requirement in map(Requirement, project["project"]["optional-dependencies"]["rllib"])
        if requirement.name == "ray"
    )
    text = (PROJECT / "kuberay.yaml").read_text()
    spec = yaml.safe_load(text)["spec"]

    assert ray.specifier.contains(spec["rayVersion"])
    assert f"rayproject/ray:{spec['rayVersion']}-" in text
    assert spec["authOptions"] == {"mode": "token"}
    for source in yaml.safe_load(TEXT)["file_mounts"].values():
        assert f" {source} " in text  # the image has what the machines get


def test_the_gateway_on_kubernetes_is_reached_by_its_service_and_reads_its_own_token_file() -> None:
    text = (PROJECT / "kuberay.yaml").read_text()
    cluster = yaml.safe_load(text)
    pod, service = (
        yaml.safe_load("\n".join(line.removeprefix("# ") for line in block.splitlines()))
        for block in text[text.index("# spec:") :].split("#\n")
    )
    (head,) = cluster["spec"]["headGroupSpec"]["template"]["spec"]["containers"]
    (init,), (container,) = pod["spec"]["initContainers"], pod["spec"]["containers"]
    command = text[text.index("serve_behind_one_address.py") :].splitlines()[1]
    _, _, address, _, token_file = command.split()
    (mount,), (port,) = container["volumeMounts"], service["spec"]["ports"]

    assert (container["name"], init["image"]) == (head["name"], head["image"])
    assert [each["name"] for each in init["volumeMounts"]] == [
        volume["name"] for volume in pod["spec"]["volumes"]
    ]
    # The example gets the copy, in the folder that both containers have.
    assert mount in init["volumeMounts"]
    assert token_file == init["command"][-1]
    assert Path(token_file).parent == Path(mount["mountPath"])
    assert service["spec"]["selector"]["ray.io/cluster"] == cluster["metadata"]["name"]
    assert address == f"0.0.0.0:{port['port']}"
    assert " examples " in text  # the image has it
