"""`compound optimize script.py`: prompts of a plain script are found, tuned, and written as a diff."""

from __future__ import annotations

import ast
import csv
import json
import re
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from compound.cli import app
from compound.cli.script import find_entry, write_source_diff
from compound.cli.tables import read_table
from compound.core.errors import CompoundError
from compound.yaml import load
from fake_openai import FakeOpenAI, chat, fake_openai

TRIAGE = '''
"""Answers support questions in three steps."""

import openai

client = openai.OpenAI(max_retries=0)
STYLE = "You are a support agent of {product}. Answer briefly."


def ask(system, user, model="gpt-4o-mini"):
    messages = [{"role": "system", "content": system}, {"role": "user", "content": user}]
    made = client.chat.completions.create(model=model, messages=messages)
    return made.choices[0].message.content


def answer(question: str, product: str) -> str:
    topic = ask("You are a classifier. Name the topic of the question.", question)
    draft = ask(STYLE.format(product=product), f"Topic: {topic}\\nQuestion: {question}")
    return ask("You are an editor. Shorten the answer to one word.", draft, model="gpt-4.1-mini")


if __name__ == "__main__":
    print(answer("my price does not work", "Alpha"))
'''
SCORE = """
def score(outputs, example):
    return float(outputs["answer"] == example.gold["answer"])
"""
BETTER = 'You are an editor. Keep the "topic" only.'


def reply(path: str, request: dict[str, Any]) -> tuple[int, str, bytes]:
    system, user = request["messages"][0]["content"], request["messages"][-1]["content"]
    if "<prompt>" in user:
        text = f"<prompt>{BETTER}</prompt>"
    elif "classifier" in system:
        found = re.search(r"my (\w+) does", user)
        text = found[1] if found else "unknown"
    elif "support agent" in system:
        text = "The issue: " + user.partition("Topic: ")[2].partition("\n")[0]
    else:
        text = user.rpartition(": ")[2] if system == BETTER else "ok"
    return 200, "application/json", chat({"role": "assistant", "content": text})


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeOpenAI]:
    with fake_openai(reply) as fake:
        monkeypatch.setenv("OPENAI_BASE_URL", fake.url)
        monkeypatch.setenv("OPENAI_API_KEY", "sk-test")
        yield fake


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "triage.py").write_text(TRIAGE)
    (tmp_path / "metrics.py").write_text(SCORE)
    topics = ["billing", "network", "login", "price"]
    with (tmp_path / "rows.csv").open("w", newline="") as file:
        rows = csv.writer(file)
        rows.writerow(["id", "question", "product", "answer"])
        for i in range(80):
            question = f"Customer {i}: my {topics[i % 4]} does not work, case {7 * i}"
            rows.writerow([i, question, ("Alpha", "Beta")[i % 2], topics[i % 4]])
    monkeypatch.chdir(tmp_path)
    return tmp_path


def run(*arguments: str, command: str = "optimize") -> Any:
    found = CliRunner().invoke(app, [command, *arguments])
    if found.exception is not None and not isinstance(found.exception, SystemExit):
        raise found.exception
    return found


def optimize(script: str, *arguments: str) -> Any:
    return run(script, "--data", "rows.csv", "--metric", "metrics.py:score", "--yes", *arguments)


def test_the_diff_of_a_script_sends_the_prompts_that_were_measured(
    folder: Path, server: FakeOpenAI
) -> None:
    found = optimize("triage.py", "--set", "optimize.budget.system_runs=150", "--quiet", "--json")
    assert "classifier: 8 requests in 8 runs" in found.stderr
    values = json.loads(found.stdout)["configuration"]
    assert values["editor.system"] == BETTER
    assert (folder / "triage.py").read_text() == TRIAGE
    models = {request["model"] for request in server.requests if "tools" not in request}
    assert models == {"gpt-4o-mini", "gpt-4.1-mini"}
    program = load(folder / "triage.yaml", trust=[f"OPENAI_API_KEY@{server.url[:-3]}"])
    assert sorted(program.system.parameters) == [
        "classifier.system",
        "editor.system",
        "support_agent.prompt",
        "support_agent.system",
    ]
    path = folder / "runs/triage/prompts.diff"
    diff = path.read_text()
    assert write_source_diff(program.system.bind(values), path.parent) == [
        f"prompts as a diff: {path}",
        f"  apply it by: patch -p1 -d {folder} < {path}",
    ]
    assert path.read_text() == diff
    assert f"+    return ask({json.dumps(BETTER)}, draft" in diff
    subprocess.run(["patch", "-p1", "--quiet"], input=diff.encode(), check=True, timeout=60)
    server.requests.clear()
    subprocess.run([sys.executable, "triage.py"], check=True, timeout=60)
    assert server.requests[-1]["messages"][0]["content"] == BETTER
    # the same options continue with the file
    again = optimize("triage.py", "--new", "--dry-run")
    assert "using triage.yaml" in again.stderr


