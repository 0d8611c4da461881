"""Losses at any batch size: time and memory of one forward and backward pass, beside others and their own products.

    python eval/benchmarks/losses.py                             # eval/results/losses.json and losses.png, 30 minutes
    python eval/benchmarks/losses.py --sizes 1024 2048 --rounds 3 --out figures

Batches of n unit rows of width 512 in float32, m = 2 and 3. Of every size the cases run in turns in one process, and
the least time of all rounds counts; the memory is the peak beyond what was held before, each case in a process of its
own. "products" are the matrix products alone, in blocks, of a loss that makes its logits anew for the backward pass:
one forward and three backward for each guessed modality. (mmcl makes the gradients at once, and does with three.)
Beside mmcl: open_clip's ClipLoss (of every pair at m = 3), the cached loss of sentence-transformers (its loss alone,
without the encoder), the symile package. Beyond 8,192 rows only forms that hold no whole matrix run, once. Sizes that
are not measured now stay in the results as they were.
"""

import argparse
import json
import os
import platform
import subprocess
import sys
import time
from collections.abc import Callable
from datetime import date
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.nn import functional as F

RESULTS = Path(__file__).parent.parent / "results"
WIDTH, TEMPERATURE, BLOCK = 512, 0.07, 512
NAMES = ("image", "text", "audio")
MOST = 8192
"""Rows up to which all cases run, in turns."""
LARGE = ("mmcl", "sentence-transformers, cached", "products")
"""Cases beyond."""
Step = Callable[[], Any]
Rows = dict[str, torch.Tensor]


def batch(count: int, m: int) -> Rows:
    generator = torch.Generator().manual_seed(count)
    rows = {name: F.normalize(torch.randn(count, WIDTH, generator=generator), dim=1) for name in NAMES[:m]}
    return {name: row.requires_grad_() for name, row in rows.items()}


def mmcl_step(rows: Rows, block_size: int | None = None, pairs: bool = False, **options: Any) -> Step:
    """The default loss: of CLIP at m = 2, of H-CLIP at m = 3; `pairs`: sums of pairs, as they are trained."""
    from mmcl.losses import contrastive_loss, pairwise_loss
    from mmcl.scores import Hadamard, SumOfPairs

    score = SumOfPairs(rows, WIDTH, TEMPERATURE) if pairs or len(rows) == 2 else Hadamard(rows, WIDTH, TEMPERATURE)
    loss: Callable[..., torch.Tensor] = pairwise_loss if pairs else contrastive_loss
    return lambda: loss(score, rows, block_size=block_size, **options).backward()


def dense_step(rows: Rows) -> Step:
    return mmcl_step(rows, block_size=len(rows["image"]))


def shuffled_step(rows: Rows) -> Step:
    """What the symile package computes."""
    others = [tuple(name for name in rows if name != anchor) for anchor in rows]
    return mmcl_step(rows, guess=others, candidates="shuffled")


def pairs_step(rows: Rows) -> Step:
    return mmcl_step(rows, pairs=True)


def open_clip_step(rows: Rows) -> Step:
    import open_clip

    loss, scale = open_clip.ClipLoss(), torch.tensor(1 / TEMPERATURE, requires_grad=True)
    return lambda: sum(loss(a, b, scale) for a, b in combinations(rows.values(), 2)).backward()


def sentence_transformers_step(rows: Rows) -> Step:
    from sentence_transformers.sentence_transformer.losses import CachedMultipleNegativesRankingLoss
    from sentence_transformers.util import dot_score

    both: Any = ("query_to_doc", "doc_to_query")
    loss = CachedMultipleNegativesRankingLoss(
        torch.nn.Sequential(torch.nn.Identity()),
        1 / TEMPERATURE,
        dot_score,
        BLOCK,
        directions=both,
        partition_mode="per_direction",
    )
    return lambda: loss.calculate_loss([[row] for row in rows.values()], with_backward=True)


def symile_step(rows: Rows) -> Step:
    import symile

    from mmcl.scores import Hadamard

    loss, scale = symile.Symile("n"), Hadamard(rows, WIDTH, TEMPERATURE).w[0].detach().requires_grad_()
    return lambda: loss(list(rows.values()), scale).backward()


def products_step(rows: Rows) -> Step:
    """For each modality logits twice, and the gradients of both sides."""
    query = rows["image"].detach()
    count = len(query)
    logits, gradient = torch.empty(min(BLOCK, count), count), torch.empty_like(query)

    def step() -> None:
        for item in rows.values():
            item = item.detach()
            other = torch.zeros_like(item)
            for start in range(0, count, BLOCK):
                part = query[start : start + BLOCK]
                block = logits[: len(part)]
                torch.mm(part, item.T, out=block)
                torch.mm(part, item.T, out=block)
                torch.mm(block, item, out=gradient[start : start + BLOCK])
                other.addmm_(block.T, part)

    return step


CASES: dict[int, dict[str, Callable[[Rows], Step]]] = {
    2: {
        "mmcl": mmcl_step,
        "mmcl, dense": dense_step,
        "open_clip": open_clip_step,
        "sentence-transformers, cached": sentence_transformers_step,
        "products": products_step,
    },
    3: {
        "mmcl": mmcl_step,
        "mmcl, dense": dense_step,
        "mmcl, shuffled": shuffled_step,
        "symile": symile_step,
        "mmcl, sum of pairs": pairs_step,
        "open_clip, sum of pairs": open_clip_step,
        "products": products_step,
    },
}
"""{m: {case: what makes one step of a batch}}."""


def cases(count: int, m: int) -> list[str]:
    return [name for name in CASES[m] if count <= MOST or name in LARGE]


