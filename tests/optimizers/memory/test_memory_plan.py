"""Memory of trainer, engines and backbone is planned together, and refused if it cannot fit."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

import compound as cp  # noqa: E402
from benchmarks.simulated.toy_model import make_toy_model  # noqa: E402
from compound import CompoundError, Executor, OptimizeSettings  # noqa: E402
from compound.api import optimize as api  # noqa: E402
from compound.api.optimize import make_problem  # noqa: E402
from compound.core.errors import DeclarationError  # noqa: E402
from compound.engines import model_folder  # noqa: E402
from compound.engines.local import devices, footprint, loading  # noqa: E402
from compound.engines.local.engine import TransformersEngine  # noqa: E402
from compound.engines.local.footprint import Footprint  # noqa: E402
from compound.engines.local.loading import checkpoint_layers  # noqa: E402
from compound.engines.vllm.engine import VLLMEngine  # noqa: E402
from compound.graph.registry.engines import find_engine  # noqa: E402
from compound.optimization.method import Problem  # noqa: E402
from compound.optimizers import memory_plan  # noqa: E402
from compound.optimizers.memory_plan import (  # noqa: E402
    Demand,
    MemoryPlan,
    plan_memory,
)
from compound.optimizers.weights.bases import PlannedTraining  # noqa: E402
from compound.optimizers.weights.distributed.learner import LearnerSettings  # noqa: E402
from compound.optimizers.weights.learner.adapters import (  # noqa: E402
    Adapters,
    _compute_in_base_dtype,
)

pytestmark = pytest.mark.usefixtures("without_reports")

RANK = 4
ROWS = [{"question": str(i), "answer": str(i)} for i in range(40)]
SPLITS: Any = {"train": ROWS, "valid": ROWS, "test": ROWS}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_toy_model(tmp_path_factory.mktemp("toy"))


def problem(
    folder: Path,
    engine: TransformersEngine | VLLMEngine | None = None,
    *,
    method: str = "mmgrpo",
    targets: Sequence[str] | str = "all-linear",
    **settings: Any,
) -> Problem:
    """Return the problem of training one component on a toy model."""
    question = cp.Input("question", str)
    llm = cp.LLM("answerer", prompt="Answer.", output=str, weights=cp.LoRA(RANK, targets=targets))
    answer = llm(question=question)
    system = cp.System("one", outputs={"answer": answer}, lm="toy")
    data = cp.Dataset.of(**SPLITS)
    lm = engine or TransformersEngine(
        str(folder), dtype="float32", max_batch=2, max_batch_tokens=400
    )
    given = OptimizeSettings.model_validate(
        {"method": method, "budget": {"system_runs": 4000}, method: settings}
    )
    return make_problem(system, data, cp.metrics.exact_match("answer"), given, {"toy": lm})


def test_weights_and_adapters_are_counted_as_they_are_loaded(folder: Path) -> None:
    sizes = footprint.footprint(folder)
    model, _ = model_folder.load_causal(folder, "float32")
    assert sizes.weights("float32") == sum(p.numel() * p.element_size() for p in model.parameters())
    assert sizes.weights("bfloat16") * 2 == sizes.weights("float32")
    adapters = Adapters(str(folder), {"x": cp.LoRA(rank=RANK)}, dtype="float32")
    held = sum(tensor.numel() for _, tensor in adapters.parameters("x"))
    assert sizes.adapter(RANK, adapters.spaces["x"].targets) == held


def test_only_the_configuration_is_read(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_bytes((folder / "config.json").read_bytes())
    model = model_folder.load_empty(tmp_path)
    assert {parameter.device.type for parameter in model.parameters()} == {"meta"}
    assert Footprint.of(model) == footprint.footprint(folder)


def test_a_teacher_is_counted_beside_another_base_model(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (alone,) = [d for d in plan_memory(problem(folder)).demands if "trainer" in d.what]
    other, made = make_toy_model(tmp_path), problem(folder, method="distill", teacher="toy")
    for teacher, weights in ((folder, 0), (other, footprint.footprint(folder).weights("float32"))):
        monkeypatch.setattr(PlannedTraining, "teacher", str(teacher))
        (taught,) = [d for d in plan_memory(made).demands if "trainer" in d.what]
        assert taught.what.endswith("taught by 'toy'")
        assert taught.fixed == alone.fixed + weights


def served(folder: Path) -> int:
    """Return the weights of an engine in float32, which packs the output layer for itself on a CPU."""
    sizes, on_cpu = footprint.footprint(folder), devices.resolve_device() == "cpu"
    return sizes.weights("float32") + on_cpu * 4 * sizes.vocabulary * sizes.hidden


def test_a_base_that_engine_and_trainer_share_is_counted_once(folder: Path) -> None:
    weights = footprint.footprint(folder).weights("float32")

    def planned(*, processes: int = 1, **base: Any) -> tuple[MemoryPlan, int, int]:
        plan = plan_memory(problem(folder, base=base, learner={"processes": processes}))
        engine, trainer = plan.demands
        return plan, engine.fixed, trainer.fixed

    plan, engine, shared = planned()
    assert engine == served(folder)
    assert "with the weights of its engine" in "\n".join(plan.lines())
    plan, engine, alone = planned(attn_implementation="eager")
    assert (engine, alone) == (served(folder), weights + shared)
    assert plan.lines()[-1] == (
        f"'{folder}' is loaded twice, for the trainer and its engine: attn_implementation is eager, and auto "
        "in the engine"
    )
    assert planned(processes=2)[1:] == (served(folder), 2 * (weights + shared))


def test_quantization_counts_linear_layers_by_their_bits() -> None:
    sizes = Footprint(1000, 640, 1, 8, 8, 8, 16, 8, 16, ())
    assert sizes.weights("bfloat16", "8bit") == 360 * 2 + 640
    assert sizes.weights("bfloat16", "4bit") == 360 * 2 + 640 // 2 + 640 // 64 * 4


def test_the_cache_holds_keys_and_values_of_every_layer(folder: Path) -> None:
    from transformers import DynamicCache

    model, _ = model_folder.load_causal(folder, "float32")
    cache = DynamicCache()
    model(input_ids=torch.ones(1, 7, dtype=torch.long), past_key_values=cache)
    held = sum(layer.keys.nbytes + layer.values.nbytes for layer in cache.layers)
    assert footprint.footprint(folder).cache("float32") * 7 == held


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(
    ("family", "sizes"),
    [
        ("Llama", {"hidden_size": 64, "intermediate_size": 192, "num_attention_heads": 4}),
        # queries are wider than hidden states, and they and keys have norms, as in Qwen3-0.6B
        (
            "Qwen3",
            {"hidden_size": 64, "intermediate_size": 192, "num_attention_heads": 4, "head_dim": 32},
        ),
    ],
)
def test_stored_activations_are_close_to_what_autograd_stores(
    family: str, sizes: dict[str, int], dtype: str, checkpointing: bool
) -> None:
    import transformers

    def measured(layers: int) -> tuple[float, Footprint]:
        config = getattr(transformers, f"{family}Config")(
            **{"num_key_value_heads": 2, **sizes}, num_hidden_layers=layers, vocab_size=32
        )
        model = getattr(transformers, f"{family}ForCausalLM")(config).to(getattr(torch, dtype))
        return stored_bytes(model, checkpointing), Footprint.of(model)

    (small, _), (large, found) = measured(2), measured(6)
    # the difference excludes what is stored once; a checkpointed layer is not stored in the forward
    # pass
    expected = found.activations(dtype, checkpointing=checkpointing)
    once = found.activations(dtype) / 6 if checkpointing else 0
    assert (large - small) / 4 <= (expected - once) / 6 * 1.02
    assert (large - small) / 4 >= (expected - once) / 6 * 0.85


def stored_bytes(model: Any, checkpointing: bool) -> float:
    """Return the bytes per token that a forward pass stores for the backward pass of an adapter."""
    import peft

    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "`is_gradient_checkpointing`", FutureWarning)
        wrapped = peft.get_peft_model(
            model, peft.LoraConfig(r=2, target_modules="all-linear")
        ).eval()
    _compute_in_base_dtype(wrapped)
    if checkpointing:
        checkpoint_layers(model, "m", "base.gradient_checkpointing")
    own = {
        tensor.untyped_storage().data_ptr()
        for tensor in (*wrapped.parameters(), *wrapped.buffers())
    }
    stored: dict[int, Any] = {}

    def pack(tensor: Any) -> Any:
        stored[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    ids = torch.ones(8, 64, dtype=torch.long)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        output = model.model(input_ids=ids, use_cache=False).last_hidden_state
    assert output.requires_grad
    found = sum(t.untyped_storage().nbytes() for place, t in stored.items() if place not in own)
    return float(found / ids.numel())


def test_trainer_and_engine_are_planned_together(folder: Path) -> None:
    plan = plan_memory(
        problem(folder, optimizer={"micro_tokens": 128}, rollouts={"max_length": 128})
    )
    sizes = footprint.footprint(folder)
    assert {demand.device for demand in plan.demands} == {
        devices.indexed_device(devices.resolve_device())
    }
    engine, trainer = plan.demands
    adapter = sum(RANK * (inputs + outputs) for _, inputs, outputs in sizes.linear)
    assert engine.fixed == served(folder)
    assert trainer.fixed == 24 * adapter
    # with two copies of keys and values
    stored = 128 * (sizes.activations("float32") + 2 * sizes.cache("float32"))
    assert trainer.working == stored + 128 * 3 * 4 * sizes.vocabulary
    adapters = 8 * adapter * 4
    assert engine.working == 500 * sizes.cache("float32") + 2 * sizes.vocabulary * 12 + adapters


def test_checkpointing_and_smaller_batches_need_less(folder: Path) -> None:
    def trainer(**settings: Any) -> Demand:
        return plan_memory(problem(folder, **settings)).demands[1]

    usual = trainer()
    assert trainer(optimizer={"micro_tokens": 1024}).working < usual.working
    assert trainer(base={"gradient_checkpointing": True}).working < usual.working
    assert "gradient_checkpointing" in usual.lower
    assert "gradient_checkpointing" not in trainer(base={"gradient_checkpointing": True}).lower


@pytest.mark.parametrize(("max_length", "longest"), [(200, 200), (8192, 256)])  # of the model: 256
def test_a_sample_longer_than_a_batch_is_planned_by_itself(
    folder: Path, max_length: int, longest: int
) -> None:
    plan = plan_memory(
        problem(folder, optimizer={"micro_tokens": 64}, rollouts={"max_length": max_length})
    )
    trainer, sizes = plan.demands[1], footprint.footprint(folder)
    logits = longest * 3 * 4 * sizes.vocabulary
    assert trainer.working == longest * sizes.activations("float32") + logits
    assert (
        "lower optimize.mmgrpo.optimizer.micro_tokens and optimize.mmgrpo.rollouts.max_length"
        in trainer.lower
    )


def test_every_process_of_a_learner_is_counted(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def trainers(**learner: Any) -> list[Demand]:
        # of other kernels than the engine, with which one process would share the weights
        base = {"attn_implementation": "sdpa"}
        found = plan_memory(problem(folder, learner=learner, base=base)).demands
        return [demand for demand in found if demand.what.startswith("trainer")]

    (one,), sizes = trainers(), footprint.footprint(folder)
    layers = 4 * sum(inputs * outputs for _, inputs, outputs in sizes.linear)
    (three,) = trainers(processes=3)
    assert (three.fixed, three.working) == (3 * one.fixed, 3 * one.working)
    assert three.what.endswith(", 3 processes")
    (divided,) = trainers(processes=2, sharding="fsdp")
    share = (
        layers // 2 + layers // sizes.layers
    )  # a half of the layers, and a whole one that is gathered
    assert divided.fixed == 2 * (one.fixed - layers + share)
    monkeypatch.setattr(LearnerSettings, "check", lambda *_: None)  # this machine may have no GPU
    monkeypatch.setattr(footprint, "free_memory", lambda _: None)
    monkeypatch.setattr(
        devices, "resolve_device", lambda name, *_: name if ":" in name else "cuda:0"
    )
    several = trainers(processes=2)
    assert [demand.device for demand in several] == ["cuda:0", "cuda:1"]
    assert {demand.fixed for demand in several} == {one.fixed}


def test_a_run_that_cannot_fit_is_refused_with_numbers_and_settings(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(footprint, "free_memory", lambda _: 1000)
    made = problem(folder)
    with pytest.raises(CompoundError) as raised:
        plan_memory(made).check()
    assert "the run needs at least" in raised.value.message
    assert "0 MiB are free" in raised.value.message
    assert "trainer of" in raised.value.message
    assert "optimize.mmgrpo.base.dtype" in raised.value.hint
    with pytest.raises(CompoundError, match="the run needs at least"):
        cp.optimize(
            made.system,
            SPLITS,
            made.metric,
            method="mmgrpo",
            run_dir=tmp_path / "run",
            budget=4000,
            engines={"toy": TransformersEngine(str(folder), dtype="float32")},
        )
    assert not (tmp_path / "run").exists()


def test_long_inputs_that_may_not_fit_are_a_note(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = plan_memory(problem(folder))
    fixed = sum(demand.fixed for demand in plan.demands)
    tight = replace(plan, free={plan.demands[0].device: fixed + 1})
    tight.check()
    assert "may not fit: lower optimize.mmgrpo.optimizer.micro_tokens" in "\n".join(tight.lines())
    assert "may not fit" not in "\n".join(replace(plan, free={}).lines())
    assert "free memory unknown" in "\n".join(replace(plan, free={}).lines())


def test_devices_are_compared_one_by_one() -> None:
    places = ("cuda:0", "cuda:1")
    demands = [Demand(f"part on {each}", each, 10, 0, "lower", f"move {each}") for each in places]
    plan = MemoryPlan(demands, dict.fromkeys(places, 15))
    plan.check()
    with pytest.raises(CompoundError, match="on cuda:0.*part on cuda:0") as raised:
        replace(plan, free={"cuda:0": 9, "cuda:1": 15}).check()
    assert "cuda:1" not in str(raised.value)


@pytest.fixture
def gpu_of_10_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine with one CUDA device, on which 10 bytes are free."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(footprint, "free_memory", lambda _: 10)
    monkeypatch.setattr(Footprint, "weights", lambda *_: 6)
    monkeypatch.setattr(Footprint, "adapter", lambda *_: 0)


@pytest.mark.usefixtures("gpu_of_10_bytes")
@pytest.mark.parametrize(
    ("engine", "trainer"), [("cuda", "cuda:0"), ("cuda:0", "auto"), ("auto", "cuda")]
)
def test_all_names_of_a_device_are_planned_as_one_device(
    folder: Path, engine: Any, trainer: str
) -> None:
    lm = TransformersEngine(str(folder), dtype="float32", device=engine)
    plan = plan_memory(problem(folder, lm, base={"device": trainer}))
    assert [(demand.device, demand.fixed) for demand in plan.demands] == [
        ("cuda:0", 6),
        ("cuda:0", 0),
    ]
    assert plan.free == {"cuda:0": 10}
    plan = plan_memory(problem(folder, lm, base={"device": trainer, "attn_implementation": "sdpa"}))
    with pytest.raises(CompoundError, match="on cuda:0"):
        plan.check()


def test_only_the_largest_of_successive_trainers_counts() -> None:
    mib = 2**20
    trainers = [
        Demand(f"trainer {n}", "cpu", fixed * mib, working * mib, f"lower {n}", f"shrink {n}")
        for n, fixed, working in (("a", 10, 1), ("b", 9, 100), ("c", 8, 2))
    ]
    plan = MemoryPlan(memory_plan._largest(trainers), {"cpu": 10 * mib})
    plan.check()  # not 10 + 9 + 8
    first, part, note = plan.lines()
    assert first.startswith(
        "memory on cpu: 10 MiB for weights and optimizer states, at most 109 MiB with"
    )
    assert part == "  trainer a or trainer b: 10 MiB, at most 109 MiB"
    assert "lower b" in note
    with pytest.raises(CompoundError, match="needs at least 10 MiB of memory on cpu") as raised:
        replace(plan, free={"cpu": 10 * mib - 1}).check()
    assert "shrink a" in raised.value.hint


def test_a_model_that_is_not_here_is_unknown_and_nothing_is_downloaded(folder: Path) -> None:
    plan = plan_memory(problem(folder, TransformersEngine("no/such-model", dtype="float32")))
    assert plan.demands == []
    assert "not on this machine" in plan.lines()[0]
    plan.check()


@pytest.mark.parametrize(
    ("targets", "hint"),
    [
        (("q_prj",), "did you mean 'q_proj'?"),
        (("k_proj", "q_prj"), "did you mean 'q_proj'?"),
        (("mlp",), "possible: "),  # a block of layers
        (("self_attn",), "possible: "),
    ],
)
def test_a_target_that_the_model_lacks_is_refused_before_anything_is_spent(
    folder: Path, targets: tuple[str, ...], hint: str
) -> None:
    refused = rf"names '{targets[-1]}', but the model has no such layer"
    with pytest.raises(DeclarationError, match=refused) as raised:
        plan_memory(problem(folder, targets=targets))
    assert raised.value.hint.startswith(hint)


def test_systems_of_remote_models_plan_nothing() -> None:
    pytest.importorskip("litellm")
    question = cp.Input("question", str)
    answer = cp.LLM("answerer", prompt=cp.Text("Answer."), output=str)(question=question)
    system = cp.System("one", outputs={"answer": answer}, lm="openai/gpt-4o-mini")
    data = cp.Dataset.of(**SPLITS)
    settings = OptimizeSettings.model_validate(
        {"method": "random", "budget": {"system_runs": 4000}}
    )
    plan = plan_memory(
        make_problem(system, data, cp.metrics.exact_match("answer"), settings, find_engine)
    )
    assert plan == MemoryPlan()
    assert plan.lines() == []


def test_the_device_of_the_trainer_is_checked_before_anything_is_spent(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(DeclarationError, match=r"optimize\.mmgrpo\.base\.device is cuda:3"):
        problem(folder, base={"device": "cuda:3"})
    engine = TransformersEngine("openai", dtype="float32")
    with pytest.raises(DeclarationError, match=r"optimize\.mmgrpo\.base\.quantization is 4bit"):
        problem(folder, engine, base={"quantization": "4bit"})
    backbone = {"model": "minilm", "device": "cuda:3"}
    with pytest.raises(DeclarationError, match=r"optimize\.optimas\.backbone\.device is cuda:3"):
        problem(folder, method="optimas", backbone=backbone)
    problem(folder, method="optimas", backbone={**backbone, "device": "cpu"})


def test_the_trainer_has_the_format_of_the_sampler(folder: Path) -> None:
    with pytest.raises(
        DeclarationError, match="dtype is bfloat16, but the components sample with float32"
    ):
        problem(folder, base={"dtype": "bfloat16"})
    problem(folder, base={"dtype": "float32"})


@pytest.fixture
def gpu_of_a_gib(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine with one CUDA device of 1 GiB, all of it free."""
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(footprint, "free_memory", lambda _: 2**30)
    monkeypatch.setattr(footprint, "total_memory", lambda _: 2**30)
    monkeypatch.setattr(loading, "dtype_of", lambda _: "float32")


