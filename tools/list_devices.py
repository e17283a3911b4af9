"""Write the table of docs/reference/devices.md from plans/devices.

    python tools/list_devices.py            # rewrite docs/reference/devices.md
    python tools/list_devices.py --check    # exit 1 if it is out of date

The text around the tables is written by people; what stands between ``<!-- devices -->`` or
``<!-- figures -->`` and the next ``<!-- end -->`` is replaced.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from pathlib import Path

from pi2.fitting.check import check_file
from pi2.plan.documents.device import Device, RateFigure, ReadFigure, Unit
from pi2.plan.documents.quantities import format_bytes

REPOSITORY = Path(__file__).resolve().parents[1]
DOCUMENT = REPOSITORY / "docs" / "reference" / "devices.md"
FOLDER = REPOSITORY / "plans" / "devices"
MARK = {"measured": "m", "published": "p", "vendor-claimed": "v", "estimated": "e"}
UNKNOWN = "-"
END = "<!-- end -->"


def read_devices(folder: Path = FOLDER) -> list[Device]:
    """All shipped devices but ``host``, which states no figures."""
    devices = []
    for path in sorted(folder.glob("*.device.toml")):
        document = check_file(path).document
        assert isinstance(document, Device), path
        if document.id != "host":
            devices.append(document)
    return devices


def render_document(text: str, devices: list[Device]) -> str:
    """``text`` with its tables made anew."""
    tables = {"devices": list_devices(devices)}
    for name, table in tables.items():
        start = f"<!-- {name} -->\n"
        assert start in text, f"docs/reference/devices.md needs {start.strip()} ... {END}"
        before, rest = text.split(start, 1)
        after = rest[rest.index(END) :]
        text = "".join([before, start, *(f"{row}\n" for row in table), after])
    return text


def list_devices(devices: list[Device]) -> Iterator[str]:
    """One row per device: its main figures, each with the letter of its status."""
    yield "| device | processor | memory | CPU reads | all units read | sequential | random 4 KiB |"
    yield "| --- | --- | --- | --- | --- | --- | --- |"
    for device in devices:
        cpu = next(unit for unit in device.units.values() if unit.kind == "cpu")
        reads = device.storage.reads
        yield _row(
            f"`{device.id}`",
            _describe_cpu(cpu),
            _describe_memory(device),
            _show_rate(cpu.read_bandwidth),
            _show_rate(device.memory.read_bandwidth),
            _show_best([read for read in reads if read.pattern == "sequential"]),
            _show_best([r for r in reads if r.pattern == "random" and r.block == 4096]),
        )


def _describe_cpu(cpu: Unit) -> str:
    cores = [
        f"{cluster.cores}x {cluster.core or 'cores'}"
        + (f" {cluster.frequency / 1e9:g} GHz" if cluster.frequency else "")
        for cluster in cpu.clusters
    ]
    return f"{cpu.model or 'any'}: {', '.join(cores)}"


def _describe_memory(device: Device) -> str:
    memory = device.memory
    text = _size(memory.capacity) if memory.capacity else UNKNOWN
    return f"{text}, {_size(memory.usable)} usable" if memory.usable else text


def _size(size: int) -> str:
    return f"{size // 10**9} GB" if size % 10**9 == 0 else format_bytes(size)


def _rate(figure: RateFigure) -> str:
    return _show(figure.value)


def _show(rate: float) -> str:
    """A rate with four digits: ``"1.076 GB/s"``."""
    return f"{rate / 1e9:.4g} GB/s" if rate >= 1e9 else f"{rate / 1e6:.4g} MB/s"


def _show_rate(figure: RateFigure | None) -> str:
    return UNKNOWN if figure is None else f"{_rate(figure)} ({MARK[figure.status]})"


def _show_best(reads: list[ReadFigure]) -> str:
    if not reads:
        return UNKNOWN
    best = max(reads, key=lambda read: read.rate)
    return f"{_show(best.rate)} ({MARK[best.status]})"


def _row(*cells: str) -> str:
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def main() -> int:
    """Rewrite or check the page."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--check", action="store_true", help="change nothing")
    check = parser.parse_args().check
    old = DOCUMENT.read_text(encoding="utf-8")
    new = render_document(old, read_devices())
    if check:
        return int(old != new)
    DOCUMENT.write_text(new, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
