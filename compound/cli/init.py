"""Command that writes the file of a system for data, and of the prompts of agents for a system."""

from __future__ import annotations

import inspect
import keyword
import os
import re
import sys
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Optional

import typer

from compound.cli.options import (
    MetricName,
    NoImport,
    Rows,
    Sets,
    TrustOption,
    app,
    format_examples,
    load_program,
    print_json,
)
from compound.core.errors import CompoundError, DataError, SpecError
from compound.core.formatting import plural

if TYPE_CHECKING:
    from compound.api.discover import Discovery
    from compound.components.gateway.clustering import FoundPrompt
    from compound.yaml import Program

GOLD = (
    "answer",
    "label",
    "gold",
    "target",
    "output",
    "expected",
    "category",
    "class",
    "response",
    "completion",
    "summary",
    "translation",
    "intent",
    "sentiment",
    "topic",
    "y",
)
IDS = ("id", "uid", "uuid", "guid", "key", "index", "idx", "row")
SPLITS = ("split", "fold", "set", "partition")
TRAIN, VALID, TEST = (
    ("train", "training"),
    ("dev", "valid", "validation", "val"),
    ("test", "testing"),
)
MOST_LABELS, MOST_LABEL, REPEATED = 20, 60, 3  # labels, their characters, and rows per label
NODE = "answerer"
SEEN = 1000  # different texts of a column that are told apart
SHARES = {"train": 0.5, "valid": 0.3, "test": 0.2}
HALVES = {"train": 0.5, "valid": 0.5}
FEWEST, LEAST = (
    60,
    10,
)  # rows of a file that is optimized, since fewer can show no gain; and of any file


@dataclass
class Column:
    """Different texts of a column, the types of its values, its filled rows, and its longest text."""

    name: str
    texts: dict[str, None] = field(default_factory=dict)
    kinds: set[str] = field(default_factory=set)
    filled: int = 0
    longest: int = 0

    def add(self, value: object) -> None:
        """Count the value of a row."""
        if value is None or (isinstance(value, str) and not value.strip()):
            self.kinds.add("None" if value is None else "str")
            return
        self.kinds.add(type(value).__name__)
        self.filled += 1
        text = str(value)
        self.longest = max(self.longest, len(text))
        if len(self.texts) < SEEN:
            self.texts[text.strip()] = None

    @property
    def type(self) -> str:
        """Type of the values in YAML; ``Any`` if they differ."""
        kinds = self.kinds - {"None"}
        kinds = {"float"} if kinds == {"int", "float"} else kinds
        (found,) = kinds if len(kinds) == 1 else ("Any",)
        known = found if found in ("str", "int", "float", "bool", "list", "dict") else "Any"
        return f"{known} | None" if "None" in self.kinds and known != "Any" else known

    @property
    def labels(self) -> list[str]:
        """The values in order, if they are a few labels."""
        few = 2 <= len(self.texts) <= min(MOST_LABELS, self.filled / REPEATED)
        is_text = self.kinds <= {"str", "None"} and self.longest <= MOST_LABEL
        plain = all(text.isprintable() for text in self.texts)
        return sorted(self.texts) if few and is_text and plain else []


