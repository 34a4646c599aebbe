"""Models beyond their numbers: modes, requests, losses, initial weights, checkpointing, outputs and refusals."""

from __future__ import annotations

import copy
import inspect
import pickle
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import minibert
from minibert import BertConfig, ConfigError, MinibertError
from minibert.model.heads import classification_loss
from minibert.model.outputs import HeadOutput, ModelOutput
from reference import HEADS, batch, fields_of, pair

TAGGER = "BertForTokenClassification"
# The fixture of the collected cases: two layers of 32 channels, 120 words, 64 positions.
CFG_T: dict[str, Any] = {
    "vocab_size": 120,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 64,
    "max_position_embeddings": 64,
    "num_labels": 18,
}


def small(head: str = TAGGER, **changes: Any) -> Any:
    return getattr(minibert, head)(BertConfig(**fields_of(head, **changes))).eval()


# Modes.


def test_two_calls_are_equal_in_eval_mode_and_differ_in_training() -> None:
    model, inputs = small(), batch(TAGGER)
    assert torch.equal(model(**inputs).logits, model(**inputs).logits)
    model.train()
    assert (model(**inputs).logits - model(**inputs).logits).abs().max() > 1e-3


@pytest.mark.parametrize("dropout", ["hidden_dropout_prob", "attention_probs_dropout_prob", "classifier_dropout"])
def test_each_dropout_of_the_config_is_applied(dropout: str) -> None:
    none = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0, "classifier_dropout": 0.0}
    inputs = batch(TAGGER)
    model = small(**none).train()
    assert torch.equal(model(**inputs).logits, model(**inputs).logits)
    model = small(**none | {dropout: 0.5}).train()
    assert (model(**inputs).logits - model(**inputs).logits).abs().max() > 1e-3


def test_dropout_stands_where_bert_has_it(monkeypatch: pytest.MonkeyPatch) -> None:
    rates: list[float] = []
    original = F.dropout
    monkeypatch.setattr(F, "dropout", lambda x, p, *rest: (rates.append(p), original(x, p, *rest))[1])
    model = small(hidden_dropout_prob=0.2, attention_probs_dropout_prob=0.3, classifier_dropout=0.4).train()
    model.set_attn_implementation("eager")
    model(**batch(TAGGER))
    layer = [0.3, 0.2, 0.2]  # the attention weights, and the ends of both halves
    assert rates == [0.2, *layer * 3, 0.4]


# What is asked for.


@pytest.mark.parametrize("head", HEADS)
@pytest.mark.parametrize("implementation", ["eager", "sdpa"])
def test_attentions_are_given_whatever_the_implementation(head: str, implementation: str) -> None:
    inputs = batch(head, (7, 3, 5))
    model = small(head)
    model.set_attn_implementation(implementation)
    plain, asked = model(**inputs), model(**inputs, output_attentions=True)
    rows = 6 if head == "BertForMultipleChoice" else 3
    assert len(asked.attentions) == 3
    mask = inputs["attention_mask"].reshape(rows, 7)
    for weights in asked.attentions:
        assert weights.shape == (rows, 4, 7, 7)
        torch.testing.assert_close(weights.sum(-1), mask[:, None].expand(rows, 4, 7).float(), atol=1e-5, rtol=0)
        assert (weights * (1 - mask)[:, None, None]).abs().max() == 0
    key = "logits" if "logits" in plain else next(iter(plain))
    torch.testing.assert_close(asked[key], plain[key], atol=1e-5, rtol=0)
    assert plain.attentions is None


def test_hidden_states_start_with_the_embeddings_and_end_with_the_last() -> None:
    inputs = batch("BertModel", (7, 3, 5))
    output = small("BertModel")(**inputs, output_hidden_states=True)
    assert len(output.hidden_states) == 4
    assert torch.equal(output.hidden_states[-1], output.last_hidden_state)
    padding = inputs["attention_mask"] == 0
    assert all(state[padding].abs().max() == 0 for state in output.hidden_states)


