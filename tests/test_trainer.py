"""The trainer: what TRL computes is the oracle, and nothing about batching, storing or sharing changes a gradient."""

from __future__ import annotations

import os
import random
import subprocess
import sys
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch")
peft = pytest.importorskip("peft")

from compound.benchmarks.toy_model import make_toy_model  # noqa: E402
from compound.component import Input  # noqa: E402
from compound.components.llm import LLM  # noqa: E402
from compound.contracts import TokenRecord  # noqa: E402
from compound.errors import CompoundError, ConfigurationError, DeclarationError  # noqa: E402
from compound.optimizers.policy import adapters as adapters_module  # noqa: E402
from compound.optimizers.policy import trainer as trainer_module  # noqa: E402
from compound.optimizers.policy.adapters import Adapters, partition  # noqa: E402
from compound.optimizers.policy.advantages import advantages  # noqa: E402
from compound.optimizers.policy.batching import micro_batches, parts, size  # noqa: E402
from compound.optimizers.policy.forward import forward, saving  # noqa: E402
from compound.optimizers.policy.head import Output  # noqa: E402
from compound.optimizers.policy.mmgrpo import MMGRPO  # noqa: E402
from compound.optimizers.policy.samples import Sample  # noqa: E402
from compound.optimizers.policy.trainer import StaleSamples, Trainer  # noqa: E402
from compound.optimizers.policy.training import Job  # noqa: E402
from compound.optimizers.policy.updates import Updater  # noqa: E402
from compound.settings import WeightSettings  # noqa: E402
from compound.space import LoRA, Weights  # noqa: E402
from compound.system import System  # noqa: E402

PLAIN = WeightSettings(correction=None)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return make_toy_model(tmp_path_factory.mktemp("toy"))


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def made(folder: Path, *names: str, noise: float = 0.2, rank: int = 4) -> Adapters:
    """Return adapters whose weights are not zero."""
    adapters = Adapters(str(folder), {name: LoRA(rank=rank) for name in names}, dtype="float32")
    noised(adapters, noise)
    return adapters


def noised(adapters: Adapters, noise: float) -> None:
    with torch.no_grad(), torch.random.fork_rng():
        torch.manual_seed(1)
        for name in adapters.spaces:
            for _, tensor in adapters.parameters(name):
                tensor.normal_(std=noise)


def some(
    components: Sequence[str] = ("x",), groups: int = 2, each: int = 4, prompt: int = 5, longest: int = 4
) -> list[Sample]:
    """Return samples of random tokens, in groups that share a prompt, with advantages."""
    rng = random.Random(0)
    found = []
    for component in components:
        for group in range(groups):
            tokens = tuple(rng.randrange(24) for _ in range(prompt + group))
            for rollout in range(each):
                sampled = tuple(rng.randrange(24) for _ in range(1 + rng.randrange(longest)))
                record = TokenRecord(tokens, sampled, (-1.0,) * len(sampled), "stop")
                found.append(
                    Sample(
                        component,
                        f"e{group}",
                        component,
                        0,
                        record,
                        rng.random(),
                        (component, group),
                        rollout,
                    )
                )
    return advantages(found, "trl")[0]


