"""The transformer: configuration, plan, mechanisms, model. One flat folder that travels with every checkpoint."""

import transformers  # noqa: F401  # its import registers our classes, so none of them may be half imported yet
