"""The trainer: what TRL computes is the oracle, and nothing about batching, storing or sharing changes a gradient."""

from __future__ import annotations

import json
import random
import shutil
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from benchmarks.simulated.toy_model import make_toy_model
from numerics import GRADIENTS, LOGPROBS
from training_settings import Parts, plain
from trainings.learners import catch_gradients, drawn, noised, randomize

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.usefixtures("one_thread")
peft = pytest.importorskip("peft")

from compound import LLM, CompoundError, Input, LoRA, System  # noqa: E402
from compound.core.engine import TokenRecord  # noqa: E402
from compound.core.errors import ConfigurationError, DeclarationError  # noqa: E402
from compound.core.storage.artifacts import folder_digest  # noqa: E402
from compound.graph.space import Weights  # noqa: E402
from compound.optimizers.weights.bases import PlannedTraining  # noqa: E402
from compound.optimizers.weights.credit import advantages  # noqa: E402
from compound.optimizers.weights.learner import adapters as adapters_module  # noqa: E402
from compound.optimizers.weights.learner import forward as forward_module  # noqa: E402
from compound.optimizers.weights.learner.adapters import Adapters, partition  # noqa: E402
from compound.optimizers.weights.learner.batching import cost, micro_batches  # noqa: E402
from compound.optimizers.weights.learner.forward import OutputLayer, forward  # noqa: E402
from compound.optimizers.weights.learner.samples import Sample  # noqa: E402
from compound.optimizers.weights.learner.targets import resolve  # noqa: E402
from compound.optimizers.weights.learner.trainer import StaleSamples, Trainer  # noqa: E402
from compound.optimizers.weights.recipes.mmgrpo import (  # noqa: E402
    MMGRPO,
    MMGRPOSettings,
    rollout_rewards,
)
from compound.optimizers.weights.steps import TrainingState  # noqa: E402
from compound.optimizers.weights.training import TrainingSession  # noqa: E402
from compound.testing import PlainMemory, ScriptedLM  # noqa: E402

PLAIN = plain()


def some(components: Sequence[str] = ("x",), groups: int = 2, **given: int) -> list[Sample]:
    return drawn(components, **{"groups": groups, "longest": 4, **given}, on_policy=True)


def noting(calls: list[str], original: Callable[..., Any]) -> Callable[..., Any]:
    def noted(*given: Any, **named: Any) -> Any:
        calls.append("called")
        return original(*given, **named)

    return noted


def gradients(
    monkeypatch: pytest.MonkeyPatch,
    adapters: Adapters,
    settings: Parts,
    samples: Sequence[Sample],
    adapter_of: Mapping[str, str] | None = None,
) -> dict[str, Any]:
    """Return the gradients of one update, which is not made."""
    with monkeypatch.context() as patched:
        found = catch_gradients(patched)
        adapter_of = adapter_of or {name: name for name in adapters.spaces}
        settings.trainer(adapters, adapter_of, longest=8).step(samples, 0)
    return found


def apart(a: dict[str, Any], b: dict[str, Any]) -> float:
    """Return the largest difference of two sets of gradients, relative to the largest gradient."""
    assert a.keys() == b.keys()
    assert a
    most = max(float(tensor.abs().max()) for tensor in b.values())
    assert most > 0
    return max(float((a[name] - b[name]).abs().max()) for name in a) / most


def padded(rows: Sequence[Sequence[int]], *, left: bool) -> tuple[Any, Any]:
    width = max(map(len, rows))
    ids, mask = (
        torch.zeros(len(rows), width, dtype=torch.long),
        torch.zeros(len(rows), width, dtype=torch.long),
    )
    for i, row in enumerate(rows):
        place = slice(width - len(row), width) if left else slice(0, len(row))
        ids[i, place], mask[i, place] = torch.tensor(row), 1
    return ids, mask


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("loss", "temperature"), [("grpo", 1.0), ("grpo", 0.6), ("dr_grpo", 1.0), ("dapo", 1.5)]
)
def test_one_component_with_one_call_is_trls_grpo(
    toy_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, loss: str, temperature: float
) -> None:
    adapters, samples = noised(toy_model, "x"), some()
    settings = plain(loss=loss, temperature=temperature)
    ours = gradients(monkeypatch, adapters, settings, samples)
    expected = trls_gradients(adapters, tmp_path, samples, loss, temperature=temperature)
    assert apart(ours, expected) < GRADIENTS


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("loss", ["grpo", "dr_grpo", "dapo"])
@pytest.mark.parametrize("corrected", [True, False])
def test_later_updates_are_clipped_corrected_and_bound_to_the_base_as_in_trl(
    toy_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, loss: str, corrected: bool
) -> None:
    adapters, samples = noised(toy_model, "x"), some()
    with adapters.using("x") as model, torch.no_grad(), torch.random.fork_rng():
        torch.manual_seed(5)
        now = forward(model, samples).logps
        old, base, sampler = (now + 0.5 * torch.randn(now.shape) for _ in range(3))
    samples = [
        replace(s, tokens=replace(s.tokens, logprobs=tuple(row[: s.length].tolist())))
        for s, row in zip(samples, sampler, strict=True)
    ]
    fixed = tuple(
        {id(s): row[: s.length] for s, row in zip(samples, some, strict=True)}
        for some in (old, base)
    )
    monkeypatch.setattr(Trainer, "_fixed_logps", lambda *_: fixed)
    how = {"clip": 0.1, "clip_high": 0.28, "beta": 0.04, "correction": 2.0 if corrected else None}
    ours = gradients(monkeypatch, adapters, plain(loss=loss, **how), samples)
    inputs = {"old_per_token_logps": old, "ref_per_token_logps": base}
    if corrected:
        inputs["importance_sampling_ratio"] = (old - sampler).exp().clamp(max=2.0)
    given: Any = {"epsilon": 0.1, "epsilon_high": 0.28, "beta": 0.04}
    given["use_bias_correction_kl"] = False
    expected = trls_gradients(adapters, tmp_path, samples, loss, inputs=inputs, **given)
    assert apart(ours, expected) < GRADIENTS


