"""Faults planted in a copy of a model: the first module that differs is named, and why."""

from __future__ import annotations

import copy
import math
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import transformers
from torch import Tensor, nn
from transformers.models.bert import modeling_bert

import minibert
from minibert.parity import compare
from reference import batch, fields_of

FIELDS = {"hidden_act": "gelu", "layer_norm_eps": 1e-12, "type_vocab_size": 2, "pad_token_id": 0}
LAYER = "encoder.layer.1"


@pytest.fixture(scope="module")
def model() -> minibert.BertForTokenClassification:
    torch.manual_seed(1)
    made = minibert.BertForTokenClassification(minibert.BertConfig(**fields_of("BertForTokenClassification", **FIELDS)))
    with torch.no_grad():  # biases of 0 and norms of 1 would hide some faults
        for parameter in made.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    return made.eval()


@pytest.fixture
def inputs() -> dict[str, Tensor]:
    given = batch("BertForTokenClassification", (7, 3, 5))
    return {
        "input_ids": given["input_ids"],
        "attention_mask": given["attention_mask"],
        "token_type_ids": given["token_type_ids"] % 2 * given["attention_mask"],
    }


def layer(model: Any) -> Any:
    return model.bert.encoder.layer[1]


# Faults of what is stored, or of a setting: for models of minibert and of transformers alike.


def wrong_eps(model: Any) -> None:
    layer(model).attention.output.LayerNorm.eps = 1e-5


def wrong_eps_in_the_embeddings(model: Any) -> None:
    model.bert.embeddings.LayerNorm.eps = 3e-4


def tanh_gelu(model: Any) -> None:
    layer(model).intermediate.intermediate_act_fn = nn.GELU(approximate="tanh")


def relu(model: Any) -> None:
    layer(model).intermediate.intermediate_act_fn = nn.ReLU()


@torch.no_grad()
def transposed(model: Any) -> None:
    weight = layer(model).attention.output.dense.weight
    weight.copy_(weight.T.clone())


@torch.no_grad()
def swapped_query_and_key(model: Any) -> None:
    attention = layer(model).attention.self
    attention.query, attention.key = attention.key, attention.query


@torch.no_grad()
def layer_not_loaded(model: Any) -> None:
    torch.manual_seed(9)
    for module in layer(model).modules():
        if hasattr(module, "reset_parameters") and isinstance(module, (nn.Linear, nn.LayerNorm)):
            module.reset_parameters()


def layer_copied(model: Any) -> None:
    layer(model).load_state_dict(model.bert.encoder.layer[2].state_dict())


@torch.no_grad()
def positions_from_two(model: Any) -> None:
    table = model.bert.embeddings.position_embeddings.weight
    table.copy_(table.roll(-2, 0))


@torch.no_grad()
def heads_in_another_order(model: Any) -> None:
    for name in ("query", "key", "value"):
        linear = getattr(layer(model).attention.self, name)
        for parameter in (linear.weight, linear.bias):
            parameter.copy_(parameter.unflatten(0, (4, 5))[[2, 0, 1, 3]].flatten(0, 1))


@torch.no_grad()
def head_pruned(model: Any) -> None:
    layer(model).attention.self.value.weight[5:10] = 0
    layer(model).attention.self.value.bias[5:10] = 0


@torch.no_grad()
def scale_in_the_weight(model: Any) -> None:
    layer(model).attention.self.query.weight.mul_(math.sqrt(5))


@torch.no_grad()
def bias_missing(model: Any) -> None:
    layer(model).output.dense.bias.zero_()


@torch.no_grad()
def rounded_weights(model: Any) -> None:
    weight = layer(model).intermediate.dense.weight
    weight.copy_(weight.bfloat16().float())


@torch.no_grad()
def other_norm(model: Any) -> None:
    layer(model).output.LayerNorm.load_state_dict(layer(model).attention.output.LayerNorm.state_dict())


