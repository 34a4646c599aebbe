"""The table of spellings, name by name."""

from __future__ import annotations

import pytest

from minibert.checkpoint.names import OTHER_HEADS, POSITION_IDS, head_of, model_name


@pytest.mark.parametrize(
    ("file_name", "with_prefix", "without"),
    [
        ("bert.embeddings.LayerNorm.gamma", "bert.embeddings.LayerNorm.weight", "embeddings.LayerNorm.weight"),
        ("embeddings.LayerNorm.beta", "bert.embeddings.LayerNorm.bias", "embeddings.LayerNorm.bias"),
        (
            "encoder.layer.0.output.dense.bias",
            "bert.encoder.layer.0.output.dense.bias",
            "encoder.layer.0.output.dense.bias",
        ),
        ("bert.pooler.dense.bias", "bert.pooler.dense.bias", "pooler.dense.bias"),
        ("cls.predictions.transform.LayerNorm.gamma", *["cls.predictions.transform.LayerNorm.weight"] * 2),
        ("classifier.weight", "classifier.weight", "classifier.weight"),
        ("MyLayerNorm.gamma", *["MyLayerNorm.gamma"] * 2),
        ("LayerNorm.gamma", *["LayerNorm.weight"] * 2),
        ("encoder.gamma", "bert.encoder.gamma", "encoder.gamma"),
        ("foo.bert.encoder.x", "foo.bert.encoder.x", "foo.bert.encoder.x"),
    ],
)
def test_model_name(file_name: str, with_prefix: str, without: str) -> None:
    assert model_name(file_name, has_base=True) == with_prefix
    assert model_name(file_name, has_base=False) == without


@pytest.mark.parametrize(
    ("name", "head"),
    [
        ("bert.encoder.layer.0.output.dense.bias", None),
        ("embeddings.LayerNorm.weight", None),
        ("bert.pooler.dense.weight", "pooler"),
        ("classifier.bias", "classifier"),
        ("cls.predictions.bias", "cls.predictions"),
        ("cls.seq_relationship.weight", "cls.seq_relationship"),
    ],
)
def test_head_of(name: str, head: str | None) -> None:
    assert head_of(name) == head


def test_only_known_heads_may_be_left_out() -> None:
    for name in (
        "cls.predictions.bias",
        "classifier.weight",
        "qa_outputs.bias",
        "bert.pooler.dense.bias",
        "pooler.dense.bias",
        "crf.transitions",
    ):
        assert OTHER_HEADS.match(name)
    for name in (
        "my.crf.transitions",
        "lstm.weight_ih_l0",
        "bert.encoder.layer.12.output.dense.bias",
        "my.classifier.weight",
        "classifiers.weight",
    ):
        assert not OTHER_HEADS.match(name)
    assert POSITION_IDS.search("bert.embeddings.position_ids")
    assert not POSITION_IDS.search("bert.embeddings.position_ids_extra")
