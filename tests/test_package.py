"""The package as a whole: what importing it costs, and which part may import which."""

from __future__ import annotations

import ast
import statistics
import subprocess
import sys
import time
from pathlib import Path

import pytest

import minibert

ROOT = Path(minibert.__file__).parent
# Each part may import those after it, and its own.
ORDER = (
    "cli", "bench", "tagging", "info", "parity", "export", "train", "adapter", "visualize", "formats", "predict",
    "engine", "text", "model", "checkpoint", "config", "hub", "writing", "threads", "quiet", "errors",
)  # fmt: skip


MODULES = "import sys; print(*(name.split('.')[0] for name in sys.modules))"
EVERYTHING = "import minibert; [getattr(minibert, name) for name in minibert.__all__]"


def run(code: str) -> str:
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout


def test_import_minibert_loads_nothing_heavy() -> None:
    loaded = run(f"import minibert; {MODULES}").split()
    heavy = {"torch", "transformers", "datasets", "pandas", "matplotlib", "numpy", "tokenizers", "huggingface_hub"}
    assert heavy.isdisjoint(loaded)


def test_every_public_name_needs_torch_only() -> None:
    loaded = set(run(f"{EVERYTHING}; {MODULES}").split())
    assert {"torch", "safetensors"} <= loaded
    assert {"transformers", "datasets", "pandas", "matplotlib", "huggingface_hub"}.isdisjoint(loaded)


def wall_time(code: str) -> float:
    start = time.perf_counter()
    run(code)
    return time.perf_counter() - start


def test_importing_takes_at_most_a_tenth_more_than_torch() -> None:
    for code in ("import minibert", EVERYTHING):
        for _attempt in range(3):  # other work on the machine can spoil one comparison
            pairs = [(wall_time(code), wall_time("import torch")) for _ in range(5)]
            ours, torchs = (statistics.median(times) for times in zip(*pairs, strict=True))
            if ours <= 1.1 * torchs:
                break
        assert ours <= 1.1 * torchs, f"{code}: {ours:.2f} s against {torchs:.2f} s"


def test_public_names_are_listed_and_unknown_ones_refused() -> None:
    assert set(minibert.__all__) <= set(dir(minibert))
    for name in minibert.__all__:
        assert getattr(minibert, name) is not None
    with pytest.raises(AttributeError, match="BertForNothing"):
        _ = minibert.BertForNothing


def part_of(path: Path) -> str:
    return path.relative_to(ROOT).parts[0].removesuffix(".py")


@pytest.mark.parametrize("path", sorted(ROOT.rglob("*.py")), ids=lambda path: str(path.relative_to(ROOT)))
def test_imports_point_in_one_direction(path: Path) -> None:
    part = part_of(path)
    if part == "__init__":  # the lazy front door
        return
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom) and node.module and node.module.startswith("minibert."):
            imported = node.module.split(".")[1]
            assert ORDER.index(imported) >= ORDER.index(part), f"{path.name} imports {node.module}"


def test_every_part_has_a_place_in_the_order() -> None:
    assert {part_of(path) for path in ROOT.rglob("*.py")} - {"__init__"} == set(ORDER)


def test_the_model_needs_torch_and_the_standard_library_only() -> None:
    for path in sorted((ROOT / "model").rglob("*.py")):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        imported = {n.module.split(".")[0] for n in ast.walk(tree) if isinstance(n, ast.ImportFrom) and n.module}
        imported |= {alias.name.split(".")[0] for n in ast.walk(tree) if isinstance(n, ast.Import) for alias in n.names}
        assert imported - sys.stdlib_module_names <= {"torch", "minibert", "typing_extensions"}, path.name
