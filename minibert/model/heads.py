"""BERT's task heads. Each works on packed tokens; padding comes back once, in the logits.

Shapes: B sequences of S cells, T packed tokens, C hidden channels, V vocabulary.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from minibert.config import BertConfig
from minibert.errors import ConfigError, MinibertError
from minibert.model.activations import activation
from minibert.model.encoder import BertModel, PackedOutput
from minibert.model.outputs import HeadOutput, PreTrainingOutput, QuestionAnsweringOutput
from minibert.model.packing import Packing, is_tracing
from minibert.model.pretrained import BertPreTrainedModel

IGNORED_LABEL = -100


def classification_loss(logits: Tensor, labels: Tensor, num_items: int | Tensor | None = None) -> Tensor:
    """Cross entropy of logits (N, classes) against labels (N,), in float32 at least.

    The mean over labelled rows (-100 is no label), which is 0.0 with zero gradients when there are none; or, with
    `num_items`, the sum divided by it, so that the losses of accumulated batches add up to that of one large batch.

    Raises:
        MinibertError: labels of another shape, or (on CPU) outside the classes.
    """
    if labels.shape != logits.shape[:1] or labels.is_floating_point():
        raise MinibertError(f"labels: expected {len(logits)} integers, got {labels.dtype} {tuple(labels.shape)}")
    is_label = labels != IGNORED_LABEL
    if labels.device.type == "cpu" and not is_tracing():
        wrong = labels[is_label & ((labels < 0) | (labels >= logits.shape[1]))]
        if wrong.numel():
            classes = f"0 to {logits.shape[1] - 1}, or {IGNORED_LABEL} for none"
            raise MinibertError(f"labels: expected {classes}, got {wrong[0].item()}")
    total = F.cross_entropy(widen(logits), labels.long(), ignore_index=IGNORED_LABEL, reduction="sum")
    return total / at_least_one(is_label.sum() if num_items is None else num_items)


def at_least_one(count: int | Tensor) -> int | Tensor:
    """A divisor for a sum that is 0 when there is nothing to count."""
    return count.clamp(min=1) if isinstance(count, Tensor) else max(count, 1)


def widen(logits: Tensor) -> Tensor:
    """Half precision to float32: a sum over a batch needs the digits."""
    return logits.to(torch.promote_types(logits.dtype, torch.float32))


def token_labels(labels: Tensor, packing: Packing) -> Tensor:
    """Labels (B, S), of which a padded position has none.

    Raises:
        MinibertError: not one for each token.
    """
    if labels.shape != (packing.batch_size, packing.seq_len):
        wanted = (packing.batch_size, packing.seq_len)
        raise MinibertError(f"labels: expected shape {wanted}, one for each token, got {tuple(labels.shape)}")
    return labels if packing.padding is None else labels.masked_fill(packing.padding, IGNORED_LABEL)


def _token_loss(logits: Tensor, labels: Tensor, packing: Packing, num_items: int | Tensor | None) -> Tensor:
    """The loss of packed logits (T, classes) against labels (B, S)."""
    return classification_loss(logits, packing.pack(token_labels(labels, packing)), num_items)


class BertTaskModel(BertPreTrainedModel):
    """A task model whose forward has the common signature; a subclass gives it a `head`."""

    bert: BertModel
    accepts_loss_kwargs = True  # tells transformers' Trainer to pass num_items_in_batch

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        token_type_ids: Tensor | None = None,
        position_ids: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        labels: Tensor | None = None,
        output_attentions: bool | None = None,
        output_hidden_states: bool | None = None,
        return_dict: bool | None = None,
        num_items_in_batch: int | Tensor | None = None,
        sequence_lengths: Tensor | None = None,
    ) -> Any:
        """Encodes a batch and applies the head.

        Args:
            input_ids, ..., inputs_embeds: as in `BertModel`.
            labels: what the class describes; -100 means no label.
            output_attentions, output_hidden_states, return_dict: as in `BertModel`.
            num_items_in_batch: divide the summed loss by this number instead of taking the mean.
            sequence_lengths: as in `BertModel`; logits and labels of tokens are then (1, S, ...), too.

        Returns:
            loss (if there are labels) and logits, then hidden_states and attentions if asked for.

        Raises:
            MinibertError: inputs or labels that do not fit the model or each other.
        """
        inputs = (input_ids, attention_mask, token_type_ids, position_ids, inputs_embeds)
        encoded = self.encode(inputs, output_attentions, output_hidden_states, sequence_lengths)
        return self.result(self.head(encoded, labels, num_items_in_batch), return_dict)

    def encode(
        self,
        inputs: tuple[Tensor | None, ...],
        output_attentions: bool | None,
        output_hidden_states: bool | None,
        sequence_lengths: Tensor | None = None,
    ) -> PackedOutput:
        """What the encoder makes of input_ids, ..., inputs_embeds."""
        encoded: PackedOutput = self.bert(
            *inputs, output_attentions, output_hidden_states, sequence_lengths=sequence_lengths, packed=True
        )
        return encoded

    def head(self, encoded: PackedOutput, labels: Tensor | None, num_items: int | Tensor | None) -> HeadOutput:
        """Logits, and the loss if there are labels, from what the encoder made."""
        raise NotImplementedError


def head_output(encoded: PackedOutput, loss: Tensor | None, logits: Tensor) -> HeadOutput:
    """A head's result with what the encoder was asked for."""
    return HeadOutput(loss=loss, logits=logits, hidden_states=encoded.hidden_states, attentions=encoded.attentions)