STORED = [
    (wrong_eps, f"{LAYER}.attention.output", r"eps: about 1e-05 instead of 1e-12"),
    (wrong_eps_in_the_embeddings, "embeddings", r"eps: about 0.0003 instead of 1e-12"),
    (tanh_gelu, f"{LAYER}.intermediate", r"activation: GELU by tanh instead of gelu"),
    (relu, f"{LAYER}.intermediate", r"activation: ReLU instead of gelu"),
    (transposed, f"{LAYER}.attention.output.dense", r"attention\.output\.dense\.weight is transposed"),
    (swapped_query_and_key, f"{LAYER}.attention.self.query", r"self\.query and .*self\.key are swapped"),
    (layer_not_loaded, f"{LAYER}.attention.self.query", r"weights of encoder\.layer\.1 were not loaded"),
    (layer_copied, f"{LAYER}.attention.self.query", r"encoder\.layer\.1 has the weights of encoder\.layer\.2"),
    (positions_from_two, "embeddings.position_embeddings", r"shifted by -2 rows: position offset"),
    (heads_in_another_order, f"{LAYER}.attention.self.query", r"heads in another order: 2, 0, 1, 3"),
    (head_pruned, f"{LAYER}.attention.self.value", r"differs in head 1 only, which is zero"),
    (scale_in_the_weight, f"{LAYER}.attention.self.query", r"multiplied by 2\.236, the square root of the head size"),
    (bias_missing, f"{LAYER}.output.dense", r"output\.dense\.bias is all zero"),
    (rounded_weights, f"{LAYER}.intermediate.dense", r"is rounded to bfloat16"),
    (other_norm, f"{LAYER}.output", r"output\.LayerNorm\.weight .*attention\.output\.LayerNorm"),
]


def named(faults: list[Any]) -> Any:
    return pytest.mark.parametrize(("fault", "first", "cause"), faults, ids=[fault[0].__name__ for fault in faults])


@named(STORED)
@pytest.mark.parametrize("library", ["minibert", "transformers"])
def test_a_fault_of_what_is_stored(
    library: str, fault: Callable[[Any], None], first: str, cause: str, model: Any, inputs: dict[str, Tensor]
) -> None:
    broken = copy.deepcopy(model) if library == "minibert" else in_transformers(model)
    fault(broken)
    report = compare(broken, model, inputs=inputs)
    assert report.first is not None
    assert report.first.name == first
    assert re.search(cause, report.finding.causes[0]), report.finding


def in_transformers(model: Any, **changes: Any) -> Any:
    fields = fields_of("BertForTokenClassification", **FIELDS, **changes)
    theirs = transformers.BertForTokenClassification(transformers.BertConfig(**fields, attn_implementation="eager"))
    theirs.load_state_dict(model.state_dict())
    return theirs.eval()


# Faults of what is computed, in transformers' model, which computes padding, too.


