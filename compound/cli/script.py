"""Optimization of a plain Python script: its file is written from the script, its data and its requests."""

from __future__ import annotations

import ast
import json
import os
import re
import shlex
import shutil
import sys
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from compound.cli.options import confirm_prompt, show_prompts
from compound.cli.tables import DataTable, read_table
from compound.core.errors import CompoundError, SpecError
from compound.core.security.sanitize import sanitize_for_terminal
from compound.core.security.trust import Origin

if TYPE_CHECKING:
    from compound.api.discover import Discovery
    from compound.components.gateway.clustering import FoundPrompt
    from compound.graph.system import System

AGENT = "script"
KEPT_MODEL = "models_of_the_script"  # engine that keeps the model that a request states
EXAMPLES = 8  # runs in which the prompts are found
BUDGET = 300  # system runs
LEAST_REQUESTS = 10  # limit of the requests of a run, at least
# runs a script that reads its inputs by input(), or as plain text; it ends where a chat would wait
READ_INPUTS = """\
import builtins, io, json, runpy, sys

given = json.load(sys.stdin)
given = [v if isinstance(v, str) else json.dumps(v) for v in map(given.get, sys.argv[2:])]
lines = iter(given)


def read(*prompt):
    for line in lines:
        return " ".join(line.splitlines())
    sys.exit()


builtins.input = read
sys.stdin = io.TextIOWrapper(io.BytesIO("\\n".join([*given, ""]).encode()), "utf-8")
sys.argv = [sys.argv[1]]
runpy.run_path(sys.argv[0], run_name="__main__")
"""
# runs a script that reads its table itself, with the inputs as the only row of it; what it writes
# into its folder is removed, and it prints nothing, so that the result is the last answer of a model
READ_TABLE = """\
import builtins, csv, io, json, os, runpy, sys, tempfile

given, (script, table, names) = json.load(sys.stdin), sys.argv[1:]
names, own, plain = json.loads(names), os.getcwd() + os.sep, open
table, scratch, moved, used = os.path.realpath(table), tempfile.TemporaryDirectory(), {}, set()
with plain(table, newline="", encoding="utf-8-sig") as file:
    row = next(csv.DictReader(file)) if table.endswith(".csv") else json.loads(next(file))
row.update((names[name], value) for name, value in given.items())


def redirected(file, mode="r", *args, **options):
    path = os.path.realpath(file) if isinstance(file, (str, os.PathLike)) else ""
    if path.startswith(own) and set(mode) & set("wax+"):
        moved.setdefault(path, os.path.join(scratch.name, f"{len(moved)}-{os.path.basename(path)}"))
    used.add(path)
    return plain(moved.get(path, file), mode, *args, **options)


builtins.open = io.open = redirected
moved[table] = os.path.join(scratch.name, os.path.basename(table))
with plain(moved[table], "w", newline="", encoding="utf-8") as file:
    if table.endswith(".csv"):
        csv.writer(file).writerows([row, row.values()])
    else:
        file.write(json.dumps(row))
sys.argv, sys.stdout = [script], sys.stderr
try:
    runpy.run_path(script, run_name="__main__")
except SystemExit as end:
    if end.code:
        raise
if table not in used:
    sys.exit("the script does not open its table by open(), as csv, json and pandas do")
"""
ARGUMENTS = (".add_argument", "click.argument", "click.option")
SCRIPT = re.compile(r"(?P<file>.+\.py)(?::(?P<function>[^:]+))?")


@dataclass(frozen=True)
class ScriptOptions:
    """What the user chose for a script.

    Attributes:
        data: the file of the rows.
        metric: ``module:function``, or the name of a metric of this package.
        lm: the model that answers; by default those that the script names.
        yes: whether every prompt that is found is tuned without a question.
    """

    data: Path | None
    metric: str | None
    lm: str | None
    yes: bool


@dataclass(frozen=True)
class ScriptEntry:
    """How a script is run: the settings of its agent, and the column of each input."""

    agent: Mapping[str, object]
    columns: Mapping[str, str]


def is_script(file: Path) -> bool:
    """Return whether a path names a Python script, or a function in it."""
    return SCRIPT.fullmatch(str(file)) is not None


