"""Broken files: every mistake is reported, at its line and column, with the nearest valid name."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import yaml

from compound.core.errors import SpecError
from compound.yaml import load, loads
from compound.yaml.source import read

FILES = Path(__file__).parents[1] / "files" / "spec"
EVERYTHING, SMALL = (
    (FILES / f"{name}.yaml").read_text("utf-8") for name in ("everything", "small")
)


def problems(
    text: str, *, overrides: Sequence[tuple[str, str]] = (), allow_import: bool = True
) -> list[str]:
    """Return what is wrong with a text, as if it were the file f.yaml beside the tests' own files."""
    with pytest.raises(SpecError) as caught:
        loads(text, path=FILES / "f.yaml", overrides=overrides, allow_import=allow_import)
    return [line.replace(f"{FILES}/", "") for line in caught.value.problems]


def changed(text: str, old: str, new: str) -> str:
    assert old in text
    return text.replace(old, new, 1)


def test_every_mistake_of_a_file_is_reported_at_once_in_the_order_of_the_file() -> None:
    text = """\
system: hotpot
lm: smollm
inputs: {question: strr, ctx: str}
components:
  rewriter: {lmm: {prompt: {tune: "Rewrite"}}, in: {question: $question}, out: str}
  searcher: {retriever: {index: bm52, corpus: c.jsonl, k: {choice: [1, 5], value: 5}}, in: {query: $rewriter}}
  ranker: {retriever: {index: bm25, corpos: c, k: {choice: [1], vlaue: 5}}, in: {query: $rewriterr}}
  answerer: {llm: {prompt: {tun: "Answer."}, max_tokens: "5"}, in: {question: $question, passages: $searcher}}
  answerer: {}
outputs: {answer: $anwserer}
data: {path: data/hotpotqa, trian: train}
metric: {token_f2: {output: answer, gold: answer}}
bugdet: 1
optimize: {valid_size: -40, budget: {system_run: 400, minutes: .inf}}
"""
    assert problems(text, overrides=[("optimize.budgt", "1"), ("lm.x", "1")]) == [
        "f.yaml:2:5: lm: no engine for the model 'smollm'; did you mean 'smollm2'?",
        "f.yaml:3:20: inputs.question: 'strr' is not a type; did you mean 'str'?",
        "f.yaml:5:14: components.rewriter.lmm: unknown kind; did you mean 'llm'?",
        "f.yaml:6:33: components.searcher.retriever.index: unknown index 'bm52'; did you mean 'bm25'?",
        "f.yaml:7:12: components.ranker.retriever: 'corpus' is missing",
        "f.yaml:7:37: components.ranker.retriever.corpos: unknown key; did you mean 'corpus'?",
        "f.yaml:7:65: components.ranker.retriever.k.vlaue: unknown key; did you mean 'value'?",
        "f.yaml:7:89: components.ranker.in.query: $rewriterr names neither an input nor a node; did you mean '$rewriter'?",
        "f.yaml:8:28: components.answerer.llm.prompt: must be a string or {tune: TEXT}, but got {'tun': 'Answer.'}; did you mean 'tune'?",
        "f.yaml:8:58: components.answerer.llm.max_tokens: must be an integer, but got '5'",
        "f.yaml:9:3: components.answerer: is a duplicate key; first defined on line 8, column 3",
        "f.yaml:10:19: outputs.answer: $anwserer names neither an input nor a node; did you mean '$answerer'?",
        "f.yaml:11:29: data.trian: unknown key; did you mean 'train'?",
        "f.yaml:12:10: metric.token_f2: unknown metric; did you mean 'token_f1'?",
        "f.yaml:13:1: bugdet: unknown key; possible: components, data, engines, inputs, lm, metric, nodes, optimize, outputs, system",
        "f.yaml:14:24: optimize.valid_size: must be >= 2, but got -40",
        "f.yaml:14:38: optimize.budget.system_run: unknown key; did you mean 'system_runs'?",
        "f.yaml:14:64: optimize.budget.minutes: a number must be finite, but is .inf; quote it if it is a string",
        "--set optimize.budgt=1: optimize.budgt: unknown key; did you mean 'budget'?",
        "--set lm.x=1: there is no lm.x to set",
    ]


MISTAKES = yaml.safe_load((FILES / "mistakes.yaml").read_text("utf-8"))
CASES = [
    (name, case["old"], case["new"], case["problems"])
    for name in ("small.yaml", "everything.yaml")
    for case in MISTAKES[name]
]


