"""Several indexes built on disk from shared passes, within a budget, of checked types; see test_side_by_side."""

import shutil

import numpy as np
import pyarrow as pa
import pytest

from mmcl.index import TupleIndex, disk_source
from mmcl.index.side_by_side import TupleIndexes
from mmcl.shards import EmbeddingShards, ShardWriter

NAMES = ("image", "audio", "text")
TWO = [("image", "audio"), ("text",)]
SPLITS = [("image", "audio"), ("image", "text"), ("audio", "text"), ("image",), ("audio",), ("text",)]
MIXED = {
    ("image", "audio"): "MIPS,IVF16,SQ8",
    ("audio", "text"): "IVF16,PQ8x4,RFlat",
    "text": "HNSW16",
    "image": "Exact",
}
"""From one to three passes, and a type that FAISS builds in memory."""


@pytest.fixture(scope="module")
def score(make_score):
    return make_score("pairs_and_neutral", 3, 16)


@pytest.fixture
def shards(items, tmp_path):
    """Shards of 300, 300 and 100 rows with metadata."""
    return write_shards(tmp_path / "emb", items)


def write_shards(folder, items, names=NAMES):
    writer = ShardWriter(folder, {"fingerprint": "made by one"})
    for start, stop in ((0, 300), (300, 600), (600, 700)):
        rows = {"key": [f"k{row}" for row in range(start, stop)], "year": list(range(start, stop))}
        writer.write({name: items[name][start:stop] for name in names}, pa.table(rows))
    writer.write_manifest(complete=True)
    return folder


def query_of(items, stored):
    return {name: items[name][:9] for name in NAMES if name not in stored}


def assert_same_answers(one, other, items):
    for names in SPLITS:
        a, b = (each.search(query_of(items, names), k=20, target=names) for each in (one, other))
        np.testing.assert_array_equal(a.ids, b.ids)
        np.testing.assert_allclose(a.scores, b.scores, rtol=1e-5, atol=1e-6)
        assert a.metadata == b.metadata


@pytest.mark.parametrize("factory", ["Flat", "IVF4,Flat", MIXED])
def test_each_index_on_disk_is_the_one_built_there_alone(factory, score, shards, items, tmp_path):
    indexes = TupleIndexes.build(score, shards, factory=factory, out=tmp_path / "all")
    assert indexes.stored == SPLITS
    assert {each.name for each in (tmp_path / "all").iterdir() if each.is_dir()} == {"+".join(each) for each in SPLITS}
    chosen = factory if isinstance(factory, dict) else dict.fromkeys(SPLITS, factory)
    for names in SPLITS:
        kind = chosen.get(names, chosen.get(names[0] if len(names) == 1 else None, "auto"))
        alone = TupleIndex.build(
            score, shards, modalities=names, factory=kind, out=tmp_path / "alone" / "+".join(names)
        )
        assert indexes.storing(names).info() == alone.info()
        a, b = (each.search(query_of(items, names), k=20) for each in (alone, indexes.storing(names)))
        np.testing.assert_array_equal(a.ids, b.ids)
        np.testing.assert_array_equal(a.scores, b.scores)
        assert a.metadata == b.metadata
    indexes.verify()
    indexes.remove(3)
    indexes.add({name: items[name][:1] for name in NAMES}, metadata={"key": ["new"]})
    indexes.save(tmp_path / "all")
    loaded = TupleIndexes.load(tmp_path / "all")
    assert len(loaded) == 700 and loaded.get(700) == {"key": "new", "year": None} and 3 not in loaded


def test_a_build_on_disk_answers_as_one_in_memory(score, shards, items, tmp_path):
    options = {"ids": [f"n{row}" for row in range(700)], "bank": {name: items[name][400:450] for name in NAMES}}
    memory = TupleIndexes.build(score, shards, **options)
    disk = TupleIndexes.build(score, shards, **options, out=tmp_path / "all")
    assert disk.storing("text").kind == "pmi"
    assert_same_answers(memory, disk, items)
    arrays = {name: items[name][:700] for name in NAMES}
    table = {"key": [f"k{row}" for row in range(700)], "year": list(range(700))}
    assert_same_answers(memory, TupleIndexes.build(score, arrays, metadata=table, **options, out=tmp_path / "b"), items)


def test_all_indexes_share_each_pass_over_the_shards(score, shards, tmp_path, monkeypatch):
    """Every block of rows is read once a pass, as many passes as the index with the most of them needs."""
    monkeypatch.setattr(disk_source, "BLOCK_BYTES", 4 * score.width * 90)
    reads, read = [], EmbeddingShards.read_rows

    def logged(self, number, rows, *modalities):
        if isinstance(rows, slice) and rows.stop - rows.start > 1:  # others are samples, and the first row of a shard
            reads.append((number, rows.start, rows.stop))
        return read(self, number, rows, *modalities)

    monkeypatch.setattr(EmbeddingShards, "read_rows", logged)
    blocks = [
        (n, begin, min(begin + 90, rows)) for n, rows in enumerate((300, 300, 100)) for begin in range(0, rows, 90)
    ]
    for factory, passes in (("Flat", 1), ("MIPS,IVF16,SQ8", 3), (MIXED, 3)):
        reads.clear()
        TupleIndexes.build(score, shards, factory=factory, out=tmp_path / str(passes))
        assert reads == blocks * passes


