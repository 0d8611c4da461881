"""Encoders while they train: frozen features kept, activations made again, backbones compiled: the same weights."""

import copy

import datasets
import numpy as np
import pytest
import torch
from PIL import Image
from torch import nn

from mmcl import MultimodalModel, SumOfPairs, fit
from mmcl.encoders import Encoder, open_clip_image, open_clip_text, transformers_image, transformers_text, vectors
from mmcl.towers import checkpointable, checkpointed_towers, compiled_towers

WORDS = ["a photo of a cat", "two dog", "a dog", "photo of two", "cat", "dog of cat", "two photo", "a a a"]


class Counting(nn.Module):
    """A backbone that tells how many rows it saw."""

    def __init__(self):
        super().__init__()
        self.layer, self.rows = nn.Linear(5, 6), []

    def forward(self, inputs):
        self.rows.append(len(inputs))
        return self.layer(inputs).tanh()


def partly_frozen():
    torch.manual_seed(0)
    frozen = Encoder(Counting(), 6, dim=4, frozen=True)
    return MultimodalModel({"image": frozen, "text": vectors(5, 4)}, SumOfPairs(("image", "text"), 4))


@pytest.fixture(scope="module")
def numbers():
    rows = np.random.default_rng(0).normal(size=(2, 300, 5))
    return datasets.Dataset.from_dict({"photo": rows[0].tolist(), "text": rows[1].tolist()})


def train(model, data, **options):
    options = {"steps": 5, "batch_size": 8, "lr": 1e-2, "progress": False, **options}
    fit(model, data, **options)
    return model.state_dict()


def same(ours, theirs, **tolerance):
    for name, value in theirs.items():
        torch.testing.assert_close(ours[name], value, **{"rtol": 1e-5, "atol": 1e-6, **tolerance}, msg=name)


@pytest.mark.parametrize("chunk_size", [None, 3])
def test_frozen_backbones_run_once_over_all_rows(numbers, chunk_size):
    models, columns = [partly_frozen() for _ in range(2)], {"image": "photo"}
    plain = train(models[0], numbers, columns=columns)
    kept = train(models[1], numbers, columns=columns, cache_features=True, chunk_size=chunk_size)
    same(kept, plain)
    assert models[0].encoders["image"].backbone.rows == [8] * 5
    assert models[1].encoders["image"].backbone.rows == [256, 44]


def test_features_are_kept_of_what_stays_as_it_is(numbers):
    learning = MultimodalModel({name: vectors(5, 4) for name in ("photo", "text")}, SumOfPairs(("photo", "text"), 4))
    with pytest.raises(ValueError, match=r"cache_features: none of the encoders of \['photo', 'text'\] is frozen"):
        train(learning, numbers, cache_features=True)
    columns = {"image": "photo"}
    with pytest.raises(ValueError, match="no stream, and no transform"):
        train(partly_frozen(), numbers.to_iterable_dataset(), columns=columns, cache_features=True)
    with pytest.raises(ValueError, match="no stream, and no transform"):
        train(partly_frozen(), numbers.with_transform(dict), columns=columns, cache_features=True)
    broken = numbers.select(range(3)).add_item({"photo": [float("nan")] * 4, "text": [0.0] * 5})
    with pytest.raises(Exception, match="image"):
        train(partly_frozen(), broken, columns=columns, batch_size=2, cache_features=True)


@pytest.fixture
def pictures():
    pixels = np.random.default_rng(0).integers(0, 256, (8, 32, 32, 3), dtype=np.uint8)
    rows = {"image": [Image.fromarray(each) for each in pixels], "text": WORDS}
    return datasets.Dataset.from_dict(rows)


@pytest.mark.parametrize("library", ["transformers", "open_clip"])
def test_activations_made_again_change_nothing(library, request, pictures):
    torch.manual_seed(0)
    if library == "transformers":
        folder = str(request.getfixturevalue("clip_folder"))
        towers = {"image": transformers_image(folder, dim=16), "text": transformers_text(folder, dim=16)}
    else:
        folder = str(request.getfixturevalue("open_clip_folder"))
        towers = {"image": open_clip_image(folder, dim=16), "text": open_clip_text(folder, dim=16)}
    model = MultimodalModel(towers, SumOfPairs(("image", "text"), 16))
    other, start = copy.deepcopy(model), copy.deepcopy(model.state_dict())
    plain, again = (train(each, pictures, steps=3, checkpoint_activations=each is other) for each in (model, other))
    same(again, plain, rtol=1e-4, atol=1e-5)
    moved = [name for name in plain if "towers" in name and not torch.equal(plain[name], start[name])]
    assert len(moved) > 40, "layers inside the towers learn"


def test_it_is_switched_on_and_off_again(vit_folder):
    towers = {"image": transformers_image(str(vit_folder), dim=4), "text": vectors(5, 4)}
    model = MultimodalModel(towers, SumOfPairs(("image", "text"), 4))
    (tower,) = checkpointable(model.encoders["image"].backbone)
    layers = [part for part in tower.modules() if hasattr(part, "gradient_checkpointing")]
    with checkpointed_towers(model):
        assert layers and all(layer.gradient_checkpointing for layer in layers)
    assert not any(layer.gradient_checkpointing for layer in layers)
    with pytest.raises(
        ValueError, match=r"no encoder that learns \(\['text'\]\) is a tower of transformers or open_clip"
    ):
        train(partly_frozen(), zeros(5), columns={"image": "photo"}, checkpoint_activations=True)


def zeros(width):
    return datasets.Dataset.from_dict({"photo": [[0.5] * width] * 8, "text": [[0.5] * width] * 8})


def test_backbones_are_compiled_inside_alone(numbers, monkeypatch):
    seen = []
    monkeypatch.setattr(nn.Module, "compile", lambda module: seen.append(type(module).__name__))
    with compiled_towers(partly_frozen()):
        assert len(seen) == 2 and "Counting" in seen
    train(partly_frozen(), numbers, columns={"image": "photo"}, compile=True)
    assert len(seen) == 4


@pytest.mark.slow
def test_compiled_backbones_learn_the_same(numbers):
    from torch._inductor.cpp_builder import get_cpp_compiler

    try:
        get_cpp_compiler()
    except Exception as error:
        pytest.skip(f"torch.compile finds no C++ compiler: {error}")
    models = [partly_frozen() for _ in range(2)]
    plain, compiled = (train(m, numbers, columns={"image": "photo"}, compile=m is models[1]) for m in models)
    assert list(compiled) == list(plain)
    same(compiled, plain, rtol=1e-4, atol=1e-5)
