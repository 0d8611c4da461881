"""Where searches run. FAISS's GPU side is stood in for by copies on the CPU that record what they are asked."""

import numpy as np
import pytest

from mmcl.index import TupleIndex, devices
from mmcl.index.faiss_setup import load_faiss


class OnGpu:
    """A FAISS index that says it is on GPUs, and refuses what those refuse."""

    def __init__(self, index, gpus, shard):
        self.index, self.gpus, self.shard, self.searches = index, gpus, shard, []

    def search(self, queries, k, params=None):
        assert k <= devices.GPU_K
        assert getattr(params, "sel", None) is None
        self.searches.append((len(queries), k))
        return self.index.search(queries, k, params=params)


@pytest.fixture
def gpus(monkeypatch):
    """gpus(n, lacking=()): as if there were n of them, for all types but some."""

    def there(count, lacking=()):
        def clone(index, options, gpus):
            if type(load_faiss().downcast_index(index)).__name__ in lacking:
                raise RuntimeError("Error in clone_Index at GpuCloner.cpp:1: Error: This index type is not implemented")
            return OnGpu(index, gpus, options.shard)

        class Options:
            shard = False

        faiss = load_faiss()
        monkeypatch.setattr(faiss, "get_num_gpus", lambda: count)
        monkeypatch.setattr(faiss, "StandardGpuResources", object, raising=False)
        monkeypatch.setattr(faiss, "index_cpu_to_gpus_list", clone, raising=False)
        monkeypatch.setattr(faiss, "GpuMultipleClonerOptions", Options, raising=False)

    return there


def engine(index):
    return index._tuples.snapshot.base._on_gpus


@pytest.mark.parametrize(
    ("device", "name", "numbers"),
    [("cuda", "cuda:0", [0]), ("cuda:2", "cuda:2", [2]), ("cuda:all", "cuda:all", [0, 1, 2]), ("auto", "cuda:0", [0])],
)
def test_an_index_goes_to_the_gpus_that_were_named(device, name, numbers, gpus, build, queries, tmp_path):
    gpus(3)
    index = build(device=device)
    assert index.device == name
    assert engine(index).gpus == numbers
    assert engine(index).shard
    expected = build().search({"text": queries})
    np.testing.assert_array_equal(index.search({"text": queries}).ids, expected.ids)
    assert engine(index).searches == [(25, 10)]
    index.save(tmp_path / "index")
    assert TupleIndex.load(tmp_path / "index").device == "cpu"
    assert TupleIndex.load(tmp_path / "index", device=device).device == name


def test_saved_with_gpus_and_loaded_without(gpus, build, queries, tmp_path, monkeypatch):
    gpus(1)
    build(device="cuda", factory="IVF16,Flat").save(tmp_path / "index")
    monkeypatch.undo()
    index = TupleIndex.load(tmp_path / "index", device="auto")
    assert index.device == "cpu"
    np.testing.assert_array_equal(
        index.search({"text": queries}, nprobe=16).ids, build(factory="Flat").search({"text": queries}).ids
    )


def test_without_a_gpu_auto_is_the_cpu_and_cuda_an_error(gpus, build):
    gpus(0)
    assert build(device="auto").device == "cpu"
    for device in ("cuda", "cuda:0", "cuda:all"):
        with pytest.raises(ValueError, match=f"{device}.*no GPU.*device='cpu'"):
            build(device=device)


def test_a_cpu_build_of_faiss_says_how_to_get_the_other(monkeypatch, build):
    faiss = load_faiss()
    monkeypatch.delattr(faiss, "StandardGpuResources", raising=False)
    with pytest.raises(ValueError, match="pip install .* faiss-gpu"):
        build(device="cuda")
    assert build(device="auto").device == "cpu"


@pytest.mark.parametrize("device", ["gpu", "cuda:", "cuda:-1", "cuda:x", "CUDA", None, 0, "mps"])
def test_other_names_are_refused_with_those_there_are(device, build):
    with pytest.raises(ValueError, match="device must be 'cpu', 'cuda', 'cuda:N', 'cuda:all' or 'auto'"):
        build(device=device)


def test_a_gpu_that_is_not_there_is_named(gpus, build):
    gpus(2)
    with pytest.raises(ValueError, match="cuda:2.*there are 2 GPUs, cuda:0 to cuda:1"):
        build(device="cuda:2")


def test_types_that_gpus_lack_are_an_error_and_auto_stays_on_the_cpu(gpus, build):
    gpus(1, lacking=("IndexHNSWFlat",))
    with pytest.raises(ValueError, match="no GPU form.*device='cpu'"):
        build(factory="HNSW16", device="cuda")
    assert build(factory="HNSW16", device="auto").device == "cpu"


def test_k_beyond_the_gpus_is_an_error_and_auto_asks_the_cpu(gpus, make_score, unit_rows):
    gpus(1)
    score, rows = make_score("sum_of_pairs", 2, 8), unit_rows(3000, 8)
    query = unit_rows(1, 8, seed=1)
    index = TupleIndex.build(score, {"image": rows}, device="cuda")
    with pytest.raises(ValueError, match="k = 2049 is beyond the 2048 of FAISS on GPUs"):
        index.search({"audio": query}, k=2049)
    index = TupleIndex.build(score, {"image": rows}, device="auto")
    assert index.search({"audio": query}, k=3000).counts[0] == 3000
    assert engine(index).searches == []
    index.search({"audio": query}, k=5)
    assert engine(index).searches == [(1, 5)]


def test_items_come_and_go_on_gpus_too(gpus, build, items, queries):
    gpus(1)
    for factory in ("Flat", "IVF16,Flat"):
        index = build(factory=factory, device="cuda")
        index.remove(range(0, 700, 2))
        index.add({name: items[name][:1] for name in ("image", "audio")}, ids=[0])
        hits = index.search({"text": queries}, k=400, **({"nprobe": 16} if "IVF" in factory else {}))
        assert all(sorted(row[:351]) == [0, *range(1, 700, 2)] for row in hits.ids)
        index.compact()
        assert index.device == "cuda:0"
        hits = index.search({"text": queries}, k=400, **({"nprobe": 16} if "IVF" in factory else {}))
        assert all(sorted(row[:351]) == [0, *range(1, 700, 2)] for row in hits.ids)
        assert engine(index).searches
