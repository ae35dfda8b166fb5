"""Broken files: every mistake is reported, at its line and column, with the nearest valid name."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

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


@pytest.mark.parametrize(
    ("old", "new", "lines"),
    [
        (
            "system: small",
            "system: my system",
            [
                "f.yaml:1:9: system: must consist of letters, digits and underscores, not starting with a digit, but got 'my system'",
            ],
        ),
        (
            "size:",
            "the-size:",
            [
                "f.yaml:6:3: components.the-size: must consist of letters, digits and underscores, not starting with a digit",
                "f.yaml:7:88: components.judge.in.size: $size names neither an input nor a node; possible: $judge, $question, $thinker",
            ],
        ),
        (
            "lm: smollm2\n",
            "",
            [
                "f.yaml:4:3: components.thinker: no model for thinker, judge; add `lm: smollm2` to the file",
            ],
        ),
        (
            "lm: smollm2",
            "lm: {choice: [a, b]}",
            [
                "f.yaml:2:5: lm: must be a string, but got {'choice': ['a', 'b']}",
            ],
        ),
        (
            "$thinker",
            "$judge",
            [
                "f.yaml:7:3: components.judge: a cycle: judge -> judge; use a loop for repetition",
            ],
        ),
        (
            "{question: $question}}",
            "{question: $judge}}",
            [
                "f.yaml:5:3: components.thinker: a cycle: thinker -> judge -> thinker; use a loop for repetition",
            ],
        ),
        (
            "in: {thought: $thinker, size: $size}",
            "in: {thought: $thinkr, size: $size.valu}",
            [
                "f.yaml:7:72: components.judge.in.thought: $thinkr names neither an input nor a node; did you mean '$thinker'?",
                "f.yaml:7:87: components.judge.in.size: size has no output 'valu'; did you mean 'value'?",
            ],
        ),
        (
            "size: $size}",
            "size: $question.x}",
            [
                "f.yaml:7:88: components.judge.in.size: $question is an input and has no fields; write $question",
            ],
        ),
        (
            "$thinker,",
            "thinker,",
            [
                "f.yaml:7:72: components.judge.in.thought: must be a reference such as $question or $node.field, but got 'thinker'; write constants as settings of the component",
            ],
        ),
        (
            "outputs: {verdict: $judge}",
            "outputs: {verdict: $judge.label, x: $thinker, y: [1]}",
            [
                "f.yaml:8:20: outputs.verdict: judge has no output 'label'; possible: output",
                "f.yaml:8:50: outputs.y: must be a reference such as $question or $node.field, but got [1]; write constants as settings of the component",
            ],
        ),
        (
            "$judge}",
            "$thinker}",
            [
                "f.yaml:6:3: components.size: no output depends on this node; use it or remove it",
                "f.yaml:7:3: components.judge: no output depends on this node; use it or remove it",
            ],
        ),
        (
            "inputs: {question: str}",
            "inputs: {question: str, extra: int}",
            [
                "f.yaml:3:25: inputs.extra: nothing reads this input; connect it or remove it",
            ],
        ),
        (
            "{int: [8, 64], log: true}",
            "{int: [80, 64], log: true}",
            [
                "f.yaml:5:55: components.thinker.llm.max_tokens: Int: low <= high must hold, but got low=80, high=64",
            ],
        ),
        (
            "{choice: [1, 2]}",
            "{choice: [1, 2], value: 3}",
            [
                "f.yaml:6:26: components.size.hyperparameter: Choice must be one of 1, 2, but got 3",
            ],
        ),
        (
            "{choice: [1, 2]}",
            "{choice: [1, 1]}",
            [
                "f.yaml:6:26: components.size.hyperparameter: Choice options must differ, but got (1, 1)",
            ],
        ),
        (
            "0.5",
            "{int: [1,2]}",
            [
                "f.yaml:7:52: components.judge.llm.temperature: must be a number, {float: [LOW, HIGH]} or {choice: [A, B]}, but got {'int': [1, 2]}",
            ],
        ),
        (
            "0.5",
            "-1",
            [
                "f.yaml:7:52: components.judge.llm.temperature: must be >= 0, but got -1",
            ],
        ),
        (
            '"one of yes, no"',
            "{}",
            [
                "f.yaml:7:101: components.judge.out: must not be empty",
            ],
        ),
        (
            "{output: verdict}",
            "{output: verdct}",
            [
                "f.yaml:9:32: metric.exact_match.output: no output 'verdct'; did you mean 'verdict'?",
            ],
        ),
        (
            "{exact_match: {output: verdict}}",
            "{exact_match: {output: verdict}, token_f1: {output: verdict}}",
            [
                "f.yaml:9:42: metric.token_f1: names several: 'exact_match' and 'token_f1'; keep one metric",
            ],
        ),
        (
            "{exact_match: {output: verdict}}",
            "exact_match",
            [
                "f.yaml:9:9: metric: must be a mapping with one metric, but got 'exact_match'; possible: accuracy, "
                "custom, exact_match, json_match, mrr, numeric_match, pairwise, pass_at_k, recall_at_k, regex_match, "
                "rouge, rubric, semantic_similarity, token_f1",
            ],
        ),
        (
            "{exact_match: {output: verdict}}",
            "{recall_at_k: {output: verdict, k: 0}}",
            [
                "f.yaml:9:23: metric.recall_at_k: recall_at_k: k >= 1 must hold, got k=0",
            ],
        ),
        (
            "{exact_match: {output: verdict}}",
            "{accuracy: {output: verdict, choices: [a, A]}}",
            [
                "f.yaml:9:20: metric.accuracy: accuracy: choices must be different labels, got ['a', 'A']",
            ],
        ),
        (
            "{exact_match: {output: verdict}}",
            "{custom: {call: 'parts:scor'}}",
            [
                "f.yaml:9:25: metric.custom.call: parts has no 'scor'; did you mean 'score'?",
            ],
        ),
        (
            "{exact_match: {output: verdict}}",
            "{custom: {call: 'parts:score', bounds: [1, 0]}}",
            [
                "f.yaml:9:48: metric.custom.bounds: metric 'score': bounds must be the minimum and maximum score, "
                "but got (1, 0); two finite numbers, the smaller one first, such as 0 and 1",
            ],
        ),
        (
            "{exact_match: {output: verdict}}",
            "{custom: {call: 'parts:number'}}",
            [
                "f.yaml:9:25: metric.custom.call: parts:number is not a function",
            ],
        ),
        (
            "{hyperparameter: {choice: [1, 2]}}",
            "{hyperparameter: {choice: [1, 2]}, llm: {}}",
            [
                "f.yaml:6:44: components.size.llm: names several: 'hyperparameter' and 'llm'; keep one kind",
            ],
        ),
        (
            "{hyperparameter: {choice: [1, 2]}}",
            "{in: {}}",
            [
                "f.yaml:6:3: components.size: names no kind; possible: agent, class, code, external_agent, first_of, function, hyperparameter, llm, loop, map, retriever, selector",
            ],
        ),
        (
            "{hyperparameter: {choice: [1, 2]}}",
            "5",
            [
                "f.yaml:6:9: components.size: must be a mapping with one kind, but got 5; possible: agent, class, code, external_agent, first_of, function, hyperparameter, llm, loop, map, retriever, selector",
            ],
        ),
        (
            "{hyperparameter: {choice: [1, 2]}}",
            "{hyperparameter: {a: 5}}",
            [
                "f.yaml:6:26: components.size.hyperparameter: must be a constant, {int: [LOW, HIGH]}, {float: [LOW, HIGH]}, {choice: [A, B]} or {tune: TEXT}, but got {'a': 5}; possible: choice, float, int, lora, tune",
            ],
        ),
        (
            "outputs:",
            "nodes: {size: {use: judge, in: {thought: $thinker}}, a: {use: juge}, b: {in: {}}}\noutputs:",
            [
                "f.yaml:8:9: nodes.size: this name is used by the node of a component; choose another",
                "f.yaml:8:54: nodes.a: no output depends on this node; use it or remove it",
                "f.yaml:8:63: nodes.a.use: no component 'juge'; did you mean 'judge'?",
                "f.yaml:8:70: nodes.b: 'use' is missing",
                "f.yaml:8:70: nodes.b: no output depends on this node; use it or remove it",
            ],
        ),
        (
            "size:",
            "question:",
            [
                "f.yaml:6:3: components.question: $question is the name of both an input and a node; rename one of them",
                "f.yaml:7:88: components.judge.in.size: $size names neither an input nor a node; possible: $judge, $question, $thinker",
            ],
        ),
        (
            "outputs:",
            "engines: {a: {litelm: {model: x}}, b: {litellm: {}}, c: 3, d: {transformers: {determinstic: true}}}\noutputs:",
            [
                "f.yaml:8:15: engines.a.litelm: unknown engine; did you mean 'litellm'?",
                "f.yaml:8:40: engines.b.litellm: 'model' is missing",
                "f.yaml:8:57: engines.c: must be a mapping with one engine, but got 3; possible: class, fleet, litellm, openai, transformers, "
                "vllm",
                "f.yaml:8:79: engines.d.transformers.determinstic: unknown key; did you mean 'deterministic'?",
            ],
        ),
        (
            "outputs:",
            "engines: {a: {vllm: {model: m, gpu_memory: 0.5, args: [--kv-cache-memory-bytes, '9']}}, b: {vllm: {args: [--port, '1']}}}\noutputs:",
            [
                "f.yaml:8:21: engines.a.vllm: engine 'm': gpu_memory and '--kv-cache-memory-bytes' in args both limit the memory of "
                "the server; remove one of them",
                "f.yaml:8:99: engines.b.vllm: engine 'smollm2': args must not set '--port'; the engine sets it; max_lora_rank, "
                "max_loras and sleep are settings of the engine",
            ],
        ),
        (
            "outputs:",
            "data: {path: x.csv, split_by: {train: 0.5}, id: 5}\noutputs:",
            [
                "f.yaml:8:31: data.split_by: split_by: the shares must sum to 1, got 0.5",
                "f.yaml:8:49: data.id: must be a string, but got 5",
            ],
        ),
        (
            "outputs:",
            "data: {path: x.csv, split_by: {trian: 0.5}}\noutputs:",
            [
                "f.yaml:8:32: data.split_by.trian: unknown key; did you mean 'train'?",
            ],
        ),
        (
            "seed: 3",
            "seed: '3', search: {sources: [demos, edit], lm: smol}, alpha: 2",
            [
                "f.yaml:10:18: optimize.seed: must be an integer, but got '3'",
                "f.yaml:10:49: optimize.search.sources.1: cannot be 'edit'; did you mean 'edits'?",
                "f.yaml:10:74: optimize.alpha: must be < 1.0, but got 2",
            ],
        ),
    ],
)
def test_a_mistake_in_a_small_file_is_named_where_it_is(
    old: str, new: str, lines: list[str]
) -> None:
    assert problems(changed(SMALL, old, new)) == lines


@pytest.mark.parametrize(
    ("old", "new", "lines"),
    [
        (
            "until: done",
            "until: don",
            [
                "f.yaml:35:14: components.agent.loop.until: 'agent': until names 'don', which its body does not have; did you mean 'done'?",
            ],
        ),
        (
            "carry: {state: state}",
            "carry: {state: stat, done: state, x: state}",
            [
                "f.yaml:34:22: components.agent.loop.carry.state: 'agent': carry names 'stat', which its body does not have; did you mean 'state'?",
                "f.yaml:34:34: components.agent.loop.carry.done: loop 'agent': carry gives 'done' (bool) to 'state' (str)",
                "f.yaml:34:44: components.agent.loop.carry.x: 'agent': carry names 'x', which its body does not have; possible: done, state",
            ],
        ),
        (
            "over: question",
            "over: questions",
            [
                "f.yaml:47:13: components.workers.map.over: 'workers': over names 'questions', which its body does not have; did you mean 'question'?",
            ],
        ),
        (
            "state: $said",
            "stat: $said",
            [
                "f.yaml:29:50: components.agent.loop.body.components.step.in: step.state is not connected; step takes state: str, turns: int (optional)",
                "f.yaml:29:55: components.agent.loop.body.components.step.in.stat: step has no input 'stat'; did you mean 'state'? (step takes state: str, turns: int (optional))",
            ],
        ),
        (
            "use: shouter",
            "use: agent",
            [
                "f.yaml:24:3: components.agent: contains itself: agent -> agent",
                "f.yaml:38:3: components.shouter.in: shouter.text is not connected; shouter takes text: str",
                "f.yaml:38:3: components.shouter: no output depends on this node; use it or remove it",
            ],
        ),
        (
            "step: {function",
            "rewriter: {function",
            [
                "f.yaml:9:3: components.rewriter: a second component is named 'rewriter'; the first is at f.yaml:29:11",
                "f.yaml:33:26: components.agent.loop.body.outputs.state: $step.state names neither an input nor a node; did you mean '$state'?",
                "f.yaml:33:45: components.agent.loop.body.outputs.done: $step.done names neither an input nor a node; did you mean '$state'?",
            ],
        ),
        (
            "parts:fuse",
            "parts:fuze",
            [
                "f.yaml:23:27: components.fuse.function.call: parts has no 'fuze'; did you mean 'fuse'?",
            ],
        ),
        (
            "parts:plan",
            "partz:plan",
            [
                "f.yaml:39:30: components.planner.function.call: no module 'partz'; looked beside the file and on sys.path; did you mean 'parts'?",
            ],
        ),
        (
            "parts:Cutter",
            "parts:step",
            [
                "f.yaml:50:17: components.mine.class: parts:step at parts.py:19 is not a subclass of Operation; "
                "use a function as `function: {call: …}`",
            ],
        ),
        (
            "size: {int",
            "sice: {int",
            [
                "f.yaml:50:44: components.mine.settings.sice: unknown setting; did you mean 'size'?",
            ],
        ),
        (
            "weight: {float",
            "wait: {float",
            [
                "f.yaml:23:41: components.fuse.function.wait: unknown setting; did you mean 'weight'?",
            ],
        ),
        (
            "size: {int: [1, 9], value: 4}",
            "size: 99",
            [
                "f.yaml:50:17: components.mine.class: parts:Cutter failed at parts.py:44, in __init__: "
                "RuntimeError: 99 is unlucky; --debug shows the traceback",
            ],
        ),
        (
            "parts:shout",
            "parts:untyped",
            [
                "f.yaml:38:23: components.shouter.function: function 'shouter': parameter 'text' has no type; write `text: str`",
            ],
        ),
        (
            "parts:shout",
            "parts:number",
            [
                "f.yaml:38:30: components.shouter.function.call: parts:number is not a function",
            ],
        ),
        (
            '{call: "parts:shout"}',
            "{call: shout}",
            [
                "f.yaml:38:30: components.shouter.function.call: must name Python code as module:name, but got 'shout'",
            ],
        ),
        (
            "$ranker, b: $searcher",
            "$ranker, b: $rewriter, c: $ranker",
            [
                "f.yaml:18:3: components.searcher: no output depends on this node; use it or remove it",
                "f.yaml:22:3: components.depth: no output depends on this node; use it or remove it",
                "f.yaml:23:96: components.fuse.in.b: fuse.b expects list[any], but $rewriter is str; change one of the two declarations (fuse takes a: list[any], b: list[any])",
                "f.yaml:23:110: components.fuse.in.c: fuse has no input 'c'; possible: a, b, weight (fuse takes a: list[any], b: list[any])",
            ],
        ),
        (
            "{$router.route: search}",
            "{$router.route: serch}",
            [
                "f.yaml:20:92: components.ranker.when: ranker: when compares $router.route with 'serch', but its type is one of search, answer; write `when: {$node.field: VALUE}` with a value it can have",
            ],
        ),
        (
            "$router.needs_search",
            "$router.route",
            [
                "f.yaml:17:5: components.rewriter.when: rewriter: when compares $router.route with True, but its type is one of search, answer; write `when: {$node.field: VALUE}` with a value it can have",
            ],
        ),
        (
            "when: $router.needs_search",
            "when: $router",
            [
                "f.yaml:17:11: components.rewriter.when: $router has 2 outputs; write one of $router.route, $router.needs_search",
            ],
        ),
        (
            "smollm2, openai/gpt-4o-mini",
            "smollm, openai/gpt-4o-mini",
            [
                "f.yaml:53:81: components.answerer.in.lm: no engine for the model 'smollm'; did you mean 'smollm2'?",
            ],
        ),
        (
            'out: {questions: "list[str]", n: int}',
            'out: {questions: "lst[str]", n: int}',
            [
                "f.yaml:39:89: components.planner.out.questions: 'lst[str]' is not a type; possible: Any, Image, None, any, bool, dict, float, int, list, str",
            ],
        ),
        (
            "in: {query: $question}}",
            "in: {}}",
            [
                "f.yaml:19:95: components.finder.in: finder.query is not connected; finder takes query: str",
            ],
        ),
        (
            "first_of: {}, in: {a: $agent.state, b: $hop2}",
            "first_of: {}, in: {a: $workers, b: $hop2}",
            [
                "f.yaml:24:3: components.agent: no output depends on this node; use it or remove it",
                "f.yaml:49:29: components.join.in.a: join.a expects str, but $workers is list[str]; change one of the two declarations (join takes a: str (optional), b: str (optional))",
            ],
        ),
        (
            "first_of: {}",
            "first_of: {port: 1}",
            [
                "f.yaml:49:21: components.join.first_of.port: unknown key; did you mean 'ports'?",
            ],
        ),
    ],
)
def test_a_mistake_among_all_kinds_is_named_where_it_is(
    old: str, new: str, lines: list[str]
) -> None:
    assert problems(changed(EVERYTHING, old, new)) == lines


@pytest.mark.parametrize(
    ("text", "lines"),
    [
        (
            "system: a\nsystem: b\n",
            [
                "f.yaml:1:1: 'components' is missing",
                "f.yaml:1:1: 'outputs' is missing",
                "f.yaml:2:1: system: is a duplicate key; first defined on line 1, column 1",
            ],
        ),
        (
            "",
            [
                "f.yaml:1:1: a file must be a mapping such as `system: NAME`, but this is empty",
            ],
        ),
        (
            "# nothing\n",
            [
                "f.yaml:1:1: a file must be a mapping such as `system: NAME`, but this is empty",
            ],
        ),
        (
            "[1]",
            [
                "f.yaml:1:1: a file must be a mapping such as `system: NAME`, but this is a list",
            ],
        ),
        (
            "a: &x 1\nb: *x\n",
            [
                "f.yaml:1:1: 'components' is missing",
                "f.yaml:1:1: 'outputs' is missing",
                "f.yaml:1:1: 'system' is missing",
                "f.yaml:1:1: a: unknown key; possible: components, data, engines, inputs, lm, metric, nodes, optimize, outputs, system",
                "f.yaml:1:4: a: the anchor &x is not supported; write the value wherever it is needed",
                "f.yaml:2:4: b: the alias *x is not supported; repeat the value",
            ],
        ),
        (
            "a: !!python/object:os.system 1\nb: !x {c: 1}\n",
            [
                "f.yaml:1:1: 'components' is missing",
                "f.yaml:1:1: 'outputs' is missing",
                "f.yaml:1:1: 'system' is missing",
                "f.yaml:1:4: a: the tag '!!python/object:os.system' is not supported; remove it",
                "f.yaml:2:4: b: the tag '!x' is not supported; remove it",
            ],
        ),
        (
            "a: {b\n",
            [
                "f.yaml:2:1: is not YAML: expected ',' or '}', but got '<stream end>' (while parsing a flow mapping from line 1); quote strings that hold any of [ ] { } , # or `: `",
            ],
        ),
        (
            "a: b\n---\nc: d\n",
            [
                "f.yaml:2:1: a second document starts here; a file holds one",
            ],
        ),
        (
            "a: .nan\nb: -.inf\nc: 1e999\nd: 99999999999999999999999999999999999999999999999999999999999999999999999999999999999999999999999999999999999999999999999999999999999999999999999999999999999999999999999999999999999999999999999999999999\n",
            [
                "f.yaml:1:1: 'components' is missing",
                "f.yaml:1:1: 'outputs' is missing",
                "f.yaml:1:1: 'system' is missing",
                "f.yaml:1:4: a: a number must be finite, but is .nan; quote it if it is a string",
                "f.yaml:2:4: b: a number must be finite, but is -.inf; quote it if it is a string",
                "f.yaml:3:4: c: a number must be finite, but is 1e999; quote it if it is a string",
                "f.yaml:4:4: d: a number must have at most 100 digits; quote it if it is a string",
            ],
        ),
        (
            "? [a]\n: b\n",
            [
                "f.yaml:1:3: a key must be a string; quote strings that begin with [ { or *",
            ],
        ),
        (
            '"\\ud800": "\\udfff"\nsystem: "\\ud812"\n',
            [
                "f.yaml:1:1: '\\ud800': contains a lone surrogate (half a character); write the whole character",
                "f.yaml:1:1: 'components' is missing",
                "f.yaml:1:1: 'outputs' is missing",
                "f.yaml:2:9: system: contains a lone surrogate (half a character); write the whole character",
            ],
        ),
        (
            'system: "a\\0b"\n',
            [
                "f.yaml:1:1: 'components' is missing",
                "f.yaml:1:1: 'outputs' is missing",
                "f.yaml:1:9: system: contains a NUL character; remove \\0",
            ],
        ),
        (
            "a: [[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[",
            [
                "f.yaml:1:44: the file is deeper than 40 levels",
            ],
        ),
        (
            "\ta: b",
            [
                "f.yaml:1:1: is not YAML: found character '\\t' that cannot start any token (while scanning for the next token); indent with spaces",
            ],
        ),
        (
            "a: b: c",
            [
                "f.yaml:1:5: is not YAML: mapping values are not allowed here; quote strings that hold any of [ ] { } , # or `: `",
            ],
        ),
        (
            'a: "x\nsystem: b\n',
            [
                "f.yaml:3:1: is not YAML: found unexpected end of stream (while scanning a quoted scalar from line 1)",
            ],
        ),
        (
            "a: '\\x'\nb: \"\\y\"\n",
            [
                "f.yaml:2:6: is not YAML: found unknown escape character 'y' (while scanning a double-quoted scalar from line 2)",
            ],
        ),
        (
            "%YAML 3.0\n---\na: b\n",
            [
                "f.yaml:1:1: is not YAML: found incompatible YAML document (version 1.* is required)",
            ],
        ),
        (
            'a: "\\UFFFFFFFF"\n',
            [
                "f.yaml:1:7: is not YAML: a number in an escape or directive is out of range",
            ],
        ),
    ],
)
def test_what_yaml_lets_slip_is_refused(text: str, lines: list[str]) -> None:
    assert problems(text) == lines


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
    with pytest.raises(
        SpecError,
        match=r"json\.py cannot be imported: .* has the same name and is already imported; rename the first file",
    ):
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
