"""The command line as a user meets it."""

from __future__ import annotations

import gc
import json
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner, Result

from minibert import TokenClassifier, __version__
from minibert.cli import main
from minibert.engine.kernels import kernel_for
from minibert.train.data import read_examples
from own_bert import MAPPING
from tagger import write_checkpoint


def invoke(*arguments: str, **options: str) -> Result:
    return CliRunner().invoke(main, arguments, **options)


@pytest.fixture
def directory(tmp_path: Path) -> str:
    write_checkpoint(tmp_path)
    return str(tmp_path)


def expected(directory: str, *texts: str) -> list[list[dict[str, Any]]]:
    classifier = TokenClassifier.from_pretrained(directory)
    return [[entity.to_dict() for entity in entities] for entities in classifier(texts)]


def rounded(found: list[list[dict[str, Any]]]) -> list[list[dict[str, Any]]]:
    """A batch changes the last digits of the scores."""
    return [[entity | {"score": round(entity["score"], 4)} for entity in entities] for entities in found]


def objects(output: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in output.split("\n")[:-1]]


def test_predict_prints_entities_in_columns(directory: str) -> None:
    result = invoke("predict", "--model", directory, "我住在北京", "Q 张三")
    assert result.exit_code == 0
    assert result.stderr == ""
    rows = [line.split() for line in result.stdout.splitlines()]
    found = expected(directory, "我住在北京", "Q 张三")
    assert rows[0] == ["我住在北京"]
    assert rows[1] == [
        found[0][0]["text"],
        found[0][0]["label"],
        f"{found[0][0]['start']}-{found[0][0]['end']}",
        f"{found[0][0]['score']:.3f}",
    ]
    assert len(rows) == 2 + sum(map(len, found))
    assert "\x1b" not in result.stdout


def test_predict_reads_arguments_standard_input_and_files_in_order(directory: str, tmp_path: Path) -> None:
    path = tmp_path / "in.txt"
    path.write_bytes("\ufeff北京好\r\n\r\n  上海".encode())
    arguments = [
        "predict",
        "--model",
        directory,
        "--format",
        "jsonl",
        "张三",
        "-",
        "--file",
        str(path),
        "-f",
        str(path),
    ]
    result = invoke(*arguments, input="我住在北京\n\n张三 李四\n")
    texts = ["张三", "我住在北京", "", "张三 李四", *["北京好", "", "  上海"] * 2]
    assert [line["text"] for line in objects(result.stdout)] == texts
    assert rounded([line["entities"] for line in objects(result.stdout)]) == rounded(expected(directory, *texts))
    assert [(line["file"], line["line"]) for line in objects(result.stdout)[1:]] == [
        *[("standard input", number) for number in (1, 2, 3)],
        *[(str(path), number) for number in (1, 2, 3)] * 2,
    ]
    assert "张三" in result.stdout  # not escaped


def test_a_whole_file_as_one_text(directory: str, tmp_path: Path) -> None:
    content = "北京好\r\n上海\n" * 100
    (tmp_path / "a.txt").write_bytes(content.encode())
    result = invoke(
        "predict", "--model", directory, "--format", "jsonl", "--whole-files", "-f", str(tmp_path / "a.txt")
    )
    (line,) = objects(result.stdout)
    assert line["text"] == content  # CRLF and all, so that offsets are right
    assert all(content[e["start"] : e["end"]] == e["text"] for e in line["entities"])


def test_bytes_that_are_no_text_are_reported_and_the_rest_goes_on(directory: str, tmp_path: Path) -> None:
    path = tmp_path / "in.txt"
    path.write_bytes("北京\n上".encode() + b"\xff\xe4\xb8" + "海\n张三\n".encode())
    result = invoke("predict", "--model", directory, "--format", "jsonl", "-f", str(path))
    assert result.exit_code == 1
    warning, error = result.stderr.splitlines()
    assert warning == f"Warning: {path}, line 2: not UTF-8 at byte 3 of the line, 10 of the file"
    assert error == "Error: 1 of the lines were not UTF-8; they are marked in the output"
    lines = objects(result.stdout)
    assert [line["text"] for line in lines] == ["北京", "上\ufffd\ufffd海", "张三"]
    assert [line.get("invalid_utf8_at") for line in lines] == [None, 3, None]
    for name, mark in (("conll", "# not UTF-8 at byte 3"), ("html", "not UTF-8 at byte 3"), ("entities", "(not UTF-8")):
        assert mark in invoke("predict", "--model", directory, "--format", name, "-f", str(path)).stdout


