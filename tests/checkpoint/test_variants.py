"""One table of the checkpoints people have: each loads bit for bit like its source, or is refused for its reason.

The source is a random model written by transformers. A variant changes the tensors, the config or the files that
hold them, as some version, framework or accident does; a legal one must give the source's weights to the bit and
the logits of transformers, an illegal one the error of the table.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

import minibert
from checkpoint.test_files import FORMATS, as_pickle, as_safetensors, as_shards
from minibert.checkpoint.names import ENDINGS
from reference import batch, largest_difference, pair

State = dict[str, Tensor]
Config = dict[str, Any]

TAGGER, MASKED, PRETRAINING, ENCODER = (
    "BertForTokenClassification",
    "BertForMaskedLM",
    "BertForPreTraining",
    "BertModel",
)
LAST = "bert.encoder.layer.2.output.dense.weight"


def same(content: Any) -> Any:
    return content


@dataclass(frozen=True)
class Variant:
    """One checkpoint: what differs from the source, and the error it gives, if any."""

    name: str
    tensors: Callable[[State], State] = same
    config: Callable[[Config], Config] = same
    write: Callable[[Path, State], None] = as_safetensors
    files: Callable[[Path], Any] = same
    head: str = TAGGER
    options: dict[str, Any] = field(default_factory=dict)
    error: str | None = None
    through: torch.dtype | None = None  # the source's weights have passed through this dtype
    absent: tuple[str, ...] = ()  # parts of the model that start anew
    notice: str | None = None  # a warning that must be given


# Changes of tensors.


def old_endings(state: State) -> State:
    """gamma and beta: the table of names, backwards."""
    for old, new in ENDINGS.items():
        state = {name.replace(new, old): tensor for name, tensor in state.items()}
    return state


def no_prefix(state: State) -> State:
    return {name.removeprefix("bert."): tensor for name, tensor in state.items()}


def prefixed(prefix: str) -> Callable[[State], State]:
    return lambda state: {prefix + name: tensor for name, tensor in state.items()}


def plus(**extra: Tensor) -> Callable[[State], State]:
    return lambda state: state | {name.replace("__", "."): tensor for name, tensor in extra.items()}


def without(*parts: str) -> Callable[[State], State]:
    return lambda state: {name: t for name, t in state.items() if not any(part in name for part in parts)}


def only(*parts: str) -> Callable[[State], State]:
    return lambda state: {name: t for name, t in state.items() if any(part in name for part in parts)}


def to(dtype: torch.dtype) -> Callable[[State], State]:
    return lambda state: {name: tensor.to(dtype) for name, tensor in state.items()}


def both(*changes: Callable[[State], State]) -> Callable[[State], State]:
    def change(state: State) -> State:
        for one in changes:
            state = one(state)
        return state

    return change


def stored_decoder(state: State) -> State:
    """As before transformers v5: what is tied is stored under each name."""
    tables = {
        "cls.predictions.decoder.weight": "bert.embeddings.word_embeddings.weight",
        "cls.predictions.decoder.bias": "cls.predictions.bias",
    }
    return state | {alias: state[name].clone() for alias, name in tables.items()}


def decoder_alone(state: State) -> State:
    """Only the second name of what is tied."""
    state = stored_decoder(state)
    del state["bert.embeddings.word_embeddings.weight"], state["cls.predictions.bias"]
    return state


def transposed_storage(state: State) -> State:
    return {name: t.t().contiguous().t() if t.dim() == 2 else t for name, t in state.items()}


# Changes of configs.


def fields(**changes: Any) -> Callable[[Config], Config]:
    return lambda config: config | changes


def dropped(*names: str) -> Callable[[Config], Config]:
    return lambda config: {key: value for key, value in config.items() if key not in names}


V2 = {
    "torchscript": False,
    "output_past": True,
    "use_bfloat16": False,
    "pruned_heads": {},
    "finetuning_task": None,
    "is_decoder": False,
    "do_sample": False,
    "_num_labels": 18,
    "xla_device": None,
}
V3 = {"gradient_checkpointing": False, "return_dict": False, "use_cache": True, "directionality": "bidi"}
V4 = {"transformers_version": "4.30.0", "torch_dtype": "float32", "position_embedding_type": "absolute"}
CHINESE = {  # what bert-base-chinese's own config has besides
    "pooler_fc_size": 768,
    "pooler_num_attention_heads": 12,
    "pooler_num_fc_layers": 3,
    "pooler_size_per_head": 128,
    "pooler_type": "first_token_transform",
}
SHUFFLED = {str(i): f"LABEL_{i}" for i in (10, 2, 17, 0, 1, 3, 9, 8, 7, 6, 5, 4, 11, 16, 15, 14, 13, 12)}


def old_config(extra: Config) -> Callable[[Config], Config]:
    return lambda config: dropped("dtype", "transformers_version", "architectures")(config) | extra


# Changes of files.


def remove(name: str) -> Callable[[Path], Any]:
    return lambda folder: (folder / name).unlink()


def replace(name: str, content: bytes) -> Callable[[Path], Any]:
    return lambda folder: (folder / name).write_bytes(content)


def cut(name: str, share: float) -> Callable[[Path], Any]:
    def files(folder: Path) -> None:
        content = (folder / name).read_bytes()
        (folder / name).write_bytes(content[: int(len(content) * share)])

    return files


def unaligned(folder: Path) -> None:
    """A header whose length is no multiple of eight, so that no tensor begins at one."""
    path = folder / "model.safetensors"
    content = path.read_bytes()
    length = int.from_bytes(content[:8], "little")
    header = content[8 : 8 + length].rstrip(b" ")
    header += b" " * (8 - len(header) % 8 + 3)
    path.write_bytes(len(header).to_bytes(8, "little") + header + content[8 + length :])


def in_subfolder(folder: Path) -> None:
    (folder / "sub").mkdir()
    for path in list(folder.iterdir()):
        if path.is_file():
            path.rename(folder / "sub" / path.name)


def stopped_save(folder: Path) -> None:
    """Another checkpoint's files, and these in the folder of a save that died before it had moved them."""
    (folder / ".minibert-saved").mkdir()
    for path in list(folder.iterdir()):
        if path.is_file():
            path.rename(folder / ".minibert-saved" / path.name)
    (folder / "config.json").write_text('{"hidden_size": 99}')
    (folder / "model.safetensors").write_bytes(b"old")


