"""LoRA adapters in the in-process engine: compared with peft, several on one base, and invalid folders."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import json
import random
import re
import shutil
import tempfile
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from numerics import LOGPROBS

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
peft = pytest.importorskip("peft")
safetensors_torch = pytest.importorskip("safetensors.torch")

import compound as cp  # noqa: E402
from compound.core.engine import Adapter, Completion, Request, TokenRecord  # noqa: E402
from compound.core.errors import CallError, ConfigurationError  # noqa: E402
from compound.core.storage.artifacts import folder_digest  # noqa: E402
from compound.engines.adapter_files import CONFIG, WEIGHTS, read_adapter  # noqa: E402
from compound.engines.local import (  # noqa: E402
    adapters,
    decoding,
    kernels,
    prefill,
)
from compound.engines.local.decoding import SamplingRow  # noqa: E402
from compound.execution.cache import MemoryCache  # noqa: E402
from compound.execution.executor import Executor  # noqa: E402
from compound.execution.trace import Call  # noqa: E402
from local_engine import ask, engine, one_by_one, outcomes, run  # noqa: E402

pytestmark = [
    pytest.mark.usefixtures("one_thread"),
    pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing:FutureWarning"),  # of peft
]

ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
EVERY = (*ATTENTION, "gate_proj", "up_proj", "down_proj", "lm_head")


LINES = [
    "the quick brown fox runs far away",
    "a question about a river and a town",
    "yes, no, maybe, one, two",
]
SHARED = "answer in a few words about the quick brown fox and the king of the town. " * 2


def version(folder: Path) -> Adapter:
    return Adapter(str(folder), folder_digest(folder))


def make_adapter(
    base: Path, folder: Path, seed: int, targets: Sequence[str] = ATTENTION, **lora: Any
) -> Adapter:
    """Save a LoRA adapter, by peft, whose matrices are all random."""
    model = transformers.AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    settings = {
        "r": 4,
        "lora_alpha": 6,
        "target_modules": list(targets),
        "init_lora_weights": False,
        **lora,
    }
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        made = peft.get_peft_model(model, peft.LoraConfig(task_type="CAUSAL_LM", **settings))
    made.save_pretrained(folder, save_embedding_layers=False)
    return version(folder)


@pytest.fixture(scope="module")
def base(make_model: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def many(base: Path, tmp_path_factory: pytest.TempPathFactory) -> list[Adapter]:
    """Three adapters of the base, the second one on every linear layer."""
    folder = tmp_path_factory.mktemp("adapters")
    targets = (ATTENTION, EVERY, ("q_proj", "v_proj"))
    return [make_adapter(base, folder / str(i), i, targets[i]) for i in range(3)]


@pytest.fixture(scope="module")
def shapes(base: Path) -> dict[str, tuple[int, int]]:
    """The base's linear layers."""
    model = transformers.AutoModelForCausalLM.from_pretrained(base)
    linears = {name: la for name, la in model.named_modules() if isinstance(la, torch.nn.Linear)}
    return {name: (layer.in_features, layer.out_features) for name, layer in linears.items()}


@pytest.fixture
def own(many: list[Adapter], tmp_path: Path) -> Path:
    """A copy of an adapter, to be damaged."""
    return shutil.copytree(many[0].path, tmp_path / "own")


def record(answer: Completion) -> TokenRecord:
    assert answer.tokens is not None
    return answer.tokens


@functools.cache
def trained(base: Path, adapter: Adapter | None) -> Any:
    """The base model with an adapter, by peft."""
    model = transformers.AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32).eval()
    return model if adapter is None else peft.PeftModel.from_pretrained(model, adapter.path).eval()


def expected(base: Path, request: Request, answer: Completion) -> list[float]:
    """Return peft's log-probabilities of the sampled tokens."""
    prompt, tokens = record(answer).prompt, record(answer).sampled
    with torch.inference_mode():
        logits = trained(base, request.adapter)(torch.tensor([[*prompt, *tokens]])).logits[0]
    scaled = (logits[len(prompt) - 1 : -1] / (request.temperature or 1.0)).log_softmax(-1)
    return [float(line[token]) for line, token in zip(scaled, tokens, strict=True)]


