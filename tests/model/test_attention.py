"""The attention functions and MultiHeadAttention: by hand, against torch.nn.MultiheadAttention, and at the edges.

Sizes: B 3, L 7, S 6, H 4, D 5, E 20, kdim 9, vdim 11.
"""

from __future__ import annotations

import copy
import itertools
import pickle
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from minibert import BertConfig, BertSelfAttention, MinibertError, MultiHeadAttention
from minibert.model import attention
from minibert.model.attention import eager_attention, sdpa_attention
from minibert.model.packing import Packing

B, L, S, H, D, E = 3, 7, 6, 4, 5, 20
FUNCTIONS = {"eager": eager_attention, "sdpa": sdpa_attention}
FLOATS = (torch.float32, torch.bfloat16, torch.float16)


def heads(*lengths: int, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    return [torch.randn(B, H, length, D, dtype=dtype) for length in lengths]


class MatrixProducts(TorchDispatchMode):
    """Counts the matrix products that run inside it."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func.overloadpacket in (torch.ops.aten.addmm, torch.ops.aten.mm)
        return func(*args, **(kwargs or {}))


# Stage 1: one head.


@pytest.mark.parametrize("name", FUNCTIONS)
def test_one_head_is_the_formula(name: str) -> None:
    query, key, value = torch.randn(1, 1, L, D), torch.randn(1, 1, S, D), torch.randn(1, 1, S, D)
    context, _ = FUNCTIONS[name](query, key, value)
    for row in range(L):
        scores = [sum(query[0, 0, row, d] * key[0, 0, s, d] for d in range(D)) / 5**0.5 for s in range(S)]
        exponentials = torch.tensor(scores).exp()
        expected = sum(e * v for e, v in zip(exponentials, value[0, 0], strict=True)) / exponentials.sum()
        torch.testing.assert_close(context[0, 0, row], expected, atol=1e-6, rtol=0)


def test_one_head_module_is_the_formula() -> None:
    module = MultiHeadAttention(5, 1)
    x = torch.randn(B, L, 5)
    q, k, v = (F.linear(x, p.weight, p.bias) for p in (module.query, module.key, module.value))
    weights = torch.softmax(q @ k.transpose(1, 2) / 5**0.5, -1)
    output, got = module(x)
    torch.testing.assert_close(output, module.out_proj(weights @ v), atol=1e-6, rtol=0)
    torch.testing.assert_close(got, weights, atol=1e-6, rtol=0)


# Stage 2: several heads, dropout and mask.


def test_heads_are_independent_slices_of_the_channels() -> None:
    module = MultiHeadAttention(E, H)
    x = torch.randn(B, L, E)
    contexts = []
    for head in range(H):
        rows = slice(head * D, (head + 1) * D)
        q, k, v = (F.linear(x, p.weight[rows], p.bias[rows]) for p in (module.query, module.key, module.value))
        contexts.append(eager_attention(q[:, None], k[:, None], v[:, None])[0][:, 0])
    torch.testing.assert_close(module(x)[0], module.out_proj(torch.cat(contexts, -1)), atol=1e-6, rtol=0)


@pytest.mark.parametrize("name", FUNCTIONS)
@pytest.mark.parametrize("need_weights", [True, False])
def test_dropout_is_applied_in_training_and_only_then(name: str, need_weights: bool) -> None:
    module = MultiHeadAttention(E, H, dropout=0.5, attn_implementation=name)
    x = torch.randn(B, L, E)
    first, second = (module(x, need_weights=need_weights)[0] for _ in range(2))
    assert (first - second).abs().max() > 1e-3
    module.eval()
    first, second = (module(x, need_weights=need_weights)[0] for _ in range(2))
    assert torch.equal(first, second)
    plain = MultiHeadAttention(E, H, attn_implementation=name).eval()
    plain.load_state_dict(module.state_dict())
    assert torch.equal(first, plain(x, need_weights=need_weights)[0])


def test_dropout_drops_weights_at_its_rate_and_scales_the_rest() -> None:
    query, key, value = (torch.randn(1, 1, 200, D) for _ in range(3))
    exact, weights = eager_attention(query, key, value)[1], eager_attention(query, key, value, None, 0.3)[1]
    assert exact is not None
    assert weights is not None
    dropped = weights == 0
    assert dropped.float().mean().item() == pytest.approx(0.3, abs=0.01)
    torch.testing.assert_close(weights[~dropped], exact[~dropped] / 0.7)


def test_dropout_of_the_weights_leaves_the_mean_output_unchanged() -> None:
    query, key, value = (torch.randn(1, 1, 4, D) for _ in range(3))
    for function in FUNCTIONS.values():
        mean = torch.stack([function(query, key, value, None, 0.3)[0] for _ in range(4000)]).mean(0)
        torch.testing.assert_close(mean, function(query, key, value)[0], atol=0.06, rtol=0)


@pytest.mark.parametrize("name", FUNCTIONS)
def test_a_masked_key_leaves_no_trace(name: str) -> None:
    query, key, value = torch.randn(1, 1, L, D), torch.randn(1, 1, 3, D), torch.randn(1, 1, 3, D)
    value[0, 0, 2] = 1e3
    for mask in (torch.tensor([True, True, False]), torch.tensor([0.0, 0.0, float("-inf")])):
        masked = FUNCTIONS[name](query, key, value, mask.expand(1, 1, L, 3))[0]
        torch.testing.assert_close(masked, FUNCTIONS[name](query, key[..., :2, :], value[..., :2, :])[0])


def test_each_entry_point_has_its_documented_polarity() -> None:
    x = torch.randn(1, 3, E)
    x[0, 2] = 1e3
    module = MultiHeadAttention(E, H)
    expected = module(x[:, :2])[0]
    ignore = torch.tensor([[False, False, True]])  # True = ignore, as in torch.nn.MultiheadAttention
    assert torch.allclose(module(x, key_padding_mask=ignore)[0][:, :2], expected, atol=1e-5)
    assert torch.allclose(module(x, attn_mask=ignore.expand(3, 3))[0][:, :2], expected, atol=1e-5)
    config = BertConfig(hidden_size=E, num_attention_heads=H)
    bert = BertSelfAttention(config).eval()
    keep = torch.tensor([[1, 1, 0]])  # 1 = real token, as in transformers
    assert torch.allclose(bert(x, keep)[0][:, :2], bert(x[:, :2])[0], atol=1e-5)


# Stage 3: key and value sizes of their own, another target length.


def test_kdim_and_vdim_differ_and_the_output_follows_the_target_length() -> None:
    torch_module = nn.MultiheadAttention(12, 3, kdim=7, vdim=5, batch_first=True)
    module = MultiHeadAttention.from_torch(torch_module)
    query, key, value = torch.randn(2, 4, 12), torch.randn(2, 6, 7), torch.randn(2, 6, 5)
    output, weights = module(query, key, value, average_attn_weights=False)
    expected, expected_weights = torch_module(query, key, value, average_attn_weights=False)
    assert output.shape == (2, 4, 12)
    assert weights.shape == (2, 3, 4, 6)
    torch.testing.assert_close(weights.sum(-1), torch.ones(2, 3, 4), atol=1e-6, rtol=0)
    torch.testing.assert_close(output, expected, atol=1e-6, rtol=0)
    torch.testing.assert_close(weights, expected_weights, atol=1e-6, rtol=0)


def test_key_and_value_projections_map_their_own_size_to_embed_dim() -> None:
    module = MultiHeadAttention(E, H, kdim=9, vdim=11)
    assert module.key.weight.shape == (E, 9)
    assert module.value.weight.shape == (E, 11)


# Stage 4: packed projections.


def test_one_two_or_three_matrix_products() -> None:
    module = MultiHeadAttention(E, H, attn_implementation="sdpa")
    x, y, z = (torch.randn(B, L, E) for _ in range(3))
    for inputs, expected in (((x,), 1), ((x, x, x), 1), ((x, y), 2), ((x, y, y), 2), ((x, y, z), 3), ((x, x, z), 3)):
        given = [*inputs, *[inputs[-1]] * (3 - len(inputs))]
        with MatrixProducts() as products:
            module.project(*given)
        assert products.count == expected
        separate = [p(t) for p, t in zip((module.query, module.key, module.value), given, strict=True)]
        for packed, alone in zip(module.project(*given), separate, strict=True):
            torch.testing.assert_close(packed, alone, atol=1e-6, rtol=0)


@pytest.mark.parametrize("batch_first", [True, False])
def test_forward_keeps_the_identity_that_packing_needs(batch_first: bool) -> None:
    module = MultiHeadAttention(E, H, batch_first=batch_first)
    x, y = torch.randn(B, L, E), torch.randn(B, L, E)
    for inputs, expected in (((x, x, x), 2), ((x, y, y), 3)):
        with MatrixProducts() as products:
            module(*inputs, need_weights=False)
        assert products.count == expected  # the output projection is one more


def test_packing_gives_way_to_modules_that_somebody_has_changed() -> None:
    x = torch.randn(B, L, E)
    module = MultiHeadAttention(E, H)
    heard: list[str] = []
    handle = module.query.register_forward_hook(lambda *_: heard.append("hook"))
    module(x)
    assert heard == ["hook"]
    handle.remove()

    class Doubled(nn.Linear):  # as adapters are
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) * 2

    adapted = copy.deepcopy(module)
    adapted.value = Doubled(E, E)
    adapted.value.load_state_dict(module.value.state_dict())
    before, after = module(x)[0] - module.out_proj.bias, adapted(x)[0] - module.out_proj.bias
    torch.testing.assert_close(after, 2 * before, atol=1e-6, rtol=0)


# Everything torch.nn.MultiheadAttention offers.

OPTIONS = list(itertools.product([True, False], repeat=4))


def masks_for(target: int, source: int, batched: bool) -> dict[str, dict[str, Tensor]]:
    """One keyword set for each kind of mask; key 0 is open to all, since torch gives NaN where nothing is."""
    batch = B if batched else 1
    padding = torch.rand(batch, source) > 0.6
    two = torch.rand(target, source) > 0.6
    three = torch.rand(batch * H, target, source) > 0.6
    for mask in (padding, two, three):
        mask[..., 0] = False

    def as_float(mask: Tensor) -> Tensor:
        return torch.randn(mask.shape).masked_fill(mask, float("-inf"))

    padding = padding if batched else padding[0]
    return {
        "none": {},
        "bool padding": {"key_padding_mask": padding},
        "float padding": {"key_padding_mask": as_float(padding)},
        "bool 2-d": {"attn_mask": two},
        "float 2-d": {"attn_mask": as_float(two)},
        "bool 3-d": {"attn_mask": three},
        "float 3-d": {"attn_mask": as_float(three)},
        "bool both": {"key_padding_mask": padding, "attn_mask": two},
        "float both": {"key_padding_mask": as_float(padding), "attn_mask": as_float(three)},
    }


@pytest.mark.parametrize(("bias", "add_bias_kv", "add_zero_attn", "own_sizes"), OPTIONS)
@pytest.mark.parametrize("layout", ["batch first", "sequence first", "unbatched"])
def test_results_of_torch(bias: bool, add_bias_kv: bool, add_zero_attn: bool, own_sizes: bool, layout: str) -> None:
    kdim, vdim = (9, 11) if own_sizes else (None, None)
    theirs = nn.MultiheadAttention(E, H, 0.0, bias, add_bias_kv, add_zero_attn, kdim, vdim, layout == "batch first")
    for parameter in theirs.parameters():
        nn.init.normal_(parameter, std=0.2)
    ours = MultiHeadAttention.from_torch(theirs)
    batched = layout != "unbatched"
    shapes = [(length, size) for length, size in ((L, E), (S, kdim or E), (S, vdim or E))]
    if layout == "batch first":
        tensors = [torch.randn(B, *shape) for shape in shapes]
    elif layout == "sequence first":
        tensors = [torch.randn(length, B, size) for length, size in shapes]
    else:
        tensors = [torch.randn(*shape) for shape in shapes]
    cases = [(tensors, L, S)] if own_sizes else [(tensors, L, S), ([tensors[0]] * 3, L, L)]
    for (query, key, value), target, source in cases:
        for kind, masks in masks_for(target, source, batched).items():
            for average in (True, False):
                expected, expected_weights = theirs(query, key, value, average_attn_weights=average, **masks)
                output, weights = ours(query, key, value, average_attn_weights=average, **masks)
                torch.testing.assert_close(output, expected, atol=1e-6, rtol=1e-5, msg=lambda m, k=kind: f"{k}: {m}")
                torch.testing.assert_close(weights, expected_weights, atol=1e-6, rtol=0)
            without, none = ours(query, key, value, need_weights=False, **masks)
            assert none is None
            torch.testing.assert_close(without, expected, atol=1e-6, rtol=1e-5)


def test_gradients_of_torch() -> None:
    theirs = nn.MultiheadAttention(E, H, kdim=9, vdim=11, add_bias_kv=True, batch_first=True)
    ours = MultiHeadAttention.from_torch(theirs)
    inputs = [torch.randn(B, L, E), torch.randn(B, S, 9), torch.randn(B, S, 11)]
    upstream = torch.randn(B, L, E)
    gradients = []
    for module in (theirs, ours):
        leaves = [x.clone().requires_grad_() for x in inputs]
        (module(*leaves)[0] * upstream).sum().backward()
        gradients.append([x.grad for x in leaves])
    for expected, got in zip(*gradients, strict=True):
        torch.testing.assert_close(got, expected, atol=1e-6, rtol=1e-5)
    for part, expected in (("weight", theirs.out_proj.weight.grad), ("bias", theirs.out_proj.bias.grad)):
        torch.testing.assert_close(getattr(ours.out_proj, part).grad, expected, atol=1e-6, rtol=1e-5)
    torch.testing.assert_close(ours.key.weight.grad, theirs.k_proj_weight.grad, atol=1e-6, rtol=1e-5)
    torch.testing.assert_close(ours.bias_k.grad, theirs.bias_k.grad, atol=1e-6, rtol=1e-5)
    assert theirs.in_proj_bias.grad is not None
    torch.testing.assert_close(ours.query.bias.grad, theirs.in_proj_bias.grad[:E], atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("need_weights", [True, False])
def test_is_causal_with_and_without_torchs_hint(need_weights: bool) -> None:
    theirs = nn.MultiheadAttention(E, H, batch_first=True)
    ours = MultiHeadAttention.from_torch(theirs)
    x = torch.randn(B, L, E)
    causal = torch.ones(L, L, dtype=torch.bool).triu(1)
    expected = theirs(x, x, x, attn_mask=causal, is_causal=True, need_weights=need_weights)[0]
    for masks in ({"is_causal": True}, {"is_causal": True, "attn_mask": causal}, {"attn_mask": causal}):
        torch.testing.assert_close(ours(x, need_weights=need_weights, **masks)[0], expected, atol=1e-6, rtol=0)


def test_is_causal_goes_with_padding() -> None:
    module = MultiHeadAttention(E, H)
    x = torch.randn(B, L, E)
    padding = torch.arange(L).expand(B, L) >= 5
    weights = module(x, key_padding_mask=padding, is_causal=True)[1]
    allowed = torch.ones(L, L, dtype=torch.bool).tril() & ~padding[0]
    assert torch.equal(weights > 0, allowed.expand(B, L, L))


@pytest.mark.parametrize("layout", [torch.strided, torch.jagged])
@pytest.mark.parametrize("name", FUNCTIONS)
@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_a_nested_tensor_comes_back_nested(layout: torch.layout, name: str) -> None:
    theirs = nn.MultiheadAttention(E, H, batch_first=True).eval()
    ours = MultiHeadAttention.from_torch(theirs)
    ours.set_attn_implementation(name)
    sequences = [torch.randn(length, E) for length in (5, 2, 2, 7)]
    nested = torch.nested.nested_tensor(sequences, layout=layout)
    output, weights = ours(nested, average_attn_weights=False)
    assert output.is_nested
    assert output.layout == layout
    for got, sequence in zip(output.unbind(), sequences, strict=True):
        torch.testing.assert_close(got, ours(sequence)[0], atol=1e-6, rtol=0)
    assert weights.shape == (4, H, 7, 7)
    torch.testing.assert_close(weights[1, :, :2, :2], ours(sequences[1], average_attn_weights=False)[1])
    assert weights[1, :, 2:].abs().max() == weights[1, :, :, 2:].abs().max() == 0
    assert ours(nested, need_weights=False)[1] is None
    if layout == torch.strided:  # torch's own module takes this layout only
        with torch.no_grad():
            expected, expected_weights = theirs(nested, nested, nested)
        for got, want in zip(output.unbind(), expected.unbind(), strict=True):
            torch.testing.assert_close(got, want, atol=1e-6, rtol=0)
        torch.testing.assert_close(weights[1].mean(0)[:2], expected_weights[1][:2], atol=1e-6, rtol=0)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_a_nested_tensor_is_refused_where_it_means_nothing() -> None:
    nested = torch.nested.nested_tensor([torch.randn(2, E), torch.randn(3, E)])
    module = MultiHeadAttention(E, H)
    with pytest.raises(MinibertError, match="eval mode"):
        module(nested)
    module.eval()
    with pytest.raises(MinibertError, match="self-attention"):
        module(nested, torch.nested.nested_tensor([torch.randn(2, E), torch.randn(3, E)]))
    with pytest.raises(MinibertError, match="mask"):
        module(nested, attn_mask=torch.zeros(3, 3))


@pytest.mark.filterwarnings("ignore:enable_nested_tensor is True")
@pytest.mark.parametrize("training", [True, False])
def test_it_takes_the_place_of_torchs_in_torchs_own_layers(training: bool) -> None:
    layer = nn.TransformerEncoderLayer(E, H, 33, dropout=0.0, batch_first=True).train(training)
    theirs = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False).train(training)
    ours = copy.deepcopy(theirs)
    for inner in ours.layers:
        inner.self_attn = MultiHeadAttention.from_torch(inner.self_attn)
    x, padding = torch.randn(B, L, E), torch.arange(L) >= torch.tensor([7, 3, 5])[:, None]
    with torch.no_grad():
        got, expected = (model(x, src_key_padding_mask=padding) for model in (ours, theirs))
    torch.testing.assert_close(got[~padding], expected[~padding], atol=1e-6, rtol=1e-5)
    nn.TransformerEncoder(ours.layers[0], 2)


# Weights in and out.


@pytest.mark.parametrize(("bias", "add_bias_kv", "add_zero_attn", "own_sizes"), OPTIONS)
def test_from_torch_to_torch_round_trip(bias: bool, add_bias_kv: bool, add_zero_attn: bool, own_sizes: bool) -> None:
    kdim, vdim = (9, 11) if own_sizes else (None, None)
    theirs = nn.MultiheadAttention(E, H, 0.25, bias, add_bias_kv, add_zero_attn, kdim, vdim, True, dtype=torch.float64)
    ours = MultiHeadAttention.from_torch(theirs.eval())
    assert (ours.training, ours.dropout, ours.query.weight.dtype) == (False, 0.25, torch.float64)
    again = ours.to_torch()
    assert again.state_dict().keys() == theirs.state_dict().keys()
    for name, tensor in theirs.state_dict().items():
        assert torch.equal(again.state_dict()[name], tensor)
    settings = ("embed_dim", "num_heads", "dropout", "kdim", "vdim", "batch_first", "add_zero_attn", "training")
    assert [getattr(again, s) for s in settings] == [getattr(theirs, s) for s in settings]


@pytest.mark.parametrize("own_sizes", [True, False])
def test_load_state_dict_takes_torchs_keys_at_any_depth(own_sizes: bool) -> None:
    sizes = {"kdim": 9, "vdim": 11} if own_sizes else {}
    theirs = nn.ModuleDict({"layer": nn.MultiheadAttention(E, H, batch_first=True, **sizes)})
    state = theirs.state_dict()
    before = list(state)
    ours = nn.ModuleDict({"layer": MultiHeadAttention(E, H, **sizes)})
    ours.load_state_dict(state)
    assert list(state) == before  # the caller's mapping stays as it was
    inputs = (torch.randn(B, L, E), torch.randn(B, S, sizes.get("kdim", E)), torch.randn(B, S, sizes.get("vdim", E)))
    torch.testing.assert_close(ours["layer"](*inputs)[0], theirs["layer"](*inputs)[0], atol=1e-6, rtol=0)
    own = MultiHeadAttention(E, H, **sizes)
    own.load_state_dict(ours["layer"].state_dict())
    assert torch.equal(own.key.weight, ours["layer"].key.weight)
    with pytest.raises(RuntimeError, match=r"query\.weight"):
        own.load_state_dict({})


def test_initial_weights_are_distributed_as_torchs() -> None:
    for sizes in ({}, {"kdim": 90, "vdim": 110}):
        theirs = nn.MultiheadAttention(200, 4, add_bias_kv=True, **sizes)
        ours = MultiHeadAttention(200, 4, add_bias_kv=True, **sizes)
        converted = MultiHeadAttention.from_torch(theirs)
        for name, parameter in ours.named_parameters():
            reference = converted.get_parameter(name)
            assert parameter.std().item() == pytest.approx(reference.std().item(), rel=0.2, abs=1e-9), name
            assert parameter.abs().max().item() == pytest.approx(reference.abs().max().item(), rel=0.4, abs=1e-9)


def test_device_and_dtype_are_the_parameters() -> None:
    module = MultiHeadAttention(E, H, add_bias_kv=True, device="meta", dtype=torch.float64)
    assert {(p.device.type, p.dtype) for p in module.parameters()} == {("meta", torch.float64)}


def test_the_module_can_be_copied_and_pickled() -> None:
    module = MultiHeadAttention(E, H).eval()
    x = torch.randn(B, L, E)
    for other in (copy.deepcopy(module), pickle.loads(pickle.dumps(module))):
        assert torch.equal(other(x)[0], module(x)[0])
        other.load_state_dict(module.to_torch().state_dict())


# Edges.


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("name", FUNCTIONS)
def test_a_query_without_keys_attends_to_nothing(name: str, dtype: torch.dtype) -> None:
    lowest = torch.finfo(dtype).min
    mask = torch.ones(B, 1, L, S, dtype=torch.bool)
    mask[1, :, 3] = False
    floats = [torch.zeros(mask.shape, dtype=dtype).masked_fill(~mask, value) for value in (float("-inf"), lowest)]
    for given in (mask, *floats):
        tensors = [x.requires_grad_() for x in heads(L, S, S, dtype=dtype)]
        context, weights = FUNCTIONS[name](*tensors, given)
        assert context[1, :, 3].abs().max() == 0
        if weights is not None:
            assert weights[1, :, 3].abs().max() == 0
        alone = FUNCTIONS[name](*tensors)[0]
        torch.testing.assert_close(context[0], alone[0], atol=1e-6 if dtype == torch.float32 else 2e-2, rtol=0)
        context.sum().backward()
        assert all(x.grad is not None and x.grad.isfinite().all() for x in tensors)
        assert tensors[0].grad is not None
        assert tensors[0].grad[1, :, 3].abs().max() == 0


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("name", FUNCTIONS)
def test_a_module_row_without_keys_gives_the_output_bias_and_finite_gradients(name: str, dtype: torch.dtype) -> None:
    module = MultiHeadAttention(E, H, attn_implementation=name).to(dtype)
    nn.init.normal_(module.out_proj.bias)
    x = torch.randn(2, L, E, dtype=dtype)
    mask = torch.tensor([[False] * L, [True] * L])
    for need_weights in (True, False):
        output, weights = module(x, key_padding_mask=mask, need_weights=need_weights)
        assert torch.equal(output[1], module.out_proj.bias.expand(L, E))
        assert weights is None or weights[1].abs().max() == 0
        module.zero_grad()
        output[0].sum().backward()
        assert all(p.grad is not None and p.grad.isfinite().all() for p in module.parameters())


@pytest.mark.parametrize("name", FUNCTIONS)
@pytest.mark.parametrize("constant", [-1e9, -65504.0, float("-inf"), torch.finfo(torch.float32).min])
def test_half_precision_does_not_overflow_on_the_mask_constant(name: str, constant: float) -> None:
    module = MultiHeadAttention(E, H, attn_implementation=name).half()
    x = torch.randn(B, L, E).half()
    blocked = torch.rand(L, L) > 0.5
    blocked[:, 0] = False
    blocked[2] = True
    mask = torch.zeros(L, L).masked_fill(blocked, constant)  # float32, as scripts make it
    output, _ = module(x, attn_mask=mask, need_weights=False)
    assert output.isfinite().all()
    expected = module(x, attn_mask=blocked, need_weights=False)[0]
    torch.testing.assert_close(output, expected, atol=2e-3, rtol=0)
    assert (module(x, attn_mask=mask)[1] * blocked).abs().max() == 0


def test_scores_beyond_half_precision_do_not_overflow_before_scaling() -> None:
    query = torch.full((1, 1, 1, 64), 40.0, dtype=torch.float16)  # the plain product is 102,400, scaled it is 12,800
    for function in FUNCTIONS.values():
        assert function(query, query, query)[0].isfinite().all()


@pytest.mark.parametrize("need_weights", [True, False])
def test_non_contiguous_inputs(need_weights: bool) -> None:
    module = MultiHeadAttention(E, H, kdim=9, vdim=11)
    query = torch.randn(E, L, B).permute(2, 1, 0)
    key, value = torch.randn(9, S, B).permute(2, 1, 0), torch.randn(B, S, 22)[..., ::2]
    assert not any(x.is_contiguous() for x in (query, key, value))
    expected = module(query.contiguous(), key.contiguous(), value.contiguous(), need_weights=need_weights)[0]
    torch.testing.assert_close(module(query, key, value, need_weights=need_weights)[0], expected, atol=1e-6, rtol=0)
    transposed = torch.randn(L, B, E).transpose(0, 1)
    own = MultiHeadAttention(E, H)
    torch.testing.assert_close(own(transposed)[0], own(transposed.contiguous())[0], atol=1e-6, rtol=0)


def kinds_of_mask() -> dict[str, Tensor | None]:
    allowed = torch.rand(B, H, L, S) > 0.4
    allowed[2, 1, 4] = False
    bias = torch.randn(B, H, L, S)
    return {
        "none": None,
        "keys": allowed[:, :1, :1],
        "bool": allowed,
        "float": bias,
        "float with -inf": bias.masked_fill(~allowed, float("-inf")),
        "float with the lowest value": bias.masked_fill(~allowed, torch.finfo(torch.float32).min),
    }


@pytest.mark.parametrize("kind", kinds_of_mask())
def test_eager_and_sdpa_agree_in_outputs_and_gradients(kind: str) -> None:
    mask = kinds_of_mask()[kind]
    tensors, upstream = heads(L, S, S), torch.randn(B, H, L, D)
    results = []
    for function in FUNCTIONS.values():
        leaves = [x.clone().requires_grad_() for x in tensors]
        context, _ = function(*leaves, mask)
        (context * upstream).sum().backward()
        results.append([context, *(x.grad for x in leaves)])
    for eager, sdpa in zip(*results, strict=True):
        assert (eager - sdpa).abs().max() <= 2e-6


def test_the_gradient_is_the_derivative() -> None:
    query, key, value = (torch.randn(1, 2, 3, 4, dtype=torch.float64, requires_grad=True) for _ in range(3))
    mask = torch.tensor([[True, True, False], [False, False, False], [True, True, True]])
    for function in FUNCTIONS.values():
        assert torch.autograd.gradcheck(lambda *x, f=function: f(*x, mask)[0], (query, key, value))


@pytest.mark.parametrize("name", FUNCTIONS)
def test_the_chosen_function_is_the_one_that_runs(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []
    for known, function in FUNCTIONS.items():

        def spy(*args: Any, known: str = known, function: Any = function) -> Any:
            calls.append(known)
            return function(*args)

        monkeypatch.setitem(attention.ATTENTION_FUNCTIONS, known, spy)
    module = MultiHeadAttention(E, H, attn_implementation=name)
    x = torch.randn(B, L, E)
    module(x, need_weights=False)
    assert calls == [name]
    module(x, need_weights=True)
    assert calls == [name, "eager"]
    BertSelfAttention(BertConfig(hidden_size=E, num_attention_heads=H))(x, torch.ones(B, L), output_attentions=True)
    assert calls == [name, "eager", "eager"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"embed_dim": 20, "num_heads": 3}, "embed_dim 20 and num_heads 3"),
        ({"embed_dim": 20, "num_heads": 0}, "num_heads 0"),
        ({"embed_dim": 20, "num_heads": 4, "dropout": 1.5}, "got 1.5"),
        (
            {"embed_dim": 20, "num_heads": 4, "attn_implementation": "flash"},
            "'flash' is not one of eager, sdpa, varlen",
        ),
    ],
)
def test_impossible_settings_are_refused(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(MinibertError, match=message):
        MultiHeadAttention(**arguments)


@pytest.mark.parametrize(
    ("inputs", "masks", "message"),
    [
        ([(3, 7, 19)], {}, r"\(B, L, 20\).*got \(3, 7, 19\)"),
        ([(3, 7, 20), (2, 6, 20)], {}, r"\(3, 7, 20\), \(2, 6, 20\)"),
        ([(3, 7, 20), (3, 6, 20), (3, 5, 20)], {}, r"\(3, 6, 20\), \(3, 5, 20\)"),
        ([(3, 7, 20), (7, 20)], {}, r"\(3, 7, 20\), \(7, 20\)"),
        ([(3, 7, 20)], {"key_padding_mask": torch.zeros(3, 6, dtype=torch.bool)}, r"\(3, 7\), got \(3, 6\)"),
        ([(3, 7, 20)], {"attn_mask": torch.zeros(3, 7, 7)}, r"\(7, 7\) or \(12, 7, 7\), got \(3, 7, 7\)"),
        ([(3, 7, 20)], {"attn_mask": torch.zeros(7, 7, dtype=torch.long)}, "got torch.int64"),
    ],
)
def test_shapes_that_do_not_fit_are_named(inputs: list[tuple[int, ...]], masks: dict[str, Any], message: str) -> None:
    with pytest.raises(MinibertError, match=message):
        MultiHeadAttention(E, H)(*(torch.randn(shape) for shape in inputs), **masks)


# BertSelfAttention.


@pytest.mark.parametrize("name", FUNCTIONS)
@pytest.mark.parametrize("lengths", [(7, 3, 5), (7, 0, 5), (4, 4, 4), (7, 7, 7), (0, 0, 0)])
def test_bert_self_attention_equals_each_sequence_alone(name: str, lengths: tuple[int, ...]) -> None:
    module = BertSelfAttention(BertConfig(hidden_size=E, num_attention_heads=H)).eval()
    module.set_attn_implementation(name)
    x = torch.randn(B, L, E)
    mask = (torch.arange(L) < torch.tensor(lengths)[:, None]).long()
    context, weights = module(x, mask, output_attentions=True)
    assert context.shape == x.shape
    assert weights.shape == (B, H, L, L)
    for row, length in enumerate(lengths):
        alone, alone_weights = module(x[row : row + 1, :length], output_attentions=True) if length else (None, None)
        if alone is not None:
            torch.testing.assert_close(context[row, :length], alone[0], atol=1e-6, rtol=0)
            torch.testing.assert_close(weights[row, :, :length, :length], alone_weights[0], atol=1e-6, rtol=0)
        assert context[row, length:].abs().sum() == 0
        assert weights[row, :, length:].abs().sum() == weights[row, :, :, length:].abs().sum() == 0


def test_bert_self_attention_takes_packed_tokens() -> None:
    module = BertSelfAttention(BertConfig(hidden_size=E, num_attention_heads=H)).eval()
    x = torch.randn(B, L, E)
    mask = (torch.arange(L) < torch.tensor([7, 3, 5])[:, None]).long()
    packing = Packing.from_mask(mask, B, L, H)
    context, none = module(packing.pack(x), packing)
    assert context.shape == (15, E)
    assert none is None
    torch.testing.assert_close(packing.unpack(context), module(x, mask)[0], atol=1e-6, rtol=0)


def test_bert_self_attention_is_multi_head_attention_without_output_projection() -> None:
    module = BertSelfAttention(BertConfig(hidden_size=E, num_attention_heads=H)).eval()
    assert isinstance(module, MultiHeadAttention)
    names = [f"{name}.{part}" for name in ("query", "key", "value") for part in ("weight", "bias")]
    assert list(module.state_dict()) == names
    with pytest.raises(MinibertError, match="no output projection"):
        module.to_torch()
    general = MultiHeadAttention(E, H).eval()
    general.load_state_dict(module.state_dict(), strict=False)
    general.out_proj = nn.Identity()
    x = torch.randn(B, L, E)
    torch.testing.assert_close(module(x)[0], general(x)[0], atol=1e-6, rtol=0)