def attention_of(change: Callable[..., Tensor]) -> Callable[[Any, Any], None]:
    """A fault in one layer's attention: `change(query, key, value, mask, scaling)` gives the context."""

    def plant(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        real, own = modeling_bert.eager_attention_forward, layer(model).attention.self

        def forward(module: Any, q: Any, k: Any, v: Any, mask: Any, scaling: float = 1.0, **options: Any) -> Any:
            if module is not own:
                return real(module, q, k, v, mask, scaling=scaling, **options)
            return change(real, module, q, k, v, mask, scaling)

        monkeypatch.setattr(modeling_bert, "eager_attention_forward", forward)

    return plant


no_scale = attention_of(lambda real, module, q, k, v, mask, scaling: real(module, q, k, v, mask, scaling=1.0))
wrong_scale = attention_of(lambda real, module, q, k, v, mask, scaling: real(module, q, k, v, mask, scaling=20**-0.5))
no_mask = attention_of(lambda real, module, q, k, v, mask, scaling: real(module, q, k, v, None, scaling=scaling))
inverted_mask = attention_of(
    lambda real, module, q, k, v, mask, scaling: real(
        module, q, k, v, torch.where(mask < 0, 0.0, -1e9), scaling=scaling
    )
)
added_mask = attention_of(
    lambda real, module, q, k, v, mask, scaling: real(module, q, k, v, (mask == 0).float(), scaling=scaling)
)
key_for_value = attention_of(lambda real, module, q, k, v, mask, scaling: real(module, q, k, k, mask, scaling=scaling))
keys_ask = attention_of(lambda real, module, q, k, v, mask, scaling: real(module, k, q, v, mask, scaling=scaling))
causal = attention_of(
    lambda real, module, q, k, v, mask, scaling: real(
        module, q, k, v, mask.masked_fill(~torch.ones(7, 7).bool().tril(), -1e9), scaling=scaling
    )
)
query_softmax = attention_of(
    lambda real, module, q, k, v, mask, scaling: (lambda w: ((w @ v).transpose(1, 2).contiguous(), w))(
        (q @ k.transpose(2, 3) * scaling + mask).softmax(2)
    )
)


def head_off(real: Any, module: Any, q: Any, k: Any, v: Any, mask: Any, scaling: float) -> Any:
    context, weights = real(module, q, k, v, mask, scaling=scaling)
    return context.index_fill(2, torch.tensor([3]), 0), weights


def merged_wrongly(real: Any, module: Any, q: Any, k: Any, v: Any, mask: Any, scaling: float) -> Any:
    context, weights = real(module, q, k, v, mask, scaling=scaling)
    return context.transpose(1, 2).contiguous(), weights


def method(path: str, change: Callable[..., Any]) -> Callable[[Any, Any], None]:
    """A fault in the forward of one module: `change(module, real, *arguments)`."""

    def plant(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        module = model.get_submodule(path)
        monkeypatch.setattr(
            module, "forward", lambda *a, f=module.forward, **k: change(module, f, *a, **k), raising=False
        )

    return plant


def norm_before(module: Any, real: Any, x: Any, residual: Any) -> Any:  # noqa: ARG001
    return module.LayerNorm(module.dense(x)) + residual


OUTPUT, EMBEDDINGS = "bert.encoder.layer.1.output", "bert.embeddings"
COMPUTED = {
    "no scale": (no_scale, f"{LAYER}.attention.self.scores", "the scale 1 / sqrt.head size. is missing"),
    "scale of the hidden size": (wrong_scale, f"{LAYER}.attention.self.scores", r"scale: 1 / sqrt.hidden size."),
    "mask ignored": (no_mask, f"{LAYER}.attention.self.scores", "mask: it is ignored"),
    "mask inverted": (inverted_mask, f"{LAYER}.attention.self.scores", "mask: its polarity is inverted"),
    "mask added": (added_mask, f"{LAYER}.attention.self.scores", "mask: its 0 and 1 are added"),
    "causal mask": (causal, f"{LAYER}.attention.self.scores", "mask: it is causal"),
    "keys ask": (keys_ask, f"{LAYER}.attention.self.scores", "swapped query/key"),
    "softmax over queries": (query_softmax, f"{LAYER}.attention.self.scores", "softmax is taken over the queries"),
    "keys averaged": (key_for_value, f"{LAYER}.attention.self.context", "swapped key/value"),
    "head off": (attention_of(head_off), f"{LAYER}.attention.self.context", "head 3 is switched off"),
    "heads merged wrongly": (
        attention_of(merged_wrongly), f"{LAYER}.attention.self.context", "merged without a transposition",
    ),
    "norm before the residual": (method(OUTPUT, norm_before), f"{LAYER}.output", "added behind the normalisation"),
    "no residual": (
        method(OUTPUT, lambda module, real, x, residual: module.LayerNorm(module.dense(x))),
        f"{LAYER}.output", "the residual connection is missing",
    ),
    "no norm": (
        method(OUTPUT, lambda module, real, x, residual: module.dense(x) + residual),
        f"{LAYER}.output", "the residual sum is not normalised|normalisation is missing",
    ),
    "pre-norm": (
        method(
            "bert.encoder.layer.1.attention.self",
            lambda module, real, x, *a, **k: real(F.layer_norm(x, x.shape[-1:]), *a, **k),
        ),
        f"{LAYER}.attention.self.query", "pre-norm: the layer's input is normalised",
    ),
    "token types ignored": (
        method(EMBEDDINGS, lambda module, real, **k: real(**k | {"token_type_ids": None})),
        "embeddings.token_type_embeddings", "token types are ignored: all are taken for 0",
    ),
    "token types inverted": (
        method(EMBEDDINGS, lambda module, real, **k: real(**k | {"token_type_ids": 1 - k["token_type_ids"]})),
        "embeddings.token_type_embeddings", "token types are the other way round",
    ),
    "positions from one": (
        method(EMBEDDINGS, lambda module, real, **k: real(**k | {"position_ids": torch.arange(1, 8)[None]})),
        "embeddings.position_embeddings", "position offset: positions begin at 1 instead of 0",
    ),
    "dropout": (method(OUTPUT, lambda module, real, x, r: F.dropout(real(x, r), 0.1)), f"{LAYER}.output", "dropout"),
    "head sees the token before": (
        method("classifier", lambda module, real, x: real(x.roll(1, 1))), "logits", "the logits of the one before it",
    ),
    "softmax in the head": (
        method("classifier", lambda module, real, x: real(x).softmax(-1)), "logits", "the softmax is taken already",
    ),
}  # fmt: skip


@pytest.mark.parametrize("fault", COMPUTED)
def test_a_fault_of_what_is_computed(
    fault: str, model: Any, inputs: dict[str, Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    broken = in_transformers(model)
    plant, first, cause = COMPUTED[fault]
    plant(broken, monkeypatch)
    report = compare(broken, model, inputs=inputs)
    assert report.first is not None
    assert report.first.name == first
    assert report.finding.causes, report.finding
    assert re.search(cause, report.finding.causes[0]), report.finding


@pytest.mark.parametrize(
    ("fault", "extent"),
    [
        ("mask ignored", "texts: those with padding"),
        ("head off", "heads: 3"),
        ("token types ignored", "token types: 1"),
        ("keys ask", ""),
    ],
)
def test_what_a_difference_is_confined_to(
    fault: str, extent: str, model: Any, inputs: dict[str, Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    broken = in_transformers(model)
    COMPUTED[fault][0](broken, monkeypatch)
    inputs["token_type_ids"] = torch.tensor([[0, 0, 1, 1, 0, 0, 1], [0, 1, 0, 0, 0, 0, 0], [0, 0, 0, 1, 1, 0, 0]])
    assert compare(broken, model, inputs=inputs).finding.extent == extent


@pytest.mark.parametrize(
    "plant", [attention_of(lambda *a: unheard_of(*a)), method(OUTPUT, lambda m, r, *a: r(*a) + 0.5)]
)
def test_a_fault_that_is_not_known_is_not_guessed(
    plant: Any, model: Any, inputs: dict[str, Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    broken = in_transformers(model)
    plant(broken, monkeypatch)
    report = compare(broken, model, inputs=inputs)
    assert report.finding.causes == []
    assert list(report.verdict())[-1].startswith("cause not decided; usual ones here: ")


def unheard_of(real: Any, module: Any, q: Any, k: Any, v: Any, mask: Any, scaling: float) -> Any:
    return real(module, q.sin(), k, v, mask, scaling=scaling)


@pytest.mark.parametrize("library", ["minibert", "transformers"])
def test_without_a_fault_nothing_differs(library: str, model: Any, inputs: dict[str, Tensor]) -> None:
    report = compare(copy.deepcopy(model) if library == "minibert" else in_transformers(model), model, inputs=inputs)
    assert report.first is None
    assert report.finding.causes == []
    assert len(report.rows) == 3 + 1 + 3 * 11 + 2
