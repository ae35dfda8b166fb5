"""Constrained decoding: answers fit their format, and the trainer's log-probabilities are the sampler's."""

from __future__ import annotations

import datetime
import json
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from jsonschema import Draft202012Validator

from compound import LoRA, Port
from compound.components.answers.answer_types import answer_format
from compound.components.answers.answer_values import parse_value
from compound.components.fields import parse
from numerics import LOGPROBS
from training_settings import plain

torch = pytest.importorskip("torch")
pytest.importorskip("llguidance")

from compound.core.engine import AnswerFormat, Completion, Message, Request, TokenRecord  # noqa: E402
from compound.core.errors import CallError  # noqa: E402
from compound.engines.local import loading  # noqa: E402
from compound.engines.local.constraints import (  # noqa: E402
    Constraint,
    ConstraintCompiler,
    ConstraintState,
    end_tokens,
)
from compound.engines.local.engine import TransformersEngine  # noqa: E402
from compound.engines.model_folder import load_causal  # noqa: E402
from compound.optimizers.weights.learner.adapters import Adapters  # noqa: E402
from compound.optimizers.weights.learner.forward import forward  # noqa: E402
from compound.optimizers.weights.learner.samples import Sample  # noqa: E402
from local_engine import outcomes  # noqa: E402

PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string"},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "tags": {"type": "array", "items": {"enum": ["a", "b"]}},
    },
    "required": ["name", "age", "tags"],
    "additionalProperties": False,
}
TREE = {
    "type": "object",
    "properties": {
        "value": {"type": "number"},
        "next": {"anyOf": [{"$ref": "#"}, {"type": "null"}]},
    },
    "required": ["value", "next"],
    "additionalProperties": False,
}
LABELS = AnswerFormat(choices=("yes", "no", "not yet"))


@pytest.fixture(scope="module")
def folder(make_model: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("model"))


def schema(document: Any) -> AnswerFormat:
    return AnswerFormat(schema=json.dumps(document))


def ask(answer: AnswerFormat | None, seed: int = 0, **given: Any) -> Request:
    options = {"max_tokens": 120, "temperature": 1.0, "want_tokens": True, **given}
    return Request((Message("user", "the king"),), format=answer, seed=seed, **options)


def run(folder: Path, *requests: Request, **given: Any) -> list[Completion | BaseException]:
    return outcomes(TransformersEngine(str(folder), dtype="float32", **given), requests)


def answers(folder: Path, *requests: Request, **given: Any) -> list[Completion]:
    found = run(folder, *requests, **given)
    assert all(isinstance(one, Completion) for one in found), found
    return [one for one in found if isinstance(one, Completion)]


@pytest.mark.parametrize("document", [PERSON, TREE])
def test_answers_of_any_model_fit_the_schema_within_the_limit(document: Any, folder: Path) -> None:
    for answer in answers(folder, *(ask(schema(document), seed) for seed in range(12))):
        assert answer.finish_reason == "stop", answer.text
        assert Draft202012Validator(document).is_valid(json.loads(answer.text)), answer.text


def test_labels_may_follow_a_cue_after_a_space(folder: Path) -> None:
    for cue in ("", "Answer:"):
        texts = [a.text for a in answers(folder, *(ask(LABELS, s, cue=cue) for s in range(8)))]
        assert {text.removeprefix(" ") for text in texts} <= set(LABELS.choices)
        assert cue or not any(text.startswith(" ") for text in texts)


@pytest.mark.parametrize("cue", ["", "Answer:"])
def test_a_low_limit_does_not_choose_among_labels(folder: Path, cue: str) -> None:
    """With few tokens left, every answer was once closed to the same label."""
    labels = AnswerFormat(choices=("no", "maybe so"))
    (failed,) = run(folder, ask(labels, cue=cue, max_tokens=1))
    assert isinstance(failed, CallError)
    assert "max_tokens=1 is too low for the answer 'maybe so'" in failed.message
    least = int(re.findall(r"\d+", failed.hint)[-1])
    for limit in range(least, 2 * least + 2):
        found = answers(
            folder, *(ask(labels, s, cue=cue, max_tokens=limit, temperature=4.0) for s in range(24))
        )
        assert {answer.text.strip() for answer in found} == set(labels.choices)


