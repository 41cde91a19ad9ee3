"""Inside trained models: what each layer knows, how alike heads and tokens are, what heads do, how weights look."""

from .heads import induction_scores, previous_token_scores, value_layers
from .observe import layer_outputs, observe
from .probe import probe_losses, slope_interval, train_probes
from .similarity import head_similarity, token_similarity
from .weights import attention_spectra, logit_spread

__all__ = [
    "attention_spectra",
    "head_similarity",
    "induction_scores",
    "layer_outputs",
    "logit_spread",
    "observe",
    "previous_token_scores",
    "probe_losses",
    "slope_interval",
    "token_similarity",
    "train_probes",
    "value_layers",
]
