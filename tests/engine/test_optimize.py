"""An optimized model gives the plain model's numbers, and leaves that one as it was."""

from __future__ import annotations

import gc
import subprocess
import sys
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import minibert
from minibert import BertConfig, BertForTokenClassification, BertModel, MinibertError
from minibert.config import ACTIVATION_NAMES
from minibert.engine import kernels, optimize
from minibert.engine.kernels import (
    GELU,
    Int8Linear,
    Kernel,
    OneDnnInt8Linear,
    OneDnnLinear,
    PlainLinear,
    has_vnni,
    kernel_for,
    rounded_to_bytes,
)
from minibert.engine.layers import FastLayer, rounding
from minibert.model.crf import BertCrfForTokenClassification

SIZES: dict[str, Any] = {
    "vocab_size": 101, "hidden_size": 40, "num_hidden_layers": 3, "num_attention_heads": 5, "intermediate_size": 72,
    "max_position_embeddings": 50, "initializer_range": 0.3,
}  # fmt: skip
HEADS = (
    "BertModel", "BertForTokenClassification", "BertForMaskedLM", "BertForPreTraining",
    "BertForNextSentencePrediction", "BertForSequenceClassification", "BertForQuestionAnswering",
)  # fmt: skip


@pytest.fixture(autouse=True)
def _probe_anew() -> Iterator[None]:
    kernel_for.cache_clear()
    yield
    kernel_for.cache_clear()


def batch() -> dict[str, Tensor]:
    input_ids = torch.randint(1, 101, (4, 13))
    mask = torch.ones(4, 13, dtype=torch.long)
    mask[1, 9:] = mask[2, 1:] = mask[3, :] = 0
    return {"input_ids": input_ids, "attention_mask": mask, "token_type_ids": torch.randint(0, 2, (4, 13))}


def same(ours: Any, plain: Any) -> None:
    assert ours.keys() == plain.keys()
    for name in plain.keys():  # noqa: SIM118
        torch.testing.assert_close(ours[name], plain[name], rtol=0, atol=1e-5, msg=name)


@pytest.mark.parametrize("head", HEADS)
def test_float32_numbers_are_the_plain_models_in_every_head(head: str) -> None:
    plain = getattr(minibert, head)(BertConfig(**SIZES)).eval()
    inputs = batch()
    with torch.no_grad():
        same(optimize(plain)(**inputs), plain(**inputs))


@pytest.mark.parametrize("name", ACTIVATION_NAMES)
def test_every_activation(name: str) -> None:
    plain = BertModel(BertConfig(**SIZES, hidden_act=name)).eval()
    inputs = batch()
    with torch.no_grad():
        same(optimize(plain)(**inputs), plain(**inputs))


@pytest.mark.parametrize(
    "inputs",
    [
        {},
        {"attention_mask": torch.rand(2, 13, 13) > 0.3},
        {"attention_mask": torch.randn(2, 5, 13, 13)},
        {"output_attentions": True, "output_hidden_states": True},
        {"position_ids": torch.arange(13).flip(0)},
    ],
    ids=["plain", "who-attends-to-whom", "added-to-the-scores", "all-states", "positions"],
)
def test_every_kind_of_input(inputs: dict[str, Any]) -> None:
    plain = BertModel(BertConfig(**SIZES, layer_norm_eps=1e-3)).eval()
    ids = torch.randint(1, 101, (2, 13))
    fast = optimize(plain)
    with torch.no_grad():
        ours, theirs = fast(ids, **inputs), plain(ids, **inputs)
        torch.testing.assert_close(ours.to_tuple(), theirs.to_tuple(), rtol=0, atol=1e-5)
        lengths = torch.tensor([4, 9])
        row = {"input_ids": ids[:1], "sequence_lengths": lengths}
        same(fast(**row), plain(**row))


def test_a_model_with_a_crf_and_one_in_eager_attention() -> None:
    plain = BertCrfForTokenClassification(BertConfig(**SIZES, num_labels=7)).eval()
    plain.set_attn_implementation("eager")
    inputs = batch() | {"labels": torch.randint(0, 7, (4, 13))}
    fast = optimize(plain)
    assert fast.bert.encoder.layer[0].attention.self.attn_implementation == "eager"
    with torch.no_grad():
        same(fast(**inputs), plain(**inputs))


