"""The same model in minibert and in transformers, and batches to try both on.

Sizes are distinct, so that no transposition can hide, and every config field is off its default.
"""

from __future__ import annotations

from typing import Any

import torch
import transformers
from torch import Tensor

import minibert

FIELDS: dict[str, Any] = {
    "vocab_size": 99,
    "hidden_size": 20,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "intermediate_size": 33,
    "hidden_act": "gelu_new",
    "hidden_dropout_prob": 0.2,
    "attention_probs_dropout_prob": 0.3,
    "max_position_embeddings": 24,
    "type_vocab_size": 3,
    "initializer_range": 0.2,
    "layer_norm_eps": 0.01,
    "pad_token_id": 5,
    "classifier_dropout": 0.4,
}
HEADS = (
    "BertModel",
    "BertForTokenClassification",
    "BertForMaskedLM",
    "BertForPreTraining",
    "BertForNextSentencePrediction",
    "BertForSequenceClassification",
    "BertForMultipleChoice",
    "BertForQuestionAnswering",
)
TOKEN_HEADS = ("BertForTokenClassification", "BertForMaskedLM")


def fields_of(head: str, **changes: Any) -> dict[str, Any]:
    """FIELDS for a head: 18 labels, or what the head needs."""
    labels = {"BertForQuestionAnswering": 2, "BertForSequenceClassification": 7}.get(head, 18)
    return {**FIELDS, "num_labels": labels, **changes}


def pair(head: str, attn_implementation: str = "sdpa", **changes: Any) -> tuple[Any, Any]:
    """(ours, theirs) with the same random weights, both in eval mode."""
    fields = fields_of(head, **changes)
    config = transformers.BertConfig(**fields, attn_implementation=attn_implementation)
    theirs = getattr(transformers, head)(config).eval()
    with torch.no_grad():  # transformers starts biases at 0 and norms at 1, where a mix-up would not show
        for parameter in theirs.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    ours = getattr(minibert, head)(minibert.BertConfig(**fields)).eval()
    ours.set_attn_implementation(attn_implementation)
    ours.load_state_dict(theirs.state_dict())
    return ours, theirs


def batch(head: str, lengths: tuple[int, ...] = (7, 7, 7), **changes: Any) -> dict[str, Tensor]:
    """Inputs of three sequences, padded if `lengths` differ, with token types and labels (none at padding)."""
    rows, longest = len(lengths), max(lengths)
    real = torch.arange(longest) < torch.tensor(lengths)[:, None]
    inputs = {
        "input_ids": torch.randint(6, 99, (rows, longest)).masked_fill(~real, 5),
        "token_type_ids": torch.randint(0, 3, (rows, longest)),
    }
    if not real.all():
        inputs["attention_mask"] = real.long()
    labels = torch.randint(0, 18, (rows, longest)).masked_fill(~real, -100)
    if longest > 2:
        labels[:, 1] = -100
    classes = torch.arange(rows)
    match head:
        case "BertForTokenClassification" | "BertForMaskedLM":
            inputs["labels"] = labels
        case "BertForPreTraining":
            inputs |= {"labels": labels, "next_sentence_label": classes % 2}
        case "BertForNextSentencePrediction":
            inputs["labels"] = classes % 2
        case "BertForSequenceClassification":
            inputs["labels"] = classes
        case "BertForMultipleChoice":
            inputs = {name: torch.stack([x, x.flip(0)], 1) for name, x in inputs.items()} | {"labels": classes % 2}
        case "BertForQuestionAnswering":
            inputs |= {"start_positions": classes % longest, "end_positions": classes.flip(0) % longest}
    return inputs | changes


def largest_difference(ours: Any, theirs: Any, mask: Tensor | None = None) -> float:
    """Largest absolute difference over the real positions of every value of two outputs, nested tuples included."""
    if isinstance(theirs, tuple | list):
        assert len(ours) == len(theirs)
        return max(largest_difference(a, b, mask) for a, b in zip(ours, theirs, strict=True))
    assert ours.shape == theirs.shape
    distance = (ours.detach().double() - theirs.detach().double()).abs()
    if mask is not None:
        if mask.dim() == 3:  # multiple choice
            mask = mask.flatten(0, 1)
        keep = mask.bool()
        if distance.dim() == 4:  # attentions (B, H, S, S): rows of real queries
            distance = distance.transpose(1, 2)
        if distance.shape[:2] == keep.shape:
            distance = distance[keep]
    return distance.max().item()
