"""Attention: scaled dot products, many heads of them, and BERT's self-attention.

Shapes: B sequences, L query and S key positions, E channels in H heads of D (E = H * D), T packed tokens.
docs/attention.md builds this file step by step.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import groupby

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from minibert.config import BertConfig
from minibert.errors import MinibertError
from minibert.model.packing import Packing

VARLEN_DEVICE, VARLEN_DTYPES = "cuda", (torch.float16, torch.bfloat16)
VARLEN_STEP, VARLEN_LARGEST = 8, 256  # channels of a head: a multiple of the one, no more than the other
AttentionFunction = Callable[[Tensor, Tensor, Tensor, Tensor | None, float], tuple[Tensor, Tensor | None]]


def eager_attention(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None = None, dropout: float = 0.0
) -> tuple[Tensor, Tensor | None]:
    """softmax(Q K^T / sqrt(D)) V, written out (https://arxiv.org/abs/1706.03762, equation 1).

    Args:
        query, key, value: (B, H, L, D), (B, H, S, D) and (B, H, S, D).
        mask: broadcastable to (B, H, L, S); bool with True = attend, or float, added to the scores, in which
            -inf or the dtype's lowest value blocks a key. A query with no key left attends to nothing: 0.
        dropout: probability of dropping a weight.

    Returns:
        The context (B, H, L, D) and the weights (B, H, L, S) that made it, after dropout.
    """
    # Scaling the query instead of the scores keeps half precision away from its largest value.
    scores = (query * query.shape[-1] ** -0.5) @ key.transpose(-2, -1)  # (B, H, L, S)
    if mask is None:
        weights = scores.softmax(-1)
    else:
        blocked = _blocked(mask)
        if mask.dtype != torch.bool:
            scores = scores + mask
        # A finite fill, then zero weights: softmax over nothing but -inf would be NaN, in the gradient too.
        weights = scores.masked_fill(blocked, torch.finfo(scores.dtype).min).softmax(-1).masked_fill(blocked, 0)
    weights = F.dropout(weights, dropout)
    return weights @ value, weights


def sdpa_attention(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None = None, dropout: float = 0.0
) -> tuple[Tensor, Tensor | None]:
    """The same by PyTorch's fused kernels, which never hold the weights and so return None for them."""
    if mask is None:
        return F.scaled_dot_product_attention(query, key, value, dropout_p=dropout), None
    # Kernels differ in what they make of a query with no key left (zeros, NaN, the mean), so it is spared them.
    empty = _blocked(mask).all(-1, keepdim=True)  # (B, H, L, 1)
    mask = mask | empty if mask.dtype == torch.bool else mask.masked_fill(empty, 0)
    context = F.scaled_dot_product_attention(query, key, value, attn_mask=mask, dropout_p=dropout)
    return context.masked_fill(empty, 0), None


def varlen_attention(query: Tensor, key: Tensor, value: Tensor, boundaries: Tensor, longest: int) -> Tensor:
    """Attention within each of many sequences that lie one after another, by one kernel of PyTorch, without padding.

    https://docs.pytorch.org/docs/stable/nn.attention.varlen.html; on CUDA, in float16 and bfloat16 only.

    Args:
        query, key, value: (T, H, D).
        boundaries: (N + 1,) int32, where each of N sequences begins, and T.
        longest: tokens of the longest sequence, or more.

    Returns:
        The context (T, H, D).

    Raises:
        MinibertError: another device or dtype, or heads of a size that the kernel does not have.
    """
    if query.device.type != VARLEN_DEVICE or query.dtype not in VARLEN_DTYPES:
        raise MinibertError(
            f"attn_implementation 'varlen' needs float16 or bfloat16 on cuda, got {str(query.dtype).split('.')[-1]} on "
            f"{query.device.type}; take 'sdpa'"
        )
    if not fits_varlen(query.shape[-1]):
        raise MinibertError(
            f"attn_implementation 'varlen' needs heads whose channels are a multiple of {VARLEN_STEP} and no more than "
            f"{VARLEN_LARGEST}, got {query.shape[-1]}; take 'sdpa'"
        )
    from torch.nn.attention.varlen import varlen_attn

    context = varlen_attn(query, key, value, boundaries, boundaries, longest, longest)
    assert isinstance(context, Tensor)
    return context


def fits_varlen(head_size: int) -> bool:
    """Whether the kernel of `varlen_attention` has heads of so many channels."""
    return head_size % VARLEN_STEP == 0 and head_size <= VARLEN_LARGEST


def _blocked(mask: Tensor) -> Tensor:
    return ~mask if mask.dtype == torch.bool else mask <= torch.finfo(mask.dtype).min


ATTENTION_FUNCTIONS: dict[str, AttentionFunction] = {
    "eager": eager_attention,
    "sdpa": sdpa_attention,
    "varlen": sdpa_attention,  # for what is not packed; `BertSelfAttention` has packed tokens
}


class MultiHeadAttention(nn.Module):
    """Multi-head attention (https://arxiv.org/abs/1706.03762, section 3.2.2).

    Takes the arguments of `torch.nn.MultiheadAttention` and gives its results, except that `batch_first` defaults
    to True, `key` to `query` and `value` to `key`, and that a query whose keys are all masked attends to nothing:
    its weights and context are 0 (so its output is the output projection's bias) instead of NaN.

    Args:
        embed_dim: E, channels of the query and the output; `num_heads` must divide it.
        num_heads: H.
        dropout: probability of dropping an attention weight, in training mode only.
        bias: whether the four projections have a bias.
        add_bias_kv: append one learned key and value to every sequence.
        add_zero_attn: append one key and value of zeros to every sequence.
        kdim, vdim: channels of key and value; default `embed_dim`.
        batch_first: whether batched input is (B, L, E) or (L, B, E).
        attn_implementation: "sdpa" or "eager"; asking for weights always takes "eager". "varlen" is for packed tokens
            in BERT on a GPU, else as "sdpa".
        device, dtype: of the parameters.

    Raises:
        MinibertError: `num_heads` does not divide `embed_dim`, or the implementation is unknown.
    """

    # What torch's Transformer layers look at before they take a shortcut past their attention's forward.
    _qkv_same_embed_dim = False
    in_proj_bias = None

    query: nn.Linear
    key: nn.Linear
    value: nn.Linear
    out_proj: nn.Module
    bias_k: nn.Parameter | None
    bias_v: nn.Parameter | None

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        dropout: float = 0.0,
        bias: bool = True,
        add_bias_kv: bool = False,
        add_zero_attn: bool = False,
        kdim: int | None = None,
        vdim: int | None = None,
        batch_first: bool = True,
        attn_implementation: str = "sdpa",
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        if embed_dim < 1 or num_heads < 1 or embed_dim % num_heads:
            raise MinibertError(f"num_heads must divide embed_dim, got embed_dim {embed_dim} and num_heads {num_heads}")
        if not 0 <= dropout <= 1:
            raise MinibertError(f"dropout must lie between 0 and 1, got {dropout}")
        self.embed_dim, self.num_heads, self.dropout = embed_dim, num_heads, dropout
        self.kdim = embed_dim if kdim is None else kdim
        self.vdim = embed_dim if vdim is None else vdim
        self.add_zero_attn, self.batch_first = add_zero_attn, batch_first
        self.set_attn_implementation(attn_implementation)
        self.query = nn.Linear(embed_dim, embed_dim, bias, device, dtype)
        self.key = nn.Linear(self.kdim, embed_dim, bias, device, dtype)
        self.value = nn.Linear(self.vdim, embed_dim, bias, device, dtype)
        self.out_proj = nn.Linear(embed_dim, embed_dim, bias, device, dtype)
        for name in ("bias_k", "bias_v"):
            appended = torch.empty(1, 1, embed_dim, device=device, dtype=dtype)
            self.register_parameter(name, nn.Parameter(appended) if add_bias_kv else None)
        self.register_load_state_dict_pre_hook(_accept_torch_layout)  # type: ignore[no-untyped-call]
        self.reset_parameters()

    def set_attn_implementation(self, attn_implementation: str) -> None:
        """Chooses the attention function: "eager" or "sdpa"."""
        if attn_implementation not in ATTENTION_FUNCTIONS:
            known = ", ".join(ATTENTION_FUNCTIONS)
            raise MinibertError(f"attn_implementation: {attn_implementation!r} is not one of {known}")
        self.attn_implementation = attn_implementation

    def reset_parameters(self) -> None:
        """Draws new parameters from the distributions that `torch.nn.MultiheadAttention` starts from."""
        # With equal sizes torch draws the three as one (3E, E) matrix, whose Xavier bound is smaller by sqrt(2).
        same_size = self.kdim == self.vdim == self.embed_dim
        for projection in (self.query, self.key, self.value):
            nn.init.xavier_uniform_(projection.weight, gain=0.5**0.5 if same_size else 1.0)
        for module in (self.query, self.key, self.value, self.out_proj):
            if isinstance(module.bias, Tensor):
                nn.init.zeros_(module.bias)
        for bias in (self.bias_k, self.bias_v):
            if bias is not None:
                nn.init.xavier_normal_(bias)

    def forward(
        self,
        query: Tensor,
        key: Tensor | None = None,
        value: Tensor | None = None,
        key_padding_mask: Tensor | None = None,
        need_weights: bool = True,
        attn_mask: Tensor | None = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        """Attends from `query` to `key` and `value`.

        Args:
            query: (B, L, E); (L, B, E) if not `batch_first`; (L, E) unbatched; or, in eval mode and for
                self-attention, a nested tensor of sequences (L_i, E).
            key, value: (B, S, kdim) and (B, S, vdim), laid out like the query.
            key_padding_mask: (B, S), or (S,) unbatched; bool with True = ignore this key, or float, added.
            need_weights: whether to return the attention weights, which takes the slower explicit path.
            attn_mask: (L, S) or (B * H, L, S); bool with True = do not attend, or float, added.
            average_attn_weights: whether to average the weights over the heads.
            is_causal: let position i attend to positions 0 to i only; `attn_mask` applies besides.

        Returns:
            The output, laid out like the query with E channels, and the weights (B, L, S), or (B, H, L, S) if not
            averaged, or None. S counts the keys that `add_bias_kv` and `add_zero_attn` append; B is left out if
            unbatched; sequences of a nested tensor are padded with zeros.

        Raises:
            MinibertError: shapes or dtypes that do not fit, with both in the message.
        """
        key = query if key is None else key
        value = key if value is None else value
        if query.is_nested or key.is_nested or value.is_nested:
            if self.training or not (query is key is value):
                raise MinibertError("a nested tensor is accepted only as self-attention input in eval mode")
            if key_padding_mask is not None or attn_mask is not None or is_causal:
                raise MinibertError("a nested tensor needs no padding mask and accepts no other mask")
            return self._forward_nested(query, need_weights, average_attn_weights)
        self._check_shapes(query, key, value)
        is_batched = query.dim() == 3
        # One view for each tensor, not each argument: `project` tells self-attention by identity.
        views = {id(x): self._as_batch_first(x) for x in (query, key, value)}
        query, key, value = views[id(query)], views[id(key)], views[id(value)]
        if key_padding_mask is not None and not is_batched:
            key_padding_mask = key_padding_mask.unsqueeze(0)
        mask = self._merge_masks(key_padding_mask, attn_mask, is_causal, query, key)
        context, weights = self.attend(*self.project(query, key, value), mask, need_weights)
        output = self.out_proj(context)
        if weights is not None and average_attn_weights:
            weights = weights.mean(1)
        if not is_batched:
            return output.squeeze(0), None if weights is None else weights.squeeze(0)
        return output if self.batch_first else output.transpose(0, 1), weights

    def project(self, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Query, key and value (..., E) with as few matrix products as the same tensors allow: one, two or three."""
        if query is key is value and _can_pack(self.query, self.key, self.value):
            query, key, value = _packed_product(query, self.query, self.key, self.value)
        elif key is value and _can_pack(self.key, self.value):
            query = self.query(query)
            key, value = _packed_product(key, self.key, self.value)
        else:
            query, key, value = self.query(query), self.key(key), self.value(value)
        return query, key, value

    def attend(
        self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None = None, need_weights: bool = False
    ) -> tuple[Tensor, Tensor | None]:
        """From projected query (B, L, E), key and value (B, S, E) to context (B, L, E) and weights (B, H, L, S).

        The one place where heads are split and merged, and where an attention function is called.
        """
        if self.bias_k is not None and self.bias_v is not None:
            key, value = (
                torch.cat([x, b.expand(len(x), 1, -1)], 1) for x, b in ((key, self.bias_k), (value, self.bias_v))
            )
        if self.add_zero_attn:
            key, value = F.pad(key, (0, 0, 0, 1)), F.pad(value, (0, 0, 0, 1))
        if mask is not None:
            mask = mask if mask.dtype == torch.bool else mask.to(query.dtype)
            if self.bias_k is not None or self.add_zero_attn:  # appended keys are open to every query
                appended = key.shape[1] - mask.shape[-1]
                mask = F.pad(mask, (0, appended), value=mask.dtype == torch.bool)
        query, key, value = (x.unflatten(-1, (self.num_heads, -1)).transpose(1, 2) for x in (query, key, value))
        attention = ATTENTION_FUNCTIONS["eager" if need_weights else self.attn_implementation]
        context, weights = attention(query, key, value, mask, self.dropout if self.training else 0.0)
        return context.transpose(1, 2).flatten(2), weights if need_weights else None  # (B, H, L, D) -> (B, L, E)

    def attend_packed(
        self, query: Tensor, key: Tensor, value: Tensor, lengths: Sequence[int], need_weights: bool = False
    ) -> tuple[Tensor, list[Tensor]]:
        """Self-attention within each of the sequences that lie one after another in (T, E), with no padding.

        Returns the context (T, E) and the weights (H, length, length) of every non-empty sequence.
        """
        contexts: list[Tensor] = []
        weights: list[Tensor] = []
        start = 0
        for length, run in groupby(length for length in lengths if length):  # neighbours of one length: one call
            count = len(list(run))
            end = start + count * length
            q, k, v = (x[start:end].unflatten(0, (count, length)) for x in (query, key, value))
            context, matrices = self.attend(q, k, v, None, need_weights)
            contexts.append(context.flatten(0, 1))
            weights.extend(() if matrices is None else matrices)
            start = end
        return torch.cat(contexts) if contexts else query, weights

    def _forward_nested(self, nested: Tensor, need_weights: bool, average: bool) -> tuple[Tensor, Tensor | None]:
        sequences = nested.unbind()
        for sequence in sequences:
            self._check_shapes(sequence, sequence, sequence)
        lengths = [len(sequence) for sequence in sequences]
        tokens = torch.cat(sequences)
        projected = self.project(tokens, tokens, tokens)
        context, matrices = self.attend_packed(*projected, lengths, need_weights)
        output = torch.nested.as_nested_tensor(list(self.out_proj(context).split(lengths)), layout=nested.layout)
        if not need_weights:
            return output, None
        appended = int(self.bias_k is not None) + int(self.add_zero_attn)
        longest = max(lengths)
        weights = tokens.new_zeros(len(lengths), self.num_heads, longest, longest + appended)
        for row, matrix in zip([row for row, length in enumerate(lengths) if length], matrices, strict=True):
            weights[row, :, : matrix.shape[1], : matrix.shape[2]] = matrix
        return output, weights.mean(1) if average else weights

    def _as_batch_first(self, x: Tensor) -> Tensor:
        if x.dim() == 2:
            return x.unsqueeze(0)
        return x if self.batch_first else x.transpose(0, 1)

    def _check_shapes(self, query: Tensor, key: Tensor, value: Tensor) -> None:
        wanted = (self.embed_dim, self.kdim, self.vdim)
        shapes = tuple(tuple(x.shape) for x in (query, key, value))
        batch = 0 if self.batch_first else 1
        fits = (
            query.dim() in (2, 3)
            and len({len(shape) for shape in shapes}) == 1
            and tuple(shape[-1] for shape in shapes) == wanted
            and key.shape[:-1] == value.shape[:-1]
            and (query.dim() == 2 or query.shape[batch] == key.shape[batch])
        )
        if not fits:
            layout = "(B, L, {}), (B, S, {}), (B, S, {})" if self.batch_first else "(L, B, {}), (S, B, {}), (S, B, {})"
            raise MinibertError(
                f"query, key, value: expected {layout.format(*wanted)}, or the same without B, "
                f"got {', '.join(map(str, shapes))}"
            )

    def _merge_masks(
        self, key_padding_mask: Tensor | None, attn_mask: Tensor | None, is_causal: bool, query: Tensor, key: Tensor
    ) -> Tensor | None:
        """One mask broadcastable to (B, H, L, S): bool, True = attend, or float if one of the given ones is float."""
        B, L, S = *query.shape[:2], key.shape[1]
        masks = []
        if key_padding_mask is not None:
            _check_mask("key_padding_mask", key_padding_mask, [(B, S)])
            masks.append(key_padding_mask[:, None, None, :])
        if attn_mask is not None:
            _check_mask("attn_mask", attn_mask, [(L, S), (B * self.num_heads, L, S)])
            masks.append(attn_mask if attn_mask.dim() == 2 else attn_mask.unflatten(0, (B, self.num_heads)))
        masks = [~mask if mask.dtype == torch.bool else mask for mask in masks]
        if is_causal:
            masks.append(torch.ones(L, S, dtype=torch.bool, device=query.device).tril())
        if not masks:
            return None
        if all(mask.dtype == torch.bool for mask in masks):
            merged = masks[0]
            for mask in masks[1:]:
                merged = merged & mask
        else:
            merged = sum((_as_bias(mask) for mask in masks[1:]), start=_as_bias(masks[0]))
        return merged if merged.dim() == 4 else merged.expand(1, 1, L, S)

    @staticmethod
    def from_torch(module: nn.MultiheadAttention) -> MultiHeadAttention:
        """A module with the weights and settings of torch's."""
        ours = MultiHeadAttention(
            module.embed_dim,
            module.num_heads,
            dropout=module.dropout,
            bias=module.in_proj_bias is not None,
            add_bias_kv=module.bias_k is not None,
            add_zero_attn=module.add_zero_attn,
            kdim=module.kdim,
            vdim=module.vdim,
            batch_first=module.batch_first,
            device=module.out_proj.weight.device,
            dtype=module.out_proj.weight.dtype,
        )
        ours.load_state_dict(module.state_dict())
        return ours.train(module.training)

    def to_torch(self) -> nn.MultiheadAttention:
        """`torch.nn.MultiheadAttention` with this module's weights and settings."""
        if not isinstance(self.out_proj, nn.Linear):
            raise MinibertError(f"{type(self).__name__} has no output projection, which torch's module needs")
        weight = self.query.weight
        theirs = nn.MultiheadAttention(
            self.embed_dim,
            self.num_heads,
            dropout=self.dropout,
            bias=self.query.bias is not None,
            add_bias_kv=self.bias_k is not None,
            add_zero_attn=self.add_zero_attn,
            kdim=self.kdim,
            vdim=self.vdim,
            batch_first=self.batch_first,
            device=weight.device,
            dtype=weight.dtype,
        )
        state = self.state_dict()
        projections = {
            part: [state.pop(f"{name}.{part}", None) for name in ("query", "key", "value")]
            for part in ("weight", "bias")
        }
        if theirs.in_proj_weight is None:
            state |= dict(zip(TORCH_SEPARATE, projections["weight"], strict=True))
        else:
            state["in_proj_weight"] = torch.cat(projections["weight"])
        if theirs.in_proj_bias is not None:
            state["in_proj_bias"] = torch.cat(projections["bias"])
        theirs.load_state_dict(state)
        return theirs.train(self.training)


TORCH_SEPARATE = ("q_proj_weight", "k_proj_weight", "v_proj_weight")


def _accept_torch_layout(_module: nn.Module, state: dict[str, Tensor], prefix: str, *_: object) -> None:
    """Renames and splits torch's `in_proj_weight`, `q_proj_weight`, ... before a `load_state_dict`."""
    names = ("query", "key", "value")
    for part in ("weight", "bias"):
        packed = state.pop(f"{prefix}in_proj_{part}", None)
        if packed is not None:
            state.update({f"{prefix}{name}.{part}": third for name, third in zip(names, packed.chunk(3), strict=True)})
    for name, separate in zip(names, TORCH_SEPARATE, strict=True):
        if prefix + separate in state:
            state[f"{prefix}{name}.weight"] = state.pop(prefix + separate)


def _can_pack(*projections: nn.Module) -> bool:
    """Whether one product may replace these modules: only plain Linears that nobody listens to or has replaced."""
    return all(
        type(p) is nn.Linear
        and (p.bias is None) == (projections[0].bias is None)
        and not (p._forward_hooks or p._forward_pre_hooks or p._backward_hooks or p._backward_pre_hooks)
        and "forward" not in vars(p)  # how offloading libraries intercept a module
        for p in projections
    )


def _packed_product(x: Tensor, *projections: nn.Linear) -> list[Tensor]:
    """Several Linears of one input by one matrix product.

    The weights are joined anew each time, so that no stale copy can be used after an update. For E = 768 that takes
    0.4 ms (2-core Xeon, AVX-512): lost among the products of a batch, a fifteenth of a layer for 32 tokens alone.
    """
    weight = torch.cat([projection.weight for projection in projections])
    bias = None if projections[0].bias is None else torch.cat([projection.bias for projection in projections])
    return list(F.linear(x, weight, bias).chunk(len(projections), -1))


def _check_mask(name: str, mask: Tensor, shapes: list[tuple[int, ...]]) -> None:
    if mask.shape not in shapes:
        raise MinibertError(f"{name}: expected shape {' or '.join(map(str, shapes))}, got {tuple(mask.shape)}")
    if mask.dtype != torch.bool and not mask.is_floating_point():
        raise MinibertError(f"{name}: expected bool (True = ignore) or float (added to the scores), got {mask.dtype}")


def _as_bias(mask: Tensor) -> Tensor:
    """A mask as float to be added, with -inf where a key is blocked."""
    bias = torch.zeros_like(mask, dtype=torch.get_default_dtype()) if mask.dtype == torch.bool else mask
    return bias.masked_fill(_blocked(mask), float("-inf"))


class BertSelfAttention(MultiHeadAttention):
    """BERT's self-attention: `MultiHeadAttention` without its output projection, which BERT keeps in `BertOutput`.

    Parameters are named as on the Hub: `query`, `key` and `value`, each with weight and bias.
    """

    def __init__(self, config: BertConfig) -> None:
        super().__init__(config.hidden_size, config.num_attention_heads, config.attention_probs_dropout_prob)
        self.out_proj = nn.Identity()

    def forward(  # type: ignore[override]  # the Hub's interface, not torch's
        self,
        hidden_states: Tensor,
        attention_mask: Tensor | Packing | None = None,
        output_attentions: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        """Mixes every token with the tokens of its sequence.

        Args:
            hidden_states: (B, S, E); or packed (T, E), with the `Packing` as second argument.
            attention_mask: as in `Packing.from_mask` (1 = real token), or the `Packing` made from one.
            output_attentions: whether to return the weights.

        Returns:
            The context, shaped like `hidden_states`, and the weights (B, H, S, S) or None; both 0 at padding.
        """
        if not isinstance(attention_mask, Packing):
            batch_size, seq_len = hidden_states.shape[:2]
            packing = Packing.from_mask(attention_mask, batch_size, seq_len, self.num_heads)
            context, weights = self.forward(packing.pack(hidden_states), packing, output_attentions)
            return packing.unpack(context), weights
        packing = attention_mask
        query, key, value = self.project(hidden_states, hidden_states, hidden_states)
        if self._takes_varlen(packing, output_attentions) and len(hidden_states):
            query, key, value = (x.unflatten(-1, (self.num_heads, -1)) for x in (query, key, value))
            boundaries, longest = packing.boundaries(query.device)
            return varlen_attention(query, key, value, boundaries, longest).flatten(1), None
        if packing.lengths and is_slow_to_call(query.device) and not output_attentions:
            return self._attend_in_rows(query, key, value, packing), None
        if packing.lengths:
            context, matrices = self.attend_packed(query, key, value, packing.lengths, output_attentions)
            return context, packing.unpack_weights(matrices, self.num_heads) if output_attentions else None
        query, key, value = (x.unflatten(0, (packing.batch_size, packing.seq_len)) for x in (query, key, value))
        context, weights = self.attend(query, key, value, packing.mask, output_attentions)
        if weights is not None and packing.padding is not None:
            weights = weights.masked_fill(packing.padding[:, None, :, None], 0)
        return context.flatten(0, 1), weights

    def _attend_in_rows(self, query: Tensor, key: Tensor, value: Tensor, packing: Packing) -> Tensor:
        """One call for all sequences, which get their padding back for it: (T, E) to (T, E)."""
        rows, real = packing.in_rows(query.device)
        query, key, value = (rows.unpack(x) for x in (query, key, value))
        context, _ = self.attend(query, key, value, real)
        return rows.pack(context)

    def _takes_varlen(self, packing: Packing, need_weights: bool) -> bool:
        """Its kernel has no weights to show or to drop, and no masks."""
        drops = self.training and self.dropout > 0
        return self.attn_implementation == "varlen" and packing.mask is None and not (need_weights or drops)


def is_slow_to_call(device: torch.device) -> bool:
    """Whether a call for every sequence takes longer than computing padding: on a GPU, which waits for Python then."""
    return device.type != "cpu"
