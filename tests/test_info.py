"""`minibert info`: what it says of good checkpoints and of bad ones."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner
from safetensors.torch import load_file, save_file

from minibert import BertConfig, BertForPreTraining, CheckpointError, info
from minibert.cli import main
from minibert.engine.kernels import has_vnni
from minibert.info import describe, engine_lines
from minibert.threads import default_threads
from tagger import LABELS, VOCABULARY, write_checkpoint


def told(directory: Path) -> dict[str, list[str]]:
    """Lines by title; a line without one belongs to the title before."""
    lines: dict[str, list[str]] = {}
    title = ""
    for line in describe(directory):
        title = line[:14].strip() or title
        lines.setdefault(title, []).append(line[14:])
    return lines


def test_a_tagger_is_described(tmp_path: Path) -> None:
    model = write_checkpoint(tmp_path, id2label={0: "O", 1: "B-人名", 2: "I-人名"}, num_labels=3)
    lines = told(tmp_path)
    assert lines["architecture"] == ["BertForTokenClassification"]
    assert lines["sizes"] == ["2 layers of 32, 4 heads, feed-forward 64, gelu"]
    assert lines["limits"] == [f"64 positions, {len(VOCABULARY)} words, 2 token types"]
    assert lines["labels"] == ["3: O, B-人名, I-人名"]
    size = (tmp_path / "model.safetensors").stat().st_size
    assert lines["weights"] == [
        f"{len(model.state_dict())} tensors, {model.num_parameters():,} numbers in F32",
        f"model.safetensors, {size:,} bytes",
    ]
    assert lines["tokenizer"] == [f"{len(VOCABULARY)} tokens, lower-cases"]
    assert lines["tasks"] == [
        "BertModel: pooler not there, would start untrained",
        "BertForTokenClassification: complete",
        "BertForMaskedLM: cls.predictions not there, would start untrained",
        "BertForPreTraining: cls.predictions and cls.seq_relationship and pooler not there, would start untrained",
        "BertForNextSentencePrediction: cls.seq_relationship and pooler not there, would start untrained",
        "BertForSequenceClassification: pooler not there, would start untrained",
        "BertForMultipleChoice: no (of another shape classifier.weight ([3, 32] in the file, [1, 32] in the model))",
        "BertForQuestionAnswering: no (num_labels: question answering scores start and end, 2, got 3)",
    ]
    assert "warning" not in lines


def test_a_pretraining_checkpoint_is_described(tmp_path: Path) -> None:
    write_checkpoint(tmp_path)
    BertForPreTraining(BertConfig.from_pretrained(tmp_path)).save_pretrained(tmp_path, max_shard_size="10KB")
    lines = told(tmp_path)
    assert lines["tasks"][0] == "BertModel: complete"
    assert lines["tasks"][1] == "BertForTokenClassification: classifier not there, would start untrained"
    assert lines["tasks"][2:5] == [
        f"{name}: complete" for name in ("BertForMaskedLM", "BertForPreTraining", "BertForNextSentencePrediction")
    ]
    assert len(lines["weights"]) > 3
    assert lines["labels"] == [f"18: {', '.join(LABELS[:8])}, and 10 more"]


def test_an_encoder_that_is_not_whole_serves_no_task(tmp_path: Path) -> None:
    write_checkpoint(tmp_path)
    state = load_file(tmp_path / "model.safetensors")
    del state["bert.encoder.layer.1.output.dense.bias"]
    save_file(state, tmp_path / "model.safetensors")
    tasks = told(tmp_path)["tasks"]
    assert tasks[1] == "BertForTokenClassification: no (missing bert.encoder.layer.1.output.dense.bias)"


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_weights_that_are_no_numbers_are_warned_of(value: float, tmp_path: Path) -> None:
    write_checkpoint(tmp_path)
    state = load_file(tmp_path / "model.safetensors")
    state["bert.encoder.layer.0.output.dense.weight"][3, 4] = value
    save_file(state, tmp_path / "model.safetensors")
    assert told(tmp_path)["warning"] == ["NaN or infinite numbers in bert.encoder.layer.0.output.dense.weight"]


def test_a_vocabulary_beyond_the_table_is_warned_of(tmp_path: Path) -> None:
    write_checkpoint(tmp_path)
    with (tmp_path / "vocab.txt").open("a", encoding="utf-8") as file:
        file.write("新\n")
    (warning,) = told(tmp_path)["warning"]
    assert f"largest id {len(VOCABULARY)} is beyond the {len(VOCABULARY)} rows" in warning


@pytest.mark.parametrize(("lower", "extra", "warned"), [(False, "", True), (False, "NASA\n", False), (True, "", False)])
def test_capitals_that_nothing_can_spell_are_warned_of(lower: bool, extra: str, warned: bool, tmp_path: Path) -> None:
    write_checkpoint(tmp_path, vocab_size=len(VOCABULARY) + 1)
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"do_lower_case": lower}))
    with (tmp_path / "vocab.txt").open("a", encoding="utf-8") as file:
        file.write(extra)
    lines = told(tmp_path)
    assert lines["tokenizer"][0].endswith("lower-cases" if lower else "keeps capitals")
    assert ("warning" in lines) is warned


def test_bert_base_chinese_is_warned_of(data_dir: Path, tmp_path: Path) -> None:
    write_checkpoint(tmp_path, vocab_size=21128)
    for name in ("vocab.txt", "tokenizer.json", "tokenizer_config.json"):
        (tmp_path / name).write_bytes((data_dir / "bert-base-chinese" / name).read_bytes())
    lines = told(tmp_path)
    assert lines["tokenizer"] == ["21,128 tokens, keeps capitals"]
    assert "become [UNK]" in lines["warning"][0]


def test_without_a_tokenizer_the_rest_is_told(tmp_path: Path) -> None:
    write_checkpoint(tmp_path)
    (tmp_path / "vocab.txt").unlink()
    lines = told(tmp_path)
    assert lines["tokenizer"] == ["none"]
    assert "expected tokenizer.json or vocab.txt" in lines["warning"][0]


def test_weights_that_cannot_be_read_are_an_error(tmp_path: Path) -> None:
    write_checkpoint(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"")
    with pytest.raises(CheckpointError, match="the file is empty"):
        list(describe(tmp_path))
    assert torch.get_default_device() == torch.device("cpu")


def test_the_engine_says_what_runs_each_precision(monkeypatch: pytest.MonkeyPatch) -> None:
    lines = dict(line.split(maxsplit=1) for line in engine_lines())
    assert lines.keys() == {"gpu", "threads", "fp32", "int8", "bf16", "fp16", "VNNI"}
    assert lines["fp32"] == "prepacked oneDNN, on the CPU"
    assert lines["int8"] == f"{'oneDNN int8' if has_vnni() else 'dynamic quantization'}, on the CPU"
    assert lines["threads"].startswith(f"{default_threads()} for ")
    if not torch.cuda.is_available():
        assert lines["bf16"] == "no, it wants a GPU"
    monkeypatch.setattr(info, "kernel_for", lambda precision: None)
    assert "int8          no, PyTorch has no kernel for this processor" in list(engine_lines())
    result = CliRunner().invoke(main, ["info", "--engine"])
    assert result.exit_code == 0
    assert result.stdout.startswith("gpu ")
    assert CliRunner().invoke(main, ["info", "--threads"]).exit_code == 2