class BertForTokenClassification(BertTaskModel):
    """A label for every token: logits (B, S, num_labels), 0 at padding; labels (B, S)."""

    def __init__(self, config: BertConfig) -> None:
        super().__init__(config)
        self.bert = BertModel(config, add_pooling_layer=False)
        self.dropout = nn.Dropout(config.classifier_dropout_prob)
        self.classifier = nn.Linear(config.hidden_size, config.num_labels)
        self.post_init()

    def head(self, encoded: PackedOutput, labels: Tensor | None, num_items: int | Tensor | None) -> HeadOutput:
        logits = self.classifier(self.dropout(encoded.tokens))  # (T, num_labels)
        loss = None if labels is None else _token_loss(logits, labels, encoded.packing, num_items)
        return head_output(encoded, loss, encoded.packing.unpack(logits))


class BertPredictionTransform(nn.Module):
    """The dense layer between encoder and vocabulary."""

    def __init__(self, config: BertConfig) -> None:
        super().__init__()
        self.dense = nn.Linear(config.hidden_size, config.hidden_size)
        self.transform_act_fn = activation(config.hidden_act)
        self.LayerNorm = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps)

    def forward(self, tokens: Tensor) -> Tensor:
        normed: Tensor = self.LayerNorm(self.transform_act_fn(self.dense(tokens)))
        return normed


class BertLMPredictionHead(nn.Module):
    """Scores of the whole vocabulary; its matrix is usually the word embeddings'."""

    def __init__(self, config: BertConfig) -> None:
        super().__init__()
        self.transform = BertPredictionTransform(config)
        self.decoder = nn.Linear(config.hidden_size, config.vocab_size)
        self.bias = nn.Parameter(torch.zeros(config.vocab_size))  # the Hub's name for the decoder's bias

    def forward(self, tokens: Tensor) -> Tensor:
        scores: Tensor = self.decoder(self.transform(tokens))
        return scores


class BertPretrainingHeads(nn.Module):
    """The heads BERT was pretrained with, under the Hub's prefix `cls`."""

    def __init__(self, config: BertConfig, predictions: bool = True, seq_relationship: bool = True) -> None:
        super().__init__()
        if predictions:
            self.predictions = BertLMPredictionHead(config)
        if seq_relationship:
            self.seq_relationship = nn.Linear(config.hidden_size, 2)


LM_TIED_WEIGHTS = {
    "cls.predictions.decoder.weight": "bert.embeddings.word_embeddings.weight",
    "cls.predictions.decoder.bias": "cls.predictions.bias",
}


class BertForMaskedLM(BertTaskModel):
    """The token that was masked: logits (B, S, V), 0 at padding; labels (B, S)."""

    tied_weights = LM_TIED_WEIGHTS

    def __init__(self, config: BertConfig) -> None:
        super().__init__(config)
        self.bert = BertModel(config, add_pooling_layer=False)
        self.cls = BertPretrainingHeads(config, seq_relationship=False)
        self.post_init()

    def head(self, encoded: PackedOutput, labels: Tensor | None, num_items: int | Tensor | None) -> HeadOutput:
        logits = self.cls.predictions(encoded.tokens)  # (T, V)
        loss = None if labels is None else _token_loss(logits, labels, encoded.packing, num_items)
        return head_output(encoded, loss, encoded.packing.unpack(logits))


class BertForNextSentencePrediction(BertTaskModel):
    """Whether the second sentence follows the first: logits (B, 2), 0 = it does; labels (B,)."""

    def __init__(self, config: BertConfig) -> None:
        super().__init__(config)
        self.bert = BertModel(config)
        self.cls = BertPretrainingHeads(config, predictions=False)
        self.post_init()

    def head(self, encoded: PackedOutput, labels: Tensor | None, num_items: int | Tensor | None) -> HeadOutput:
        logits = self.cls.seq_relationship(encoded.pooler_output)
        loss = None if labels is None else classification_loss(logits, labels.flatten(), num_items)
        return head_output(encoded, loss, logits)


