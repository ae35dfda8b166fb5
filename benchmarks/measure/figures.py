"""Write figures of a finished run's local rewards (OPTIMAS, figure 5).

    python -m benchmarks.measure.figures runs/atlas --output docs/figures/atlas

Writes ``scores.svg``, the scores of each method and the differences by example;
``alignment.svg``, local against global rewards; and ``length.svg``, local rewards against the
lengths, values or labels of outputs.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from compound.report import summarize
from compound.report.figures import scores_svg, with_background
from compound.report.rewards import reward_svg
from compound.rewards.inspection import Inspection


def main(arguments: Sequence[str] | None = None) -> None:
    """Draw the figures of one run."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("run", type=Path, help="a run directory of method optimas")
    parser.add_argument(
        "--output", type=Path, default=Path("figures"), help="the folder to write to"
    )
    args = parser.parse_args(arguments)
    overview = Inspection.open(args.run).overview()
    drawings = {
        "scores": scores_svg(summarize(args.run)),
        "alignment": reward_svg("alignment", overview.heads),
        "length": reward_svg("length", overview.heads),
    }
    args.output.mkdir(parents=True, exist_ok=True)
    for name, svg in drawings.items():
        (args.output / f"{name}.svg").write_text(with_background(svg) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
