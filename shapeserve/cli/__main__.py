"""``python -m shapeserve.cli``: the command line without an installed script."""

from shapeserve.cli import main

if __name__ == "__main__":
    main()