class BertForPreTraining(BertTaskModel):
    """Both pretraining heads at once: prediction_logits (B, S, V) and seq_relationship_logits (B, 2)."""

    tied_weights = LM_TIED_WEIGHTS
    accepts_loss_kwargs = False  # the loss counts tokens and sentences, and no one number divides both

    def __init__(self, config: BertConfig) -> None:
        super().__init__(config)
        self.bert = BertModel(config)
        self.cls = BertPretrainingHeads(config)
        self.post_init()

    def forward(  # type: ignore[override]  # one argument more, where transformers has it
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        token_type_ids: Tensor | None = None,
        position_ids: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        labels: Tensor | None = None,
        next_sentence_label: Tensor | None = None,
        output_attentions: bool | None = None,
        output_hidden_states: bool | None = None,
        return_dict: bool | None = None,
        num_items_in_batch: int | Tensor | None = None,
    ) -> Any:
        """As `BertTaskModel.forward`, with `labels` (B, S) for the tokens and `next_sentence_label` (B,).

        The loss is the sum of both, and is there only if both labels are. `num_items_in_batch` counts tokens; the
        sentences' part is always their mean.
        """
        inputs = (input_ids, attention_mask, token_type_ids, position_ids, inputs_embeds)
        encoded = self.encode(inputs, output_attentions, output_hidden_states)
        predictions = self.cls.predictions(encoded.tokens)  # (T, V)
        seq_relationship = self.cls.seq_relationship(encoded.pooler_output)
        loss = None
        if labels is not None and next_sentence_label is not None:
            loss = _token_loss(predictions, labels, encoded.packing, num_items_in_batch)
            loss = loss + classification_loss(seq_relationship, next_sentence_label.flatten())
        output = PreTrainingOutput(
            loss=loss,
            prediction_logits=encoded.packing.unpack(predictions),
            seq_relationship_logits=seq_relationship,
            hidden_states=encoded.hidden_states,
            attentions=encoded.attentions,
        )
        return self.result(output, return_dict)


class BertForSequenceClassification(BertTaskModel):
    """A label, labels or numbers for the whole sequence: logits (B, num_labels).

    `config.problem_type` says which: "single_label_classification" (labels (B,)), "multi_label_classification"
    (labels (B, num_labels) of 0.0 and 1.0) or "regression" (labels like the logits, or (B,) for one number). If it
    says nothing: one label is a regression, integer labels are classes, float labels are several at once.
    """

    def __init__(self, config: BertConfig) -> None:
        super().__init__(config)
        self.bert = BertModel(config)
        self.dropout = nn.Dropout(config.classifier_dropout_prob)
        self.classifier = nn.Linear(config.hidden_size, config.num_labels)
        self.post_init()

    def head(self, encoded: PackedOutput, labels: Tensor | None, num_items: int | Tensor | None) -> HeadOutput:
        logits = self.classifier(self.dropout(encoded.pooler_output))
        return head_output(encoded, None if labels is None else self._loss(logits, labels, num_items), logits)

    def _loss(self, logits: Tensor, labels: Tensor, num_items: int | Tensor | None) -> Tensor:
        problem = self.config.problem_type
        if problem is None:
            problem = "multi_label_classification" if labels.is_floating_point() else "single_label_classification"
            problem = "regression" if self.config.num_labels == 1 else problem
        if problem == "single_label_classification":
            return classification_loss(logits, labels.flatten(), num_items)
        if labels.numel() != logits.numel():
            shapes = f"{tuple(logits.shape)}, got {tuple(labels.shape)}"
            raise MinibertError(f"labels: expected shape {shapes} for problem_type {problem}")
        function = F.mse_loss if problem == "regression" else F.binary_cross_entropy_with_logits
        logits = widen(logits)
        total = function(logits, labels.reshape(logits.shape).to(logits.dtype), reduction="sum")
        return total / at_least_one(logits.numel() if num_items is None else num_items)


