"""All methods on one set of pictures: what their features are worth with ten labels a class.

    python eval/self_supervised.py                          # digits of scikit-learn: methods, collapse, architectures
    python eval/self_supervised.py --quick                  # SimCLR, BYOL and what collapses without negatives, 90 s
    python eval/self_supervised.py --dataset cifar10 --split train --test-split test --image img --label label

Protocol. Encoders train on the training pictures without labels (SupCon is shown the ten a class of the first draw).
Frozen features h of the encoder, and z of the head, are judged by a linear probe (`mmcl.metrics.linear_probe`, C chosen
on folds of the labelled rows) and weighted nearest neighbours (`weighted_knn`), fitted to ten labelled training rows a
class, on the test pictures; the mean over ten draws of those labels. Widths, epochs, batch and protocol stand with each
result. Three parts:

    methods        one encoder, one recipe of augmentations, each method as in `METHOD_OPTIONS`
    collapse       without negatives, without stop-gradient, without predictor: same-class similarity and rank
    architectures  SimCLR with MLP, ViT and ResNet-18 under all augmentations, crops alone, all but crops

Writes results/self_supervised.json and .png; the exit code says whether what is expected came out.
"""

import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from latent_training import on_all_cores
from protocols import command_line, ended, told, write_results
from self_supervised_models import ENCODERS, WITHOUT
from torch import Tensor, nn

from mmcl.data import load_data, named_labels, undecoded
from mmcl.methods import METHODS, REGIMES, ImageSource, Method, RandomViews, TensorSource, features, pretrain
from mmcl.methods.base import unit
from mmcl.metrics import alignment, effective_rank, linear_probe, same_class_similarity, uniformity, weighted_knn

DRAWS, A_CLASS = 10, 10
METHOD_OPTIONS: dict[str, dict[str, Any]] = {
    "simclr": {"epochs": 60, "dim": 16},
    "memory_bank": {"epochs": 60, "dim": 16},
    "moco": {"epochs": 60, "dim": 16, "queue": 1024, "momentum": 0.99, "temperature": 0.2},
    "byol": {"epochs": 120, "dim": 32, "momentum": 0.95},
    "simsiam": {"epochs": 120, "dim": 128},
    "barlow_twins": {"epochs": 100, "dim": 256},
    "deep_cluster": {"epochs": 40, "clusters": 30, "every": 4, "batch_size": 64, "lr": 1e-3},
    "swav": {"epochs": 60, "dim": 16},
    "sup_con": {"epochs": 60, "dim": 16},
    "triplet": {"epochs": 60, "dim": 16},
}
QUICK = ("simclr", "byol")
ARCHITECTURE_EPOCHS = {"mlp": 60, "vit": 60, "resnet18": 12}
FIT = ("epochs", "batch_size", "lr", "weight_decay")


@dataclass(frozen=True)
class Pictures:
    """Images (n, c, h, w) in [0, 1] and labels, for training and for the test."""

    name: str
    train: Tensor
    train_labels: np.ndarray
    test: Tensor
    test_labels: np.ndarray

    def draw(self, number: int) -> np.ndarray:
        """Ten labelled training rows a class."""
        generator = np.random.default_rng([17, number])
        classes = np.unique(self.train_labels)
        chosen = [generator.permutation(np.flatnonzero(self.train_labels == each))[:A_CLASS] for each in classes]
        return np.concatenate(chosen)


def digits() -> Pictures:
    """scikit-learn's: 1,297 to train on, 500 to judge."""
    from sklearn.datasets import load_digits

    images, labels = load_digits(return_X_y=True)
    order = np.random.default_rng(0).permutation(len(images))
    tensor = torch.tensor(images / 16.0, dtype=torch.float32).view(-1, 1, 8, 8)
    train, test = order[:1_297], order[1_297:]
    return Pictures("digits", tensor[train], labels[train], tensor[test], labels[test])


def from_dataset(source: str, split: str | None, test_split: str | None, image: str, label: str, size: int) -> Pictures:
    """Any dataset of pictures with a label column, resized to size x size."""
    parts = []
    for which in (split, test_split):
        rows = load_data(source, which)
        pictures = ImageSource(rows, image, size=size)
        tensor = torch.cat([pictures.inputs(range(at, min(at + 256, len(rows)))) for at in range(0, len(rows), 256)])
        values = undecoded(rows)[label][:]
        names = named_labels(rows, label)
        parts.append((tensor / 2 + 0.5, np.array([names[v] for v in values] if names else values)))
    return Pictures(source, *parts[0], *parts[1])


