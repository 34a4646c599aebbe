"""A model for other runtimes: complete, fused, open in batch and length, and compared before anything is written."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from click.testing import CliRunner
from torch.utils._python_dispatch import TorchDispatchMode

import minibert
from minibert import BertConfig, BertForTokenClassification, CheckpointError, MinibertError, TokenClassifier
from minibert import export as exporting
from minibert.cli import main
from minibert.config import CONFIG_NAME
from minibert.engine.onnx import CRF_NAME, DATA_NAME, INPUTS, ONNX_NAME, OnnxModel
from minibert.export import OPSET, PROGRAM_NAME, batches, check_inputs, count_nodes, export, write_graph
from minibert.hub import DEFAULT_MODEL
from minibert.model.crf import BertCrfForTokenClassification
from minibert.quiet import quiet
from minibert.text.decoding import Entity
from tagger import write_checkpoint

onnx = pytest.importorskip("onnx")
onnxruntime = pytest.importorskip("onnxruntime")
pytest.importorskip("onnxscript")

MICROSOFT = "com.microsoft"
TEXTS = ["张三住在北京。", "我喜欢iphone16", "", "上海医院 2024年", "今天气很好，" * 40]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("checkpoint") / "tagger"
    write_checkpoint(folder)
    return folder


@pytest.fixture(scope="module")
def exported(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("exported") / "onnx"
    export(checkpoint, "onnx", folder)
    return folder


def inputs(batch: int, length: int, segments: int = 2) -> dict[str, Any]:
    random = np.random.default_rng(1)
    mask = np.ones((batch, length), np.int64)
    mask[0, 1 + length // 2 :] = 0
    arrays = (random.integers(0, 120, mask.shape), mask, random.integers(0, segments, mask.shape))
    return dict(zip(INPUTS, arrays, strict=True))


def plain_logits(checkpoint: Path, given: dict[str, Any]) -> Any:
    model = BertForTokenClassification.from_pretrained(checkpoint)
    with torch.no_grad():
        return model(**{name: torch.from_numpy(value) for name, value in given.items()}).logits.numpy()


def files_of(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()} if folder.exists() else set()


# What is written.


def test_the_directory_is_complete(checkpoint: Path, exported: Path) -> None:
    assert files_of(exported) == {ONNX_NAME, CONFIG_NAME, "vocab.txt"}
    assert (exported / "vocab.txt").read_bytes() == (checkpoint / "vocab.txt").read_bytes()
    config = BertConfig.from_pretrained(exported)
    assert config.id2label == BertConfig.from_pretrained(checkpoint).id2label
    assert config.architectures == ["BertForTokenClassification"]


def test_inputs_are_named_and_open_and_the_opset_is_stated(exported: Path) -> None:
    model = onnx.load(exported / ONNX_NAME)
    onnx.checker.check_model(model)
    axes = {i.name: [d.dim_param for d in i.type.tensor_type.shape.dim] for i in model.graph.input}
    assert axes == {name: ["batch", "length"] for name in INPUTS}
    (output,) = model.graph.output
    assert output.name == "logits"
    assert [d.dim_param or d.dim_value for d in output.type.tensor_type.shape.dim] == ["batch", "length", 18]
    assert {opset.domain: opset.version for opset in model.opset_import}[""] == OPSET == 20
    assert "bert.embeddings.word_embeddings.weight" in {tensor.name for tensor in model.graph.initializer}


def test_attention_normalisation_and_gelu_are_single_nodes(exported: Path) -> None:
    nodes = count_nodes(exported / ONNX_NAME)
    layers = 2
    assert nodes[f"{MICROSOFT}.Attention"] == layers
    assert nodes[f"{MICROSOFT}.SkipLayerNormalization"] == 2 * layers
    assert nodes["LayerNormalization"] == 1  # the embeddings'
    assert nodes["Gelu"] == layers
    assert nodes["Gemm"] == 3 * layers + 1  # query, key and value are part of Attention
    assert not nodes.keys() & {"Softmax", "Erf", "Tanh", "Sqrt", "ReduceMean", "Pow", "Transpose", "MatMul", "Dropout"}


def test_as_many_nodes_are_fused_as_by_the_optimizer_of_onnx_runtime(exported: Path, tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    from minibert.bench.peers import Setting, _fused_onnx

    write_checkpoint(tmp_path / "tagger")
    with quiet():
        theirs = count_nodes(_fused_onnx(Setting(tmp_path / "tagger", tmp_path, 1)))
    ours = count_nodes(exported / ONNX_NAME)
    for kind in ("Attention", "LayerNormalization", "Gelu"):
        counts = [sum(count for name, count in nodes.items() if name.endswith(kind)) for nodes in (ours, theirs)]
        assert counts[0] >= counts[1] > 0, kind
    assert sum(ours.values()) < 1.3 * sum(theirs.values()) + 20  # what does not grow with the layers


def test_a_portable_graph_has_standard_operators_only(checkpoint: Path, tmp_path: Path) -> None:
    found = export(checkpoint, "onnx", tmp_path / "portable", portable=True)
    assert max(difference.largest for difference in found) < 1e-4
    assert {node.domain for node in onnx.load(tmp_path / "portable" / ONNX_NAME).graph.node} == {""}


def test_another_runtime_runs_a_portable_graph(checkpoint: Path, tmp_path: Path) -> None:
    openvino = pytest.importorskip("openvino")
    export(checkpoint, "onnx", tmp_path, portable=True)
    compiled = openvino.Core().compile_model(tmp_path / ONNX_NAME, "CPU", {"INFERENCE_PRECISION_HINT": "f32"})
    for shape in [(3, 20), (1, 64)]:
        given = inputs(*shape)
        assert np.abs(compiled(given)["logits"] - plain_logits(checkpoint, given)).max() < 1e-4


@pytest.mark.parametrize("apart", [True, False])
def test_weights_are_in_the_same_file_or_in_one_of_their_own(apart: bool, checkpoint: Path, tmp_path: Path) -> None:
    export(checkpoint, "onnx", tmp_path, external_data=apart)
    assert (DATA_NAME in files_of(tmp_path)) == apart
    given = inputs(3, 20)
    assert np.abs(OnnxModel(tmp_path)(**given)["logits"] - plain_logits(checkpoint, given)).max() < 1e-4


@pytest.mark.parametrize("precision", ["fp32", "int8"])
def test_weights_too_large_for_one_file_have_their_own(
    precision: str, checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(exporting, "ONE_FILE", 10_000)
    export(checkpoint, "onnx", tmp_path, precision=precision, unmeasured=True)
    assert DATA_NAME in files_of(tmp_path)
    assert (tmp_path / DATA_NAME).stat().st_size > 10_000
    with pytest.raises(MinibertError, match=r"one file: [\d,]+ bytes of weights are more than"):
        export(checkpoint, "onnx", tmp_path / "out", precision=precision, unmeasured=True, external_data=False)
    assert not (tmp_path / "out").exists()


def test_an_older_export_goes_and_other_files_stay(checkpoint: Path, tmp_path: Path) -> None:
    export(checkpoint, "onnx", tmp_path, external_data=True)
    (tmp_path / "notes.txt").write_text("mine")
    (tmp_path / "tokenizer.json").write_text("of another model")
    export(checkpoint, "torch", tmp_path)
    assert files_of(tmp_path) == {PROGRAM_NAME, CONFIG_NAME, "vocab.txt", "notes.txt"}


# Shapes.


@pytest.mark.parametrize("shape", [(3, 20), (1, 64), (1, 8), (1, 1), (5, 1), (20, 20)])
def test_any_batch_and_length_match(shape: tuple[int, int], checkpoint: Path, exported: Path) -> None:
    given = inputs(*shape)
    plain = plain_logits(checkpoint, given)
    assert np.abs(OnnxModel(exported)(**given)["logits"] - plain).max() < 1e-4


def test_too_long_an_input_is_an_error_with_both_numbers(exported: Path) -> None:
    with pytest.raises(MinibertError, match="65 tokens is longer than max_position_embeddings 64"):
        OnnxModel(exported)(**inputs(1, 65))
    bare = onnxruntime.InferenceSession(exported / ONNX_NAME)
    with pytest.raises(Exception, match=r"idx=64 must be within the inclusive range \[-64,63\]"):
        bare.run(None, inputs(1, 65))


def test_an_axis_name_that_matches_no_input_is_an_error(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = exporting._open_axes

    def misspelt(config: BertConfig) -> dict[str, Any]:
        axes = real(config)
        return {**axes, "input_idz": axes.pop("input_ids")}

    monkeypatch.setattr(exporting, "_open_axes", misspelt)
    with pytest.raises(MinibertError, match="cannot trace"):
        export(checkpoint, "onnx", tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_baked_shapes_are_refused(checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exporting, "_open_axes", lambda config: None)
    with pytest.raises(MinibertError, match=r"expected the inputs input_ids \(batch, length\).*got input_ids \(2, 7\)"):
        export(checkpoint, "onnx", tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_inputs_of_other_names_are_refused(exported: Path, tmp_path: Path) -> None:
    model = onnx.load(exported / ONNX_NAME)
    model.graph.input[0].name = "ids"
    onnx.save(model, tmp_path / ONNX_NAME)
    with pytest.raises(MinibertError, match=r"got ids \(batch, length\)"):
        check_inputs(tmp_path / ONNX_NAME)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"input_ids": np.full((1, 4), 120)}, "input_ids: expected integers from 0 to 119, got 120"),
        ({"input_ids": np.full((1, 4), 1.5)}, r"input_ids: expected integers from 0 to 119, got 1\.5"),
        ({"input_ids": np.ones(4)}, r"input_ids: expected shape \(batch, sequence\), not empty, got \(4,\)"),
        ({"input_ids": np.ones((0, 4))}, r"not empty, got \(0, 4\)"),
        ({"attention_mask": np.full((1, 4), -10000)}, "attention_mask: expected integers from 0 to 1, got -10000"),
        ({"attention_mask": np.ones((1, 5))}, r"attention_mask: expected shape \(1, 4\).*got \(1, 5\)"),
        ({"token_type_ids": np.full((1, 4), 2)}, "token_type_ids: expected integers from 0 to 1, got 2"),
    ],
)
def test_wrong_inputs_are_refused(changes: dict[str, Any], message: str, exported: Path) -> None:
    with pytest.raises(MinibertError, match=message):
        OnnxModel(exported)(**{"input_ids": np.ones((1, 4), np.int64), **changes})


@pytest.mark.parametrize("dtype", [np.int32, np.bool_, np.float32])
def test_a_mask_of_any_dtype_means_the_same(dtype: Any, checkpoint: Path, exported: Path) -> None:
    given = inputs(2, 9)
    logits = OnnxModel(exported)(**{**given, "attention_mask": given["attention_mask"].astype(dtype)})["logits"]
    assert np.abs(logits - plain_logits(checkpoint, given)).max() < 1e-4


def test_mask_and_token_types_can_be_left_out(checkpoint: Path, exported: Path) -> None:
    given = inputs(2, 9, segments=1)
    given["attention_mask"][:] = 1
    logits = OnnxModel(exported)(given["input_ids"])["logits"]
    assert np.abs(logits - plain_logits(checkpoint, given)).max() < 1e-4


# Comparing.


def test_padded_two_segment_shortest_and_longest_batches_are_tried() -> None:
    config = BertConfig(vocab_size=120, max_position_embeddings=64)
    tried = dict(batches(config))
    assert list(tried) == ["padded", "two segments", "length 1", "maximum length"]
    assert tried["padded"]["attention_mask"].sum(1).tolist() == [20, 6, 0]
    assert set(tried["two segments"]["token_type_ids"][0]) == {0, 1}
    assert tried["length 1"]["input_ids"].shape == (1, 1)
    assert tried["maximum length"]["input_ids"].shape == (2, 64)


def broken(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is exported differs from the plain model by 0.01 in one label."""
    real: Callable[[Any], Any] = exporting.inference_copy

    def changed(model: Any) -> Any:
        copy = real(model)
        bias = copy.classifier.bias.clone()
        bias[3] += 0.01
        copy.classifier.bias = torch.nn.Parameter(bias, requires_grad=False)
        return copy

    monkeypatch.setattr(exporting, "inference_copy", changed)


