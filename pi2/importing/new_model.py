"""Writes a checkpoint's model document from ``config.json``, checked against its tensors."""

import json
import re
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from pi2.caches import show_path
from pi2.diagnostics import UserError
from pi2.formats import Packing, list_published
from pi2.importing.checkpoint import Checkpoint, open_checkpoint, parse_json
from pi2.importing.config import Config, read_sampling
from pi2.importing.families import describe_family, list_heads
from pi2.importing.requirements import check_checkpoint, find_leftovers, raise_findings, repeats
from pi2.model.ffn import name_part
from pi2.model.tensor import fill_name, match_name
from pi2.model.tensors import list_sources
from pi2.plan.checking import Facts
from pi2.plan.checking.rules import load_rules
from pi2.plan.documents.model import Model
from pi2.plan.documents.model_parts import TENSOR_OPTIONS, Tensors
from pi2.plan.reading.block_entries import gather_blocks, list_entries, write_entries
from pi2.plan.toml.text import write_key, write_value
from pi2.plan.weights.layout import GROUP, round_up
from pi2.sandbox.tokenizer import TokenizerRefused

_PREFIXES = ("model.", "transformer.", "gpt_neox.")
"""Prefixes of names that some checkpoints leave out."""
_LONGER = ("language_model.model.", "model.language_model.", "model.text_model.")
"""Prefixes that stand for ``model.`` in models that read pictures too."""
_SINGLE_EXPERT = (".{expert}.gate_proj.weight", ".{expert}.w1.weight")
"""Ends of the name of one expert's gates."""
_BLOCK = ".block_sparse_moe."
"""Names of MoE models in the checkpoints of some families; transformers has one name for FFNs."""
_INDEX = ".index_"
"""Names of an index in some checkpoints, likewise."""
_FIRST = ("schema_version", "name", "description", "id", "licence")


@dataclass(frozen=True, slots=True, kw_only=True)
class NewModel:
    """A model document that was made."""

    model: Model
    text: str
    """The document as TOML, without defaults."""


def describe_checkpoint(
    path: Path | Checkpoint, name: str | None = None, *, has_texts: bool = True
) -> NewModel:
    """Describe the checkpoint at ``path``, or one that is open; ``name`` is the document's id, else
    the checkpoint's.  Without ``has_texts`` the tokenizer is not read.

    Raises `UserError`: P530-P538 as `open_checkpoint`; P544 for a family or option that no model
    document can state; P533, P534 or P537 if configuration and tensors contradict each other."""
    checkpoint = path if isinstance(path, Checkpoint) else open_checkpoint(path)
    place = path.folder if isinstance(path, Checkpoint) else path
    file = checkpoint.config_file
    config = Config(file, checkpoint.config)
    if checkpoint.document is not None:
        tables = parse_json(file, checkpoint.document) | ({"id": name} if name else {})
        if has_texts and checkpoint.given_tokenizer is not None:
            tables["tokenizer"] = _describe_tokenizer(checkpoint, config)
        model = _validate(config, tables)
        says = "its document says"
    else:
        model, says = _derive_model(checkpoint, config, name, has_texts=has_texts)
    check_checkpoint(checkpoint, model, says=says)
    left = [*checkpoint.find_unread(model), *find_leftovers(checkpoint, model, says)]
    raise_findings(left)
    return NewModel(model=model, text=write_model(model, name_origin(place)))


def describe_metadata(checkpoint: Checkpoint) -> Model:
    """The model that a checkpoint's keys and shapes describe, before its weights and texts are
    written; raises as `describe_checkpoint`."""
    config = Config(checkpoint.config_file, checkpoint.config)
    model, says = _derive_model(checkpoint, config, None, has_texts=False, has_weights=False)
    check_checkpoint(checkpoint, model, says=says)
    raise_findings([*checkpoint.find_unread(model)])
    return model


def _derive_model(
    checkpoint: Checkpoint,
    config: Config,
    name: str | None,
    *,
    has_texts: bool,
    has_weights: bool = True,
) -> tuple[Model, str]:
    """The model that a configuration describes, and the name of its source; without
    ``has_weights`` no number of them is looked at."""
    file, place = checkpoint.config_file, checkpoint.folder
    tables = describe_family(config)
    _match_names(checkpoint, tables)
    _match_blocks(checkpoint, tables)
    _match_stacks(checkpoint, tables)
    _find_predictors(checkpoint, tables)
    if has_texts:
        tables["tokenizer"] = _describe_tokenizer(checkpoint, config)
    if checkpoint.takes_last:
        tables["pooling"] = "last"
    sampling = read_sampling(checkpoint)
    if sampling is not None:
        tables["sampling"] = sampling.model_dump(exclude_unset=True)
    tables = {
        "schema_version": 2,
        "name": _find_name(config, place)[:120],
        "id": name or make_id(_find_name(config, place)),
        **tables,
    }
    model = _validate(config, tables)
    if not has_weights:
        return model, "its metadata says"
    own = next((own for own in list_published().values() if _has(checkpoint, model, own)), None)
    if own is not None:
        attention = own.name if "projections" in own.uses else "int8"
        tables["quantization"] = {"ffn": own.name, "attention": attention}
        model = _validate(config, tables)
    return model, f"{file.name} says" if file.suffix == ".json" else "its metadata says"


