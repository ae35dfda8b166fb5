"""Kill a run in the middle, resume it by the same call, and count the requests to the model.

A process optimizes until it is killed. The same call of `cp.optimize` with the same run directory
then continues the run. Each request is written to a log, so that the example can tell which ones
were repeated.

Run: python docs/examples/resume.py [FOLDER]
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import compound as cp
from compound.testing import ScriptedLM


class LoggedLM(ScriptedLM):
    """A simulated model that adds two numbers, and writes each request to a file."""

    def __init__(self, log: Path) -> None:
        super().__init__(self.add, latency=0.02, concurrency=4)
        self.log = log

    def add(self, message: str) -> str:
        """Answer in a sentence, or with the number alone where the prompt shows an example."""
        with self.log.open("a", encoding="utf-8") as file:
            file.write(json.dumps(message) + "\n")
        sums = re.findall(r"What is (\d+) plus (\d+)", message)
        total = int(sums[-1][0]) + int(sums[-1][1])
        return str(total) if len(sums) > 1 else f"The sum is {total}."


def optimize(folder: Path, log: str, run: str = "resume") -> cp.Result:
    """Start a run, or continue it."""
    prompt = cp.Text("Answer the question.")
    answerer = cp.LLM(
        "answerer", prompt=prompt, demos=cp.Demos(max=2), output={"answer": str}, max_tokens=8
    )
    system = cp.System(
        "sums", outputs={"answer": answerer(question=cp.Input("question", str))}, lm="adder"
    )
    rows = [
        {"question": f"What is {i} plus {7 * i % 20}?", "answer": str(i + 7 * i % 20)}
        for i in range(90)
    ]
    return cp.optimize(
        system,
        data={"train": rows[:30], "valid": rows[30:60], "test": rows[60:]},
        metric=cp.metrics.token_f1("answer"),
        budget=cp.Budget(system_runs=300),
        engines={"adder": LoggedLM(folder / log)},
        run_dir=folder / run,
        progress=False,
    )


def lines(path: Path) -> list[str]:
    """Return the complete lines of a file that another process may be writing."""
    text = path.read_text("utf-8") if path.exists() else ""
    return text.splitlines()[: text.count("\n")]


def recorded(run: Path) -> set[str]:
    """Return the requests in the traces of a run."""
    calls = [call for line in lines(run / "traces.jsonl") for call in json.loads(line)["calls"]]
    return {json.dumps(call["exchanges"][0]["messages"][-1]["content"]) for call in calls}


def main(folder: Path) -> cp.Result:
    """Run, kill and resume; then compare with a run that is not interrupted."""
    first = subprocess.Popen([sys.executable, __file__, str(folder), "first"])
    while len(lines(folder / "first.log")) < 100 and first.poll() is None:
        time.sleep(0.01)
    first.kill()
    first.wait()
    before = recorded(folder / "resume")
    result = optimize(folder, "second.log")
    whole = optimize(folder, "whole.log", run="whole")
    sent = {name: lines(folder / f"{name}.log") for name in ("first", "second", "whole")}
    print(f"requests before the kill: {len(sent['first'])}, after it: {len(sent['second'])}")
    print(f"requests of an uninterrupted run: {len(sent['whole'])}")
    print(
        f"recorded requests that were sent again: {len(before & set(sent['second']))} of {len(before)}"
    )
    print(f"same configuration as the uninterrupted run: {result.best == whole.best}")
    return result


if __name__ == "__main__":
    if sys.argv[2:] == ["first"]:
        optimize(Path(sys.argv[1]), "first.log")
    else:
        with tempfile.TemporaryDirectory() as temporary:
            main(Path(sys.argv[1] if len(sys.argv) > 1 else temporary))
