"""What each score can express of joints that are known exactly, and what training on draws finds of it.

    python eval/expressivity.py                        # under 30 minutes on 2 cores; eval/results/expressivity.*
    python eval/expressivity.py --quick --out figures  # under a minute, fewer of everything

"exact" rows minimise the joint KL itself over the whole table: what a score can express, in the limit of infinitely
many data. They say nothing of how much data it takes, nor of the width that data of one's own need: d = 64 suffices
here because a modality has 8 values, and where d is small beside the joint's size no score gets it right. "draws" rows
train on batches alone and are then measured by the same exact, uncorrected KL. On every fit the hierarchy is asserted:
no conditional KL above the joint KL. Rankings of scores are claimed only where the ranges over seeds do not overlap.
"""

import argparse
import json
import math
import os
import platform
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from datetime import date
from itertools import product
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch
from scipy import optimize
from torch import Tensor

from mmcl.losses import contrastive_loss, joint_loss, pairwise_loss
from mmcl.metrics.expressivity import (
    conditional_kl,
    divergence,
    full_conditional_kls,
    joint_kl,
    pairwise_conditional_kls,
    pairwise_floor,
)
from mmcl.scores import Hadamard, Score, SumOfPairs, sum_of_both
from mmcl.synthetic.fits import each_from_all_others, fit_by_draws, fit_exactly
from mmcl.synthetic.grids import product_density
from mmcl.synthetic.joints import JOINTS, Joint

RESULTS = Path(__file__).parent / "results"
KINDS: dict[str, Any] = {
    "sum_of_pairs": SumOfPairs,
    "hadamard": Hadamard,
    "tied": lambda *args, **options: Hadamard(*args, tied=True, **options),
    "sum_of_both": sum_of_both,
}
MAIN = ("softened_sum", "random_tensor", "random_pairwise")
DIMS = (4, 8, 16, 32, 64, 128, 256)
COMPARED = {16: 7, 64: 31}
"""{d at which scores are compared: that of a sum of both whose index rows are as wide}."""
OTHERS: list[tuple[str, dict[str, Any]]] = [
    ("planted_mixture", {}),
    ("product_interaction", {}),
    ("parity", {"strength": 2.0}),
    ("independent", {}),
    ("random_tensor", {"n": 4, "m": 4}),
    ("softened_sum", {"n": 4, "m": 4}),
    ("random_pairwise", {"n": 4, "m": 4}),
    ("softened_sum", {"n": 3, "m": 5}),
    ("random_tensor", {"n": 3, "m": 5}),
]
MIXING = tuple(step / 8 for step in range(9))
BATCH = 512
EXPECTED: dict[str, float] = {
    "sum of pairs above its floor, d >= 64": 1e-4,
    "sum of pairs below its floor": 1e-9,
    "H-CLIP on the main joints, d = 64": 5e-4,
    "H-CLIP on the random tensor, d = 16": 0.03,
    "CLIP, m = 2, d = 64": 1e-3,
    "pairwise conditionals of sum of pairs, d >= 64": 1e-4,
    "draws, H-CLIP on the softened sum": 0.005,
    "draws, H-CLIP on the random tensor and random pairwise": 0.01,
    "draws, tuples shuffled, given the query": 0.01,
    "draws, tuples in the batch, given the query, own target": 0.01,
}
"""At most, in nats."""


def joint_of(spec: dict[str, Any]) -> Joint:
    """The joint that a specification names."""
    makers = {**JOINTS, "product_density": product_density}
    return makers[spec["joint"]](**spec.get("options", {}))


def masked_duplicates(score: Score, embeddings: dict[str, Tensor], values: dict[str, Tensor]) -> Tensor:
    """What not to do: rows that equal the answer are taken out of its negatives, and not counted as answers."""
    losses = []
    for guessed in score.modalities:
        rest = {name: rows for name, rows in embeddings.items() if name != guessed}
        logits = score.query_vectors(rest) @ score.item_vectors({guessed: embeddings[guessed]}).T
        same = values[guessed][:, None] == values[guessed]
        same.fill_diagonal_(False)
        losses.append(torch.nn.functional.cross_entropy(logits.masked_fill(same, -math.inf), torch.arange(len(logits))))
    return torch.stack(losses).mean()


