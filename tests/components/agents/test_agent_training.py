"""Agents in optimization: preference pairs and local rewards of turns, training, prompts and tool texts."""

from __future__ import annotations

import asyncio
import json
import re
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Literal

import pytest

import compound as cp
from compound import Example, Executor
from compound.execution.cache import MemoryCache
from compound.metrics import custom
from compound.rewards.candidates import Sampling
from compound.rewards.pairs import collect
from compound.testing import ScriptedLM

pytestmark = pytest.mark.usefixtures("without_reports")

TOWNS = ("Lima", "Oslo")


@cp.tool(reproducible=True)
def country(town: Literal["Lima", "Oslo"]) -> str:
    """Return the country of a town."""
    return {"Lima": "Peru", "Oslo": "Norway"}[town]


def agent_system(lm: str = "m", **settings: Any) -> cp.System:
    agent = cp.Agent(
        "agent", [country], **{"prompt": cp.Text("Answer."), "max_turns": 3, **settings}
    )
    return cp.System("geography", {"answer": agent(question=cp.Input("question"))}, lm=lm)


class TestLocalRewards:
    """A turn that calls the tool for the right town is better than one for the other."""

    @staticmethod
    def script(message: str, rng: Any) -> str:
        if "Result of" in message:
            return json.dumps({"answer": message.rsplit("\n", 1)[-1]})
        return json.dumps({"tool": "country", "arguments": {"town": str(rng.choice(TOWNS))}})

    def test_the_turns_of_an_agent_give_preference_pairs(self) -> None:
        system = agent_system(temperature=1.0)
        executor = Executor({"m": ScriptedLM(self.script)}, cache=MemoryCache())
        examples = [
            Example(f"e{n}", {"question": f"Country of Lima, {n}?"}, {"answer": "Peru"})
            for n in range(6)
        ]
        metric = custom(lambda outputs, example: float(outputs["answer"] == "Peru"), "right")

        async def found() -> Any:
            traced = []
            for example in examples:
                trace = await executor.run(system, example.inputs, example=example.id)
                traced.append((example, executor.settle(trace)))
            sampling = Sampling(samples=4, rollouts=2, max_rollouts=2, level=1)
            return await collect(
                executor, system, traced, ["agent_turn"], metric, sampling=sampling
            )

        pairs = [pair for pair in asyncio.run(found()).pairs if not pair.inputs["history"]]
        assert pairs
        for pair in pairs:
            assert "Lima" in str(pair.chosen["tool_calls"])
            assert "Oslo" in str(pair.rejected["tool_calls"])


class TestPrompts:
    """A search over the prompt and the text of the tool, with a model that calls only a well described tool."""

    @staticmethod
    def script(message: str) -> str:
        if "<prompt>" in message:
            return "<prompt>country: Find the country of any town.</prompt>"
        if "Result of" in message:
            return json.dumps({"answer": message.rsplit("\n", 1)[-1]})
        town = next(town for town in TOWNS if town in message.rsplit("Question:", 1)[-1])
        if "of any town" in message:
            return json.dumps({"tool": "country", "arguments": {"town": town}})
        return json.dumps({"answer": "unknown"})

    def test_a_better_text_of_a_tool_is_found_and_kept(self, tmp_path: Path) -> None:
        answers = {"Lima": "Peru", "Oslo": "Norway"}
        rows = [
            {
                "id": f"{split}-{n}",
                "question": f"Country of {TOWNS[n % 2]} in year {n}{split}?",
                "answer": answers[TOWNS[n % 2]],
            }
            for split in ("train", "valid", "test")
            for n in range(24)
        ]
        data = {
            split: [r for r in rows if r["id"].startswith(split)]
            for split in ("train", "valid", "test")
        }
        system = agent_system(prompt="Answer.", tune_tools=True)
        assert list(system.parameters) == ["agent_turn.tool_country"]
        result = cp.optimize(
            system,
            data,
            "exact_match",
            method="opro",
            budget=600,
            run_dir=tmp_path / "run",
            progress=False,
            engines={"m": ScriptedLM(self.script)},
        )
        assert "of any town" in str(result.best["agent_turn.tool_country"])
        trace = cp.run(
            system.bind(result.best),
            {"question": "Country of Oslo?"},
            engines={"m": ScriptedLM(self.script)},
        )
        assert trace.outputs == {"answer": "Norway"}


