"""The type that "auto" takes: by count, width, budget and recall."""

import numpy as np
import pytest

from mmcl.index import TupleIndex
from mmcl.index.choose import choose_factory, memory_size, parse_bytes
from mmcl.index.faiss_backend import FaissBackend


def test_flat_up_to_a_million_and_lists_beyond():
    assert choose_factory(0, 16).factory == "Flat"
    assert choose_factory(1_000_000, 512).factory == "Flat"
    large = choose_factory(4_000_000, 512)
    assert large.factory == "IVF8192,Flat"
    assert 1 < large.parameters["nprobe"] < 8192
    assert "4,000,000" in large.reason
    assert choose_factory(4_000_000, 512, recall_target=1.0).factory == "Flat"


@pytest.mark.parametrize("count", [50_000, 500_000, 5_000_000])
@pytest.mark.parametrize("width", [32, 128, 514])
@pytest.mark.parametrize("share", [1, 4, 8])
def test_the_choice_fits_the_budget(count, width, share):
    budget = 4 * count * width // share
    choice = choose_factory(count, width, max(budget, 20 * count + 10**6))
    assert choice.bytes <= max(budget, 20 * count + 10**6)
    assert choice.bytes == memory_size(choice.factory, count, width, mapped=choice.mapped)
    assert "HNSW" not in choice.factory


def test_where_nothing_fits_the_least_is_named():
    with pytest.raises(ValueError, match=r"500,000 vectors of width 128 in 1 MB; the least is .* 'IVF4096,PQ16x4fs"):
        choose_factory(500_000, 128, 1_000_000)
    least = choose_factory(500_000, 128, 11_000_000)
    assert least.bytes <= 11_000_000


def test_a_quarter_of_the_raw_size_keeps_full_vectors_on_the_disk():
    choice = choose_factory(500_000, 128, 64_000_000)
    assert choice.mapped
    assert choice.factory.endswith(",RFlat")


@pytest.mark.parametrize(
    "factory",
    [
        "Flat",
        "SQ8",
        "PQ16",
        "HNSW32",
        "HNSW16,SQ8",
        "IVF64,Flat",
        "IVF64,PQ16",
        "IVF64,SQ8",
        "IVF64,PQ32x4fs,RFlat",
        "IVF64,PQ16,Refine(SQ8)",
        "MIPS,IVF64,Flat",
        "MIPS,HNSW16",
    ],
)
def test_predicted_sizes_are_those_of_faiss(factory):
    rows = np.random.default_rng(0).normal(size=(5000, 64)).astype(np.float32)
    stored = FaissBackend.build(factory, 64, [rows]).stored_bytes()
    assert memory_size(factory, 5000, 64) == pytest.approx(stored, rel=0.05)


@pytest.mark.parametrize(
    ("text", "number"),
    [(5, 5), ("5", 5), ("64MB", 64_000_000), ("2GiB", 2**31), ("1.5 kb", 1500), ("3 G", 3 * 10**9), ("10b", 10)],
)
def test_budgets_are_read(text, number):
    assert parse_bytes(text) == number


@pytest.mark.parametrize("text", ["", "MB", "-5MB", 0, -3, True, 2.5, "5 furlongs", None, "0"])
def test_budgets_that_are_none_are_refused(text):
    with pytest.raises(ValueError, match="memory_budget must be bytes"):
        parse_bytes(text)


@pytest.mark.parametrize("recall", [0, 1.5, -1, "high", True, None, float("nan")])
def test_recall_targets_that_are_none_are_refused(recall):
    with pytest.raises(ValueError, match="recall_target"):
        choose_factory(10, 10, None, recall)


def test_a_budget_without_auto_is_refused(build):
    with pytest.raises(ValueError, match="memory_budget goes with factory='auto'"):
        build(factory="Flat", memory_budget="1GB")
    with pytest.raises(ValueError, match="700 vectors of width 34 in 1 kB; the least is"):
        build(memory_budget="1kB")
    assert build(memory_budget="1MB").reason.startswith("700 vectors")


def test_codes_in_memory_and_vectors_on_the_disk(make_score, unit_rows, tmp_path):
    """Within a budget of a quarter: scores exact, recall as asked for with true queries, and kept on disk."""
    score = make_score("hadamard", 3, 32)
    items = {name: unit_rows(30_000, 32, seed) for seed, name in enumerate(("image", "audio"))}
    queries = {"text": unit_rows(200, 32, 7)}
    budget = 30_000 * 32
    index = TupleIndex.build(score, items, memory_budget=budget, queries=queries)
    assert index.info()["factory"].endswith("x4fs,RFlat")
    assert "on the disk" in index.reason
    exact = TupleIndex.build(score, items, factory="Flat").search(queries)
    index.save(tmp_path / "index")
    for each in (index, TupleIndex.load(tmp_path / "index", memory_map=True)):
        hits = each.search(queries)
        found = np.mean([len(set(a) & set(b)) / 10 for a, b in zip(hits.ids, exact.ids, strict=True)])
        assert found >= 0.95
        assert hits.exact
        assert each.search_parameters == index.search_parameters
        assert each.reason == index.reason