def test_the_plain_model_stays_as_it_was_and_can_be_let_go() -> None:
    plain = BertForTokenClassification(BertConfig(**SIZES)).train()
    names = [name for name, _ in plain.named_parameters()]
    inputs = batch()
    plain.eval()
    before = plain(**inputs).logits.detach()
    plain.train()
    fast = optimize(plain)
    assert plain.training
    assert not fast.training
    assert [name for name, parameter in plain.named_parameters() if parameter.requires_grad] == names
    plain.eval()
    assert torch.equal(plain(**inputs).logits, before)
    assert not fast(**inputs).logits.requires_grad
    # Embeddings and head are shared, the layers' weights are not held on to.
    assert fast.classifier.weight.data_ptr() == plain.classifier.weight.data_ptr()
    weight = weakref.ref(plain.bert.encoder.layer[0].output.dense.weight)
    del plain
    gc.collect()
    assert weight() is None


def test_int8_is_close_smaller_and_the_same_each_time() -> None:
    plain = BertForTokenClassification(BertConfig(**{**SIZES, "initializer_range": 0.1}, num_labels=7)).eval()
    fast = optimize(plain, "int8")
    inputs = batch()
    with torch.no_grad():
        ours, theirs = fast(**inputs).logits, plain(**inputs).logits
        assert torch.equal(ours, fast(**inputs).logits)
    assert 0 < (ours - theirs).abs().max() < 0.1 * theirs.abs().max()
    layers = [module for module in fast.modules() if isinstance(module, Kernel)]
    assert len(layers) == 4 * 3
    assert {type(layer) for layer in layers} == {kernel_for("int8")}
    assert {type(module) for module in (fast.classifier, fast.bert.embeddings.word_embeddings)} == {
        nn.Linear,
        nn.Embedding,
    }


@pytest.mark.parametrize(
    ("tokens", "wanted"),
    [(1, 8), (8, 8), (9, 8), (255, 8), (511, 8), (512, 16), (1023, 16), (1024, 32), (3662, 64), (4096, 128)],
)
def test_rows_are_rounded_to_few_different_numbers(tokens: int, wanted: int) -> None:
    assert rounding(tokens) == wanted
    assert -tokens % rounding(tokens) < max(8, tokens / 31)


@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
@pytest.mark.parametrize("lengths", [[13, 9, 1, 0], [13, 13, 13, 13], [3, 0, 0, 0], [0, 0, 0, 0], [8, 0, 0, 0], [13]])
def test_rounding_changes_no_number(lengths: list[int], implementation: str, monkeypatch: pytest.MonkeyPatch) -> None:
    plain = BertForTokenClassification(BertConfig(**SIZES)).eval()
    plain.set_attn_implementation(implementation)
    fast = optimize(plain)
    rows: list[int] = []
    forward = FastLayer.forward

    def counted(self: FastLayer, hidden_states: Tensor, *rest: Any) -> Any:
        rows.append(len(hidden_states))
        return forward(self, hidden_states, *rest)

    monkeypatch.setattr(FastLayer, "forward", counted)
    ids = torch.randint(1, 101, (len(lengths), 13))
    mask = (torch.arange(13) < torch.tensor(lengths)[:, None]).long()
    with torch.no_grad():
        same(fast(ids, attention_mask=mask), plain(ids, attention_mask=mask))
    tokens = sum(lengths)
    rounded = tokens + -tokens % 8
    assert set(rows) == {tokens if rounded > 2 * tokens else rounded}


def test_the_int8_kernel_is_the_one_for_the_processor(monkeypatch: pytest.MonkeyPatch) -> None:
    assert kernel_for("int8") is (OneDnnInt8Linear if has_vnni() else Int8Linear)
    kernel_for.cache_clear()
    monkeypatch.setattr(kernels, "has_vnni", lambda: False)
    assert kernel_for("int8") is Int8Linear


@pytest.mark.skipif(not has_vnni(), reason="the processor has no VNNI")
@pytest.mark.parametrize("rows", [1, 3, 40])
def test_both_int8_kernels_compute_the_same(rows: int) -> None:
    torch.manual_seed(0)
    x, residual, weight, bias = torch.randn(rows, 96), torch.randn(rows, 33), torch.randn(33, 96), torch.randn(33)
    for given in ((weight, bias), (weight, None), (weight, bias, GELU)):
        ours, theirs = OneDnnInt8Linear(*given), Int8Linear(*given)
        # Both round the weights alike; the other's inputs may fall on the neighbouring byte.
        torch.testing.assert_close(ours(x), theirs(x), rtol=0, atol=0.15)
        if len(given) == 2:
            torch.testing.assert_close(ours.add(x, residual), ours(x) + residual, rtol=0, atol=1e-5)
    assert OneDnnInt8Linear(weight, bias)(x[:0]).shape == (0, 33)


