"""`python -m experiments.vision`: the command line of leanqkv, which also trains models of images."""

from leanqkv.cli import main
from leanqkv.commands import options

if __name__ == "__main__":
    options.PROGRAM = "python -m experiments.vision"
    main()
