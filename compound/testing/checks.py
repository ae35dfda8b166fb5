"""Helpers of the kits: run one without pytest, compare values, watch random generators."""

from __future__ import annotations

import json
import random
import shutil
import sys
import tempfile
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from unittest import SkipTest

import numpy as np

from compound.graph.configuration import canonical_json, to_readable_json
from compound.graph.registry.user_code import place_of_error
from compound.optimization.registration import json_problem

__all__ = ["json_problem", "run_kit", "seeded_global_generators", "without_global_generators"]


def run_kit(kit: type[object]) -> dict[str, str]:
    """Run the checks of a kit without pytest.

    Each check runs on a new instance. pytest fixtures are not available.

    Args:
        kit: a subclass of one of the kits.

    Returns:
        The message of each failed check by its name; empty if all checks passed.
    """
    failures = {}
    for name in dir(kit):
        if not name.startswith("test_"):
            continue
        try:
            getattr(kit(), name)()
        except SkipTest:
            continue
        except AssertionError as error:
            failures[name] = str(error)
        except Exception as error:  # noqa: BLE001 - any exception of the tested code is a failed check
            failures[name] = f"{type(error).__name__}: {error}{place_of_error(error)}"
    return failures


def temporary_folder(owner: object) -> Path:
    """Return a new folder that is deleted when its owner is garbage-collected."""
    folder = Path(tempfile.mkdtemp(prefix="compound-kit-"))
    weakref.finalize(owner, shutil.rmtree, folder, ignore_errors=True)
    return folder


def through_json(value: object) -> object:
    """Return a value after a round trip through JSON."""
    found: object = json.loads(json.dumps(value))
    return found


def same_json(one: object, other: object) -> bool:
    """Return whether two values have the same JSON form; NaN equals itself."""
    return canonical_json(to_readable_json(one)) == canonical_json(to_readable_json(other))


SEED = 20_250_923  # an unlikely seed: code under test that seeds with the same number would go unnoticed


@contextmanager
def seeded_global_generators(seed: int) -> Iterator[None]:
    """Seed the global generators for a block, and restore their states afterwards."""
    states = random.getstate(), np.random.get_state()
    random.seed(seed)
    np.random.seed(seed)
    torch = sys.modules.get("torch")
    of_torch = None if torch is None else torch.get_rng_state()
    if torch is not None:
        torch.default_generator.manual_seed(seed)
    try:
        yield
    finally:
        random.setstate(states[0])
        np.random.set_state(states[1])
        if torch is not None:
            torch.set_rng_state(of_torch)


@contextmanager
def without_global_generators(what: str, seed: int = SEED) -> Iterator[None]:
    """Check that a block neither draws from nor seeds a global random generator."""
    with seeded_global_generators(seed):
        before = _global_states()
        yield
        after = _global_states()
    used = [name for name, state in before.items() if after[name] != state]
    assert not used, (
        f"{what} used or seeded the global generator of {' and '.join(used)}; use "
        "compound.execution.rng.generator(seed, ...) instead, so that equal seeds give equal results"
    )


def _global_states() -> dict[str, object]:
    """Return the states of the global generators by module name."""
    _, keys, *rest = np.random.get_state(legacy=True)
    states: dict[str, object] = {
        "random": random.getstate(),
        "numpy.random": (np.asarray(keys).tobytes(), *rest),
    }
    if (torch := sys.modules.get("torch")) is not None:
        states["torch"] = torch.get_rng_state().numpy().tobytes()
    return states
