"""Keys reused as values, K = V: one projection and one cached tensor instead of two.

The keys are the values as they are attended with, after QK-norm and rotary positions. With rotary positions every
head's output is turned back by its own position, so that only distances enter, as they do in the scores; rotating
values this way is described by Zadouri et al. 2025, https://arxiv.org/abs/2505.21487 (tied keys and values), and by
Su 2021, https://arxiv.org/abs/2104.09864 (section 3.2.2, relative positions by rotation).
"""

from .registry import Projection


class KeysAsValues(Projection):
    """No weights: LeanAttention takes the leading own key heads for the layer's own value heads."""

    kind = "keys"
    reuses_keys = True

    def build(self, config, num_heads: int) -> None:
        """Return no module."""
