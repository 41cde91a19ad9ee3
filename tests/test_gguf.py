"""GGUF files: the same function and tokens as in transformers, by every command, and what is refused."""

import json
import math
import os
import random
import struct
import sys
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
import transformers
from corpus import write_corpus
from gguf_files import (
    CHAT,
    CONFIGS,
    metadata,
    random_model,
    stored_tensors,
    write,
    write_model,
)
from refusing import refused
from shapes import assert_near, tokens
from transformers import AutoModelForCausalLM, AutoTokenizer

from leanqkv.checkpoints.gguf import GgufCheckpoint
from leanqkv.checkpoints.gguf_tokenizer import CUTTINGS, load_tokenizer
from leanqkv.checkpoints.open import load_model, open_checkpoint
from leanqkv.data.tokenizer import train_tokenizer
from leanqkv.errors import LeanError

# Of two implementations of the eight or so sums of a layer in float32.
TOLERANCE_OF_A_LAYER = 8 * torch.finfo(torch.float32).eps
DTYPES = {"F16": torch.float16, "BF16": torch.bfloat16}


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """An empty directory, in which the test runs."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("LEANQKV_CACHE", str(tmp_path / "cache"))
    return tmp_path


@pytest.fixture
def tiny(folder):
    """The path of a small LLaMA, in float32."""
    write_model(folder / "tiny.gguf", "llama")
    return Path("tiny.gguf")


def stock(path: Path, **options) -> transformers.PreTrainedModel:
    """What transformers makes of a file."""
    return AutoModelForCausalLM.from_pretrained(
        path.absolute().parent, gguf_file=path.name, dtype=torch.float32, **options
    ).eval()


@torch.no_grad()
def assert_same_function(path: Path, model: transformers.PreTrainedModel) -> None:
    ids = tokens(2, 24, vocab_size=model.config.vocab_size)
    ours = load_model(open_checkpoint(path), torch.float32)
    assert_near(ours(ids).logits, model(ids).logits, TOLERANCE_OF_A_LAYER * model.config.num_hidden_layers)


# --- the function -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1"])
@pytest.mark.parametrize("architecture", CONFIGS)
def test_a_file_is_the_function_that_transformers_makes_of_it(folder, architecture, kind):
    path = folder / "model.gguf"
    model = write_model(path, architecture, kind)
    # transformers does not read the width of a head of Qwen3.
    assert_same_function(path, stock(path, config=model.config))
    if kind in ("F32", *DTYPES):
        assert_same_function(path, model)
    opened = open_checkpoint(path)
    assert opened.dtype == DTYPES.get(kind, torch.float32)
    assert opened.config.tie_word_embeddings == model.config.tie_word_embeddings
    assert opened.config.eos_token_id == opened.config.bos_token_id == 0


@pytest.mark.parametrize("kind", ["Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "IQ4_NL", "IQ4_XS", "TQ2_0", "MXFP4"])
def test_every_type_that_the_package_knows_is_dequantized(folder, kind):
    model = random_model("llama", hidden_size=256, head_dim=64, intermediate_size=256)
    tensors, quantized = stored_tensors("llama", model), gguf.GGMLQuantizationType[kind]
    path, generator = folder / "model.gguf", np.random.default_rng(0)
    write(path, metadata("llama", model.config), tensors, "Q8_0")
    writer = gguf.GGUFWriter(path, "llama")
    from gguf_files import add_value

    for key, value in metadata("llama", model.config).items():
        if key != "general.architecture":
            add_value(writer, key, value)
    for name, values in tensors.items():
        if values.ndim == 1:
            writer.add_tensor(name, values)
        else:  # bytes of which no two are a half that is infinite or NaN
            shape = gguf.quants.quant_shape_to_byte_shape(values.shape, quantized)
            writer.add_tensor(name, generator.integers(0, 0x30, shape, dtype=np.uint8), raw_dtype=quantized)
    for step in (writer.write_header_to_file, writer.write_kv_data_to_file, writer.write_tensors_to_file, writer.close):
        step()
    stored, state = open_checkpoint(path).stored, stock(path).state_dict()
    assert set(stored) == set(state)
    for name, tensor in state.items():
        assert torch.equal(stored[name], tensor), name
        assert tensor.std() > 0


VARIANTS = {
    "biases": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "tied": ("llama", {"tie_word_embeddings": True}),
    "one key for all": ("llama", {"num_key_value_heads": 1}),
    "wide heads": ("llama", {"head_dim": 24}),
    "untied": ("qwen2", {"tie_word_embeddings": False}),
    "base 1e6": ("qwen3", {"rope_parameters": {"rope_type": "default", "rope_theta": 1e6}}),
}


@pytest.mark.parametrize("variant", VARIANTS)
def test_variants_of_an_architecture(folder, variant):
    architecture, changes = VARIANTS[variant]
    model = random_model(architecture, **changes)
    about = metadata(architecture, model.config)
    about |= (
        {f"{architecture}.attention.{part}_length": model.config.head_dim for part in ("key", "value")}
        if ("head_dim" in changes)
        else {}
    )
    assert_same_function(write(folder / "model.gguf", about, stored_tensors(architecture, model)), model)


LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
    "rope_theta": 5e5,
}


def rope_factors(parameters: dict) -> np.ndarray:
    """The divisors of frequencies that llama.cpp's converter writes for LLaMA 3."""
    config = transformers.LlamaConfig(hidden_size=64, num_attention_heads=1, rope_parameters=dict(parameters))
    scaled, _ = transformers.modeling_rope_utils.ROPE_INIT_FUNCTIONS["llama3"](config, "cpu")
    plain = parameters["rope_theta"] ** (-torch.arange(0, 64, 2).float() / 64)
    return (plain / scaled).numpy()


