"""Opens a checkpoint: its configuration and the places of all its tensors.

Files of other programs than Hugging Face's are shown as the original checkpoint: with configuration
and names of tensors as in transformers."""

import json
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

from pi2.caches import check_regular, has_gguf_suffix, read_regular
from pi2.diagnostics import Diagnostic, UserError
from pi2.importing.config import list_beginnings, rename_tensors
from pi2.importing.decoded_tensor import MOST_EXPERTS
from pi2.importing.families import unwrap_config
from pi2.importing.quantized import decode_weights, find_settings
from pi2.importing.safetensors_file import (
    Shards,
    SourceTensor,
    StreamedTensor,
    list_safetensors,
    list_streamed,
    refuse_export,
)
from pi2.plan.documents.model import Model
from pi2.sandbox.tokenizer import TokenizerRefused, open_tokenizer, try_tokenizer
from pi2.tokens.table_tokenizer import Coder

_BLOBS, _SNAPSHOTS = "blobs", "snapshots"
"""Folders of a repository in the hub's cache: ``snapshots/REVISION/NAME`` links to ``blobs``."""


def check_place(folder: Path, file: Path) -> os.stat_result:
    """The system's facts about ``file``, which is in the checkpoint ``folder``.

    `UserError` P538 if symbolic links lead out of the folder, except links of the hub's cache;
    `OSError` if it is no regular file, or cannot be looked at."""
    home = folder.resolve()
    places = [home]
    if home.parent.name == _SNAPSHOTS:
        places.append(home.parent.parent / _BLOBS)
    target = file.resolve()
    if not any(target.is_relative_to(place) for place in places):
        raise UserError.of(
            "P538",
            f"{file} is a link out of the checkpoint, to {target}",
            help="replace the link by the file: files outside of the folder are not read",
        )
    return check_regular(file)


def read_place(folder: Path, file: Path) -> bytes:
    """Contents of ``file`` in the checkpoint ``folder``; raises as `check_place`."""
    check_place(folder, file)
    return read_regular(file)


