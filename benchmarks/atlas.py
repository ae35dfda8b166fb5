"""Python step of the atlas system."""


def both(country: str, question: str) -> str:
    """Return the second query: the country from the first hop, then the question.

    >>> both("Peru", "Which currency is used there?")
    'Peru Which currency is used there?'
    """
    return f"{country} {question}"