def an_adapter_beside_nothing(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder / "adapter_model.safetensors")
    (folder / "adapter_config.json").write_text("{}")


POSITIONS = torch.arange(24)[None]
HEAD_GONE = ("classifier",)
LFS = b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 400000000\n"

LEGAL = [
    Variant("as transformers v5 writes it"),
    *(Variant(f"format {write.__name__}", write=write) for write in FORMATS),
    *(Variant(f"format {write.__name__}, old endings", old_endings, write=write) for write in FORMATS),
    Variant("gamma and beta", old_endings),
    Variant("no prefix", no_prefix),
    Variant("no prefix, gamma and beta", both(old_endings, no_prefix)),
    Variant("module.", prefixed("module."), notice="begins with module., which is left off"),
    Variant("model.", prefixed("model."), notice="begins with model., which is left off"),
    Variant("_orig_mod.", prefixed("_orig_mod."), notice="begins with _orig_mod."),
    Variant("module. twice over", prefixed("module._orig_mod."), notice="begins with module._orig_mod."),
    Variant("module., no prefix, gamma", both(old_endings, no_prefix, prefixed("module.")), notice="module."),
    Variant("position_ids", plus(bert__embeddings__position_ids=POSITIONS)),
    Variant("position_ids without prefix", both(no_prefix, plus(embeddings__position_ids=POSITIONS))),
    Variant("position_ids of another length", plus(bert__embeddings__position_ids=torch.arange(512)[None])),
    Variant("a pooler nobody asked for", plus(bert__pooler__dense__weight=torch.ones(20, 20))),
    Variant("heads of pretraining beside", plus(cls__seq_relationship__weight=torch.ones(2, 20))),
    Variant("a CRF on top", plus(crf__transitions=torch.ones(18, 18)), notice="the CRF is left out"),
    Variant("not contiguous in a pickle", transposed_storage, write=as_pickle),
    Variant("unaligned data", files=unaligned),
    Variant("float16 file", to(torch.float16), options={"dtype": "float32"}, through=torch.float16),
    Variant("bfloat16 file", to(torch.bfloat16), options={"dtype": "float32"}, through=torch.bfloat16),
    Variant("float64 file", to(torch.float64), options={"dtype": "float32"}),
    Variant("float16 pickle", to(torch.float16), write=as_pickle, options={"dtype": "float32"}, through=torch.float16),
    Variant("float16 in config, float32 asked", config=fields(dtype="float16"), options={"dtype": "float32"}),
    Variant("pytorch-pretrained-bert", old_endings, dropped("model_type", "dtype", "architectures"), as_pickle),
    Variant("transformers v2", config=old_config(V2), write=as_pickle),
    Variant("transformers v3", plus(bert__embeddings__position_ids=POSITIONS), old_config(V3), as_pickle),
    Variant("transformers v4", plus(bert__embeddings__position_ids=POSITIONS), old_config(V4)),
    Variant("bert-base-chinese's extra keys", config=fields(**CHINESE)),
    Variant("label ids as strings in any order", config=fields(id2label=SHUFFLED, label2id=None)),
    Variant("labels by name only", config=lambda c: dropped("id2label")(c) | {"label2id": c["label2id"]}),
    Variant("num_labels and no names", config=lambda c: dropped("id2label", "label2id")(c) | {"num_labels": 18}),
    Variant("null fields", config=fields(classifier_dropout=None, num_labels=None, problem_type=None)),
    Variant("_name_or_path", config=fields(_name_or_path="/nowhere/at/all")),
    Variant("unknown keys", config=fields(custom_tag={"a": [1, None]}, team="ner")),
    Variant("config with a byte order mark", files=lambda f: _with_mark(f / "config.json")),
    Variant("in a subfolder", files=in_subfolder, options={"subfolder": "sub"}),
    Variant("a save that died while its files moved", files=stopped_save),
    Variant("abandoned save beside", files=lambda f: (f / ".minibert-saving-00").mkdir()),
    Variant("other frameworks' files beside", files=lambda f: (f / "tf_model.h5").touch()),
    Variant("an older pickle beside", files=replace("pytorch_model.bin", b"older")),
    Variant("masked LM", head=MASKED),
    Variant("decoder stored too", stored_decoder, head=MASKED),
    Variant("decoder stored alone", decoder_alone, head=MASKED),
    Variant("decoder in a pickle, shared", stored_decoder, head=MASKED, write=as_pickle),
    Variant("pretraining, v2", both(stored_decoder, old_endings), old_config(V2), as_pickle, head=PRETRAINING),
    Variant("encoder alone", head=ENCODER),
    Variant("encoder with the prefix of a task model", prefixed("bert."), head=ENCODER),
    Variant("encoder, pooler absent", without("pooler"), head=ENCODER, absent=("pooler",), notice="train before use"),
    Variant("classifier absent", without("classifier"), absent=HEAD_GONE, notice="train before use"),
    Variant(
        "classifier of another size, allowed",
        lambda s: s | {"classifier.weight": torch.ones(9, 20), "classifier.bias": torch.ones(9)},
        options={"ignore_mismatched_sizes": True},
        absent=HEAD_GONE,
        notice="train before use",
    ),
]

