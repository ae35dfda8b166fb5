"""Command line entry point: parse arguments, explain errors, and set the exit code."""

from __future__ import annotations

import os
import sys
from typing import NoReturn

from compound.cli.errors import explain, explain_imports, explain_os_error, explain_unforeseen
from compound.cli.options import app
from compound.core.errors import CompoundError
from compound.core.security.sanitize import sanitized_output

# Each module registers its commands; `--help` lists them in this order.
# isort: split
from compound.cli import init  # noqa: F401

# isort: split
from compound.cli import optimize  # noqa: F401

# isort: split
from compound.cli import evaluate  # noqa: F401

# isort: split
from compound.cli import serve  # noqa: F401

# isort: split
from compound.cli import export  # noqa: F401

# isort: split
from compound.cli import runs  # noqa: F401

# isort: split
from compound.cli import check  # noqa: F401


def main() -> NoReturn:
    """Run the command line, turning every expected error into a message and an exit code."""
    arguments = [a for a in sys.argv[1:] if a != "--debug"]
    debug = len(arguments) < len(sys.argv) - 1
    # otherwise litellm downloads its price list on import
    os.environ.setdefault("LITELLM_LOCAL_MODEL_COST_MAP", "True")
    if arguments == ["--version"]:
        from compound import __version__

        print(f"compound {__version__}")
        sys.exit(0)
    with sanitized_output():
        _run_app(arguments, debug)


def _run_app(arguments: list[str], debug: bool) -> NoReturn:
    try:
        with explain_imports():
            app(arguments, prog_name="compound")
    except CompoundError as error:
        if debug:
            raise
        sys.exit(explain(error))
    except (
        KeyboardInterrupt,
        SystemExit,
    ) as ended:  # typer converts KeyboardInterrupt to exit code 130
        if isinstance(ended, SystemExit) and ended.code != 130:
            raise
        print("interrupted; run the same command to resume", file=sys.stderr)
        sys.exit(130)
    except BrokenPipeError:
        # Python flushes stdout at exit, which would raise again
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(0)
    except Exception as error:
        if debug:
            raise
        if isinstance(error, OSError) and explain_os_error(error):
            sys.exit(2)
        explain_unforeseen(error)
        sys.exit(1)
    sys.exit(0)