@pytest.mark.parametrize("kind", ["linear", "yarn", "llama3"])
def test_scaled_positions(folder, kind):
    rope = {"rope_type": kind, "factor": 4.0, "rope_theta": 1e4}
    stored = {"llama.rope.scaling.type": kind, "llama.rope.scaling.factor": 4.0}
    if kind == "yarn":
        rope["original_max_position_embeddings"] = 16
        stored["llama.rope.scaling.original_context_length"] = 16
    if kind == "llama3":
        rope, stored = LLAMA3, {}
    sizes = {"hidden_size": 128, "num_attention_heads": 2, "head_dim": 64}
    model = random_model("llama", rope_parameters=rope, **sizes)
    tensors = stored_tensors("llama", model)
    if kind == "llama3":
        tensors["rope_freqs.weight"] = rope_factors(rope)
    path = write(folder / "model.gguf", metadata("llama", model.config) | stored, tensors)
    assert_same_function(path, model)
    plain = random_model("llama", rope_parameters={"rope_type": "default", "rope_theta": rope["rope_theta"]}, **sizes)
    with pytest.raises(AssertionError, match="off by"):
        assert_same_function(path, plain)


def test_a_factor_without_a_type_is_of_linear_scaling(folder):
    rope = {"rope_type": "linear", "factor": 4.0, "rope_theta": 5e4}
    model = random_model("llama", rope_parameters=rope)
    about = metadata("llama", model.config) | {"llama.rope.scaling.factor": 4.0}
    assert_same_function(write(folder / "model.gguf", about, stored_tensors("llama", model)), model)


def test_gemma_without_a_window_has_none_in_any_layer(folder):
    model = random_model("gemma3", layer_types=["full_attention"] * 6)
    about = metadata("gemma3", model.config)
    del about["gemma3.attention.sliding_window"]
    path = write(folder / "model.gguf", about, stored_tensors("gemma3", model))
    assert {layer.window for layer in open_checkpoint(path).config.plan.layers} == {None}
    assert_same_function(path, model)


def test_norms_that_the_matrices_dtype_cannot_hold_stay_in_float32(folder):
    model = random_model("llama")
    for parameter in model.parameters():
        parameter.data = parameter.bfloat16().float()
    model.model.norm.weight.data += 2**-20
    path = write(folder / "model.gguf", metadata("llama", model.config), stored_tensors("llama", model), "BF16")
    opened = open_checkpoint(path)
    assert opened.dtype == torch.float32
    assert opened.stored.dtypes["model.layers.0.input_layernorm.weight"] == torch.bfloat16
    assert_same_function(path, model)


def test_opening_reads_no_tensor(folder, monkeypatch):
    write_model(folder / "model.gguf", "llama", "Q8_0")
    read: list[str] = []
    monkeypatch.setattr(GgufCheckpoint, "read", lambda self, name: read.append(name))
    opened = open_checkpoint(folder / "model.gguf")
    assert not read
    with pytest.raises(AttributeError):
        opened.tensors["model.layers.0.self_attn.q_proj.weight"]
    assert read == ["blk.0.attn_q.weight"]


