"""Generator of the atlas data: short passages about the world's countries, and questions about them.

The facts come from the table ``data/atlas_countries.json``, and the sentences from templates in
this file. Nothing is random: each choice depends on a checksum, so ``python -m
benchmarks.atlas_data`` writes the same bytes on every machine. Splits are by country, so training
has no questions about test countries.
"""

from __future__ import annotations

import json
import zlib
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

T = TypeVar("T")

DATA = Path(__file__).parent / "data"
SIZES = {"train": 120, "dev": 60, "test": 100}
SHARES = {
    "train": 9,
    "dev": 13,
    "test": 20,
}  # upper bounds, out of 20, of the checksums in each split

# One page per topic; {c} is the country with its article, {C} the same at the start of a sentence.
PAGES: dict[str, tuple[str, tuple[str, ...]]] = {
    "country": (
        "{bare}",
        (
            "{C} is a country in {region}.{borders} Its capital is {capital}.",
            "{C} belongs to {region}.{borders} The capital is {capital}.",
            "On a map of {region} you will find {c}.{borders} A star marks its capital, {capital}.",
        ),
    ),
    "capital": (
        "{capital}",
        (
            "{capital} is the capital of {c}. On most maps a star marks the city.",
            "The capital of {c} is {capital}. Atlases print the name of this city in bold.",
            "{C} has chosen {capital} as its capital. Its streets are busy on every working day.",
        ),
    ),
    "city": (
        "{largest}",
        (
            "{largest} is the largest city of {c}, but it is not the capital.",
            "More people live in {largest} than in any other city of {c}. Even so, it is not the capital.",
        ),
    ),
    "money": (
        "Money in {c}",
        (
            "The currency of {c} is the {currency}. Banks in {capital} pay it out over the counter.",
            "Shops in {c} ask to be paid in the {currency}. Banks in {capital} change other money.",
            "People in {c} pay with the {currency}. Its notes and coins go from hand to hand in {capital}.",
        ),
    ),
    "speech": (
        "Languages of {c}",
        (
            "The official language of {c} is {language}. Newspapers in {capital} are printed in it.",
            "{C} has one official language: {language}. Visitors to {capital} should learn a few words.",
            "In the offices of {c} the official language is {language}. Signs in {capital} use it too.",
        ),
    ),
    "speeches": (
        "Languages of {c}",
        (
            "{C} has several official languages: {languages}. You may hear them in {capital}.",
            "The official languages of {c} are {languages}. Schools in {capital} teach them.",
        ),
    ),
    "sight": (
        "{Sight}",
        (
            "{Sight} can be found in {c}. Many books about the country show it.",
            "Travellers to {c} like to see {sight}. Postcards show it too.",
            "One of the best known places of {c} is {sight}. School books there have pictures of it.",
        ),
    ),
    "phone": (
        "Calling {c}",
        (
            "To phone {c} from abroad, dial +{code} first. Cars there keep to the {side}.",
            "The calling code of {c} is +{code}. Traffic on its roads drives on the {side}.",
            "Numbers in {c} begin with +{code}. Drivers use the {side} side of the road.",
        ),
    ),
}

# The facts that questions ask for: the field with the answer, and wordings with {it} for the
# country.
ASKED: dict[str, tuple[str, tuple[str, ...]]] = {
    "capital": ("capital", ("What is the capital of {it}?", "Which city is the capital of {it}?")),
    "currency": (
        "currency",
        ("Which currency is used in {it}?", "What money do people pay with in {it}?"),
    ),
    "language": (
        "language",
        ("What is the official language of {it}?", "Which language is official in {it}?"),
    ),
    "code": (
        "code",
        ("What is the calling code of {it}?", "Which code do you dial to phone {it}?"),
    ),
    "city": ("largest", ("What is the largest city of {it}?",)),
    "region": (
        "region",
        ("In which part of the world is {it}?", "Which part of the world does {it} lie in?"),
    ),
}

# First sentences of two-hop questions, which identify a country without naming it.
POINTERS: dict[str, tuple[str, ...]] = {
    "capital": (
        "The capital of one country is {capital}.",
        "{capital} is the capital of one country.",
    ),
    "sight": ("You can visit {sight} in one country.", "{Sight} can be found in one country."),
    "currency": ("People in one country pay with the {currency}.",),
}

# Kinds of questions: (hops, pointer, asked). With an empty pointer the question names the country.
KINDS: tuple[tuple[int, str, str], ...] = (
    (1, "", "capital"),
    (2, "capital", "currency"),
    (1, "", "currency"),
    (1, "", "region"),
    (2, "sight", "capital"),
    (1, "", "language"),
    (1, "", "code"),
    (2, "capital", "language"),
    (1, "", "city"),
    (2, "currency", "capital"),
)


@dataclass(frozen=True)
class Question:
    """Question with its answer; ``hops`` is the number of facts needed to answer it."""

    id: str
    question: str
    answer: str
    hops: int


def pick(options: Sequence[T], key: str) -> T:
    """Choose one of ``options`` by the checksum of a key.

    >>> pick("abc", "Peru") == pick("abc", "Peru")
    True
    """
    return options[zlib.crc32(key.encode()) % len(options)]


def sentence_case(text: str) -> str:
    """Capitalize the first letter and keep the others.

    >>> sentence_case("the Gambia")
    'The Gambia'
    """
    return text[:1].upper() + text[1:]