_SHARED = ("embedding", "head", "final_norm")
"""Tensors that an MTP head has of its own, or takes from its model."""
_OF_LAYERS = ("layers", "recurrence", "convolution", "predictor", "sparsity")
"""Tables of a model that say nothing of its MTP head."""


def name_mtp_tensors(checkpoint: Checkpoint, model: Model) -> tuple[str, dict[str, str]]:
    """How names of the layer of a checkpoint's MTP head begin, and names of its other tensors by
    their keys in the family's document; none without such a head."""
    start = model.tensors.attention_norm.partition("{layer}")[0]
    for head in list_heads(Config(checkpoint.config_file, checkpoint.config)):
        layer, own = head.layer or f"{start}{model.shape.layers}", head.names.items()
        names = {key: f"{layer}{name}" if name.startswith(".") else name for key, name in own}
        if names.get("in") in checkpoint.tensors:
            return layer, names
    return "", {}


def describe_mtp(checkpoint: Checkpoint, model: Model) -> Model:
    """The MTP head that drafts for ``model``, as a model of one layer.

    Raises `UserError` P544 where the checkpoint has none; P533 or P534 as `check_checkpoint`."""
    config = Config(checkpoint.config_file, checkpoint.config)
    layer, names = name_mtp_tensors(checkpoint, model)
    if not names:
        help_text = 'write drafts = "prompt" in a plan, or leave --mtp out'
        raise config.refuse("the checkpoint has no MTP head that its family describes", help_text)
    values = model.model_dump(mode="json", exclude_defaults=True)
    for key in _OF_LAYERS:
        values.pop(key, None)
    for key in ("dense_layers", "dense_ffn"):
        values.get("moe", {}).pop(key, None)
    # A draft that attends to all keys is as good.
    values.get("attention", {}).pop("index", None)
    left = {key for key in _SHARED if names.get(key) not in checkpoint.tensors}
    if checkpoint.shards is None:
        others = [(key, getattr(model.tensors, key)) for key in ("embedding", "head")]
        left |= {key for key, own in others if repeats(checkpoint, names.get(key, ""), own)}
    own = {key: names.pop(key) for key in ("in", "token_norm", "stream_norm") if key in names}
    values |= {
        "id": f"{model.id[:60]}-mtp",
        "name": f"MTP head of {model.name or model.id}"[:120],
        "shape": {**values["shape"], "layers": 1},
        "operators": {"mtp": own},
    }
    keys = {source.key for source in list_sources(_validate(config, values))}
    patterns = {key: name for key, name in model.tensors if key in keys and "{layer}" in name}
    values.setdefault("tensors", {}).update(
        {key: re.sub(r"^.*\{layer\}", layer, name) for key, name in patterns.items()}
        | {key: name for key, name in names.items() if key not in left}
    )
    made = _validate(config, values)
    check_checkpoint(checkpoint, made)
    return made


def find_mtp(checkpoint: Checkpoint, model: Model) -> Model | None:
    """The MTP head that drafts for ``model``; None where the checkpoint has no whole one."""
    if not name_mtp_tensors(checkpoint, model)[1]:
        return None
    with suppress(UserError):
        return describe_mtp(checkpoint, model)
    return None


def _has(checkpoint: Checkpoint, model: Model, packing: Packing) -> bool:
    """Whether the matrices of all layers have the numbers of ``packing``; of a format of neurons
    only, an expert's of the first MoE layer.

    Raises `UserError` P531, P532 or P535 as `SourceTensor.read`."""
    names = _name_matrices(model) if "projections" in packing.uses else _name_first(model)
    tensors = [checkpoint.tensors.get(name) for name in names]
    return bool(tensors) and all(own is not None and own.is_of(packing) for own in tensors)


def _name_first(model: Model) -> Iterator[str]:
    for layer, block in enumerate(model.blocks):
        if model.moe is None or block.ffn.has_router:
            for part in ("up", "down"):
                yield fill_name(getattr(model.tensors, name_part(model, part)), layer)
            return


def _name_matrices(model: Model) -> Iterator[str]:
    names = model.tensors
    ffn = [names.gate, names.up, names.down] if model.ffn.gated else [names.up, names.down]
    for layer in range(model.shape.layers):
        for pattern in (names.query, names.key, names.value, names.output):
            yield fill_name(pattern, layer)
        for expert in range(model.expert_count):
            yield from (fill_name(pattern, layer, expert) for pattern in ffn)