# --- the tokenizer ----------------------------------------------------------------------------------------------------

TEXTS = (
    "def function(argument):\n\n    return argument + 3.14\t12345",
    "naïve café 漢字 🙂\r\n don't   WON'T",
    "<|endoftext|>text<|endoftext|>",
)


@pytest.mark.parametrize("architecture", CONFIGS)
def test_the_tokenizer_is_the_one_that_transformers_makes(folder, architecture):
    if architecture == "gemma3" and transformers.__version__.startswith("5.17."):
        pytest.skip("transformers 5.17 cannot read this tokenizer")
    write_model(folder / "model.gguf", architecture)
    theirs, ours = AutoTokenizer.from_pretrained(folder, gguf_file="model.gguf"), load_tokenizer(Path("model.gguf"))
    assert ours.chat_template == CHAT
    assert ours.eos_token_id == theirs.eos_token_id == 0
    for text in TEXTS:
        ids = ours(text)["input_ids"]
        assert ids == theirs(text)["input_ids"]
        assert ours.decode(ids, skip_special_tokens=False) == text


# A text's pieces, as the tokenizer.json of the model cuts it.
PIECES = {
    "gpt-2": ["a", " ", " 1234", " ,.", "\n", " x"],
    "smollm": ["a", "  ", "1", "2", "3", "4", " ,.", "\n", " x"],
    "llama-bpe": ["a", " ", " ", "123", "4", " ,.\n", " x"],
    "qwen2": ["a", " ", " ", "1", "2", "3", "4", " ,.\n", " x"],
    "tekken": ["a", " ", " ", "1", "2", "3", "4", " ,.\n", " x"],
}


@pytest.mark.parametrize("pre", PIECES)
def test_text_is_cut_as_the_vocabulary_was_trained(folder, pre):
    assert {CUTTINGS[name] for name in PIECES} == set(CUTTINGS.values())
    model = random_model("llama")
    about = metadata("llama", model.config) | {"tokenizer.ggml.pre": pre}
    write(folder / "model.gguf", about, stored_tensors("llama", model))
    tokenizer = load_tokenizer(Path("model.gguf"))
    tokenizer.save_pretrained("saved")
    for loaded in (tokenizer, AutoTokenizer.from_pretrained("saved")):
        backend = loaded.backend_tokenizer
        pieces = [piece for piece, _ in backend.pre_tokenizer.pre_tokenize_str("a  1234 ,.\n x")]
        assert [piece.replace("Ġ", " ").replace("Ċ", "\n") for piece in pieces] == PIECES[pre]
        assert loaded("a")["input_ids"][:-1] == ([loaded.bos_token_id] if pre in ("llama-bpe", "tekken") else [])
        assert backend.model.ignore_merges == (pre in ("llama-bpe", "tekken"))
        assert (backend.encode("e\u0301").ids == backend.encode("é").ids) == (pre == "qwen2")


def sentencepiece() -> dict:
    """A vocabulary of SentencePiece, with bytes for what it lacks."""
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    kinds = [2, 3, 3] + [6] * 256
    words = ["▁", "a", "b", "ab", "▁a", "▁ab", "1"]
    pieces += words + [f"[PAD{i}]" for i in range(300 - len(pieces) - len(words))]
    scores = [0.0] * 259 + [-float(i) for i in range(len(words))] + [-1000.0] * (300 - 259 - len(words))
    kinds += [1] * len(words) + [5] * (300 - 259 - len(words))
    names = {"model": "llama", "tokens": pieces, "scores": scores, "token_type": kinds}
    ids = {"bos_token_id": 1, "eos_token_id": 2, "unknown_token_id": 0, "padding_token_id": None}
    nothing = {"merges": None, "pre": "default"}
    return {f"tokenizer.ggml.{key}": value for key, value in {**names, **ids, **nothing}.items()}


def test_a_sentencepiece_vocabulary(folder, cli):
    model = random_model("llama")
    write(folder / "model.gguf", metadata("llama", model.config) | sentencepiece(), stored_tensors("llama", model))
    assert cli("import", "model.gguf", "--out", "saved")[0] == 0
    for tokenizer in (load_tokenizer(Path("model.gguf")), AutoTokenizer.from_pretrained("saved")):
        ids = tokenizer("ab aé1")["input_ids"]
        assert tokenizer.convert_ids_to_tokens(ids) == ["<s>", "▁ab", "▁a", "<0xC3>", "<0xA9>", "1"]
        assert tokenizer.decode(ids, skip_special_tokens=True) == "ab aé1"


