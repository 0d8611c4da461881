"""The pictures of the protocols."""

from collections.abc import Sequence
from typing import Any

import matplotlib
import numpy as np
from protocols import joined

matplotlib.use("Agg")
from matplotlib.axes import Axes
from matplotlib.figure import Figure

MOST_PANELS, MOST_NAMED, MOST_ROWS = 12, 25, 24
GREY = "#6b7280"
STAGES = {"": ("as scored", "#d97b29", "o"), "_with_temperature": ("with temperature", "#2563a8", "s")}
FEW = 10
"""Rows of a bin below which its accuracy says little."""
COLOURS = ("#2563a8", "#7fa8d1", "#d97b29", "#2e8b57", "#7b3294", "#c0392b")


def draw_confusion(records: Sequence[dict[str, Any]]) -> Figure:
    """A matrix a record: of each class's rows, the share that each class was predicted for."""
    figure, axes = panels(records, 4.3)
    for axis, record in zip(axes, records, strict=False):
        names = record["classes"]
        if "confusion" not in record:
            axis.text(0.5, 0.5, f"{names} classes: see\nmost_confused", ha="center", va="center", color=GREY)
            axis.set(xticks=[], yticks=[])
        else:
            draw_matrix(axis, np.array(record["confusion"]), names)
        axis.set_title(f"{titled(record)}\nacc1 {record['metrics']['acc1']:.3f}", fontsize=10)
    return figure


def draw_matrix(axis: Axes, counts: np.ndarray, names: Sequence[str]) -> None:
    """Shares of rows; numbers where there is room for them."""
    shares = counts / np.maximum(counts.sum(axis=1, keepdims=True), 1)
    axis.imshow(shares, cmap="Blues", vmin=0, vmax=1)
    if len(names) <= MOST_NAMED:
        axis.set_xticks(range(len(names)), names, rotation=60, ha="right", rotation_mode="anchor", fontsize=8)
        axis.set_yticks(range(len(names)), names, fontsize=8)
    if len(names) <= 12:
        for (row, column), share in np.ndenumerate(shares):
            if round(100 * share):
                colour = "white" if share > 0.5 else "#1f2937"
                axis.text(column, row, f"{100 * share:.0f}", ha="center", va="center", fontsize=7, color=colour)
    axis.set_xlabel("predicted (% of the class's rows)", fontsize=9)
    axis.set_ylabel("class", fontsize=9)


def draw_calibration(records: Sequence[dict[str, Any]]) -> Figure:
    """A reliability diagram a record: accuracy of each bin over its confidence, a point's area by its rows."""
    figure, axes = panels(records, 3.3, 4)
    for axis, record in zip(axes, records, strict=False):
        found, title = record["calibration"], titled(record)
        axis.plot([0, 1], [0, 1], color=GREY, linewidth=1, linestyle="--")
        for suffix, (_, colour, marker) in STAGES.items():
            if f"reliability{suffix}" not in found:
                continue
            bins = found[f"reliability{suffix}"]
            rows, confidence, accuracy = (np.array(bins[key], float) for key in ("rows", "confidence", "accuracy"))
            title += f"\nECE {record['metrics'][f'ece{suffix}']:.3f}"
            title += f" at temperature {found['temperature']:.2f}" if suffix else " as scored"
            for some, face in ((rows >= FEW, colour), ((rows > 0) & (rows < FEW), "none")):
                sizes = 14 + 140 * rows[some] / rows.sum()
                axis.scatter(confidence[some], accuracy[some], sizes, color=face, edgecolor=colour, marker=marker)
        axis.set(xlim=(0, 1.03), ylim=(-0.03, 1.03), xlabel="confidence", ylabel="accuracy")
        axis.set_title(title, fontsize=9)
        axis.spines[["top", "right"]].set_visible(False)
    for label, colour, marker in STAGES.values():
        axes[0].scatter([], [], 40, color=colour, marker=marker, label=label)
    axes[0].scatter([], [], 40, color="none", edgecolor=GREY, label=f"fewer than {FEW} rows")
    figure.legend(loc="outside upper center", ncols=3, frameon=False, fontsize=9)
    return figure


def panels(records: Sequence[dict[str, Any]], size: float, most: int = 3) -> tuple[Figure, list[Axes]]:
    """A grid with a panel a record, so many in a line; past the most that are legible, no more."""
    count = min(len(records), MOST_PANELS)
    columns = min(most, count)
    lines = -(-count // columns)
    figure = Figure(figsize=(size * columns, 1.12 * size * lines + 0.4), layout="constrained")
    axes = list(figure.subplots(lines, columns, squeeze=False, gridspec_kw={"hspace": 0.05}).flat)
    for axis in axes[count:]:
        axis.set_axis_off()
    return figure, axes[:count]


def titled(record: dict[str, Any]) -> str:
    return f"{record['model'].replace('_', ' ')}: {record['target']} from {joined(record['query'])}"


def draw_retrieval(records: Sequence[dict[str, Any]]) -> Figure:
    """A row a direction: recall at 1 of each model, with the share up to 10 as a thin line and chance as a tick."""
    directions = list(dict.fromkeys((tuple(each["query"]), tuple(each["items"])) for each in records))[:MOST_ROWS]
    models = list(dict.fromkeys(each["model"] for each in records))
    figure = Figure(figsize=(9.5, 1.4 + len(directions) * (0.22 + 0.2 * len(models))), layout="constrained")
    axis = figure.subplots()
    height = 0.8 / len(models)
    for record in records:
        place = (tuple(record["query"]), tuple(record["items"]))
        if place not in directions:
            continue
        number = models.index(record["model"])
        y = directions.index(place) + height * (number - (len(models) - 1) / 2)
        colour = COLOURS[number % len(COLOURS)]
        if record["metrics"] is None:
            axis.text(0.005, y, "not possible: a modality is absent", va="center", fontsize=7, color=GREY)
            continue
        first, tenth, chance = (metric(record, key) for key in ("recall@1", "recall@10", "chance"))
        axis.barh(y, first, height=0.85 * height, color=colour)
        axis.plot([first, tenth], [y, y], color=colour, linewidth=1.2, marker="|", markersize=5)
        axis.plot([chance, chance], [y - 0.5 * height, y + 0.5 * height], color="black", linewidth=1.3)
        axis.text(1.02, y, f"{first:.3f}", va="center", fontsize=8, color=colour)
    for number, name in enumerate(models):
        axis.barh(-9, 0, color=COLOURS[number % len(COLOURS)], label=name.replace("_", " "))
    axis.plot([-9], [-9], color="black", linewidth=1.3, label="chance")
    axis.set_yticks(range(len(directions)), [f"{joined(query)} → {joined(items)}" for query, items in directions])
    axis.set(
        xlim=(0, 1.08), ylim=(len(directions) - 0.4, -0.6), xlabel="recall@1 (bars and numbers), to recall@10 (lines)"
    )
    axis.spines[["top", "right"]].set_visible(False)
    figure.legend(loc="outside upper center", ncols=len(models) + 1, frameon=False)
    return figure


def metric(record: dict[str, Any], name: str) -> float:
    """recall@1 and such, under the name that it has in this record."""
    if name == "chance":
        return record["chance_recall@1"]
    return record["metrics"][f"{joined(record['items'])}_retrieval_{name}"]