def gradients(
    monkeypatch: pytest.MonkeyPatch,
    adapters: Adapters,
    settings: WeightSettings,
    samples: Sequence[Sample],
    **how: Any,
) -> dict[str, Any]:
    """Return the gradients of one update, which is not made."""
    found: dict[str, Any] = {}

    class Caught(Updater):
        def update(self, step: int) -> float:
            for name, tensor in self.parameters:
                if tensor.grad is not None:
                    found[f"{self.whose} {name}"] = tensor.grad.clone()
                tensor.grad = None
            return 0.0

    monkeypatch.setattr(trainer_module, "Updater", Caught)
    adapter_of = how.pop("adapter_of", {name: name for name in adapters.spaces})
    trainer = Trainer(adapters, adapter_of, settings, longest=8)
    trainer.step(samples, 0, **how)
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
    ("loss", "temperature"), [("grpo", 1.0), ("grpo", 0.6), ("bnpo", 1.0), ("dr_grpo", 1.0), ("dapo", 1.5)]
)
def test_one_component_with_one_call_is_trls_grpo(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, loss: str, temperature: float
) -> None:
    trl = pytest.importorskip("trl")
    datasets = pytest.importorskip("datasets")
    adapters, samples = made(folder, "x"), some()
    settings = PLAIN.model_copy(update={"loss": loss, "temperature": temperature})
    ours = gradients(monkeypatch, adapters, settings, samples)
    arguments = trl.GRPOConfig(
        output_dir=str(tmp_path), per_device_train_batch_size=8, num_generations=4, max_completion_length=8,
        loss_type=loss, beta=0.0, report_to=[], use_cpu=True, bf16=False, temperature=temperature,
    )  # fmt: skip
    theirs = trl.GRPOTrainer(
        model=adapters.model, reward_funcs=lambda **_: [0.0], args=arguments,
        train_dataset=datasets.Dataset.from_list([{"prompt": "go"}] * 8), processing_class=adapters.tokenizer,
    )  # fmt: skip
    theirs.current_gradient_accumulation_steps = 1
    prompt_ids, prompt_mask = padded([s.tokens.prompt for s in samples], left=True)
    completion_ids, completion_mask = padded([s.tokens.sampled for s in samples], left=False)
    adapters.model.eval()
    with adapters.using("x"):
        theirs._compute_loss(
            adapters.model,
            {
                "prompt_ids": prompt_ids, "prompt_mask": prompt_mask, "completion_ids": completion_ids,
                "completion_mask": completion_mask, "num_items_in_batch": completion_mask.sum(),
                "advantages": torch.tensor([s.advantages[0] for s in samples]),
            },
        ).backward()  # fmt: skip
    expected = {f"adapter 'x' {name}": tensor.grad for name, tensor in adapters.parameters("x")}
    assert apart(ours, expected) < 1e-5