def test_no_space_in_front_is_right_or_refused(folder):
    rewritten(sentencepiece() | {"tokenizer.ggml.add_space_prefix": False})
    try:
        tokenizer = load_tokenizer(Path("tiny.gguf"))
    except LeanError as error:
        assert "tokenizer.ggml.add_space_prefix False cannot be read" in str(error)
    else:
        assert tokenizer.tokenize("ab") == ["ab"]


def test_another_tokenizer_beside_the_file_is_not_taken(tiny):
    for name in ("tokenizer.json", "tokenizer_config.json", "config.json"):
        Path(name).write_text("{")
    assert load_tokenizer(tiny)("def")["input_ids"]


def test_two_models_are_compared_if_their_tokens_are_the_same(folder, tiny, cli):
    """A file's tokens are those of the directory made of it, however that writes them down, but not of another one."""
    Path("corpus.txt").write_text(write_corpus(folder / "corpus.txt").read_text()[:3000])
    assert cli("import", "tiny.gguf", "--out", "imported")[0] == 0
    tokenizer = Path("imported/tokenizer.json")
    tokenizer.write_text(json.dumps(json.loads(tokenizer.read_text())))
    command = ("eval", "imported", "--against", "tiny.gguf", "--data", "corpus.txt", "--device", "cpu")
    assert cli(*command)[0] == 0
    train_tokenizer(iter(["another text, with other merges"]), 290).save_pretrained("imported")
    code, _, err = cli(*command)
    assert code == 2 and "--against tiny.gguf has another tokenizer" in err


def test_a_token_that_ends_a_turn_ends_the_answer(folder):
    model = random_model("llama")
    about = metadata("llama", model.config) | {"tokenizer.ggml.eot_token_id": 5}
    opened = open_checkpoint(write(folder / "model.gguf", about, stored_tensors("llama", model)))
    assert opened.config.eos_token_id == [0, 5]
    assert load_model(opened).generation_config.eos_token_id == [0, 5]


# --- the commands -----------------------------------------------------------------------------------------------------

TRAINING = "--data corpus.txt --precision fp32 --micro-batch-size 1 --batch-size 2 --device cpu --steps 1"
COMMANDS = {
    "inspect": "inspect {}",
    "eval": "eval {} --data corpus.txt --context-length 16",
    "bench": "bench {} --context 4 --new-tokens 1 --batch 1 --rounds 1 --dtype fp32 --out bench",
    "eliminate": "eliminate {} --remove block-diagonal --text corpus.txt --out eliminated",
    "convert": "convert {} --to skipv1 --method mean-v --out converted",
    "calibrated": "convert {} --to skipv1 --calibration corpus.txt --tokens 512 --sequence-length 16 --out calibrated",
    "export": "export {} --out exported",
    "uptrain": f"uptrain {{}} {TRAINING} --context-length 16 --evaluation-sequences 2 --teacher {{}} --out distilled",
    "analysis": "experiments.analysis {} --data corpus.txt --probe-steps 0 --samples 2 --context-length 16 --out seen",
    "verify": "verify {} imported",
}


@pytest.mark.exhaustive
@pytest.mark.slow
def test_every_command_takes_a_file(folder, tiny, cli):
    before = tiny.read_bytes()
    write_corpus(folder / "corpus.txt")
    assert cli("import", "tiny.gguf", "--out", "imported")[0] == 0
    for name, command in COMMANDS.items():
        code, out, err = cli(*command.format(tiny, tiny).split())
        assert code == 0, (name, out, err)
    written = ("eliminated", "converted", "calibrated", "exported", "distilled", "imported")
    texts = [AutoTokenizer.from_pretrained(name)(TEXTS[0])["input_ids"] for name in written]
    assert all(ids == load_tokenizer(tiny)(TEXTS[0])["input_ids"] for ids in texts)
    assert json.loads(Path("distilled/record.json").read_text())["initial_sha256"]
    assert tiny.read_bytes() == before
    assert_same_function(tiny, AutoModelForCausalLM.from_pretrained("exported").eval())


