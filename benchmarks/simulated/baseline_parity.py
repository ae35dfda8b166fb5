"""Compare our MIPROv2 with DSPy's on the same program, data and scripted model.

    python -m benchmarks.simulated.baseline_parity --output benchmarks/data/baseline_parity.json

For each size of the search, both optimize a program of two calls, and a scripted model answers all
requests. The table holds the number of requests by kind, the examples of each evaluation, and the
information that every request of a kind contains. It needs DSPy, which is not a dependency of this
package.

Known differences: DSPy asks for one more instruction of each predictor, which it then replaces by
the current instruction, and runs the program on the same example once for each set of
demonstrations, where ours reads the stored runs.
"""

from __future__ import annotations

import argparse
import io
import json
import threading
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from compound.components.llm import LLM
from compound.core.example import Example
from compound.evaluation.evaluate import Evaluation
from compound.evaluation.metrics.built_in import exact_match
from compound.graph.component import Input
from compound.graph.space import Demos, Text
from compound.graph.system import System
from compound.optimizers.baselines.mipro import SIZES, Auto, Mipro, MIPROSettings
from compound.optimizers.baselines.mipro_proposer import TIPS
from compound.testing import OptimizerJob, ScriptedLM

KINDS: Mapping[str, str] = {
    "Write a new instruction": "instruction",
    "Describe the task": "system",
    "Describe the role": "component",
    "Condense": "summary",
    "have in common": "observation",
}  # words of our requests, by which they are told apart
FIELDS: Mapping[str, str] = {
    "proposed_instruction": "instruction",
    "program_description": "system",
    "module_description": "component",
    "summary": "summary",
    "observations": "observation",
}  # output fields of DSPy's requests
REPLIES: Mapping[str, str] = {
    "observation": "All rows ask for a capital.",
    "summary": "The data ask for capitals.",
    "system": "It makes a plan and then an answer.",
    "component": "It is one of the two calls.",
}
START = {"first": "Plan the reply.", "second": "Reply with care."}
Message = Mapping[str, object]
COMPARED: Mapping[str, tuple[Auto, int]] = {
    "light": ("light", 4),
    "light, instructions only": ("light", 0),
    "medium": ("medium", 4),
}  # the size of the search, and the maximum number of demonstrations
POOL, MORE = 48, 74  # examples that demonstrations come from, and others that are not scored


@dataclass
class Log:
    """What one side did.

    Attributes:
        requests: the kind and the text of each request for a proposal.
        evaluations: the number of examples of each evaluation, in order.
        runs: all runs of the program.
    """

    requests: list[tuple[str, str]] = field(default_factory=list)
    evaluations: list[int] = field(default_factory=list)
    runs: int = 0

    def reply(self, kind: str, text: str) -> str:
        """Record a request, and return the scripted reply."""
        self.requests.append((kind, text))
        return REPLIES.get(kind, f"Instruction {len(self.requests)}.")

    def facts(self, tips: Sequence[str]) -> dict[str, object]:
        """Return the counts, and the information that all requests of each kind contain."""
        kinds = {kind for kind, _ in self.requests}
        return {
            "requests": dict(sorted(Counter(kind for kind, _ in self.requests).items())),
            "evaluations": self.evaluations,
            "runs": self.runs,
            "information": {kind: self._information(kind, tips) for kind in sorted(kinds)},
        }

    def _information(self, kind: str, tips: Sequence[str]) -> dict[str, float]:
        """Return the share of a kind's requests that contain each piece of information."""
        texts = [text for found, text in self.requests if found == kind]
        marks = {
            "rows": ["capital of"],
            "earlier observations": [REPLIES["observation"]],
            "summary of the data": [REPLIES["summary"]],
            "structure of the program": ["first", "second"],
            "description of the program": [REPLIES["system"]],
            "description of the component": [REPLIES["component"]],
            "demonstrations": ["capital of"],
            "current instruction": [*START.values()],
        }
        of_demos = kind in ("system", "component", "instruction")
        del marks["rows" if of_demos else "demonstrations"]
        shares = {
            name: sum(any(w in text for w in words) for text in texts) / len(texts)
            for name, words in marks.items()
        }
        shares["tip"] = float(any(tip in text for tip in tips if tip for text in texts))
        return {name: round(share, 3) for name, share in shares.items() if share}


def rows(count: int) -> list[tuple[str, str]]:
    """Return questions with their answers."""
    return [(f"the capital of land {number}", f"town {number}") for number in range(count)]


def answer_to(text: str) -> str:
    """Return the right answer to the last question in a text, except every fourth."""
    number = int(text.rpartition("land ")[2].split()[0].strip("."))
    return f"town {number}" if number % 4 else "a town"


