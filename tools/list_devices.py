"""Write the tables of docs/devices.md from plans/devices.

    python tools/list_devices.py            # rewrite docs/devices.md
    python tools/list_devices.py --check    # exit 1 if it is out of date

The text around the tables is written by people; what stands between ``<!-- devices -->`` or
``<!-- figures -->`` and the next ``<!-- end -->`` is replaced.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from pathlib import Path

from pi2.plan.checking.check import check_file
from pi2.plan.documents.common import Origin
from pi2.plan.documents.device import (
    ComputeFigure,
    Device,
    PowerFigure,
    RateFigure,
    ReadFigure,
    Unit,
)
from pi2.plan.documents.quantities import WATT_UNITS, format_bytes, format_quantity

REPOSITORY = Path(__file__).resolve().parents[1]
DOCUMENT = REPOSITORY / "docs" / "devices.md"
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
    tables = {"devices": list_devices(devices), "figures": list_figures(devices)}
    for name, table in tables.items():
        start = f"<!-- {name} -->\n"
        assert start in text, f"docs/devices.md needs {start.strip()} ... {END}"
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


def list_figures(devices: list[Device]) -> Iterator[str]:
    """One row per figure that has a source."""
    yield "| device | figure | value | status | source |"
    yield "| --- | --- | --- | --- | --- |"
    for device in devices:
        for label, value, origin in _walk(device):
            yield _row(f"`{device.id}`", label, value, origin.status, origin.source)


def _walk(device: Device) -> Iterator[tuple[str, str, Origin]]:
    for name, unit in device.units.items():
        yield from _walk_unit(name, unit)
    memory, storage = device.memory, device.storage
    if memory.read_bandwidth is not None:
        yield "memory, all units", _rate(memory.read_bandwidth), memory.read_bandwidth
    if memory.peak_bandwidth is not None:
        yield "memory, interface", _rate(memory.peak_bandwidth), memory.peak_bandwidth
    for read in storage.reads:
        yield _describe_read(read), _show(read.rate), read
    if storage.reader_penalty is not None:
        penalty = storage.reader_penalty
        yield "flash, lost with several readers", f"{penalty.value:.0%}", penalty
    if device.power is not None:
        yield "power, all units", _power(device.power), device.power


def _walk_unit(name: str, unit: Unit) -> Iterator[tuple[str, str, Origin]]:
    if unit.read_bandwidth is not None:
        yield f"{name}, main memory", _rate(unit.read_bandwidth), unit.read_bandwidth
    if unit.memory is not None and unit.memory.peak_bandwidth is not None:
        peak = unit.memory.peak_bandwidth
        yield f"{name}, own memory's interface", _rate(peak), peak
    for figure in unit.compute:
        yield f"{name}, {figure.precision}", _compute(figure), figure
    if unit.power is not None:
        yield f"{name}, power", _power(unit.power), unit.power


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


def _describe_read(read: ReadFigure) -> str:
    text = f"flash, {read.pattern} {format_bytes(read.block)}"
    if read.range is not None:
        text += f" within {format_bytes(read.range)}"
    if read.threads is not None:
        text += f", {read.threads} thread{'s' if read.threads > 1 else ''}"
    return f"{text}, {read.cluster} core" if read.cluster is not None else text


def _size(size: int) -> str:
    return f"{size // 10**9} GB" if size % 10**9 == 0 else format_bytes(size)


def _rate(figure: RateFigure) -> str:
    return _show(figure.value)


def _show(rate: float) -> str:
    """A rate with four digits: ``"1.076 GB/s"``."""
    return f"{rate / 1e9:.4g} GB/s" if rate >= 1e9 else f"{rate / 1e6:.4g} MB/s"


def _power(figure: PowerFigure) -> str:
    return format_quantity(figure.value, WATT_UNITS)


def _compute(figure: ComputeFigure) -> str:
    return f"{figure.giga_ops:,.0f} GOP/s"


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
    """Rewrite or check docs/devices.md."""
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
