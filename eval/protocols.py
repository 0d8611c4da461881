"""What `zero_shot.py` and `retrieval.py` share: recipes, embeddings of a dataset, the models of the demo, results.

A recipe is one TOML file. Its common part:

    name = "mine"                       # of the dataset, in the results
    model = "runs/mine/model"           # a folder that save_pretrained wrote, or a hub id
    [data]
    source = "test.parquet"             # whatever `mmcl train` reads
    split = "test"                      # of a source with several
    columns = { image = "photo" }       # default: columns named as the modalities

Relative paths start at the recipe's own folder.
"""

import argparse
import json
import os
import platform
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import combinations
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
from pydantic import Field
from torch import Tensor

from mmcl.batching import BatchMaker
from mmcl.cli.common import quiet_libraries
from mmcl.data import as_names, column_rows, group_ids, load_data, named_labels, refuse_missing_column, undecoded
from mmcl.model import MultimodalModel
from mmcl.modes import evaluating
from mmcl.recipes import RecipeFile, read_recipe, source_beside
from mmcl.settings import Settings

RESULTS = Path(__file__).parent / "results"
BATCH = 256
DEMO_ROWS = 2_000
DEMO_SCORES = ("hadamard", "tied_hadamard", "sum_of_pairs")
QUICK_SCORES = ("hadamard", "sum_of_pairs")

Recipe = TypeVar("Recipe", bound="ProtocolRecipe")


class DataTable(Settings):
    """[data]: the rows that are judged."""

    source: str
    """A file (parquet, csv, tsv, json, jsonl, arrow, webdataset tar), a folder, or a hub id."""
    split: str | None = None
    """Of a source with several."""
    columns: dict[str, str] = Field(default_factory=dict)
    """{modality: column}; default: columns named as the modalities."""


class ProtocolRecipe(RecipeFile):
    """What the recipes of both protocols have."""

    name: str
    """Of the dataset, in the results."""
    model: str
    """Folder of a trained model, or its hub id."""


@dataclass(frozen=True)
class Subject:
    """A model under test and what the results call it."""

    name: str
    source: str
    """Where its weights come from."""
    model: MultimodalModel


@dataclass(frozen=True)
class Rows:
    """A dataset through a model. Every distinct raw value was encoded once.

    vectors: {modality: (u, d) unit rows of its distinct values}; ids: {modality: (n,) which of them each row has}.
    """

    dataset: Any
    columns: dict[str, str]
    vectors: dict[str, Tensor]
    ids: dict[str, np.ndarray]

    def __len__(self) -> int:
        return len(next(iter(self.ids.values())))

    def embeddings(self, names: Iterable[str]) -> dict[str, Tensor]:
        """{modality: (n, d)}, a vector a row."""
        return {name: self.vectors[name][torch.from_numpy(self.ids[name])] for name in names}


def embedded(model: MultimodalModel, dataset: Any, columns: Mapping[str, str] | None, names: Sequence[str]) -> Rows:
    """The dataset's rows through the model's encoders of these modalities, in evaluation mode.

    Raises: KeyError for a column that is not there; ValueError naming modality and row for a value that cannot be used,
        and for a dataset without rows.
    """
    maker = BatchMaker(model, dataset, columns, modalities=names)
    if not maker.count:
        raise ValueError("the data have no rows, or come as a stream that cannot be counted")
    seen: dict[str, dict[int, int]] = {name: {} for name in names}
    ids: dict[str, list[int]] = {name: [] for name in names}
    parts: dict[str, list[Tensor]] = {name: [] for name in names}
    with evaluating(model):
        for rows, values in column_rows(maker.dataset.select_columns(sorted(set(maker.columns.values()))), BATCH):
            for name, column in maker.columns.items():
                known, fresh = seen[name], []
                for place, value in enumerate(group_ids(values[column]).tolist()):
                    if value not in known:
                        known[value] = len(known)
                        fresh.append(place)
                    ids[name].append(known[value])
                if fresh:
                    new = maker.prepare(name, [values[column][at] for at in fresh], [rows[at] for at in fresh])
                    parts[name].append(model.encode({name: new})[name].float().cpu())
    vectors = {name: torch.cat(part) for name, part in parts.items()}
    return Rows(maker.dataset, maker.columns, vectors, {name: np.array(row) for name, row in ids.items()})


def column_values(dataset: Any, column: str, what: str) -> list:
    """The values of a column, of labels their class names; KeyError where there is none, ValueError for a gap."""
    refuse_missing_column(dataset, column, what)
    values = list(as_names(undecoded(dataset)[column][:], named_labels(dataset, column)))
    if None in values:
        raise ValueError(f"{what} (column {column!r}): row {values.index(None)} is missing (None)")
    return values


