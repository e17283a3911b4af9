"""Calls of the attention kernels: weights of every layer, the KV cache, room to work in."""

from dataclasses import dataclass

import numpy as np

from pi2.arrays import F32, U8, Raw
from pi2.backends.arithmetic import RopeTables, compute_growth
from pi2.backends.compiler.runtime import BoundCall, Library
from pi2.backends.cpu.workspace import Scratch, Views, Workspace, count_tokens
from pi2.backends.kernels.mixing_layout import count, lay_out_mixing
from pi2.backends.kernels.spec import KV_BLOCK, KV_DTYPES, SPANS, KernelSpec, strip_attention
from pi2.backends.protocol import CONTEXT_BLOCK, BuildRequest
from pi2.model.blocks import Attention as AttentionBlock
from pi2.model.blocks import list_turns
from pi2.model.states import StateShape
from pi2.model.tensor import name_layer_tensor
from pi2.plan.documents.model_mixing import Latent, Rope
from pi2.plan.weights.layout import fill_groups, round_up


class States:
    """Inputs and outputs of these layers' functions in addition to the arrays of a chunk."""

    def __init__(self, request: BuildRequest, space: Workspace, spec: KernelSpec) -> None:
        assert spec.state is not None
        shape, model = spec.state, request.model
        self.weights: dict[tuple[int, int], Views] = {
            (layer, number): space.wrap_layer(layer, number) for layer, number in model.states
        }
        """By layer and number of the mixer in it."""
        self._arrays: list[list[F32]] = []
        """States of each sequence, one after the other."""
        self.kept: list[dict[tuple[int, int], Views]] = []
        """Views of them by layer and number of the mixer, of each sequence."""
        for _ in range(request.sequences):
            made = {place: _make_state(space, shape) for place in model.states}
            self._arrays.append([array for state in made.values() for array in state.values()])
            self.kept.append(
                {
                    place: {name: space.wrap(array) for name, array in state.items()}
                    for place, state in made.items()
                }
            )
        tokens = count_tokens(request)
        self.room = space.make_inputs("state_mixed", tokens, shape.stored_width, spec)
        self.room |= space.make_tiles("state_mixed", spec, shape.stored_width)
        lengths = {
            "state_projected": shape.entries,
            "state_factors": max(1, shape.factors),
            "state_ranks": shape.stored_rank,
            "state_decays_ranks": shape.stored_decay_rank,
            "state_output_gates_ranks": shape.stored_gate_rank,
        }
        for name, length in lengths.items():
            if length:
                self.room[name] = space.wrap(space.make("float32", tokens, length))

    def read(self, sequence: int) -> F32:
        return np.concatenate(self._arrays[sequence])

    def put(self, sequence: int, state: F32) -> None:
        """Set the states of a sequence to what `read` gave."""
        first = 0
        for array in self._arrays[sequence]:
            array[:] = state[first : first + len(array)]
            first += len(array)


def _make_state(space: Workspace, shape: StateShape) -> dict[str, F32]:
    """Return the arrays of a state; an element stands for one that is empty."""
    sizes = {"state_tail": shape.kept, "state_memory": shape.memory}
    return {
        name: space.make("float32", max(1, size), segment="state" if size else "workspace")
        for name, size in sizes.items()
    }


_SHAPED = frozenset({"attend", "attend_mix", "attend_mix_tokens"})
"""Functions in which a window makes a difference."""


@dataclass(frozen=True, slots=True)
class PartCalls:
    """The three parts of a layer's attention block: in a step of several sequences, and where
    another unit computes rows of its projections."""

    project: BoundCall
    mix: tuple[BoundCall, ...]
    """By sequence: of one token in a step, else of all tokens."""
    output: BoundCall


