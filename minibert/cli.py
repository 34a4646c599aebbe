"""The command line: parsing only. Results go to standard output, notices to standard error."""

from __future__ import annotations

import atexit
import contextlib
import gc
import itertools
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import click

from minibert import __version__
from minibert.errors import MinibertError, printable
from minibert.threads import default_threads


def _version(context: click.Context, _: click.Parameter, asked: bool) -> None:
    """With the threads that a command would take, where one looks who wonders why all is slow."""
    if not asked:
        return
    try:
        threads = default_threads()
    except MinibertError as error:
        raise click.ClickException(str(error)) from None
    click.echo(f"minibert, version {__version__}, {threads} thread{'s' if threads > 1 else ''}")
    context.exit()


class _Commands(click.Group):
    """Turns known errors into one line and exit status 1."""

    def invoke(self, context: click.Context) -> Any:
        try:
            return super().invoke(context)
        except MinibertError as error:
            lines = (line.strip() for line in str(error).splitlines())
            raise click.ClickException(printable(" ".join(lines))) from None


@click.group(cls=_Commands, context_settings={"help_option_names": ["-h", "--help"]})
@click.option(
    "--version", "-V", is_flag=True, is_eager=True, expose_value=False, callback=_version, help="And threads."
)
def main() -> None:
    """A BERT encoder for Hugging Face checkpoints."""


def run() -> None:
    """`main` as a process of its own.

    Python's collector would look through what importing PyTorch makes, again and again, for garbage that is not there:
    at start and at the end it took 0.8 of the 2.0 seconds of a first answer (EPYC, BERT-base).
    """
    gc.disable()
    atexit.register(gc.freeze)
    main()


def _collect_garbage() -> None:
    """From now on, as ever; what has been loaded is left alone. A command calls it before work that may take long."""
    if not gc.isenabled():
        gc.freeze()
        gc.enable()


def _classifier_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """The options of commands that run a model over text."""
    for option in reversed(
        [
            click.option("--aggregation-strategy", type=click.Choice(["first", "average", "max", "simple", "none"])),
            click.option(
                "--decoder", type=click.Choice(["argmax", "viterbi", "crf"]), help="viterbi: legal tags only."
            ),
            click.option("--scheme", type=click.Choice(["auto", "BIO", "BIOES", "BMES", "BILOU", "IO"])),
            click.option("--split-mode", type=click.Choice(["text", "characters"]), help="Default: as in training."),
            click.option("--lower-case", is_flag=True, help="Lower-case the text for the model."),
            click.option("--stride", type=int, help="Tokens that two windows of a long text share."),
            click.option("--no-windows", "allow_windows", flag_value=False, default=None, help="Refuse long texts."),
            click.option("--max-tokens-per-batch", type=int, help="Cells that go through the model at once."),
            click.option("--engine", type=click.Choice(["torch", "onnx"]), help="onnx: MODEL is an export."),
            click.option("--precision", type=click.Choice(["fp32", "int8", "bf16", "fp16"]), help="Default fp32."),
            click.option("--threads", type=int, help="CPU threads; default all cores, divided among workers."),
            click.option("--device", help="cpu, cuda, cuda:1, ...; default a GPU if there is one."),
            click.option("--allow-untrained-head", is_flag=True, help="Accept a checkpoint without a trained head."),
        ]
    ):
        command = option(command)
    return command


def _load_classifier(name_or_path: str | None, options: dict[str, Any]) -> Any:
    from minibert.predict import TokenClassifier

    if options.get("threads") is None:
        options["threads"] = default_threads()
    classifier = TokenClassifier.from_pretrained(
        name_or_path, **{name: value for name, value in options.items() if value is not None}
    )
    _collect_garbage()
    if sys.stderr.isatty():
        click.echo(repr(classifier), err=True)
    return classifier


