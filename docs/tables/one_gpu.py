"""Tables of the measurements on one GPU."""

from __future__ import annotations

from collections.abc import Mapping

from tables.data import markdown, results
from tables.training_speed import in_range

CASES = {
    "step": "32 × (192 + 32) tokens",
    "shared": "32 × (320 + 32) tokens",
    "long": "8 × (1,500 + 32) tokens, one prompt",
}
FORMATS = ("float32 cpu", "float32 cuda", "bfloat16 cpu", "bfloat16 cuda")


def gpu_memory() -> str:
    """Compare the peak memory of a training step with the computed memory, and tabulate its speed."""
    rows = [
        [
            name,
            f"{found['planned'] / 1e9:.1f} GB",
            f"{found['peak'] / 1e9:.1f} GB",
            f"{found['peak'] / found['planned']:.2f}",
            f"{found['reserved'] / 1e9:.1f} GB",
            in_range(*(found["seconds"][key] for key in ("median", "min", "max"))),
            f"{found['tokens_per_second']:,.0f}",
            f"{found['share_of_peak']:.0%}",
        ]
        for name, found in results("one_gpu")["memory"].items()
        if isinstance(found, dict)
    ]
    memory = ["computed", "peak", "peak / computed", "reserved"]
    head = ["base", *memory, "a step, s", "tokens/s", "of the operations"]
    return markdown(head, rows)


def gpu_speed() -> str:
    """Compare a training step on a GPU with TRL's."""
    rows = []
    for part, name in CASES.items():
        found = results("one_gpu")[part]
        kinds = ("trl", "every", "once", "every/trl", "once/trl")
        rows.append(
            [
                name,
                *(
                    in_range(*(found[kind][key] for key in ("median", "min", "max")))
                    for kind in kinds
                ),
            ]
        )
    return markdown(
        [
            "a step on",
            "TRL, s",
            "every prompt, s",
            "equal prompts once, s",
            "every / TRL",
            "once / TRL",
        ],
        rows,
    )


def gpu_agreement() -> str:
    """Tabulate the largest differences of log-probabilities and gradients from a model in float64."""
    rows = [
        [family, *(", ".join(_largest(found, form)) for form in FORMATS)]
        for family, found in results("one_gpu")["agreement"].items()
        if isinstance(found, dict)
    ]
    return markdown(["family", *(form.replace(" ", ", ") for form in FORMATS)], rows)


def _largest(found: Mapping[str, Mapping[str, float]], form: str) -> list[str]:
    both = [found[f"{form} {way}"] for way in ("default", "unshared")]
    return [f"{max(each[key] for each in both):.0e}" for key in ("logps", "gradients")]


TABLES = (gpu_agreement, gpu_memory, gpu_speed)
