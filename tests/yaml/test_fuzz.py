"""Ten thousand damaged files: each loads or is refused with places, and nothing else ever happens."""

from __future__ import annotations

import os
import random
import re
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from compound.core.errors import SpecError
from compound.yaml import loads

FILES = Path(__file__).parents[1] / "files" / "spec"
GOOD = [
    (FILES / "small.yaml").read_text("utf-8"),
    """\
system: looped
lm: local/tiny
engines: {tiny: {transformers: {model: smollm2}}}
inputs: {question: str, rows: "list[dict]"}
components:
  ranker: {retriever: {index: passages, k: {int: [1, 9]}}, in: {query: $question, passages: $rows}}
  again:
    loop:
      body:
        inputs: {state: str}
        components: {say: {llm: {demos: {tune: 2}, weights: {lora: {rank: 2}}}, in: {state: $state}, when: {$state: go}}}
        outputs: {state: $say}
      carry: {state: state}
    in: {state: $question}
  all: {function: {call: "parts:shout"}, in: {text: $again}}
  last: {llm: {prompt: Go}, in: {a: $all, b: $ranker, c: $hop}, out: {x: bool, y: "one of a, b"}}
nodes: {hop: {use: all, in: {text: $question}, when: {$question: go}}}
outputs: {x: $last.x, y: $last.y}
data: {path: rows.jsonl, split_by: {train: 0.5, valid: 0.5}}
""",
]
TOKENS: list[str] = [
    *"{}[],:#&*!|>'\"%@`?-$~ \n\t",
    ": ",
    "- ",
    "{}",
    "[]",
    "$x",
    "null",
    "true",
    "on",
    "1e-6",
    ".inf",
    ".nan",
    "-1",
    "1e999",
    "0x1F",
    "9" * 200,
    "&a ",
    "*a",
    "!!python/object/apply:os.system ",
    "!x ",
    "<<: ",
    "---\n",
    "...\n",
    "? ",
    "%YAML 1.1\n",
    "tune",
    "choice",
    "int",
    "value",
    "in",
    "when",
    "use",
    "$question",
    "$say.output",
    "\\ud800",
    '"\\ud800"',
    '"\\UFFFFFFFF"',
    "\u2028",
    "\x85",
    "\x00",
    "\x1b",
    "\ufeff",
    "\U0001f600",
    "|\n  a\n",
    "lm",
    "llm: {}",
    "list[",
    "Literal[1, 2]",
    "one of ",
    "str | int",
    "a" * 300,
]
PLACE = re.compile(r"f\.yaml:[1-9][0-9]*:[1-9][0-9]*: .")


def delete_line(text: str, rng: random.Random) -> str:
    lines = text.splitlines(keepends=True)
    lines.pop(rng.randrange(len(lines))) if lines else None
    return "".join(lines)


def repeat_line(text: str, rng: random.Random) -> str:
    lines = text.splitlines(keepends=True) or [""]
    lines.insert(rng.randrange(len(lines)), rng.choice(lines))
    return "".join(lines)


def swap_lines(text: str, rng: random.Random) -> str:
    lines = text.splitlines(keepends=True) or [""]
    i, j = rng.randrange(len(lines)), rng.randrange(len(lines))
    lines[i], lines[j] = lines[j], lines[i]
    return "".join(lines)


def cut_off(text: str, rng: random.Random) -> str:
    return text[: rng.randrange(len(text) + 1)]


def drop_part(text: str, rng: random.Random) -> str:
    start = rng.randrange(len(text) + 1)
    return text[:start] + text[start + rng.randrange(12) :]


def insert_token(text: str, rng: random.Random) -> str:
    place = rng.randrange(len(text) + 1)
    return text[:place] + rng.choice(TOKENS) + text[place:]


def replace_word(text: str, rng: random.Random) -> str:
    """Put a token where a word stood: wrong types, unknown names, references to nothing."""
    words = list(re.finditer(r"[$\w./]+", text))
    if not words:
        return text
    word = rng.choice(words)
    return (
        text[: word.start()] + rng.choice([*TOKENS, rng.choice(words).group()]) + text[word.end() :]
    )


def nest(text: str, rng: random.Random) -> str:
    """Bury a word in brackets, sometimes deeper than a file may be."""
    words = list(re.finditer(r"[$\w./]+", text))
    if not words:
        return text
    word, depth = rng.choice(words), rng.choice([*range(1, 9), 45])
    opening, closing = rng.choice([("[", "]"), ("{a: ", "}")])
    nested = f"{opening * depth}{word[0]}{closing * depth}"
    return text[: word.start()] + nested + text[word.end() :]


