"""Small GGUF files, written as llama.cpp's converter writes them, from random models of transformers."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
import transformers
from shapes import randomize
from tokenizers.pre_tokenizers import ByteLevel

from leanqkv.data.tokenizer import END_OF_TEXT, train_tokenizer

VOCABULARY = 300
TEXT = ["def function(argument):\n    return argument + 12\n"] * 50
SIZES = {"vocab_size": VOCABULARY, "num_hidden_layers": 2, "num_attention_heads": 4, "hidden_size": 64}
GROUPED = SIZES | {"intermediate_size": 96, "num_key_value_heads": 2, "max_position_embeddings": 64}
# Heads whose width is not the hidden size over their number, and nothing tied, where the class has that.
CONFIGS: dict[str, transformers.PreTrainedConfig] = {
    "llama": transformers.LlamaConfig(**GROUPED, rope_parameters={"rope_type": "default", "rope_theta": 5e4}),
    "qwen2": transformers.Qwen2Config(**GROUPED, tie_word_embeddings=True),
    "qwen3": transformers.Qwen3Config(**GROUPED, head_dim=32),
    "gpt2": transformers.GPT2Config(
        vocab_size=VOCABULARY,
        n_layer=2,
        n_head=4,
        n_embd=64,
        n_positions=64,
        n_inner=96,
        bos_token_id=0,
        eos_token_id=0,
    ),
}
# The sixth layer has no window; 32 is no default width of a head, which the scale of attention follows.
CONFIGS["gemma3"] = transformers.Gemma3TextConfig(
    **{**GROUPED, "num_hidden_layers": 6}, head_dim=32, query_pre_attn_scalar=32, sliding_window=8
)
CHAT = "{% for message in messages %}<{{ message['role'] }}>{{ message['content'] }}{% endfor %}"


def random_model(architecture: str, **changes: Any) -> transformers.PreTrainedModel:
    """A model of transformers whose every weight is drawn, in float32."""
    config = type(CONFIGS[architecture])(**{**CONFIGS[architecture].to_dict(), **changes})
    return randomize(transformers.AutoModelForCausalLM.from_config(config), std=0.1).eval()


def metadata(architecture: str, config: transformers.PreTrainedConfig) -> dict[str, Any]:
    """The metadata that llama.cpp's converter writes, tokenizer included."""
    about: dict[str, Any] = {
        "context_length": config.max_position_embeddings,
        "block_count": config.num_hidden_layers,
        "embedding_length": config.hidden_size,
        "attention.head_count": config.num_attention_heads,
    }
    if architecture == "gpt2":
        about |= {"feed_forward_length": config.n_inner, "attention.layer_norm_epsilon": config.layer_norm_epsilon}
    else:
        about |= {
            "feed_forward_length": config.intermediate_size,
            "attention.head_count_kv": config.num_key_value_heads,
            "attention.layer_norm_rms_epsilon": config.rms_norm_eps,
            "rope.freq_base": config.rope_parameters.get("full_attention", config.rope_parameters)["rope_theta"],
        }
    if architecture == "gemma3":
        about["attention.sliding_window"] = config.sliding_window
    if architecture in ("qwen3", "gemma3"):
        about |= {"attention.key_length": config.head_dim, "attention.value_length": config.head_dim}
    if architecture == "llama":
        about |= {"vocab_size": config.vocab_size, "rope.dimension_count": config.head_dim}
    pre = "qwen2" if architecture.startswith("qwen") else "gpt-2"
    return {
        "general.architecture": architecture,
        "general.name": "tiny",
        **{f"{architecture}.{key}": value for key, value in about.items()},
        **{f"tokenizer.{key}": value for key, value in byte_level_vocabulary(pre).items()},
    }


