"""The component kinds and the engines that LLM components call, imported as ``compound.components``."""

if __name__ != "compound.components":
    raise ImportError("import compound.components, not components: a second copy would break isinstance")