class BertForMultipleChoice(BertTaskModel):
    """Which of N choices fits: inputs (B, N, S), logits (B, N); labels (B,).

    Every input has a dimension of choices after the batch; hidden states and attentions come flattened, B * N of them.
    """

    def __init__(self, config: BertConfig) -> None:
        super().__init__(config)
        self.bert = BertModel(config)
        self.dropout = nn.Dropout(config.classifier_dropout_prob)
        self.classifier = nn.Linear(config.hidden_size, 1)
        self.post_init()

    def encode(
        self,
        inputs: tuple[Tensor | None, ...],
        output_attentions: bool | None,
        output_hidden_states: bool | None,
        sequence_lengths: Tensor | None = None,
    ) -> PackedOutput:
        if sequence_lengths is not None:
            raise MinibertError("sequence_lengths: choices cannot be packed; give them with an attention_mask")
        given = [x for x in inputs if x is not None]
        choices = given[0].shape[:2] if given else ()
        if any(x.dim() < 3 or x.shape[:2] != choices for x in given):
            shapes = ", ".join(str(tuple(x.shape)) for x in given)
            raise MinibertError(f"expected inputs (batch, choices, sequence), got {shapes}")
        flat = tuple(None if x is None else x.flatten(0, 1) for x in inputs)
        encoded = super().encode(flat, output_attentions, output_hidden_states)
        assert encoded.pooler_output is not None
        return replace(encoded, pooler_output=encoded.pooler_output.unflatten(0, choices))  # (B, N, C)

    def head(self, encoded: PackedOutput, labels: Tensor | None, num_items: int | Tensor | None) -> HeadOutput:
        logits = self.classifier(self.dropout(encoded.pooler_output)).squeeze(-1)
        loss = None if labels is None else classification_loss(logits, labels.flatten(), num_items)
        return head_output(encoded, loss, logits)


class BertForQuestionAnswering(BertTaskModel):
    """Where the answer starts and ends: start_logits and end_logits (B, S), 0 at padding.

    Since padding scores 0 and not minus infinity, mask it before an argmax. The loss knows: it is taken over real
    tokens only, so padding a sequence does not change it.
    """

    def __init__(self, config: BertConfig) -> None:
        super().__init__(config)
        if config.num_labels != 2:
            raise ConfigError(f"num_labels: question answering scores start and end, 2, got {config.num_labels}")
        self.bert = BertModel(config, add_pooling_layer=False)
        self.qa_outputs = nn.Linear(config.hidden_size, config.num_labels)
        self.post_init()

    def forward(  # type: ignore[override]  # positions in place of labels, as in transformers
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        token_type_ids: Tensor | None = None,
        position_ids: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        start_positions: Tensor | None = None,
        end_positions: Tensor | None = None,
        output_attentions: bool | None = None,
        output_hidden_states: bool | None = None,
        return_dict: bool | None = None,
        num_items_in_batch: int | Tensor | None = None,
    ) -> Any:
        """As `BertTaskModel.forward`, with `start_positions` and `end_positions` (B,) for labels.

        A position outside the sequence, or at padding, is no label: its answer was cut away. The loss is the mean
        of both parts.
        """
        inputs = (input_ids, attention_mask, token_type_ids, position_ids, inputs_embeds)
        encoded = self.encode(inputs, output_attentions, output_hidden_states)
        logits = self.qa_outputs(encoded.tokens)  # (T, 2)
        start_logits, end_logits = encoded.packing.unpack(logits).unbind(-1)
        loss = None
        if start_positions is not None and end_positions is not None:
            real = encoded.packing.unpack(torch.ones_like(logits[:, :1])).squeeze(-1).bool()
            parts = ((start_logits, start_positions), (end_logits, end_positions))
            loss = sum(_position_loss(*part, real, num_items_in_batch) for part in parts) / 2
        output = QuestionAnsweringOutput(
            loss=loss,
            start_logits=start_logits,
            end_logits=end_logits,
            hidden_states=encoded.hidden_states,
            attentions=encoded.attentions,
        )
        return self.result(output, return_dict)


def _position_loss(logits: Tensor, positions: Tensor, real: Tensor, num_items: int | Tensor | None) -> Tensor:
    """Cross entropy over the real positions of (B, S), from a position in each row."""
    if positions.is_floating_point():
        raise MinibertError(f"start_positions and end_positions: expected integers, got {positions.dtype}")
    positions = positions.flatten()
    inside = positions.clamp(0, logits.shape[1] - 1)
    is_real = (positions == inside) & real.gather(1, inside[:, None]).squeeze(1)
    scores = logits.masked_fill(~real, torch.finfo(logits.dtype).min)
    return classification_loss(scores, inside.masked_fill(~is_real, IGNORED_LABEL), num_items)


MODELS: dict[str, type[BertPreTrainedModel]] = {
    kind.__name__: kind
    for kind in (
        BertModel,
        BertForTokenClassification,
        BertForMaskedLM,
        BertForPreTraining,
        BertForNextSentencePrediction,
        BertForSequenceClassification,
        BertForMultipleChoice,
        BertForQuestionAnswering,
    )
}


def named_class(config: BertConfig) -> tuple[str, type[BertPreTrainedModel] | None]:
    """The class that a checkpoint names in `architectures`, "BertModel" if none, and ours of that name, if any."""
    name = next(iter(config.architectures or ()), BertModel.__name__)
    return name, MODELS.get(name)
