"""The comparison with transformers: what it reports, and that it sees a difference."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

import minibert
from minibert import MinibertError, parity
from minibert.model import attention
from minibert.model.attention import eager_attention, sdpa_attention
from tagger import write_checkpoint

CLASSES = (
    "BertModel",
    "BertForTokenClassification",
    "BertForMaskedLM",
    "BertForPreTraining",
    "BertForQuestionAnswering",
    "BertForMultipleChoice",
)


@pytest.mark.parametrize("name", CLASSES)
@pytest.mark.parametrize("implementation", ["eager", "sdpa"])
def test_the_class_that_the_checkpoint_names_is_compared(name: str, implementation: str, tmp_path: Path) -> None:
    write_checkpoint(tmp_path)
    config = minibert.BertConfig.from_pretrained(tmp_path, num_labels=2)
    getattr(minibert, name)(config).save_pretrained(tmp_path)
    rows = list(parity.compare(tmp_path, attn_implementation=implementation))
    results = {
        "BertModel": ["last_hidden_state", "pooler_output"],
        "BertForPreTraining": ["prediction_logits", "seq_relationship_logits"],
        "BertForQuestionAnswering": ["start_logits", "end_logits"],
    }.get(name, ["logits"])
    assert [row.name for row in rows] == ["embeddings", "layer 1", "layer 2", *results]
    assert max(row.largest for row in rows) < 5e-5


def test_a_head_that_is_not_in_the_file_is_left_out_and_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    model = write_checkpoint(tmp_path)
    model.bert.save_pretrained(tmp_path)  # no pooler in it
    assert [row.name for row in parity.compare(tmp_path)] == ["embeddings", "layer 1", "layer 2"]
    assert "not compared: pooler.dense.weight, pooler.dense.bias" in caplog.text


def test_a_config_without_architectures_or_with_a_foreign_one_means_the_encoder(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    write_checkpoint(tmp_path)
    config = (tmp_path / "config.json").read_text(encoding="utf-8")
    for replacement in ('"BertCrfTagger"', '"BertConfig"', ""):
        (tmp_path / "config.json").write_text(config.replace('"BertForTokenClassification"', replacement))
        assert [row.name for row in parity.compare(tmp_path)] == ["embeddings", "layer 1", "layer 2"]
    assert "the head of BertCrfTagger is not compared" in caplog.text


def test_a_broken_attention_is_seen_in_the_layer_where_it_acts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_checkpoint(tmp_path)
    for name, function in (("eager", eager_attention), ("sdpa", sdpa_attention)):
        monkeypatch.setitem(attention.ATTENTION_FUNCTIONS, name, lambda q, k, *rest, f=function: f(k, q, *rest))
    rows = {row.name: row.largest for row in parity.compare(tmp_path)}
    assert rows["embeddings"] < 1e-5
    assert rows["layer 1"] > 1e-2


def test_without_transformers_it_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(MinibertError, match=r"pip install 'minibert\[train\]'"):
        list(parity.compare(tmp_path))


def test_only_real_tokens_are_compared() -> None:
    ours, theirs = torch.zeros(2, 3, 4), torch.zeros(2, 3, 4)
    theirs[0, 2] = 7.0
    theirs[1, 0, 0] = 0.5
    real = torch.tensor([[True, True, False], [True, True, True]])
    row = parity._difference("x", ours, theirs, real)
    assert row == parity.Difference("x", 0.5, 0.5 / 20)
