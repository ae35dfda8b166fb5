"""Optimizers and baselines, imported as ``compound.optimizers``."""

if __name__ != "compound.optimizers":
    raise ImportError(
        "import compound.optimizers, not optimizers: a second copy would break isinstance"
    )
