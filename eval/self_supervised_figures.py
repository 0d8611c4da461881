"""The picture of `self_supervised.py`."""

from pathlib import Path
from typing import Any

REGIME_NAMES = {"all": "all", "crop": "crops alone", "all_but_crop": "all but crops"}


def draw(rows: list[dict[str, Any]], path: Path) -> None:
    """Methods by their probes of h and z; what collapses; architectures by augmentations."""
    import matplotlib.pyplot as plt

    plot, (left, middle, right) = plt.subplots(1, 3, figsize=(13, 4.2), width_ratios=(2.2, 1.5, 1.5))
    methods = sorted((row for row in rows if row["part"] == "methods"), key=lambda row: row["probe_h"])
    for shift, key, colour in ((0.2, "probe_h", "#4878a8"), (-0.2, "probe_z", "#b7c9dd")):
        at = [(place, row[key]) for place, row in enumerate(methods) if key in row]
        left.barh([place + shift for place, _ in at], [v for _, v in at], 0.38, color=colour, label=key[-1])
    for row, dash in zip([row for row in rows if row["part"] == "baseline"], ("--", ":"), strict=False):
        left.axvline(row["probe_h"], color="black", lw=0.8, ls=dash, label=row["method"])
    left.set_yticks(range(len(methods)), [row["method"].replace("_", " ") for row in methods], fontsize=8)
    left.set_xlim(0.6, 1.0)
    left.set_xlabel("linear probe, ten labels a class")
    left.legend(fontsize=7, frameon=False, ncols=4, loc="lower center", bbox_to_anchor=(0.5, 1.0))
    gone = [row for row in rows if row["part"] == "collapse"]
    whole = {row["method"]: row for row in methods}
    for place, row in enumerate(gone):
        for shift, what, colour in ((-0.2, whole[row["method"]], "#4878a8"), (0.2, row, "#c46a3f")):
            middle.bar(place + shift, what["same_class_similarity"], 0.38, color=colour)
    middle.set_xticks(range(len(gone)), [f"{r['method']}\nwithout\n{r['without'].replace('_', ' ')}" for r in gone])
    middle.tick_params(axis="x", labelsize=8)
    middle.set_ylabel("same-class similarity (1: one point)")
    middle.set_title("whole (blue), and with a part taken away", fontsize=8)
    table = [row for row in rows if row["part"] == "architectures"]
    kinds, colours = ("mlp", "vit", "resnet18"), ("#9aa5b1", "#4878a8", "#c46a3f")
    for shift, (kind, colour) in enumerate(zip(kinds, colours, strict=True)):
        of = {row["augmentations"]: row["probe_h"] for row in table if row["architecture"] == kind}
        right.bar([p + 0.27 * (shift - 1) for p in range(len(of))], list(of.values()), 0.25, color=colour, label=kind)
    right.set_xticks(range(len(REGIME_NAMES)), list(REGIME_NAMES.values()), fontsize=8)
    right.set_ylim(0.5, 1.0)
    right.set_ylabel("linear probe")
    right.legend(fontsize=7, frameon=False, ncols=3, loc="lower center", bbox_to_anchor=(0.5, 1.0))
    plot.tight_layout()
    plot.savefig(path, dpi=130)
    plt.close(plot)
