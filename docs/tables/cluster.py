"""Tables of the benchmark of Ray workers."""

from __future__ import annotations

from tables.data import markdown, results


def ray_overhead() -> str:
    """Tabulate the time per example in this process and with one worker."""
    rows = []
    for in_flight in (64, 1):
        found = results("ray_overhead")["overhead"][f"in_flight_{in_flight}"]
        low, high = found["ms_added_range"]
        rows.append(
            [
                str(in_flight),
                f"{found['ms_per_example_here']:.2f} ms",
                f"{found['ms_per_example_on_worker']:.2f} ms",
                f"+{found['ms_added_median']:.2f} ms ({low:.2f} to {high:.2f})",
            ]
        )
    return markdown(
        ["examples in flight", "this process", "one worker", "difference (range)"], rows
    )


def ray_scaling() -> str:
    """Tabulate the throughput of 1 and 8 workers with a model of fixed latency."""
    found = results("ray_overhead")["scaling"]
    low, high = found["ratio_range"]
    ratios = {"1": "1 ×", "8": f"{found['ratio_8_to_1_median']:.2f} × ({low:.2f} to {high:.2f})"}
    rows = [
        [
            workers,
            f"{found['examples_per_second'][workers]:.1f}",
            f"{found['bound_examples_per_second'][workers]:.1f}",
            ratios[workers],
        ]
        for workers in ("1", "8")
    ]
    return markdown(["workers", "examples per second", "bound", "relative (range)"], rows)


def large_job() -> str:
    """Tabulate the driver's resident memory and the time of an evaluation of a million examples."""
    found = results("large_job")
    runs = [found["ray"], found["here"]]
    last = len(runs[0]["examples"]) - 1
    rows = []
    for place in (0, *range(last // 5, last, last // 5), last):
        label = f"{runs[0]['examples'][place]:,}" if place < last else "end"
        cells = [f"{run['mb'][place]:.0f} MB, {run['seconds'][place]:,.0f} s" for run in runs]
        rows.append([label, *cells])
    return markdown(["examples", "three workers", "this process"], rows)


def worker_memory() -> str:
    """Tabulate the memory of workers on one machine that search a corpus."""
    found = results("worker_memory")["workers"]
    rows = [
        [workers, f"{each['workers_mb']:.0f} MB", f"{each['examples_per_second']:.1f}"]
        for workers, each in found.items()
    ]
    return markdown(
        ["workers on the machine", "memory of all workers", "examples per second"], rows
    )


TABLES = (ray_overhead, ray_scaling, worker_memory, large_job)