@main.command(no_args_is_help=True, short_help="Find the entities of texts.")
@click.argument("texts", nargs=-1, metavar="[TEXT | -]...")
@click.option("--file", "-f", "files", multiple=True, type=click.Path(path_type=Path), help="Tag each line of a file.")
@click.option("--whole-files", is_flag=True, help="Take each file, or standard input, as one text.")
@click.option(
    "--model", "name_or_path", metavar="MODEL", help="A directory, or a name on the Hub; default a small model within."
)
@click.option(
    "--format",
    "format_",
    default="entities",
    show_default=True,
    type=click.Choice(["entities", "jsonl", "conll", "html"]),
)
@_classifier_options
def predict(
    texts: tuple[str, ...],
    files: tuple[Path, ...],
    whole_files: bool,
    name_or_path: str | None,
    format_: str,
    **options: Any,
) -> None:
    """Find the entities of each TEXT ("-": every line of standard input) and of every line of each file.

    Results are written as they come. A line that is not UTF-8 is reported and marked, the rest goes on, and the exit
    status is 1 at the end.
    """
    if not texts and not files:
        raise click.UsageError("expected a TEXT, - for standard input, or --file")
    from minibert import tagging

    classifier = _load_classifier(name_or_path, options)
    broken: list[str] = []

    def report(message: str) -> None:
        broken.append(message)
        click.echo(f"Warning: {message}", err=True)

    def lines() -> Iterator[tagging.Line]:
        for text in texts:
            if text == "-":
                yield from tagging.read_lines(sys.stdin.buffer, "standard input", report, whole=whole_files)
            else:
                yield tagging.Line(text)
        yield from tagging.read_files(files, report, whole=whole_files)

    typed = "-" in texts and sys.stdin.isatty()
    results = tagging.tagged(classifier, lines(), at_once=typed)
    scheme, colour = classifier.labels.scheme, sys.stdout.isatty()
    size = sum(path.stat().st_size for path in files if path.is_file())
    hidden = not (files and sys.stderr.isatty()) or colour  # results on the same terminal show the progress
    with click.progressbar(length=size, file=sys.stderr, hidden=hidden) as progress:
        for line, output in tagging.rendered(results, format_, scheme, colour=colour):
            tagging.write_whole_lines(output)
            progress.update(line.size if line is not None else 0)
    if broken:
        raise click.ClickException(f"{len(broken)} of the lines were not UTF-8; they are marked in the output")


@main.command(no_args_is_help=True, short_help="Fine-tune a model by a recipe.")
@click.argument("recipe", metavar="RECIPE.toml", type=click.Path(path_type=Path))
@click.option("--set", "settings", multiple=True, metavar="KEY=VALUE", help="Such as training.epochs=5.")
@click.option("--resume", is_flag=True, help="Go on from the last checkpoint of a run that was stopped.")
def train(recipe: Path, settings: tuple[str, ...], resume: bool) -> None:
    """Train a token classifier as RECIPE.toml says, and save it with its tokeniser. Needs minibert[train]."""
    from minibert.train.recipe import Recipe

    read = Recipe.from_file(recipe, settings)  # before anything heavy is loaded
    try:
        from minibert.train.training import train as begin
    except ModuleNotFoundError as error:
        raise MinibertError(f"training needs {error.name}: pip install 'minibert[train]'") from None
    _collect_garbage()
    with contextlib.redirect_stdout(sys.stderr):  # where loggers may talk
        begin(read, resume=resume)
    from torch import distributed

    if distributed.is_available() and distributed.is_initialized():
        distributed.destroy_process_group()  # whose threads would else now and then abort the end of the process
    if os.environ.get("RANK", "0") == "0":  # of several processes the first one speaks
        click.echo(read.training.output_dir)


@main.command(no_args_is_help=True, short_help="Score a model on labelled text.")
@click.argument("name_or_path", metavar="MODEL")
@click.argument("path", metavar="FILE", type=click.Path(path_type=Path))
@click.option("--format", "format_", default="auto", show_default=True, type=click.Choice(["auto", "conll", "jsonl"]))
@click.option("--html", "page", type=click.Path(path_type=Path), metavar="PAGE", help="Write a page of the errors.")
@click.option("--json", "as_json", is_flag=True, help="Print the scores as one JSON object.")
@click.option(
    "--max-drop",
    default=1.0,
    show_default=True,
    type=click.FloatRange(min=0),
    metavar="POINTS",
    help="With another --precision than fp32: by how much strict F1 may fall.",
)
@_classifier_options
def evaluate(
    name_or_path: str,
    path: Path,
    format_: str,
    page: Path | None,
    as_json: bool,
    max_drop: float,
    **options: Any,
) -> None:
    """Score MODEL on a FILE of token and tag columns (CoNLL) or of JSON lines, and print what it confuses.

    With --precision int8, bf16 or fp16 it is scored in fp32, too, and the change in F1 is said (with --json on standard
    error); exit status 1 if F1 falls by more than --max-drop.
    """
    from minibert.train import evaluate as evaluation
    from minibert.train.data import read_examples

    examples = read_examples(path, format_)

    def score(**changed: str) -> evaluation.Evaluation:
        classifier = _load_classifier(name_or_path, options | changed)
        with click.progressbar(length=len(examples), file=sys.stderr, hidden=not sys.stderr.isatty()) as progress:
            return evaluation.evaluate(classifier, examples, progress=progress.update)

    result = score()
    for line in [result.to_json()] if as_json else result.lines():
        click.echo(printable(line))
    if page is not None:
        result.write_page(page, f"{path.name}: errors of {name_or_path}")
    precision = options["precision"] or "fp32"
    if precision != "fp32":
        before, after = (100 * found.scores["strict"]["micro"]["f1"] for found in (score(precision="fp32"), result))
        said = f"strict F1: fp32 {before:.2f}, {precision} {after:.2f}, a change of {after - before:+.2f} points"
        click.echo(said, err=as_json)
        if before - after > max_drop:
            raise click.ClickException(f"F1 fell by {before - after:.2f} points, more than --max-drop {max_drop:g}")


