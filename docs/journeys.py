"""Count what two journeys pass through: one run of a system, and one optimization of 150 runs.

``python docs/journeys.py [ROOT]`` prints the stack frames from `compound.run` to the model, with the
files that hold them, and the functions and files of the package that each journey enters. Both use
one LLM component and a scripted model.
"""

from __future__ import annotations

import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import CodeType, FrameType

ROOT = Path(sys.argv[1] if sys.argv[1:] else Path(__file__).parents[1]).resolve()
FOLDERS = tuple(
    str(ROOT / name) + "/" for name in ("compound", "components", "rewards", "optimizers")
)
sys.path.insert(0, str(ROOT))


@contextmanager
def entered() -> Iterator[set[CodeType]]:
    """Collect the functions of the package that are entered, in all threads."""
    found: set[CodeType] = set()

    def note(frame: FrameType, event: str, _: object) -> None:
        if event == "call" and frame.f_code.co_filename.startswith(FOLDERS):
            found.add(frame.f_code)

    threading.setprofile(note)
    sys.setprofile(note)
    try:
        yield found
    finally:
        sys.setprofile(None)
        threading.setprofile(None)  # type: ignore[arg-type]


def count(journey: str, run: Callable[[], object]) -> None:
    """Print the functions and files of a journey, except for what its modules run when imported."""
    run()  # imports
    with entered() as found:
        run()
    functions = {code for code in found if code.co_name not in {"<module>"}}
    print(f"{journey}: {len(functions)} functions, {len({c.co_filename for c in functions})} files")


def main() -> None:
    """Run both journeys."""
    import compound as cp
    from compound.testing import ScriptedLM

    stacks: list[list[str]] = []

    def answer(message: str) -> str:
        frame: FrameType | None = sys._getframe()
        files = []
        while frame is not None:
            files.append(frame.f_code.co_filename)
            frame = frame.f_back
        stacks.append([name for name in files if name.startswith(FOLDERS)])
        return "yes" if "please" in message else "no"

    node = cp.LLM("answer", prompt=cp.Text("Answer."))(question=cp.Input("question"))
    system = cp.System("qa", outputs={"answer": node}, lm="lm")
    engines = {"lm": ScriptedLM(answer)}
    rows = [{"question": f"Is {i} a number?", "answer": "yes"} for i in range(60)]
    data = {"train": rows[:30], "valid": rows[30:]}

    def optimize() -> None:
        with tempfile.TemporaryDirectory() as folder:
            cp.optimize(
                system,
                data,
                "exact_match",
                method="search",
                budget=150,
                engines=engines,
                run_dir=Path(folder) / "run",
                progress=False,
            )

    count("run", lambda: cp.run(system, {"question": "Is 1 a number?"}, engines=engines))
    print(f"run: {len(stacks[-1])} frames to the model, {len(set(stacks[-1]))} files on the stack")
    count("optimize", optimize)


if __name__ == "__main__":
    main()
