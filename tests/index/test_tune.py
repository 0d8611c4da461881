"""Tuning: recall against exact search with true queries, the curve, and the setting that is kept."""

import json

import numpy as np
import pytest

from mmcl.index import TupleIndex
from mmcl.index.tune import MARGIN, Point, grid, pareto, standard_error, surely_reaches, tune

STORED = ("image", "audio")


@pytest.mark.parametrize("factory", ["IVF16,Flat", "IVF16,PQ8x4,RFlat", "MIPS,HNSW16"])
def test_the_cheapest_setting_that_reaches_the_target_is_kept(factory, build, queries, tmp_path):
    index, exact = build(factory=factory), build(factory="Flat").search({"text": queries})
    result = tune(index, {"text": queries}, recall_target=0.9)
    assert result.reached
    assert result.chosen.recall >= 0.9
    good = [point for point in result.points if point.recall - MARGIN * point.error >= 0.9]
    assert result.chosen.seconds == min(point.seconds for point in good)
    for point in result.points:
        found = index.search({"text": queries}, **point.parameters).ids
        share = np.mean([len(set(a) & set(b)) / 10 for a, b in zip(found, exact.ids, strict=True)])
        assert share == pytest.approx(point.recall)
    index.save(tmp_path / "index")
    loaded = TupleIndex.load(tmp_path / "index")
    assert loaded.search_parameters == result.chosen.parameters == index.info()["search_parameters"]
    found = loaded.search({"text": queries}).ids
    assert np.mean([len(set(a) & set(b)) / 10 for a, b in zip(found, exact.ids, strict=True)]) >= 0.9


def test_a_target_out_of_reach_takes_the_best_there_is(build, queries, items):
    index = build(factory="PQ8x4")
    with pytest.raises(ValueError, match="codes alone.*items="):
        tune(index, {"text": queries})
    with pytest.raises(ValueError, match="700 items, items= has 3"):
        tune(index, {"text": queries}, items={name: items[name][:3] for name in STORED})
    result = tune(index, {"text": queries}, items={name: items[name] for name in STORED})
    assert not result.reached
    assert 0 < result.chosen.recall < 0.95


def test_types_without_efforts_are_measured_as_they_are(build, queries):
    result = tune(build(factory="Flat"), {"text": queries})
    assert [point.parameters for point in result.points] == [{}]
    assert result.chosen.recall == 1
    assert result.reached


def test_few_items_and_queries(build, queries):
    result = tune(build(factory="IVF4,Flat", rows=6), {"text": queries[:1]}, k=10)
    assert (result.k, result.queries) == (6, 1)
    assert result.chosen.recall == 1
    with pytest.raises(ValueError, match="0 items"):
        tune(build(factory="Flat", rows=0), {"text": queries})
    with pytest.raises(ValueError, match="0 queries"):
        tune(build(factory="Flat", rows=5), {"text": queries[:0]})
    with pytest.raises(ValueError, match="'image' is stored"):
        tune(build(factory="Flat", rows=5), {"image": queries})


def test_the_curve_is_written(build, queries, tmp_path):
    result = tune(build(factory="IVF16,Flat"), {"text": queries})
    told, picture = result.save(tmp_path / "curve")
    assert json.loads(told.read_text())["chosen"]["parameters"] == result.chosen.parameters
    assert len(json.loads(told.read_text())["points"]) == 5
    assert picture.stat().st_size > 10_000


def test_only_unbeaten_settings_are_on_the_curve():
    made = ((0.5, 1.0), (0.4, 2.0), (0.9, 3.0), (0.9, 4.0))
    points = [Point({}, recall, 0.0, seconds, 1 / seconds) for recall, seconds in made]
    assert [(point.recall, point.seconds) for point in pareto(points)] == [(0.5, 1), (0.9, 3)]


def test_a_recall_above_the_target_by_luck_is_not_enough():
    """16 queries that find all and 4 that find half: 0.9 by hand, its standard error 0.0459."""
    shares = np.array([1.0] * 16 + [0.5] * 4)
    assert standard_error(shares) == pytest.approx(np.sqrt((16 * 0.1**2 + 4 * 0.4**2) / 19 / 20))
    assert not surely_reaches(shares, 0.89)
    assert not surely_reaches(shares, 0.83)
    assert surely_reaches(shares, 0.82)
    assert surely_reaches(np.repeat(shares, 100), 0.89)
    assert surely_reaches(np.ones(20), 1.0)
    assert not surely_reaches(np.ones(19), 0.1), "too few to tell"


def test_held_out_queries_reach_the_target_too(build, unit_rows):
    """A setting chosen by a few queries holds for others: in 19 of 20 draws, so in most of these."""
    index, exact = build(factory="IVF16,Flat"), build(factory="Flat")
    held_out = {"text": unit_rows(2000, 16, 1000).numpy()}
    truth, reached = exact.search(held_out).ids, 0
    for seed in range(10):
        tune(index, {"text": unit_rows(60, 16, seed).numpy()}, recall_target=0.8)
        found = index.search(held_out).ids
        reached += np.mean([len(set(a) & set(b)) / 10 for a, b in zip(found, truth, strict=True)]) >= 0.8
    assert reached >= 9


def test_graphs_of_lists_are_tuned_too(build, queries):
    """The effort of the graph that finds lists: no less than the lists it has to find, or it makes no difference."""
    index = build(factory="IVF64_HNSW4,Flat")
    settings = list(grid(index, 10))
    assert {setting["quantizer_efSearch"] for setting in settings if setting["nprobe"] == 1} == {16, 32, 64}
    assert [s["quantizer_efSearch"] for s in settings if s["nprobe"] == 64] == [64]
    assert all(s["quantizer_efSearch"] >= s["nprobe"] for s in settings)
    result = tune(index, {"text": queries}, recall_target=0.8)
    assert result.reached
    assert set(index.search_parameters) == {"nprobe", "quantizer_efSearch"}
    assert result.chosen.parameters == index.search_parameters


def test_copies_of_the_best_are_no_misses(build, items, queries):
    """Which of equal items comes back is chance; their score is the best all the same."""
    copies = {name: np.tile(items[name][:30], (40, 1)) for name in ("image", "audio")}
    index = TupleIndex.build(build(rows=5).score, copies, factory="IVF8,Flat")
    result = tune(index, {"text": queries}, recall_target=1.0)
    assert result.reached and result.chosen.recall == 1


def test_a_handful_of_queries_is_sure_of_nothing(build, queries):
    index = build(factory="IVF16,Flat")
    assert not tune(index, {"text": queries[:5]}, recall_target=0.5).reached
    assert tune(index, {"text": queries}, recall_target=0.5).reached


@pytest.mark.parametrize(
    ("given", "told"),
    [({"k": 0}, "k must be"), ({"batch": 0}, "batch must be"), ({"recall_target": 2.0}, "recall_target must be")],
)
def test_senseless_numbers_are_refused(given, told, build, queries):
    with pytest.raises(ValueError, match=told):
        tune(build(factory="IVF16,Flat"), {"text": queries}, **given)


def test_what_does_not_go_together_is_refused_before_anything_is_built(build, queries):
    with pytest.raises(ValueError, match="recall_target must be"):
        build(factory="IVF16,Flat", queries={"text": queries}, recall_target=1.5)
    for given, told in (
        ({"memory_budget": "1GB"}, "Milvus keeps its memory"),
        ({"queries": {"text": queries}}, "in Milvus"),
    ):
        with pytest.raises(ValueError, match=told):
            build(backend="milvus", uri="nowhere.db", **given)