@main.command(no_args_is_help=True, short_help="Compare two models module by module.")
@click.argument("name_or_path", metavar="MODEL")
@click.argument("texts", nargs=-1, metavar="[TEXT...]")
@click.option(
    "--against",
    metavar="REFERENCE",
    help="transformers (default), minibert (its plain model in fp32), a directory, or a name on the Hub.",
)
@click.option("--text", "files", multiple=True, type=click.Path(path_type=Path), help="Take each line of a file.")
@click.option("--dtype", default="fp32", show_default=True, help="Of MODEL: fp32, fp64, bf16, fp16.")
@click.option("--engine", metavar="PRECISION", help="Run MODEL by the fast engine: fp32, int8, bf16, fp16.")
@click.option("--grad", is_flag=True, help="Compare the gradient of every parameter, too.")
@click.option("--device", help="cpu, cuda, cuda:1, ...; default cpu.")
@click.option("--module", metavar="FILE.py:NAME", help="Your own model in MODEL's place: a class or a function.")
@click.option(
    "--mapping", "mapping_file", type=click.Path(path_type=Path), help="Its module names to ours, as TOML or JSON."
)
@click.option("--tolerance", type=float, help="Largest difference that counts as the same; default by the precision.")
@click.option("--attention", default="eager", show_default=True, type=click.Choice(["eager", "sdpa"]))
@click.option("--json", "as_json", is_flag=True, help="Print everything as one JSON object.")
@click.option("--html", "page", type=click.Path(path_type=Path), metavar="PAGE", help="Write a page with a plot.")
def parity(
    name_or_path: str,
    texts: tuple[str, ...],
    files: tuple[Path, ...],
    attention: str,
    mapping_file: Path | None,
    as_json: bool,
    page: Path | None,
    **options: Any,
) -> None:
    """Compare MODEL with a reference, module by module, on a few sentences, each TEXT, or each line of a file.

    Says which module is the first to differ, and where the numbers tell why, the cause. Exit status 1 if one does.
    """
    from minibert import parity as comparison
    from minibert import tagging

    _collect_garbage()
    read = tagging.read_files(files, lambda message: click.echo(f"Warning: {message}", err=True), whole=False)
    lines = [*texts, *(line.text for line in read if line.text.strip())]
    names = None if mapping_file is None else comparison.Names.from_file(mapping_file)
    with contextlib.redirect_stdout(sys.stderr):  # where a user's own model may talk
        report = comparison.compare(
            name_or_path,
            texts=lines if texts or files else comparison.SENTENCES,
            mapping=names,
            attn_implementation=attention,
            **options,
        )
    for line in [report.to_json()] if as_json else report.lines():
        click.echo(printable(line))
    if page is not None:
        report.write_page(page)
    if not report.is_within:
        raise click.ClickException(next(report.verdict()))


@main.command(no_args_is_help=True, short_help="Draw where a model looks.")
@click.argument("name_or_path", metavar="MODEL")
@click.argument("text", metavar="TEXT")
@click.option("--output", "-o", required=True, type=click.Path(path_type=Path), metavar="OUT.html|.png")
@click.option("--layer", default=1, show_default=True, help="The layer of the head in detail.")
@click.option("--head", default=1, show_default=True, help="The head in detail.")
@click.option("--font", metavar="FILE", help="For a PNG: a font file or family; default one with the characters.")
def attention(name_or_path: str, text: str, output: Path, layer: int, head: int, font: str | None) -> None:
    """Draw the attention of MODEL over TEXT: every layer and head, averages, rollout, and one head in detail.

    A page (.html) needs a browser only, and shows any head on a click. A picture (.png) needs minibert[viz].
    """
    from minibert.visualize.attention import check_suffix, read_attention

    _collect_garbage()
    check_suffix(output)  # before anything is loaded
    read_attention(name_or_path, text).save(output, layer, head, font=font)
    click.echo(output)


