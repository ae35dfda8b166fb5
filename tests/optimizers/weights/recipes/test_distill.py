"""Distillation into weights: its gradient, its optimum on a toy model, its decision, and bad input."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest

from numerics import LOGPROBS

torch = pytest.importorskip("torch")
pytest.importorskip("peft")

import peft  # noqa: E402

import compound as cp  # noqa: E402
from benchmarks.simulated.toy_model import COLOURS, PLACES, make_toy_model  # noqa: E402
from compound import CompoundError, Example, Score, System  # noqa: E402
from compound.api.optimize import run_optimization  # noqa: E402
from compound.core.engine import TokenRecord  # noqa: E402
from compound.core.errors import DeclarationError  # noqa: E402
from compound.engines import model_folder  # noqa: E402
from compound.engines.local.chat_tokens import ChatTokenizer  # noqa: E402
from compound.engines.local.engine import TransformersEngine  # noqa: E402
from compound.execution.schedule import setting_values  # noqa: E402
from compound.optimization.runs.recorder import read_events  # noqa: E402
from compound.optimization.settings.optimize import make_settings  # noqa: E402
from compound.optimizers.methods import method  # noqa: E402
from compound.optimizers.weights.learner.adapters import Adapters, FrozenModel  # noqa: E402
from compound.optimizers.weights.learner.losses import ClippedLoss, per_token_loss  # noqa: E402
from compound.optimizers.weights.learner.samples import Sample  # noqa: E402
from compound.optimizers.weights.recipes.distill import (  # noqa: E402
    Distill,
    DistillSettings,
    advantages,
)
from compound.testing.recipe_kit import ConstantCritic, RecipeJob  # noqa: E402
from training_settings import plain  # noqa: E402

SHORT, LONG = "Say:", "Say: south south south Found: lime lime Fact:"


pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_toy_model(tmp_path_factory.mktemp("toy"))


def test_the_expected_gradient_is_that_of_the_reverse_kl_divergence_of_trl() -> None:
    """The mean over all tokens of the vocabulary, weighted by their probabilities, at each position."""
    gkd = pytest.importorskip("trl.experimental.gkd")
    torch.manual_seed(0)
    student, teacher = torch.randn(1, 3, 7, requires_grad=True), torch.randn(1, 3, 7)
    theirs = gkd.GKDTrainer.generalized_jsd_loss(student, teacher, torch.zeros(1, 3), beta=1)
    (expected,) = torch.autograd.grad(theirs, student)

    logps = student.log_softmax(-1)[
        0
    ].T  # a row for each token, as if it was sampled at all positions
    far = (logps - teacher.log_softmax(-1)[0].T).detach()
    rows = torch.tensor([advantages(row) for row in far.tolist()])
    terms = per_token_loss(ClippedLoss(), logps, logps.detach(), rows, torch.ones_like(logps))
    (found,) = torch.autograd.grad((terms * logps.detach().exp()).sum() / 3, student)
    assert float(far.abs().max()) < 5  # below the bound of advantages
    assert torch.allclose(found, expected, atol=1e-6)


def drawn(prompt: tuple[int, ...]) -> Sample:
    return Sample("x", "e", "x", 0, TokenRecord(prompt, (5, 2, 9), (), "stop"), 0.0)


def logps(model: Any, sample: Sample) -> list[float]:
    """Return the log-probabilities of the answer of a sample, as transformers computes them."""
    prompt, answer = sample.tokens.prompt, sample.tokens.sampled
    with torch.no_grad():
        found = (
            model(torch.tensor([[*prompt, *answer]]))
            .logits[0, len(prompt) - 1 : -1]
            .log_softmax(-1)
        )
    return [float(row[token]) for row, token in zip(found, answer, strict=True)]


@pytest.mark.parametrize("other", [False, True], ids=["the base model", "another model"])
def test_divergences_compare_an_answer_after_two_prompts(
    other: bool, folder: Path, tmp_path: Path
) -> None:
    adapters = Adapters(str(folder), {"x": cp.LoRA(rank=4)}, dtype="float32")
    larger = make_toy_model(tmp_path / "other", seed=1)
    placement = plain().settings.base.placement("float32", "none", "")
    teacher = FrozenModel(str(larger), placement) if other else None
    trainer = plain(max_length=8).trainer(adapters, {"x": "x"}, teacher=teacher)
    own, taught = [drawn((3, 4)), drawn((3, 5))], [drawn((7, 8, 3, 4)), drawn((7, 8, 6, 6, 3, 5))]
    model, _ = model_folder.load_causal(folder, "float32")
    scorer = model_folder.load_causal(larger, "float32")[0] if other else model
    pairs = zip(logps(model, own[0]), logps(scorer, taught[0]), strict=True)
    first, second = trainer.divergences(own, taught)
    assert first == pytest.approx(tuple(a - b for a, b in pairs), abs=LOGPROBS)
    assert second == ()  # too long for the teacher
    assert any(abs(value) > 0.01 for value in first)


def system(model: Path, prompt: Any = None, **more: Any) -> System:
    settings = {"output": {"say": str}, "max_tokens": 1, "weights": cp.LoRA(rank=8), **more}
    agent = cp.LLM("agent", prompt=cp.Text(SHORT) if prompt is None else prompt, **settings)
    return cp.System("saying", {"say": agent(word=cp.Input("colour", str))}, lm=str(model))


def data(said: dict[str, str] | None = None) -> cp.Dataset:
    rows = [
        {"id": f"{n}-{word}", "colour": word, "say": (said or {}).get(word, PLACES[0])}
        for n in range(5)
        for word in COLOURS
    ]
    return cp.Dataset.of(train=rows, valid=rows, test=rows)


def engine(model: Path) -> Callable[[str], TransformersEngine]:
    made = TransformersEngine(str(model), dtype="float32", deterministic=True)
    return lambda _: made


def request_tokens(system: System, folder: Path, word: str) -> tuple[int, ...]:
    component: Any = system.components["agent"]
    request = component.request({"word": word}, setting_values(component, system))
    return ChatTokenizer(model_folder.load_tokenizer(folder), "toy").encode(
        request.messages, request.cue, ()
    )


def distribution(model: Any, system: System, folder: Path, word: str) -> Any:
    with torch.no_grad():
        return model(torch.tensor([request_tokens(system, folder, word)])).logits[0, -1].softmax(-1)


def divergence(one: Any, other: Any) -> float:
    return float((one * (one / other).log()).sum())


@pytest.mark.slow
def test_the_student_reaches_the_teacher_and_drops_its_prompt(model: Path, tmp_path: Path) -> None:
    """The optimum is known: the distribution of the base model after the long prompt, at any input."""
    short = system(model)
    start = short.bind({**short.configuration, "agent.prompt": LONG})
    base, _ = model_folder.load_causal(model, "float32")
    wanted = [distribution(base, start, model, word) for word in COLOURS]
    before = [distribution(base, short, model, word) for word in COLOURS]
    training = {
        "steps": 24,
        "rollouts": {"examples": 4, "runs": 32},
        "optimizer": {"lr": 0.02},
        "evaluation": {"every": 0},
        "margin": 0.2,
    }
    settings = make_settings({"method": "distill", "distill": training})
    run, metric = (
        tmp_path / "run",
        cp.metrics.custom(lambda outputs, example: 1.0, "same", bounds=(0, 1)),
    )
    result = run_optimization(start, data(), metric, settings, run_dir=run, engines=engine(model))
    trained = peft.PeftModel.from_pretrained(base, result.best["agent.weights"]["path"])  # type: ignore[index]
    after = [distribution(trained, short, model, word) for word in COLOURS]
    far, near = (
        [divergence(*pair) for pair in zip(some, wanted, strict=True)] for some in (before, after)
    )
    assert min(far) > 2
    assert sum(near) < 0.2 * sum(far)

    assert (result.best["agent.prompt"], result.verdict) == (
        SHORT,
        "supported",
    )  # although no score rose
    (decision,) = [event for event in read_events(run) if event["event"] == "decision"]
    assert decision["p"] == pytest.approx((1 - 0.2) ** 20)  # 20 equal scores from 0 to 1
    long, brief = (
        fmean(len(request_tokens(some, model, word)) for word in COLOURS) for some in (start, short)
    )
    assert result.cost_notes == [
        f"Input tokens per run: {long:,.0f} → {brief:,.0f} (×{brief / long:.2g})."
    ]


def test_a_stage_distills_what_the_stage_before_it_found(model: Path, tmp_path: Path) -> None:
    training = {"steps": 1, "rollouts": {"examples": 2, "runs": 2}, "evaluation": {"every": 0}}
    both = {"method": "better_together", "better_together": {"stages": ["random", "distill"]}}
    settings = make_settings({**both, "distill": training, "budget": {"system_runs": 3000}})
    metric = cp.metrics.custom(lambda outputs, example: 1.0, "same", bounds=(0, 1))
    run_optimization(
        system(model), data(), metric, settings, run_dir=tmp_path, engines=engine(model)
    )
    jobs = [event for event in read_events(tmp_path) if event["event"] == "job"]
    assert "nothing to learn: the prompts of agent are the short ones" in jobs[-1]["note"]
    assert not jobs[-1]["runs"]


class Teaching(ConstantCritic):
    tokenizer: Any = None

    def divergences(self, samples: Any, taught: Any = None) -> list[tuple[float, ...]]:
        self.asked += taught
        return super().divergences(samples, taught)


@pytest.mark.parametrize("feedback", [False, True])
def test_a_teacher_may_read_the_answer_and_the_feedback(feedback: bool, model: Path) -> None:
    job = RecipeJob("a")
    job.critic = critic = Teaching()
    critic.tokenizer = model_folder.load_tokenizer(model)
    metric = cp.metrics.custom(
        lambda outputs, example: Score(0.5, f"too far from {example.gold['y']}"), bounds=(0, 1)
    )
    examples = [Example("one", {"x": "word1"}, {"y": "seven"})]
    recipe = Distill(DistillSettings(rollouts={"runs": 2}, feedback=feedback))  # type: ignore[arg-type]
    credited = job.collect(recipe, examples=examples, metric=metric)
    assert [sample.advantages for sample in credited.samples] == [(-1.0,), (-2.0,)]
    assert credited.facts == {"too_long": 0, "reverse_kl": 1.5}
    for sample in critic.asked:
        read = critic.tokenizer.decode(sample.tokens.prompt)
        assert "word1" in read
        assert ("seven" in read, "too far from seven" in read) == (feedback, feedback)


@pytest.mark.parametrize(
    ("prompt", "settings", "told"),
    [
        (None, {}, "nothing to distill: the prompts of agent are the short ones"),
        (None, {"prompts": {"agent": SHORT}}, "nothing to distill"),
        (None, {"prompts": {"other": "Say."}}, "prompts names 'other', which is not trained"),
        (LONG, {"prompts": {"agent": "Say."}}, "prompts names 'agent', whose prompt is fixed"),
        (cp.Text(LONG, keep=["south"]), {"prompts": {"agent": "Say."}}, "must contain 'south'"),
        (
            None,
            {"teacher": "openai/gpt-4o"},
            "teacher is 'openai/gpt-4o', which only answers requests",
        ),
        (None, {"teacher": "MODEL"}, "has another tokenizer than .*: of 27 and .* tokens"),
        (None, {"margin": -0.1}, "margin"),
    ],
)
def test_bad_input_is_refused_before_a_run(
    prompt: object, settings: dict[str, Any], told: str, folder: Path, model: Path, tmp_path: Path
) -> None:
    if settings.get("teacher") == "MODEL":
        settings = {"teacher": str(model)}
    given = {"method": "distill", "distill": settings}
    with pytest.raises(CompoundError, match=told):
        cp.optimize(
            system(folder, prompt),
            data(),
            cp.metrics.exact_match("say"),
            settings=given,
            run_dir=tmp_path / "run",
        )
    assert not (tmp_path / "run").exists()


def test_trained_weights_are_no_start(folder: Path, tmp_path: Path) -> None:
    made = system(folder)
    values = {"agent.prompt": LONG, "agent.weights": {"path": "adapter", "sha256": "0" * 64}}
    with pytest.raises(DeclarationError, match="the weights of agent are trained already"):
        method(
            "distill",
            made.bind({**made.configuration, **values}),
            make_settings({"method": "distill"}),
        )


def test_demonstrations_are_dropped_from_the_declared_prompt(folder: Path) -> None:
    demo = {"inputs": {"word": "red"}, "outputs": {"say": "north"}}
    made = system(folder, demos=cp.Demos(value=(demo,)))
    (job,) = method("distill", made, make_settings({"method": "distill"})).jobs
    assert job.keys == ("agent.weights", "agent.prompt", "agent.demos")
    assert Distill(DistillSettings()).values(made, ["agent"]) == {
        "agent.prompt": SHORT,
        "agent.demos": (),
    }