def test_the_config_can_ask_for_states_attentions_and_tuples() -> None:
    model = small(output_hidden_states=True, output_attentions=True, return_dict=False)
    output = model(**batch(TAGGER))
    assert type(output) is tuple
    assert [len(output), len(output[2]), len(output[3])] == [4, 4, 3]
    overruled = model(**batch(TAGGER), return_dict=True, output_attentions=False, output_hidden_states=False)
    assert list(overruled) == ["loss", "logits"]


def test_logits_at_padding_are_zero() -> None:
    inputs = batch(TAGGER, (7, 3, 5))
    logits = small()(**inputs).logits
    assert logits[inputs["attention_mask"] == 0].abs().max() == 0
    assert logits[inputs["attention_mask"] == 1].abs().min() > 0


def test_without_pooling_layer() -> None:
    model = minibert.BertModel(BertConfig(**fields_of("BertModel")), add_pooling_layer=False).eval()
    assert list(model(**batch("BertModel"))) == ["last_hidden_state"]
    assert not any("pooler" in name for name in model.state_dict())


# Outputs.


def test_an_output_works_by_attribute_key_and_index() -> None:
    output = HeadOutput(logits=torch.ones(1), loss=torch.zeros(()), hidden_states=None)
    assert list(output) == ["loss", "logits"]  # declared order, absent ones left out
    assert output.loss is output["loss"] is output[0]
    assert output[:2] == output.to_tuple() == (output.loss, output.logits)
    assert output.attentions is None
    output.loss = torch.ones(())
    assert output["loss"] == 1
    with pytest.raises(AttributeError, match="HeadOutput has no field 'nothing'"):
        _ = output.nothing
    with pytest.raises(TypeError, match="no field nothing"):
        HeadOutput(nothing=1)
    with pytest.raises(KeyError):
        _ = output["attentions"]


def test_an_output_can_be_rebuilt_copied_and_pickled() -> None:
    output = HeadOutput(logits=torch.ones(1), loss=torch.zeros(()))
    halved = type(output)({name: value.half() for name, value in output.items()})  # as accelerate does
    assert (type(halved), halved.logits.dtype) == (HeadOutput, torch.float16)
    for other in (copy.deepcopy(output), copy.copy(output), pickle.loads(pickle.dumps(output))):
        assert (type(other), list(other)) == (HeadOutput, ["loss", "logits"])
        assert isinstance(other, ModelOutput)


def test_an_output_is_gathered_and_taken_apart_by_torch() -> None:
    output = HeadOutput(logits=torch.ones(2, 3), loss=torch.zeros(1))
    gathered = type(output)((name, torch.cat([value, value])) for name, value in output.items())  # as DataParallel does
    assert (type(gathered), gathered.logits.shape) == (HeadOutput, (4, 3))
    doubled = torch.utils._pytree.tree_map(lambda x: 2 * x, output)
    assert (type(doubled), doubled.logits.unique().tolist(), list(doubled)) == (HeadOutput, [2.0], ["loss", "logits"])


# Losses.


def test_the_loss_is_the_mean_over_labelled_tokens() -> None:
    inputs = batch(TAGGER, (7, 3, 5))
    output = small()(**inputs)
    labelled = inputs["labels"] != -100
    expected = F.cross_entropy(output.logits[labelled], inputs["labels"][labelled])
    assert output.loss.item() == pytest.approx(expected.item(), abs=1e-6)


@pytest.mark.parametrize("head", [TAGGER, "BertForMaskedLM"])
@pytest.mark.parametrize("mask", [None, torch.zeros(1, 5)])
def test_a_batch_without_labels_has_loss_zero_and_no_gradient(head: str, mask: torch.Tensor | None) -> None:
    model = small(head)
    ids = torch.randint(6, 99, (1, 5))
    loss = model(ids, mask, labels=torch.full((1, 5), -100)).loss
    assert loss.item() == 0.0
    loss.backward()
    assert all(p.grad is None or p.grad.abs().max() == 0 for p in model.parameters())
    before = model(ids, labels=torch.ones(1, 5, dtype=torch.long)).loss
    assert before.isfinite()


