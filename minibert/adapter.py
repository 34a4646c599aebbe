"""Into transformers: minibert's models as `PreTrainedModel`s, and its attention under names of its own.

Importing this module needs transformers (`minibert[adapter]` brings it); nothing else in the package imports it. The
models have the names, parameters and results of the stock ones, so that whatever asks for a `PreTrainedModel` takes
them: `transformers.pipeline`, the auto classes, Trainer, PEFT. A checkpoint of theirs is one of the stock class and of
minibert, too. Everything at padding is 0, and masks are checked, as in minibert.
"""

from __future__ import annotations

import functools
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from minibert.config import BertConfig
from minibert.errors import MinibertError
from minibert.model import encoder, heads
from minibert.model.attention import ATTENTION_FUNCTIONS, AttentionFunction, MultiHeadAttention
from minibert.model.pretrained import BertPreTrainedModel, init_module

try:
    import transformers
    from transformers import modeling_outputs as outputs
    from transformers.masking_utils import AttentionMaskInterface, sdpa_mask
    from transformers.models.bert.modeling_bert import BertForPreTrainingOutput
except ImportError as missing:
    raise ImportError(f"minibert.adapter: pip install 'minibert[adapter]' ({missing})") from missing

# What an attention function can be asked for beyond query, key, value and mask, and BERT never asks for.
NOT_BERTS = ("position_bias", "softcap", "s_aux", "cache")


class AdaptedModel(transformers.PreTrainedModel):
    """A minibert model in the shape of a `PreTrainedModel`: the same modules under the same names.

    Args:
        config: of transformers.
    """

    config_class = transformers.BertConfig
    base_model_prefix = "bert"
    supports_gradient_checkpointing = True
    _supports_sdpa = True
    minibert_class: ClassVar[type[BertPreTrainedModel]]
    output_class: ClassVar[type[Any]]

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)  # type: ignore[no-untyped-call]
        cls._tied_weights_keys = dict(cls.minibert_class.tied_weights)

        # Trainer and others ask the signature which columns of a data set the model wants.
        @functools.wraps(cls.minibert_class.forward)
        def forward(self: AdaptedModel, *inputs: Any, **named: Any) -> Any:
            return self.run(*inputs, **named)

        cls.forward = forward

    def __init__(self, config: transformers.BertConfig) -> None:
        super().__init__(config)
        self._adopt(self.minibert_class(BertConfig.from_dict(config.to_dict())))
        self.set_attn_implementation(config._attn_implementation)
        self.post_init()  # type: ignore[no-untyped-call]

    def _adopt(self, model: BertPreTrainedModel) -> None:
        """Makes the model's modules this one's. Both share one table, so a module put in here is in there, too."""
        vars(self)["_modules"] = vars(model)["_modules"]
        self._model = (model,)  # in a tuple, which hides it from nn.Module

    @property
    def minibert(self) -> BertPreTrainedModel:
        """The model within, with the same parameters."""
        return self._model[0]

    def run(
        self,
        *inputs: Any,
        output_attentions: bool | None = None,
        output_hidden_states: bool | None = None,
        return_dict: bool | None = None,
        **named: Any,
    ) -> Any:
        """What `forward` does: runs the model within; the config, which can be changed here, says what was not said."""
        config, model = self.config, self.minibert
        if model.config.problem_type != config.problem_type:
            model.config = model.config.replace(problem_type=config.problem_type)
        output = model(
            *inputs,
            **named,
            output_attentions=config.output_attentions if output_attentions is None else output_attentions,
            output_hidden_states=config.output_hidden_states if output_hidden_states is None else output_hidden_states,
            return_dict=True,
        )
        as_dict = config.return_dict if return_dict is None else return_dict
        return self.output_class(**output) if as_dict else output.to_tuple()

    def _init_weights(self, module: nn.Module) -> None:
        decoder = self.get_output_embeddings()  # type: ignore[no-untyped-call]
        if not (self.config.tie_word_embeddings and module is decoder):  # else it is drawn as the embeddings
            init_module(module, self.minibert.config)

    def get_input_embeddings(self) -> nn.Module:
        """The word embeddings."""
        return self.minibert.get_input_embeddings()

    def set_attn_implementation(self, attn_implementation: Any, allow_all_kernels: bool = False) -> None:  # noqa: ARG002
        """Chooses the attention function: "sdpa" or "eager"."""
        self.minibert.set_attn_implementation(attn_implementation)
        self.config._attn_implementation_internal = attn_implementation

    def activation_checkpointing_enable(self, *arguments: Any, **options: Any) -> None:
        """As in minibert, which has the arguments of transformers."""
        self.minibert.activation_checkpointing_enable(*arguments, **options)

    def activation_checkpointing_disable(self) -> None:
        """Keeps activations again."""
        self.minibert.activation_checkpointing_disable()

    @property
    def is_activation_checkpointing(self) -> bool:
        """Whether layers are recomputed in the backward pass."""
        return self.minibert.is_activation_checkpointing


class BertModel(AdaptedModel):
    """`minibert.BertModel` for transformers."""

    minibert_class = encoder.BertModel
    output_class = outputs.BaseModelOutputWithPoolingAndCrossAttentions


class BertForTokenClassification(AdaptedModel):
    """`minibert.BertForTokenClassification` for transformers."""

    minibert_class = heads.BertForTokenClassification
    output_class = outputs.TokenClassifierOutput