@pytest.mark.filterwarnings("ignore:.*the program wrote nothing")
def test_a_script_that_reads_its_table_runs_on_one_row_at_a_time(
    folder: Path, server: FakeOpenAI
) -> None:
    source = """
import csv, pathlib
import openai

client = openai.OpenAI(max_retries=0)
with open(pathlib.Path(__file__).parent / "rows.csv") as file:
    rows = list(csv.DictReader(file))
right = 0
for row in rows:
    prompt = "You are a classifier."
    prompt += " Name the topic."
    messages = [{"role": "system", "content": prompt}, {"role": "user", "content": row["question"]}]
    made = client.chat.completions.create(model="m", messages=messages)
    row["found"] = made.choices[0].message.content
    right += row["found"] == row["answer"]
    print(row["id"], row["found"])
with open("found.csv", "w") as file:
    csv.DictWriter(file, rows[0]).writerows(rows)
print(open("found.csv").read(), right / len(rows))
"""
    (folder / "loop.py").write_text(source)
    (folder / "found.csv").write_text("kept")
    common = ("loop.py", "--data", "rows.csv", "--metric", "metrics.py:score", "--yes")
    found = run(*common, command="init")
    assert "classifier: 8 requests in 8 runs" in found.stdout
    assert "it returned 'billing'" in found.stdout  # the last answer, not what it printed
    sent = {request["messages"][1]["content"] for request in server.requests}
    assert len(sent) == 8
    assert (folder / "found.csv").read_text() == "kept"
    (folder / "loop.py").write_text(
        source.replace("csv.DictReader(file)", "csv.DictReader(open(os.open('rows.csv', 0)))")
        .replace("import csv", "import csv, os")
        .replace("in rows:", "in rows[:1]:")
        .replace('open(pathlib.Path(__file__).parent / "rows.csv")', 'open("metrics.py")')
    )
    (folder / "loop.yaml").unlink()
    failed = CliRunner().invoke(app, ["init", *common])
    assert "all 8 runs of loop.py failed" in str(failed.exception)
    assert "does not open its table by open()" in failed.output


PROGRAMS = {
    "argv": ("question, product = sys.argv[1:3]", "print(text)"),
    "argparse": (
        "parser = argparse.ArgumentParser()\nparser.add_argument('question')\n"
        "parser.add_argument('-p', '--product')\nparser.add_argument('--verbose', action='store_true')\n"
        "given = parser.parse_args()\nquestion, product = given.question, given.product",
        "print(text)",
    ),
    "click": (
        "import click\n@click.command()\n@click.argument('question')\n"
        "@click.option('--product', '-p', 'other', prompt=True)\n"
        "def main(question, other):\n    return question, other\n"
        "question, product = main(standalone_mode=False)",
        "click.echo(text)",
    ),
    "stdin": (
        "read = sys.stdin.read()\ngiven = json.loads(read)\n"
        "question, product = given['question'], given['product']",
        "print(json.dumps({'output': text}))",
    ),
    "input": (
        "parser = argparse.ArgumentParser()\nparser.add_argument('--verbose')\nparser.parse_args()\n"
        "product: str\nproduct = input('Product? ')\n"
        "while question := input('Question? ').strip():",
        "print(text)",
    ),
}


@pytest.mark.parametrize("form", PROGRAMS)
def test_a_script_without_a_function_runs_as_a_program(
    folder: Path, server: FakeOpenAI, form: str
) -> None:
    first, last = PROGRAMS[form]
    source = f"""import argparse, json, os, sys, urllib.request
{first}
system = f"You are a support agent of {{product}}. Answer briefly."
messages = [{{"role": "system", "content": system}}, {{"role": "user", "content": question}}]
key = {{"Authorization": "Bearer " + os.environ["OPENAI_API_KEY"], "Content-Type": "application/json"}}
address = os.environ["OPENAI_BASE_URL"] + "/chat/completions"
body = json.dumps({{"model": "gpt-4o-mini", "messages": messages}}).encode()
with urllib.request.urlopen(urllib.request.Request(address, body, key)) as answer:
    text = json.load(answer)["choices"][0]["message"]["content"]
{last}
"""
    if form == "input":  # a chat
        head, last_line, rest = source.partition(":\nsystem = ")
        source = head + last_line.replace("\n", "\n    ") + rest.replace("\n", "\n    ")
    (folder / "script-1.py").write_text(source)
    options = ("--data", "rows.csv", "--metric", str(folder / "metrics.py:score"), "--yes")
    found = run("script-1.py", *options, command="init")
    assert "now run: compound optimize script-1.yaml --dry-run" in found.stdout
    assert "support_agent: 8 requests in 8 runs" in found.stdout
    assert "{{text}}. Answer briefly." in (folder / "script-1.yaml").read_text()
    assert "'; the column answer has 'billing'" in found.stdout
    sent = {request["messages"][0]["content"] for request in server.requests}
    assert sent == {f"You are a support agent of {x}. Answer briefly." for x in ("Alpha", "Beta")}


