"""The command line as a user meets it."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from minibert import __version__
from minibert.cli import main
from tagger import write_checkpoint


def invoke(*arguments: str, **options: str) -> Result:
    return CliRunner().invoke(main, arguments, **options)


@pytest.fixture
def directory(tmp_path: Path) -> str:
    write_checkpoint(tmp_path)
    return str(tmp_path)


def test_predict_prints_token_label_and_score(directory: str) -> None:
    result = invoke("predict", "--model", directory, "我住在北京", "Q 张三")
    assert result.exit_code == 0
    assert result.stderr == ""
    blocks = [block.splitlines() for block in result.stdout.strip().split("\n\n")]
    rows = [[line.split("\t") for line in block] for block in blocks]
    assert [[row[0] for row in block] for block in rows] == [list("我住在北京"), list("Q张三")]
    assert all(row[1].startswith("LABEL_") and 0 < float(row[2]) <= 1 for block in rows for row in block)


def test_predict_reads_lines_from_standard_input(directory: str) -> None:
    from_input = invoke("predict", "--model", directory, "-", input="我住在北京\n\n张三")
    as_arguments = invoke("predict", "--model", directory, "我住在北京", "", "张三")
    assert from_input.exit_code == as_arguments.exit_code == 0
    assert from_input.stdout == as_arguments.stdout


def test_predict_answers_a_text_longer_than_the_model(directory: str) -> None:
    result = invoke("predict", "--model", directory, "好" * 2000)
    assert result.exit_code == 0
    assert len(result.stdout.split()) == 3 * 2000


def test_parity_prints_a_line_for_each_layer_and_exits_by_the_tolerance(directory: str) -> None:
    result = invoke("parity", directory)
    assert result.exit_code == 0
    names = [line[:24].strip() for line in result.stdout.splitlines()]
    assert names == ["", "embeddings", "layer 1", "layer 2", "logits"]
    assert result.stdout.splitlines()[0].split() == ["largest", "mean"]
    strict = invoke("parity", directory, "--tolerance", "1e-12", "--attention", "eager", "我住在北京")
    assert strict.exit_code == 1
    assert "above 1e-12" in strict.stdout
    assert strict.stderr == "Error: the numbers differ from transformers'\n"


@pytest.mark.parametrize(
    ("arguments", "status", "message"),
    [
        (["predict", "--model", "/nowhere", "x"], 1, "/nowhere: no such directory"),
        (["parity", "/nowhere"], 1, "/nowhere: no such directory"),
        (["predict", "x"], 2, "Missing option '--model'"),
        (["predict", "--model", "/nowhere"], 2, "Missing argument 'TEXT...'"),
        (["predict", "--model", "/nowhere", "--num-labels", "many", "x"], 2, "'many' is not a valid integer"),
        (["no-such-command"], 2, "No such command"),
    ],
)
def test_known_errors_are_one_line_and_no_traceback(arguments: list[str], status: int, message: str) -> None:
    result = invoke(*arguments)
    assert result.exit_code == status
    assert message in result.stderr
    assert len([line for line in result.stderr.splitlines() if line.startswith("Error")]) == 1
    assert "Traceback" not in result.output
    assert result.stdout == ""


def test_an_error_of_many_lines_is_told_in_one(directory: str) -> None:
    result = invoke("predict", "--model", directory, "--num-labels", "5", "x")
    assert result.exit_code == 1
    assert len(result.stderr.splitlines()) == 1
    assert "classifier.weight ([18, 32] in the file, [5, 32] in the model)" in result.stderr


def test_bytes_that_are_no_text_are_an_error_with_their_place(directory: str) -> None:
    command = [sys.executable, "-m", "minibert.cli", "predict", "--model", directory]
    piped = subprocess.run([*command, "-"], input="好\n北".encode() + b"\xff\n", capture_output=True, check=False)
    assert piped.returncode == 1
    assert piped.stderr == b"Error: standard input, line 2: not UTF-8 at byte 3\n"
    assert piped.stdout.startswith("好\t".encode())
    argument = subprocess.run([*command, b"\xff"], capture_output=True, check=False)
    assert argument.returncode == 1
    assert b"surrogate pair" in argument.stderr
    assert b"Traceback" not in argument.stderr


def test_version_and_help() -> None:
    assert invoke("--version").stdout == f"minibert, version {__version__}\n"
    for flag in ("-h", "--help"):
        assert "predict" in invoke(flag).stdout
        assert "--model MODEL" in invoke("predict", flag).stdout


def test_help_answers_in_under_a_third_of_a_second() -> None:
    command = [sys.executable, "-m", "minibert.cli", "predict", "-h"]
    seconds = []
    for _ in range(5):
        start = time.perf_counter()
        subprocess.run(command, check=True, capture_output=True)
        seconds.append(time.perf_counter() - start)
    assert min(seconds) < 0.3
