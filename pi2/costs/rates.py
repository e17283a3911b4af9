"""Times of single steps on a device: from measured kernels, else from bandwidths and constants."""

from dataclasses import replace
from math import isinf
from statistics import median
from typing import get_args

from pi2.costs.constants import Constants, Figure, Flash, Spread, count_pipes, keep_core
from pi2.costs.kernel_times import DenseUnit, KernelTimes, Linear, Rates, Step, count_ops, draw_line
from pi2.diagnostics import Diagnostic, Span, UserError
from pi2.plan.documents.device import EXAMPLE_READS, CpuCluster, Device, ShareFigure, Unit
from pi2.plan.documents.plan import ActivationType, KvType

MISSING_FIGURE = "P351"
_ENOUGH_CORES = 5.0
"""Cores that read as fast as all; PowerInfer-2 uses 5 of 8 on a phone."""
_WIDE_BYTES_S, _MANY_CORES = 150e9, 20
"""Peak bandwidth beyond what two channels give, and cores beyond what laptops have."""


def read_rates(
    device: Device,
    width: int | None = None,
    constants: Constants | None = None,
    *,
    unit: str | None = None,
) -> Rates:
    """Rates of a device at a model's ``width``, with the dense ``unit``; UserError P351."""
    return _Reader(device, width, constants or Constants()).read(unit)


def read_whole_rates(device: Device, name: str, constants: Constants | None = None) -> Rates:
    """Rates of the unit ``name`` that has the whole model; UserError P351 without its rate. It
    takes the processor's place: a step takes its bytes, and a fixed time for every kernel."""
    constants = constants or Constants()
    return _Reader(device, None, constants).read_whole(name, device.units[name])


ATTENTION_KERNELS = 6
"""Norm, QKV projection, writing the KV cache, scores, mixing, output."""
NAMED_KERNELS = 4
"""List of places of the neurons that a predictor names, activations, sums of parts, their join."""
ROUTER_KERNELS = 8
"""Scores, softmax, choice, weights, their sum and scale, gathering, and adding up."""
LAST_KERNELS = 2
"""Norm and head; with the embedding, three a token."""


def _read_steps(times: KernelTimes, bandwidth: float, norm_s: float) -> dict[Step, Linear]:
    return {
        "multiply": times.find_linear("multiply", bandwidth, norm_s),
        "project": times.find_linear("project", bandwidth, norm_s),
        "predict": times.find_linear("predict", bandwidth, norm_s),
        "gather": times.find_gather(bandwidth),
        "attend": times.find_attend(bandwidth),
    }


