"""PyTorch's attention over packed sequences, for a machine without a GPU."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import varlen

from minibert.model import attention


class StandIn:
    """`varlen_attn` as its documentation has it, one sequence after another."""

    def __init__(self) -> None:
        self.calls: list[tuple[list[int], int]] = []
        self.boundaries: list[Tensor] = []

    def __call__(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        cu_seq_q: Tensor,
        cu_seq_k: Tensor | None,
        max_q: int,
        max_k: int,
        **options: Any,
    ) -> Tensor:
        assert cu_seq_k is not None
        assert not options
        assert cu_seq_q.dtype == cu_seq_k.dtype == torch.int32
        assert torch.equal(cu_seq_q, cu_seq_k)
        assert max_q == max_k
        ends = cu_seq_q.tolist()
        assert ends[0] == 0
        assert ends[-1] == len(query) == len(key) == len(value)
        assert all(end - start <= max_q for start, end in pairwise(ends))
        self.calls.append((ends, max_q))
        self.boundaries.append(cu_seq_q)
        contexts = [
            F.scaled_dot_product_attention(*(x[start:end].transpose(0, 1) for x in (query, key, value))).transpose(0, 1)
            for start, end in pairwise(ends)
        ]
        return torch.cat(contexts)


def stand_in(monkeypatch: pytest.MonkeyPatch) -> StandIn:
    """Takes the place of the kernel, on a CPU and in float32."""
    kernel = StandIn()
    monkeypatch.setattr(varlen, "varlen_attn", kernel)
    monkeypatch.setattr(attention, "VARLEN_DEVICE", "cpu")
    monkeypatch.setattr(attention, "VARLEN_DTYPES", (torch.float32,))
    return kernel
