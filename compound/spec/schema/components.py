"""What the YAML file may say of components and of the graph they form, as pydantic models."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Literal

from pydantic import ConfigDict, Discriminator, Field, Tag

from compound.spec.schema.settings import (
    AnySetting,
    AnySpace,
    CountSetting,
    DemosSetting,
    FloatSetting,
    IntSetting,
    LabelSetting,
    OptionSetting,
    TextSetting,
    WeightsSetting,
)
from compound.spec.schema.types import Code, Model, Name, Reference, Scalar, Type


def one_key(kinds: Mapping[str, object], noun: str) -> Discriminator:
    """Tell entries apart by the one key among ``kinds`` that they have."""

    def tag(value: object) -> str | None:
        found = [kind for kind in kinds if kind in value] if isinstance(value, Mapping) else []
        return f"~{found[0]}" if len(found) == 1 else None

    return Discriminator(tag, custom_error_type="one_key", custom_error_message=noun)


def _by_index(value: object) -> str | None:
    index = value.get("index") if isinstance(value, Mapping) else None
    return f"~{index}" if index in INDEXES else None


INDEXES = ("bm25", "dense", "passages")
When = Annotated[
    Annotated[Reference, Tag("~always")]
    | Annotated[dict[Reference, Scalar], Field(min_length=1, max_length=1), Tag("~equals")],
    Discriminator(lambda value: "~equals" if isinstance(value, Mapping) else "~always"),
]
Out = Annotated[
    Annotated[Type, Tag("~one")] | Annotated[dict[Name, Type], Field(min_length=1), Tag("~several")],
    Discriminator(lambda value: "~several" if isinstance(value, Mapping) else "~one"),
]


class Wiring(Model):
    """How a node hangs in the graph."""

    wires: dict[Name, Reference] = Field(default={}, alias="in")
    """Which input or output feeds each port; edges may also feed settings."""
    when: When | None = None
    """Run the node only if this output is true, or equals a value: {$router.route: search}."""


class LLMSettings(Model):
    """A call to a language model."""

    prompt: TextSetting = ""
    """The instruction."""
    demos: DemosSetting = Field(default=[])
    """Worked examples shown before the inputs."""
    lm: LabelSetting | None = None
    """The model; the file's `lm` by default."""
    temperature: FloatSetting = 0.0
    """0 is greedy, and makes the component deterministic."""
    max_tokens: CountSetting = 256
    """The longest answer, in tokens."""
    stop: list[str] = Field(default=[])
    """Texts that end the answer."""
    format: Literal["auto", "text", "fields", "json"] = "auto"
    """How fields are written: text (one field), fields (`name: value` lines) or json."""
    weights: WeightsSetting | None = None
    """A LoRA adapter to train."""
    takes: dict[Name, Type] | None = None
    """Declared inputs and types; whatever is connected by default."""
    system: str = ""
    """A system message."""
    timeout: float | None = Field(default=120.0, gt=0)
    """Seconds for one try of a remote model."""
    retries: int = Field(default=3, ge=0)
    """How often transient errors are tried again."""


class LLMEntry(Wiring):
    """A language model as a typed step."""

    llm: LLMSettings
    """The model's settings."""
    out: Out = Field(default="str", validate_default=True)
    """The type of the answer, or the types of several fields."""


class _Index(Model):
    k: CountSetting = 5
    """How many passages to return."""
    text: str = "text"
    """The column of a passage's text."""
    title: str = "title"
    """The column of its title."""
    id: str = "id"
    """The column that identifies it."""


class BM25Settings(_Index):
    """A search by shared words."""

    index: Literal["bm25"]
    """bm25: by shared words."""
    corpus: str
    """A .jsonl or .csv file of passages, perhaps .gz, relative to this file."""
    k1: float = Field(default=1.5, ge=0)
    """How fast repeated words stop counting."""
    b: float = Field(default=0.75, ge=0, le=1)
    """How much long passages are discounted."""


class DenseSettings(_Index):
    """A search by meaning."""

    index: Literal["dense"]
    """dense: by embeddings."""
    corpus: str
    """A .jsonl or .csv file of passages, perhaps .gz, relative to this file."""
    model: str = ""
    """The embedding model: a sentence-transformers folder or hub id."""
    revision: str | None = None
    """The model's hub revision."""
    device: str | None = None
    """Where to compute, for example cuda."""


class PassagesSettings(_Index):
    """A ranking of the passages that each example carries, given to the port `passages`."""

    index: Literal["passages"]
    """passages: those of the `passages` input."""
    model: str | None = None
    """An embedding model; BM25 by default."""
    k1: float = Field(default=1.5, ge=0)
    """How fast repeated words stop counting."""
    b: float = Field(default=0.75, ge=0, le=1)
    """How much long passages are discounted."""
    revision: str | None = None
    """The model's hub revision."""
    device: str | None = None
    """Where to compute, for example cuda."""


