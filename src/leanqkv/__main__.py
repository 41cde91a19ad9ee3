"""`python -m leanqkv`, and `torchrun -m leanqkv` for several processes."""

from .cli import main

if __name__ == "__main__":  # not in the workers of a comparison, which import this module too
    main()
