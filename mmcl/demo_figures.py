"""The pictures of the demo."""

from pathlib import Path
from typing import Any

from mmcl.synthetic.digits import WORDS, DigitWorld

Hits = dict[str, list[list[tuple[Any, float, dict[str, Any]]]]]

NAMES = {"hadamard": "H-CLIP", "tied_hadamard": "tied Hadamard", "sum_of_pairs": "sum of pairs"}
TICKS = {"hadamard": "H-CLIP", "tied_hadamard": "tied\nHadamard", "sum_of_pairs": "sum of\npairs"}
COLOURS = {"hadamard": "#2563a8", "tied_hadamard": "#7fa8d1", "sum_of_pairs": "#d97b29"}
RIGHT, WRONG, GREY = "#2e8b57", "#c0392b", "#555555"
QUERIES, TUPLES = ("three", "seven", "nine"), 6


def draw_results(out: Path, world: DigitWorld, results: dict[str, Any], hits: Hits) -> None:
    """out/demo.png: what a text query returns under two scores, and all scores beside chance."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib.figure import Figure

    figure = Figure(figsize=(14, 6.4), layout="constrained")
    left, right = parts_of(figure, 1, 2, width_ratios=(1.75, 1))
    upper, lower = parts_of(left, 2, 1)
    draw_hits(upper, world, "hadamard", hits["hadamard"])
    draw_hits(lower, world, "sum_of_pairs", hits["sum_of_pairs"])
    draw_bars(right, results)
    figure.savefig(out / "demo.png", dpi=130)


def parts_of(figure: Any, rows: int, columns: int, **options: Any) -> Any:
    """The cells of a figure, to be drawn in each on its own."""
    return figure.subfigures(rows, columns, **options)


def draw_hits(part: Any, world: DigitWorld, score: str, hits: list[list[tuple[Any, float, dict[str, Any]]]]) -> None:
    """One row a query word: the tuples that came back first, in a frame of green where their sum is right."""
    part.suptitle(
        f"{NAMES[score]}: (image, speech) tuples that a text query returns", fontsize=12, color=COLOURS[score]
    )
    axes = part.subplots(len(QUERIES), TUPLES + 1, squeeze=False)
    for row, word in enumerate(QUERIES):
        axes[row, 0].text(0.5, 0.5, f'"{word}"', ha="center", va="center", fontsize=14)
        axes[row, 0].axis("off")
        for column, (_, _, item) in enumerate(hits[WORDS.index(word)][:TUPLES], start=1):
            cell = axes[row, column]
            cell.imshow(world.images[item["image_id"]], cmap="gray_r")
            cell.set(xticks=[], yticks=[])
            colour = RIGHT if item["text"] == word else WRONG
            for edge in cell.spines.values():
                edge.set(color=colour, linewidth=2.5)
            total = WORDS.index(item["text"])
            cell.set_xlabel(f'+ "{WORDS[item["audio_digit"]]}" → {total}', fontsize=9, color=colour)


def draw_bars(part: Any, results: dict[str, Any]) -> None:
    """Zero-shot accuracy of each score on the sum, and on the control, beside chance."""
    axis = part.subplots()
    bars = [(NAMES[name], figures["zero_shot_accuracy"], name) for name, figures in results["scores"].items()]
    controls = [(NAMES[name], value, name) for name, value in results["control"].items()]
    places = [*range(len(bars)), *(len(bars) + 0.6 + place for place in range(len(controls)))]
    for place, (_, value, name) in zip(places, bars + controls, strict=True):
        axis.bar(place, value, color=COLOURS[name], width=0.75)
        axis.text(place, value + 0.015, f"{value:.3f}", ha="center", fontsize=10)
    axis.axhline(results["chance"], color=GREY, linestyle="--", linewidth=1)
    blank = {"facecolor": "white", "edgecolor": "none", "pad": 2}  # over the dashed line
    axis.text(places[-1] + 0.6, results["chance"], "chance", va="center", fontsize=9, color=GREY, bbox=blank)
    axis.text((len(bars) - 1) / 2, 1.08, "text = word of\n(image + speech) mod 10", ha="center", fontsize=10)
    middle = (places[len(bars)] + places[-1]) / 2
    axis.text(middle, 1.08, "control: text =\nword of the image", ha="center", fontsize=10)
    axis.set_xticks(places, [TICKS[name] for _, _, name in bars + controls], fontsize=9)
    axis.set(ylim=(0, 1.18), xlim=(-0.6, places[-1] + 1.35))
    axis.set_yticks([0, 0.25, 0.5, 0.75, 1.0])
    axis.set_ylabel("zero-shot accuracy, images and voices never trained on")
    axis.spines[["top", "right"]].set_visible(False)
