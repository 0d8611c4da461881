"""The demo over several seeds: figures with their range, and the picture of the first seed.

python eval/demo_seeds.py                    # seeds 0 1 2; writes eval/results/demo_seeds.json and demo.png
python eval/demo_seeds.py --seeds 0 --out figures
"""

import argparse
import json
import shutil
import sys
import tempfile
from pathlib import Path

from mmcl.demo import run_demo

RESULTS = Path(__file__).parent / "results"
EXPECTED = {"hadamard at least": 0.97, "sum_of_pairs at most": 0.15, "controls at least": 0.95}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--out", type=Path, default=RESULTS)
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    runs = {}
    for seed in options.seeds:
        with tempfile.TemporaryDirectory() as folder:
            runs[seed] = run_demo(folder, seed)
            if seed == options.seeds[0]:
                shutil.copy(Path(folder) / "demo.png", options.out / "demo.png")
    accuracy = {
        name: [run["scores"][name]["zero_shot_accuracy"] for run in runs.values()] for name in runs[seed]["scores"]
    }
    control = {name: [run["control"][name] for run in runs.values()] for name in runs[seed]["control"]}
    summary = {
        "command": "python " + " ".join(["eval/demo_seeds.py", *sys.argv[1:]]),
        "expected": EXPECTED,
        "zero_shot_accuracy": {name: {"min": min(row), "max": max(row)} for name, row in accuracy.items()},
        "control": {name: {"min": min(row), "max": max(row)} for name, row in control.items()},
        "runs": runs,
    }
    (options.out / "demo_seeds.json").write_text(json.dumps(summary, indent=2) + "\n", encoding="utf-8")
    print(json.dumps({key: summary[key] for key in ("zero_shot_accuracy", "control")}, indent=2))
    kept = min(accuracy["hadamard"]) >= 0.97 and max(accuracy["sum_of_pairs"]) <= 0.15
    kept = kept and min(value for row in control.values() for value in row) >= 0.95
    sys.exit(0 if kept else 1)


if __name__ == "__main__":
    main()
