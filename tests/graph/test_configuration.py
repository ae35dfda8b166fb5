"""Configurations: immutable, identified by their digest, and safe to read from a file."""

from __future__ import annotations

import copy
import json
import multiprocessing
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from compound.core.errors import ConfigurationError
from compound.core.narrowing import entry
from compound.graph.configuration import FORMAT, Change, Configuration, canonical_json, digest, load

KEYS = st.text("abc._", min_size=1, max_size=8)
VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(KEYS, inner, max_size=3),
    max_leaves=6,
)
CONFIGURATIONS = st.dictionaries(KEYS, VALUES, max_size=5)
NESTED = {"answerer.demos": [{"inputs": {"q": "1+1"}, "outputs": {"a": ["2"]}}], "searcher.k": 5}


@given(CONFIGURATIONS)
def test_what_is_saved_is_loaded_again(
    tmp_path_factory: pytest.TempPathFactory, values: dict[str, Any]
) -> None:
    path = tmp_path_factory.mktemp("configuration") / "best.json"
    configuration = Configuration(values)
    configuration.save(path)
    assert load(path) == configuration
    assert load(path).digest == configuration.digest


@given(CONFIGURATIONS, CONFIGURATIONS)
def test_equality_hash_and_digest_say_the_same(one: dict[str, Any], two: dict[str, Any]) -> None:
    a, b = Configuration(one), Configuration(two)
    assert (a == b) == (a.digest == b.digest)
    assert a == Configuration(one)
    assert hash(a) == hash(Configuration(one))


@pytest.mark.parametrize(
    ("one", "other"), [(1, True), (0, False), (1, 1.0), (0.0, -0.0), ([1], [True])]
)
def test_equal_numbers_of_different_types_are_different_values(one: Any, other: Any) -> None:
    a, b = Configuration({"x": one}), Configuration({"x": other})
    assert a != b
    assert a.digest != b.digest
    assert [change.key for change in a.diff(b)] == ["x"]


def test_the_digest_is_the_same_in_every_process_and_under_every_hash_seed(
    under_every_hash_seed: Callable[[str], set[str]],
) -> None:
    code = (
        "from compound.graph.configuration import Configuration, digest\n"
        "values = {k: {'x': [1, 2.5], 'y': 'é'} for k in {'b', 'a', 'c', 'longer'}}\n"
        "print(Configuration(values).digest, digest([{'s', 't', 'u'}, frozenset({1, 2})]))"
    )
    values = {k: {"x": [1, 2.5], "y": "é"} for k in ("a", "b", "c", "longer")}
    assert under_every_hash_seed(code) == {
        f"{Configuration(values).digest} {digest([['s', 't', 'u'], [1, 2]])}\n"
    }


def test_the_digest_is_the_sha_256_of_the_canonical_json() -> None:
    assert canonical_json({"b": ("x",), "a": 1}) == '{"a":1,"b":["x"]}'
    # printf '{"a":1,"b":["x"]}' | sha256sum
    assert (
        digest({"b": ("x",), "a": 1})
        == "fd5e92badbe24726f55b88132dd5fa1ceec0efd960b3bcd44f527b4bcc84af34"
    )


def test_nothing_in_a_configuration_can_be_changed() -> None:
    given_values = copy.deepcopy(NESTED)
    configuration = Configuration(given_values)
    before = configuration.digest
    with pytest.raises(TypeError):
        configuration["searcher.k"] = 6  # type: ignore[index]
    with pytest.raises(AttributeError):
        configuration.extra = 1  # type: ignore[attr-defined]
    (demo, *_) = entry(configuration, "answerer.demos", tuple)
    changes: list[Callable[[], object]] = [
        lambda: demo.update(inputs={}),
        lambda: demo.__setitem__("inputs", {}),
        lambda: demo["inputs"].clear(),
        lambda: demo.pop("inputs"),
        lambda: demo.__delitem__("inputs"),
        lambda: demo.setdefault("x", 1),
        lambda: demo.__ior__({"x": 1}),
        lambda: demo.popitem(),
    ]
    for change in changes:
        with pytest.raises(TypeError, match="bind another configuration"):
            change()
    assert isinstance(configuration["answerer.demos"], tuple)
    given_values["answerer.demos"][0]["inputs"]["q"] = "changed"  # type: ignore[index]
    assert Configuration(NESTED) == configuration
    assert Configuration(configuration).digest == before


