"""Peers take turns over each workload, so that whatever else the machine does hits them alike."""

from __future__ import annotations

import gc
import json
import platform
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np
import torch

from minibert.bench.peers import PACKAGES, PEERS, Run, Setting, quiet
from minibert.bench.workloads import WORKLOADS, Workload, workloads
from minibert.config import BertConfig
from minibert.errors import MinibertError
from minibert.model.heads import BertForTokenClassification

REFERENCE = "transformers sdpa"  # whose numbers the others' are compared with, and whose speed is 1
PAUSE = 0.05  # seconds, in which the threads that one peer leaves spinning go to sleep


@dataclass
class Timing:
    """One peer on one workload."""

    seconds: list[float] = field(default_factory=list)  # of each round
    difference: float | None = None  # the largest from the reference's logits, at real tokens

    def rate(self, tokens: int) -> tuple[float, float]:
        """Real tokens a second: by the median time, and by the shortest."""
        return tokens / statistics.median(self.seconds), tokens / min(self.seconds)


@dataclass
class Results:
    """All that a run found."""

    machine: dict[str, str]
    workloads: list[Workload]
    timings: dict[str, dict[str, Timing]]  # by workload, by peer
    left_out: dict[str, str]  # peer and reason

    def lines(self) -> Iterator[str]:
        """Tables for people."""
        yield "; ".join(f"{name} {value}" for name, value in self.machine.items())
        for workload in self.workloads:
            timings = self.timings[workload.name]
            yield ""
            yield f"{workload.name}: {workload.what}; {workload.tokens:,} tokens, {workload.padding:.0%} padding"
            yield f"{'':22}{'tokens/s':>10}{'best':>10}{'ratio':>8}{'difference':>12}"
            base = timings[REFERENCE].rate(workload.tokens)[0] if REFERENCE in timings else None
            for name, timing in timings.items():
                median, best = timing.rate(workload.tokens)
                ratio = f"{median / base:.2f}" if base else "-"
                difference = "-" if timing.difference is None else f"{timing.difference:.1e}"
                yield f"{name:22}{median:10,.0f}{best:10,.0f}{ratio:>8}{difference:>12}"
        for name, reason in self.left_out.items():
            yield f"left out: {name} ({reason})"

    def to_json(self) -> str:
        """The same in one line."""
        found = {
            workload.name: {
                "tokens": workload.tokens,
                "padding": round(workload.padding, 4),
                "peers": {name: asdict(timing) for name, timing in self.timings[workload.name].items()},
            }
            for workload in self.workloads
        }
        return json.dumps({"machine": self.machine, "workloads": found, "left_out": self.left_out})


def bench(
    folder: Path | None = None,
    names: Sequence[str] = (),
    peers: Sequence[str] = (),
    **options: Any,
) -> Results:
    """Times the named peers on the named workloads; all of them if none are named.

    Args:
        folder: a token-classification checkpoint; default BERT-base with random weights and 18 labels.
        options: as for `measure`.

    Raises:
        MinibertError: a name that is none.
    """
    for kind, given, known in (("workload", names, WORKLOADS), ("peer", peers, PEERS)):
        for name in given:
            if name not in known:
                raise MinibertError(f"{kind}: expected {', '.join(known)}, got {name!r}")
    with tempfile.TemporaryDirectory() as work:
        if folder is None:
            folder = Path(work) / "bert-base"
            torch.manual_seed(0)
            BertForTokenClassification(BertConfig(vocab_size=21128, num_labels=18)).save_pretrained(folder)
        chosen = workloads(BertConfig.from_pretrained(folder).vocab_size, names)
        return measure(folder, Path(work), chosen, peers, **options)


def measure(
    folder: Path,
    work: Path,
    chosen: Sequence[Workload],
    names: Sequence[str] = (),
    *,
    rounds: int = 7,
    threads: int | None = None,
    progress: Callable[[str], object] = lambda _: None,
) -> Results:
    """Times the named peers, or all that are installed.

    Args:
        folder: a token-classification checkpoint.
        work: a folder for exported and converted models.
        rounds: timed passes of each peer over each workload, after one that is not timed.
        threads: for every peer; default as PyTorch has it.
        progress: told what is going on.
    """
    threads = threads or torch.get_num_threads()
    torch.set_num_threads(threads)
    runs: dict[str, Run] = {}
    left_out: dict[str, str] = {}
    for name in names or PEERS:
        progress(f"preparing {name}")
        try:
            with quiet():
                runs[name] = PEERS[name](Setting(folder, work, threads))
        except ImportError as error:
            left_out[name] = f"{error.name or error} is not installed"
    timings = {}
    for workload in chosen:
        timings[workload.name] = _take_turns(workload, runs, rounds, progress)
    return Results(machine(threads), list(chosen), timings, left_out)


def _take_turns(
    workload: Workload, runs: dict[str, Run], rounds: int, progress: Callable[[str], object]
) -> dict[str, Timing]:
    timings = {name: Timing() for name in runs}
    masks = [batch.mask.astype(bool) for batch in workload.batches]
    outputs = {}
    for name, run in runs.items():  # warms up, too
        progress(f"{workload.name}: {name}")
        outputs[name] = np.concatenate([run(b)[mask] for b, mask in zip(workload.batches, masks, strict=True)])
    for name, output in outputs.items():
        if REFERENCE in outputs and name != REFERENCE:
            timings[name].difference = float(np.abs(output - outputs[REFERENCE]).max())
    order = list(runs)
    gc.collect()
    for round_ in range(rounds):
        progress(f"{workload.name}: round {round_ + 1} of {rounds}")
        for name in order[round_ % len(order) :] + order[: round_ % len(order)]:
            time.sleep(PAUSE)
            start = time.perf_counter()
            for batch in workload.batches:
                runs[name](batch)
            timings[name].seconds.append(time.perf_counter() - start)
    return timings


def machine(threads: int) -> dict[str, str]:
    """Processor, what of its instructions matters, threads and versions."""
    found = {"processor": platform.processor() or platform.machine(), "instructions": "", "threads": str(threads)}
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.is_file():
        lines = cpuinfo.read_text(encoding="utf-8").splitlines()
        pairs = (line.partition(":") for line in lines)
        facts = {name.strip(): value.strip() for name, _, value in pairs}
        found["processor"] = facts.get("model name", found["processor"])
        flags = set(facts.get("flags", "").split())
        wanted = ("avx2", "avx512f", "avx512_vnni", "avx_vnni", "avx512_bf16", "amx_int8")
        found["instructions"] = " ".join(flag for flag in wanted if flag in flags)
    for package in PACKAGES:
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return found
