"""Run the command line as ``python -m compound``."""

from compound.cli import main

if __name__ == "__main__":
    main()