def test_a_text_on_stdin_is_no_json_if_the_script_reads_none(folder: Path) -> None:
    (folder / "two.csv").write_text("Ticket text,label\n" + "".join(f"t{i},a\n" for i in range(20)))
    table = read_table(folder / "two.csv", "two.csv")
    source = "import sys\nfor line in sys.stdin:\n    print(line.strip(), input())\n"
    entry = find_entry(Path("m.py"), ast.parse(source), None, table)
    (folder / "m.py").write_text(source)
    command = entry.agent["command"]
    assert isinstance(command, list)
    given = json.dumps({"Ticket_text": "a\n日本"})
    done = subprocess.run(command, input=given, capture_output=True, text=True, check=True)
    assert (done.stdout, entry.columns) == ("a a 日本\n", {"Ticket_text": "Ticket text"})
    json_source = "import json, sys\nfor line in sys.stdin:\n    row = json.loads(line)\n"
    entry = find_entry(Path("m.py"), ast.parse(json_source), None, table)
    assert entry.agent["command"] == [command[0], "m.py"]


ONE = {"question": "question", "product": "product"}
ENTRIES: Mapping[str, tuple[str, str | None, object]] = {
    "one that fits": ("def f(question, product): return 1", None, ("m:f", ONE)),
    "the one that the others do not call": (
        "def g(question): return 1\ndef f(question, product): return g(question)",
        None,
        ("m:f", ONE),
    ),
    "named": (
        "def g(question): return 1\ndef f(product) -> int: return 2",
        "f",
        ("m:f", {"product": "product"}),
    ),
    "optional parameters": (
        "async def f(Question, *, top=3) -> dict[str, str]: return {}",
        None,
        ("m:f", {"Question": "question"}),
    ),
    "a command of typer": (
        "@app.command()\ndef f(question, product): return 1",
        None,
        ("m:f", ONE),
    ),
    "nothing returned": (
        "def f(question): print(question)",
        None,
        "no function, argument or input\\(\\) of the script",
    ),
    "two that fit": (
        "def f(question): return 1\ndef g(product): return 2",
        None,
        "several functions fit the columns of the data: f, g",
    ),
    "unknown": ("def f(question): return 1", "g", "no function 'g'"),
    "other parameters": ("def f(query): return 1", "f", "parameters of f are not columns"),
}


@pytest.mark.parametrize("case", ENTRIES)
def test_the_function_is_the_one_whose_parameters_are_columns(folder: Path, case: str) -> None:
    source, function, expected = ENTRIES[case]
    table = read_table(folder / "rows.csv", "rows.csv")

    def found() -> object:
        entry = find_entry(Path("m.py"), ast.parse(source), function, table)
        return entry.agent["call"], dict(entry.columns)

    if isinstance(expected, str):
        with pytest.raises(CompoundError, match=expected):
            found()
    else:
        assert found() == expected


def test_the_only_input_may_have_another_name(folder: Path) -> None:
    (folder / "two.csv").write_text("Ticket text,label\n" + "".join(f"t{i},a\n" for i in range(20)))
    table = read_table(folder / "two.csv", "two.csv")
    entry = find_entry(Path("m.py"), ast.parse("def f(query): return 1"), None, table)
    assert entry.columns == {"query": "Ticket text"}


def write(name: str, text: str) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        (folder / name).write_text(text)

    return change


