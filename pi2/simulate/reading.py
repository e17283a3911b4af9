"""Fills the simulation's inputs from a resolved plan, and says which figures are missing."""

from __future__ import annotations

from collections import Counter

from pi2.diagnostics import Diagnostic, Span, UserError
from pi2.memory.context import count_lent_bytes
from pi2.plan.arithmetic.mixers import (
    count_mixer_bytes,
    count_mixer_weights,
    count_state_traffic,
)
from pi2.plan.arithmetic.resolved import ResolvedPlan
from pi2.plan.arithmetic.sizes import count_kv_token_bytes, reads_embedding
from pi2.plan.documents.device import Device, Unit
from pi2.plan.documents.model import Model
from pi2.plan.weights.layout import BundleLayout, matrix_bytes, round_up, scale_bytes, weight_bytes
from pi2.simulate.assumptions import list_assumptions, list_dense_units
from pi2.simulate.constants import Constants
from pi2.simulate.flash import Flash, list_points
from pi2.simulate.inputs import (
    Choices,
    Figure,
    LayerChoice,
    Machine,
    SimulationInput,
    Workload,
)

MISSING_FIGURE = "P330"
UNSUPPORTED_SPLIT = "P331"
_BLOCK_BYTES = 4096


def read_inputs(resolved: ResolvedPlan, constants: Constants | None = None) -> SimulationInput:
    """Collect the inputs; ``UserError`` P330, P331 names every figure that is missing."""
    constants = constants or Constants()
    reader = _Reader(resolved, constants)
    machine = reader.read_machine()
    workload = reader.read_workload()
    choices = reader.read_choices()
    if reader.missing:
        raise UserError(reader.missing, exit_code=2)
    return SimulationInput(
        name=resolved.plan.name or resolved.path.name,
        digest=resolved.digest,
        machine=machine,
        workload=workload,
        choices=choices,
        constants=constants,
        figures=tuple(reader.figures),
        assumptions=list_assumptions(resolved),
    )