def test_num_items_in_batch_makes_accumulated_losses_add_up() -> None:
    # One labelled token with loss 2 and three with loss 1: the token mean is 5 / 4.
    def logits_for(losses: list[float]) -> torch.Tensor:
        other = torch.tensor(losses).exp().sub(1).log()  # so that -log softmax of class 0 is the loss
        return torch.stack([torch.zeros_like(other), other], 1)

    parts = [(logits_for([2.0]), torch.zeros(1)), (logits_for([1.0, 1.0, 1.0]), torch.zeros(3))]
    for count in (4, torch.tensor(4)):
        total = sum(classification_loss(logits, labels.long(), count) for logits, labels in parts)
        assert total.item() == pytest.approx(1.25)


@pytest.mark.parametrize("head", [h for h in HEADS if h not in ("BertModel", "BertForPreTraining")])
def test_accumulation_equals_one_large_batch(head: str) -> None:
    inputs = batch(head, (7, 3, 5))
    model = small(head)
    label_names = [name for name in inputs if "label" in name or "_positions" in name]
    count = int((inputs[label_names[0]] != -100).sum())
    model(**inputs, num_items_in_batch=count).loss.backward()
    together = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    assert model(**inputs).loss.item() == pytest.approx(model(**inputs, num_items_in_batch=count).loss.item(), rel=1e-6)
    model.zero_grad()
    for row in range(3):
        part = {name: value[row : row + 1] for name, value in inputs.items()}
        model(**part, num_items_in_batch=count).loss.backward()
    for name, gradient in together.items():
        torch.testing.assert_close(dict(model.named_parameters())[name].grad, gradient, atol=1e-6, rtol=1e-4)


def test_nothing_to_count_divides_by_one() -> None:
    ids = torch.randint(6, 99, (1, 5))
    for count in (0, torch.tensor(0)):
        assert small()(ids, labels=torch.full((1, 5), -100), num_items_in_batch=count).loss.item() == 0.0


def test_a_label_at_padding_is_no_label() -> None:
    inputs = batch(TAGGER, (7, 3, 5))
    model = small()
    expected = model(**inputs).loss
    inputs["labels"] = inputs["labels"].masked_fill(inputs["attention_mask"] == 0, 0)
    assert torch.equal(model(**inputs).loss, expected)


def test_the_loss_of_half_precision_is_taken_in_float32_and_of_double_in_float64() -> None:
    for dtype, wanted in ((torch.bfloat16, torch.float32), (torch.float64, torch.float64)):
        assert small().to(dtype)(**batch(TAGGER)).loss.dtype == wanted


@pytest.mark.parametrize(
    ("labels", "message"),
    [
        (torch.zeros(3, 6, dtype=torch.long), r"expected shape \(3, 7\).* got \(3, 6\)"),
        (torch.full((3, 7), 18), "expected 0 to 17, or -100 for none, got 18"),
        (torch.full((3, 7), -1), "got -1"),
        (torch.full((3, 7), 1.7), "integers, got torch.float32"),
    ],
)
def test_labels_that_do_not_fit_are_refused(labels: torch.Tensor, message: str) -> None:
    with pytest.raises(MinibertError, match=message):
        small()(**batch(TAGGER) | {"labels": labels})


def test_multi_label_targets_of_another_shape_are_refused() -> None:
    model = small("BertForSequenceClassification", problem_type="multi_label_classification")
    with pytest.raises(MinibertError, match=r"\(3, 7\), got \(3,\)"):
        model(**batch("BertForSequenceClassification"))


def test_positions_that_are_no_integers_are_refused() -> None:
    inputs = batch("BertForQuestionAnswering")
    with pytest.raises(MinibertError, match=r"integers, got torch\.float32"):
        small("BertForQuestionAnswering")(**inputs | {"start_positions": inputs["start_positions"].float()})


def test_question_answering_needs_two_labels() -> None:
    with pytest.raises(ConfigError, match="2, got 18"):
        minibert.BertForQuestionAnswering(BertConfig(num_labels=18, hidden_size=20, num_attention_heads=4))


