"""What a family document states: how keys of ``config.json`` become keys of a model document."""

from typing import Annotated, Any

from pydantic import Field

from pi2.plan.documents.common import Document, Table


class Window(Table):
    """A sliding window of some layers: of ``layer_types``, else of ``layers``."""

    width: int | None = Field(default=None, ge=1, examples=[4096])
    """Tokens, if the configuration states no `sliding_window`; absent means that there is no window
    then."""
    layers: str = Field(default="true", max_length=300, examples=["layer % 4 != 0"])
    """Expression that says whether `layer` has a window."""
    needs_width: bool = False
    """Whether a `sliding_window` that is null means that there is none."""
    still: bool = False
    """Whether layers without a window have no rotary positions."""


class Sections(Table):
    """What a family states of its models, or under a condition."""

    assume: dict[str, Any] = Field(default={}, examples=[{"rms_norm_eps": 1e-5}])
    """Values of keys that the configuration leaves out, or states as null."""
    fix: dict[str, Any] = Field(default={}, examples=[{"mlp_bias": False}])
    """Values that replace keys of the configuration."""
    only: dict[str, Any] = Field(default={}, examples=[{"alibi": False}])
    """The one value of a key that pi2 computes; any other is refused (`P544`)."""
    require: dict[str, str] = Field(default={}, examples=[{"swiglu_limit": "swiglu_limit > 0"}])
    """Expressions that must hold, by any name; the model is refused (`P544`) otherwise."""
    read: dict[str, Any] = Field(default={}, examples=[{"norm": {"epsilon": ["eps", 1e-5]}}])
    """Keys of the model document, each with keys of the configuration, of which the first stated
    one counts. A default may follow, which is no text."""
    set: dict[str, Any] = Field(default={}, examples=[{"rope": {"pairs": "neighbours"}}])
    """Values of keys of the model document, which count before `read`; a text that begins with `=`
    is an expression, and a key without a value is left out."""
    names: dict[str, str] = Field(default={}, examples=[{"up": ".mlp.fc1.*"}])
    """Names of tensors by keys of the table `tensors`. A name that begins with a dot follows
    `layer`, `.*` stands for `.weight` and, of the key with `_bias`, for `.bias`; `{part}` in key
    and name for `gate`, `up` and `down`."""
    window: Window | None = None
    """Sliding window."""
    functions: tuple[str, ...] = Field(default=(), examples=[["gemma4"]])
    """Functions of `pi2.importing.families.functions` that describe what no key here can."""


class When(Sections):
    """What counts where a condition holds; it replaces what the family states."""

    test: str = Field(max_length=300, examples=["use_parallel_residual"])
    """Expression of keys of the configuration."""


class Architecture(Table):
    """Models of the family in GGUF files, by ``general.architecture``.

    A name that begins with ``_`` stands for tensor names that several families share."""

    refused: str = Field(default="", max_length=200, examples=["adapters that tokens switch on"])
    """Operators of its models that no model document states; nothing else counts then."""
    extends: tuple[str, ...] | None = Field(default=None, examples=[["_attention"]])
    """Architectures whose names of tensors count too, weakest first; absent means `_decoder`."""
    names: dict[str, str] = Field(default={}, examples=[{".ffn_up.*": ".fc1.*"}])
    """Names in a Hugging Face checkpoint by those in the file. A name that begins with a dot
    follows `blk.{layer}` and `layer`; `{part}` and `.*` as in the family's `names`. An empty name
    is of a tensor that changes nothing."""
    layer: str = Field(default="model.layers.{layer}", examples=["backbone.layers.{layer}"])
    """How names of a layer's tensors begin in the checkpoint."""
    model_type: str = Field(default="", examples=["granitemoeshared"])
    """The family's name in the configuration; default: the file's."""
    families: tuple[str, ...] = Field(default=(), examples=[["mixtral"]])
    """Further families whose models are written as files of this architecture."""
    activation: str = Field(default="silu", examples=["relu2"])
    """Activation of the models, which files do not state."""
    permutes: bool = False
    """Whether rows of queries and keys are in the order of pairs that follow each other."""
    norm_offset: float = Field(default=0.0, examples=[1.0])
    """Number that the file has added to the weights of norms."""
    tiles_values: bool = False
    """Whether value heads that share a key head are apart."""
    sliding_every: int = Field(default=0, examples=[4])
    """The last of so many layers has no window, of a negative number the first, unless the file's
    `sliding_window_pattern` says otherwise; 0 means that files do not state windows by layers."""
    keys: dict[str, Annotated[list[Any], Field(min_length=1, max_length=2)]] = Field(
        default={}, examples=[{"index_topk": ["attention.indexer.top_k", 2048]}]
    )
    """Further keys of the configuration, each with the file's key after the architecture's name and
    its default; without one it is a whole number of 1 or more. A text that begins with ``=`` is an
    expression of the file's keys, and of the configuration's as ``config.KEY``; a key of a table
    that the configuration has not is left out. ``has(END, layer)`` tells whether there is a tensor
    with a name that ends so, in a layer or in any, ``rows(END)`` its rows. `extends` adds its
    keys."""
    settings: dict[str, Any] = Field(default={}, examples=[{"norm_topk_prob": True}])
    """Further keys of the configuration, which files do not state."""
    read: tuple[str, ...] = Field(default=("_usual",), examples=[["_usual", "_kinds"]])
    """Tables whose settings and keys count before its own, weakest first, each after its own
    `read`."""
    test: str = Field(default="", max_length=300, examples=["expert_count"])
    """Expression that says whether a table that others `read` counts; absent means that it does."""
    positive_rates: bool = False
    """Whether files have rates of decay without a minus sign."""


class MtpHead(Table):
    """The MTP head of a checkpoint, which drafts for its model."""

    layer: str = Field(default="", max_length=200, examples=["mtp.layers.0"])
    """How names of its layer's tensors begin; absent means the layer after the model's last."""
    names: dict[str, str] = Field(default={}, examples=[{"in": ".eh_proj.weight"}])
    """Names of its other tensors: `in` projects both inputs, `token_norm` and `stream_norm` are
    their norms, and others are keys of the table `tensors`. A name that begins with a dot follows
    `layer`."""


class Family(Document, Sections):
    """A family of models (``*.family.toml``): the file is named after ``model_type``.

    Expressions have numbers, texts, ``true``, ``false`` and ``none``, and Python's operators. Keys
    of the configuration have their names, keys of the model document their dots (``shape.hidden``).
    ``each(...)`` is a list of values, one for every ``layer``, ``where(...)`` one of the layers for
    which it holds."""

    aliases: tuple[str, ...] = Field(default=(), examples=[["sparsellama"]])
    """Other names of the same family."""
    wrappers: dict[str, dict[str, Any]] = Field(default={}, examples=[{"llava": {}}])
    """Families of models that also read pictures, sound or video and whose text model is of this
    one, with values that their text configurations leave out."""
    refused: str = Field(default="", max_length=500, examples=["two attentions in a layer"])
    """What models of this family have that no model document states; nothing else counts then."""
    layer: str = Field(default="model.layers.{layer}", examples=["model.layers.{layer}"])
    """How names of a layer's tensors begin."""
    rotated: float | None = Field(default=None, gt=0.0, le=1.0, examples=[0.5])
    """Part of a head that turns if the configuration states none; absent means always the whole
    head."""
    when: dict[str, When] = Field(default={})
    """Conditions, by any name."""
    mtp: MtpHead | None = None
    """Its MTP heads, if it has some."""
    gguf: dict[str, Architecture] = Field(default={})
    """Architectures of GGUF files; a family does not inherit them."""
