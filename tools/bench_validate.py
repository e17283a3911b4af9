"""Times `pi2 validate`: one plan as a whole process, and a folder of 1,000 plans.

``python tools/bench_validate.py`` writes the plans into a temporary folder: every shipped model on
every shipped device, with growing memory and different contexts, so that no two are alike.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
import time
from itertools import count
from pathlib import Path

from pi2.authoring.drafting import Wish, draft_plan
from pi2.diagnostics import UserError
from pi2.fitting.check import check_file
from pi2.plan.documents.device import Device
from pi2.plan.documents.model import Model
from pi2.plan.reading.references import find_shipped_folder, list_shipped

MIB = 1 << 20


def write_plans(folder: Path, number: int) -> None:
    """Write ``number`` plans."""
    devices = [check_file(path).document for path in list_shipped("device").values()]
    models = [check_file(path).document for path in list_shipped("model").values()]
    written = 0
    for step in count(1):
        for device in devices:
            for model in models:
                assert isinstance(device, Device)
                assert isinstance(model, Model)
                wish = Wish(
                    device=device.id,
                    model=model.id,
                    store="store",
                    budget_bytes=(3072 + 257 * step) * MIB,
                    context=512 * (1 + step % 4),
                )
                try:
                    text = draft_plan(wish, device, model)
                except UserError:
                    continue  # too little memory for this model
                (folder / f"{written:04}.plan.toml").write_text(text)
                written += 1
                if written == number:
                    return


def time_command(*arguments: str) -> float:
    """Seconds of one ``pi2`` as a whole process."""
    start = time.perf_counter()
    subprocess.run([sys.executable, "-m", "pi2", *arguments], capture_output=True, check=False)
    return time.perf_counter() - start


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("-r", "--repetitions", type=int, default=7)
    parser.add_argument("-n", "--plans", type=int, default=1000)
    options = parser.parse_args()
    demo = str(find_shipped_folder() / "demo.plan.toml")
    with tempfile.TemporaryDirectory() as name:
        write_plans(Path(name), options.plans)
        for label, target in (("one plan", demo), (f"{options.plans} plans", name)):
            times = sorted(time_command("validate", target) for _ in range(options.repetitions))
            middle = times[len(times) // 2]
            print(f"{label}: median {middle:.2f} s, from {times[0]:.2f} to {times[-1]:.2f} s")


if __name__ == "__main__":
    main()