def trls_gradients(
    adapters: Adapters,
    toy_model: Path,
    samples: Sequence[Sample],
    loss: str,
    *,
    mask: Any = None,
    tool_mask: Any = None,
    inputs: Mapping[str, Any] | None = None,
    beta: float = 0.0,
    **given: Any,
) -> dict[str, Any]:
    """Return the gradients of TRL's loss; ``mask`` is 0 for samples that TRL masks, ``tool_mask`` for tokens."""
    trl = pytest.importorskip("trl")
    datasets = pytest.importorskip("datasets")
    arguments = trl.GRPOConfig(
        output_dir=str(toy_model),
        per_device_train_batch_size=8,
        num_generations=4,
        max_completion_length=8,
        loss_type=loss,
        report_to=[],
        use_cpu=True,
        bf16=False,
        beta=0.0,
        **given,
    )
    theirs = trl.GRPOTrainer(
        model=adapters.model,
        reward_funcs=lambda **_: [0.0],
        args=arguments,
        train_dataset=datasets.Dataset.from_list([{"prompt": "go"}] * 8),
        processing_class=adapters.tokenizer,
    )
    theirs.current_gradient_accumulation_steps = 1
    theirs.beta = beta  # else the trainer would look for its own adapters
    theirs.use_vllm = "importance_sampling_ratio" in (inputs or {})  # which corrects by it
    prompt_ids, prompt_mask = padded([s.tokens.prompt for s in samples], left=True)
    completion_ids, completion_mask = padded([s.tokens.sampled for s in samples], left=False)
    if mask is not None:
        completion_mask = completion_mask * mask
    extra = {} if tool_mask is None else {"tool_mask": tool_mask}
    items = (completion_mask if tool_mask is None else completion_mask * tool_mask).sum()
    adapters.model.eval()
    with adapters.using("x"):
        theirs._compute_loss(
            adapters.model,
            {
                "prompt_ids": prompt_ids,
                "prompt_mask": prompt_mask,
                "completion_ids": completion_ids,
                "completion_mask": completion_mask,
                "num_items_in_batch": items,
                "advantages": torch.tensor([s.advantages[0] for s in samples]),
                **extra,
                **(inputs or {}),
            },
        ).backward()
    found = {
        f"adapter 'x' {name}": tensor.grad.clone() for name, tensor in adapters.parameters("x")
    }
    for _, tensor in adapters.parameters("x"):
        tensor.grad = None
    return found


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("loss", ["grpo", "dapo"])
def test_truncated_answers_are_masked_as_trl_masks_them(
    toy_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, loss: str
) -> None:
    adapters = noised(toy_model, "x")
    samples = [
        replace(s, tokens=replace(s.tokens, finish_reason="length" if place % 3 == 0 else "stop"))
        for place, s in enumerate(some())
    ]
    settings = plain(loss=loss, mask_truncated=True)
    ours = gradients(monkeypatch, adapters, settings, samples)
    live = torch.tensor([not s.is_truncated for s in samples]).int()[:, None]
    expected = trls_gradients(adapters, tmp_path, samples, loss, mask=live)
    assert apart(ours, expected) < GRADIENTS
    unmasked = gradients(monkeypatch, adapters, settings.but(mask_truncated=False), samples)
    assert apart(unmasked, expected) > 1e-2


