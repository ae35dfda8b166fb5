"""The commands. Results go to stdout, progress and messages to stderr.

Exit codes: 0 done; 1 ran, but the demand failed; 2 bad input or usage; 130 interrupted, resumable.
"""

from compound.cli.entry_point import main as main
from compound.cli.options import app as app
