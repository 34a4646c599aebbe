"""minibert's models where transformers wants its own: the stock classes are the reference for everything."""

from __future__ import annotations

import copy
import hashlib
import pickle
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import nn

import minibert
from minibert import MinibertError, adapter, optimize
from minibert.model.crf import BertCrfForTokenClassification
from reference import HEADS, TOKEN_HEADS, batch, fields_of, largest_difference, pair
from tagger import write_checkpoint


def adapted_pair(head: str, **changes: Any) -> tuple[Any, Any]:
    """(ours behind the adapter, theirs) with the same random weights."""
    ours, theirs = pair(head, **changes)
    return adapter.as_pretrained(ours), theirs


def random_biases(model: nn.Module) -> Any:
    """A model whose every parameter is its own, since a fresh one has the same biases everywhere."""
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    return model.eval()


@pytest.fixture
def auto_classes() -> Iterator[None]:
    adapter.register_auto_classes()
    yield
    adapter.unregister_auto_classes()


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    write_checkpoint(tmp_path / "tagger")
    return tmp_path / "tagger"


@pytest.mark.parametrize("head", HEADS)
@pytest.mark.parametrize("lengths", [(7, 7, 7), (7, 3, 5)])
def test_results_are_the_stock_classs(head: str, lengths: tuple[int, ...]) -> None:
    ours, theirs = adapted_pair(head)
    inputs = batch(head, lengths)
    if head in TOKEN_HEADS:  # theirs counts labels at padding, of which there are none here
        assert (inputs["labels"][inputs.get("attention_mask", torch.ones(3, 7)) == 0] == -100).all()
    if head == "BertForQuestionAnswering" and lengths[1] < 7:  # theirs takes its loss over padding, too
        inputs = {name: x for name, x in inputs.items() if "positions" not in name}
    options = {"output_hidden_states": True, "output_attentions": True}
    theirs.set_attn_implementation("eager")
    mine, reference = ours(**inputs, **options), theirs(**inputs, **options)
    assert type(mine) is type(reference)
    assert list(mine) == [name for name in reference if name != "cross_attentions"]  # of which an encoder has none
    for name in mine:
        assert largest_difference(mine[name], reference[name], inputs.get("attention_mask")) < 1e-5, name


@pytest.mark.parametrize("head", HEADS)
def test_names_and_parameters_are_the_stock_classs(head: str) -> None:
    ours, theirs = adapted_pair(head)
    assert isinstance(ours, transformers.PreTrainedModel)
    assert type(ours).__name__ == type(theirs).__name__
    mine, reference = ours.state_dict(), theirs.state_dict()
    assert mine.keys() == reference.keys()
    assert all(torch.equal(mine[name], reference[name]) for name in mine)
    assert ours.num_parameters() == theirs.num_parameters()
    assert ours.config.to_diff_dict().items() >= {"hidden_size": 20, "layer_norm_eps": 0.01}.items()


def test_both_models_have_the_same_parameters() -> None:
    ours, _ = pair("BertForTokenClassification")
    wrapped = adapter.as_pretrained(ours)
    assert wrapped.minibert is ours
    wrapped.classifier = nn.Linear(20, 18)  # as tools that replace a module do
    assert ours.classifier is wrapped.classifier
    twin = copy.deepcopy(wrapped)
    inputs = batch("BertForTokenClassification")
    assert torch.equal(twin(**inputs).logits, wrapped(**inputs).logits)
    nn.init.zeros_(twin.classifier.weight)
    nn.init.zeros_(twin.classifier.bias)
    assert not twin(**inputs).logits.any()
    assert wrapped(**inputs).logits.any()
    assert torch.equal(pickle.loads(pickle.dumps(wrapped))(**inputs).logits, wrapped(**inputs).logits)


@pytest.mark.parametrize("head", HEADS)
def test_a_fresh_model_is_drawn_as_minibert_draws_it(head: str) -> None:
    config = transformers.BertConfig(**fields_of(head, initializer_range=0.5))
    torch.manual_seed(1)
    model = getattr(adapter, head)(config)
    for name, parameter in model.state_dict().items():
        if name.endswith("bias"):
            assert not parameter.any(), name
        elif "LayerNorm" in name:
            assert (parameter == 1).all(), name
        elif parameter.numel() > 300:
            assert parameter.std() == pytest.approx(0.5, rel=0.1), name
    assert not model.get_input_embeddings().weight[5].any()  # padding