def judged(method: Method, pictures: Pictures) -> dict[str, Any]:
    """Probe and neighbours of h and z, and how they lie on the sphere."""
    spaces: dict[str, Callable[[Tensor], Tensor]] = {"h": nn.Identity()}
    if hasattr(method, "head"):
        spaces["z"] = method.head
    rows: dict[str, Any] = {}
    h = {part: features(method, TensorSource(getattr(pictures, part), nn.Identity())) for part in ("train", "test")}
    for name, project in spaces.items():
        with torch.no_grad():
            train, test = project(h["train"]), project(h["test"])
        probes, neighbours = [], []
        for number in range(DRAWS):
            chosen = pictures.draw(number)
            known = (train[chosen], pictures.train_labels[chosen], test, pictures.test_labels)
            probes.append(linear_probe(*known))
            neighbours.append(weighted_knn(*known))
        rows |= {f"probe_{name}": float(np.mean(probes)), f"knn_{name}": float(np.mean(neighbours))}
        rows[f"probe_{name}_std"] = float(np.std(probes))
    last = unit(test)
    numbers = np.unique(pictures.test_labels, return_inverse=True)[1]
    rows |= {"uniformity": uniformity(last), "effective_rank": effective_rank(last)}
    return rows | {"same_class_similarity": same_class_similarity(last, torch.from_numpy(numbers))}


@dataclass(frozen=True)
class Task:
    """One training run."""

    part: str
    method: str
    pictures: Pictures
    architecture: str = "cnn"
    regime: str = "all"
    without: str | None = None
    options: tuple[tuple[str, Any], ...] = ()


def run(task: Task) -> dict[str, Any]:
    """One row of the results."""
    pictures, options = task.pictures, dict(task.options)
    shape = tuple(pictures.train.shape[1:])
    settings = {"batch_size": 256, "lr": 2e-3, "epochs": 60} | {k: options.pop(k) for k in FIT if k in options}
    torch.manual_seed(0)
    encoder, width = ENCODERS[task.architecture](shape)
    if task.method in ("memory_bank", "deep_cluster"):
        options["size"] = len(pictures.train)
    kind = WITHOUT[task.without] if task.without else METHODS[task.method]
    method = kind(encoder, width, **options)
    labels = np.full(len(pictures.train), -1)
    classes = np.unique(pictures.train_labels)
    chosen = pictures.draw(0)
    labels[chosen] = np.searchsorted(classes, pictures.train_labels[chosen])
    augment = RandomViews(**REGIMES[task.regime])
    started = time.perf_counter()
    result = pretrain(method, TensorSource(pictures.train, augment), labels, progress=False, **settings)
    seconds = time.perf_counter() - started
    torch.manual_seed(1)
    with torch.no_grad():
        a, b = (unit(method.encoder(augment(pictures.test))) for _ in range(2))
    about = {"part": task.part, "method": task.method, "without": task.without, "architecture": task.architecture}
    about |= {"augmentations": task.regime, "width": width, **settings, "options": options}
    return {
        **about,
        "protocol": f"{A_CLASS} labels a class, {DRAWS} draws",
        "loss": float(result.history[-1]["loss"]),
        "alignment": alignment(a, b),
        **judged(method, pictures),
        "seconds": round(seconds, 1),
    }


def baseline(pictures: Pictures) -> list[dict[str, Any]]:
    """Raw pixels, and the encoder as it was drawn."""
    torch.manual_seed(0)
    encoder, width = ENCODERS["cnn"](tuple(pictures.train.shape[1:]))
    rows = []
    for name, module, size in (("pixels", nn.Flatten(), pictures.train[0].numel()), ("random encoder", encoder, width)):
        holder = Method(nn.Sequential(module, nn.Linear(size, size)), size)
        holder.encoder = module
        holder.register_parameter("anchor", nn.Parameter(torch.zeros(1)))
        rows.append({"part": "baseline", "method": name, "width": size, **judged(holder, pictures)})
    return rows


