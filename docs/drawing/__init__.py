"""The figures of the documentation, a function each, a module for each subject; docs/make_figures.py names them."""