@pytest.mark.filterwarnings("ignore")
def test_imitation_is_trls_sft_on_the_same_samples(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trl = pytest.importorskip("trl")
    datasets = pytest.importorskip("datasets")
    adapters, samples = made(folder, "x"), some()
    settings = PLAIN.model_copy(update={"temperature": 0.5})  # of attempts, and no part of what is imitated
    ours = gradients(monkeypatch, adapters, settings, samples, likelihood=True)
    rows = [
        {
            "input_ids": [*s.tokens.prompt, *s.tokens.sampled],
            "labels": [-100] * len(s.tokens.prompt) + [*s.tokens.sampled],
        }
        for s in samples
    ]
    arguments = trl.SFTConfig(
        output_dir=str(tmp_path), per_device_train_batch_size=8, report_to=[], use_cpu=True, bf16=False,
        max_length=None,
    )  # fmt: skip
    theirs = trl.SFTTrainer(
        model=adapters.model, args=arguments, train_dataset=datasets.Dataset.from_list(rows),
        processing_class=adapters.tokenizer,
    )  # fmt: skip
    batch = theirs.data_collator([dict(row) for row in rows])
    adapters.model.eval()
    with adapters.using("x"):
        theirs.compute_loss(adapters.model, batch).backward()
    expected = {f"adapter 'x' {name}": tensor.grad for name, tensor in adapters.parameters("x")}
    assert apart(ours, expected) < 1e-5


@pytest.mark.parametrize("length", [1, 4])
def test_a_prompt_read_once_gives_the_gradients_of_reading_everything(folder: Path, length: int) -> None:
    adapters, samples = made(folder, "x"), some(prompt=20, longest=length)
    found = []
    for shared in (False, True):
        with adapters.using("x") as model:
            ran = forward(model, samples, shared=shared)
            (ran.logps * torch.arange(len(samples))[:, None]).sum().backward()
        found.append({name: tensor.grad.clone() for name, tensor in adapters.parameters("x")})
        for _, tensor in adapters.parameters("x"):
            tensor.grad = None
    assert apart(*found) < 1e-5
    assert saving(samples) < 0.5


def test_adapters_compute_as_a_base_in_half_precision_and_learn_in_float32(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """peft computes in float32 there: the gradients are the same but for rounding, and less is kept for them."""

    def learned() -> tuple[dict[str, Any], int]:
        adapters = Adapters(str(folder), {"x": LoRA(rank=4)}, dtype="bfloat16")
        noised(adapters, 0.2)
        kept: dict[int, int] = {}

        def keep(tensor: Any) -> Any:
            kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            found = gradients(monkeypatch, adapters, PLAIN, some())
        assert {tensor.dtype for tensor in found.values()} == {torch.float32}
        return found, sum(kept.values())

    found, less = learned()
    monkeypatch.setattr(adapters_module, "_compute_as_the_base", lambda model: None)
    expected, more = learned()
    assert 0 < apart(found, expected) < 0.1
    assert less < 0.9 * more


@pytest.mark.parametrize("loss", ["grpo", "dapo", "dr_grpo", "luspo", "gspo", "sft"])
def test_micro_batches_do_not_change_an_update(
    folder: Path, monkeypatch: pytest.MonkeyPatch, loss: str
) -> None:
    adapters, samples = made(folder, "x"), some(groups=3)
    how = {"likelihood": True} if loss == "sft" else {}
    settings = PLAIN if loss == "sft" else PLAIN.model_copy(update={"loss": loss})
    whole, cut = (
        gradients(monkeypatch, adapters, settings.model_copy(update={"micro_tokens": most}), samples, **how)
        for most in (8192, 64)
    )
    assert len(micro_batches(samples, 20)) > 3
    assert apart(cut, whole) < 1e-5


def test_every_sample_is_trained_on_whatever_the_number_of_parts() -> None:
    samples = some(components=("x", "y"), groups=3, each=5)
    dealt = parts(samples, 4, 0)
    assert sorted(id(s) for part in dealt for s in part) == sorted(id(s) for s in samples)
    for part in dealt:
        for sample in part:  # a group is in one part
            assert sum(s.group == sample.group for s in part) == 5


def test_micro_batches_hold_no_more_than_they_may() -> None:
    samples = some(groups=5, each=6, longest=9)
    for batch in micro_batches(samples, 64):
        assert len(batch) == 1 or max(map(size, batch)) * len(batch) <= 64


class TestAdapters:
    def test_training_one_leaves_the_others_as_they_are_to_the_bit(self, folder: Path) -> None:
        adapters = made(folder, "a", "b", "c")
        before = {n: [t.detach().clone() for _, t in adapters.parameters(n)] for n in adapters.spaces}
        Trainer(adapters, {"x": "b"}, PLAIN).step(some(), 0)
        moved = {
            n: any(bool((t != b).any()) for (_, t), b in zip(adapters.parameters(n), before[n], strict=True))
            for n in adapters.spaces
        }
        assert moved == {"a": False, "b": True, "c": False}

    def test_adapters_trained_together_move_as_each_would_alone(self, folder: Path) -> None:
        ends = []
        for names in (("x", "y"), ("x",), ("y",)):
            adapters = made(folder, "x", "y")
            trainer = Trainer(adapters, {"x": "x", "y": "y"}, PLAIN)
            for number in range(2):
                trainer.step([s for s in some(components=("x", "y")) if s.component in names], number)
            ends.append({n: [t.detach().clone() for _, t in adapters.parameters(n)] for n in names})
        both, *alone = ends
        for end in alone:
            for name, tensors in end.items():
                for a, b in zip(both[name], tensors, strict=True):
                    assert torch.allclose(a, b, atol=1e-6)

    def test_a_shared_adapter_learns_from_all_who_share_it(
        self, folder: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        samples = some(components=("x", "y"))
        adapters = made(folder, "both")
        shared = gradients(monkeypatch, adapters, PLAIN, samples, adapter_of={"x": "both", "y": "both"})
        one = gradients(monkeypatch, adapters, PLAIN, samples[:8], adapter_of={"x": "both"})
        other = gradients(monkeypatch, adapters, PLAIN, samples[8:], adapter_of={"y": "both"})
        assert apart(shared, {name: (one[name] + other[name]) / 2 for name in one}) < 1e-5

    def test_what_is_stored_is_read_again_and_peft_reads_it_too(self, folder: Path, tmp_path: Path) -> None:
        from transformers import AutoModelForCausalLM

        adapters = made(folder, "x")
        reference = adapters.save("x", tmp_path)
        assert reference is not None
        assert adapters.save("x", tmp_path) == reference  # nothing changed in between
        base = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            theirs = peft.PeftModel.from_pretrained(base, tmp_path / reference["path"]).eval()
        samples = some()
        with adapters.using("x") as model, torch.no_grad():
            ours = forward(model, samples).logps
            assert torch.allclose(ours, forward(theirs.get_base_model(), samples).logps, atol=1e-5)
        again = Adapters(str(folder), {"x": LoRA(rank=4)}, dtype="float32")
        again.begin("x", reference, tmp_path)
        with again.using("x") as model, torch.no_grad():
            assert torch.equal(ours, forward(model, samples).logps)
        assert again.version("x") == reference["sha256"]

    def test_an_adapter_that_never_moved_is_the_base(self, folder: Path, tmp_path: Path) -> None:
        adapters = Adapters(str(folder), {"x": LoRA(rank=4)}, dtype="float32")
        assert (adapters.save("x", tmp_path), adapters.version("x")) == (None, "")

    def test_the_probe_tells_a_version_from_the_one_before(self, folder: Path, tmp_path: Path) -> None:
        import json

        adapters = made(folder, "x")
        first = adapters.save("x", tmp_path)
        taught = [replace(s, on_policy=False) for s in some()]
        Trainer(adapters, {"x": "x"}, PLAIN.model_copy(update={"lr": 0.05})).step(taught, 0)
        second = adapters.save("x", tmp_path)
        assert first
        assert second
        read = [json.loads((tmp_path / r["path"] / "probe.json").read_text()) for r in (first, second)]
        assert read[1]["before"] == read[0]["logprobs"] != read[1]["logprobs"]
        assert len(read[1]["tokens"]) == len(read[1]["logprobs"]) + 1

    def test_an_adapter_of_another_shape_is_refused(self, folder: Path, tmp_path: Path) -> None:
        reference = made(folder, "x", rank=8).save("x", tmp_path)
        with pytest.raises(ConfigurationError, match="another base or another shape"):
            made(folder, "x").begin("x", reference, tmp_path)

    def test_a_truncated_adapter_is_refused(self, folder: Path, tmp_path: Path) -> None:
        reference = made(folder, "x").save("x", tmp_path)
        assert reference
        path = tmp_path / reference["path"] / "adapter_model.safetensors"
        path.write_bytes(path.read_bytes()[:100])
        with pytest.raises(ConfigurationError, match="holds no adapter"):
            made(folder, "x").load("x", path.parent)
        with pytest.raises(ConfigurationError, match="was changed"):
            made(folder, "x").begin("x", reference, tmp_path)

    def test_targets_that_the_model_lacks_are_named(self, folder: Path) -> None:
        with pytest.raises(DeclarationError, match="nowhere"):
            Adapters(str(folder), {"x": Weights(targets=("nowhere",))}, dtype="float32")

    def test_a_base_without_a_chat_template_is_refused(self, folder: Path, tmp_path: Path) -> None:
        import shutil

        other = tmp_path / "other"
        shutil.copytree(folder, other)
        (other / "chat_template.jinja").unlink(missing_ok=True)
        with pytest.raises(CompoundError, match="no chat template"):
            Adapters(str(other), {"x": LoRA()}, dtype="float32")

    def test_who_shares_what_must_be_trained_and_once(self) -> None:
        with pytest.raises(DeclarationError, match="'c', which has no weights"):
            partition(["a", "b"], {"one": ["a", "c"]})
        with pytest.raises(DeclarationError, match="'a' twice"):
            partition(["a", "b"], {"one": ["a"], "two": ["a", "b"]})
        with pytest.raises(DeclarationError, match="'one' to no component"):
            partition(["a", "b"], {"one": []})
        with pytest.raises(DeclarationError, match="like a component that has another one"):
            partition(["a", "b"], {"b": ["a"]})
        assert partition(["a", "b"], {"b": ["a", "b"]}) == {"b": ("a", "b")}
        for name in ("../../escaped", "a/b", "|value", ""):
            with pytest.raises(DeclarationError, match="Adapter name"):
                partition(["a"], {name: ["a"]})

    def test_an_adapter_of_another_alpha_is_refused(self, folder: Path, tmp_path: Path) -> None:
        """Its shapes fit, but everything it adds would be scaled by something else than where it samples."""
        made(folder, "x").write("x", tmp_path)
        other = Adapters(str(folder), {"x": LoRA(rank=4, alpha=32)}, dtype="float32")
        with pytest.raises(ConfigurationError, match="alpha 8 and rank 4, but 'x' declares alpha 32"):
            other.load("x", tmp_path)

    def test_a_base_that_makes_its_logits_in_another_way_is_refused(
        self, folder: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        whole = Output.of
        monkeypatch.setattr(Output, "of", lambda model, _: replace(whole(model), times=30.0))
        with pytest.raises(CompoundError, match="makes its logits in a way that is not known"):
            made(folder, "x")


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
    import transformers

    small = {
        "vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 4, "initializer_range": 0.3,
    }  # fmt: skip
    config = getattr(transformers, f"{family}Config")(**small, **settings)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = getattr(transformers, f"{family}ForCausalLM")(config).eval()
    sample = Sample("x", "e", "x", 0, TokenRecord((3, 4, 5, 6), (7, 8, 9), (), "stop"), 0.0)
    with torch.no_grad():
        rows = model(torch.tensor([[3, 4, 5, 6, 7, 8, 9]])).logits[0].float().log_softmax(-1)
        found = forward(model, [sample]).logps[0]
    expected = torch.stack([rows[3 + i, token] for i, token in enumerate(sample.tokens.sampled)])
    assert torch.allclose(found, expected, atol=1e-4)


def test_what_a_job_began_with_is_not_deleted(folder: Path, tmp_path: Path) -> None:
    """A step without samples stores nothing new, so what is saved then is what others still refer to."""
    begun = made(folder, "x").save("x", tmp_path)
    assert begun
    agent = LLM("x", weights=LoRA(rank=4))(question=Input("question"))
    system = System("one", outputs={"answer": agent}, lm="lm").bind({"x.weights": begun})
    bench = SimpleNamespace(memory=SimpleNamespace(folder=tmp_path))
    task: Any = SimpleNamespace(system=system, keys=("x.weights",), train=[0], bench=bench, seed=0)
    job = Job(task, MMGRPO(), PLAIN)
    adapters = made(folder, "x", noise=0.0)
    trainer = Trainer(adapters, {"x": "x"}, PLAIN)
    adapters.begin("x", begun, tmp_path)
    kept: dict[str, Any] = {}
    for number in range(5):
        samples = [replace(sample, on_policy=False) for sample in some()] if number else []
        trainer.step(samples, number)
        saved = trainer.save(tmp_path)
        assert (saved["adapters"]["x"] == begun) == (number == 0)
        kept = dict(kept)
        job.forget({"saved": saved, "ahead": None, "kept": kept})
    assert (tmp_path / begun["path"]).is_dir()
    assert sum(path.name.startswith("x-") for path in tmp_path.iterdir()) == 3  # and those of two steps


class TestSteps:
    def test_going_on_from_a_checkpoint_ends_where_the_uninterrupted_training_does(
        self, folder: Path, tmp_path: Path
    ) -> None:
        settings = PLAIN.model_copy(update={"lr": 0.01, "passes": 2, "parts": 2, "beta": 0.05})
        whole = Trainer(made(folder, "x"), {"x": "x"}, settings, critic=True, steps=4)
        batches = [
            [replace(s, values=(0.1,) * s.length, returns=(0.7,) * s.length) for s in some()]
            for _ in range(4)
        ]
        settings_now = settings.model_copy(update={"stale": 0})
        assert settings_now == settings
        saved = None
        for number, batch in enumerate(batches):
            whole.step([replace(s, on_policy=False) for s in batch], number)
            if number == 1:
                saved = whole.save(tmp_path)
        assert saved is not None
        other = Trainer(made(folder, "x", noise=0.9), {"x": "x"}, settings, critic=True, steps=4)
        other.restore(saved, tmp_path)
        for number in (2, 3):
            other.step([replace(s, on_policy=False) for s in batches[number]], number)
        ends = [[t.detach() for _, t in t_.adapters.parameters("x")] for t_ in (whole, other)]
        assert all(torch.equal(a, b) for a, b in zip(*ends, strict=True))
        heads = [list(t_.head.state_dict().values()) for t_ in (whole, other) if t_.head is not None]
        assert len(heads) == 2
        assert all(torch.equal(a, b) for a, b in zip(*heads, strict=True))
        assert any(bool((value != 0).any()) for value in heads[0][2:])

    def test_samples_of_other_weights_are_refused(self, folder: Path, tmp_path: Path) -> None:
        trainer = Trainer(made(folder, "x"), {"x": "x"}, PLAIN)
        trainer.step(some(), 0)  # sampled by the base, as the trainer began
        trainer.save(tmp_path)
        with pytest.raises(StaleSamples, match="of no adapter"):
            trainer.step(some(), 1)
        trainer.step([replace(s, on_policy=False) for s in some()], 1)  # a teacher's
        version = trainer.versions["x"][-1]
        trainer.step([replace(s, tokens=replace(s.tokens, adapter=version)) for s in some()], 1)

    def test_samples_may_be_as_old_as_they_are_allowed_to_be(self, folder: Path, tmp_path: Path) -> None:
        trainer = Trainer(made(folder, "x"), {"x": "x"}, PLAIN.model_copy(update={"stale": 1}))
        for number in range(2):
            trainer.step(some(), number)
            if number == 0:
                trainer.save(tmp_path)
        trainer.save(tmp_path)
        with pytest.raises(StaleSamples):
            trainer.step(some(), 2)

    def test_a2_a3_samples_that_are_too_long_are_left_out_and_counted_never_cut(
        self, folder: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        adapters = made(folder, "x")
        short, long = some(), some(prompt=40)
        settings = PLAIN.model_copy(update={"max_length": 30})
        assert (
            apart(
                gradients(monkeypatch, adapters, settings, [*long, *short]),
                gradients(monkeypatch, adapters, settings, short),
            )
            == 0
        )
        trainer = Trainer(adapters, {"x": "x"}, settings)
        assert trainer.step([*long, *short], 0)["left_out"] == len(long)

    def test_a1_prompts_carry_no_loss(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        adapters, samples = made(folder, "x"), some()
        full = gradients(monkeypatch, adapters, PLAIN, samples)
        same_prompt = samples[0].tokens.prompt
        with adapters.using("x") as model:
            ran = forward(model, samples)
            weights = torch.tensor([[s.advantages[0] / (len(samples) * s.length)] for s in samples])
            (-(ran.logps * ran.mask) * weights).sum().backward()  # nothing but sampled tokens
        by_hand = {f"adapter 'x' {n}": t.grad for n, t in adapters.parameters("x")}
        assert same_prompt
        assert apart(full, by_hand) < 1e-5

    def test_a_step_without_samples_changes_nothing(self, folder: Path) -> None:
        adapters = made(folder, "x")
        before = adapters._content("x")
        Trainer(adapters, {"x": "x"}, PLAIN).step([], 0)
        assert adapters._content("x") == before

    def test_a_gradient_that_is_not_finite_is_an_error_and_changes_nothing(self, folder: Path) -> None:
        adapters = made(folder, "x")
        before = adapters._content("x")
        broken = [s.with_advantage(float("inf")) for s in some()]
        with pytest.raises(CompoundError, match="adapter 'x' is not finite"):
            Trainer(adapters, {"x": "x"}, PLAIN).step(broken, 0)
        assert adapters._content("x") == before

    def test_too_little_memory_says_what_to_lower(
        self, folder: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def full(*_: Any, **__: Any) -> Any:
            raise RuntimeError("DefaultCPUAllocator: can't allocate memory")

        monkeypatch.setattr(trainer_module, "forward", full)
        with pytest.raises(CompoundError) as raised:
            Trainer(made(folder, "x"), {"x": "x"}, PLAIN).step(some(), 0)
        assert "micro_tokens" in str(raised.value.hint)

    def test_the_sampler_s_mismatch_weighs_advantages_up_to_the_cap(
        self, folder: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        adapters, samples = made(folder, "x"), some()
        with adapters.using("x") as model, torch.no_grad():
            ours = forward(model, samples).logps
        told = [
            replace(s, tokens=replace(s.tokens, logprobs=tuple((row[: s.length] - 0.5).tolist())))
            for s, row in zip(samples, ours, strict=True)
        ]
        corrected = gradients(monkeypatch, adapters, WeightSettings(correction=None), samples)
        for cap, factor in ((2.0, 2.718281828**0.5), (1.25, 1.25)):
            found = gradients(monkeypatch, adapters, WeightSettings(correction=cap), told)
            assert apart(found, {n: t * factor for n, t in corrected.items()}) < 1e-5

    def test_later_updates_of_a_step_have_a_ratio_and_are_clipped(self, folder: Path) -> None:
        settings = PLAIN.model_copy(update={"passes": 6, "lr": 0.05})
        facts = Trainer(made(folder, "x"), {"x": "x"}, settings).step(some(), 0)["components"]["x"]
        once = Trainer(made(folder, "x"), {"x": "x"}, PLAIN).step(some(), 0)["components"]["x"]
        assert facts["low"] + facts["high"] > 0
        assert facts["kl"] > 0
        assert (once["low"], once["high"], once["kl"]) == (0, 0, 0)

    def test_imitation_is_by_tokens_or_by_answers(
        self, folder: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        adapters, samples = made(folder, "x"), some()

        def found(loss: str) -> dict[str, Any]:
            settings = PLAIN.model_copy(update={"loss": loss})
            return gradients(monkeypatch, adapters, settings, samples, likelihood=True)

        assert apart(found("grpo"), found("sft")) == 0.0  # that of the other methods means nothing here
        by_tokens, by_answers = found("sft"), found("sft_sum")
        mean = sum(sample.length for sample in samples) / len(samples)
        assert apart(by_answers, {name: tensor * mean for name, tensor in by_tokens.items()}) < 1e-4

    def test_vespo_corrects_by_its_own_ratio(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        adapters, samples = made(folder, "x"), some()

        def found(cap: float | None, off: float) -> dict[str, Any]:
            settings = PLAIN.model_copy(update={"loss": "vespo", "correction": cap})
            told = [
                replace(s, tokens=replace(s.tokens, logprobs=tuple(x + off for x in s.tokens.logprobs)))
                for s in samples
            ]
            return gradients(monkeypatch, adapters, settings, told)

        assert apart(found(1.05, -2.5), found(9.0, -2.5)) == 0.0  # it has no weight that could be capped
        assert apart(found(1.05, -2.5), found(1.05, -2.0)) > 0.01
        assert apart(found(None, -2.5), found(None, -2.0)) == 0.0

    def test_an_adapter_may_be_called_head(self, folder: Path, tmp_path: Path) -> None:
        trainer = Trainer(made(folder, "head"), {"x": "head"}, PLAIN, critic=True)
        samples = [replace(s, values=(0.1,) * s.length, returns=(0.7,) * s.length) for s in some()]
        trainer.step(samples, 0)
        saved = trainer.save(tmp_path)
        again = Trainer(made(folder, "head", noise=0.0), {"x": "head"}, PLAIN, critic=True)
        again.restore(saved, tmp_path)
        assert again.save(tmp_path) == saved

    def test_beta_pulls_towards_the_base(self, folder: Path) -> None:
        distances = []
        for beta in (0.0, 5.0):
            adapters = made(folder, "x", noise=0.1)
            trainer = Trainer(adapters, {"x": "x"}, PLAIN.model_copy(update={"beta": beta, "lr": 0.01}))
            flat = [s.with_advantage(0.0) for s in some()]
            for number in range(5):
                facts = trainer.step(flat, number)
            distances.append(facts["components"]["x"].get("base_kl"))
            first = Trainer(made(folder, "x", noise=0.1), {"x": "x"}, PLAIN.model_copy(update={"beta": 5.0}))
            start = first.step(flat, 0)["components"]["x"]["base_kl"]
        assert distances[0] is None  # nothing is measured that is not used
        assert distances[1] < start


TOGETHER = """
import sys
import torch
import torch.distributed as distributed
from pathlib import Path
from safetensors.torch import save_file
from tests.test_trainer import PLAIN, made, some
from compound.optimizers.policy.trainer import Trainer

folder, out, rank, world, store = Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4]), sys.argv[5]
torch.set_num_threads(1)
if world > 1:
    distributed.init_process_group("gloo", init_method="file://" + store, rank=rank, world_size=world)
settings = PLAIN.model_copy(update={"micro_tokens": 64, "parts": 2, "lr": 0.01})
adapters = made(folder, "x", "y")
trainer = Trainer(adapters, {"x": "x", "y": "y"}, settings)
samples = some(components=("x", "y"), groups=3)
for number in range(2):
    facts = trainer.step(samples, number)
ends = {f"{name}.{key}": t.detach() for name in ("x", "y") for key, t in adapters.parameters(name)}
save_file(ends, out / f"{world}-{rank}.safetensors")
print(facts["components"]["x"]["entropy"])
if world > 1:
    distributed.destroy_process_group()
"""


def test_two_processes_train_to_the_weights_of_one(folder: Path, tmp_path: Path) -> None:
    from safetensors.torch import load_file

    root = Path(__file__).parents[1]
    environment = {**os.environ, "PYTHONPATH": str(root), "PYTHONWARNINGS": "ignore"}

    def begun(rank: int, world: int) -> subprocess.Popen[str]:
        arguments = [str(folder), str(tmp_path), str(rank), str(world), str(tmp_path / "store")]
        return subprocess.Popen(
            [sys.executable, "-c", TOGETHER, *arguments], cwd=root, env=environment, text=True,
            stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        )  # fmt: skip

    told = []
    for process in [begun(0, 2), begun(1, 2), begun(0, 1)]:
        out, error = process.communicate(timeout=300)
        assert process.returncode == 0, error
        told.append(float(out.splitlines()[-1]))
    alone, first, second = (load_file(tmp_path / f"{name}.safetensors") for name in ("1-0", "2-0", "2-1"))
    start = made(folder, "x", "y")
    before = {f"{name}.{key}": t.detach() for name in ("x", "y") for key, t in start.parameters(name)}
    assert alone.keys() == first.keys() == second.keys() == before.keys()
    for name, tensor in alone.items():
        assert torch.equal(first[name], second[name])
        assert torch.allclose(tensor, first[name], atol=1e-5)
        assert not torch.equal(tensor, before[name])
    assert told[0] == pytest.approx(told[2], rel=1e-4)  # what is reported is of all samples