@pytest.mark.parametrize("target", ["onnx", "torch"])
def test_a_difference_above_the_tolerance_leaves_nothing_and_exits_with_1(
    target: str, checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    broken(monkeypatch)
    arguments = ["export", str(checkpoint), target, "-o", str(tmp_path / "out")]
    result = CliRunner().invoke(main, arguments)
    assert result.exit_code == 1
    assert not (tmp_path / "out").exists()
    rows = [line for line in result.stdout.splitlines() if " logits " in line]
    assert len(rows) == 4  # all are printed
    assert all("1.00e-02" in row and row.endswith("above 0.0001") for row in rows)
    (error,) = result.stderr.splitlines()
    assert error.startswith(
        "Error: the exported model differs from the plain one: logits on padded (3, 20) by 1.00e-02"
    )
    accepted = CliRunner().invoke(main, [*arguments, "--tolerance", "0.1"], catch_exceptions=False)
    assert accepted.exit_code == 0
    assert "above" not in accepted.stdout
    assert "config.json" in files_of(tmp_path / "out")


def test_a_failed_export_leaves_the_older_one_as_it_was(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    export(checkpoint, "onnx", tmp_path)
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    broken(monkeypatch)
    with pytest.raises(MinibertError, match="nothing was written"):
        export(checkpoint, "onnx", tmp_path, external_data=True)
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before


def test_nan_is_above_any_tolerance(tmp_path: Path) -> None:
    model = write_checkpoint(tmp_path / "broken")
    with torch.no_grad():
        model.classifier.bias[0] = float("nan")
    model.save_pretrained(tmp_path / "broken")
    with pytest.raises(MinibertError, match="by nan"):
        export(tmp_path / "broken", "onnx", tmp_path / "out", tolerance=1e9)


def test_the_command_prints_nodes_and_differences(checkpoint: Path, tmp_path: Path) -> None:
    result = CliRunner().invoke(main, ["export", str(checkpoint), "onnx", "-o", str(tmp_path)], catch_exceptions=False)
    first, head, *rows = result.stdout.splitlines()
    assert first.startswith("opset 20: 2 Gelu, 7 Gemm, 1 LayerNormalization, 2 com.microsoft.Attention")
    assert head.split() == ["largest", "mean", "relative"]
    assert [row.split(" (")[0] for row in rows] == [name for name, _ in batches(BertConfig())]
    assert result.stderr == ""


HEADS = {
    "BertModel": ["last_hidden_state", "pooler_output"],
    "BertForMaskedLM": ["logits"],
    "BertForPreTraining": ["prediction_logits", "seq_relationship_logits"],
    "BertForNextSentencePrediction": ["logits"],
    "BertForSequenceClassification": ["logits"],
    "BertForQuestionAnswering": ["start_logits", "end_logits"],
}
SIZES: dict[str, Any] = {
    "vocab_size": 99, "hidden_size": 20, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 33,
    "max_position_embeddings": 24, "type_vocab_size": 3, "hidden_act": "gelu_new", "layer_norm_eps": 0.01,
    "initializer_range": 0.2, "pad_token_id": 5,
}  # fmt: skip


@pytest.mark.parametrize("target", ["onnx", "torch"])
@pytest.mark.parametrize("name", HEADS)
def test_every_head_is_exported_with_all_its_results(name: str, target: str, tmp_path: Path) -> None:
    model = getattr(minibert, name)(BertConfig(**SIZES))
    model.save_pretrained(tmp_path / "model")
    found = export(tmp_path / "model", target, tmp_path / "out")
    assert [difference.result for difference in found] == HEADS[name] * 4
    assert max(difference.largest for difference in found) < 1e-4
    if target == "onnx":
        assert OnnxModel(tmp_path / "out").outputs == HEADS[name]
        with pytest.raises(CheckpointError, match=f"expected the export of a token classifier, got {name}"):
            TokenClassifier.from_pretrained(tmp_path / "out", engine="onnx")


# Attention weights.


def test_weights_of_a_fused_attention_are_an_error_and_of_a_plain_one_are_there(tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "tagger", output_attentions=True, output_hidden_states=True)
    with pytest.raises(MinibertError, match="output_attentions: a fused attention has no weights to give"):
        export(tmp_path / "tagger", "onnx", tmp_path / "out")
    export(tmp_path / "tagger", "onnx", tmp_path / "out", portable=True)
    given = inputs(2, 9)
    results = OnnxModel(tmp_path / "out")(**given)
    assert list(results) == ["logits", *(f"hidden_states.{i}" for i in range(3)), "attentions.0", "attentions.1"]
    for layer in range(2):
        weights = results[f"attentions.{layer}"]
        assert weights.shape == (2, 4, 9, 9)
        sums = weights.sum(-1)
        assert np.abs(sums - given["attention_mask"][:, None]).max() < 1e-5
    write_checkpoint(tmp_path / "plain")
    export(tmp_path / "plain", "onnx", tmp_path / "fused")
    assert np.abs(results["logits"] - OnnxModel(tmp_path / "fused")(**given)["logits"]).max() < 1e-4


# int8.


def labelled(classifier: TokenClassifier, path: Path) -> Path:
    """A file in which the model's own answers are the truth."""
    texts = ["张三住在北京", "李四喜欢上海医院", "今天气很好", "我和张三在北京医院", "四月住院血压混合"]
    tags = classifier.tag_words([list(text) for text in texts])
    lines = [
        "\n".join(f"{c} {tag}" for c, tag in zip(text, of, strict=True)) for text, of in zip(texts, tags, strict=True)
    ]
    path.write_text("\n\n".join(lines) + "\n", encoding="utf-8")
    return path


def test_int8_leaves_embeddings_and_head_in_float(checkpoint: Path, tmp_path: Path) -> None:
    found = export(checkpoint, "onnx", tmp_path, precision="int8", unmeasured=True)
    assert 1e-3 < max(difference.relative for difference in found) < 0.2
    tensors = {tensor.name: tensor for tensor in onnx.load(tmp_path / ONNX_NAME).graph.initializer}
    kinds = {name: onnx.TensorProto.DataType.Name(tensor.data_type) for name, tensor in tensors.items()}
    assert kinds["bert.embeddings.word_embeddings.weight"] == "FLOAT"
    assert kinds["classifier.weight_Transposed"] == "FLOAT"
    rounded = [name for name, kind in kinds.items() if kind == "INT8" and len(tensors[name].dims) == 2]
    assert len(rounded) == 4 * 2  # four products a layer, that of Attention included
    for name in rounded:  # seven bits, so that no processor overflows
        assert np.abs(onnx.numpy_helper.to_array(tensors[name]).astype(int)).max() <= 64
    nodes = count_nodes(tmp_path / ONNX_NAME)
    assert nodes[f"{MICROSOFT}.QAttention"] == 2
    assert nodes["MatMulInteger"] == 6
    assert OnnxModel(tmp_path).engine == "int8 by ONNX Runtime"


def test_int8_wants_labelled_text(checkpoint: Path, tmp_path: Path) -> None:
    with pytest.raises(MinibertError, match=r"int8 changes the entities that are found.*--evaluate FILE"):
        export(checkpoint, "onnx", tmp_path / "out", precision="int8")
    assert not (tmp_path / "out").exists()


def test_f1_is_measured_before_and_after_and_too_deep_a_fall_fails(checkpoint: Path, tmp_path: Path) -> None:
    gold = labelled(TokenClassifier.from_pretrained(checkpoint), tmp_path / "gold.txt")
    arguments = ["export", str(checkpoint), "onnx", "-o", str(tmp_path / "out"), "--precision", "int8"]
    measured = [*arguments, "--evaluate", str(gold)]
    result = CliRunner().invoke(main, [*measured, "--max-drop", "100"], catch_exceptions=False)
    last = result.stdout.splitlines()[-1]
    assert last.startswith("strict F1: plain 100.00, exported ")
    change = float(last.split()[-2])
    assert -100 < change < -1  # else the next lines say nothing
    assert (tmp_path / "out" / ONNX_NAME).is_file()
    (tmp_path / "out").rename(tmp_path / "kept")
    result = CliRunner().invoke(main, measured)
    assert result.exit_code == 1
    assert f"F1 fell by {-change:.2f} points, more than 1 (--max-drop)" in result.stderr
    assert not (tmp_path / "out").exists()


# torch.export.


def test_a_torch_program_runs_without_minibert_and_says_what_is_too_long(checkpoint: Path, tmp_path: Path) -> None:
    export(checkpoint, "torch", tmp_path)
    module = torch.export.load(tmp_path / PROGRAM_NAME).module()
    for shape in [(3, 20), (1, 64), (1, 1), (20, 20)]:
        given = inputs(*shape)
        (logits,) = module(*(torch.from_numpy(given[name]) for name in INPUTS))
        assert np.abs(logits.numpy() - plain_logits(checkpoint, given)).max() < 1e-5
    with pytest.raises(AssertionError, match=r"input_ids.size\(\)\[1\] <= 64"):
        module(*(torch.from_numpy(value) for value in inputs(1, 65).values()))


# Texts to entities.


class NoTorch(TorchDispatchMode):
    """Any operation of PyTorch is an error."""

    def __torch_dispatch__(self, operation: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise AssertionError(f"PyTorch computes {operation}")


@pytest.fixture
def no_torch(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    def refused(*_: object, **__: object) -> None:
        raise AssertionError("PyTorch is asked for something")

    for name in ("from_numpy", "tensor", "inference_mode"):  # which make nothing that a dispatcher sees
        monkeypatch.setattr(torch, name, refused)
    with NoTorch():
        yield


def assert_same(ours: list[list[Entity]], theirs: list[list[Entity]]) -> None:
    assert [[(e.label, e.start, e.end, e.text) for e in found] for found in ours] == [
        [(e.label, e.start, e.end, e.text) for e in found] for found in theirs
    ]
    pairs = [(a.score, b.score) for one, two in zip(ours, theirs, strict=True) for a, b in zip(one, two, strict=True)]
    assert pairs
    assert max(abs(a - b) for a, b in pairs) < 1e-4


@pytest.fixture(scope="module")
def plain_results(checkpoint: Path) -> dict[str, list[list[Entity]]]:
    return {
        decoder: TokenClassifier.from_pretrained(checkpoint, decoder=decoder)(TEXTS)
        for decoder in ("argmax", "viterbi")
    }


@pytest.mark.usefixtures("no_torch")
@pytest.mark.parametrize("decoder", ["argmax", "viterbi"])
def test_the_entities_are_those_of_the_plain_model_and_torch_computes_nothing(
    decoder: str, plain_results: dict[str, list[list[Entity]]], exported: Path
) -> None:
    classifier = TokenClassifier.from_pretrained(exported, engine="onnx", decoder=decoder, threads=1)
    assert_same(classifier(TEXTS), plain_results[decoder])
    assert "18 labels in BIO, 2 layers of 32, fp32 by ONNX Runtime, first" in repr(classifier)


def test_the_fixture_catches_operations_that_only_run_the_model(checkpoint: Path) -> None:
    classifier = TokenClassifier.from_pretrained(checkpoint)
    with NoTorch(), pytest.raises(AssertionError, match="PyTorch computes"):
        classifier(TEXTS)


def test_a_crf_is_exported_and_decodes_the_same(tmp_path: Path, request: pytest.FixtureRequest) -> None:
    tagger = write_checkpoint(tmp_path / "tagger", decoder="crf")
    model = BertCrfForTokenClassification(tagger.config)
    model.load_state_dict(tagger.state_dict(), strict=False)
    with torch.no_grad():
        for parameter in model.crf.parameters():
            parameter.normal_(std=2.0)
    model.save_pretrained(tmp_path / "tagger")
    export(tmp_path / "tagger", "onnx", tmp_path / "out")
    assert CRF_NAME in files_of(tmp_path / "out")
    plain = TokenClassifier.from_pretrained(tmp_path / "tagger")(TEXTS)
    by_argmax = TokenClassifier.from_pretrained(tmp_path / "tagger", decoder="argmax")(TEXTS)
    assert plain != by_argmax  # the CRF matters
    request.getfixturevalue("no_torch")
    classifier = TokenClassifier.from_pretrained(tmp_path / "out", engine="onnx")
    assert classifier.decoder == "crf"
    assert_same(classifier(TEXTS), plain)


def test_the_default_model_is_exported_and_finds_the_same(tmp_path: Path, request: pytest.FixtureRequest) -> None:
    lines = (Path(__file__).parent / "default_model_sentences.txt").read_text(encoding="utf-8").splitlines()
    texts = [line for line in lines if line.strip()][:120]
    export(None, "onnx", tmp_path / "out")
    plain = TokenClassifier.from_pretrained(device="cpu")(texts)
    assert count_nodes(tmp_path / "out" / ONNX_NAME)[f"{MICROSOFT}.Attention"] == 4
    request.getfixturevalue("no_torch")
    assert_same(TokenClassifier.from_pretrained(tmp_path / "out", engine="onnx")(texts), plain)


def test_predict_runs_an_export(tmp_path: Path) -> None:
    export(DEFAULT_MODEL, "onnx", tmp_path)
    text = "王小明毕业于江州大学计算机系，现任恒翔科技有限公司技术总监。"
    arguments = ["predict", "--format", "jsonl", text]
    plain = CliRunner().invoke(main, arguments, catch_exceptions=False)
    ours = CliRunner().invoke(main, [*arguments, "--model", str(tmp_path), "--engine", "onnx"], catch_exceptions=False)
    assert ours.exit_code == 0
    assert "江州大学计算机系" in ours.stdout
    assert ours.stdout == plain.stdout or len(ours.stdout) == len(plain.stdout)  # but for the last digits of scores


# What is refused.


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"engine": "tensorrt"}, "engine: expected torch, onnx, got 'tensorrt'"),
        ({"engine": "onnx", "precision": "int8"}, "runs in the precision of the export, got precision 'int8'"),
        ({"engine": "onnx", "device": "cuda"}, "runs on the CPU, got device cuda"),
        ({"engine": "onnx", "threads": 0}, "threads: expected at least 1, got 0"),
        ({"engine": "onnx", "num_labels": 3}, "an export has no options num_labels"),
        ({"engine": "onnx", "decoder": "crf"}, "the model has no CRF"),
        ({}, r"there is an export to ONNX only: .*engine='onnx' \(--engine onnx\)"),
    ],
)
def test_what_an_export_cannot_do_is_refused(options: dict[str, Any], message: str, exported: Path) -> None:
    with pytest.raises(MinibertError, match=message):
        TokenClassifier.from_pretrained(exported, **options)


