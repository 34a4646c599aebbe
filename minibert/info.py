"""What a person wants to know of a checkpoint before using it."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import torch

from minibert.checkpoint.files import WeightFiles
from minibert.checkpoint.loading import compare, few, is_finite
from minibert.checkpoint.names import head_of
from minibert.config import BertConfig
from minibert.engine import HALF, PRECISIONS, attention_of, has_varlen
from minibert.engine.kernels import has_vnni, kernel_for
from minibert.errors import CheckpointError, ConfigError
from minibert.hub import Source
from minibert.model.encoder import BertModel
from minibert.model.heads import MODELS
from minibert.model.pretrained import BertPreTrainedModel
from minibert.text.tokenizer import cannot_spell_capitals, load_tokenizer, lower_cases
from minibert.threads import default_threads, usable_cores


def describe(name_or_path: str | os.PathLike[str], **where: Any) -> Iterator[str]:
    """Lines about a checkpoint: architecture, labels, files, tokeniser, what each task would miss, and warnings.

    `where` as in `hub.Source`. Reads every weight once, to see whether all are finite.

    Raises:
        ConfigError, CheckpointError: the config or the weights cannot be read.
    """
    source = Source(os.fspath(name_or_path), **where)
    with source.unchanged():
        config = BertConfig.from_pretrained(source)
        files = WeightFiles(source)
    yield _line("architecture", ", ".join(config.architectures or ["not named"]))
    yield _line(
        "sizes",
        f"{config.num_hidden_layers} layers of {config.hidden_size}, {config.num_attention_heads} heads, "
        f"feed-forward {config.intermediate_size}, {config.hidden_act}",
    )
    yield _line(
        "limits",
        f"{config.max_position_embeddings} positions, {config.vocab_size:,} words, "
        f"{config.type_vocab_size} token types",
    )
    yield _line("labels", f"{config.num_labels}: {few(list(config.id2label.values()), 8)}")
    warnings: list[str] = []
    with files:
        paths = sorted({tensor.path for tensor in files.tensors.values()})
        numbers = sum(torch.Size(tensor.shape).numel() for tensor in files.tensors.values())
        dtypes = ", ".join(sorted({tensor.dtype for tensor in files.tensors.values()}))
        yield _line("weights", f"{len(files.tensors)} tensors, {numbers:,} numbers in {dtypes}")
        for path in paths:
            yield _line("", f"{path.name}, {path.stat().st_size:,} bytes")
        yield from _tokenizer_lines(source, config, warnings)
        for name, model_class in MODELS.items():
            title = "tasks" if model_class is BertModel else ""
            yield _line(title, f"{name}: {_task(model_class, config, files)}")
        broken = [name for name, tensor in files.tensors.items() if not is_finite(tensor.read())]
    if broken:
        warnings.append(f"NaN or infinite numbers in {few(broken)}")
    for warning in warnings:
        yield _line("warning", warning)


def engine_lines() -> Iterator[str]:
    """Lines about what would run a model here: what `optimize` takes for each precision, and threads."""
    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else "none"
    yield _line("gpu", gpu)
    yield _line("threads", f"{default_threads()} for {usable_cores()} cores of {os.cpu_count()} processors")
    for precision in PRECISIONS:
        if precision in HALF:
            if gpu == "none":
                runs = "no, it wants a GPU"
            else:
                runs = f"PyTorch, on the GPU, {attention_of(has_varlen(torch.device('cuda')))}"
        else:
            kernel = kernel_for(precision)
            runs = f"{kernel.name}, on the CPU" if kernel else "no, PyTorch has no kernel for this processor"
        yield _line(precision, runs)
    yield _line("VNNI", "yes" if has_vnni() else "no, so int8 inputs are rounded to seven bits")


def _line(title: str, text: str) -> str:
    return f"{title:<14}{text}"


def _task(model_class: type[BertPreTrainedModel], config: BertConfig, files: WeightFiles) -> str:
    """Whether the weights are all there for one class, or what is not."""
    try:
        with torch.device("meta"):
            model = model_class(config)
        found = compare(model, files, tied=model.tied_names())
    except (ConfigError, CheckpointError) as error:
        return f"no ({' '.join(str(error).split())})"
    problems = [f"{kind} {names[0]}" for kind, names in found.problems.items() if names]
    if problems:
        return f"no ({'; '.join(problems)})"
    missing = sorted({head_of(name) or name for name in found.fresh})
    return f"{' and '.join(missing)} not there, would start untrained" if missing else "complete"


def _tokenizer_lines(source: Source, config: BertConfig, warnings: list[str]) -> Iterator[str]:
    try:
        tokenizer = load_tokenizer(source)
    except CheckpointError as error:
        yield _line("tokenizer", "none")
        warnings.append(str(error))
        return
    vocabulary = tokenizer.get_vocab()
    lowers = lower_cases(tokenizer)
    yield _line("tokenizer", f"{len(vocabulary):,} tokens, {'lower-cases' if lowers else 'keeps capitals'}")
    if max(vocabulary.values()) >= config.vocab_size:
        warnings.append(
            f"the tokenizer's largest id {max(vocabulary.values())} is beyond the {config.vocab_size} rows of the word "
            "embeddings: tokenizer and checkpoint do not match"
        )
    if cannot_spell_capitals(tokenizer):
        warnings.append(
            "the tokenizer keeps capitals but its vocabulary has none: words with capital Latin letters become [UNK]; "
            "lower-case such text first"
        )
