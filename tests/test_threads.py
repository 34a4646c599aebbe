"""How many threads a process takes by itself, and that workers which share a machine do not slow each other down."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
from click.testing import CliRunner

from minibert import MinibertError, threads
from minibert.cli import main
from minibert.threads import default_threads, usable_cores

VARIABLES = ("OMP_NUM_THREADS", "LOCAL_WORLD_SIZE", "WEB_CONCURRENCY")


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """Eight processors on four cores, no container."""
    for processor in range(8):
        folder = tmp_path / "cpu" / f"cpu{processor}" / "topology"
        folder.mkdir(parents=True)
        (folder / "thread_siblings_list").write_text(f"{processor % 4},{processor % 4 + 4}\n")
    monkeypatch.setattr(threads, "TOPOLOGY", tmp_path / "cpu")
    monkeypatch.setattr(threads, "CGROUP", tmp_path / "cgroup")
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)), raising=False)
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)
    return tmp_path


@pytest.mark.usefixtures("machine")
@pytest.mark.parametrize(("workers", "wanted"), [(None, 4), (1, 4), (2, 2), (3, 1), (4, 1), (9, 1)])
def test_cores_are_divided_among_workers(workers: int | None, wanted: int) -> None:
    assert default_threads(workers) == wanted


@pytest.mark.usefixtures("machine")
@pytest.mark.parametrize("name", ["LOCAL_WORLD_SIZE", "WEB_CONCURRENCY"])
def test_workers_are_counted_by_who_starts_them(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setenv(name, "2")
    assert default_threads() == 2
    assert default_threads(4) == 1  # what is said here goes first


@pytest.mark.usefixtures("machine")
def test_omp_num_threads_is_respected(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    monkeypatch.setenv("WEB_CONCURRENCY", "4")
    assert default_threads() == default_threads(2) == 3
    monkeypatch.setenv("OMP_NUM_THREADS", "6,2")
    assert default_threads() == 6


def test_only_processors_that_the_process_may_use_count(machine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 4, 5})
    assert usable_cores() == 2
    monkeypatch.delattr(os, "sched_getaffinity")
    monkeypatch.setattr(os, "cpu_count", lambda: 3)
    assert usable_cores() == 3
    monkeypatch.setattr(threads, "TOPOLOGY", machine / "nothing")
    assert usable_cores() == 3


@pytest.mark.parametrize(
    ("files", "wanted"),
    [
        ({"cpu.max": "200000 100000\n"}, 2),
        ({"cpu.max": "50000 100000\n"}, 1),
        ({"cpu.max": "max 100000\n"}, 4),
        ({"cpu.max": "900000 100000\n"}, 4),
        ({"cpu/cpu.cfs_quota_us": "300000\n", "cpu/cpu.cfs_period_us": "100000\n"}, 3),
        ({"cpu/cpu.cfs_quota_us": "-1\n", "cpu/cpu.cfs_period_us": "100000\n"}, 4),
    ],
)
def test_a_container_gets_what_it_was_given(machine: Path, files: dict[str, str], wanted: int) -> None:
    for name, text in files.items():
        path = machine / "cgroup" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    assert usable_cores() == wanted


@pytest.mark.usefixtures("machine")
@pytest.mark.parametrize("text", ["0", "-1", "two", "1.5"])
def test_what_is_no_number_of_threads_is_refused(monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", text)
    with pytest.raises(MinibertError, match=rf"OMP_NUM_THREADS: expected a number of at least 1, got '{text}'"):
        default_threads()
    monkeypatch.delenv("OMP_NUM_THREADS")
    with pytest.raises(MinibertError, match="workers: expected at least 1, got 0"):
        default_threads(0)


def test_the_version_says_how_many(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    assert CliRunner().invoke(main, ["--version"]).output.endswith(", 3 threads\n")
    monkeypatch.setenv("OMP_NUM_THREADS", "many")
    result = CliRunner().invoke(main, ["--version"])
    assert result.exit_code == 1
    assert result.stderr.startswith("Error: OMP_NUM_THREADS: expected a number")


@pytest.mark.parametrize(("given", "wanted"), [({}, "1"), ({"OMP_NUM_THREADS": "2"}, "2")])
def test_the_command_line_takes_as_many(given: dict[str, str], wanted: str) -> None:
    code = (
        "import sys, torch; from click.testing import CliRunner; from minibert.cli import main; "
        "CliRunner().invoke(main, ['predict', '王小明'], catch_exceptions=False); print(torch.get_num_threads())"
    )
    environment = {name: value for name, value in os.environ.items() if name not in VARIABLES}
    environment |= {"WEB_CONCURRENCY": "1000", **given}
    told = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    assert told.stdout.split()[-1] == wanted


WORKER = """
import random, sys, torch
from minibert import TokenClassifier
from minibert.threads import default_threads
number, workers = int(sys.argv[1]), int(sys.argv[2])
classifier = TokenClassifier.from_pretrained(device="cpu", threads=default_threads(workers))
draw = random.Random(0)
lengths = [int(min(200, max(8, draw.lognormvariate(3.8, 0.7)))) for _ in range(64)]
texts = ["".join(draw.choice("王小明住在北京，今天去上海开会。") for _ in range(length)) for length in lengths]
classifier(texts)
print("ready", torch.get_num_threads(), flush=True)
for _ in sys.stdin:
    for _ in range(3):
        for text in texts[number::workers]:
            classifier(text)
    print("done", flush=True)
"""


@pytest.mark.skipif(usable_cores() < 2, reason="needs two cores")
def test_two_workers_answer_no_fewer_requests_than_one() -> None:  # P01
    environment = {name: value for name, value in os.environ.items() if name not in VARIABLES}

    def start(number: int, workers: int) -> subprocess.Popen[str]:
        command = [sys.executable, "-c", WORKER, str(number), str(workers)]
        pipe = subprocess.PIPE
        return subprocess.Popen(command, env=environment, stdin=pipe, stdout=pipe, text=True)

    def told(worker: subprocess.Popen[str]) -> list[str]:
        assert worker.stdout is not None
        return worker.stdout.readline().split()

    def seconds(workers: list[subprocess.Popen[str]]) -> float:
        begin = time.perf_counter()
        for worker in workers:
            assert worker.stdin is not None
            worker.stdin.write("\n")
            worker.stdin.flush()
        assert [told(worker) for worker in workers] == [["done"]] * len(workers)
        return time.perf_counter() - begin

    alone, together = [start(0, 1)], [start(0, 2), start(1, 2)]
    try:
        cores = usable_cores()
        assert [told(worker) for worker in alone + together] == [
            ["ready", str(cores)], *[["ready", str(cores // 2)]] * 2
        ]  # fmt: skip
        taken: dict[str, list[float]] = {"one": [], "two": []}
        for _ in range(20):  # other work on the machine can spoil one comparison
            taken["one"].append(seconds(alone))
            taken["two"].append(seconds(together))
            if len(taken["one"]) > 3 and min(taken["two"]) <= min(taken["one"]):
                break
        assert min(taken["two"]) <= min(taken["one"])
    finally:
        for worker in alone + together:
            worker.kill()
            worker.communicate()