ILLEGAL = [
    Variant("foreign prefix", prefixed("foo.bar."), error=r"missing \(\d+\): bert\.embeddings.*unexpected.*foo\.bar\."),
    Variant("a prefix for some only", lambda s: prefixed("module.")(only("encoder")(s)) | without("encoder")(s),
            error="missing"),
    Variant("an encoder tensor missing", without(LAST), error=rf"missing \(1\): {LAST}"),
    Variant("nothing but the head", only("classifier"), error="missing"),
    Variant("half a head", without("classifier.bias"), error=r"missing \(1\): classifier\.bias"),
    Variant("one layer too many", lambda s: s | {LAST.replace(".2.", ".3."): s[LAST]}, error=r"unexpected \(1\)"),
    Variant("another shape", lambda s: s | {LAST: torch.ones(20, 32)}, error=r"\[20, 32\] in the file, \[20, 33\]"),
    Variant("transposed", lambda s: s | {LAST: s[LAST].t().contiguous()}, error=r"\[33, 20\] in the file, \[20, 33\]"),
    Variant(
        "classifier of another size",
        lambda s: s | {"classifier.weight": torch.ones(9, 20)},
        error=r"classifier\.weight \(\[9, 20\] in the file, \[18, 20\] in the model\).*ignore_mismatched_sizes=True",
    ),
    Variant("both spellings", lambda s: s | old_endings(only("embeddings.LayerNorm")(s)), error="are both bert"),
    Variant("an LSTM on top", plus(lstm__weight_ih_l0=torch.ones(4, 4)), error=r"unexpected \(1\): lstm"),
    Variant("LoRA", plus(bert__encoder__layer__0__attention__self__query__lora_A__weight=torch.ones(1)),
            error="adapter"),
    Variant("an adapter alone", files=an_adapter_beside_nothing, error="there is an adapter only"),
    Variant("integers", to(torch.int32), error=r"not floating point \(\d+\): .*I32"),
    Variant("a decoder that differs", head=MASKED,
            tensors=lambda s: stored_decoder(s) | {"cls.predictions.decoder.bias": torch.ones(99)},
            error="tie_word_embeddings=False to load both"),
    Variant("no weights", files=remove("model.safetensors"), error="no model.safetensors or pytorch_model.bin"),
    Variant("no config", files=remove("config.json"), error="config.json: not in the directory"),
    Variant("truncated", files=cut("model.safetensors", 0.6), error=r"incomplete or corrupt, \d"),
    Variant("truncated in the header", files=cut("model.safetensors", 0.01), error=r"incomplete or corrupt, \d"),
    Variant("empty", files=replace("model.safetensors", b""), error="the file is empty"),
    Variant("an LFS pointer", files=replace("model.safetensors", LFS), error="git lfs pull"),
    Variant("an LFS pointer as config", files=replace("config.json", LFS), error="config.json.*git lfs pull"),
    Variant("HTML", files=replace("model.safetensors", b"<html>"), error="HTML page"),
    Variant("HTML as config", files=replace("config.json", b"\n<html>"), error="config.json.*HTML page"),
    Variant("HTML as pickle", write=as_pickle, files=replace("pytorch_model.bin", b"<html>"),
            error="HTML page|refused"),
    Variant("a shard missing", write=as_shards, files=remove("model-00002-of-00003.safetensors"),
            error="names model-00002"),
    Variant("a shard truncated", write=as_shards, files=cut("model-00003-of-00003.safetensors", 0.9),
            error="00003.*corrupt"),
    Variant("a truncated index", write=as_shards, files=cut("model.safetensors.index.json", 0.5),
            error="not a JSON file"),
    Variant("only TensorFlow's file", files=lambda f: (f / "model.safetensors").rename(f / "tf_model.h5"),
            error="TensorFlow weights are not read"),
    Variant("only Flax's file", files=lambda f: (f / "model.safetensors").rename(f / "flax_model.msgpack"),
            error="Flax weights are not read"),
    Variant("another architecture", config=fields(model_type="roberta"),
            error="model_type: 'roberta' is another architecture"),
    Variant("quantised", config=fields(quantization_config={"bits": 4}), error="quantization_config"),
    Variant("relative positions", config=fields(position_embedding_type="relative_key"),
            error="position_embedding_type"),
    Variant("a decoder", config=fields(is_decoder=True), error="is_decoder"),
    Variant("a size as a string", config=fields(vocab_size="99"), error="vocab_size: expected int, got '99'"),
    Variant("a size that is null", config=fields(hidden_size=None), error="hidden_size: expected int, got None"),
    Variant("labels that contradict", config=fields(label2id={"A": 0}), error="label2id.*contradicts id2label"),
    Variant("num_labels that contradicts", config=fields(num_labels=3), error="num_labels: 3 contradicts id2label"),
    Variant("a gap in the label ids", config=fields(id2label={"0": "O", "2": "B"}, label2id=None), error="ids must be"),
    Variant("a broken config", files=replace("config.json", b'{"hidden'), error="config.json: not a JSON file"),
]  # fmt: skip


