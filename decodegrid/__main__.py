"""`python -m decodegrid` runs the console entry point."""

from decodegrid.engine.cli import main

if __name__ == "__main__":
    raise SystemExit(main())
