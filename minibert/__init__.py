"""A BERT encoder that speaks the Hugging Face format, and Chinese named entity recognition around it.

Names are loaded on first use, so that `import minibert` costs next to nothing.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from minibert.config import BertConfig as BertConfig
    from minibert.engine import optimize as optimize
    from minibert.errors import CheckpointError as CheckpointError
    from minibert.errors import ConfigError as ConfigError
    from minibert.errors import DataError as DataError
    from minibert.errors import MinibertError as MinibertError
    from minibert.model.attention import BertSelfAttention as BertSelfAttention
    from minibert.model.attention import MultiHeadAttention as MultiHeadAttention
    from minibert.model.encoder import BertModel as BertModel
    from minibert.model.heads import BertForMaskedLM as BertForMaskedLM
    from minibert.model.heads import BertForMultipleChoice as BertForMultipleChoice
    from minibert.model.heads import BertForNextSentencePrediction as BertForNextSentencePrediction
    from minibert.model.heads import BertForPreTraining as BertForPreTraining
    from minibert.model.heads import BertForQuestionAnswering as BertForQuestionAnswering
    from minibert.model.heads import BertForSequenceClassification as BertForSequenceClassification
    from minibert.model.heads import BertForTokenClassification as BertForTokenClassification
    from minibert.predict import TokenClassifier as TokenClassifier
    from minibert.text.decoding import Entity as Entity

_MODULES = {
    "config": ("BertConfig",),
    "engine": ("optimize",),
    "errors": ("CheckpointError", "ConfigError", "DataError", "MinibertError"),
    "model.attention": ("BertSelfAttention", "MultiHeadAttention"),
    "model.encoder": ("BertModel",),
    "model.heads": (
        "BertForMaskedLM",
        "BertForMultipleChoice",
        "BertForNextSentencePrediction",
        "BertForPreTraining",
        "BertForQuestionAnswering",
        "BertForSequenceClassification",
        "BertForTokenClassification",
    ),
    "predict": ("TokenClassifier",),
    "text.decoding": ("Entity",),
}
_HOMES = {name: f"{__name__}.{module}" for module, names in _MODULES.items() for name in names}

__all__ = [*sorted(_HOMES), "__version__"]  # pyright: ignore[reportUnsupportedDunderAll]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(_HOMES[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return __all__