@pytest.mark.slow
@pytest.mark.parametrize("deterministic", [False, True])
def test_answers_in_a_mixed_batch_are_those_alone(deterministic: bool, folder: Path) -> None:
    requests = [ask((schema(PERSON), LABELS, None)[i % 3], i, max_tokens=40) for i in range(7)]
    together = answers(folder, *requests, deterministic=deterministic)
    alone = [answers(folder, request, deterministic=deterministic)[0] for request in requests]
    assert [a.text for a in together] == [a.text for a in alone]


def test_a_greedy_answer_is_the_most_likely_one_that_is_allowed(folder: Path) -> None:
    first, second = answers(
        folder, ask(LABELS, 1, temperature=0.0), ask(LABELS, 2, temperature=0.0)
    )
    assert first.text == second.text


def test_a_format_that_cannot_be_compiled_fails_alone_and_says_what_to_do(folder: Path) -> None:
    broken = schema({"type": "object", "properties": {"a": {"$ref": "#/$defs/Missing"}}})
    failed, fine = run(folder, ask(broken), ask(LABELS))
    assert isinstance(failed, CallError)
    assert "cannot be enforced" in str(failed)
    assert "enforce" in failed.hint
    assert isinstance(fine, Completion)


def test_a_keyword_that_cannot_be_enforced_is_left_to_the_parser(folder: Path) -> None:
    unique = {"type": "array", "items": {"enum": [1, 2]}, "uniqueItems": True, "maxItems": 3}
    (answer,) = answers(folder, ask(schema(unique)))
    assert set(json.loads(answer.text)) <= {1, 2}


def sample(record: TokenRecord) -> Sample:
    return Sample("c", "e", "c", 0, record, 0.0)


@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("packed", [True, False])
def test_the_trainer_computes_the_samplers_log_probabilities(
    temperature: float, packed: bool, folder: Path
) -> None:
    requests = [
        ask((schema(PERSON), LABELS, None)[i % 3], i, temperature=temperature) for i in range(6)
    ]
    records = [a.tokens for a in answers(folder, *requests) if a.tokens is not None]
    model, tokenizer = load_causal(folder, "float32")
    ends = end_tokens(model, tokenizer)
    compiler = ConstraintCompiler(tokenizer, model.config.vocab_size, ends)
    samples = [sample(record) for record in records]
    ran = forward(model, samples, packed=packed, temperature=temperature, constraints=compiler)
    for row, record in zip(ran.logps, records, strict=True):
        assert row[: len(record.sampled)].tolist() == pytest.approx(record.logprobs, abs=LOGPROBS)
    assert torch.isfinite(ran.entropies).all()
    assert (ran.entropies >= -1e-4).all()
    free = forward(model, samples, packed=packed, temperature=temperature)
    assert not torch.allclose(free.logps, ran.logps, atol=0.1)


def test_forced_tokens_have_no_gradient(folder: Path) -> None:
    """Where one token is allowed, the probability is 1 for all weights."""
    (answer,) = answers(folder, ask(schema({"const": "the king"})))
    assert answer.tokens is not None
    model, tokenizer = loading.load(str(folder), "float32")
    compiler = ConstraintCompiler(tokenizer, model.config.vocab_size, end_tokens(model, tokenizer))
    forced = [
        compiler.replay(Constraint.from_text(answer.tokens.constraint), answer.tokens.sampled)[i]
        for i in range(len(answer.tokens.sampled))
    ]
    single = [sum(int(word).bit_count() for word in line.view("uint32")) == 1 for line in forced]
    assert any(single)
    for alone, logprob in zip(single, answer.tokens.logprobs, strict=True):
        assert not alone or logprob == 0.0


def test_replaying_an_answer_that_does_not_fit_is_an_error(folder: Path) -> None:
    model, tokenizer = loading.load(str(folder), "float32")
    compiler = ConstraintCompiler(tokenizer, model.config.vocab_size, end_tokens(model, tokenizer))
    with pytest.raises(ValueError, match="position 0 violates"):
        compiler.replay(Constraint(LABELS, False, 8), tokenizer("the").input_ids)


