"""The one step of the atlas system that is plain code."""


def both(country: str, question: str) -> str:
    """Return the second query: the country found first, then the question.

    >>> both("Peru", "Which currency is used there?")
    'Peru Which currency is used there?'
    """
    return f"{country} {question}"