def test_a_checkpoint_is_no_export(checkpoint: Path) -> None:
    with pytest.raises(CheckpointError, match=r"no model.onnx: not in the directory .*`minibert export` makes one"):
        TokenClassifier.from_pretrained(checkpoint, engine="onnx")


@pytest.mark.parametrize(("name", "message"), [(ONNX_NAME, "cannot be loaded by ONNX"), (CRF_NAME, "not the CRF of")])
def test_a_damaged_export_is_named(name: str, message: str, exported: Path, tmp_path: Path) -> None:
    for path in exported.iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    (tmp_path / name).write_bytes(b"nothing of the kind")
    with pytest.raises(CheckpointError, match=f"{name}: {message}"):
        TokenClassifier.from_pretrained(tmp_path, engine="onnx")


@pytest.mark.parametrize(
    ("target", "options", "message"),
    [
        ("tflite", {}, "target: expected onnx, torch, got 'tflite'"),
        ("onnx", {"precision": "fp16"}, "precision: expected fp32, int8, got 'fp16'"),
        ("torch", {"precision": "int8"}, "target torch: is written in fp32"),
        ("torch", {"portable": True}, "target torch: is written in fp32"),
        ("torch", {"examples": []}, "F1 is measured with ONNX Runtime"),
        ("onnx", {"dtype": "float16"}, "expected options of hub.Source .* got dtype"),
    ],
)
def test_a_wrong_option_is_refused(
    target: str, options: dict[str, Any], message: str, checkpoint: Path, tmp_path: Path
) -> None:
    with pytest.raises(MinibertError, match=message):
        export(checkpoint, target, tmp_path / "out", **options)
    assert not (tmp_path / "out").exists()


