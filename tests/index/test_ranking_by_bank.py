"""An index with a bank ranks by log p(query | item) / p(query), through its whole life."""

import json

import numpy as np
import pytest

from mmcl.index import TupleIndex

STORED = ("image", "audio")


def take(items, rows):
    return {name: items[name][rows] for name in STORED}


@pytest.fixture
def bank(unit_rows):
    """60 text queries."""
    return unit_rows(60, 16, seed=99).numpy()


@pytest.fixture
def expected(brute_force, make_score, items, queries, bank):
    """(25, 700): score minus log mean exp of the item's scores with the bank, in float64."""
    score, stored = make_score("pairs_and_hadamard", 3, 16), {name: items[name] for name in STORED}
    usual = np.log(np.exp(brute_force(score, stored, {"text": bank})).mean(axis=0))
    return brute_force(score, stored, {"text": queries}) - usual


EXACT = {"Flat": {}, "IVF16,Flat": {"nprobe": 16}, "HNSW32": {"efSearch": 700}, "MIPS,IVF16,Flat": {"nprobe": 16}}


@pytest.mark.parametrize("factory", EXACT)
def test_scores_are_log_ratios_and_stay_so(factory, build, items, queries, bank, expected, tmp_path):
    index = build(rows=600, factory=factory, bank={"text": bank})
    index.add(take(items, slice(600, 700)))
    index.upsert(take(items, [690]), ids=[5])
    index.save(tmp_path / "index")
    loaded = TupleIndex.load(tmp_path / "index")
    loaded.compact()
    truth = expected.copy()
    truth[:, 5] = truth[:, 690]
    for each in (index, loaded):
        hits = each.search({"text": queries}, k=10, **EXACT[factory])
        assert hits.kind == each.kind == "pmi"
        np.testing.assert_allclose(hits.scores, np.take_along_axis(truth, hits.ids, axis=1), atol=2e-4)
        if "HNSW" not in factory:  # a graph may miss one
            np.testing.assert_allclose(hits.scores, -np.sort(-truth, axis=1)[:, :10], atol=2e-4)
    told = json.loads((tmp_path / "index" / "manifest.json").read_text())
    assert told["bank"] == loaded.info()["bank"] == {"modalities": ["text"], "rows": 60}
    assert told["kind"] == "pmi"


def test_every_type_takes_the_coordinate(factory, build, items, queries, bank):
    index = build(factory=factory, bank={"text": bank})
    assert index.info()["width"] == index.score.width + 1
    assert (index.search({"text": queries}, k=5).counts == 5).all()
    assert build(factory=factory).search({"text": queries}).kind == "score"


def test_queries_of_other_modalities_than_the_bank_s_are_refused(make_score, items, queries, bank):
    score = make_score("pairs_and_neutral", 3, 16)
    index = TupleIndex.build(score, {"image": items["image"]}, bank={"text": bank})
    assert index.query_modalities == ("text",)
    with pytest.raises(ValueError, match=r"bank of \['text'\].*\['audio', 'text'\]"):
        index.search({"audio": queries, "text": queries})
    with pytest.raises(ValueError, match=r"bank of \['text'\].*\['audio'\]"):
        index.search({"audio": queries})
    both = TupleIndex.build(score, {"image": items["image"]}, bank={"text": bank, "audio": bank})
    with pytest.raises(ValueError, match="must name just those"):
        both.search({"text": queries})
    assert both.search({"text": queries, "audio": queries}).kind == "pmi"


@pytest.mark.parametrize(
    ("bank", "error", "told"),
    [
        ({"image": np.eye(16)}, ValueError, "'image' is stored"),
        ({"smell": np.eye(16)}, KeyError, "unknown modality 'smell' in the bank"),
        ({}, ValueError, "the bank is empty"),
        (np.eye(16), ValueError, "the bank must be {modality: values}"),
        ({"text": np.empty((0, 16))}, ValueError, "no rows"),
        ({"text": np.zeros((3, 16))}, ValueError, "row 0 holds only zeros"),
        ({"text": np.eye(15)}, ValueError, "16 columns"),
    ],
)
def test_a_bank_that_cannot_be_used_is_refused_by_name(bank, error, told, build):
    with pytest.raises(error, match=told):
        build(rows=20, bank=bank)
