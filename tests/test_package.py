"""The package as others install and import it."""

import statistics
import subprocess
import sys
import time
import zipfile
from pathlib import Path

import pytest

import mmcl

ROOT = Path(__file__).parents[1]


def run(code, folder=None):
    return subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True, cwd=folder)


def test_every_public_name_resolves_and_an_unknown_one_lists_them():
    for name in mmcl.__all__:
        assert getattr(mmcl, name).__name__ == name
    assert set(mmcl.__all__) <= set(dir(mmcl))
    with pytest.raises(AttributeError, match="has no attribute 'Hadamrd'; it has"):
        mmcl.Hadamrd  # noqa: B018


def loaded_after(statement, modules):
    """Which of `modules` a fresh process has loaded after the statement."""
    code = f"import sys; {statement}; print([name for name in {modules} if name in sys.modules])"
    return run(code).stdout.strip()


def test_importing_mmcl_loads_nothing_heavy():
    heavy = ["faiss", "open_clip", "transformers", "datasets", "matplotlib", "sklearn"]
    assert loaded_after("import mmcl", ["torch", *heavy]) == "[]"
    assert loaded_after("from mmcl import Hadamard, MultimodalModel, TupleIndex", heavy) == "[]"
    assert loaded_after("import mmcl.cli", ["torch", *heavy]) == "[]"


def test_no_import_runs_upward():
    """Scores and losses know no model, models no index; encoders no data."""
    below = {
        "scores": "mmcl.scores, mmcl.losses",
        "model": "mmcl.model",
        "index": "mmcl.index",
    }
    above = {
        "scores": ("mmcl.model", "mmcl.index", "mmcl.encoders", "mmcl.training"),
        "model": ("mmcl.index", "mmcl.training", "mmcl.zero_shot", "mmcl.shards"),
        "index": ("mmcl.model", "mmcl.training", "mmcl.encoders"),
    }
    for name, modules in below.items():
        assert loaded_after(f"import {modules}", above[name]) == "[]", name


def median_seconds(*codes, repeats=7):
    """Median wall time of each program, run in turns."""
    times = [[] for _ in codes]
    for _ in range(repeats):
        for code, kept in zip(codes, times):
            start = time.perf_counter()
            run(code)
            kept.append(time.perf_counter() - start)
    return [statistics.median(kept) for kept in times]


@pytest.mark.nightly
def test_import_costs_little_more_than_torch_and_help_is_quick():
    helped = "import sys; sys.argv = ['mmcl', '--help']; from mmcl.cli import main; main()"
    torch, package, help_seconds = median_seconds("import torch", "import torch, mmcl", helped)
    assert package <= 1.3 * torch
    assert help_seconds < 1.0


@pytest.mark.slow
def test_the_wheel_holds_mmcl_alone_and_works_beside_a_folder_named_eval(tmp_path):
    build = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--wheel-dir", str(tmp_path), str(ROOT)]
    subprocess.run(build, check=True, capture_output=True)
    (wheel,) = tmp_path.glob("mmcl-*.whl")
    names = zipfile.ZipFile(wheel).namelist()
    top = {name.split("/")[0] for name in names}
    assert {name for name in top if not name.endswith(".dist-info")} == {"mmcl"}
    assert "mmcl/py.typed" in names
    install = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", str(tmp_path / "site")]
    subprocess.run([*install, str(wheel)], check=True, capture_output=True)
    (tmp_path / "work" / "eval").mkdir(parents=True)
    (tmp_path / "work" / "eval" / "__init__.py").write_text("raise RuntimeError('not yours')")
    code = (
        f"import sys; sys.path.insert(0, {str(tmp_path / 'site')!r}); import mmcl, torch\n"
        "from mmcl import Hadamard\n"
        "print(mmcl.__file__, Hadamard(('a', 'b'), 4)({'a': torch.ones(2, 4), 'b': torch.ones(2, 4)}).shape)"
    )
    assert str(tmp_path / "site") in run(code, tmp_path / "work").stdout
