"""TRL trains a component on rollouts of its system, and on exported groups: the same step as ours."""

from __future__ import annotations

import json
import warnings
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from numerics import GRADIENTS
from training_settings import plain, trainings
from trainings.learners import catch_gradients

torch = pytest.importorskip("torch")
peft = pytest.importorskip("peft")
transformers = pytest.importorskip("transformers")
with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    trl = pytest.importorskip("trl")
    datasets = pytest.importorskip("datasets")

import compound as cp  # noqa: E402
from compound.core.engine import TokenRecord  # noqa: E402
from compound.core.errors import DeclarationError  # noqa: E402
from compound.core.example import Example  # noqa: E402
from compound.engines.local.engine import TransformersEngine  # noqa: E402
from compound.optimizers.weights.credit import advantages  # noqa: E402
from compound.optimizers.weights.interchange import (  # noqa: E402
    TRLRollouts,
    export_groups,
    store_adapter,
    trl_rollouts,
)
from compound.optimizers.weights.learner import trainer as trainer_module  # noqa: E402
from compound.optimizers.weights.learner.adapters import Adapters  # noqa: E402
from compound.optimizers.weights.learner.samples import Sample  # noqa: E402
from compound.testing import ScriptedLM  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore")
SHAPE = cp.LoRA(rank=4, targets=("q_proj", "v_proj"))
EXAMPLES = [Example(str(n), {"question": f"What is {n}?"}, {}) for n in range(2)]
GROUP = 4


@pytest.fixture(scope="module")
def model(make_model: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(make_model(tmp_path_factory.mktemp("model")))


def declared(model: str, **settings: Any) -> cp.System:
    """Return a system whose answerer reads what another model wrote."""
    question = cp.Input("question")
    rewriter = cp.LLM("rewriter", prompt=cp.Text("Rewrite."), lm="scripted", temperature=1.0)
    options = {"max_tokens": 12, "retries": 0, "weights": SHAPE, "lm": model, **settings}
    answerer = cp.LLM("answerer", prompt=cp.Text("Answer."), **options)
    return cp.System("qa", outputs={"answer": answerer(question=rewriter(question=question))})


def engines(model: str) -> dict[str, cp.ext.Engine]:
    count = iter(range(1000))
    scripted = ScriptedLM(lambda _: f"rewritten {next(count)}")
    return {model: TransformersEngine(model, dtype="float32"), "scripted": scripted}


def letters(outputs: Mapping[str, Any], _: Example) -> float:
    return len(set(outputs["answer"])) / 20


def rollouts_of(
    model: str,
    folder: Path,
    system: cp.System | None = None,
    component: str = "answerer",
    examples: Sequence[Example] = EXAMPLES,
) -> TRLRollouts:
    given = system or declared(model), component, examples, letters
    return trl_rollouts(*given, engines=engines(model), folder=folder)


@dataclass
class Recorded(transformers.TrainerCallback):  # type: ignore[misc, name-defined]
    """Gradients before the first update of a TRL run, and what its rollout function returned."""

    rollouts: Callable[..., Any]
    gradients: dict[str, Any] = field(default_factory=dict)
    drawn: dict[str, list[Any]] = field(default_factory=dict)

    def __call__(self, prompts: list[str], trainer: Any) -> dict[str, list[Any]]:
        found = self.rollouts(prompts, trainer)
        self.drawn = self.drawn or {**found, "prompt": prompts}
        return found  # type: ignore[no-any-return]

    def on_pre_optimizer_step(self, *_: Any, model: Any = None, **__: Any) -> None:
        if not self.gradients:
            self.gradients = {
                name.replace(".default.", "."): parameter.grad.clone()
                for name, parameter in model.named_parameters()
                if parameter.grad is not None
            }


def train_by_trl(
    model: str,
    folder: Path,
    rows: list[dict[str, str]],
    rollouts: Callable[..., Any],
    reward: Any,
    loss: str = "bnpo",
    **settings: Any,
) -> tuple[Recorded, Any]:
    recorded = Recorded(rollouts)
    arguments = trl.GRPOConfig(
        output_dir=str(folder),
        num_generations=GROUP,
        per_device_train_batch_size=GROUP * len(rows),
        loss_type=loss,
        beta=0.0,
        learning_rate=0.01,
        max_grad_norm=0.0,
        logging_steps=1,
        save_strategy="no",
        report_to=[],
        use_cpu=True,
        bf16=False,
        shuffle_dataset=False,
        disable_tqdm=True,
        **{"max_steps": 1, **settings},
    )
    lora = peft.LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj", "v_proj"])
    trainer = trl.GRPOTrainer(
        model=transformers.AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32),
        reward_funcs=reward,
        args=arguments,
        train_dataset=datasets.Dataset.from_list(rows),
        processing_class=transformers.AutoTokenizer.from_pretrained(model),
        rollout_func=recorded,
        peft_config=lora,
        callbacks=[recorded],
    )
    trainer.train()
    return recorded, trainer