def reindent(text: str, rng: random.Random) -> str:
    lines = text.splitlines(keepends=True) or [""]
    i = rng.randrange(len(lines))
    lines[i] = rng.choice(["", " ", "  ", "    ", "\t"]) + lines[i].lstrip()
    return "".join(lines)


MUTATIONS: list[Callable[[str, random.Random], str]] = [
    delete_line,
    repeat_line,
    swap_lines,
    cut_off,
    drop_part,
    insert_token,
    insert_token,
    replace_word,
    replace_word,
    replace_word,
    nest,
    reindent,
]


def damaged(seed: int) -> bytes:
    """Return the damaged file of a seed: a good one after one to four mutations, or with random bytes."""
    rng = random.Random(seed)
    text = rng.choice(GOOD)
    for _ in range(rng.choice([1, 1, 1, 2, 3, 4])):
        text = rng.choice(MUTATIONS)(text, rng)
    raw = bytearray(text.encode("utf-8", "surrogatepass"))
    if rng.random() < 0.05 and raw:
        for _ in range(rng.randrange(1, 5)):
            raw[rng.randrange(len(raw))] = rng.randrange(256)
    return bytes(raw)


@pytest.mark.parametrize("start", range(0, 10_000, 1_000))
def test_a_damaged_file_loads_or_is_refused_with_places(start: int) -> None:
    loaded = 0
    for seed in range(start, start + 1_000):
        raw = damaged(seed)
        try:
            loads(raw, path=FILES / "f.yaml")
            loaded += 1
        except SpecError as error:
            lines = [line.replace(f"{FILES}/", "") for line in error.problems]
            assert lines, seed
            assert all(PLACE.match(line) and "\n" not in line for line in lines), (seed, lines)
        except Exception as error:  # noqa: BLE001 - whatever it is, its seed must be told
            pytest.fail(f"seed {seed}: {type(error).__name__}: {error}\n{raw!r}")
    assert 0 < loaded < 500


@pytest.mark.parametrize("opening", ["[", "{a: ", "- ", "? ", "[{a: ", "!x [", "'"])
def test_a_file_of_nothing_but_openings_is_refused(opening: str) -> None:
    with pytest.raises(SpecError):
        loads(f"system: {opening * 20_000}")


def test_the_files_that_are_damaged_are_good() -> None:
    for text in GOOD:
        loads(text, path=FILES / "f.yaml")


CHECKED = """
import gc, os, sys
from pathlib import Path
import compound.api.check, compound.optimizers.methods, compound.yaml  # loaded once
from compound.cli import main

gc.freeze()  # else every process would collect what is loaded when it ends
for path in map(Path, sys.argv[1:]):
    pid = os.fork()  # a process of its own, without loading everything again
    if pid == 0:
        os.dup2(os.open(path.with_suffix(".out"), os.O_CREAT | os.O_WRONLY), 1)
        os.dup2(os.open(path.with_suffix(".err"), os.O_CREAT | os.O_WRONLY), 2)
        sys.argv = ["compound", "check", str(path), "--no-import"]
        main()
        sys.exit()
    print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), flush=True)
"""


def checked(paths: Sequence[Path]) -> list[tuple[int, str]]:
    """Check files, each in a process of its own; returns exit codes and what went to stderr."""
    ran = subprocess.run(
        [sys.executable, "-c", CHECKED, *map(str, paths)],
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])},
        capture_output=True,
        text=True,
        check=True,
    )
    codes = map(int, ran.stdout.split())
    return [
        (code, path.with_suffix(".err").read_text())
        for code, path in zip(codes, paths, strict=True)
    ]


def test_fifty_damaged_files_through_the_command_leave_no_traceback(tmp_path: Path) -> None:
    (tmp_path / "good.yaml").write_text(GOOD[0])
    seeds = range(20_000, 20_050)
    for seed in seeds:
        (tmp_path / f"{seed}.yaml").write_bytes(damaged(seed))
    good, *results = checked(
        [tmp_path / "good.yaml", *(tmp_path / f"{seed}.yaml" for seed in seeds)]
    )
    assert good == (0, "")
    for seed, (code, err) in zip(seeds, results, strict=True):
        assert "Traceback" not in err, (seed, err)
        assert code == (2 if err else 0), (seed, code, err)
        assert all(re.match(rf".*{seed}\.yaml:\d+:\d+: .", line) for line in err.splitlines()), (
            seed,
            err,
        )
