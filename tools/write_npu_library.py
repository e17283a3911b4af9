"""Write the library of an NPU: ``python tools/write_npu_library.py PLAN UNIT FOLDER``."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from pi2.backends.hexagon.arrays import UnitArrays
from pi2.backends.hexagon.backend import KINDS
from pi2.backends.hexagon.specification import write_library
from pi2.diagnostics import UserError
from pi2.diagnostics.texts import render_full
from pi2.fitting import describe_unit
from pi2.fitting.check import load_plan


def main(arguments: list[str]) -> int:
    """Write the library that the command line asks for."""
    parser = argparse.ArgumentParser(
        prog="python tools/write_npu_library.py",
        description="Compile the graphs of a plan's NPU ahead of time.",
    )
    parser.add_argument("plan", type=Path, metavar="PLAN")
    parser.add_argument("unit", metavar="UNIT", help="name of the NPU in the device file")
    parser.add_argument("folder", type=Path, metavar="FOLDER", help="where the library goes")
    chosen = parser.parse_args(arguments)
    try:
        resolved = load_plan(chosen.plan)
        known = resolved.device.units.get(chosen.unit)
        if known is None or known.kind not in KINDS:
            parser.error(f"the device {resolved.device.id!r} has no NPU named {chosen.unit!r}")
        share = describe_unit(resolved, chosen.unit).share
        assert share is not None, chosen.unit
        write_library(UnitArrays(share).spec, chosen.folder)
    except UserError as error:
        print(render_full(error.diagnostics), file=sys.stderr)
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
