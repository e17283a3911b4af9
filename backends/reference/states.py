"""Layers with a state in the reference backend, after Yang et al. 2024 ("Gated Delta Networks"), Gu
and Dao 2023 ("Mamba"), Dao and Gu 2024 ("Transformers are SSMs"), and Hugging Face transformers."""

from dataclasses import dataclass

import numpy as np

from pi2.arrays import F32
from pi2.backends.protocol import BuildRequest
from pi2.backends.reference.operators import take_sigmoid, take_silu, take_softplus, widen
from pi2.model.states import StateShape
from pi2.model.tensor import name_state_tensor
from pi2.plan.weights.layout import ALIGNMENT, round_up


@dataclass(slots=True, kw_only=True)
class ChunkState:
    """Arrays are replaced from step to step; before a layer has begun, they have no meaning but
    for x, ``added`` and ``streams``."""

    x: F32
    """What goes from layer to layer [T, hidden]."""
    input: F32
    """What attention of the layer reads, before its norm [T, hidden]."""
    u: F32
    """What the FFN reads [T, hidden]."""
    v: F32
    """Input of its neurons [T, neuron width]: u, or its projection for experts of another width."""
    routes: F32
    """Weights of experts [T, experts]."""
    y: F32
    """The sum of its neurons [T, neuron width]."""
    squares: F32
    """Sums of the squares of the FFN's activations [T], for their norm."""
    added: F32
    """Embeddings that layers have of their own [layers, T, width]."""
    streams: F32
    """Residual streams other than x [streams - 1, T, hidden]."""
    cutoffs: F32 | None = None
    """Cutoffs of the layer's gates [T, 1], if it has them."""


def begin_chunk(x: F32, added: F32, streams: F32) -> ChunkState:
    """Return the state of tokens whose embeddings are ``x``."""
    return ChunkState(
        x=x, input=x, u=x, v=x, routes=x, y=x, squares=x, added=added, streams=streams
    )


_Place = tuple[int, int, int]
"""Sequence, layer and number of the mixer in the layer."""


