"""Which score do data need: what is read from columns, vectors and shards, and what is advised."""

import datasets
import numpy as np
import pytest
import torch
from PIL import Image

from mmcl.diagnose import Diagnosis, advised, diagnose
from mmcl.diagnose_inputs import read_values
from mmcl.metrics import bounds
from mmcl.metrics.bounds import Bounds
from mmcl.metrics.interaction import Estimate, Interaction
from mmcl.synthetic.joints import independent, parity, random_pairwise


def draw(joint, count=600, seed=0):
    return {name: value.numpy() for name, value in joint.sample(count, torch.Generator().manual_seed(seed)).items()}


@pytest.mark.parametrize("method", ["auto", "encoders"])
def test_parity_asks_for_the_product(method):
    words = {name: np.array(["no", "yes"])[value] for name, value in draw(parity(2.0)).items()}
    found = diagnose(words, method=method)
    assert found.score == "hadamard"
    assert "Hadamard" in found.advice
    assert found.beyond.low > 0.3
    assert found.pairwise.low == 0
    assert found.method == {"auto": "counts", "encoders": "encoders"}[method]
    assert found.kinds == {"x1": "2 categories", "x2": "2 categories", "x3": "2 categories"}
    assert ("lower bounds" in found.limits) == (method == "encoders")


def test_pairs_ask_for_the_sum_of_pairs():
    found = diagnose(draw(random_pairwise(n=4), 2000))
    assert (found.score, found.beyond.low) == ("sum_of_pairs", 0)
    assert found.pairwise.low > 0


def test_two_modalities_ask_for_clip():
    found = diagnose(draw(random_pairwise(n=4, m=2), 500))
    assert found.score == "sum_of_pairs"
    assert "CLIP" in found.advice


@pytest.mark.parametrize("size", [5, 6])
def test_a_category_that_follows_from_two_others_is_found(size):
    """No chain among tables of the same pairs leaves such data: of 5 values nowhere, of 6 hardly."""
    first, second = np.random.default_rng(0).integers(0, size, (2, 1200))
    data = {"a": first, "b": second, "c": (first + second) % size}
    stuck = diagnose(data, method="counts")
    assert "stayed near the data" in stuck.limits
    found = diagnose(data)
    assert (found.method, found.score) == ("encoders", "hadamard")
    assert found.beyond.nats == pytest.approx(np.log(size), rel=0.1)
    assert found.pairwise.low == 0


def test_independent_data_ask_for_nothing():
    found = diagnose(draw(independent(n=3), 500))
    assert found.score is None
    assert "look independent" in found.advice


def test_datasets_of_every_kind_of_column():
    rows = draw(parity(2.0), 240)
    images = [Image.fromarray(np.random.default_rng(at).integers(0, 255, (8, 8), dtype=np.uint8)) for at in range(240)]
    data = datasets.Dataset.from_dict(
        {
            "photo": images,
            "label": rows["x2"].tolist(),
            "pose": np.stack([rows["x3"], 1 - rows["x3"]], axis=1).astype(np.float32).tolist(),
            "year": rows["x1"].astype(np.float64).tolist(),
        }
    ).cast_column("label", datasets.ClassLabel(names=["odd", "even"]))
    columns = {"image": "photo", "label": "label", "pose": "pose", "year": "year"}
    values, kinds = read_values(data, columns, None, 0)
    assert kinds == {
        "image": "vectors of 256",
        "label": "2 categories",
        "pose": "vectors of 2",
        "year": "vectors of 1",
    }
    assert values["label"][:3].tolist() == [["odd", "even"][at] for at in rows["x2"][:3]]
    assert np.allclose(values["image"].mean(axis=1), 0, atol=1e-5)
    assert all(len(value) == 240 for value in values.values())


def test_many_columns_have_to_be_named():
    data = datasets.Dataset.from_dict({name: [0, 1] for name in "abcdef"})
    with pytest.raises(ValueError, match="which of the columns .*'f'.* are the modalities"):
        diagnose(data)
    assert len(read_values(data, {"a": "a", "second": "f"}, None, 0)[0]) == 2


def test_rows_are_drawn_together_and_the_same_each_time():
    data = {"a": np.arange(1000), "b": np.arange(1000) * 2, "c": np.arange(1000.0)}
    values, _ = read_values(data, None, 100, 3)
    again, _ = read_values(data, None, 100, 3)
    assert (values["b"] == 2 * values["a"]).all()
    assert (values["c"][:, 0] == values["a"]).all()
    assert (values["a"] == again["a"]).all()
    assert len(set(values["a"].tolist())) == 100


