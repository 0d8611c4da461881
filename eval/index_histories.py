"""A thousand random lives of an index against a dictionary: the nightly test, and what it counted.

    python eval/index_histories.py             # eval/results/index_histories.json, about 20 minutes
    python eval/index_histories.py --factory HNSW8 --out figures

Each history adds, upserts, removes, compacts, saves, loads, searches and filters at random, up to 30 steps. Every one
is checked: no removed, repeated, padded or missing id, the right scores, the right metadata.
"""

import argparse
import json
import os
import platform
import re
import subprocess
import sys
import time
from datetime import date
from pathlib import Path

ROOT = Path(__file__).parent.parent
TESTS = ROOT / "tests" / "index" / "test_histories.py"
TEST = "test_a_thousand_histories_agree_with_a_dictionary"
COUNTED = re.compile(r"^(\S+): (\d+) histories of up to (\d+) steps, (\d+) more without metadata$", re.MULTILINE)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--factory", default="", help="only this of the test's types")
    parser.add_argument("--out", type=Path, default=ROOT / "eval" / "results")
    options = parser.parse_args()
    start = time.perf_counter()
    chosen = f"{TESTS}::{TEST}" + (f"[{options.factory}]" if options.factory else "")
    command = [sys.executable, "-m", "pytest", "-q", "-m", "nightly", chosen]
    run = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, text=True, check=False)
    print(run.stdout)
    counted = {factory: [int(each) for each in rest] for factory, *rest in COUNTED.findall(run.stdout)}
    if run.returncode or not counted:
        sys.exit(run.returncode or 1)
    summary = {
        "command": " ".join(["python eval/index_histories.py", *sys.argv[1:]]),
        "machine": f"{platform.system()} {platform.machine()}, {os.cpu_count()} cores",
        "date": date.today().isoformat(),
        "seconds": round(time.perf_counter() - start),
        "histories": sum(count for count, _, _ in counted.values()),
        "without metadata": sum(bare for _, _, bare in counted.values()),
        "steps at most": max(steps for _, steps, _ in counted.values()),
        "of each type": {factory: count + bare for factory, (count, _, bare) in counted.items()},
        "failed": 0,
    }
    options.out.mkdir(parents=True, exist_ok=True)
    (options.out / "index_histories.json").write_text(json.dumps(summary, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
