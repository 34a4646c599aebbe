"""Texts in, entities out."""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, overload

import numpy as np
import torch
from tokenizers import Tokenizer

from minibert.config import SOURCE_OPTIONS, BertConfig
from minibert.engine import check_precision, optimize_spent, set_threads
from minibert.engine.onnx import OnnxModel
from minibert.errors import CheckpointError, DataError, MinibertError
from minibert.hub import DEFAULT_MODEL, Source
from minibert.model.crf import BertCrfForTokenClassification
from minibert.model.heads import BertForTokenClassification
from minibert.text.alignment import (
    SPLIT_MODES,
    Tokens,
    labels_from_words,
    labels_of_words,
    tokenize,
    tokenize_words,
)
from minibert.text.decoding import (
    DECODERS,
    STRATEGIES,
    Entity,
    PathScores,
    best_paths,
    entities_of,
    entries_of,
    marginals,
    most_likely,
    scheme_scores,
    word_probabilities,
)
from minibert.text.labels import Bools, Floats, Ints, LabelSet
from minibert.text.tokenizer import cannot_spell_capitals, load_tokenizer
from minibert.text.windows import sentence_starts, stitched, windows

logger = logging.getLogger("minibert")

STRIDE = 64  # tokens that two windows of a long text share, so that each is read with context on both sides
SMALL_BATCH = 256  # cells, up to which one more call of the model costs more than padding
CPU_CELLS, GPU_CELLS = 2048, 16384  # of a batch; on a CPU int8 loses a tenth with twice as many
READ_AHEAD = 16  # batches of text that are read before they are sorted by length
ENGINES = ("torch", "onnx")
OTHER_CLASSIFIERS = {"BertForSequenceClassification", "BertForMultipleChoice"}  # their heads have the same name


