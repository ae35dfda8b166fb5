"""Diffs of agents' files: applied by ``patch``, the files make the tuned texts."""

from __future__ import annotations

import importlib.util
import json
import shutil
import subprocess
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import yaml

import compound as cp
from compound.components.gateway.templates import fill
from compound.interchange.source_diff import SourceDiff, source_diff

LONG = ("Use only the passages. " * 12).strip()
SOURCES = {
    "constant": ('def text(place, day):\n    return "You are a geographer. Be kind."\n', []),
    "f-string": (
        "def text(place, day):\n    return f'You are a geographer of {place}. Be kind.'\n",
        ["place"],
    ),
    "module level": (
        'PROMPT = """You are a geographer of {place}.\nToday is {day:>3}. {{JSON}}"""\n\n\n'
        "def text(place, day):\n    return PROMPT.format(day=day, place=place)\n",
        ["place", "day"],
    ),
    "unnamed fields": (
        "def text(place, day):\n    return 'You are a geographer of {}. Today is {}.'.format(place, day)\n",
        ["place", "day"],
    ),
    "percent": (
        "def text(place, day):\n"
        "    return 'You are a geographer of %(place)s at 100%%.' % {'place': place}\n",
        ["place"],
    ),
    "dollar": (
        "import string\n\nPROMPT = string.Template('You are a geographer of $place for $$5.')\n\n\n"
        "def text(place, day):\n    return PROMPT.substitute(place=place, day=day)\n",
        ["place"],
    ),
    "sum": (
        "def text(place, day):\n    return 'You are a geographer of ' + place + '.\\nBe kind.'\n",
        ["place"],
    ),
    "appended": (
        "def text(place, day):\n    found: str = 'You are a geographer'\n    found += f' of {place}. '\n"
        "    found += 'Be kind.'\n    return found\n",
        ["place"],
    ),
    "implicit concatenation": (
        'def text(place, day):\n    return (\n        "You are a geographer "\n'
        '        f"of {place}. "  # a comment\n        f"Today is {day!s:>3}."\n    )\n',
        ["place", "day"],
    ),
    "indented": (
        "import textwrap\n\n\ndef text(place, day):\n    found = f'''\n        You are a geographer of\n"
        "        {place}.\n\n        Be kind.\n    '''\n    return textwrap.dedent(found).strip()\n",
        ["place"],
    ),
    "indented, with its ends": (
        'from textwrap import dedent\n\n\ndef text(place, day):\n    return dedent("""\n'
        '        You are a geographer.\n          - Be kind.\n    """)\n',
        [],
    ),
    "indented after a backslash": (
        'import textwrap\n\nTEXT = textwrap.dedent("""\\\n    You are a geographer.\n    Be kind.\n""")\n'
        "\n\ndef text(place, day):\n    return TEXT\n",
        [],
    ),
    "named constants": (
        "ROLE = 'You are a geographer.'\nRULES = ' Be kind.' ' Be short.'\nBOTH = ROLE + RULES\n\n\n"
        "def text(place, day):\n    return BOTH + f'\\n{ROLE}\\n' + 'Place: ' + place\n",
        ["place"],
    ),
    "a joined list": (
        "ROLE = 'You are a geographer.'\n\n\ndef text(place, day):\n"
        "    return '\\n\\n'.join([ROLE, f'Place: {place}', 'Day: ' + day])\n",
        ["place", "day"],
    ),
    "a named constant alone": (
        "ROLE = 'You are a geographer.'\n\n\ndef text(place, day):\n    return ROLE + place\n",
        ["place"],
    ),
    "a parameter with the name of a constant": (
        "def text(place, day):\n    return 'You are a geographer of ' + place\n\n\n"
        "if __name__ == '__main__':\n    place = 'Peru'\n    print(text(place, ''))\n",
        ["place"],
    ),
    "an attribute with the name of a constant": (
        "import types\n\nplace = 'Peru'\n\n\ndef text(*values):\n"
        "    row = types.SimpleNamespace(**dict(zip(['place', 'day'], values)))\n"
        "    return f'You are a geographer of {row.place}.'\n",
        ["place"],
    ),
    "brackets": (
        "PROMPT = (\n    'You are a geographer. '\n    'Be kind. '\n)\n\n\n"
        "def text(place, day):\n    return str('Hello! ' + PROMPT)\n",
        [],
    ),
    "carriage returns": (
        '\ufeffPROMPT = "You are a geographer. Be kind."\r\n\r\n\r\ndef text(place, day):\r\n    return PROMPT',
        [],
    ),
    "other ends of lines": (
        '"""\u2028"""\n\f\nOTHER = "\x1c\u0085"\n\f\nPROMPT = "You are a geographer. Be kind."; x = 1\n\f\n'
        "def text(place, day):\n    return PROMPT\n",
        [],
    ),
    "wide characters": (
        "def text(place, day):\n    return '日本', f'地理学者として、{place}について答えてください。'\n",
        ["place"],
    ),
}
NEW = [
    "Be brief.",
    'She said: "a\\b"\n\n\n\'\'\'"""{x} %s $y {{z}} \u2028é\x07\t' + LONG,
    LONG + '"',
]


