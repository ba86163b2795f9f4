"""Endpoints that are in a pool and have users of their own."""

import pickle
from pathlib import Path

from rlmesh_ray.auth.token_file import PoolTokenFile, TokenRole, TokenStore


def test_the_tokens_of_the_file_and_of_the_pool_count(tmp_path: Path) -> None:
    path = tmp_path / "tokens"
    path.write_text("ours\nwatcher probe\n")
    path.chmod(0o600)
    now = [0.0]
    known = TokenStore(PoolTokenFile(path, "pooled"), clock=lambda: now[0])

    assert known.role_of(b"ours") is TokenRole.OPERATOR
    assert known.role_of(b"watcher") is TokenRole.PROBE
    assert known.role_of(b"pooled") is TokenRole.CLIENT
    assert known.role_of(b"other") is None

    path.write_text("our new one\n".replace(" ", "-"))
    now[0] = 2.0

    assert known.role_of(b"ours") is None
    assert known.role_of(b"our-new-one") is TokenRole.OPERATOR
    assert known.role_of(b"pooled") is TokenRole.CLIENT


def test_the_pools_token_is_in_no_repr(tmp_path: Path) -> None:
    source = PoolTokenFile(tmp_path / "tokens", "pooled")

    assert "pooled" not in repr(source)
    assert pickle.loads(pickle.dumps(source)) == source
