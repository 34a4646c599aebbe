"""Is the graph that `minibert export` writes as fast as the one that ONNX Runtime's own optimizer makes?

python scripts/compare_export.py [--threads N] [--rounds N]: BERT-base with random weights, both graphs in turn in one
run. Prints a table, and the ratio of the medians for each workload; exit status 1 if one is below 0.95. Let nothing
else run. (That the graph computes the same, export has seen to before it wrote it.)
"""

from __future__ import annotations

import argparse
import statistics
import sys

from minibert.bench.measure import bench

WORKLOADS = ("lat32", "b8x128", "mixed", "sorted")
OURS, THEIRS = "minibert onnx", "onnxruntime fp32"
LEAST = 0.95

parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
parser.add_argument("--threads", type=int)
parser.add_argument("--rounds", type=int, default=15)
arguments = parser.parse_args()

results = bench(None, WORKLOADS, (THEIRS, OURS), rounds=arguments.rounds, threads=arguments.threads)
print("\n".join(results.lines()))
if results.left_out:
    sys.exit("pip install 'minibert[bench]'")
slow = []
for section in results.sections:
    ours, theirs = (statistics.median(section.timings[name].seconds) for name in (OURS, THEIRS))
    print(f"{section.name}: {theirs / ours:.3f} of the speed of ONNX Runtime's optimizer")
    slow += [section.name] if theirs / ours < LEAST else []
sys.exit(f"below {LEAST}: {', '.join(slow)}" if slow else 0)