@pytest.mark.parametrize("loss", ["grpo", "sft"])
def test_a_step_of_truncated_answers_alone_changes_nothing_when_they_are_masked(
    toy_model: Path, loss: str
) -> None:
    adapters = noised(toy_model, "x")
    beta = {"beta": 0.1} if loss == "grpo" else {}
    settings = plain(loss=loss, mask_truncated=True, epochs=2, **beta)
    trainer = settings.trainer(adapters, {"x": "x"})
    trainer.step([replace(s, on_policy=False) for s in some()], 0)  # momentum that would move on
    before = adapters._serialized("x")
    cut = [
        replace(s, on_policy=False, tokens=replace(s.tokens, finish_reason="length"))
        for s in some()
    ]
    facts = trainer.step(cut, 1)
    assert adapters._serialized("x") == before
    assert facts["masked"] == len(cut)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("loss", ["grpo", "dapo"])
def test_a_conversation_is_trained_as_trl_trains_one_whose_environment_s_turns_are_masked(
    toy_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, loss: str
) -> None:
    """Two turns are two samples here, and one row in TRL; a short conversation weighs as much as a long one."""
    adapters, rng = noised(toy_model, "x"), random.Random(2)
    rows: list[
        tuple[list[int], list[int], list[int], float]
    ] = []  # prompt, completion, mask, advantage
    samples: list[Sample] = []
    for rollout, (turns, reward) in enumerate([(1, 1.0), (3, 0.0), (2, 0.5)]):
        prompt = [rng.randrange(24) for _ in range(4)]
        said: list[int] = []
        mask: list[int] = []
        for turn in range(turns):
            words = [rng.randrange(24) for _ in range(2 + turn)]
            record = TokenRecord((*prompt, *said), tuple(words), (-1.0,) * len(words), "stop")
            unit = ("e", "x", rollout)
            samples.append(
                Sample("x", "e", "x", turn, record, reward, ("e", "x"), rollout, unit=unit)
            )
            said, mask = said + words, mask + [1] * len(words)
            if turn < turns - 1:
                said, mask = [*said, rng.randrange(24)], [*mask, 0]  # the environment's reply
        rows.append((prompt, said, mask, reward))
    taught, _ = advantages(samples, "center", references=rollout_rewards(samples))
    ours = gradients(monkeypatch, adapters, plain(loss=loss), taught)
    whole = [
        Sample(
            "x", "e", "x", 0, TokenRecord(tuple(p), tuple(c), (-1.0,) * len(c), "stop"), r
        ).with_advantage(r - 0.5)
        for p, c, _, r in rows
    ]
    mask = padded([m for _, _, m, _ in rows], left=False)[0]
    expected = trls_gradients(adapters, tmp_path, whole, loss, tool_mask=mask)
    assert apart(ours, expected) < GRADIENTS


