"""The spread of attention logits at initialization."""