class _Reader:
    def __init__(self, device: Device, width: int | None, constants: Constants) -> None:
        self._device = device
        self._width = width
        self._constants = constants
        self._missing: list[Diagnostic] = []
        name, unit = next(
            ((n, u) for n, u in device.units.items() if u.kind == "cpu"), ("cpu", Unit(kind="cpu"))
        )
        self._name, self._cpu = name, unit
        self._times = KernelTimes(unit, width, constants)
        self._figures: dict[Figure, None] = {}
        self._spreads: dict[str, Spread] = {}

    def read(self, chosen: str | None = None) -> Rates:
        constants, cpu, storage = self._constants, self._cpu, self._device.storage
        bandwidth = self._read_bandwidth(cpu, self._find_cpu_share(), self._name)
        norm_s = self._times.find_time("norm", self._times.barrier_s)
        dense = self._read_dense(chosen)
        look_up, place_s, touch_s = self._times.find_look_up()
        shared = self._device.memory.read_bandwidth
        shared_s = float(shared.value) if shared is not None else bandwidth
        if shared is not None:
            self._use("memory.read_bandwidth", shared.status, shared.source)
        if shared is None and dense is not None:
            peak = self._device.memory.peak_bandwidth
            shared_s = (
                constants.dense_of_peak * float(peak.value) if peak is not None else bandwidth
            )
        steps = _read_steps(self._times, bandwidth, norm_s)
        steps["gate"] = steps["predict"]
        steps["open"] = self._times.find_gather(bandwidth, "gather-open")
        find_hot_s = 0.0
        if self._times.has("predict-gate"):
            steps["gate"] = self._times.find_linear("predict-gate", bandwidth, norm_s)
            find_hot_s = self._times.find_time("find", 0.0)
        own_spread = self._spreads[self._name]
        if self._times.measured:
            apart = median(float(item.spread or 0.0) for item in cpu.kernels)
            own_spread = Spread.around(constants.probed_factor + apart)
        power_w, both_w = self._read_powers(dense)
        rates = Rates(
            measured=self._times.measured,
            cores=self._times.cores,
            core_share=self._choose(storage.core_share, constants.reading_core_share),
            core_ops_s=self._find_core_ops(),
            enough_cores=4.0 if cpu.architecture == "x86-64" else _ENOUGH_CORES,
            bandwidth_bytes_s=bandwidth,
            steps=steps,
            norm_s=norm_s,
            route_s=self._times.find_time("route", 0.0),
            python_s=self._times.find_time("engine", 0.0),
            token_s=self._times.find_time("engine-token", 0.0),
            look_up=look_up,
            place_s=place_s,
            room_s=self._constants.place_s if isinf(look_up.bytes_s) else 0.0,
            touch_s=touch_s,
            find_s=self._times.find_time("find", 0.0, most=True),
            find_hot_s=find_hot_s,
            wake_s=self._times.find_time("wake", 0.0),
            dense_many=self._times.find_many("dense"),
            project_many=self._times.find_many("project-many"),
            few_ops_s=self._times.find_ops("dense", few=True),
            shared_bytes_s=max(
                shared_s, bandwidth, dense.bytes_s if dense and not dense.has_memory else 0.0
            ),
            dense=dense,
            flash=self._read_flash(),
            overlap=self._choose(storage.overlap, constants.unseen_overlap),
            beside_overlap=1.0 if storage.overlap is None else float(storage.overlap.value),
            power_w=power_w,
            both_w=both_w,
            bandwidths=tuple(
                (item.threads, float(item.value)) for item in cpu.bandwidth_by_threads
            ),
            types=self._read_types(bandwidth, norm_s),
            spread=own_spread,
            call_spread=own_spread,
            ops_spread=self._find_ops_spread(cpu, own_spread),
            flash_spread=self._find_flash_spread(),
            constants=constants,
        )
        for item in cpu.kernels:
            self._use(f"kernels ({item.kernel})", item.status, item.source)
        rates = replace(rates, figures=tuple(self._figures))
        if self._missing:
            raise UserError(tuple(self._missing), exit_code=2)
        return rates

    def _find_ops_spread(self, unit: Unit, spread: Spread) -> Spread:
        """Of arithmetic: a share of a stated peak is the least certain."""
        if any(item.kernel == "dense" for item in unit.kernels) or not unit.compute:
            return spread
        best = max(unit.compute, key=lambda item: item.giga_ops)
        if best.peak:
            return self._constants.find_spread("vendor_ops_share")
        return self._constants.find_label_spread(best.status)

    def _find_flash_spread(self) -> Spread:
        constants, storage = self._constants, self._device.storage
        found = Spread()
        for item in storage.reads:
            found = found.widen(constants.find_label_spread(item.status))
        if storage.sustained is None and not self._times.measured:
            found = found.widen(constants.find_spread("sustained_reads"))
        return found

    def _read_types(
        self, bandwidth: float, norm_s: float
    ) -> dict[tuple[KvType, ActivationType], dict[Step, Linear]]:
        return {
            (kv, activations): _read_steps(
                KernelTimes(
                    self._cpu, self._width, self._constants, kv=kv, activations=activations
                ),
                bandwidth,
                norm_s,
            )
            for kv in get_args(KvType)
            for activations in get_args(ActivationType)
            if (kv, activations) != ("fp16", "int16")
        }

    def _choose(self, figure: ShareFigure | None, assumed: float) -> float:
        """The figure; else 1 if the device ran pi2's kernels, or the share assumed of others."""
        if figure is not None:
            return float(figure.value)
        return 1.0 if self._times.measured else assumed

    def _find_cpu_share(self) -> str:
        """The constant that says which part of its memory's peak the processor reaches."""
        peak = self._device.memory.peak_bandwidth
        is_wide = peak is not None and peak.value > _WIDE_BYTES_S
        if is_wide or self._times.cores > _MANY_CORES:
            return "wide_of_peak"
        return "x86_of_peak" if self._cpu.architecture == "x86-64" else "arm_of_peak"

    def _find_core_ops(self) -> tuple[float, ...]:
        """Operations per second of each core for a token, fastest first; none if unknown, or in
        kernels' times."""
        constants, architecture = self._constants, self._cpu.architecture
        if self._times.measured or architecture is None:
            return ()
        if self._cpu.compute:
            best = max(count_ops(figure, constants) for figure in self._cpu.compute)
            return (best / self._times.cores,) * self._times.cores
        rates = [
            (item.frequency or constants.usual_clock) * count_pipes(item.core, architecture)
            for item in self._cpu.clusters or (CpuCluster(id="cores", cores=1),)
            for _ in range(item.cores)
        ]
        return tuple(sorted((constants.pipe_ops * rate for rate in rates), reverse=True))

    def _read_bandwidth(self, unit: Unit, share: str, name: str) -> float:
        of_peak: float = getattr(self._constants, share)
        figure = unit.read_bandwidth
        others = [item for item in self._device.units.values() if item is not unit]
        if figure is None and all(item.memory is not None for item in others):
            figure = self._device.memory.read_bandwidth
        if figure is not None:
            self._use(f"units.{name}.read_bandwidth", figure.status, figure.source)
            self._spreads[name] = self._constants.find_label_spread(figure.status)
            return float(figure.value)
        self._spreads[name] = self._constants.find_spread(share)
        peak = self._device.memory.peak_bandwidth
        if peak is not None:
            origin = f"{of_peak:.0%} of it, as units of its kind reach"
            self._use("memory.peak_bandwidth", "estimated", origin)
            return of_peak * float(peak.value)
        self._miss(
            f"units.{name}.read_bandwidth",
            'write memory.peak_bandwidth of a data sheet, such as value = "6400 MT/s x 128 bit"; '
            "on the device, `pi2 probe` measures it",
        )
        return 1.0

    def _read_dense(self, chosen: str | None) -> DenseUnit | None:
        """The unit ``chosen``, else an NPU or GPU whose memory rate is stated, else one that
        programs can use, in main memory whose peak is."""
        units, has_peak = self._device.units, self._device.memory.peak_bandwidth is not None
        if chosen in units:
            return self._describe_dense(chosen, units[chosen], estimated=True)
        for estimated in (False, True) if has_peak else (False,):
            for kind in ("npu", "gpu"):
                for name, unit in units.items():
                    if unit.kind != kind or (estimated and unit.architecture is None):
                        continue
                    found = self._describe_dense(name, unit, estimated=estimated)
                    if found is not None:
                        return found
        return None

    def _describe_dense(
        self, name: str, unit: Unit, *, estimated: bool = False
    ) -> DenseUnit | None:
        if unit.emulated:
            return None
        bytes_s = self._find_dense_rate(name, unit, estimated=estimated)
        if bytes_s is None:
            return None
        best = max(unit.compute, key=lambda item: item.giga_ops, default=None)
        if best is not None:
            self._use(f"units.{name}.compute", best.status, best.source)
        return DenseUnit(
            name=name,
            bytes_s=bytes_s,
            launch_s=self._find_launch(unit),
            ops_s=None if best is None else count_ops(best, self._constants),
            is_npu=unit.kind == "npu",
            has_memory=unit.memory is not None,
            spread=self._spreads[name],
            ops_spread=self._find_ops_spread(unit, self._spreads[name]),
        )

    def read_whole(self, name: str, unit: Unit) -> Rates:
        constants = self._constants
        kernel = "metal_kernel_s" if unit.architecture == "metal" else "recorded_kernel_s"
        kernel_s: float = getattr(constants, kernel)
        bytes_s = self._find_dense_rate(name, unit, estimated=True)
        if bytes_s is None or self._missing:
            raise UserError(tuple(self._missing), exit_code=2)
        linear = Linear(call_s=kernel_s, bytes_s=bytes_s)
        gather = Linear(
            call_s=NAMED_KERNELS * kernel_s, bytes_s=constants.gather_efficiency * bytes_s
        )
        power_w = None if unit.power is None else float(unit.power.value)
        return Rates(
            measured=False,
            whole_unit=name,
            cores=1,
            bandwidth_bytes_s=bytes_s,
            steps={
                "multiply": replace(linear, call_s=LAST_KERNELS * kernel_s),
                "project": replace(linear, call_s=ATTENTION_KERNELS * kernel_s),
                "attend": replace(linear, call_s=0.0),
                "predict": linear,
                "gather": gather,
                "gate": linear,
                "open": gather,
            },
            norm_s=kernel_s,
            route_s=ROUTER_KERNELS * kernel_s,
            token_s=constants.card_launch_s + kernel_s,
            shared_bytes_s=bytes_s,
            spread=self._spreads[name],
            call_spread=constants.find_spread(kernel).invert(),
            power_w=power_w,
            both_w=power_w,
            figures=tuple(self._figures),
            constants=constants,
        )

    def _find_dense_rate(self, name: str, unit: Unit, *, estimated: bool) -> float | None:
        constants = self._constants
        if unit.memory is None:
            if unit.read_bandwidth is None and not estimated:
                return None
            return self._read_bandwidth(unit, "dense_of_peak", name)
        figure, share, key = unit.memory.read_bandwidth, 1.0, "read_bandwidth"
        if figure is None:
            figure, key = unit.memory.peak_bandwidth, "peak_bandwidth"
            share = constants.card_of_peak
        if figure is None:
            if estimated:
                self._miss(
                    f"units.{name}.memory.read_bandwidth",
                    'write its peak_bandwidth of a data sheet, such as value = "1008 GB/s"; on the '
                    "device, `pi2 probe` measures it",
                )
            return None
        status, origin = figure.status, figure.source
        self._spreads[name] = constants.find_label_spread(status)
        if share != 1.0:
            self._spreads[name] = constants.find_spread("card_of_peak")
            status, origin = "estimated", f"{share:.0%} of its memory's peak"
        self._use(f"units.{name}.memory.{key}", status, origin)
        return share * float(figure.value)

    def _find_launch(self, unit: Unit) -> float:
        """Seconds until the unit has started: the time of a small matrix without its bytes."""
        found = sorted(
            (item for item in unit.kernels if item.kernel == "multiply" and item.bytes),
            key=lambda item: item.size,
        )
        if len(found) < 2:
            constants = self._constants
            return constants.dense_launch_s if unit.memory is None else constants.card_launch_s
        return max(draw_line(found[0], found[-1], by_bytes=True)[0], 0.0)

    def _read_powers(self, dense: DenseUnit | None) -> tuple[float | None, float | None]:
        """Watts of the processor while it computes, and of the device while both units do."""
        whole, own = self._device.power, self._cpu.power
        if (figure := own or whole) is not None:
            name = "power" if own is None else f"units.{self._name}.power"
            self._use(name, figure.status, figure.source)
        if whole is not None:
            self._use("power", whole.status, whole.source)
        others = [] if dense is None else [self._device.units[dense.name].power]
        known = [float(item.value) for item in (own, *others) if item is not None]
        both_w = max(known, default=None) if whole is None else float(whole.value)
        return None if figure is None else float(figure.value), both_w

    def _read_flash(self) -> Flash | None:
        storage = self._device.storage
        patterns = {item.pattern for item in storage.reads}
        if patterns != {"random", "sequential"}:
            return None
        for item in storage.reads:
            name = f"storage.reads ({item.pattern}, {item.block} B)"
            self._use(name, item.status, item.source)
        clusters = self._cpu.clusters
        bursts = tuple(item for item in storage.reads if item.burst is not None)
        steady = (item for item in storage.reads if item.burst is None)
        points = keep_core(steady, clusters[0].id if clusters else None)
        penalty = storage.reader_penalty
        if penalty is not None:
            self._use("storage.reader_penalty", penalty.status, penalty.source)
        if (kept := self._choose(storage.sustained, self._constants.sustained_reads)) != 1.0:
            points = [item.model_copy(update={"rate": kept * item.rate}) for item in points]
        usual = self._constants.reader_penalty if storage.kind in ("ufs", "emmc", "sd") else 0.0
        return Flash(
            points=tuple(points),
            bursts=bursts,
            latency_s=float(storage.latency or self._constants.read_latency_s),
            reader_penalty=usual if penalty is None else float(penalty.value),
            block_bytes=storage.block_size or 4096,
            queue=min((storage.queue_depth or 128) * (storage.queues or 1), 128),
            # Phones' systems forbid it, and Apple's have none.
            has_io_uring=storage.kind != "ufs"
            and not any(unit.architecture == "metal" for unit in self._device.units.values())
            and not any((item.core or "").startswith("apple-") for item in clusters),
        )

    def _use(self, name: str, status: str, source: str) -> None:
        self._figures[Figure(name=name, status=status, source=source)] = None

    def _miss(self, name: str, help_text: str) -> None:
        self._missing.append(
            Diagnostic(
                code=MISSING_FIGURE,
                message=f"the device {self._device.id!r} has no figure {name}",
                help=help_text,
                span=Span.of_file(self._device.id),
            )
        )