@pytest.mark.parametrize("shift", [-3.0, 0.0, 3.0])
def test_inputs_are_rounded_to_the_nearest_of_256_steps(shift: float) -> None:
    torch.manual_seed(0)
    x = torch.randn(5, 7) + shift
    rounded, scale, zero = rounded_to_bytes(x)
    assert rounded.dtype == torch.uint8
    assert rounded.shape == x.shape
    assert ((rounded.float() - zero) * scale - x).abs().max() <= scale / 2 * 1.001
    assert {int(rounded.min()), int(rounded.max())} & {0, 255}
    assert rounded_to_bytes(torch.zeros(2, 3))[0].float().sub(rounded_to_bytes(torch.zeros(2, 3))[2]).eq(0).all()
    with pytest.raises(MinibertError, match="int8: the hidden states hold NaN or infinity"):
        rounded_to_bytes(torch.tensor([[1.0, float("nan")]]))


def test_nothing_is_warned_of() -> None:
    code = "import torch; from minibert import BertConfig, BertModel, optimize; " + (
        f"optimize(BertModel(BertConfig(**{SIZES})), 'int8')(torch.ones(2, 3, dtype=torch.long))"
    )
    told = subprocess.run([sys.executable, "-W", "error", "-c", code], capture_output=True, text=True, check=False)
    assert (told.returncode, told.stderr) == (0, "")


def test_int8_does_not_overflow_where_products_are_summed_in_pairs() -> None:
    # The largest inputs by the largest weights, all of one sign: 8 bits by 8 bits, twice, is more than 16 bits hold.
    x, weight = torch.full((3, 256), 1.0), torch.full((16, 256), 1.0)
    product = Int8Linear(weight, None)(x)
    torch.testing.assert_close(product, torch.full((3, 16), 256.0), rtol=0.02, atol=0)


def test_what_runs_it_is_said_and_a_missing_or_wrong_operator_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    model = BertModel(BertConfig(**SIZES))
    assert model.engine is None
    assert optimize(model).engine == f"fp32 by {OneDnnLinear.name}"
    right = OneDnnLinear.forward

    def missing(*_: object) -> Tensor:
        raise RuntimeError("no such operator")

    for broken in (missing, lambda self, x: right(self, x) * 1.001):
        kernel_for.cache_clear()
        monkeypatch.setattr(OneDnnLinear, "forward", broken)
        assert kernel_for("fp32") is PlainLinear
        assert optimize(model).engine == "fp32 by PyTorch"
    kernel_for.cache_clear()
    monkeypatch.setitem(kernels.KERNELS, "int8", ())
    with pytest.raises(MinibertError, match="precision int8: PyTorch has no kernel for it on this processor"):
        optimize(model, "int8")


def test_what_cannot_be_is_refused(tmp_path: Path) -> None:
    model = BertModel(BertConfig(**SIZES))
    fast = optimize(model)
    for precision, message in (("fp8", "expected fp32, int8, bf16, fp16, got 'fp8'"), ("bf16", "bf16 is for a GPU")):
        with pytest.raises(MinibertError, match=message):
            optimize(model, precision)
    with pytest.raises(MinibertError, match="expected at least 1, got 0"):
        optimize(model, threads=0)
    with pytest.raises(MinibertError, match="optimized already"):
        optimize(fast)
    with pytest.raises(MinibertError, match="expected a model in float32, got torch"):
        optimize(BertModel(BertConfig(**SIZES)).half())
    for refused, what in (
        (fast.train, "trained"),
        (lambda: fast.save_pretrained(tmp_path / "model"), "saved"),
        (fast.half, "moved or converted"),
        (lambda: fast.to("meta"), "moved or converted"),
        (fast.double, "moved or converted"),
    ):
        with pytest.raises(MinibertError, match=f"an optimized model .* cannot be {what}; take the one it was made"):
            refused()
    assert fast.to("cpu").float() is fast
    assert fast.dtype == torch.float32
    assert not (tmp_path / "model").exists()
    assert fast.eval() is fast