def test_modalities_in_several_folders_are_joined_in_one_order(score, items, tmp_path):
    """The rows of text lie in another order; every index has those of the first modality."""
    back = {name: rows[:700][::-1] for name, rows in items.items()}
    write_shards(tmp_path / "two", items, NAMES[:2])
    writer = ShardWriter(tmp_path / "text", {"fingerprint": "made by one"})
    writer.write({"text": back["text"]}, pa.table({"key": [f"k{row}" for row in range(699, -1, -1)]}))
    writer.write_manifest(complete=True)
    folders = {"image": tmp_path / "two", "audio": tmp_path / "two", "text": tmp_path / "text"}
    disk = TupleIndexes.build(score, folders, factory={"text": "IVF4,Flat"}, out=tmp_path / "all")
    memory = TupleIndexes.build(score, {name: items[name][:700] for name in NAMES})
    for names in SPLITS:
        effort = {"nprobe": 4} if names == ("text",) else {}
        found = disk.search(query_of(items, names), target=names, **effort)
        np.testing.assert_array_equal(found.ids, memory.search(query_of(items, names), target=names).ids)


@pytest.mark.parametrize("step", ["mmcl.index.side_by_side_build.write_items", "mmcl.index.disk_codes.Codes.merge"])
def test_an_interrupted_build_goes_on(step, score, shards, items, tmp_path, monkeypatch):
    options = {"factory": "IVF16,Flat", "out": tmp_path / "all"}

    def interrupt(*_, **__):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(step, interrupt)
        with pytest.raises(KeyboardInterrupt):
            TupleIndexes.build(score, shards, **options)
    with pytest.raises(FileNotFoundError, match="no index"):
        TupleIndexes.load(tmp_path / "all")
    with monkeypatch.context() as patch:
        patch.setattr("mmcl.index.disk_build.trained", interrupt)  # nothing is trained or encoded again
        patch.setattr("mmcl.index.disk_codes.Codes.put", interrupt)
        indexes = TupleIndexes.build(score, shards, **options)
    assert not (tmp_path / "all" / ".building").exists()
    for names in SPLITS:
        found = indexes.search(query_of(items, names), target=names, nprobe=16)
        expected = TupleIndex.build(score, shards, modalities=names, factory="Flat").search(query_of(items, names))
        np.testing.assert_array_equal(found.ids, expected.ids)


def test_indexes_that_are_there_are_replaced_only_by_a_whole_build(score, shards, items, tmp_path):
    TupleIndexes.build(score, {name: items[name][:9] for name in NAMES}, out=tmp_path / "all")
    broken = {name: items[name][:700].copy() for name in NAMES}
    broken["text"][650] = np.nan
    with pytest.raises(ValueError, match="text: row 650 holds NaN"):
        TupleIndexes.build(score, broken, stored=TWO, out=tmp_path / "all")
    assert len(TupleIndexes.load(tmp_path / "all")) == 9
    with pytest.raises(ValueError, match=r"unfinished build: source is .*remove the folder"):
        TupleIndexes.build(score, shards, stored=TWO, out=tmp_path / "all")
    shutil.rmtree(tmp_path / "all" / ".building")
    TupleIndexes.build(score, shards, stored=TWO, out=tmp_path / "all")
    assert len(TupleIndexes.load(tmp_path / "all")) == 700
    assert {each.name for each in (tmp_path / "all").iterdir() if each.is_dir()} == {"image+audio", "text"}


def test_out_that_cannot_be_is_refused(score, shards, items, tmp_path):
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "thesis.tex").write_text("x")
    (tmp_path / "file").write_text("x")
    with pytest.raises(ValueError, match=r"'thesis\.tex'"):
        TupleIndexes.build(score, shards, out=tmp_path / "full")
    with pytest.raises(ValueError, match="is a file"):
        TupleIndexes.build(score, shards, out=tmp_path / "file")
    with pytest.raises(ValueError, match="Milvus keeps its tuples itself"):
        TupleIndexes.build(score, shards, out=tmp_path / "o", backend="milvus", uri="x.db")
    with pytest.raises(ValueError, match="needs uri="):
        TupleIndexes.build(score, shards, backend="milvus")
    with pytest.raises(KeyError, match=r"backend.*faiss"):
        TupleIndexes.build(score, shards, backend="paper")
    model = Counting(score, items)
    with pytest.raises(ValueError, match="takes embeddings"):
        TupleIndexes.build(model, {name: ["1", "2"] for name in NAMES}, out=tmp_path / "o")
    assert model.encoded == 0
    assert not (tmp_path / "o").exists()


class Counting:
    """A model whose raw values are row numbers; it counts what it encodes."""

    def __init__(self, score, items):
        self.score, self.items, self.encoded = score, items, 0

    def encode(self, values, batch_size=None):
        self.encoded += sum(map(len, values.values()))
        return {name: self.items[name][[int(row) for row in rows]] for name, rows in values.items()}

    def fingerprint(self):
        return "counting"