@pytest.mark.parametrize("head", HEADS)
def test_loading_and_saving_by_transformers_own_code(head: str, tmp_path: Path) -> None:
    _, theirs = pair(head)
    theirs.save_pretrained(tmp_path / "theirs")
    ours, report = getattr(adapter, head).from_pretrained(tmp_path / "theirs", output_loading_info=True)
    assert not any(report.values())
    inputs = batch(head)
    assert largest_difference(ours(**inputs).to_tuple(), theirs(**inputs).to_tuple()) < 1e-5
    ours.save_pretrained(tmp_path / "ours")
    again = getattr(transformers, head).from_pretrained(tmp_path / "ours")
    plain = getattr(minibert, head).from_pretrained(tmp_path / "ours")
    assert largest_difference(again(**inputs).to_tuple(), theirs(**inputs).to_tuple()) < 1e-6
    assert largest_difference(plain(**inputs).to_tuple(), theirs(**inputs).to_tuple()) < 1e-5
    assert again.config.architectures == [head]


def weights_digest(folder: Path) -> str:
    return hashlib.sha256((folder / "model.safetensors").read_bytes()).hexdigest()


def test_training_and_a_round_trip(directory: Path, tmp_path: Path) -> None:
    """Case H05: two steps, saved, read by transformers and back; a second save has the same bytes."""
    model = adapter.BertForTokenClassification.from_pretrained(directory).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    ids = torch.randint(5, 60, (3, 7))
    before = model.classifier.weight.detach().clone()
    for _ in range(2):
        optimizer.zero_grad()
        model(input_ids=ids, labels=ids % 18).loss.backward()
        optimizer.step()
    assert not torch.equal(before, model.classifier.weight)
    model.eval().save_pretrained(tmp_path / "one")
    stock = transformers.BertForTokenClassification.from_pretrained(tmp_path / "one")
    assert largest_difference(model(ids).logits, stock(ids).logits) < 1e-5
    stock.save_pretrained(tmp_path / "two")
    back = adapter.BertForTokenClassification.from_pretrained(tmp_path / "two")
    assert torch.equal(back(ids).logits, model(ids).logits)
    back.save_pretrained(tmp_path / "three")
    assert weights_digest(tmp_path / "three") == weights_digest(tmp_path / "one")
    assert back.config.id2label == model.config.id2label == stock.config.id2label
    assert back.config.id2label[1] == "B-PER"
    assert (back.config.model_type, back.config.architectures) == ("bert", ["BertForTokenClassification"])


@pytest.mark.parametrize("strategy", ["none", "simple", "first", "average", "max"])
def test_the_pipeline_gives_what_it_gives_with_the_stock_model(directory: Path, strategy: str) -> None:
    tokenizer = transformers.BertTokenizer.from_pretrained(directory)
    texts = ["我住在北京医院，张三喜欢上海。", "iphone16 2024年", "好"]
    results = []
    for model_class in (adapter.BertForTokenClassification, transformers.BertForTokenClassification):
        model = model_class.from_pretrained(directory)
        tagger = transformers.pipeline("token-classification", model=model, tokenizer=tokenizer, batch_size=2)
        results.append([e for found in tagger(texts, aggregation_strategy=strategy) for e in found])
    mine, theirs = results
    assert len(mine) > 5
    for one, other in zip(mine, theirs, strict=True):
        assert one.pop("score") == pytest.approx(other.pop("score"), abs=1e-5)
        assert one == other


def test_a_model_of_minibert_goes_into_the_pipeline_as_it_is(directory: Path) -> None:
    model = minibert.BertForTokenClassification.from_pretrained(directory)
    tokenizer = transformers.BertTokenizer.from_pretrained(directory)
    tagger = transformers.pipeline("ner", model=adapter.as_pretrained(model), tokenizer=tokenizer)
    found = tagger("我住在北京", aggregation_strategy="first")
    ours = minibert.TokenClassifier.from_pretrained(directory)("我住在北京")
    assert [(e["entity_group"], e["start"], e["end"]) for e in found] == [(e.label, e.start, e.end) for e in ours]


@pytest.mark.usefixtures("auto_classes")
def test_auto_classes_give_minibert_until_told_otherwise(directory: Path) -> None:
    automatic = transformers.AutoModelForTokenClassification
    assert type(automatic.from_pretrained(directory)) is adapter.BertForTokenClassification
    tagger = transformers.pipeline("token-classification", str(directory))
    assert isinstance(tagger.model, adapter.BertForTokenClassification)
    for auto_class, model_class in adapter.AUTO_CLASSES.items():
        fields = fields_of(model_class.__name__)
        assert type(auto_class.from_config(transformers.BertConfig(**fields))) is model_class
    adapter.unregister_auto_classes()
    assert type(automatic.from_pretrained(directory)) is transformers.BertForTokenClassification
    assert type(transformers.AutoModel.from_pretrained(directory)) is transformers.BertModel


