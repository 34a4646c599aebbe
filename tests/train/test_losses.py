"""Losses that can be worked out by hand, and that add up over accumulated batches."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F

from minibert import ConfigError
from minibert.text.labels import LabelSet
from minibert.train.losses import TokenLoss, symmetric_divergence, weights_of_labels

KINDS: list[dict[str, Any]] = [
    {},
    {"label_smoothing": 0.1},
    {"class_weights": (0.5, 2.0, 3.0, 1.0)},
    {"kind": "focal"},
    {"kind": "dice", "dice_alpha": 0.5, "class_weights": (0.5, 2.0, 3.0, 1.0)},
]


def case() -> tuple[torch.Tensor, torch.Tensor]:
    labels = torch.randint(0, 4, (3, 5))
    labels[0, 2:] = labels[2, 4:] = -100
    return torch.randn(3, 5, 4, requires_grad=True), labels


def test_cross_entropy_is_torchs() -> None:
    logits, labels = case()
    for smoothing in (0.0, 0.2):
        loss = TokenLoss(label_smoothing=smoothing)({"logits": logits}, labels)
        expected = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), label_smoothing=smoothing)
        assert loss.item() == pytest.approx(expected.item(), abs=1e-6)


def test_a_token_weighs_as_its_gold_label_does() -> None:
    logits, labels = torch.randn(3, 4), torch.tensor([1, 3, 1])
    plain = TokenLoss().of_tokens(logits, labels)
    weighted = TokenLoss(class_weights=(1.0, 5.0, 1.0, 0.5)).of_tokens(logits, labels)
    torch.testing.assert_close(weighted, plain * torch.tensor([5.0, 0.5, 5.0]))


def test_focal_loss_by_hand() -> None:
    logits = torch.tensor([[0.8, 0.2], [0.25, 0.75]]).log()
    loss = TokenLoss("focal", focal_gamma=2.0).of_tokens(logits, torch.tensor([0, 0]))
    expected = [0.2**2 * -torch.tensor(0.8).log(), 0.75**2 * -torch.tensor(0.25).log()]
    torch.testing.assert_close(loss, torch.stack(expected))
    zero = TokenLoss("focal", focal_gamma=0.0).of_tokens(logits, torch.tensor([0, 1]))
    torch.testing.assert_close(zero, F.cross_entropy(logits, torch.tensor([0, 1]), reduction="none"))


def test_dice_loss_by_hand() -> None:
    logits = torch.tensor([[0.8, 0.2]]).log()
    loss = TokenLoss("dice").of_tokens(logits, torch.tensor([0]))
    assert loss.item() == pytest.approx((1 - (2 * 0.8 + 1) / (0.8 + 2)) + (1 - 1 / (0.2 + 1)), abs=1e-6)
    adjusted = TokenLoss("dice", dice_alpha=1.0).of_tokens(logits, torch.tensor([0]))
    p, q = 0.8 * 0.2, 0.2 * 0.8
    assert adjusted.item() == pytest.approx((1 - (2 * p + 1) / (p + 2)) + (1 - 1 / (q + 1)), abs=1e-6)
    sure, unsure = (TokenLoss("dice").of_tokens(torch.tensor([[x, 0.0]]), torch.tensor([0])) for x in (9.0, 1.0))
    assert sure < unsure


@pytest.mark.parametrize("options", KINDS, ids=str)
def test_accumulated_batches_add_up_to_one(options: dict[str, Any]) -> None:  # E07
    logits, labels = case()
    loss, count = TokenLoss(**options), (labels != -100).sum()
    whole = loss({"logits": logits}, labels)
    parts = sum(loss({"logits": logits[n : n + 1]}, labels[n : n + 1], count) for n in range(3))
    assert float(torch.as_tensor(parts).detach()) == pytest.approx(whole.item(), abs=1e-6)
    assert loss((logits,), labels, int(count)).item() == pytest.approx(whole.item(), abs=1e-6)


@pytest.mark.parametrize("options", KINDS, ids=str)
def test_without_a_label_there_is_no_loss_and_no_gradient(options: dict[str, Any]) -> None:  # E05
    logits, labels = case()
    for count in (None, 0, torch.tensor(3)):
        loss = TokenLoss(**options)({"logits": logits}, torch.full_like(labels, -100), count)
        assert loss.item() == 0.0
        loss.backward()
        assert logits.grad is not None
        assert (logits.grad == 0).all()


def test_half_precision_is_summed_in_full() -> None:
    logits, labels = case()
    assert TokenLoss("focal")({"logits": logits.bfloat16()}, labels).dtype == torch.float32


def test_weights_of_labels_and_types() -> None:
    labels = LabelSet(["O", "B-PER", "I-PER", "B-LOC", "I-LOC"])
    assert weights_of_labels({"PER": 2, "B-PER": 3.5, "O": 0.5}, labels) == (0.5, 3.5, 2.0, 1.0, 1.0)
    with pytest.raises(ConfigError, match="class_weights: ORG: neither label nor type; the labels are O, B-PER"):
        weights_of_labels({"PER": 2, "ORG": 1}, labels)
    with pytest.raises(ConfigError, match="expected positive numbers"):
        weights_of_labels({"PER": 0.0}, labels)
    with pytest.raises(ConfigError, match="loss: expected cross_entropy, focal, dice, got 'hinge'"):
        TokenLoss("hinge")


def test_the_divergence_is_half_of_both() -> None:
    logits, labels = case()
    others = torch.randn_like(logits)
    real = labels != -100
    p, q = logits[real].log_softmax(-1), others[real].log_softmax(-1)
    expected = (F.kl_div(q, p, reduction="sum", log_target=True) + F.kl_div(p, q, reduction="sum", log_target=True)) / 2
    torch.testing.assert_close(symmetric_divergence(logits, others, labels), expected)
    assert symmetric_divergence(logits, logits, labels).item() == 0.0