def name_origin(path: Path) -> str:
    """What a document that was made from the checkpoint at ``path`` says of where it is from."""
    name = show_path(Path(path.name))
    return f"{name}/config.json" if (path / "config.json").exists() else name


def make_id(name: str) -> str:
    """A short name for documents: ``Llama-2-7b hf`` becomes ``llama-2-7b-hf``."""
    words = re.sub(r"[^a-z0-9._-]+", "-", name.lower()).strip("-._")
    return words[:64] or "model"


def write_model(model: Model, origin: str) -> str:
    """A model document as TOML, without default values."""
    values = model.model_dump(mode="json", exclude_defaults=True, exclude_none=True)
    # Written out although they are defaults: a reader wants to see them.
    values["norm"] = {
        "kind": model.norm.kind,
        "epsilon": model.norm.epsilon,
        **values.get("norm", {}),
    }
    values["rope"] = {"kind": model.rope.kind, **values.get("rope", {})}
    values["quantization"] = model.quantization.model_dump(mode="json", exclude_none=True)
    entries = list_entries(model)
    blocks = []
    if len(entries) > 1:
        values = gather_blocks(model, values)
        blocks = values.pop("blocks", [])
    lines = [f"# Written by `pi2 model new` from {origin}"]
    plain = {key: value for key, value in values.items() if not isinstance(value, Mapping)}
    first = [key for key in _FIRST if key in plain]
    for key in [*first, *(key for key in plain if key not in first)]:
        lines.append(f"{write_key(key)} = {write_value(plain[key])}")
    for key, table in values.items():
        if isinstance(table, Mapping):
            lines += ["", f"[{write_key(key)}]", *_write_table(table)]
    if blocks:
        lines += ["", *write_entries(blocks)]
    return "\n".join(lines) + "\n"


def _write_table(table: Mapping[str, Any]) -> Iterator[str]:
    for key, value in table.items():
        yield f"{write_key(key)} = {write_value(value)}"


def _validate(config: Config, tables: Mapping[str, Any]) -> Model:
    """The document, checked by the rules for model files; `UserError` P544."""
    try:
        model = Model.model_validate_json(json.dumps(tables))
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(str(part) for part in first["loc"])
        raise config.refuse(f"{place} would be {first['input']!r}: {first['msg']}") from None
    facts = Facts(known={"model": model}, files={"model": Path(f"{model.id}.model.toml")})
    for rule in load_rules():
        if rule.needs == ("model",):
            for finding in rule.check(facts):
                raise config.refuse(f"{'.'.join(map(str, finding.path))}: {finding.message}")
    return model


def _find_name(config: Config, folder: Path) -> str:
    """What people call the model: the last part of its name on the hub, or its folder's."""
    stated = config.read("_name_or_path", str, "").rstrip("/")
    return stated.rpartition("/")[2] or show_path(Path(folder.resolve().name))


def _match_names(checkpoint: Checkpoint, tables: dict[str, Any]) -> None:
    """Take a prefix away from all names, or put it before, if the checkpoint has them so."""
    left = (*TENSOR_OPTIONS, "head")
    patterns = {key: own for key, own in Tensors() if isinstance(own, str) and key not in left}
    stated = {key: value for key, value in tables["tensors"].items() if key not in TENSOR_OPTIONS}
    patterns |= stated
    embedding, head = patterns["embedding"], stated.get("head")
    if embedding in checkpoint.tensors:
        return
    for old, new in (*(("model.", own) for own in _LONGER), *((own, "") for own in _PREFIXES)):
        own = new + embedding.removeprefix(old)
        if not embedding.startswith(old) or own not in checkpoint.tensors:
            continue
        tables["tensors"] |= {
            key: new + pattern.removeprefix(old) if pattern.startswith(old) else pattern
            for key, pattern in patterns.items()
        }
        outer = f"language_model.{head or Tensors().head}"
        if new and outer in checkpoint.tensors:
            tables["tensors"]["head"] = outer
        elif head is not None and not new:
            tables["tensors"]["head"] = head
        return


