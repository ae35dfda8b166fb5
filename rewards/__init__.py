"""Local rewards, imported as ``compound.rewards``."""

if __name__ != "compound.rewards":
    raise ImportError("import compound.rewards, not rewards: a second copy would break isinstance")
