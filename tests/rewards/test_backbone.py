"""The backbone: what it reads, batches and caches; LoRA training by equation 5, on a tiny random transformer."""

from __future__ import annotations

import asyncio
import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from compound import LLM, CompoundError, Function, Input, System, Text
from compound.core.errors import ConfigurationError
from compound.metrics import custom
from compound.optimizers.search.rewarding import (
    RewardAdapter,
    RewardMemory,
    RunRewards,
    shared_backbone,
)
from compound.rewards import fit as training
from compound.rewards import model as reward_model
from compound.rewards.backbone import Backbone, FeatureStore, batches
from compound.rewards.buffer import PairBuffer
from compound.rewards.candidates import Candidate
from compound.rewards.features import Template
from compound.rewards.fit import component_pairs, fit_rewards, train
from compound.rewards.model import _normalize, load, load_policy, store_reward
from compound.rewards.pairs import Draw
from compound.rewards.settings import BackboneLoRASettings
from numerics import LOGPROBS, rounding
from optimas_settings import learning, optimas

WORDS = ["good", "bad", "text", "number", "output", ":", *"0123456789", "which", "is", "the", "of"]


@pytest.fixture(scope="module", params=["encoder", "decoder"])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A transformer of a few thousand random weights, with a word tokenizer."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import (
        BertConfig,
        BertModel,
        LlamaConfig,
        LlamaForCausalLM,
        PreTrainedTokenizerFast,
    )

    path = tmp_path_factory.mktemp(str(request.param))
    special = (
        ["[PAD]", "[UNK]", "[CLS]", "[SEP]"]
        if request.param == "encoder"
        else ["[PAD]", "[UNK]", "</s>"]
    )
    vocabulary = {word: i for i, word in enumerate([*special, *WORDS])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    names: dict[str, str] = {"pad_token": "[PAD]", "unk_token": "[UNK]"}
    names |= (
        {"cls_token": "[CLS]", "sep_token": "[SEP]"}
        if request.param == "encoder"
        else {"eos_token": "</s>"}
    )
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, **names).save_pretrained(path)
    sizes: dict[str, Any] = {
        "vocab_size": len(vocabulary),
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "intermediate_size": 48,
        "max_position_embeddings": 64,
    }
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = (
            BertModel(BertConfig(**sizes, architectures=["BertModel"]))
            if request.param == "encoder"
            else LlamaForCausalLM(LlamaConfig(**sizes, num_key_value_heads=2))
        )
    model.save_pretrained(path)
    return path


def backbone(folder: Path, **settings: Any) -> Backbone:
    return Backbone(str(folder), dtype="float32", **settings)


tidy = _normalize


def shuffled_and_tidied(adapter: Path, name: str) -> None:
    """Write the names of the adapted layers in another order, as another process might, before tidying."""
    config = json.loads((adapter / "adapter_config.json").read_text())
    config["target_modules"] = sorted(config["target_modules"], reverse=True)
    (adapter / "adapter_config.json").write_text(json.dumps(config))
    tidy(adapter, name)


STATES = rounding(5.0)  # final states are normalised: a few times the unit of length
REWARDS = LOGPROBS
PAIRS = [
    ("text : good", "output : 1 2 3"),
    ("", "output : 4"),
    ("text : bad number of the text", ""),
]


