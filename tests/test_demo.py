"""The main job and the README's commands, as a newcomer runs them."""

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


def mmcl(arguments, folder):
    """Run `mmcl ...` in a process of its own; two threads, as on a small machine."""
    code = "from mmcl.cli import main; main()"
    environment = {**os.environ, "OMP_NUM_THREADS": "2"}
    command = [sys.executable, "-c", code, *arguments]
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=600)


SEEDS = [pytest.param(seed, marks=pytest.mark.slow) for seed in (0,)]
SEEDS += [pytest.param(seed, marks=pytest.mark.nightly) for seed in range(1, 7)]


@pytest.fixture(scope="module", params=SEEDS)
def demo(request, tmp_path_factory):
    """(seed, the folder that the demo was run in)."""
    folder = tmp_path_factory.mktemp(f"seed{request.param}")
    result = mmcl(["demo", "--out", "demo", "--seed", str(request.param)], folder)
    assert result.returncode == 0, result.stderr
    return request.param, folder


def test_hadamard_hears_the_sum_that_a_sum_of_pairs_cannot(demo):
    _, folder = demo
    results = json.loads((folder / "demo/results.json").read_text())
    assert results["scores"]["hadamard"]["zero_shot_accuracy"] >= 0.97
    assert results["scores"]["sum_of_pairs"]["zero_shot_accuracy"] <= 0.15
    assert min(results["control"].values()) >= 0.95
    assert results["scores"]["hadamard"]["recall_at_1"] == 1.0
    assert results["chance"] == 0.1
    assert set(results["scores"]) == set(results["train_seconds"]) == {"hadamard", "tied_hadamard", "sum_of_pairs"}
    assert set(results["control"]) == {"hadamard", "sum_of_pairs"}
    assert results["train_seconds"]["hadamard"] < 30
    assert results["total_seconds"] < 180  # under 90 on two idle cores


def test_the_demos_index_answers_with_right_sums(demo):
    _, folder = demo
    found = mmcl(["index", "search", "demo/index", "--model", "demo/model", "--query", "text=seven", "--json"], folder)
    hits = json.loads(found.stdout)["hits"]
    assert all((hit["image_digit"] + hit["audio_digit"]) % 10 == 7 for hit in hits)


def readme_commands():
    """Every line of the README's bash blocks that calls mmcl."""
    blocks = re.findall(r"```bash\n(.*?)```", (ROOT / "README.md").read_text(encoding="utf-8"), re.DOTALL)
    return [shlex.split(line)[1:] for block in blocks for line in block.splitlines() if line.startswith("mmcl ")]


@pytest.mark.parametrize("demo", SEEDS[:1], indirect=True)
def test_every_command_of_the_readme_runs(demo):
    _, folder = demo
    for name in ("examples", "indexes"):
        shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("built"))
    commands = readme_commands()
    assert len(commands) >= 8
    for command in commands:
        result = mmcl(command, folder)
        assert result.returncode == 0, (command, result.stderr)
        if command[0] == "zero-shot":
            assert result.stdout.startswith("seven "), result.stdout
    history = json.loads((folder / "runs/digits/history.json").read_text())
    assert history[-1]["validation_text_recall_at_1"] > 0.8