def our_step(
    model: str, samples: Sequence[Sample], start: Path, loss: str, monkeypatch: pytest.MonkeyPatch
) -> tuple[float, dict[str, Any]]:
    """Return loss and gradients of our trainer on the same samples, from the same adapter."""
    losses: list[float] = []
    original = trainer_module.Trainer._loss

    def noted(*arguments: Any) -> Any:
        value, ran = original(*arguments)
        losses.append(value.item())
        return value, ran

    with monkeypatch.context() as patched:
        found = catch_gradients(patched)
        patched.setattr(trainer_module.Trainer, "_loss", noted)
        adapters = Adapters(model, {"answerer": SHAPE}, dtype="float32")
        adapters.load("answerer", start)
        settings = plain(loss=loss)
        settings.trainer(adapters, {"answerer": "answerer"}, longest=12).step(samples, 0)
    return sum(losses), {name.partition("' ")[2]: tensor for name, tensor in found.items()}


def assert_equal_steps(
    recorded: Recorded, trainer: Any, ours: tuple[float, dict[str, Any]]
) -> None:
    loss, gradients = ours
    assert trainer.state.log_history[0]["loss"] == pytest.approx(loss, abs=1e-5)
    most = max(float(tensor.abs().max()) for tensor in recorded.gradients.values())
    assert most > 1e-3
    assert gradients.keys() == recorded.gradients.keys()
    for name, expected in recorded.gradients.items():
        assert float((gradients[name] - expected).abs().max()) / most < GRADIENTS


def samples_of(drawn: Mapping[str, list[Any]]) -> list[Sample]:
    """Return the samples of a rollout function's answer, with our advantages."""
    names = ("prompt", "prompt_ids", "completion_ids", "logprobs", "run_reward")
    made = []
    for prompt, ids, answer, logprobs, reward in zip(*map(drawn.get, names), strict=True):
        record = TokenRecord(tuple(ids), tuple(answer), tuple(logprobs), "stop")
        place = "answerer", prompt, "answerer", 0
        made.append(Sample(*place, record, reward, (prompt,), on_policy=False))
    # TRL keeps flat groups
    trained = {id(sample.tokens): sample for sample in advantages(made, "trl")[0]}
    return [trained.get(id(sample.tokens), sample.with_advantage(0.0)) for sample in made]


OURS = {"grpo": "grpo", "bnpo": "dapo"}  # by TRL's name


