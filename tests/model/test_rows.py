"""Attention by one call for all sequences, as a GPU has it, is attention by a call for each."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from minibert import BertConfig, BertForTokenClassification
from minibert.model import attention
from minibert.model.attention import MultiHeadAttention

SIZES: dict[str, Any] = {
    "vocab_size": 99, "hidden_size": 20, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 33,
    "max_position_embeddings": 16, "num_labels": 5, "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0,
}  # fmt: skip


def inputs_of(lengths: list[int], layout: str) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(1, 99, (len(lengths), 14), generator=generator)
    real = torch.arange(14) < torch.tensor(lengths)[:, None]
    if layout == "holes":
        real[:, ::3] = False
    if layout == "one row":
        return {"input_ids": ids[real][None], "sequence_lengths": torch.tensor([n for n in lengths if n])}
    return {"input_ids": ids, "attention_mask": real}


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, ...]]:
    """The shapes that attention is called with."""
    shapes: list[tuple[int, ...]] = []
    attend = MultiHeadAttention.attend

    def counted(self: MultiHeadAttention, query: Tensor, *rest: Any) -> Any:
        shapes.append(tuple(query.shape))
        return attend(self, query, *rest)

    monkeypatch.setattr(MultiHeadAttention, "attend", counted)
    return shapes


@pytest.mark.parametrize("layout", ["padded", "holes", "one row"])
@pytest.mark.parametrize("lengths", [[13, 9, 1, 0], [1, 1, 1], [5]])
@pytest.mark.parametrize("training", [False, True])
def test_numbers_and_gradients_are_the_same(
    training: bool, lengths: list[int], layout: str, calls: list[tuple[int, ...]], monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(0)
    model = BertForTokenClassification(BertConfig(**SIZES)).train(training).double()
    inputs = inputs_of(lengths, layout)
    found = []
    for is_slow in (False, True):
        monkeypatch.setattr(attention, "is_slow_to_call", lambda _, is_slow=is_slow: is_slow)
        model.zero_grad()
        calls.clear()
        logits = model(**inputs).logits
        logits.square().sum().backward()
        found.append((logits.detach(), [parameter.grad for parameter in model.parameters()]))
    rows = sum(map(bool, lengths)) if layout == "one row" else len(lengths)
    width = max(lengths) if layout == "one row" else 14
    assert calls == [(rows, width, 20)] * 2  # one a layer
    torch.testing.assert_close(found[0], found[1], rtol=1e-9, atol=1e-9)


def test_weights_are_dropped_there_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention, "is_slow_to_call", lambda _: True)
    model = BertForTokenClassification(BertConfig(**SIZES | {"attention_probs_dropout_prob": 0.5})).train()
    inputs = inputs_of([13, 9, 1], "padded")
    assert not torch.equal(model(**inputs).logits, model(**inputs).logits)
    assert torch.equal(model.eval()(**inputs).logits, model(**inputs).logits)


def test_weights_that_are_asked_for_come_as_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    model = BertForTokenClassification(BertConfig(**SIZES)).eval()
    inputs = inputs_of([13, 9, 0], "padded")
    plain = model(**inputs, output_attentions=True)
    monkeypatch.setattr(attention, "is_slow_to_call", lambda _: True)
    for ours, theirs in zip(model(**inputs, output_attentions=True).attentions, plain.attentions, strict=True):
        assert torch.equal(ours, theirs)


def test_it_is_for_what_is_no_cpu() -> None:
    assert [attention.is_slow_to_call(torch.device(name)) for name in ("cpu", "cuda", "mps")] == [False, True, True]