def test_generate_gives_the_same_tokens_from_the_file_and_from_what_is_imported(folder, tiny, cli):
    assert cli("import", "tiny.gguf", "--out", "imported")[0] == 0
    for more in ((), ("--chat",)):
        arguments = ("--prompt", "def function", "--temperature", "0", "--max-new-tokens", "8", *more)
        (code, file, err), directory = (cli("generate", name, *arguments) for name in ("tiny.gguf", "imported"))
        assert code == 0, err
        assert file == directory[1]


@pytest.mark.parametrize("kind", ["F32", "BF16", "Q8_0"])
def test_import_keeps_the_dtype_and_the_function(folder, cli, kind):
    write_model(folder / "model.gguf", "llama", kind)
    assert cli("import", "model.gguf", "--out", "imported")[0] == 0
    imported, opened = open_checkpoint(Path("imported")), open_checkpoint(Path("model.gguf"))
    assert set(imported.stored.dtypes.values()) == {DTYPES.get(kind, torch.float32)}
    for name, tensor in opened.tensors.items():
        assert torch.equal(imported.tensors[name], tensor), name
    assert imported.config.to_dict() | {"dtype": None} == opened.config.to_dict() | {"dtype": None, **CODE(imported)}


def CODE(opened) -> dict:
    """What a saved configuration says of the classes that were saved with it."""
    saved = opened.config.to_dict()
    return {key: saved[key] for key in ("architectures", "auto_map") if key in saved}


def test_import_goes_on_after_an_interruption_unless_the_file_is_another_one(folder, tiny, cli, monkeypatch):
    from leanqkv.checkpoints.write import source_hashes

    hashes = source_hashes(open_checkpoint(tiny))
    assert list(hashes) == ["tiny.gguf"]
    tiny.write_bytes(tiny.read_bytes()[:-1] + b"\1")
    assert source_hashes(open_checkpoint(tiny)) != hashes


# --- what is refused --------------------------------------------------------------------------------------------------


def rewritten(changes: dict, tensors: dict | None = None) -> None:
    """Write the small LLaMA again, with other metadata and tensors; None leaves one out."""
    model = random_model("llama")
    found = stored_tensors("llama", model) | (tensors or {})
    about = metadata("llama", model.config) | changes
    write(
        Path("tiny.gguf"),
        {key: value for key, value in about.items() if value is not None},
        {name: values for name, values in found.items() if values is not None},
    )


def patched(change) -> None:
    data = bytearray(Path("tiny.gguf").read_bytes())
    change(data)
    Path("tiny.gguf").write_bytes(data)


def version(number: bytes):
    return lambda: patched(lambda data: data.__setitem__(slice(4, 8), number))


def retyped(number: int) -> None:
    """Give the embedding another type."""

    def change(data: bytearray) -> None:
        at = data.index(b"token_embd.weight") + len("token_embd.weight") + 4 + 2 * 8
        data[at : at + 4] = struct.pack("<I", number)

    patched(change)