class Attention:
    """Inputs and outputs of attention in addition to the arrays of a chunk."""

    def __init__(
        self,
        request: BuildRequest,
        space: Workspace,
        spec: KernelSpec,
        library: Library,
        scratch: Scratch,
    ) -> None:
        self._spec = spec
        self._library = library
        self._model = model = request.model
        tokens = count_tokens(request)
        self._layers = range(model.shape.layers)
        self.context = round_up(request.context, KV_BLOCK)
        """Tokens that the KV cache has room for."""
        self.ropes = make_rope_tables(request, space)
        """Tables of positions by `Attention.turn`."""
        tables = {
            turn: dict(zip(("cosines", "sines"), map(space.wrap, rope.arrays), strict=True))
            for turn, rope in self.ropes.items()
        }
        growing: dict[bytes, Views] = {}
        self._weights: list[Views] = []
        self._shapes: list[int] = []
        """Number of each layer's shape of attention."""
        self._mixers = [block.mixers for block in model.blocks]
        for layer, mixers in enumerate(self._mixers):
            attention = model.blocks[layer].attention
            if attention is None:
                self._weights.append({})
                self._shapes.append(0)
                continue
            seen = strip_attention(attention, spec.model)
            self._shapes.append(spec.attentions.index(seen))
            rows = {"qkv": spec.rows.qkv, "output": spec.rows.output}
            turned = tables[attention.turn]
            own = space.wrap_layer(layer, mixers.index(attention)) | turned
            for kind, first in rows.items():
                own |= space.wrap_own_rows(kind, name_layer_tensor(layer, kind), first)
            if spec.attention.growth:
                own |= self._wrap_growth(request, space, layer, growing)
            self._weights.append(own)
        self.states = None if spec.state is None else States(request, space, spec)
        """What layers with a state have."""
        specs = spec.list_blocks()
        self._specs = [specs[number] for number in self._shapes]
        self._kept: list[list[U8]] = [[] for _ in range(request.sequences)]
        """KV cache of each sequence, by layer, as bytes [kv_heads, blocks, bytes]."""
        self._caches: list[list[list[Views]]] = [[] for _ in range(request.sequences)]
        """Of each sequence, layer and mixer."""
        for sequence, caches in enumerate(self._caches):
            for layer in self._layers:
                numbers = range(len(self._mixers[layer]))
                caches.append(
                    [self._make_cache(space, layer, number, sequence) for number in numbers]
                )
        rooms = {_find_room(own): _Room(space, own, tokens, scratch) for own in specs}
        self._rooms = [rooms[_find_room(own)].views for own in self._specs]
        room = rooms[_find_room(spec)]
        self.mixed: F32 = room.mixed
        """What the queries have mixed [tokens, width]."""
        self.qkv: F32 = room.qkv
        """QKV [tokens, rows]."""

    def _wrap_growth(
        self, request: BuildRequest, space: Workspace, layer: int, known: dict[bytes, Views]
    ) -> Views:
        """Return the view of factors of a layer's queries; equal ones are made once."""
        factors = compute_growth(self._model, layer, 0, request.context)
        key = factors.tobytes()
        if key not in known:
            array = space.make("float32", request.context)
            array[:] = factors
            known[key] = {"growth": space.wrap(array)}
        return known[key]

    def _make_cache(self, space: Workspace, layer: int, number: int, sequence: int) -> Views:
        """Return views of the data that mixer ``number`` of a layer keeps of a sequence: a KV
        cache, perhaps an earlier layer's, or a state."""
        mixer = self._mixers[layer][number]
        if isinstance(mixer, AttentionBlock) and mixer.key_layer is not None:
            return self._caches[sequence][mixer.key_layer][number]
        if isinstance(mixer, AttentionBlock):
            spec = self._specs[layer]
            arrays = _make_cache(space, spec, self.context)
            blocks = self.context // CONTEXT_BLOCK
            for array in arrays.values():
                heads = spec.attention.kv_heads if spec.attention.latent is None else 1
                raw = array.view(np.uint8).reshape(heads, blocks, -1)
                self._kept[sequence].append(raw)
            return {name: space.wrap(array) for name, array in arrays.items()}
        assert self.states is not None
        return self.states.kept[sequence][layer, number]

    def read(self, sequence: int, first: int, end: int) -> U8:
        """Return a copy of the KV cache of a sequence's tokens."""
        blocks = slice(first // CONTEXT_BLOCK, end // CONTEXT_BLOCK)
        return np.concatenate([raw[:, blocks].reshape(-1) for raw in self._kept[sequence]])

    def put(self, sequence: int, first: int, end: int, kept: U8) -> None:
        """Set the KV cache of a sequence's tokens to what `read` gave."""
        blocks, done = slice(first // CONTEXT_BLOCK, end // CONTEXT_BLOCK), 0
        for raw in self._kept[sequence]:
            place = raw[:, blocks]
            place[:] = kept[done : done + place.size].reshape(place.shape)
            done += place.size

    def bind_chunk(self, views: Views) -> list[list[tuple[BoundCall, ...]]]:
        """Return the calls of the block for each sequence and layer, of a chunk with ``views``: one
        for each mixer."""
        return [
            [
                tuple(
                    self._bind("attend", layer, number, cache, views)
                    for number, cache in enumerate(caches[layer])
                )
                for layer in self._layers
            ]
            for caches in self._caches
        ]

    def bind_parts(self, views: Views) -> list[tuple[PartCalls, ...]]:
        """Return the calls of each layer and mixer with divided rows, of a chunk with ``views``."""
        names = ("attend_own_project", "attend_mix_tokens", "attend_own_output")
        return [self._bind_three(names, layer, views, "tokens") for layer in self._layers]

    def bind_step(self, views: Views) -> list[tuple[PartCalls, ...]]:
        """Return the calls of each layer and mixer in a step; none for a single sequence."""
        if not self._spec.sequences:
            return []
        names = ("attend_project", "attend_mix", "attend_output")
        return [self._bind_three(names, layer, views, "token") for layer in self._layers]

    def _bind_three(
        self, names: tuple[str, str, str], layer: int, views: Views, which: str
    ) -> tuple[PartCalls, ...]:
        """Return the calls ``names`` of each mixer of a layer; ``which``: tokens mixed at once."""
        project, mix, output = names
        found = []
        for number in range(len(self._mixers[layer])):
            caches = [caches[layer][number] for caches in self._caches]
            found.append(
                PartCalls(
                    self._bind(project, layer, number, caches[0], views),
                    tuple(self._bind(mix, layer, number, cache, views, which) for cache in caches),
                    self._bind(output, layer, number, caches[0], views),
                )
            )
        return tuple(found)

    def _bind(
        self, name: str, layer: int, number: int, cache: Views, views: Views, which: str = "tokens"
    ) -> BoundCall:
        arrays = (self._weights[layer], cache, self._rooms[layer], views)
        shape, function = self._shapes[layer], name
        if not isinstance(self._mixers[layer][number], AttentionBlock):
            assert self.states is not None
            function = f"state_{name}"
            arrays = (self.states.weights[layer, number], cache, self.states.room, views)
        elif shape and (name in _SHAPED or self._spec.has_other_heads(shape)):
            function = f"{name}_{shape}"
        given = f"{which} position context"
        return self._library.bind(function, given, *arrays, layer=layer, name=name)


def _find_room(spec: KernelSpec) -> tuple[int, ...]:
    return spec.attention.kv_heads, spec.attention.head_dim, spec.attention.projected


class _Room:
    def __init__(self, space: Workspace, spec: KernelSpec, tokens: int, scratch: Scratch) -> None:
        width = spec.attention.stored_query
        self.mixed: F32 = space.make("float32", tokens, width)
        self.qkv: F32 = space.make("float32", tokens, spec.attention.projected)
        self.views: Views = space.make_inputs("mixed", tokens, width, spec, self.mixed)
        self.views |= space.make_tiles("mixed", spec, width)
        self.views["qkv"] = space.wrap(self.qkv)
        if spec.model.altup is not None:
            rank = fill_groups(spec.model.altup.laurel_rank)
            self.views |= space.make_inputs("laurel", tokens, rank, spec)
            self.views |= space.make_tiles("laurel", spec, rank)
        if spec.attention.latent is not None:
            self.views |= _make_latent_room(space, spec, spec.attention.latent, tokens)
        else:
            self.views |= _cut_mixing_room(space, spec, scratch)
        summed = (
            spec.attention.head_dim if spec.attention.latent is None else spec.attention.latent.rank
        )
        for name, *size in (("sums", summed), ("tops",), ("totals",)):
            array = space.make("float32", spec.attention.heads, SPANS, *size)
            self.views[f"span_{name}"] = space.wrap(array)


def _cut_mixing_room(space: Workspace, spec: KernelSpec, scratch: Scratch) -> Views:
    layout = lay_out_mixing(spec)
    sizes = {
        "mixing_floats": ("float32", layout.float_sizes),
        "mixing_integers": ("int32", layout.integer_sizes),
        "mixing_codes": ("int8", layout.byte_sizes),
    }
    arrays = scratch.cut(*((dtype, spec.threads * count(own)) for dtype, own in sizes.values()))
    return {name: space.wrap(array) for name, array in zip(sizes, arrays, strict=True)}


def _make_latent_room(space: Workspace, spec: KernelSpec, latent: Latent, tokens: int) -> Views:
    vectors, planes = tokens * spec.attention.heads, spec.most_planes
    room: Views = {}
    if latent.query_rank:
        made = fill_groups(latent.query_rank)
        room |= space.make_inputs("made", tokens, made, spec) | space.make_tiles("made", spec, made)
    room |= space.make_activations("plain", vectors, fill_groups(latent.plain), planes)
    room |= space.make_activations("found", vectors, fill_groups(latent.rank), planes)
    room["queries"] = space.wrap(space.make("float32", tokens, spec.attention.heads * latent.key))
    room["absorbed"] = space.wrap(space.make("float32", vectors, latent.kept))
    return room


def make_rope_tables(request: BuildRequest, space: Workspace) -> dict[tuple[Rope, int], RopeTables]:
    """Return the tables of positions that layers have, by `Attention.turn`."""
    tables = {}
    for turn in list_turns(request.model):
        size = (request.context, turn[1] // 2)
        arrays = (space.make("float32", *size), space.make("float32", *size))
        tables[turn] = RopeTables(*turn, arrays)
    return tables


def _make_cache(space: Workspace, spec: KernelSpec, context: int) -> dict[str, Raw]:
    """Return a layer's KV cache, and its scales if it has any: blocks of tokens of a head, one
    after the other."""
    vectors = context * spec.attention.kv_heads
    sizes = dict.fromkeys(("keys", "values"), vectors * spec.attention.head_dim)
    if spec.attention.latent is not None:
        vectors, sizes = context, {"keys": context * spec.attention.latent.kept}
    arrays = {
        name: space.make(KV_DTYPES[spec.kv], size, segment="kv") for name, size in sizes.items()
    }
    if spec.kv == "int8":
        for name in ("key_scales", "value_scales")[: len(sizes)]:
            arrays[name] = space.make("float16", vectors, segment="kv")
    return arrays