SINGLES = ("model.safetensors", "pytorch_model.bin")
"""Weight files that are a whole checkpoint; safetensors files are preferred."""
INDEXES = ("model.safetensors.index.json", "pytorch_model.bin.index.json")
_MANIFEST = "manifest.json"
"""What a neuron store has."""
_MLC_CONFIG = "mlc-chat-config.json"
"""Configuration of a folder that only MLC-LLM computes."""
SENTENCE_PIECE = "tokenizer.model"
"""The SentencePiece library's file."""
_MODELOPT = "hf_quant_config.json"
"""Says that NVIDIA's exporter has quantised the weights, if the configuration does not."""
_ADAPTERS = ("adapter_config.json",)
"""What describes changes of weights, in files of their own, that transformers adds to them."""
_LAST = "pooling_mode_lasttoken"
TEMPLATES = "additional_chat_templates"
"""Folder of further chat templates."""
_TEMPLATE_NAME = re.compile(r"[A-Za-z0-9_-]{1,64}")
PICKLED = (".bin", ".pt", ".pth")
"""Endings of PyTorch files."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkpoint:
    """A checkpoint; no weight is in memory."""

    folder: Path
    """The folder or file that messages call it by."""
    config: Mapping[str, Any]
    config_file: Path
    tensors: Mapping[str, SourceTensor]
    files: tuple[Path, ...]
    shards: Shards | None = None
    """Source of weight files that may be missing."""
    beginnings: Sequence[tuple[str, str]] = ()
    """Prefixes of the files' names, and the matching prefixes in ``tensors``."""
    given_tokenizer: tuple[Path, bytes] | None = None
    """A ``tokenizer.json`` instead of the checkpoint's: its file and content."""
    has_blocks: bool = False
    """Whether tensors are a GGUF file's, perhaps by other names."""

    def read_file(self, name: str) -> bytes | None:
        """Contents of the small file ``name`` next to the weights; None if there is none.

        `UserError` P543 if it cannot be read, P538 if it is a link out of the folder."""
        try:
            return read_place(self.folder, self.folder / name)
        except FileNotFoundError:
            return None
        except OSError as error:
            raise UserError.of(
                "P543", f"cannot read {self.folder / name}: {error.strerror}"
            ) from None

    def read_tokenizer(self) -> bytes | None:
        """The ``tokenizer.json``, or one that is made from ``tokenizer.model``; None if there is
        neither.  `UserError` P543 if it cannot be read."""
        if self.given_tokenizer is not None:
            return self.given_tokenizer[1]
        found = self.read_file("tokenizer.json")
        pieces = self.read_file(SENTENCE_PIECE) if found is None else None
        if pieces is None:
            return found
        return self.convert_pieces(self.folder / SENTENCE_PIECE, pieces)

    def convert_pieces(self, file: Path, content: bytes) -> bytes:
        """What a ``file`` of SentencePiece holds as ``tokenizer.json``; `UserError` P543."""
        from pi2.importing.gguf_tokenizer import convert_sentence_piece, parse_config

        config = parse_config(self.read_file("tokenizer_config.json"))
        return convert_sentence_piece(file, content, config)

    def read_template(self) -> bytes | None:
        """The chat template: ``chat_template.jinja``, or what ``chat_template.json`` says;
        `UserError` P543 if it cannot be read."""
        found = self.read_file("chat_template.jinja")
        said = self.read_file("chat_template.json") if found is None else None
        if said is None:
            return found
        try:
            template = json.loads(said)["chat_template"]
            return bytes(template.encode("utf-8"))
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
            raise UserError.of(
                "P543",
                f"{self.folder / 'chat_template.json'} has no text 'chat_template'",
                help="copy it from the checkpoint again, or remove it",
            ) from None

    def find_mark(self, text: str) -> int | None:
        """The token that the tokenizer takes as ``text`` out of texts; None if it has none.

        `UserError`, or what reading JSON raises, if the tokenizer is broken."""
        added = json.loads(self.read_tokenizer() or b"{}").get("added_tokens", [])
        found = [token["id"] for token in added if token["content"] == text]
        return found[0] if found and type(found[0]) is int else None

    def find_begin(self) -> int | None:
        """The token that the tokenizer puts before a text; None if there is no tokenizer.

        `UserError` or `TokenizerRefused` if it is broken."""
        content = self.read_tokenizer()
        return None if content is None else try_tokenizer(content).begin

    @property
    def may_have_table(self) -> bool:
        """Whether `open_tokenizer` makes a compact table, unless the file's lists are odd."""
        return False

    def open_tokenizer(self) -> Coder:
        """The tokenizer, with a compact table where that can be; `UserError` P543 or P605."""
        try:
            return open_tokenizer(self.read_tokenizer() or b"")
        except TokenizerRefused as error:
            raise UserError.of(
                "P605",
                f"cannot read the tokenizer of {self.folder}: {error}",
                help="give the original's tokenizer.json with --tokenizer",
            ) from None

    def list_templates(self) -> dict[str, bytes]:
        """Further chat templates by their names; `UserError` P543 if one cannot be read."""
        found = {}
        for file in sorted((self.folder / TEMPLATES).glob("*.jinja")):
            content = self.read_file(f"{TEMPLATES}/{file.name}")
            if content is not None and _TEMPLATE_NAME.fullmatch(file.stem):
                found[file.stem] = content
        return found

    @property
    def takes_last(self) -> bool:
        """Whether a text's embedding is its last token's, as sentence-transformers states it."""
        content = self.read_file("1_Pooling/config.json")
        file = self.folder / "1_Pooling/config.json"
        return content is not None and parse_json(file, content).get(_LAST) is True

    @property
    def document(self) -> bytes | None:
        """The model's document, as JSON, if the checkpoint has it."""
        return None

    def find_unread(self, model: Model) -> Iterator[Diagnostic]:
        """Statements of the checkpoint outside of its tensors that its ``model`` leaves out."""
        for name in _ADAPTERS:
            if (self.folder / name).is_file():
                yield Diagnostic(
                    code="P537",
                    message=f"{self.folder} has an adapter, {name}, which pi2 does not add to "
                    "the weights",
                    help="merge it into the weights and save them, or take it out of the folder",
                )

    def describe_name(self, name: str) -> str:
        """The checkpoint's own name of the tensor ``name``, whether it has it or not."""
        for old, new in self.beginnings:
            if name.startswith(new):
                return old + name[len(new) :]
        return name


Opened = TypeVar("Opened", bound=Checkpoint)


def read_given(file: Path) -> bytes:
    """Contents of a small file that is not the checkpoint's; `UserError` P543."""
    try:
        return read_regular(file)
    except OSError as error:
        raise UserError.of("P543", f"cannot read {file}: {error.strerror}") from None


def find_tokenizer(path: Path) -> Path:
    """The file of a tokenizer, or the one in a folder; `UserError` P543."""
    names = ("tokenizer.json", SENTENCE_PIECE)
    # Names that no file system takes are of no file.
    files = [path / name for name in names] if os.path.isdir(path) else [path]
    found = next(filter(os.path.isfile, files), None)
    if found is None:
        raise UserError.of(
            "P543",
            f"there is no tokenizer at {path}",
            help=f"--tokenizer takes a {names[0]}, a {names[1]}, or a folder that has one",
        )
    return found