def byte_level_vocabulary(pre: str) -> dict[str, Any]:
    """A byte-level BPE of VOCABULARY tokens; those that training did not need are unused ones."""
    trained = train_tokenizer(iter(TEXT), VOCABULARY)
    ids = trained.get_vocab()
    tokens = sorted(ids, key=ids.__getitem__)
    unused = [f"[PAD{i}]" for i in range(len(tokens), VOCABULARY)]
    merges = json.loads(trained.backend_tokenizer.to_str())["model"]["merges"]
    assert set(tokens) >= set(ByteLevel.alphabet())
    return {
        "ggml.model": "gpt2",
        "ggml.pre": pre,
        "ggml.tokens": tokens + unused,
        "ggml.token_type": [3 if token == END_OF_TEXT else 1 for token in tokens] + [5] * len(unused),
        "ggml.merges": [" ".join(merge) for merge in merges],
        "ggml.bos_token_id": ids[END_OF_TEXT],
        "ggml.eos_token_id": ids[END_OF_TEXT],
        "ggml.padding_token_id": ids[END_OF_TEXT],
        "chat_template": CHAT,
    }


def stored_tensors(architecture: str, model: transformers.PreTrainedModel) -> dict[str, np.ndarray]:
    """The tensors of a model in float32 as llama.cpp has them: other names, W_Q and W_K of LLaMA in pairs of rows."""
    number = {name: number for number, name in gguf.MODEL_ARCH_NAMES.items()}[architecture]
    names = gguf.get_tensor_name_map(number, model.config.num_hidden_layers)
    stored = {}
    for name, tensor in model.state_dict().items():
        module, _, kind = name.rpartition(".")
        if name == "lm_head.weight" and model.config.tie_word_embeddings:
            continue
        values, module = tensor.float().numpy(), names.get_name(module)
        if architecture == "gpt2" and module.startswith("blk.") and values.ndim == 2:
            values = values.T
        if architecture == "llama" and (part := module.rpartition(".")[2]) in ("attn_q", "attn_k"):
            heads = model.config.num_attention_heads if part == "attn_q" else model.config.num_key_value_heads
            halves = values.reshape(heads, 2, -1, *values.shape[1:])
            values = halves.swapaxes(1, 2).reshape(values.shape)
        if architecture == "gemma3" and name.endswith("norm.weight"):
            values = values + 1
        stored[f"{module}.{kind}"] = np.ascontiguousarray(values)
    return stored


def write(
    path: Path, about: Mapping[str, Any], tensors: Mapping[str, np.ndarray], kind: str = "F32", **kinds: str
) -> Path:
    """Write a file whose matrices are of type `kind`, where they can be; vectors are always in float32."""
    writer = gguf.GGUFWriter(path, about["general.architecture"])
    for key, value in about.items():
        if key != "general.architecture" and value is not None:
            add_value(writer, key, value)
    for name, values in tensors.items():
        wanted = gguf.GGMLQuantizationType[kinds.get(name.split(".")[-2], kind)]
        block = gguf.GGML_QUANT_SIZES[wanted][0]
        if values.ndim == 1 or values.shape[-1] % block:
            wanted = gguf.GGMLQuantizationType.F32
        writer.add_tensor(name, gguf.quants.quantize(values, wanted), raw_dtype=wanted)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def add_value(writer: gguf.GGUFWriter, key: str, value: Any) -> None:
    """Add a value with the type that llama.cpp gives to values of its kind."""
    if isinstance(value, str):
        writer.add_string(key, value)
    elif isinstance(value, bool):
        writer.add_bool(key, value)
    elif isinstance(value, int):
        writer.add_uint32(key, value)
    elif isinstance(value, float):
        writer.add_float32(key, value)
    else:
        writer.add_array(key, value)


def write_model(path: Path, architecture: str, kind: str = "F32", **changes: Any) -> transformers.PreTrainedModel:
    """Write a random model and return it; with BF16 or F16 its weights are rounded to that."""
    model = random_model(architecture, **changes)
    if kind in ("F16", "BF16"):
        for parameter in model.parameters():  # the frequencies of rotary positions stay as they are
            parameter.data = parameter.to({"F16": torch.float16, "BF16": torch.bfloat16}[kind]).float()
    write(path, metadata(architecture, model.config), stored_tensors(architecture, model), kind)
    return model