def test_threads_are_set(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []
    monkeypatch.setattr(torch, "set_num_threads", asked.append)
    optimize(BertModel(BertConfig(**SIZES)), threads=3)
    assert asked == [3]


@pytest.mark.parametrize("vnni", [True, False])
def test_int8_inputs_have_seven_bits_where_the_processor_has_no_vnni(
    vnni: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kernels, "has_vnni", lambda: vnni)
    assert Int8Linear(torch.ones(4, 8), None).reduce_range is not vnni


@pytest.mark.parametrize("layout", ["no padding", "padded", "holes", "one row", "who attends to whom"])
@pytest.mark.parametrize("given", ["nothing", "types", "positions", "both"])
def test_embeddings_of_every_layout(layout: str, given: str) -> None:
    plain = BertModel(BertConfig(**SIZES, pad_token_id=0)).eval()
    fast = optimize(plain)
    torch.manual_seed(0)
    inputs: dict[str, Any] = {"input_ids": torch.randint(1, 101, (1 if layout == "one row" else 3, 13))}
    if layout in ("padded", "holes"):
        inputs["attention_mask"] = torch.arange(13) < torch.tensor([[13], [4], [9]])
        inputs["attention_mask"][:, 2] &= layout == "padded"
    elif layout == "one row":
        inputs["sequence_lengths"] = torch.tensor([4, 9])
    elif layout == "who attends to whom":
        inputs["attention_mask"] = torch.rand(3, 13, 13) > 0.3
    if given in ("types", "both"):
        inputs["token_type_ids"] = torch.randint(0, 2, inputs["input_ids"].shape)
    if given in ("positions", "both"):
        inputs["position_ids"] = torch.randint(0, 50, (13,))
    with torch.no_grad():
        same(fast(**inputs), plain(**inputs))


def test_tables_that_nobody_asked_for_are_not_read(monkeypatch: pytest.MonkeyPatch) -> None:
    fast = optimize(BertModel(BertConfig(**SIZES)))
    tables: list[Tensor] = []
    embedding = torch.nn.functional.embedding

    def counted(ids: Tensor, table: Tensor, *rest: Any) -> Tensor:
        tables.append(table)
        return embedding(ids, table, *rest)

    monkeypatch.setattr(torch.nn.functional, "embedding", counted)
    fast(torch.randint(1, 101, (2, 13)))
    assert [len(table) for table in tables] == [101]  # the words'


@pytest.mark.parametrize(
    "name", ["embeddings", "embeddings.LayerNorm", "encoder.layer.1.attention", "encoder.layer.1.attention.self",
             "encoder.layer.1.attention.output", "encoder.layer.1.intermediate", "encoder.layer.1.output"]
)  # fmt: skip
def test_who_listens_to_a_part_hears_it(name: str) -> None:
    plain = BertModel(BertConfig(**SIZES)).eval()
    fast = optimize(plain)
    heard = []
    for model in (plain, fast):
        module = model.get_submodule(name)
        module.register_forward_hook(lambda _, __, result: heard.append(result))
    ids = torch.randint(1, 101, (2, 12))
    with torch.no_grad():
        same(fast(ids), plain(ids))
        result, right = (x[0] if isinstance(x, tuple) else x for x in heard)
        assert (result - right).abs().max() < 1e-5


def test_single_texts_of_all_lengths_take_little_memory() -> None:
    """oneDNN keeps what it makes for every number of rows."""
    code = (
        "import random, torch; from minibert import BertConfig, BertModel, optimize\n"
        "model = optimize(BertModel(BertConfig(vocab_size=99, num_hidden_layers=1)))\n"
        "def held(): return int(open('/proc/self/statm').read().split()[1]) * 4096 / 1e6\n"
        "lengths = random.Random(0).sample(range(257, 385), 128)\n"
        "for length in (384, 264): model(torch.ones(1, length, dtype=torch.long))\n"
        "before = held()\n"
        "for length in lengths: model(torch.ones(1, length, dtype=torch.long))\n"
        "print(held() - before)\n"
    )
    told = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert float(told.stdout) < 200  # megabytes; without rounding 400


@pytest.mark.parametrize(
    ("ids", "message"),
    [
        (torch.full((1, 3), 101), "input_ids: id 101 lies outside the 101 rows"),
        (torch.full((1, 3), -1), "input_ids: id -1 lies outside"),
        (torch.ones(1, 51, dtype=torch.long), "input of 51 tokens is longer than max_position_embeddings 50"),
        (torch.ones(1, 3), "input_ids: expected integers, got torch.float32"),
    ],
)
def test_what_the_plain_model_refuses_is_refused(ids: Tensor, message: str) -> None:
    plain = BertModel(BertConfig(**SIZES, pad_token_id=None))
    for model in (plain, optimize(plain)):
        with pytest.raises(MinibertError, match=message):
            model(ids)
    assert optimize(plain)(torch.ones(1, 3, dtype=torch.int32)).last_hidden_state.shape == (1, 3, 40)