def use_tokenizer(checkpoint: Opened, path: Path | None) -> Opened:
    """The checkpoint with another tokenizer: a ``tokenizer.json``, a ``tokenizer.model``, or a
    folder that has one.  `UserError` P543 if it cannot be read."""
    if path is None:
        return checkpoint
    file = find_tokenizer(path)
    content = read_given(file)
    if file.suffix == ".model":
        content = checkpoint.convert_pieces(file, content)
    return replace(checkpoint, given_tokenizer=(file, content))


def open_checkpoint(path: Path, model: Model | None = None) -> Checkpoint:
    """Open a GGUF file, a folder of Hugging Face, or a store of ``model``.

    A folder that has nothing but one GGUF model in it stands for that.  Raises `UserError` as
    `open_folder` and `pi2.importing.gguf_checkpoint.open_gguf` do."""
    if path.suffix == ".toml":
        raise UserError.of(
            "P532",
            f"{path} is a document of pi2, no checkpoint",
            help="give the GGUF file, or the folder with config.json and weights, that it is about",
        )
    if path.is_file() or has_gguf_suffix(path):
        from pi2.importing.gguf_checkpoint import open_gguf

        return open_gguf(path)
    if not (path / "config.json").exists():
        if (path / _MANIFEST).exists():
            from pi2.importing.store_checkpoint import open_store_folder

            return open_store_folder(path, model)
        if (path / _MLC_CONFIG).exists():
            raise UserError.of(
                "P532",
                f"{path} has weights of MLC-LLM, which are not converted",
                help="give the checkpoint that they were made from, or run a plan with "
                f"`--mlc {path}`",
            )
        files = sorted(filter(has_gguf_suffix, path.glob("*")))
        if files:
            return _open_only_gguf(path, files)
    return open_folder(path)


def _open_only_gguf(folder: Path, files: list[Path]) -> Checkpoint:
    from pi2.importing.gguf_checkpoint import find_parts, open_gguf

    for file in files:
        check_weights(folder, file)
    if find_parts(files[0]) != files:
        raise UserError.of(
            "P531",
            f"{folder} has {len(files)} GGUF files that do not belong together",
            help=f"give one of them: {files[0]}",
        )
    return open_gguf(files[0])


def open_folder(folder: Path, shards: Shards | None = None) -> Checkpoint:
    """Read ``config.json`` and the headers of all weight files of a Hugging Face folder.

    ``shards``: source of the weight files that the index names, if some are missing. Raises
    `UserError`: P530 not a checkpoint folder, P531 no weight files, P532 broken file, P533 a
    missing tensor of the index; P536 a tensor twice, P538 an index that names files outside the
    folder."""
    if not folder.is_dir():
        raise UserError.of(
            "P530",
            f"{folder} is neither a checkpoint's folder nor a GGUF file"
            if folder.exists()
            else f"there is no file or folder {folder}",
            help="give a folder with config.json and weights, or a GGUF file",
        )
    stated = read_json(folder / "config.json")
    config = unwrap_config(stated)
    index = _find_index(folder)
    places = {} if index is None else _read_weight_map(index)
    files = [folder / name for name in sorted(set(places.values()))] or [_find_single(folder)]
    tensors: dict[str, SourceTensor] = {}
    for file in files:
        if shards is None:
            check_weights(folder, file)
        found = list_tensors(file) if shards is None else list_streamed(file, shards)
        for name, tensor in found.items():
            if name in tensors:
                raise refuse_export(
                    "P536", f"tensor {name!r} is in {tensors[name].file} and in {file}"
                )
            tensors[name] = tensor
    for name, place in places.items():
        if name not in tensors or tensors[name].file.name != place:
            assert index is not None
            raise refuse_export(
                "P533", f"{folder / place} has no tensor {name!r}, although {index.name} says so"
            )
    beginnings = list_beginnings(config)
    says, settings = folder / "config.json", find_settings(stated)
    if not settings and (folder / _MODELOPT).is_file():
        says, settings = folder / _MODELOPT, {"quant_method": "modelopt"}
    decoded = decode_weights(says, settings, divide_stacks(tensors))
    return Checkpoint(
        folder=folder,
        config=config,
        config_file=folder / "config.json",
        tensors=rename_tensors(decoded, beginnings),
        files=tuple(files),
        shards=shards,
        beginnings=beginnings,
    )


