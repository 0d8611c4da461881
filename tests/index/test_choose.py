"""The type that "auto" takes: by count, width, budget and recall."""

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from mmcl.index import TupleIndex
from mmcl.index.choose import choose_factory, memory_size, parse_bytes
from mmcl.index.faiss_backend import FaissBackend
from mmcl.index.faiss_setup import load_faiss
from mmcl.index.store import read_manifest, write_manifest


def test_flat_up_to_a_million_and_lists_beyond():
    assert choose_factory(0, 16).factory == "Flat"
    assert choose_factory(1_000_000, 512).factory == "Flat"
    large = choose_factory(4_000_000, 512)
    assert large.factory == "RR512,IVF8192,PQ512x4fs,RFlat"
    assert not large.mapped
    assert large.parameters["nprobe"] == 8192, "all lists until the effort is measured"
    assert "4,000,000" in large.reason
    assert choose_factory(4_000_000, 512, recall_target=1.0).factory == "Flat"


def test_gpus_are_given_what_they_have():
    """4-bit codes for fast scans are of the CPU alone; "auto" goes back to it for them."""
    assert choose_factory(4_000_000, 512, device="cuda:0").factory == "IVF8192,Flat"
    assert choose_factory(4_000_000, 512, device="cuda:0").parameters["nprobe"] == 2048
    assert choose_factory(4_000_000, 512, 2 * 10**9, device="auto").factory.endswith("x4fs,RFlat")
    with pytest.raises(ValueError, match=r"in 2 GB on device 'cuda:0'; the least is 8.19 GB, with factory 'Flat'"):
        choose_factory(4_000_000, 512, 2 * 10**9, device="cuda:0")


def roomy(count, width):
    """Bytes that the smallest type takes, generously."""
    return count * (width // 8 + 30) + 10**7


@pytest.mark.parametrize("count", [50_000, 500_000, 5_000_000])
@pytest.mark.parametrize("width", [32, 128, 514])
@pytest.mark.parametrize("share", [1, 4, 8])
def test_the_choice_fits_the_budget(count, width, share):
    budget = 4 * count * width // share
    choice = choose_factory(count, width, max(budget, roomy(count, width)))
    assert choice.bytes <= max(budget, roomy(count, width))
    assert choice.bytes == memory_size(choice.factory, count, width, mapped=choice.mapped)
    assert "HNSW" not in choice.factory


def test_where_nothing_fits_the_least_is_named():
    with pytest.raises(ValueError, match=r"128 in 1 MB; the least is .* 'RR128,IVF4096,PQ32x4fs"):
        choose_factory(500_000, 128, 1_000_000)
    least = choose_factory(500_000, 128, 22_000_000)
    assert least.bytes <= 22_000_000


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
        "RR64,Flat",
        "PQ32x4fs,RFlat",
        "IVF64,PQ16,Refine(SQ8)",
        "MIPS,IVF64,Flat",
        "MIPS,HNSW16",
    ],
)
def test_predicted_sizes_are_those_of_faiss(factory):
    rows = np.random.default_rng(0).normal(size=(5000, 64)).astype(np.float32)
    stored = FaissBackend.build(factory, 64, [rows]).stored_bytes()
    assert memory_size(factory, 5000, 64) == pytest.approx(stored, rel=0.05)


TAKEN = """
import os, sys
def resident():
    return next(int(line.split()[1]) * 1024 for line in open("/proc/self/status") if line.startswith("RssAnon"))
{prepare}
before = resident()
index = load(sys.argv[1])
print(resident() - before, flush=True)
os._exit(0)  # only memory is asked for, not how threads of others end with the process
"""
FAISS = "from mmcl.index.faiss_setup import load_faiss; load = load_faiss().read_index"
TUPLES = "from mmcl.index import TupleIndex; load = TupleIndex.load; small = load(sys.argv[2])"
IN_MEMORY = TUPLES + "; load = lambda path: TupleIndex.load(path, memory_map=False)"
needs_proc = pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="resident memory is read from /proc")


