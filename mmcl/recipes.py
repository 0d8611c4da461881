"""Recipes: TOML files that say how to train, or how to build an index. Read once, checked, then plain arguments.

Relative paths in a recipe start at the recipe's own folder.
"""

import os
import tomllib
from pathlib import Path
from typing import Any, TypeVar

from pydantic import Field

from mmcl.settings import Settings, checked
from mmcl.training_settings import FitSettings, PretrainSettings

Recipe = TypeVar("Recipe", bound="RecipeFile")


class DataTable(Settings):
    """[data]: where the rows come from."""

    source: str
    """A file (parquet, csv, tsv, json, jsonl, arrow, webdataset tar), a folder, or a hub id. Paths of pictures and
    sounds inside a file start at the folder the command runs in."""
    split: str | None = None
    """Of a source with several."""
    streaming: bool = False
    """Read on the fly; training then needs train.steps."""
    columns: dict[str, str] = Field(default_factory=dict)
    """{modality: column}; default: columns named as the modalities."""
    groups: dict[str, str] = Field(default_factory=dict)
    """{modality: "equal" or a column}: rows that share the value are one answer."""
    validation: str | None = None
    """A second source of the same columns."""
    validation_split: str | None = None
    """Of the validation source, or of `source` where `validation` is left out."""


class RecipeFile(Settings):
    """What all recipes share."""


class TrainRecipe(RecipeFile):
    """How `mmcl train` builds and trains a model."""

    data: DataTable
    """Where the rows come from."""
    score: dict[str, Any]
    """name (see `mmcl list scores`), dim, and its options such as temperature, tied, neutral."""
    encoders: dict[str, dict[str, Any]]
    """A table a modality, [encoders.image]: name (see `mmcl list encoders`) and its options."""
    train: FitSettings = FitSettings()
    """Training settings."""
    out: str
    """Folder of checkpoints, history and the trained model (out/model)."""


class MethodData(Settings):
    """[data] of a method: one column of pictures or sounds."""

    source: str
    """As in other recipes: a file, a folder, or a hub id."""
    split: str | None = None
    """Of a source with several."""
    column: str
    """Of the pictures; for cpc of the sounds."""
    labels: str | None = None
    """A column of labels for sup_con; missing ones, or -1, are unknown."""


class MethodRecipe(RecipeFile):
    """How `mmcl train` trains one encoder by a contrastive method (a recipe with the key `method`)."""

    method: str
    """Such as simclr, moco, byol, swav, cpc; see `mmcl list methods`."""
    options: dict[str, Any] = Field(default_factory=dict)
    """Of the method, such as dim, temperature, queue, momentum."""
    data: MethodData
    """Where the pictures or sounds come from."""
    views: dict[str, Any] = Field(default_factory=dict)
    """Of pictures: size, crop, colour, flip, blur, small_crops; of sounds: sampling_rate, seconds, gain."""
    encoder: dict[str, Any] = Field(default_factory=dict)
    """Of pictures: name, a classifier of torchvision (resnet18); of sounds: width, strides."""
    train: PretrainSettings = PretrainSettings()
    """Training settings."""
    out: str
    """Folder of checkpoints, history and the encoder (out/model/encoder.safetensors)."""


class IndexRecipe(RecipeFile):
    """How `mmcl index build` makes an index of tuples."""

    model: str | None = None
    """Folder of a trained model; or give `score`."""
    score: str | None = None
    """A score.safetensors, where the embeddings come from elsewhere."""
    embeddings: str
    """Folder of embedding shards (`mmcl embed`)."""
    modalities: list[str] | None = None
    """Those fused into the items; the others ask. Default: all that the folder holds."""
    factory: str = "auto"
    """A FAISS factory string, "Exact", or "auto"."""
    memory_budget: str | int | None = None
    """Bytes that "auto" may take in memory, such as "64MB" or "2GiB"; default: no limit."""
    recall_target: float = Field(default=0.95, gt=0, le=1)
    """Share of the true best 10 that "auto" aims at."""
    bank: int | None = Field(default=None, ge=1)
    """Rank by log p(query | item) / p(query), against so many random queries from the embeddings' other modalities."""
    device: str = "cpu"
    """"cpu", "cuda", "cuda:N", "cuda:all" or "auto"."""
    backend: str = "faiss"
    """"faiss", or "milvus" with `uri`."""
    uri: str | None = None
    """Of Milvus: a path that ends in .db (Milvus Lite), or http://host:port. A token is read from MILVUS_TOKEN."""
    collection: str = "mmcl"
    """Of Milvus."""
    ids: str | None = None
    """A metadata column of unique ids, such as "key"; default: 0, 1, 2 ..."""
    out: str | None = None
    """Folder of the index; default: built/NAME beside the recipe."""


RECIPES: dict[str, type[RecipeFile]] = {"train": TrainRecipe, "method": MethodRecipe, "index": IndexRecipe}
"""What `mmcl list recipes` shows."""


def read_recipe(path: str | Path, kind: type[Recipe]) -> Recipe:
    """The checked recipe at `path`.

    Raises: FileNotFoundError; ValueError for broken TOML, a missing key, a value out of range, or an unknown key, with
        the known ones.
    """
    return checked(kind, read_toml(path), str(path))


def names_method(path: str | Path) -> bool:
    """Whether a recipe for `mmcl train` is that of a method, by its key."""
    return "method" in read_toml(path)


def read_toml(path: str | Path) -> dict[str, Any]:
    """What a TOML file says. FileNotFoundError; ValueError for broken TOML."""
    path = Path(path)
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise FileNotFoundError(f"no recipe at {path}") from None
    except UnicodeDecodeError:
        raise ValueError(f"{path} is no TOML file") from None
    except tomllib.TOMLDecodeError as error:
        raise ValueError(f"{path}: {error}") from None


def beside(recipe: str | Path, path: str) -> str:
    """`path` as the recipe means it: relative ones start at its folder."""
    return os.path.normpath(Path(recipe).parent / path)


def source_beside(recipe: str | Path, source: str) -> str:
    """A data source: a path beside the recipe where there is one, else as it stands (a hub id, an absolute path)."""
    parent = Path(recipe).parent
    pattern = Path(source)
    if pattern.is_absolute():
        return source
    return beside(recipe, source) if any(parent.glob(source)) or pattern.suffix else source
