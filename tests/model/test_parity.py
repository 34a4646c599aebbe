"""minibert's numbers are transformers' numbers: outputs, losses, gradients and names, for every head."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import transformers

import minibert
from minibert.config import ACTIVATION_NAMES
from minibert.model import attention
from reference import FIELDS, HEADS, TOKEN_HEADS, batch, fields_of, largest_difference, pair

TOLERANCE = 1e-5
ATTENTIONS = ("eager", "sdpa")


def run_both(head: str, implementation: str, inputs: dict[str, Any], **changes: Any) -> tuple[Any, Any]:
    """Both outputs with hidden states; with attentions too in the eager run, where transformers has them."""
    ours, theirs = pair(head, implementation, **changes)
    options = {"output_hidden_states": True, "output_attentions": implementation == "eager", "return_dict": True}
    with torch.no_grad():
        return ours(**inputs, **options), theirs(**inputs, **options)


def difference_over_all(ours: Any, theirs: Any, inputs: dict[str, Any], skip: tuple[str, ...] = ()) -> float:
    names = [name for name in theirs if name != "cross_attentions"]  # an encoder has none; theirs is ()
    assert list(ours) == names
    return max(largest_difference(ours[k], theirs[k], inputs.get("attention_mask")) for k in names if k not in skip)


def test_the_reference_config_differs_from_the_default_in_every_field() -> None:
    defaults = minibert.BertConfig()
    assert [name for name, value in FIELDS.items() if getattr(defaults, name) == value] == []
    numeric = {f for f in vars(defaults) if isinstance(getattr(defaults, f), int | float)} - {"num_labels"}
    switches = {"return_dict", "output_hidden_states", "output_attentions", "tie_word_embeddings"}
    assert numeric - switches <= FIELDS.keys()


@pytest.mark.parametrize("head", HEADS)
def test_state_dict_has_the_keys_and_shapes_of_transformers(head: str) -> None:
    ours, theirs = pair(head)
    assert {k: v.shape for k, v in ours.state_dict().items()} == {k: v.shape for k, v in theirs.state_dict().items()}
    assert list(dict(ours.named_parameters())) == list(dict(theirs.named_parameters()))


@pytest.mark.parametrize("head", HEADS)
@pytest.mark.parametrize("implementation", ATTENTIONS)
@pytest.mark.parametrize("lengths", [(7, 7, 7), (7, 3, 5)], ids=["unpadded", "padded"])
def test_outputs_and_loss(head: str, implementation: str, lengths: tuple[int, ...]) -> None:
    inputs = batch(head, lengths)
    ours, theirs = run_both(head, implementation, inputs)
    assert difference_over_all(ours, theirs, inputs, loss_differs(head, inputs)) < TOLERANCE
    assert ("loss" in ours) == (head != "BertModel")


def loss_differs(head: str, inputs: dict[str, Any]) -> tuple[str, ...]:
    """With padding, transformers' span loss counts the scores of padded positions; ours does not (see below)."""
    return ("loss",) if head == "BertForQuestionAnswering" and "attention_mask" in inputs else ()


