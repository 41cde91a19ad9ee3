"""`python -m experiments.theory`."""

from leanqkv.cli import run

from .command import app

if __name__ == "__main__":
    run(app)
