"""BERT's embeddings: word + token type + position, normalised (https://arxiv.org/abs/1810.04805, section 3).

Shapes: B sequences of S cells, T packed tokens, C hidden channels.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from minibert.config import BertConfig
from minibert.errors import MinibertError
from minibert.model.packing import Packing, is_tracing


class BertEmbeddings(nn.Module):
    """Ids of a padded batch to packed hidden states."""

    def __init__(self, config: BertConfig) -> None:
        super().__init__()
        size = config.hidden_size
        self.word_embeddings = _empty_table(config.vocab_size, size, config.pad_token_id)
        self.position_embeddings = _empty_table(config.max_position_embeddings, size)
        self.token_type_embeddings = _empty_table(config.type_vocab_size, size)
        self.LayerNorm = nn.LayerNorm(size, eps=config.layer_norm_eps)
        self.dropout = nn.Dropout(config.hidden_dropout_prob)

    def forward(
        self,
        packing: Packing,
        input_ids: Tensor | None,
        token_type_ids: Tensor | None,
        position_ids: Tensor | None,
        inputs_embeds: Tensor | None,
    ) -> Tensor:
        """Ids (B, S), or `inputs_embeds` (B, S, C) in place of `input_ids`, to hidden states (T, C).

        Raises:
            MinibertError: ids or positions beyond their table (on CPU, where looking costs nothing), or a
                sequence longer than the position table.
        """
        shape = (packing.batch_size, packing.seq_len)
        given = input_ids if input_ids is not None else inputs_embeds
        assert given is not None
        if position_ids is None:
            self.check_length(packing)
            position_ids = packing.positions(given.device)
        if token_type_ids is None:
            token_type_ids = torch.zeros(packing.seq_len, dtype=torch.long, device=given.device)
        if input_ids is not None:
            inputs_embeds = self._look_up("input_ids", self.word_embeddings, packing.pack(input_ids), "vocab_size")
        else:
            inputs_embeds = packing.pack(given)
        types = packing.pack(_spread("token_type_ids", token_type_ids, shape))
        positions = packing.pack(_spread("position_ids", position_ids, shape))
        hidden_states = inputs_embeds + self._look_up(
            "token_type_ids", self.token_type_embeddings, types, "type_vocab_size"
        )
        hidden_states = hidden_states + self._look_up(
            "position_ids", self.position_embeddings, positions, "max_position_embeddings"
        )
        normed: Tensor = self.dropout(self.LayerNorm(hidden_states))
        return normed

    def check_length(self, packing: Packing) -> None:
        """Refuses a sequence that is longer than the position table."""
        if packing.longest > self.position_embeddings.num_embeddings:
            raise MinibertError(
                f"input of {packing.longest} tokens is longer than max_position_embeddings "
                f"{self.position_embeddings.num_embeddings}; split the text into windows"
            )

    def _look_up(self, name: str, table: nn.Embedding, ids: Tensor, size_name: str) -> Tensor:
        check_ids(name, table, ids, size_name)
        rows: Tensor = table(ids.long())
        return rows


def check_ids(name: str, table: nn.Embedding, ids: Tensor, size_name: str) -> None:
    """Refuses ids that are no rows of a table, or no integers."""
    if ids.is_floating_point() or ids.dtype == torch.bool:
        raise MinibertError(f"{name}: expected integers, got {ids.dtype}")
    # On a GPU the look would wait for all the work queued before; in a traced graph it would be a break.
    if ids.device.type == "cpu" and ids.numel() and not is_tracing():
        numbers = ids.flatten().tolist()  # for one text sooner done than by PyTorch, for many lost in the products
        low, high = min(numbers), max(numbers)
        if low < 0 or high >= table.num_embeddings:
            wrong = low if low < 0 else high
            raise MinibertError(
                f"{name}: id {wrong} lies outside the {table.num_embeddings} rows of the table ({size_name} "
                f"{table.num_embeddings})" + ("; tokenizer and checkpoint do not match" * (name == "input_ids"))
            )


def _empty_table(rows: int, size: int, padding_idx: int | None = None) -> nn.Embedding:
    """An embedding for `init_weights` or a checkpoint to fill.

    The constructor would draw normal numbers; on the meta device torch 2.13 imports 800 modules for that, in 1 s.
    """
    table: nn.Embedding = nn.Embedding.from_pretrained(torch.empty(rows, size), freeze=False, padding_idx=padding_idx)
    return table


def _spread(name: str, ids: Tensor, shape: tuple[int, int]) -> Tensor:
    """Ids of shape (S,), (1, S) or (B, S) as (B, S)."""
    # By dimensions, since a trace would keep it as a rule if a batch were compared with a length.
    if ids.shape not in ((shape, (1, shape[1])) if ids.dim() == 2 else (shape[1:],)):
        raise MinibertError(f"{name}: expected shape {shape} or {shape[1:]}, got {tuple(ids.shape)}")
    return ids.expand(shape)
