"""All arrays of a model on a device, and the way of its weights there."""

from collections.abc import Mapping

import numpy as np

from pi2.arrays import F32, I32, U8, Raw
from pi2.backends.arithmetic import compute_growth, compute_rope_tables
from pi2.backends.gpu.kernels.specification import Number
from pi2.backends.gpu.launchers.interface import DeviceArray, Event, Launch, Launcher, LoadedKernel
from pi2.backends.gpu.model_sizes import (
    JOINED,
    ModelUse,
    count_ropes,
    lies_in_tiles,
    list_kept,
    list_neurons,
    list_state,
    list_tensor_arrays,
)
from pi2.backends.gpu.packing import DeviceArrays, WholeTiles, pack_matrix, pack_neurons, pack_slots
from pi2.backends.gpu.sizes import TILE, choose_kernel_tokens, count_tile_bytes
from pi2.model.blocks import list_attention
from pi2.model.tensor import name_layer_tensor
from pi2.plan.arithmetic.units import name_head
from pi2.plan.weights.layout import Tensor


class ModelArrays:
    def __init__(self, launcher: Launcher, use: ModelUse) -> None:
        """Make them all; raises P361 where the device has no memory for them."""
        self._launcher, self._use = launcher, use
        self._queue = launcher.open_queue()
        self._own = DeviceArrays(launcher)
        self._shapes = {tensor.name: tensor for tensor in use.list_tensors()}
        self._uploaded: Event | None = None
        self._tiles = WholeTiles()
        layers = range(use.model.shape.layers)
        try:
            self.tensors = {
                name: self._own.allocate(list_tensor_arrays(tensor))
                for name, tensor in self._shapes.items()
                if name.rpartition(".")[2] not in JOINED
            }
            self.neurons = [self._own.allocate(list_neurons(use)) for _ in layers]
            self.kept = [self._own.allocate(list_kept(use, layer)) for layer in layers]
            self.state = self._own.allocate(list_state(use))
        except BaseException:
            self.release()
            raise
        ropes = [use.model.rope, use.model.other_rope]
        self._ropes = [rope for rope in ropes if rope is not None]
        self._is_long: list[bool | None] = [None] * count_ropes(use)
        self._send_growth()
        # What fills up the last group of what heads have mixed is written by no product.
        for name in ("zeros", "mixed", "mixed_state"):
            if name in self.state:
                self._send(self.state[name], np.zeros(self.state[name].size // 4, np.float32))

    def _send_growth(self) -> None:
        model, context = self._use.model, self._use.context
        for name, is_wanted in (("growth", True), ("no_growth", False)):
            if name in self.state:
                blocks = enumerate(block.attention for block in model.blocks)
                found = (n for n, own in blocks if own and (own.growth > 0.0) is is_wanted)
                layer = next(found, None)
                if layer is not None:
                    self._send(self.state[name], compute_growth(model, layer, 0, context))

    @property
    def device_bytes(self) -> int:
        return self._own.total_bytes

    def put(self, tensor: Tensor, first: int) -> None:
        shape = self._shapes.get(tensor.name)
        if shape is None:
            # Such as predictors that the plan does not use.
            return
        assert first % TILE == 0, first
        kind = tensor.name.rpartition(".")[2]
        if kind in JOINED:
            array, part = JOINED[kind]
            layer = int(tensor.name.split(".")[1])
            rows = self._use.router.moe.experts if self._use.router is not None else 0
            begin = 4 * shape.length * (part * rows if array == "router" else part)
            self._send(
                self.state[f"{array}_{layer}"], tensor.weights, begin + 4 * shape.length * first
            )
            return
        arrays = self.tensors[tensor.name]
        if shape.packing.is_float32 or not lies_in_tiles(shape):
            row_bytes = tensor.weights.nbytes // tensor.rows
            self._send(arrays["values"], tensor.weights, first * row_bytes)
            return
        weights = np.asarray(tensor.weights).view(np.uint8).reshape(tensor.rows, -1)
        scales = None if tensor.scales is None else tensor.scales.reshape(tensor.rows, -1)
        tiles = -(-shape.rows // TILE)
        for name, values in pack_matrix(weights, scales, shape.length, shape.precision).items():
            # The size of the array may be rounded up: of a tile it is not.
            size = values.nbytes // -(-tensor.rows // TILE)
            assert tiles * size <= arrays[name].size
            self._send(arrays[name], values, first // TILE * size)

    def keep(self, layer: int, first: int, bundles: U8) -> None:
        first, whole = self._tiles.take(layer, first, bundles, self._use.model.layer_neurons)
        if len(whole):
            pack = pack_slots if self._use.is_sparse else pack_neurons
            sizes = count_tile_bytes(self._use.layout)
            for name, values in pack(whole, self._use.layout).items():
                self._send(self.neurons[layer][name], values, first // TILE * sizes[name])

    def put_order(self, layer: int, order: I32) -> None:
        """Tell the stored indices of an MoE model's neurons, expert by expert."""
        self._send(self.state[f"order_{layer}"], np.ascontiguousarray(order, np.int32))

    def expect(self, end: int) -> None:
        """Prepare the tables of positions for a sequence of ``end`` tokens."""
        for number, rope in enumerate(self._ropes):
            is_long = rope.kind == "longrope" and end > rope.original_context
            if is_long == self._is_long[number]:
                continue
            self._is_long[number] = is_long
            width, context = list_attention(self._use.model)[0][0].turned_width, self._use.context
            tables = compute_rope_tables(rope, width, context, is_long=is_long)
            for name, table in zip(("cosines", "sines"), tables, strict=True):
                self._send(self.state[f"{name}_{number}"], np.ascontiguousarray(table, np.float32))

    def _send(self, array: DeviceArray, values: Raw | F32 | I32 | U8, offset: int = 0) -> None:
        """Send a piece when the one before has arrived: no more than two are in main memory."""
        flat = np.ascontiguousarray(values).reshape(-1).view(np.uint8)
        if flat.nbytes % 4:
            flat = np.concatenate([flat, np.zeros(-flat.nbytes % 4, np.uint8)])
        elif np.may_share_memory(flat, np.asarray(values)):
            # The caller's memory may change as soon as this returns.
            flat = flat.copy()
        if self._uploaded is not None:
            self._uploaded.wait()
        self._queue.upload(array, flat, offset)
        self._uploaded = self._queue.submit()

    def finish_loading(self) -> None:
        if self._uploaded is not None:
            self._uploaded.wait()
            self._uploaded = None

    def release(self) -> None:
        """Give the device's memory back."""
        self._own.release()


Work = tuple[Launch, Mapping[str, Number]]
"""A kernel with its arrays, and its numbers."""


class WorkList:
    """Binds kernels to a model's arrays, each pair once, and lists them."""

    def __init__(
        self,
        launcher: Launcher,
        kernels: Mapping[str, LoadedKernel],
        use: ModelUse,
        arrays: ModelArrays,
    ) -> None:
        self.launcher, self.use = launcher, use
        self._products = use.products
        self._kernels = kernels
        self.arrays = arrays
        self.state = arrays.state
        """Working arrays, by name."""
        self._bound: dict[tuple[str, tuple[int, ...]], Launch] = {}
        self._work: list[Work] = []

    def take(self) -> list[Work]:
        work, self._work = self._work, []
        return work

    def add(
        self, name: str, arrays: Mapping[str, DeviceArray], numbers: Mapping[str, Number]
    ) -> None:
        """Add a kernel; ``arrays`` and ``numbers`` may be more than it takes."""
        kernel = self._kernels[name]
        chosen = {key: arrays[key] for key in kernel.signature.arrays}
        key = (name, tuple(map(id, chosen.values())))
        if key not in self._bound:
            self._bound[key] = self.launcher.bind(kernel, chosen)
        self._work.append((self._bound[key], numbers))

    def find_tensor(self, name: str) -> Mapping[str, DeviceArray]:
        return self.arrays.tensors[name]

    def find_vector(self, name: str, layer: int | None = None) -> DeviceArray:
        """The array of a tensor of float32; ``name``: of a layer its kind."""
        whole = name if layer is None else name_layer_tensor(layer, name)
        return self.arrays.tensors[whole]["values"]

    def multiply(
        self,
        kind: str,
        layer: int | None,
        rows: int,
        tokens: int,
        inputs: str,
        outputs: str,
        bias: str | None = None,
    ) -> None:
        """Add the product of the working array ``inputs`` with the ``rows`` of a layer's tensor, or
        of the head."""
        product = self._products[kind]
        size = min(choose_kernel_tokens(tokens), 4 if product.blocks > 1 else 64)
        head = name_head(self.use.model)
        tensor = self.find_tensor(head if layer is None else name_layer_tensor(layer, kind))
        arrays = {**tensor, "inputs": self.state[inputs], "outputs": self.state[outputs]}
        if product.bias:
            arrays["biases"] = self.find_vector(bias or f"{kind}_bias", layer)
        self.add(f"{product.name}_{size}", arrays, {"rows": rows, "tokens": tokens})

    def normalise(
        self, name: str, target: str, first: int, tokens: int, layer: int | None = None
    ) -> None:
        """Add the norm ``name`` of tokens of x from ``first`` on, into ``target``."""
        arrays = {
            "x": self.state["x"],
            "outputs": self.state[target],
            "weights": self.find_vector(name, layer),
        }
        if self.use.model.norm.bias:
            arrays["biases"] = self.find_vector(f"{name}_bias", layer)
        self.add("norm", arrays, {"first": first, "tokens": tokens})