@pytest.mark.usefixtures("gpu_of_a_gib")
def test_a_vllm_server_beside_the_trainer_is_planned_with_it(folder: Path) -> None:
    short: Any = {"optimizer": {"micro_tokens": 128}, "rollouts": {"max_length": 128}}
    plan = plan_memory(problem(folder, VLLMEngine(str(folder)), **short))
    sizes = footprint.footprint(folder)
    adapter = sum(RANK * (inputs + outputs) for _, inputs, outputs in sizes.linear)
    fixed = sizes.weights("float32") + 24 * adapter
    stored = sizes.activations("float32") + 8 * sizes.cache("float32")
    working = 128 * (stored + 3 * 4 * sizes.vocabulary)
    share = int(100 * (1 - 0.08 - (fixed + working) / 2**30)) / 100
    assert plan.gpu_shares == {"0": share}
    server, trainer = plan.demands
    assert (
        (server.device, server.fixed)
        == (trainer.device, int(share * 2**30))
        == ("cuda:0", server.fixed)
    )
    assert (trainer.fixed, trainer.working) == (fixed, working)
    plan.check()
    text = "\n".join(plan.lines())
    assert f"  vLLM server of '{folder}', {share:g} of the device: " in text
    assert f"gets {share:g} of the memory of cuda:0 (--gpu-memory-utilization)" in text
    assert "may not fit" not in text


