import json

import numpy as np
import pytest
import torch
from PIL import Image
from torch import nn

from mmcl import Hadamard, MultimodalModel, SumOfPairs
from mmcl.encoders import categories, small_image, vectors


def small_model(seed=0, neutral=False):
    torch.manual_seed(seed)
    encoders = {"image": small_image(8, size=4), "sensor": vectors(3, 8), "text": categories(["no", "yes"], 8)}
    return MultimodalModel(encoders, Hadamard(("image", "sensor", "text"), 8, neutral=neutral)).eval()


VALUES = {
    "image": [Image.new("RGB", (5, 5), (i * 40, 0, 200 - i * 30)) for i in range(5)],
    "sensor": np.arange(15.0).reshape(5, 3),
    "text": ["no", "yes", "no", "no", "yes"],
}


def test_encode_gives_unit_rows_of_every_modality_asked_for():
    rows = small_model().encode(VALUES)
    assert {name: tuple(value.shape) for name, value in rows.items()} == dict.fromkeys(VALUES, (5, 8))
    for value in rows.values():
        torch.testing.assert_close(value.norm(dim=1), torch.ones(5))
    assert list(small_model().encode({"text": ["yes"]})) == ["text"]


def test_encode_in_batches_equals_encode_at_once():
    model = small_model()
    at_once, in_batches = model.encode(VALUES), model.encode(VALUES, batch_size=2)
    for name in VALUES:
        torch.testing.assert_close(at_once[name], in_batches[name], rtol=0, atol=1e-6)


def test_prepared_tensors_are_taken_as_they_are():
    model = small_model()
    inputs = {name: model.prepare(name, values) for name, values in VALUES.items()}
    for name, rows in model.encode(inputs, batch_size=3).items():
        torch.testing.assert_close(rows, model.encode({name: VALUES[name]})[name], rtol=0, atol=1e-6)


def test_gradients_are_as_the_callers_context_says():
    model = small_model()
    assert model.encode({"text": ["no"]})["text"].requires_grad
    with torch.no_grad():
        assert not model.encode({"text": ["no"]})["text"].requires_grad


def test_an_empty_list_gives_no_rows():
    assert small_model().encode({"text": []})["text"].shape == (0, 8)


def test_a_bad_value_names_modality_and_row_also_in_a_later_batch():
    with pytest.raises(ValueError, match="text: row 3: unknown category"):
        small_model().encode({"text": ["no", "yes", "no", "maybe"]}, batch_size=2)
    with pytest.raises(ValueError, match="image: row 1: image is missing"):
        small_model().encode({"image": [VALUES["image"][0], None]})
    with pytest.raises(KeyError, match=r"unknown modality 'audio'.*\['image', 'sensor', 'text'\]"):
        small_model().encode({"audio": []})
    with pytest.raises(ValueError, match="text: expected a list"):
        small_model().encode({"text": "no"})


class Own(nn.Module):
    """A user's encoder, normalising nothing."""

    def __init__(self, fill=None):
        super().__init__()
        self.layer = nn.Linear(3, 8)
        self.fill = fill

    def forward(self, x):
        return 7 * self.layer(x) if self.fill is None else torch.full((len(x), 8), self.fill)


def own_model(module):
    return MultimodalModel({"a": module, "b": vectors(3, 8)}, SumOfPairs(("a", "b"), 8)).eval()


def test_any_module_is_normalised_and_saved_and_asked_for_again(tmp_path):
    model = own_model(Own())
    rows = model.encode({"a": torch.randn(4, 3)})["a"]
    torch.testing.assert_close(rows.norm(dim=1), torch.ones(4))
    model.save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="encoder of 'a' was your own module"):
        MultimodalModel.from_pretrained(tmp_path)
    again = MultimodalModel.from_pretrained(tmp_path, encoders={"a": Own()})
    assert again.fingerprint() == model.fingerprint()


def test_a_module_without_prepare_takes_rows_of_numbers():
    model = MultimodalModel({"a": Own(), "b": nn.Embedding(4, 8)}, SumOfPairs(("a", "b"), 8)).eval()
    rows = np.arange(6.0).reshape(2, 3)
    for values in (rows, rows.tolist(), rows.astype(np.float16)):
        torch.testing.assert_close(
            model.encode({"a": values})["a"], model.encode({"a": torch.tensor(rows).float()})["a"]
        )
    assert torch.equal(model.encode({"b": [3, 1]})["b"], model.encode({"b": torch.tensor([3, 1])})["b"])
    with pytest.raises(ValueError, match="a: an encoder without a method `prepare` takes tensors or arrays"):
        model.encode({"a": ["x", "y"]})


@pytest.mark.parametrize(("fill", "fault"), [(0.0, "only zeros"), (float("nan"), "NaN"), (float("inf"), "NaN")])
def test_an_embedding_without_direction_is_refused_by_row(fill, fault):
    with pytest.raises(ValueError, match=f"a: row 0 holds {fault}"):
        own_model(Own(fill)).encode({"a": torch.randn(2, 3)})


def test_a_module_of_another_width_is_refused_with_both_shapes():
    with pytest.raises(ValueError, match=r"a: expected 8 columns, got shape \(2, 5\)"):
        own_model(nn.Linear(3, 5)).encode({"a": torch.randn(2, 3)})
    with pytest.raises(ValueError, match="'b' gives 6 columns, the score takes 8"):
        MultimodalModel({"a": Own(), "b": vectors(3, 6)}, SumOfPairs(("a", "b"), 8))


