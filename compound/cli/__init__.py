"""Command line interface. Results go to stdout, progress and messages to stderr.

Exit codes: 0 success; 1 completed, but a check failed; 2 invalid input or usage; 130 interrupted,
resumable.
"""

from compound.cli.entry_point import main as main
from compound.cli.options import app as app
