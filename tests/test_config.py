"""BertConfig: what real config.json files hold, and what is refused."""

from __future__ import annotations

import copy
import dataclasses
import json
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from minibert import BertConfig, ConfigError

DESIGN = Path(__file__).parent.parent / "configs" / "bert-base-chinese-18.json"
DESIGN_FIELDS = {
    "architectures": ["BertForMaskedLM"],
    "attention_probs_dropout_prob": 0.1,
    "directionality": "bidi",
    "hidden_act": "gelu",
    "hidden_dropout_prob": 0.1,
    "hidden_size": 768,
    "initializer_range": 0.02,
    "intermediate_size": 3072,
    "layer_norm_eps": 1e-12,
    "max_position_embeddings": 512,
    "model_type": "bert",
    "num_attention_heads": 12,
    "num_hidden_layers": 12,
    "num_labels": 18,
    "pad_token_id": 0,
    "pooler_fc_size": 768,
    "pooler_num_attention_heads": 12,
    "pooler_num_fc_layers": 3,
    "pooler_size_per_head": 128,
    "pooler_type": "first_token_transform",
    "return_dict": False,
    "type_vocab_size": 2,
    "vocab_size": 21128,
}


def test_the_design_config_is_there_field_for_field() -> None:
    assert json.loads(DESIGN.read_text(encoding="utf-8")) == DESIGN_FIELDS


def test_the_design_config_survives_a_round_trip(tmp_path: Path) -> None:
    config = BertConfig.from_pretrained(DESIGN)
    assert (config.num_labels, config.return_dict, config.pooler_fc_size) == (18, False, 768)
    config.save_pretrained(tmp_path)
    saved = json.loads((tmp_path / "config.json").read_text(encoding="utf-8"))
    assert {key: saved[key] for key in DESIGN_FIELDS} == DESIGN_FIELDS
    assert BertConfig.from_pretrained(tmp_path) == config
    assert [path.name for path in tmp_path.iterdir()] == ["config.json"]  # no temporary file is left


def test_the_design_config_is_bert_base_chinese_with_18_labels(data_dir: Path) -> None:
    hub = json.loads((data_dir / "bert-base-chinese" / "config.json").read_text(encoding="utf-8"))
    assert {**hub, "num_labels": 18, "return_dict": False} == DESIGN_FIELDS


def test_defaults_are_those_of_transformers() -> None:
    ours, theirs = BertConfig(), transformers.BertConfig()
    for field in dataclasses.fields(BertConfig):
        if field.name not in ("extra", "return_dict"):
            assert getattr(ours, field.name) == getattr(theirs, field.name), field.name
    assert ours.return_dict is theirs.return_dict is True


def test_transformers_reads_what_is_saved_and_the_reverse(tmp_path: Path) -> None:
    ours = BertConfig(hidden_size=20, num_attention_heads=4, id2label={0: "O", 1: "B-人", 2: "I-人"}, dtype="bfloat16")
    ours.save_pretrained(tmp_path / "ours")
    theirs = transformers.BertConfig.from_pretrained(tmp_path / "ours")
    assert (theirs.hidden_size, theirs.id2label, theirs.label2id) == (20, ours.id2label, ours.label2id)
    assert theirs.dtype == torch.bfloat16
    theirs.save_pretrained(tmp_path / "theirs")
    again = BertConfig.from_pretrained(tmp_path / "theirs")
    for field in dataclasses.fields(BertConfig):
        if field.name not in ("extra", "architectures"):
            assert getattr(again, field.name) == getattr(ours, field.name), field.name


def test_a_config_is_frozen_and_can_be_copied() -> None:
    config = BertConfig(hidden_size=20, num_attention_heads=4, pooler_type="first_token_transform")
    with pytest.raises(dataclasses.FrozenInstanceError, match="hidden_size is frozen"):
        config.hidden_size = 24
    config.use_cache = False  # no field of ours; transformers' Trainer sets it
    assert config.to_dict()["use_cache"] is False
    assert dataclasses.replace(config, hidden_size=24).extra == config.extra
    assert copy.deepcopy(config) == pickle.loads(pickle.dumps(config)) == config
    changed = config.replace(num_labels=5)
    assert (changed.num_labels, changed.hidden_size, changed.pooler_type) == (5, 20, "first_token_transform")
    assert config.num_labels == 2


@pytest.mark.parametrize("given", [{"classifier_dropout": None}, {}])
def test_classifier_dropout_null_or_missing_is_hidden_dropout(given: dict[str, Any]) -> None:
    assert BertConfig.from_dict({"hidden_dropout_prob": 0.3, **given}).classifier_dropout_prob == 0.3


def test_classifier_dropout_zero_stays_zero() -> None:
    assert BertConfig.from_dict({"hidden_dropout_prob": 0.3, "classifier_dropout": 0.0}).classifier_dropout_prob == 0.0


def test_a_null_pad_token_id_survives_a_round_trip() -> None:
    config = BertConfig.from_dict({"pad_token_id": None})
    assert config.pad_token_id is None
    assert BertConfig.from_dict(config.to_dict()).pad_token_id is None


