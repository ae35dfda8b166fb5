"""Ten thousand damaged files: each loads or is refused with places, and nothing else ever happens."""

from __future__ import annotations

import random
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

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
SIGNS = "{}[],:#&*!|>'\"%@`?-$~ \n\t\u2028\x85\x00\x1b\ufeff\U0001f600"
PHRASES = (  # between broken bars
    ": ¦- ¦{}¦[]¦$x¦null¦true¦on¦1e-6¦.inf¦.nan¦1e999¦0x1F¦&a ¦*a¦!!python/object/apply:os.system ¦<<: "
    "¦---\n¦? ¦%YAML 1.1\n¦tune¦choice¦int¦value¦in¦when¦use¦$question¦$say.output¦lm¦llm: {}¦list[¦one of "
    '¦Literal[1, 2]¦str | int¦|\n  a\n¦\\ud800¦"\\ud800"¦"\\UFFFFFFFF"'
)
TOKENS: list[str] = [*SIGNS, *PHRASES.split("¦"), "a" * 300, "9" * 200]
PLACE = re.compile(r"f\.yaml:[1-9][0-9]*:[1-9][0-9]*: .")


def delete_line(text: str, rng: random.Random) -> str:
    lines = text.splitlines(keepends=True)
    lines.pop(rng.randrange(len(lines))) if lines else None
    return "".join(lines)


def cut_off(text: str, rng: random.Random) -> str:
    return text[: rng.randrange(len(text) + 1)]


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
    cut_off,
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


@pytest.mark.slow
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


def test_damaged_files_through_the_command_leave_no_traceback(cli: Any, tmp_path: Path) -> None:
    file = tmp_path / "f.yaml"
    file.write_text(GOOD[0])
    assert (ran := cli("check", str(file), "--no-import")).code == 0, ran
    for seed in range(20_000, 20_012):
        file.write_bytes(damaged(seed))
        ran = cli("check", str(file), "--no-import")
        assert ran.code == (2 if ran.err else 0), (seed, ran)
        told = [line for line in ran.err.split("\n") if not re.match(r"( +\d* \||\Z)", line)]
        assert all(PLACE.search(line) for line in told), (seed, ran.err)
