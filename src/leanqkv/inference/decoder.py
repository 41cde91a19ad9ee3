"""Prefill in chunks, then one token of every sequence at a time."""

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from transformers import LogitsProcessor, LogitsProcessorList, generation
from transformers.cache_utils import Cache

from ..cache_bits import CacheBits
from ..compat import attention_implementation
from ..errors import LeanError
from ..model.attention import Attention
from ..model.attention_latent import LatentAttention
from ..model.causal_lm import LeanForCausalLM
from ..model.config import LeanConfig
from ..model.latent import HOOKS, Absorbing
from ..model.latent_heads import LatentHeadsAttention
from ..model.transformer import LeanModel
from .attention import additive, attend_one_query, attend_one_query_to_latent, attend_one_query_turned
from .cache import allocate_cache, join_rows
from .layer import use_programs
from .linear import FewRowsLinear, shared_copy, use_products
from .repeat import RepeatedLayers
from .step import compiled_kernels, fuse

# Tokens of all rows of a prompt that are computed together at most, which bounds the memory of their activations; and
# those of a row where larger pieces bring nothing.
PREFILL_TOKENS, PIECE_TOKENS = 4096, 512


def prepared(model: LeanForCausalLM) -> LeanForCausalLM:
    """A copy for inference that shares the parameters; `generate` is still transformers'.

    The projections of one input are one product (joined.py), which a kernel computes where there are few rows, as other
    linear layers (linear.py) and small operations (step.py); what a usual layer computes before and after attention is
    one call each (layer.py), and where that is all, steps repeat the calls of the first one (repeat.py). In place of
    "sdpa" there is the kernel for attention of one query (attention.py).
    """
    copied = shared_copy(model).eval()
    use_products(copied)
    fuse(copied)
    use_programs(copied)
    if attention_implementation(copied) == "sdpa":
        for module in copied.modules():
            if isinstance(module, Attention):
                module.attend = attend_one_query
            if isinstance(module, LatentHeadsAttention):
                module.attend_turned = attend_one_query_turned
            if isinstance(module, LatentAttention):
                module.attend_to_latent = attend_one_query_to_latent
    if kernels := compiled_kernels():
        repeat = next(iter(kernels.values())).repeat
        for module in copied.modules():
            if isinstance(module, LeanModel):
                module._run_layers = RepeatedLayers(module, repeat, additive)  # type: ignore[method-assign]
    return copied


def last_position(config: LeanConfig, length: int) -> int | None:
    """Return how many positions a cache can come to that begins with a prompt of `length` tokens; None: any number.

    Beyond `cached_positions` rotary positions of type "longrope" have other frequencies, the same for all lengths, and
    "dynamic" ones others at every length: a prompt is turned by those of its own length.
    """
    limit = config.cached_positions
    if limit is None or length <= limit or config.position_embedding_type == "learned":
        return limit
    ropes = [rope["rope_type"] for rope in (config.rope_parameters, config.window_rope_parameters) if rope]
    return length if "dynamic" in ropes else None


def position_limit(config: LeanConfig, positions: int) -> str:
    """Return what a prompt and an answer of more than so many `positions` exceed, in words."""
    if config.position_embedding_type == "learned" or positions != config.cached_positions:
        return f"the model's {positions} positions"
    return f"the {positions} positions behind which rotary frequencies change, those of cached keys do not"


