"""Tokenizers of several kinds, made by hand."""

from tokenizers import Tokenizer, decoders, models, normalizers


def sentencepiece() -> Tokenizer:
    """As LLaMA 2: spaces in tokens, bytes for what has no token, and a decoder that drops the first space."""
    pieces = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), *sorted(set("▁abcdefghijlmnoprstuvyz,"))]
    merges = [("t", "h"), ("th", "e"), ("▁", "the"), ("l", "a"), ("z", "y"), ("la", "zy"), ("▁", "lazy"), ("▁", "▁")]
    vocabulary = {piece: number for number, piece in enumerate(pieces + ["".join(merge) for merge in merges])}
    tokenizer = Tokenizer(models.BPE(vocabulary, merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    tokenizer.decoder = decoders.Sequence(steps)
    return tokenizer
