"""The two towers of an open_clip model, by any name that open_clip knows or any folder that it wrote."""

import json
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mmcl.decode import decode_image, decode_rows, decode_text
from mmcl.encoders.base import Encoder

CONFIG_FILE = "open_clip_config.json"


def open_clip_image(
    source: str = "ViT-B-32",
    pretrained: str | None = None,
    dim: int | None = None,
    head: str = "auto",
    frozen: bool = False,
    load_weights: bool = True,
) -> Encoder:
    """The image tower of an open_clip model, with open_clip's own preprocessing.

    Args:
        source: an architecture ("ViT-B-32"), a hub id ("laion/CLIP-ViT-B-32-laion2B-s34B-b79K"), or a folder
            with open_clip_config.json and weights.
        pretrained: with an architecture: a tag ("laion2b_s34b_b79k") or a checkpoint file. None starts at random.
        dim, head, frozen: see `Encoder`. With dim=None the embedding is open_clip's own, normalised.
        load_weights: False keeps the random start, whatever `source` holds.
    Raises: ValueError naming the first key where the weights are of another architecture.
    """
    model, _, transform = load_open_clip(source, pretrained, load_weights)
    config = {"name": "open_clip_image", "dim": dim, "head": head, "frozen": frozen}
    prepare = partial(prepare_images, transform=transform)
    save = partial(save_description, description=describe(source, model))
    return Encoder(model.visual, output_width(model), dim, prepare, head, frozen, config, save)


def open_clip_text(
    source: str = "ViT-B-32",
    pretrained: str | None = None,
    dim: int | None = None,
    head: str = "auto",
    frozen: bool = False,
    load_weights: bool = True,
) -> Encoder:
    """The text tower of an open_clip model with its tokenizer; texts are cut at its context length (CLIP: 77 tokens).

    Args and errors: as `open_clip_image`.
    """
    import open_clip

    model, name, _ = load_open_clip(source, pretrained, load_weights)
    tokenizer = open_clip.get_tokenizer(name)
    config = {"name": "open_clip_text", "dim": dim, "head": head, "frozen": frozen}
    prepare = partial(prepare_texts, tokenizer=tokenizer)
    save = partial(save_description, description=describe(source, model), tokenizer=tokenizer)
    return Encoder(model.text, output_width(model), dim, prepare, head, frozen, config, save)


def prepare_images(values: Any, transform: Any) -> Tensor:
    """Images of any kind, decoded and transformed."""
    return torch.stack(decode_rows(values, lambda value: transform(decode_image(value))))


def prepare_texts(values: Any, tokenizer: Any) -> Tensor:
    """Token ids, (n, context length)."""
    return tokenizer(decode_rows(values, decode_text))


def load_open_clip(source: str, pretrained: str | None, load_weights: bool) -> tuple[Any, str, Any]:
    """(model with separate towers, its name for open_clip, evaluation transform)."""
    import open_clip
    from open_clip.transform import PreprocessCfg, image_transform_v2

    name = full_name(source)
    # a folder or hub id promises weights; an architecture without `pretrained` is a random start by choice
    promised = load_weights and (":" in name or pretrained is not None)
    try:
        with quiet(not promised):
            model = open_clip.create_model(
                name,
                pretrained=pretrained if load_weights else None,
                load_weights=load_weights,
                pretrained_text=load_weights,
                force_custom_text=True,
                require_pretrained=promised,
            )
    except (RuntimeError, AssertionError, KeyError) as error:
        raise ValueError(f"open_clip could not load {source!r}: {first_fault(error, source, pretrained)}") from error
    preprocess = PreprocessCfg(**model.visual.preprocess_cfg)
    return model, name, image_transform_v2(preprocess, is_train=False)


def full_name(source: str) -> str:
    """With the schema that open_clip tells folders and hub ids from architectures by."""
    import open_clip

    if Path(source).is_dir():
        return f"local-dir:{source}"
    known = ":" in source or source.replace("/", "-") in open_clip.list_models()
    return source if known or "/" not in source else f"hf-hub:{source}"


@contextmanager
def quiet(wanted: bool) -> Iterator[None]:
    """Without open_clip's warning of a random start, where that is what was asked for."""
    logger = logging.getLogger()
    level = logger.level
    logger.setLevel(logging.ERROR if wanted else level)
    try:
        yield
    finally:
        logger.setLevel(level)


def first_fault(error: Exception, source: str, pretrained: str | None) -> str:
    """The first key of the checkpoint that does not fit the architecture, or open_clip's own message."""
    import open_clip
    from open_clip.factory import load_state_dict

    files = sorted(Path(source).glob("open_clip_*.*[snt]")) if Path(source).is_dir() else [Path(pretrained or "")]
    files = [file for file in files if file.is_file() and file.suffix != ".json"]
    if not files:
        return str(error)
    name = full_name(source)
    with quiet(True):
        wanted = open_clip.create_model(name, load_weights=False, pretrained_text=False).state_dict()
    held = load_state_dict(str(files[0]))
    for key, value in wanted.items():
        if key not in held:
            return f"the weights are of another architecture; first key that does not fit: {key!r} is missing"
        if held[key].shape != value.shape:
            shapes = f"{tuple(held[key].shape)} in the file, {tuple(value.shape)} in the architecture"
            return f"the weights are of another architecture; first key that does not fit: {key!r}, {shapes}"
    return str(error)


def output_width(model: Any) -> int:
    """Width of the shared embedding: the text tower's, which every open_clip model states or projects to."""
    return int(model.text.output_dim)


def describe(source: str, model: Any) -> dict[str, Any]:
    """What open_clip needs to build this architecture again, without the hub."""
    import open_clip
    from huggingface_hub import hf_hub_download

    if Path(source).is_dir():
        description = json.loads((Path(source) / CONFIG_FILE).read_text(encoding="utf-8"))
    elif full_name(source).startswith("hf-hub:"):
        path = hf_hub_download(full_name(source).removeprefix("hf-hub:"), CONFIG_FILE)
        description = json.loads(Path(path).read_text(encoding="utf-8"))
    else:
        description = {"model_cfg": open_clip.get_model_config(source.replace("/", "-"))}
    return {"model_cfg": description["model_cfg"], "preprocess_cfg": dict(model.visual.preprocess_cfg)}


def save_description(folder: Path, description: dict[str, Any], tokenizer: Any = None) -> None:
    """Write the architecture, and a Hugging Face tokenizer's files where one is used."""
    (folder / CONFIG_FILE).write_text(json.dumps(description, indent=2), encoding="utf-8")
    save = getattr(getattr(tokenizer, "tokenizer", None), "save_pretrained", None)
    if save is not None:
        save(folder)
