"""Training a method on tensors, pictures and sounds: it learns, resumes to the same numbers, and says what is wrong."""

import json

import datasets
import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file
from sklearn.datasets import load_digits
from torch import nn

from mmcl.methods import (
    CPC,
    DeepCluster,
    ImageSource,
    MoCo,
    RandomViews,
    SimCLR,
    SupCon,
    TensorSource,
    features,
    pretrain,
)
from mmcl.methods.encoders import WaveEncoder, torchvision_encoder
from mmcl.methods.job import label_numbers, pretrain_job
from mmcl.methods.views import AudioSource
from mmcl.metrics import weighted_knn


def encoder():
    torch.manual_seed(0)
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 64, bias=False), nn.BatchNorm1d(64), nn.ReLU(), nn.Linear(64, 32))


def digits(count=300):
    images, labels = load_digits(return_X_y=True)
    return torch.tensor(images[:count] / 16, dtype=torch.float32).view(-1, 1, 8, 8), labels[:count]


AUGMENT = RandomViews(crop=0.2, degrees=10.0, shift=0.1, noise=0.1)


def test_features_improve():
    images, labels = digits(600)
    method = SimCLR(encoder(), 32)
    source = TensorSource(images, AUGMENT)

    def judged():
        h = features(method, source)
        return weighted_knn(h[:100], labels[:100], h[100:], labels[100:], k=5)

    before = judged()
    result = pretrain(method, source, epochs=20, batch_size=100, progress=False)
    assert result.steps == 120
    assert judged() > before + 0.05
    assert not method.training


@pytest.mark.parametrize("kind", [SimCLR, MoCo, DeepCluster])
def test_a_run_that_was_broken_off_goes_on_to_the_same_numbers(kind, tmp_path, monkeypatch):
    images, _ = digits(120)

    def make():
        options = {"size": 120, "clusters": 5, "every": 2} if kind is DeepCluster else {"dim": 8}
        return kind(encoder(), 32, **options)

    settings = {"epochs": 4, "batch_size": 40, "progress": False, "report_every": 1}
    whole = make()
    expected = pretrain(whole, TensorSource(images, AUGMENT), **settings)
    source = TensorSource(images, AUGMENT)
    views, calls = source.views, []

    def interrupted(rows):
        calls.append(rows)
        if len(calls) == 8:
            raise RuntimeError("the machine went away")
        return views(rows)

    source.views = interrupted
    with pytest.raises(RuntimeError, match="went away"):
        pretrain(make(), source, out=tmp_path / "run", checkpoint_every=3, **settings)
    again = make()
    with pytest.raises(ValueError, match="holds a run already"):
        pretrain(again, TensorSource(images, AUGMENT), out=tmp_path / "run", **settings)
    result = pretrain(again, TensorSource(images, AUGMENT), out=tmp_path / "run", resume=True, **settings)
    for key, value in whole.state_dict().items():
        torch.testing.assert_close(again.state_dict()[key], value, msg=lambda text, key=key: f"{key}: {text}")
    assert [r["loss"] for r in result.history] == pytest.approx([r["loss"] for r in expected.history], rel=1e-5)
    saved = load_file(tmp_path / "run" / "model" / "encoder.safetensors")
    torch.testing.assert_close(saved, dict(again.encoder.state_dict()))


def test_views_are_drawn_independently_for_each_row_and_view():
    same = torch.rand(1, 1, 8, 8).expand(4, 1, 8, 8)
    first, second = TensorSource(same, AUGMENT).views(range(4))
    assert not torch.allclose(first, second)
    assert not torch.allclose(first[0], first[1])
    plain = RandomViews()(same)
    torch.testing.assert_close(plain, same, atol=1e-5, rtol=0)


def test_sup_con_sees_the_labels_of_its_rows():
    images, labels = digits(200)
    known = np.where(np.arange(200) < 60, labels, -1)
    method = SupCon(encoder(), 32, dim=16)
    pretrain(method, TensorSource(images, AUGMENT), known, epochs=5, batch_size=50, progress=False)
    with pytest.raises(ValueError, match=r"labels must be \(200,\) integers"):
        pretrain(method, TensorSource(images, AUGMENT), known[:7], epochs=1, progress=False)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"epoch": 3}, "unknown key 'epoch'"),
        ({"batch_size": 500}, "300 rows, too few for batch_size 500"),
        ({"lr": -1.0}, "lr = -1.0"),
    ],
)
def test_settings_that_cannot_be_used_are_refused(settings, message):
    with pytest.raises(ValueError, match=message):
        pretrain(SimCLR(encoder(), 32), TensorSource(digits()[0], AUGMENT), progress=False, **settings)


@pytest.fixture
def pictures(tmp_path):
    images, labels = digits(40)
    rows = [Image.fromarray((image[0].numpy() * 255).astype(np.uint8)) for image in images]
    dataset = datasets.Dataset.from_dict({"photo": rows, "label": [f"d{each}" for each in labels]})
    dataset.save_to_disk(tmp_path / "pictures")
    return tmp_path