@app.command(
    epilog=format_examples(
        "init data.csv",
        "init data/ --lm openai/gpt-4o-mini --out qa.yaml",
        "init system.yaml --examples 20 --yes",
        "init system.yaml --temperature --model smollm2 --model openai/gpt-4o-mini",
        "init script.py --data rows.csv --metric metrics:score",
    )
)
def init(
    source: Annotated[
        Path,
        typer.Argument(
            help="Data file, or folder with train, dev and test files; the YAML file of a system "
            "with external agents; or a Python script that calls OpenAI's API.",
            show_default=False,
        ),
    ],
    lm: Annotated[
        str, typer.Option(help="Model of the system. [default: smollm2, or those of a script]")
    ] = "",
    out: Annotated[
        Optional[Path],  # noqa: UP045 - typer reads this at run time
        typer.Option(help="File to write. [default: system.yaml, or AGENT_prompts.yaml]"),
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Replace an existing file.")] = False,
    examples: Annotated[
        int, typer.Option(min=2, help="Agents: number of train examples to run them on.")
    ] = 8,
    yes: Annotated[
        bool, typer.Option("--yes", "-y", help="Agents: accept every prompt without a question.")
    ] = False,
    model: Annotated[
        Optional[list[str]],  # noqa: UP045
        typer.Option(help="Agents: model among which prompts may choose; repeatable."),
    ] = None,
    temperature: Annotated[
        bool, typer.Option(help="Agents: tune the temperature of each prompt, too.")
    ] = False,
    as_json: Annotated[
        bool, typer.Option("--json", help="Agents: print the found prompts as JSON, write nothing.")
    ] = False,
    rows: Rows = None,
    metric_name: MetricName = "",
    sets: Sets = None,
    no_import: NoImport = False,
    trust: TrustOption = None,
) -> None:
    """Write a system of one model call for data, of a script, or the prompts of the agents of a system.

    Of data, the answer is the column with a usual name (answer, label, ...), otherwise the last
    one; a few different values become the labels of the output. All other columns are inputs,
    except ids and splits.

    The external agents of a system are run on some examples, and the texts of their requests are
    compared: what several runs share becomes a template, and what varies a placeholder, {{name}}.
    Each template is shown for confirmation, or all are accepted by --yes, which is needed without a
    terminal. The confirmed ones are written to a file that the agent's setting prompts_file names;
    their texts are tuned by compound optimize.

    For a script, see compound optimize, which writes the same file and then optimizes it.
    """
    from compound.cli.script import ScriptOptions, is_script, write_script_system

    if is_script(source):
        if no_import:
            raise SpecError([f"--no-import does not allow to run {source}"])
        chosen = ScriptOptions(rows, metric_name or None, lm or None, yes)
        written, _ = write_script_system(source, chosen)
        print(f"now run: compound optimize {written} --dry-run")
        return
    if source.suffix in (".yaml", ".yml"):
        program = load_program(source, sets, no_import, trust=trust)
        found = _discover(program, source, examples)
        if as_json:
            print_json(
                [{k: v for k, v in asdict(each).items() if k != "results"} for each in found]
            )
        else:
            _write_prompts(found, source, out, Choices(yes, force, tuple(model or ()), temperature))
        return
    _write_system(source, lm or "smollm2", out or Path("system.yaml"), force)


def _write_system(data: Path, lm: str, out: Path, force: bool) -> None:
    from compound.api.check import check_program
    from compound.interchange.exports import write as write_file
    from compound.yaml import loads

    folder = Path(os.path.relpath(data, out.parent)).as_posix()
    text = system_file(data, folder, lm)
    if out.exists() and not force:
        raise CompoundError(
            f"{out} exists", hint="choose another name by --out, or replace it by --force"
        )
    program = loads(text, path=out)
    write_file(out, text)
    try:
        checked = check_program(program)  # reports what is wrong with the rows
    except CompoundError:
        print(f"{out} is written, but cannot be used yet:", file=sys.stderr)
        raise
    print(f"{checked}\nedit the prompt in {out}, then run: compound optimize {out} --dry-run")


@dataclass(frozen=True)
class DataTable:
    """Columns of a data file: which ones are inputs, and which one is the answer.

    Attributes:
        columns: the inputs and the answer.
        gold: the column of the answer.
        output: its name as an output of a system.
        inputs: the other columns by their names as inputs.
        source: where the rows and splits are, as the entry ``data``.
        kind, metric, tokens: type of the answer, its metric, and its maximum number of tokens.
        rows: the number of rows.
    """

    columns: Sequence[Column]
    gold: Column
    output: str
    inputs: Mapping[str, Column]
    source: Mapping[str, object]
    kind: str
    metric: str
    tokens: int
    rows: int


def read_table(data: Path, path: str) -> DataTable:
    """Read the columns of a file or folder; see `system_file`, which describes the arguments."""
    from compound.yaml.text import Flow

    columns, rows = read_columns(data)
    usable = [column for column in columns if column.name.strip() and column.filled]
    splits = [column for column in usable if _is_split(column)]
    by = next((c for c in splits if _has_train_and_valid(c)), None) if not data.is_dir() else None
    identity = next((c for c in usable if c not in splits and _is_id(c, rows)), None)
    left = [column for column in usable if column not in (*splits, identity)]
    if len(left) < 2:
        separated = len(columns) == 1 and re.search(r"[;\t|]", columns[0].name)
        raise DataError(
            f"{data}: an input and an answer need two columns with names and values, but found: "
            f"{', '.join(repr(c.name) for c in columns) or 'none'}",
            hint="separate the columns by commas"
            if separated
            else "name the columns in the first row of a CSV file, or by the keys of JSON objects",
        )
    named = {column.name.strip().lower(): column for column in reversed(left)}
    gold = next((named[name] for name in GOLD if name in named), left[-1])
    names = port_names([column.name for column in left if column is not gold])
    output = port_names([gold.name], taken=names)[0]
    inputs = dict(zip(names, (column for column in left if column is not gold), strict=True))
    source: dict[str, object] = {"path": path, **_splits(data, by, rows)}
    source |= {"id": identity.name} if identity and identity.name != "id" else {}
    fields = {port: column.name for port, column in inputs.items() if port != column.name}
    fields |= {output: gold.name} if output != gold.name else {}
    source |= {"fields": Flow(fields)} if fields else {}
    return DataTable(left, gold, output, inputs, source, *_answer(gold), rows)


def system_file(data: Path, path: str, lm: str) -> str:
    """Return the YAML text of a system for some data.

    Args:
        data: the file or folder.
        path: the same, relative to the folder of the YAML file.
        lm: the model of the system.

    Raises:
        DataError: it has no rows, or fewer than two columns with a name and values.
    """
    from compound.yaml.text import Flow, write

    table = read_table(data, path)
    longest = max(table.inputs.values(), key=lambda column: ("str" in column.kinds, column.longest))
    asked, given = _words(table.gold.name), _words(longest.name)
    llm = {
        "prompt": {"tune": f"Give the {asked} of the {given}."},
        "demos": {"tune": 4},
        "max_tokens": table.tokens,
    }
    tree: dict[str, object] = {
        "system": port_names([data.name.partition(".")[0]])[0],
        "lm": lm,
        "inputs": Flow({port: column.type for port, column in table.inputs.items()}),
        "components": {
            NODE: {
                "llm": Flow(llm),
                "in": Flow({port: f"${port}" for port in table.inputs}),
                **({"out": table.kind} if table.kind != "str" else {}),
            }
        },
        "outputs": Flow({table.output: f"${NODE}"}),
        "data": Flow(table.source),
        "metric": Flow({table.metric: Flow({"output": table.output, "gold": table.output})}),
    }
    if table.rows >= FEWEST or data.is_dir():
        tree["optimize"] = Flow({"budget": Flow({"system_runs": 300})})
    return write(tree)


def read_columns(data: Path) -> tuple[list[Column], int]:
    """Return the columns of a data file, or of the train split of a folder, and the number of rows.

    Raises:
        DataError: the rows cannot be read, or there are too few.
    """
    from compound.core.security.untrusted import UntrustedFolder
    from compound.evaluation.rows import find_split_file, iterate_rows, read_rows

    found: dict[str, Column] = {}
    is_folder, count = data.is_dir(), 0
    lines: Iterable[tuple[int, Mapping[str, object]]] = (
        iterate_rows(find_split_file(UntrustedFolder(data, error=DataError), TRAIN[:1])[1])
        if is_folder
        else read_rows(data)
    )
    for _, row in lines:
        count += 1
        for name, value in row.items():
            found.setdefault(name, Column(name)).add(value)
    if not count:
        raise DataError(f"{data} has no rows")
    if count < LEAST and not is_folder:
        raise DataError(
            f"{data} has {plural(count, 'row')}",
            hint=f"at least {LEAST} are needed to divide them, better 100",
        )
    for column in found.values():
        if column.filled < count and column.kinds != {"str"}:
            column.kinds.add("None")
    return list(found.values()), count


def port_names(columns: Sequence[str], taken: Sequence[str] = ()) -> list[str]:
    """Return distinct names of ports for columns: letters, digits and underscores, and no name of a setting.

    >>> port_names(["Ticket text", "prompt", "2nd", "ticket_text", "日本"])
    ['Ticket_text', 'prompt_column', 'column_2nd', 'ticket_text', 'column_5']
    """
    from compound.components.llm import LLM

    reserved = {*inspect.signature(LLM).parameters, "item", "previous", NODE, *taken}
    found: list[str] = []
    for number, column in enumerate(columns, 1):
        name = re.sub(r"[^A-Za-z0-9]+", "_", column).strip("_") or f"column_{number}"
        name = f"column_{name}" if name[0].isdigit() else name
        if name in reserved or keyword.iskeyword(name):
            name = f"{name}_column"
        while name in found or name in taken:
            name = f"{name}_{number}"
        found.append(name)
    return found


def _words(name: str) -> str:
    words = " ".join(re.findall(r"[^\W_]+", name)).lower()
    return words.removeprefix("the ")[:MOST_LABEL] or "value"


def _is_id(column: Column, rows: int) -> bool:
    name = column.name.strip().lower()
    is_named = name in IDS or name.endswith(("_id", " id", "-id"))
    return is_named and column.filled == rows and column.type in ("str", "int")


def _is_split(column: Column) -> bool:
    values = set(column.texts)
    return column.name.strip().lower() in SPLITS and values <= {*TRAIN, *VALID, *TEST}


def _has_train_and_valid(column: Column) -> bool:
    return not column.texts.keys().isdisjoint(TRAIN) and not column.texts.keys().isdisjoint(VALID)


def _splits(data: Path, by: Column | None, rows: int) -> dict[str, object]:
    """Return where the splits are: in files, in a column, or as shares."""
    if by is not None:
        roles = {"train": TRAIN, "valid": VALID, "test": TEST}
        found = {
            role: next((n for n in names if n in by.texts), None) for role, names in roles.items()
        }
        return {"split_by": by.name, **found}
    if data.is_dir():
        has_test = any(file.name.startswith("test.") for file in data.iterdir())
        return {} if has_test else {"test": None}
    return {"split_by": SHARES if rows >= FEWEST else HALVES}


def _answer(gold: Column) -> tuple[str, str, int]:
    """Return the type of the answer, its metric, and its maximum number of tokens."""
    if labels := gold.labels:
        is_plain = all(re.fullmatch(r"[\w ./&-]+", label) for label in labels)
        kind = (
            f"one of {', '.join(labels)}"
            if is_plain
            else f"Literal[{', '.join(map(repr, labels))}]"
        )
        return kind, "accuracy", max(16, gold.longest)
    if gold.type in ("int", "float", "bool"):
        return gold.type, "accuracy", 16
    return "str", "token_f1", max(32, min(1024, gold.longest))


# --- the prompts of agents -----------------------------------------------------------------------


@dataclass(frozen=True)
class Choices:
    """What the user chose for the prompts of agents."""

    yes: bool
    force: bool
    models: tuple[str, ...]
    temperature: bool


def _discover(program: Program, file: Path, examples: int) -> list[Discovery]:
    """Run the agents of a system on train examples, and return their prompts."""
    from compound.api.discover import discover

    if program.data is None:
        raise SpecError([f"{file}:1:1: finding the prompts of agents needs `data:` in the file"])
    train = program.data.examples("train", list(program.system.inputs), limit=examples)
    return discover(program.system, train, program.find_engine)


def _write_prompts(
    found: Sequence[Discovery], file: Path, out: Path | None, choices: Choices
) -> None:
    """Show the prompts, and write the confirmed ones."""
    unasked = False
    for each in found:
        show_prompts(each)
        confirmed = [prompt for prompt in each.prompts if confirm_prompt(prompt, choices.yes)]
        if confirmed:
            _write(each, confirmed, file, out, choices)
        unasked = unasked or bool(each.prompts and not confirmed)
    if unasked:
        _explain_nothing_written()


def show_prompts(found: Discovery) -> None:
    """Print the counts of an agent's requests."""
    print(
        f"{found.agent}: {found.runs} runs, {found.usage.calls} requests, {found.usage.tokens} tokens"
    )
    for message, count in Counter(found.failed).most_common():
        print(f"  {plural(count, 'run')} failed: {message}")
    for name, count in found.recognized.items():
        print(f"  {count} requests have the declared prompt {name}")
    if found.other:
        print(
            f"  {found.other} requests have no prompt that several runs share; they are sent unchanged"
        )
    if not found.prompts:
        print("  no further prompt was found")


def confirm_prompt(prompt: FoundPrompt, yes: bool) -> bool:
    """Show a prompt, and ask whether to tune it."""
    print(f"\n{prompt.name}: {prompt.requests} requests in {prompt.runs} runs")
    for role, text in prompt.match.items():
        print(f"  [{role}]")
        print("\n".join(f"    {line}" for line in text.splitlines()))
    if yes or not sys.stdin.isatty():
        return yes
    return typer.confirm(f"Tune {prompt.name}?", default=True, err=True)


def _explain_nothing_written() -> None:
    """Print why an agent's prompts were not written; without a terminal, end with exit code 1."""
    if sys.stdin.isatty():
        print("\nno prompt was accepted, so that nothing was written")
        return
    print(
        "error: nothing was written: without a terminal, the prompts cannot be confirmed\n"
        "hint: check them above, and accept them all with --yes",
        file=sys.stderr,
    )
    raise typer.Exit(1)


def _write(
    found: Discovery, confirmed: list[FoundPrompt], file: Path, out: Path | None, choices: Choices
) -> None:
    """Write the confirmed prompts, and say how to use the file."""
    from compound.api.discover import prompts_tree
    from compound.yaml.text import write

    path = out or file.with_name(f"{found.agent}_prompts.yaml")
    found_prompts = prompts_tree(confirmed, models=choices.models, temperature=choices.temperature)
    try:
        with path.open("w" if choices.force else "x", encoding="utf-8") as opened:
            opened.write(write(found_prompts))
    except FileExistsError:
        raise CompoundError(
            f"{path} exists", hint="choose another name by --out, or replace it by --force"
        ) from None
    setting = f"{found.agent}: {{external_agent: {{prompts_file: {path.name}}}}}"
    print(f"\nwrote {path}; add it to the agent:\n  {setting}")