def test_unknown_keys_are_kept_and_private_ones_are_not() -> None:
    data = {
        "gradient_checkpointing": False,
        "transformers_version": "4.8.2",
        "my_note": {"a": [1]},
        "_name_or_path": "/home/someone/secret",
        "use_return_dict": True,
    }
    config = BertConfig.from_dict(data)
    assert (config.my_note, config.transformers_version) == ({"a": [1]}, "4.8.2")
    written = config.to_dict()
    assert written["my_note"] == {"a": [1]}
    assert "_name_or_path" not in written
    assert "use_return_dict" not in written
    with pytest.raises(AttributeError, match="no_such_field"):
        _ = config.no_such_field


def test_null_means_the_default_where_it_cannot_change_the_model() -> None:
    names = ("num_labels", "id2label", "return_dict", "output_attentions", "tie_word_embeddings", "model_type")
    assert BertConfig.from_dict(dict.fromkeys(names)) == BertConfig()


@pytest.mark.parametrize(
    ("data", "dtype"),
    [
        ({"torch_dtype": "float16"}, "float16"),
        ({"dtype": "bfloat16"}, "bfloat16"),
        ({"dtype": torch.float64}, "float64"),
        ({"torch_dtype": "torch.float16"}, "float16"),
        ({}, None),
    ],
)
def test_dtype_under_both_of_its_names(data: dict[str, Any], dtype: str | None) -> None:
    assert BertConfig.from_dict(data).dtype == dtype


def test_dtype_wins_over_torch_dtype_with_a_notice(caplog: pytest.LogCaptureFixture) -> None:
    assert BertConfig.from_dict({"dtype": "float32", "torch_dtype": "float16"}).dtype == "float32"
    assert "dtype float32 and torch_dtype float16" in caplog.text


# Labels.


def test_label_ids_are_integers_in_order_whatever_the_file_says() -> None:
    names = {str(index): f"L{index}" for index in (10, 2, 0, 17, *range(11, 17), 1, *range(3, 10))}
    config = BertConfig.from_dict({"id2label": names, "label2id": {name: int(key) for key, name in names.items()}})
    assert list(config.id2label) == list(range(18))
    assert (config.id2label[10], config.label2id["L2"], config.num_labels) == ("L10", 2, 18)
    assert BertConfig.from_dict(json.loads(json.dumps(config.to_dict()))) == config


def test_label_ids_may_be_strings_in_either_map() -> None:
    config = BertConfig.from_dict({"id2label": {"0": "O", "1": "B"}, "label2id": {"O": "0", "B": "1"}})
    assert (config.id2label, config.label2id) == ({0: "O", 1: "B"}, {"O": 0, "B": 1})


def test_leftovers_that_change_nothing_are_no_problem() -> None:
    assert BertConfig.from_dict({"pruned_heads": {"0": []}, "torch_dtype": "auto"}).dtype is None


def test_labels_may_be_given_by_name_only() -> None:
    assert BertConfig(label2id={"O": 0, "B": 1, "I": 2}).id2label == {0: "O", 1: "B", 2: "I"}


