"""The planted faults of ``tests.faults`` have their places and their tests, and none is lost."""

import ast
from collections import Counter
from functools import cache

from tests.faults import FAULTS, FOLDERS, ROOMS, ROOT

LEAST_FAULTS = 60
LEAST_OF_A_ROOM = 2


def test_no_fault_is_lost() -> None:
    rooms = Counter(fault.room for fault in FAULTS)

    assert len({fault.name for fault in FAULTS}) == len(FAULTS) >= LEAST_FAULTS
    assert set(rooms) == set(ROOMS)
    assert min(rooms.values()) >= LEAST_OF_A_ROOM


def test_each_fault_has_its_place() -> None:
    lost = {fault.name: fault.says for fault in FAULTS if fault.num_places != 1}

    assert lost == {}, "plant them anew, where the code is now"
    assert all(fault.new != fault.old for fault in FAULTS)


def test_each_fault_has_a_test_of_the_public_surface() -> None:
    names = {fault.name: fault.test.partition("[")[0].split("::") for fault in FAULTS}

    assert {name for name, (file, _) in names.items() if not file.startswith(FOLDERS)} == set()
    assert {name for name, (file, test) in names.items() if test not in functions(file)} == set()


@cache
def functions(file: str) -> set[str]:
    tree = ast.parse((ROOT / file).read_text())
    return {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}