def taken(prepare, *paths):
    """Bytes of a process of its own that loading the first of these takes."""
    command = [sys.executable, "-c", TAKEN.format(prepare=prepare), *map(str, paths)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, f"{done.returncode}: {done.stdout} {done.stderr}"
    return int(done.stdout)


@needs_proc
@pytest.mark.parametrize("factory", ["IVF256,PQ64x4fs", "RR64,IVF256,PQ32x4fs", "IVF256,SQ8", "Flat"])
def test_predicted_sizes_are_what_the_process_takes(factory, tmp_path):
    """Lists of fast codes take more than their codes: blocks that are not full, and allocations rounded up."""
    rows = np.random.default_rng(0).normal(size=(60_000, 64)).astype(np.float32)
    backend = FaissBackend.build(factory, 64, [rows])
    load_faiss().write_index(backend.index, str(tmp_path / "index"))
    found, predicted = taken(FAISS, tmp_path / "index"), memory_size(factory, 60_000, 64)
    assert 0.97 * found < predicted < (1.25 if "fs" in factory else 1.05) * found


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


@pytest.fixture(scope="module")
def within_a_quarter(make_score, unit_rows):
    """30,000 items and others' queries; build(**options) within a budget of a quarter of the raw size."""
    score = make_score("hadamard", 3, 32)
    items = {name: unit_rows(30_000, 32, seed) for seed, name in enumerate(("image", "audio"))}
    asked = {"text": unit_rows(200, 32, 7)}
    exact = TupleIndex.build(score, items, factory="Flat").search(asked)

    def build(**options):
        return TupleIndex.build(score, items, **{"memory_budget": 30_000 * 32, **options})

    def recall(index):
        found = index.search(asked).ids
        return np.mean([len(set(a) & set(b)) / 10 for a, b in zip(found, exact.ids, strict=True)])

    return build, recall


def test_codes_in_memory_and_vectors_on_the_disk(within_a_quarter, unit_rows, tmp_path):
    """Within a budget of a quarter: recall as asked for with other queries, kept on disk, and read from there."""
    build, recall = within_a_quarter
    index = build(queries={"text": unit_rows(300, 32, 8)})
    assert index.info()["factory"].endswith("x4fs,RFlat")
    assert "on the disk" in index.reason
    assert "at build queries set the effort: recall 0.9" in index.reason
    index.save(tmp_path / "index")
    loaded = TupleIndex.load(tmp_path / "index")
    assert loaded.info()["mapped"]
    assert loaded._tuples.snapshot.base.memory_mapped
    assert not TupleIndex.load(tmp_path / "index", memory_map=False)._tuples.snapshot.base.memory_mapped
    for each in (index, loaded, TupleIndex.load(tmp_path / "index", memory_map=False)):
        assert recall(each) >= 0.95
        assert each.info()["exact"]
        assert each.search_parameters == index.search_parameters
        assert each.reason == index.reason


def test_without_queries_the_recall_is_kept_all_the_same(within_a_quarter, tmp_path):
    """By the least effort that random queries are content with, also where the index is built in a folder."""
    build, recall = within_a_quarter
    index = build(out=tmp_path / "index")
    assert recall(index) >= 0.95
    assert index.search_parameters["nprobe"] < 512
    assert "random queries set the effort, a guess for true ones, which may need far less" in index.reason
    assert TupleIndex.load(tmp_path / "index").search_parameters == index.search_parameters
    lazy = build(recall_target=0.6)
    assert 0.6 <= recall(lazy) < recall(index)
    assert lazy.search_parameters["nprobe"] < index.search_parameters["nprobe"]


def test_what_no_effort_reaches_is_told(within_a_quarter):
    build, recall = within_a_quarter
    with pytest.warns(
        UserWarning, match=r"'RR32,IVF512,PQ8x4fs,RFlat' surely reach recall@10 1: the best, .* has 0\.9"
    ):
        index = build(memory_budget=700_000, recall_target=1.0)
    assert 0.9 < recall(index) < 1
    assert index.search_parameters["nprobe"] == 512


def test_rows_of_a_bank_are_queries(make_score, unit_rows):
    """Its coordinate, in nats, would take all of the codes, were it not scaled: recall would be 0.71."""
    score = make_score("hadamard", 3, 32)
    items = {name: unit_rows(30_000, 32, seed) for seed, name in enumerate(("image", "audio"))}
    bank = {"text": abs(unit_rows(300, 32, 8))}
    index = TupleIndex.build(score, items, memory_budget=30_000 * 33, bank=bank)
    exact = TupleIndex.build(score, items, factory="Flat", bank=bank).search(bank)
    found = index.search(bank).ids
    assert np.mean([len(set(a) & set(b)) / 10 for a, b in zip(found, exact.ids, strict=True)]) >= 0.95
    assert "at build rows of the bank set the effort" in index.reason


@needs_proc
def test_an_index_within_a_budget_is_within_it_after_a_plain_load(make_score, unit_rows, tmp_path):
    """What it takes of memory, and what it was said to take, below the budget; read into memory it is beyond."""
    score, budget = make_score("hadamard", 3, 64), 60_000 * 64
    items = {name: unit_rows(60_000, 64, seed) for seed, name in enumerate(("image", "audio"))}
    index = TupleIndex.build(score, items, memory_budget=budget, out=tmp_path / "index")
    assert memory_size(index.info()["factory"], 60_000, 64, mapped=True) <= budget
    small = {name: rows[:10] for name, rows in items.items()}
    TupleIndex.build(score, small).save(tmp_path / "small")
    within, beyond = (taken(how, tmp_path / "index", tmp_path / "small") for how in (TUPLES, IN_MEMORY))
    assert within <= budget + 60_000 * 50, "beside ids, which are read through arrow"
    assert beyond > within + 0.9 * 60_000 * 64 * 4


def test_indexes_that_do_not_say_are_read_into_memory(build, tmp_path):
    """Those written before there was such a choice."""
    build(factory="IVF16,Flat").save(tmp_path / "index")
    manifest = read_manifest(tmp_path / "index")
    assert manifest.pop("mapped") is False
    write_manifest(tmp_path / "index", {name: value for name, value in manifest.items() if name != "sha256"})
    index = TupleIndex.load(tmp_path / "index")
    assert (index.mapped, index._tuples.snapshot.base.memory_mapped, len(index)) == (False, False, 700)
