"""What a model of text predicts: every next token, tokens that are masked, or what follows a prefix.

Masks and prefixes are drawn from the seed of the batch plan and a sequence's number in it, so that all models of a
comparison have the same ones. Those of an evaluation are the same for every seed.
"""

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from ..checkpoints.tokenizer import framing
from .batches import IGNORED, Starts, collate
from .token_files import Tokens

# The streams of random numbers of a plan's seed; 0 and 1 are those of the starts.
TRAINING, EVALUATION = 2, 3


class NextToken:
    """Every next token, from all tokens before it.

    Attributes:
        kind: in records; None of every next token.
        predicts: in words.
        counted: an evaluation's name for the number of its targets, where they are drawn.
    """

    kind: ClassVar[str | None] = None
    predicts: ClassVar[str] = "every next token"
    counted: ClassVar[str] = ""

    def record(self) -> dict[str, Any]:
        """Return a record's entry on the targets."""
        return {}

    def draw(self, stream: Sequence[int], length: int) -> np.ndarray:
        """Return the random numbers of a sequence of `length` tokens, float64."""
        return np.empty(0)

    def batch(self, tokens: Tokens, starts: Starts, length: int, streams: Iterable[Sequence[int]]) -> dict[str, Tensor]:
        """Return inputs and targets of sequences: `shift_labels`, or `labels` that stand at their own position.

        Args:
            tokens, starts, length: as `collate` takes them.
            streams: of each sequence, the seed of its random numbers.
        """
        return self.with_targets(collate(tokens, starts, length), [self.draw(stream, length) for stream in streams])

    def with_targets(self, batch: dict[str, Tensor], drawn: Sequence[np.ndarray]) -> dict[str, Tensor]:
        """Return a batch with this objective's targets in place of every next token; `drawn` is of each sequence."""
        return batch


@dataclass(frozen=True)
class MaskedTokens(NextToken):
    """15% of the tokens, from all others. Of these 80% are replaced by a mask, 10% by a random token, 10% stay.

    Devlin et al. 2018, "BERT", section 3.1, https://arxiv.org/abs/1810.04805. As there, every sequence has the same
    share, and special tokens are never chosen.

    Attributes:
        mask: the token in place of those that are hidden.
        vocabulary: random tokens are below this.
        special: tokens that are never predicted.
    """

    kind: ClassVar[str | None] = "masked"
    predicts: ClassVar[str] = "masked tokens (task=masked_lm)"
    counted: ClassVar[str] = "masked_tokens"

    mask: int
    vocabulary: int
    special: tuple[int, ...]
    share: float = 0.15
    masked: float = 0.8
    random: float = 0.1

    @classmethod
    def of(cls, tokenizer: Any, vocabulary: int) -> "MaskedTokens":
        """Return the objective for a tokenizer that has a mask token, which as the last one is no random token."""
        vocabulary -= tokenizer.mask_token_id == vocabulary - 1
        around = framing(tokenizer)
        special = {*tokenizer.all_special_ids, around.begin, around.end} - {None}
        return cls(tokenizer.mask_token_id, vocabulary, tuple(sorted(special)))

    def record(self) -> dict[str, Any]:
        words = (
            f"{self.share:.0%} of the tokens of each sequence; of these {self.masked:.0%} are replaced by token "
            f"{self.mask}, {self.random:.0%} by a random one, and the others stay"
        )
        return {"kind": self.kind, "words": words, **asdict(self), "special": [*self.special]}

    def draw(self, stream: Sequence[int], length: int) -> np.ndarray:
        """Return for every position its place in an order, what is done to it, and a token, [3, length]."""
        random = np.random.default_rng(stream)
        return np.stack([random.random(length), random.random(length), random.integers(self.vocabulary, size=length)])

    def hide(self, ids: np.ndarray, drawn: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return what a model sees of a sequence, and what it is to predict, both int64 [length]."""
        order, action, token = drawn
        candidates = np.flatnonzero(~np.isin(ids, self.special))
        count = min(len(candidates), max(1, round(self.share * len(candidates))))
        chosen = candidates[np.argsort(order[candidates])[:count]]
        labels = np.full_like(ids, IGNORED)
        labels[chosen] = ids[chosen]
        to_mask, to_random = action < self.masked, action < self.masked + self.random
        instead = np.where(to_mask, self.mask, np.where(to_random, token.astype(ids.dtype), ids))
        return np.where(labels == IGNORED, ids, instead), labels

    def with_targets(self, batch: dict[str, Tensor], drawn: Sequence[np.ndarray]) -> dict[str, Tensor]:
        rows = [self.hide(ids, numbers) for ids, numbers in zip(batch["input_ids"].numpy(), drawn, strict=True)]
        seen, labels = (torch.from_numpy(np.stack(part)) for part in zip(*rows, strict=True))
        return {"input_ids": seen, "labels": labels}


class AfterPrefix(NextToken):
    """Every token after a prefix, whose tokens see each other in both directions.

    Raffel et al. 2019, "T5", sections 3.2.1 and 3.2.3, https://arxiv.org/abs/1910.10683. The prefix of n inputs has
    1 to n tokens, all lengths alike, and its last one predicts the first token behind it.
    """

    kind: ClassVar[str | None] = "prefix"
    predicts: ClassVar[str] = "the tokens after a prefix (mask_type=prefix)"
    counted: ClassVar[str] = "tokens_after_prefix"

    def record(self) -> dict[str, Any]:
        return {"kind": self.kind, "words": "the tokens after a prefix of random length"}

    def draw(self, stream: Sequence[int], length: int) -> np.ndarray:
        """Return the length of the prefix, [1]."""
        return np.random.default_rng(stream).integers(1, length, size=1, endpoint=True).astype(np.float64)

    def with_targets(self, batch: dict[str, Tensor], drawn: Sequence[np.ndarray]) -> dict[str, Tensor]:
        mask = prefix_mask([int(length[0]) for length in drawn], batch["input_ids"].shape[1])
        within = torch.nn.functional.pad(mask, (0, 1))[:, 1:].bool()  # whose targets are seen
        # `labels` as in `collate`.
        labels = batch["input_ids"].masked_fill(mask.bool(), IGNORED)
        shifted = batch["shift_labels"].masked_fill(within, IGNORED)
        return {**batch, "shift_labels": shifted, "labels": labels, "prefix_mask": mask}


def prefix_mask(prefixes: Sequence[int], length: int) -> Tensor:
    """Return 1 for the first so many tokens of each sequence, int64 [sequences, length]."""
    return (torch.arange(length) < torch.tensor(prefixes)[:, None]).long()


def targets(batch: dict[str, Tensor]) -> Tensor:
    """Return the target at every position of logits, IGNORED where none is predicted, [batch, length]."""
    return batch["shift_labels"] if "shift_labels" in batch else batch["labels"]


def inputs(batch: dict[str, Tensor], device: torch.device | None = None) -> dict[str, Tensor]:
    """Return what a model reads of a batch: all but the targets."""
    return {name: tensor.to(device) for name, tensor in batch.items() if "labels" not in name}
