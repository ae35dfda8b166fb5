"""Test doubles, and conformance kits for implementations of a role.

A kit is a plain class. Subclass it in a test module under a name that starts with ``Test``, and
override its hooks; pytest then collects its checks. `run_kit` runs them without pytest. The kits
are loaded on first use, so that importing the doubles is fast.
"""

from compound.core.lazy import public_names

__getattr__, __dir__, __all__, _HOME = public_names(__name__, __file__)
