"""Zero-shot classification from every subset of the other modalities, with calibration and prompt ensembles.

    python eval/zero_shot.py                       # the demo's digits; writes zero_shot.json, .png into eval/results
    python eval/zero_shot.py --quick --out figures
    python eval/zero_shot.py recipe.toml --out figures

A recipe (see `protocols.py` for the common part):

    target = "text"                     # the modality that the classes stand for
    label = "kind"                      # column of each row's class; default: the target's column
    classes = ["cat", "dog"]            # default: all labels there are; { label = "name in prompts" } works too
    templates = ["a photo of a {}"]     # or examples = 8: that many of a class's validation rows stand for it
    bins = 15                           # of the calibration error
    [validation]                        # as [data]: where the temperature is fitted, and examples are taken
    source = "validation.parquet"

On the demo's data there are two tasks: words of the sum as the classes, guessed from the image, the sound, or both; and
spoken digits as the classes, each given by 8 clips, guessed from image and word. All images and clips were held out of
training, and test and validation rows have none in common. Results are CLIP_benchmark's, a record a model and subset.
"""

import argparse
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from protocol_figures import draw_calibration, draw_confusion
from protocols import (
    DEMO_SCORES,
    QUICK_SCORES,
    RESULTS,
    DemoData,
    Rows,
    Subject,
    ended,
    joined,
    opened,
    subsets,
    write_results,
)
from scipy.special import softmax
from sklearn.metrics import confusion_matrix
from zero_shot_task import Task, ZeroShotRecipe, demo_tasks, task_of

from mmcl.arrays import as_numpy
from mmcl.metrics import expected_calibration_error, fit_temperature, log_loss_of_scores, reliability
from mmcl.metrics.calibration import TEMPERATURES
from mmcl.zero_shot import ZeroShotClassifier

MOST_LISTED = 50
"""Classes up to which the whole confusion matrix goes into the results."""
EXPECTED = {
    "hadamard and tied, text from image+audio: acc1 at least": 0.96,
    "hadamard and tied, audio from image+text: acc1 at least": 0.95,
    "hadamard and tied, both: ece_with_temperature (or, without one, ece) at most": 0.02,
    "sum_of_pairs, every subset: acc1 at most": 0.17,
}


def protocol(subject: Subject, task: Task) -> list[dict[str, Any]]:
    """A record a subset of the modalities other than the target, the largest first."""
    classifier = ZeroShotClassifier(subject.model, task.prompts, target=task.target)
    records = []
    for query in subsets([name for name in subject.model.modalities if name != task.target]):
        record = {
            "dataset": task.dataset,
            "model": subject.name,
            "pretrained": subject.source,
            "task": "zeroshot_classification",
            "target": task.target,
            "query": list(query),
        }
        try:
            scores = scores_of(classifier, task.rows, query)
        except KeyError as error:  # a score that cannot do without a modality says so
            records.append({**record, "metrics": None, "not_possible": error.args[0]})
            continue
        validation = None if task.validation is None else scores_of(classifier, task.validation, query)
        record |= judged(scores, task, validation)
        records.append(record)
    possible = [record for record in records if record["metrics"] is not None]
    if possible:
        possible[0]["prompts"] |= each_alone(subject, task, tuple(possible[0]["query"]))
    return records


def scores_of(classifier: ZeroShotClassifier, rows: Rows, query: Sequence[str]) -> np.ndarray:
    """(n, classes)."""
    return as_numpy(classifier.scores(rows.embeddings(query), encoded=True)).astype(np.float64)


def judged(scores: np.ndarray, task: Task, validation: np.ndarray | None) -> dict[str, Any]:
    """Everything that is told from the scores of one subset."""
    labels, names = task.labels, list(task.prompts)
    confusion = confusion_matrix(labels, scores.argmax(axis=1), labels=range(len(names)))
    recalls = class_recalls(confusion)
    calibration = calibrated(scores, labels, validation, task.validation_labels, task.bins)
    metrics = {
        "acc1": top_k_accuracy(scores, labels, 1),
        "acc5": top_k_accuracy(scores, labels, 5) if len(names) >= 5 else None,
        "mean_per_class_recall": float(np.nanmean(recalls)),
        **{key: calibration.pop(key) for key in list(calibration) if key.startswith(("ece", "log_loss"))},
    }
    record = {
        "metrics": metrics,
        "rows": len(labels),
        "classes": names if len(names) <= MOST_LISTED else len(names),
        "per_class_accuracy": dict(zip(names, recalls.tolist(), strict=True)),
        "most_confused": most_confused(confusion, names),
        "calibration": calibration,
        "prompts": {"per_class": len(next(iter(task.prompts.values())))},
    }
    return record | ({"confusion": confusion.tolist()} if len(names) <= MOST_LISTED else {})


def top_k_accuracy(scores: np.ndarray, labels: np.ndarray, k: int) -> float:
    """Share of rows whose class is among the first k; of equal scores the class listed first wins, as in `predict`."""
    first = np.argsort(-scores, axis=1, kind="stable")[:, :k]
    return float((first == labels[:, None]).any(axis=1).mean())


def class_recalls(confusion: np.ndarray) -> np.ndarray:
    """Share of each class's rows that are found; NaN for a class without rows."""
    counts = confusion.sum(axis=1)
    return confusion.diagonal() / np.where(counts > 0, counts, np.nan)