@pytest.mark.parametrize(("name", "old", "new", "lines"), CASES)
def test_a_mistake_is_named_where_it_is(name: str, old: str, new: str, lines: list[str]) -> None:
    assert problems(changed((FILES / name).read_text("utf-8"), old, new)) == lines


@pytest.mark.parametrize("case", MISTAKES["texts"], ids=lambda case: case["text"][:20])
def test_what_yaml_lets_slip_is_refused(case: dict[str, Any]) -> None:
    assert problems(case["text"]) == case["problems"]


@pytest.mark.parametrize(
    ("raw", "line"),
    [
        (b"\xff\xfe a", "f:1:1: is not UTF-8 (byte 0xff); save the file as UTF-8"),
        ("a: ü\n".encode("latin-1"), "f:1:4: is not UTF-8 (byte 0xfc); save the file as UTF-8"),
        (b"a: \x00", "f:1:4: holds the control character U+0000; remove it"),
        (b"a: b\r\nc: \x1b", "f:2:4: holds the control character U+001B; remove it"),
        (b"\x7fELF\x02\x01\x01", "f:1:1: holds the control character U+007F; remove it"),
        (b"x" * 1_000_001, "f:1:1: the file has 1000001 bytes; at most 1000000 are read"),
    ],
)
def test_what_is_no_text_is_refused_at_its_first_byte(raw: bytes, line: str) -> None:
    with pytest.raises(SpecError) as caught:
        read(raw, "f")
    assert caught.value.problems == (line,)


def test_a_file_of_too_many_values_is_refused() -> None:
    assert problems("a: [" + "1," * 50_001 + "]")[0].endswith("the file has more than 50000 values")


def test_an_alias_bomb_is_refused_without_expanding_it() -> None:
    bomb = "a: &a [x, x]\n" + "".join(
        f"{b}: &{b} [*{a}, *{a}]\n" for a, b in zip("abcdefgh", "bcdefghi", strict=True)
    )
    assert len([line for line in problems(bomb) if "is not supported" in line]) == 9 + 16


def test_files_that_cannot_be_opened_say_why(tmp_path: Path) -> None:
    for path, reason in (
        (tmp_path / "no.yaml", "No such file or directory"),
        (tmp_path, "Is a directory"),
    ):
        with pytest.raises(SpecError) as caught:
            load(path)
        assert caught.value.problems == (f"{path}: cannot be read: {reason}",)


def test_overrides_are_named_as_they_were_given() -> None:
    overrides = [
        ("optimize.budgt", "1"),
        ("lm.x", "2"),
        ("components.size.hyperparameter.choice.7", "2"),
        ("optimize.iterations", "few"),
        ("outputs.verdict", "$juge"),
    ]
    assert problems(SMALL, overrides=overrides) == [
        "--set optimize.budgt=1: optimize.budgt: unknown key; did you mean 'budget'?",
        "--set lm.x=2: there is no lm.x to set",
        "--set components.size.hyperparameter.choice.7=2: there is no components.size.hyperparameter.choice.7 to set",
        "--set optimize.iterations=few: optimize.iterations: must be an integer, but got 'few'",
        "--set outputs.verdict=$juge: outputs.verdict: $juge names neither an input nor a node; did you mean '$judge'?",
    ]


def test_overrides_that_are_no_values_are_refused() -> None:
    overrides = [
        ("optimize.seed", "[1"),
        ("a..b", "1"),
        ("optimize.alpha", "!x 1"),
        ("lm", "a\x00"),
        ("a\x1b", "1"),
    ]
    assert problems(SMALL, overrides=overrides) == [
        "--set optimize.seed=[1: is not YAML: expected ',' or ']', but got '<stream end>' (while parsing a flow sequence from line 1); quote strings that hold any of [ ] { } , # or `: `",
        "--set a..b=1: must name an entry such as optimize.seed",
        "--set optimize.alpha=!x 1: the tag '!x' is not supported; remove it",
        "'--set lm=a\\x00': holds the control character U+0000; remove it",
        "--set 'a\\x1b'=…: must name an entry such as optimize.seed",
    ]


def test_code_is_refused_line_by_line_when_imports_are_not_allowed() -> None:
    found = problems(EVERYTHING, allow_import=False)
    assert found[0] == (
        "f.yaml:4:47: engines.mock.litellm.api_base: the file sends prompts to http://127.0.0.1:8000, which "
        "--no-import does not allow; if you trust it, add --trust http://127.0.0.1:8000"
    )
    assert found[1] == (
        "f.yaml:8:29: components.router.function.call: names Python code (parts:route), and imports are not allowed"
    )
    assert [line.split(": ")[1] for line in found] == [
        "engines.mock.litellm.api_base",
        "components.router.function.call",
        "components.fuse.function.call",
        "components.agent.loop.body.components.step.function.call",
        "components.shouter.function.call",
        "components.planner.function.call",
        "components.mine.class",
        "metric.custom.call",
    ]