@pytest.mark.usefixtures("gpu_of_a_gib")
def test_a_share_that_does_not_fit_beside_the_trainer_is_refused(folder: Path) -> None:
    plan = plan_memory(problem(folder, VLLMEngine(str(folder), gpu_memory=1.0)))
    with pytest.raises(CompoundError, match="on cuda:0") as raised:
        plan.check()
    assert f"lower gpu_memory of the engine of '{folder}'" in raised.value.hint


@pytest.mark.usefixtures("gpu_of_a_gib")
def test_sleep_is_refused_where_samples_are_drawn_during_training(folder: Path) -> None:
    lm = VLLMEngine(str(folder), sleep=True)
    said = r"optimize\.mmgrpo draws samples during training"
    with pytest.raises(DeclarationError, match=said) as raised:
        plan_memory(problem(folder, lm, rollouts={"max_staleness": 1}))
    assert "rollouts.max_staleness to 0" in raised.value.hint
    assert any("sleep while the trainer" in line for line in plan_memory(problem(folder, lm)).notes)
    elsewhere = problem(folder, lm, rollouts={"max_staleness": 1}, base={"device": "cpu"})
    said = f"sleep of the engine of '{folder}' has no effect: no trainer computes on its GPU (0)"
    assert plan_memory(elsewhere).lines()[-1] == said