class TestReading:
    def test_features_do_not_depend_on_the_company(self, folder: Path) -> None:
        one, many = backbone(folder), backbone(folder)
        together = many.embed(PAIRS)
        alone = np.vstack([one.embed([pair]) for pair in PAIRS])
        assert together == pytest.approx(alone, abs=STATES)
        assert together.shape == (3, one.dim)

    def test_a_text_is_read_once_with_each_description(self, folder: Path) -> None:
        model = backbone(folder)
        learned = fit_rewards(filled(), SYSTEM, ["a", "b"], model, "tiny").model
        calls = [
            ({"text": f"number {i}"}, {"output": word})
            for i in range(5)
            for word in ("good", "bad")
        ]
        before = model.passes
        a, b = (learned.rewards(name, calls) for name in "ab")
        assert model.passes - before == 2 * len(calls)
        assert learned.rewards("a", calls) == pytest.approx(a)
        assert model.passes - before == 2 * len(calls)
        assert not np.allclose(a, b)

    def test_inputs_are_shortened_never_the_output(self, folder: Path) -> None:
        model = backbone(folder, max_length=12)
        (tokens,) = model.tokenize([("text " * 50, "1 2 3 4 5")])
        assert len(tokens) == 12
        digits = model.tokenizer.convert_tokens_to_ids(list("12345"))
        assert [t for t in tokens if t in digits] == digits
        assert model.tokenize([("", "1 " * 50)])[0].count(digits[0]) >= 9

    def test_an_encoder_is_averaged_and_a_decoder_read_at_its_end(self, folder: Path) -> None:
        model = backbone(folder)
        tokens = model.tokenize(PAIRS[:1])
        with torch.inference_mode():
            hidden = model.model(input_ids=torch.tensor(tokens)).last_hidden_state[0]
            found = model.forward(tokens)[0]
        expected = hidden[-1] if model.decoder else hidden.mean(0)
        assert found.numpy() == pytest.approx(expected.numpy(), abs=STATES)

    def test_what_cannot_be_loaded_is_said(self, tmp_path: Path) -> None:
        with pytest.raises(CompoundError, match="cannot be a reward backbone"):
            Backbone(str(tmp_path))


@given(st.lists(st.integers(1, 40), max_size=30), st.integers(1, 100))
def test_batches_hold_each_text_once_and_no_more_tokens_than_allowed(
    lengths: list[int], most: int
) -> None:
    found = list(batches(lengths, most))
    assert sorted(i for batch in found for i in batch) == list(range(len(lengths)))
    for batch in found:
        assert len(batch) == 1 or len(batch) * max(lengths[i] for i in batch) <= most
    longest = [max(lengths[i] for i in batch) for batch in found]
    assert longest == sorted(longest, reverse=True)


class TestStore:
    def test_what_was_computed_is_read_not_computed_again(
        self, folder: Path, tmp_path: Path
    ) -> None:
        first, second = backbone(folder), backbone(folder)
        first.store_in(tmp_path / "features.bin")
        found = first.embed(PAIRS)
        second.store_in(tmp_path / "features.bin")
        assert second.embed(PAIRS).tobytes() == found.tobytes()
        assert second.passes == 0

    def test_a_torn_record_is_dropped_and_the_rest_stays(self, tmp_path: Path) -> None:
        path = tmp_path / "features.bin"
        store = FeatureStore(path, 3)
        store.put([b"a" * 16, b"b" * 16], np.arange(6, dtype=np.float32).reshape(2, 3))
        path.write_bytes(path.read_bytes()[:-5])
        again = FeatureStore(path, 3)
        assert b"a" * 16 in again
        assert b"b" * 16 not in again
        again.put([b"c" * 16], np.ones((1, 3), np.float32))
        assert FeatureStore(path, 3).get(b"c" * 16).tolist() == [1, 1, 1]

    def test_a_damaged_record_is_computed_again_and_said(
        self, tmp_path: Path, caplog: pytest.LogCaptureFixture
    ) -> None:
        path = tmp_path / "features.bin"
        store = FeatureStore(path, 3)
        store.put([b"a" * 16, b"b" * 16], np.arange(6, dtype=np.float32).reshape(2, 3))
        raw = bytearray(path.read_bytes())
        raw[-8] ^= 1  # in the last vector
        path.write_bytes(raw)
        again = FeatureStore(path, 3)
        assert (b"a" * 16 in again, b"b" * 16 in again) == (True, False)
        assert "features.bin: 1 damaged features are computed again" in caplog.text
        again.put([b"b" * 16], np.array([[3, 4, 5]], np.float32))
        assert FeatureStore(path, 3).get(b"b" * 16).tolist() == [3, 4, 5]