def write_script_system(
    given: Path, options: ScriptOptions, *, runs: bool = True
) -> tuple[Path, list[str]]:
    """Write the file of a script beside it, unless the same options wrote it before.

    Returns the file, and the server of the user's environment that it names.

    Raises:
        CompoundError: the script cannot be run on the data, it sends no request, no prompt is
            chosen, or another file is in the way; or there is no file yet, and ``runs`` forbids to
            run the script.
    """
    from compound.interchange.exports import write

    named = SCRIPT.fullmatch(str(given))
    assert named is not None
    path = Path(named["file"])
    if options.data is None:
        raise SpecError([f"{path}: a script needs --data, a file with a column for each input"])
    out = path.with_suffix(".yaml")
    command = f"{shlex.quote(str(given))} {_arguments(options)}"
    head = f"# written for: {' '.join(command.split())}\n"
    server, trust = _server()
    if out.exists():
        if not out.read_text(encoding="utf-8", errors="replace").startswith(head):
            raise CompoundError(
                f"{out} exists, and these options did not write it",
                hint=f"optimize it by compound optimize {out}, or remove it",
            )
        print(f"using {out}; remove it to find the prompts again", file=sys.stderr)
        return out, trust
    if not path.is_file():
        raise SpecError([f"{path}: no such file"])
    if not runs:
        raise CompoundError(
            f"the prompts of {path} are not known yet: finding them runs it on {EXAMPLES} rows",
            hint=f"find them by: compound init {command}",
        )
    tree = _parse(path)
    folder = Path(os.path.relpath(options.data, out.parent)).as_posix()
    table = read_table(options.data, folder)
    entry = find_entry(path, tree, named["function"], table)
    system = _system(path, entry, table, options, server)
    found = _find_prompts(system, out, trust)
    show_prompts(found)
    _require_requests(found, path, tree)
    kind = _declare_output(system, found, table, options.metric, path)
    # system prompts first: they are what people expect to tune
    asked = sorted(found.prompts, key=lambda prompt: "system" not in prompt.match)
    chosen = [prompt for prompt in asked if confirm_prompt(prompt, options.yes)]
    if not chosen:
        hint = (
            "check the prompts above, and accept them all with --yes"
            if found.prompts and not sys.stdin.isatty()
            else ""
        )
        raise CompoundError(
            f"no prompt of {path} was chosen, so that nothing was written", hint=hint
        )
    kept = [prompt for prompt in found.prompts if prompt in chosen]
    system["components"][AGENT]["out"] = kind  # type: ignore[index]
    write(out, head + _with_prompts(system, kept, found, options, server))
    print(f"\nwrote {out}", file=sys.stderr)
    return out, trust


def write_source_diff(system: System, run: Path) -> list[str]:
    """Write the tuned texts of external agents as a diff of their files into a run directory.

    Returns lines that say where it is, and what it does not contain.
    """
    from compound.interchange.exports import write
    from compound.interchange.source_diff import source_diff

    lines: list[str] = []
    for number, found in enumerate(source_diff(system)):
        lines += [f"not in the diff: {note}" for note in found.notes]
        if found.text:
            out = run / (f"prompts_{number + 1}.diff" if number else "prompts.diff")
            write(out, found.text)
            folder, file = (shlex.quote(str(each)) for each in (found.folder, out))
            lines += [f"prompts as a diff: {out}", f"  apply it by: patch -p1 -d {folder} < {file}"]
    return [sanitize_for_terminal(line) for line in lines]


def _arguments(options: ScriptOptions) -> str:
    given = {"--data": options.data, "--metric": options.metric, "--lm": options.lm}
    return " ".join(f"{n} {shlex.quote(str(v))}" for n, v in given.items() if v is not None)


def _server() -> tuple[dict[str, object], list[str]]:
    """Return the settings of an engine for the server of the environment, and the trust in it."""
    address = os.environ.get("OPENAI_BASE_URL")
    if not address:
        return {}, []
    key = {"api_key_env": "OPENAI_API_KEY"} if os.environ.get("OPENAI_API_KEY") else {}
    host = str(Origin.of(address))
    return {"api_base": address, **key}, [f"OPENAI_API_KEY@{host}" if key else host]


# --- how the script is run -------------------------------------------------------------------------


