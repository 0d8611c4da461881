"""How often `diagnose` finds what is there, and how often what is not: 4,000 rows, many seeds, known joints.

    python eval/diagnose.py                     # eval/results/diagnose.json and diagnose.png; about half an hour
    python eval/diagnose.py --quick --out figures       # a tenth of the seeds
    python eval/diagnose.py --cases "counts: mixture"   # only these

Joints of three modalities: independent; purely pairwise; a planted mixture of both kinds, of which .696 nats lie beyond
pairs; the softened sum, all of whose dependence does; and handwritten digit x spoken digit -> word of the sum. Small
networks see categories as vectors of 16 numbers: a random centre each, and noise. A case fails where it finds too much
in nothing (`alarms`), or too little or too much in something (`within`, `found`).
"""

import argparse
import json
import sys
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import cache, partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np
import torch

from mmcl.diagnose import diagnose
from mmcl.metrics.expressivity import pairwise_floor
from mmcl.synthetic.joints import Joint, independent, planted_mixture, random_pairwise, softened_sum

RESULTS = Path(__file__).parent / "results"
ROWS = 4000
WIDTH, SPREAD = 16, 0.3
"""Of the vectors that stand for categories, and the standard deviation of their noise around centres of norm 4."""
WORKERS = 2


@dataclass(frozen=True)
class Case:
    """What is diagnosed with which seeds, and what has to come out."""

    data: Callable[[int], Any]
    """seed -> {modality: values} or a dataset."""
    method: str
    seeds: int
    alarms: int | None = None
    """At most so many of the intervals of `beyond` may lie above 0: nothing is there."""
    truth: float | None = None
    within: float | None = None
    """Relative error of `beyond` that no seed may exceed."""

    def run(self, seed: int) -> dict[str, Any]:
        """One diagnosis."""
        torch.set_num_threads(1)
        data = self.data(seed)
        start = time.perf_counter()
        found = diagnose(data, method=self.method, seed=seed)
        seconds = time.perf_counter() - start
        beyond, pairwise = found.beyond, found.pairwise
        return {
            "seed": seed,
            "beyond": [round(value, 5) for value in (beyond.nats, beyond.low, beyond.high)],
            "pairwise": [round(value, 5) for value in (pairwise.nats, pairwise.low, pairwise.high)],
            "score": found.score,
            "seconds": round(seconds, 2),
        }

    def held(self, runs: list[dict[str, Any]]) -> bool:
        """Whether what has to come out did; limits on alarms go down with the seeds."""
        above = sum(run["beyond"][1] > 0 for run in runs)
        if self.alarms is not None:
            return above <= max(1, self.alarms * len(runs) / self.seeds)
        if self.within is None:
            return above == len(runs)
        errors = [abs(run["beyond"][0] - self.truth) / self.truth for run in runs]
        return max(errors) <= self.within and above == len(runs)


def categories(joint: Joint, seed: int) -> dict[str, np.ndarray]:
    """Rows drawn from a joint."""
    drawn = joint.sample(ROWS, torch.Generator().manual_seed(seed))
    return {name: value.numpy() for name, value in drawn.items()}


def vectors(joint: Joint, seed: int) -> dict[str, np.ndarray]:
    """The same rows as noisy vectors."""
    found = {}
    for number, (name, value) in enumerate(categories(joint, seed).items()):
        centres = np.random.default_rng(number).standard_normal((int(value.max()) + 1, WIDTH))
        noise = np.random.default_rng([seed, number]).standard_normal((ROWS, WIDTH))
        found[name] = (centres[value] + SPREAD * noise).astype(np.float32)
    return found


def digits(seed: int) -> Any:
    """Handwritten x spoken digits and the word of their sum."""
    from mmcl.synthetic.digits import digit_tuples

    return digit_tuples(digit_world_once(), "train", ROWS, seed).select_columns(["image", "audio", "text"])


@cache
def digit_world_once() -> Any:
    from mmcl.synthetic.digits import digit_world

    return digit_world(0)


MIXTURE = planted_mixture()
NOTHING, PAIRS, SUM = independent(), random_pairwise(), softened_sum()
BEYOND = pairwise_floor(MIXTURE)