@pytest.fixture(scope="module")
def model(make_model: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("peft")
    pytest.importorskip("llguidance")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return make_model(tmp_path_factory.mktemp("agent-model"), positions=4096)


class TestWeights:
    """Training of a tiny random model, whose actions are valid because they are enforced."""

    def test_turns_are_sampled_with_tokens_that_continue(self, model: Path) -> None:
        from compound.optimizers.weights.learner.forward import sequences
        from compound.optimizers.weights.learner.samples import Sample

        system = agent_system(
            str(model),
            weights=cp.LoRA(rank=4),
            output=Literal["Peru", "Norway"],
            temperature=1.0,
            max_tokens=60,
        )
        engine = cp.engines.Transformers(str(model), dtype="float32")
        executor = Executor({str(model): engine})

        async def runs() -> list[cp.Trace]:
            try:
                wanted = [
                    executor.run(
                        system, {"question": f"Country of {TOWNS[n % 2]}?"}, example=str(n)
                    )
                    for n in range(12)
                ]
                return list(await asyncio.gather(*wanted))
            finally:
                await executor.aclose()

        several = 0
        for trace in asyncio.run(runs()):
            turns = trace.calls_of("agent_turn")
            assert all(len(turn.tokens) == 1 and turn.tokens[0].constraint for turn in turns)
            samples = [
                Sample("agent_turn", trace.example, t.address, t.invocation, t.tokens[0], 0.0)
                for t in turns
            ]
            if len(turns) > 1 and trace.failure is None:
                several += 1
                first, second = (turn.tokens[0] for turn in turns[:2])
                if second.prompt[: len(first.prompt) + len(first.sampled)] == (
                    *first.prompt,
                    *first.sampled,
                ):
                    assert len(sequences(samples)) < len(samples)
        assert several

    @pytest.mark.slow
    def test_a_step_of_grpo_moves_the_weights_of_the_turns(
        self, model: Path, tmp_path: Path
    ) -> None:
        rows = [
            {"id": str(n), "question": f"Country of {TOWNS[n % 2]}, {n}?", "answer": "Peru"}
            for n in range(12)
        ]
        system = agent_system(
            str(model),
            weights=cp.LoRA(rank=4),
            prompt="Answer.",
            output=Literal["Peru", "Norway"],
            max_tokens=60,
        )

        def early(outputs: Mapping[str, Any], example: cp.Example) -> float:
            return float(outputs["answer"] == "Peru")

        cp.optimize(
            system,
            {"train": rows[:6], "valid": rows[6:]},
            custom(early, "peru"),
            method="mmgrpo",
            budget=400,
            progress=False,
            run_dir=tmp_path / "run",
            engines={str(model): cp.engines.Transformers(str(model), dtype="float32")},
            mmgrpo={"steps": 1, "rollouts": {"examples": 3, "runs": 4}, "optimizer": {"lr": 0.01}},
        )
        events = [
            json.loads(line)
            for line in (tmp_path / "run" / "events.jsonl").read_text().splitlines()
        ]
        (job,) = (event for event in events if event["event"] == "job")
        assert job["values"]["agent_turn.weights"]["sha256"]
        (step,) = (event for event in events if event["event"] == "progress")
        trained, samples = map(int, re.findall(r"(\d+) of (\d+) samples", step["note"])[0])
        assert 0 < trained <= samples
        assert samples > 12  # more than one turn for each of the 12 runs
