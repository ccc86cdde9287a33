"""The design's table of rooms and what each may import, checked on the real import graph."""

from __future__ import annotations

import sys

import grimp
import pytest

import headwater

# docs/design.md, "Rooms". A room that is not here may not exist.
MAY_IMPORT: dict[str, frozenset[str]] = {
    "core": frozenset(),
    "recipe": frozenset({"core"}),
    "router": frozenset({"core"}),
    "kv": frozenset({"core"}),
    "disk": frozenset({"core"}),
    "transfer": frozenset({"core"}),
    "experts": frozenset({"core"}),
    "numerics": frozenset({"core"}),
    "speculate": frozenset({"core", "numerics"}),
    "model": frozenset({"core", "numerics", "experts"}),
    "engine": frozenset({"core", "numerics", "model", "speculate"}),
    "prefill": frozenset({"core", "kv", "disk", "transfer", "engine"}),
    "decode": frozenset({"core", "kv", "disk", "transfer", "engine", "speculate"}),
    "worker": frozenset(
        {"core", "kv", "disk", "transfer", "engine", "speculate", "prefill", "decode"}
    ),
    "api": frozenset({"core", "recipe"}),
    "sim": frozenset({"core", "kv", "router"}),
}
MAY_IMPORT["app"] = frozenset(MAY_IMPORT) - {"sim"}

# Tensors start at engine: bookkeeping, policies and text work without torch.
WITHOUT_TENSORS = (
    "core", "recipe", "router", "kv", "disk", "transfer",
    "prefill", "decode", "worker", "api", "sim",
)  # fmt: skip
TENSOR_PACKAGES = frozenset({"torch", "numba", "safetensors"})


@pytest.fixture(scope="module")
def graph() -> grimp.ImportGraph:
    return grimp.build_graph("headwater", include_external_packages=True, cache_dir=None)


def room_of(module: str) -> str:
    """``headwater.kv.manager`` -> ``kv``; the package itself and other packages -> ``""``."""
    parts = module.split(".")
    return parts[1] if parts[0] == "headwater" and len(parts) > 1 else ""


def test_every_room_is_in_the_table(graph: grimp.ImportGraph) -> None:
    rooms = {room_of(module) for module in graph.modules} - {""}
    assert rooms <= MAY_IMPORT.keys()


def test_a_room_imports_only_what_the_table_allows(graph: grimp.ImportGraph) -> None:
    wrong = [
        f"{module} imports {imported}"
        for module in sorted(graph.modules)
        for imported in sorted(graph.find_modules_directly_imported_by(module))
        if (room := room_of(module)) and (other := room_of(imported)) not in ("", room)
        if other not in MAY_IMPORT.get(room, frozenset())
    ]
    assert not wrong


def test_prefill_and_decode_never_reach_each_other(graph: grimp.ImportGraph) -> None:
    phases = ("headwater.prefill", "headwater.decode")
    present = [phase for phase in phases if phase in graph.modules]
    for phase in present:
        for other in set(present) - {phase}:
            assert not graph.chain_exists(importer=phase, imported=other, as_packages=True)


def test_core_uses_only_the_standard_library(graph: grimp.ImportGraph) -> None:
    outside = {
        imported
        for module in graph.modules
        if room_of(module) == "core"
        for imported in graph.find_modules_directly_imported_by(module)
        if not imported.startswith("headwater")
    }
    assert outside <= sys.stdlib_module_names


def test_no_tensors_outside_the_rooms_that_compute(graph: grimp.ImportGraph) -> None:
    wrong = [
        f"{module} imports {imported}"
        for module in sorted(graph.modules)
        if room_of(module) in WITHOUT_TENSORS
        for imported in graph.find_modules_directly_imported_by(module)
        if imported in TENSOR_PACKAGES
    ]
    assert not wrong


def test_the_package_itself_imports_nothing(graph: grimp.ImportGraph) -> None:
    """Importing any room runs ``headwater/__init__.py``: it must stay free."""
    assert not graph.find_modules_directly_imported_by(headwater.__name__)