def test_conll_can_be_read_again(directory: str, tmp_path: Path) -> None:
    texts = ["我住在 北京", "2024年iphone16张三"]
    result = invoke("predict", "--model", directory, "--format", "conll", *texts)
    (tmp_path / "out.conll").write_text(result.stdout, encoding="utf-8")
    examples = read_examples(tmp_path / "out.conll")
    assert [example.text for example in examples] == texts
    found = [[(e["label"], e["start"], e["end"]) for e in entities] for entities in expected(directory, *texts)]
    assert [list(example.entities) for example in examples] == found


def test_html_is_one_page(directory: str) -> None:
    result = invoke("predict", "--model", directory, "--format", "html", "我住在北京", "<b>")
    assert result.stdout.startswith("<!DOCTYPE html>")
    assert result.stdout.endswith("</html>\n")
    assert "&lt;" in result.stdout
    found = expected(directory, "我住在北京")[0][0]
    assert f"<small>{found['label']} {found['score']:.3f}</small>" in result.stdout
    assert result.stdout.count("<p>") == 3  # two texts and the legend


def test_an_interrupted_run_leaves_whole_lines(directory: str, tmp_path: Path) -> None:
    path = tmp_path / "many.txt"
    path.write_text("我住在北京医院，张三喜欢上海。\n" * 200_000, encoding="utf-8")
    command = [
        sys.executable,
        "-m",
        "minibert.cli",
        "predict",
        "--model",
        directory,
        "--format",
        "jsonl",
        "-f",
        str(path),
    ]
    for number in (signal.SIGINT, signal.SIGKILL):
        with (
            (tmp_path / "out").open("wb") as out,
            # Who runs the tests in the background of a shell has them ignore an interrupt, and their children, too.
            subprocess.Popen(
                command,
                stdout=out,
                stderr=subprocess.PIPE,
                preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
            ) as process,
        ):
            deadline = time.monotonic() + 60
            while (tmp_path / "out").stat().st_size < 20_000 and time.monotonic() < deadline:
                time.sleep(0.02)  # results are there long before the end
            process.send_signal(number)
            _, stderr = process.communicate(timeout=60)
        content = (tmp_path / "out").read_bytes()
        assert len(content) >= 20_000
        assert content.endswith(b"\n")
        assert all(json.loads(line)["text"] for line in content.splitlines())
        assert process.returncode != 0
        assert b"Traceback" not in stderr


def test_a_reader_that_goes_away_is_no_error_of_ours(directory: str, tmp_path: Path) -> None:
    path = tmp_path / "many.txt"
    path.write_text("我住在北京\n" * 20_000, encoding="utf-8")
    command = f"{sys.executable} -m minibert.cli predict --model {directory} --format jsonl -f {path} | head -n 1"
    done = subprocess.run(["/bin/sh", "-c", command], capture_output=True, check=False, timeout=60)
    assert done.stdout.count(b"\n") == 1
    assert done.stderr == b""


def test_predict_takes_the_classifiers_options(directory: str) -> None:
    arguments = ["predict", "--model", directory, "--format", "jsonl", "iphone16上海"]
    none = invoke(*arguments, "--aggregation-strategy", "none", "--threads", str(torch.get_num_threads()))
    assert all(e["label"][1] == "-" for e in objects(none.stdout)[0]["entities"])
    options = ["--decoder", "viterbi", "--scheme", "BIO", "--split-mode", "characters", "--stride", "5", "--lower-case"]
    options += ["--max-tokens-per-batch", "100", "--device", "cpu"]
    assert invoke(*arguments, *options).exit_code == 0


def test_long_texts_can_be_refused(directory: str) -> None:
    assert invoke("predict", "--model", directory, "好" * 100).exit_code == 0
    refused = invoke("predict", "--model", directory, "--no-windows", "好" * 100)
    assert refused.exit_code == 1
    assert "a text of 100 tokens is longer than the 62" in refused.stderr


