"""Modules that a test adds to folders of pi2 that are listed, from a temporary folder."""

import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

ROOT = Path(__file__).parents[2]

STARTS = """
import sys
from importlib.machinery import PathFinder
from pathlib import Path

PLACES = {
    "pi2.formats": "formats",
    "pi2.backends.kernels.unpacking": "unpacking",
    "pi2.model": "model",
}


class Finder(PathFinder):
    @classmethod
    def find_spec(cls, name, path=None, target=None):
        spec = super().find_spec(name, path, target)
        if spec is not None and name in PLACES:
            spec.submodule_search_locations.append(str(Path(__file__).parent / PLACES[name]))
        return spec


sys.meta_path.insert(0, Finder)
"""
"""Every process of a test finds the modules of more folders."""


def run_with(folder: Path, modules: Mapping[str, str], script: str) -> None:
    """Run ``script FOLDER`` with ``modules``, by the names of folders, added as ``toy``."""
    for place, text in modules.items():
        (folder / place).mkdir()
        (folder / place / "toy.py").write_text(text)
    (folder / "sitecustomize.py").write_text(STARTS)
    paths = os.pathsep.join([str(folder), *filter(None, [os.environ.get("PYTHONPATH")])])
    environment = {**os.environ, "PYTHONPATH": paths, "XDG_CACHE_HOME": str(folder / "cache")}
    command = [sys.executable, "-c", script, str(folder)]
    done = subprocess.run(
        command, capture_output=True, text=True, cwd=ROOT, env=environment, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