def batches(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Adapter | None, int]]:
    """Return a list that records the adapter and the number of rows of every batch."""
    seen: list[tuple[Adapter | None, int]] = []
    original = decoding.Decoder.run

    def noted(self: Any, batch: Sequence[SamplingRow], adapter: Adapter | None) -> None:
        seen.append((adapter, len(batch)))
        original(self, batch, adapter)

    monkeypatch.setattr(decoding.Decoder, "run", noted)
    return seen


def readings(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return a list that records the folders that are read."""
    seen: list[str] = []

    def noted(folder: Path, layers: Mapping[str, tuple[int, int]]) -> Any:
        seen.append(str(folder))
        return read_adapter(folder, layers)

    monkeypatch.setattr(adapters, "read_adapter", noted)
    return seen


@pytest.mark.parametrize("packed", [False, True])
def test_a_layer_gets_its_low_rank_addition_and_loses_it(tmp_path: Path, packed: bool) -> None:
    # W x + (alpha / r) B A x = [1 + 2, 1 - 1] + (3 / 1) [5, 7] (10 + 2 * 1) = [183, 252] for x =
    # (1, 1) by hand: A x = 10 + 2 = 12, B A x = (60, 84), times 3: (180, 252).
    model = torch.nn.Module()
    model.dtype, model.device, model.name_or_path = torch.float32, torch.device("cpu"), "base"
    model.own = torch.nn.Linear(2, 2, bias=False)
    model.own.weight.data = torch.tensor([[1.0, 2.0], [1.0, -1.0]])
    tensors = {"A": torch.tensor([[10.0, 2.0]]), "B": torch.tensor([[5.0], [7.0]])}
    named = {f"base_model.model.own.lora_{side}.weight": tensor for side, tensor in tensors.items()}
    safetensors_torch.save_file(named, tmp_path / WEIGHTS)
    (tmp_path / CONFIG).write_text(json.dumps({"peft_type": "LORA", "r": 1, "lora_alpha": 3}))
    if packed:
        kernels.pack(model)
        assert type(model.own) is kernels.PackedLinear
    held = adapters.AdapterCache(model, capacity=1, on_evict=lambda _: None)
    x = torch.ones(3, 1, 2)
    with torch.inference_mode():
        with held.applied(version(tmp_path)) as applied:
            assert applied == folder_digest(tmp_path)
            assert model.own(x).tolist() == [[[183.0, 252.0]]] * 3
        with held.applied(None) as applied:
            assert applied == ""
            assert model.own(x).tolist() == [[[3.0, 0.0]]] * 3


@pytest.mark.slow
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("which", [0, 1])
@pytest.mark.parametrize("deterministic", [False, True])
def test_logprobs_are_those_of_peft(
    base: Path,
    many: list[Adapter],
    monkeypatch: pytest.MonkeyPatch,
    packed: bool,
    which: int,
    deterministic: bool,
) -> None:
    if not packed:
        monkeypatch.setattr(kernels, "packable", lambda _: False)
    requests = [
        ask(
            SHARED + line if i % 2 else line,
            temperature=0.7 * i,
            seed=i,
            adapter=many[which],
            max_tokens=12,
        )
        for i, line in enumerate(LINES)
    ]
    plain = run(engine(base), *(replace(request, adapter=None) for request in requests))
    answers = run(engine(base, deterministic=deterministic), *requests)
    for request, answer, other in zip(requests, answers, plain, strict=True):
        assert record(answer).logprobs == pytest.approx(
            expected(base, request, answer), abs=LOGPROBS
        )
        assert record(answer).sampled != record(other).sampled, (
            "an adapter that changes nothing tests nothing"
        )


def mixed(many: Sequence[Adapter], n: int = 18) -> list[Request]:
    """Return requests of all lengths, temperatures and limits, alternating between the base and the adapters."""
    each: list[Adapter | None] = [None, *many]
    words, rng = " ".join(LINES).split(), random.Random(n)
    return [
        ask(
            SHARED * (i % 2) + " ".join(rng.choices(words, k=rng.randint(1, 30))),
            max_tokens=rng.randint(1, 16),
            temperature=rng.choice([0.0, 0.7, 1.3]),
            seed=i,
            adapter=each[i % len(each)],
        )
        for i in range(n)
    ]


def test_versions_called_together_give_what_each_gives_alone(
    base: Path, many: list[Adapter], monkeypatch: pytest.MonkeyPatch
) -> None:
    requests = mixed(many[:2])
    alone = [one_by_one(engine(base, max_wait_ms=1.0), requests[i::3]) for i in range(3)]
    seen = batches(monkeypatch)
    for i, answer in enumerate(run(engine(base), *requests)):
        lone = alone[i % 3][i // 3]
        assert record(answer).sampled == record(lone).sampled
        assert record(answer).logprobs == pytest.approx(record(lone).logprobs, abs=LOGPROBS)
    assert seen == [(None, 6), (many[0], 6), (many[1], 6)]


def test_prefixes_are_reused_by_their_own_version_only(
    base: Path, many: list[Adapter], monkeypatch: pytest.MonkeyPatch
) -> None:
    each = [None, many[0], many[1]]
    requests = [ask(SHARED + line, adapter=adapter) for line in LINES for adapter in each]
    read: list[int] = []
    original = prefill.Prefill._forward

    def noted(self: Any, ids: Any, *rest: Any) -> Any:
        read.append(ids.shape[1])
        return original(self, ids, *rest)

    monkeypatch.setattr(prefill.Prefill, "_forward", noted)
    answers = one_by_one(engine(base, max_wait_ms=1.0), requests)
    for request, answer in zip(requests, answers, strict=True):
        assert record(answer).logprobs == pytest.approx(
            expected(base, request, answer), abs=LOGPROBS
        )
    prompts = [record(answer).prompt[:-1] for answer in answers]
    new = [
        len(p) - max((prefill.common_prefix(p, q) for q in prompts[i % 3 : i : 3]), default=0)
        for i, p in enumerate(prompts)
    ]
    assert [tokens for tokens in read if tokens] == new
    assert min(new[:3]) > 2 * max(new[3:])


def test_the_least_recently_used_adapter_is_evicted(
    base: Path, many: list[Adapter], monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = readings(monkeypatch)
    order = [many[0], None, many[1], many[0], many[2], many[0], many[1]]
    requests = [ask(SHARED, adapter=adapter) for adapter in order]
    answers = one_by_one(engine(base, max_wait_ms=1.0, max_adapters=2), requests)
    assert [Path(folder).name for folder in seen] == ["0", "1", "2", "1"]
    assert answers[6] == answers[2]
    assert answers[0] == answers[3] == answers[5]


def test_the_oldest_call_runs_first_with_calls_of_the_same_adapter(
    base: Path, many: list[Adapter], monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = batches(monkeypatch)
    a, b, c = many
    order = [a, b, a, None, a, b, a, a, c, None]
    run(engine(base, max_batch=64), *(ask(str(i), adapter=which) for i, which in enumerate(order)))
    assert seen == [(a, 5), (b, 2), (None, 2), (c, 1)]
    seen.clear()
    run(engine(base, max_batch=2), *(ask(str(i), adapter=which) for i, which in enumerate(order)))
    assert seen == [(a, 2), (b, 2), (None, 2), (a, 2), (a, 1), (c, 1)]


def test_a_failed_batch_removes_its_adapter(
    base: Path, many: list[Adapter], monkeypatch: pytest.MonkeyPatch
) -> None:
    [plain] = run(engine(base), ask())
    original = decoding.Decoder._decode

    def broken(self: Any, rows: list[SamplingRow], *rest: Any) -> None:
        original(self, rows, *rest)
        if rows[0].seed == 99:
            raise RuntimeError("no memory left")

    monkeypatch.setattr(decoding.Decoder, "_decode", broken)
    failed, after = outcomes(engine(base), [ask(adapter=many[0], seed=99), ask()])
    assert isinstance(failed, CallError)
    assert after == plain


def test_deterministic_answers_are_identical_in_any_batch(base: Path, many: list[Adapter]) -> None:
    requests = mixed(many, 20)
    lm = engine(base, deterministic=True, max_wait_ms=20.0)
    bits = dict(zip(requests, run(lm, *requests), strict=True))
    assert len({record(answer).adapter for answer in bits.values()}) == 4
    for seed in range(3):
        order = random.Random(seed).sample(requests, len(requests) - 4 * seed)
        assert run(lm, *order) == [bits[request] for request in order]
    assert one_by_one(lm, requests) == [bits[request] for request in requests]


def edit(**changes: Any) -> Callable[[Path], None]:
    """Change settings of an adapter."""

    def change(folder: Path) -> None:
        path = folder / CONFIG
        path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))

    return change


def rewrite(change: Callable[[dict[str, Any]], object]) -> Callable[[Path], None]:
    """Change tensors of an adapter."""

    def changed(folder: Path) -> None:
        tensors = safetensors_torch.load_file(folder / WEIGHTS)
        change(tensors)
        safetensors_torch.save_file(tensors, folder / WEIGHTS)

    return changed


def key(side: str = "A", name: str = "model.layers.0.self_attn.q_proj") -> str:
    return f"base_model.model.{name}.lora_{side}.weight"


def cut(name: str, keep: float) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        data = (folder / name).read_bytes()
        (folder / name).write_bytes(data[: int(len(data) * keep)])

    return change


def pickled(folder: Path) -> None:
    tensors = safetensors_torch.load_file(folder / WEIGHTS)
    (folder / WEIGHTS).unlink()
    torch.save(tensors, folder / "adapter_model.bin")


WRONG: dict[str, tuple[Callable[[Path], object], str]] = {
    "no settings": (lambda f: (f / CONFIG).unlink(), f"has no {CONFIG}"),
    "cut settings": (cut(CONFIG, 0.5), f"a {CONFIG} that cannot be read"),
    "nested settings": (
        lambda f: (f / CONFIG).write_text("[" * 100_000),
        f"a {CONFIG} that cannot be read",
    ),
    "binary settings": (
        lambda f: (f / CONFIG).write_bytes(b"\xff\xfe{"),
        f"a {CONFIG} that cannot be read",
    ),
    "a list": (lambda f: (f / CONFIG).write_text("[]"), f"a {CONFIG} that is not a JSON object"),
    "another kind": (edit(peft_type="IA3"), "of the kind 'IA3'"),
    "no kind": (edit(peft_type=None), "of the kind None"),
    "a later invention": (edit(use_something_new=1), "use_something_new=1, which is not supported"),
    "pissa": (edit(init_lora_weights="pissa"), "init_lora_weights='pissa', which changes the base"),
    "a rank of nothing": (edit(r=0), "r=0, which must be a positive number"),
    "a rank of words": (edit(r="4"), "r='4', which must be a positive number"),
    "a rank of truth": (edit(r=True), "r=True, which must be a positive number"),
    "no alpha": (edit(lora_alpha=None), "lora_alpha=None, which must be a positive number"),
    "an alpha that is none": (edit(lora_alpha=float("nan")), "lora_alpha=nan, which must be"),
    "no weights": (lambda f: (f / WEIGHTS).unlink(), f"has no {WEIGHTS}"),
    "pickled weights": (pickled, "only safetensors files are read"),
    "cut weights": (cut(WEIGHTS, 0.7), f"a {WEIGHTS} that cannot be read"),
    "empty weights": (cut(WEIGHTS, 0.0), f"a {WEIGHTS} that cannot be read"),
    "no tensors": (rewrite(dict.clear), "without tensors"),
    "one side": (
        rewrite(lambda t: t.pop(key("B"))),
        "one of two matrices for model.layers.0.self_attn.q_proj",
    ),
    "a whole layer": (
        rewrite(lambda t: t.update({"base_model.model.lm_head.weight": torch.ones(2)})),
        "holds base_model.model.lm_head.weight, which is not a LoRA matrix",
    ),
    "a magnitude": (
        rewrite(lambda t: t.update({key().replace("A.weight", "magnitude_vector"): torch.ones(2)})),
        "lora_magnitude_vector, which is not a LoRA matrix",
    ),
    "no number": (
        rewrite(lambda t: t[key("B")].fill_(float("inf"))),
        "non-finite numbers for model.layers.0.self_attn.q_proj",
    ),
    "another width": (
        rewrite(lambda t: t.update({key(): torch.ones(4, 48)})),
        r"shapes \(4, 48\) and \(32, 4\) for model.layers.0.self_attn.q_proj, but rank 4 and the model require "
        r"\(4, 32\) and \(32, 4\); it was trained on another base",
    ),
    "another rank": (edit(r=3), r"but rank 3 and the model require \(3, 32\)"),
    "a layer that is not there": (
        rewrite(lambda t: t.update({key("A", "model.layers.7.mlp.up_proj"): torch.ones(4, 32)})),
        "adapts model.layers.7.mlp.up_proj: the model has no such linear layer; it was trained on another base",
    ),
    "a layer that is no linear one": (
        rewrite(lambda t: t.update({key("A", "model.embed_tokens"): torch.ones(4, 32)})),
        "adapts model.embed_tokens: the model has no such linear layer",
    ),
    "a layer left out": (
        rewrite(lambda t: [t.pop(key(side)) for side in "AB"]),
        "has no matrices for model.layers.0.self_attn.q_proj, which its target_modules name",
    ),
}


def test_adapters_that_cannot_be_used_fail_only_their_calls(
    base: Path, many: list[Adapter], tmp_path: Path
) -> None:
    bad = []
    for i, (change, _) in enumerate(WRONG.values()):
        change(shutil.copytree(many[0].path, tmp_path / str(i)))
        bad.append(version(tmp_path / str(i)))
    good = [None, *many]
    done = outcomes(engine(base), [ask(adapter=adapter) for adapter in (*bad, *good, *bad)])
    answers, errors = done[len(bad) : -len(bad)], done[: len(bad)] + done[-len(bad) :]
    for error, (_, said) in zip(errors, [*WRONG.values()] * 2, strict=True):
        assert isinstance(error, ConfigurationError)
        assert re.search(said, str(error))
    assert answers == run(engine(base), *(ask(adapter=adapter) for adapter in good))


def test_an_adapter_of_a_base_with_fewer_or_more_layers_does_not_pass(
    shapes: dict[str, tuple[int, int]], own: Path
) -> None:
    assert len(read_adapter(own, shapes)) == 12
    more = {name.replace("layers.0", "layers.3"): shape for name, shape in shapes.items()}
    with pytest.raises(ConfigurationError, match=r"no matrices .*layers.3.self_attn.k_proj and 3"):
        read_adapter(own, shapes | more)
    fewer = {name: shape for name, shape in shapes.items() if "layers.2" not in name}
    with pytest.raises(ConfigurationError, match=r"adapts model.layers.2.self_attn.k_proj and 3"):
        read_adapter(own, fewer)


def test_some_layers_may_be_chosen(base: Path, tmp_path: Path) -> None:
    some = [
        make_adapter(base, tmp_path / "one", 0, layers_to_transform=[0]),
        make_adapter(base, tmp_path / "but", 1, exclude_modules=["k_proj"]),
        make_adapter(base, tmp_path / "pattern", 2, target_modules=r".*layers\.1.*\.(q|v)_proj"),
    ]
    edit(layers_to_transform=0)(tmp_path / "one")
    edit(target_modules=r".*layers\.1.*\.(q|v)_proj")(tmp_path / "pattern")
    requests = [ask(adapter=replace(a, sha256=folder_digest(Path(a.path)))) for a in some]
    for request, answer in zip(requests, run(engine(base), *requests), strict=True):
        assert record(answer).logprobs == pytest.approx(
            expected(base, request, answer), abs=LOGPROBS
        )


@pytest.mark.parametrize(
    ("kind", "said"),
    [
        ({"use_dora": True}, "use_dora=True"),
        ({"use_rslora": True}, "use_rslora=True"),
        ({"bias": "all"}, "bias='all'"),
        ({"rank_pattern": {"q_proj": 2}}, "rank_pattern="),
        ({"alpha_pattern": {"q_proj": 2}}, "alpha_pattern="),
        ({"modules_to_save": ["lm_head"]}, "modules_to_save="),
        ({"lora_bias": True}, "lora_bias=True"),
        ({"trainable_token_indices": [1]}, "trainable_token_indices="),
        ({"target_modules": ["embed_tokens"]}, "lora_embedding_[AB]"),
    ],
)
def test_kinds_that_peft_makes_and_the_sampler_does_not_know_are_refused(
    base: Path, shapes: dict[str, tuple[int, int]], tmp_path: Path, kind: dict[str, Any], said: str
) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        make_adapter(base, tmp_path / "own", 0, **kind)
    with pytest.raises(ConfigurationError, match=said):
        read_adapter(tmp_path / "own", shapes)


@given(st.sampled_from([CONFIG, WEIGHTS]), st.floats(0, 1), st.binary(max_size=8), st.booleans())
def test_any_damage_gives_an_adapter_or_a_compound_error(
    shapes: dict[str, tuple[int, int]],
    many: list[Adapter],
    name: str,
    at: float,
    put: bytes,
    cut_off: bool,
) -> None:
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        for file in (CONFIG, WEIGHTS):
            data = (Path(many[0].path) / file).read_bytes()
            if file == name:  # most of the weights is numbers; what can be wrong comes before them
                place = int(at * min(len(data), 4000))
                data = data[:place] + put + (b"" if cut_off else data[place + len(put) :])
            (folder / file).write_bytes(data)
        with contextlib.suppress(ConfigurationError):
            found = read_adapter(folder, shapes)
            assert found.keys() <= shapes.keys()
            assert all(a.shape[0] == b.shape[1] for a, b in found.values())


def test_a_folder_that_was_changed_or_is_gone_is_an_error(base: Path, own: Path) -> None:
    before = version(own)
    rewrite(lambda tensors: tensors[key("B")].mul_(2))(own)
    elsewhere = replace(before, path=str(own / "nowhere"))
    changed, gone, now = outcomes(
        engine(base), [ask(adapter=a) for a in (before, elsewhere, version(own))]
    )
    assert isinstance(changed, ConfigurationError)
    assert "was changed" in str(changed)
    assert isinstance(gone, ConfigurationError)
    assert "does not exist" in str(gone)
    assert isinstance(now, Completion)


def test_a_version_in_memory_stays_what_it_was_when_its_folder_changes(
    base: Path, own: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = readings(monkeypatch)
    lm = engine(base, max_wait_ms=1.0)
    request = ask(adapter=version(own))

    async def work() -> list[Completion]:
        first = await lm.generate(request)
        with (own / WEIGHTS).open("r+b") as file:  # in place, which a mapping of the file would see
            file.write(b"\0" * (own / WEIGHTS).stat().st_size)
        return [first, await lm.generate(request)]

    first, second = asyncio.run(work())
    assert first == second
    assert len(seen) == 1
    asyncio.run(lm.aclose())
    with pytest.raises(ConfigurationError, match="was changed"):
        run(lm, request)


def tuned() -> cp.System:
    answerer = cp.LLM("answerer", prompt="Answer.", max_tokens=6, weights=cp.LoRA(4))
    return cp.System("one", outputs={"y": answerer(question=cp.Input("question", str))}, lm="lm")


def bound(adapter: Adapter | None, path: str = "") -> cp.System:
    value = {"path": path or adapter.path, "sha256": adapter.sha256} if adapter else None
    return tuned().bind(cp.Configuration({"answerer.weights": value}))


def test_a_configuration_with_an_adapter_samples_with_it_and_versions_are_cached_apart(
    base: Path, many: list[Adapter], own: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = batches(monkeypatch)
    home = Path(many[0].path).parent

    async def work() -> list[Call]:
        executor = Executor({"lm": engine(base, max_wait_ms=1.0)}, cache=MemoryCache(), folder=home)
        systems = [
            bound(None),
            bound(many[0], "0"),
            bound(many[1], "1"),
            bound(many[0], str(own)),
            bound(None),
        ]
        calls: list[Call] = []
        for system in systems:
            trace = await executor.run(system, {"question": "the king"})
            calls += trace.calls
        await executor.aclose()
        return calls

    calls = asyncio.run(work())
    assert [call.failure for call in calls] == [None] * 5
    assert [call.tokens[0].adapter for call in calls] == [
        "",
        *(a.sha256 for a in (*many[:2], many[0])),
        "",
    ]
    assert [adapter and Path(adapter.path) for adapter, _ in seen] == [None, home / "0", home / "1"]
    assert [call.reused for call in calls] == [False, False, False, True, True]
    assert len({call.tokens[0].logprobs for call in calls}) == 3
    assert calls[1].tokens == calls[3].tokens


@pytest.mark.parametrize(("off", "fits"), [(0.0, True), (0.1, True), (0.5, False)])
def test_an_adapter_of_another_base_of_the_same_shape_is_refused(
    off: float, fits: bool, base: Path, many: list[Adapter], tmp_path: Path
) -> None:
    """Its probe holds log-probabilities of training; number formats explain at most a tenth of a nat."""
    model = peft.PeftModel.from_pretrained(
        transformers.AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32), many[0].path
    )
    tokens = [3, 5, 8, 13, 21, 34]
    with torch.no_grad():
        logits = model(input_ids=torch.tensor([tokens])).logits[0, :-1].log_softmax(-1)
    logprobs = [float(row[token]) - off for row, token in zip(logits, tokens[1:], strict=True)]
    folder = shutil.copytree(many[0].path, tmp_path / "own")
    (folder / "probe.json").write_text(
        json.dumps({"tokens": tokens, "logprobs": logprobs, "before": logprobs})
    )
    held = engine(base)
    plain, found, again = outcomes(
        held, [ask(), ask(adapter=version(folder)), ask(adapter=version(folder))]
    )
    assert not isinstance(plain, Exception)
    if fits:
        (wanted,) = run(engine(base), ask(adapter=many[0]))
        assert [one.text for one in (found, again) if isinstance(one, Completion)] == [
            wanted.text
        ] * 2
    else:
        for error in (found, again):
            assert isinstance(error, ConfigurationError)
            assert (
                "was trained on another base model: its log-probabilities differ from the adapter's by 0.5 nats"
                in str(error)
            )


def test_an_adapter_that_names_another_base_is_refused_without_a_probe(
    base: Path, many: list[Adapter], tmp_path: Path
) -> None:
    folder = shutil.copytree(many[0].path, tmp_path / "own")
    config = json.loads((folder / CONFIG).read_text())
    found = {}
    for name in ("Owner/Other", f"Owner/{base.name.upper()}", None):
        (folder / CONFIG).write_text(json.dumps({**config, "base_model_name_or_path": name}))
        (found[name],) = outcomes(engine(base), [ask(adapter=version(folder))])
    error = found.pop("Owner/Other")
    assert isinstance(error, ConfigurationError)
    assert f"another base model, 'Owner/Other': the model is {base}" in str(error)
    assert all(isinstance(answer, Completion) for answer in found.values())
