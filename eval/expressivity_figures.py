"""Figures of `expressivity.py`; redraw them from its JSON by

python eval/expressivity_figures.py
"""

import json
import statistics
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot as plt

from mmcl.metrics.expressivity import best_scores
from mmcl.scores import Hadamard, SumOfPairs
from mmcl.synthetic.fits import fit_exactly
from mmcl.synthetic.joints import JOINTS

RESULTS = Path(__file__).parent / "results"
COLOURS = {"sum_of_pairs": "#d97b29", "hadamard": "#2563a8", "tied": "#6b9fd4", "sum_of_both": "#3a7d44"}
NAMES = {"sum_of_pairs": "sum of pairs", "hadamard": "H-CLIP", "tied": "tied", "sum_of_both": "sum of both"}
LEAST = 1e-7
"""What is smaller is drawn here."""


def draw(rows: list[dict[str, Any]], out: Path) -> None:
    """All three."""
    by_width(rows, out / "expressivity.png")
    by_mixing(rows, out / "expressivity_mixing.png")
    learned_tables(out / "expressivity_tables.png")


def by_width(rows: list[dict[str, Any]], file: Path) -> None:
    """Joint KL over the embeddings' width, a panel a joint, the floor of all sums of pairs as a line."""
    joints = ("softened_sum", "random_tensor", "random_pairwise")
    figure, axes = plt.subplots(1, 3, figsize=(12, 4), sharey=True, layout="constrained")
    for axis, joint in zip(axes, joints, strict=True):
        plain = [row for row in rows if row["kind"] == "exact" and row["joint"] == joint and is_plain(row)]
        for score, colour in COLOURS.items():
            part = sorted((row for row in plain if row["score"] == score), key=lambda row: row["dim"])
            dims = [row["dim"] for row in part]
            low, middle, high = ([max(of(row["kl"]), LEAST) for row in part] for of in (min, statistics.median, max))
            axis.plot(dims, middle, marker="o", ms=4, color=colour, label=NAMES[score])
            axis.fill_between(dims, low, high, color=colour, alpha=0.25, lw=0)
        dims = sorted({row["dim"] for row in plain})
        floor = plain[0]["floor"]
        if floor > LEAST:
            axis.axhline(floor, color="#444444", lw=1, ls="--", label="floor of any sum of pairs")
        axis.set(xscale="log", yscale="log", xlabel="width d", title=joint.replace("_", " "))
        axis.set_xticks(dims, [str(dim) for dim in dims], fontsize=7)
        axis.minorticks_off()
        axis.spines[["top", "right"]].set_visible(False)
    axes[0].set_ylabel("exact KL to the joint, nats")
    axes[2].legend(*axes[0].get_legend_handles_labels(), frameon=False, fontsize=8, loc="upper right")
    figure.savefig(file, dpi=120)
    plt.close(figure)


def is_plain(row: dict[str, Any]) -> bool:
    """Table encoders, a learned temperature of .3 at the start; not the widths that index rows of others would have."""
    return row["dim"] not in (7, 31) and not any(row.get(name) for name in ("encoder", "options", "temperature"))


def by_mixing(rows: list[dict[str, Any]], file: Path) -> None:
    """Joint KL over the probability with which the third value is the XOR of the others."""
    figure, axis = plt.subplots(figsize=(5.5, 4), layout="constrained")
    mixed = [row for row in rows if row["joint"] == "xor_to_identity"]
    for score in ("sum_of_pairs", "hadamard"):
        part = [row for row in mixed if row["score"] == score]
        axis.plot(
            [row["options"]["probability"] for row in part],
            [statistics.median(row["kl"]) for row in part],
            marker="o",
            color=COLOURS[score],
            label=NAMES[score],
        )
    part = [row for row in mixed if row["score"] == "hadamard"]
    probabilities = [row["options"]["probability"] for row in part]
    axis.plot(probabilities, [row["floor"] for row in part], color="#444444", ls="--", lw=1, label="floor of any sum")
    totals = [row["total_correlation"] for row in part]
    axis.plot(probabilities, totals, color="#999999", ls=":", lw=1, label="total correlation")
    axis.set(xlabel="probability of x1 XOR x2 (else x1)", ylabel="exact KL to the joint, nats", ylim=(-0.02, None))
    axis.spines[["top", "right"]].set_visible(False)
    axis.legend(frameon=False, fontsize=8)
    figure.savefig(file, dpi=120)
    plt.close(figure)


def learned_tables(file: Path) -> None:
    """True and learned scores of the softened sum and the random tensor, where x1 = 0."""
    joints = ("softened_sum", "random_tensor")
    figure, axes = plt.subplots(2, 3, figsize=(8.5, 5.6), layout="constrained")
    for line, name in zip(axes, joints, strict=True):
        joint = JOINTS[name]()
        tables = {"true: log p / (p1 p2 p3)": best_scores(joint)[0]}
        for label, kind in (("sum of pairs, d = 64", SumOfPairs), ("H-CLIP, d = 64", Hadamard)):
            (fit,) = fit_exactly(joint, lambda kind=kind, joint=joint: kind(joint.modalities, 64, 0.3), steps=600)
            constant = (joint.product_of_marginals() * fit.scores.exp()).sum().log()
            tables[label] = fit.scores - constant
        limit = float(tables["true: log p / (p1 p2 p3)"][0].abs().max())
        for axis, (label, table) in zip(line, tables.items(), strict=True):
            image = axis.imshow(table[0], cmap="RdBu_r", vmin=-limit, vmax=limit)
            axis.set_title(label, fontsize=9)
            axis.set(xlabel="x3", xticks=[], yticks=[])
        line[0].set_ylabel(f"{name.replace('_', ' ')}\nx2")
        figure.colorbar(image, ax=line, shrink=0.8, label="nats")
    figure.savefig(file, dpi=120)
    plt.close(figure)


if __name__ == "__main__":
    draw(json.loads((RESULTS / "expressivity.json").read_text(encoding="utf-8"))["rows"], RESULTS)