def imported(folder: Path, name: str = "agent") -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, folder / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    source = (folder / f"{name}.py").read_bytes()
    exec(compile(source, name, "exec"), module.__dict__)  # no cached bytecode
    return module


def text(folder: Path, place: str, day: str) -> str:
    found = imported(folder).text(place, day)
    return found if isinstance(found, str) else found[-1]


def diff_of(folder: Path, sent: str, new: str) -> SourceDiff:
    prompt = cp.components.AgentPrompt("p", match={"system": sent}, system=cp.Text(new))
    agent = cp.components.ExternalAgent("a", call="agent:text", prompts=[prompt], folder=folder)
    system = cp.System("qa", {"answer": agent(question=cp.Input("question"))}, lm="lm")
    (found,) = source_diff(system)
    return found


def apply(found: SourceDiff) -> None:
    command = ["patch", "-p1", "--binary", "--quiet", "-d", str(found.folder)]
    change = found.text.encode(errors="surrogateescape")
    subprocess.run(command, input=change, check=True, timeout=60)


@pytest.mark.skipif(shutil.which("patch") is None, reason="patch is not installed")
@pytest.mark.parametrize("new", NEW)
@pytest.mark.parametrize("form", SOURCES)
def test_the_patched_source_makes_the_tuned_text(tmp_path: Path, form: str, new: str) -> None:
    source, names = SOURCES[form]
    (tmp_path / "agent.py").write_bytes(source.encode())
    sent = text(tmp_path, "{{place}}", "{{day}}")
    values = {"place": "Peru", "day": "2026-01-01"}
    tuned = "".join(f"{{{{{name}}}}}, " for name in names) + new
    found = diff_of(tmp_path, sent, tuned)
    assert not found.notes
    assert (tmp_path / "agent.py").read_bytes() == source.encode()
    apply(found)
    assert text(tmp_path, **values) == fill(tuned, {name: values[name] for name in names})


@pytest.mark.skipif(shutil.which("patch") is None, reason="patch is not installed")
def test_values_without_a_word_between_them_have_one_placeholder(tmp_path: Path) -> None:
    (tmp_path / "agent.py").write_text(
        "def text(place, day):\n    return f'You are a geographer of {place}:\\n{day}'\n"
    )
    found = diff_of(tmp_path, "You are a geographer of {{place}}", "Geography of {{place}}.")
    assert not found.notes
    apply(found)
    assert text(tmp_path, "Peru", "2026") == "Geography of Peru:\n2026."


@pytest.mark.skipif(shutil.which("patch") is None, reason="patch is not installed")
@pytest.mark.parametrize(
    ("template", "made"),
    [
        (
            "Answer about {place}.\n\nUse {{}}.\n",
            "(here / 'p.txt').read_text().format(place=place)",
        ),
        (
            "Answer about {{ place }}.\n",
            "(here / 'p.txt').read_text().replace('{{ place }}', place)",
        ),
    ],
)
def test_the_text_may_be_in_a_file_of_its_own(tmp_path: Path, template: str, made: str) -> None:
    (tmp_path / "p.txt").write_text(template, newline="")
    source = (
        f"import pathlib\n\nhere = pathlib.Path({str(tmp_path)!r})\n\n\ndef text(place, day):\n"
    )
    (tmp_path / "agent.py").write_text(f"{source}    return {made}.strip()\n")
    sent = text(tmp_path, "{{place}}", "")
    found = diff_of(tmp_path, sent, "In {{place}} {x}: be\u2028--- a/b brief.\nAlways.")
    assert not found.notes
    apply(found)
    assert text(tmp_path, "Peru", "") == "In Peru {x}: be\u2028--- a/b brief.\nAlways."
    assert (tmp_path / "p.txt").read_text().endswith("Always.\n")


