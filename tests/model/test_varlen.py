"""Attention over packed sequences by one kernel: on a CPU with a stand-in of its signature, on a GPU with itself."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.attention import varlen

from minibert import BertConfig, BertForTokenClassification, MinibertError
from minibert.model.attention import BertSelfAttention, fits_varlen
from minibert.model.packing import Packing
from varlen_kernel import StandIn, stand_in

SIZES: dict[str, Any] = {
    "vocab_size": 99, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 33,
    "max_position_embeddings": 16, "num_labels": 18, "initializer_range": 0.3,
}  # fmt: skip


@pytest.fixture
def kernel(monkeypatch: pytest.MonkeyPatch) -> StandIn:
    return stand_in(monkeypatch)


@pytest.fixture
def model() -> BertForTokenClassification:
    torch.manual_seed(0)
    return BertForTokenClassification(BertConfig(**SIZES)).eval()


def both(model: BertForTokenClassification, **inputs: Any) -> tuple[Tensor, Tensor]:
    results = []
    for implementation in ("sdpa", "varlen"):
        model.set_attn_implementation(implementation)
        results.append(model(**inputs).logits)
    return results[0], results[1]


def test_the_stand_in_has_the_parameters_of_the_kernel() -> None:
    theirs, ours = (list(inspect.signature(f).parameters) for f in (varlen.varlen_attn, StandIn().__call__))
    assert theirs[:7] == ours[:7]


INPUTS = {
    "padded": {"attention_mask": torch.tensor([[1] * 7, [1] * 3 + [0] * 4, [0] * 2 + [1] * 5])},
    "with holes": {"attention_mask": torch.tensor([[1, 0, 1, 1, 0, 1, 0], [1] * 7, [0, 1, 0, 1, 0, 1, 0]])},
    "an empty one": {"attention_mask": torch.tensor([[1] * 7, [0] * 7, [1] * 2 + [0] * 5])},
    "no padding": {},
}
ENDS = {
    "padded": [0, 7, 10, 15], "with holes": [0, 4, 11, 14], "an empty one": [0, 7, 7, 9], "no padding": [0, 7, 14, 21],
}  # fmt: skip


@pytest.mark.parametrize("name", INPUTS)
def test_one_kernel_gives_what_sequence_by_sequence_gives(
    name: str, kernel: StandIn, model: BertForTokenClassification
) -> None:
    ids = torch.randint(1, 99, (3, 7), generator=torch.Generator().manual_seed(0))
    plain, ours = both(model, input_ids=ids, **INPUTS[name])
    assert (plain - ours).abs().max() < 1e-5
    assert kernel.calls == [(ENDS[name], 7)] * 2  # one call a layer
    assert kernel.boundaries[0] is kernel.boundaries[1]  # made once


def test_sequences_in_one_row(kernel: StandIn, model: BertForTokenClassification) -> None:
    ids = torch.randint(1, 99, (1, 12), generator=torch.Generator().manual_seed(0))
    plain, ours = both(model, input_ids=ids, sequence_lengths=torch.tensor([5, 1, 6]))
    assert (plain - ours).abs().max() < 1e-5
    assert kernel.calls == [([0, 5, 6, 12], 6)] * 2


def test_nothing_but_padding_needs_no_kernel(kernel: StandIn, model: BertForTokenClassification) -> None:
    ids = torch.ones(2, 3, dtype=torch.long)
    plain, ours = both(model, input_ids=ids, attention_mask=torch.zeros(2, 3, dtype=torch.long))
    assert torch.equal(plain, ours)
    assert kernel.calls == []


def test_gradients_are_those_of_sdpa(kernel: StandIn, model: BertForTokenClassification) -> None:
    ids = torch.randint(1, 99, (3, 7), generator=torch.Generator().manual_seed(0))
    gradients = []
    for implementation in ("sdpa", "varlen"):
        model.set_attn_implementation(implementation)
        model.zero_grad()
        model(input_ids=ids, labels=ids % 18, **INPUTS["padded"]).loss.backward()
        gradients.append(model.bert.encoder.layer[0].attention.self.key.weight.grad)
    assert (gradients[0] - gradients[1]).abs().max() < 1e-5
    assert len(kernel.calls) == 2


def test_what_the_kernel_cannot_do_goes_another_way(kernel: StandIn, model: BertForTokenClassification) -> None:
    ids = torch.randint(1, 99, (3, 7), generator=torch.Generator().manual_seed(0))
    model.set_attn_implementation("varlen")
    weights = model(input_ids=ids, output_attentions=True, **INPUTS["padded"]).attentions[0]
    assert weights.shape == (3, 4, 7, 7)
    model(input_ids=ids, attention_mask=torch.ones(7, 7, dtype=torch.bool).tril().expand(3, 7, 7))
    model.train()(input_ids=ids, **INPUTS["padded"])  # drops weights
    assert kernel.calls == []


@pytest.mark.parametrize(("device", "dtype", "message"), [
    ("cpu", torch.bfloat16, "'varlen' needs float16 or bfloat16 on cuda, got bfloat16 on cpu; take 'sdpa'"),
    ("cpu", torch.float32, "got float32 on cpu"),
])  # fmt: skip
def test_another_device_or_dtype_is_refused(
    device: str, dtype: torch.dtype, message: str, model: BertForTokenClassification
) -> None:
    model.set_attn_implementation("varlen")
    with pytest.raises(MinibertError, match=message):
        model.to(device, dtype)(input_ids=torch.ones(1, 3, dtype=torch.long))


@pytest.mark.parametrize(("head_size", "fits"), [(8, True), (256, True), (5, False), (12, False), (264, False)])
def test_heads_that_the_kernel_does_not_have_are_refused(head_size: int, fits: bool, kernel: StandIn) -> None:
    assert fits_varlen(head_size) is fits
    sizes = SIZES | {"hidden_size": 2 * head_size, "num_attention_heads": 2}
    model = BertForTokenClassification(BertConfig(**sizes)).eval()
    model.set_attn_implementation("varlen")
    ids = torch.ones(1, 3, dtype=torch.long)
    if fits:
        assert model(ids).logits.shape == (1, 3, 18)
        assert len(kernel.calls) == 2
    else:
        with pytest.raises(MinibertError, match=f"multiple of 8 and no more than 256, got {head_size}; take 'sdpa'"):
            model(ids)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_the_kernel_itself_is_as_near_to_float32_as_sdpa(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    module = BertSelfAttention(BertConfig(**SIZES | {"hidden_size": 256})).eval().cuda()
    x = torch.randn(3, 7, 256, device="cuda")
    packing = Packing.from_mask(INPUTS["padded"]["attention_mask"].cuda(), 3, 7, 4)
    packed = packing.pack(x)
    right = module(packed, packing)[0]
    module.to(dtype)
    errors = {}
    for implementation in ("sdpa", "varlen"):
        module.set_attn_implementation(implementation)
        errors[implementation] = (module(packed.to(dtype), packing)[0].float() - right).abs().max().item()
    assert errors["varlen"] <= 2 * errors["sdpa"]
