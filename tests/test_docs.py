"""docs/: the code blocks run in order, their assertions hold, and those about attention break with broken code."""

from __future__ import annotations

import ast
import dataclasses
import functools
import re
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import tomllib
import torch

from minibert.model import attention
from minibert.model.attention import ATTENTION_FUNCTIONS, MultiHeadAttention
from minibert.parity import Names, differences
from minibert.train.recipe import TrainingPart

DOCUMENT = Path(__file__).parent.parent / "docs" / "attention.md"
LINES = DOCUMENT.read_text(encoding="utf-8").splitlines()


@dataclass(frozen=True)
class Block:
    heading: str
    line: int  # of the document, where the code begins; counted from 1
    source: str


def read_blocks() -> list[Block]:
    blocks, heading, start = [], "", None
    for number, line in enumerate(LINES, 1):
        if start is not None:
            if line == "```":
                blocks.append(Block(heading, start, "\n".join(LINES[start - 1 : number - 1])))
                start = None
        elif line == "```python":
            start = number + 1
        elif line.startswith("## "):
            heading = line[3:]
    assert start is None, f"{DOCUMENT.name}: the block that begins at line {start} has no end"
    return blocks


BLOCKS = read_blocks()
*STEPS, CLOSING = [line[3:] for line in LINES if line.startswith("## ")]


class Session:
    """One namespace, and one stream of random numbers, in which the blocks run in order, each once."""

    def __init__(self) -> None:
        self.namespace: dict[str, Any] = {"__name__": DOCUMENT.stem}
        self.num_run = 0
        self.rng_state = torch.get_rng_state()

    def run_through(self, last: Block) -> None:
        while self.num_run <= BLOCKS.index(last):
            with torch.random.fork_rng(devices=[]):  # a reader's session is not seeded anew before each block
                torch.set_rng_state(self.rng_state)
                self._run(BLOCKS[self.num_run])
                self.rng_state = torch.get_rng_state()
            self.num_run += 1

    def _run(self, block: Block) -> None:
        # Empty lines before the code give tracebacks the line numbers of the document.
        code = compile("\n" * (block.line - 1) + block.source, str(DOCUMENT), "exec")
        try:
            exec(code, self.namespace)  # noqa: S102  # running the document is the test
        except Exception as error:
            frames = traceback.extract_tb(error.__traceback__)
            line = next(frame.lineno or 1 for frame in frames if frame.filename == str(DOCUMENT))
            place = f"docs/{DOCUMENT.name}:{line}, in {block.heading!r}:\n    {LINES[line - 1].strip()}"
            raise AssertionError(f"{place}\n{type(error).__name__}: {error}") from error


@pytest.fixture(scope="module")
def session() -> Session:
    return Session()


@pytest.mark.parametrize("block", BLOCKS, ids=lambda block: block.heading)
def test_block_runs_after_the_blocks_before_it(session: Session, block: Block) -> None:
    session.run_through(block)


def test_steps_are_numbered_and_the_closing_section_has_no_block() -> None:
    assert [step.split(".")[0] for step in STEPS] == [str(number) for number in range(1, 9)]
    assert CLOSING not in {block.heading for block in BLOCKS}


@pytest.mark.parametrize("step", STEPS)
def test_step_has_a_block_with_an_assertion(step: str) -> None:
    nodes = [node for block in BLOCKS if block.heading == step for node in ast.walk(ast.parse(block.source))]
    assert any(isinstance(node, ast.Assert) for node in nodes)


def test_blocks_import_nothing_but_torch_and_minibert() -> None:
    nodes = [node for block in BLOCKS for node in ast.walk(ast.parse(block.source))]
    modules = {node.module for node in nodes if isinstance(node, ast.ImportFrom)}
    modules |= {alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names}
    assert {str(module).split(".")[0] for module in modules} == {"torch", "minibert"}


def closing_table() -> dict[str, list[str]]:
    """Step to the names in backquotes beside it."""
    rows = [line.strip("| ").split(" | ") for line in LINES[LINES.index(f"## {CLOSING}") :] if line.startswith("|")]
    return {step: re.findall(r"`([^`]+)`", names) for step, names in rows[2:]}


def test_closing_table_has_one_row_with_names_for_each_step() -> None:
    assert list(closing_table()) == STEPS
    assert all(closing_table().values())


@pytest.mark.parametrize("name", sorted({name for names in closing_table().values() for name in names}))
def test_name_in_the_closing_table_exists(name: str) -> None:
    functools.reduce(getattr, name.split("."), attention)


def without_scale(function: Callable[..., Any]) -> Callable[..., Any]:
    return lambda query, *rest: function(query * query.shape[-1] ** 0.5, *rest)


def without_mask(function: Callable[..., Any]) -> Callable[..., Any]:
    return lambda query, key, value, mask=None, dropout=0.0: function(query, key, value, None, dropout)


def without_boundaries(function: Callable[..., Any]) -> Callable[..., Any]:
    return lambda self, q, k, v, lengths, weights=False: function(self, q, k, v, [sum(lengths)], weights)


def with_key_and_value_swapped(function: Callable[..., Any]) -> Callable[..., Any]:
    def swapped(*arguments: Any) -> tuple[Any, Any, Any]:
        query, key, value = function(*arguments)
        return query, value, key

    return swapped


