"""From nothing to a first answer at full size: how long it may take, and how much memory."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from minibert.bench.measure import write_bert_base
from minibert.bench.peers import Setting
from minibert.bench.processes import first_answers, timed

pytestmark = pytest.mark.full_size
WEIGHTS = 407  # megabytes


@pytest.fixture(scope="module")
def setting(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Setting]:
    folder = tmp_path_factory.mktemp("bert-base")
    write_bert_base(folder)
    yield Setting(folder, folder, threads=2)
    (folder / "model.safetensors").unlink()


def test_a_first_answer_comes_long_before_that_of_the_pipeline(setting: Setting) -> None:
    best: dict[str, float] = {}
    held: dict[str, float] = {}
    for _ in range(6):  # the best of a few: other work on the machine is not what is measured
        for name, command in first_answers(setting).items():
            seconds, held[name] = timed(command, setting.threads)
            best[name] = min(seconds, best.get(name, seconds))
        if best["minibert fp32"] <= 0.35 * best["pipeline"]:
            break
    assert best["minibert fp32"] <= 0.35 * best["pipeline"]
    assert best["minibert int8"] <= 0.4 * best["pipeline"]
    assert best["minibert fp32"] <= 1.4 * best["floor"]  # which imports PyTorch and reads the file
    assert held["minibert fp32"] <= WEIGHTS + 300
    assert held["minibert int8"] <= WEIGHTS / 4 + 400  # a quarter of the layers' weights, all of the embeddings
    assert Path(setting.checkpoint, "model.safetensors").stat().st_size / 1e6 == pytest.approx(WEIGHTS, rel=0.01)
