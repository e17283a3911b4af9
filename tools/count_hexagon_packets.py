"""Count what the kernels for Hexagon NPUs do in their inner loops, and say how fast that could be.

A *packet* holds up to four instructions that begin together; at best one ends per cycle.  The bound
is that of one vector unit that never waits, for memory or for scalar instructions: no device has
been measured.

    python tools/count_hexagon_packets.py [--version v75] [--hidden 4096] [--neurons 14336]
    python tools/count_hexagon_packets.py --device plans/devices/oneplus-12.device.toml

With a device, its version of the instruction set and its own memory count, and what its memory's
rate bounds is printed, too: weights are read once by a graph, whatever its tokens.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import tvm

from pi2.backends.compiler.compile import generate_plain
from pi2.backends.hexagon.arrays import VALUE_BYTES, choose_neurons, lay_out_neurons
from pi2.backends.hexagon.kernels.program import Program
from pi2.backends.hexagon.specification import (
    LANES,
    VERSIONS,
    FfnGraph,
    FfnShape,
    HexagonSpec,
    count_together,
)
from pi2.fitting.check import check_file
from pi2.plan.documents.device import Device, Unit
from pi2.plan.documents.model_parts import Ffn
from pi2.plan.weights.layout import round_up

MACS = 4 * LANES
"""Products of a ``vrmpy``."""
_LOOP = re.compile(r"loop(\d)\((\.\w+),")


@dataclass(frozen=True, slots=True)
class Loop:
    """The innermost hardware loop of a function."""

    packets: int
    products: int
    """``vrmpy`` instructions."""
    scalar_products: int
    """Multiplications of single numbers."""

    @property
    def macs_per_packet(self) -> float:
        """Multiply-adds of a packet."""
        return self.products * MACS / self.packets


def find_loop(assembly: str, name: str) -> Loop | None:
    """Return the loop with the most products of function ``name``; None without a loop."""
    start = assembly.index(f"\n{name}:")
    body = assembly[start : assembly.index(".Lfunc_end", start)]
    loops = []
    for _, label in _LOOP.findall(body):
        first = body.index(f"\n{label}:")
        end = body.index(":endloop", first)
        text = body[first:end]
        loops.append(
            Loop(
                packets=text.count("\t{"),
                products=text.count("vrmpy("),
                scalar_products=len(re.findall(r"\bmpy[iu]?\(|\bsfmpy\(", text)),
            )
        )
    return max(loops, key=lambda loop: loop.products, default=None)


def count_kernels(spec: HexagonSpec) -> dict[str, Loop | None]:
    """Return the inner loop of every product of a library."""
    program = Program(spec)
    found = {}
    for function in program.list_functions():
        if function.name.startswith("multiply_"):
            module = generate_plain(tvm.IRModule({function.name: function.make()}), program.target)
            found[function.name] = find_loop(str(module.inspect_source("asm")), function.name)
    return found


def describe_shape(hidden: int, neurons: int, tokens: Sequence[int], version: str) -> HexagonSpec:
    """Return graphs of gated neurons in int4."""
    assert version in VERSIONS
    shape = FfnShape(hidden=hidden, weights="int4", options=Ffn(activation="drelu"))
    graphs = tuple(FfnGraph(tokens=count, neurons=neurons) for count in tokens)
    return HexagonSpec(version=version, ffn=shape, graphs=graphs)


def main() -> None:
    """Print a table."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--version", choices=VERSIONS, default="v75")
    parser.add_argument("--hidden", type=int, default=4096)
    parser.add_argument("--neurons", type=int, default=14336)
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--device", type=Path, help="a device file with an NPU")
    arguments = parser.parse_args()
    tokens = (1, 2, 4, 64)
    unit = None if arguments.device is None else read_npu(arguments.device)
    if unit is not None and unit.hexagon is not None and unit.hexagon.version is not None:
        arguments.version = unit.hexagon.version
    spec = describe_shape(arguments.hidden, arguments.neurons, tokens, arguments.version)
    loops = count_kernels(spec)
    print(f"{'kernel':18} packets  vrmpy  scalar products  multiply-adds a packet")
    for name, loop in loops.items():
        assert loop is not None, name
        print(
            f"{name:18} {loop.packets:7} {loop.products:6} {loop.scalar_products:16} "
            f"{loop.macs_per_packet:23.1f}"
        )
    each = arguments.hidden * arguments.neurons * arguments.layers
    print("\nFFN of all layers, inner loops alone, one vector unit:")
    for count in tokens:
        together = count_together(count)
        inputs, down = loops[f"multiply_int4_{together}"], loops[f"multiply_int8_{together}"]
        assert inputs is not None
        assert down is not None
        packets = 2 * each / inputs.macs_per_packet + each / down.macs_per_packet
        print(f"{count:4} tokens: {packets / 1e6:8.1f} million packets a token, ", end="")
        print(f"{1e9 / packets:6.1f} tokens/s at 1 GHz")
    if unit is not None:
        print_memory_bounds(unit, spec.ffn, arguments.neurons, arguments.layers, tokens)


def read_npu(path: Path) -> Unit:
    """Return the NPU of a device file."""
    device = check_file(path).document
    assert isinstance(device, Device), path
    return next(unit for unit in device.units.values() if unit.kind == "npu")


def print_memory_bounds(
    unit: Unit, shape: FfnShape, neurons: int, layers: int, tokens: Sequence[int]
) -> None:
    """Print what the memory's rate allows, and the graphs that fit into the NPU's own memory."""
    own = None if unit.hexagon is None else unit.hexagon.own_memory
    most = None if own is None else own // 2 // (128 * VALUE_BYTES)
    (size,) = choose_neurons([neurons], most)
    scratch = FfnGraph(tokens=128, neurons=size).scratch.bytes
    print(f"\ngraphs of {size} neurons, {scratch} bytes while they run with 128 tokens")
    if unit.read_bandwidth is None:
        return
    total = layers * lay_out_neurons(shape, round_up(neurons, LANES)).bytes
    for count in tokens:
        rate = count * unit.read_bandwidth.value / total
        print(f"{count:4} tokens: {total / 1e9:.2f} GB are read once, {rate:8.1f} tokens/s at most")


if __name__ == "__main__":
    main()
