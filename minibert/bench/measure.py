"""Peers take turns over each workload, so that whatever else the machine does hits them alike."""

from __future__ import annotations

import gc
import json
import platform
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from importlib import metadata
from pathlib import Path

import numpy as np
import torch

from minibert.bench.peers import PACKAGES, PEERS, Setting
from minibert.bench.processes import first_answers, loadings, timed
from minibert.bench.text import RunTexts, budgets, text_peers
from minibert.bench.training import BATCH_SIZE, TRAINERS, Steps, rows_of_file, rows_of_workload
from minibert.bench.workers import NotInstalledError, Worker, timed_turn
from minibert.bench.workloads import WORKLOADS, Workload, workloads
from minibert.config import BertConfig
from minibert.errors import MinibertError
from minibert.model.heads import BertForTokenClassification
from minibert.quiet import quiet
from minibert.threads import default_threads

REFERENCE = "transformers sdpa"  # whose numbers the others' are compared with, and whose speed is 1
THINGS = (*WORKLOADS, "text", "budget", "load", "start", "train")
WARM_UP = 2  # training steps
PAUSE = 0.05  # seconds, in which the threads that one peer leaves spinning go to sleep


@dataclass
class Timing:
    """One peer at one thing."""

    seconds: list[float] = field(default_factory=list)  # of each round
    difference: float | None = None  # the largest from the reference's logits, at real tokens
    megabytes: float | None = None  # the most that a process held


@dataclass
class Section:
    """Peers at one thing: so much work, done once a round."""

    name: str
    what: str
    amount: int  # real tokens or characters; 0 if the time itself is what matters
    unit: str
    timings: dict[str, Timing]
    base: str  # the peer whose speed is 1

    def lines(self) -> Iterator[str]:
        """A table for people."""
        yield f"{self.name}: {self.what}"
        figure = f"{self.unit}/s" if self.amount else "seconds"
        yield f"{'':22}{figure:>14}{'best':>10}{'speed':>8}{'difference':>12}{'MB':>8}"
        base = self.timings.get(self.base)
        for name, timing in self.timings.items():
            median, best = statistics.median(timing.seconds), min(timing.seconds)
            speed = f"{statistics.median(base.seconds) / median:.2f}" if base else "-"
            figures = [f"{self.amount / value:,.0f}" if self.amount else f"{value:.2f}" for value in (median, best)]
            difference = "" if timing.difference is None else f"{timing.difference:.1e}"
            memory = "" if timing.megabytes is None else f"{timing.megabytes:,.0f}"
            yield f"{name:22}{figures[0]:>14}{figures[1]:>10}{speed:>8}{difference:>12}{memory:>8}".rstrip()


@dataclass
class Results:
    """All that a run found."""

    machine: dict[str, str]
    sections: list[Section]
    left_out: dict[str, str]  # peer and reason

    def lines(self) -> Iterator[str]:
        """Tables for people; figures are medians of the rounds, `speed` their ratio to the first peer of its kind."""
        yield "; ".join(f"{name} {value}" for name, value in self.machine.items() if value)
        for section in self.sections:
            yield ""
            yield from section.lines()
        for name, reason in self.left_out.items():
            yield f"left out: {name} ({reason})"

    def to_json(self) -> str:
        """The same in one line."""
        return json.dumps(asdict(self), ensure_ascii=False)


