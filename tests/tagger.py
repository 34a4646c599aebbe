"""A tiny checkpoint with its tokeniser, for the tests that go from text to labels."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from minibert import BertConfig, BertForTokenClassification

HAN = "今天气很好北京上海医院住在我喜欢和张三李四年月压血混合矩阵视通"
LETTERS = "abcdefghijklmnopqrstuvwxyz0123456789"
TYPES = ("PER", "LOC", "ORG", "GPE", "TIME", "PROD", "BOOK", "GAME")
LABELS = ("O", *(f"{prefix}-{label}" for label in TYPES for prefix in "BI"), "[PAD]")  # 18
VOCABULARY = (
    ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *HAN, *"。，！-.%/", *LETTERS]
    + [f"##{letter}" for letter in LETTERS]
    + ["app", "wifi", "iphone", "2024", "##16"]
)


def write_checkpoint(directory: Path, **fields: Any) -> BertForTokenClassification:
    """A random tagger of the 18 labels, with 64 positions and `vocab.txt`; returns the model."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64}
    limits: dict[str, Any] = {"vocab_size": len(VOCABULARY), "max_position_embeddings": 64, "initializer_range": 0.3}
    if not fields.keys() & {"num_labels", "id2label"}:
        limits["id2label"] = dict(enumerate(LABELS))
    model = BertForTokenClassification(BertConfig(**sizes | limits | fields)).eval()
    model.save_pretrained(directory)
    (directory / "vocab.txt").write_text("\n".join(VOCABULARY) + "\n", encoding="utf-8")
    return model