@pytest.mark.parametrize(
    ("options", "error", "told"),
    [
        ({"factory": {("image", "audio"): "Flat", "text": "Nonsense"}}, ValueError, r"\('text',\).*Nonsense"),
        ({"factory": {("image", "audio"): "Flat", "text": 7}}, ValueError, r"\('text',\).*factory string"),
        ({"factory": {"text": "IVF4,L2norm"}}, ValueError, r"\('text',\)"),
        ({"factory": {"text": "IVF64,Flat"}}, ValueError, r"\('text',\).*at least 64 items.*got 20"),
        ({"factory": {("text", "image"): "Flat"}}, KeyError, r"\('text', 'image'\).*\('image', 'audio'\), \('text',\)"),
        ({"factory": {5: "Flat"}}, KeyError, r"index of 5; there are"),
        ({"memory_budget": "1kB"}, ValueError, r"\('image', 'audio'\).*the least.*for 2 indexes together"),
        ({"memory_budget": "1MB", "factory": "Flat"}, ValueError, "none of the indexes"),
        ({"memory_budget": "much"}, ValueError, "'much'"),
        ({"recall_target": 2.0}, ValueError, "recall_target"),
        ({"queries": {"text": ["1"]}}, ValueError, r"queries has \['text'\]; the index of \('text',\)"),
        ({"queries": {"smell": ["1"]}}, KeyError, "smell"),
        ({"queries": ["1"]}, ValueError, "queries must be"),
        ({"metadata": {"a": [1]}}, ValueError, "'a' has 1 rows"),
        ({"ids": [1] * 20}, ValueError, "duplicate"),
    ],
)
def test_what_is_wrong_is_told_before_items_are_encoded(options, error, told, score, items):
    model = Counting(score, items)
    with pytest.raises(error, match=told):
        TupleIndexes.build(model, {name: [str(row) for row in range(20)] for name in NAMES}, stored=TWO, **options)
    assert model.encoded <= 1, "a query at most"


def test_a_budget_is_for_all_together_and_kept_on_disk(score, items):
    rows = {name: np.tile(items[name], (2, 1))[:1000] for name in NAMES}
    full = 4 * 1000 * score.width
    free = TupleIndexes.build(score, rows, stored=TWO, memory_budget=2 * full)
    assert [free.storing(names).info()["factory"] for names in TWO] == ["Flat", "Flat"]
    tight = TupleIndexes.build(score, rows, stored=TWO, memory_budget=int(0.9 * full))
    for names in TWO:
        index = tight.storing(names)
        alone = TupleIndex.build(score, rows, modalities=names, memory_budget=int(0.45 * full))
        assert index.info() == alone.info()
        assert index.info()["mapped"] and index.reason
        a, b = (each.search(query_of(items, names)) for each in (index, alone))
        np.testing.assert_array_equal(a.ids, b.ids)
    text = tight.storing("text")
    del tight
    assert text.search(query_of(items, ("text",)), k=5).counts.tolist() == [5] * 9  # its files are still there
    mixed = TupleIndexes.build(score, rows, stored=TWO, memory_budget=full, factory={"text": "IVF4,Flat"})
    assert [mixed.storing(names).info()["factory"] for names in TWO] == ["Flat", "IVF4,Flat"]


def test_queries_set_the_effort_of_each_index(score, items, tmp_path):
    rows, queries = {name: items[name][:600] for name in NAMES}, {name: items[name][600:680] for name in NAMES}
    options = {"factory": {("image", "audio"): "IVF16,Flat"}, "stored": TWO, "queries": queries, "recall_target": 0.9}
    for out in (None, tmp_path / "all"):
        indexes = TupleIndexes.build(score, rows, **options, out=out)
        alone = TupleIndex.build(
            score, rows, factory="IVF16,Flat", modalities=TWO[0], queries={"text": queries["text"]}, recall_target=0.9
        )
        assert alone.search_parameters
        assert indexes.storing(TWO[0]).search_parameters.keys() == alone.search_parameters.keys()
    loaded = TupleIndexes.load(tmp_path / "all")
    assert loaded.storing(TWO[0]).search_parameters == indexes.storing(TWO[0]).search_parameters
    assert loaded.storing("text").search_parameters == {}


def test_queries_are_encoded_once_or_taken_as_they_are(score, items):
    rows, text = {name: [str(row) for row in range(600)] for name in NAMES}, [str(row) for row in range(600, 680)]
    options = {"factory": "IVF16,Flat", "stored": [("image", "audio"), ("image",)]}
    model = Counting(score, items)
    raw = TupleIndexes.build(model, rows, queries={"text": text}, **options)
    assert model.encoded == 2 * 600 + 80
    given = {name: items[name][:600] for name in NAMES}
    asked = {"text": 3 * items["text"][600:680]}  # no unit rows: only the caller says what they are
    embedded = TupleIndexes.build(model, given, queries=asked, encoded=True, **options)
    assert model.encoded == 2 * 600 + 80
    for names in options["stored"]:
        assert raw.storing(names).search_parameters == embedded.storing(names).search_parameters != {}