def _with_mark(path: Path) -> None:
    path.write_bytes(b"\xef\xbb\xbf" + path.read_bytes())


def write(variant: Variant, folder: Path) -> tuple[State, Any]:
    """Writes the variant; gives the source's tensors and the transformers model that they are from."""
    _, theirs = pair(variant.head)
    if variant.through is not None:
        theirs.to(variant.through).float()
    theirs.save_pretrained(folder)
    state = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    (folder / "config.json").write_text(json.dumps(variant.config(config)), encoding="utf-8")
    changed = variant.tensors(dict(state))
    if variant.write is not as_pickle:
        changed = {name: tensor.contiguous().clone() for name, tensor in changed.items()}
    variant.write(folder, changed)
    variant.files(folder)
    return state, theirs


def test_the_table_is_large_enough_and_names_are_unique() -> None:
    names = [variant.name for variant in LEGAL + ILLEGAL]
    assert len(set(names)) == len(names) >= 60


@pytest.mark.parametrize("variant", LEGAL, ids=lambda v: v.name)
def test_a_legal_variant_loads_bit_for_bit(variant: Variant, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    state, theirs = write(variant, tmp_path)
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    model = getattr(minibert, variant.head).from_pretrained(tmp_path, **variant.options)
    assert not model.training
    loaded = model.state_dict()
    for name, tensor in state.items():
        if not name.startswith(variant.absent):
            assert torch.equal(loaded[name], tensor), name
    assert {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()} == before
    if variant.notice is None:
        assert caplog.messages == []
    else:
        assert variant.notice in " ".join(caplog.messages)
    inputs = batch(variant.head, (7, 3, 5))
    with torch.no_grad():
        ours, expected = model(**inputs, return_dict=True), theirs(**inputs)
    keys = {
        TAGGER: ["logits"],
        MASKED: ["logits"],
        PRETRAINING: ["prediction_logits", "seq_relationship_logits"],
        ENCODER: ["last_hidden_state", "pooler_output"],
    }[variant.head]
    if variant.absent:
        keys = ["last_hidden_state"]
        ours, expected = (
            getattr(m, "bert", m)(**{k: v for k, v in inputs.items() if k != "labels"}) for m in (model, theirs)
        )
    for key in keys:
        assert largest_difference(ours[key], expected[key], inputs["attention_mask"]) < 1e-5
    model.save_pretrained(tmp_path / "again")
    config = json.loads((tmp_path / "again" / "config.json").read_text(encoding="utf-8"))
    assert "_name_or_path" not in config
    if variant.name == "unknown keys":
        assert (config["custom_tag"], config["team"]) == ({"a": [1, None]}, "ner")
    if variant.name.startswith("label"):
        assert config["id2label"]["10"] == "LABEL_10"


@pytest.mark.parametrize("lenient", [False, True], ids=["strict", "lenient"])
@pytest.mark.parametrize("variant", ILLEGAL, ids=lambda v: v.name)
def test_an_illegal_variant_gives_its_error(variant: Variant, lenient: bool, tmp_path: Path) -> None:
    write(variant, tmp_path)
    options = dict(variant.options)
    if lenient:
        if "ignore_mismatched_sizes=True" in (variant.error or ""):
            return
        options["ignore_mismatched_sizes"] = True
    with pytest.raises(minibert.MinibertError, match=rf"(?s){variant.error}") as caught:
        getattr(minibert, variant.head).from_pretrained(tmp_path, **options)
    assert isinstance(caught.value, minibert.CheckpointError | minibert.ConfigError)
    assert str(tmp_path) in str(caught.value)
