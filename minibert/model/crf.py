"""A conditional random field on top of token logits: how well labels follow one another is learnt too.

Lafferty, McCallum and Pereira, "Conditional Random Fields", 2001; on a neural tagger: Lample et al., "Neural
Architectures for Named Entity Recognition", 2016. Shapes: B sequences of S labelled tokens, K labels.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from minibert.config import BertConfig
from minibert.model.encoder import PackedOutput
from minibert.model.heads import IGNORED_LABEL, BertForTokenClassification, head_output, token_labels
from minibert.model.outputs import HeadOutput


class LinearChainCRF(nn.Module):
    """Scores of a first label, of label j behind label i, and of a last label; the names are those of pytorch-crf."""

    draws_itself = True  # its initial values are not those of BERT's layers

    def __init__(self, num_labels: int) -> None:
        super().__init__()
        self.start_transitions = nn.Parameter(torch.empty(num_labels))
        self.transitions = nn.Parameter(torch.empty(num_labels, num_labels))
        self.end_transitions = nn.Parameter(torch.empty(num_labels))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """All zero: any label may follow any other."""
        for parameter in self.parameters():
            nn.init.zeros_(parameter)

    def forbid(self, start: Tensor, transitions: Tensor, end: Tensor, penalty: float = 10.0) -> None:
        """Makes unlikely, to begin with, what a tag scheme forbids: bool (K,), (K, K), (K,), False for forbidden."""
        with torch.no_grad():
            for parameter, legal in (
                (self.start_transitions, start),
                (self.transitions, transitions),
                (self.end_transitions, end),
            ):
                parameter.copy_(torch.where(legal, 0.0, -penalty))

    def forward(self, logits: Tensor, labels: Tensor) -> Tensor:
        """Minus the log probability of the labels, summed over all sequences.

        Args:
            logits: (B, S, K).
            labels: (B, S); -100 at the end of shorter sequences.
        """
        logits = logits.float()
        real = labels != IGNORED_LABEL
        lengths = real.sum(dim=1)
        known = labels.masked_fill(~real, 0)
        rows = torch.arange(len(labels), device=labels.device)
        emitted = logits.gather(2, known[:, :, None])[:, :, 0]
        moved = self.transitions[known[:, :-1], known[:, 1:]]
        last = known[rows, (lengths - 1).clamp(min=0)]
        gold = (emitted * real).sum(1) + (moved * real[:, 1:]).sum(1)
        gold = gold + self.start_transitions[known[:, 0]] + self.end_transitions[last]
        scores = self.start_transitions + logits[:, 0]  # (B, K): of all paths that end in each label
        for step in range(1, logits.shape[1]):
            longer = torch.logsumexp(scores[:, :, None] + self.transitions, dim=1) + logits[:, step]
            scores = torch.where(real[:, step, None], longer, scores)
        total = torch.logsumexp(scores + self.end_transitions, dim=1)
        return ((total - gold) * (lengths > 0)).sum()


class BertCrfForTokenClassification(BertForTokenClassification):
    """A token classifier trained with a CRF on its logits.

    Its checkpoint is that of `BertForTokenClassification` with `crf.*` besides, which other programs leave out.
    """

    architecture = "BertForTokenClassification"

    def __init__(self, config: BertConfig) -> None:
        super().__init__(config)
        self.crf = LinearChainCRF(config.num_labels)

    def head(self, encoded: PackedOutput, labels: Tensor | None, num_items: int | Tensor | None) -> HeadOutput:
        packing = encoded.packing
        logits = self.classifier(self.dropout(encoded.tokens))  # (T, K)
        loss = None
        if labels is not None:
            chains = packing.by_sequence(logits.device)
            given = packing.pack(token_labels(labels, packing))
            known = chains.unpack(given - IGNORED_LABEL) + IGNORED_LABEL  # it fills padding with 0: no label there
            loss = self._loss(chains.unpack(logits), known, num_items)
        return head_output(encoded, loss, packing.unpack(logits))

    def _loss(self, logits: Tensor, labels: Tensor, num_items: int | Tensor | None) -> Tensor:
        labelled = labels != IGNORED_LABEL
        count = labelled.sum()
        if not count:  # every parameter still gets a gradient, which training on several devices waits for
            return sum((parameter.sum() for parameter in self.crf.parameters()), start=logits.sum()) * 0.0
        # Labelled tokens first, in their order: special tokens and later pieces of words are no steps of the chain.
        order = (~labelled).to(torch.int8).argsort(dim=1, stable=True)[:, : int(labelled.sum(dim=1).max())]
        chained = logits.gather(1, order[:, :, None].expand(-1, -1, logits.shape[2]))
        loss: Tensor = self.crf(chained, labels.gather(1, order))
        return loss / (count if num_items is None else num_items)
