"""cluster.yaml is what `ray up` takes, by Ray's validator, and kuberay.yaml fits the project."""

import tomllib
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import yaml  # it comes with Ray
from packaging.requirements import Requirement

pytestmark = pytest.mark.ray

ROOT = Path(__file__).parents[2]
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
CLUSTER = yaml.safe_load((ROOT / "cluster.yaml").read_text())
KUBERAY = yaml.safe_load((ROOT / "kuberay.yaml").read_text())


def test_the_cluster_of_own_machines_has_all_workers_that_are_listed() -> None:
    from ray.autoscaler._private.util import prepare_config, validate_config

    config: dict[str, Any] = prepare_config(deepcopy(CLUSTER))
    validate_config(config)

    (node_type,) = config["available_node_types"].values()
    assert (
        node_type["min_workers"] == config["max_workers"] == len(config["provider"]["worker_ips"])
    )


def test_all_that_the_build_needs_is_mounted() -> None:
    mounts = CLUSTER["file_mounts"]
    setuptools, project = PYPROJECT["tool"]["setuptools"], PYPROJECT["project"]
    sources = {name.partition(".")[0] for name in setuptools["packages"]}
    sources |= set(setuptools["package-dir"].values())
    named = {project["readme"], *project["license-files"]}

    assert sources | named | {"pyproject.toml", "constraints.txt"} == set(mounts.values())
    assert all(target == f"~/rlmesh-ray/{source}" for target, source in mounts.items())


def test_the_cluster_on_kubernetes_runs_a_ray_that_the_project_takes_with_a_token() -> None:
    (ray,) = (
        requirement
        for requirement in map(Requirement, PYPROJECT["project"]["optional-dependencies"]["rllib"])
        if requirement.name == "ray"
    )

    assert ray.specifier.contains(KUBERAY["spec"]["rayVersion"])
    assert KUBERAY["spec"]["authOptions"] == {"mode": "token"}


def test_the_pods_on_kubernetes_share_an_image_and_get_what_they_are_limited_to() -> None:
    spec = KUBERAY["spec"]
    groups = [spec["headGroupSpec"], *spec["workerGroupSpecs"]]
    containers = [each for group in groups for each in group["template"]["spec"]["containers"]]

    assert len({container["image"] for container in containers}) == 1
    for container in containers:
        assert container["resources"]["limits"] == container["resources"]["requests"]
