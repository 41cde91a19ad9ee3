"""`python -m experiments.analysis`."""

from leanqkv.cli import alone, run

from .command import analysis


def main() -> None:
    """Run the command line."""
    run(alone(analysis))


if __name__ == "__main__":
    main()
