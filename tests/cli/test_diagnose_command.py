"""mmcl diagnose: what it prints, its JSON, and wrong arguments in one line."""

import json

import datasets
import numpy as np
import pytest
import torch
from typer.testing import CliRunner

from mmcl.cli import app
from mmcl.synthetic.joints import parity


def mmcl(*arguments):
    return CliRunner().invoke(app, ["diagnose", *[str(argument) for argument in arguments]])


@pytest.fixture(scope="module")
def rows(tmp_path_factory):
    """Parity of three columns, and a fourth that belongs to none of them."""
    path = tmp_path_factory.mktemp("rows") / "data.parquet"
    drawn = parity(2.0).sample(800, torch.Generator().manual_seed(0))
    words = {name: np.array(["no", "yes"])[value.numpy()].tolist() for name, value in drawn.items()}
    datasets.Dataset.from_dict({**words, "key": list(range(800))}).to_parquet(path)
    return path


MODALITIES = ("--modality", "x1", "--modality", "second=x2", "--modality", "x3")


def test_it_says_what_to_train(rows):
    told = mmcl(rows, *MODALITIES)
    assert told.exit_code == 0, told.output
    assert "800 rows: x1 2 categories, second 2 categories, x3 2 categories" in told.stdout
    assert "Train Hadamard" in told.stdout
    beyond = next(line for line in told.stdout.splitlines() if line.startswith("beyond pairs"))
    assert float(beyond.split()[3]) == pytest.approx(parity(2.0).total_correlation(), rel=0.15)


def test_json_holds_the_same(rows):
    told = mmcl(rows, *MODALITIES, "--json", "--rows", 500, "--seed", 1)
    found = json.loads(told.stdout)
    assert (found["score"], found["method"], found["rows"]) == ("hadamard", "counts", 500)
    assert found["beyond"]["low"] > 0.3
    assert found["kinds"]["second"] == "2 categories"
    assert json.loads(mmcl(rows, *MODALITIES, "--json", "--rows", 500, "--seed", 1).stdout) == found


@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        (("--modality", "x1"), 1, "two modalities or more"),
        (("--modality", "x1", "--modality", "smell"), 1, "no column 'smell' for modality 'smell'"),
        (("--modality", "x1", "--modality", "x1=x2"), 2, "named twice"),
        (("--modality", "=x1"), 2, "is not NAME or NAME=COLUMN"),
        ((*MODALITIES, "--modality", "key", "--method", "encoders"), 1, "key: 800 distinct values"),
        (("--method", "counting"), 2, "counting"),
        (("--rows", "-1"), 2, "greater than or equal to 1"),
    ],
)
def test_wrong_arguments_end_in_one_line(rows, arguments, code, said):
    told = mmcl(rows, *arguments)
    assert told.exit_code == code, told.output
    assert said in told.stderr
    assert "Traceback" not in told.output


def test_data_that_are_not_there(tmp_path):
    told = mmcl(tmp_path / "none.parquet")
    assert told.exit_code == 1
    assert "no data at" in told.stderr
