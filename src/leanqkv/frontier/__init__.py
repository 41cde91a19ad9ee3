"""The frontier of a checkpoint: bytes of KV cache per token against loss, by kind of reduction and by precision."""