def tasks(pictures: Pictures, quick: bool) -> list[Task]:
    """The long ones first, so that no core waits at the end."""

    def options(name: str) -> tuple[tuple[str, Any], ...]:
        return tuple(METHOD_OPTIONS[name].items())

    methods = [Task("methods", name, pictures, options=options(name)) for name in METHOD_OPTIONS]
    collapse = [
        Task("collapse", name, pictures, without=without, options=options(name))
        for name, without in (("simclr", "negatives"), ("simsiam", "stop_gradient"), ("byol", "predictor"))
    ]
    if quick:
        return [task for task in methods if task.method in QUICK] + collapse[:1]
    tables = [
        Task("architectures", "simclr", pictures, name, regime, options=(("epochs", epochs),))
        for name, epochs in reversed(ARCHITECTURE_EPOCHS.items())
        for regime in REGIMES
    ]
    return tables + methods + collapse


def failures(rows: list[dict[str, Any]], name: str) -> list[str]:
    """What did not come out as expected on digits; of other data nothing is expected."""
    if name != "digits":
        return []
    methods = {row["method"]: row for row in rows if row["part"] == "methods"}
    found = [f"{each}: probe {methods[each]['probe_h']:.3f} < .95" for each in QUICK if methods[each]["probe_h"] < 0.95]
    good = [each for each, row in methods.items() if row["probe_h"] >= 0.92]
    if len(methods) == len(METHOD_OPTIONS) and len(good) < 8:
        found.append(f"only {len(good)} methods reach .92: {good}")
    worse = [each for each, row in methods.items() if row.get("probe_z", 0) > row["probe_h"]]
    if 2 * len(worse) > len(methods):
        found.append(f"z is better than h in the probe of {worse}")
    found += [f"{row['method']} takes {row['seconds']} s" for row in methods.values() if row["seconds"] > 150]
    for row in (row for row in rows if row["part"] == "collapse"):
        if row["same_class_similarity"] < 0.98:  # of the whole methods: .6 to .9
            found.append(f"{row['method']} without {row['without']} does not collapse")
    return found


def gaps(rows: list[dict[str, Any]]) -> dict[str, float]:
    """Of each regime of augmentations, the best architecture's probe less the worst's."""
    table = [row for row in rows if row["part"] == "architectures"]
    each = {regime: [row["probe_h"] for row in table if row["augmentations"] == regime] for regime in REGIMES}
    return {regime: max(values) - min(values) for regime, values in each.items() if values}


def line(row: dict[str, Any]) -> str:
    what = f"{row['part']:13} {row['method']:14}" + (f" without {row['without']}" if row.get("without") else "")
    what += f" {row['architecture']}, {row['augmentations']}" if row["part"] == "architectures" else ""
    z = f"  z {row['probe_z']:.3f}" if "probe_z" in row else ""
    geometry = f"rank {row['effective_rank']:5.1f}  same class {row['same_class_similarity']:.2f}"
    return f"{what:48} probe {row['probe_h']:.3f}{z}  knn {row['knn_h']:.3f}  {geometry}  {row.get('seconds', 0)} s"


def main(arguments: list[str] | None = None) -> bool:
    parser = command_line(__doc__, "SimCLR, BYOL and one collapse")
    parser.add_argument("--dataset", help="a file, a folder or a hub id of pictures with labels; default: digits")
    parser.add_argument("--split", help="of the dataset, to train on")
    parser.add_argument("--test-split", help="of the dataset, to judge")
    parser.add_argument("--image", default="image", help="column of the pictures")
    parser.add_argument("--label", default="label", help="column of the labels")
    parser.add_argument("--size", type=int, default=32, help="pixels a side that pictures are resized to")
    o = parser.parse_args(arguments)
    pictures = from_dataset(o.dataset, o.split, o.test_split, o.image, o.label, o.size) if o.dataset else digits()
    started = time.perf_counter()
    rows = baseline(pictures)
    print("\n".join(map(line, rows)))
    rows += on_all_cores(run, tasks(pictures, o.quick), lambda row: print(line(row), flush=True))
    missed, gap = failures(rows, pictures.name), gaps(rows)
    summary = {"dataset": pictures.name, "rows": [len(pictures.train), len(pictures.test)], "gaps": gap}
    summary |= {"seconds": round(time.perf_counter() - started), "missed": missed, "results": rows}
    write_results(o.out, "self_supervised", summary)
    if not o.quick:
        from self_supervised_figures import draw

        draw(rows, o.out / "self_supervised.png")
        narrower = gap["crop"] > gap["all"] or gap["all_but_crop"] > gap["all"]
        print(
            f"between architectures: {gap}: the gap {'grows' if narrower else 'does not grow'} with fewer augmentations"
        )
    return told(missed)


if __name__ == "__main__":
    sys.exit(ended(main))
