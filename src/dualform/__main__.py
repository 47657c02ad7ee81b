"""`python -m dualform` is the command `dualform`."""

from dualform.cli import main

if __name__ == "__main__":
    main()
