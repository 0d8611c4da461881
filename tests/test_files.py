"""Where a folder is asked for and a file stands in its place, everything that writes says so before it works."""

import numpy as np
import pytest

from mmcl.files import made_folder
from mmcl.index import TupleIndex
from mmcl.scores import SumOfPairs
from mmcl.shards import ShardWriter
from mmcl.training import fit


@pytest.mark.parametrize("below", ["", "deeper", "deeper/still"])
def test_a_file_in_a_folder_s_place_is_named(below, tmp_path):
    file = tmp_path / "notes.txt"
    file.write_text("mine")
    with pytest.raises(ValueError, match=r"notes.txt is a file; an index is saved as a folder"):
        made_folder(file / below, "an index is saved")
    assert file.read_text() == "mine"
    assert made_folder(tmp_path / "new" / below, "it is kept").is_dir()


def test_everything_that_writes_folders_refuses_a_file(tmp_path, vectors_model, numbers):
    file = tmp_path / "notes.txt"
    file.write_text("mine")
    index = TupleIndex.build(SumOfPairs(("a", "b"), 4), {"a": np.eye(4)})
    writers = {
        "embeddings are written": lambda: ShardWriter(file, {}),
        "an index is saved": lambda: index.save(file),
        "a run is kept": lambda: fit(vectors_model, numbers, out=file, epochs=1, batch_size=4, progress=False),
    }
    for told, write in writers.items():
        with pytest.raises(ValueError, match=f"notes.txt is a file; {told} as a folder"):
            write()
    with pytest.raises(ValueError, match="notes.txt is a file; an index is saved as a folder"):
        TupleIndex.build(SumOfPairs(("a", "b"), 4), {"a": np.eye(4)}, factory="Flat", out=file / "deep")
    assert file.read_text() == "mine"


@pytest.fixture
def vectors_model():
    from mmcl.encoders import vectors
    from mmcl.model import MultimodalModel

    return MultimodalModel({name: vectors(3, dim=4) for name in ("a", "b")}, SumOfPairs(("a", "b"), 4))


@pytest.fixture
def numbers():
    import datasets

    rows = np.random.default_rng(0).normal(size=(8, 3)).tolist()
    return datasets.Dataset.from_dict({"a": rows, "b": rows})
