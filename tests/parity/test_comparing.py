"""What a comparison takes, what it reports, and that it sees a difference."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import nn

import minibert
from minibert import DataError, MinibertError
from minibert.model import attention
from minibert.model.attention import eager_attention
from minibert.parity import Names, compare
from minibert.parity.differences import Bound, Difference
from own_bert import MAPPING, Bert
from tagger import write_checkpoint

OWN = Path(__file__).parent.parent / "own_bert.py"
CLASSES = {
    "BertModel": ["last_hidden_state", "pooler_output"],
    "BertForTokenClassification": ["logits", "loss"],
    "BertForMaskedLM": ["logits", "loss"],
    "BertForPreTraining": ["prediction_logits", "seq_relationship_logits", "loss"],
    "BertForNextSentencePrediction": ["logits", "loss"],
    "BertForSequenceClassification": ["logits", "loss"],
    "BertForMultipleChoice": ["logits", "loss"],
    "BertForQuestionAnswering": ["start_logits", "end_logits", "loss"],
}
LAYER_POINTS = [
    "attention.self.query", "attention.self.key", "attention.self.value", "attention.self.scores",
    "attention.self.context", "attention.output.dense", "attention.output", "intermediate.dense", "intermediate",
    "output.dense", "output",
]  # fmt: skip
ENCODER = [f"embeddings.{name}" for name in ("word_embeddings", "token_type_embeddings", "position_embeddings")]
ENCODER += ["embeddings", *(f"encoder.layer.{i}.{name}" for i in range(2) for name in LAYER_POINTS)]


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    write_checkpoint(tmp_path)
    return tmp_path


def write_head(folder: Path, name: str, **fields: Any) -> None:
    write_checkpoint(folder)
    config = minibert.BertConfig.from_pretrained(folder, **fields)
    torch.manual_seed(0)
    model = getattr(minibert, name)(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.05)
    model.save_pretrained(folder)


@pytest.mark.parametrize("name", CLASSES)
def test_every_module_output_loss_and_gradient_of_every_head_is_compared(name: str, tmp_path: Path) -> None:
    write_head(tmp_path, name, num_labels=2)
    report = compare(tmp_path, grad=True)
    names = [
        row.name for row in report.rows if not row.name.startswith(("pooler", "cls.")) or row.name in CLASSES[name]
    ]
    assert names == ENCODER + CLASSES[name]
    assert report.is_within, report.first
    parameters = getattr(minibert, name).from_pretrained(tmp_path).named_parameters()
    assert {row.name for row in report.gradients} == {own.removeprefix("bert.") for own, _ in parameters}
    assert all(row.own is not None and row.allowed > 0 for row in report.rows)
    assert max(row.largest for row in report.rows) < 5e-5


@pytest.mark.parametrize("problem", ["multi_label_classification", "regression", None])
def test_the_kinds_of_sequence_classification(problem: str | None, tmp_path: Path) -> None:
    write_head(tmp_path, "BertForSequenceClassification", num_labels=1 if problem is None else 3, problem_type=problem)
    report = compare(tmp_path)
    assert report.rows[-1].name == "loss"
    assert report.is_within


def test_sdpa_has_no_scores_but_all_else(checkpoint: Path) -> None:
    eager = {row.name for row in compare(checkpoint).rows}
    fused = {row.name for row in compare(checkpoint, attn_implementation="sdpa").rows}
    assert eager - fused == {f"encoder.layer.{i}.attention.self.scores" for i in range(2)}


def test_a_head_that_is_not_in_the_file_is_the_same_in_both(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    model = write_checkpoint(tmp_path)
    model.bert.save_pretrained(tmp_path)  # no pooler in it
    report = compare(tmp_path)
    assert report.is_within
    assert report.rows[-1].name == "pooler_output"
    assert (
        "not in the checkpoint, so random, and the same in both: pooler.dense.weight, pooler.dense.bias" in caplog.text
    )


def test_a_foreign_architecture_means_the_encoder(checkpoint: Path, caplog: pytest.LogCaptureFixture) -> None:
    config = (checkpoint / "config.json").read_text(encoding="utf-8")
    for replacement in ('"BertCrfTagger"', '"BertConfig"', ""):
        (checkpoint / "config.json").write_text(config.replace('"BertForTokenClassification"', replacement))
        names = [row.name for row in compare(checkpoint).rows]
        assert names == [*ENCODER, "pooler", "last_hidden_state", "pooler_output"]
    assert "the head of BertCrfTagger is not compared" in caplog.text


def test_a_broken_attention_is_seen_in_the_layer_where_it_acts(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    swapped = lambda q, k, *rest: eager_attention(k, q, *rest)  # noqa: E731
    monkeypatch.setitem(attention.ATTENTION_FUNCTIONS, "eager", swapped)
    report = compare(checkpoint)
    assert report.first is not None
    assert report.first.name == "encoder.layer.0.attention.self.scores"
    assert "swapped query/key" in report.finding.causes[0]


def test_without_transformers_it_says_what_to_install(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(MinibertError, match=r"pip install 'minibert\[train\]'"):
        compare(checkpoint)
    assert compare(checkpoint, "minibert").is_within  # which does not need it


def test_without_a_tokenizer_random_ids_are_compared(checkpoint: Path, caplog: pytest.LogCaptureFixture) -> None:
    (checkpoint / "vocab.txt").unlink()
    report = compare(checkpoint)
    assert report.is_within
    assert report.num_texts == 4
    assert "random ids are compared instead of texts" in caplog.text


# Precisions and engines.


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_half_precision_is_judged_by_the_reference_s_own_error(dtype: str, checkpoint: Path) -> None:
    report = compare(checkpoint, dtype=dtype, grad=True)
    assert report.is_within, report.first
    assert report.dtype in ("bfloat16", "float16")
    eps = torch.finfo(getattr(torch, report.dtype)).eps
    for row in report.rows:
        assert row.own is not None
        assert row.allowed == 2 * row.own + (1 if row.count >= 256 else 10) * eps * row.scale
    assert max(row.largest for row in report.rows) > 1e-3  # far above what float32 may do
    strict = compare(checkpoint, dtype=dtype, tolerance=2e-5)
    assert not strict.is_within


def test_a_fault_is_seen_in_half_precision(checkpoint: Path) -> None:
    model = minibert.BertForTokenClassification.from_pretrained(checkpoint)
    model.bert.encoder.layer[1].intermediate.intermediate_act_fn = nn.Identity()
    report = compare(model, checkpoint, dtype="bf16", inputs=ids())
    assert report.first is not None
    assert report.first.name == "encoder.layer.1.intermediate"
    assert report.finding.causes == ["activation: none instead of gelu"]
    assert model.dtype == torch.float32  # as it was


def test_float64_leaves_next_to_nothing(checkpoint: Path) -> None:
    report = compare(checkpoint, dtype="fp64")
    assert report.is_within
    assert max(row.largest for row in report.rows) < 1e-12


def test_two_precisions_of_one_model(checkpoint: Path) -> None:
    report = compare(checkpoint, "minibert", dtype="bf16")
    assert report.is_within
    assert [row.largest for row in report.rows] == [row.own for row in report.rows]  # the same twice


def test_an_engine_is_compared_where_it_has_modules(checkpoint: Path) -> None:
    report = compare(checkpoint, "minibert", engine="fp32")
    names = [row.name for row in report.rows]
    assert report.is_within, report.first
    assert "encoder.layer.1.attention.self.value" in names  # a third of one product
    assert "encoder.layer.1.output" in names
    assert "encoder.layer.1.output.dense" not in names  # part of another kernel
    rounded = compare(checkpoint, "minibert", engine="int8")
    assert rounded.is_within
    assert max(row.largest for row in rounded.rows) > 1e-4
    with pytest.raises(MinibertError, match="an engine has no gradients"):
        compare(checkpoint, engine="fp32", grad=True)


def test_an_optimized_model_as_a_module(checkpoint: Path) -> None:
    model = minibert.BertForTokenClassification.from_pretrained(checkpoint)
    report = compare(minibert.optimize(model), model, inputs=ids())
    assert report.is_within
    assert report.candidate.startswith("minibert.BertForTokenClassification, fp32 by ")


def test_two_checkpoints(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    other = tmp_path_factory.mktemp("other")
    write_checkpoint(other, layer_norm_eps=1e-3, hidden_act="gelu_new")
    report = compare(other, checkpoint)
    assert report.first is not None
    assert report.first.name == "embeddings"
    assert report.finding.causes == ["eps: about 0.001 instead of 1e-12"]
    assert report.notes == [
        "config: hidden_act is 'gelu_new' in the candidate, 'gelu' in the reference",
        "config: layer_norm_eps is 0.001 in the candidate, 1e-12 in the reference",
    ]


def test_checkpoints_of_different_sizes_differ_in_shape(checkpoint: Path, tmp_path_factory: Any) -> None:
    other = tmp_path_factory.mktemp("other")
    write_checkpoint(other, num_attention_heads=8)
    report = compare(other, checkpoint)
    assert report.first is not None
    assert report.first.name == "encoder.layer.0.attention.self.scores"
    assert re.fullmatch(r"\(\d+, 8, \d+\) instead of \(\d+, 4, \d+\)", report.first.shapes)
    assert report.finding.causes == ["8 attention heads instead of 4"]


# Gradients.


def test_a_fault_of_the_gradient_alone(checkpoint: Path) -> None:
    model = minibert.BertForTokenClassification.from_pretrained(checkpoint)
    reference = minibert.BertForTokenClassification.from_pretrained(checkpoint)
    key = model.bert.encoder.layer[0].output.dense
    key.weight.register_hook(lambda gradient: gradient * 3)
    report = compare(model, reference, grad=True, inputs=ids())
    assert all(row.is_within for row in report.rows)
    assert report.first is not None
    assert report.first.name == "encoder.layer.0.output.dense.weight"
    assert report.finding.causes == ["it is 3 times the reference's"]
    assert next(report.verdict()).startswith(
        "first gradient outside its tolerance: encoder.layer.0.output.dense.weight"
    )
    assert all(parameter.grad is None for parameter in model.parameters())


# Models of one's own.


def ids() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    mask = torch.arange(7) < torch.tensor([7, 3, 5])[:, None]
    found = {"input_ids": torch.randint(5, 60, (3, 7), generator=generator), "attention_mask": mask.long()}
    found["token_type_ids"] = torch.randint(0, 2, (3, 7), generator=generator)
    return {name: x * mask for name, x in found.items()}


@pytest.mark.parametrize(
    ("fault", "first", "cause"),
    [
        ("", None, ""),
        ("scale", "attention.self.scores", "the scale 1 / sqrt.head size. is missing"),
        ("mask", "attention.self.scores", "mask: it is ignored"),
        ("residual", "attention.output", "the residual connection is missing"),
        ("gelu", "output.dense", "activation: GELU by tanh instead of gelu"),  # which is no module there
    ],
)
def test_a_model_of_one_s_own_by_a_mapping(fault: str, first: str | None, cause: str, checkpoint: Path) -> None:
    reference = minibert.BertForTokenClassification.from_pretrained(checkpoint)
    names = Names(MAPPING)
    model = Bert(reference.config)
    state = {name.removeprefix("bert."): x for name, x in reference.state_dict().items()}
    model.load_state_dict({own: torch.cat([state[n] for n in names.ours(own)]) for own in model.state_dict()})
    model.blocks[1].fault = fault
    report = compare(model, checkpoint, mapping=names, grad=not fault)
    if first is None:
        assert report.is_within, report.first
        assert {row.name for row in report.gradients} == set(state)  # also thirds of one matrix
        assert "encoder.layer.0.attention.self.key" in {row.name for row in report.rows}
    else:
        assert report.first is not None
        assert report.first.name == f"encoder.layer.1.{first}"
        assert re.search(cause, report.finding.causes[0]), report.finding


@pytest.mark.parametrize("suffix", ["json", "toml"])
def test_a_file_and_a_mapping_file(suffix: str, checkpoint: Path) -> None:
    path = checkpoint / f"names.{suffix}"
    lines = [f"{json.dumps(own)} = {json.dumps(ours)}" for own, ours in MAPPING.items()]
    path.write_text(json.dumps(MAPPING) if suffix == "json" else "\n".join(["[modules]", *lines]), encoding="utf-8")
    names = Names.from_file(path)
    for against in (None, "transformers"):
        assert compare(checkpoint, against, module=f"{OWN}:Bert", mapping=names).is_within
    report = compare(checkpoint, module=f"{OWN}:build", mapping=names)
    assert report.first is not None
    assert report.first.name == "encoder.layer.1.attention.output.dense"
    assert report.finding.causes == ["encoder.layer.1.attention.output.dense.weight is transposed"]


def test_what_follows_in_place_does_not_change_what_was_recorded(checkpoint: Path) -> None:
    model = minibert.BertForTokenClassification.from_pretrained(checkpoint)
    half = model.bert.encoder.layer[0].output
    half.forward = lambda x, residual: half.LayerNorm(half.dense(x).add_(residual))
    assert compare(model, checkpoint).is_within


def test_lower_precision_within_a_model_is_told_from_a_fault(checkpoint: Path) -> None:
    model = minibert.BertForTokenClassification.from_pretrained(checkpoint)
    half, real = model.bert.encoder.layer[1].output, model.bert.encoder.layer[1].output.forward

    def rounded(x: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return real(x, residual)

    half.forward = rounded
    report = compare(model, checkpoint)
    assert report.first is not None
    assert report.first.name == "encoder.layer.1.output.dense"
    assert report.finding.causes == ["rounding: in float64 both agree; something is computed in a lower precision"]


def test_a_model_with_float32_written_into_it(checkpoint: Path) -> None:
    model = minibert.BertForTokenClassification.from_pretrained(checkpoint)
    embeddings = model.bert.embeddings
    real = embeddings.forward
    embeddings.forward = lambda *arguments, **named: real(*arguments, **named).float()
    model.bert.encoder.layer[1].intermediate.intermediate_act_fn = nn.ReLU()
    reference = minibert.BertForTokenClassification.from_pretrained(checkpoint)
    for pair in ((model, reference), (reference, model)):  # as the candidate, and as the reference
        report = compare(*pair, inputs=ids())
        assert report.first is not None
        assert report.first.name == "encoder.layer.1.intermediate"
    assert compare(model, reference, inputs=ids()).finding.causes[0] == "activation: ReLU instead of gelu"


def test_a_config_that_asks_for_tuples(checkpoint: Path) -> None:
    config = json.loads((checkpoint / "config.json").read_text(encoding="utf-8"))
    (checkpoint / "config.json").write_text(json.dumps({**config, "return_dict": False}), encoding="utf-8")
    report = compare(checkpoint)
    assert report.is_within
    assert [row.name for row in report.rows][-2:] == ["logits", "loss"]


def test_a_model_is_left_as_it_was(checkpoint: Path) -> None:
    model = minibert.BertForTokenClassification.from_pretrained(checkpoint).train()
    before = {name: (x.data_ptr(), x.dtype) for name, x in model.named_parameters()}
    gradient = model.classifier.bias.grad = torch.ones(18)
    compare(model, checkpoint, grad=True, dtype="bf16")
    assert {name: (x.data_ptr(), x.dtype) for name, x in model.named_parameters()} == before
    assert model.training
    assert model.classifier.bias.grad is gradient
    assert not any(module._forward_hooks for module in model.modules())


def test_many_texts_go_through_in_batches(checkpoint: Path) -> None:
    texts = [f"今天{'很' * (index % 7)}好" for index in range(40)]
    report = compare(checkpoint, texts=texts, grad=True)
    assert report.is_within, report.first
    assert report.num_texts == 41
    model = minibert.BertForTokenClassification.from_pretrained(checkpoint)
    once = iter([1.0])
    model.classifier.bias.register_hook(lambda gradient: gradient + next(once, 0.0))  # in the first batch only
    report = compare(model, checkpoint, texts=texts, grad=True)
    assert report.first is not None
    assert (report.first.name, round(report.first.largest, 4)) == ("classifier.bias", 1.0)


def test_a_module_with_the_same_state_dict_needs_no_mapping(checkpoint: Path) -> None:
    theirs = transformers.BertForTokenClassification.from_pretrained(checkpoint)
    assert compare(theirs, checkpoint).is_within


@pytest.mark.parametrize(
    ("mapping", "message"),
    [
        ({**MAPPING, "blocks.{i}.qvk": "encoder"}, r"no module 'blocks.\{i\}.qvk'"),
        ({**MAPPING, "out": "clasifier"}, r"'clasifier' is no name of ours \(the nearest is 'classifier'\)"),
    ],
)
def test_a_mapping_with_names_that_are_nowhere_is_refused(mapping: Any, message: str, checkpoint: Path) -> None:
    model = Bert(minibert.BertConfig.from_pretrained(checkpoint))
    with pytest.raises(DataError, match=message):
        compare(model, checkpoint, mapping=Names(mapping))


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("[", "cannot be read as json"),
        ("[1]", "expected module names"),
        ('{"a": 5}', "expected module names .* got 'a'"),
    ],
)
def test_a_mapping_file_that_is_none(content: str, message: str, tmp_path: Path) -> None:
    (tmp_path / "names.json").write_text(content, encoding="utf-8")
    with pytest.raises(DataError, match=message):
        Names.from_file(tmp_path / "names.json")


@pytest.mark.parametrize(
    ("module", "message"),
    [
        ("nowhere.py:Bert", "expected FILE.py:NAME .* got nowhere.py:Bert"),
        (f"{OWN}:Nothing", "expected a class or a function 'Nothing'"),
        (f"{OWN}:number", "expected a torch.nn.Module, got int"),
        (f"{OWN}:Block", "no qkv.weight in the checkpoint"),
    ],
)
def test_a_module_that_is_none(module: str, message: str, checkpoint: Path) -> None:
    with pytest.raises(MinibertError, match=message):
        compare(checkpoint, module=module)


def test_options_that_do_not_go_together(checkpoint: Path) -> None:
    model = Bert(minibert.BertConfig.from_pretrained(checkpoint))
    for arguments, options, message in (
        ((model,), {}, "a module is compared with a checkpoint or with another module"),
        ((model, checkpoint), {"engine": "int8"}, "they are for a checkpoint"),
        ((checkpoint,), {"mapping": Names(MAPPING)}, "give module=FILE.py:NAME, too"),
        ((checkpoint,), {"module": f"{OWN}:Bert", "engine": "int8"}, "engine: it is for minibert's models"),
        ((checkpoint,), {"dtype": "fp8"}, "dtype: expected fp32, fp64, bf16, fp16, got fp8"),
        ((checkpoint,), {"inputs": {"attention_mask": torch.ones(1, 2)}}, "expected input_ids"),
        ((checkpoint,), {"texts": ["", " "]}, "at least one that is not empty"),
        ((nn.Linear(2, 2), checkpoint), {}, r"expected forward\(input_ids, attention_mask, token_type_ids\)"),
    ):
        with pytest.raises(MinibertError, match=message):
            compare(*arguments, **options)


# Figures.


def test_the_figures_of_a_difference() -> None:
    row = Difference("x", 0)
    row.add(torch.tensor([1.0, 2.0]), torch.tensor([1.0, 4.0]))
    row.add(torch.tensor([3.0]), torch.tensor([0.0]), batch=1)
    assert (row.largest, row.worst_batch, row.scale) == (3.0, 1, 4.0)
    assert row.mean == 5 / 3
    assert row.relative == pytest.approx((13 / 17) ** 0.5)
    assert row.cosine == pytest.approx(9 / (17 * 14) ** 0.5)
    Bound(torch.float32, 0.5).allow(row)
    assert row.allowed == 2.0
    assert not row.is_within


def test_a_small_error_everywhere_is_outside_by_its_norm_and_one_that_is_alone_by_its_size() -> None:
    reference = torch.tensor([1.0, -1.0]).repeat(500)
    for candidate, said in (
        (reference * (1 + 5e-6), "relative above 3.1"),
        (reference + (torch.arange(1000) == 500) * 2e-5, "above 6.19"),
        (reference * (1 + 2e-6), ""),
    ):
        row = Difference("x", 0)
        row.add(candidate, reference)
        row.add_own(reference.double() * (1 + 5e-7), reference)
        Bound(torch.float32).allow(row)
        assert row.excess.startswith(said)
        assert row.is_within == (not said), row


def test_no_number_is_never_within() -> None:
    row = Difference("x", 0)
    row.add(torch.tensor([float("nan"), 0.0]), torch.zeros(2))
    Bound(torch.float32, 1e9).allow(row)
    assert not row.is_within
    assert row.figures()["largest"] is None  # JSON has no NaN


def test_the_report_as_lines_json_and_page(checkpoint: Path) -> None:
    model = minibert.BertForTokenClassification.from_pretrained(checkpoint)
    model.bert.encoder.layer[1].output.LayerNorm.eps = 0.5
    report = compare(model, checkpoint)
    lines = list(report.lines())
    assert lines[0] == "candidate  minibert.BertForTokenClassification, float32"
    assert sum("above" in line for line in lines) == 3  # from there on
    assert lines[-1] == "cause: eps: about 0.5 instead of 1e-12"
    facts = json.loads(report.to_json())
    assert (facts["within"], facts["first"]) == (False, "encoder.layer.1.output")
    assert facts["causes"] == ["eps: about 0.5 instead of 1e-12"]
    assert [row["name"] for row in facts["modules"]] == [row.name for row in report.rows]
    assert set(facts["modules"][0]) >= {"largest", "mean", "relative", "cosine", "allowed", "within", "depth"}
    report.write_page(checkpoint / "page.html")
    page = (checkpoint / "page.html").read_text(encoding="utf-8")
    assert page.count("<circle") == len(report.rows)
    assert page.count('<tr class="above">') == 3
    assert "<title>encoder.layer.1.output: " in page
    assert all(name in page for name in (">emb.</text>", ">layer 0</text>", ">layer 1</text>", ">head</text>"))
    assert "http" not in page  # nothing beside it


def test_a_model_that_was_trained_and_went_to_transformers_and_back(
    checkpoint: Path, tmp_path_factory: Any
) -> None:  # H05
    model = minibert.BertForTokenClassification.from_pretrained(checkpoint).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for _step in range(2):
        model(**ids(), labels=ids()["input_ids"] % 18).loss.backward()
        optimizer.step()
    there, back = tmp_path_factory.mktemp("there"), tmp_path_factory.mktemp("back")
    model.save_pretrained(there)
    assert compare(there, "transformers").is_within
    transformers.BertForTokenClassification.from_pretrained(there).save_pretrained(back)
    report = compare(model, back, inputs=ids())
    assert max(row.largest for row in report.rows) == 0
    minibert.BertForTokenClassification.from_pretrained(back).save_pretrained(back)
    assert (back / "model.safetensors").read_bytes() == (there / "model.safetensors").read_bytes()