def test_the_config_can_be_changed_as_with_the_stock_class() -> None:
    ours, _ = adapted_pair("BertForSequenceClassification")
    inputs = batch("BertForSequenceClassification")
    assert "attentions" not in ours(**inputs)
    ours.set_attn_implementation("eager")
    ours.config.output_attentions = ours.config.output_hidden_states = True
    assert len(ours(**inputs).attentions) == 3
    assert len(ours(**inputs).hidden_states) == 4
    assert isinstance(ours(**inputs, return_dict=False), tuple)
    assert ours(**inputs).loss is not None  # whole labels are classes
    ours.config.problem_type = "regression"
    output = ours(**inputs | {"labels": torch.ones(3, 7)})
    assert output.loss.item() == pytest.approx((output.logits - 1).square().mean().item(), rel=1e-5)


def test_the_attention_function_is_the_chosen_one(monkeypatch: pytest.MonkeyPatch) -> None:
    eager = minibert.BertModel(minibert.BertConfig(**fields_of("BertModel")))
    eager.set_attn_implementation("eager")
    assert adapter.as_pretrained(eager).config._attn_implementation == "eager"
    ours, _ = adapted_pair("BertModel")
    assert {m.attn_implementation for m in ours.modules() if hasattr(m, "attn_implementation")} == {"sdpa"}
    ours.set_attn_implementation("eager")
    called = []
    for name, function in minibert.model.attention.ATTENTION_FUNCTIONS.items():
        spy = lambda *a, name=name, function=function: called.append(name) or function(*a)  # noqa: E731
        monkeypatch.setitem(minibert.model.attention.ATTENTION_FUNCTIONS, name, spy)
    ours(torch.tensor([[6, 7]]))
    assert called == ["eager"] * 3
    assert ours.config._attn_implementation == "eager"
    with pytest.raises(MinibertError, match="'flash'"):
        ours.set_attn_implementation("flash")


def test_activation_checkpointing_reaches_the_encoder() -> None:
    ours, _ = adapted_pair("BertForTokenClassification")
    ours.activation_checkpointing_enable()
    assert ours.minibert.bert.encoder.checkpoint_every == 1
    assert ours.is_activation_checkpointing
    ours.activation_checkpointing_disable()
    assert not ours.is_activation_checkpointing


def test_trainer_keeps_the_columns_and_trains_on_minibert(directory: Path, tmp_path: Path) -> None:
    import datasets

    model = adapter.BertForTokenClassification.from_pretrained(directory)
    rows = {"input_ids": [[2, 5, 6, 3]] * 8, "attention_mask": [[1] * 4] * 8, "labels": [[-100, 1, 2, -100]] * 8}
    data = datasets.Dataset.from_dict({**rows, "text": ["x"] * 8})
    arguments = transformers.TrainingArguments(
        tmp_path / "run", max_steps=3, learning_rate=1e-2, use_cpu=True, report_to=[], save_strategy="no",
        disable_tqdm=True,
    )  # fmt: skip
    trainer = transformers.Trainer(model, arguments, train_dataset=data)
    before = model(torch.tensor([[2, 5, 6, 3]]), labels=torch.tensor([[-100, 1, 2, -100]])).loss.item()
    trainer.train()
    model.eval()
    assert model(torch.tensor([[2, 5, 6, 3]]), labels=torch.tensor([[-100, 1, 2, -100]])).loss.item() < before - 0.5
    trainer.save_model(tmp_path / "saved")
    assert minibert.BertForTokenClassification.from_pretrained(tmp_path / "saved").config.id2label[1] == "B-PER"


def test_a_head_that_is_not_in_the_file_is_drawn_and_the_rest_is_loaded(tmp_path: Path) -> None:
    encoder = random_biases(transformers.BertModel(transformers.BertConfig(**fields_of("BertModel"))))
    encoder.save_pretrained(tmp_path)
    model, report = adapter.BertForTokenClassification.from_pretrained(tmp_path, output_loading_info=True)
    assert report["missing_keys"] == {"classifier.weight", "classifier.bias"}
    assert model.classifier.weight.detach().std() == pytest.approx(0.2, rel=0.2)
    assert not model.classifier.bias.any()
    loaded = model.bert.state_dict()
    assert all(torch.equal(loaded[name], value) for name, value in encoder.state_dict().items() if "pooler" not in name)