def subsets(names: Sequence[str]) -> list[tuple[str, ...]]:
    """All of them that are not empty, the largest first."""
    return [part for size in range(len(names), 0, -1) for part in combinations(names, size)]


def joined(names: Iterable[str]) -> str:
    """A subset as the results call it."""
    return "+".join(names)


class DemoData:
    """Handwritten digit x spoken digit -> word of the sum: a model a score, and rows that training never met.

    The test rows have the images and the voices that `mmcl demo` holds out. For validation a third of the other images
    is held out too, and half of the clips of those voices; so no image and no clip stands in both.
    """

    def __init__(self, seed: int, rows: int = DEMO_ROWS):
        from mmcl.synthetic.digits import digit_tuples, digit_world

        world, generator = digit_world(seed), np.random.default_rng([seed, 1])
        images = share_of_each(world.image_digits, ~world.image_is_test, 1 / 3, generator)
        clips = share_of_each(world.clip_digits, world.clip_is_test, 1 / 2, generator)
        self.seed, self.training = seed, replace(world, image_is_test=world.image_is_test | images)
        parts = {
            "test": replace(world, clip_is_test=world.clip_is_test & ~clips),
            "validation": replace(world, image_is_test=images, clip_is_test=clips),
        }
        self.test, self.validation = (digit_tuples(part, "test", rows, seed) for part in parts.values())

    def subjects(self, names: Iterable[str]) -> Iterator[Subject]:
        """Each score's model, trained as in `mmcl demo`."""
        from mmcl.demo import train_and_test

        torch.set_num_threads(1)  # of matrices this small two threads gain little, and lose much beside other work
        for name in names:
            trained = train_and_test(self.training, name, self.seed, "sum", progress=False)
            yield Subject(name, f"trained here, seed {self.seed}", trained.model)


def share_of_each(labels: np.ndarray, among: np.ndarray, share: float, generator: np.random.Generator) -> np.ndarray:
    """(n,) bool: of each label's rows that are True in `among`, so many at random."""
    chosen = np.zeros(len(labels), bool)
    for label in np.unique(labels):
        rows = generator.permutation(np.flatnonzero(among & (labels == label)))
        chosen[rows[: round(share * len(rows))]] = True
    return chosen


def opened(path: str, kind: type[Recipe]) -> tuple[Recipe, Subject]:
    """A recipe and the model that it names."""
    recipe = read_recipe(path, kind)
    source = source_beside(path, recipe.model)
    return recipe, Subject(Path(source).name, source, MultimodalModel.from_pretrained(source))


def data_of(path: str, source: str, split: str | None) -> Any:
    """The dataset that a recipe means."""
    return load_data(source_beside(path, source), split)


def command_line(about: str | None, quick: str) -> argparse.ArgumentParser:
    """The options that protocols share; quick: what --quick does."""
    parser = argparse.ArgumentParser(description=about, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help=quick)
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder of the results")
    return parser


def told(missed: Sequence[str]) -> bool:
    """Prints what did not come out as expected; whether all did."""
    print("\n".join(f"not as expected: {each}" for each in missed) or "as expected")
    return not missed


def machine() -> str:
    return f"{platform.machine()}, {os.cpu_count()} cores, torch {torch.__version__}"


def rounded(value: Any) -> Any:
    """Numbers to 6 places, all the way down; what is not finite becomes null, as JSON has no word for it."""
    if isinstance(value, Mapping):
        return {key: rounded(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [rounded(each) for each in value]
    if isinstance(value, float | np.floating):
        return round(float(value), 6) if np.isfinite(value) else None
    return value


def write_results(out: Path, name: str, summary: dict[str, Any]) -> None:
    """out/NAME.json: the summary, a line a result, with the command that made it."""
    out.mkdir(parents=True, exist_ok=True)
    command = "python " + " ".join([f"eval/{name}.py", *sys.argv[1:]])
    head = {"command": command, "machine": machine(), **{k: v for k, v in summary.items() if k != "results"}}
    lines = ",\n".join("    " + json.dumps(rounded(each), ensure_ascii=False) for each in summary["results"])
    text = json.dumps(rounded(head), indent=2, ensure_ascii=False)[:-2] + f',\n  "results": [\n{lines}\n  ]\n}}\n'
    (out / f"{name}.json").write_text(text, encoding="utf-8")


def ended(run: Callable[[], bool]) -> int:
    """Exit code: 0 where what was expected came out, 1 where it did not, 2 for a fault of the input, in one line."""
    quiet_libraries()
    try:
        return 0 if run() else 1
    except (ValueError, KeyError, TypeError, OSError, ImportError) as error:
        if os.environ.get("MMCL_DEBUG"):
            raise
        message = error.args[0] if isinstance(error, KeyError) and error.args else error
        print(f"Error: {message}", file=sys.stderr)
        return 2