@main.command(no_args_is_help=True, short_help="Write a model for another runtime.")
@click.argument("name_or_path", metavar="MODEL")
@click.argument("target", type=click.Choice(["onnx", "torch"]))
@click.option("--output", "-o", "directory", required=True, metavar="DIR", type=click.Path(path_type=Path))
@click.option("--precision", default="fp32", show_default=True, type=click.Choice(["fp32", "int8"]))
@click.option("--portable", is_flag=True, help="Standard ONNX operators only, for other runtimes than ONNX Runtime.")
@click.option("--external-data/--one-file", default=None, help="Weights apart; default only if too large for one file.")
@click.option("--tolerance", type=click.FloatRange(min=0), help="Default 1e-4; for int8 0.35 of the output's size.")
@click.option(
    "--evaluate", "labelled", type=click.Path(path_type=Path), metavar="FILE", help="Measure F1 on this text."
)
@click.option("--max-drop", default=1.0, show_default=True, type=click.FloatRange(min=0), metavar="POINTS")
@click.option("--unmeasured", is_flag=True, help="Accept int8 without --evaluate.")
def export(name_or_path: str, target: str, directory: Path, labelled: Path | None, **options: Any) -> None:
    """Write MODEL as an ONNX graph or a torch.export program, with config and tokeniser, into DIR.

    What was written is run beside the plain model on a few batches, and the differences are printed. If one is above
    the tolerance, or F1 falls by more than --max-drop, nothing is left and the exit status is 1.
    """
    from minibert.export import export as write

    _collect_garbage()
    examples = None
    if labelled is not None:
        from minibert.train.data import read_examples

        examples = read_examples(labelled, "auto")
    write(name_or_path, target, directory, examples=examples, report=click.echo, **options)


@main.command(short_help="Time minibert and its peers side by side.")
@click.option("--model", "folder", type=click.Path(path_type=Path), help="Default BERT-base with random weights.")
@click.option(
    "--workload",
    "workloads",
    multiple=True,
    metavar="NAME",
    help="lat32, mixed, ...; default all.",
)
@click.option("--peer", "peers", multiple=True, metavar="NAME", help='Such as "minibert fp32"; default all there are.')
@click.option("--texts", type=click.Path(path_type=Path), help="A file, whose lines are taken to their entities.")
@click.option("--limit", default=500, show_default=True, type=click.IntRange(min=1), help="Of these lines.")
@click.option("--labelled", type=click.Path(path_type=Path), help="Labelled text to train on; default random.")
@click.option("--rounds", default=7, show_default=True, type=click.IntRange(min=1))
@click.option("--threads", type=click.IntRange(min=1), help="For every peer; default all cores.")
def bench(
    folder: Path | None,
    workloads: tuple[str, ...],
    peers: tuple[str, ...],
    texts: Path | None,
    limit: int,
    labelled: Path | None,
    rounds: int,
    threads: int | None,
) -> None:
    """Time minibert and its peers on the same weights and inputs, taking turns; the last line is JSON.

    Peers that are not installed are left out and named: pip install 'minibert[bench]'. Let nothing else run.
    """
    from minibert import tagging
    from minibert.bench.measure import bench as measure

    _collect_garbage()

    def progress(text: str) -> None:
        if sys.stderr.isatty():
            click.echo(f"\r\x1b[K{text}", err=True, nl=False)

    paths = [] if texts is None else [texts]
    read = tagging.read_files(paths, lambda message: click.echo(f"Warning: {message}", err=True), whole=False)
    lines = list(itertools.islice((line.text for line in read if line.text.strip()), limit))
    results = measure(
        folder, workloads, peers, texts=lines, labelled=labelled, rounds=rounds, threads=threads, progress=progress
    )
    progress("")
    for line in results.lines():
        click.echo(line)
    click.echo(results.to_json())


@main.command(no_args_is_help=True, short_help="Say what a checkpoint holds.")
@click.argument("name_or_path", metavar="[MODEL]", required=False)
@click.option("--engine", is_flag=True, help="Say what would run a model on this machine, and at which precision.")
def info(name_or_path: str | None, engine: bool) -> None:
    """Say what a person wants to know of MODEL before using it: sizes, labels, files, tokeniser, what is missing."""
    from minibert.info import describe, engine_lines

    _collect_garbage()
    if name_or_path is None and not engine:
        raise click.UsageError("expected a MODEL, or --engine")
    for line in engine_lines() if engine else ():
        click.echo(line)
    for line in describe(name_or_path) if name_or_path is not None else ():
        click.echo(printable(line))


if __name__ == "__main__":
    run()
