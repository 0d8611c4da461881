"""Small and repeatable: one thread, fixed seeds, no network, no display; and the fixtures that all tests share."""

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("MPLBACKEND", "Agg")
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["HF_DATASETS_OFFLINE"] = "1"
os.environ["TRANSFORMERS_OFFLINE"] = "1"

import random
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import settings
from torch.nn import functional as F

import mmcl
from mmcl.scores import Hadamard, SumOfPairs

torch.set_num_threads(1)
settings.register_profile("mmcl", deadline=None, max_examples=25, derandomize=True)
settings.load_profile("mmcl")

NAMES = ("image", "audio", "text", "touch", "smell")

SCORE_KINDS = {
    "sum_of_pairs": lambda *args, **options: SumOfPairs(*args, **options),
    "hadamard": lambda *args, **options: Hadamard(*args, **options),
    "tied": lambda *args, **options: Hadamard(*args, tied=True, **options),
    "neutral": lambda *args, **options: Hadamard(*args, neutral=True, **options),
    "pairs_and_hadamard": lambda *args, **options: SumOfPairs(*args, **options) + Hadamard(*args, **options),
    "pairs_and_neutral": lambda *args, **options: (
        SumOfPairs(*args, **options) + Hadamard(*args, neutral=True, **options)
    ),
}


def pytest_itemcollected(item):
    """Parameters stand in one order in every process: a set's order, and so its name, follows the hash seed."""
    parameters = item.callspec.params if hasattr(item, "callspec") else {}
    sets = [name for name, value in parameters.items() if isinstance(value, set | frozenset)]
    if sets:
        raise pytest.UsageError(f"{item.nodeid}: {', '.join(sets)} is a set; give a tuple or a word")


@pytest.fixture(autouse=True)
def _fixed_seeds():
    random.seed(0)
    np.random.seed(0)
    torch.manual_seed(0)


@pytest.fixture(scope="session", params=SCORE_KINDS)
def kind(request):
    """Every kind of score, by its name in `make_score`."""
    return request.param


@pytest.fixture(scope="session", params=[kind for kind in SCORE_KINDS if kind.endswith(("pairs", "neutral"))])
def forgiving_kind(request):
    """Every kind of score that can do without a modality."""
    return request.param


@pytest.fixture(scope="session")
def make_score():
    """make_score(kind, names or their number, dim, seed=0): a score whose every parameter has left its start."""

    def build(kind, names, dim, seed=0, temperature=0.3):
        names = NAMES[:names] if isinstance(names, int) else names
        score = SCORE_KINDS[kind](names, dim, temperature=temperature)
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for parameter in score.parameters():
                parameter += 0.3 * torch.randn(parameter.shape, generator=generator)
        return score

    return build


@pytest.fixture(scope="session")
def unit_rows():
    """unit_rows(n, dim, seed=0, dtype=torch.float32): random rows of norm 1."""

    def draw(n, dim, seed=0, dtype=torch.float32):
        generator = torch.Generator().manual_seed(seed)
        return F.normalize(torch.randn(n, dim, generator=generator, dtype=torch.float64), dim=1).to(dtype)

    return draw


@pytest.fixture(scope="session")
def unit_embeddings(unit_rows):
    """unit_embeddings(m, n, dim, seed=0, dtype=torch.float32): {modality: unit rows} of the first m modalities."""

    def draw(m, n, dim, seed=0, dtype=torch.float32):
        return {name: unit_rows(n, dim, 100 * seed + i, dtype) for i, name in enumerate(NAMES[:m])}

    return draw


@pytest.fixture(scope="session")
def start_ranks(tmp_path_factory):
    """start_ranks(script, world): runs `python SCRIPT RANK WORLD FOLDER` for every rank, and loads FOLDER/rankN.pt."""

    def start(script, world):
        folder = tmp_path_factory.mktemp(f"world{world}")
        environment = os.environ | {"PYTHONPATH": str(Path(mmcl.__file__).parents[1]), "OMP_NUM_THREADS": "1"}
        command = [sys.executable, str(script)]
        options = {"env": environment, "stderr": subprocess.PIPE, "text": True}
        ranks = [subprocess.Popen([*command, str(rank), str(world), str(folder)], **options) for rank in range(world)]
        try:
            errors = [process.communicate(timeout=300)[1] for process in ranks]
        finally:
            for process in ranks:
                process.kill()
        assert [process.returncode for process in ranks] == [0] * world, "\n".join(errors)
        return [torch.load(folder / f"rank{rank}.pt", weights_only=True) for rank in range(world)]

    return start
