"""The benchmark of losses: every case computes what it says, and growth is fitted as stated."""

import importlib.util
import json
from pathlib import Path

import numpy as np
import pytest
import torch

FILE = Path(__file__).parents[2] / "eval" / "benchmarks" / "losses.py"
spec = importlib.util.spec_from_file_location("losses_benchmark", FILE)
benchmark = importlib.util.module_from_spec(spec)
spec.loader.exec_module(benchmark)


def gradients(make, m):
    rows = benchmark.batch(32, m)
    torch.manual_seed(0)
    make(rows)()
    return {name: row.grad for name, row in rows.items()}


@pytest.mark.parametrize(
    ("m", "ours", "theirs", "times"),
    [
        (2, "mmcl", "open_clip", 1),
        (2, "mmcl", "mmcl, dense", 1),
        (2, "mmcl", "sentence-transformers, cached", 1),
        (3, "mmcl", "mmcl, dense", 1),
        (3, "mmcl, sum of pairs", "open_clip, sum of pairs", 3),
    ],
)
def test_cases_side_by_side_are_the_same_loss(m, ours, theirs, times):
    """open_clip's of every pair are summed, ours averaged."""
    if theirs == "sentence-transformers, cached":
        pytest.importorskip("sentence_transformers")
    a, b = (gradients(benchmark.CASES[m][name], m) for name in (ours, theirs))
    for name in a:
        torch.testing.assert_close(times * a[name], b[name], rtol=1e-4, atol=1e-6)


def test_shuffled_case_is_symile_but_for_the_shuffle():
    pytest.importorskip("symile")
    a, b = (gradients(benchmark.CASES[3][name], 3) for name in ("mmcl, shuffled", "symile"))
    for name in a:  # w starts at 1 and both shuffle alike under one seed
        torch.testing.assert_close(a[name], b[name], rtol=1e-4, atol=1e-6)


def test_every_case_runs_in_turns_and_dense_ones_stop():
    times = benchmark.timed(64, 3, 2)
    assert set(times) == set(benchmark.CASES[3]) and all(len(each) == 2 for each in times.values())
    assert set(benchmark.CASES[2]) - set(benchmark.cases(65536, 2)) == {"mmcl, dense", "open_clip"}


def test_growth_is_the_slope_of_logarithms():
    rows = [
        {"m": 2, "case": "mmcl", "count": n, "seconds": 1e-9 * n**2, "extra_mib": 0.01 * n} for n in (1024, 4096, 8192)
    ]
    (found,) = benchmark.exponents([{**row, "times_products": 1.0} for row in rows])
    assert found["extra_mib"] == pytest.approx(1) and found["seconds"] == pytest.approx(2)
    assert benchmark.exponents(rows[:2]) == []


def test_what_was_committed_keeps_its_promises():
    """Above 4096 rows: less time than open_clip, a fifth of its memory at 8,192, at most 1.6 of the products alone."""
    results = json.loads((FILE.parents[1] / "results" / "losses.json").read_text())
    assert all(row["command"].startswith("python eval/benchmarks/losses.py --sizes") for row in results["rows"])
    row = {(row["m"], row["count"], row["case"]): row for row in results["rows"]}
    for m, other in ((2, "open_clip"), (3, "mmcl, dense")):
        ours, theirs = row[m, 8192, "mmcl"], row[m, 8192, other]
        assert ours["seconds"] < theirs["seconds"]
        assert 5 * ours["extra_mib"] < theirs["extra_mib"]
    three = row[3, 8192, "mmcl"]
    assert three["times_products"] <= 1.6 and three["extra_mib"] <= 400
    shuffled, symile = row[3, 8192, "mmcl, shuffled"], row[3, 8192, "symile"]
    assert shuffled["seconds"] < symile["seconds"] and shuffled["extra_mib"] < symile["extra_mib"]
    assert row[3, 65536, "mmcl"]["extra_mib"] <= 3072
    slopes = {(each["m"], each["case"]): each for each in results["exponents"]}
    assert slopes[3, "mmcl"]["extra_mib"] < 1.3 < 1.7 < slopes[3, "mmcl, dense"]["extra_mib"]
    assert np.isfinite([each["seconds"] for each in results["rows"]]).all()