# Inputs that do not fit.


def test_ids_beyond_the_table_are_named_before_any_arithmetic() -> None:
    model = minibert.BertForTokenClassification(BertConfig(**CFG_T))
    with pytest.raises(MinibertError, match=r"id 120 lies outside the 120 rows.*tokenizer and checkpoint do not match"):
        model(torch.tensor([[2, 120, 3]]))
    with pytest.raises(MinibertError, match="id -1 lies outside the 120 rows"):
        model(torch.tensor([[2, -1, 3]]))
    with pytest.raises(MinibertError, match="token_type_ids: id 2 lies outside the 2 rows"):
        model(torch.tensor([[2, 1, 3]]), token_type_ids=torch.tensor([[0, 1, 2]]))
    with pytest.raises(MinibertError, match="position_ids: id 64 lies outside the 64 rows"):
        model(torch.tensor([[2, 1, 3]]), position_ids=torch.tensor([[0, 1, 64]]))
    model(torch.tensor([[2, 119, 3]]), token_type_ids=torch.tensor([[0, 1, 1]]), position_ids=torch.tensor([0, 1, 63]))


def test_a_sequence_longer_than_the_position_table_is_refused_with_both_numbers() -> None:
    model = minibert.BertForTokenClassification(BertConfig(**CFG_T)).eval()
    with pytest.raises(MinibertError, match="input of 65 tokens is longer than max_position_embeddings 64"):
        model(torch.full((1, 65), 7))
    assert model(torch.full((1, 64), 7)).logits.shape == (1, 64, 18)


@pytest.mark.parametrize(
    ("inputs", "message"),
    [
        ({}, "either input_ids or inputs_embeds, got neither"),
        ({"input_ids": torch.ones(1, 3).long(), "inputs_embeds": torch.ones(1, 3, 20)}, "got both"),
        ({"input_ids": torch.ones(3).long()}, r"input_ids: expected shape \(batch, sequence\), got \(3,\)"),
        ({"input_ids": torch.ones(1, 3)}, "input_ids: expected integers, got torch.float32"),
        ({"inputs_embeds": torch.ones(1, 3, 19)}, r"\(batch, sequence, 20\), got \(1, 3, 19\)"),
        (
            {"input_ids": torch.ones(1, 3).long(), "token_type_ids": torch.zeros(1, 4).long()},
            r"\(1, 3\) or \(3,\), got \(1, 4\)",
        ),
        ({"input_ids": torch.ones(2, 3).long(), "position_ids": torch.zeros(3, 3).long()}, r"or \(3,\), got \(3, 3\)"),
        ({"input_ids": torch.ones(2, 3).long(), "position_ids": torch.zeros(2, 1).long()}, r"or \(3,\), got \(2, 1\)"),
        ({"input_ids": torch.ones(2, 3).long(), "position_ids": torch.tensor(0)}, r"or \(3,\), got \(\)"),
    ],
)
def test_inputs_that_do_not_fit_are_named(inputs: dict[str, Any], message: str) -> None:
    with pytest.raises(MinibertError, match=message):
        small()(**inputs)


def test_multiple_choice_wants_a_dimension_of_choices() -> None:
    model, ids = small("BertForMultipleChoice"), torch.full((3, 2, 7), 9)
    for wrong in ({"input_ids": ids[0]}, {"input_ids": ids, "attention_mask": torch.ones(2, 6)}):
        with pytest.raises(MinibertError, match=r"\(batch, choices, sequence\), got .*\(2, [67]\)"):
            model(**wrong)
    with pytest.raises(MinibertError, match="got neither"):
        model()


@pytest.mark.parametrize("dtype", [torch.int32, torch.int16, torch.uint8])
def test_ids_of_any_integer_dtype(dtype: torch.dtype) -> None:
    inputs = batch("BertModel")
    model = small("BertModel")
    narrow = {name: value.to(dtype) for name, value in inputs.items()}
    assert torch.equal(model(**narrow).last_hidden_state, model(**inputs).last_hidden_state)