def test_new_labels_replace_the_old_maps() -> None:
    old = BertConfig(id2label={0: "O", 1: "B", 2: "I"})
    assert old.replace(num_labels=18).id2label[17] == "LABEL_17"
    assert old.replace(num_labels=3).id2label == old.id2label
    assert old.replace(id2label={0: "a", 1: "b"}).label2id == {"a": 0, "b": 1}
    assert old.replace(label2id={"x": 0}).num_labels == 1


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"num_labels": 3, "id2label": {0: "a", 1: "b"}}, "num_labels: 3 contradicts id2label, which names 2"),
        ({"id2label": {0: "a", 1: "b"}, "label2id": {"a": 1, "b": 0}}, "label2id: .* contradicts id2label"),
        ({"id2label": {0: "a", 2: "b"}}, r"integers 0 to 1, each once, got \[0, 2\]"),
        ({"id2label": {"x": "a"}}, r"each once, got \['x'\]"),
        ({"id2label": {0.5: "a", 1.2: "b"}}, r"each once, got \[0.5, 1.2\]"),
        ({"id2label": {"0": "a", 0: "b", 1: "c"}}, r"each once, got \[0, 0, 1\]"),
        ({"id2label": {False: "a", True: "b"}}, r"each once, got \[False, True\]"),
        ({"label2id": {"a": [0]}}, r"each once, got \[\[0\]\]"),
        ({"id2label": {0: "a", 1: "a"}}, r"must be strings and differ, got \['a', 'a'\]"),
        ({"id2label": {0: "a", 1: 5}}, r"must be strings and differ, got \['a', 5\]"),
        ({"id2label": ["a", "b"]}, r"id2label: expected dict\[int, str\], got \['a', 'b'\]"),
    ],
)
def test_contradicting_labels_are_refused(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        BertConfig(**fields)


# Refusals.


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"vocab_size": "120"}, "vocab_size: expected int, got '120'"),
        ({"vocab_size": 120.0}, "vocab_size: expected int, got 120.0"),
        ({"hidden_size": True}, "hidden_size: expected int, got True"),
        ({"hidden_size": None}, "hidden_size: expected int, got None"),
        ({"layer_norm_eps": "1e-12"}, "layer_norm_eps: expected float, got '1e-12'"),
        ({"hidden_dropout_prob": True}, "hidden_dropout_prob: expected float, got True"),
        ({"layer_norm_eps": float("nan")}, "layer_norm_eps: expected float, got nan"),
        ({"return_dict": 1}, "return_dict: expected bool, got 1"),
        ({"hidden_act": None}, "hidden_act: expected str, got None"),
        ({"architectures": "BertModel"}, "architectures: expected .*, got 'BertModel'"),
        ({"hidden_size": 20, "num_attention_heads": 3}, "num_attention_heads: 3 heads do not divide hidden_size 20"),
        ({"num_attention_heads": 0}, "num_attention_heads: must be at least 1 and at most .*, got 0"),
        ({"num_hidden_layers": -1}, "num_hidden_layers: must be at least 1 and at most .*, got -1"),
        ({"num_hidden_layers": 10**9}, "num_hidden_layers: .* at most 1000, got 1000000000"),
        ({"vocab_size": 10**30}, "vocab_size: .* at most 2147483647, got 1000000000000000000000000000000"),
        ({"num_labels": 10**12}, "num_labels: .* at most 1048576, got 1000000000000"),
        ({"num_labels": 0}, "num_labels: must be at least 1 and at most .*, got 0"),
        ({"hidden_act": "gelu2"}, "hidden_act: 'gelu2' is not one of gelu, gelu_10"),
        ({"hidden_dropout_prob": 1.5}, "hidden_dropout_prob: must lie between 0 and 1, got 1.5"),
        ({"layer_norm_eps": -1e-5}, "layer_norm_eps: must not be negative, got -1e-05"),
        ({"pad_token_id": 120, "vocab_size": 120}, "pad_token_id: 120 lies outside the vocabulary of 120"),
        ({"problem_type": "tagging"}, "problem_type: 'tagging' is not one of"),
        ({"dtype": "int8"}, "dtype: 'int8' is not one of bfloat16"),
        ({"model_type": "roberta"}, "model_type: 'roberta' is another architecture"),
        ({"position_embedding_type": "relative_key"}, "position_embedding_type: 'relative_key' is not implemented"),
        ({"is_decoder": True}, "is_decoder: True is not implemented"),
        ({"add_cross_attention": True}, "add_cross_attention: True is not implemented"),
        ({"pruned_heads": {"0": [1]}}, "pruned_heads: .* is not implemented"),
        ({"quantization_config": {"bits": 4}}, "quantization_config: .* is not implemented"),
        ({"hiden_size": 20}, "hiden_size: unknown field; did you mean hidden_size?"),
        ({"layer_norm_epsilon": 1e-5}, "layer_norm_epsilon: unknown field; did you mean layer_norm_eps?"),
    ],
)
def test_a_bad_field_is_named_with_its_value(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        BertConfig(**fields)


def test_all_problems_come_in_one_error() -> None:
    fields = {"vocab_size": "120", "hidden_size": 20, "num_attention_heads": 3, "hidden_act": "x", "is_decoder": True}
    with pytest.raises(ConfigError) as caught:
        BertConfig(**fields, num_labels=4, id2label={0: "a"})
    lines = str(caught.value).splitlines()
    assert len(lines) == 6
    for name in ("vocab_size", "num_attention_heads", "hidden_act", "is_decoder", "num_labels"):
        assert any(line.strip().startswith(f"- {name}:") for line in lines)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"{", "not a JSON file"),
        (b"", "not a JSON file"),
        (b"\xff\xfe", "not a JSON file"),
        (b"[1]", "expected a JSON object, got list"),
        (b"[" * 100_000, "not a JSON file"),
        (b'{"hidden_size": ' + b"9" * 5000 + b"}", "not a JSON file"),
        (b'{"id2label": {"' + b"9" * 5000 + b'": "a"}}', "each once, got"),
        (b'{"hidden_size": "20"}', "hidden_size: expected int, got '20'"),
    ],
)
def test_a_bad_file_is_named(tmp_path: Path, content: bytes, message: str) -> None:
    (tmp_path / "config.json").write_bytes(content)
    with pytest.raises(ConfigError, match=message) as caught:
        BertConfig.from_pretrained(tmp_path)
    assert str(tmp_path / "config.json") in str(caught.value)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"config\.json: not in the directory"):
        BertConfig.from_pretrained(tmp_path)


def test_an_override_must_be_a_field(tmp_path: Path) -> None:
    BertConfig().save_pretrained(tmp_path)
    assert BertConfig.from_pretrained(tmp_path, num_labels=18).num_labels == 18
    with pytest.raises(ConfigError, match="num_lables: unknown field; did you mean num_labels"):
        BertConfig.from_pretrained(tmp_path, num_lables=18)
    assert BertConfig.from_pretrained(tmp_path, torch_dtype="float16").dtype == "float16"
    with pytest.raises(ConfigError, match="heads: not a field"):
        BertConfig.from_pretrained(tmp_path, heads=4)
