"""Kernel times on another machine through TVM's RPC (`pi2 probe --rpc`), by its clock."""

import json
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from math import inf
from pathlib import Path
from typing import Any, get_args

import numpy as np
import numpy.typing as npt

from pi2.backends.blocks.room import Memory
from pi2.backends.compiler.cache import compile_ahead
from pi2.backends.compiler.runtime import Library
from pi2.backends.compiler.signature import Parameter
from pi2.backends.cpu.arrays import NeuronArrays
from pi2.backends.cpu.neurons import Neurons
from pi2.backends.cpu.prediction import Prediction
from pi2.backends.cpu.request import make_spec
from pi2.backends.cpu.views import TensorViews, measure_arrays, wrap_all
from pi2.backends.kernels.spec import DENSE_FLOATS, KernelSpec
from pi2.backends.protocol import BuildRequest
from pi2.diagnostics import UserError
from pi2.plan.documents.device import Device, IsaFeature
from pi2.plan.weights.layout import matrix_bytes
from pi2.probing import tokens as synthetic
from pi2.probing.document import describe_step, keep_rate
from pi2.probing.steps import StepFacts, Times, choose_times
from pi2.progress import Progress

ROUNDS = 5
SHAPE = synthetic.REMOTE
_KEPT_BYTES = 1 << 16
"""Larger arrays that are given with calls are sent once."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RemoteMachine:
    """The address of an RPC tracker, and the equipment of a machine that it knows."""

    host: str
    port: int
    key: str
    triple: str
    architecture: str
    features: frozenset[str]
    threads: int


class RemoteFunctions:
    """The functions of a library on another machine, as `CompiledFunctions` has them here."""

    def __init__(self, session: Any, library: Path) -> None:
        session.upload(str(library))
        self._module = session.load_module(library.name)
        self._device = session.cpu()
        self.seconds = 0.0
        """What functions have taken there."""
        self._sent: dict[tuple[int, int], Any] = {}

    def bind(
        self, name: str, tensors: Sequence[object], given: Sequence[Parameter]
    ) -> tuple[Callable[..., object], Sequence[object]]:
        del given
        measure = self._module.time_evaluator(name, self._device, number=1, repeat=1)

        def call(*values: object) -> None:
            sent = [self._send(value) for value in values]
            self.seconds += float(measure(*tensors, *sent).mean)

        return call, ()

    def make_tensor(self, flat: npt.NDArray[Any]) -> object:
        """See `pi2.backends.compiler.functions`; the array is copied to the other machine."""
        import tvm

        return tvm.runtime.tensor(flat, self._device)

    def _send(self, value: object) -> object:
        if not isinstance(value, np.ndarray):
            return value
        place = (value.ctypes.data, value.nbytes)
        if value.nbytes < _KEPT_BYTES:
            return self.make_tensor(value)
        if place not in self._sent:
            self._sent[place] = self.make_tensor(value)
        return self._sent[place]

    def close(self) -> None:
        self._sent.clear()


def measure_remote(machine: RemoteMachine, progress: Progress) -> Times:
    """Steps of the engine and their seconds on the other machine; UserError P342."""
    model = synthetic.make_model(SHAPE)
    request = synthetic.make_request(
        model,
        threads=machine.threads,
        features=machine.features,
        architecture=machine.architecture,
        progress=progress,
    )
    spec = make_spec(request)
    with tempfile.TemporaryDirectory() as folder:
        library = Path(folder) / "pi2-kernels.so"
        compile_ahead(spec, library, machine.triple, progress)
        session = connect(machine)
        session.get_function("runtime.config_threadpool")(1, machine.threads)
        functions = RemoteFunctions(session, library)
        calls = Library(library, measure_arrays(request), functions=functions)
        try:
            begin, steps = _list_steps(request, spec, calls)
            found: Times = {facts: [] for facts, _, _ in steps}
            for number in range(ROUNDS + 1):
                for facts, tokens, run in steps:
                    begin(tokens)
                    functions.seconds = 0.0
                    run()
                    if number:  # the first round makes ready
                        found[facts].append(functions.seconds)
                progress("measuring there", number / ROUNDS)
            return found
        finally:
            calls.close()


Step = tuple[StepFacts, int, Callable[[], object]]
"""A step, the tokens that it computes, and what runs it."""


def _list_steps(
    request: BuildRequest, spec: KernelSpec, calls: Library
) -> tuple[Callable[..., object], list[Step]]:
    """What begins a layer's FFN with so many tokens, and the steps of its neurons."""
    memory = Memory(request.allocate)
    arrays = NeuronArrays(spec, request, memory, keeps_read=False)
    read, given = (memory.take("float32", request.chunk, spec.hidden) for _ in range(2))
    read[:] = 1
    own = arrays.chunks[0] | {"hidden_values": read, "given": given}
    views, tensors = wrap_all(calls, own), TensorViews(calls, request.tensors)
    prediction = Prediction(request, arrays, spec, calls, views, tensors, later={})
    scratch = memory.take("uint8", 4 * spec.threads * DENSE_FLOATS)
    neurons = Neurons(request, arrays, spec, calls, views, prediction, scratch)
    begin, end = (calls.bind(name, "tokens", views) for name in ("begin_ffn", "end_ffn"))
    neighbours = neurons.bind_chunk(views)[0]
    arena, dense = synthetic.make_arena(request.model, SHAPE.arena_neurons), SHAPE.dense_neurons
    width, used_bytes = SHAPE.width, request.bundle.used_bytes
    # A prediction multiplies two matrices, of as many weights as one of these rows.
    rows = SHAPE.rank + SHAPE.neurons * SHAPE.rank // width
    norm = StepFacts(kernel="norm", size=width, width=width)
    named = np.zeros(1, np.int32)
    multiply = replace(
        norm, kernel="multiply", size=rows, read_bytes=matrix_bytes(rows, width, "int8")
    )
    steps: list[Step] = [
        (multiply, 1, lambda: prediction.find_named(0, 0.0, named)),
        (norm, 1, lambda: (begin(1), end(1))),
    ]
    for count in SHAPE.gathered:
        (slots,) = synthetic.choose_slots(count, SHAPE.arena_neurons, 1)
        gather = partial(neurons.add_gathered, 0, arena, slots, None, False)
        facts = replace(norm, kernel="gather", size=count, read_bytes=count * used_bytes)
        steps.append((facts, 1, gather))
    for count in (8, 128):
        add = partial(neurons.add_neighbours, arena[:dense], 0, count, neighbours)
        work = 2.0 * 3 * dense * width * count
        steps.append((replace(norm, kernel="dense", size=count, operations=work), count, add))
    return begin, steps


