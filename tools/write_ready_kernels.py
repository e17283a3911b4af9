"""Compile the kernels of GGUF files for processors of some generations into the installed pi2.

python tools/write_ready_kernels.py                    # the generations that machines have
python tools/write_ready_kernels.py avx2 avx512vnni    # these, by the names of PI2_CPU

A wheel that is built afterwards holds them (`backends/ready`), and a first run compiles nothing.
Kernels of neuron stores depend on the model's shape: they are still compiled where they run.
"""

import argparse
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

from pi2.backends.blocks.contract import (
    COMMON,
    INDEX,
    ROUTING,
    STATES,
    STEPS,
    BlockSpec,
    describe_libraries,
    name_attention,
)
from pi2.backends.blocks.unpacking import list_unpackings
from pi2.backends.compiler.cache import READY, Spec, load_or_compile_several
from pi2.backends.compiler.signature import find_signatures
from pi2.backends.faults.guard import FaultSpec
from pi2.machine.cpu import detect_cpu, list_features
from pi2.memory.host_loops import HostSpec, choose_checks
from pi2.plan.documents.device import IsaFeature
from pi2.progress import ignore_progress

PROCESSORS = ("avx2", "avx512bw", "avx512vnni", "amx")
GROUPS = ((1,), (2,), (3,), (4,), (4, 1), (4, 2), (4, 3))
"""Heads that read the same keys and values, as models have them."""


def list_specs(processor: str, *more: IsaFeature) -> list[BlockSpec]:
    """``more``: features that only change attention, which is then listed."""
    attention = [name_attention(kind, group) for kind in ("fp16", "int8") for group in GROUPS]
    index = [name_attention("fp16", group, INDEX) for group in ((4,),)]
    names = (
        [*attention, *index]
        if more
        else [STEPS, COMMON, ROUTING, STATES, *attention, *index, *sorted(list_unpackings())]
    )
    return describe_libraries(names, list_features("x86-64", processor) | {*more}, "x86-64")


def list_groups(processors: list[str]) -> Iterator[list[Spec]]:
    """Yield specs of one program each."""
    yield [FaultSpec()]
    checks = {choose_checks(list_features("x86-64", processor)) for processor in processors}
    yield [HostSpec(checks=item) for item in checks]
    for processor in processors:
        yield list(list_specs(processor))
    if "avx512vnni" in processors:
        yield list(list_specs("avx512vnni", "l2-prefetch"))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("processors", nargs="*", default=PROCESSORS)
    chosen: list[str] = list(parser.parse_args().processors)
    if detect_cpu().architecture != "x86-64":
        print("kernels are made on x86-64 only: elsewhere the first run compiles them")
        return
    shutil.rmtree(READY, ignore_errors=True)
    with tempfile.TemporaryDirectory() as folder:
        os.environ["PI2_CACHE_DIR"] = folder
        made: list[Path] = []
        for specs in list_groups(chosen):
            made += load_or_compile_several(specs, ignore_progress)
            print(f"{len(made)} libraries", flush=True)
        READY.mkdir(parents=True)
        for path in set(made):
            for own in (path, find_signatures(path)):
                if own.exists():
                    shutil.copy(own, READY / own.name)
    size = sum(path.stat().st_size for path in READY.iterdir())
    print(f"{READY}: {len(set(made))} libraries, {size / 1e6:.1f} MB")


if __name__ == "__main__":
    main()