def _parse(path: Path) -> ast.Module:
    try:
        return ast.parse(path.read_bytes())
    except (SyntaxError, ValueError) as error:
        raise SpecError([f"{path}: not Python: {error}"]) from None


def find_entry(path: Path, tree: ast.Module, function: str | None, table: DataTable) -> ScriptEntry:
    """Return how a script is run on the rows of a table.

    It is the function that is named, otherwise the only one that returns a value, whose parameters
    are columns, and that no other such function calls, otherwise the whole script with arguments.

    Raises:
        SpecError: there is none, or more than one.
    """
    functions = {
        node.name: node
        for node in tree.body
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    }
    if function is not None and function not in functions:
        raise SpecError([f"{path}: no function {function!r} at the top of the script"])
    columns = ", ".join(column.name for column in table.columns)
    fitting = {
        name: found
        for name, node in functions.items()
        if (function is None and _returns(node) and name[0] != "_" and not _is_command(node))
        or name == function
        if (found := _columns_of(node, table)) is not None
    }
    if function is not None and not fitting:
        raise SpecError(
            [f"{path}: the parameters of {function} are not columns of the data ({columns})"]
        )
    called = {
        each.func.id
        for name in fitting
        for each in ast.walk(functions[name])
        if isinstance(each, ast.Call) and isinstance(each.func, ast.Name) and each.func.id != name
    }
    roots = [name for name in fitting if name not in called] or list(fitting)
    if len(roots) > 1:
        raise CompoundError(
            f"{path}: several functions fit the columns of the data: {', '.join(roots)}",
            hint=f"name one, such as {path}:{roots[-1]}",
        )
    if roots:
        return ScriptEntry({"call": f"{path.stem}:{roots[0]}"}, fitting[roots[0]])
    same = shutil.which("python") == sys.executable
    command = ["python" if same else sys.executable]
    arguments = _command_line(tree, table)
    if arguments is not None:
        return ScriptEntry({"command": [*command, path.name, *arguments[0]]}, arguments[1])
    read = _inputs_read(tree, table)
    if read is not None:
        return ScriptEntry({"command": [*command, "-c", READ_INPUTS, path.name, *read]}, read)
    data = Path(str(table.source["path"]))
    texts = {node.value for node in ast.walk(tree) if isinstance(node, ast.Constant)}
    if data.suffix in (".csv", ".jsonl") and any(
        isinstance(text, str) and text.endswith(data.name) for text in texts
    ):
        columns_read = {name: column.name for name, column in table.inputs.items()}
        code = ["-c", READ_TABLE, path.name, str(data), json.dumps(columns_read)]
        print(f"{path} reads {data} itself: it runs on one row, whose result is the last answer")
        return ScriptEntry({"command": [*command, *code]}, columns_read)
    names = [column.name for column in table.columns if column is not table.gold]
    raise CompoundError(
        f"{path}: no function, argument or input() of the script has the names of columns of the "
        f"data ({columns})",
        hint=f"put its steps into a function that returns the answer: def answer({', '.join(names)})",
    )