@pytest.mark.parametrize("head", HEADS)
@pytest.mark.parametrize("implementation", ATTENTIONS)
@pytest.mark.parametrize("length", [1, 2, 3, 11, 23, 24])
def test_every_length_up_to_the_maximum(head: str, implementation: str, length: int) -> None:
    inputs = batch(head, (length, 1, max(1, length // 2)))
    ours, theirs = run_both(head, implementation, inputs)
    assert difference_over_all(ours, theirs, inputs, loss_differs(head, inputs)) < TOLERANCE


@pytest.mark.parametrize("head", HEADS)
@pytest.mark.parametrize("implementation", ATTENTIONS)
def test_explicit_position_ids(head: str, implementation: str) -> None:
    inputs = batch(head, (7, 3, 5))
    plain = run_both(head, implementation, inputs)[0]
    torch.manual_seed(1)
    inputs["position_ids"] = torch.randint(0, 24, inputs["input_ids"].shape)
    ours, theirs = run_both(head, implementation, inputs)
    assert difference_over_all(ours, theirs, inputs, loss_differs(head, inputs)) < TOLERANCE
    assert largest_difference(plain.hidden_states[0], ours.hidden_states[0]) > 0.01


@pytest.mark.parametrize("head", HEADS)
@pytest.mark.parametrize("implementation", ATTENTIONS)
def test_inputs_embeds(head: str, implementation: str) -> None:
    inputs = batch(head, (7, 3, 5))
    inputs["inputs_embeds"] = torch.randn(*inputs.pop("input_ids").shape, 20)
    ours, theirs = run_both(head, implementation, inputs)
    assert difference_over_all(ours, theirs, inputs, loss_differs(head, inputs)) < TOLERANCE


def test_without_token_types() -> None:
    inputs = batch("BertModel", (7, 3, 5))
    del inputs["token_type_ids"]
    ours, theirs = run_both("BertModel", "sdpa", inputs)
    assert difference_over_all(ours, theirs, inputs) < TOLERANCE


@pytest.mark.parametrize("implementation", ATTENTIONS)
@pytest.mark.parametrize("heads", [1, 4])
def test_additive_and_bool_masks_of_four_dimensions(implementation: str, heads: int) -> None:
    allowed = torch.rand(3, heads, 7, 7) > 0.4
    allowed[..., 0] = True
    additive = torch.zeros(allowed.shape).masked_fill(~allowed, torch.finfo(torch.float32).min)
    inputs = batch("BertModel") | {"attention_mask": additive}
    ours, theirs = pair("BertModel", implementation)
    with torch.no_grad():
        expected = theirs(**inputs).last_hidden_state
        for mask in (additive, allowed, allowed.int()):
            got = ours(**inputs | {"attention_mask": mask}).last_hidden_state
            assert largest_difference(got, expected) < TOLERANCE


@pytest.mark.parametrize("name", sorted(ACTIVATION_NAMES))
def test_every_activation(name: str) -> None:
    inputs = batch("BertForMaskedLM", (7, 3, 5))
    ours, theirs = pair("BertForMaskedLM", hidden_act=name, initializer_range=0.1)
    theirs.float()  # xielu's own parameters are bfloat16 there
    ours.load_state_dict(theirs.state_dict())
    with torch.no_grad():
        assert difference_over_all(ours(**inputs), theirs(**inputs), inputs) < TOLERANCE


def test_activation_names_are_those_of_transformers() -> None:
    from transformers.activations import ACT2FN

    assert frozenset(ACT2FN) == ACTIVATION_NAMES


@pytest.mark.parametrize(
    ("problem_type", "labels"),
    [
        (None, torch.tensor([0, 6, 3])),
        (None, torch.rand(3, 7).round()),
        ("regression", torch.randn(3, 7)),
        ("single_label_classification", torch.tensor([[2], [1], [5]])),
        ("multi_label_classification", torch.rand(3, 7).round()),
    ],
)
def test_every_problem_type_of_sequence_classification(problem_type: str | None, labels: torch.Tensor) -> None:
    inputs = batch("BertForSequenceClassification") | {"labels": labels}
    ours, theirs = run_both("BertForSequenceClassification", "sdpa", inputs, problem_type=problem_type)
    assert difference_over_all(ours, theirs, inputs) < TOLERANCE
    one = {"num_labels": 1, "problem_type": problem_type}
    if problem_type in (None, "regression"):
        inputs["labels"] = torch.randn(3)
        assert (
            difference_over_all(*run_both("BertForSequenceClassification", "sdpa", inputs, **one), inputs) < TOLERANCE
        )


def test_an_untied_decoder() -> None:
    inputs = batch("BertForMaskedLM", (7, 3, 5))
    ours, theirs = run_both("BertForMaskedLM", "sdpa", inputs, tie_word_embeddings=False)
    assert difference_over_all(ours, theirs, inputs) < TOLERANCE
    model, _ = pair("BertForMaskedLM", tie_word_embeddings=False)
    assert model.cls.predictions.decoder.weight is not model.bert.embeddings.word_embeddings.weight


def assert_same_gradients(head: str, implementation: str, inputs: dict[str, Any], loss_of: Any) -> None:
    """Every gradient lies within 1e-5 of the parameter's largest one in float32, and within 1e-10 in float64.

    Some true gradients are 0 (a key bias moves all scores of a query alike), and there float32 holds rounding noise
    only: the floor is a millionth of the model's largest gradient. float64 shows that noise is all there is.
    """
    ours, theirs = pair(head, implementation)
    for dtype, tolerance, floor in ((torch.float32, TOLERANCE, 1e-6), (torch.float64, 1e-10, 1e-14)):
        gradients = []
        for model in (ours, theirs):
            model.to(dtype).zero_grad()
            loss_of(model(**inputs)).backward()
            gradients.append({name: p.grad for name, p in model.named_parameters() if p.grad is not None})
        got, expected = gradients
        assert got.keys() == expected.keys()
        largest = max(gradient.abs().max() for gradient in expected.values())
        for name, gradient in expected.items():
            allowed = tolerance * gradient.abs().max() + floor * largest
            assert (got[name] - gradient).abs().max() <= allowed, (name, dtype)


@pytest.mark.parametrize("head", HEADS)
@pytest.mark.parametrize("implementation", ATTENTIONS)
@pytest.mark.parametrize("lengths", [(7, 7, 7), (7, 3, 5)], ids=["unpadded", "padded"])
def test_gradients_of_every_parameter(head: str, implementation: str, lengths: tuple[int, ...]) -> None:
    inputs = batch(head, lengths)
    mask = inputs.get("attention_mask", torch.ones(3, 7))
    weights = torch.linspace(-1, 1, 20)

    def loss_of(output: Any) -> torch.Tensor:
        if head == "BertModel":
            return (output.last_hidden_state * mask[..., None] * weights).sum() + (output.pooler_output * weights).sum()
        if head == "BertForQuestionAnswering" and len(set(lengths)) > 1:  # its loss over padding is another one
            return (output.start_logits * mask * torch.linspace(-1, 1, 7)).sum() + (output.end_logits**2 * mask).sum()
        if head == "BertForMultipleChoice":  # the gradients of its two choices cancel to rounding noise
            return output.loss + (output.logits * torch.linspace(-1, 2, 6).view(3, 2)).sum()
        return output.loss

    assert_same_gradients(head, implementation, inputs, loss_of)


def test_span_loss_of_a_padded_batch_is_the_mean_of_the_sentences_alone() -> None:
    inputs = batch("BertForQuestionAnswering", (7, 3, 5)) | {
        "start_positions": torch.tensor([1, 2, 0]),
        "end_positions": torch.tensor([3, 2, 4]),
    }
    ours, theirs = pair("BertForQuestionAnswering")
    together = ours(**inputs).loss.item()
    alone = []
    for row, length in enumerate((7, 3, 5)):
        cut = {k: v[row : row + 1] if v.dim() == 1 else v[row : row + 1, :length] for k, v in inputs.items()}
        alone.append(theirs(**cut).loss.item())
    assert together == pytest.approx(sum(alone) / 3, abs=TOLERANCE)


def test_a_span_beyond_the_sequence_is_no_label_as_in_transformers() -> None:
    inputs = batch("BertForQuestionAnswering") | {
        "start_positions": torch.tensor([1, 9, 2]),
        "end_positions": torch.tensor([3, 9, 30]),
    }
    ours, theirs = run_both("BertForQuestionAnswering", "sdpa", inputs)
    assert difference_over_all(ours, theirs, inputs) < TOLERANCE
    nowhere = torch.tensor([9, 9, 9])
    model, _ = pair("BertForQuestionAnswering")
    assert model(**inputs | {"start_positions": nowhere, "end_positions": nowhere}).loss.item() == 0.0


@pytest.mark.parametrize("head", HEADS)
def test_a_plain_tuple_has_the_order_of_transformers(head: str) -> None:
    inputs = batch(head)
    ours, theirs = pair(head)
    with torch.no_grad():
        mine = ours(**inputs, return_dict=False, output_hidden_states=True)
        reference = theirs(**inputs, return_dict=False, output_hidden_states=True)
    assert type(mine) is tuple
    assert largest_difference(mine, reference) < TOLERANCE


@pytest.mark.parametrize("head", HEADS)
def test_forward_takes_every_argument_of_transformers_encoder_by_the_same_position(head: str) -> None:
    mine = list(inspect.signature(getattr(minibert, head).forward).parameters)
    reference = list(inspect.signature(getattr(transformers, head).forward).parameters)
    without = [
        n for n in reference if "encoder" not in n and n not in ("kwargs", "cache", "use_cache", "past_key_values")
    ]
    assert mine[: len(without)] == without


# What parity would look like if the model were wrong: each of these faults must be seen.


def swapped(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, function in list(attention.ATTENTION_FUNCTIONS.items()):
        monkeypatch.setitem(attention.ATTENTION_FUNCTIONS, name, lambda q, k, *rest, f=function: f(k, q, *rest))


def unscaled(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, function in list(attention.ATTENTION_FUNCTIONS.items()):
        monkeypatch.setitem(
            attention.ATTENTION_FUNCTIONS, name, lambda q, *rest, f=function: f(q * q.shape[-1] ** 0.5, *rest)
        )


def tanh_gelu(monkeypatch: pytest.MonkeyPatch) -> None:
    original = F.gelu
    monkeypatch.setattr(F, "gelu", lambda x, approximate="none": original(x, approximate="tanh"))
    monkeypatch.setitem(__import__("minibert.model.activations").model.activations._FUNCTIONS, "gelu", F.gelu)


def no_eps(monkeypatch: pytest.MonkeyPatch) -> None:
    original = F.layer_norm
    monkeypatch.setattr(F, "layer_norm", lambda x, shape, w, b, eps: original(x, shape, w, b, 1e-12))


def no_token_types(monkeypatch: pytest.MonkeyPatch) -> None:
    original = minibert.BertModel.forward

    def forward(self: Any, input_ids: Any, attention_mask: Any, token_type_ids: Any, *rest: Any, **named: Any) -> Any:  # noqa: ARG001
        return original(self, input_ids, attention_mask, None, *rest, **named)

    monkeypatch.setattr(minibert.BertModel, "forward", forward)


def skipped_norm(monkeypatch: pytest.MonkeyPatch) -> None:
    from minibert.model.encoder import BertOutput

    calls: list[int] = []
    original = BertOutput.forward

    def forward(self: BertOutput, x: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
        calls.append(1)
        return self.dense(x) + residual if len(calls) == 3 else original(self, x, residual)

    monkeypatch.setattr(BertOutput, "forward", forward)


@pytest.mark.parametrize("fault", [swapped, unscaled, tanh_gelu, no_eps, no_token_types, skipped_norm])
@pytest.mark.parametrize("implementation", ATTENTIONS)
def test_parity_sees_a_broken_model(fault: Any, implementation: str, monkeypatch: pytest.MonkeyPatch) -> None:
    inputs = batch("BertForTokenClassification", (7, 3, 5))
    ours, theirs = pair("BertForTokenClassification", implementation, hidden_act="gelu")
    with torch.no_grad():
        expected = theirs(**inputs)
        assert difference_over_all(ours(**inputs), expected, inputs) < TOLERANCE
        fault(monkeypatch)
        assert difference_over_all(ours(**inputs), expected, inputs) > 10 * TOLERANCE


@pytest.mark.parametrize("head", TOKEN_HEADS)
def test_training_mode_is_parity_too_when_dropout_is_zero(head: str) -> None:
    none = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0, "classifier_dropout": 0.0}
    inputs = batch(head, (7, 3, 5))
    ours, theirs = pair(head, **none)
    ours.train()
    theirs.train()
    assert difference_over_all(ours(**inputs), theirs(**inputs), inputs) < TOLERANCE
    assert fields_of(head, **none)["classifier_dropout"] == 0.0
