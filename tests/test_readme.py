"""The README is true: its code runs, its tree is the tree, and the Chinese one says the same."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import minibert
from minibert import BertConfig, BertForTokenClassification

ROOT = Path(minibert.__file__).parent.parent
READMES = ("README.md", "README.zh-CN.md")

pytestmark = pytest.mark.skipif(not (ROOT / "README.md").is_file(), reason="installed without its repository")


def blocks(name: str, language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", (ROOT / name).read_text(encoding="utf-8"), re.DOTALL)


def without_comments(code: str) -> str:
    return re.sub(r"\s*#.*", "", code)


@pytest.mark.parametrize("name", READMES)
def test_the_python_blocks_run(name: str, tmp_path: Path) -> None:
    sizes = {"hidden_size": 20, "num_hidden_layers": 1, "num_attention_heads": 4, "intermediate_size": 33}
    BertForTokenClassification(BertConfig(vocab_size=2000, num_labels=18, **sizes)).save_pretrained(tmp_path)
    code = "\n".join(blocks(name, "python"))
    namespace: dict[str, object] = {}
    assert code.count("path/to/bert-base-chinese") == 1
    code = code.replace("path/to/bert-base-chinese", str(tmp_path))
    exec(code, namespace)  # noqa: S102
    output, weights = namespace["output"], namespace["weights"]
    assert isinstance(output, torch.Tensor)
    assert isinstance(weights, torch.Tensor)
    assert (output.shape, weights.shape) == ((3, 7, 20), (3, 7, 6))


@pytest.mark.parametrize("name", READMES)
def test_the_first_output_is_what_the_demo_prints(name: str) -> None:
    shown = blocks(name, "text")[0].splitlines()
    texts = [line for line in shown if not line.startswith("  ")]
    assert texts == re.findall(r'^        "(.+)"', (ROOT / "scripts/demo.sh").read_text(encoding="utf-8"), re.MULTILINE)
    command = [sys.executable, "-m", "minibert.cli", "predict", "--", *texts]
    printed = subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()
    for ours, theirs in zip(printed, shown, strict=True):
        if ours in texts:
            assert ours == theirs
        else:  # an entity: all the same but for the last digits of the score, which may differ between processors
            assert ours[:-5] == theirs[:-5]
            assert abs(float(ours[-5:]) - float(theirs[-5:])) < 0.003


def test_both_languages_show_the_same_code_output_headings_and_figures() -> None:
    english, chinese = READMES
    for language in ("python", "sh"):
        assert [without_comments(b) for b in blocks(english, language)] == [
            without_comments(b) for b in blocks(chinese, language)
        ]
    assert blocks(english, "text")[0] == blocks(chinese, "text")[0]
    texts = [(ROOT / name).read_text(encoding="utf-8") for name in READMES]
    for pattern in (r"^#+ ", r"^\| ", r"^- "):
        counts = [len(re.findall(pattern, text, re.MULTILINE)) for text in texts]
        assert counts[0] == counts[1], pattern
    figures = [re.findall(r"\b\de-\d\b", text) for text in texts]
    assert figures[0] == figures[1]


@pytest.mark.parametrize("name", READMES)
def test_the_tree_is_the_tree(name: str) -> None:
    listed: set[str] = set()
    parents: list[str] = []
    for line in blocks(name, "text")[1].splitlines():
        depth = (len(line) - len(line.lstrip())) // 2
        entry = line.split()[0]
        parents = [*parents[:depth], entry]
        listed.add("".join(parents))
    assert all((ROOT / entry).exists() for entry in listed)
    modules = {str(path.relative_to(ROOT)) for path in (ROOT / "minibert").rglob("*.py")}
    named = {entry for entry in listed if entry.endswith(".py")}
    folders = {entry for entry in listed if entry.endswith("/")}
    for module in modules - named:
        assert module.endswith("__init__.py") or f"{Path(module).parent}/" in folders, module
