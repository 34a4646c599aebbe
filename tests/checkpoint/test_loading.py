"""A checkpoint loads with exactly its numbers or is refused: names, shapes, heads, dtypes, files."""

from __future__ import annotations

import gc
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor

import minibert.hub
from minibert import BertConfig, CheckpointError
from reference import HEADS, batch, fields_of, largest_difference, pair

TAGGER = "BertForTokenClassification"
Change = Callable[[dict[str, Tensor]], dict[str, Tensor]]


def write(directory: Path, head: str = TAGGER, change: Change = dict, **fields: Any) -> dict[str, Tensor]:
    """A checkpoint as transformers writes it, its tensors passed through `change`; returns those before."""
    directory.mkdir(parents=True, exist_ok=True)
    _, theirs = pair(head, **fields)
    theirs.save_pretrained(directory)
    state = load_file(directory / "model.safetensors")
    save_file(
        {k: v.contiguous() for k, v in change(dict(state)).items()}, directory / "model.safetensors", {"format": "pt"}
    )
    return state


def renamed(old: str, new: str) -> Change:
    return lambda state: {name.replace(old, new): tensor for name, tensor in state.items()}


def load(directory: Path, head: str = TAGGER, **options: Any) -> Any:
    return getattr(minibert, head).from_pretrained(directory, **options)


@pytest.mark.parametrize("head", HEADS)
def test_what_transformers_saves_loads_bit_for_bit(head: str, tmp_path: Path) -> None:
    state = write(tmp_path, head)
    model, report = load(tmp_path, head, output_loading_info=True)
    assert not model.training
    assert report == {"missing_keys": [], "unexpected_keys": [], "mismatched_keys": [], "renamed_keys": {}}
    loaded = model.state_dict()
    assert all(torch.equal(loaded[name], tensor) for name, tensor in state.items())
    reference = getattr(transformers, head).from_pretrained(tmp_path, dtype=torch.float32).eval()
    inputs = batch(head, (7, 3, 5))
    with torch.no_grad():
        ours, theirs = model(**inputs), reference(**inputs)
    key = next(name for name in theirs if name != "loss")
    assert largest_difference(ours[key], theirs[key], inputs["attention_mask"]) < 1e-5


def layer_norms_as_gamma_and_beta(state: dict[str, Tensor]) -> dict[str, Tensor]:
    names = {"LayerNorm.weight": "LayerNorm.gamma", "LayerNorm.bias": "LayerNorm.beta"}
    for new, old in names.items():
        state = renamed(new, old)(state)
    return state


@pytest.mark.parametrize(
    "change",
    [
        layer_norms_as_gamma_and_beta,
        renamed("bert.", ""),
        lambda state: layer_norms_as_gamma_and_beta(renamed("bert.", "")(state)),
        lambda state: state | {"bert.embeddings.position_ids": torch.arange(24)[None]},
        lambda state: state | {"bert.embeddings.position_ids": torch.arange(512)[None]},
        lambda state: (
            state | {"cls.seq_relationship.weight": torch.zeros(2, 20), "cls.predictions.bias": torch.zeros(99)}
        ),
        lambda state: state | {"bert.pooler.dense.weight": torch.zeros(20, 20)},
    ],
    ids=["gamma and beta", "no prefix", "neither", "position_ids", "long position_ids", "other heads", "pooler"],
)
def test_the_hubs_spellings_give_the_same_numbers(change: Change, tmp_path: Path) -> None:
    write(tmp_path / "plain")
    (tmp_path / "changed").mkdir()
    plain = load_file(tmp_path / "plain" / "model.safetensors")
    save_file(change(dict(plain)), tmp_path / "changed" / "model.safetensors")
    (tmp_path / "changed" / "config.json").write_bytes((tmp_path / "plain" / "config.json").read_bytes())
    expected, (model, report) = load(tmp_path / "plain"), load(tmp_path / "changed", output_loading_info=True)
    for name, tensor in expected.state_dict().items():
        assert torch.equal(model.state_dict()[name], tensor), name
    assert report["missing_keys"] == report["mismatched_keys"] == []
    inputs = batch(TAGGER, (7, 3, 5))
    assert torch.equal(model(**inputs).logits, expected(**inputs).logits)


