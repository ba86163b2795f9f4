"""cluster.yaml is what `ray up` takes, by Ray's own validator; no cluster is started here."""

from pathlib import Path
from typing import Any

import pytest
import yaml  # it comes with Ray

pytestmark = pytest.mark.ray

TEXT = (Path(__file__).parents[2] / "cluster.yaml").read_text()


def prepared(config: dict[str, Any]) -> dict[str, Any]:
    from ray.autoscaler._private.util import prepare_config, validate_config

    config = prepare_config(config)
    validate_config(config)
    return dict(config)


def test_the_cluster_of_own_machines_is_valid() -> None:
    config = yaml.safe_load(TEXT)

    workers = config["provider"]["worker_ips"]
    assert config["min_workers"] == config["max_workers"] == len(workers)
    assert prepared(config)["available_node_types"]


def test_the_cloud_variant_is_valid_without_its_comment_signs() -> None:
    commented = TEXT[TEXT.index("# provider:") :].splitlines()
    variant = yaml.safe_load("\n".join(line.removeprefix("# ") for line in commented))
    config = {**yaml.safe_load(TEXT), **variant}
    del config["min_workers"]

    assert prepared(config)["max_workers"] == 8
