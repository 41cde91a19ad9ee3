"""Inside trained models: what each layer knows, how alike heads and tokens are, what heads do, how weights look.

python -m experiments.analysis runs/baseline runs/skipv1 --out runs/analysis
"""
