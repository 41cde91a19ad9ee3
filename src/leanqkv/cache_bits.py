"""The precision of a cache, as `--cache-bits`, `Decoder(model, cache_bits=…)` and the points of a frontier have it."""

from dataclasses import dataclass
from typing import Any

from .errors import LeanError

WHOLE, QUANTIZED = 16, (8, 4, 2)
VALID = "16, 8, 4, 2, or KEYS/VALUES of 8, 4 and 2, such as 8/4"
NUMBERS = {str(bits): bits for bits in (WHOLE, *QUANTIZED)}


@dataclass(frozen=True)
class CacheBits:
    """Bits of the cached keys and of the cached values; 16 of both stand for the model's own precision.

    Raises:
        LeanError: other numbers, or only one of the two quantized.
    """

    key_bits: int = WHOLE
    value_bits: int = WHOLE

    def __post_init__(self) -> None:
        both = (self.key_bits, self.value_bits)
        if any(type(bits) is not int for bits in both) or not (both == (WHOLE, WHOLE) or {*both} <= {*QUANTIZED}):
            raise _invalid(str(self))

    @classmethod
    def of(cls, given: Any) -> "CacheBits":
        """Return the precision that is meant by None (16), a number, a pair (keys, values), or a text such as "8/4".

        Raises:
            LeanError: `given` is none of these.
        """
        if given is None or isinstance(given, cls):
            return given or cls()
        numbers: Any = given if isinstance(given, tuple | list) else (given,)
        if isinstance(given, str):
            numbers = [NUMBERS.get(part) for part in given.split("/")]
        if len(numbers) not in (1, 2) or any(type(bits) is not int for bits in numbers):
            raise _invalid(given)
        return cls(numbers[0], numbers[-1])

    @classmethod
    def list_of(cls, text: str) -> "list[CacheBits]":
        """Return the precisions between the commas of `text`, each once, in its order."""
        return list(dict.fromkeys(cls.of(part.strip()) for part in text.split(",")))

    def __str__(self) -> str:
        return str(self.key_bits) if self.key_bits == self.value_bits else f"{self.key_bits}/{self.value_bits}"

    @property
    def name(self) -> str:
        """As "8/4 bits", keys first."""
        return f"{self} bits"

    @property
    def quantized(self) -> bool:
        """Whether the cache is a quantized one."""
        return self.key_bits != WHOLE

    def bytes_per_token(self, plan: Any, dtype: Any) -> float:
        """Return the bytes of a token in whole blocks, scales and offsets included; 16 bits are of `dtype`."""
        from .model.cache_quantized import quantized_bytes_per_token

        if not self.quantized:
            return plan.kv_bytes_per_token(dtype)
        return quantized_bytes_per_token(plan, self.key_bits, self.value_bits)

    def kv_bytes(self, plan: Any, tokens: int, dtype: Any) -> int:
        """Return the bytes of a sequence's cache; what is not quantized is of `dtype`."""
        from .model.cache_quantized import quantized_bytes

        if not self.quantized:
            return plan.kv_bytes(tokens, dtype)
        return quantized_bytes(plan, tokens, dtype, self.key_bits, self.value_bits)

    def cache(self, config: Any) -> Any:
        """Return an empty quantized cache, to be given as `past_key_values`."""
        from .model.cache_quantized import KIVI, LeanQuantizedCache

        return LeanQuantizedCache(KIVI, config, key_bits=self.key_bits, value_bits=self.value_bits)


# The model's own precision.
PLAIN = CacheBits()


def _invalid(found: Any) -> LeanError:
    return LeanError(f"`cache_bits` is {VALID}; found {found!r}")