@pytest.mark.parametrize("loss", OURS)
def test_trls_step_on_rollouts_of_the_system_is_ours(
    model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, loss: str
) -> None:
    rollouts = rollouts_of(model, tmp_path / "adapters")
    recorded, trainer = train_by_trl(
        model, tmp_path / "trl", rollouts.rows, rollouts, rollouts.reward, loss, max_steps=2
    )
    drawn = recorded.drawn
    assert drawn["prompt"] == [name for name in ("0", "1") for _ in range(GROUP)]
    for first in (0, GROUP):  # the rewriter answers once per group
        assert len({tuple(ids) for ids in drawn["prompt_ids"][first : first + GROUP]}) == 1
    assert len({tuple(ids) for ids in drawn["completion_ids"]}) > 2
    assert len({len(ids) for ids in drawn["completion_ids"]}) > 1
    adapters = {path.name: path for path in (tmp_path / "adapters").iterdir()}
    assert len(adapters) == 2  # that of each step
    start = next(path for path in adapters.values() if _is_zero(path))
    assert_equal_steps(
        recorded, trainer, our_step(model, samples_of(drawn), start, OURS[loss], monkeypatch)
    )
    assert trainer.state.log_history[0]["reward"] == pytest.approx(
        sum(drawn["run_reward"]) / len(drawn["run_reward"]), abs=1e-5
    )


def _is_zero(folder: Path) -> bool:
    from safetensors.torch import load_file

    tensors = load_file(folder / "adapter_model.safetensors")
    return all(not tensor.any() for name, tensor in tensors.items() if "lora_B" in name)


def drawn_by(
    model: str, folder: Path, process: int, prompts: list[str]
) -> list[tuple[list[int], list[int]]]:
    """Return prompts and completions that one of several processes of TRL draws, with the same weights."""
    torch.manual_seed(0)
    base = transformers.AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    lora = peft.LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj", "v_proj"])
    trainer: Any = SimpleNamespace(
        is_fsdp_enabled=False,
        is_deepspeed_enabled=False,
        model=peft.get_peft_model(base, lora),
        accelerator=SimpleNamespace(process_index=process, unwrap_model=lambda model: model),
        args=SimpleNamespace(temperature=1.0),
        processing_class=transformers.AutoTokenizer.from_pretrained(model),
    )
    found = rollouts_of(model, folder)(prompts, trainer)
    return list(zip(found["prompt_ids"], found["completion_ids"], strict=True))


def test_processes_draw_the_parts_of_a_group_that_one_process_draws(
    model: str, tmp_path: Path
) -> None:
    whole = drawn_by(model, tmp_path / "whole", 0, ["0"] * 4)
    first = drawn_by(model, tmp_path / "first", 0, ["0"] * 2)
    second = drawn_by(model, tmp_path / "second", 1, ["0"] * 2)
    assert len({tuple(completion) for _, completion in whole}) == 4
    assert len({tuple(prompt) for prompt, _ in whole}) == 1
    assert first + second == whole


def test_runs_without_an_answer_are_left_out_of_their_group(model: str, tmp_path: Path) -> None:
    def picky(question: str) -> str:
        if "0" in question:
            raise ValueError("no zeros")
        return question

    answerer = cp.LLM(
        "answerer", prompt=cp.Text("Say."), max_tokens=6, retries=0, weights=SHAPE, lm=model
    )
    node = answerer(question=cp.Function("picky", picky)(question=cp.Input("question")))
    rollouts = rollouts_of(model, tmp_path / "adapters", cp.System("qa", outputs={"answer": node}))
    recorded, trainer = train_by_trl(
        model, tmp_path / "trl", rollouts.rows, rollouts, rollouts.reward
    )
    assert recorded.drawn["run_reward"][:GROUP] == [None] * GROUP
    assert all(reward is not None for reward in recorded.drawn["run_reward"][GROUP:])
    assert all(torch.isfinite(tensor).all() for tensor in recorded.gradients.values())
    mean = sum(recorded.drawn["run_reward"][GROUP:]) / GROUP
    assert trainer.state.log_history[0]["reward"] == pytest.approx(mean, abs=1e-5)


def test_a_component_that_is_called_several_times_is_refused(model: str, tmp_path: Path) -> None:
    answerer = cp.LLM(
        "answerer", prompt=cp.Text("Say."), max_tokens=4, retries=0, weights=SHAPE, lm=model
    )
    again = answerer(question=answerer(question=cp.Input("question")), name="again")
    rollouts = rollouts_of(model, tmp_path / "adapters", cp.System("qa", outputs={"answer": again}))
    with pytest.raises(DeclarationError, match="called 2 times in a run of example '0'"):
        train_by_trl(model, tmp_path / "trl", rollouts.rows, rollouts, rollouts.reward)