class BertForMaskedLM(AdaptedModel):
    """`minibert.BertForMaskedLM` for transformers."""

    minibert_class = heads.BertForMaskedLM
    output_class = outputs.MaskedLMOutput

    def get_output_embeddings(self) -> nn.Module:
        """The decoder."""
        return self.get_submodule("cls.predictions.decoder")


class BertForPreTraining(AdaptedModel):
    """`minibert.BertForPreTraining` for transformers."""

    minibert_class = heads.BertForPreTraining
    output_class = BertForPreTrainingOutput

    get_output_embeddings = BertForMaskedLM.get_output_embeddings


class BertForNextSentencePrediction(AdaptedModel):
    """`minibert.BertForNextSentencePrediction` for transformers."""

    minibert_class = heads.BertForNextSentencePrediction
    output_class = outputs.NextSentencePredictorOutput


class BertForSequenceClassification(AdaptedModel):
    """`minibert.BertForSequenceClassification` for transformers."""

    minibert_class = heads.BertForSequenceClassification
    output_class = outputs.SequenceClassifierOutput


class BertForMultipleChoice(AdaptedModel):
    """`minibert.BertForMultipleChoice` for transformers."""

    minibert_class = heads.BertForMultipleChoice
    output_class = outputs.MultipleChoiceModelOutput


class BertForQuestionAnswering(AdaptedModel):
    """`minibert.BertForQuestionAnswering` for transformers."""

    minibert_class = heads.BertForQuestionAnswering
    output_class = outputs.QuestionAnsweringModelOutput


AUTO_CLASSES: dict[Any, type[AdaptedModel]] = {
    transformers.AutoModel: BertModel,
    transformers.AutoModelForTokenClassification: BertForTokenClassification,
    transformers.AutoModelForMaskedLM: BertForMaskedLM,
    transformers.AutoModelForPreTraining: BertForPreTraining,
    transformers.AutoModelForNextSentencePrediction: BertForNextSentencePrediction,
    transformers.AutoModelForSequenceClassification: BertForSequenceClassification,
    transformers.AutoModelForMultipleChoice: BertForMultipleChoice,
    transformers.AutoModelForQuestionAnswering: BertForQuestionAnswering,
}


def as_pretrained(model: BertPreTrainedModel) -> AdaptedModel:
    """A `PreTrainedModel` around a model of minibert; both have the same parameters from then on.

    Raises:
        MinibertError: the model is optimized, or of a class that transformers does not have (one with a CRF).
    """
    adapted = next((a for a in AUTO_CLASSES.values() if a.minibert_class is type(model)), None)
    if adapted is None or model.engine is not None:
        what = type(model).__name__ if model.engine is None else f"an optimized model ({model.engine})"
        known = ", ".join(a.__name__ for a in AUTO_CLASSES.values())
        raise MinibertError(f"expected a plain model of {known}, got {what}")
    config = transformers.BertConfig.from_dict(model.saved_config().to_dict())
    with torch.device("meta"):
        wrapped = adapted(config)
    wrapped._adopt(model)
    attention = next(module for module in model.modules() if isinstance(module, MultiHeadAttention))
    wrapped.set_attn_implementation(attention.attn_implementation)
    wrapped.train(model.training)
    return wrapped


def register_auto_classes() -> None:
    """Makes transformers' auto classes, and so `pipeline` by name, give minibert's models for BERT checkpoints.

    For the whole process, until `unregister_auto_classes`.
    """
    for auto_class, model_class in AUTO_CLASSES.items():
        auto_class.register(transformers.BertConfig, model_class, exist_ok=True)


def unregister_auto_classes() -> None:
    """Gives the auto classes their own models back."""
    for auto_class in AUTO_CLASSES:
        auto_class._model_mapping._extra_content.pop(transformers.BertConfig, None)


def register_attention() -> None:
    """Registers "minibert_eager" and "minibert_sdpa" as `attn_implementation` for the models of transformers.

    With them a query that has nothing to attend to gets 0 and never NaN, and "minibert_eager" gives its weights.
    """
    for name in ("eager", "sdpa"):
        registered = f"minibert_{name}"
        transformers.AttentionInterface.register(registered, functools.partial(_attention, ATTENTION_FUNCTIONS[name]))
        AttentionMaskInterface.register(registered, sdpa_mask)  # bool, True = attend


def _attention(
    function: AttentionFunction,
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    **more: Any,
) -> tuple[Tensor, Tensor | None]:
    """An attention function of minibert behind the signature of transformers: (B, H, L, D) in, (B, L, H, D) out."""
    refused = [name for name in NOT_BERTS if more.get(name) is not None]
    if refused:
        raise MinibertError(f"attn_implementation: minibert's attention has no {', '.join(refused)}; take another")
    if scaling is not None:  # minibert's functions divide by sqrt(D) themselves
        query = query * (scaling * query.shape[-1] ** 0.5)
    groups = query.shape[1] // key.shape[1]
    if groups > 1:  # fewer heads of keys than of queries
        key, value = (x.repeat_interleave(groups, 1) for x in (key, value))
    causal = getattr(module, "is_causal", False) if is_causal is None else is_causal
    if attention_mask is None and causal and query.shape[2] > 1:  # sdpa_mask leaves it to the function
        shape = (query.shape[2], key.shape[2])
        attention_mask = torch.ones(shape, dtype=torch.bool, device=query.device).tril()[None, None]
    context, weights = function(query, key, value, attention_mask, dropout)
    return context.transpose(1, 2).contiguous(), weights
