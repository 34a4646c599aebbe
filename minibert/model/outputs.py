"""What a model returns: values by attribute, by key and by index, with the names and order of `transformers`."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, overload

from torch import Tensor
from torch.utils._pytree import register_pytree_node  # public by use: transformers does the same


class ModelOutput(dict[str, Any]):
    """A dict of the values there are, in the order the class declares them; what is absent reads as None by attribute.

    Built from a mapping or pairs too, as tools that move, convert or gather results do (`type(output)({...})`).
    """

    def __init_subclass__(cls) -> None:
        # torch.export and others take results apart and put them together again.
        register_pytree_node(
            cls,
            lambda output: (list(output.values()), list(output)),
            lambda values, names: cls(zip(names, values, strict=True)),
            serialized_type_name=f"{cls.__module__}.{cls.__name__}",
        )

    def __init__(self, values: Mapping[str, Any] | Iterable[tuple[str, Any]] = (), /, **named: Any) -> None:
        given = dict(values, **named)
        unknown = given.keys() - self.__annotations__.keys()
        if unknown:
            raise TypeError(f"{type(self).__name__} has no field {', '.join(sorted(unknown))}")
        super().__init__({name: given[name] for name in self.__annotations__ if given.get(name) is not None})

    def __getattr__(self, name: str) -> Any:  # only called for what is not an attribute
        if name in type(self).__annotations__:
            return self.get(name)
        raise AttributeError(f"{type(self).__name__} has no field {name!r}")

    def __setattr__(self, name: str, value: Any) -> None:
        self[name] = value

    @overload
    def __getitem__(self, key: str | int) -> Any: ...
    @overload
    def __getitem__(self, key: slice) -> tuple[Any, ...]: ...
    def __getitem__(self, key: str | int | slice) -> Any:
        return super().__getitem__(key) if isinstance(key, str) else self.to_tuple()[key]

    def to_tuple(self) -> tuple[Any, ...]:
        """The values there are, in order."""
        return tuple(self.values())


class BaseModelOutput(ModelOutput):
    """`BertModel`'s result: the last hidden state (B, S, C) and the pooled first token (B, C) or None."""

    last_hidden_state: Tensor
    pooler_output: Tensor | None
    hidden_states: tuple[Tensor, ...] | None
    attentions: tuple[Tensor, ...] | None


class HeadOutput(ModelOutput):
    """A task head's result: the loss (a scalar, when labels are given) and the logits."""

    loss: Tensor | None
    logits: Tensor
    hidden_states: tuple[Tensor, ...] | None
    attentions: tuple[Tensor, ...] | None


class PreTrainingOutput(ModelOutput):
    """Both pretraining heads: vocabulary logits (B, S, V) and next-sentence logits (B, 2)."""

    loss: Tensor | None
    prediction_logits: Tensor
    seq_relationship_logits: Tensor
    hidden_states: tuple[Tensor, ...] | None
    attentions: tuple[Tensor, ...] | None


class QuestionAnsweringOutput(ModelOutput):
    """Scores (B, S) of every token as the first and as the last one of the answer."""

    loss: Tensor | None
    start_logits: Tensor
    end_logits: Tensor
    hidden_states: tuple[Tensor, ...] | None
    attentions: tuple[Tensor, ...] | None
