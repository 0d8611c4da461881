"""The main job: handwritten digit x spoken digit -> the word of their sum, with three scores side by side.

Any two of the three modalities are independent, so a sum over pairs has nothing to learn; the product has all of it.
"""

import json
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image

from mmcl.encoders import categories, small_audio, small_image
from mmcl.files import made_folder
from mmcl.index import TupleIndex
from mmcl.metrics.retrieval import recall_from_hits
from mmcl.model import MultimodalModel
from mmcl.modes import evaluating
from mmcl.scores import Hadamard, Score, SumOfPairs
from mmcl.synthetic.digits import WORDS, DigitWorld, digit_tuples, digit_world
from mmcl.training import fit
from mmcl.zero_shot import ZeroShotClassifier

MODALITIES = ("image", "audio", "text")
DIM = 128
TRAIN_ROWS, TEST_ROWS = 51_200, 2_000
KEPT_ROWS = 6_000
"""Training tuples that are written to the disk, for a user's own runs."""
TRAINING: dict[str, Any] = {"epochs": 2, "batch_size": 256, "lr": 3e-3, "weight_decay": 0.1, "warmup": 0.2}
ASKED = ("three", "seven")
"""Queries whose answers are printed."""
SHOWN = 10
"""Tuples that a query returns."""

SCORES: dict[str, Callable[[], Score]] = {
    "hadamard": lambda: Hadamard(MODALITIES, DIM),
    "tied_hadamard": lambda: Hadamard(MODALITIES, DIM, tied=True),
    "sum_of_pairs": lambda: SumOfPairs(MODALITIES, DIM),
}
CONTROLS = ("hadamard", "sum_of_pairs")


@dataclass(frozen=True)
class Trained:
    """One score's model, what it reaches on images and voices never trained on, and its index of test tuples."""

    model: MultimodalModel
    index: TupleIndex
    figures: dict[str, float]
    hits: list[list[tuple[Any, float, dict[str, Any]]]]
    """The first tuples of each word of WORDS."""
    seconds: float


def run_demo(
    out: str | Path, seed: int = 0, progress: bool = True, say: Callable[[str], None] = print
) -> dict[str, Any]:
    """Train, index, ask and classify.

    Writes out/results.json, out/demo.png, out/model, out/index, and to play with: out/train.parquet and
    out/test.parquet (tuples), out/four.png and out/three.wav (one held-out image and clip).

    Args:
        out: a folder; an earlier demo there is replaced.
        seed: of the split, the draws, the start and the training.
        say: called with one line before each part.
    Returns: the content of results.json: {"scores": {name: figures}, "control": {name: zero-shot accuracy}, "chance",
        "train_seconds": {name: s}, "total_seconds", "seed", "asked": {query: its first tuples under H-CLIP}}.
        recall_at_k: text queries, the share of the ten words with a right (image, audio) tuple among the first k.
    Raises: ImportError without the extra `demo` (speech).
    """
    from mmcl.demo_figures import draw_results

    start, out = time.perf_counter(), made_folder(out, "the demo is written")
    say("Handwritten and spoken digits (the first run synthesises the speech)")
    world = digit_world(seed)
    trained = {}
    for name in SCORES:
        say(f"Training {name}: the text is the word of (image digit + spoken digit) mod 10")
        trained[name] = train_and_test(world, name, seed, "sum", progress)
    control = {}
    for name in CONTROLS:
        say(f"Control, {name}: the text is the word of the image's own digit")
        control[name] = train_and_test(world, name, seed, "image", progress)
    say("Writing the model, the index and the pictures")
    trained["hadamard"].model.save_pretrained(out / "model")
    trained["hadamard"].index.save(out / "index")
    results = {
        "scores": {name: each.figures for name, each in trained.items()},
        "control": {name: each.figures["zero_shot_accuracy"] for name, each in control.items()},
        "chance": 1 / len(WORDS),
        "train_seconds": {name: round(each.seconds, 2) for name, each in trained.items()},
        "seed": seed,
        "asked": {word: shown(trained["hadamard"].hits[WORDS.index(word)][:5]) for word in ASKED},
    }
    write_data(out, world, seed)
    draw_results(out, world, results, {name: each.hits for name, each in trained.items()})
    results["total_seconds"] = round(time.perf_counter() - start, 2)
    (out / "results.json").write_text(json.dumps(results, indent=2), encoding="utf-8")
    return results


def train_and_test(world: DigitWorld, name: str, seed: int, text: str, progress: bool) -> Trained:
    """Train one score on the training images and voices, and measure it on the others."""
    train = digit_tuples(world, "train", TRAIN_ROWS, seed, text)
    test = digit_tuples(world, "test", TEST_ROWS, seed, text)
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = MultimodalModel(
            {
                "image": small_image(DIM, size=8, channels=1, noise=0.5),
                "audio": small_audio(DIM, seconds=0.8, n_mels=32, hop=0.02, noise=0.3),
                "text": categories(WORDS, DIM),
            },
            SCORES[name](),
        )
    begin = time.perf_counter()
    fit(model, train, groups={"text": "equal"}, seed=seed, cache_inputs=True, progress=progress, **TRAINING)
    seconds = time.perf_counter() - begin
    inputs = {part: model.prepare(part, test[part][:]) for part in ("image", "audio")}
    with evaluating(model):
        tuples = model.encode(inputs)
    classifier = ZeroShotClassifier(model, WORDS)
    accuracy = float(np.mean([a == b for a, b in zip(classifier.predict(tuples), test["text"], strict=True)]))
    index = TupleIndex.build(model, tuples, metadata=described(test), encoded=True)
    hits = list(index.search({"text": list(WORDS)}, k=SHOWN))
    right = np.array([[row["text"] == word for _, _, row in found] for word, found in zip(WORDS, hits, strict=True)])
    figures = {
        "zero_shot_accuracy": accuracy,
        "recall_at_1": recall_from_hits(right, 1),
        "recall_at_10": recall_from_hits(right, SHOWN),
    }
    return Trained(model, index, figures, hits, seconds)


def shown(hits: list[tuple[Any, float, dict[str, Any]]]) -> list[dict[str, Any]]:
    """What came back for one query, in few words."""
    names = ("image_digit", "audio_digit", "text")
    return [{"score": round(score, 3), **{name: row[name] for name in names}} for _, score, row in hits]


def write_data(out: Path, world: DigitWorld, seed: int) -> None:
    """Tuples as parquet (each distinct file once, through the dictionary), and one image and clip as files."""
    for part, rows in (("train", KEPT_ROWS), ("test", TEST_ROWS)):
        tuples = digit_tuples(world, part, rows, seed)
        tuples.to_parquet(out / f"{part}.parquet", batch_size=rows, dictionary_pagesize_limit=2**26)
    image = np.flatnonzero(world.image_is_test & (world.image_digits == 4))[0]
    clip = np.flatnonzero(world.clip_is_test & (world.clip_digits == 3))[0]
    Image.fromarray(world.images[image]).save(out / "four.png")
    (out / "three.wav").write_bytes(world.clips[clip])


def described(test: Any) -> dict[str, list]:
    """The columns that say what a tuple is."""
    return {name: test[name][:] for name in ("text", "image_digit", "audio_digit", "voice", "image_id", "clip_id")}
