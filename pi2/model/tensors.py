"""The one table of a model's tensors, and the formats that a type such as Q4_K_M gives them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from pi2.formats import Packing, find_format, find_packing
from pi2.formats.packing import fill_groups
from pi2.model.attention import list_attention_tensors
from pi2.model.blocks import Attention, Block
from pi2.model.ffn import (
    list_cutoff_tensors,
    list_down_biases,
    list_neuron_sources,
    list_predictor_tensors,
    list_router_tensors,
    list_side_tensors,
)
from pi2.model.options import Options, list_own
from pi2.model.states import list_state_tensors
from pi2.model.tensor import (
    EMBEDDING,
    EMBEDDING_NORM,
    FINAL_NORM,
    FINAL_NORM_BIAS,
    HEAD,
    HEAD_BIAS,
    LAYER_EMBEDDING,
    LAYER_PROJECTION,
    LAYER_PROJECTION_NORM,
    POSITIONS,
    STREAM_IN,
    STREAM_OUT,
    DenseTensor,
    Order,
    Place,
    Source,
    name_mixer_norm,
)

if TYPE_CHECKING:
    from pi2.arrays import F32
    from pi2.plan.documents.model import Model
    from pi2.plan.documents.model_parts import GatedStreams, Ngrams


def list_embedding_tensors(at: Place) -> Iterator[DenseTensor]:
    """``embedding`` [vocab, hidden], its norm and the bias of that; ``positions`` [context,
    hidden], position 0 first; ``layer_embedding`` [vocab, layers width], all layers of a token in a
    row, and ``layer_projection`` [layers width, hidden] of the first layer's input, with its norm;
    ``stream_in`` and ``stream_out`` [(streams - 1) hidden, hidden], one stream after the other."""
    model, shape, precision = at.model, at.model.shape, at.model.quantization
    hidden, stored = shape.hidden, shape.stored_hidden
    rows: Order | None
    yield at.copy(EMBEDDING, shape.vocab, hidden, precision=precision.embedding)
    if model.norm.embedding_weights:
        yield at.norm(EMBEDDING_NORM)
        yield from [at.norm(f"{EMBEDDING_NORM}_bias")] if model.norm.bias else ()
    if model.positions is not None:
        offset = model.positions.offset
        rows = partial(range, offset, offset + shape.context)
        source = at.take("positions", shape.context + offset, hidden, rows=rows)
        yield at.matrix(POSITIONS, shape.context, stored, source, precision="fp16")
    own = model.layer_embedding
    if own is not None:
        width, vocab = shape.layers * own.width, own.vocab or shape.vocab
        yield at.copy(LAYER_EMBEDDING, vocab, width, precision=precision.embedding)
        yield at.copy(LAYER_PROJECTION, width, hidden)
        source = at.take("layer_projection_norm", own.width)
        yield at.vector(LAYER_PROJECTION_NORM, own.stored_width, source)
    if model.ngrams is not None:
        yield at.copy("ngram_rows", model.ngrams.rows, hidden // model.ngrams.count)
    if model.altup is not None:
        others = model.altup.others
        rows = None if hidden == stored else partial(range, hidden)
        for key in (STREAM_IN, STREAM_OUT):
            sources = [
                at.take(key, hidden, hidden, rows=rows, stream=n, missing=stored - hidden)
                for n in range(others)
            ]
            yield at.matrix(key, others * stored, stored, *sources)


class MtpHead:
    """Input of the layer of an MTP head: float32 ``mtp_in`` [hidden, 2 hidden] reads a token's
    embedding and what the main model's head reads, each by its norm."""

    name = "mtp"

    def find_fault(self, options: Options) -> str | None:
        """The fault in ``options``, names of tensors in the checkpoint."""
        wanted = ("in", "token_norm", "stream_norm")
        is_sound = set(options) == set(wanted) and all(type(own) is str for own in options.values())
        return None if is_sound else f"its keys are {', '.join(wanted)}, each a tensor's name"

    def list_tensors(self, at: Place, options: Options) -> Iterator[DenseTensor]:
        hidden = at.model.shape.hidden
        source = at.take(options["in"], hidden, 2 * hidden)
        yield at.vector("mtp_in", 2 * hidden, source, rows=hidden)
        for kind in ("token_norm", "stream_norm"):
            yield at.vector(f"mtp_{kind}", hidden, at.take(options[kind], hidden))

    def compute(self, x: F32, options: Options, read: Callable[[str], F32]) -> F32:
        """``x`` as it is: the operator works before the layer."""
        return x


OPERATORS = (MtpHead(),)


