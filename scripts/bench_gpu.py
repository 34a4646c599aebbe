"""Check minibert's numbers on a GPU and time it beside transformers, in under eight minutes.

python scripts/bench_gpu.py [--minutes 7] [--rounds 10] [--small]

The same random BERT-base everywhere. Half precision is judged by the error of transformers in the same precision; a
training step (AdamW, on a GPU with autocast to bfloat16) by its loss, within 1 %. Ends in one line of JSON, with exit
status 1 if a number is off. With --small a tiny model, on a CPU too, to try the script.
"""

import argparse
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
import transformers
from torch.nn.attention import SDPBackend, sdpa_kernel

from minibert import BertForTokenClassification, BertModel, optimize
from minibert.engine import HALF
from minibert.engine.graphs import GraphedEncoder
from minibert.model.encoder import BertEncoder
from minibert.train.features import batches_by_tokens

SIZES = {"vocab_size": 21128, "num_labels": 18}
SMALL = SIZES | {"vocab_size": 300, "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
SMALL |= {"intermediate_size": 128}
SLACK = 1.5  # times the error of transformers that half precision may have
FP32 = 1e-4
LOSS = 0.01
STEPS = 10
Inputs = dict[str, torch.Tensor]
Run = Callable[[Inputs], torch.Tensor]


def batch(lengths: list[int], vocab_size: int, device: str) -> Inputs:
    generator = torch.Generator().manual_seed(0)
    width = max(lengths)
    ids = torch.randint(min(1000, vocab_size // 2), vocab_size, (len(lengths), width), generator=generator)
    mask = (torch.arange(width) < torch.tensor(lengths)[:, None]).long()
    return {"input_ids": (ids * mask).to(device), "attention_mask": mask.to(device)}


def workloads(small: bool, vocab_size: int, device: str) -> dict[str, list[Inputs]]:
    """One short text; a batch without padding; many texts of log-normal lengths in batches of so many real tokens."""
    generator = torch.Generator().manual_seed(0)
    count, budget = (40, 300) if small else (4000, 16384)
    lengths = torch.exp(torch.randn(count, generator=generator) * 0.7 + 3.8).clamp(8, 256).int().tolist()
    mixed = [batch([lengths[row] for row in rows], vocab_size, device) for rows in batches_by_tokens(lengths, budget)]
    as_they_come = [lengths[start : start + 16] for start in range(0, len(lengths), 16)][:32]
    return {
        "lat32": [batch([32], vocab_size, device)],
        "b32x128": [batch([128] * (2 if small else 32), vocab_size, device)],
        "mixed, batches of 16": [batch(rows, vocab_size, device) for rows in as_they_come],
        f"mixed, {budget} tokens": mixed,
    }


def run_of(model: Any, backend: SDPBackend | None = None) -> Run:
    def run(inputs: Inputs) -> torch.Tensor:
        given = {"input_ids": inputs["input_ids"]}
        if not bool(inputs["attention_mask"].all()):
            given["attention_mask"] = inputs["attention_mask"]
        with torch.inference_mode(), sdpa_kernel(backend) if backend else nullcontext():
            logits: torch.Tensor = model(**given).logits
        return logits

    return run


def peers(folder: Path, device: str) -> tuple[dict[str, Run], dict[str, str]]:
    """Everything that can run here, and why the rest cannot."""

    def theirs(dtype: torch.dtype, attention: str) -> Any:
        load = transformers.BertForTokenClassification.from_pretrained
        return load(folder, dtype=dtype, attn_implementation=attention).eval().to(device)

    def ours(precision: str) -> Any:
        return optimize(
            BertForTokenClassification.from_pretrained(folder, dtype=torch.float32, device=device), precision
        )

    made = {
        "transformers fp32 sdpa": run_of(theirs(torch.float32, "sdpa")),
        "minibert fp32": run_of(ours("fp32")),
    }
    left_out = {}
    for name, dtype in HALF.items() if device == "cuda" else ():
        made[f"transformers {name} sdpa"] = run_of(theirs(dtype, "sdpa"))
        made[f"minibert {name}"] = run_of(ours(name))
        made[f"minibert {name}, no graphs"] = run_of(without_graphs(ours(name)))
        try:
            made[f"transformers {name} flash"] = run_of(theirs(dtype, "flash_attention_2"))
        except ImportError as error:
            left_out[f"transformers {name} flash"] = str(error).splitlines()[0]
        made[f"transformers {name} compile"] = run_of(torch.compile(theirs(dtype, "sdpa"), mode="reduce-overhead"))
    return made, left_out


def without_graphs(model: Any) -> Any:
    """The same layers, launched one by one."""
    for module in list(model.modules()):
        if isinstance(module, BertModel) and isinstance(module.encoder, GraphedEncoder):
            module.encoder.__class__ = BertEncoder
    return model


def train(folder: Path, batches: list[Inputs], device: str) -> dict[str, tuple[list[float], list[float]]]:
    """Seconds and losses of the same steps by either model; without dropout, so that losses can be compared."""
    found = {}
    for name, kind in (
        ("transformers", transformers.BertForTokenClassification),
        ("minibert", BertForTokenClassification),
    ):
        model = kind.from_pretrained(
            folder, dtype=torch.float32, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0
        )
        model.to(device).train()
        optimizer = torch.optim.AdamW(model.parameters(), lr=3e-5)
        times, losses = [], []
        for step in range(STEPS):
            inputs = batches[step % len(batches)]
            labels = (inputs["input_ids"] % 18).masked_fill(inputs["attention_mask"] == 0, -100)
            start = time.perf_counter()
            with torch.autocast("cuda", torch.bfloat16) if device == "cuda" else nullcontext():
                loss = model(**inputs, labels=labels).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())  # waits for the step's end
            times.append(time.perf_counter() - start)
        found[name] = times[1:], losses
    return found


def losses_apart(losses: dict[str, list[float]]) -> float:
    """The largest difference of a loss, as a share of that of transformers."""
    pairs = zip(losses["minibert"], losses["transformers"], strict=True)
    return max(abs(ours - theirs) / theirs for ours, theirs in pairs)


def check(runs: dict[str, Run], batches: list[Inputs]) -> dict[str, float]:
    """Each one's largest difference from transformers in float32, at real tokens."""
    worst = dict.fromkeys(runs, 0.0)
    for inputs in batches:
        real = inputs["attention_mask"].bool()
        right = runs["transformers fp32 sdpa"](inputs)[real]
        for name, run in runs.items():
            worst[name] = max(worst[name], (run(inputs)[real].float() - right).abs().max().item())
    return worst


def faults(differences: dict[str, float], loss: float) -> list[str]:
    """What is further off than it may be."""
    bounds = {"minibert fp32": FP32}
    for name in HALF:
        allowed = SLACK * differences.get(f"transformers {name} sdpa", 0.0)
        bounds |= {f"minibert {name}": allowed, f"minibert {name}, no graphs": allowed}
    wrong = [
        f"{name}: {differences[name]:.2e} from float32, more than {bound:.2e}"
        for name, bound in bounds.items()
        if name in differences and not differences[name] <= bound
    ]
    return wrong if loss <= LOSS else [*wrong, f"training: a loss is {loss:.2%} from that of transformers"]


def seconds(run: Run, batches: list[Inputs], device: str) -> float:
    start = time.perf_counter()
    for inputs in batches:
        run(inputs)
    if device == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - start


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=7.0)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--small", action="store_true")
    options = parser.parse_args()
    end = time.time() + 60 * options.minutes
    device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cpu" and not options.small:
        print("bench_gpu needs a GPU; with --small it can be tried without", file=sys.stderr)
        return 2
    torch.backends.cuda.matmul.fp32_precision = torch.backends.cudnn.fp32_precision = "ieee"  # no TF32 for anybody
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    sizes = SMALL if options.small else SIZES
    with tempfile.TemporaryDirectory() as folder:
        torch.manual_seed(0)
        transformers.BertForTokenClassification(transformers.BertConfig(**sizes)).save_pretrained(folder)
        runs, left_out = peers(Path(folder), device)
        given = workloads(options.small, sizes["vocab_size"], device)
        # Three times, so that graphs are recorded and used: what they give is what is looked at.
        differences = check(runs, [batches[0] for batches in given.values() for _ in range(3)])
        steps = train(Path(folder), given["mixed, batches of 16"], device)
        apart = losses_apart({name: losses for name, (_, losses) in steps.items()})
        wrong = faults(differences, apart)
        times: dict[str, dict[str, list[float]]] = {name: {peer: [] for peer in runs} for name in given}
        for name, batches in given.items():
            for number in range(options.rounds + 1):
                for peer, run in runs.items():
                    if time.time() < end:
                        took = seconds(run, batches, device)
                        times[name][peer] += [took] if number else []
    name_of_device = torch.cuda.get_device_name() if device == "cuda" else "cpu"
    print(f"{name_of_device}; torch {torch.__version__}; transformers {transformers.__version__}")
    for name, batches in given.items():
        tokens = sum(int(inputs["attention_mask"].sum()) for inputs in batches)
        cells = sum(inputs["input_ids"].numel() for inputs in batches)
        print(f"\n{name}: {tokens:,} tokens in {len(batches)} batches, {1 - tokens / cells:.0%} padding; tokens/s")
        for peer, of in times[name].items():
            rates = [tokens / value for value in of]
            said = f"{statistics.median(rates):>14,.0f}{max(rates):>14,.0f}" if rates else f"{'no time left':>14}"
            print(f"{peer:28}{said}{differences[peer]:>12.1e}")
    print(f"\ntrain: a step of 16 rows, median milliseconds; losses {apart:.1e} apart")
    for name, (took, _) in steps.items():
        print(f"{name:28}{1000 * statistics.median(took):>14,.1f}")
    for line in (*(f"left out: {name} ({reason})" for name, reason in left_out.items()), *wrong):
        print(line)
    found = {"device": name_of_device, "seconds": times, "differences": differences, "left_out": left_out}
    found |= {"training": {name: took for name, (took, _) in steps.items()}, "losses_apart": apart}
    print(json.dumps(found | {"wrong": wrong}))
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
