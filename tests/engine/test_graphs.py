"""CUDA graphs: on a CPU by a stand-in that runs the layers again, and with tensors of a GPU that hold no numbers."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import pairwise
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.attention import varlen

from minibert import BertConfig, BertForTokenClassification, BertModel, MinibertError, engine, optimize
from minibert.engine import graphs
from minibert.engine.graphs import GRAPHS, LARGEST, Graph, GraphedEncoder, Layers, Shape, boundaries_of, shape_of
from minibert.engine.kernels import PlainLinear
from minibert.model import attention
from minibert.model.attention import MultiHeadAttention
from minibert.model.packing import Packing
from varlen_kernel import StandIn, stand_in

KERNEL = varlen.varlen_attn
SIZES: dict[str, Any] = {
    "vocab_size": 99, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 40,
    "max_position_embeddings": 60, "num_labels": 5, "initializer_range": 0.3,
}  # fmt: skip


class Again:
    """In place of a recorder: a launch runs the layers again, on the tensors that the graph has, and on no others."""

    made: list[Graph]

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.made = []

    def __call__(self, layers: Layers, hidden_states: Tensor, boundaries: Tensor) -> Graph:
        assert not hidden_states.is_inference()
        assert not boundaries.is_inference()
        result = torch.empty_like(hidden_states)

        def launch() -> None:
            result.copy_(layers(hidden_states, boundaries))

        self.made.append(Graph(launch, hidden_states, boundaries, result))
        return self.made[-1]


@pytest.fixture(autouse=True)
def kernel(monkeypatch: pytest.MonkeyPatch) -> StandIn:
    monkeypatch.setattr(graphs, "Recorder", Again)
    return stand_in(monkeypatch)


@pytest.fixture
def plain() -> BertForTokenClassification:
    torch.manual_seed(0)
    return BertForTokenClassification(BertConfig(**SIZES)).eval()


def with_graphs(plain: BertForTokenClassification) -> tuple[BertForTokenClassification, GraphedEncoder]:
    fast = engine.inference_copy(plain)
    fast.set_attn_implementation("varlen")
    engine._replace_layers(fast, PlainLinear, GraphedEncoder)
    encoder = fast.bert.encoder
    assert isinstance(encoder, GraphedEncoder)
    return fast, encoder


def batch(lengths: list[int], seed: int = 0) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    mask = (torch.arange(max(lengths)) < torch.tensor(lengths)[:, None]).long()
    return {"input_ids": torch.randint(1, 99, mask.shape, generator=generator) * mask, "attention_mask": mask}


def made(encoder: GraphedEncoder) -> list[Graph]:
    recorder = encoder._recorder
    return recorder.made if isinstance(recorder, Again) else []


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_one_graph_serves_all_batches_of_its_shape(mode: Callable[[], Any], plain: BertForTokenClassification) -> None:
    fast, encoder = with_graphs(plain)
    batches = [
        batch(lengths, seed) for seed, lengths in enumerate([[9, 5], [3, 12, 1], [13], [16], [7, 8, 0], [1, 13]])
    ]
    with mode():
        results = [[fast(**of).logits for of in batches] for _ in range(3)]
        for of, *ours in zip(batches, *results, strict=True):
            for logits in ours:  # kept while other launches wrote where they came from
                assert (logits - plain(**of).logits).abs().max() < 1e-5
    assert len(made(encoder)) == len(encoder._graphs) < len(batches)


def test_a_result_is_kept_when_the_next_is_written(plain: BertForTokenClassification) -> None:
    fast, encoder = with_graphs(plain)
    batches = [batch([8, 8], seed)["input_ids"] for seed in range(4)]
    with torch.no_grad():
        ours, right = ([model.bert(ids).last_hidden_state for ids in batches] for model in (fast, plain))
    assert len(made(encoder)) == 1
    torch.testing.assert_close(ours, right, rtol=0, atol=1e-5)


def test_what_was_recorded_in_inference_mode_runs_outside_of_it(plain: BertForTokenClassification) -> None:
    fast, encoder = with_graphs(plain)
    of = batch([9, 5])
    with torch.inference_mode():
        fast(**of)
        fast(**of)
    assert len(made(encoder)) == 1
    assert (fast(**of).logits - plain(**of).logits).abs().max() < 1e-5


def test_a_graph_is_recorded_at_the_second_meeting_and_then_used(
    kernel: StandIn, plain: BertForTokenClassification
) -> None:
    fast, encoder = with_graphs(plain)
    of = batch([9, 5])
    calls = []
    for _ in range(4):
        fast(**of)
        calls.append(len(made(encoder)))
    assert calls == [0, 1, 1, 1]
    assert [ends for ends, _ in kernel.calls] == [[0, 9, 14]] * 2 + [[0, 9, 14, 16, 16]] * 6  # the first without


@pytest.mark.parametrize(
    "inputs",
    [
        {"output_attentions": True},
        {"output_hidden_states": True},
        {"attention_mask": torch.ones(1, 16, 16, dtype=torch.bool)},
        {"input_ids": None, "inputs_embeds": torch.randn(1, 16, 32, requires_grad=True)},
        {"input_ids": torch.zeros(1, 0, dtype=torch.long), "attention_mask": None},
        {"input_ids": torch.ones(60, LARGEST // 60 + 1, dtype=torch.long), "attention_mask": None},
    ],
    ids=["weights", "states", "who-attends-to-whom", "gradients", "nothing", "a-large-batch"],
)
def test_what_a_graph_cannot_do_goes_the_usual_way(inputs: dict[str, Any], plain: BertForTokenClassification) -> None:
    fast, encoder = with_graphs(plain)
    given_inputs = batch([16]) | inputs
    for _ in range(3):
        ours, theirs = fast(**given_inputs), plain(**given_inputs)
        torch.testing.assert_close(ours.to_tuple(), theirs.to_tuple(), rtol=0, atol=1e-5)
    assert not encoder._graphs


def test_who_listens_to_the_layers_or_changes_them_is_heard(
    plain: BertForTokenClassification, monkeypatch: pytest.MonkeyPatch
) -> None:
    fast, encoder = with_graphs(plain)
    of = batch([9, 5])
    heard: list[nn.Module] = []
    monkeypatch.setattr(attention, "VARLEN_DTYPES", (torch.float32, torch.bfloat16))  # of autocast

    @contextmanager
    def other_attention() -> Iterator[None]:
        fast.set_attn_implementation("eager")
        yield
        fast.set_attn_implementation("varlen")

    @contextmanager
    def hook() -> Iterator[None]:
        handle = encoder.layer[1].attention.register_forward_hook(lambda module, *_: heard.append(module))
        yield
        handle.remove()

    for change in (hook, other_attention, lambda: torch.autocast("cpu", torch.bfloat16)):
        with change():
            for _ in range(3):
                fast(**of)
        assert not encoder._graphs
    assert len(heard) == 3
    fast(**of)
    assert len(encoder._graphs) == 1


def test_where_recording_fails_the_layers_run_without(
    plain: BertForTokenClassification,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    def fails(device: torch.device) -> Again:
        raise RuntimeError(f"no streams on {device}")

    monkeypatch.setattr(graphs, "Recorder", fails)
    fast, encoder = with_graphs(plain)
    of = batch([9, 5])
    with caplog.at_level(logging.WARNING, "minibert"):
        for _ in range(4):
            assert (fast(**of).logits - plain(**of).logits).abs().max() < 1e-5
    assert caplog.messages == ["CUDA graphs are left out, small batches take longer: no streams on cpu"]
    assert not encoder._graphs


def test_graphs_that_were_used_last_are_kept(plain: BertForTokenClassification) -> None:
    encoder = with_graphs(plain)[1]

    def run(count: int) -> None:
        encoder(torch.randn(count, 32), Packing(1, count, [1] * count))

    for _ in range(2):
        run(10)
    kept = shape_of([1] * 10)
    sizes = sorted({shape_of([1] * count).tokens for count in range(1, LARGEST + 1)})
    others = [shape for tokens in sizes for n in (1, 3, 8, 20) if (shape := shape_of([tokens - n] + [1] * n)) != kept]
    for shape in dict.fromkeys(others[: GRAPHS + 5]):
        run(10)
        encoder._by_graph(torch.randn(shape.tokens, 32), Packing(1, shape.tokens, _lengths_for(shape)))
    assert len(encoder._graphs) == GRAPHS
    assert len(made(encoder)) == 1  # once
    assert isinstance(encoder._graphs[kept], Graph)


def _lengths_for(shape: Shape) -> list[int]:
    count = shape.sequences // 2
    return [shape.tokens - count + 1] + [1] * (count - 1)


def test_threads_take_turns(plain: BertForTokenClassification) -> None:
    fast, _ = with_graphs(plain)
    batches = [batch([9, 5], seed) for seed in range(4)]
    right = [plain(**of).logits.detach() for of in batches]
    worst = []

    def work(number: int) -> None:
        for _ in range(30):
            worst.append((fast(**batches[number]).logits - right[number]).abs().max().item())

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(worst) == 120
    assert max(worst) < 1e-5


@given(st.lists(st.integers(1, 300), min_size=1, max_size=40).filter(lambda lengths: sum(lengths) <= LARGEST))
def test_shapes_are_few_and_have_room(lengths: list[int]) -> None:
    tokens, shape = sum(lengths), shape_of(lengths)
    assert tokens <= shape.tokens <= max(16 * -(-tokens // 16), 1.25 * tokens)
    boundaries = boundaries_of(lengths, shape)
    assert boundaries.dtype == torch.int32
    assert len(boundaries) == shape.sequences + 1
    ends = boundaries.tolist()
    found = [end - start for start, end in pairwise(ends)]
    assert found[: len(lengths)] == lengths
    assert sum(found) == shape.tokens
    assert min(found) >= 0
    assert max(found) <= shape.longest
    assert shape.sequences & (shape.sequences - 1) == shape.longest & (shape.longest - 1) == 0


def test_single_texts_have_few_shapes() -> None:
    assert len({shape_of([length]) for length in range(1, 513)}) < GRAPHS / 2


class Counted(FakeTensorMode):
    """In it tensors have shape, dtype and device, and no numbers; it keeps the names of the operations."""

    def __init__(self) -> None:
        super().__init__(allow_non_fake_inputs=True)
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        device = (kwargs or {}).get("device")
        is_moved = device is not None and args and isinstance(args[0], Tensor) and device != args[0].device
        self.names.append("moved" if is_moved else func.name())
        return super().__torch_dispatch__(func, types, args, kwargs)


def on_a_gpu(
    precision: str, monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int] = (9, 0), **sizes: Any
) -> BertModel:
    """A model on a GPU, within a FakeTensorMode, whose tensors have shape, dtype and device, and no numbers."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: 0)
    monkeypatch.setattr(torch.cuda, "default_stream", lambda device: 0)
    model = BertModel(BertConfig(**SIZES | sizes), add_pooling_layer=False)

    def moved(model: BertModel, dtype: torch.dtype) -> BertModel:
        for module in model.modules():
            for name, parameter in list(module.named_parameters(recurse=False)):
                tensor = torch.empty(parameter.shape, dtype=dtype, device="cuda")
                setattr(module, name, nn.Parameter(tensor, requires_grad=False))
        return model

    monkeypatch.setattr(BertModel, "to", moved)  # PyTorch's own would ask for a GPU
    return optimize(model.to(torch.float32), precision)


