"""The way of a model's weights to a device, and tables of positions."""

import numpy as np

from pi2.arrays import F32, I32, U8, Raw
from pi2.backends.arithmetic import compute_growth, compute_rope_tables
from pi2.backends.gpu.arrays import TILE, count_tile_bytes
from pi2.backends.gpu.launchers.interface import DeviceArray, Event, Queue
from pi2.backends.gpu.model_arrays import ModelArrays, ModelUse, lies_in_tiles
from pi2.backends.gpu.packing import WholeTiles, pack_matrix, pack_neurons, pack_slots
from pi2.model.blocks import list_attention
from pi2.plan.weights.layout import Tensor


class ModelWeights:
    """Fills a model's arrays."""

    def __init__(self, queue: Queue, use: ModelUse, arrays: ModelArrays) -> None:
        self._queue, self._use, self._arrays = queue, use, arrays
        self._shapes = {tensor.name: tensor for tensor in use.list_tensors()}
        self._uploaded: Event | None = None
        self._tiles = WholeTiles()
        model, state = use.model, arrays.state
        ropes = [model.rope, model.other_rope]
        self._ropes = [rope for rope in ropes if rope is not None]
        self._is_long: list[bool | None] = [None] * len(self._ropes)
        blocks = enumerate(block.attention for block in model.blocks)
        grows = next((layer for layer, own in blocks if own and own.options.growth), None)
        if grows is not None:
            self._send(state["growth"], compute_growth(model, grows, 0, use.context))
        # What fills up the last group of what heads have mixed is written by no product.
        for name in ("zeros", "mixed", "mixed_state"):
            if name in state:
                self._send(state[name], np.zeros(state[name].size // 4, np.float32))

    def put(self, tensor: Tensor, first: int) -> None:
        """See `pi2.backends.units.WholeModel`."""
        shape = self._shapes.get(tensor.name)
        if shape is None:
            # Such as predictors that the plan does not use.
            return
        assert first % TILE == 0, first
        arrays = self._arrays.tensors[tensor.name]
        if shape.packing.is_float32 or not lies_in_tiles(shape):
            row_bytes = tensor.weights.nbytes // tensor.rows
            self._send(arrays["values"], tensor.weights, first * row_bytes)
            return
        weights = np.asarray(tensor.weights).view(np.uint8).reshape(tensor.rows, -1)
        scales = None if tensor.scales is None else tensor.scales.reshape(tensor.rows, -1)
        for name, values in pack_matrix(weights, scales, shape.length, shape.precision).items():
            size = values.nbytes // -(-tensor.rows // TILE)
            self._send(arrays[name], values, first // TILE * size)

    def keep(self, layer: int, first: int, bundles: U8) -> None:
        first, whole = self._tiles.take(layer, first, bundles, self._use.model.layer_neurons)
        if len(whole):
            pack = pack_slots if self._use.is_sparse else pack_neurons
            sizes = count_tile_bytes(self._use.layout)
            for name, values in pack(whole, self._use.layout).items():
                self._send(self._arrays.neurons[layer][name], values, first // TILE * sizes[name])

    def put_order(self, layer: int, order: I32) -> None:
        """Tell the stored indices of an MoE model's neurons, expert by expert."""
        self._send(self._arrays.state[f"order_{layer}"], np.ascontiguousarray(order, np.int32))

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
                values = np.ascontiguousarray(table, np.float32)
                self._send(self._arrays.state[f"{name}_{number}"], values)

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

    def finish(self) -> None:
        """Wait until all has arrived."""
        if self._uploaded is not None:
            self._uploaded.wait()
            self._uploaded = None