_PLAIN = (SourceTensor, StreamedTensor)
"""Tensors stored in their file as plain numbers."""


def divide_stacks(tensors: Mapping[str, SourceTensor]) -> dict[str, SourceTensor]:
    """The tensors with matrices of experts that lie one after the other in one tensor as tensors of
    their own: ``NAME.0``, ``NAME.1`` and so on."""
    divided: dict[str, SourceTensor] = {}
    for name, tensor in tensors.items():
        is_stack = type(tensor) in _PLAIN and len(tensor.shape) == 3
        # A convolution's channel has one row; scales of a matrix may have one, too.
        is_scale = name.endswith(("_scale_inv", "_scale"))
        is_stack = is_stack and (is_scale or (tensor.shape[1] > 1 and tensor.shape[2] > 1))
        is_stack = is_stack and not name.endswith(("_blocks", "_scales"))
        if not is_stack or not 1 <= tensor.shape[0] <= MOST_EXPERTS:
            divided[name] = tensor
            continue
        for number in range(tensor.shape[0]):
            own = f"{name}.{number}"
            divided[own] = tensor.cut(number, name=own)
    return divided


def _find_index(folder: Path) -> Path | None:
    """The index of several weight files, unless a single one before it is a whole checkpoint."""
    names = (name for pair in zip(SINGLES, INDEXES, strict=True) for name in pair)
    found = next((name for name in names if (folder / name).exists()), None)
    return folder / found if found in INDEXES else None


def _find_single(folder: Path) -> Path:
    """The only weight file of a folder without an index; `UserError` P531."""
    names = (name for name in SINGLES if (folder / name).exists())
    found = [folder / name for name in names][:1] or sorted(folder.glob("*.safetensors"))
    found = found or sorted(file for ending in PICKLED for file in folder.glob(f"*{ending}"))
    if len(found) == 1:
        return found[0]
    if found:
        problem = f"{len(found)} weight files and no {INDEXES[0]}"
        raise UserError.of("P531", f"{folder} has {problem}", help=f"add {INDEXES[0]}")
    raise UserError.of(
        "P531",
        f"{folder} has no safetensors files",
        help="give the folder that has config.json and model.safetensors",
    )


def check_weights(folder: Path, file: Path) -> None:
    """`UserError` P538 for a weight file that links out of ``folder``, P532 for no regular one."""
    try:
        check_place(folder, file)
    except OSError as error:
        raise UserError.of("P532", f"cannot read {file}: {error.strerror}") from None


def list_tensors(file: Path) -> Mapping[str, SourceTensor]:
    """Tensors of a weight file by name; raises as the reader of its format does."""
    if file.suffix in PICKLED:
        from pi2.importing.safetensors_file import list_torch_file

        return list_torch_file(file)
    return list_safetensors(file)


def _read_weight_map(file: Path) -> dict[str, str]:
    weight_map = read_json(file).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise UserError.of("P532", f"{file} has no weight_map", file=str(file))
    for tensor, name in weight_map.items():
        if not isinstance(name, str) or not _is_file_name(name):
            raise UserError.of(
                "P538",
                f"the index puts tensor {tensor!r} into {name!r}, which is not a file name",
                help="weight files must be in the checkpoint's own folder",
                file=str(file),
            )
    return weight_map


def _is_file_name(name: str) -> bool:
    """Whether it is a file of the folder itself, in characters that a file system can take."""
    return name.isprintable() and name == Path(name).name and name not in ("", ".", "..")


def read_json(file: Path) -> dict[str, Any]:
    """Read a JSON object of a checkpoint; `UserError` P530 if there is no such file, P532 if it is
    not one, P538 if it is a link out of its folder."""
    try:
        content = read_place(file.parent, file)
    except FileNotFoundError:
        raise UserError.of(
            "P530",
            f"there is no {file}",
            help="give a Hugging Face folder (config.json, safetensors files, tokenizer.json), or "
            "a GGUF file",
        ) from None
    except OSError as error:
        raise UserError.of("P532", f"cannot read {file}: {error.strerror}") from None
    return parse_json(file, content)


def parse_json(file: Path, content: bytes) -> dict[str, Any]:
    """The JSON object that ``file`` holds; `UserError` P532 if it is something else."""
    try:
        value = json.loads(content)
    except (ValueError, RecursionError):
        raise UserError.of("P532", f"{file} is not JSON", file=str(file)) from None
    if not isinstance(value, dict):
        raise UserError.of("P532", f"{file} is not a JSON object", file=str(file))
    return value