def assert_fails_at(step: str) -> None:
    with pytest.raises(AssertionError, match=re.escape(step)) as failure:
        Session().run_through(BLOCKS[-1])
    assert isinstance(failure.value.__cause__, AssertionError)


@pytest.mark.parametrize("fault", [without_scale, without_mask])
@pytest.mark.parametrize("name", ["eager", "sdpa"])
def test_broken_attention_function_fails_step_7(monkeypatch: pytest.MonkeyPatch, name: str, fault: Any) -> None:
    monkeypatch.setitem(ATTENTION_FUNCTIONS, name, fault(ATTENTION_FUNCTIONS[name]))
    assert_fails_at(STEPS[6])


@pytest.mark.parametrize(
    ("method", "fault", "step"),
    [("project", with_key_and_value_swapped, STEPS[6]), ("attend_packed", without_boundaries, STEPS[7])],
)
def test_broken_method_fails_its_step(monkeypatch: pytest.MonkeyPatch, method: str, fault: Any, step: str) -> None:
    monkeypatch.setattr(MultiHeadAttention, method, fault(getattr(MultiHeadAttention, method)))
    assert_fails_at(step)


ENTITIES = Path(__file__).parent.parent / "docs" / "entities.md"


def test_the_blocks_about_entities_run_in_order() -> None:
    text = ENTITIES.read_text(encoding="utf-8")
    blocks = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    assert len(blocks) == 8
    assert sum(block.count("assert ") for block in blocks) >= 15
    namespace: dict[str, Any] = {}
    for block in blocks:
        exec(block, namespace)  # noqa: S102
    assert namespace["entities"]


FINE_TUNING = Path(__file__).parent.parent / "docs" / "fine-tuning.md"


def test_the_blocks_about_fine_tuning_run_in_order() -> None:
    text = FINE_TUNING.read_text(encoding="utf-8")
    blocks = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    assert len(blocks) == 6
    namespace: dict[str, Any] = {"__name__": "fine_tuning"}
    for block in blocks:
        exec(compile(block, str(FINE_TUNING), "exec"), namespace)  # noqa: S102


@pytest.mark.parametrize(("name", "count"), [("pictures", 4), ("transformers", 5)])
def test_the_blocks_about_pictures_and_transformers_run_in_order(
    name: str, count: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    document = DOCUMENT.with_name(f"{name}.md")
    blocks = re.findall(r"```python\n(.*?)```", document.read_text(encoding="utf-8"), re.DOTALL)
    assert len(blocks) == count
    namespace: dict[str, Any] = {"__name__": name}
    for block in blocks:
        exec(compile(block, str(document), "exec"), namespace)  # noqa: S102


def test_the_options_of_a_recipe_are_listed_with_their_defaults() -> None:
    table = FINE_TUNING.read_text(encoding="utf-8").split("| `[training]` |")[1].split("\n\n")[0]
    said = dict(re.findall(r"`(\w+)(?: = ([^`]+))?`(?=[,| ])", table))
    options = {key.name: key for key in dataclasses.fields(TrainingPart) if key.name != "output_dir"}
    assert options.keys() <= said.keys()
    for name, key in options.items():
        default = key.default if key.default_factory is dataclasses.MISSING else key.default_factory()
        if default is not None:
            assert tomllib.loads(f"value = {said[name]}")["value"] == default, name


EXPORT = Path(__file__).parent.parent / "docs" / "export.md"


def test_the_blocks_about_export_run_in_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for package in ("onnx", "onnxruntime", "onnxscript"):
        pytest.importorskip(package)
    blocks = re.findall(r"```python\n(.*?)```", EXPORT.read_text(encoding="utf-8"), re.DOTALL)
    assert len(blocks) == 2
    monkeypatch.chdir(tmp_path)
    namespace: dict[str, Any] = {}
    for block in blocks:
        exec(compile(block, str(EXPORT), "exec"), namespace)  # noqa: S102


PARITY = Path(__file__).parent.parent / "docs" / "parity.md"


def test_the_block_about_parity_runs() -> None:
    text = PARITY.read_text(encoding="utf-8")
    blocks = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    assert len(blocks) == 1
    exec(compile(blocks[0], str(PARITY), "exec"), {"__name__": "parity"})  # noqa: S102


def test_the_page_about_parity_has_the_bounds_that_are_used() -> None:
    text = PARITY.read_text(encoding="utf-8")
    for dtype, names in ((torch.float32, "fp32"), (torch.bfloat16, "bf16, fp16"), (torch.float16, "bf16, fp16")):
        at_most, by_norm, steps = (
            table[dtype] for table in (differences.LARGEST, differences.BY_NORM, differences.STEPS)
        )
        row = next(line for line in text.splitlines() if line.startswith(f"| {names} | "))
        assert f"{at_most:g} times, and {steps:g} " in row
        assert f"| {by_norm:g} times, and {by_norm:g} steps" in row  # the norm's steps come with its error
    assert f"| fp64 | | {differences.TOLERANCES[torch.float64]:g} " in text
    assert f"| int8 | | {differences.INT8_TOLERANCE:g} " in text
    assert f"fewer than {differences.MANY} numbers" in text
    mapping = tomllib.loads(re.findall(r"```toml\n(.*?)```", text, re.DOTALL)[0])
    assert Names(mapping["modules"]).ours("blocks.3.norm1.weight") == (
        "encoder.layer.3.attention.output.LayerNorm.weight",
    )
