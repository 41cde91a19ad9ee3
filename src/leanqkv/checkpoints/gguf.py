"""A GGUF file as a checkpoint of the class of transformers that it was made from: configuration and tensors."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from math import inf
from typing import Any

import torch
from torch import Tensor
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from ..errors import LeanError, needs
from .families import FAMILIES
from .families.family import Packed
from .gguf_format import PLAIN, Array, GgufFile
from .tensors import Stored, StoredTensors, some

ROPE_FACTORS = "rope_freqs.weight"

# Settings of every architecture here, those after its name in the file -> those of transformers.
COMMON = {
    "context_length": "max_position_embeddings",
    "block_count": "num_hidden_layers",
    "embedding_length": "hidden_size",
    "attention.head_count": "num_attention_heads",
}
GROUPED = COMMON | {
    "feed_forward_length": "intermediate_size",
    "attention.head_count_kv": "num_key_value_heads",
    "attention.key_length": "head_dim",
    "attention.layer_norm_rms_epsilon": "rms_norm_eps",
}
OPTIONAL = ("attention.head_count_kv", "attention.key_length", "attention.sliding_window")
ROPE = tuple(
    f"rope.{key}" for key in ("freq_base", "scaling.type", "scaling.factor", "scaling.original_context_length")
)
# Settings that say nothing, or nothing with this value.
NEUTRAL = {"expert_count": 0, "expert_used_count": 0, "attention.causal": True}
CHECKED_OR_HISTORY = (
    *("vocab_size", "attention.value_length", "rope.dimension_count"),
    *("rope.scaling.finetuned", "tensor_data_layout"),
)


def _implied_by_gemma3(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the divisor of attention's logits, squared, and the kinds of layers where the file has no window.

    llama.cpp knows the one size with another divisor, too. Its converter leaves the window out where no layer has one.
    """
    layers = config["num_hidden_layers"]
    implied = {"query_pre_attn_scalar": _head_dim(config) if layers == 62 else config["head_dim"]}
    return implied if "sliding_window" in config else implied | {"layer_types": ["full_attention"] * layers}


@dataclass(frozen=True)
class Architecture:
    """An architecture of llama.cpp in terms of a family of transformers."""

    model_type: str
    settings: Mapping[str, str] = field(default_factory=lambda: GROUPED)
    rotary: bool = True
    # Whether the rows of W_Q and W_K are stored in pairs that rotate together, not in halves of a head.
    paired: bool = False
    # Whether norms are stored with the 1 that the class adds to them.
    norm_offset: bool = False
    # Of layers with a window: the base of their rotary positions, where the file does not say it.
    local_rope_theta: float | None = None
    # Settings that no file holds, from those that are read.
    implied: Callable[[Mapping[str, Any]], dict[str, Any]] = lambda config: {}


ARCHITECTURES = {
    "llama": Architecture("llama", paired=True),  # Mistral's files say "llama", too
    "qwen2": Architecture("qwen2"),
    "qwen3": Architecture("qwen3"),
    "gpt2": Architecture(
        "gpt2",
        COMMON | {"feed_forward_length": "n_inner", "attention.layer_norm_epsilon": "layer_norm_epsilon"},
        rotary=False,
    ),
    "gemma3": Architecture(
        "gemma3_text",
        GROUPED | {"attention.sliding_window": "sliding_window"},
        norm_offset=True,
        local_rope_theta=10_000.0,
        implied=_implied_by_gemma3,
    ),
}