@pytest.mark.parametrize("head", HEADS)
@pytest.mark.parametrize("shape", [(0, 7), (2, 0), (0, 0)])
def test_an_empty_batch_and_an_empty_sequence(head: str, shape: tuple[int, int]) -> None:
    choices = (3,) if head == "BertForMultipleChoice" else ()
    for mask in (None, torch.ones(shape[0], *choices, shape[1])):
        output = small(head)(torch.zeros(shape[0], *choices, shape[1]).long(), mask)
        assert output[0].shape[0] == shape[0]
        assert output[0].isfinite().all()


def test_every_forward_names_its_arguments() -> None:
    for head in HEADS:
        kinds = {p.kind for p in inspect.signature(getattr(minibert, head).forward).parameters.values()}
        assert kinds == {inspect.Parameter.POSITIONAL_OR_KEYWORD}


# Initial weights.


@pytest.mark.parametrize("head", HEADS)
def test_initial_weights_are_berts(head: str) -> None:
    model = small(head, hidden_size=200, initializer_range=0.05)
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear | nn.Embedding):
            weight = module.weight.detach()
            if name.endswith(("word_embeddings", "decoder")):
                assert weight[5].abs().max() == 0  # the padding row
                weight = torch.cat([weight[:5], weight[6:]])
            assert weight.mean().item() == pytest.approx(0, abs=0.01), name
            assert weight.std().item() == pytest.approx(0.05, rel=0.15), name
            assert weight.abs().max() > 0.06  # a uniform draw of this deviation would end at 0.087
        if isinstance(module, nn.LayerNorm):
            assert torch.equal(module.weight, torch.ones_like(module.weight))
        if isinstance(getattr(module, "bias", None), nn.Parameter):
            assert module.bias.abs().max() == 0, name


@pytest.mark.parametrize("head", ["BertForTokenClassification", "BertForMaskedLM"])
def test_init_weights_draws_every_parameter_anew(head: str) -> None:
    with torch.device("meta"):
        model = small(head)
    model.to_empty(device="cpu")
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(float("nan"))
    for _ in range(2):  # and again on what is tied by now
        model.init_weights()
        model.tie_weights()
        assert all(p.isfinite().all() for p in model.parameters())
        assert model.get_input_embeddings().weight[5].abs().max() == 0
        assert model.get_input_embeddings().weight[6].abs().max() > 0


def test_normal_and_not_uniform() -> None:
    weight = small(hidden_size=200, initializer_range=0.05).bert.encoder.layer[0].intermediate.dense.weight
    assert weight.abs().max() > 0.15  # three deviations


def test_initialisation_is_reproducible() -> None:
    states = []
    for _ in range(2):
        torch.manual_seed(7)
        states.append(small().state_dict())
    assert all(torch.equal(states[0][name], states[1][name]) for name in states[0])


def test_tied_weights_are_one_parameter_and_stay_so() -> None:
    model = small("BertForMaskedLM")
    head, embeddings = model.cls.predictions, model.bert.embeddings.word_embeddings
    assert head.decoder.weight is embeddings.weight
    assert head.decoder.bias is head.bias
    assert model.get_input_embeddings() is embeddings
    moved = copy.deepcopy(model).double()
    assert moved.cls.predictions.decoder.weight is moved.bert.embeddings.word_embeddings.weight


# Gradient checkpointing.


@pytest.mark.parametrize("names", ["gradient_checkpointing", "activation_checkpointing"])
@pytest.mark.parametrize("kwargs", [None, {"use_reentrant": True}])
def test_checkpointing_changes_memory_and_not_gradients(names: str, kwargs: dict[str, Any] | None) -> None:
    none = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0, "classifier_dropout": 0.0}
    inputs = batch(TAGGER, (7, 3, 5))
    model = small(**none).train()
    model(**inputs).loss.backward()
    expected = {name: p.grad.clone() for name, p in model.named_parameters()}
    model.zero_grad()
    getattr(model, f"{names}_enable")(kwargs)
    assert model.is_gradient_checkpointing
    calls: list[int] = []
    model.bert.encoder.layer[1].intermediate.register_forward_hook(lambda *_: calls.append(1))
    model(**inputs, output_hidden_states=True, output_attentions=True).loss.backward()
    assert len(calls) == 2  # once forward, once again in the backward pass
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(parameter.grad, expected[name], atol=1e-6, rtol=1e-5)
    getattr(model, f"{names}_disable")()
    model(**inputs).loss.backward()
    assert len(calls) == 3
    assert not model.is_gradient_checkpointing


