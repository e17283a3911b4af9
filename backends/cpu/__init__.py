"""The cpu backend: TensorIR kernels, compiled for this machine's instruction set.

Activations are quantised to 16 bits per group of 32, as two int8 planes (`kernels.quantize`).
Why not 8 bits: the demo model's logits over 384 tokens of held-out text, against the reference
backend (float32 activations, the same weights):

=======  ==========================  ==================  =====================================
planes   largest difference,         the same, of the    greedy text of 64 tokens
         of the largest logit        worst single token
=======  ==========================  ==================  =====================================
2        2.6e-4                      4.7e-4              as the reference's, in every mode
1        6.2e-3                      1.1e-2              low-rank mode differs from it
=======  ==========================  ==================  =====================================

1e-2 is what is promised.  The second plane costs nothing where memory is the limit, which is
decoding (`tools/bench_kernels.py`), and about half of the rate where arithmetic is.  Most of what
two planes differ by comes from keys and values in fp16.  A plan may have neither rounded
(docs/exactness.md): 1e-4 is promised then.
"""

from __future__ import annotations

import importlib.util

from pi2.backends.compiler.cache import load_or_compile
from pi2.backends.compiler.runtime import Library, find_runtime_library, start_threads
from pi2.backends.cpu.arrays import measure_arrays
from pi2.backends.cpu.executor import CpuExecutor
from pi2.backends.cpu.specification import make_spec
from pi2.backends.kernels.isa import ARCHITECTURES
from pi2.backends.protocol import BuildRequest

__all__ = ["NAME", "CpuExecutor", "build", "find_obstacles", "make_spec"]

NAME = "cpu"


def find_obstacles(features: frozenset[str], architecture: str) -> list[str]:
    """Return what keeps the kernels from running here."""
    obstacles = []
    if architecture not in ARCHITECTURES:
        obstacles.append(f"no kernels for architecture {architecture}")
    if find_runtime_library() is None:
        obstacles.append("apache-tvm is not installed")
    if importlib.util.find_spec("tvm_ffi") is None:
        obstacles.append("apache-tvm-ffi is not installed")
    return obstacles


def build(request: BuildRequest) -> CpuExecutor:
    """Compile the kernels unless they are cached, and make the executor."""
    spec = make_spec(request)
    path = load_or_compile(spec, request.progress)
    start_threads(request.threads, request.cores)
    return CpuExecutor(request, spec, Library(path, measure_arrays(request)))