def test_encoders_and_score_name_the_same_modalities():
    score = SumOfPairs(("a", "b"), 8)
    with pytest.raises(KeyError, match=r"no encoder for modality \['b'\]"):
        MultimodalModel({"a": Own()}, score)
    with pytest.raises(KeyError, match="unknown modality 'c'"):
        MultimodalModel({"a": Own(), "b": Own(), "c": Own()}, score)
    with pytest.raises(TypeError, match="must be an nn.Module"):
        MultimodalModel({"a": Own(), "b": lambda x: x}, score)


def test_modalities_may_have_any_name():
    names = ("type", "v1.0", "é")
    model = MultimodalModel({name: vectors(3, 8) for name in names}, Hadamard(names, 8))
    assert model.encode({name: torch.randn(2, 3) for name in names}).keys() == set(names)


@pytest.mark.parametrize("neutral", [False, True])
def test_save_and_load_is_the_same_model_to_the_bit(tmp_path, neutral):
    model = small_model(neutral=neutral)
    with torch.no_grad():
        model.score.weight.mul_(torch.linspace(0.5, 2, 8))
    model.save_pretrained(tmp_path / "a model é")
    again = MultimodalModel.from_pretrained(tmp_path / "a model é")
    assert again.fingerprint() == model.fingerprint()
    assert all(torch.equal(value, again.state_dict()[name]) for name, value in model.state_dict().items())
    for name, rows in model.encode(VALUES).items():
        assert torch.equal(rows, again.encode(VALUES)[name])
    assert not again.training
    assert not list((tmp_path / "a model é").rglob("*.bin")) + list((tmp_path / "a model é").rglob("*.pkl"))


def test_the_fingerprint_tells_weights_and_config_apart():
    model, other = small_model(), small_model(seed=1)
    assert model.fingerprint() == small_model().fingerprint() != other.fingerprint()
    before = model.fingerprint()
    with torch.no_grad():
        model.score.logit_scale.add_(1e-6)
    assert model.fingerprint() != before


def test_a_foreign_folder_and_wrong_weights_are_refused(tmp_path):
    with pytest.raises(FileNotFoundError, match="no config.json"):
        MultimodalModel.from_pretrained(tmp_path)
    small_model().save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    config["model"]["encoders"]["sensor"]["hidden"] = 64
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match=r"does not fit its config.*towers\.1"):
        MultimodalModel.from_pretrained(tmp_path)
    config["format_version"] = 99
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match="format version 99"):
        MultimodalModel.from_pretrained(tmp_path)


def test_two_modalities_may_share_an_encoder(tmp_path):
    shared = vectors(3, 8)
    model = MultimodalModel({"a": shared, "b": shared}, SumOfPairs(("a", "b"), 8)).eval()
    model.save_pretrained(tmp_path)
    again = MultimodalModel.from_pretrained(tmp_path)
    assert again.fingerprint() == model.fingerprint()
    rows = torch.randn(2, 3)
    assert torch.equal(again.encode({"b": rows})["b"], model.encode({"a": rows})["a"])


@pytest.mark.parametrize("cast", ["double", "half", "bfloat16"])
def test_another_precision_is_saved_loaded_and_run(tmp_path, cast):
    model = getattr(small_model(), cast)()
    model.save_pretrained(tmp_path)
    again = MultimodalModel.from_pretrained(tmp_path)
    assert again.fingerprint() == model.fingerprint()
    for name, rows in model.encode(VALUES).items():
        assert torch.equal(rows, again.encode(VALUES)[name])
        assert rows.dtype == (torch.float64 if cast == "double" else torch.float32)


@pytest.mark.parametrize("cast", ["float", "double"])
def test_loaded_weights_are_in_memory_as_new_ones_are(tmp_path, cast):
    """Matrix products round by the alignment of their arrays; in a file's map a weight lies where the file says."""
    for length in range(8):
        folder = tmp_path / str(length)
        encoders = {"a" * (length + 1): vectors(3, 8), "b": vectors(3, 8)}
        model = getattr(MultimodalModel(encoders, SumOfPairs(tuple(encoders), 8)), cast)()
        model.save_pretrained(folder)
        again = MultimodalModel.from_pretrained(folder)
        assert all(weight.data_ptr() % 64 == 0 for weight in again.state_dict().values())


def test_a_batch_size_below_one_and_a_broken_file_are_refused(tmp_path):
    for size in (0, -1):
        with pytest.raises(ValueError, match="batch_size must be at least 1"):
            small_model().encode(VALUES, batch_size=size)
    small_model().save_pretrained(tmp_path)
    (tmp_path / "model.safetensors").write_bytes((tmp_path / "model.safetensors").read_bytes()[:100])
    with pytest.raises(ValueError, match=r"model\.safetensors cannot be read"):
        MultimodalModel.from_pretrained(tmp_path)


def test_weights_are_readable_as_the_umask_says(tmp_path):
    small_model().save_pretrained(tmp_path)
    assert (tmp_path / "model.safetensors").stat().st_mode == (tmp_path / "config.json").stat().st_mode
