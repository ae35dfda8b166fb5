"""What `compound check` reads, what it leaves unchecked and says so, and which methods it names."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

import compound as cp
from compound.core.errors import DeclarationError, install_command
from compound.optimization.settings.optimize import OptimizeSettings
from compound.optimizers.methods import applicable_methods, method
from compound.yaml import load

ROOT = Path(__file__).parents[2]
BENCHMARKS = sorted((ROOT / "benchmarks").glob("*.yaml"))
TRAINED = ["ppo", "mappo", "mmgrpo", "mhgpo_is", "mhgpo_fof", "mhgpo_rr", "prompt_r1", "mygo"]


def trained() -> cp.System:
    answerer = cp.LLM("answerer", prompt="Answer.", weights=cp.LoRA(rank=4))
    return cp.System(
        "trained", outputs={"y": answerer(question=cp.Input("question"))}, lm="smollm2"
    )


def test_check_accepts_every_file_of_the_benchmarks_at_once(cli: Any) -> None:
    assert len(BENCHMARKS) >= 12
    ran = cli("check", *map(str, BENCHMARKS), "--json")
    found = json.loads(ran.out)
    assert [row["file"] for row in found] == [str(path) for path in BENCHMARKS]
    for problem in (problem for row in found for problem in row["problems"]):
        assert problem["where"].endswith((".path", ".corpus"))  # downloaded by other commands
        assert problem["message"].startswith("no file or folder ")


@pytest.mark.parametrize("path", BENCHMARKS, ids=lambda path: path.stem)
def test_the_method_of_a_benchmark_file_has_something_to_tune(path: Path) -> None:
    program = load(path)
    made = method(program.optimize.method, program.system, program.optimize, program.folder)
    assert made.jobs
    assert all(note.startswith("local rewards may make") for note in made.notes)
    assert program.optimize.method in applicable_methods(
        program.system, program.optimize, program.folder
    )


def test_an_output_that_the_metric_does_not_find_is_one_error(tmp_path: Path, cli: Any) -> None:
    (tmp_path / "rows.csv").write_text("q,y\n" + "".join(f"{i},{i}\n" for i in range(60)))
    (tmp_path / "system.yaml").write_text(
        "system: s\nlm: smollm2\ninputs: {q: str}\n"
        "components: {a: {llm: {prompt: {tune: Answer.}}, in: {q: $q}}}\noutputs: {y: $a}\n"
        "data: {path: rows.csv, split_by: {train: 0.5, valid: 0.5}}\n"
        "metric: {exact_match: {output: yy, gold: y}}\n"
    )
    ran = cli("check", str(tmp_path / "system.yaml"))
    assert (ran.code, "system.yaml: 1 error" in ran.out) == (2, True)
    assert "metric.exact_match.output: no output 'yy'; did you mean 'y'?" in ran.err


@pytest.mark.parametrize("path", BENCHMARKS, ids=lambda path: path.stem)
def test_the_commands_at_the_head_of_a_benchmark_file_name_its_own_settings(path: Path) -> None:
    """Every override of a printed command fits the file, whatever data is there."""
    head = path.read_text("utf-8").split("\nsystem:")[0]
    text = re.sub(r"^# ?", "", head, flags=re.MULTILINE).replace("\\\n", " ")
    commands = [line for line in text.splitlines() if re.match(r"\s+(\w+=\S+ )?compound ", line)]
    assert any(f"compound optimize benchmarks/{path.name}" in line for line in commands)
    for line in commands:
        words = shlex.split(line)
        settings = [words[i + 1].split("=", 1) for i, word in enumerate(words) if word == "--set"]
        load(path, overrides=[(key, value) for key, value in settings])


def test_check_names_settings_whose_library_is_not_installed(
    game: Path, cli: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    missing = {"wandb", "ray"}
    monkeypatch.setattr(
        "compound.core.errors.find_spec", lambda name: None if name in missing else object()
    )
    ran = cli(
        "check",
        "game.yaml",
        "--set",
        "optimize.trackers=[tensorboard, wandb]",
        "--set",
        "optimize.runner={ray: {address: local}}",
        "--set",
        "optimize.method=random",
    )
    assert ran.code == 0, ran.err
    for setting, library in (("trackers: wandb", "wandb"), ("runner: ray", "ray")):
        message = f"note: optimize.{setting} needs {library}, which is not installed"
        assert f"{message}; {install_command(library)}" in ran.out
    assert "tensorboard needs" not in ran.out


def test_check_reports_data_which_is_not_there_at_its_place(game: Path, cli: Any) -> None:
    (game / "rows.jsonl").unlink()
    ran = cli("check", "game.yaml")
    assert ran.code == 2
    assert re.search(
        r"^game\.yaml:\d+:\d+: data\.path: no file or folder 'rows\.jsonl'; create it, or correct.*\n"
        r" +\d+ \|.* rows\.jsonl.*\n +\| +\^{10}$",
        ran.err,
        re.MULTILINE,
    )
    assert "--set data.path=gone: data.path: no file" in (
        cli("check", "game.yaml", "--set", "data.path=gone").err
    )
    assert cli("run", "game.yaml", "x=4").code == 0  # needs no data


def test_check_compares_the_metric_with_every_row(game: Path, cli: Any) -> None:
    text = (game / "game.yaml").read_text()
    text = text.replace('{custom: {call: "game:near"}}', "{exact_match: {output: y, gold: traget}}")
    (game / "game.yaml").write_text(text)
    ran = cli("check", "game.yaml")
    assert ran.code == 2
    assert re.search(
        r"game\.yaml:\d+:\d+: metric\.exact_match\.gold: .* no gold field 'traget'", ran.err
    )
    assert "did you mean 'target'" in ran.err


def test_check_reports_a_corpus_which_is_not_there_with_all_other_mistakes(cli: Any) -> None:
    ran = cli("check", str(ROOT / "benchmarks" / "hover.yaml"), "--set", "optimize.sed=1")
    assert ran.code == 2
    assert re.search(r"hover\.yaml:\d+:\d+: components\.search\..*wiki_abstracts", ran.err)
    assert "optimize.sed: unknown key" in ran.err


def test_check_does_not_ask_the_hub(game: Path, cli: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any) -> Any:
        raise AssertionError("a check must not load anything from the hub")

    monkeypatch.setattr("compound.evaluation.dataset.hub_rows", refuse)
    ran = cli(
        "check", "game.yaml", "--set", "data.path=someone/numbers", "--set", "data.split_by=null"
    )
    assert ran.code == 0
    assert (
        "not checked: data: file or folder 'someone/numbers' does not exist; `check` does not load data sets"
        in ran.out
    )


def test_the_methods_that_fit_a_system_follow_from_its_parameters() -> None:
    found = applicable_methods(trained(), OptimizeSettings())
    assert set(found) >= {*TRAINED, "optimas"}
    assert not set(found) & {"search", "random", "mipro", "opro", "llm_selector"}
    prompt = cp.LLM("answerer", prompt=cp.Text("Answer."))(question=cp.Input("question"))
    found = applicable_methods(
        cp.System("tuned", outputs={"y": prompt}, lm="smollm2"), OptimizeSettings()
    )
    assert {"search", "mipro", "opro"} <= set(found)
    assert not set(found) & set(TRAINED)


@pytest.mark.parametrize("name", ["search", "mipro", "opro", "llm_selector", "better_together"])
def test_a_method_with_nothing_to_tune_names_the_methods_that_fit(name: str) -> None:
    with pytest.raises(DeclarationError, match="methods that fit this system: .*mmgrpo"):
        method(name, trained(), OptimizeSettings())


def test_a_method_that_trains_weights_names_the_methods_that_fit_a_system_without_any() -> None:
    prompt = cp.LLM("answerer", prompt=cp.Text("Answer."))(question=cp.Input("question"))
    system = cp.System("tuned", outputs={"y": prompt}, lm="smollm2")
    with pytest.raises(DeclarationError, match="methods that fit this system: auto, search, "):
        method("mmgrpo", system, OptimizeSettings())


def test_a_system_without_parameters_is_told_how_to_declare_one() -> None:
    answerer = cp.LLM("answerer", prompt="Answer.")(question=cp.Input("question"))
    with pytest.raises(DeclarationError, match="declare one"):
        method(
            "search", cp.System("fixed", outputs={"y": answerer}, lm="smollm2"), OptimizeSettings()
        )


def test_check_names_the_methods_that_fit_instead_of_that_in_the_file(game: Path, cli: Any) -> None:
    (game / "trained.yaml").write_text(
        "system: s\nlm: smollm2\ninputs: {q: str}\ncomponents:\n"
        "  a: {llm: {weights: {lora: {rank: 4}}}, in: {q: $q}}\noutputs: {y: $a}\n"
    )
    ran = cli("check", "trained.yaml")
    assert ran.code == 0
    assert "auto" not in ran.out
    planned = cli("check", "trained.yaml", "--set", "optimize.budget.system_runs=100")
    assert "auto: mmgrpo, since only the weights of a can change" in planned.out
    given = cli("check", "trained.yaml", "--set", "optimize.method=search")
    assert given.code == 2
    assert "methods that fit this system: " in given.err


def dirty(tmp_path: Path, changes: Mapping[str, str]) -> Path:
    """Write a file and data with mistakes of several kinds."""
    rows = {
        "train": [
            '{"id": "a", "q": "x", "y": "1"}',
            '{"id": "a", "q": "x", "y": "1"}',
            "[1]",
            "{",
            '{"id": "b", "q": 5, "y": "1"}',
            '{"id": "c", "q": 6, "y": NaN}',
            '{"id": "d", "q": " ", "y": ""}',
        ],
        "dev": ['{"id": "e", "y": "1"}', '{"id": "f", "q": "", "y": "1"}'],
        "test": ['{"id": "g", "q": 7, "y": null}'],
    }
    (tmp_path / "data").mkdir()
    for split, lines in rows.items():
        (tmp_path / "data" / f"{split}.jsonl").write_text("\n".join(lines) + "\n")
    text = (
        "system: demo\nlm: smollm2\ninputs: {q: str}\ncomponents:\n"
        "  k: {hyperparameter: {choice: [0, 1], value: 1}}\n"
        "  answerer: {llm: {prompt: Answer., max_tokens: 5}, in: {q: $q, k: $k}}\n"
        "outputs: {y: $answerer}\ndata: {path: data}\nmetric: {exact_match: {output: y, gold: y}}\n"
    )
    for old, new in changes.items():
        assert old in text
        text = text.replace(old, new)
    (tmp_path / "s.yaml").write_text(text)
    return tmp_path / "s.yaml"


def test_check_reports_mistakes_of_file_and_data_in_one_pass(tmp_path: Path, cli: Any) -> None:
    changes = {"max_tokens": "max_tokns", "value: 1": "value: 4", "gold: y": "gold: anser"}
    code, out, said = cli("check", str(dirty(tmp_path, changes)))
    assert code == 2
    assert "unknown key; did you mean 'max_tokens'?" in said
    assert "Choice must be one of 0, 1, but got 4" in said
    assert said.count("no gold field 'anser'") == 1
    assert (
        "data/train.jsonl:1: exact_match, example 'a': no gold field 'anser'\nhint: fields: id, q, y; 6 more rows like this\n"
        in said
    )
    assert out.endswith("s.yaml: 8 errors\n")


def test_check_reports_each_mistake_of_data_once_with_its_place(tmp_path: Path, cli: Any) -> None:
    code, out, said = cli("check", str(dirty(tmp_path, {})))
    assert code == 2
    for text in (
        "data/train.jsonl:2: id 'a' is already used on line 1\n",
        "data/train.jsonl:3: a row must be an object {…}, got list\n",
        "data/train.jsonl:4: not JSON",
        "row 'b': input 'q' must be str, but got 5\nhint: correct the data, or the type of 'q' under inputs; 3 of 5 rows like this\n",
        "data/train.jsonl:6: exact_match, example 'c': gold field 'y' is None, but must hold a value to compare with\n"
        "hint: 1 more row like this\n",
        "data/dev.jsonl:1: no column 'q' to read 'q' from\n",
        "warning: input 'q' is empty in 1 train row: ",
        "warning: gold field 'y' is empty in 1 train row: ",
        "warning: input 'q' is empty in 1 dev row: ".replace("dev", "valid"),
    ):
        assert said.count(text) == 1, text
    assert out.endswith("s.yaml: 6 errors\n")
    code, out, _ = cli("check", str(tmp_path / "s.yaml"), "--json")
    problems = json.loads(out)["problems"]
    places = [(Path(each["file"]).name, each["line"]) for each in problems]
    assert len(places) == 6
    assert {("train.jsonl", 2), ("train.jsonl", 6), ("dev.jsonl", 1)} < set(places)


def test_a_mistake_in_a_single_file_is_told_once_for_all_splits(tmp_path: Path, cli: Any) -> None:
    shares = "data: {path: data/all.csv, split_by: {train: 0.4, valid: 0.3, test: 0.3}}"
    file = dirty(tmp_path, {"data: {path: data}": shares})
    rows = "".join(f"{i},x,1\n" for i in range(40))
    (tmp_path / "data" / "all.csv").write_text(f"id,q,y\n{rows}0,x,1\n41,x\n")
    code, out, said = cli("check", str(file))
    assert code == 2
    assert said.count("already used") == said.count("2 cells") == 1
    assert out.endswith("s.yaml: 2 errors\n")


@pytest.mark.parametrize(
    ("engine", "message"),
    [
        ("litellm: {model: openai/m, extra: {num_ctx: 5}}", "extra.num_ctx is an option of Ollama"),
        (
            "transformers: {chat_template_kwargs: {tools: x}}",
            "chat_template_kwargs must not set 'tools'",
        ),
        ("litellm: {model: ollama_chat/m, extra: {num_ctx: 5}}", ""),
    ],
)
def test_check_makes_engines_of_the_system(game: Path, cli: Any, engine: str, message: str) -> None:
    (game / "s.yaml").write_text(
        f"system: demo\nlm: mine\nengines: {{mine: {{{engine}}}}}\ninputs: {{q: str}}\ncomponents:\n"
        "  a: {llm: {prompt: Answer.}, in: {q: $q}}\noutputs: {y: $a}\n"
    )
    code, _, said = cli("check", "s.yaml")
    assert (code, message in said) == (2 if message else 0, True)


@pytest.mark.parametrize(
    ("retriever", "data", "message"),
    [
        (
            "{index: bm25, corpus: c.jsonl}",
            {},
            "2 of 3 train queries: data/train.jsonl:1, data/train.jsonl:2;",
        ),
        ("{index: bm25, corpus: c.jsonl, k: {choice: [1, 2]}}", {"q": "Lima"}, None),
        ("{index: passages}", {"ps": ["大阪は町です"]}, "3 of 3 train queries"),
        ("{index: passages}", {"ps": [{"text": "who is Quito"}, "Lima"]}, "1 of 3 train queries"),
        ("{index: passages}", {"ps": []}, "3 of 3 train queries"),
    ],
)
def test_check_counts_queries_that_find_no_passage(
    game: Path, cli: Any, retriever: str, data: dict[str, Any], message: str | None
) -> None:
    (game / "c.jsonl").write_text('{"text": "Lima liegt am Rimac."}\n')
    (game / "data").mkdir()
    queries = "東京の首都", "¿Dónde está Quito?", "Lima"
    rows = [{"q": q, "ps": [], "y": "1", "id": str(i)} | data for i, q in enumerate(queries)]
    (game / "data" / "train.jsonl").write_text("\n".join(map(json.dumps, rows)))
    given = "{query: $q, passages: $ps}" if "passages" in retriever else "{query: $q}"
    (game / "s.yaml").write_text(
        "system: demo\nlm: smollm2\ninputs: {q: str, ps: list}\ncomponents:\n"
        f"  search: {{retriever: {retriever}, in: {given}}}\n"
        "  a: {llm: {prompt: Answer.}, in: {passages: $search, ps: $ps}}\n"
        "outputs: {y: $a}\ndata: {path: data, valid: train, test: null}\n"
        "metric: {exact_match: {output: y, gold: y}}\n"
    )
    code, _, said = cli("check", "s.yaml")
    assert code == 0, said
    assert ("'search' finds no passage for" in said) == (message is not None)
    assert (message or "") in said


def test_check_reports_mistakes_of_a_corpus_and_of_passages(game: Path, cli: Any) -> None:
    (game / "c.jsonl").write_text('{"txt": "Lima"}\n')
    (game / "data").mkdir()
    (game / "data" / "train.jsonl").write_text('{"q": "Lima", "ps": [{"txt": "Lima"}], "y": "1"}\n')
    (game / "s.yaml").write_text(
        "system: demo\nlm: smollm2\ninputs: {q: str, ps: list}\ncomponents:\n"
        "  search: {retriever: {index: bm25, corpus: c.jsonl}, in: {query: $q}}\n"
        "  rank: {retriever: {index: passages}, in: {query: $q, passages: $ps}}\n"
        "  a: {llm: {prompt: Answer.}, in: {passages: $search, ranked: $rank}}\n"
        "outputs: {y: $a}\ndata: {path: data, valid: train, test: null}\n"
    )
    code, _, said = cli("check", "s.yaml")
    assert code == 2
    for place in ("c.jsonl:1", "train.jsonl:1: passage 1"):
        assert re.search(
            rf"{place}: a passage needs text in 'text'\n *hint: did you mean 'txt'", said
        )


def test_labels_that_no_gold_value_has_are_told_at_the_metric(tmp_path: Path, cli: Any) -> None:
    (tmp_path / "all.csv").write_text(
        "id,q,y\n" + "".join(f"{i},x,{'ab'[i % 2]}\n" for i in range(40))
    )
    changes = {
        "data: {path: data}": "data: {path: all.csv, split_by: {train: 0.4, valid: 0.3, test: 0.3}}",
        "k: $k}}": "k: $k}, out: bool}",
        "{exact_match: {output: y, gold: y}}": "{pass_at_k: {k: 1, of: {exact_match: {output: y}}}}",
    }
    _, _, said = cli("check", str(dirty(tmp_path, changes)))
    assert re.search(
        r"s\.yaml:\d+:\d+: metric\.pass_at_k\.of\.exact_match: .*no label of output", said
    )
