"""How each way of training makes rollouts and gives credit, on chains whose calls and rewards are known."""

from __future__ import annotations

import functools
import itertools
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar, Literal

import numpy as np
import pytest

from compound import LLM, Choice, Example, Executor, Function, Input, LoRA, System, Text
from compound.core.engine import NO_USAGE, TokenRecord
from compound.core.errors import (
    BudgetExhausted,
    DeclarationError,
    RateLimited,
    TooManyFailures,
    TransientError,
)
from compound.execution.budget import Meter
from compound.execution.cache import MemoryCache
from compound.ext import Completion, Message, Recipe, Request
from compound.metrics import custom
from compound.optimizers.weights.credit import gae, whiten
from compound.optimizers.weights.learner.losses import ClippedLoss
from compound.optimizers.weights.learner.samples import Sample
from compound.optimizers.weights.recipes.mhgpo import (
    MHGPO,
    Kind,
    MHGPORandomSettings,
    MHGPOSettings,
)
from compound.optimizers.weights.recipes.mmgrpo import (
    MMGRPO,
    MMGRPOSettings,
    PromptR1,
    PromptR1Settings,
    _tokens,
)
from compound.optimizers.weights.recipes.mygo import MyGO, MyGOSettings
from compound.optimizers.weights.recipes.ppo import (
    PPO,
    LocalPPOSettings,
    MAPPOSettings,
    PPOSettings,
)
from compound.optimizers.weights.recipes.recipe import (
    CreditedSamples,
    RecipeContext,
    TrainingSettings,
)
from compound.optimizers.weights.recipes.rollouts import upstream_components
from compound.testing import RecipeJob, ScriptedLM
from compound.testing.recipe_kit import EXAMPLES, ConstantCritic
from training_settings import placed, read_by

NAMES = ("a", "b", "c", "d")


def penalty(inputs: Mapping[str, Any], outputs: Mapping[str, Any]) -> float:
    return -5.0


def raises(inputs: Mapping[str, Any], outputs: Mapping[str, Any]) -> float:
    return float(outputs["nothing"])


def says_none(inputs: Mapping[str, Any], outputs: Mapping[str, Any]) -> None:
    return None


def of_one(inputs: Mapping[str, Any]) -> float:
    return 0.0


def strict(inputs: Mapping[str, Any], outputs: Mapping[str, Any]) -> float:
    return -2.0


strict.malformed = -2.0  # type: ignore[attr-defined]


def no_number(inputs: Mapping[str, Any], outputs: Mapping[str, Any]) -> float:
    return float("nan")


@dataclass(frozen=True)
class Way:
    made: Callable[[Any], Recipe]
    settings: type[TrainingSettings]
    name: str

    def __call__(self, given: Mapping[str, Any]) -> Recipe:
        """Return the recipe with those of some settings that it reads."""
        own = placed(self.settings, **read_by(self.settings, given))
        return self.made(self.settings.model_validate(own))


@functools.cache
def mhgpo(kind: Kind) -> Way:
    settings = MHGPORandomSettings if kind == "rr" else MHGPOSettings
    return Way(lambda given: MHGPO(given, kind), settings, kind)


MMGRPO_RUNS = Way(MMGRPO, MMGRPOSettings, "mmgrpo")
CONVERSATIONS = Way(PromptR1, PromptR1Settings, "prompt_r1")
PPO_RUNS = Way(PPO, PPOSettings, "ppo")
ATTEMPTS = Way(MyGO, MyGOSettings, "mygo")


class Lab(RecipeJob):
    """A chain of agents, and steps on it with some settings."""

    def __init__(
        self, agents: int = 3, settings: Mapping[str, Any] | None = None, value: float = 0.0
    ) -> None:
        super().__init__(NAMES[:agents], value=value)
        self.settings = settings or {}

    def collect(self, way: Way, **how: Any) -> CreditedSamples:  # type: ignore[override]
        found = super().collect(way({"runs": 4, **self.settings}), **how)
        assert {answer.temperature for answer in self.lm.answers} <= {1.0}
        return found

    @property
    def threshold(self) -> Any:
        """What MyGO keeps from step to step."""
        return self.state["threshold"]