@pytest.mark.parametrize(("precision", "dtype"), [("bf16", torch.bfloat16), ("fp16", torch.float16)])
def test_layers_can_be_recorded_with_the_kernel_itself(
    precision: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module, name, value in (
        (varlen, "varlen_attn", KERNEL),
        (attention, "VARLEN_DEVICE", "cuda"),
        (attention, "VARLEN_DTYPES", (dtype,)),
        (graphs, "Recorder", lambda device: lambda layers, *given: layers(*given)),
    ):
        monkeypatch.setattr(module, name, value)
    with Counted() as counted, torch.inference_mode():
        fast = on_a_gpu(precision, monkeypatch)
        assert fast.engine == f"{precision} by PyTorch, varlen attention, CUDA graphs"
        encoder = fast.encoder
        assert isinstance(encoder, GraphedEncoder)
        tokens = torch.empty(21, 32, dtype=dtype, device="cuda")
        counted.names.clear()
        result = encoder._record(Shape(24, 4, 8), tokens)
    assert isinstance(result, Tensor)
    assert (result.shape, result.dtype, result.device.type) == ((24, 32), dtype, "cuda")
    assert counted.names.count("torch_attn::_varlen_attn") == 2
    # A graph can neither read a number nor touch the CPU's memory: the one copy is that of the boundaries, before.
    assert counted.names.count("moved") == 1
    names = counted.names[counted.names.index("moved") + 1 :]
    assert not [name for name in names if name == "aten::copy_" or "_local_scalar" in name]
    assert names.count("aten::addmm") == 2 * 4
    assert "aten::cat" not in names  # of weights: nothing is done to them at every call


@pytest.mark.parametrize(("capability", "heads"), [((7, 5), 4), ((9, 0), 8)])
def test_where_there_is_no_such_kernel_sdpa_is_taken(
    capability: tuple[int, int], heads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Counted():
        fast = on_a_gpu("bf16", monkeypatch, capability, num_attention_heads=heads)
    assert fast.engine == "bf16 by PyTorch, sdpa attention"
    assert not isinstance(fast.encoder, GraphedEncoder)
    assert {module.attn_implementation for module in fast.modules() if isinstance(module, MultiHeadAttention)} == {
        "sdpa"
    }
    assert fast.dtype == torch.bfloat16


def test_float32_on_a_gpu_is_float32(monkeypatch: pytest.MonkeyPatch) -> None:
    with Counted():
        fast = on_a_gpu("fp32", monkeypatch)
    assert fast.engine == "fp32 by PyTorch"
    kernels = [module for module in fast.modules() if isinstance(module, PlainLinear)]
    assert {kernel.weight.dtype for kernel in kernels} == {fast.dtype} == {torch.float32}
    assert len(kernels) == 4 * 2


def test_int8_is_not_for_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    with (
        FakeTensorMode(),
        pytest.raises(MinibertError, match="precision int8 is for a CPU; on a GPU take bf16 or fp16"),
    ):
        on_a_gpu("int8", monkeypatch)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_graphs_on_a_gpu_give_the_numbers_of_the_layers(precision: str) -> None:
    torch.manual_seed(0)
    plain = BertForTokenClassification(BertConfig(**SIZES)).eval().cuda()
    fast = optimize(plain, precision)
    encoder = fast.bert.encoder
    assert isinstance(encoder, GraphedEncoder)
    batches = [
        {name: x.cuda() for name, x in batch(lengths).items()} for lengths in ([9, 5], [3, 12, 1], [13], [40, 7])
    ]
    with torch.inference_mode():
        first = [fast(**of).logits for of in batches]
        later = [[fast(**of).logits for of in batches] for _ in range(3)]
        right = [plain(**of).logits for of in batches]
    assert any(encoder._graphs.values())
    for results in later:
        for ours, alone, exact in zip(results, first, right, strict=True):
            assert (ours - alone).abs().max() < 0.02
            assert (ours.float() - exact).abs().max() < 0.1
