"""Tables, figures and pages of comparisons, benchmarks and analyses, made from their records alone."""