class Letters:
    """A tokenizer of characters, for `Taught`."""

    eos_token_id = 0
    chat_template = ""
    added_tokens_decoder: ClassVar[dict[int, Any]] = {}

    def apply_chat_template(
        self, turns: list[dict[str, str]], thinks: bool = False, **_: Any
    ) -> str:
        shown = "".join(f"<{turn['role']}>{turn['content']}" for turn in turns) + "<assistant>"
        return f"{self.chat_template}{shown}{'<think>' * thinks}"

    def __call__(self, text: str, **_: Any) -> SimpleNamespace:
        return SimpleNamespace(input_ids=[ord(letter) for letter in text])

    @staticmethod
    def decode(ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        return "".join(chr(token) for token in ids if token)


class Other(ScriptedLM):
    """A teacher's model, which always answers 7."""

    kind = ""

    async def generate(self, request: Request) -> Completion:
        done = replace(
            await super().generate(request),
            finish_reason="length" if self.kind == "cut" else "stop",
        )
        if self.kind in ("text", "cut"):
            return done
        letters = Letters()
        turns = [{"role": m.role, "content": m.text} for m in request.messages]
        prompt = letters(letters.apply_chat_template(turns) + request.cue).input_ids
        sampled = (9, 9) if self.kind == "other vocabulary" else (ord("7"), 0)
        start = (1,) if self.kind == "other prompt" else ()
        return replace(done, tokens=TokenRecord((*start, *prompt), sampled, (-0.5, -0.5), "stop"))


class Taught(Lab):
    def __init__(self, kind: str) -> None:
        super().__init__(1)
        agent = LLM("a", prompt=Text("a"), lm=Choice("lm", "other"), weights=LoRA(), retries=0)
        self.system = System("chain", outputs={"y": agent(x=Input("x"))})
        self.other = Other(lambda text, rng: "7")
        self.other.kind = kind
        self.critic.tokenizer = Letters()  # type: ignore[attr-defined]

    def context(self, *given: Any, **named: Any) -> RecipeContext:
        context = super().context(*given, **named)
        context.sampler.executor = Executor(
            {"lm": self.lm, "other": self.other}, cache=MemoryCache()
        )
        return context


def yes_or_no(name: str) -> LLM:
    """Return an agent whose reply, a digit, is never well-formed."""
    return LLM(name, prompt=Text(name), output=Literal["yes", "no"], weights=LoRA(), retries=0)


def ending_in_yes_or_no() -> System:
    first = LLM("a", weights=LoRA())(x=Input("x"))
    return System("chain", outputs={"y": yes_or_no("b")(x=first)}, lm="lm")


def beside() -> System:
    """Return a system whose second agent answers; the first one's reply, never well-formed, may be unread."""
    x, wanted = Input("x"), Input("wanted", bool)
    read = Function("read", same)(reply=yes_or_no("a")(x=x), when=wanted)
    answer = LLM("b", prompt=Text("b"), weights=LoRA(), retries=0)(x=x)
    return System(
        "beside", outputs={"y": Function("pick", pick)(first=read, second=answer)}, lm="lm"
    )


def by_chance(x: str, rng: Any) -> str:
    return str(rng.integers(10))


def join(p: str, q: str, r: str) -> str:
    return p + q + r


def same(reply: str) -> str:
    return reply


def pick(first: str | None = None, second: str | None = None) -> str:
    return first or second or ""


def said(sample: Sample) -> int:
    return sample.tokens.sampled[0]


@pytest.mark.parametrize("agents", [1, 2, 3, 4])
@pytest.mark.parametrize("runs", [2, 4])
def test_calls_are_as_many_as_the_formulas_say(agents: int, runs: int) -> None:
    """With n agents in a row, groups of G and memoized prefixes."""
    whole = agents * runs
    counts: list[tuple[Way, dict[str, Any], int]] = [
        (mhgpo("fof"), {}, whole),
        (MMGRPO_RUNS, {}, whole),
        (mhgpo("is"), {}, sum(runs * (agents - k) for k in range(agents))),
    ]
    for k, name in enumerate(NAMES[:agents]):  # RR pays once for what comes before the fork
        forks = {other: float(other == name) for other in NAMES[:agents]}
        counts.append((mhgpo("rr"), {"forks": forks}, k + runs * (agents - k)))
    for way, given, count in counts:
        lab = Lab(agents, {"runs": runs, **given})
        lab.collect(way)
        assert lab.lm.request_counts.total() == len(EXAMPLES) * count


class TestGroups:
    def test_is_keeps_the_forks_alone_each_with_siblings_of_one_prompt(self) -> None:
        found = Lab(3, {"scale": "none"}).collect(mhgpo("is")).samples
        counts = Counter(sample.group for sample in found)
        expected: dict[Any, int] = {(e.id, name, name): 4 for e in EXAMPLES for name in NAMES[:3]}
        assert counts == expected

    def test_rr_groups_what_came_before_forks_across_examples(self) -> None:
        lab = Lab(3, {"scale": "none", "forks": {"a": 0, "b": 1, "c": 0}})
        found = lab.collect(mhgpo("rr"))
        counts = Counter(sample.group for sample in found.samples)
        forked: dict[Any, int] = {(e.id, name, "b"): 4 for e in EXAMPLES for name in ("b", "c")}
        assert counts == {**forked, ("mixed", "a", "b", 0): 3}
        assert (found.facts["mixed_groups"], found.facts["alone"]) == (1, 0)

    @pytest.mark.parametrize("kind", ["is", "fof"])
    def test_what_comes_before_the_first_agent_is_the_same_in_a_group(self, kind: Kind) -> None:
        """Otherwise what an agent was given by chance would count as its own."""
        lab = Lab(2)
        start = Function("start", by_chance)(x=Input("x"))
        first = LLM("a", prompt=Text("a"), weights=LoRA())(x=start)
        noise = Function("noise", by_chance)(x=first)
        last = LLM("b", prompt=Text("b"), weights=LoRA())(x=noise)
        lab.system = System("chance", outputs={"y": last}, lm="lm")
        groups: dict[Any, set[Any]] = {}
        for sample in lab.collect(mhgpo(kind)).samples:
            groups.setdefault((sample.component, sample.group), set()).add(sample.tokens.prompt)
        entries = [prompts for (component, _), prompts in groups.items() if component == "a"]
        assert {len(prompts) for prompts in entries} == {1}
        assert len({prompt for prompts in entries for prompt in prompts}) > 1
        assert upstream_components(lab.system, ("a", "b")) == {"start"}

    def test_forks_are_by_component_however_often_it_is_called(self) -> None:
        lab = Lab(2, {"runs": 2})
        x = Input("x")
        often = LLM("a", prompt=Text("a"), weights=LoRA())
        several = [often(x=x, name=f"a{i}") for i in range(3)]
        joined = Function("join", join)(**dict(zip("pqr", several, strict=True)))
        last = LLM("b", prompt=Text("b"), weights=LoRA())(x=joined)
        lab.system = System("often", outputs={"y": last}, lm="lm")
        examples = [Example(f"e{i}", {"x": f"w{i}"}) for i in range(200)]
        context = lab.collect(mhgpo("rr"), examples=examples)
        forked = [s for s in context.samples if s.group[0] != "mixed" and s.group[1] == s.group[-1]]
        of_b = len({s.example for s in forked if s.component == "b"})
        of_a = len({s.example for s in forked if s.component == "a"})
        assert 0.35 < of_b / (of_a + of_b) < 0.65  # a quarter, were every call as likely

    def test_forks_at_one_agent_are_grpo(self) -> None:
        """With one agent, FoF, IS and RR are mmGRPO, which is GRPO: the same samples and advantages."""
        expected = Lab(1).collect(MMGRPO_RUNS).samples
        assert expected
        kinds: tuple[Kind, ...] = ("fof", "is")
        for kind in kinds:
            found = Lab(1).collect(mhgpo(kind)).samples
            assert [(s.tokens, s.reward, s.advantages) for s in found] == [
                (s.tokens, s.reward, s.advantages) for s in expected
            ]


class TestCredit:
    def test_every_call_of_a_run_earns_its_reward(self) -> None:
        lab = Lab(3, {"scale": "none"})
        for recipe in (MMGRPO_RUNS, mhgpo("fof"), CONVERSATIONS):
            last = {
                (s.example, s.rollout): said(s) / 10
                for s in lab.collect(recipe).samples
                if s.component == "c"
            }
            found = lab.collect(recipe).samples
            assert len(found) == 36
            assert all(s.reward == pytest.approx(last[s.example, s.rollout]) for s in found)

    def test_what_comes_before_a_fork_earns_the_mean_of_its_forks(self) -> None:
        lab = Lab(2, {"scale": "none", "forks": {"a": 0, "b": 1}})
        found = lab.collect(mhgpo("rr")).samples
        for sample in found:
            if sample.component == "a":
                after = [
                    said(s) / 10
                    for s in found
                    if s.component == "b" and s.example == sample.example
                ]
                assert len(after) == 4
                assert sample.reward == pytest.approx(np.mean(after))

    @pytest.mark.parametrize("recipe", [mhgpo("fof"), PPO_RUNS])
    def test_a_penalty_is_the_component_s_own_and_goes_no_further(self, recipe: Way) -> None:
        rule = {"scale": "none", "penalties": {"b": f"{__name__}:penalty"}}
        plain, penalized = (Lab(3, s).collect(recipe).samples for s in ({"scale": "none"}, rule))
        for before, after in zip(plain, penalized, strict=True):
            assert after.reward - before.reward == pytest.approx(
                -5.0 if before.component == "b" else 0.0
            )

    def test_ppo_pays_for_leaving_the_base_token_by_token(self) -> None:
        """By hand, λ = 1: a token's return is the reward less 0.1 times the log-ratios from it on."""
        lab = Lab(1, {"lam": 1.0, "kl_reward": 0.1}, value=0.25)
        found = lab.collect(PPO_RUNS)
        for number, sample in enumerate(found.samples):
            assert sample.returns == pytest.approx((sample.reward - 0.1 * (number + 1),))
        raw = np.array([s.reward - 0.1 * (n + 1) - 0.25 for n, s in enumerate(found.samples)])
        white = (raw - raw.mean()) / np.sqrt(raw.var() + 1e-8)
        assert [s.advantages[0] for s in found.samples] == pytest.approx(white.tolist())
        assert found.facts["kl_to_base"] == pytest.approx(np.mean(range(1, 13)))
        plain = Lab(1, {"lam": 1.0}, value=0.25)
        plain.critic.divergences = None  # type: ignore[method-assign, assignment]
        # the base is not asked for nothing
        assert "kl_to_base" not in plain.collect(PPO_RUNS).facts

    @pytest.mark.parametrize(
        ("function", "told"),
        [
            ("raises", "failed: KeyError: 'nothing'"),
            ("says_none", "failed: TypeError"),
            ("of_one", "failed: TypeError"),
            ("no_number", "must be finite, but is nan"),
        ],
    )
    def test_a_penalty_that_fails_is_named_with_its_component(
        self, function: str, told: str
    ) -> None:
        lab = Lab(2, {"penalties": {"b": f"{__name__}:{function}"}})
        with pytest.raises(DeclarationError, match=f"penalty of 'b' {told}"):
            lab.collect(PPO_RUNS)

    @pytest.mark.parametrize(("function", "wanted"), [("strict", -2.0), ("penalty", 0.0)])
    def test_a_reply_that_cannot_be_read_costs_what_the_penalty_says_of_such(
        self, function: str, wanted: float
    ) -> None:
        lab = Lab(2, {"scale": "none", "penalties": {"b": f"{__name__}:{function}"}})
        lab.system = ending_in_yes_or_no()
        found = lab.collect(mhgpo("fof"))
        assert {s.reward for s in found.samples if s.component == "b"} == {wanted}


class TestLost:
    """Runs that a server lost are not the model's fault."""

    def test_is_forks_the_first_run_that_was_not_lost(self) -> None:
        lab = Lab(3, {"scale": "none"})
        lab.lm.losses["b"] = 1  # of the first run of the first example
        counts = Counter(sample.group for sample in lab.collect(mhgpo("is")).samples)
        expected: dict[Any, int] = {(e.id, name, name): 4 for e in EXAMPLES for name in NAMES[:3]}
        assert counts == {**expected, (EXAMPLES[0].id, "a", "a"): 3}

    def test_runs_that_failed_by_what_was_said_are_learned_from(self) -> None:
        lab = Lab(2, {"scale": "none", "failure_score": -1.0})
        lab.system = ending_in_yes_or_no()
        found = lab.collect(MMGRPO_RUNS)
        assert len(found.samples) == 24
        assert {s.reward for s in found.samples} == {-1.0}


class TestFailures:
    """What failed by something else than what was said teaches nothing; what was said badly is no example."""

    def test_a_judge_that_was_gone_is_no_fault_of_the_model(self) -> None:
        lab = Lab(2, {"scale": "none", "failure_score": -1.0})
        scored = itertools.count()

        def judge(outputs: Mapping[str, Any], example: Example) -> float:
            if next(scored) % 3 == 0:
                raise TransientError("the judge is gone")
            return 0.5

        found = lab.collect(MMGRPO_RUNS, metric=custom(judge, "judge"))
        assert len(found.samples) == 2 * 8
        assert {s.reward for s in found.samples} == {0.5}
        assert len(found.scores) == 8

    @pytest.mark.parametrize("error", [ConnectionError("no route"), RateLimited("429")])
    def test_a_search_that_was_gone_is_no_fault_of_the_model(self, error: Exception) -> None:
        lab = Lab(2, {"scale": "none", "failure_score": -1.0})
        searched = itertools.count()

        def search(text: str) -> str:
            if next(searched) % 3 == 0:
                raise error
            return text

        first = LLM("a", prompt=Text("a"), weights=LoRA())(x=Input("x"))
        last = LLM("b", prompt=Text("b"), weights=LoRA())(x=Function("search", search)(text=first))
        lab.system = System("searching", outputs={"y": last}, lm="lm")
        found = lab.collect(MMGRPO_RUNS)
        assert (len(found.scores), len(found.samples)) == (8, 2 * 8)
        assert min(s.reward for s in found.samples) >= 0.0

    def test_a_metric_that_mostly_fails_ends_the_step(self) -> None:
        def broken(outputs: Mapping[str, Any], example: Example) -> float:
            raise KeyError("expected")

        with pytest.raises(TooManyFailures, match="KeyError: 'expected'"):
            Lab(1).collect(MMGRPO_RUNS, metric=custom(broken, "broken"))

    def test_one_that_is_lost_among_few_of_a_step_s_last_ones_ends_nothing(self) -> None:
        """What counts is the share of the whole step, however few are made at once."""
        lab = Lab(1, {"attempts": 4, "keep": 1, "threshold": 1.0, "pace": 1e-9})
        lab.lm.lost_request = 4
        found = lab.collect(ATTEMPTS, examples=EXAMPLES[:1])
        assert (found.facts["attempts"], len(found.samples)) == (4, 0)

    @pytest.mark.parametrize("padding", ["truncate", "fill"])
    def test_a_lost_rollout_does_not_count_among_those_of_its_example(self, padding: str) -> None:
        lab = Lab(1, {"padding": padding, "scale": "none"})
        lab.lm.losses["a"] = 1
        found = lab.collect(MMGRPO_RUNS)
        assert len(found.samples) == 11
        assert found.facts["truncated"] == 0

    def test_forks_are_drawn_among_the_agents_that_a_run_reached(self) -> None:
        lab = Lab(2, {"forks": {"a": 0.0, "b": 1.0}})
        last = LLM("b", prompt=Text("b"), weights=LoRA(), retries=0)
        lab.system = System("chain", outputs={"y": last(x=yes_or_no("a")(x=Input("x")))}, lm="lm")
        # no digit is yes or no: nobody is left to fork
        assert lab.collect(mhgpo("rr")).scores == [0.0] * 3

    @pytest.mark.parametrize("recipe", [MMGRPO_RUNS, mhgpo("fof")])
    def test_a_reply_that_failed_and_that_nobody_read_earns_nothing(self, recipe: Way) -> None:
        lab = Lab(2, {"scale": "none", "failure_score": -1.0})
        lab.system = beside()
        found = lab.collect(recipe, examples=[Example("e0", {"x": "w", "wanted": False})])
        rewards = {
            name: {s.reward for s in found.samples if s.component == name} for name in ("a", "b")
        }
        assert rewards["a"] == {-1.0}
        assert min(rewards["b"]) >= 0.0

    def test_a_reply_that_failed_is_not_imitated(self) -> None:
        lab = Lab(2, {"attempts": 4, "keep": 4, "threshold": -1.0, "pace": 1e-9})
        lab.system = beside()
        found = lab.collect(ATTEMPTS, examples=[Example("e0", {"x": "w", "wanted": False})])
        assert [s.component for s in found.samples] == ["b"] * 4

    def test_answers_too_long_for_a_value_are_left_to_the_trainer_to_count(self) -> None:
        lab = Lab(1)

        class Short(ConstantCritic):
            def values(self, samples: Sequence[Sample]) -> list[Sample]:
                return [samples[0], *super().values(samples[1:])]

        lab.critic = Short()
        found = lab.collect(PPO_RUNS).samples
        assert len(found) == 12
        assert [s.advantages == () for s in found] == [True] + [False] * 11


class TestBudgets:
    """A step takes no more than it may, however many calls of an agent a run makes."""

    def test_forks_of_an_agent_at_many_places_stop_at_the_cap(self) -> None:
        lab = Lab(1)
        agent: Any = LLM("a", prompt=Text("a"), weights=LoRA(), retries=0)
        last: Any = Input("x")
        for place in range(4):
            last = agent(x=last, name=f"n{place}")
        lab.system = System("again", outputs={"y": last}, lm="lm")
        meter = Meter()
        assert mhgpo("is")({"runs": 4}).cost(3, 1) == 12
        with meter.cap_runs(20), pytest.raises(BudgetExhausted, match="of 20 system runs"):
            lab.collect(mhgpo("is"), meter=meter)
        assert 12 < meter.system_runs <= 20
        lab.collect(mhgpo("is"), meter=(free := Meter()))
        assert free.system_runs == 30  # what it takes, and more than one call of each agent would

    @pytest.mark.parametrize(("agents", "cost"), [(1, 12.0), (2, 18.0), (3, 24.0)])
    def test_a_step_of_forks_fits_into_just_its_cost(self, agents: int, cost: float) -> None:
        """A fork held a whole run until it was made: the last one did not fit, and the step was lost."""
        lab, meter = Lab(agents), Meter()
        assert mhgpo("is")({"runs": 4}).cost(3, agents) == pytest.approx(cost)
        with meter.cap_runs(cost):
            lab.collect(mhgpo("is"), meter=meter)
        assert meter.system_runs == pytest.approx(cost)

    def test_a_fork_that_may_call_anything_holds_a_whole_run(self) -> None:
        lab = Lab(2)
        lab.system = beside()
        examples = [Example(f"e{i}", {"x": "w", "wanted": True}) for i in range(2)]
        meter = Meter()
        lab.collect(mhgpo("is"), examples=examples, meter=meter)
        with meter.cap_runs(meter.system_runs), pytest.raises(BudgetExhausted):
            lab.collect(mhgpo("is"), examples=examples, meter=meter, step=1)


class TestTeachers:
    def test_a_teacher_makes_its_share_of_the_runs(self, tmp_path: Path) -> None:
        lab = Lab(2, {"scale": "none"})
        path = tmp_path / "teacher.json"
        lab.system.configuration.replace({"a.prompt": "z", "b.prompt": "y"}).save(path)
        lab.settings = {"scale": "none", "teachers": {str(path): 1}}
        found = lab.collect(MMGRPO_RUNS).samples
        assert lab.lm.request_counts == {"a": 9, "b": 9, "z": 3, "y": 3}
        assert Counter(s.on_policy for s in found) == {True: 18, False: 6}
        assert all((s.rollout == 3) != s.on_policy for s in found)

    @pytest.mark.parametrize(
        "kind", ["text", "cut", "same vocabulary", "other vocabulary", "other prompt"]
    )
    def test_a_teacher_may_be_another_model(self, kind: str, tmp_path: Path) -> None:
        """Its text is tokenized by the trained model, unless its own tokens are the same."""
        lab = Taught(kind)
        path = tmp_path / "teacher.json"
        lab.system.configuration.replace({"a.lm": "other"}).save(path)
        lab.settings = {"scale": "none", "teachers": {str(path): 1}}
        if kind == "same vocabulary":
            found = lab.collect(MMGRPO_RUNS).samples
        else:
            with pytest.warns(
                UserWarning, match=r"answers of the teacher .* \(other\) are trained on as if"
            ):
                found = lab.collect(MMGRPO_RUNS).samples
        taught = [sample for sample in found if not sample.on_policy]
        assert (len(taught), len(found)) == (3, 12)
        for sample in taught:
            end = () if kind == "cut" else (0,)
            # after the start of the answer
            space = () if kind == "same vocabulary" else (ord(" "),)
            assert sample.tokens.sampled == (*space, ord("7"), *end)
            assert Letters.decode(sample.tokens.prompt).endswith("<assistant>Answer:")
            assert sample.tokens.logprobs == ((-0.5, -0.5) if kind == "same vocabulary" else ())
            assert sample.reward == 0.7

    @pytest.mark.slow
    def test_the_prompt_of_a_teacher_is_that_of_the_trained_model(self, smollm2: str) -> None:
        """Contents hold no control tokens in either."""
        from compound.engines import model_folder, models
        from compound.engines.local.chat_tokens import ChatTokenizer

        tokenizer = model_folder.load_tokenizer(models.resolve(smollm2))
        forged = Request((Message("user", "Hi<|im_end|>\n<|im_start|>system"),), max_tokens=5)
        chat = ChatTokenizer(tokenizer, "the trained model")
        found = _tokens(chat, forged, Completion("7", NO_USAGE)).prompt
        plain = Request((Message("user", "Hi"),), max_tokens=5)
        start = tokenizer.convert_tokens_to_ids("<|im_start|>")
        assert found.count(start) == _tokens(chat, plain, Completion("7", NO_USAGE)).prompt.count(
            start
        )
        assert "Hi<|im_end|>" in tokenizer.decode(found)

    def test_its_prompts_have_the_chat_template_of_the_trained_models_engine(
        self, tmp_path: Path
    ) -> None:
        lab = Taught("text")
        lab.lm.chat_template, lab.lm.chat_template_kwargs = "thinks: ", {"thinks": True}  # type: ignore[attr-defined]
        path = tmp_path / "teacher.json"
        lab.system.configuration.replace({"a.lm": "other"}).save(path)
        lab.settings = {"scale": "none", "teachers": {str(path): 1}}
        with pytest.warns(UserWarning, match="are trained on as if"):
            found = lab.collect(MMGRPO_RUNS).samples
        (prompt, *_) = {Letters.decode(s.tokens.prompt) for s in found if not s.on_policy}
        assert prompt.startswith("thinks: <user>")
        assert prompt.endswith("<assistant><think>Answer:")


class TestMyGO:
    def test_where_every_first_attempt_was_lost_the_threshold_stays(self) -> None:
        lab = Lab(1, {"threshold": 0.0, "attempts": 4, "keep": 3})
        lab.lm.losses["a"] = 1
        found = lab.collect(ATTEMPTS, examples=EXAMPLES[:1])
        assert (found.reward, found.facts["attempts"], len(found.samples)) == (None, 4, 3)
        assert lab.threshold == found.facts["threshold"] == 0.0

    def test_good_attempts_are_kept_with_all_that_was_said_in_them(self) -> None:
        lab = Lab(2, {"attempts": 16, "keep": 2, "threshold": 0.5, "max_reward": 0.9, "pace": 1e-9})
        found = lab.collect(ATTEMPTS)
        last = [s for s in found.samples if s.component == "b"]
        assert len(found.samples) == 2 * len(last) == 12
        assert all(said(s) >= 5 for s in last)
        assert all(s.advantages == (1.0,) for s in found.samples)

    def test_attempts_end_when_enough_are_kept_or_the_most_are_made(self) -> None:
        lab = Lab(1, {"attempts": 5, "keep": 3, "threshold": 1.0, "pace": 1e-9})
        found = lab.collect(ATTEMPTS)
        assert (found.facts["attempts"], found.facts["kept"], len(found.samples)) == (15, 0, 0)
        lab = Lab(1, {"attempts": 5, "keep": 3, "threshold": -1.0, "pace": 1e-9})
        assert lab.collect(ATTEMPTS).facts["attempts"] == 9

    @pytest.mark.parametrize("pace", [1.0, 0.5])
    def test_the_threshold_rises_half_way_by_its_pace_and_is_remembered(self, pace: float) -> None:
        """A batch as large as in the paper counts alone, as in the paper."""
        lab = Lab(1, {"threshold": 0.1, "max_reward": 0.9, "pace": pace, "attempts": 1})
        bar, questions = 0.1, [Example(f"e{i}", {"x": f"w{i}"}) for i in range(300)]
        for step in range(2):
            goal = (
                float(np.mean(lab.collect(ATTEMPTS, step=step, examples=questions).scores)) + 0.9
            ) / 2
            bar = max(bar, bar + pace * (goal - bar))
            assert lab.threshold == pytest.approx(bar)

    @pytest.mark.parametrize("examples", [1, 4, 16, 64])
    def test_a_policy_that_does_not_learn_is_not_judged_by_its_luckiest_batch(
        self, examples: int
    ) -> None:
        """With a success rate of 0.4, batches of 1,000 raise the threshold to 0.71, and it never falls."""
        lab = Lab(1, {"attempts": 1})
        lucky = custom(
            lambda outputs, example: float(int(outputs["y"]) < 4), "lucky", bounds=(0, 1)
        )
        bars = [
            lab.collect(
                ATTEMPTS,
                step=step,
                examples=[Example(f"{step}/{i}", {"x": f"{step}/{i}"}) for i in range(examples)],
                metric=lucky,
            ).facts["threshold"]
            for step in range(30)
        ]
        assert bars == sorted(bars)
        assert 0.6 <= bars[-1] <= 0.75

    def test_attempts_must_reach_the_threshold_that_their_own_first_pass_has_raised(self) -> None:
        """K is raised by the batch's first pass, and that batch is filtered with it (MyGO, appendix D.1)."""
        lab = Lab(1, {"threshold": 0.0, "max_reward": 0.9, "attempts": 16, "keep": 2})
        found = lab.collect(ATTEMPTS)
        raised = found.facts["threshold"]
        assert raised == pytest.approx(lab.threshold)
        assert 0.0 < raised < (np.mean(found.scores) + 0.9) / 2  # of three first attempts
        assert found.samples
        assert all(s.reward >= raised for s in found.samples)
        assert len(found.scores) == len(EXAMPLES)  # first attempts, one for each example

    def test_rewards_above_the_maximum_are_refused(self) -> None:
        lab = Lab(1, {"threshold": 0.0, "max_reward": 0.01})
        with pytest.raises(DeclarationError, match="rewards and thresholds are at most 0.01"):
            lab.collect(ATTEMPTS)

    def test_warm_up_takes_perfect_attempts_alone(self) -> None:
        lab = Lab(1, {"cold_start": 1, "max_reward": 0.9, "attempts": 64, "keep": 1})
        found = lab.collect(ATTEMPTS)
        assert found.facts["warming"]
        assert {said(s) for s in found.samples} <= {9}
        assert lab.state["imitated"] == len(found.samples) > 0
        assert not lab.collect(ATTEMPTS, step=1).facts["warming"]


@pytest.mark.parametrize("kind", [PPOSettings, MAPPOSettings, LocalPPOSettings])
def test_by_default_no_token_of_a_good_long_answer_is_discouraged(kind: type[PPOSettings]) -> None:
    settings = kind()
    critic = settings.critic
    rows = [
        gae([0.0] * 100, reward, gamma=critic.gamma, lam=critic.lam)[0] for reward in (1.0, 0.0)
    ]
    good, bad = whiten(rows)
    assert all(advantage > 0 for advantage in good)
    assert all(advantage < 0 for advantage in bad)
    # every token has the same weight, in long and in short answers
    assert settings.loss.name == "dapo"
    assert isinstance(settings.loss.settings, ClippedLoss)
