"""Fair comparisons: paired runs of several architectures, and their report."""
