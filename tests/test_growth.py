"""Thirty times the text takes thirty times as long, and no more memory."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from tagger import write_checkpoint

CODE = """
import json, random, resource, sys, time
from minibert import TokenClassifier
classifier = TokenClassifier.from_pretrained(sys.argv[1], device="cpu", threads=1)
draw = random.Random(0)
lengths = [int(min(200, max(3, draw.lognormvariate(3, 0.7)))) for _ in range(1000)]
lines = ["".join(draw.choice("今天气很好北京上海医院，。 app") for _ in range(length)) for length in lengths]
list(classifier.stream(lines[:200]))
found = []
for times in (1, 10, 30, 1):
    start = time.process_time()
    entities = sum(map(len, classifier.stream(line for _ in range(times) for line in lines)))
    found.append((times, entities, time.process_time() - start, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss))
print(json.dumps(found))
"""


def test_the_cost_grows_with_the_number_of_texts_and_memory_does_not(tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "tagger")
    for _attempt in range(3):  # other work on the machine can spoil one comparison
        told = subprocess.run(
            [sys.executable, "-c", CODE, str(tmp_path / "tagger")], capture_output=True, text=True, check=True
        )
        (_, few, first, _), (_, _, _, before), (_, many, long, after), (_, _, again, _) = json.loads(told.stdout)
        assert many == 30 * few > 0
        if abs(long / 30 - min(first, again)) <= 0.1 * min(first, again):
            break
    assert abs(long / 30 / min(first, again) - 1) <= 0.1
    assert after - before < 40_000  # kilobytes, from 11,000 lines to 41,000
