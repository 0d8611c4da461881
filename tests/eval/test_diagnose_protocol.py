"""Alarms and findings of a diagnosis over many seeds: the committed run, and a tenth of it anew."""

import json
import subprocess
import sys
from pathlib import Path

import diagnose
import pytest

EVAL = Path(__file__).parents[2] / "eval"

MEASURED = json.loads((EVAL / "results" / "diagnose.json").read_text())


@pytest.mark.parametrize("name", diagnose.CASES)
def test_the_committed_run_is_whole_and_kept_its_bounds(name):
    case, found = diagnose.CASES[name], MEASURED["cases"][name]
    assert MEASURED["command"] == "python eval/diagnose.py"
    assert [run["seed"] for run in found["runs"]] == list(range(case.seeds))
    assert found["held"] is case.held(found["runs"]) is True


def test_bounds_are_missed_by_alarms_and_by_wrong_estimates():
    quiet, alarm = {"beyond": [0.0, 0.0, 0.1]}, {"beyond": [0.1, 0.05, 0.2]}
    nothing = diagnose.Case(diagnose.digits, "counts", 100, alarms=10)
    assert nothing.held([quiet] * 90 + [alarm] * 10)
    assert not nothing.held([quiet] * 89 + [alarm] * 11)
    something = diagnose.Case(diagnose.digits, "counts", 20, truth=0.11, within=0.1)
    assert something.held([alarm] * 20)
    assert not something.held([alarm] * 19 + [{"beyond": [0.13, 0.1, 0.2]}])
    assert not something.held([alarm] * 19 + [{"beyond": [0.11, 0.0, 0.2]}])
    assert not diagnose.Case(diagnose.digits, "encoders", 20).held([alarm] * 19 + [quiet])


@pytest.mark.slow
def test_a_tenth_of_the_seeds_keeps_the_bounds(tmp_path):
    command = [sys.executable, EVAL / "diagnose.py", "--quick", "--out", tmp_path]
    done = subprocess.run(command, check=False, capture_output=True, text=True)
    print(done.stdout)
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads((tmp_path / "diagnose.json").read_text())["cases"]
    assert set(found) == set(diagnose.CASES)
    assert (tmp_path / "diagnose.png").stat().st_size > 10_000