@pytest.mark.parametrize(
    ("source", "note"),
    [
        (
            "text = ' '.join(found := ['You are a geographer.', 'Be kind.'])",
            "no string in the agent's files has the original text; it is put together from parts in "
            "agent.py:1",
        ),
        (
            "if a:\n    x = 'You are a geographer.'\nelse:\n    x += ' Be kind.'",
            "parts in agent.py:2, agent.py:4",
        ),
        ("a = 'You are a geographer. Be kind.'\nb = f'{a} Be kind.'", ""),
        (
            "a = f'You are a geographer. {b}'\nc = f'You are a geographer. {d}'",
            "several strings could be its origin",
        ),
        ("text = 'You are a {}. Be {}.'.format(role, how)", "placeholders have no names"),
        ("text = f'You are a {role}. Be {how}.'", "does not use {role}, {how}, the same"),
    ],
)
def test_what_a_diff_cannot_express_is_named(tmp_path: Path, source: str, note: str) -> None:
    (tmp_path / "agent.py").write_text(source)
    found = diff_of(tmp_path, "You are a geographer. Be kind.", "Name the kind.")
    assert note in "".join(found.notes)
    assert bool(found.text) == (not note or "does not use" in note)


@pytest.mark.parametrize(
    ("source", "note"),
    [
        (
            'return"You are a geographer of "+x',
            "agent.py cannot be changed: the result would be no",
        ),
        ("return f'''You are a geographer of {d[\"it's\"]}'''", "an f-string cannot contain"),
    ],
)
def test_what_would_not_be_python_is_left_out(tmp_path: Path, source: str, note: str) -> None:
    (tmp_path / "agent.py").write_text(f"def f(x, d):\n    {source}\n")
    found = diff_of(tmp_path, "You are a geographer of {{x}}", "Geography of {{x}}")
    assert not found.text
    assert note in "".join(found.notes)


def test_links_hidden_folders_and_docstrings_are_no_source(tmp_path: Path) -> None:
    own, other = tmp_path / "own", tmp_path / "other.py"
    (own / ".venv").mkdir(parents=True)
    prompt = "You are a geographer. Be kind."
    other.write_text(f"text = {prompt!r}\n")
    (own / "link.py").symlink_to(other)
    (own / ".venv" / "copy.py").write_text(f"text = {prompt!r}\n")
    (own / "agent.py").write_text(f'def text():\n    """{prompt}"""\n    return {prompt!r}\n')
    found = diff_of(own, prompt, "Be brief.")
    assert [line for line in found.text.splitlines() if line[:1] == "+"][1:] == [
        '+    return "Be brief."'
    ]


FILES = {
    "with its end": ("p.txt", "You are\r\na geographer.\r\n", ""),
    "without its end": ("p.md", "\n You are a geographer.\n", ".strip()"),
    "a block": (
        "p.yaml",
        "# c\na:\n  - b: |\n      You are\n\n      Peru.\n\n  - 1\n",
        "['a'][0]['b']",
    ),
    "a folded block": ("p.yml", "a: [1, {b: 2}]\nb: >-\n  You are\n  a geographer.\n", "['b']"),
    "a block with CRLF": ("p.yaml", "a:\r\n  b: |+\r\n    You are kind.\r\nc: x\r\n", "['a']['b']"),
    "a quoted text": ("p.yaml", "a: {b: 'You are a ''geographer''.', c: d} # e\n", "['a']['b']"),
    "a plain text": ("p.yaml", "\ufeffa: You are a geographer.\nb: &x c\n", "['a']"),
    "JSON": ("p.json", '{\n\t"a": ["You are\\na \\u00e9", {"b": null}]\n}', "['a'][0]"),
}