LOSSES: dict[str, Any] = {
    "each from all others": each_from_all_others,
    "each, equal rows summed": lambda score, rows, values: contrastive_loss(score, rows, groups=values),
    "tuple, shuffled": lambda score, rows, values: contrastive_loss(
        score, rows, guess=[score.modalities[1:]], candidates="shuffled"
    ),
    "joint, 4 shuffles": lambda score, rows, values: joint_loss(score, rows),
    "pairwise": lambda score, rows, values: pairwise_loss(score, rows),
    "WRONG: duplicates masked": masked_duplicates,
    "WRONG: tuple in the batch": lambda score, rows, values: contrastive_loss(score, rows, [score.modalities[1:]]),
}


def exact_row(spec: dict[str, Any]) -> dict[str, Any]:
    """Fit one score at one width to one joint; the best of `starts` for each of `seeds`."""
    joint = joint_of(spec)
    starts, seeds = spec.get("starts", 1), spec["seeds"]

    def make() -> Score:
        return KINDS[spec["score"]](joint.modalities, spec["dim"], temperature=spec.get("temperature", 0.3))

    numbers = range(seeds * starts)
    options = {"encoder": spec.get("encoder", "table"), "learn_scale": spec.get("learned", True)}
    fits = fit_exactly(joint, make, numbers, steps=spec["steps"], lr=spec.get("lr", 0.03), **options)
    found = [measured(joint, fit.scores) for fit in fits]
    best = [min(found[seed * starts : (seed + 1) * starts], key=lambda row: row["kl"]) for seed in range(seeds)]
    return {**about(joint), **spec, "width": make().width, **in_columns(best)}


def draws_row(spec: dict[str, Any]) -> dict[str, Any]:
    """Train one score on draws from one joint."""
    joint, seeds = joint_of(spec), spec["seeds"]
    found = []
    for seed in range(seeds):
        score = KINDS[spec["score"]](joint.modalities, spec["dim"], temperature=0.3)
        given = {"encoder": spec.get("encoder", "table"), "steps": spec["steps"], "seed": seed}
        fit = fit_by_draws(joint, score, LOSSES[spec["loss"]], batch_size=BATCH, **given)
        found.append({**measured(joint, fit.scores), **given_the_query(joint, fit.scores)})
    return {**about(joint), **spec, "batch": BATCH, **in_columns(found)}


def measured(joint: Joint, scores: Tensor) -> dict[str, float]:
    """Joint KL and the largest conditional KLs; AssertionError where one of them is above it."""
    kl = float(joint_kl(joint, scores))
    full, pairs = full_conditional_kls(joint, scores), pairwise_conditional_kls(joint, scores)
    assert max(*full.values(), *pairs.values()) <= kl + 1e-12, (kl, full, pairs)
    return {"kl": kl, "full_conditional": max(full.values()), "pairwise_conditional": max(pairs.values())}


def given_the_query(joint: Joint, scores: Tensor) -> dict[str, float]:
    """KL of the tuple (x_2, ..., x_m) given the query x_1, under two targets of a score.

    A loss that guesses tuples from x_1 leaves any function of x_1 free, which the joint KL counts as an error. With
    tuples shuffled it learns log p / prod p_i; in the batch, log p / (p_Q p_T), which tilts p(x_2, ..., x_m) itself.
    """
    first, *rest = joint.modalities
    logits = (joint.marginal(rest).log() + scores).flatten(1).log_softmax(1).reshape(scores.shape)
    query = joint.marginal(first).log().reshape(-1, *[1] * len(rest))
    return {
        "kl_given_query": float(conditional_kl(joint, scores, rest, first)),
        "kl_given_query, tuple's own target": float(divergence(joint.table, query + logits)),
    }


def about(joint: Joint) -> dict[str, Any]:
    total = joint.total_correlation()
    return {"sizes": list(joint.table.shape), "total_correlation": total, "floor": pairwise_floor(joint)}


def in_columns(rows: list[dict[str, float]]) -> dict[str, list[float]]:
    return {name: [row[name] for row in rows] for name in rows[0]}


