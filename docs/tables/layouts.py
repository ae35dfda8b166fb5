"""Tables of the simulation of layouts."""

from __future__ import annotations

from collections.abc import Mapping
from statistics import median
from typing import Any

from tables.data import markdown, results

KINDS = ("in turns", "one after the other", "overlapping")


def layouts(gpus: str) -> str:
    """Tabulate the fastest layout of each kind, with examples in proportion to the GPUs."""
    rows = [
        [
            base,
            kind,
            _division(found[kind]),
            f"{found[kind]['step']:.0f} s",
            found[kind]["bottleneck"],
        ]
        for base, by_gpus in results("layouts")["scaling"].items()
        for found in [by_gpus[gpus]["growing"]]
        for kind in KINDS
    ]
    return markdown(
        ["base", "kind", "GPUs: sampling + training", "step", "takes the longest"], rows
    )


def layout_scaling() -> str:
    """Tabulate the seconds of a step with the same examples, by number of GPUs."""
    scaling = results("layouts")["scaling"]
    numbers = list(dict.fromkeys(gpus for by_gpus in scaling.values() for gpus in by_gpus))
    rows = []
    for base, by_gpus in scaling.items():
        for kind in ("in turns", "overlapping"):
            found = {gpus: each["fixed"].get(kind) for gpus, each in by_gpus.items()}
            rows.append(
                [base, kind, *(_seconds(found.get(gpus)) for gpus in sorted(numbers, key=int))]
            )
    return markdown(["base", "kind", *sorted(numbers, key=int)], rows)


def layout_assumptions() -> str:
    """Tabulate the fastest overlapping layout of eight GPUs by what the software reaches."""
    found = results("layouts")["assumptions"]
    labels = list(next(iter(found.values())))
    rows = [
        [
            label,
            *(f"{_division(each[label])}: {each[label]['step']:.0f} s" for each in found.values()),
        ]
        for label in labels
    ]
    return markdown(["", *found], rows)


def _division(found: Mapping[str, Any]) -> str:
    if not found["training_gpus"]:
        return f"{found['sampling_gpus']} for both"
    return f"{found['sampling_gpus']} + {found['training_gpus']}"


def _seconds(found: Mapping[str, Any] | None) -> str:
    return "–" if found is None else f"{found['step']:.0f} s"


def base_memory() -> str:
    """Tabulate the memory of training and sampling with base models of three sizes."""
    found = results("base_memory")
    lines = {
        "weights in bfloat16": "weights",
        "weights in NF4 (`4bit`)": "weights_4bit",
        "an adapter in the trainer": "adapter",
        "activations": "activations",
        "activations with checkpointing": "activations_checkpointed",
        "logits, at most": "logits",
        "cache of 1,000 tokens": "cache_of_1000_tokens",
    }
    bases = found["bases"].values()
    rows = [
        [label, *(f"{each[key] / 1e9:.1f} GB" for each in bases)] for label, key in lines.items()
    ]
    rows += [
        [
            "**training, with checkpointing**",
            *(f"{_training(each, 'weights'):.0f} GB" for each in bases),
        ],
        [
            "**the same with `4bit`**",
            *(f"{_training(each, 'weights_4bit'):.0f} GB" for each in bases),
        ],
    ]
    return markdown(["", *found["bases"]], rows)


def _training(found: Mapping[str, int], weights: str) -> float:
    parts = (weights, "adapter", "activations_checkpointed", "logits")
    return sum(found[part] for part in parts) / 1e9


def memory_peaks() -> str:
    """Tabulate the memory plan of training steps beside the measured peaks."""
    kinds = {"one": "with an engine, one base", "each": "with an engine, a base for each"}

    def row(found: Mapping[str, Any]) -> list[str]:
        tokens = f"{found['each']} × {found['prompt']} + {found['answer']}"
        what = kinds.get(found["base"], tokens)
        numbers = [f"{found[key] / 1e6:,.0f} MB" for key in ("most", "peak", "resident")]
        return [
            found["model"] or found["family"],
            found["dtype"],
            f"{found['micro_tokens']:,}",
            "yes" if found["checkpointing"] else "no",
            what,
            *numbers,
            f"{found['plan/peak']:.2f}",
        ]

    head = ["model", "format", "`micro_tokens`", "checkpointing", "samples of a prompt", "plan"]
    head += ["allocated", "resident", "plan / allocated"]
    return markdown(head, [row(found) for found in results("memory_peaks")])


def packed_weights() -> str:
    """Tabulate steps and decoding with shared weights and fused products against those without."""

    def ratio(row: Mapping[str, Any], name: str) -> str:
        middle, low, high = row[name]
        return f"{middle:.2f} ({low:.2f}–{high:.2f})"

    def cells(row: Mapping[str, Any]) -> list[str]:
        if "peft" not in row:  # decoding
            seconds, own, shared = row["own"], "", ratio(row, "shared/own")
        else:
            seconds, own = row["peft"], ratio(row, "own/peft")
            shared = ratio(row, "shared/peft")
        return [row["case"], row["dtype"], f"{median(seconds):.1f} s", own, shared]

    head = ["case", "format", "before", "fused products", "and shared weights"]
    return markdown(head, [cells(row) for row in results("packed_weights")])


TABLES = (base_memory, memory_peaks, packed_weights, layouts, layout_scaling, layout_assumptions)
