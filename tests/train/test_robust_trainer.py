"""R-Drop and adversarial embeddings: what is added to the gradients, and that the weights come back."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import transformers

from minibert import BertConfig, BertForTokenClassification
from minibert.train.features import Collator, PackingCollator
from minibert.train.losses import TokenLoss, symmetric_divergence
from minibert.train.trainer import Attack, RobustTrainer

SIZES = {"vocab_size": 30, "hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
NO_DROPOUT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
IDS = torch.tensor([[2, 7, 8, 3], [2, 9, 3, 0]])
BATCH = {
    "input_ids": IDS,
    "attention_mask": (IDS > 0).long(),
    "labels": torch.tensor([[-100, 1, 2, -100], [-100, 0, -100, -100]]),
}


def model(**fields: Any) -> BertForTokenClassification:
    return BertForTokenClassification(BertConfig(**SIZES, num_labels=3, initializer_range=0.5, **fields))


def trainer(of: BertForTokenClassification, folder: Path, **options: Any) -> RobustTrainer:
    arguments = transformers.TrainingArguments(output_dir=str(folder), use_cpu=True, report_to=[])
    made = RobustTrainer(model=of, args=arguments, **options)
    made.current_gradient_accumulation_steps = 1
    return made


def gradients(of: BertForTokenClassification) -> dict[str, torch.Tensor]:
    return {name: p.grad.clone() for name, p in of.named_parameters() if p.grad is not None}


def step(of: BertForTokenClassification, folder: Path, times: int = 1, **options: Any) -> dict[str, torch.Tensor]:
    """The gradients that `times` accumulated batches leave."""
    made = trainer(of, folder, **options)
    for _ in range(times):
        made.training_step(of, dict(BATCH), torch.tensor(3 * times))
    return gradients(of)


def test_the_fast_gradient_method_by_hand(tmp_path: Path) -> None:
    of = model(**NO_DROPOUT)
    other, before = copy.deepcopy(of), copy.deepcopy(of.state_dict())
    found = step(of, tmp_path, attack=Attack(1, 0.7, 0.7))
    other.train()
    other(**BATCH, num_items_in_batch=3).loss.backward()
    table = other.get_input_embeddings().weight
    plain = gradients(other)
    direction = plain["bert.embeddings.word_embeddings.weight"]
    with torch.no_grad():
        table += 0.7 * direction / direction.norm()
    other(**BATCH, num_items_in_batch=3).loss.backward()
    expected = gradients(other)
    assert found.keys() == expected.keys()
    for name, gradient in expected.items():
        torch.testing.assert_close(found[name], gradient, atol=1e-5, rtol=1e-4)
        assert "position" in name or not torch.allclose(gradient, 2 * plain[name]) or gradient.norm() < 1e-4
    assert all(torch.equal(tensor, before[name]) for name, tensor in of.state_dict().items())


def test_projected_gradient_descent_by_hand(tmp_path: Path) -> None:
    attack = Attack(steps=3, step_size=0.5, epsilon=0.8)
    of = model(**NO_DROPOUT)
    other = copy.deepcopy(of)
    found = step(of, tmp_path, attack=attack)
    other.train()
    table = other.get_input_embeddings().weight
    original = table.detach().clone()
    other(**BATCH).loss.backward()
    clean = gradients(other)
    assert table.grad is not None
    for _ in range(3):
        direction = table.grad
        with torch.no_grad():
            moved = table - original + 0.5 * direction / direction.norm()
            if moved.norm() > 0.8:
                moved *= 0.8 / moved.norm()
            table.copy_(original + moved)
        other.zero_grad()
        other(**BATCH).loss.backward()
    for name, gradient in gradients(other).items():
        torch.testing.assert_close(found[name], clean[name] + gradient, atol=1e-5, rtol=1e-4)
    assert torch.equal(of.get_input_embeddings().weight, original)


def test_an_attack_raises_the_loss_and_keeps_to_its_ball(tmp_path: Path) -> None:
    of = model(**NO_DROPOUT).train()
    table = of.get_input_embeddings().weight
    original, seen = table.detach().clone(), []
    forward = of.forward

    def spy(**inputs: Any) -> Any:
        output = forward(**inputs)
        seen.append((output.loss.item(), (table - original).norm().item()))
        return output

    of.forward = spy  # type: ignore[method-assign]
    trainer(of, tmp_path, attack=Attack(3, 0.3, 0.5)).training_step(of, dict(BATCH), torch.tensor(3))
    assert [round(distance, 4) for _, distance in seen] == [0.0, 0.3, 0.5, 0.5]
    assert seen[1][0] > seen[0][0] < seen[3][0]


@pytest.mark.parametrize("attack", [Attack(1, 0.5, 0.5), Attack(2, 0.3, 0.5)])
def test_gradients_of_earlier_batches_stay(attack: Attack, tmp_path: Path) -> None:
    of = model(**NO_DROPOUT)
    once, twice = step(copy.deepcopy(of), tmp_path, attack=attack), step(of, tmp_path, times=2, attack=attack)
    for name, gradient in once.items():
        torch.testing.assert_close(twice[name], gradient, atol=1e-5, rtol=1e-4)


def test_a_batch_without_a_gradient_is_not_attacked(tmp_path: Path) -> None:
    of = model(**NO_DROPOUT)
    empty = {**BATCH, "labels": torch.full_like(BATCH["labels"], -100)}
    made = trainer(of, tmp_path, attack=Attack(), r_drop=1.0)
    assert made.training_step(of, empty, torch.tensor(0)) == 0.0
    assert all(p.isfinite().all() for p in of.parameters())
    assert all((gradient == 0).all() for gradient in gradients(of).values())


def test_an_attack_that_cannot_be_is_refused() -> None:
    for sizes in ((0, 1.0, 1.0), (1, 0.0, 1.0), (1, 1.0, -1.0)):
        with pytest.raises(ValueError, match="at least one step and positive sizes"):
            Attack(*sizes)


@pytest.mark.parametrize("loss", [None, TokenLoss("focal")])
def test_r_drop_by_hand(loss: TokenLoss | None, tmp_path: Path) -> None:
    of = model(hidden_dropout_prob=0.3)
    made = trainer(of, tmp_path, r_drop=2.0, compute_loss_func=loss)
    of.train()
    torch.manual_seed(5)
    found, outputs = made.compute_loss(of, dict(BATCH), return_outputs=True, num_items_in_batch=torch.tensor(3))
    first, second = outputs["logits"].chunk(2)
    assert not torch.equal(first, second)
    labels = BATCH["labels"]
    if loss is None:
        plain = sum(F.cross_entropy(x.flatten(0, 1), labels.flatten()) for x in (first, second)) / 2
    else:
        plain = sum(loss({"logits": x}, labels) for x in (first, second)) / 2
    expected = plain + 2.0 * symmetric_divergence(first, second, labels) / 3
    torch.testing.assert_close(found, expected)
    counted = made.compute_loss(of, dict(BATCH), num_items_in_batch=None)
    assert counted.isfinite()


@pytest.mark.parametrize("options", [{}, {"r_drop": 2.0}, {"attack": Attack(2, 0.3, 0.5)}])
def test_packed_batches_leave_the_gradients_of_padded_ones(options: dict[str, Any], tmp_path: Path) -> None:
    of = model(hidden_dropout_prob=0.3, attention_probs_dropout_prob=0.2)
    other = copy.deepcopy(of)
    torch.manual_seed(5)
    padded = step(of, tmp_path, **options)
    real = BATCH["attention_mask"].bool()
    packed = {"input_ids": IDS[real][None], "labels": BATCH["labels"][real][None], "sequence_lengths": real.sum(1)}
    torch.manual_seed(5)
    trainer(other, tmp_path, **options).training_step(other, packed, torch.tensor(3))
    assert all(torch.equal(gradient, padded[name]) for name, gradient in gradients(other).items())


def test_training_and_evaluation_have_their_own_collators(tmp_path: Path) -> None:
    of = model()
    rows = [{"input_ids": [2, 7, 3], "labels": [-100, 1, -100]}, {"input_ids": [2, 3], "labels": [-100, -100]}]
    made = trainer(
        of, tmp_path, data_collator=Collator(), train_collator=PackingCollator(), train_dataset=rows, eval_dataset=rows
    )
    (training,), (evaluated,) = list(made.get_train_dataloader()), list(made.get_eval_dataloader())
    assert training["input_ids"].shape == (1, 5)
    assert evaluated["input_ids"].shape == (2, 3)


def test_without_dropout_r_drop_changes_nothing_and_neither_does_it_in_evaluation(tmp_path: Path) -> None:
    of = model(**NO_DROPOUT)
    plain, dropped = step(copy.deepcopy(of), tmp_path), step(of, tmp_path, r_drop=2.0)
    for name, gradient in plain.items():
        torch.testing.assert_close(dropped[name], gradient, atol=1e-6, rtol=1e-4)
    of.eval()
    outputs = trainer(of, tmp_path, r_drop=2.0).compute_loss(of, dict(BATCH), return_outputs=True)[1]
    assert outputs["logits"].shape[0] == 2