def masked_limit(batch: int = BATCH, values: int = 8, strength: float = 4.0) -> dict[str, float]:
    """The softened sum with duplicates masked, in closed form but for one root: the gap that the loss prefers.

    One of `values` answers is right with probability p. Its other copies masked, an answer stands against the batch's
    rows of other values; the gap Delta of its score minimises
    p log(1 + (B-1) (v-1)/v e^-Delta) + (1-p) log(1 + (B-1) (e^Delta + v-2) / v).
    """
    right = math.exp(strength) / (math.exp(strength) + values - 1)
    share = (batch - 1) / values

    def loss(gap: float) -> float:
        wrong = math.log1p(share * (math.exp(gap) + values - 2))
        return right * math.log1p(share * (values - 1) * math.exp(-gap)) + (1 - right) * wrong

    gap = optimize.minimize_scalar(loss, bounds=(0, 20), method="bounded", options={"xatol": 1e-10}).x
    taken = math.exp(gap) / (math.exp(gap) + values - 1)
    kl = right * math.log(right / taken) + (1 - right) * math.log((1 - right) / (1 - taken))
    return {"p": right, "q": taken, "kl": kl}


def exact_specs() -> list[dict[str, Any]]:
    """What is fitted to tables."""
    common: dict[str, Any] = {"kind": "exact", "steps": 2000, "seeds": 3}
    best_of_three, network = {"seeds": 5, "starts": 3}, {"encoder": "mlp", "lr": 0.003}
    specs = []
    for joint in MAIN:
        given = {**common, "joint": joint}
        for score, dim in product(KINDS, DIMS):
            specs.append({**given, "score": score, "dim": dim, **(best_of_three if dim in COMPARED else {})})
        specs += [{**given, "score": "sum_of_both", "dim": dim, **best_of_three} for dim in COMPARED.values()]
        specs += [{**given, "score": score, "dim": 64, **network} for score in ("sum_of_pairs", "hadamard")]
    for (temperature, learned), dim in product(((0.07, True), (0.07, False), (0.3, False)), COMPARED):
        given = {"temperature": temperature, "learned": learned}
        specs.append({**common, "joint": "random_tensor", "score": "hadamard", "dim": dim, **given})
    specs.append({**common, "joint": "random_tensor", "options": {"m": 2}, "score": "sum_of_pairs", "dim": 64})
    for (joint, options), score in product(OTHERS, KINDS):
        specs.append({**common, "joint": joint, "options": options, "dim": 64, "score": score})
    for score in ("sum_of_pairs", "hadamard"):
        grid = {"joint": "product_density", "options": {"nodes": 12}, "dim": 32}
        specs.append({**common, **grid, "score": score, **network})
    return [*specs, *mixing_specs(MIXING, common)]


def mixing_specs(probabilities: Sequence[float], common: dict[str, Any]) -> list[dict[str, Any]]:
    """The XOR-to-identity family."""
    mixed = {**common, "joint": "xor_to_identity", "dim": 16}
    scores = ("sum_of_pairs", "hadamard")
    return [{**mixed, "options": {"probability": p}, "score": score} for p, score in product(probabilities, scores)]


def quick_specs() -> list[dict[str, Any]]:
    """A little of everything."""
    common: dict[str, Any] = {"kind": "exact", "steps": 300, "seeds": 1}
    chosen = product(MAIN, ("sum_of_pairs", "hadamard"), COMPARED)
    exact = [{**common, "joint": joint, "score": score, "dim": dim} for joint, score, dim in chosen]
    draws = [{**spec, "steps": 50} for spec in draws_specs()[::5]]
    return [*draws, *exact, *mixing_specs((0.0, 0.5, 1.0), common)]


def draws_specs() -> list[dict[str, Any]]:
    """What is trained on draws."""
    common = {"kind": "draws", "steps": 3000, "dim": 64, "seeds": 1}
    plan = [(loss, "hadamard", joint) for loss in ("each from all others", "joint, 4 shuffles") for joint in MAIN]
    plan += [("pairwise", "sum_of_pairs", joint) for joint in MAIN]
    plan += [
        ("each from all others", "sum_of_pairs", "random_tensor"),
        ("each, equal rows summed", "hadamard", "softened_sum"),
        ("tuple, shuffled", "hadamard", "random_tensor"),
        ("WRONG: duplicates masked", "hadamard", "softened_sum"),
        ("WRONG: tuple in the batch", "hadamard", "random_tensor"),
    ]
    specs = [{**common, "loss": loss, "score": score, "joint": joint} for loss, score, joint in plan]
    return [*specs, {**specs[1], "encoder": "mlp"}]


