"""The command line: parsing only. Results go to standard output, notices to standard error."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

import click

from minibert import __version__
from minibert.errors import DataError, MinibertError


class _Commands(click.Group):
    """Turns known errors into one line and exit status 1."""

    def invoke(self, context: click.Context) -> Any:
        try:
            return super().invoke(context)
        except MinibertError as error:
            lines = (line.strip() for line in str(error).splitlines())
            raise click.ClickException(" ".join(lines)) from None


@click.group(cls=_Commands, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, "-V", "--version", prog_name="minibert")
def main() -> None:
    """A BERT encoder for Hugging Face checkpoints."""


@main.command(no_args_is_help=True, short_help="Label every token of a text.")
@click.argument("texts", nargs=-1, required=True, metavar="TEXT...")
@click.option("--model", "name_or_path", required=True, metavar="MODEL", help="A directory, or a name on the Hub.")
@click.option("--allow-untrained-head", is_flag=True, help="Accept a checkpoint without a head; labels are random.")
@click.option("--num-labels", type=int, help="Number of labels of an untrained head.")
def predict(texts: tuple[str, ...], name_or_path: str, allow_untrained_head: bool, num_labels: int | None) -> None:
    """Print the label and score of every token of each TEXT ("-": every line of standard input).

    One token a line, with its label and score after tabs; an empty line after each text.
    """
    from minibert.predict import TokenClassifier

    options = {} if num_labels is None else {"num_labels": num_labels}
    classifier = TokenClassifier.from_pretrained(name_or_path, allow_untrained_head=allow_untrained_head, **options)
    for text in texts:
        for line in _input_lines() if text == "-" else (text,):
            for token in classifier.label_tokens([line])[0]:
                click.echo(f"{token.text}\t{token.label}\t{token.score:.4f}")
            click.echo()


def _input_lines() -> Iterator[str]:
    for number, line in enumerate(sys.stdin.buffer, 1):
        try:
            yield line.decode("utf-8").rstrip("\n")
        except UnicodeDecodeError as error:
            raise DataError(f"standard input, line {number}: not UTF-8 at byte {error.start}") from None


@main.command(no_args_is_help=True, short_help="Compare a checkpoint's numbers with transformers'.")
@click.argument("name_or_path", metavar="MODEL")
@click.argument("texts", nargs=-1, metavar="[TEXT...]")
@click.option("--tolerance", default=1e-4, show_default=True, help="Largest difference that counts as the same.")
@click.option("--attention", default="sdpa", show_default=True, type=click.Choice(["sdpa", "eager"]))
def parity(name_or_path: str, texts: tuple[str, ...], tolerance: float, attention: str) -> None:
    """Compare MODEL with transformers, layer by layer, on a few sentences or on each TEXT.

    Exit status 1 if a difference is above the tolerance.
    """
    from minibert.parity import SENTENCES, compare

    differs = False
    for index, difference in enumerate(compare(name_or_path, texts or SENTENCES, attention)):
        if index == 0:
            click.echo(f"{'':24}{'largest':>12}{'mean':>12}")
        above = not difference.largest <= tolerance  # so that NaN is above, too
        differs = differs or above
        verdict = f"  above {tolerance:g}" if above else ""
        click.echo(f"{difference.name:24}{difference.largest:12.2e}{difference.mean:12.2e}{verdict}")
    if differs:
        raise click.ClickException("the numbers differ from transformers'")


@main.command(no_args_is_help=True, short_help="Say what a checkpoint holds.")
@click.argument("name_or_path", metavar="MODEL")
def info(name_or_path: str) -> None:
    """Say what a person wants to know of MODEL before using it: sizes, labels, files, tokeniser, what is missing."""
    from minibert.info import describe

    for line in describe(name_or_path):
        click.echo(line)


if __name__ == "__main__":
    main()