def which(text: str) -> str:
    return text


SYSTEM = System(
    "two",
    outputs={
        "a": Function("a", which)(text=Input("text", str)),
        "b": Function("b", which)(text=Input("text", str)),
    },
)


def filled(inputs: int = 40) -> PairBuffer:
    """Component a is to say good, component b is to say bad: one backbone, two opposite heads."""
    buffer = PairBuffer(SYSTEM.identity)
    for i in range(inputs):
        for name, best in (("a", "good"), ("b", "bad")):
            candidates = tuple(
                Candidate(
                    {"output": f"{word} {i % 7} {i % 5}"}, (float(word == best),), certain=True
                )
                for word in ("good", "bad")
            )
            buffer.add(
                [
                    Draw(
                        name,
                        name,
                        f"e{i}",
                        "digest",
                        {"text": f"number {i % 10} of {i % 9}"},
                        candidates,
                    )
                ],
                1,
            )
    return buffer


TRAINING = BackboneLoRASettings(rank=4, alpha=8, lr=1e-2, epochs=6, batch=16)


class TestTraining:
    def test_two_opposite_components_learn_on_one_backbone(self, folder: Path) -> None:
        model = backbone(folder)
        before = {name: p.detach().clone() for name, p in model.model.named_parameters()}
        texts = [
            component_pairs(filled(), Template.of(SYSTEM.components[name]), held_out=True)
            for name in "ab"
        ]
        curve = train(model, texts, TRAINING, seed=0)
        assert curve.losses[0][1] == pytest.approx(math.log(2), abs=0.3)
        assert min(loss for _, loss in curve.losses) < 0.1
        assert curve.kept > 0
        learned = fit_rewards(filled(), SYSTEM, ["a", "b"], model, "tiny", trained=True)
        assert {name: r.accuracy.mean for name, r in learned.model.rewards_of.items()} == {
            "a": 1.0,
            "b": 1.0,
        }
        after = {
            name.replace("base_model.model.", "").replace(".base_layer", ""): p
            for name, p in model.model.named_parameters()
        }
        assert all(torch.equal(p, after[name]) for name, p in before.items())  # the base is frozen

    def test_checkpointing_trains_the_same_weights(self, folder: Path) -> None:
        losses = []
        for checkpointing in (False, True):
            training = BackboneLoRASettings(
                rank=2, alpha=4, epochs=2, batch=8, gradient_checkpointing=checkpointing
            )
            texts = [
                component_pairs(filled(16), Template.of(SYSTEM.components[name]), held_out=True)
                for name in "ab"
            ]
            losses.append(
                [loss for _, loss in train(backbone(folder), texts, training, seed=0).losses]
            )
        assert losses[1] == pytest.approx(losses[0], abs=1e-4)

    def test_a_checkpoint_and_a_stored_policy_bring_the_trained_weights(
        self, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Equal weights are equal files, whatever order peft writes its sets in; two policies do not mix."""
        monkeypatch.setattr(
            reward_model, "make_backbone", lambda name, length: backbone(Path(name))
        )
        model = backbone(folder)
        train(
            model,
            [
                component_pairs(filled(16), Template.of(SYSTEM.components[n]), held_out=True)
                for n in "ab"
            ],
            TRAINING,
            seed=0,
        )
        learned = fit_rewards(filled(), SYSTEM, ["a", "b"], model, str(folder), trained=True).model
        calls = [({"text": "number 1"}, {"output": word}) for word in ("good 1", "bad 2")]
        learned.save(tmp_path / "m")
        again = load(tmp_path / "m", backbone=lambda name: backbone(Path(name)))
        assert again.rewards("a", calls) == pytest.approx(learned.rewards("a", calls), abs=REWARDS)
        files = {path.suffix for path in (tmp_path / "m").rglob("*") if path.is_file()}
        assert files <= {".json", ".safetensors", ".md"}
        first = store_reward(learned, "a", tmp_path)
        monkeypatch.setattr(reward_model, "_normalize", shuffled_and_tidied)
        assert store_reward(learned, "a", tmp_path) == first
        other = load_policy(tmp_path / store_reward(learned, "b", tmp_path)["path"])
        stored = load_policy(tmp_path / first["path"])
        assert other.scores("b", calls) == pytest.approx(learned.rewards("b", calls), abs=REWARDS)
        assert stored.scores("a", calls) == pytest.approx(learned.rewards("a", calls), abs=REWARDS)

    def test_another_adapter_than_the_card_says_is_refused(
        self, folder: Path, tmp_path: Path
    ) -> None:
        model = backbone(folder)
        model.add_adapter(2, 4, seed=0)
        model.save_adapter(tmp_path / "adapter")
        with pytest.raises(ConfigurationError, match="does not match the digest"):
            backbone(folder).load_adapter(tmp_path / "adapter", "0" * 64)
        with pytest.raises(ConfigurationError, match="has no reward adapter"):
            backbone(folder).load_adapter(tmp_path, "0" * 64)


def adapter(rewards: RunRewards) -> RewardAdapter:
    found = RewardMemory.of(rewards.memory).adapter
    assert found is not None
    return found


class TestAdaptersOfARun:
    """A trained backbone while configurations come and go."""

    SYSTEM = System(
        "prompted",
        outputs={"a": LLM("a", prompt=Text("Say good."))(text=Input("text", str))},
        lm="lm",
    )
    SETTINGS = optimas(lora={"rank": 2, "alpha": 4, "epochs": 2, "batch": 8}, max_length=32)

    def learned(self, job: Any, folder: Path, prompt: str, inputs: int) -> RunRewards:
        """Add pairs of some inputs to the run of `job`, under a prompt, and learn from all."""
        system = self.SYSTEM.bind({"a.prompt": prompt})
        settings = optimas(self.SETTINGS, model=str(folder))
        rewards = RunRewards.load(replace(job.task, system=system), learning(settings))
        start = len(rewards.buffer.entries)
        for i in range(start, start + inputs):
            found = tuple(
                Candidate({"output": f"{w} {i % 7}"}, (float(w == "good"),), certain=True)
                for w in ("good", "bad")
            )
            draw = Draw("a", "a", f"e{i}", "digest", {"text": f"number {i % 10}"}, found)
            for record in rewards.buffer.add([draw], 1):
                rewards.memory.append(record)
        asyncio.run(rewards.learn(["a"]))
        return rewards

    @pytest.fixture
    def run(self, job: Any) -> Any:
        async def constant(outputs: Any, example: Any) -> float:
            return 0.0

        shared_backbone.cache_clear()
        return job(self.SYSTEM, custom(constant), [])

    def test_a_rejected_configuration_takes_its_adapter_along(
        self, run: Any, folder: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        began: list[str] = []
        real = training.train

        def watched(backbone: Backbone, *args: Any, **kwargs: Any) -> Any:
            began.append(backbone.adapter)
            return real(backbone, *args, **kwargs)

        monkeypatch.setattr(training, "train", watched)
        first = adapter(self.learned(run, folder, "Say good.", 16)).name
        tried = adapter(self.learned(run, folder, "Say bad.", 16)).name
        self.learned(run, folder, "Say good.", 16)
        assert began == ["", first, first]
        assert tried != first

    def test_nothing_new_trains_nothing_also_in_another_process(
        self, run: Any, folder: Path
    ) -> None:
        rewards = self.learned(run, folder, "Say good.", 16)
        known = adapter(rewards)
        rows = (rewards.memory.folder / "rewards" / "heads.safetensors").read_bytes()
        shared_backbone.cache_clear()  # as a new process would begin
        again = self.learned(run, folder, "Say good.", 0)
        assert adapter(again) == known
        assert (rewards.memory.folder / "rewards" / "heads.safetensors").read_bytes() == rows