def test_nothing_is_imported_when_imports_are_not_allowed(tmp_path: Path) -> None:
    (tmp_path / "trap.py").write_text("raise SystemExit('imported')")
    text = changed(SMALL, "{exact_match: {output: verdict}}", "{custom: {call: 'trap:score'}}")
    with pytest.raises(SpecError, match="imports are not allowed"):
        loads(text, path=tmp_path / "f.yaml", allow_import=False)


@pytest.mark.parametrize(
    ("code", "message"),
    [
        (
            "1 / 0",
            "importing 'broken' failed: ZeroDivisionError: division by zero ({folder}/broken.py:1)",
        ),
        (
            "import no_such_library",
            "importing 'broken' failed: ModuleNotFoundError: No module named 'no_such_library' "
            "({folder}/broken.py:1); install it where compound is installed, or correct the name "
            "'no_such_library'",
        ),
        ("raise SystemExit(3)", "importing 'broken' failed: SystemExit: 3 ({folder}/broken.py:1)"),
        (
            "def f(:",
            "importing 'broken' failed: SyntaxError: invalid syntax ({folder}/broken.py:1)",
        ),
        ("def scored(): ...", "broken has no 'score'; did you mean 'scored'?"),
    ],
)
def test_an_import_that_fails_says_how(tmp_path: Path, code: str, message: str) -> None:
    (tmp_path / "broken.py").write_text(code)
    text = changed(SMALL, "{exact_match: {output: verdict}}", "{custom: {call: 'broken:score'}}")
    with pytest.raises(SpecError) as caught:
        loads(text, path=tmp_path / "f.yaml")
    assert caught.value.problems == (
        f"{tmp_path}/f.yaml:9:25: metric.custom.call: {message.format(folder=tmp_path)}",
    )


def test_a_module_that_another_one_hides_is_refused(tmp_path: Path) -> None:
    (tmp_path / "json.py").write_text("def score(outputs, example): return 1")
    text = changed(SMALL, "{exact_match: {output: verdict}}", "{custom: {call: 'json:score'}}")
    with pytest.raises(SpecError, match=r"json\.py cannot .*is already imported; rename the"):
        loads(text, path=tmp_path / "f.yaml")


def test_a_broken_component_hides_no_mistake_and_causes_none() -> None:
    text = changed(EVERYTHING, 'tune: "Answer."', 'tone: "Answer."')
    text = changed(text, 'call: "parts:route"', 'call: "parts:rout"')
    text = changed(text, "query: $question, passages", "query: $context, passages")
    text = changed(text, "until: done", "until: dome")
    assert [line.split(": ")[1] for line in problems(text)] == [
        "components.router.function.call",
        "components.ranker.in.query",
        "components.agent.loop.until",
        "components.answerer.llm.prompt",
    ]


def test_penalties_are_code_and_stages_are_methods(tmp_path: Path) -> None:
    text = """
system: demo
lm: smollm2
inputs: {q: str}
components:
  a: {llm: {prompt: x, weights: {lora: {rank: 2}}}, in: {q: $q}}
outputs: {y: $a}
optimize:
  method: better_together
  better_together: {stages: [mipr]}
  mappo: {penalties: {a: "math:nothing"}}
"""
    with pytest.raises(SpecError) as raised:
        loads(text)
    assert "no method 'mipr'" in str(raised.value)
    assert "math has no 'nothing'" in str(raised.value)
    with pytest.raises(SpecError, match="math:sqrt"):
        loads(text.replace("mipr", "mipro").replace("nothing", "sqrt"), allow_import=False)


def test_an_input_does_not_replace_a_setting_of_the_same_name() -> None:
    text = """\
system: s
lm: smollm2
inputs: {prompt: str, temperature: float}
components:
  a: {llm: {prompt: P.}, in: {prompt: $prompt, temperature: $temperature}}
outputs: {y: $a}
"""
    found = problems(text)
    assert len(found) == 2
    for name, problem in zip(("prompt", "temperature"), found, strict=True):
        assert f"{name!r} is a setting of llm 'a'" in problem
        assert f"the_{name}" in problem
    assert loads(
        text.replace("in: {prompt: $prompt, temperature:", "in: {the_prompt: $prompt, degrees:")
    )