class Decoder:
    """Generate the tokens that `model.generate` gives, with less work around each step.

    The cache has exactly as many places as there will be tokens. Weights are the model's own, except for copies of
    those that are read in another layout. Changes of the model between two prompts take effect at the second: weights,
    dtypes, hooks, adapters. A copy misses only numbers written in place through `.data`, which PyTorch does not count
    as changes.
    """

    def __init__(
        self,
        model: LeanForCausalLM,
        chunk: int | None = None,
        cache_bits: CacheBits | int | str | tuple[int, int] | None = None,
    ):
        """Prepare `model`, which stays as it is; dropout does not act, even where the model is in training mode.

        Args:
            model: a LeanForCausalLM, or one that PEFT or `torch.compile` wraps.
            chunk: tokens of a prompt at a time; None: as `piece_tokens` says. A prefix model's prompt is always taken
                whole.
            cache_bits: 8, 4 or 2 bits of cached keys and values, or "8/4" or (8, 4) for keys and values of their own;
                16 or None: the model's own precision. Tokens are quantized in blocks, at the end of the chunk or the
                step that completes one.

        Raises:
            ValueError: another model, or one with trained prompt tokens before the prompt.
            LeanError: other bits.
        """
        _check_model(model)
        self.cache_bits = CacheBits.of(cache_bits)
        self.config = model.config
        self.generation_config = model.generation_config
        self._source, self._made_of = model, _state_of(model)
        self.model = prepared(model)
        self.chunk: int | None = chunk if model.config.mask_type != "prefix" else 2**31
        # Every piece of a prompt makes the heads of all tokens before it again.
        self.makes_heads = any(isinstance(module, Absorbing) for module in self.model.modules())
        self.cache: Cache | None = None  # of the last prompt
        self.mask: Tensor | None = None  # of its tokens; None: no padding
        self.given: dict[str, Any] = {}

    @torch.inference_mode()
    def generate(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        *,
        max_new_tokens: int,
        do_sample: bool = False,
        temperature: float = 1.0,
        top_k: int | None = None,
        top_p: float | None = None,
        eos_token_id: int | list[int] | None = None,
        pad_token_id: int | None = None,
        callback: Callable[[Tensor], Any] | None = None,
    ) -> Tensor:
        """Continue `input_ids` [batch, length] by at most `max_new_tokens`, of which there is at least one.

        The prompt is padded on the left where `attention_mask` [batch, length] is 0. Sampling is among all tokens but
        for `top_k` and `top_p` (transformers' own default is the 50 likeliest), and takes from torch's global generator
        what `model.generate` takes. A sequence ends with one of `eos_token_id` (default: the generation config's; none,
        if that has none) and is filled up with `pad_token_id`.

        Args:
            callback: is given the new tokens [batch] after every step; a true answer ends the generation.

        Returns:
            [batch, length + new tokens], prompt included.

        Raises:
            ValueError: as `prefill`, and no tokens to be generated, as in transformers.
            LeanError: the logits are NaN or infinite.
        """
        if max_new_tokens < 1:
            raise ValueError(f"max_new_tokens is {max_new_tokens}; ask for at least 1")
        warpers = logits_warpers(temperature, top_k, top_p) if do_sample else LogitsProcessorList()
        logits = self.prefill(input_ids, attention_mask, room=max_new_tokens - 1)
        batch, length = input_ids.shape
        last = self.generation_config.eos_token_id if eos_token_id is None else eos_token_id
        ends = torch.tensor([last] if isinstance(last, int) else last or [], dtype=torch.long, device=input_ids.device)
        pad = self.generation_config.pad_token_id if pad_token_id is None else pad_token_id
        if pad is None:
            pad = int(ends[0]) if len(ends) else 0
        tokens = input_ids.new_full((batch, length + max_new_tokens), pad)
        tokens[:, :length] = input_ids
        running = torch.ones(batch, dtype=torch.bool, device=input_ids.device)
        for place in range(length, length + max_new_tokens):
            scores = warpers(tokens[:, :place], logits.float())  # type: ignore[arg-type]
            if not scores.amax(-1).isfinite().all():  # the likeliest of such logits is none, silently
                found = f"the scores of new token {place - length + 1} are NaN or infinite"
                raise LeanError(f"{found}: the weights are too large to compute with, or the temperature is too small")
            new = torch.multinomial(scores.softmax(-1), 1)[:, 0] if do_sample else scores.argmax(-1)
            new = torch.where(running, new, pad)
            tokens[:, place] = new
            if len(ends):
                running &= torch.isin(new, ends, invert=True)
            stop = callback is not None and callback(new)
            if stop or place + 1 == tokens.shape[1] or (len(ends) and not running.any()):
                return tokens[:, : place + 1]
            logits = self.step(new)
        return tokens

    @torch.inference_mode()
    def prefill(self, input_ids: Tensor, attention_mask: Tensor | None = None, *, room: int) -> Tensor:
        """Read a prompt into a new cache with room for `room` more tokens; return the next token's logits [batch,
        vocab_size]. Arguments as `generate`.

        Raises:
            ValueError: an empty prompt or batch, something other than token ids, a mask of another shape, or more
                tokens than the model has positions.
        """
        *_, logits = self.prefill_chunks(input_ids, attention_mask, room=room)
        assert logits is not None
        return logits

    @torch.inference_mode()
    def prefill_chunks(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        *,
        room: int,
        observe: Callable[[int, Tensor], None] | None = None,
    ) -> Iterator[Tensor | None]:
        """Prefill a chunk at a time: yield None after every chunk but the last, and after that what `prefill` returns.

        Args:
            observe: is given the first position of every chunk and its logits [batch, positions, vocab_size].

        Raises:
            ValueError: as `prefill`.
        """
        _check_prompt(input_ids, attention_mask, room)
        if (state := _state_of(self._source)) != self._made_of:
            with torch.inference_mode(False):
                self.model, self._made_of = prepared(self._source), state
        length = input_ids.shape[1]
        if (end := last_position(self.config, length)) is not None and length + room > end:
            found = f"the prompt of {length} and {room} tokens more do not fit {position_limit(self.config, end)}"
            raise ValueError(found)
        self.cache = allocate_cache(self.config, length + room, self.cache_bits)
        self.mask = None if attention_mask is None or bool(attention_mask.all()) else attention_mask
        first, later = self.piece_tokens(len(input_ids))
        # Beyond this limit the frequencies of rotary positions depend on how long the prompt is.
        if length > (self.config.cached_positions or length):
            first = length
        alone = self.mask is not None or len(input_ids) * min(length, first) > PREFILL_TOKENS
        if self.cache_bits.quantized and len(input_ids) > 1 and alone:
            real = torch.ones_like(input_ids) if attention_mask is None else attention_mask
            yield from self._prefill_rows(input_ids, real, room)
            return
        self.given = {}
        if self.config.mask_type == "prefix":
            self.given["prefix_mask"] = torch.ones_like(input_ids) if attention_mask is None else attention_mask
        starts = [0, *range(first, length, later)]
        for start, end in zip(starts, [*starts[1:], length], strict=True):
            mask = None if self.mask is None else self.mask[:, :end]
            logits = self._forward(input_ids[:, start:end], mask, keep=0 if observe else 1)
            if observe:
                observe(start, logits)
            yield logits[:, -1] if end == length else None

    def _prefill_rows(self, input_ids: Tensor, attention_mask: Tensor, room: int) -> Iterator[Tensor | None]:
        """As `prefill_chunks`, row by row: what pads a row would be quantized with it, and smaller pieces, because rows
        are many, would be quantized otherwise."""
        rows = [ids[real.bool()][None] for ids, real in zip(input_ids, attention_mask, strict=True)]
        lengths, limit = [row.shape[1] for row in rows], self.config.cached_positions or 0
        if min(lengths) <= limit < max(lengths):
            raise ValueError(
                f"prompts of {min(lengths)} and {max(lengths)} tokens have different rotary frequencies, which change "
                f"behind {limit}; read them on their own"
            )
        cache, last = None, []
        for row in rows:
            for logits in self.prefill_chunks(row, room=room):  # noqa: B007
                yield None
            last.append(logits)
            if cache is None:
                cache = self.cache
            else:
                join_rows(cache, self.cache)  # type: ignore[arg-type]
        longest = max(lengths)
        starts = longest - torch.tensor(lengths, device=input_ids.device)
        self.cache, self.mask = cache, (torch.arange(longest, device=starts.device) >= starts[:, None]).long()
        if self.config.mask_type == "prefix":
            self.given["prefix_mask"] = self.mask
        yield torch.cat(last)  # type: ignore[arg-type]

    def piece_tokens(self, rows: int) -> tuple[int, int]:
        """Return the tokens of each of so many rows in the first piece of a prompt, and in those behind it.

        A first piece without padding needs no mask, and PyTorch leaves out what its tokens do not see; others compute
        that too, the more the larger they are. But where each reads all tokens before it otherwise than they lie, makes
        heads of latents or numbers of codes, few pieces are faster. A sliding window keeps what is read short.
        """
        if self.chunk is not None:
            return self.chunk, self.chunk
        if any(layer.window is not None for layer in self.config.plan.layers):
            return PIECE_TOKENS, PIECE_TOKENS
        quantized = self.cache_bits.quantized  # the same pieces whatever the other rows are
        whole = max(PIECE_TOKENS, PREFILL_TOKENS // (1 if quantized else rows))
        if self.makes_heads or quantized:
            return whole, whole
        return PIECE_TOKENS if self.mask is not None else whole, PIECE_TOKENS

    @torch.inference_mode()
    def step(self, tokens: Tensor) -> Tensor:
        """Read one more token of every sequence, [batch]; return the next token's logits [batch, vocab_size]."""
        if self.mask is not None:
            self.mask = torch.cat((self.mask, self.mask.new_ones(len(tokens), 1)), dim=1)
        return self._forward(tokens[:, None], self.mask)[:, -1]

    def _forward(self, new: Tensor, attention_mask: Tensor | None, keep: int = 1) -> Tensor:
        """[batch, keep, vocab_size], of the last positions; 0 keeps all."""
        positions = None
        if attention_mask is not None:  # real tokens before
            positions = (attention_mask.cumsum(-1) - 1).clamp_min(0)[:, -new.shape[1] :]
        return self.model(
            input_ids=new,
            attention_mask=attention_mask,
            position_ids=positions,
            past_key_values=self.cache,
            use_cache=True,
            logits_to_keep=keep,
            **self.given,
        ).logits


def _state_of(model: nn.Module) -> list[Any]:
    """What a copy for inference is made of: another list after a change of weights, dtypes, modules or hooks."""
    weights = [(one.data_ptr(), one.dtype, None if one.is_inference() else one._version) for one in model.parameters()]
    hooks = [[[*getattr(one, kind)] for kind in HOOKS] for one in model.modules()]
    return [*weights, *hooks, *((id(one), vars(one).get("forward")) for one in model.modules())]


def logits_warpers(
    temperature: float, top_k: int | None, top_p: float | None, min_p: float | None = None
) -> LogitsProcessorList:
    """Return what turns logits into those to sample from."""
    chosen: list[tuple[Any, Callable[[Any], LogitsProcessor], Any]] = [
        (temperature != 1.0, generation.TemperatureLogitsWarper, temperature),
        (top_k, generation.TopKLogitsWarper, top_k),
        (top_p is not None and top_p < 1.0, generation.TopPLogitsWarper, top_p),
        (min_p, generation.MinPLogitsWarper, min_p),
    ]
    return LogitsProcessorList(make(value) for used, make, value in chosen if used)


class CountPenalty(LogitsProcessor):
    """Lower the logits of tokens in an answer: by `frequency` for every time, and by `presence` once."""

    def __init__(self, start: int, frequency: float, presence: float):
        """start: the place of the answer's first token."""
        self._start, self._frequency, self._presence = start, frequency, presence

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        counts = torch.bincount(input_ids[0, self._start :], minlength=scores.shape[-1])
        return scores - self._frequency * counts - self._presence * (counts > 0)


def _check_model(model: Any) -> None:
    config = getattr(model, "config", None)
    ours = getattr(config, "model_type", None) == LeanConfig.model_type
    if not ours or not hasattr(model, "can_generate") or not model.can_generate():
        raise ValueError(
            f"a {type(model).__name__} cannot be decoded, only a LeanForCausalLM; `leanqkv import` makes one of a "
            "checkpoint of transformers"
        )
    if any(isinstance(module, FewRowsLinear) for module in model.modules()):
        raise ValueError("this model is a Decoder's own copy; give the model that it was made of")
    if getattr(getattr(model, "active_peft_config", None), "is_prompt_learning", False):
        raise ValueError(
            f"this {type(model).__name__} puts trained tokens before every prompt, which a Decoder does not; use "
            "model.generate"
        )


def _check_prompt(input_ids: Tensor, attention_mask: Tensor | None, room: int) -> None:
    shape, dtype = list(input_ids.shape), str(input_ids.dtype).removeprefix("torch.")
    if len(shape) != 2 or dtype not in ("int64", "int32"):
        raise ValueError(f"the prompt is {dtype} of shape {shape}; give token ids [batch, length] as int64 or int32")
    if not shape[0]:
        raise ValueError("the batch is empty; give at least one prompt")
    if not shape[1]:
        raise ValueError("the prompt is empty; give at least one token")
    if attention_mask is not None and list(attention_mask.shape) != shape:
        raise ValueError(f"attention_mask has shape {list(attention_mask.shape)}; give it the prompt's, {shape}")
    if room < 0:
        raise ValueError(f"room is {room} tokens; give 0 or more")