def test_lora_trains_and_saves_through_the_adapter(directory: Path, tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")
    ids = torch.randint(5, 60, (3, 7))
    config = peft.LoraConfig(task_type="TOKEN_CLS", target_modules=["query", "value"])
    model = peft.get_peft_model(adapter.BertForTokenClassification.from_pretrained(directory), config)
    optimizer = torch.optim.AdamW((p for p in model.parameters() if p.requires_grad), lr=1e-2)
    for _ in range(3):
        optimizer.zero_grad()
        model(input_ids=ids, labels=ids % 18).loss.backward()
        optimizer.step()
    expected = model.eval()(input_ids=ids).logits
    model.save_pretrained(tmp_path / "lora")
    base = adapter.BertForTokenClassification.from_pretrained(directory)
    assert largest_difference(base(ids).logits, expected) > 1e-2
    assert (
        largest_difference(peft.PeftModel.from_pretrained(base, tmp_path / "lora")(input_ids=ids).logits, expected)
        < 1e-6
    )


def test_without_transformers_it_is_said_what_to_install() -> None:
    code = "import sys; sys.modules['transformers'] = None; import minibert.adapter"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert "ImportError: minibert.adapter: pip install 'minibert[adapter]'" in done.stderr


def test_what_cannot_be_adapted_is_named(directory: Path) -> None:
    config = minibert.BertConfig(**fields_of("BertForTokenClassification"))
    with pytest.raises(MinibertError, match="got BertCrfForTokenClassification"):
        adapter.as_pretrained(BertCrfForTokenClassification(config))
    with pytest.raises(MinibertError, match="an optimized model"):
        adapter.as_pretrained(optimize(minibert.BertForTokenClassification.from_pretrained(directory)))


@pytest.fixture(scope="module")
def _registered() -> None:
    adapter.register_attention()


@pytest.mark.usefixtures("_registered")
@pytest.mark.parametrize("name", ["eager", "sdpa"])
def test_stock_models_run_on_the_registered_attention(name: str) -> None:
    fields = fields_of("BertForTokenClassification")
    reference = random_biases(transformers.BertForTokenClassification(transformers.BertConfig(**fields)))
    reference.set_attn_implementation("eager")
    inputs = batch("BertForTokenClassification", (7, 3, 5))
    expected = reference(**inputs, output_attentions=True)
    model = copy.deepcopy(reference)
    model.set_attn_implementation(f"minibert_{name}")
    found = model(**inputs, output_attentions=name == "eager")
    assert largest_difference(found.logits, expected.logits, inputs["attention_mask"]) < 1e-5
    if name == "eager":
        assert largest_difference(found.attentions, expected.attentions, inputs["attention_mask"]) < 1e-5


@pytest.mark.usefixtures("_registered")
def test_a_row_of_padding_gives_no_nan_with_the_registered_attention() -> None:
    model = random_biases(transformers.BertModel(transformers.BertConfig(**fields_of("BertModel"))))
    model.set_attn_implementation("minibert_sdpa")
    weights: dict[str, Any] = {}
    attention = model.encoder.layer[0].attention.self
    attention.register_forward_hook(lambda module, inputs, output: weights.update(context=output[0]))
    output = model(torch.tensor([[6, 7, 8], [6, 7, 8]]), torch.tensor([[1, 1, 1], [0, 0, 0]]))
    assert output.last_hidden_state.isfinite().all()
    assert not weights["context"][1].any()


@pytest.mark.usefixtures("_registered")
@pytest.mark.parametrize("name", ["eager", "sdpa"])
def test_decoders_with_fewer_key_heads_run_on_it_too(name: str) -> None:
    config = transformers.LlamaConfig(
        vocab_size=50, hidden_size=24, intermediate_size=30, num_hidden_layers=2, num_attention_heads=6,
        num_key_value_heads=2, head_dim=10, max_position_embeddings=32, attn_implementation="eager",
    )  # fmt: skip
    model = random_biases(transformers.LlamaForCausalLM(config))
    ids = torch.randint(0, 50, (2, 9))
    expected = model(ids).logits
    model.set_attn_implementation(f"minibert_{name}")
    assert largest_difference(model(ids).logits, expected) < 1e-5


@pytest.mark.usefixtures("_registered")
def test_what_minibert_has_not_is_refused_and_another_scale_is_kept() -> None:
    function = transformers.AttentionInterface()["minibert_eager"]
    query, key, value = torch.randn(3, 2, 4, 7, 5).unbind(0)
    context, weights = function(nn.Identity(), query, key, value, None, scaling=0.3)
    expected = (0.3 * query @ key.transpose(-1, -2)).softmax(-1)
    assert largest_difference(weights, expected) < 1e-6
    assert largest_difference(context, (expected @ value).transpose(1, 2)) < 1e-6
    with pytest.raises(MinibertError, match="has no softcap"):
        function(nn.Identity(), query, key, value, None, softcap=30.0)