class GgufCheckpoint(GgufFile):
    """A GGUF file whose architecture is a class of transformers."""

    @property
    def architecture(self) -> Architecture:
        """Return its architecture; raise a LeanError for one that cannot be opened."""
        name = self.required("general.architecture")
        if name not in ARCHITECTURES:
            raise LeanError(
                f"{self.path} holds a model of architecture {name!r}; only {', '.join(ARCHITECTURES)} can be opened"
            )
        return ARCHITECTURES[name]

    def config(self) -> dict[str, Any]:
        """Return the config.json of the class of transformers that the file was made from.

        Raises a LeanError for a setting that is missing, contradicts the tensors, or cannot be expressed; names it.
        """
        architecture, prefix = self.architecture, f"{self.metadata['general.architecture']}."
        self._check_settings(architecture, prefix)
        config: dict[str, Any] = {"model_type": architecture.model_type, "vocab_size": self._vocabulary(prefix)}
        for key, setting in architecture.settings.items():
            if key not in OPTIONAL or prefix + key in self.metadata:
                config[setting] = self._number(prefix + key)
        if "attention.head_count_kv" in architecture.settings:
            config.setdefault("num_key_value_heads", config["num_attention_heads"])
        # Compared with the tensors before anything of that many layers is built.
        layers = config["num_hidden_layers"]
        if (found := len({name.split(".")[1] for name in self.entries if name.startswith("blk.")})) != layers:
            raise LeanError(f"{self.path}: {prefix}block_count is {layers!r}, the tensors are those of {found} layers")
        if architecture.rotary:
            config.setdefault("head_dim", _head_dim(config))
            config["rope_parameters"] = self._rope(architecture, prefix, config["head_dim"])
        for module, setting in (("attn_q", "attention_bias"), ("ffn_up", "mlp_bias")):
            if setting in FAMILIES[architecture.model_type].biases.values():
                config[setting] = f"blk.0.{module}.bias" in self.entries
        config["tie_word_embeddings"] = "output.weight" not in self.entries
        return config | architecture.implied(config) | self._special_tokens(config)

    def tensors(self, tensor_map: Sequence[Packed], config: Mapping[str, Any]) -> StoredTensors:
        """Return the file's tensors under the names of transformers, which `tensor_map` has.

        Raises a LeanError for tensors that are missing or unknown; names them as the file does.
        """
        architecture = self.architecture
        names = _stored_names(self.metadata["general.architecture"], tensor_map, config["num_hidden_layers"])
        expected = {names[packed.name] for packed in tensor_map}
        found = {name for name in self.entries if name != ROPE_FACTORS or not architecture.rotary}
        for what, wrong in (("lacks", expected - found), ("has unknown", found - expected)):
            if wrong:
                raise LeanError(f"{self.path} {what} tensors: {some(sorted(wrong))}")
        heads = {"attn_q": config["num_attention_heads"], "attn_k": config.get("num_key_value_heads", 0)}

        def stored(packed: Packed) -> Stored:
            """Return a tensor as transformers has it: the file may have it transposed, in other rows, or plus 1."""
            name = names[packed.name]
            entry = self.entries[name]
            paired_heads = heads.get(name.split(".")[-2], 0) if architecture.paired else 0
            offset = architecture.norm_offset and name.endswith("norm.weight")

            def read() -> Tensor:
                tensor = self.read(name)
                if paired_heads:
                    tensor = tensor.unflatten(0, (paired_heads, -1, 2)).transpose(1, 2).flatten(0, 2)
                tensor = tensor.T if packed.transposed else tensor
                return (tensor - 1 if offset else tensor).contiguous()

            shape = entry.shape[::-1] if packed.transposed else entry.shape
            return Stored(self.path, shape, PLAIN.get(entry.kind, torch.float32), read)

        return StoredTensors(self.path, _narrowed({packed.name: stored(packed) for packed in tensor_map}), "metadata")

    def _number(self, key: str, default: float | None = None) -> Any:
        """Return the metadata `key`; raise a LeanError if it is missing without a default, or not above 0."""
        value = self.required(key) if default is None or key in self.metadata else default
        if isinstance(value, str | bool) or not 0 < value < inf:
            raise LeanError(f"{self.path}: {key} is {value!r}, no number above 0")
        return value

    def _check_settings(self, architecture: Architecture, prefix: str) -> None:
        """Refuse what cannot be expressed: a setting that is not known may change the function."""
        known = {*architecture.settings, *CHECKED_OR_HISTORY, *(ROPE if architecture.rotary else ())}
        known |= {"rope.freq_base_swa"} if architecture.local_rope_theta else set()
        for key, value in self.metadata.items():
            setting = key.removeprefix(prefix)
            if key.startswith(prefix) and setting not in known and NEUTRAL.get(setting) != value:
                raise LeanError(f"{self.path}: {key} {value!r} cannot be expressed here")

    def _vocabulary(self, prefix: str) -> int:
        """Return the number of tokens, on which tokenizer, metadata and embedding must agree."""
        embedding = self.entries.get("token_embd.weight")
        counts = {"token_embd.weight": embedding.shape[0]} if embedding is not None else {}
        if isinstance(tokens := self.metadata.get("tokenizer.ggml.tokens"), Array):
            counts["tokenizer.ggml.tokens"] = tokens.length
        if f"{prefix}vocab_size" in self.metadata:
            counts[f"{prefix}vocab_size"] = self.required(f"{prefix}vocab_size")
        if not counts:
            raise LeanError(f"{self.path} lacks tensors: token_embd.weight")
        if len(set(counts.values())) > 1:
            found = ", ".join(f"{count} by {name}" for name, count in counts.items())
            raise LeanError(f"{self.path} contradicts itself on the number of tokens: {found}")
        return next(iter(counts.values()))

    def _rope(self, architecture: Architecture, prefix: str, head_dim: int) -> dict[str, Any]:
        for key in ("attention.value_length", "rope.dimension_count"):
            if (found := self.metadata.get(prefix + key, head_dim)) != head_dim:
                raise LeanError(
                    f"{self.path}: {prefix}{key} is {found}; only that of a whole head, {head_dim}, is read"
                )
        theta = self._number(f"{prefix}rope.freq_base", 10_000.0)
        # llama.cpp takes a factor without a type for that of linear scaling.
        unnamed = "linear" if f"{prefix}rope.scaling.factor" in self.metadata else "none"
        kind = self.metadata.get(f"{prefix}rope.scaling.type", unnamed)
        scaling: dict[str, Any] = {"rope_type": "default"}
        if kind in ("linear", "yarn"):
            scaling = {"rope_type": kind, "factor": self._number(f"{prefix}rope.scaling.factor")}
            if kind == "yarn":
                length = self._number(f"{prefix}rope.scaling.original_context_length")
                scaling["original_max_position_embeddings"] = length
        elif kind != "none":
            raise LeanError(f"{self.path}: {prefix}rope.scaling.type {kind!r} cannot be expressed here")
        if ROPE_FACTORS in self.entries:
            scaling = self._llama3_scaling(scaling, theta, head_dim)
        rope = {**scaling, "rope_theta": theta}
        if architecture.local_rope_theta is None:
            return rope
        base = self._number(f"{prefix}rope.freq_base_swa", architecture.local_rope_theta)
        local = {"rope_type": "default", "rope_theta": base}
        return {"full_attention": rope, "sliding_attention": local}

    def _llama3_scaling(self, scaling: dict[str, Any], theta: float, head_dim: int) -> dict[str, Any]:
        """Return the settings of LLaMA 3.1 to 3.3 that the stored divisors of the frequencies were computed from."""
        divisors = self.read(ROPE_FACTORS).float()
        shape = (head_dim // 2,)
        if scaling == {"rope_type": "default"} and divisors.shape == shape and divisors.isfinite().all():
            scaling = {
                "rope_type": "llama3",
                "factor": round(divisors.max().item(), 3),
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 8192,
            }
            plain = theta ** (-torch.arange(0, head_dim, 2).float() / head_dim)
            if torch.allclose(_frequencies(scaling, theta, head_dim), plain / divisors, rtol=1e-5, atol=0):
                return scaling
        raise LeanError(f"{self.path}: {ROPE_FACTORS} are not the factors of LLaMA 3.1 and cannot be expressed here")

    def _special_tokens(self, config: Mapping[str, Any]) -> dict[str, Any]:
        """Return the ids of the tokens that begin, end and fill a text; one that ends a turn ends a text, too."""
        ids = {}
        for name in ("bos", "eos", "eot", "padding"):
            ids[name] = token = self.metadata.get(f"tokenizer.ggml.{name}_token_id")
            if token is not None and not (isinstance(token, int) and 0 <= token < config["vocab_size"]):
                raise LeanError(
                    f"{self.path}: tokenizer.ggml.{name}_token_id is {token!r}, there are {config['vocab_size']} tokens"
                )
        ends = [token for token in dict.fromkeys((ids["eos"], ids["eot"])) if token is not None]
        end = ends if len(ends) > 1 else next(iter(ends), None)
        return {"bos_token_id": ids["bos"], "eos_token_id": end, "pad_token_id": ids["padding"]}


def _narrowed(stored: dict[str, Stored]) -> dict[str, Stored]:
    """Return the tensors with norms and biases, always stored in float32, in float16 or bfloat16 where all matrices are
    that and the values are the same in it."""
    matrices = {tensor.dtype for tensor in stored.values() if len(tensor.shape) > 1}
    if len(matrices) != 1 or (narrow := matrices.pop()) == torch.float32:
        return stored
    return {
        name: tensor._replace(dtype=narrow) if len(tensor.shape) == 1 and _holds(narrow, tensor.read()) else tensor
        for name, tensor in stored.items()
    }


def _stored_names(architecture: str, tensor_map: Sequence[Packed], layers: int) -> dict[str, str]:
    """Return the names of transformers -> those in the file."""
    gguf = needs("gguf", "gguf")
    number = next(number for number, name in gguf.MODEL_ARCH_NAMES.items() if name == architecture)
    modules = gguf.get_tensor_name_map(number, layers)
    return {packed.name: modules.get_name(packed.name, (".weight", ".bias")) for packed in tensor_map}


def _head_dim(config: Mapping[str, Any]) -> int:
    return int(config["hidden_size"] // config["num_attention_heads"])


def _frequencies(scaling: dict[str, Any], theta: float, head_dim: int) -> Tensor:
    """Return the frequencies that transformers computes, [head_dim / 2]."""
    config = LlamaConfig(
        hidden_size=head_dim, num_attention_heads=1, head_dim=head_dim, rope_parameters={**scaling, "rope_theta": theta}
    )
    return ROPE_INIT_FUNCTIONS[scaling["rope_type"]](config, "cpu")[0]


def _holds(dtype: torch.dtype, tensor: Tensor) -> bool:
    return torch.equal(tensor.to(dtype).to(tensor.dtype), tensor)