def most_confused(confusion: np.ndarray, names: Sequence[str], most: int = 10) -> list[dict[str, Any]]:
    """The most frequent pairs of a class and another that was predicted for it."""
    wrong = confusion - np.diag(confusion.diagonal())
    first = np.argsort(-wrong, axis=None, kind="stable")[:most]
    pairs = [(int(at) // len(names), int(at) % len(names)) for at in first if wrong.flat[at]]
    return [{"class": names[i], "predicted": names[j], "rows": int(wrong[i, j])} for i, j in pairs]


def calibrated(
    scores: np.ndarray,
    labels: np.ndarray,
    validation: np.ndarray | None,
    validation_labels: np.ndarray | None,
    bins: int,
) -> dict[str, Any]:
    """Calibration error and log loss as the scores are, and with the temperature that is best for validation rows."""
    found: dict[str, Any] = {"bins": bins, "temperature": None, "validation_rows": 0}
    temperatures = {"": 1.0}
    if validation is not None and validation_labels is not None:
        found["validation_rows"] = len(validation)
        best = fit_temperature(validation, validation_labels)
        if best > TEMPERATURES[0]:
            found["temperature"] = temperatures["_with_temperature"] = best
        else:
            found["no_temperature"] = "every validation row is right: the lower the temperature, the less the loss"
    for suffix, temperature in temperatures.items():
        probabilities = softmax(scores / temperature, axis=1)
        found["ece" + suffix] = expected_calibration_error(probabilities, labels, bins)
        found["log_loss" + suffix] = log_loss_of_scores(scores, labels, temperature)
        counts, confidence, accuracy = reliability(probabilities, labels, bins)
        found["reliability" + suffix] = {
            "rows": counts.tolist(),
            "confidence": confidence.tolist(),
            "accuracy": accuracy.tolist(),
        }
    return found


def each_alone(subject: Subject, task: Task, query: tuple[str, ...]) -> dict[str, Any]:
    """Accuracy of each prompt by itself, beside which the ensemble's stands."""
    count = len(next(iter(task.prompts.values())))
    if count == 1:
        return {}
    accuracies = []
    for place in range(count):
        alone = {name: [prompts[place]] for name, prompts in task.prompts.items()}
        scores = scores_of(ZeroShotClassifier(subject.model, alone, target=task.target), task.rows, query)
        accuracies.append(top_k_accuracy(scores, task.labels, 1))
    return {"acc1_of_each_alone": accuracies, "mean_acc1_alone": float(np.mean(accuracies))}


def kept(records: Sequence[dict[str, Any]]) -> list[str]:
    """What of EXPECTED the demo's records miss, in words."""
    text, audio, error, pairs = EXPECTED.items()
    misses = []
    for record in records:
        where = f"{record['model']}, {record['target']} from {joined(record['query'])}"
        found = record["metrics"]
        if record["model"] == "sum_of_pairs" and found["acc1"] > pairs[1]:
            misses.append(f"{where}: acc1 {found['acc1']:.4f}; {pairs[0]} {pairs[1]}")
        if record["model"] == "sum_of_pairs" or found is None:
            continue
        least = text if record["target"] == "text" else audio
        if found["acc1"] < least[1]:
            misses.append(f"{where}: acc1 {found['acc1']:.4f}; {least[0]} {least[1]}")
        if (left := found.get("ece_with_temperature", found["ece"])) > error[1]:
            misses.append(f"{where}: ece {left:.4f}; {error[0]} {error[1]}")
    return misses


def line(record: dict[str, Any]) -> str:
    """One record, as the run prints it."""
    where = f"{record['model']:14} {record['target']} from {joined(record['query']):12}"
    found = record["metrics"]
    if found is None:
        return f"{where} not possible: {record['not_possible'].partition(';')[0]}"
    shown = f"{where} acc1 {found['acc1']:.4f}  ece {found['ece']:.4f}"
    if record["calibration"]["temperature"] is not None:
        shown += f", {found['ece_with_temperature']:.4f} at temperature {record['calibration']['temperature']:.3f}"
    alone = record["prompts"].get("mean_acc1_alone")
    return shown + (f"  (one prompt alone: {alone:.4f})" if alone is not None else "")


def run(options: argparse.Namespace) -> bool:
    """Whether all that was expected came out; of a user's data nothing is."""
    started = time.perf_counter()
    if options.recipe is not None:
        recipe, subject = opened(options.recipe, ZeroShotRecipe)
        records = protocol(subject, task_of(recipe, options.recipe, subject))
    else:
        demo = DemoData(options.seed, 500 if options.quick else 2000)
        subjects = demo.subjects(QUICK_SCORES if options.quick else DEMO_SCORES)
        records = [
            each for subject in subjects for task in demo_tasks(demo, subject) for each in protocol(subject, task)
        ]
    for record in records:
        print(line(record))
    misses = kept(records) if options.recipe is None else []
    summary: dict[str, Any] = {"seconds": round(time.perf_counter() - started, 1)}
    summary |= {"expected": EXPECTED, "missed": misses} if options.recipe is None else {}
    write_results(options.out, "zero_shot", {**summary, "results": records})
    possible = [record for record in records if record["metrics"] is not None]
    most = sorted((each for each in possible if len(each["query"]) > 1), key=lambda each: each["target"] != "text")
    if possible:
        draw_confusion(possible if options.recipe else most).savefig(options.out / "zero_shot.png", dpi=110)
        draw_calibration(possible).savefig(options.out / "zero_shot_calibration.png", dpi=110)
    for miss in misses:
        print(f"missed: {miss}", file=sys.stderr)
    return not misses


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("recipe", nargs="?", help="TOML; default: the demo's data and models")
    parser.add_argument("--quick", action="store_true", help="of the demo: fewer rows, two of three scores")
    parser.add_argument("--seed", type=int, default=0, help="of the demo")
    parser.add_argument("--out", type=Path, default=RESULTS)
    options = parser.parse_args()
    sys.exit(ended(lambda: run(options)))


if __name__ == "__main__":
    main()