@pytest.mark.filterwarnings("ignore")
def test_imitation_is_trls_sft_on_the_same_samples(
    toy_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trl = pytest.importorskip("trl")
    datasets = pytest.importorskip("datasets")
    adapters, samples = noised(toy_model, "x"), some()
    settings = plain(loss="sft", temperature=0.5)  # of attempts, and no part of what is imitated
    ours = gradients(monkeypatch, adapters, settings, samples)
    rows = [
        {
            "input_ids": [*s.tokens.prompt, *s.tokens.sampled],
            "labels": [-100] * len(s.tokens.prompt) + [*s.tokens.sampled],
        }
        for s in samples
    ]
    arguments = trl.SFTConfig(
        output_dir=str(tmp_path),
        per_device_train_batch_size=8,
        report_to=[],
        use_cpu=True,
        bf16=False,
        max_length=None,
    )
    theirs = trl.SFTTrainer(
        model=adapters.model,
        args=arguments,
        train_dataset=datasets.Dataset.from_list(rows),
        processing_class=adapters.tokenizer,
    )
    batch = theirs.data_collator([dict(row) for row in rows])
    adapters.model.eval()
    with adapters.using("x"):
        theirs.compute_loss(adapters.model, batch).backward()
    expected = {f"adapter 'x' {name}": tensor.grad for name, tensor in adapters.parameters("x")}
    assert apart(ours, expected) < GRADIENTS


@pytest.mark.parametrize("length", [1, 4])
def test_a_prompt_read_once_gives_the_gradients_of_reading_everything(
    toy_model: Path, length: int
) -> None:
    adapters, samples = noised(toy_model, "x"), some(prompt=20, longest=length)
    found = []
    for packed in (False, True):
        with adapters.using("x") as model:
            ran = forward(model, samples, packed=packed)
            (ran.logps * torch.arange(len(samples))[:, None]).sum().backward()
        found.append({name: tensor.grad.clone() for name, tensor in adapters.parameters("x")})
        for _, tensor in adapters.parameters("x"):
            tensor.grad = None
    assert apart(*found) < GRADIENTS
    assert cost(samples) < cost(samples, share=False)


def test_adapters_compute_as_a_base_in_half_precision_and_learn_in_float32(
    toy_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """peft computes in float32 there: the gradients are the same but for rounding, and less is kept for them."""

    def learned() -> tuple[dict[str, Any], int]:
        adapters = Adapters(str(toy_model), {"x": LoRA(rank=4)}, dtype="bfloat16")
        randomize(adapters)
        kept: dict[int, int] = {}

        def keep(tensor: Any) -> Any:
            kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            found = gradients(monkeypatch, adapters, PLAIN, some())
        assert {tensor.dtype for tensor in found.values()} == {torch.float32}
        return found, sum(kept.values())

    found, less = learned()
    monkeypatch.setattr(adapters_module, "_compute_in_base_dtype", lambda model: None)
    expected, more = learned()
    assert 0 < apart(found, expected) < 0.1
    assert less < 0.9 * more


@pytest.mark.parametrize("loss", ["grpo", "dapo", "dr_grpo", "sft", "sft_sum"])
def test_micro_batches_do_not_change_an_update(
    toy_model: Path, monkeypatch: pytest.MonkeyPatch, loss: str
) -> None:
    adapters, samples = noised(toy_model, "x"), some(groups=3)
    settings = plain(loss=loss)
    whole, cut = (
        gradients(monkeypatch, adapters, settings.but(micro_tokens=most), samples)
        for most in (8192, 64)
    )
    assert len(micro_batches(samples, 20)) > 3
    assert apart(cut, whole) < GRADIENTS


class TestAdapters:
    def test_a_shared_adapter_learns_from_all_who_share_it(
        self, toy_model: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        samples = some(components=("x", "y"))
        adapters = noised(toy_model, "both")
        shared = gradients(
            monkeypatch, adapters, PLAIN, samples, adapter_of={"x": "both", "y": "both"}
        )
        one = gradients(monkeypatch, adapters, PLAIN, samples[:8], adapter_of={"x": "both"})
        other = gradients(monkeypatch, adapters, PLAIN, samples[8:], adapter_of={"y": "both"})
        assert apart(shared, {name: (one[name] + other[name]) / 2 for name in one}) < GRADIENTS

    def test_the_probe_tells_a_version_from_the_one_before(
        self, toy_model: Path, tmp_path: Path
    ) -> None:
        adapters = noised(toy_model, "x")
        first = adapters.save("x", tmp_path)
        taught = [replace(s, on_policy=False) for s in some()]
        plain(lr=0.05).trainer(adapters, {"x": "x"}).step(taught, 0)
        second = adapters.save("x", tmp_path)
        assert first
        assert second
        read = [
            json.loads((tmp_path / r["path"] / "probe.json").read_text()) for r in (first, second)
        ]
        assert read[1]["before"] == read[0]["logprobs"] != read[1]["logprobs"]
        assert len(read[1]["tokens"]) == len(read[1]["logprobs"]) + 1

    def test_an_adapter_of_another_shape_is_refused(self, toy_model: Path, tmp_path: Path) -> None:
        reference = noised(toy_model, "x", rank=8).save("x", tmp_path)
        with pytest.raises(ConfigurationError, match="another base or another shape"):
            noised(toy_model, "x").start_from("x", reference, tmp_path)

    def test_an_adapter_of_another_base_of_equal_shape_is_refused(
        self, toy_model: Path, tmp_path: Path
    ) -> None:
        """By its probe, or by the name of its base; a copy of the base has another name."""
        reference = noised(toy_model, "x").save("x", tmp_path)
        assert reference
        make_toy_model(tmp_path / "sibling", seed=1)
        copy = shutil.copytree(toy_model, tmp_path / "copy")
        noised(copy, "x").start_from("x", reference, tmp_path)
        foreign = shutil.copytree(tmp_path / reference["path"], tmp_path / "foreign")
        (foreign / "probe.json").unlink()
        unknown = {"path": "foreign", "sha256": folder_digest(foreign)}
        noised(toy_model, "x").start_from("x", unknown, tmp_path)
        other = f"was trained on another base model, '{toy_model.name}': "
        for base, given in ((tmp_path / "sibling", reference), (copy, unknown)):
            with pytest.raises(ConfigurationError, match=other) as caught:
                noised(base, "x").start_from("x", given, tmp_path)
            assert f"if {base} is a copy of it, give its folder that name" in caught.value.hint

    def test_a_truncated_adapter_is_refused(self, toy_model: Path, tmp_path: Path) -> None:
        reference = noised(toy_model, "x").save("x", tmp_path)
        assert reference
        path = tmp_path / reference["path"] / "adapter_model.safetensors"
        path.write_bytes(path.read_bytes()[:100])
        with pytest.raises(ConfigurationError, match="contains no readable adapter"):
            noised(toy_model, "x").load("x", path.parent)
        with pytest.raises(ConfigurationError, match="was changed"):
            noised(toy_model, "x").start_from("x", reference, tmp_path)

    @pytest.mark.parametrize(
        ("targets", "expected"),
        [
            ("attention", ["k_proj", "o_proj", "q_proj", "v_proj"]),
            (
                "all-linear",
                ["down_proj", "gate_proj", "k_proj", "o_proj", "q_proj", "up_proj", "v_proj"],
            ),
            (["up_proj", "q_proj"], ["q_proj", "up_proj"]),
        ],
    )
    def test_targets_are_trained_stored_and_sampled_with(
        self, targets: Any, expected: list[str], toy_model: Path, tmp_path: Path
    ) -> None:
        """What is stored names layers as peft and vLLM read them, and the sampler says what the trainer says."""
        from transformers import AutoModelForCausalLM

        from compound.core.engine import Adapter
        from compound.engines.local.adapters import AdapterCache as Sampling

        adapters = Adapters(str(toy_model), {"x": LoRA(rank=4, targets=targets)}, dtype="float32")
        randomize(adapters)
        adapted = {key.split(".")[-3] for key, _ in adapters.parameters("x")}
        assert sorted(adapted) == expected
        reference = adapters.save("x", tmp_path)
        assert reference
        stored = tmp_path / reference["path"]
        assert folder_digest(stored) == reference["sha256"]
        assert (
            json.loads((stored / "adapter_config.json").read_text())["target_modules"] == expected
        )
        samples = some()
        with adapters.using("x") as model, torch.no_grad():
            ours = forward(model, samples).logps
        base = AutoModelForCausalLM.from_pretrained(toy_model, dtype=torch.float32).eval()
        sampling = Sampling(base, 1, lambda _: None)
        with sampling.applied(Adapter(str(stored), reference["sha256"])), torch.no_grad():
            assert torch.allclose(ours, forward(base, samples).logps, atol=LOGPROBS)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            theirs = peft.PeftModel.from_pretrained(base, stored).eval()
        with torch.no_grad():
            assert torch.allclose(
                ours, forward(theirs.get_base_model(), samples).logps, atol=LOGPROBS
            )
        again = Adapters(str(toy_model), {"x": LoRA(rank=4, targets=targets)}, dtype="float32")
        again.start_from("x", reference, tmp_path)
        assert again.version("x") == reference["sha256"]

    def test_targets_that_the_model_lacks_are_named(self, toy_model: Path) -> None:
        with pytest.raises(DeclarationError, match="nowhere"):
            Adapters(str(toy_model), {"x": Weights(targets=("nowhere",))}, dtype="float32")

    def test_who_shares_what_must_be_trained_and_once(self) -> None:
        with pytest.raises(DeclarationError, match="'c', which has no weights"):
            partition(["a", "b"], {"one": ["a", "c"]})
        with pytest.raises(DeclarationError, match="'a' twice"):
            partition(["a", "b"], {"one": ["a"], "two": ["a", "b"]})
        with pytest.raises(DeclarationError, match="'one' to no component"):
            partition(["a", "b"], {"one": []})
        with pytest.raises(DeclarationError, match="component of that name uses another adapter"):
            partition(["a", "b"], {"b": ["a"]})
        assert partition(["a", "b"], {"b": ["a", "b"]}) == {"b": ("a", "b")}
        for name in ("../../escaped", "a/b", "|value", ""):
            with pytest.raises(DeclarationError, match="Adapter name"):
                partition(["a"], {name: ["a"]})

    def test_an_adapter_of_another_alpha_is_refused(self, toy_model: Path, tmp_path: Path) -> None:
        """Its shapes fit, but everything it adds would be scaled by something else than where it samples."""
        noised(toy_model, "x").write("x", tmp_path)
        other = Adapters(str(toy_model), {"x": LoRA(rank=4, alpha=32)}, dtype="float32")
        with pytest.raises(
            ConfigurationError, match="alpha 8 and rank 4, but 'x' declares alpha 32"
        ):
            other.load("x", tmp_path)

    def test_a_base_that_makes_its_logits_in_another_way_is_refused(
        self, toy_model: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        whole = OutputLayer.of
        monkeypatch.setattr(OutputLayer, "of", lambda model, _: replace(whole(model), scale=30.0))
        with pytest.raises(CompoundError, match="computes logits is not supported"):
            noised(toy_model, "x")


def small_model(family: str, **given: Any) -> Any:
    import transformers

    config = getattr(transformers, f"{family}Config")(**{**SMALL, **given})
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return getattr(transformers, f"{family}ForCausalLM")(config).eval()


SMALL = {
    "vocab_size": 24,
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
}


@pytest.mark.parametrize(
    ("family", "settings"),
    [
        ("Granite", {"logits_scaling": 8.0}),
        ("Gemma2", {"head_dim": 8, "final_logit_softcapping": 1.0}),
        ("Cohere", {"logit_scale": 0.0625, "eos_token_id": 1, "bos_token_id": 2}),
    ],
)
def test_families_that_rescale_their_logits_are_read_as_they_are(
    family: str, settings: dict[str, Any]
) -> None:
    model = small_model(family, initializer_range=0.3, **settings)
    sample = Sample("x", "e", "x", 0, TokenRecord((3, 4, 5, 6), (7, 8, 9), (), "stop"), 0.0)
    with torch.no_grad():
        rows = model(torch.tensor([[3, 4, 5, 6, 7, 8, 9]])).logits[0].float().log_softmax(-1)
        found = forward(model, [sample]).logps[0]
    expected = torch.stack([rows[3 + i, token] for i, token in enumerate(sample.tokens.sampled)])
    assert torch.allclose(found, expected, atol=LOGPROBS)


@pytest.mark.parametrize(
    ("family", "given", "attention", "linear"),
    [
        (
            "Qwen3",
            {"head_dim": 8},
            {"q_proj", "k_proj", "v_proj", "o_proj"},
            {"gate_proj", "up_proj", "down_proj"},
        ),
        ("Phi3", {"pad_token_id": 0}, {"qkv_proj", "o_proj"}, {"gate_up_proj", "down_proj"}),
        ("GPTNeoX", {}, {"query_key_value", "attention.dense"}, {"dense_h_to_4h", "dense_4h_to_h"}),
        ("Phi", {}, {"q_proj", "k_proj", "v_proj", "dense"}, {"fc1", "fc2"}),
    ],
)
def test_sets_of_layers_are_found_whatever_a_family_calls_them(
    family: str, given: dict[str, Any], attention: set[str], linear: set[str]
) -> None:
    model, last = small_model(family, **given), lambda name: name.rpartition(".")[2]
    found, every = (set(resolve(model, targets)) for targets in ("attention", "all-linear"))
    assert set(map(last, found)) == set(map(last, attention))
    assert set(map(last, every - found)) >= linear
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        wrapped = peft.get_peft_model(model, peft.LoraConfig(r=2, target_modules=sorted(found)))
    layers = {key.split(".lora_")[0] for key, _ in wrapped.named_parameters() if ".lora_" in key}
    assert layers
    assert all("attn" in layer or "attention" in layer for layer in layers)


def test_what_a_job_began_with_is_not_deleted(toy_model: Path, tmp_path: Path) -> None:
    """A step without samples stores nothing new, so what is saved then is what others still refer to."""
    begun = noised(toy_model, "x").save("x", tmp_path)
    assert begun
    agent = LLM("x", weights=LoRA(rank=4))(question=Input("question"))
    system = System("one", outputs={"answer": agent}, lm="lm").bind({"x.weights": begun})
    context = SimpleNamespace(memory=PlainMemory(tmp_path))
    task: Any = SimpleNamespace(
        system=system, keys=("x.weights",), train=[0], context=context, seed=0
    )
    planned = PlannedTraining(system, ("x",), lambda _: ScriptedLM([]))
    session = TrainingSession(task, MMGRPO(MMGRPOSettings()), planned)
    adapters = noised(toy_model, "x", noise=0.0)
    trainer = PLAIN.trainer(adapters, {"x": "x"})
    adapters.start_from("x", begun, tmp_path)
    folders: list[str] = []
    before: list[str] = []
    for number in range(5):
        samples = [replace(sample, on_policy=False) for sample in some()] if number else []
        trainer.step(samples, number)
        saved = trainer.save(tmp_path)
        assert (saved.adapters["x"] == begun) == (number == 0)
        state = TrainingState(saved=saved, folders=folders, folders_before=before)
        session.delete_unused(state)
        folders, before = state.folders, state.folders_before
    assert (tmp_path / begun["path"]).is_dir()
    # and those of two steps
    assert sum(path.name.startswith("x-") for path in tmp_path.iterdir()) == 3


class TestSteps:
    def test_samples_of_other_weights_are_refused(self, toy_model: Path, tmp_path: Path) -> None:
        trainer = PLAIN.trainer(noised(toy_model, "x"), {"x": "x"})
        trainer.step(some(), 0)  # sampled by the base, as the trainer began
        trainer.save(tmp_path)
        with pytest.raises(StaleSamples, match=r"version \(base model\)"):
            trainer.step(some(), 1)
        trainer.step([replace(s, on_policy=False) for s in some()], 1)  # a teacher's
        version = trainer.versions["x"][-1]
        trainer.step([replace(s, tokens=replace(s.tokens, adapter=version)) for s in some()], 1)

    def test_samples_may_be_as_old_as_they_are_allowed_to_be(
        self, toy_model: Path, tmp_path: Path
    ) -> None:
        trainer = plain(max_staleness=1, correction=2.0).trainer(noised(toy_model, "x"), {"x": "x"})
        for number in range(2):
            trainer.step(some(), number)
            if number == 0:
                trainer.save(tmp_path)
        trainer.save(tmp_path)
        with pytest.raises(StaleSamples):
            trainer.step(some(), 2)

    def test_a2_a3_samples_that_are_too_long_are_left_out_and_counted_never_cut(
        self, toy_model: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        adapters = noised(toy_model, "x")
        short, long = some(), some(prompt=40)
        settings = plain(max_length=30)
        assert (
            apart(
                gradients(monkeypatch, adapters, settings, [*long, *short]),
                gradients(monkeypatch, adapters, settings, short),
            )
            == 0
        )
        trainer = settings.trainer(adapters, {"x": "x"})
        assert trainer.step([*long, *short], 0)["left_out"] == len(long)

    def test_an_update_with_a_gradient_that_is_not_finite_is_skipped_and_counted(
        self, toy_model: Path
    ) -> None:
        good = [replace(s, on_policy=False) for s in some()]
        broken = [s.with_advantage(float("inf")) for s in good]
        ends = []
        for batches in ([good, broken, good], [good, good]):
            trainer = PLAIN.trainer(noised(toy_model, "x"), {"x": "x"})
            facts = [trainer.step(batch, 0) for batch in batches]
            ends.append((trainer.adapters._serialized("x"), trainer._updaters["x"].state()))
            skipped = [f["skipped_updates"] for f in facts]
            assert skipped == [int(batch is broken) for batch in batches]
            json.dumps(facts, allow_nan=False)
        (content, state), (expected, wanted) = ends
        assert content == expected  # neither the weights nor Adam's moments and counts have moved
        assert state.keys() == wanted.keys()
        assert all(torch.equal(state[key], wanted[key]) for key in state)

    def test_several_of_them_in_a_row_end_training_also_across_a_restart(
        self, toy_model: Path, tmp_path: Path
    ) -> None:
        good = [replace(s, on_policy=False) for s in some()]
        broken = [s.with_advantage(float("nan")) for s in good]
        trainer = PLAIN.trainer(noised(toy_model, "x"), {"x": "x"})
        for batch in (*[broken] * 4, good, *[broken] * 4):  # never five in a row
            trainer.step(batch, 0)
        saved = trainer.save(tmp_path)
        again = PLAIN.trainer(noised(toy_model, "x"), {"x": "x"})
        again.restore(saved, tmp_path)
        before = again.adapters._serialized("x")
        with pytest.raises(CompoundError, match="adapter 'x' was not finite in 5 updates in a row"):
            again.step(broken, 0)
        assert again.adapters._serialized("x") == before

    def test_too_little_memory_says_what_to_lower(
        self, toy_model: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def full(*_: Any, **__: Any) -> Any:
            raise RuntimeError("DefaultCPUAllocator: can't allocate memory")

        trainer = PLAIN.trainer(noised(toy_model, "x"), {"x": "x"}, section="optimize.ppo")
        monkeypatch.setattr(forward_module, "forward", full)
        with pytest.raises(CompoundError) as raised:
            trainer.step(some(), 0)
        assert "lower optimize.ppo.optimizer.micro_tokens" in str(raised.value.hint)

    def test_checkpointing_gives_the_same_gradients(
        self, toy_model: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        found = []
        for checkpointing in (False, True):
            spaces = {"x": LoRA(rank=4)}
            adapters = Adapters(
                str(toy_model), spaces, dtype="float32", checkpointing=checkpointing
            )
            randomize(adapters)
            calls: list[str] = []
            for layer in adapters.base.modules():
                if original := getattr(layer, "_gradient_checkpointing_func", None):
                    layer._gradient_checkpointing_func = noting(calls, original)
            found.append(gradients(monkeypatch, adapters, PLAIN, some()))
            assert bool(calls) == checkpointing
            assert not adapters.unshared
            assert not any(
                m.training for m in adapters.base.modules() if isinstance(m, torch.nn.Dropout)
            )
        assert found[0].keys() == found[1].keys()
        for name, gradient in found[0].items():
            assert gradient.abs().max() > 0
            torch.testing.assert_close(found[1][name], gradient, atol=1e-6, rtol=1e-4)

    def test_the_sampler_s_mismatch_weighs_advantages_up_to_the_cap(
        self, toy_model: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        adapters, samples = noised(toy_model, "x"), some()
        with adapters.using("x") as model, torch.no_grad():
            ours = forward(model, samples).logps
        told = [
            replace(s, tokens=replace(s.tokens, logprobs=tuple((row[: s.length] - 0.5).tolist())))
            for s, row in zip(samples, ours, strict=True)
        ]
        corrected = gradients(monkeypatch, adapters, plain(correction=None), samples)
        for cap, factor in ((2.0, 2.718281828**0.5), (1.25, 1.25)):
            found = gradients(monkeypatch, adapters, plain(correction=cap), told)
            assert apart(found, {n: t * factor for n, t in corrected.items()}) < GRADIENTS

    def test_weight_decay_shrinks_the_adapters_and_nothing_else(self, toy_model: Path) -> None:
        adapters = noised(toy_model, "x")
        trainer = plain(lr=0.1, weight_decay=0.5).trainer(adapters, {"x": "x"}, critic=True)
        before = {name: tensor.clone() for name, tensor in adapters.parameters("x")}
        flat = [replace(s, values=(0.0,) * s.length, returns=(0.0,) * s.length) for s in some()]
        assert trainer.critic is not None
        torch.nn.init.ones_(trainer.critic.head[0].weight)
        trainer.step([s.with_advantage(0.0) for s in flat], 0)
        for name, tensor in adapters.parameters("x"):
            torch.testing.assert_close(tensor, before[name] * (1 - 0.1 * 0.5), rtol=1e-6, atol=0)
        assert trainer.critic.head[0].weight.eq(1.0).all()

    def test_beta_pulls_towards_the_base(self, toy_model: Path) -> None:
        distances = []
        for beta in (0.0, 5.0):
            adapters = noised(toy_model, "x", noise=0.1)
            trainer = plain(beta=beta, lr=0.01).trainer(adapters, {"x": "x"})
            flat = [s.with_advantage(0.0) for s in some()]
            for number in range(5):
                facts = trainer.step(flat, number)
            distances.append(facts["components"]["x"].get("base_kl"))
            first = plain(beta=5.0).trainer(noised(toy_model, "x", noise=0.1), {"x": "x"})
            start = first.step(flat, 0)["components"]["x"]["base_kl"]
        assert distances[0] is None  # nothing is measured that is not used
        assert distances[1] < start


class NCCL:
    """A process group of two that, like NCCL, refuses what is not on the device of the gradients.

    There may be no such device here, so a tensor counts as there if it was made with the ``device``
    of the model given.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch, adapters: Adapters) -> None:
        self.reduced: list[tuple[Any, tuple[int, ...]]] = []
        self.adapters, self._placed = adapters, {}  # type: ignore[var-annotated]  # of tensors by id
        for name in ("tensor", "zeros"):
            monkeypatch.setattr(torch, name, self._noting(getattr(torch, name)))
        distributed = torch.distributed
        for name, says in (("is_initialized", True), ("get_rank", 0), ("get_world_size", 2)):
            monkeypatch.setattr(distributed, name, lambda says=says: says)
        for name in dir(distributed):
            if name.startswith(("all_", "broadcast", "gather", "reduce")):
                monkeypatch.setattr(distributed, name, None)
        monkeypatch.setattr(distributed, "all_reduce", self._all_reduce)

    def _noting(self, real: Any) -> Any:
        def made(*given: Any, device: Any = None, **how: Any) -> Any:
            found = real(*given, device=device, **how)
            if device is not None and device == self.adapters.device:
                self._placed[id(found)] = found
            return found

        return made

    def _all_reduce(self, tensor: Any) -> None:
        assert id(tensor) in self._placed, f"on the CPU: {tuple(tensor.shape)} {tensor.dtype}"
        assert tensor.is_contiguous()
        self.reduced.append((tensor.dtype, tuple(tensor.shape)))


def test_no_collective_is_given_a_tensor_that_nccl_refuses(
    toy_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = plain(epochs=2, beta=0.05)
    adapters = noised(toy_model, "x")
    trainer = settings.trainer(adapters, {"x": "x"}, critic=True)
    group = NCCL(monkeypatch, adapters)
    samples = trainer.values(some())
    trainer.step([replace(s, returns=(0.7,) * s.length) for s in samples], 0)
    shapes = [shape for dtype, shape in group.reduced if dtype == torch.float32]
    longest = max(s.length for s in samples)
    assert shapes.count((len(samples), longest)) == 3  # values; before the step, and of the base
    doubles = [shape for dtype, shape in group.reduced if dtype == torch.float64]
    # gradients of adapter and value head, two epochs
    assert sum(len(shape) == 1 for shape in doubles) == 4
    assert sum(len(shape) == 2 for shape in doubles) == 1  # what is reported