def check_power(rates: Rates, device: Device) -> None:
    """``UserError`` P351 where the device does not say what power it takes."""
    if rates.power_w is not None:
        return
    name = next((name for name, unit in device.units.items() if unit.kind == "cpu"), "cpu")
    raise UserError.of(
        MISSING_FIGURE,
        f"the device {device.id!r} has no figure units.{name}.power, and energy is asked for",
        help="measure it while `pi2 run` generates: on phones current times voltage of "
        "/sys/class/power_supply/battery, on x86 `perf stat -a -e power/energy-pkg/`, else a meter "
        "at the plug; state the watts with their source",
    )


def check_flash(rates: Rates, device: Device) -> Flash:
    """The storage's rates; ``UserError`` P351 says which reads are missing."""
    if rates.flash is None:
        raise UserError(list_missing_reads(device), exit_code=2)
    return rates.flash


def list_missing_reads(device: Device) -> tuple[Diagnostic, ...]:
    """P351 if the device does not say how fast its storage is."""
    missing = sorted({"random", "sequential"} - {item.pattern for item in device.storage.reads})
    if not missing:
        return ()
    return UserError.of(
        MISSING_FIGURE,
        f"the device {device.id!r} has no figure storage.reads for {', '.join(missing)} reads, and "
        "the model does not fit into the memory",
        help="write a data sheet's: " + "; ".join(EXAMPLE_READS[item] for item in missing) + "; on "
        "the device, `pi2 probe` measures them",
    ).diagnostics
