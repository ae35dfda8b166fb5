"""Tables of the time and memory of training steps."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import median
from typing import Any

from tables.data import markdown, results


def speed() -> str:
    """Compare a training step with TRL's: medians, and the range over the turns of one run."""
    found = results("weights_speed")
    step, shared = found["step"], found["shared"]
    rows = [
        ["32 × (192 + 32) tokens, every prompt read", step["trl"], step["ours"]],
        ["the same, equal prompts read once", step["trl"], step["ours with shared prompts"]],
        ["32 × (320 + 32) tokens, equal prompts read once", shared["trl"], shared["once"]],
    ]
    return markdown(
        ["a step on", "TRL, s", "ours, s", "time", "TRL, MiB", "ours, MiB", "memory"],
        [
            [
                name,
                in_range(a["seconds"], *a["spread"], digits=1),
                in_range(b["seconds"], *b["spread"], digits=1),
                in_range(*ratios(b, a)),
                f"{a['peak']:,.0f}",
                f"{b['peak']:,.0f}",
                f"{b['peak'] / a['peak']:.2f}",
            ]
            for name, a, b in rows
        ],
    )


def long_prompts() -> str:
    """Compare reading long prompts once with reading them for every sample."""
    found = results("weights_speed")["long"]
    every, once = found["every"], found["once"]
    row = [
        *(in_range(one["seconds"], *one["spread"], digits=1) for one in (every, once)),
        in_range(*ratios(once, every)),
        *(f"{one['peak']:,.0f}" for one in (every, once)),
    ]
    return markdown(
        ["every prompt, s", "equal prompts once, s", "time", "every, MiB", "once, MiB"], [row]
    )


def swaps() -> str:
    """Tabulate the sampling rate with new adapters in every step, as a share of that with the same ones."""
    rows = []
    for engine, found in results("adapter_swaps").items():
        same, shares = found["tokens_per_second"]["same"], found["by_same"]
        rows.append(
            [
                f"`{engine}`",
                str(found["rounds"]),
                in_quartiles(same, digits=0),
                in_quartiles(shares["new"]),
                in_quartiles(shares["first use"]) if "first use" in shares else "–",
            ]
        )
    head = [
        "engine",
        "rounds",
        "tokens/s with the same adapters",
        "share with new ones",
        "loaded at first use",
    ]
    return markdown(head, rows)


def in_quartiles(found: Mapping[str, float], *, digits: int = 2) -> str:
    """Format a median with the quartiles."""
    return in_range(found["median"], found["p25"], found["p75"], digits=digits)


def ratios(one: Mapping[str, Any], other: Mapping[str, Any]) -> tuple[float, float, float]:
    """Return median, minimum and maximum of the ratios of one measurement's seconds to another's.

    If the measurements alternated, each ratio belongs to one turn; otherwise the limits follow from
    the spreads.

    >>> alternated = {"each": [1.0, 2.0, 9.0]}, {"each": [2.0, 2.0, 10.0]}
    >>> ratios(*alternated)
    (0.9, 0.5, 1.0)
    >>> ratios({"seconds": 1.0, "spread": [1.0, 3.0]}, {"seconds": 4.0, "spread": [2.0, 5.0]})
    (0.25, 0.2, 1.5)
    """
    if "each" in one and "each" in other:
        found = [a / b for a, b in zip(one["each"], other["each"], strict=True)]
        return median(found), min(found), max(found)
    (low, high), (least, most) = one["spread"], other["spread"]
    return one["seconds"] / other["seconds"], low / most, high / least


def in_range(middle: float, low: float, high: float, *, digits: int = 2) -> str:
    """Format a median with the minimum and the maximum.

    >>> in_range(0.5, 0.25, 1.0)
    '0.50 (0.25 to 1.00)'
    """
    return f"{middle:.{digits}f} ({low:.{digits}f} to {high:.{digits}f})"


def sampling() -> str:
    """Tabulate tokens per second through a graph, as a share of those of the engine alone."""
    found = results("weights_speed")["sampling"]
    low, high = found["spread"]
    row = [f"{found['ratio']:.2f}", f"{low:.2f} to {high:.2f}", f"{found['tokens_per_second']:.0f}"]
    return markdown(
        ["through the graph, share of the engine alone", "three repeats", "tokens/s, alone"], [row]
    )


def prefill() -> str:
    """Tabulate the prompt tokens of a training step on Atlas, and the reused share."""
    found = results("weights_speed")["prefill"]
    rows = [
        [
            name,
            f"{one['prompt_tokens']:,}",
            f"{one['prompt_tokens'] - one['cached']:,}",
            f"{one['share']:.0%}",
        ]
        for name, one in found.items()
    ]
    return markdown(["method", "prompt tokens of a step", "computed", "reused"], rows)


def several() -> str:
    """Tabulate the memory of training several adapters on one base, and the increase per adapter."""
    found = results("weights_speed")["adapters"]
    rows = [[count, f"{one['peak']:,.0f}"] for count, one in found.items() if count.isdecimal()]
    grown, expected = (f"{found[name]:.1f}" for name in ("grown_by_each", "adapter_and_optimizer"))
    rows.append(["each further one", grown])
    rows.append(["its weights, gradients and optimizer state", expected])
    return markdown(["adapters", "peak, MiB"], rows)


def batches() -> str:
    """Tabulate time and memory of a training step by the number of tokens per micro-batch."""
    found = results("weights_speed")["batches"]
    rows = [
        [
            f"{int(most):,}",
            f"{one['seconds']:.1f}",
            f"{one['peak']:,.0f}",
            f"{one['peak'] - one['idle']:,.0f}",
        ]
        for most, one in found.items()
    ]
    return markdown(["`micro_tokens`", "a step, s", "peak, MiB", "of it for the step, MiB"], rows)


def overheads() -> str:
    """Compare ways of storing an adapter and of holding token records: medians, and the range over turns."""
    found = results("step_overheads")
    files, records = found["adapter"], found["tokens"]
    hashed, kept = ("three times", "once"), ("separate", "shared")
    rows = [
        [
            f"storing an adapter of {files['bytes'] / 2**20:.0f} MiB, s",
            *_medians(files, hashed, "seconds"),
        ],
        ["of it computing, s", *_medians(files, hashed, "CPU seconds")],
        [
            f"a record of {records['prompt']:,} + {records['answer']:,} tokens, KiB",
            *(f"{records[way]['bytes']['median'] / 1024:.0f}" for way in kept),
        ],
        ["making it from parsed JSON, ms", *_medians(records, kept, "seconds", 1000)],
    ]
    return markdown(["", "before", "now"], rows)


def _medians(
    found: Mapping[str, Any], ways: Sequence[str], quantity: str, scale: float = 1
) -> list[str]:
    measured = [found[way][quantity] for way in ways]
    return [
        in_range(*(scale * value for value in (one["median"], *one["spread"]))) for one in measured
    ]


TABLES = (speed, long_prompts, sampling, swaps, prefill, several, batches, overheads)