def test_a_directory_with_a_checkpoint_is_not_written_to(checkpoint: Path) -> None:
    before = files_of(checkpoint)
    with pytest.raises(CheckpointError, match=r"expected a directory for the export alone.*model\.safetensors"):
        export(checkpoint, "onnx", checkpoint)
    assert files_of(checkpoint) == before


def test_a_model_without_its_head_is_refused(tmp_path: Path) -> None:
    model = minibert.BertModel(BertConfig(**SIZES))
    model.architecture = "BertForTokenClassification"
    model.save_pretrained(tmp_path / "bare")
    with pytest.raises(CheckpointError, match=r"classifier\.weight.* not in this checkpoint; fine-tune it first"):
        export(tmp_path / "bare", "onnx", tmp_path / "out")


@pytest.mark.parametrize(
    ("architecture", "message"),
    [("BertForMultipleChoice", "cannot be exported; its inputs have a third axis"), ("T5", "got T5")],
)
def test_another_architecture_is_refused(architecture: str, message: str, tmp_path: Path) -> None:
    BertConfig(**SIZES, architectures=[architecture]).save_pretrained(tmp_path)
    with pytest.raises(CheckpointError, match=message):
        export(tmp_path, "onnx", tmp_path / "out")


@pytest.mark.parametrize("name", ["onnx", "onnxscript", "onnxruntime"])
def test_a_package_that_is_not_installed_is_named(
    name: str, checkpoint: Path, exported: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(MinibertError, match=rf"export to ONNX needs {name}: pip install 'minibert\[export\]'"):
        export(checkpoint, "onnx", tmp_path / "out")
    if name == "onnxruntime":
        with pytest.raises(MinibertError, match="engine onnx needs onnxruntime"):
            TokenClassifier.from_pretrained(exported, engine="onnx")


def test_a_file_of_real_weights_is_exported(minilm_dir: Path, tmp_path: Path) -> None:
    found = export(minilm_dir, "onnx", tmp_path)
    assert max(difference.largest for difference in found) < 1e-4
    assert count_nodes(tmp_path / ONNX_NAME)[f"{MICROSOFT}.Attention"] == 6


def test_writing_a_graph_leaves_the_model_as_it_was(checkpoint: Path, tmp_path: Path) -> None:
    model = BertForTokenClassification.from_pretrained(checkpoint)
    before = dict(model.named_modules())
    with quiet():
        write_graph(model, tmp_path / ONNX_NAME)
    check_inputs(tmp_path / ONNX_NAME)
    assert dict(model.named_modules()) == before
    assert model.config.return_dict