def bench(
    folder: Path | None = None,
    names: Sequence[str] = (),
    peers: Sequence[str] = (),
    *,
    texts: Sequence[str] = (),
    labelled: Path | None = None,
    rounds: int = 7,
    threads: int | None = None,
    progress: Callable[[str], object] = lambda _: None,
) -> Results:
    """Times the named peers at the named things; all of them if none are named.

    Args:
        folder: a token-classification checkpoint; default BERT-base with random weights and 18 labels.
        names: of `THINGS`; "text" wants `texts`.
        peers: of `PEERS`, for what is timed on token ids.
        texts: for "text", from texts to entities.
        labelled: a file of labelled text for "train"; default random ids and labels of mixed lengths.
        rounds: timed passes, after one that is not timed.
        threads: for every peer; default all cores.
        progress: told what is going on.

    Raises:
        MinibertError: a name that is none, or no texts.
    """
    for kind, given, known in (("workload", names, THINGS), ("peer", peers, tuple(PEERS))):
        for name in given:
            if name not in known:
                raise MinibertError(f"{kind}: expected {', '.join(known)}, got {name!r}")
    if not texts and (wants := sorted({"text", "budget"} & set(names))):
        raise MinibertError(f"workload {wants[0]}: expected texts (--texts FILE), got none")
    names = names or [name for name in THINGS if name != "budget" and (name != "text" or texts)]
    threads = threads or default_threads()
    torch.set_num_threads(threads)
    with tempfile.TemporaryDirectory() as place:
        work = Path(place)
        if folder is None:
            folder = work / "bert-base"
            write_bert_base(folder)
        setting = Setting(folder, work, threads)
        sections: list[Section] = []
        left_out: dict[str, str] = {}
        wanted = [name for name in names if name in WORKLOADS]
        if wanted:
            chosen = workloads(BertConfig.from_pretrained(folder).vocab_size, wanted)
            with ExitStack() as stack:
                workers = _workers(setting, peers, left_out, progress, stack)
                sections += [_take_turns(workload, workers, rounds, progress) for workload in chosen]
        if "text" in names:
            with quiet():
                made = text_peers(setting, texts)
            sections.append(_texts_to_entities("text", made, list(made)[-1], texts, rounds, progress))
        if "budget" in names:
            for precision in ("fp32", "int8"):
                made = budgets(setting, precision)
                base = f"{precision}, 4,096 cells"
                sections.append(_texts_to_entities("budget", made, base, texts, rounds, progress))
        if "load" in names:
            what = "a new process to a loaded model, all weights read"
            sections.append(_processes("load", what, loadings(setting), setting, rounds, progress))
        if "start" in names:
            what = "a new process to its first answer"
            sections.append(_processes("start", what, first_answers(setting), setting, rounds, progress))
        if "train" in names:
            sections.append(_training_steps(setting, labelled, progress))
    return Results(machine(threads), sections, left_out)


def write_bert_base(folder: Path) -> None:
    """BERT-base with random weights, 18 labels, and a vocabulary of as many words as bert-base-chinese has."""
    torch.manual_seed(0)
    types = ("NAME", "ORG", "TITLE", "EDU", "CONT", "LOC", "PRO", "RACE")
    labels = ["[PAD]", "O", *(f"{prefix}-{type_}" for type_ in types for prefix in "BI")]
    BertForTokenClassification(BertConfig(vocab_size=21128, id2label=dict(enumerate(labels)))).save_pretrained(folder)
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *map(chr, range(0x21, 0x7F)), *"，。、；：？！“”（）《》"]
    words += map(chr, range(0x4E00, 0x4E00 + 21128 - len(words)))
    (folder / "vocab.txt").write_text("\n".join(words) + "\n", encoding="utf-8")


def _workers(
    setting: Setting,
    names: Sequence[str],
    left_out: dict[str, str],
    progress: Callable[[str], object],
    stack: ExitStack,
) -> dict[str, Worker]:
    """One after another, since they share exported graphs."""
    workers: dict[str, Worker] = {}
    for name in names or PEERS:
        progress(f"preparing {name}")
        try:
            workers[name] = Worker(name, setting)
            stack.callback(workers[name].close)
        except NotInstalledError as error:
            left_out[name] = str(error)
    return workers


