"""Bytes that a run has resident beside what its segments hold: Python, libraries, tables.

Measured as `python tools/measure_memory.py` does: runs of small models in processes of their own
(Linux, x86-64, CPython 3.11), less what was used of their segments.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from pi2.plan.documents.device import UnitKind
from pi2.plan.documents.model import Model
from pi2.plan.weights.layout import round_up

LIBRARY_BYTES = 78 << 20
"""Python, pi2, numpy, the tokenizer library and TVM's runtime, once tokens have been generated."""
LAYER_BYTES = 100 << 10
"""Python's objects of a layer, and pages of which it uses a part."""
VOCABULARY_BYTES = 700
"""What a tokenizer with merges has of each token in memory: 560 to 750 of 4 thousand to 256
thousand tokens."""
TOKENIZER_FILE_PART = 12.5
"""The same for each byte of ``tokenizer.json``: 9 to 18."""
NEURON_TABLE_BYTES = 41
"""What is known of a neuron: its check, slot and owner, how often it is used, and copies of it.
From the resident set of a 7B's run, less that of the demo model's."""
PAGE_TABLE_PART = 512
"""The system takes 8 bytes for each page of 4 KiB and counts them as the process's."""
SPARE_BYTES = 4 << 20
"""By how much other versions of Python and of libraries may be larger."""
UNIT_BYTES: Mapping[UnitKind, int] = {"cpu": 0, "gpu": 736 << 20, "npu": 64 << 20}
"""What the library, driver and buffers of a unit take of main memory, by its kind, whether it
computes beside the processor or alone.  Assumed: measured on no card and no NPU.  The demo's plans
for GPUs peak 76 to 92 MiB higher than the demo, with drivers that let the processor play one."""
_MIB = 1 << 20


def count_libraries(model: Model, tokenizer_bytes: int | None = None) -> int:
    """Bytes that are expected to be resident beside the segments; ``tokenizer_bytes``: size of the
    file ``tokenizer.json``, where it is known."""
    shape = model.shape
    tokenizer = VOCABULARY_BYTES * shape.vocab
    if tokenizer_bytes is not None:
        tokenizer = int(TOKENIZER_FILE_PART * tokenizer_bytes)
    tables = NEURON_TABLE_BYTES * shape.layers * model.layer_neurons
    return LIBRARY_BYTES + LAYER_BYTES * shape.layers + tokenizer + tables


def count_file_runtime(model: Model) -> int:
    """Bytes that a run of a GGUF file has resident beside its segments: no neuron has a table."""
    shape = model.shape
    return LIBRARY_BYTES + LAYER_BYTES * shape.layers + VOCABULARY_BYTES * shape.vocab + SPARE_BYTES


def count_runtime(model: Model, budget_bytes: int, *, units: Iterable[UnitKind] = ()) -> int:
    """Bytes that the segment ``runtime`` should have, in whole MiB: what is expected to be
    resident, the system's tables of the budget's pages, ``units`` that compute beside the processor
    or alone, and a little to spare."""
    tables = budget_bytes // PAGE_TABLE_PART
    spare = SPARE_BYTES + sum(UNIT_BYTES[kind] for kind in units)
    return round_up(count_libraries(model) + tables + spare, _MIB)