def listed(names: Sequence[str]) -> str:
    """Join names with commas and "and".

    >>> listed(["Dutch", "French", "German"])
    'Dutch, French and German'
    """
    return names[-1] if len(names) == 1 else ", ".join(names[:-1]) + " and " + names[-1]


def load_countries() -> list[dict[str, str]]:
    """Read the table as one flat set of template fields per country; a missing fact is ``""``."""
    rows = json.loads((DATA / "atlas_countries.json").read_text(encoding="utf-8"))
    currencies = Counter(row["currency"] for row in rows)
    return [_fields(row, shared=currencies[row["currency"]] > 1) for row in rows]


def _fields(row: Mapping[str, str | list[str]], *, shared: bool) -> dict[str, str]:
    name, sight = str(row["name"]), str(row["sight"])
    languages, neighbours = list(row["languages"]), list(row["neighbours"])
    return {
        "c": name,
        "C": sentence_case(name),
        "bare": name.removeprefix("the "),
        "region": str(row["region"]),
        "capital": str(row["capital"]),
        "largest": str(row["largest_city"]),
        "currency": str(row["currency"]),
        "shared": "yes" if shared else "",
        "language": languages[0] if len(languages) == 1 else "",
        "languages": listed(languages) if len(languages) > 1 else "",
        "borders": f" It shares a border with {listed(neighbours)}." if neighbours else "",
        "sight": sight,
        "Sight": sentence_case(sight),
        "code": str(row["calling_code"]),
        "side": str(row["drives_on"]),
    }


def pages(country: Mapping[str, str]) -> Iterator[tuple[str, str]]:
    """Yield the title and text of every page about a country."""
    needs = {
        "country": country["capital"],
        "capital": country["capital"],
        "city": country["largest"] if country["largest"] != country["capital"] else "",
        "money": country["currency"],
        "speech": country["language"],
        "speeches": country["languages"],
        "sight": country["sight"],
        "phone": country["code"],
    }
    here = {**country, "capital": country["capital"] or country["largest"]}
    for topic, (title, texts) in PAGES.items():
        if needs[topic]:
            yield title.format_map(here), pick(texts, f"{topic} {country['c']}").format_map(here)


def corpus(countries: Iterable[Mapping[str, str]]) -> list[dict[str, str]]:
    """Return all pages, numbered in the order of the table."""
    found = [page for country in countries for page in pages(country)]
    return [
        {"id": f"p{i:04d}", "title": title, "text": text} for i, (title, text) in enumerate(found)
    ]


def askable(country: Mapping[str, str], pointer: str, asked: str) -> bool:
    """Return whether the table has the needed facts and the pointer does not reveal the country's name."""
    if not country[ASKED[asked][0]]:
        return False
    if asked == "city" and country["largest"] == country["capital"]:
        return False
    if asked == "region" and not country["capital"]:  # its page needs both
        return False
    if not pointer:
        return True
    if pointer == "currency" and country["shared"]:
        return False
    return bool(country[pointer]) and country["bare"] not in country[pointer]


def ask(country: Mapping[str, str], hops: int, pointer: str, asked: str) -> Question:
    """Formulate a question about a country."""
    key = f"{country['c']} {pointer} {asked}"
    name = f"{pointer or 'name'}-{asked}-{country['bare'].lower().replace(' ', '-')}"
    clue = pick(POINTERS[pointer], key).format_map(country) + " " if pointer else ""
    field, wordings = ASKED[asked]
    wording = pick(wordings, key).format(it="that country" if pointer else country["c"])
    answer = ("+" if asked == "code" else "") + country[field].removeprefix("the ")
    return Question(name, clue + wording, answer, hops)


def splits(countries: Sequence[Mapping[str, str]]) -> dict[str, list[Question]]:
    """Assign countries to splits by checksum, and write each split's questions, cycling through the kinds."""
    homes: dict[str, list[Mapping[str, str]]] = {name: [] for name in SHARES}
    for country in sorted(countries, key=lambda row: zlib.crc32(row["c"].encode())):
        number = zlib.crc32(f"split {country['c']}".encode()) % 20
        homes[next(name for name, share in SHARES.items() if number < share)].append(country)
    return {name: _questions(homes[name], SIZES[name]) for name in SIZES}


def _questions(countries: Sequence[Mapping[str, str]], size: int) -> list[Question]:
    """Write ``size`` questions, cycling through the kinds; each uses the country with the fewest so far."""
    asked_of: Counter[str] = Counter()
    done: dict[str, Question] = {}
    while len(done) < size:
        before = len(done)
        for kind in KINDS[: size - len(done)]:
            rows = [row for row in countries if askable(row, *kind[1:])]
            fresh = [row for row in rows if ask(row, *kind).id not in done]
            if fresh:
                row = min(fresh, key=lambda row: asked_of[row["c"]])
                asked_of[row["c"]] += 1
                question = ask(row, *kind)
                done[question.id] = question
        if len(done) == before:
            raise ValueError(f"only {before} questions are possible, but {size} are required")
    return list(done.values())


def write_lines(path: Path, rows: Iterable[Mapping[str, object]]) -> None:
    """Write one JSON object per line."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8", newline="\n")


def main() -> None:
    """Rewrite the corpus and the three splits."""
    countries = load_countries()
    write_lines(DATA / "atlas" / "corpus.jsonl", corpus(countries))
    for name, questions in splits(countries).items():
        rows = (
            {"id": q.id, "question": q.question, "answer": q.answer, "hops": q.hops}
            for q in questions
        )
        write_lines(DATA / "atlas" / f"{name}.jsonl", rows)


if __name__ == "__main__":
    main()