class RetrieverEntry(Wiring):
    """A retriever: a query in, passages out, best first."""

    retriever: Annotated[
        Annotated[BM25Settings, Tag("~bm25")]
        | Annotated[DenseSettings, Tag("~dense")]
        | Annotated[PassagesSettings, Tag("~passages")],
        Discriminator(_by_index, custom_error_type="index", custom_error_message="index"),
    ]
    """The index and how many passages to return."""


class SelectorSettings(Model):
    """A choice among a few options."""

    options: list[Scalar] = Field(min_length=1)
    """The options."""
    value: OptionSetting = None  # type: ignore[assignment]  # the first one
    """The option to start with; the first by default. With `per_input` also a stored reward."""
    per_input: bool = False
    """Whether method `optimas` may let a local reward choose an option for each input."""


class SelectorEntry(Wiring):
    """A selector: picks one of a few options, for example which model answers."""

    selector: SelectorSettings
    """The options."""


class HyperparameterEntry(Wiring):
    """A tunable value as a node of its own, so that several components can read it."""

    hyperparameter: AnySpace
    """The values it may take."""


class FunctionSettings(Model):
    """A typed Python function; further keys set some of its parameters, and may be tuned."""

    model_config = ConfigDict(extra="allow")
    __pydantic_extra__: dict[str, AnySetting]

    call: Code
    """The function, as module:name; modules are also found beside this file."""
    timeout: float | None = Field(default=None, gt=0)
    """Seconds for one try."""
    retries: int = Field(default=0, ge=0)
    """How often transient errors are tried again."""


class FunctionEntry(Wiring):
    """A Python function as a step; its ports come from its annotations."""

    function: FunctionSettings
    """The function and its settings."""
    out: Out | None = None
    """The types of several fields, when the function returns a mapping."""


class FirstOfSettings(Model):
    """Nothing but the ports."""

    ports: list[Name] | None = None
    """The ports in order of preference; those of `in` by default."""


class FirstOfEntry(Wiring):
    """Passes on the first of its inputs whose node ran; joins conditional branches."""

    first_of: FirstOfSettings
    """Usually {}."""
    out: Type = Field(default="str", validate_default=True)
    """The type of its inputs and its output."""


class LoopSettings(Model):
    """A body that runs turn after turn."""

    body: Body
    """The system of one turn."""
    carry: dict[Name, Name]
    """Body output -> body input it replaces in the next turn."""
    until: Name | None = None
    """A boolean body output that ends the loop when true."""
    max_turns: IntSetting = 5
    """The most turns."""


class LoopEntry(Wiring):
    """A loop; its inputs and outputs are those of its body."""

    loop: LoopSettings
    """The body and when to stop."""


class MapSettings(Model):
    """A body that runs for each item of a list."""

    body: Body
    """The system for one item."""
    over: Name
    """The body input that receives the items."""


class MapEntry(Wiring):
    """A map; its outputs are lists in the items' order."""

    map: MapSettings
    """The body and what it runs over."""


class ClassEntry(Wiring):
    """Any Component subclass, made as Class(name, **settings)."""

    code: Code = Field(alias="class")
    """The class, as module:name; modules are also found beside this file."""
    settings: dict[Name, AnySetting] = Field(default={})
    """What it is made with."""


KINDS: Mapping[str, type[Wiring]] = {
    "llm": LLMEntry,
    "retriever": RetrieverEntry,
    "selector": SelectorEntry,
    "hyperparameter": HyperparameterEntry,
    "function": FunctionEntry,
    "loop": LoopEntry,
    "map": MapEntry,
    "first_of": FirstOfEntry,
    "class": ClassEntry,
}
Entry = Annotated[
    Annotated[LLMEntry, Tag("~llm")]
    | Annotated[RetrieverEntry, Tag("~retriever")]
    | Annotated[SelectorEntry, Tag("~selector")]
    | Annotated[HyperparameterEntry, Tag("~hyperparameter")]
    | Annotated[FunctionEntry, Tag("~function")]
    | Annotated[LoopEntry, Tag("~loop")]
    | Annotated[MapEntry, Tag("~map")]
    | Annotated[FirstOfEntry, Tag("~first_of")]
    | Annotated[ClassEntry, Tag("~class")],
    one_key(KINDS, "kind"),
]


class UseEntry(Wiring):
    """A further use of a component under another name; both share one configuration."""

    use: Name
    """The component."""


class Body(Model):
    """A graph: inputs, components, further uses of them, and outputs."""

    inputs: dict[Name, Type] = Field(default={})
    """What the graph reads, by name and type."""
    components: dict[Name, Entry]
    """The components; each is a node of its own name."""
    nodes: dict[Name, UseEntry] = Field(default={})
    """Further uses of components under other names."""
    outputs: dict[Name, Reference] = Field(min_length=1)
    """What the graph returns, by name."""