def _take_turns(
    workload: Workload, workers: dict[str, Worker], rounds: int, progress: Callable[[str], object]
) -> Section:
    timings = {name: Timing() for name in workers}
    outputs = {}
    for name, worker in workers.items():
        progress(f"{workload.name}: {name}")
        outputs[name] = worker.logits(workload)
    for name, output in outputs.items():
        if REFERENCE in outputs and name != REFERENCE:
            timings[name].difference = float(np.abs(output - outputs[REFERENCE]).max())

    def turn(name: str) -> float:
        seconds, timings[name].megabytes = workers[name].turn(workload)
        return seconds

    _in_turn(timings, turn, rounds, lambda text: progress(f"{workload.name}: {text}"))
    what = f"{workload.what}; {workload.tokens:,} tokens, {workload.padding:.0%} padding"
    return Section(workload.name, what, workload.tokens, "tokens", timings, REFERENCE)


def _in_turn(
    timings: dict[str, Timing], turn: Callable[[str], float], rounds: int, progress: Callable[[str], object]
) -> None:
    """Each round begins with another peer; a turn says how many seconds it took."""
    order = list(timings)
    gc.collect()
    for number in range(rounds):
        progress(f"round {number + 1} of {rounds}")
        first = number % len(order)
        for name in order[first:] + order[:first]:
            time.sleep(PAUSE)
            timings[name].seconds.append(turn(name))


def _texts_to_entities(
    thing: str,
    peers: dict[str, RunTexts],
    base: str,
    texts: Sequence[str],
    rounds: int,
    progress: Callable[[str], object],
) -> Section:
    timings = {name: Timing() for name in peers}
    for run in peers.values():
        run(texts[:4])
    _in_turn(timings, lambda n: timed_turn(lambda: peers[n](texts)), rounds, lambda text: progress(f"{thing}: {text}"))
    characters = sum(map(len, texts))
    what = f"{len(texts):,} texts to their entities, {characters:,} characters"
    return Section(thing, what, characters, "characters", timings, base)


def _processes(
    thing: str,
    what: str,
    commands: dict[str, list[str]],
    setting: Setting,
    rounds: int,
    progress: Callable[[str], object],
) -> Section:
    timings = {name: Timing() for name in commands}
    for number in range(rounds + 1):  # the first brings files into memory and is not counted
        progress(f"{thing}: round {number} of {rounds}")
        for name, command in commands.items():
            seconds, megabytes = timed(command, setting.threads)
            if number:
                timings[name].seconds.append(seconds)
                timings[name].megabytes = max(megabytes, timings[name].megabytes or 0)
    return Section(thing, what, 0, "", timings, list(commands)[-1])


def _training_steps(setting: Setting, labelled: Path | None, progress: Callable[[str], object]) -> Section:
    """Step by step both do the same, so a step's time is compared with the same step's; `difference` is of losses."""
    if labelled is None:
        config = BertConfig.from_pretrained(setting.checkpoint)
        (mixed,) = workloads(config.vocab_size, ["mixed"])
        rows = rows_of_workload(mixed, config.num_labels)
    else:
        with quiet():
            rows = rows_of_file(setting, str(labelled))
    least = (WARM_UP + 1) * BATCH_SIZE
    if len(rows) < least:
        raise MinibertError(f"workload train: expected at least {least} rows of labelled text, got {len(rows)}")
    steps: dict[str, Steps] = {}
    for name, run in TRAINERS.items():
        progress(f"train: {name}")
        with quiet():
            steps[name] = run(setting, rows)
    ours, theirs = steps["minibert"], steps["transformers"]
    timings = {name: Timing(of.seconds[WARM_UP:]) for name, of in steps.items()}
    apart = [abs(one - two) / two for one, two in zip(ours.losses, theirs.losses, strict=True)]
    timings["minibert"].difference = max(apart)
    count = len(ours.seconds)
    tokens = sum(len(row["input_ids"]) for row in rows[: count * BATCH_SIZE]) // count
    what = f"a step of {BATCH_SIZE} rows, {tokens:,} tokens on average, {count} steps, the first {WARM_UP} not timed; "
    what += "difference: the largest of a loss, as a share"
    return Section("train", what, tokens, "tokens", timings, "transformers")


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