class TokenClassifier:
    """A token-classification model with its tokeniser: any text in, its entities out.

    Nothing is cut off: a text that is longer than the model is read in overlapping windows. The model is run in eval
    mode without gradients, and its former mode is restored. Can be called from several threads.

    Args:
        model: the model, or one that was exported.
        tokenizer: the tokeniser of the same checkpoint.
        aggregation_strategy: how the tokens of a word agree on a label: "first" (the first token's), "average" (of
            their probabilities), "max" (the surest token's); "simple" takes each token by itself; "none" gives one
            entry a token, with its full label. As in the `transformers` pipeline.
        decoder: "argmax" (every word's likeliest label, read leniently), "viterbi" (the likeliest sequence that the
            scheme allows) or "crf" (the best sequence by the model's CRF); default what the model was trained for
            (`decoder` in its config), else "argmax".
        scheme: as for `text.labels.LabelSet`.
        stride: tokens that two windows share; default 64, or a quarter of a short window.
        allow_windows: if False, a text longer than the model is an error instead.
        max_tokens_per_batch: cells, padding included, that go through the model at once; default 2,048, the fastest for
            BERT-base on a CPU (docs/benchmarks), or 16,384 on a GPU.
        split_mode: "text" or "characters"; default what the model was trained with (`split_mode` in its config),
            else "text".

    Raises:
        CheckpointError: the tokeniser has ids beyond the model's word embeddings, or adds other special tokens than
            one in front and one behind, or knows no offsets; or the model has no room for a token between these two.
        DataError: the labels belong to no one scheme, or are names such as LABEL_0 that say nothing.
        MinibertError: an option that is none.
    """

    def __init__(
        self,
        model: BertForTokenClassification | OnnxModel,
        tokenizer: Tokenizer,
        *,
        aggregation_strategy: str = "first",
        decoder: str | None = None,
        scheme: str = "auto",
        stride: int | None = None,
        allow_windows: bool = True,
        max_tokens_per_batch: int | None = None,
        split_mode: str | None = None,
    ) -> None:
        config = model.config
        self.split_mode = config.extra.get("split_mode", "text") if split_mode is None else split_mode
        self.decoder = config.extra.get("decoder", "argmax") if decoder is None else decoder
        for name, value, allowed in (
            ("aggregation_strategy", aggregation_strategy, STRATEGIES),
            ("decoder", self.decoder, DECODERS),
            ("split_mode", self.split_mode, SPLIT_MODES),
        ):
            if value not in allowed:
                raise MinibertError(f"{name}: expected {', '.join(allowed)}, got {value!r}")
        if max_tokens_per_batch is None:
            max_tokens_per_batch = (
                CPU_CELLS if isinstance(model, OnnxModel) or model.device.type == "cpu" else GPU_CELLS
            )
        if max_tokens_per_batch < 1:
            raise MinibertError(f"max_tokens_per_batch: expected at least 1, got {max_tokens_per_batch}")
        self.model, self.tokenizer = model, tokenizer
        self.labels = LabelSet([config.id2label[index] for index in range(config.num_labels)], scheme)
        self.aggregation_strategy = aggregation_strategy
        if self.decoder == "crf":
            crf_scores(model)  # refuses a model without
        self.max_tokens_per_batch = max_tokens_per_batch
        frame = _checked_frame(tokenizer, config.vocab_size)
        self._first_id, self._last_id = frame
        self._window_size = config.max_position_embeddings - len(frame)
        if self._window_size < 1:
            raise CheckpointError(f"max_position_embeddings {self._window_size + 2} leaves no room for text")
        self.stride = min(STRIDE, self._window_size // 4) if stride is None else stride
        windows(self._window_size, self.stride, np.ones(1, dtype=bool), np.ones(1, dtype=bool))  # refuses a bad stride
        self.allow_windows = allow_windows
        self._lock = threading.Lock()

    @classmethod
    def from_pretrained(
        cls,
        name_or_path: str | os.PathLike[str] | None = None,
        *,
        engine: str = "torch",
        device: str | torch.device | None = None,
        precision: str = "fp32",
        threads: int | None = None,
        allow_untrained_head: bool = False,
        lower_case: bool = False,
        aggregation_strategy: str = "first",
        decoder: str | None = None,
        scheme: str = "auto",
        stride: int | None = None,
        allow_windows: bool = True,
        max_tokens_per_batch: int | None = None,
        split_mode: str | None = None,
        **options: Any,
    ) -> TokenClassifier:
        """Loads a checkpoint, local or from the Hub.

        Args:
            name_or_path: a directory, or a name on the Hub; default the small model that comes with the package, whose
                card (`assets/default-model/README.md`) says what it is for.
            engine: "torch"; or "onnx" for a directory that `minibert export` wrote, which ONNX Runtime runs on the
                CPU, in the precision of the export.
            device: where to run; default a GPU if there is one, else the CPU.
            precision: "fp32"; "int8" for speed on a CPU; "bf16" or "fp16" for speed on a GPU; as in `optimize`.
            threads: CPU threads, of the whole process (with onnx, of the model); default as the engine has it.
            allow_untrained_head: accept a checkpoint without a trained head, whose labels are random.
            lower_case: lower-case the text before it is tokenised; offsets stay those of the text given.
            options: as for `BertForTokenClassification.from_pretrained`; the rest as for the class.

        Raises:
            CheckpointError: as there; or the checkpoint has no token-classification head, whose labels would be
                random, and `allow_untrained_head` is False.
        """
        check_precision(precision)  # before anything is loaded
        where = {name: options[name] for name in SOURCE_OPTIONS if name in options}
        if name_or_path is None:
            if where:
                raise MinibertError(f"{', '.join(where)}: expected with the name of a checkpoint, got no name")
            name_or_path = DEFAULT_MODEL
        source = Source(os.fspath(name_or_path), **where)
        with source.unchanged():
            model: BertForTokenClassification | OnnxModel
            if engine == "torch":
                model = _loaded(source, decoder, precision, threads, device, allow_untrained_head, options)
            else:
                _check_engine(engine, device, precision, options)
                model = _exported(source, threads)
            tokenizer = load_tokenizer(source, lower_case=lower_case)
        if cannot_spell_capitals(tokenizer):
            logger.warning(
                "%s: the tokenizer keeps capitals but its vocabulary has none, so words with capital Latin letters are "
                "unknown to it; lower_case=True (--lower-case) lower-cases them",
                name_or_path,
            )
        return cls(
            model,
            tokenizer,
            aggregation_strategy=aggregation_strategy,
            decoder=decoder,
            scheme=scheme,
            stride=stride,
            allow_windows=allow_windows,
            max_tokens_per_batch=max_tokens_per_batch,
            split_mode=split_mode,
        )

    def __repr__(self) -> str:
        config, model = self.model.config, self.model
        if isinstance(model, OnnxModel):
            runs = model.engine
        else:
            dtype = str(model.dtype).removeprefix("torch.")
            runs = f"{dtype} on {model.device}, {model.engine or 'plain'}, {torch.get_num_threads()} threads"
        return (
            f"TokenClassifier({config.num_labels} labels in {self.labels.scheme}, {config.num_hidden_layers} layers of "
            f"{config.hidden_size}, {runs}, {self.aggregation_strategy}, {self.decoder}, split by {self.split_mode})"
        )

    @overload
    def __call__(self, texts: str) -> list[Entity]: ...  # type: ignore[overload-overlap]
    @overload
    def __call__(self, texts: Iterable[str]) -> list[list[Entity]]: ...
    def __call__(self, texts: str | Iterable[str]) -> list[Entity] | list[list[Entity]]:
        """The entities of a text, or those of each text of a list, in its order.

        Raises:
            TypeError: a text is not a string.
            DataError: a text holds half of a surrogate pair, which is no character; or it is longer than the model
                and windows are not allowed.
        """
        if isinstance(texts, str):
            return next(self.stream([texts]))
        return list(self.stream(texts))

    def stream(self, texts: Iterable[str]) -> Iterator[list[Entity]]:
        """The entities of each text, in order, as they come; reads no more than a few batches ahead."""
        if isinstance(texts, str):
            raise TypeError(f"expected an iterable of strings, got the string {texts!r}")
        for group in self._groups(texts):
            tokens = tokenize(self.tokenizer, group, self.split_mode)
            probabilities = self._probabilities(tokens, group)
            yield from self._entities(group, tokens, probabilities)

    def tag_words(self, sentences: Iterable[Sequence[str]]) -> list[list[str]]:
        """One label a word, for sentences that are given in words.

        A word that has no token, such as a space, goes on with the entity that stands on both sides of it; else it
        is outside. With the strategies "simple" and "none" a word has the label of its first token.

        Raises:
            TypeError: a sentence is a string, or a word is not.
        """
        sentences = list(sentences)
        for sentence in sentences:
            if isinstance(sentence, str) or not all(isinstance(word, str) for word in sentence):
                raise TypeError(f"expected lists of words, got {sentence!r}")
        tokens = tokenize_words(self.tokenizer, sentences)
        chosen = self._choose(tokens, self._probabilities(tokens), by_word=True)[0]
        return [
            [self.labels.names[label] for label in labels_of_words(of, labels, len(words), self.labels).tolist()]
            for words, of, labels in zip(sentences, tokens, chosen, strict=True)
        ]

    def tag_characters(self, texts: Iterable[str]) -> list[list[str]]:
        """One label a character: of a word that goes on, B-X I-X, and B-X E-X for a word that was S-X.

        Raises:
            TypeError: a text is not a string.
            DataError: the model lacks a label that this takes.
        """
        results = []
        for group in self._groups(texts):
            tokens = tokenize(self.tokenizer, group, self.split_mode)
            chosen = self._choose(tokens, self._probabilities(tokens, group), by_word=True)[0]
            for text, of, labels in zip(group, tokens, chosen, strict=True):
                results.append(self._character_tags(len(text), of, labels))
        return results

    def _character_tags(self, length: int, tokens: Tokens, chosen: Ints) -> list[str]:
        first = np.flatnonzero(tokens.begins_word)
        starts, ends = tokens.starts[first], tokens.ends[np.append(first[1:], len(tokens)) - 1] if len(first) else first
        counts = ends - starts
        word_of = np.repeat(np.arange(len(first)), counts)  # of each character that is part of a word
        place_of = np.repeat(starts - np.append(0, np.cumsum(counts)[:-1]), counts) + np.arange(len(word_of))
        characters = Tokens(word_of, place_of, place_of + 1, word_of)
        spread = labels_from_words(characters, chosen, self.labels, label_all=True)
        as_words = Tokens(word_of, place_of, place_of + 1, place_of)
        ids = labels_of_words(as_words, spread, length, self.labels)
        return [self.labels.names[label] for label in ids.tolist()]

    def _groups(self, texts: Iterable[str]) -> Iterator[list[str]]:
        """Texts in order, as many at a time as make a few batches."""
        group: list[str] = []
        characters = 0
        for text in texts:
            if not isinstance(text, str):
                raise TypeError(f"expected a string, got {text!r}")
            group.append(text)
            characters += len(text) + 2
            if characters >= READ_AHEAD * self.max_tokens_per_batch:
                yield group
                group, characters = [], 0
        if group:
            yield group

    def _entities(self, texts: list[str], tokens: list[Tokens], probabilities: list[Floats]) -> Iterator[list[Entity]]:
        by_word = self.aggregation_strategy not in ("none", "simple")
        chosen, distributions = self._choose(tokens, probabilities, by_word=by_word)
        for text, of, labels, distribution in zip(texts, tokens, chosen, distributions, strict=True):
            if self.aggregation_strategy == "none":
                yield entries_of(text, of, labels, distribution, self.labels)
            else:
                yield entities_of(text, of, labels, distribution, self.labels, by_word=by_word)

    def _choose(
        self, tokens: list[Tokens], probabilities: list[Floats], *, by_word: bool
    ) -> tuple[list[Ints], list[Floats]]:
        """The label of each word (or token), and the distributions they were chosen from."""
        strategy = "first" if self.aggregation_strategy in ("none", "simple") else self.aggregation_strategy
        if by_word:
            probabilities = [word_probabilities(p, of, strategy) for p, of in zip(probabilities, tokens, strict=True)]
        if self.decoder == "crf":
            scores = crf_scores(self.model)
            return best_paths(probabilities, scores), marginals(probabilities, scores)
        if self.decoder == "viterbi":
            return best_paths(probabilities, scheme_scores(self.labels)), probabilities
        return [most_likely(distribution) for distribution in probabilities], probabilities

    def _probabilities(self, tokens: list[Tokens], texts: list[str] | None = None) -> list[Floats]:
        """Each token's distribution over the labels, (T, K) float32 for each text."""
        places: list[list[tuple[int, int]]] = []
        for number, of in enumerate(tokens):
            if len(of) > self._window_size and not self.allow_windows:
                raise DataError(
                    f"a text of {len(of):,} tokens is longer than the {self._window_size} that the model reads at once "
                    "(max_position_embeddings); shorten it, or allow windows"
                )
            sentences = np.zeros(len(of), dtype=bool)
            if texts is not None and len(of) > self._window_size:
                sentences = sentence_starts(texts[number], of.starts)
            places.append(windows(self._window_size, self.stride, of.begins_word, sentences) if len(of) else [])
        work = [(number, start, end) for number, of in enumerate(places) for start, end in of]
        work.sort(key=lambda piece: piece[2] - piece[1], reverse=True)
        parts: dict[tuple[int, int], Floats] = {}
        for batch in self._batches(work):
            rows = self._run([tokens[number].ids[start:end] for number, start, end in batch])
            parts |= {(number, start): row for (number, start, _), row in zip(batch, rows, strict=True)}
        num_labels = len(self.labels.names)
        return [
            stitched([parts.pop((number, start)) for start, _ in of], of, tokens[number].begins_word, self.labels)
            if of
            else np.zeros((0, num_labels), dtype=np.float32)
            for number, of in enumerate(places)
        ]

    def _batches(self, work: list[tuple[int, int, int]]) -> Iterator[list[tuple[int, int, int]]]:
        """Pieces, longest first, as many at a time as `max_tokens_per_batch` cells hold with little padding."""
        batch: list[tuple[int, int, int]] = []
        width = real = 0
        for piece in work:
            length = piece[2] - piece[1] + 2
            cells = width * (len(batch) + 1)
            wasteful = cells > SMALL_BATCH and cells > 1.3 * (real + length)
            if batch and (cells > self.max_tokens_per_batch or wasteful):
                yield batch
                batch, real = [], 0
            if not batch:
                width = length
            batch.append(piece)
            real += length
        if batch:
            yield batch

    def _run(self, sequences: list[Ints]) -> list[Floats]:
        """The model's distributions for token ids, special tokens left out again."""
        longest = max(map(len, sequences)) + 2
        input_ids = np.full((len(sequences), longest), self.model.config.pad_token_id or 0, dtype=np.int64)
        mask = np.zeros((len(sequences), longest), dtype=bool)
        for row, ids in enumerate(sequences):
            input_ids[row, : len(ids) + 2] = [self._first_id, *ids, self._last_id]
            mask[row, : len(ids) + 2] = True
        probabilities = self._distributions(input_ids, mask)
        if not np.isfinite(probabilities).all():
            raise MinibertError("the model gives NaN: its weights are no numbers, or too large for their dtype")
        return [probabilities[row, 1 : len(ids) + 1] for row, ids in enumerate(sequences)]

    def _distributions(self, input_ids: Ints, mask: Bools) -> Floats:
        """The model's distributions (B, S, K) for a padded batch."""
        if isinstance(self.model, OnnxModel):
            logits = self.model(input_ids, mask)["logits"]
            powers = np.exp(logits - logits.max(-1, keepdims=True))
            shares: Floats = powers / powers.sum(-1, keepdims=True)
            return shares
        device = self.model.device
        with self._lock, torch.inference_mode():
            was_training = self.model.training
            self.model.eval()
            try:
                ids_on_device = torch.from_numpy(input_ids).to(device)
                scores = self.model(ids_on_device, torch.from_numpy(mask).to(device), return_dict=False)[0]
                probabilities: Floats = scores.float().softmax(-1).cpu().numpy()
            finally:
                self.model.train(was_training)
        return probabilities


def _loaded(
    source: Source,
    decoder: str | None,
    precision: str,
    threads: int | None,
    device: str | torch.device | None,
    allow_untrained_head: bool,
    options: dict[str, Any],
) -> BertForTokenClassification:
    """A checkpoint's model, optimized."""
    if threads is not None:
        set_threads(threads)
    chosen = device or ("cuda" if torch.cuda.is_available() else "cpu")
    options = {"dtype": torch.float32, **options, "device": chosen}
    wanted = decoder or BertConfig.from_pretrained(source).extra.get("decoder")
    kind = BertCrfForTokenClassification if wanted == "crf" else BertForTokenClassification
    model, report = kind.from_pretrained(source.name, **options, output_loading_info=True)
    of_another_task = bool(set(model.config.architectures or ()) & OTHER_CLASSIFIERS)
    if report["missing_keys"] or report["mismatched_keys"] or of_another_task:
        if not allow_untrained_head:
            raise CheckpointError(
                f"{source.name}: no trained token-classification head of {model.config.num_labels} labels in this "
                "checkpoint; fine-tune it first, or pass allow_untrained_head (--allow-untrained-head) and get "
                "random labels"
            )
        logger.warning("%s: the token-classification head is untrained; its labels are random", source.name)
    return optimize_spent(model, precision)


def _check_engine(engine: str, device: object, precision: str, options: dict[str, Any]) -> None:
    """Refuses what an exported model cannot be asked for."""
    if engine not in ENGINES:
        raise MinibertError(f"engine: expected {', '.join(ENGINES)}, got {engine!r}")
    if precision != "fp32":
        raise MinibertError(f"engine onnx: runs in the precision of the export, got precision {precision!r}")
    if device is not None and str(device) != "cpu":
        raise MinibertError(f"engine onnx: runs on the CPU, got device {device}")
    others = sorted(options.keys() - set(SOURCE_OPTIONS))
    if others:
        raise MinibertError(f"engine onnx: an export has no options {', '.join(others)}; give them when it is made")


def _exported(source: Source, threads: int | None) -> OnnxModel:
    model = OnnxModel(source, threads)
    if model.architecture not in (BertForTokenClassification.__name__, BertCrfForTokenClassification.__name__):
        raise CheckpointError(f"{source}: expected the export of a token classifier, got {model.architecture}")
    return model


def crf_scores(model: BertForTokenClassification | OnnxModel) -> PathScores:
    """What the model's CRF says of paths.

    Raises:
        MinibertError: it has none.
    """
    if isinstance(model, OnnxModel) and model.crf is not None:
        return model.crf
    if not isinstance(model, BertCrfForTokenClassification):
        raise MinibertError("decoder: the model has no CRF; expected argmax or viterbi")
    parts = (model.crf.start_transitions, model.crf.transitions, model.crf.end_transitions)
    return PathScores(*(part.detach().float().cpu().numpy() for part in parts))


def _checked_frame(tokenizer: Tokenizer, num_rows: int) -> list[int]:
    """The ids of [CLS] and [SEP], if tokeniser and model belong together."""
    largest = max(tokenizer.get_vocab().values())
    if largest >= num_rows:
        raise CheckpointError(
            f"the tokenizer's largest id is {largest} but the word embeddings have {num_rows} rows (vocab_size): "
            "tokenizer and checkpoint do not match"
        )
    frame: list[int] = tokenizer.encode("").ids
    if len(frame) != 2:
        raise CheckpointError(f"expected a tokenizer that adds [CLS] and [SEP], got {len(frame)} special tokens")
    if tokenizer.encode(" 上", add_special_tokens=False).offsets != [(1, 2)]:
        raise CheckpointError("the tokenizer does not say where its tokens stand in the text (offsets)")
    return frame
