"""Tables of constrained decoding."""

from __future__ import annotations

from tables.data import markdown, results


def constrained() -> str:
    """Tabulate the shares of valid answers with and without constrained decoding."""
    found = results("constrained_decoding")["validity"]
    rows = [
        [
            name,
            f"{one['valid']} of {one['of']}",
            str(one["cut_at_max_tokens"]),
            f"{one['mean_tokens']:.0f}",
        ]
        for name, one in found.items()
    ]
    return markdown(["answers", "valid", "cut at `max_tokens`", "mean tokens"], rows)


def constraint_cost() -> str:
    """Tabulate the cost of constrained decoding, in interleaved pairs of batches."""
    found = results("constrained_decoding")["speed"]
    ratios = sorted(found["ratios"])
    row = [
        str(found["batch"]),
        str(len(ratios)),
        f"{found['median_ratio']:.2f}",
        f"{ratios[0]:.2f} to {ratios[-1]:.2f}",
        f"{found['median_cpu_ratio']:.2f}",
    ]
    headings = [
        "batch",
        "pairs",
        "tokens/s, relative to free answers",
        "range",
        "processor time per token",
    ]
    return markdown(headings, [row])


def grammars() -> str:
    """Tabulate the times of grammar libraries on the schemas of the benchmark."""
    found = results("constrained_decoding")["libraries"]
    rows = [
        [
            f"{name.replace('_', '-')} {one['version']}",
            f"{one['compiled']} of {one['compiled'] + one['rejected'] + one['not_tried']}",
            f"{one['compile_milliseconds_median']:.1f}",
            f"{one['compile_milliseconds_longest']:.0f}",
            f"{one['mask_microseconds_mean']:.0f}",
        ]
        for name, one in found.items()
        if "version" in one
    ]
    headings = [
        "library",
        "schemas compiled within 20 s",
        "compiling, median ms",
        "longest, ms",
        "allowed tokens, mean µs",
    ]
    return markdown(headings, rows)


TABLES = (constrained, constraint_cost, grammars)