def test_gamma_and_beta_are_renamed_in_layer_norms_only(tmp_path: Path) -> None:
    write(tmp_path, change=lambda state: state | {"bert.encoder.gamma": torch.zeros(1)})
    with pytest.raises(CheckpointError, match=r"unexpected \(1\): bert.encoder.gamma"):
        load(tmp_path)


def test_two_names_for_one_tensor_are_refused(tmp_path: Path) -> None:
    def both(state: dict[str, Tensor]) -> dict[str, Tensor]:
        return state | {"bert.embeddings.LayerNorm.gamma": torch.zeros(20)}

    write(tmp_path, change=both)
    with pytest.raises(CheckpointError, match=r"are both bert\.embeddings\.LayerNorm\.weight"):
        load(tmp_path)


# Heads.


@pytest.mark.parametrize("head", [h for h in HEADS if h != "BertModel"])
def test_a_head_that_is_not_in_the_file_starts_anew_and_is_named(
    head: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    state = write(tmp_path, "BertModel")
    model, report = load(tmp_path, head, output_loading_info=True, num_labels=fields_of(head)["num_labels"])
    assert caplog.text == ""
    assert report["missing_keys"]
    assert all(name.split(".")[0] in ("cls", "classifier", "qa_outputs") for name in report["missing_keys"])
    loaded = model.state_dict()
    for name, tensor in state.items():
        if f"bert.{name}" in loaded:
            assert torch.equal(loaded[f"bert.{name}"], tensor)
    for name in report["missing_keys"]:
        if name.endswith("bias"):
            assert loaded[name].abs().max() == 0
        elif "LayerNorm" not in name:
            assert loaded[name].std().item() == pytest.approx(0.2, rel=0.4), name  # initializer_range
    assert all(not p.is_meta for p in model.parameters())
    load(tmp_path, head, num_labels=fields_of(head)["num_labels"])
    assert report["missing_keys"][0] in caplog.text


def test_a_missing_pooler_is_a_missing_head(tmp_path: Path) -> None:
    write(tmp_path, TAGGER)
    model, report = load(tmp_path, "BertModel", output_loading_info=True)
    assert report["missing_keys"] == ["pooler.dense.weight", "pooler.dense.bias"]
    assert report["unexpected_keys"] == ["classifier.bias", "classifier.weight"]
    assert model.pooler.dense.bias.abs().max() == 0


def test_a_stray_tensor_in_the_models_own_head_is_an_error(tmp_path: Path) -> None:
    write(tmp_path, change=lambda state: state | {"classifier.scale": torch.ones(1)})
    with pytest.raises(CheckpointError, match=r"unexpected \(1\): classifier\.scale"):
        load(tmp_path)


def test_other_heads_are_left_out_behind_a_wrapper_too(tmp_path: Path) -> None:
    write(tmp_path, "BertForMaskedLM", lambda state: {f"module.{name}": t for name, t in state.items()})
    _, report = load(tmp_path, output_loading_info=True)
    assert all(name.startswith("module.cls.") for name in report["unexpected_keys"])


def test_half_a_head_is_an_error(tmp_path: Path) -> None:
    write(tmp_path, change=lambda state: {name: t for name, t in state.items() if name != "classifier.bias"})
    with pytest.raises(CheckpointError, match=r"missing \(1\): classifier\.bias"):
        load(tmp_path)


def test_a_head_of_another_size_is_refused_with_both_shapes_or_started_anew(tmp_path: Path) -> None:
    state = write(tmp_path, num_labels=9)
    with pytest.raises(CheckpointError) as caught:
        load(tmp_path, num_labels=18)
    text = str(caught.value)
    assert "classifier.weight ([9, 20] in the file, [18, 20] in the model)" in text
    assert "ignore_mismatched_sizes=True" in text
    model, report = load(tmp_path, num_labels=18, ignore_mismatched_sizes=True, output_loading_info=True)
    assert sorted(report["mismatched_keys"]) == ["classifier.bias", "classifier.weight"]
    assert report["missing_keys"] == []
    assert model.classifier.weight.shape == (18, 20)
    name = "bert.encoder.layer.2.output.dense.weight"
    assert torch.equal(model.state_dict()[name], state[name])
    assert load(tmp_path).config.num_labels == 9  # one's own directory needs no label argument


# The encoder must be whole.


@pytest.mark.parametrize("head", ["BertModel", TAGGER])
def test_a_missing_encoder_tensor_is_an_error_in_every_mode(head: str, tmp_path: Path) -> None:
    gone = "encoder.layer.1.attention.self.key.weight"
    write(tmp_path, head, lambda state: {name: t for name, t in state.items() if not name.endswith(gone)})
    for options in ({}, {"ignore_mismatched_sizes": True}):
        with pytest.raises(CheckpointError, match=rf"missing \(1\): (bert\.)?{gone}"):
            load(tmp_path, head, **options)


def test_an_encoder_tensor_of_another_shape_is_an_error_in_every_mode(tmp_path: Path) -> None:
    write(tmp_path)
    for options in ({}, {"ignore_mismatched_sizes": True}):
        with pytest.raises(CheckpointError, match=r"word_embeddings\.weight \(\[99, 20\] in the file, \[100, 20\]"):
            load(tmp_path, vocab_size=100, **options)


def test_layers_beyond_the_config_are_an_error(tmp_path: Path) -> None:
    write(tmp_path)
    with pytest.raises(CheckpointError, match=r"unexpected \(16\): bert\.encoder\.layer\.2"):
        load(tmp_path, num_hidden_layers=2)


def test_missing_unexpected_and_misshaped_come_in_one_error(tmp_path: Path) -> None:
    def spoil(state: dict[str, Tensor]) -> dict[str, Tensor]:
        del state["bert.embeddings.token_type_embeddings.weight"]
        state["classifier.weight"] = torch.zeros(9, 20)
        return state | {"lstm.weight_ih_l0": torch.zeros(3, 3)}

    write(tmp_path, change=spoil)
    with pytest.raises(CheckpointError) as caught:
        load(tmp_path)
    text = str(caught.value)
    assert str(tmp_path / "model.safetensors") in text
    assert "missing (1): bert.embeddings.token_type_embeddings.weight" in text
    assert "unexpected (1): lstm.weight_ih_l0" in text
    assert "of another shape (1): classifier.weight ([9, 20] in the file, [18, 20] in the model)" in text


def test_a_foreign_prefix_is_never_a_random_encoder(tmp_path: Path) -> None:
    write(tmp_path, change=lambda state: {f"foo.bar.{name}": tensor for name, tensor in state.items()})
    with pytest.raises(CheckpointError) as caught:
        load(tmp_path)
    assert "foo.bar.bert." in str(caught.value)  # a sample of what is in the file
    assert "missing (53): bert.embeddings.word_embeddings.weight" in str(caught.value)  # and of what was expected


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_numbers_that_are_none_are_warned_of(value: float, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    name = "bert.encoder.layer.1.output.dense.weight"

    def diverged(state: dict[str, Tensor]) -> dict[str, Tensor]:
        state[name][3, 4] = value
        return state

    write(tmp_path / "bad", change=diverged)
    _, report = load(tmp_path / "bad", output_loading_info=True)
    assert report.not_finite == [name]
    assert f"NaN or infinite (1): {name}" in str(report)
    (warning,) = caplog.messages
    assert f"model.safetensors: NaN or infinite numbers in {name}" in warning
    caplog.clear()
    write(tmp_path / "large", change=lambda state: state | {"classifier.bias": torch.full((18,), 3e38)})
    load(tmp_path / "large")
    assert caplog.messages == []  # the sum of finite numbers need not be finite
    load(tmp_path / "large", dtype="float16")
    assert "NaN or infinite numbers in classifier.bias (in torch.float16)" in caplog.messages[-1]


def test_a_crf_on_top_is_left_out_with_a_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    crf = {"crf.transitions": torch.ones(18, 18), "crf.start_transitions": torch.ones(18)}
    write(tmp_path, change=lambda state: state | crf)
    _, report = load(tmp_path, output_loading_info=True)
    assert set(report["unexpected_keys"]) == crf.keys()
    assert [m.split(": ", 1)[1] for m in caplog.messages] == [
        "the CRF is left out; labels are those of the logits under it"
    ]


@pytest.mark.parametrize(
    "name",
    [
        "bert.encoder.layer.0.attention.self.query.lora_A.weight",
        "bert.encoder.layer.0.output.adapters.ner.adapter_down.0.weight",
        "base_model.model.bert.encoder.layer.0.attention.self.query.base_layer.weight",
    ],
)
def test_an_adapter_is_refused_with_advice(name: str, tmp_path: Path) -> None:
    write(tmp_path, change=lambda state: state | {name: torch.zeros(1)})
    with pytest.raises(CheckpointError, match=r"There is an adapter in it; merge it into the weights"):
        load(tmp_path)
    (tmp_path / "model.safetensors").rename(tmp_path / "adapter_model.safetensors")
    (tmp_path / "adapter_config.json").write_text("{}")
    with pytest.raises(CheckpointError, match="there is an adapter only: load it with PEFT onto its base model"):
        load(tmp_path)


def test_the_report_prints_as_a_summary(tmp_path: Path) -> None:
    def old_and_half(state: dict[str, Tensor]) -> dict[str, Tensor]:
        state = layer_norms_as_gamma_and_beta({name: tensor.half() for name, tensor in state.items()})
        return state | {"cls.seq_relationship.bias": torch.zeros(2)}

    write(tmp_path, change=old_and_half, num_labels=9)
    options = {"dtype": "float32", "ignore_mismatched_sizes": True, "output_loading_info": True}
    _, report = load(tmp_path, num_labels=18, **options)
    lines = str(report).splitlines()
    assert lines[0] == "loaded 53 tensors"
    assert lines[1] == "converted 53 from F16 to float32"
    assert lines[2] == "initialised, of another size in the file (2): classifier.weight, classifier.bias"
    assert lines[3] == "left out, for other heads (1): cls.seq_relationship.bias"
    assert lines[4].startswith("renamed (14): bert.")
    assert ".gamma to bert." in lines[4] or ".beta to bert." in lines[4]
    assert len(lines) == 5
    write(tmp_path, "BertModel")
    _, report = load(tmp_path, output_loading_info=True)
    assert "initialised, not in the file (2): classifier.weight, classifier.bias" in str(report)


# Tied weights.


def test_a_decoder_that_the_file_stores_too_is_the_embeddings(tmp_path: Path) -> None:
    def with_decoder(state: dict[str, Tensor]) -> dict[str, Tensor]:
        return state | {"cls.predictions.decoder.weight": state["bert.embeddings.word_embeddings.weight"].clone()}

    write(tmp_path, "BertForMaskedLM", with_decoder)
    model, report = load(tmp_path, "BertForMaskedLM", output_loading_info=True)
    assert report["missing_keys"] == report["unexpected_keys"] == []
    assert model.cls.predictions.decoder.weight is model.bert.embeddings.word_embeddings.weight


def test_a_bias_stored_under_the_decoders_name_only_is_read(tmp_path: Path) -> None:
    state = write(tmp_path, "BertForMaskedLM", renamed("cls.predictions.bias", "cls.predictions.decoder.bias"))
    model = load(tmp_path, "BertForMaskedLM")
    assert torch.equal(model.cls.predictions.bias, state["cls.predictions.bias"])
    assert model.cls.predictions.decoder.bias is model.cls.predictions.bias


@pytest.mark.parametrize("name", ["weight", "bias"])
def test_a_decoder_that_differs_from_what_it_is_tied_to_is_not_dropped(name: str, tmp_path: Path) -> None:
    tied_to = {"weight": "bert.embeddings.word_embeddings.weight", "bias": "cls.predictions.bias"}[name]
    decoder = f"cls.predictions.decoder.{name}"
    both = {"cls.predictions.decoder.weight", "cls.predictions.decoder.bias"}

    def untied(state: dict[str, Tensor]) -> dict[str, Tensor]:
        own = {n: state[t].clone() for n, t in minibert.BertForMaskedLM.tied_weights.items() if n in both}
        own[decoder] = own[decoder] + 1
        return state | own

    state = write(tmp_path, "BertForMaskedLM", untied)
    with pytest.raises(CheckpointError, match=rf"{decoder} differs from {tied_to}.*tie_word_embeddings=False"):
        load(tmp_path, "BertForMaskedLM")
    model = load(tmp_path, "BertForMaskedLM", tie_word_embeddings=False)
    assert torch.equal(model.state_dict()[decoder], state[tied_to] + 1)
    assert torch.equal(model.state_dict()[tied_to], state[tied_to])


# Dtypes and devices.


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_float32_of_another_file_is_its_conversion(dtype: torch.dtype, tmp_path: Path) -> None:
    write(tmp_path, change=lambda state: {name: tensor.to(dtype) for name, tensor in state.items()})
    stored = load_file(tmp_path / "model.safetensors")
    for wanted in ("float32", torch.float32):
        model = load(tmp_path, dtype=wanted)
        assert all(torch.equal(model.state_dict()[name], tensor.float()) for name, tensor in stored.items())
    assert model.dtype == torch.float32
    assert model.config.dtype == "float32"


@pytest.mark.parametrize(
    ("config_keys", "stored", "expected"),
    [
        ({}, torch.float64, torch.float64),
        ({"torch_dtype": "float64"}, torch.float32, torch.float64),
        ({"dtype": "float64", "torch_dtype": "float32"}, torch.float32, torch.float64),
        ({"dtype": "float32"}, torch.float16, torch.float32),
    ],
)
def test_auto_is_the_configs_dtype_else_the_files(
    config_keys: dict[str, str], stored: torch.dtype, expected: torch.dtype, tmp_path: Path
) -> None:
    write(tmp_path, change=lambda state: {name: tensor.to(stored) for name, tensor in state.items()})
    config = json.loads((tmp_path / "config.json").read_text(encoding="utf-8"))
    config.pop("dtype", None)
    (tmp_path / "config.json").write_text(json.dumps(config | config_keys), encoding="utf-8")
    assert {p.dtype for p in load(tmp_path).parameters()} == {expected}


@pytest.mark.parametrize("supported", [True, False])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_becomes_float32_with_one_message_where_the_cpu_has_no_half(
    supported: bool,
    dtype: torch.dtype,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from minibert.checkpoint import loading

    monkeypatch.setattr(loading, "_cpu_has", lambda _: supported)
    write(tmp_path, change=lambda state: {name: tensor.to(dtype) for name, tensor in state.items()})
    config = json.loads((tmp_path / "config.json").read_text(encoding="utf-8"))
    (tmp_path / "config.json").write_text(json.dumps(config | {"dtype": str(dtype)[6:]}), encoding="utf-8")
    assert load(tmp_path).dtype == (dtype if supported else torch.float32)
    assert len(caplog.records) == (0 if supported else 1)
    assert load(tmp_path, dtype=dtype).dtype == dtype  # asked for is asked for


def test_a_dtype_that_is_none_is_refused(tmp_path: Path) -> None:
    write(tmp_path)
    for wrong in ("int8", "float99", torch.float8_e4m3fn):
        with pytest.raises(CheckpointError, match=f"expected auto, float64, .*, got {wrong}"):
            load(tmp_path, dtype=wrong)


def test_the_device_is_where_the_parameters_are(tmp_path: Path) -> None:
    write(tmp_path)
    assert load(tmp_path, device="cpu").device == torch.device("cpu")
    assert {p.device.type for p in load(tmp_path, device="meta").parameters()} == {"meta"}


@pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="needs Linux to see what is mapped")
def test_weights_of_the_files_dtype_are_mapped_and_not_copied(tmp_path: Path) -> None:
    def mapped() -> bool:
        return str(tmp_path / "model.safetensors") in Path("/proc/self/maps").read_text(encoding="utf-8")

    write(tmp_path)
    gc.collect()
    assert not mapped()
    model = load(tmp_path)
    assert mapped()
    del model
    gc.collect()
    assert not mapped()
    converted = load(tmp_path, dtype=torch.float64)
    assert converted.dtype == torch.float64
    assert not mapped()


def test_training_a_loaded_model_leaves_the_file_alone(tmp_path: Path) -> None:
    write(tmp_path)
    before = (tmp_path / "model.safetensors").read_bytes()
    model = load(tmp_path)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(1)
    assert (tmp_path / "model.safetensors").read_bytes() == before
    assert all(p.requires_grad for p in model.parameters())


def test_the_chosen_attention_is_set(tmp_path: Path) -> None:
    write(tmp_path)
    model = load(tmp_path, attn_implementation="eager")
    assert model.bert.encoder.layer[0].attention.self.attn_implementation == "eager"


@pytest.mark.parametrize("dtype", [torch.int8, torch.bool, torch.int64])
def test_numbers_that_are_no_weights_are_refused(dtype: torch.dtype, tmp_path: Path) -> None:
    name = "bert.encoder.layer.0.attention.self.query.weight"
    write(tmp_path, change=lambda state: state | {name: torch.ones(20, 20, dtype=dtype)})
    with pytest.raises(CheckpointError, match=rf"not floating point \(1\): {name} \((I8|BOOL|I64)\)"):
        load(tmp_path)


def test_a_subclass_needs_no_more_than_a_config(tmp_path: Path) -> None:
    class Tagger(minibert.BertForTokenClassification):
        def __init__(self, config: BertConfig) -> None:
            super().__init__(config)

    write(tmp_path)
    assert type(Tagger.from_pretrained(tmp_path, attn_implementation="eager")) is Tagger


# Files.


def test_a_directory_without_weights_says_what_is_there(tmp_path: Path) -> None:
    BertConfig(**fields_of(TAGGER)).save_pretrained(tmp_path)
    (tmp_path / "notes.txt").touch()
    with pytest.raises(CheckpointError, match=r"no model\.safetensors or .*; found config\.json, notes\.txt"):
        load(tmp_path)


def test_what_is_no_directory_is_named(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="nowhere: no such directory"):
        load(tmp_path / "nowhere")


@pytest.mark.parametrize("damage", ["truncated", "empty", "text"])
def test_a_damaged_file_is_named_with_its_size(damage: str, tmp_path: Path) -> None:
    write(tmp_path)
    path = tmp_path / "model.safetensors"
    whole = path.read_bytes()
    content = {"truncated": whole[: len(whole) * 6 // 10], "empty": b"", "text": b"<html>not found</html>" * 9}[damage]
    path.write_bytes(content)
    with pytest.raises(CheckpointError, match="incomplete or corrupt") as caught:
        load(tmp_path)
    assert str(path) in str(caught.value)
    assert f"{len(content):,} bytes" in str(caught.value)


def test_a_file_in_place_of_a_directory_is_named(tmp_path: Path) -> None:
    write(tmp_path)
    (tmp_path / "loop").symlink_to("loop")
    for name in ("model.safetensors", "loop"):
        with pytest.raises(CheckpointError, match=f"{name}: expected a directory or a name on the Hub, got a file"):
            minibert.hub.Source(str(tmp_path / name))