def test_a_configuration_can_be_copied_and_sent_to_another_process() -> None:
    configuration = Configuration(NESTED)
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
        there_and_back = pool.submit(copy.copy, configuration).result()
    for other in (copy.copy(configuration), copy.deepcopy(configuration), there_and_back):
        assert other == configuration
        with pytest.raises(TypeError, match="bind another configuration"):
            entry(other, "answerer.demos", tuple)[0]["inputs"]["q"] = "changed"


def test_the_difference_names_each_changed_key_with_both_values() -> None:
    one = Configuration({"a": 1, "b": 2, "c": 3})
    two = Configuration({"a": 1, "b": 5, "d": 4})
    assert one.diff(two) == [Change("b", 2, 5), Change("c", 3, None), Change("d", None, 4)]
    assert one.diff(one) == []


def test_the_file_says_where_the_values_come_from(tmp_path: Path) -> None:
    path = tmp_path / "best.json"
    Configuration({"a.k": 5}).save(path, system="hotpot", score=0.5)
    document = json.loads(path.read_text())
    assert document["format"] == FORMAT
    assert (document["system"], document["score"]) == ("hotpot", 0.5)
    assert document["values"] == {"a.k": 5}
    assert [p.name for p in tmp_path.iterdir()] == ["best.json"]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", "cannot be read"),
        ('{"format": 1, "values": {"a": ', "cannot be read"),
        ("not json", "cannot be read"),
        ("[" * 100_000, "cannot be read"),
        ("\xff\xfe", "cannot be read"),
        ("[]", "is not a configuration file"),
        ('{"values": []}', "is not a configuration file"),
        ('{"model": "gpt"}', "is not a configuration file"),
        ('{"values": {}}', "has format None, but this version reads format 1"),
        ('{"format": 2, "values": {}}', "has format 2, but this version reads format 1"),
        ('{"format": 1, "digest": "0", "values": {"a": 1}}', "was changed"),
        ('{"format": 1, "values": {"a": NaN}}', "cannot be read"),
        ('{"format": 1, "digest": "0", "values": {"a": [{"b": Infinity}]}}', "cannot be read"),
    ],
)
def test_a_broken_file_is_refused_with_its_name(tmp_path: Path, content: str, message: str) -> None:
    path = tmp_path / "best.json"
    path.write_bytes(content.encode("latin-1"))
    with pytest.raises(ConfigurationError) as error:
        load(path)
    assert message in str(error.value)
    assert str(path) in str(error.value)


def test_a_missing_file_is_refused_with_its_name(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match=r"gone\.json does not exist"):
        load(tmp_path / "gone.json")
    with pytest.raises(ConfigurationError, match="is a folder, but must be a file"):
        load(tmp_path)


def test_a_value_changed_by_hand_is_noticed_unless_the_digest_is_removed(tmp_path: Path) -> None:
    path = tmp_path / "best.json"
    Configuration({"a.k": 5}).save(path)
    document = json.loads(path.read_text())
    document["values"]["a.k"] = 6
    path.write_text(json.dumps(document))
    with pytest.raises(ConfigurationError, match="remove the digest line"):
        load(path)
    del document["digest"]
    path.write_text(json.dumps(document))
    assert load(path)["a.k"] == 6


def test_what_json_cannot_hold_has_no_digest() -> None:
    with pytest.raises(ValueError, match="nan and inf are numbers without a JSON form"):
        digest({"x": float("nan")})
    with pytest.raises(TypeError, match="cannot be written as JSON"):
        digest({"x": object()})