def timed(count: int, m: int, rounds: int) -> dict[str, list[float]]:
    """Seconds of every round of every case."""
    rows = batch(count, m)
    steps = {name: CASES[m][name](rows) for name in cases(count, m)}
    small = batch(64, m)
    for name in steps:
        CASES[m][name](small)()
    times: dict[str, list[float]] = {name: [] for name in steps}
    for _ in range(rounds):
        for name, step in steps.items():
            start = time.perf_counter()
            step()
            times[name].append(time.perf_counter() - start)
            for row in rows.values():
                row.grad = None
    return times


def peak(count: int, m: int, name: str) -> tuple[float, float]:
    """(MiB at the most beyond what the batch takes, seconds) of one step in this process."""
    make = CASES[m][name]
    make(batch(64, m))()
    step = make(batch(count, m))
    before = status("VmRSS")
    Path("/proc/self/clear_refs").write_text("5", encoding="ascii")
    start = time.perf_counter()
    step()
    return status("VmHWM") - before, time.perf_counter() - start


def status(field: str) -> float:
    lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    return next(int(line.split()[1]) / 1024 for line in lines if line.startswith(field))


def in_a_process(*arguments: Any) -> Any:
    """What this program prints as JSON when it is asked for one measurement."""
    command = [sys.executable, __file__, "--one", *map(str, arguments)]
    return json.loads(subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout.splitlines()[-1])


def measured(count: int, m: int, rounds: int) -> list[dict[str, Any]]:
    """A row a case."""
    names = cases(count, m)
    peaks = {name: in_a_process("memory", count, m, name) for name in names}
    times = {name: [seconds] for name, (_, seconds) in peaks.items()}
    if count <= MOST:
        times = in_a_process("time", count, m, rounds)
    found = []
    for name in names:
        row = {"m": m, "count": count, "case": name, "seconds": min(times[name]), "rounds": len(times[name])}
        row |= {"times_products": min(times[name]) / min(times["products"]), "extra_mib": peaks[name][0]}
        found.append(row)
        print({key: round(value, 3) if isinstance(value, float) else value for key, value in row.items()}, flush=True)
    return found


def exponents(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """How time and memory grow, from 4096 rows on: the slopes of their logarithms."""
    found = []
    for m, name in dict.fromkeys((row["m"], row["case"]) for row in rows):
        part = [row for row in rows if (row["m"], row["case"]) == (m, name) and row["count"] >= 4096]
        if len(part) < 2:
            continue
        counts = np.log([row["count"] for row in part])
        slopes = {
            key: float(np.polyfit(counts, np.log([row[key] for row in part]), 1)[0]) for key in ("seconds", "extra_mib")
        }
        found.append({"m": m, "case": name, **slopes})
    return found


MEASURES = {"times_products": "time / time of the products alone", "extra_mib": "MiB beyond the batch"}
COLOURS = ("#2563a8", "#7fb0e0", "#0f766e", "#d97b29", "#7c3aed", "#b91c1c", "#6b7280")


def draw(rows: list[dict[str, Any]], file: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(2, 2, figsize=(11, 7.4), layout="constrained", sharex=True)
    for column, m in zip(axes.T, (2, 3), strict=True):
        for name, colour in zip(CASES[m], COLOURS, strict=False):
            part = [row for row in rows if (row["m"], row["case"]) == (m, name)]
            for axis, measure in zip(column, MEASURES, strict=True):
                style = {"color": "#6b7280", "ls": ":"} if name == "products" else {"color": colour, "marker": "o"}
                counts = [row["count"] for row in part]
                axis.plot(counts, [row[measure] for row in part], markersize=4, label=name, **style)
        for axis, told in zip(column, MEASURES.values(), strict=True):
            axis.set(xscale="log", yscale="log", ylabel=told)
            axis.set_xscale("log", base=2)
            axis.grid(alpha=0.3)
            axis.spines[["top", "right"]].set_visible(False)
        column[0].set_title(f"{m} modalities")
        column[0].set_yscale("linear")
        column[0].set_ylim(bottom=0)
        column[0].legend(frameon=False, fontsize=8)
        column[1].set_xlabel("rows of a batch")
    figure.savefig(file, dpi=120)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", type=int, nargs="+", default=[2**power for power in range(10, 17)])
    parser.add_argument("--rounds", type=int, default=7, help="up to 8192 rows; one beyond")
    parser.add_argument("--threads", type=int, default=min(2, os.cpu_count() or 1))
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument("--one", nargs=4, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if min(options.sizes) < 2 or options.rounds < 1:
        parser.error("--sizes must be 2 rows or more, --rounds 1 or more")
    if options.one:
        what, count, m, last = options.one
        print(json.dumps(timed(int(count), int(m), int(last)) if what == "time" else peak(int(count), int(m), last)))
        return
    os.environ["OMP_NUM_THREADS"] = str(options.threads)
    options.out.mkdir(parents=True, exist_ok=True)
    file = options.out / "losses.json"
    before = json.loads(file.read_text(encoding="utf-8"))["rows"] if file.is_file() else []
    made = {
        "machine": f"{platform.machine()}, {options.threads} threads, {torch.backends.cpu.get_cpu_capability()}",
        "torch": torch.__version__,
        "date": date.today().isoformat(),
        "command": "python eval/benchmarks/losses.py --sizes " + " ".join(map(str, sorted(options.sizes))),
    }
    rows = [{**row, **made} for n in sorted(options.sizes) for m in CASES for row in measured(n, m, options.rounds)]
    rows = sorted([*rows, *(row for row in before if row["count"] not in options.sizes)], key=lambda row: row["count"])
    summary = {"width": WIDTH, "exponents": exponents(rows), "rows": rows}
    file.write_text(json.dumps(summary, indent=2) + "\n", encoding="utf-8")
    draw(rows, options.out / "losses.png")


if __name__ == "__main__":
    main()