OWN_ADDRESS = TRIAGE.replace("max_retries=0", 'base_url="http://127.0.0.1:9/v1", max_retries=0')
FAULTS: Mapping[str, tuple[Callable[[Path], None], list[str], str]] = {
    "without data": (lambda folder: None, ["triage.py"], "a script needs --data"),
    "of a file": (
        write("system.yaml", "system: a"),
        ["system.yaml", "--data", "rows.csv"],
        "are for scripts",
    ),
    "no script": (lambda folder: None, ["other.py", "--data", "rows.csv"], "no such file"),
    "no Python": (write("triage.py", "def"), ["triage.py", "--data", "rows.csv"], "not Python"),
    "other file in the way": (
        write("triage.yaml", "system: mine"),
        ["triage.py", "--data", "rows.csv"],
        "these options did not write it",
    ),
    "own address": (
        write("triage.py", OWN_ADDRESS),
        ["triage.py", "--data", "rows.csv"],
        "remove base_url \\(line 6\\)",
    ),
    "no request": (
        write("triage.py", "def f(question):\n    return question"),
        ["triage.py", "--data", "rows.csv"],
        "sent no request that could be recorded",
    ),
    "runs that fail after a request": (
        write("triage.py", TRIAGE.replace('return ask("You are an editor', 'return 1 / ask("You')),
        ["triage.py", "--data", "rows.csv", "--yes"],
        "all 8 runs of triage.py failed",
    ),
    "metric elsewhere": (
        lambda folder: None,
        ["triage.py", "--data", "rows.csv", "--metric", f"{__file__}:score"],
        "test_script.py is not in .*, the folder of the script",
    ),
    "not confirmed": (
        lambda folder: None,
        ["triage.py", "--data", "rows.csv"],
        "no prompt of triage.py was chosen",
    ),
    "dry run": (
        lambda folder: None,
        ["triage.py", "--data", "rows.csv", "--dry-run"],
        "the prompts of triage.py are not known yet",
    ),
    "not allowed": (
        lambda folder: None,
        ["triage.py", "--data", "rows.csv", "--no-import"],
        "--no-import does not allow to run triage.py",
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_faults_are_named_and_nothing_is_written(
    folder: Path, server: FakeOpenAI, fault: str
) -> None:
    change, arguments, message = FAULTS[fault]
    change(folder)
    before = {path.name for path in folder.iterdir() if path.suffix in (".py", ".yaml", ".csv")}
    with pytest.raises(CompoundError, match=message):
        run(*arguments)
    after = {path.name for path in folder.iterdir() if path.suffix in (".py", ".yaml", ".csv")}
    assert after == before


def test_texts_of_the_data_and_of_requests_control_no_terminal(
    folder: Path, server: FakeOpenAI
) -> None:
    rows = "".join(f"my price does,Alpha{n},a\n" for n in range(20))
    (folder / "odd.csv").write_text(f"question,product,ans\x1b[31mwer\n{rows}")
    source = (folder / "triage.py").read_text()
    (folder / "triage.py").write_text(source.replace("Answer briefly.", "Answer \u202e briefly."))
    found = run(
        "triage.py", "--data", "odd.csv", "--metric", "metrics:score", "--yes", command="init"
    )
    assert "Answer \ufffd briefly." in found.stdout
    assert not re.search("[\x1b\u202e]", found.stdout)


def test_a_model_that_answers_nothing_proposes_nothing(
    folder: Path, server: FakeOpenAI, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(path: str, request: dict[str, Any]) -> tuple[int, str, bytes]:
        if request["model"] == "broken":
            return 404, "application/json", b'{"error": {"message": "no such model"}}'
        return reply(path, request)

    monkeypatch.setattr(server, "_script", broken)
    source = TRIAGE.replace("    made = client", "    try:\n        made = client", 1)
    source = source.replace("model=model, messages=messages)", "model='broken', messages=messages)")
    fallback = "    except openai.APIError:\n        made = client.chat.completions.create(model=model, messages=messages)\n"
    source = source.replace("    return made", f"{fallback}    return made")
    (folder / "triage.py").write_text(source)
    run("triage.py", "--data", "rows.csv", "--metric", "metrics:score", "--yes", command="init")
    text = (folder / "triage.yaml").read_text()
    assert "\nlm: gpt_4o_mini\n" in text
    assert "lm: models_of_the_script\n" in text


def test_a_metric_by_name_reads_the_field_named_like_the_column(
    folder: Path, server: FakeOpenAI
) -> None:
    source = TRIAGE.replace(
        'return ask("You are an editor', 'return dict(n=1, answer=ask("You are an editor'
    )
    (folder / "triage.py").write_text(
        source.replace('model="gpt-4.1-mini")', 'model="gpt-4.1-mini"))')
    )
    common = ("triage.py", "--data", "rows.csv", "--yes")
    run(*common, "--metric", "accuracy", command="init")
    text = (folder / "triage.yaml").read_text()
    assert "    out: {answer: str}\noutputs: {answer: $script.answer}\n" in text
    budget = "optimize.budget.system_runs=150"
    found = run(*common, "--metric", "accuracy", "--set", budget, "--quiet", "--json")
    assert json.loads(found.stdout)["configuration"]["editor.system"] == BETTER
    (folder / "triage.yaml").unlink()
    run(*common, "--metric", "metrics:score", command="init")  # a function may read all of it
    assert "    out: Any\noutputs: {answer: $script}\n" in (folder / "triage.yaml").read_text()