def test_checkpointing_repeats_the_same_dropout() -> None:
    model, inputs = small().train(), batch(TAGGER, (7, 3, 5))
    gradients = []
    for enable in (False, True):
        model.zero_grad()
        if enable:
            model.activation_checkpointing_enable()
        torch.manual_seed(3)
        model(**inputs).loss.backward()
        gradients.append([p.grad.clone() for p in model.parameters()])
    for plain, checkpointed in zip(*gradients, strict=True):
        torch.testing.assert_close(plain, checkpointed, atol=1e-7, rtol=1e-5)


def test_checkpointing_options() -> None:
    model = small()
    model.gradient_checkpointing_enable({"preserve_rng_state": False}, every_n_layers=2)
    assert model.bert.encoder.checkpoint_kwargs == {"use_reentrant": False, "preserve_rng_state": False}
    assert model.bert.encoder.checkpoint_every == 2
    with pytest.raises(MinibertError, match="offload=True is not implemented"):
        model.activation_checkpointing_enable(offload=True)


def test_checkpointing_every_second_layer_and_never_in_eval_mode() -> None:
    model, inputs = small().train(), batch(TAGGER)
    model.activation_checkpointing_enable(every_n_layers=2)
    calls: list[int] = []
    for index, layer in enumerate(model.bert.encoder.layer):
        layer.intermediate.register_forward_hook(lambda *_, index=index: calls.append(index))
    model(**inputs).loss.backward()
    assert sorted(calls) == [0, 0, 1, 2, 2]
    calls.clear()
    model.eval()(**inputs).loss.backward()
    assert sorted(calls) == [0, 1, 2]


# Switches and sizes.


def test_set_attn_implementation_reaches_every_layer_and_refuses_unknown_names() -> None:
    model = small()
    model.set_attn_implementation("eager")
    assert {layer.attention.self.attn_implementation for layer in model.bert.encoder.layer} == {"eager"}
    with pytest.raises(MinibertError, match="'flash_attention_2' is not one of eager, sdpa"):
        model.set_attn_implementation("flash_attention_2")


def test_num_parameters_counts_tied_ones_once_as_transformers_does() -> None:
    for head in ("BertForMaskedLM", TAGGER):
        ours, theirs = pair(head)
        assert ours.num_parameters() == theirs.num_parameters()
        assert ours.num_parameters(exclude_embeddings=True) == theirs.num_parameters(exclude_embeddings=True)
    ours.bert.requires_grad_(False)
    assert ours.num_parameters(only_trainable=True) == 20 * 18 + 18


def test_a_model_can_be_copied_and_pickled() -> None:
    model, inputs = small(), batch(TAGGER, (7, 3, 5))
    expected = model(**inputs).logits
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert torch.equal(other(**inputs).logits, expected)


def test_a_layer_can_be_hooked_and_its_projections_replaced() -> None:
    model, inputs = small(), batch(TAGGER, (7, 3, 5))
    before = model(**inputs).logits
    seen: list[Any] = []
    model.bert.encoder.layer[0].attention.self.query.register_forward_hook(lambda m, i, o: seen.append(o.shape))
    model.bert.register_forward_hook(lambda *_: seen.append("bert"))
    model(**inputs)
    assert seen == [torch.Size([15, 20]), "bert"]

    class Shifted(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x) + 1

    old = model.bert.encoder.layer[1].attention.self.value
    new = Shifted(20, 20)
    new.load_state_dict(old.state_dict())
    model.bert.encoder.layer[1].attention.self.value = new
    assert (model(**inputs).logits - before).abs().max() > 1e-3