class _Reader:
    """Reads documents, and remembers what it used and what it missed."""

    def __init__(self, resolved: ResolvedPlan, constants: Constants) -> None:
        self._resolved = resolved
        self._device: Device = resolved.device
        self._model: Model = resolved.model
        self._constants = constants
        self.figures: list[Figure] = []
        self.missing: list[Diagnostic] = []
        self._cpu = self._find_unit("cpu")
        names = list_dense_units(resolved)
        self._dense_name = names[0] if names else None
        if len(names) > 1:
            self._report(
                f"layers are given to {', '.join(names)}: the simulator knows the CPU and one "
                "other unit",
                f"give the layers of `{names[-1]}` to `{names[0]}`",
                code=UNSUPPORTED_SPLIT,
            )
        if self._dense_name is not None and self._device.units[self._dense_name].memory:
            self._report(
                f"the unit {self._dense_name!r} has memory of its own: the simulator knows units "
                "that use main memory",
                "`pi2 explain --cost` predicts the plan",
                code=UNSUPPORTED_SPLIT,
            )
        if self._dense_name is not None and self._device.units[self._dense_name].emulated:
            self._report(
                f"the unit {self._dense_name!r} is the processor itself, emulating another one",
                "give the layers to `cpu`",
                code=UNSUPPORTED_SPLIT,
            )

    def _find_unit(self, kind: str) -> tuple[str, Unit]:
        for name, unit in self._device.units.items():
            if unit.kind == kind:
                return name, unit
        self._miss(f"units.{kind}", "describe the processor: `pi2 probe` does")
        return kind, Unit(kind="cpu")

    # ------------------------------------------------------------------ device

    def read_machine(self) -> Machine:
        """Read the rates of the device."""
        constants, device = self._constants, self._device
        cpu_name, cpu = self._cpu
        dense = device.units[self._dense_name] if self._dense_name else None
        cpu_rate = self._read_bandwidth(cpu_name, cpu, constants.cpu_of_peak)
        dense_rate = None
        if dense is not None and self._dense_name is not None:
            dense_rate = self._read_bandwidth(self._dense_name, dense, constants.dense_of_peak)
        shared = device.memory.read_bandwidth
        if shared is not None:
            self._use("memory.read_bandwidth", shared.status, shared.source)
            shared_rate = float(shared.value)
        elif dense_rate is None:
            shared_rate = cpu_rate
        else:
            shared_rate = self._estimate_from_peak(constants.both_of_peak) or max(
                cpu_rate, dense_rate
            )
        return Machine(
            cpu_bytes_s=cpu_rate,
            dense_bytes_s=dense_rate,
            shared_bytes_s=max(shared_rate, cpu_rate, dense_rate or 0.0),
            cpu_ops_s=self._read_ops(cpu_name, cpu),
            dense_ops_s=self._read_ops(self._dense_name, dense) if dense else None,
            flash=self._read_flash(),
            io_core=cpu.clusters[0].id if cpu.clusters else None,
            cpu_power_w=self._read_power(cpu_name, cpu),
            dense_power_w=self._read_power(self._dense_name, dense) if dense else None,
            power_w=self._use_power("power", device),
        )

    def _read_bandwidth(self, name: str, unit: Unit, of_peak: float) -> float:
        if unit.read_bandwidth is not None:
            figure = unit.read_bandwidth
            self._use(f"units.{name}.read_bandwidth", figure.status, figure.source)
            return float(figure.value)
        others = [item for item in self._device.units.values() if item is not unit]
        if unit.kind == "cpu" and all(item.memory is not None for item in others):
            memory = self._device.memory.read_bandwidth
            if memory is not None:
                self._use("memory.read_bandwidth", memory.status, memory.source)
                return float(memory.value)
        estimate = self._estimate_from_peak(of_peak)
        if estimate is not None:
            return estimate
        self._miss(
            f"units.{name}.read_bandwidth",
            "measure it with `pi2 probe`, or state memory.peak_bandwidth, from which it is "
            "estimated",
        )
        return 1.0

    def _estimate_from_peak(self, share: float) -> float | None:
        peak = self._device.memory.peak_bandwidth
        if peak is None:
            return None
        self._use("memory.peak_bandwidth", "estimated", f"{share:.0%} of it, as on the OnePlus 12")
        return share * float(peak.value)

    def _read_ops(self, name: str | None, unit: Unit | None) -> float | None:
        if unit is None or not unit.compute:
            return None
        order = {"int4": 0, "int8": 1, "fp16": 2, "fp32": 3}
        best = min(unit.compute, key=lambda item: order[item.precision])
        self._use(f"units.{name}.compute", best.status, best.source)
        return best.giga_ops * 1e9

    def _read_power(self, name: str | None, unit: Unit | None) -> float | None:
        if unit is None or unit.power is None:
            return None
        self._use(f"units.{name}.power", unit.power.status, unit.power.source)
        return float(unit.power.value)

    def _use_power(self, name: str, device: Device) -> float | None:
        if device.power is None:
            return None
        self._use(name, device.power.status, device.power.source)
        return float(device.power.value)

    def _read_flash(self) -> Flash | None:
        storage = self._device.storage
        mapped = self._resolved.plan.pipeline.policy == "mmap"
        if not mapped and all(layer.hot >= 1.0 for layer in self._resolved.layers):
            return None
        if not storage.reads:
            self._miss(
                "storage.reads",
                "measure read rates with `pi2 probe`; random reads of 4 KiB and sequential "
                "ones of 512 KiB are the least",
            )
            return None
        for item in storage.reads:
            name = f"storage.reads ({item.pattern}, {item.block} B)"
            self._use(name, item.status, item.source)
        for pattern in ("random", "sequential"):
            if not any(item.pattern == pattern for item in storage.reads):
                self._miss(f"storage.reads with pattern {pattern!r}", "measure it with `pi2 probe`")
        return Flash(
            points=list_points(storage),
            latency_s=float(storage.latency or self._constants.read_latency_s),
            reader_penalty=self._find_reader_penalty(),
            block_bytes=storage.block_size or _BLOCK_BYTES,
            queues=1,
        )

    def _find_reader_penalty(self) -> float:
        """Rate lost to several readers: the device's figure, else that of flash with one queue."""
        storage = self._device.storage
        penalty = storage.reader_penalty
        if penalty is not None:
            self._use("storage.reader_penalty", penalty.status, penalty.source)
            return float(penalty.value)
        return self._constants.reader_penalty if storage.kind in ("ufs", "emmc", "sd") else 0.0

    # ------------------------------------------------------------------- model

    def read_workload(self) -> Workload:
        """Sizes of the model, as the store holds them."""
        model, shape = self._model, self._model.shape
        precision = model.quantization
        attention = count_mixer_bytes(model) + count_state_traffic(model)
        head = precision.embedding if model.tied_head else precision.head
        return Workload(
            layers=shape.layers,
            hidden=shape.stored_hidden,
            ffn=shape.ffn,
            experts=model.expert_count,
            active_experts=model.active_experts,
            attention_bytes=attention,
            kv_token_bytes=count_kv_token_bytes(model, self._resolved.plan.kv.type),
            predictor_bytes=self._read_predictor(model.active_experts),
            head_bytes=matrix_bytes(shape.vocab, shape.stored_hidden, head),
            neuron_bytes=self._resolved.bundle.neuron_bytes,
            dense_neuron_bytes=self._size_dense_neuron(),
            attention_weights=count_mixer_weights(model),
            active=self._read_active(),
            skew=self._read_skew(),
            batch=self._resolved.plan.decode.batch,
        )

    def _size_dense_neuron(self) -> float:
        """Bytes of a neuron on the dense unit: NPUs quantise per row, so that scales vanish."""
        bundle = self._resolved.bundle
        dense = self._device.units.get(self._dense_name or "")
        if dense is not None and dense.kind == "npu":
            return 3 * weight_bytes(bundle.hidden, bundle.precision)
        return bundle.neuron_bytes

    def _read_predictor(self, active_experts: int) -> float:
        model, shape = self._model, self._model.shape
        kind = self._resolved.plan.decode.predictor
        if kind == "gate":
            return active_experts * matrix_bytes(
                shape.ffn, shape.stored_hidden, model.quantization.ffn
            )
        if kind == "low-rank":
            rank = model.predictor.rank if model.predictor is not None else 0
            if rank == 0:
                return 0.0
            precision = model.quantization.predictor
            size = matrix_bytes(rank, shape.stored_hidden, precision)
            return active_experts * (size + matrix_bytes(shape.ffn, rank, precision))
        return 0.0

    def _read_active(self) -> float:
        """Share of the computed experts' neurons that the engine computes."""
        model, constants = self._model, self._constants
        kind = self._resolved.plan.decode.predictor
        if kind in ("none", "router"):
            return 1.0
        if kind == "gate" and self._resolved.thresholds is not None:
            self._use("sparsity.active", "measured", "the plan's thresholds")
            return self._resolved.thresholds.computed
        predictor = model.predictor
        if kind == "low-rank" and predictor is not None and predictor.active is not None:
            self._use("predictor.active", "estimated", "model document")
            return float(predictor.active)
        if model.sparsity is not None:
            self._use("sparsity.active", model.sparsity.status, model.sparsity.source)
            active = float(model.sparsity.active)
        else:
            self._use("sparsity.active", "estimated", "the model states none: see default_active")
            active = constants.default_active
        ratio = constants.named_per_active if kind == "low-rank" else 1.0
        if model.ffn.activation == "silu":
            ratio = 1.0
        return min(1.0, active * ratio)

    def _read_skew(self) -> float:
        model, constants = self._model, self._constants
        if model.sparsity is not None and model.sparsity.skew is not None:
            self._use("sparsity.skew", model.sparsity.status, model.sparsity.source)
            return float(model.sparsity.skew)
        smooth = model.ffn.activation == "silu"
        self._use("sparsity.skew", "estimated", "the model states none")
        return constants.smooth_skew if smooth else constants.default_skew

    # -------------------------------------------------------------------- plan

    def read_choices(self) -> Choices:
        """Read the settings of the plan."""
        plan, bundle = self._resolved.plan, self._resolved.bundle
        gate, rest = _split_reads(bundle, plan.pipeline.phases, self._device.storage.block_size)
        segments = plan.memory.segments
        kept = segments.hot + segments.cold + segments.attention + segments.predictor
        return Choices(
            policy=plan.pipeline.policy,
            phases=plan.pipeline.phases,
            cluster=plan.pipeline.cluster,
            prefill_order=plan.pipeline.prefill,
            chunk=plan.prefill.chunk,
            compute_threads=self._count_threads(),
            io_threads=self._count_readers(),
            look_ahead=plan.decode.look_ahead,
            # The context lends what a mean token has not used.
            cold_neurons=(segments.cold + count_lent_bytes(self._resolved)) / bundle.stride,
            embedding_s=self._time_embedding(),
            predicted=plan.decode.predictor != "none",
            stride_bytes=bundle.stride,
            gate_read_bytes=gate,
            rest_read_bytes=rest,
            page_cache_bytes=float(kept),
            layers=self._group_layers(),
        )

    def _time_embedding(self) -> float:
        """Seconds of a token: for each sequence a read of weights, and one of scales."""
        plan, model = self._resolved.plan, self._model
        if not reads_embedding(plan, model):
            return 0.0
        latency_s = float(self._device.storage.latency or self._constants.read_latency_s)
        scales = scale_bytes(model.shape.stored_hidden, model.quantization.embedding) > 0
        return plan.decode.batch * (1 + scales) * latency_s

    def _count_threads(self) -> int:
        plan = self._resolved.plan
        if plan.threads.compute is not None:
            return plan.threads.compute
        cores = sum(cluster.cores for cluster in self._cpu[1].clusters)
        return max(1, cores - self._count_readers()) if cores else 4

    def _count_readers(self) -> int:
        """Threads that issue reads: with a queue, one does, whatever it divides them into."""
        io = self._resolved.plan.io
        return 1 if io.engine == "io_uring" else io.threads

    def _group_layers(self) -> tuple[LayerChoice, ...]:
        kinds: Counter[tuple[float, float]] = Counter()
        batch = self._resolved.plan.decode.batch
        for layer in self._resolved.layers:
            kinds[(layer.find_dense_share(batch), layer.hot)] += 1
        return tuple(
            LayerChoice(dense=dense, hot=hot, count=count) for (dense, hot), count in kinds.items()
        )

    # ----------------------------------------------------------------- findings

    def _use(self, name: str, status: str, source: str) -> None:
        figure = Figure(name=name, status=status, source=source)
        if figure not in self.figures:
            self.figures.append(figure)

    def _miss(self, name: str, help_text: str) -> None:
        device = self._device.id
        self._report(f"the device {device!r} has no figure {name}", help_text)

    def _report(self, message: str, help_text: str, code: str = MISSING_FIGURE) -> None:
        span = Span.of_file(str(self._resolved.path))
        self.missing.append(Diagnostic(code=code, message=message, help=help_text, span=span))


def _split_reads(bundle: BundleLayout, phases: int, block: int | None) -> tuple[int, int]:
    """Bytes of the first and second read of a missing neuron."""
    if phases == 1:
        return bundle.stride, 0
    first = min(bundle.stride, round_up(bundle.first_bytes, block or _BLOCK_BYTES))
    return first, bundle.stride - first