def list_head_tensors(at: Place) -> Iterator[DenseTensor]:
    """``final_norm`` and its bias [1, hidden]; ``head`` [vocab, hidden], unless the embedding is
    it; ``head_bias`` [1, vocab]; float32 ``hyper_head`` [streams, streams hidden]."""
    model, vocab, hyper = at.model, at.model.shape.vocab, at.model.hyper
    if hyper is not None and hyper.head:
        yield at.copy_vector("hyper_head", hyper.streams * model.shape.hidden, hyper.streams)
        yield at.copy_vector("hyper_head_bias", hyper.streams)
        yield at.copy_vector("hyper_head_scale", 1)
    if model.gated_streams is not None:
        yield from _list_gates(at, "hyper_head", model.gated_streams)
    yield at.norm(FINAL_NORM, is_there=model.norm.weights)
    if model.norm.bias:
        yield at.norm(FINAL_NORM_BIAS)
    if not model.tied_head:
        yield at.copy(HEAD, vocab, model.shape.hidden, precision=model.quantization.head)
    if model.head_bias:
        yield at.copy_vector(HEAD_BIAS, vocab)


def list_input_norms(at: Place, kind: str, *, is_there: bool = True) -> Iterator[DenseTensor]:
    """The norm of what an operator reads, and its bias; a layer without that operator has ones."""
    norm = at.model.norm
    if norm.inputs:
        yield at.norm(kind, is_there=(norm.weights and is_there) or at.mixer > 0)
    if norm.inputs and norm.bias:
        name = "attention_norm_bias" if at.mixer else f"{kind}_bias"
        yield Place(at.model, at.layer).norm(name)


def list_layer_tensors(at: Place) -> Iterator[DenseTensor]:
    """``layer_scale`` [1, 1]; ``layer_input_gate`` [width, hidden] and ``layer_input_output``
    [hidden, width] of a layer's own embedding, with its norm; ``laurel_in`` [rank, hidden] and
    ``laurel_out`` [hidden, rank]; float32 ``altup_router`` [streams, hidden], ``altup_predict``
    [streams streams, streams] and ``altup_correct`` [streams, streams], norms and factors; float32
    ``hyper_attention`` and ``hyper_ffn`` [streams (streams + 2), streams hidden], biases and
    scales."""
    model, own, altup = at.model, at.model.layer_embedding, at.model.altup
    hidden, stored = model.shape.hidden, model.shape.stored_hidden
    if model.layer_scale:
        yield at.copy_vector("layer_scale", 1)
    if own is not None:
        yield at.copy("layer_input_gate", own.width, hidden)
        output = at.take("layer_input_output", hidden, own.width)
        yield at.matrix("layer_input_output", stored, own.stored_width, output)
        yield at.norm("layer_input_norm")
    if model.hyper is not None:
        factors, width = model.hyper.factors, model.hyper.streams * hidden
        for key in ("hyper_attention", "hyper_ffn"):
            yield at.copy_vector(key, width, factors)
            yield at.copy_vector(f"{key}_bias", factors)
            yield at.copy_vector(f"{key}_scale", 3)
    if model.gated_streams is not None:
        streams = model.gated_streams.streams
        for key in ("hyper_attention", "hyper_ffn"):
            yield from _list_gates(at, key, model.gated_streams)
            yield at.copy(f"{key}_inject", streams, streams * hidden)
    if model.ngrams is not None and model.ngrams.layer == at.layer:
        yield from _list_ngrams(at, model.ngrams)
    if altup is None:
        return
    streams, rank = altup.streams, altup.laurel_rank
    yield at.copy("laurel_in", rank, hidden)
    yield at.matrix("laurel_out", stored, fill_groups(rank), at.take("laurel_out", hidden, rank))
    router = at.take("altup_router", streams, hidden)
    yield at.vector("altup_router", stored, router, rows=streams)
    yield at.norm("altup_router_norm")
    yield at.copy_vector("altup_predict", streams, streams * streams)
    yield at.copy_vector("altup_correct", streams, streams)
    yield at.norm("laurel_norm")
    if altup.scaled:
        yield at.norm("altup_scale")


def _list_gates(at: Place, key: str, own: GatedStreams) -> Iterator[DenseTensor]:
    """Norms and gates by which an operator reads gated streams."""
    rank, width = own.rank, own.streams * at.model.shape.hidden
    yield at.copy_vector(f"{key}_norm", width)
    yield at.copy(f"{key}_down", rank, width)
    yield at.copy(f"{key}_up", width, rank)


def _list_ngrams(at: Place, own: Ngrams) -> Iterator[DenseTensor]:
    """What adds rows of n-grams to the streams of a layer."""
    assert at.model.gated_streams is not None
    hidden = at.model.shape.hidden
    width = at.model.gated_streams.streams * hidden
    yield at.copy("ngram_key", width, hidden)
    yield at.copy("ngram_value", hidden, hidden)
    for key in ("ngram_key_norm", "ngram_query_norm", "ngram_convolution_norm"):
        yield at.copy_vector(key, width)
    source = at.take("ngram_convolution", width, own.kernel)
    yield at.vector("ngram_convolution", own.kernel, source, rows=width)


def list_tensors(model: Model, ranks: Sequence[int] | None = None) -> list[DenseTensor]:
    """The dense tensors of ``model`` in their order in stores; ``ranks`` of its predictors by
    layer, None without."""
    whole = Place(model)
    found = list(list_embedding_tensors(whole))
    for layer, block in enumerate(model.blocks):
        found += _list_block(model, layer, block)
        if ranks is not None:
            found += list_predictor_tensors(Place(model, layer), ranks[layer])
    return [*found, *list_head_tensors(whole)]