def test_embedding_shards(tmp_path, monkeypatch):
    rows = draw(parity(3.0), 900)
    generator = np.random.default_rng(0)
    vectors = {
        name: np.eye(6, dtype=np.float32)[value] + 0.2 * generator.standard_normal((900, 6)).astype(np.float32)
        for name, value in rows.items()
    }
    for name, value in vectors.items():
        (tmp_path / f"{name}_emb").mkdir()
        for at in range(3):
            np.save(tmp_path / f"{name}_emb" / f"{name}_emb_{at}.npy", value[at * 300 : at * 300 + 300])
    values, kinds = read_values(str(tmp_path), None, 500, 0)
    chosen = np.sort(np.random.default_rng(0).choice(900, 500, replace=False))
    assert set(kinds.values()) == {"vectors of 6"}
    assert (values["x2"] == vectors["x2"][chosen]).all()
    values, _ = read_values(tmp_path, {"one": "x1", "two": "x3"}, None, 0)
    assert (values["two"] == vectors["x3"]).all()
    monkeypatch.setattr(bounds, "BATCHES", {"folds": 3, "dim": 8, "steps": 120})
    found = diagnose(tmp_path)
    assert isinstance(found, Diagnosis)
    assert found.score == "hadamard"
    assert found.method == "encoders"


TEXTS = [f"text {at}" for at in range(400)]
WHOLE = {"a": [0, 1] * 200, "b": [1, 0] * 200}


@pytest.mark.parametrize(
    ("data", "options", "error", "said"),
    [
        ({"a": [0, 1]}, {}, ValueError, "two modalities or more"),
        ({}, {}, ValueError, "two modalities or more"),
        ([1, 2], {}, ValueError, "expected .modality: values."),
        ({**WHOLE, "c": [0, None] * 200}, {}, ValueError, "c: row 1 has no value"),
        ({**WHOLE, "c": [0.0, float("nan")] * 200}, {}, ValueError, "c: row 1 holds NaN"),
        ({**WHOLE, "c": [[1.0], [1.0, 2.0]] * 200}, {}, ValueError, "c: rows of numbers must have one length"),
        ({**WHOLE, "c": [{"bytes": b""}] * 400}, {}, ValueError, "c: row 0 holds dict"),
        ({**WHOLE, "c": [0]}, {}, ValueError, "a has 400, c has 1"),
        (WHOLE, {"method": "count"}, KeyError, "choose from"),
        (WHOLE, {"rows": 0}, ValueError, "rows must be at least 1"),
        (WHOLE, {"columns": {"a": "a", "b": "x"}}, KeyError, "unknown modality 'x' in columns"),
        ({**WHOLE, "c": np.eye(400, 2)}, {"method": "counts"}, ValueError, "'c' has vectors of 2"),
        ({**WHOLE, "c": TEXTS}, {"method": "encoders"}, ValueError, "c: 400 distinct values in 400 rows are too many"),
        ({**WHOLE, "c": TEXTS}, {"method": "counts"}, ValueError, "c: 400 distinct values in 400 rows are too many"),
        ({**WHOLE, "c": ["x"] * 400}, {}, ValueError, "c: one value in all 400 rows, on which nothing can depend"),
        ({**WHOLE, "c": np.ones((400, 2))}, {}, ValueError, "c: one value in all 400 rows"),
        ({name: values[:1] for name, values in WHOLE.items()}, {}, ValueError, "a: one value in all 1 rows"),
    ],
)
def test_what_cannot_be_diagnosed_is_refused(data, options, error, said):
    with pytest.raises(error, match=said):
        diagnose(data, **options)


def test_advice_follows_the_intervals():
    nothing, something = Estimate(0.001, 0.0, 0.004, 0.4), Estimate(0.5, 0.4, 0.6, 0.001)

    def advice(pairwise, beyond, modalities=3, bound=True):
        if bound:
            return advised(Bounds(something, pairwise, beyond, 1000), modalities)
        return advised(Interaction(something, pairwise, beyond, 1000, {}, True, 0.0), modalities)

    assert advice(something, something)[0] == "hadamard"
    assert "sum of both scores" in advice(something, something)[1]
    assert "sum of both scores" not in advice(nothing, something)[1]
    assert "0.500 nats (0.400 to 0.600, a lower bound) lie beyond pairs" in advice(nothing, something)[1]
    assert advice(something, nothing)[0] == "sum_of_pairs"
    assert "at most 0.004 nats" in advice(something, nothing, bound=False)[1]
    assert "at most" not in advice(something, nothing)[1]
    assert advice(nothing, nothing)[0] is None
    assert "CLIP" in advice(something, nothing, modalities=2)[1]