@given(text=st.text(max_size=20), lead=st.booleans(), limit=st.integers(1, 10_000))
def test_a_constraint_and_its_record_survive_json(text: str, lead: bool, limit: int) -> None:
    constraint = Constraint(AnswerFormat(choices=(text or "x", "y")), lead, limit)
    record = TokenRecord((1,), (2,), (-0.5,), "stop", "", constraint.to_text())
    again = TokenRecord.from_row(json.loads(json.dumps(record.row)))
    assert again == record
    assert Constraint.from_text(again.constraint) == constraint


def test_a_record_without_a_constraint_has_the_row_of_earlier_versions() -> None:
    assert TokenRecord((1,), (2,), (-0.5,), "stop").row == ([1], [2], [-0.5], "stop", "")


@settings(
    max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None
)
@given(
    names=st.lists(st.sampled_from("abcdefgh"), min_size=1, max_size=4, unique=True),
    kinds=st.lists(
        st.sampled_from(["string", "integer", "boolean", "null", "array"]), min_size=4, max_size=4
    ),
    limit=st.integers(60, 200),
)
def test_the_closing_of_an_answer_fits_the_schema(
    names: list[str], kinds: list[str], limit: int, compiler: ConstraintCompiler, decode: Any
) -> None:
    properties: dict[str, Any] = {n: {"type": kind} for n, kind in zip(names, kinds, strict=False)}
    document = {
        "type": "object",
        "properties": properties,
        "required": names,
        "additionalProperties": False,
    }
    state = compiler.start(Constraint(schema(document), False, limit))
    assert isinstance(state, ConstraintState)
    text = decode(state.closing()[:-1])
    assert Draft202012Validator(document).is_valid(json.loads(text)), text


TIMES: dict[str, Any] = {
    "day": datetime.date,
    "at": datetime.datetime,
    "time": datetime.time,
    "took": datetime.timedelta,
}


def test_the_closing_of_a_time_is_a_short_value(compiler: ConstraintCompiler, decode: Any) -> None:
    for name, kind in TIMES.items():
        answer = answer_format({name: Port(kind)}, "text")
        assert answer is not None
        state = compiler.start(Constraint(answer, False, 60))
        assert isinstance(state, ConstraintState)
        text = decode(state.closing()[:-1])
        assert isinstance(parse_value(text, kind), kind), text


def test_answers_of_times_are_completed_within_the_limit(folder: Path) -> None:
    """A random model draws digits of the second's fraction until it must stop."""
    ports = {name: Port(kind) for name, kind in TIMES.items()}
    answer = answer_format(ports, "json")
    for found in answers(folder, *(ask(answer, seed, max_tokens=160) for seed in range(8))):
        assert found.finish_reason == "stop", found.text
        parse(found.text, ports, "json")


def test_keys_that_are_no_texts_are_enforced(folder: Path) -> None:
    for kind in (dict[int, bool], dict[Literal["a", "b"], bool]):
        ports = {"output": Port(kind)}
        for found in answers(
            folder, *(ask(answer_format(ports, "text"), seed) for seed in range(6))
        ):
            parse(found.text, ports, "text")


@pytest.fixture(scope="module")
def compiler(folder: Path) -> ConstraintCompiler:
    model, tokenizer = loading.load(str(folder), "float32")
    return ConstraintCompiler(tokenizer, model.config.vocab_size, end_tokens(model, tokenizer))


@pytest.fixture(scope="module")
def decode(folder: Path) -> Any:
    return loading.load(str(folder), "float32")[1].decode


def test_the_trainer_learns_from_constrained_answers_of_its_own_distribution(folder: Path) -> None:
    requests = [ask((schema(PERSON), LABELS)[i % 2], i) for i in range(4)]
    samples = [
        replace(sample(a.tokens), reward=float(i % 2), component="x").with_advantage(
            1.0 - 2.0 * (i % 2)
        )
        for i, a in enumerate(answers(folder, *requests))
        if a.tokens is not None
    ]
    adapters = Adapters(str(folder), {"x": LoRA(rank=2)}, dtype="float32")
    trainer = plain().trainer(adapters, {"x": "x"}, longest=120)
    logps = trainer.passes.logps(samples, base=False)
    for one in samples:
        assert logps[id(one)][: one.length].tolist() == pytest.approx(
            one.tokens.logprobs, abs=LOGPROBS
        )
    facts = trainer.step(samples, 0)["components"]["x"]
    assert facts["ratio"] == pytest.approx(1.0, abs=1e-3)
    assert adapters.parameters("x")[1][1].abs().max() > 0