def _is_command(node: ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    """Return whether click reads a function's parameters; unlike those of typer, it cannot be called."""
    made = [ast.unparse(decorator).partition("(")[0] for decorator in node.decorator_list]
    return any(name.endswith(("argument", "option")) for name in made)


def _returns(node: ast.AST) -> bool:
    """Return whether a function returns a value."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda | ast.ClassDef):
            continue
        if (isinstance(child, ast.Return) and child.value is not None) or _returns(child):
            return True
    return False


def _columns_of(
    node: ast.FunctionDef | ast.AsyncFunctionDef, table: DataTable
) -> dict[str, str] | None:
    """Return the column of each parameter of a function, or ``None`` if one has none."""
    given = node.args
    if given.posonlyargs:
        return None
    optional = [each.arg for each in given.args[len(given.args) - len(given.defaults) :]]
    optional += [
        each.arg
        for each, default in zip(given.kwonlyargs, given.kw_defaults, strict=True)
        if default is not None
    ]
    names = [each.arg for each in (*given.args, *given.kwonlyargs)]
    found = _match_columns(names, table)
    missing = [name for name in names if name not in found and name not in optional]
    others = [column.name for column in table.columns if column is not table.gold]
    if len(missing) == 1 and not found and len(others) == 1:  # only one column can be meant
        return {missing[0]: others[0]}
    return found if found and not missing else None


def _match_columns(names: Sequence[str], table: DataTable) -> dict[str, str]:
    known = {
        re.sub(r"\W+", "_", column.name.strip()).casefold(): column.name
        for column in reversed(table.columns)
        if column is not table.gold
    }
    return {name: known[name.casefold()] for name in names if name.casefold() in known}


def _command_line(tree: ast.Module, table: DataTable) -> tuple[list[str], dict[str, str]] | None:
    """Return the arguments of a script with the places of its inputs, and the column of each input."""
    names = [column.name for column in table.columns if column is not table.gold]
    flags = list(_declared_arguments(tree))
    if flags:
        found = _match_columns([_parameter(flag) for flag in flags], table)
        used = [flag for flag in flags if _parameter(flag) in found]
        arguments = [
            part
            for flag in used
            for part in ([flag] if flag[0] == "-" else []) + [f"{{{_parameter(flag)}}}"]
        ]
        positional = [flag for flag in flags if flag[0] != "-"]
        if found or positional:
            return (arguments, found) if found and set(positional) <= set(used) else None
    places = {
        place
        for node in ast.walk(tree)
        if isinstance(node, ast.Subscript) and ast.unparse(node.value) in ("sys.argv", "argv")
        for place in _places(node.slice, len(names))
    } - {0}
    ports = {re.sub(r"\W+", "_", name.strip()): name for name in names}
    if places == set(range(1, len(names) + 1)):
        return [f"{{{port}}}" for port in ports], ports
    return ([], ports) if not places and _reads_json(tree) else None


def _places(part: ast.expr, last: int) -> Sequence[object]:
    """Return the arguments of a script that an index or a slice of its arguments means."""
    if not isinstance(part, ast.Slice):
        return [getattr(part, "value", 0)]
    start, end = (getattr(bound, "value", None) for bound in (part.lower, part.upper))
    return range(last + 1)[start if isinstance(start, int) else 0 : end]


def _names_read(tree: ast.Module, what: str) -> list[str]:
    """Return the variables that take the results of a call, or what is read from a file; "" for none."""
    names: dict[int, str] = {}
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign | ast.NamedExpr | ast.For):
            target = node.targets[0] if isinstance(node, ast.Assign) else node.target
            read = node.iter if isinstance(node, ast.For) else node.value
            names |= dict.fromkeys(map(id, ast.walk(read)), ast.unparse(target))
        if isinstance(node, ast.Call | ast.Attribute):
            read = node.func if isinstance(node, ast.Call) else node
            if ast.unparse(read) == what:
                found.append(node)
    found.sort(key=lambda node: (node.lineno, node.col_offset))
    return [names.get(id(node), "") for node in found]


def _reads_json(tree: ast.Module) -> bool:
    """Return whether a script parses what it reads from stdin as JSON."""
    names = {"sys.stdin", *_names_read(tree, "sys.stdin")}
    return any(
        isinstance(node, ast.Call)
        and ast.unparse(node.func).rpartition(".")[2] in ("load", "loads")
        and any(ast.unparse(inner) in names for each in node.args for inner in ast.walk(each))
        for node in ast.walk(tree)
    )


def _inputs_read(tree: ast.Module, table: DataTable) -> dict[str, str] | None:
    """Return the column of each text that a script reads by input(), or of the one on stdin."""
    names = list(dict.fromkeys(_names_read(tree, "input") or _names_read(tree, "sys.stdin")[:1]))
    found = _match_columns(names, table)
    if names and len(found) == len(names):
        return found
    columns = [column.name for column in table.columns if column is not table.gold]
    return (
        {re.sub(r"\W+", "_", columns[0]): columns[0]} if len(names) == len(columns) == 1 else None
    )


def _declared_arguments(tree: ast.Module) -> Iterator[str]:
    """Yield the arguments that a script declares to argparse or click; of an option its longest name."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and ast.unparse(node.func).endswith(ARGUMENTS):
            names = [
                n.value
                for n in node.args
                if isinstance(n, ast.Constant) and isinstance(n.value, str)
            ]
            options = [name for name in names if name[:1] == "-"]
            if names:
                yield max(options or names, key=len)


def _parameter(flag: str) -> str:
    return flag.lstrip("-").replace("-", "_")


# --- its prompts -------------------------------------------------------------------------------------


def _system(
    path: Path,
    entry: ScriptEntry,
    table: DataTable,
    options: ScriptOptions,
    server: Mapping[str, object],
) -> dict[str, object]:
    """Return the file of a script, as a tree, before its prompts are found."""
    from compound.yaml.text import Flow

    kinds = {column.name: column.type for column in table.columns}
    used = {port: kinds[column] for port, column in entry.columns.items()}
    output = table.output if table.output not in used else f"{table.output}_1"
    fields = {port: column for port, column in entry.columns.items() if port != column}
    fields |= {output: table.gold.name} if output != table.gold.name else {}
    source = {name: value for name, value in table.source.items() if name != "fields"}
    name = re.sub(r"\W+", "_", path.stem)
    lm = options.lm or KEPT_MODEL
    engines = (
        {} if options.lm else {"engines": {KEPT_MODEL: {"openai": Flow({"model": "", **server})}}}
    )
    return {
        "system": name if name[:1].isalpha() else f"script_{name}",
        **engines,
        "lm": lm,
        "inputs": Flow(used),
        "components": {
            AGENT: {
                "external_agent": dict(entry.agent),
                "in": Flow({port: f"${port}" for port in used}),
                "out": "Any",
            }
        },
        "outputs": Flow({output: f"${AGENT}"}),
        "data": Flow({**source, **({"fields": Flow(fields)} if fields else {})}),
        "metric": _metric(options.metric, path.parent, table, output),
        "optimize": Flow({"budget": Flow({"system_runs": BUDGET})}),
    }


def _metric(given: str | None, folder: Path, table: DataTable, output: str) -> object:
    """Return the entry of a metric: a function of the user, or one of this package."""
    from compound.yaml.text import Flow

    if given is not None and ":" in given:
        module, _, function = given.rpartition(":")
        if module.endswith(".py"):  # a file, from here or from the folder of the script
            place = os.path.relpath(module, folder) if os.path.exists(module) else module
            if (place := os.path.normpath(place)).startswith((os.pardir, os.sep)):
                raise CompoundError(
                    f"the metric's file {module} is not in {folder.absolute()}, the folder of the script",
                    hint="move it there, or name a module that Python finds: --metric module:function",
                )
            module = place.removesuffix(".py")
        module = module.replace("/", ".")
        return Flow({"custom": Flow({"call": f"{module}:{function}"})})
    return Flow({given or table.metric: Flow({"output": output, "gold": output})})


def _find_prompts(system: Mapping[str, object], out: Path, trust: Sequence[str]) -> Discovery:
    """Run the script on some train rows, and return the prompts in its requests."""
    from compound.api.discover import discover
    from compound.yaml import loads
    from compound.yaml.text import write

    program = loads(write(dict(system)), path=out, trust=trust)
    assert program.data is not None
    train = program.data.examples("train", list(program.system.inputs), limit=EXAMPLES)
    print(f"running {AGENT} on {len(train)} train rows to find its prompts", file=sys.stderr)
    (found,) = discover(program.system, train, program.find_engine)
    return found


def _require_requests(found: Discovery, path: Path, tree: ast.Module) -> None:
    """Raise if there is nothing to tune: the runs failed, or sent no request through the gateway."""
    if found.prompts and len(found.failed) < found.runs:
        return
    if found.usage.calls and len(found.failed) < found.runs:
        raise CompoundError(
            f"no text is shared by the requests of {path}, so that there is no prompt to tune"
        )
    own = ", ".join(
        f"line {node.value.lineno}"
        for node in ast.walk(tree)
        if isinstance(node, ast.keyword) and node.arg == "base_url"
    )
    failed = f"all {found.runs} runs of {path} failed"
    problem = failed if found.failed else f"{path} sent no request that could be recorded"
    if found.usage.calls or (found.failed and not own):
        raise CompoundError(problem, hint="the messages above say why")
    hint = (
        f"let the client read the address from OPENAI_BASE_URL: remove base_url ({own})"
        if own
        else "its client must call OpenAI's API and read the address from OPENAI_BASE_URL, as "
        "openai.OpenAI() does"
    )
    raise CompoundError(problem, hint=hint)


def _declare_output(
    system: dict[str, Any],
    found: Discovery,
    table: DataTable,
    metric: str | None,
    path: Path,
) -> object:
    """Return the type of what a script returns; the output is a field of it if a metric needs one."""
    from compound.yaml.text import Flow

    gold, column = next(iter(table.gold.texts), ""), sanitize_for_terminal(table.gold.name)
    print(f"it returned {_short(found)}; the column {column} has {gold!r:.100}")
    values: list[Any] = [value for result in found.results for value in result.values()]
    kind = _type_of(values)
    field = next((name for name in (table.gold.name, table.output) if _is_field(name, values)), "")
    if field and ":" not in (metric or ""):  # metrics of this package read a single value
        system["outputs"] = Flow(dict.fromkeys(found.results[0], f"${AGENT}.{field}"))
        return Flow({field: _type_of([value[field] for value in values])})
    if kind == "Any" and not metric:
        raise CompoundError(
            f"{path} returns {_short(found)}, which no metric of this package reads by default",
            hint="give --metric module:function, which reads outputs and returns a score",
        )
    return kind


def _is_field(name: str, values: Sequence[Any]) -> bool:
    is_in_all = all(isinstance(value, dict) and name in value for value in values)
    return bool(values) and is_in_all and name.isidentifier()


def _type_of(values: Sequence[object]) -> str:
    """Return the type of the results of a script, in a file.

    >>> _type_of(["a", "b"]), _type_of([1, 2.5]), _type_of([{"label": "a"}])
    ('str', 'float', 'Any')
    """
    kinds = {type(value).__name__ for value in values}
    kinds = {"float"} if kinds == {"int", "float"} else kinds
    return kinds.pop() if len(kinds) == 1 and kinds <= {"str", "int", "float", "bool"} else "Any"


def _short(found: Discovery) -> str:
    values = [value for result in found.results for value in result.values()]
    return f"{values[0]!r:.100}" if values else "nothing"


def _with_prompts(
    system: Mapping[str, object],
    prompts: Sequence[FoundPrompt],
    found: Discovery,
    options: ScriptOptions,
    server: Mapping[str, object],
) -> str:
    """Return the text of the file with the prompts to tune, and an engine for each of their models."""
    from compound.api.discover import prompts_tree
    from compound.yaml.text import Flow, write

    tree = dict(system)
    entries = prompts_tree(prompts)
    components = {AGENT: dict(tree["components"][AGENT])}  # type: ignore[index]
    most = max(LEAST_REQUESTS, 4 * -(-found.usage.calls // found.runs))
    agent = {**components[AGENT]["external_agent"], "prompts": entries, "max_requests": most}
    components[AGENT]["external_agent"] = agent
    tree["components"] = components
    counts = Counter[str]()
    for prompt in found.prompts:
        counts.update(dict.fromkeys(prompt.models[:1], prompt.requests))
    if options.lm is None and counts:
        names = {model: _engine_name(model) for model in counts}
        engines: dict[str, object] = {
            name: {"openai": Flow({"model": model, **server, **({} if server else _price(model))})}
            for model, name in names.items()
        }
        tree["lm"] = names[counts.most_common(1)[0][0]]
        mixed = [prompt for prompt in prompts if len(prompt.models) > 1]
        if len(counts) > 1 or mixed or found.other:  # other requests keep the model that they state
            engines[KEPT_MODEL] = {"openai": Flow({"model": "", **server})}
            agent["lm"] = KEPT_MODEL
            for prompt in prompts:
                if len(prompt.models) == 1:
                    entries[prompt.name] = {**entries[prompt.name], "lm": names[prompt.models[0]]}
        tree["engines"] = engines
    return write(tree)


def _engine_name(model: str) -> str:
    name = re.sub(r"\W+", "_", model).strip("_")
    return name if name[:1].isalpha() else f"model_{name}"


def _price(model: str) -> dict[str, object]:
    """Return the price of a model of OpenAI, if litellm is installed and lists it."""
    from compound.engines.litellm import listed_cost

    each = [listed_cost(model, *counts) for counts in ((10**6, 0), (0, 10**6))]
    return {} if None in each else {"price": [round(dollars or 0.0, 6) for dollars in each]}
