"""Component kinds: models, agents, retrievers, tools, functions and flow; and the gateway of agents."""

if __name__ != "compound.components":
    raise ImportError(
        "import compound.components, not components: a second copy would break isinstance"
    )

from compound.core.lazy import public_names

__getattr__, __dir__, __all__, _HOME = public_names(__name__, __file__)