def run(spec: dict[str, Any]) -> dict[str, Any]:
    torch.set_num_threads(1)
    start = time.perf_counter()
    row = {"exact": exact_row, "draws": draws_row}[spec["kind"]](spec)
    return {**row, "seconds": round(time.perf_counter() - start, 1)}


def checks(rows: list[dict[str, Any]]) -> dict[str, float]:
    """What `EXPECTED` bounds, as it was found."""

    def worst(what: str = "kl", **wanted: Any) -> float:
        chosen = [row for row in rows if all(row.get(name) == value for name, value in wanted.items())]
        return max(value for row in chosen for value in row[what])

    pairs = [row for row in rows if row["kind"] == "exact" and row["score"] == "sum_of_pairs"]
    wide = [row for row in pairs if row["dim"] >= 64 and row.get("encoder", "table") == "table"]
    above = [kl - row["floor"] for row in pairs for kl in row["kl"]]
    main: dict[str, Any] = {"kind": "exact", "score": "hadamard", "encoder": None, "options": None, "temperature": None}
    drawn = {"kind": "draws", "score": "hadamard", "loss": "each from all others", "encoder": None}
    conditionals = [each for row in wide for each in row["pairwise_conditional"]]
    return {
        "sum of pairs above its floor, d >= 64": max(kl - row["floor"] for row in wide for kl in row["kl"]),
        "sum of pairs below its floor": -min(above),
        "H-CLIP on the main joints, d = 64": max(worst(**main, joint=joint, dim=64) for joint in MAIN),
        "H-CLIP on the random tensor, d = 16": worst(**main, joint="random_tensor", dim=16),
        "CLIP, m = 2, d = 64": worst(kind="exact", options={"m": 2}),
        "pairwise conditionals of sum of pairs, d >= 64": max(conditionals),
        "draws, H-CLIP on the softened sum": worst(**drawn, joint="softened_sum"),
        "draws, H-CLIP on the random tensor and random pairwise": max(worst(**drawn, joint=name) for name in MAIN[1:]),
        "draws, tuples shuffled, given the query": worst("kl_given_query", loss="tuple, shuffled"),
        "draws, tuples in the batch, given the query, own target": worst(
            "kl_given_query, tuple's own target", loss="WRONG: tuple in the batch"
        ),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="fewer joints, widths, seeds and steps; asserts less")
    parser.add_argument("--workers", type=int, default=os.cpu_count() or 1, help="processes, of one thread each")
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder of expressivity.json and the figures")
    options = parser.parse_args()
    if options.workers < 1:
        parser.error(f"--workers must be 1 or more, got {options.workers}")
    start = time.perf_counter()
    specs = quick_specs() if options.quick else [*draws_specs(), *exact_specs()]  # the long ones first
    rows = []
    with ProcessPoolExecutor(options.workers, mp_context=get_context("spawn")) as pool:
        for row in pool.map(run, specs):
            rows.append(row)
            shown = [row[name] for name in ("kind", "joint", "score", "dim")]
            print(f"{len(rows)}/{len(specs)}", *shown, " ".join(f"{kl:.5f}" for kl in row["kl"]), flush=True)
    summary = {
        "command": " ".join(["python eval/expressivity.py", *sys.argv[1:]]),
        "machine": f"{platform.machine()}, {options.workers} processes",
        "date": date.today().isoformat(),
        "seconds": round(time.perf_counter() - start),
        "masked duplicates, in closed form": masked_limit(),
        "expected at most": EXPECTED,
        "rows": rows,
    }
    if not options.quick:
        summary["found"] = checks(rows)
    options.out.mkdir(parents=True, exist_ok=True)
    (options.out / "expressivity.json").write_text(json.dumps(summary, indent=1) + "\n", encoding="utf-8")
    from expressivity_figures import draw

    draw(rows, options.out)
    failed = [name for name, value in summary.get("found", {}).items() if not value <= EXPECTED[name]]
    for name, value in summary.get("found", {}).items():
        print(f"{value:10.2e}  at most {EXPECTED[name]:g}  {name}{'  FAILED' if name in failed else ''}")
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    main()