def test_pictures_of_a_dataset_through_torchvision(pictures):
    dataset = datasets.load_from_disk(str(pictures / "pictures"))
    source = ImageSource(dataset, "photo", size=16, flip=False, blur=True, small_crops=2)
    views = source.views([3, 5])
    assert [tuple(view.shape) for view in views] == [(2, 3, 16, 16)] * 2 + [(2, 3, 8, 8)] * 2
    assert not torch.allclose(views[0], views[1])
    plain = source.inputs([3, 5])
    assert plain.shape == (2, 3, 16, 16)
    assert plain.min() >= -1
    assert plain.max() <= 1
    broken = datasets.Dataset.from_dict({"photo": [b"no picture", b"neither"]})
    with pytest.raises(ValueError, match=r"'photo'.*row 1"):
        ImageSource(broken, "photo").views([1])
    with pytest.raises(KeyError, match="image"):
        ImageSource(dataset, "image")


RECIPE = """
method = "{method}"
out = "run"
[data]
source = "{source}"
column = "{column}"
{labels}
[options]
{options}
[views]
{views}
[train]
epochs = 1
batch_size = 8
{extra}
"""


def write(folder, **parts):
    blank = {"method": "simclr", "source": "pictures", "column": "photo", "labels": "", "options": "dim = 8"}
    blank |= {"views": "size = 8\nflip = false", "extra": ""}
    path = folder / "recipe.toml"
    path.write_text(RECIPE.format(**(blank | parts)))
    return path


@pytest.mark.parametrize(
    ("method", "options", "labels"),
    [("moco", "dim = 8\nqueue = 16", ""), ("memory_bank", "dim = 8", ""), ("sup_con", "dim = 8", 'labels = "label"')],
)
def test_a_recipe_trains_a_method(method, options, labels, pictures):
    recipe = write(pictures, method=method, options=options, labels=labels)
    result = pretrain_job(recipe, progress=False)
    assert result.steps == 5
    weights = load_file(pictures / "run" / "model" / "encoder.safetensors")
    assert weights["conv1.weight"].shape == (64, 3, 3, 3), "the stem for small pictures"
    assert json.loads((pictures / "run" / "history.json").read_text())[-1]["step"] == 5


@pytest.mark.parametrize(
    ("parts", "message"),
    [
        ({"method": "mocco"}, "unknown method 'mocco'.*'moco'"),
        ({"options": "tau = 1"}, r"\[options\].*tau.*temperature"),
        ({"views": "sise = 3"}, r"\[views\].*sise.*small_crops"),
        ({"column": "picture"}, "picture.*photo"),
        ({"extra": "epoch = 3"}, "unknown key 'train.epoch'"),
        ({"labels": 'labels = "name"'}, "name.*label"),
    ],
)
def test_a_recipe_that_is_wrong_names_its_key(parts, message, pictures):
    with pytest.raises((ValueError, KeyError), match=message):
        pretrain_job(write(pictures, **parts), progress=False)


def test_labels_of_any_kind_become_numbers():
    dataset = datasets.Dataset.from_dict({"a": ["x", None, "y", "x"], "b": [3, -1, 7, 3]})
    assert label_numbers(dataset, "a") == [0, -1, 1, 0]
    assert label_numbers(dataset, "b") == [0, -1, 1, 0]


def test_cpc_learns_what_follows_in_sounds():
    """Tones that rise or fall: the next step follows from the last ones."""
    time, generator = np.arange(4000) / 8000, np.random.default_rng(0)
    rows = []
    for _ in range(48):
        start, end = generator.uniform(200, 1500, 2)
        wave = 0.5 * np.sin(2 * np.pi * (start * time + (end - start) * time**2))
        rows.append({"array": wave.astype(np.float32), "sampling_rate": 8000})
    dataset = datasets.Dataset.from_dict({"sound": rows})
    source = AudioSource(dataset, "sound", seconds=0.4, gain=1.5)
    assert source.views([0, 1])[0].shape == (2, 3200)
    torch.manual_seed(0)
    method = CPC(WaveEncoder(24), 24, context=32, ahead=2)
    latents, _ = method.contexts(source.inputs(range(2)))
    assert latents.shape == (2, 20, 24)
    result = pretrain(method, source, epochs=15, batch_size=16, lr=3e-3, progress=False, report_every=5)
    assert result.history[-1]["loss"] < result.history[0]["loss"] - 0.5


def test_any_classifier_of_torchvision_gives_features():
    for name, width in (("resnet18", 512), ("mobilenet_v3_small", 1024), ("vit_b_16", 768)):
        network, found = torchvision_encoder(name, 32)
        assert found == width
        if name != "vit_b_16":
            assert network(torch.randn(2, 3, 32, 32)).shape == (2, width)
    with pytest.raises(KeyError, match=r"no classifier 'resnet19'.*resnet18"):
        torchvision_encoder("resnet19")