def test_evaluate_prints_a_table_an_object_and_a_page(directory: str, tmp_path: Path) -> None:
    path = tmp_path / "gold.txt"
    path.write_text("张\tB-PER\n三\tI-PER\n\n北\tB-LOC\n京\tI-LOC\n", encoding="utf-8")
    result = invoke("evaluate", directory, str(path), "--html", str(tmp_path / "page.html"))
    assert result.exit_code == 0
    assert result.stdout.startswith("2 examples, scheme BIO, token accuracy ")
    assert "<mark" in (tmp_path / "page.html").read_text(encoding="utf-8")
    assert json.loads(invoke("evaluate", directory, str(path), "--json").stdout)["examples"] == 2
    path.write_text("张\tB-FOO\n", encoding="utf-8")
    refused = invoke("evaluate", directory, str(path))
    assert refused.exit_code == 1
    assert refused.stderr.startswith(f"Error: {path}, line 1: type 'FOO': the model knows BOOK")


def test_evaluate_says_what_another_precision_does_to_f1(
    directory: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gold = tmp_path / "gold.txt"  # what the model itself says, so that F1 in float32 is high
    said = invoke("predict", "--model", directory, "--format", "conll", "张三住在北京", "李四很喜欢上海").stdout
    gold.write_text(said, encoding="utf-8")
    arguments = ("evaluate", directory, str(gold), "--precision", "int8", "--split-mode", "text")
    result = invoke(*arguments, "--max-drop", "100")
    assert result.exit_code == 0
    last = result.stdout.splitlines()[-1]
    assert re.fullmatch(r"strict F1: fp32 [5-9]\d\.\d\d, int8 \d+\.\d\d, a change of [+-]\d+\.\d\d points", last)
    as_json = invoke(*arguments, "--json", "--max-drop", "100")
    assert json.loads(as_json.stdout)["examples"] == 2
    assert as_json.stderr == last + "\n"
    kernel = kernel_for("int8")  # which has passed its probe by now
    assert kernel is not None
    real = kernel.forward
    monkeypatch.setattr(kernel, "forward", lambda self, x: real(self, x) * 0)
    broken = invoke(*arguments)
    assert broken.exit_code == 1
    assert re.search(r"Error: F1 fell by \d+\.\d\d points, more than --max-drop 1\n$", broken.stderr)


def test_parity_prints_a_line_for_each_module_and_exits_by_the_tolerance(directory: str) -> None:
    result = invoke("parity", directory)
    assert result.exit_code == 0
    lines = result.stdout.splitlines()
    assert lines[1].startswith(f"reference  {directory} in transformers ")
    assert lines[4].split() == ["module", "largest", "mean", "relative", "cosine", "reference"]
    names = [line.split()[0] for line in lines[5:] if line]
    assert names[:4] == [f"embeddings.{name}_embeddings" for name in ("word", "token_type", "position")] + [
        "embeddings"
    ]
    assert names[-3:] == ["logits", "loss", "the"]
    assert lines[-1] == "the same: 28 values are within their tolerance"
    strict = invoke("parity", directory, "--tolerance", "1e-12", "--attention", "sdpa", "我住在北京")
    assert strict.exit_code == 1
    assert re.search(r"above \d\.\d\de-12", strict.stdout)
    assert re.fullmatch(r"Error: first module outside its tolerance: \S+ \(largest difference .*\)\n", strict.stderr)


def test_parity_of_a_user_s_model_with_a_page_json_and_gradients(directory: str, tmp_path: Path) -> None:
    mapping, page, texts = tmp_path / "names.json", tmp_path / "page.html", tmp_path / "texts.txt"
    mapping.write_text(json.dumps(MAPPING), encoding="utf-8")
    texts.write_text("我住在北京\n\n今天天气很好\n", encoding="utf-8")
    own = Path(__file__).with_name("own_bert.py")
    common = ("parity", directory, "--mapping", str(mapping), "--json")
    good = invoke(*common, "--module", f"{own}:Talkative", "--grad", "--text", str(texts), "--device", "cpu")
    assert good.exit_code == 0, good.output
    facts = json.loads(good.stdout)
    assert (facts["within"], facts["texts"]) == (True, 3)  # two lines, and both as a pair
    assert len(facts["gradients"]) == 39
    bad = invoke(*common, "--module", f"{own}:build", "--html", str(page))
    assert bad.exit_code == 1
    name = "encoder.layer.1.attention.output.dense"
    assert json.loads(bad.stdout)["causes"] == [f"{name}.weight is transposed"]
    assert bad.stderr.startswith(f"Error: first module outside its tolerance: {name} ")
    assert f"<title>{name}: " in page.read_text(encoding="utf-8")


@pytest.mark.parametrize(
    "arguments", [("--engine", "int8"), ("--dtype", "bf16"), ("--engine", "fp32", "--dtype", "fp32")]
)
def test_parity_of_two_precisions_or_engines(arguments: tuple[str, ...], directory: str) -> None:
    result = invoke("parity", directory, "--against", "minibert", *arguments)
    assert result.exit_code == 0, result.output
    assert result.stdout.splitlines()[1] == f"reference  {directory} in minibert, float32"


def test_attention_writes_a_page_or_a_picture(directory: str, tmp_path: Path) -> None:
    for name, start in (("a.html", b"<!DOCTYPE html>"), ("a.png", b"\x89PNG")):
        result = invoke("attention", directory, "Q app", "-o", str(tmp_path / name), "--layer", "2", "--head", "4")
        assert (result.exit_code, result.stdout) == (0, f"{tmp_path / name}\n")
        assert (tmp_path / name).read_bytes().startswith(start)
    page = (tmp_path / "a.html").read_text(encoding="utf-8")
    assert '"layer": 2, "column": 4' in page
    assert "Attention of " in page
    refused = invoke("attention", directory, "x", "-o", str(tmp_path / "b.html"), "--layer", "3")
    assert (refused.exit_code, refused.stderr) == (1, "Error: layer: expected 1 to 2, got 3\n")
    refused = invoke("attention", directory, "x", "-o", str(tmp_path / "b.png"), "--font", "/no/such")
    assert refused.stderr == "Error: font: expected a font file or the name of an installed family, got '/no/such'\n"
    assert not list(tmp_path.glob("b.*"))


@pytest.mark.parametrize(
    ("arguments", "status", "message"),
    [
        (["attention", "/nowhere", "x", "-o", "a.pdf"], 1, "a.pdf: expected a name that ends in .html or .png"),
        (["attention", "/nowhere", "x", "-o", "a.png"], 1, "/nowhere: no such directory"),
        (["attention", "/nowhere", "x"], 2, "Missing option '--output'"),
        (["predict", "--model", "/nowhere", "x"], 1, "/nowhere: no such directory"),
        (["parity", "/nowhere"], 1, "/nowhere: no such directory"),
        (["parity", "/nowhere", "--dtype", "fp8"], 1, "dtype: expected fp32, fp64, bf16, fp16, got fp8"),
        (["predict", "--model", "/nowhere"], 2, "expected a TEXT, - for standard input, or --file"),
        (["predict", "--model", "/nowhere", "--stride", "many", "x"], 2, "'many' is not a valid integer"),
        (["evaluate", "/nowhere", "/no/such/file"], 1, "/no/such/file: cannot be read"),
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
    config = Path(directory, "config.json")
    config.write_text(
        config.read_text(encoding="utf-8").replace('"hidden_size": 32', '"hidden_size": 36'), encoding="utf-8"
    )
    result = invoke("predict", "--model", directory, "x")
    assert result.exit_code == 1
    assert len(result.stderr.splitlines()) == 1
    assert "bert.embeddings.LayerNorm.weight ([32] in the file, [36] in the model)" in result.stderr


def test_a_missing_file_and_an_argument_that_is_no_text(directory: str) -> None:
    missing = invoke("predict", "--model", directory, "-f", "/no/such/file")
    assert (missing.exit_code, missing.stderr) == (
        1,
        "Error: /no/such/file: cannot be read (No such file or directory)\n",
    )
    command = [sys.executable, "-m", "minibert.cli", "predict", "--model", directory, b"\xff"]
    argument = subprocess.run(command, capture_output=True, check=False)
    assert argument.returncode == 1
    assert b"surrogate pair" in argument.stderr
    assert b"Traceback" not in argument.stderr


def test_a_checkpoint_cannot_speak_to_the_terminal(directory: str) -> None:
    path = Path(directory, "config.json")
    config = json.loads(path.read_text(encoding="utf-8"))
    path.write_text(json.dumps(config | {"architectures": ["a\x1b[2Jb"]}), encoding="utf-8")
    assert r"a\x1b[2Jb" in invoke("info", directory).stdout
    path.write_text(json.dumps(config | {"hidden_act": "a\x1b[2Jb"}), encoding="utf-8")
    refused = invoke("predict", "--model", directory, "x")
    assert "\x1b" not in refused.stderr
    assert refused.exit_code == 1


@pytest.mark.parametrize("device", ["mars", "cuda:99", "-"])
def test_a_device_that_is_not_here_is_named(device: str, directory: str) -> None:
    refused = invoke("predict", "--model", directory, "--device", device, "x")
    assert refused.exit_code == 1
    assert refused.stderr.startswith("Error: device: expected one that is here, such as cpu, got ")
    assert len(refused.stderr.splitlines()) == 1


def test_version_and_help() -> None:
    assert invoke("--version").stdout.startswith(f"minibert, version {__version__}, ")
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


COMMANDS = {
    "predict": ["--model", "MODEL", "x"],
    "evaluate": ["MODEL", "FILE"],
    "info": ["MODEL"],
    "attention": ["MODEL", "x", "-o", "PAGE"],
    "parity": ["MODEL"],
    "export": ["MODEL", "onnx", "-o", "OUT"],
    "bench": ["--workload", "none such"],
    "train": ["RECIPE"],
}


def test_every_command_collects_garbage_once_it_works(directory: str, tmp_path: Path) -> None:
    assert set(COMMANDS) == set(main.commands)
    labelled, recipe = tmp_path / "labelled.conll", tmp_path / "recipe.toml"
    labelled.write_text("张 B-PER\n三 I-PER\n", encoding="utf-8")
    settings = f'[data]\ntrain = "{tmp_path}/none"\n[model]\nname_or_path = "{directory}"\n'
    recipe.write_text(f'{settings}[training]\noutput_dir = "{tmp_path}/run"\n', encoding="utf-8")
    places = {"MODEL": directory, "FILE": str(labelled), "RECIPE": str(recipe), "OUT": str(tmp_path / "out")}
    places["PAGE"] = str(tmp_path / "out.html")
    for name, arguments in COMMANDS.items():
        gc.disable()
        try:
            result = invoke(name, *(places.get(argument, argument) for argument in arguments))
            assert gc.isenabled(), result.output
        finally:
            gc.enable()
            gc.unfreeze()


def test_a_command_of_its_own_neither_begins_nor_ends_with_a_search_for_garbage() -> None:
    code = (
        "import gc; from minibert import cli\n"
        "import atexit; atexit.register(lambda: print('at the end', gc.get_freeze_count() > kept))\n"
        "def main():\n"
        "    global kept\n"
        "    print(gc.isenabled())\n"
        "    cli._collect_garbage()\n"
        "    kept = gc.get_freeze_count()\n"
        "    print(gc.isenabled(), kept > 0)\n"
        "    cli.more = [[] for _ in range(1000)]\n"
        "cli.main = main\n"
        "cli.run()\n"
    )
    told = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert told.stdout.splitlines() == ["False", "True True", "at the end True"]


def test_a_first_answer_takes_little_more_than_importing_torch(directory: str) -> None:
    def best(*command: str) -> float:
        taken = []
        for _ in range(5):
            start = time.perf_counter()
            subprocess.run([sys.executable, *command], check=True, capture_output=True)
            taken.append(time.perf_counter() - start)
        return min(taken)

    answer = best("-m", "minibert.cli", "predict", "--model", directory, "张三")
    assert answer < 1.1 * best("-c", "import torch")  # whose end alone takes a third of it