class States:
    """States of all sequences: what the convolution reads of earlier tokens, and matrices."""

    def __init__(self, request: BuildRequest, shape: StateShape) -> None:
        self._request = request
        self._shape = shape
        self._tails: dict[_Place, F32] = {}
        self._memories: dict[_Place, F32] = {}
        memory = (shape.value_heads, shape.key_dim, shape.value_dim)
        for sequence in range(request.sequences):
            for state in request.model.states:
                place = (sequence, *state)
                self._tails[place] = self._allocate(shape.kernel - 1, shape.channels)
                self._memories[place] = self._allocate(*memory)

    def _allocate(self, *shape: int) -> F32:
        size = 4 * int(np.prod(shape))
        if size == 0:
            return np.zeros(shape, np.float32)
        raw = self._request.allocate("state", round_up(size, ALIGNMENT))
        return raw[:size].view(np.float32).reshape(shape)

    def _read(self, place: _Place, kind: str) -> F32:
        _, layer, mixer = place
        return widen(self._request.tensors[name_state_tensor(layer, mixer, kind)])

    def read(self, sequence: int) -> F32:
        return np.concatenate([array.reshape(-1) for array in self._list_arrays(sequence)])

    def put(self, sequence: int, state: F32) -> None:
        """Set the states of a sequence to what `read` gave."""
        first = 0
        for array in self._list_arrays(sequence):
            array[...] = state[first : first + array.size].reshape(array.shape)
            first += array.size

    def _list_arrays(self, sequence: int) -> list[F32]:
        places = [(sequence, *state) for state in self._request.model.states]
        return [kept[place] for place in places for kept in (self._tails, self._memories)]

    def mix(self, place: _Place, projected: F32, gates: F32, position: int) -> F32:
        """What tokens from ``position`` on mix at ``place`` [T, stored width], from ``projected``
        [T, rows] and ``gates`` [T, gates]; position 0 starts with a zero state."""
        shape = self._shape
        if position == 0:
            self._tails[place][:] = 0
            self._memories[place][:] = 0
        if shape.kind == "convolution":
            mixed = self._mix_convolution(projected, place)
        elif shape.kind == "mamba1":
            mixed = self._scan(projected, place)
        else:
            mixed = self._mix_recurrent(projected, gates, place)
        padding = np.zeros((len(mixed), shape.stored_width - shape.width), np.float32)
        return np.concatenate([mixed, padding], axis=1)

    def _mix_convolution(self, projected: F32, place: _Place) -> F32:
        before, after, values = np.split(projected, 3, axis=1)
        return np.asarray(after * self._convolve(before * values, place))

    def _convolve(self, inputs: F32, place: _Place) -> F32:
        """Causal convolution of each channel of ``inputs`` [T, channels]; keeps the last ones."""
        tail = self._tails[place]
        known = np.concatenate([tail, inputs])
        weights = self._read(place, "state_convolution")
        result = sum(
            weights[step] * known[step : step + len(inputs)] for step in range(len(weights))
        )
        if self._shape.convolution_bias:
            result = result + self._read(place, "state_convolution_bias")
        tail[:] = known[len(inputs) :]
        return np.asarray(result, np.float32)

    def _mix_recurrent(self, projected: F32, gates: F32, place: _Place) -> F32:
        shape, count = self._shape, len(projected)
        keys = shape.key_heads * shape.key_dim
        convolved = take_silu(self._convolve(projected[:, : shape.channels], place))
        query, key, value = np.split(convolved, [keys, 2 * keys], axis=1)
        query = query.reshape(count, shape.key_heads, shape.key_dim)
        key = key.reshape(count, shape.key_heads, shape.key_dim)
        value = value.reshape(count, shape.value_heads, shape.value_dim)
        rate = self._read(place, "state_decay")[0]
        step_bias = self._read(place, "state_step")[0]
        if shape.kind == "delta":
            query = _normalize_l2(query) * np.float32(shape.key_dim**-0.5)
            key = _normalize_l2(key)
            entry = take_sigmoid(gates[:, : shape.value_heads])
            steps = self._make_decays(gates, place) + step_bias
            decay = self._take_decays(steps.reshape(count, shape.value_heads, -1), rate[:, None])
        else:
            entry = take_softplus(gates + step_bias)
            entry = np.clip(entry, shape.shortest_step, shape.longest_step or np.inf)
            decay = np.exp(rate * entry)[:, :, None]
        together = shape.value_heads // shape.key_heads
        query, key = np.repeat(query, together, axis=1), np.repeat(key, together, axis=1)
        memory = self._memories[place]
        mixed = np.empty_like(value)
        for token in range(count):
            memory *= decay[token, :, :, None]
            added = value[token]
            if shape.kind == "delta":
                added = added - np.einsum("hkv,hk->hv", memory, key[token])
            added = added * entry[token, :, None]
            memory += key[token, :, :, None] * added[:, None, :]
            mixed[token] = np.einsum("hkv,hk->hv", memory, query[token])
        if shape.kind == "mamba":
            mixed += self._read(place, "state_skip")[0][None, :, None] * value
        return self._normalize_output(place, mixed, self._make_gates(projected, gates, place))

    def _make_decays(self, gates: F32, place: _Place) -> F32:
        """What decays are, before their biases, [T, decays]."""
        shape = self._shape
        first = shape.value_heads
        if not shape.decay_rank:
            return gates[:, first : first + shape.decays]
        weights = self._read(place, "state_decays")[:, : shape.decay_rank]
        return np.asarray(gates[:, first : first + shape.decay_rank] @ weights.T)

    def _take_decays(self, steps: F32, rate: F32) -> F32:
        """Decays of ``steps`` [T, value heads, 1 or key_dim]; ``rate`` [value heads, 1]."""
        floor = self._shape.decay_floor
        if floor is None:
            return np.asarray(np.exp(rate * take_softplus(steps)))
        return np.asarray(np.exp(np.float32(floor) * take_sigmoid(-rate * steps)))

    def _make_gates(self, projected: F32, gates: F32, place: _Place) -> F32:
        """Gates of the mixer's output, [T, width]."""
        shape = self._shape
        if not shape.gate_rank:
            return projected[:, shape.channels :]
        weights = self._read(place, "state_output_gates")[:, : shape.gate_rank]
        return np.asarray(gates[:, shape.gates - shape.gate_rank :] @ weights.T)

    def _scan(self, projected: F32, place: _Place) -> F32:
        """The first Mamba's recurrence: every element of a channel's state has its own decay."""
        shape = self._shape
        values = take_silu(self._convolve(projected[:, : shape.channels], place))
        parts = values @ self._read(place, "state_parts")[:, : shape.width].T
        steps, keys, queries = self._normalize_parts(parts, place)
        weights = self._read(place, "state_steps")[:, : shape.step_rank]
        entry = take_softplus(steps @ weights.T + self._read(place, "state_step")[0])
        rates, memory = self._read(place, "state_decay"), self._memories[place][0]
        mixed = np.empty_like(values)
        for token, (step, value) in enumerate(zip(entry, values, strict=True)):
            memory *= np.exp(rates * step)
            memory += keys[token, :, None] * (step * value)
            mixed[token] = queries[token] @ memory
        mixed += self._read(place, "state_skip")[0] * values
        return np.asarray(mixed * take_silu(projected[:, shape.channels :]))

    def _normalize_parts(self, parts: F32, place: _Place) -> list[F32]:
        """What step sizes are made of, keys and queries, of the columns of ``parts``, with norms
        if they have some."""
        shape = self._shape
        bounds = [shape.step_rank, shape.step_rank + shape.key_dim]
        found = np.split(parts, bounds, axis=1)
        if shape.part_norm == "none":
            return found
        epsilon = np.float32(shape.part_epsilon)
        for part in found:
            part /= np.sqrt(np.mean(np.square(part), axis=1, keepdims=True) + epsilon)
        if shape.part_norm == "weighted":
            weights = np.split(self._read(place, "state_part_norm")[0], bounds)
            found = [part * weight for part, weight in zip(found, weights, strict=True)]
        return found

    def _normalize_output(self, place: _Place, mixed: F32, gates: F32) -> F32:
        """Norm and gates: of Mamba-2 gates come first, of the delta rule the norm of each head."""
        shape = self._shape
        if not shape.has_norm:
            return np.asarray(mixed.reshape(len(mixed), -1) * take_silu(gates))
        weight = self._read(place, "state_norm")
        epsilon = np.float32(self._request.model.norm.epsilon)
        flat = mixed.reshape(len(mixed), -1)
        if shape.kind == "mamba":
            groups = (flat * take_silu(gates)).reshape(len(mixed), shape.norm_groups, -1)
            factor = 1 / np.sqrt(np.mean(np.square(groups), axis=-1, keepdims=True) + epsilon)
            return np.asarray((groups * factor).reshape(len(mixed), -1) * weight)
        factor = 1 / np.sqrt(np.mean(np.square(mixed), axis=-1, keepdims=True) + epsilon)
        activate = take_silu if shape.gate == "silu" else take_sigmoid
        return np.asarray((mixed * factor * weight).reshape(len(mixed), -1) * activate(gates))


def _normalize_l2(x: F32) -> F32:
    return np.asarray(x / np.sqrt(np.sum(np.square(x), axis=-1, keepdims=True) + np.float32(1e-6)))
