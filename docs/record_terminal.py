"""Record what a command prints as a picture of a terminal.

    python docs/record_terminal.py docs/figures/optimize.svg compound optimize benchmarks/atlas.yaml
    --new

The command runs here and now; progress, which goes to stderr, is not recorded.
"""

from __future__ import annotations

import io
import re
import shlex
import subprocess
import sys
from pathlib import Path

from rich._export_format import CONSOLE_SVG_FORMAT
from rich.console import Console
from rich.text import Text

WIDTH = 112
STYLE = re.sub(
    r"@font-face {{.*?}}", "", CONSOLE_SVG_FORMAT, flags=re.DOTALL
)  # which fetches fonts


def main() -> None:
    """Run the command and write the picture."""
    output, command = Path(sys.argv[1]), sys.argv[2:]
    printed = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout
    console = Console(record=True, width=WIDTH, file=io.StringIO(), force_terminal=True)
    console.print(Text.assemble(("$ ", "green"), (shlex.join(command), "bold")))
    console.print(Text(printed.rstrip()), soft_wrap=False)
    console.save_svg(str(output), title="compound", code_format=STYLE)


if __name__ == "__main__":
    main()