CASES = {
    "counts: independent": Case(partial(categories, NOTHING), "counts", 100, alarms=10),
    "counts: pairwise": Case(partial(categories, PAIRS), "counts", 100, alarms=10),
    "counts: mixture": Case(partial(categories, MIXTURE), "counts", 20, truth=BEYOND, within=0.10),
    "tables: independent": Case(partial(categories, NOTHING), "encoders", 100, alarms=10),
    "tables: pairwise": Case(partial(categories, PAIRS), "encoders", 100, alarms=10),
    "tables: mixture": Case(partial(categories, MIXTURE), "encoders", 20, truth=BEYOND, within=0.15),
    "networks: independent": Case(partial(vectors, NOTHING), "encoders", 20, alarms=2),
    "networks: pairwise": Case(partial(vectors, PAIRS), "encoders", 20, alarms=2),
    "networks: softened sum": Case(partial(vectors, SUM), "encoders", 20),
    "networks: digits x speech x text": Case(digits, "encoders", 20),
}


def run_case(name: str, seed: int) -> dict[str, Any]:
    return CASES[name].run(seed)


def run_all(names: Iterable[str], share: float) -> dict[str, Any]:
    """Every case on its seeds, in processes of one thread each."""
    results = {}
    with ProcessPoolExecutor(WORKERS, mp_context=get_context("spawn")) as pool:
        for name in names:
            case = CASES[name]
            runs = list(pool.map(partial(run_case, name), range(max(2, round(case.seeds * share)))))
            above = sum(run["beyond"][1] > 0 for run in runs)
            results[name] = {
                "seeds": len(runs),
                "lower end above 0": above,
                "beyond": [min(run["beyond"][0] for run in runs), max(run["beyond"][0] for run in runs)],
                "truth": None if case.truth is None else round(case.truth, 5),
                "expected": {"alarms at most": case.alarms, "within": case.within},
                "median_seconds": float(np.median([run["seconds"] for run in runs])),
                "held": case.held(runs),
                "runs": runs,
            }
            shown = {key: value for key, value in results[name].items() if key not in ("runs", "expected")}
            print(f"{name}: {json.dumps(shown)}", flush=True)
    return results


def draw(results: dict[str, Any], path: Path) -> None:
    """Every interval of every case, sorted."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    columns = min(5, len(results))
    rows = -(-len(results) // columns)
    figure, axes = plt.subplots(rows, columns, figsize=(3.1 * columns, 2.9 * rows), squeeze=False, layout="constrained")
    for axis in axes.flat[len(results) :]:
        axis.set_axis_off()
    for axis, (name, result) in zip(axes.flat, results.items(), strict=False):
        runs = sorted(result["runs"], key=lambda run: run["beyond"][0])
        for at, run in enumerate(runs):
            nats, low, high = run["beyond"]
            colour = "#d55e00" if low > 0 else "#0072b2"
            axis.plot([at, at], [low, high], color=colour, linewidth=1.2)
            axis.plot(at, max(nats, 0), ".", color=colour, markersize=3)
        if result["truth"] is not None:
            axis.axhline(result["truth"], color="black", linestyle="--", linewidth=1)
        axis.set_ylim(bottom=0)
        axis.set_title(f"{name}\n{result['lower end above 0']} of {len(runs)} found", fontsize=9)
        axis.set_xticks([])
    figure.supylabel("nats beyond pairs, with 95 % intervals")
    figure.suptitle("orange: the interval lies above 0; dashed: the truth; one line a seed", fontsize=10)
    figure.savefig(path, dpi=110)
    plt.close(figure)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", nargs="+", choices=list(CASES), default=list(CASES), metavar="CASE")
    parser.add_argument("--quick", action="store_true", help="a tenth of the seeds")
    parser.add_argument("--out", type=Path, default=RESULTS)
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    start = time.perf_counter()
    results = run_all(options.cases, 0.1 if options.quick else 1.0)
    summary = {
        "command": "python " + " ".join(["eval/diagnose.py", *sys.argv[1:]]),
        "rows": ROWS,
        "seconds": round(time.perf_counter() - start),
        "cases": results,
    }
    (options.out / "diagnose.json").write_text(json.dumps(summary) + "\n", encoding="utf-8")
    draw(results, options.out / "diagnose.png")
    sys.exit(0 if all(result["held"] for result in results.values()) else 1)


if __name__ == "__main__":
    main()
