"""Records what the columns of a checkpoint's matrices count: mean squares of their inputs on texts.

The checkpoint is written to a GGUF file as it is, for a while, and this file runs."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import cast

import numpy as np

from pi2.arrays import F32, F64
from pi2.backends.blocks.model import BlockModel
from pi2.backends.blocks.operands import Matrix
from pi2.backends.reference.instructions.arguments import Arguments
from pi2.backends.reference.instructions.products import list_pairs, read_inputs
from pi2.importing.checkpoint import Checkpoint
from pi2.importing.quantize import Wish, name_matrices, quantize_checkpoint
from pi2.importing.quantizers import Importance, name_experts
from pi2.measuring.texts import Passages, read_texts, run_windows
from pi2.orchestrator import load
from pi2.plan.documents.model import Model
from pi2.progress import Progress, ignore_progress
from pi2.refit import read_plan
from pi2.weights.file_reading import FileFiller

WINDOWS = 24
CONTEXT = 256
"""Tokens of a window."""
KERNELS = ("multiply", "multiply_few", "multiply_many")


def record_importance(
    checkpoint: Checkpoint,
    model: Model,
    texts: Sequence[Path],
    folder: Path,
    *,
    arranges: bool = False,
    progress: Progress = ignore_progress,
) -> Importance:
    """Compute at most `WINDOWS` windows of the ``texts``; ``folder`` has room for the checkpoint,
    which ``arranges`` as `Wish.arranges` says. `UserError` P660 for too little text, others as
    `quantize_checkpoint` and `load`."""
    context = min(CONTEXT, model.shape.context)
    settings = {"kv.context": context, "kv.type": "fp32", "prefill.activations": "fp32"}
    settings |= {"prefill.chunk": context}
    with tempfile.TemporaryDirectory(dir=folder, prefix=".calibrating-") as room:
        file = Path(room) / "model.gguf"
        wish = Wish(keeps=True, arranges=arranges)
        quantize_checkpoint(checkpoint, model, file, wish, progress=progress)
        names = name_matrices(checkpoint, model, file, wish)
        plan = read_plan(file, overrides=settings, files=FileFiller())
        with load(plan, progress=progress) as loaded:
            windows = Passages(read_texts(texts), context=context, count=WINDOWS).cut(loaded)
            recorder = _Recorder(cast("BlockModel", loaded._parts.model.program))
            for _ in run_windows(loaded, windows, partial(progress, "calibrating")):
                pass
    sums: dict[str, F32] = {}
    for name, found in recorder.sums.items():
        matrix = name_experts(names.get(name, name)) if len(found) > 1 else names.get(name, name)
        sums[matrix] = found.reshape(-1).astype(np.float32)
    return Importance(file=texts[0], sums=sums)


class _Recorder:
    """Adds up squares of what matrices read, by their names in the file."""

    def __init__(self, program: BlockModel) -> None:
        self._program = program
        self.sums: dict[str, F64] = {}
        """[experts, columns]."""
        self._matrices: dict[int, Matrix] = {
            number: matrix
            for matrix in program.matrices
            for number in matrix.instructions
            if matrix.numbers is None
        }
        program.watch(self._note)

    def _note(self, number: int) -> None:
        matrix, program = self._matrices.get(number), self._program
        if matrix is None:
            return
        weight, (address, arguments, *items) = matrix.weight, program.read_code(number)
        find = program.interpreter.find
        kernel = next((n for n in KERNELS if find(n, weight.format) == address), None)
        if kernel is None or items[0]:
            return  # what is streamed is multiplied in pieces
        lanes, places = program.interpreter.lanes, (items[0], items[1])
        own = Arguments(kernel, arguments, places, format=weight.format, kv="fp32", lanes=lanes)
        length = own.blocks * weight.kind.block
        sums = self.sums.setdefault(weight.name, np.zeros((weight.experts, length)))
        for expert, _, tokens in list_pairs(own):
            read = read_inputs(own, tokens, length)
            sums[expert] += np.square(read).sum(axis=0)