def _list_block(model: Model, layer: int, block: Block) -> Iterator[DenseTensor]:
    at, ffn = Place(model, layer), block.ffn
    for number, mixer in enumerate(block.mixers):
        own = Place(model, layer, number)
        if number == 0 or model.layers is None or not model.layers.parallel:
            yield from list_input_norms(own, name_mixer_norm(number))
        if isinstance(mixer, Attention):
            yield from list_attention_tensors(at, mixer)
        elif mixer.shape is not None:
            yield from list_state_tensors(own, mixer.shape)
    if model.norm.outputs:
        yield at.norm("attention_output_norm")
    yield from list_input_norms(at, "ffn_norm", is_there=ffn.kind != "none")
    yield from list_down_biases(at, ffn)
    if model.norm.outputs:
        yield at.norm("ffn_output_norm")
    yield from list_layer_tensors(at)
    for operator, options in list_own(model):
        yield from operator.list_tensors(at, options)
    yield from list_cutoff_tensors(at, ffn)
    yield from list_router_tensors(at, ffn)
    yield from list_side_tensors(at, ffn)


def list_sources(model: Model) -> Iterator[Source]:
    """Everything that a checkpoint must have: what tensors and neurons are made of.  Several may
    be of one tensor."""
    for tensor in list_tensors(model):
        yield from (source for source in tensor.sources if source.key)
    for layer, block in enumerate(model.blocks):
        yield from list_neuron_sources(Place(model, layer), block.ffn)


_FALLBACKS = {"q4_k": "q5_0", "q5_k": "q5_1", "q6_k": "q8_0"}
"""What rows get that are no multiple of 256."""
_PLAIN, _EXACT = "f16", "f32"


@dataclass(frozen=True, slots=True, kw_only=True)
class Mixture:
    """Formats by the part of a model."""

    name: str
    number: int
    """What ``general.file_type`` of GGUF files calls it."""
    base: str
    careful: str
    """Of values and of down projections, in the layers that `takes_care` names."""
    fused: str
    """QKV in one matrix."""
    head: str

    def choose(self, source: Source, model: Model) -> str:
        """Return the format of a matrix with rows of any length."""
        key, layers = source.key, model.shape.layers
        if key == "head" or (key == "embedding" and model.tied_head):
            return self.head
        if key == "fused_qkv":
            return self.fused
        is_sensitive = key == "value" or key.endswith("down")
        return self.careful if is_sensitive and takes_care(source.layer, layers) else self.base


def takes_care(layer: int, layers: int) -> bool:
    """Whether a layer is one of the first and last eighth, or every third between them."""
    eighth = layers // 8
    return layer < eighth or layer >= 7 * layers // 8 or (layer - eighth) % 3 == 2


MIXTURES: Mapping[str, Mixture] = {
    own.name: own
    for own in (
        Mixture(name="q4_0", number=2, base="q4_0", careful="q4_0", fused="q4_0", head="q6_k"),
        Mixture(name="q4_k_m", number=15, base="q4_k", careful="q6_k", fused="q5_k", head="q6_k"),
        Mixture(name="q5_k_m", number=17, base="q5_k", careful="q6_k", fused="q6_k", head="q6_k"),
        Mixture(name="q6_k", number=18, base="q6_k", careful="q6_k", fused="q6_k", head="q6_k"),
        Mixture(name="q8_0", number=7, base="q8_0", careful="q8_0", fused="q8_0", head="q8_0"),
    )
}


def choose_formats(
    shapes: Mapping[str, tuple[int, ...]], model: Model, mixture: Mixture | None = None
) -> dict[str, str]:
    """Return the format of each of a model's tensors by its name in a checkpoint, which has these
    ``shapes``: of a type such as Q4_K_M, or the document's precisions; a store's float32 stays.
    `KeyError` for a precision that no file has."""
    found: dict[str, str] = {}
    for source, packing in _list_all(model):
        name = source.name(model.tensors)
        if name not in shapes or name in found:
            continue
        shape = shapes[name]
        if packing.is_float32 or len(shape) < 2:
            found[name] = _EXACT
            continue
        wanted = packing.like if mixture is None else mixture.choose(source, model)
        if wanted is None or not find_format(wanted).can_encode:
            raise KeyError(packing.name)
        found[name] = fit_width(wanted, shape[-1])
    return found


def fit_width(name: str, width: int) -> str:
    """Return ``name``, or the format nearest to it whose blocks fill rows of ``width``."""
    while width % find_format(name).block:
        name = _FALLBACKS.get(name, _PLAIN)
    return name


def _list_all(model: Model) -> Iterator[tuple[Source, Packing]]:
    """Yield what a checkpoint must have, and how a store keeps it."""
    for tensor in list_tensors(model):
        yield from ((own, tensor.packing) for own in tensor.sources if own.key)
    kinds = model.quantization
    for layer, block in enumerate(model.blocks):
        for own in list_neuron_sources(Place(model, layer), block.ffn):
            is_gate = not own.key.endswith("down")
            yield own, find_packing(kinds.gates if is_gate else kinds.ffn)