VECTOR = np.ones(64, np.float32)
DAMAGES = {
    "foreign": (lambda: Path("tiny.gguf").write_bytes(b"PK\3\4" * 99), "is no GGUF file"),
    "empty": (lambda: Path("tiny.gguf").write_bytes(b""), "is no GGUF file"),
    "missing": (lambda: Path("tiny.gguf").unlink(), "there is no file tiny.gguf"),
    "version 1": (version(b"\1\0\0\0"), "GGUF version 1; versions 2 and 3"),
    "big-endian": (version(b"\0\0\0\3"), "it is big-endian"),
    "unknown type": (lambda: retyped(99), "token_embd.weight is of type 99"),
    "integers": (lambda: retyped(26), "token_embd.weight is of type I32"),
    "architecture": (lambda: rewritten({"general.architecture": "mamba"}), "only llama, qwen2, qwen3, gpt2"),
    "no architecture": (
        lambda: patched(lambda data: data.__setitem__(slice(32, 52), b"general.architectur_")),
        "lacks the metadata general.architecture",
    ),
    "no layers": (lambda: rewritten({"llama.block_count": None}), "lacks the metadata llama.block_count"),
    "no epsilon": (
        lambda: rewritten({"llama.attention.layer_norm_rms_epsilon": None}),
        "lacks the metadata llama.attention.layer_norm_rms_epsilon",
    ),
    "more layers": (lambda: rewritten({"llama.block_count": 2**31}), "the tensors are those of 2 layers"),
    "a layer's number in words": (lambda: rewritten({"llama.block_count": "two"}), "block_count is 'two'"),
    "heads by layer": (lambda: rewritten({"llama.attention.head_count_kv": [2, 1]}), "has 2 values, one per layer"),
    "no heads": (lambda: rewritten({"llama.attention.head_count": 0}), "head_count is 0, no number above 0"),
    "a base in words": (lambda: rewritten({"llama.rope.freq_base": "x"}), "freq_base is 'x', no number above 0"),
    "an infinite base": (lambda: rewritten({"llama.rope.freq_base": math.inf}), "freq_base is inf, no number above 0"),
    "heads that do not divide": (lambda: rewritten({"llama.attention.head_count": 3}), "tiny.gguf"),
    "experts": (lambda: rewritten({"llama.expert_count": 8}), "llama.expert_count 8 cannot be expressed"),
    "unknown setting": (lambda: rewritten({"llama.logit_scale": 0.5}), "llama.logit_scale 0.5 cannot be expressed"),
    "partial rotation": (lambda: rewritten({"llama.rope.dimension_count": 8}), "llama.rope.dimension_count is 8"),
    "scaling": (lambda: rewritten({"llama.rope.scaling.type": "longrope"}), "'longrope' cannot be expressed"),
    "rope factors": (
        lambda: rewritten({}, {"rope_freqs.weight": np.linspace(1, 8, 8, dtype=np.float32)}),
        "rope_freqs.weight are not the factors of LLaMA 3.1",
    ),
    "split": (lambda: rewritten({"split.count": 2, "split.no": 0}), "is one of 2 parts of a split model"),
    "fewer tokens": (
        lambda: rewritten({"tokenizer.ggml.tokens": [f"t{i}" for i in range(299)]}),
        "299 by tokenizer.ggml.tokens",
    ),
    "another vocabulary": (lambda: rewritten({"llama.vocab_size": 301}), "301 by llama.vocab_size"),
    "end beyond": (
        lambda: rewritten({"tokenizer.ggml.eos_token_id": 300}),
        "eos_token_id is 300, there are 300 tokens",
    ),
    "lacking": (lambda: rewritten({}, {"blk.1.ffn_up.weight": None}), "lacks tensors: blk.1.ffn_up.weight"),
    "left over": (lambda: rewritten({}, {"blk.1.extra.weight": VECTOR}), "has unknown tensors: blk.1.extra.weight"),
    "shape": (
        lambda: rewritten({}, {"blk.0.attn_q.weight": np.ones((32, 64), np.float32)}),
        "the weights in tiny.gguf do not fit its metadata: model.layers.0.self_attn.q_proj.weight in tiny.gguf has",
    ),
    "NaN": (
        lambda: rewritten({}, {"blk.0.attn_q.weight": np.full((64, 64), np.nan, np.float32)}),
        "values that are NaN or infinite",
    ),
}
READERS = {
    "import": "import tiny.gguf --out result",
    "inspect": "inspect tiny.gguf",
    "generate": "generate tiny.gguf --prompt a",
    "serve": "serve tiny.gguf --port 0",
    "eval": "eval tiny.gguf --data corpus.txt",
    "convert": "convert tiny.gguf --to skipv1 --method mean-v --out result",
    "uptrain": f"uptrain tiny.gguf {TRAINING} --out result",
    "bench": "bench tiny.gguf --context 4 --new-tokens 1 --batch 1 --out result",
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_file_that_cannot_be_opened_is_refused(folder, tiny, cli, damage):
    spoil, message = DAMAGES[damage]
    spoil()
    Path("corpus.txt").write_text("text")
    readers = list(READERS.values()) if damage in ("missing", "split") else [READERS["import"], READERS["inspect"]]
    for command in readers:
        assert message in refused(cli, folder, command.split()), command


TOKENIZERS = {
    "no kind": ({"tokenizer.ggml.model": None}, "has a tokenizer of kind None"),
    "WordPiece": ({"tokenizer.ggml.model": "bert"}, "has a tokenizer of kind 'bert'"),
    "another cut": ({"tokenizer.ggml.pre": "viking"}, "tokenizer.ggml.pre 'viking' is not known, only gpt-2, smollm"),
    "no cut": ({"tokenizer.ggml.pre": None}, "tokenizer.ggml.pre None is not known"),
    "merges of nothing": ({"tokenizer.ggml.merges": ["xyz qqq"]}, "the tokenizer of tiny.gguf cannot be read"),
}


@pytest.mark.parametrize("damage", TOKENIZERS)
def test_a_tokenizer_that_is_not_known_is_refused(folder, cli, damage):
    changes, message = TOKENIZERS[damage]
    rewritten(changes)
    for command in ("import", "generate"):
        assert message in refused(cli, folder, READERS[command].split()), command


def test_parts_that_were_put_together_are_a_file_like_any_other(folder):
    rewritten({"split.count": 0})
    assert open_checkpoint(Path("tiny.gguf")).config.num_hidden_layers == 2


def test_a_file_without_a_tokenizer_is_imported_without_one(folder, cli):
    rewritten({key: None for key in metadata("llama", CONFIGS["llama"]) if key.startswith("tokenizer.")})
    assert cli("import", "tiny.gguf", "--out", "imported")[0] == 0
    assert not Path("imported/tokenizer.json").exists()
    assert "has a tokenizer of kind None" in refused(cli, folder, READERS["generate"].split())


def test_a_file_that_is_cut_off_anywhere_is_refused(folder, tiny, cli):
    whole, header = tiny.read_bytes(), min(entry.start for entry in GgufCheckpoint.open(tiny).entries.values())
    generator = random.Random(0)
    cuts = [*range(64), *(generator.randrange(header) for _ in range(300)), header, len(whole) - 1]
    for cut in cuts:
        tiny.write_bytes(whole[:cut])
        with pytest.raises(LeanError, match=r"is cut off|is no GGUF file"):
            open_checkpoint(tiny)
    for cut in (0, 3, 20, 1000, header - 40, header, header + 1000, len(whole) - 1):
        tiny.write_bytes(whole[:cut])
        refused(cli, folder, READERS["import"].split())


def test_a_damaged_header_is_opened_or_refused(folder, tiny):
    """Whatever a wrong byte makes of it, and it takes no time: a length is believed only as far as the file goes."""
    whole, header = tiny.read_bytes(), min(entry.start for entry in GgufCheckpoint.open(tiny).entries.values())
    generator, refusals = random.Random(0), 0
    for _ in range(400):
        data = bytearray(whole)
        data[generator.randrange(header)] = generator.randrange(256)
        tiny.write_bytes(data)
        try:
            open_checkpoint(tiny)
        except LeanError as error:
            refusals += 1
            assert "tiny.gguf" in str(error)
            assert "\n" not in str(error)
    assert refusals > 100


def test_a_directory_with_a_file_in_it_says_to_give_the_file(folder, tiny, cli):
    Path("model").mkdir()
    tiny.rename("model/tiny.gguf")
    error = refused(cli, folder, ["import", "model", "--out", "result"])
    assert "it has no config.json; give the file itself: model/tiny.gguf" in error


def test_the_package_that_is_missing_is_named(folder, tiny, cli, monkeypatch):
    monkeypatch.setitem(sys.modules, "gguf", None)
    assert "pip install 'leanqkv[gguf]'" in refused(cli, folder, ["import", "tiny.gguf", "--out", "result"])


def test_a_record_does_not_replace_the_file(folder, tiny, cli):
    Path("corpus.txt").write_text("text")
    error = refused(cli, folder, ["eval", "tiny.gguf", "--data", "corpus.txt", "--out", "tiny.gguf"])
    assert "tiny.gguf is a file, and nothing is ever written over" in error


# --- a real file ------------------------------------------------------------------------------------------------------


@pytest.mark.skipif("LEANQKV_REAL_GGUF" not in os.environ, reason="LEANQKV_REAL_GGUF names no file")
def test_a_real_file(cli, tmp_path):
    path = Path(os.environ["LEANQKV_REAL_GGUF"])
    model, opened, tokenizer = stock(path), open_checkpoint(path), load_tokenizer(path)
    assert_same_function(path, model)
    state = model.state_dict()
    assert all(torch.equal(opened.stored[name], state[name]) for name in opened.stored)
    for text in TEXTS:
        assert tokenizer.decode(tokenizer(text)["input_ids"], skip_special_tokens=False) == text
    assert cli("import", str(path), "--out", str(tmp_path / "imported"))[0] == 0
    question = ("--prompt", "What is the capital of France?", "--chat", "--temperature", "0")
    answers = [cli("generate", str(source), *question)[1] for source in (path, tmp_path / "imported")]
    assert answers[0] == answers[1]
    assert "Paris" in answers[0]
