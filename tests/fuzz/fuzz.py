"""Runs one fuzz target: ``python -m tests.fuzz.fuzz TARGET CORPUS [libFuzzer options]``.

CORPUS is a folder; the seeds are written there first, and libFuzzer keeps what finds new code.
An input that makes the target fail is printed, and written where ``-artifact_prefix`` says.
"""

import hashlib
import random
import sys
import warnings
from pathlib import Path

import atheris

with atheris.instrument_imports(include=["rlmesh_ray"]):
    from tests.fuzz.targets import TARGETS


def main() -> None:
    """Fuzz until libFuzzer has done what its options say."""
    name, corpus, *options = sys.argv[1:]
    target = TARGETS[name]
    folder = Path(corpus)
    folder.mkdir(parents=True, exist_ok=True)
    for seed in target.seeds():
        (folder / hashlib.sha1(seed).hexdigest()).write_bytes(seed)
    warnings.simplefilter("error")  # what NumPy warns of is a finding, too

    def run(data: bytes) -> None:
        try:
            target.run(data)
        except BaseException:
            print(f"{name} fails with {data!r}", flush=True)  # noqa: T201  # for who runs it
            raise

    def mutate(data: bytes, max_bytes: int, seed: int) -> bytes:
        chance = random.Random(seed)
        if chance.random() < 0.5:
            own: bytes = atheris.Mutate(data, max_bytes)
            return own
        return target.mutate_frame(data, chance)[:max_bytes]

    atheris.Setup([sys.argv[0], *options, str(folder)], run, custom_mutator=mutate)
    atheris.Fuzz()


if __name__ == "__main__":
    main()