def test_what_cannot_be_trained_is_refused_before_anything_runs(model: str, tmp_path: Path) -> None:
    with pytest.raises(DeclarationError, match="has no weights"):
        rollouts_of(model, tmp_path, component="rewriter")
    with pytest.raises(DeclarationError, match="same id"):
        rollouts_of(model, tmp_path, examples=[*EXAMPLES, EXAMPLES[0]])
    with pytest.raises(DeclarationError, match="does not serve adapters"):
        rollouts_of(model, tmp_path, declared("scripted"))


def train(model: str, folder: Path, **settings: Any) -> None:
    rows = [{"id": e.id, **e.inputs, "answer": "x"} for e in EXAMPLES]
    valid = [{"id": f"v{n}", "question": f"Who is {n}?", "answer": "x"} for n in range(6)]
    cp.optimize(
        declared(model),
        {"train": rows, "valid": valid, "test": valid},
        letters,
        method="mmgrpo",
        run_dir=folder,
        engines=engines(model),
        progress=False,
        budget=200,
        **trainings(steps=2, examples=2, runs=GROUP, lr=0.01, **settings),
    )


class Replay:
    def __init__(self, rows: Sequence[Mapping[str, Any]]) -> None:
        self.groups = defaultdict(list)
        for row in rows:
            self.groups[row["group"]].append(row)

    def __call__(self, prompts: list[str], trainer: Any) -> dict[str, list[Any]]:
        left = {name: iter(rows) for name, rows in self.groups.items()}
        rows = [next(left[name]) for name in prompts]
        found = {
            name: [row[name] for row in rows]
            for name in ("prompt_ids", "completion_ids", "logprobs", "reward")
        }
        return {**found, "run_reward": found.pop("reward")}

    def reward(self, run_reward: list[float], **_: Any) -> list[float]:
        return run_reward


def test_exported_groups_are_read_by_datasets_and_trained_by_trl(
    model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    train(model, tmp_path / "run", keep_samples=True)
    count = export_groups(tmp_path / "run", tmp_path / "groups.jsonl")
    data = datasets.load_dataset(
        "json",
        data_files=str(tmp_path / "groups.jsonl"),
        split="train",
        cache_dir=str(tmp_path / "cache"),
    )
    assert len(data) == count
    assert set(data["step"]) == {0, 1}
    tokenizer = transformers.AutoTokenizer.from_pretrained(model)
    for row in data:
        assert tokenizer.decode(row["completion_ids"]) == row["completion"]
        assert len(row["advantages"]) == len(row["completion_ids"]) == len(row["logprobs"])
        assert json.loads(row["group"])[:3] == [row["job"], row["step"], row["example"]]
    replay = Replay(data)
    assert len(replay.groups) == len({(row["step"], row["example"]) for row in data}) == 4
    assert {len(rows) for rows in replay.groups.values()} == {GROUP}
    prompts = [{"prompt": name} for name in replay.groups]
    recorded, trainer = train_on_export(model, tmp_path, prompts, replay)
    samples = samples_of(recorded.drawn)
    exported = [row for rows in replay.groups.values() for row in rows]
    for sample, row in zip(
        samples, exported, strict=True
    ):  # TRL computes the advantages of the export
        assert sample.advantages == pytest.approx(row["advantages"])
    assert_equal_steps(
        recorded, trainer, our_step(model, samples, tmp_path / "start", "dapo", monkeypatch)
    )


def train_on_export(
    model: str, folder: Path, prompts: list[dict[str, str]], replay: Replay
) -> tuple[Recorded, Any]:
    def rollouts(names: list[str], trainer: Any) -> dict[str, list[Any]]:
        reference = store_adapter(trainer, folder)
        (folder / reference["path"]).rename(folder / "start")
        return replay(names, trainer)

    return train_by_trl(model, folder / "trl", prompts, rollouts, replay.reward)