def ours(auto: Auto, demos: int) -> Log:
    """Run our optimizer."""
    log = Log()

    def script(message: str) -> str:
        kind = next((kind for words, kind in KINDS.items() if words in message), "")
        if kind:
            text = log.reply(kind, message)
            return f"<prompt>{text}</prompt>" if kind == "instruction" else text
        return "a plan" if message.rstrip().endswith("Plan:") else answer_to(message)

    settings: dict[str, Any] = {"demos": Demos(max=demos)} if demos else {}
    question = Input("question", str)
    plan = LLM("first", prompt=Text(START["first"]), output={"plan": str}, **settings)(
        question=question
    )
    last = LLM("second", prompt=Text(START["second"]), **settings)(plan=plan, question=question)
    system = System("parity", outputs={"answer": last}, lm="lm")
    most = SIZES[auto][1]
    pairs = rows(2 * (most + MORE) if demos else most + MORE + POOL)
    examples = [Example(f"e{i}", {"question": q}, {"answer": a}) for i, (q, a) in enumerate(pairs)]
    job = OptimizerJob(system, exact_match("answer"), examples, lambda: ScriptedLM(script))
    score = job.scorer.score

    async def watch(
        candidates: Sequence[Mapping[str, Any]], some: Sequence[Example]
    ) -> list[Evaluation]:
        log.evaluations.append(len(some))
        return await score(candidates, some)

    job.scorer.score = watch  # type: ignore[method-assign,assignment]  # records the sizes
    job.run(Mipro(MIPROSettings(auto=auto)))
    log.runs = int(job.spent)
    return log


def dspys(auto: Auto, demos: int, shown: int) -> Log:
    """Run DSPy's optimizer, with ``shown`` train examples."""
    import dspy
    from dspy.teleprompt import mipro_optimizer_v2 as module

    log, lock = Log(), threading.Lock()

    class Scripted(dspy.BaseLM):  # type: ignore[misc]  # DSPy is untyped here
        def forward(
            self, prompt: object = None, messages: Sequence[Message] = (), **settings: object
        ) -> SimpleNamespace:
            text = "\n".join(str(message["content"]) for message in messages)
            names = [
                name for name in (*FIELDS, "plan", "answer") if f"`[[ ## {name} ## ]]`" in text
            ]
            wanted = text.rpartition("Respond with the corresponding output field")[2]
            (name,) = [name for name in names if f"[[ ## {name} ## ]]" in wanted]
            with lock:
                if name in FIELDS:
                    reply = log.reply(FIELDS[name], text)
                else:
                    reply = (
                        "a plan" if name == "plan" else answer_to(text.partition("Respond with")[0])
                    )
            content = f"[[ ## {name} ## ]]\n{reply}\n\n[[ ## completed ## ]]"
            message = SimpleNamespace(content=content, tool_calls=None)
            choice = SimpleNamespace(message=message, finish_reason="stop")
            return SimpleNamespace(choices=[choice], usage={}, model="scripted")

    class Program(dspy.Module):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.first = dspy.Predict(dspy.Signature("question -> plan", START["first"]))
            self.second = dspy.Predict(dspy.Signature("plan, question -> answer", START["second"]))

        def forward(self, question: str) -> object:
            with lock:
                log.runs += 1
            return self.second(plan=self.first(question=question).plan, question=question)

    def evaluate(size: int, *arguments: object) -> object:
        log.evaluations.append(size)
        return original(size, *arguments)

    original = module.eval_candidate_program
    module.eval_candidate_program = evaluate
    try:
        examples = [
            dspy.Example(question=question, answer=answer).with_inputs("question")
            for question, answer in rows(shown + SIZES[auto][1])
        ]
        dspy.configure(lm=Scripted("scripted"))
        dspy.disable_logging()
        optimizer = module.MIPROv2(
            metric=lambda example, prediction, trace=None: example.answer == prediction.answer,
            auto=auto,
            max_bootstrapped_demos=demos,
            max_labeled_demos=demos,
            num_threads=1,
        )
        with redirect_stdout(io.StringIO()), redirect_stderr(io.StringIO()):  # progress bars
            optimizer.compile(Program(), trainset=examples[:shown], valset=examples[shown:])
    finally:
        module.eval_candidate_program = original
    return log


def compare(auto: Auto, demos: int) -> dict[str, object]:
    """Run both sides at one size, and return the facts of each."""
    from dspy.propose.grounded_proposer import TIPS as THEIRS

    own = ours(auto, demos)
    shown = 10 * sum(kind == "observation" for kind, _ in own.requests)
    other = dspys(auto, demos, shown)
    return {"ours": own.facts(TIPS), "dspy": other.facts([*THEIRS.values()])}


def main(arguments: Sequence[str] | None = None) -> None:
    """Write the comparison at all sizes."""
    import dspy

    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--output", type=Path, required=True)
    parsed = parser.parse_args(arguments)
    found: dict[str, object] = {"dspy": dspy.__version__}
    for name, (auto, demos) in COMPARED.items():
        found[name] = compare(auto, demos)
    parsed.output.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
