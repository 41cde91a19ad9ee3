"""Data: corpora, tokenizers, prepared files of tokens, and the batch plan that compared runs share."""