@pytest.mark.skipif(shutil.which("patch") is None, reason="patch is not installed")
@pytest.mark.parametrize(
    "new", ["Be brief.", 'In {x}:\n - "a"\n\n   b: é\n', " x\n\u2028\t'\U0001f600\n\n"]
)
@pytest.mark.parametrize("form", FILES)
def test_a_file_beside_the_agent_makes_the_tuned_text(tmp_path: Path, form: str, new: str) -> None:
    name, content, place = FILES[form]
    path = tmp_path / name
    path.write_bytes(content.encode())
    new = new.strip() if place == ".strip()" else new

    def sent() -> object:
        read = path.read_text(encoding="utf-8-sig")
        if path.suffix in (".txt", ".md"):
            return eval(f"read{place}", {"read": read})
        load = json.loads if path.suffix == ".json" else yaml.safe_load
        return eval(f"tree{place}", {"tree": load(read)})

    # files that are no prompts, and one of this package
    (tmp_path / "agent.yaml").write_text(
        f"system: s\ncomponents:\n  a: {{external_agent: {{prompts: {{p: {{system: {{tune: {json.dumps(sent())}}}}}}}}}}}\n"
    )
    (tmp_path / "broken.yaml").write_text("a: [")
    (tmp_path / "rows.json").write_text("[]")
    found = diff_of(tmp_path, str(sent()), new)
    assert not found.notes
    apply(found)
    assert sent() == new
    assert found.text.count("+++ ") == 1


def test_files_without_the_words_of_a_prompt_are_not_parsed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A folder may hold thousands of rows, and parsing takes long; a value may replace some words."""
    prompt = "Answer for a geographer in {language}, from the year {year}."
    (tmp_path / "p.yaml").write_text(f"a: {prompt}\n")
    for number in range(3):
        (tmp_path / f"rows{number}.json").write_text(json.dumps([{"question": "Where is Lima?"}]))
    parsed: list[str] = []
    compose = yaml.compose_all

    def counted(text: str, **how: Any) -> Any:
        parsed.append(text)
        return compose(text, **how)

    monkeypatch.setattr(yaml, "compose_all", counted)
    sent = prompt.format(language="Brazilian Portuguese", year="2026")
    found = diff_of(tmp_path, sent, f"{sent} Be brief.")
    assert parsed == [f"a: {prompt}\n"]
    assert "no string" not in " ".join(found.notes)


@pytest.mark.skipif(shutil.which("patch") is None, reason="patch is not installed")
def test_a_source_may_have_another_encoding(tmp_path: Path) -> None:
    path = tmp_path / "agent.py"
    source = "# -*- coding: latin-1 -*-\ndef text(place, day):\n    return 'Sei präzise.'\n"
    path.write_bytes(source.encode("latin-1"))
    apply(diff_of(tmp_path, text(tmp_path, "", ""), "Sei höflich."))
    assert text(tmp_path, "", "") == "Sei höflich."
    found = diff_of(tmp_path, "Sei höflich.", "日本")
    assert found.notes == ("agent.py cannot be changed: its encoding iso-8859-1 has no '日'",)
    (tmp_path / "p.txt").write_bytes("Sei “präzise”.".encode("cp1252"))
    apply(diff_of(tmp_path, "Sei “präzise”.", "Sei „klar“."))
    assert (tmp_path / "p.txt").read_text("cp1252") == "Sei „klar“."


def test_a_prompt_that_keeps_its_text_but_shares_a_string_is_named(tmp_path: Path) -> None:
    (tmp_path / "agent.py").write_text("SYSTEM = 'You are kind.'\n")
    kept = cp.components.AgentPrompt(
        "a", match={"system": "You are kind.", "user": "Draft: {{x}}"}, system="You are kind."
    )
    new = cp.components.AgentPrompt(
        "b", match={"system": "You are kind."}, system=cp.Text("Be brief.")
    )
    agent = cp.components.ExternalAgent("e", call="agent:f", prompts=[kept, new], folder=tmp_path)
    system = cp.System("qa", {"answer": agent(question=cp.Input("question"))}, lm="lm")
    (found,) = source_diff(system)
    assert '+SYSTEM = "Be brief."' in found.text
    assert found.notes == (
        "a.system: it keeps its text, but the diff changes the string in agent.py, its origin",
    )