def connect(machine: RemoteMachine) -> Any:
    """Ask the tracker for the machine; UserError P342."""
    try:
        # TVM itself would try for minutes.
        import socket

        from tvm import rpc

        with socket.create_connection((machine.host, machine.port), timeout=5):
            pass
        tracker = rpc.connect_tracker(machine.host, machine.port)
        return tracker.request(machine.key, session_timeout=300)
    except ImportError as error:
        raise UserError.of(
            "P342", f"TVM's RPC cannot be imported: {error}", help="pip install 'pi2[rpc]'"
        ) from None
    except (OSError, RuntimeError) as error:
        problem = str(error).strip().splitlines()
        raise UserError.of(
            "P342",
            f"no machine {machine.key!r} at the tracker {machine.host}:{machine.port}:"
            f" {problem[-1] if problem else type(error).__name__}",
            help="start `python -m tvm.exec.rpc_tracker` here, and `python -m tvm.exec.rpc_server"
            " --tracker HOST:PORT --key KEY` there",
        ) from None


def make_remote_device(name: str, machine: RemoteMachine, step_s: Times) -> Device:
    """The device ``name``: its processor and kernels; flash, memory and noise are unknown."""
    threads = f"{machine.threads} thread" + "s" * (machine.threads > 1)
    what = f"through RPC: cpu backend, {threads}, int4 weights"
    kernels = [describe_step(*item, what) for item in choose_times(step_s, inf).items()]
    cpu: dict[str, Any] = {
        "kind": "cpu",
        "architecture": machine.architecture,
        "features": [item for item in get_args(IsaFeature) if item in machine.features],
        "clusters": [{"id": "cores", "cores": machine.threads}],
        "kernels": kernels,
    }
    best = max((item for item in kernels if item["kernel"] == "dense"), key=lambda i: i["size"])
    cpu["compute"] = [{"precision": "int8", **keep_rate(best)}]
    text = f"Kernels measured through RPC with {machine.threads} threads; flash was not measured."
    values = {
        "schema_version": 2,
        "id": name,
        "name": name,
        "description": text,
        "units": {"cpu": cpu},
    }
    return Device.model_validate_json(json.dumps(values))
