"""Measurements on a GPU, with the CPU in its place."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("trl")

from benchmarks.measure.gpu import agreement, models, one_gpu  # noqa: E402
from numerics import GRADIENTS, LOGPROBS  # noqa: E402

pytestmark = pytest.mark.filterwarnings(
    "ignore"
)  # of families, about kernels that are not installed


@pytest.mark.parametrize("family", agreement.FAMILIES)
def test_the_formats_of_every_family_are_compared_with_float64(
    family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(models, "GPU", "cpu")
    before = torch.get_rng_state()
    found = agreement._agreement(*agreement.FAMILIES[family])
    assert set(found) == {
        f"{form} cpu {way}" for form in ("float32", "bfloat16") for way in ("unshared", "default")
    }
    for way in ("unshared", "default"):
        exact, half = found[f"float32 cpu {way}"], found[f"bfloat16 cpu {way}"]
        assert isinstance(exact, dict)
        assert isinstance(half, dict)
        assert exact["logps"] < LOGPROBS
        assert exact["gradients"] < GRADIENTS
        assert half["logps"] > 10 * exact["logps"]  # the formats differ
    assert bool((torch.get_rng_state() == before).all())


def test_a_machine_without_cuda_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(SystemExit, match="PyTorch finds no CUDA device"):
        one_gpu.main(["agreement"])