@pytest.mark.usefixtures("gpu_of_a_gib")
def test_a_run_starts_its_server_with_the_planned_share(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lm = VLLMEngine(str(folder))
    made = problem(folder, lm)

    def stop(planned: Problem) -> None:
        assert Executor(planned.engines).engine("toy") is lm
        raise KeyboardInterrupt

    monkeypatch.setattr(api, "describe", stop)  # the plan is made, and nothing has been started
    with pytest.raises(KeyboardInterrupt):
        cp.optimize(
            made.system,
            SPLITS,
            made.metric,
            method="mmgrpo",
            run_dir=tmp_path / "run",
            budget=4000,
            engines={"toy": lm},
        )
    assert lm._gpu_memory_left == plan_memory(made).gpu_shares["0"]


def test_an_unknown_trainer_leaves_the_share_to_vllm_and_says_so() -> None:
    plan = plan_memory(problem(folder=Path("unused"), engine=VLLMEngine("no/such-model")))
    assert plan.gpu_shares == {}
    assert "set gpu_memory of their engines" in plan.lines()[-1]


SIZES: dict[str, Any] = {
    "vocab_size": 500,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
MIXTURES: dict[str, dict[str, Any]] = {
    "Qwen3Moe": {"num_experts": 4, "moe_intermediate_size": 32, "head_dim": 16},
    "Mixtral": {"num_local_experts": 4},
    "GptOss": {"num_local_experts": 4, "head_dim": 16},
    "DeepseekV3": {"n_routed_experts": 8, "first_k_dense_replace": 1, "q_lora_rank": None},
}


@pytest.mark.parametrize("family", MIXTURES)
def test_adapters_that_would_silently_leave_out_experts_are_refused(
    family: str, tmp_path: Path
) -> None:
    import transformers

    getattr(transformers, f"{family}Config")(**SIZES, **MIXTURES[family]).save_pretrained(tmp_path)
    with pytest.raises(
        DeclarationError, match=r"do not apply to \d\d% of the parameters in the layers"
    ) as told:
        problem(tmp_path)
    assert "set weights.lora.targets to attention" in told.value.hint
    for targets in ("attention", ["o_proj"]):
        with pytest.warns(
            UserWarning, match=r"adapters leave \d\d% of the parameters in the layers"
        ):
            problem(tmp_path, targets=targets)
