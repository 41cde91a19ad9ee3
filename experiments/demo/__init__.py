"""The demo: every tool of the package on one small model, in a few minutes.

python -m experiments.demo --out runs/demo
"""

from leanqkv.job import KINDS

KINDS["demo"] = ("demo.json", "is not empty and not a demo. Choose another `out`.")