def _match_blocks(checkpoint: Checkpoint, tables: dict[str, Any]) -> None:
    """Name FFNs and indexes as transformers does in memory, if the checkpoint has them so: MoE
    models like other FFNs, gates and ups of an FFN in one tensor."""
    if "moe" not in tables:
        return
    names, layers = tables["tensors"], range(tables["shape"]["layers"])

    def is_there(pattern: str) -> bool:
        return any(fill_name(pattern, layer) in checkpoint.tensors for layer in layers)

    router = names.get("router", "")
    plain = router.replace(_BLOCK, ".mlp.")
    if plain != router and not is_there(router) and is_there(plain):
        for key, pattern in names.items():
            if isinstance(pattern, str):
                names[key] = pattern.replace(_BLOCK, ".mlp.")
        bias = names.get("choice_bias", "").replace(".mlp.", ".mlp.gate.")
        if is_there(bias):
            names["choice_bias"] = bias
    index = names.get("index_query", "")
    if not is_there(index) and is_there(index.replace(_INDEX, ".indexer.")):
        for key in (key for key in names if key.startswith("index_")):
            names[key] = names[key].replace(_INDEX, ".indexer.")
    for kind in ("shared", "dense"):
        gate = names.get(f"{kind}_gate", getattr(Tensors(), f"{kind}_gate"))
        fused = gate.replace(".gate_proj.", ".gate_up_proj.")
        if not is_there(gate) and is_there(fused):
            names[f"fused_{kind}"] = fused


def _match_stacks(checkpoint: Checkpoint, tables: dict[str, Any]) -> None:
    """Name the tensors of all experts, if the checkpoint has these instead of one for each: as
    transformers keeps them in memory, and some models are published."""
    names = tables["tensors"]
    pattern = names.get("gate", "")
    ending = next((ending for ending in _SINGLE_EXPERT if pattern.endswith(ending)), None)
    if "moe" not in tables or ending is None:
        return
    base = pattern.removesuffix(ending)
    for layer in range(tables["shape"]["layers"]):
        if fill_name(pattern, layer) in checkpoint.tensors:
            return
        first = fill_name(base, layer)
        fused = checkpoint.tensors.get(f"{first}.gate_up_proj.0")
        if fused is not None:
            hidden, ffn = tables["shape"]["hidden"], tables["shape"]["ffn"]
            down = checkpoint.tensors.get(f"{first}.down_proj.0")
            # Both shapes of one order are never both shapes of the other.
            sizes = [(fused.shape, (hidden, 2 * ffn)), (down and down.shape, (ffn, hidden))]
            if all(has == turned for has, turned in sizes):
                names["experts_turned"] = True
            names["fused_gate_up"] = f"{base}.gate_up_proj.{{expert}}"
            names["down"] = f"{base}.down_proj.{{expert}}"
            del names["gate"], names["up"]
            return


def _find_predictors(checkpoint: Checkpoint, tables: dict[str, Any]) -> None:
    """State the predictors that are in the checkpoint itself, such as TurboSparse's."""
    pattern = tables["tensors"].get("predictor_in", Tensors().predictor_in)
    named = match_name(pattern)
    found = [tensor for name, tensor in checkpoint.tensors.items() if named.fullmatch(name)]
    ranks = [tensor.shape[0] for tensor in found if tensor.shape]
    if ranks:
        tables["predictor"] = {"rank": round_up(max(1, *ranks), GROUP)}


def _describe_tokenizer(checkpoint: Checkpoint, config: Config) -> dict[str, Any]:
    """Begin and end tokens: generation_config.json before config.json, as transformers does."""
    generation = config
    name = "generation_config.json"
    content = checkpoint.read_file(name)
    if content is not None:
        file = checkpoint.folder / name
        generation = Config(file, parse_json(file, content))
    chosen = generation if generation.has("eos_token_id") else config
    ends = [token for token in chosen.read_list("eos_token_id") if type(token) is int]
    turn = _find_turn_end(checkpoint)
    if turn is not None and turn not in ends:
        ends.append(turn)
    bos, vocab = config.read("bos_token_id", int, -1), config.read("vocab_size", int)
    tokenizer: dict[str, Any] = {"eos": [token for token in ends if 0 <= token < vocab]}
    if 0 <= bos < vocab:
        tokenizer |= {"bos": bos, "add_bos": _begins_with(checkpoint, bos)}
    return tokenizer


def _find_turn_end(checkpoint: Checkpoint) -> int | None:
    """The token by which an answer ends, as ``tokenizer_config.json`` names it, if there is a chat
    template: configurations of models that were tuned to chat often name the base model's."""
    content = checkpoint.read_file("tokenizer_config.json")
    try:
        said = {} if content is None else json.loads(content)
        if "chat_template" not in said and checkpoint.read_template() is None:
            return None
        end = said.get("eos_token")
        end = end.get("content") if isinstance(end, Mapping) else end
        return checkpoint.find_mark(end) if isinstance(end, str) else None
    except (UserError, ValueError, TypeError, KeyError, AttributeError, RecursionError):
        return None  # the conversion will say what is wrong


def _begins_with(checkpoint: Checkpoint, bos: int) -> bool:
    """Whether the tokenizer puts ``bos`` before a text; False if it cannot be read."""
    try:
        return checkpoint.find_begin() == bos
    except (UserError, TokenizerRefused):  # the conversion will say what is wrong
        return False
