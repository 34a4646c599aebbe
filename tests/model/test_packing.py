"""Padding out and back in, masks at the door, and that padding cannot change a real token."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import minibert
from minibert import BertConfig, MinibertError
from minibert.model.packing import Packing
from reference import HEADS, batch, fields_of, largest_difference, pair

B, S, H = 3, 7, 4
ATTENTIONS = ("eager", "sdpa")


def small(head: str = "BertModel", **changes: Any) -> Any:
    return getattr(minibert, head)(BertConfig(**fields_of(head, **changes))).eval()


def test_pack_and_unpack_are_inverse_and_padding_comes_back_as_zero() -> None:
    mask = torch.tensor([[1, 1, 1, 0, 0, 0, 0], [0, 1, 0, 1, 1, 0, 1], [0] * 7])  # right padding, holes, nothing
    packing = Packing.from_mask(mask, B, S, H)
    x = torch.randn(B, S, 5)
    tokens = packing.pack(x)
    assert tokens.shape == (7, 5)
    assert torch.equal(tokens, x[mask.bool()])
    assert torch.equal(packing.unpack(tokens), x * mask[..., None])
    firsts = packing.first_tokens(tokens)
    assert torch.equal(firsts, torch.stack([x[0, 0], x[1, 1], torch.zeros(5)]))


def test_without_padding_nothing_is_copied() -> None:
    for mask in (None, torch.ones(B, S)):
        packing = Packing.from_mask(mask, B, S, H)
        x = torch.randn(B, S, 5)
        assert packing.unpack(packing.pack(x)).data_ptr() == x.data_ptr()


def test_padding_is_removed_before_the_embeddings(monkeypatch: pytest.MonkeyPatch) -> None:
    model = small("BertForTokenClassification")
    rows: list[int] = []
    linear = torch.nn.functional.linear
    monkeypatch.setattr(torch.nn.functional, "linear", lambda x, *rest: (rows.append(x.shape[0]), linear(x, *rest))[1])
    embedding = torch.nn.functional.embedding
    looked_up: list[Any] = []
    monkeypatch.setattr(
        torch.nn.functional, "embedding", lambda ids, *rest: (looked_up.append(ids.shape), embedding(ids, *rest))[1]
    )
    model(**batch("BertForTokenClassification", (7, 3, 5)))
    assert set(rows) == {15}
    assert set(looked_up) == {(15,)}


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32, torch.bool, torch.float32, torch.uint8, torch.float16])
def test_the_dtype_of_a_padding_mask_does_not_change_its_meaning(dtype: torch.dtype) -> None:
    inputs = batch("BertModel", (7, 3, 5))
    model = small()
    expected = model(**inputs).last_hidden_state
    inputs["attention_mask"] = inputs["attention_mask"].to(dtype)
    assert torch.equal(model(**inputs).last_hidden_state, expected)


@pytest.mark.parametrize(
    ("mask", "message"),
    [
        (torch.full((B, S), 0.5), r"got 0\.5"),
        (torch.zeros(B, S).masked_fill(torch.eye(B, S) > 0, -10000.0), "got -10000"),
        (torch.full((B, S), 2), "got 2"),
        (torch.ones(B, S - 1), r"\(3, 7\), .* got \(3, 6\)"),
        (torch.ones(B, S, S - 1), r"\(3, 4, 7, 7\).* got \(3, 1, 7, 6\)|got \(3, 7, 6\)"),
        (torch.ones(B, 2, S, S), r"got \(3, 2, 7, 7\)"),
        (torch.ones(B, 1, 1, S), r"got \(3, 1, 1, 7\)"),
        (torch.ones(S), r"got \(7,\)"),
        (torch.full((B, 1, S, S), 3), "got 3"),
        (torch.ones(B, S, S), "only 0 and 1; pass mask.bool"),
        (torch.full((B, S, S), float("nan")), "NaN"),
        (torch.full((B, S, S), float("inf")), r"\+inf"),
    ],
)
def test_any_other_mask_is_refused_with_its_value_or_shape(mask: torch.Tensor, message: str) -> None:
    with pytest.raises(MinibertError, match=message):
        small()(torch.randint(6, 99, (B, S)), mask)


@pytest.mark.parametrize("implementation", ATTENTIONS)
def test_masks_with_a_row_for_each_query(implementation: str) -> None:
    model = small()
    model.set_attn_implementation(implementation)
    ids = torch.randint(6, 99, (B, S))
    keep = torch.arange(S) < torch.tensor([7, 3, 5])[:, None]
    expected = model(ids, keep).last_hidden_state
    allowed = keep[:, None, :].expand(B, S, S)  # 3 dimensions; every query sees the real keys
    four = allowed[:, None].expand(B, H, S, S)
    additive = torch.zeros(B, 1, S, S).masked_fill(~allowed[:, None], float("-inf"))
    for mask in (allowed, allowed.int(), allowed[:, None], four, four.long(), additive, additive.squeeze(1)):
        got = model(ids, mask).last_hidden_state
        assert largest_difference(got, expected, keep) < 1e-6


@pytest.mark.parametrize("implementation", ATTENTIONS)
@pytest.mark.parametrize("made_in", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("model_in", [torch.float32, torch.float64])
def test_the_lowest_value_of_any_dtype_blocks(implementation: str, made_in: torch.dtype, model_in: torch.dtype) -> None:
    model = small().to(model_in)
    model.set_attn_implementation(implementation)
    ids = torch.randint(6, 99, (B, S))
    allowed = torch.rand(B, 1, S, S) > 0.5
    allowed[1, 0, 3] = False  # attends to nothing
    additive = torch.zeros(B, 1, S, S, dtype=made_in).masked_fill(~allowed, torch.finfo(made_in).min)
    got, expected = (model(ids, mask, output_attentions=True) for mask in (additive, allowed))
    assert largest_difference(got.last_hidden_state, expected.last_hidden_state) < 1e-6
    assert all(weights[1, :, 3].abs().max() == 0 for weights in got.attentions)


@pytest.mark.parametrize("head", HEADS)
@pytest.mark.parametrize("implementation", ATTENTIONS)
def test_a_row_of_padding_only_hurts_nobody(head: str, implementation: str) -> None:
    inputs = batch(head, (7, 3, 5))
    mask = inputs["attention_mask"]
    mask[1] = 0
    inputs = {k: v for k, v in inputs.items() if "label" not in k and "position" not in k}
    model = small(head)
    model.set_attn_implementation(implementation)
    output = model(**inputs, output_attentions=True)[0]
    sum_of_first = output[0].square().sum()
    sum_of_first.backward()
    assert output.isfinite().all()
    assert all(p.grad.isfinite().all() for p in model.parameters() if p.grad is not None)
    alone = model(**{name: value[:1] for name, value in inputs.items()})[0]
    torch.testing.assert_close(output[0], alone[0], atol=1e-5, rtol=0)
    if output.shape[:2] == mask.shape:
        assert output[1].abs().max() == 0  # documented: a padded position is 0


@pytest.mark.parametrize("implementation", ATTENTIONS)
@pytest.mark.parametrize("head", ["BertModel", "BertForTokenClassification"])
def test_alone_padded_and_in_a_batch_are_one_result(implementation: str, head: str) -> None:
    model = small(head)
    model.set_attn_implementation(implementation)
    ids = torch.tensor([[2, 9, 6, 7, 3]])
    alone = model(ids)[0][0]
    padded = torch.full((1, 12), 5)
    padded[0, :5] = ids
    mask = (torch.arange(12) < 5).long()[None]
    longer = torch.randint(6, 99, (1, 12))
    together = model(torch.cat([padded, longer]), torch.cat([mask, torch.ones_like(mask)]))[0]
    for other in (model(padded, mask)[0][0, :5], together[0, :5]):
        assert (other - alone).abs().max() <= 1e-6
        assert torch.equal(other.argmax(-1), alone.argmax(-1))
    full_mask = torch.ones(1, 5)
    assert torch.equal(model(ids, full_mask)[0][0], alone)


def test_padding_of_any_content_and_on_any_side_leaves_real_tokens_alone() -> None:
    model = small("BertForTokenClassification")
    ids = torch.tensor([[2, 9, 6, 7, 3]])
    alone = model(ids).logits[0]
    for filler in (5, 11, 98):
        right = torch.cat([ids, torch.full((1, 7), filler)], 1)
        mask = (torch.arange(12) < 5).long()[None]
        assert torch.equal(model(right, mask).logits[0, :5], model(right.masked_fill(mask == 0, 5), mask).logits[0, :5])
    left = torch.cat([torch.full((1, 7), 5), ids], 1)
    mask = (torch.arange(12) >= 7).long()[None]
    positions = torch.arange(-7, 5).clamp(min=0)[None]
    shifted = model(left, mask, position_ids=positions).logits[0, 7:]
    assert (shifted - alone).abs().max() <= 1e-6


def test_left_padding_pools_the_first_real_token() -> None:
    model = small()
    ids = torch.tensor([[2, 9, 6, 7, 3]])
    left = torch.cat([torch.full((1, 3), 5), ids], 1)
    positions = torch.arange(-3, 5).clamp(min=0)
    mask = (torch.arange(8) >= 3).long()[None]
    pooled = model(left, mask, position_ids=positions).pooler_output
    assert (pooled - model(ids).pooler_output).abs().max() <= 1e-6


def test_a_batch_in_training_is_packed_too() -> None:
    none = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0, "classifier_dropout": 0.0}
    ours, theirs = pair("BertForTokenClassification", **none)
    inputs = batch("BertForTokenClassification", (7, 3, 5))
    for model in (ours, theirs):
        model.train()(**inputs).loss.backward()
    reference = dict(theirs.named_parameters())
    for name, parameter in ours.named_parameters():
        torch.testing.assert_close(parameter.grad, reference[name].grad, atol=1e-6, rtol=1e-4)


@pytest.mark.parametrize("implementation", ATTENTIONS)
@pytest.mark.parametrize("head", ["BertModel", "BertForTokenClassification", "BertForMaskedLM"])
def test_sequences_in_one_row_are_those_of_a_padded_batch(head: str, implementation: str) -> None:
    model = small(head)
    model.set_attn_implementation(implementation)
    inputs = batch(head, (7, 3, 5))
    real = inputs["attention_mask"].bool()
    row = {name: value[real][None] for name, value in inputs.items() if name != "attention_mask"}
    wanted = {"output_hidden_states": True, "output_attentions": True}
    with torch.no_grad():
        padded, packed = model(**inputs, **wanted), model(**row, **wanted, sequence_lengths=torch.tensor([7, 3, 5]))
    for one, other in zip(padded.hidden_states, packed.hidden_states, strict=True):
        torch.testing.assert_close(other[0], one[real], atol=1e-5, rtol=0)
    for one, other in zip(padded.attentions, packed.attentions, strict=True):
        assert other.shape == (1, H, 15, 15)
        for n, (start, length) in enumerate(((0, 7), (7, 3), (10, 5))):
            cells = slice(start, start + length)
            torch.testing.assert_close(other[0, :, cells, cells], one[n, :, :length, :length], atol=1e-5, rtol=0)
            assert other[0, :, cells].count_nonzero() == other[0, :, cells, cells].count_nonzero()  # none in between
    if head == "BertModel":
        torch.testing.assert_close(packed.pooler_output, padded.pooler_output, atol=1e-5, rtol=0)
    else:
        torch.testing.assert_close(packed.loss, padded.loss)
        torch.testing.assert_close(packed.logits[0], padded.logits[real], atol=1e-5, rtol=0)


def test_one_row_may_be_longer_than_the_model_and_a_sequence_may_not() -> None:
    model = small()  # of 24 positions
    ids = torch.randint(6, 99, (1, 40))
    assert model(ids, sequence_lengths=torch.tensor([20, 20])).last_hidden_state.shape[:2] == (1, 40)
    with pytest.raises(MinibertError, match="input of 25 tokens is longer than max_position_embeddings 24"):
        model(ids, sequence_lengths=torch.tensor([25, 15]))


@pytest.mark.parametrize(
    ("lengths", "message"),
    [
        ([3, 3], r"add up to the tokens of one row, got 2 that add up to 6, for input of shape \(1, 7\)"),
        ([7, 0], "expected positive numbers"),
        ([], "got 0 that add up to 0"),
        ([3.0, 4.0], r"expected integers of shape \(sequences,\), got torch.float32"),
        ([[3, 4]], r"got torch.int64 \(1, 2\)"),
    ],
)
def test_lengths_that_cannot_be_are_named(lengths: list[Any], message: str) -> None:
    dtype = None if lengths else torch.int64
    with pytest.raises(MinibertError, match=message):
        small()(torch.randint(6, 99, (1, 7)), sequence_lengths=torch.tensor(lengths, dtype=dtype))


def test_lengths_go_without_a_mask_and_without_choices() -> None:
    ids, lengths = torch.randint(6, 99, (1, 7)), torch.tensor([3, 4])
    with pytest.raises(MinibertError, match="sequence_lengths: go without an attention_mask"):
        small()(ids, torch.ones(1, 7), sequence_lengths=lengths)
    with pytest.raises(MinibertError, match="choices cannot be packed"):
        small("BertForMultipleChoice")(ids[None], sequence_lengths=lengths)


def test_unmasked_padding_is_warned_of() -> None:
    model = small()
    with pytest.warns(UserWarning, match="padding id 5 but there is no attention_mask"):
        model(torch.tensor([[9, 8, 5, 5]]))


@pytest.mark.filterwarnings("error")
def test_no_warning_without_padding_or_with_a_mask() -> None:
    model = small()
    model(torch.tensor([[9, 8, 7]]))
    model(torch.tensor([[9, 8, 5]]), torch.tensor([[1, 1, 0]]))
    small(pad_token_id=None)(torch.tensor([[9, 8, 5, 5]]))


# Tracing keeps the padded layout, with the same results.


def traced_inputs() -> tuple[torch.Tensor, torch.Tensor]:
    mask = (torch.arange(S) < torch.tensor([7, 3, 5])[:, None]).long()
    return torch.randint(6, 99, (B, S)), mask


@pytest.mark.parametrize("head", ["BertModel", "BertForTokenClassification", "BertForSequenceClassification"])
def test_torch_jit_trace_serves_other_batches(head: str) -> None:
    model = small(head, return_dict=False)
    ids, mask = traced_inputs()
    with torch.no_grad(), pytest.warns():
        traced = torch.jit.trace(model, (ids, mask), strict=False, check_trace=False)
    other = (torch.randint(6, 99, (2, 11)), (torch.arange(11) < torch.tensor([4, 11])[:, None]).long())
    for inputs in ((ids, mask), other):
        for got, expected in zip(traced(*inputs), model(*inputs), strict=True):
            torch.testing.assert_close(got, expected, atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("head", ["BertModel", "BertForTokenClassification"])
def test_torch_compile_makes_one_graph_with_the_same_results(head: str) -> None:
    model = small(head)
    ids, mask = traced_inputs()
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    labels = {"labels": torch.randint(0, 18, (B, S))} if head == "BertForTokenClassification" else {}
    for attention_mask in (mask, None):
        got, expected = (m(ids, attention_mask, **labels) for m in (compiled, model))
        assert list(got) == list(expected)
        for name in expected:
            torch.testing.assert_close(got[name], expected[name], atol=1e-6, rtol=1e-5)


def test_torch_export_takes_other_batch_sizes_and_lengths() -> None:
    model = small("BertForTokenClassification")
    ids, mask = traced_inputs()
    rows, length = torch.export.Dim("rows", max=64), torch.export.Dim("length", max=24)
    shapes = {"input_ids": {0: rows, 1: length}, "attention_mask": {0: rows, 1: length}}
    program = torch.export.export(model, (ids, mask), dynamic_shapes=shapes).module()
    other = (torch.randint(6, 99, (2, 11)), (torch.arange(11) < torch.tensor([4, 11])[:, None]).long())
    for inputs in ((ids, mask), other):
        torch.testing.assert_close(program(*inputs).logits, model(*inputs).logits, atol=1e-6, rtol=1e-5)


def test_autocast_runs_and_stays_near_float32() -> None:
    model = small("BertForTokenClassification")
    inputs = batch("BertForTokenClassification", (7, 3, 5))
    expected = model(**inputs)
    with torch.autocast("cpu", torch.bfloat16):
        output = model(**inputs)
    assert output.loss.dtype == torch.float32
    assert abs(output.loss.item() - expected.loss.item()) < 0.05
