"""Tokenizers of checkpoints: the ids of their file on every path, and the tokens that they put around a text."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from harness import sequence_losses
from shapes import randomize, tiny
from text_losses import strided_losses
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from transformers import (
    AutoTokenizer,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen2ForCausalLM,
)

from leanqkv import LeanError, LeanForCausalLM
from leanqkv.checkpoints.open import load_model, open_causal_lm
from leanqkv.checkpoints.tokenizer import SAMPLE, check_ids, framing, load_tokenizer
from leanqkv.convert.conversion import calibration_tokens
from leanqkv.data.batches import IGNORED, collate
from leanqkv.data.evaluation import evaluation_text
from leanqkv.data.prepare import prepare_data
from leanqkv.data.tokenizer import encode_prompt
from leanqkv.evaluate.paired import paired_record
from leanqkv.evaluate.strided import strided_windows

WORDS = "in 2024 there were 10000 lazy dogs, def f(x): return x + 1 你好 日本   ok\n"
DOCUMENTS = [f"{number} {WORDS[number:]}{WORDS[::-1]}" for number in range(3)]
VOCABULARY, LENGTH = 640, 16


def trained(tokenizer: Tokenizer, special: list[str], alphabet: list[str]) -> Tokenizer:
    options = {"vocab_size": VOCABULARY, "special_tokens": special, "initial_alphabet": alphabet}
    trainer = trainers.BpeTrainer(**options, show_progress=False, max_token_length=6)
    tokenizer.train_from_iterator([WORDS, *SAMPLE], trainer)
    return tokenizer


def bytes_form(*before: pre_tokenizers.PreTokenizer) -> Tokenizer:
    """A byte-level tokenizer, as of GPT-2 and LLaMA 3."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([*before, pre_tokenizers.ByteLevel(add_prefix_space=False)])
    tokenizer.decoder = decoders.ByteLevel()
    return trained(tokenizer, ["<s>", "</s>"], pre_tokenizers.ByteLevel.alphabet())


def pieces_form() -> Tokenizer:
    """A tokenizer like SentencePiece's, as of LLaMA 2 and Gemma."""
    tokenizer = Tokenizer(models.BPE(byte_fallback=True, unk_token="<unk>", fuse_unk=True))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    return trained(tokenizer, ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))], [])


def putting(tokenizer: Tokenizer, before: str = "<s>", after: str = "") -> Tokenizer:
    """The tokenizer with a template that puts tokens around a text."""
    special = [(token, tokenizer.token_to_id(token)) for token in {before, after} - {""}]
    single = " ".join(filter(None, [before, "$A", after]))
    tokenizer.post_processor = processors.TemplateProcessing(single=single, special_tokens=special)
    return tokenizer


digits = pre_tokenizers.Digits(individual_digits=True)
FORMS = {
    "pieces, begun": lambda: putting(pieces_form()),
    "bytes": bytes_form,
    "bytes, digits one by one": lambda: bytes_form(digits),
    "bytes, begun": lambda: putting(bytes_form()),
    "bytes, begun with the end token": lambda: putting(bytes_form(), before="</s>"),
    "bytes, begun and ended": lambda: putting(bytes_form(digits), after="</s>"),
    "pieces": pieces_form,
}
CLASSES = ("GPT2Tokenizer", "LlamaTokenizer", "GemmaTokenizer", "Qwen2Tokenizer", "PreTrainedTokenizerFast", "Missing")
TYPES = ("leanqkv", "llama", "qwen2", "gemma3_text", "gpt_neox")


def write(directory: Path, tokenizer: Tokenizer, model_type: str = "llama", name: str = "LlamaTokenizer", **settings):
    directory.mkdir(exist_ok=True)
    tokenizer.save(str(directory / "tokenizer.json"))
    if not (directory / "config.json").exists():
        (directory / "config.json").write_text(json.dumps({"model_type": model_type}))
    settings = {"tokenizer_class": name, "bos_token": "<s>", "eos_token": "</s>", **settings}
    (directory / "tokenizer_config.json").write_text(json.dumps(settings))
    return directory


def ids(tokenizer, text: str) -> list[list[int]]:
    """With and without the tokens around it."""
    if isinstance(tokenizer, Tokenizer):
        return [tokenizer.encode(text, add_special_tokens=adding).ids for adding in (True, False)]
    return [tokenizer(text, add_special_tokens=adding)["input_ids"] for adding in (True, False)]


TEXTS = (*SAMPLE, WORDS, "a</s> b  <s>c", "<|x|>")


@pytest.fixture(scope="module", params=FORMS)
def form(request):
    return FORMS[request.param]()


@pytest.fixture
def sources(form, tmp_path):
    """Tiny models of two stock classes, with the tokenizer and a class that would cut text in another way."""
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
    sizes |= {"num_key_value_heads": 4, "vocab_size": VOCABULARY, "max_position_embeddings": 64}
    for name, config, kind in (("llama", LlamaConfig, LlamaForCausalLM), ("qwen2", Qwen2Config, Qwen2ForCausalLM)):
        torch.manual_seed(0)
        randomize(kind(config(**sizes, tie_word_embeddings=False)), std=0.1).save_pretrained(tmp_path / name)
        write(tmp_path / name, form, name="GPT2Tokenizer")
    return tmp_path


@pytest.fixture
def model(form, tmp_path):
    """The directory of a tiny model of ours with the tokenizer."""
    config = tiny("llama", vocab_size=VOCABULARY, max_position_embeddings=64)
    randomize(LeanForCausalLM(config).double(), std=0.1).save_pretrained(tmp_path / "model")
    return write(tmp_path / "model", form)


def around(form: Tokenizer) -> tuple[int | None, int]:
    """What the tokenizer puts before a text, and what is behind each text."""
    with_them, without = (encoded for encoded in ids(form, "dogs"))
    extra = with_them[: with_them.index(without[0])]
    return (extra[0] if extra else None), form.token_to_id("</s>")


# --- the ids of the file ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("model_type", TYPES)
@pytest.mark.parametrize("name", CLASSES)
def test_ids_are_those_of_the_file_whatever_class_is_named(form, tmp_path, model_type, name):
    loaded = load_tokenizer(write(tmp_path / "a", form, model_type, name))
    assert [ids(loaded, text) for text in TEXTS] == [ids(form, text) for text in TEXTS]


@pytest.mark.long_cases
@pytest.mark.parametrize("family", ["llama", "qwen2"])
def test_ids_of_what_is_written_are_the_sources(form, sources, cli, family):
    """Imported, converted and exported; read by the file, by this library, and by AutoTokenizer."""
    steps = {
        "imported": ("import", sources / family),
        "converted": ("convert", sources / "imported", "--to", "skipv1", "--method", "mean-v"),
        "exported": ("export", sources / "imported", "--family", family),
    }
    expected = [ids(form, text) for text in TEXTS]
    for name, arguments in steps.items():
        code, _, message = cli(*map(str, arguments), "--out", str(sources / name))
        assert code == 0, message
        out = sources / name
        readers = [Tokenizer.from_file(str(out / "tokenizer.json")), load_tokenizer(out)]
        # Of a Qwen2ForCausalLM, AutoTokenizer takes its own class's way to cut text, whatever the settings say.
        if (name, family) != ("exported", "qwen2"):
            readers.append(AutoTokenizer.from_pretrained(out))
        assert all([ids(reader, text) for text in TEXTS] == expected for reader in readers), name


def test_other_tools_that_cut_text_in_another_way_are_warned_of(tmp_path, caplog, cli):
    config = tiny("llama", vocab_size=VOCABULARY)
    LeanForCausalLM(config).save_pretrained(tmp_path / "model")
    write(tmp_path / "model", bytes_form())
    code, _, message = cli("export", str(tmp_path / "model"), "--family", "qwen2", "--out", str(tmp_path / "out"))
    assert code == 0 and "AutoTokenizer cuts" in caplog.text, message


def test_a_vocabulary_without_a_tokenizer_json(tmp_path, cli):
    """As GPT-2's first files: what transformers builds of it for the source's class is written."""
    content = json.loads(bytes_form().to_str())["model"]
    (source := tmp_path / "source").mkdir()
    sizes = {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 32, "vocab_size": VOCABULARY}
    GPT2LMHeadModel(GPT2Config(**sizes, bos_token_id=1, eos_token_id=1)).save_pretrained(source)
    (source / "vocab.json").write_text(json.dumps(content["vocab"]))
    (source / "merges.txt").write_text("#version: 0.2\n" + "\n".join(" ".join(pair) for pair in content["merges"]))
    (source / "tokenizer_config.json").write_text(json.dumps({"bos_token": "</s>", "eos_token": "</s>"}))
    expected = [ids(load_tokenizer(source), text) for text in TEXTS]
    assert len(expected[0][0]) < len(TEXTS[0])
    assert cli("import", str(source), "--out", str(tmp_path / "out"))[0] == 0
    for reader in (load_tokenizer(tmp_path / "out"), AutoTokenizer.from_pretrained(tmp_path / "out")):
        assert [ids(reader, text) for text in TEXTS] == expected


def test_tokens_of_the_settings_alone_have_their_numbers(tmp_path):
    form = bytes_form()
    number = form.get_vocab_size()
    declared = {str(number): {"content": "<|x|>", "special": True}, "0": {"content": "<s>", "special": True}}
    loaded = load_tokenizer(write(tmp_path / "a", form, added_tokens_decoder=declared))
    assert ids(loaded, "a<|x|>")[0][-1] == number
    declared = {str(number + 1): {"content": "<|x|>", "special": True}}
    with pytest.raises(LeanError, match=rf"gives '<\|x\|>' the number {number + 1}, tokenizer.json {number}"):
        load_tokenizer(write(tmp_path / "b", form, added_tokens_decoder=declared))


def test_tokens_that_the_settings_name_are_special_ones(tmp_path):
    """As transformers has it, which numbers those that the file lacks."""
    form = bytes_form()
    place = write(tmp_path / "a", form, pad_token="<pad>", additional_special_tokens=["<|user|>", "</s>"])
    theirs, loaded = PreTrainedTokenizerFast.from_pretrained(place), load_tokenizer(place)
    for text in ("a<|user|>b", "<pad>", "a</s>b"):
        assert ids(loaded, text) == ids(theirs, text)
    assert loaded.pad_token_id == theirs.pad_token_id >= form.get_vocab_size()
    assert len(ids(loaded, "<|user|>")[0]) == 1


@pytest.mark.parametrize("asked", [True, False])
def test_what_is_put_around_a_text_is_the_files_too(tmp_path, asked):
    for number, form in enumerate((bytes_form(), putting(bytes_form()))):
        settings = {"add_bos_token": asked, "add_eos_token": asked}
        loaded = load_tokenizer(write(tmp_path / str(number), form, **settings))
        assert ids(loaded, WORDS) == ids(form, WORDS)


def test_no_end_token(tmp_path):
    with pytest.raises(LeanError, match="needs a fast version and an end-of-text token"):
        load_tokenizer(write(tmp_path / "a", bytes_form(), eos_token="<end>"))


def test_an_end_token_that_the_file_lacks_is_not_the_unknown_one(tmp_path):
    words = Tokenizer(models.WordLevel({"<unk>": 0, "a": 1, "</s>": 2}, unk_token="<unk>"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    words.add_special_tokens(["<unk>", "</s>"])
    assert load_tokenizer(write(tmp_path / "has", words, eos_token="</s>", unk_token="<unk>")).eos_token_id == 2
    with pytest.raises(LeanError, match="needs a fast version and an end-of-text token"):
        load_tokenizer(write(tmp_path / "lacks", words, eos_token="<end>", unk_token="<unk>"))


def test_two_tokens_around_a_text_are_refused(tmp_path):
    form = bytes_form()
    template = {"single": "<s> </s> $A", "special_tokens": [("<s>", 0), ("</s>", 1)]}
    form.post_processor = processors.TemplateProcessing(**template)
    with pytest.raises(LeanError, match=r"puts the tokens \[0, 1\] before and \[\] after each text"):
        load_tokenizer(write(tmp_path / "a", form))


def test_damaged_tokenizers(tmp_path, cli):
    """Two tokens of one number; and a pattern that backtracks without end, at which the library panics."""
    content = json.loads(bytes_form().to_str())
    content["model"]["vocab"]["!"] = content["model"]["vocab"]["a"]
    place = write(tmp_path / "a", bytes_form())
    (place / "tokenizer.json").write_text(json.dumps(content))
    with pytest.raises(LeanError, match=r"gives two tokens the number \d+: '.' and '.'"):
        load_tokenizer(place)
    form = bytes_form()
    form.pre_tokenizer = pre_tokenizers.Split(Regex("(a+a+)+x"), "isolated")
    slow = write(tmp_path / "b", form)
    with pytest.raises(LeanError, match="the prompt cannot be tokenized"):
        encode_prompt(load_tokenizer(slow), "a" * 100)


# --- what is put around a text ----------------------------------------------------------------------------------------


def stream(form: Tokenizer, documents: list[str]) -> list[int]:
    """The documents' tokens with those around each, a token that ends one and begins the next once."""
    begin, end = around(form)
    found: list[int] = []
    for document in documents:
        found += [*([] if begin is None or found[-1:] == [begin] else [begin]), *ids(form, document)[1], end]
    return found[:-1]


@torch.no_grad()
def losses_one_by_one(form: Tokenizer, model, tokens: list[int], stride: int) -> torch.Tensor:
    """The definition, a forward pass a token: windows begin as texts do, and that token is not predicted."""
    begin, end = around(form)
    losses, last = [], len(tokens) - 1
    for target in range(1, len(tokens)):
        stop = LENGTH
        while stop < target:
            stop += stride
        inputs = tokens[max(0, min(stop, last) - LENGTH) : target]
        if begin is not None:
            inputs = [begin, *inputs[1:]]
            if tokens[target] == begin != end:
                continue
        losses.append(-model(torch.tensor([inputs])).logits[0, -1].log_softmax(-1)[tokens[target]])
    return torch.stack(losses)


@pytest.fixture
def texts(tmp_path, monkeypatch):
    monkeypatch.setenv("LEANQKV_CACHE", str(tmp_path / "cache"))
    file = tmp_path / "texts.jsonl"
    file.write_text("".join(json.dumps({"text": document}) + "\n" for document in DOCUMENTS))
    return file


@pytest.mark.long_cases
def test_evaluation_begins_every_window(form, model, texts):
    loaded = load_model(open_causal_lm(model), torch.float64)
    text = evaluation_text(str(texts), tokenizer=model, vocab_size=VOCABULARY)
    assert np.asarray(text.tokens).tolist() == stream(form, DOCUMENTS)
    assert text.record()["windows_begin_with"] == around(form)[0]
    for stride in (LENGTH, 5):
        expected = losses_one_by_one(form, loaded, stream(form, DOCUMENTS), stride)
        losses = strided_losses(loaded, text.tokens, context_length=LENGTH, stride=stride)
        torch.testing.assert_close(losses, expected, rtol=1e-10, atol=1e-12)
        windows = strided_windows(len(text.tokens), LENGTH, stride)
        figures = paired_record(loaded, loaded, text, windows, LENGTH)
        assert figures["before"]["tokens"] == len(expected) == text.predicted
        assert figures["before"]["loss"] == pytest.approx(expected.mean().item(), rel=1e-10)
        bits = expected.sum().item() / np.log(2) / text.bytes
        assert figures["after"]["bits_per_byte"] == pytest.approx(bits, rel=1e-10)


def test_the_held_out_tail_is_begun_too(form, model, texts):
    data = prepare_data(str(texts), vocab_size=VOCABULARY, tokenizer=str(model))
    held = evaluation_text(str(texts), tokenizer=model, vocab_size=VOCABULARY, split="validation")
    begin = around(form)[0]
    tail = np.asarray(data.validation())[:-1].tolist()
    assert np.asarray(held.tokens).tolist() == ([] if begin is None else [begin]) + tail
    # A token can begin within a character, the bytes of which before it cannot be decoded.
    decoded = load_tokenizer(model).decode([*ids(form, "dogs")[1], *tail]).partition("dogs")[2]
    assert abs(held.bytes - len(decoded.replace("\ufffd", "").encode())) < 4
    assert DOCUMENTS[-1].endswith(decoded.replace("\ufffd", ""))


def test_training_and_calibration_begin_every_sequence(form, model, texts):
    data = prepare_data(str(texts), vocab_size=VOCABULARY, tokenizer=str(model))
    begin, end = around(form)
    tokens = np.asarray(data.train()).tolist()
    whole = [*stream(form, DOCUMENTS), end]
    if begin == end:  # which is not written before the first text
        whole = whole[1:]
    assert tokens == whole[: len(tokens)]
    second = next((place for place, token in enumerate(tokens) if place > LENGTH and token == begin), 2 * LENGTH)
    starts = [0, 7, second - 4]  # the last one has the beginning of a document within it
    batch = collate(data.train(), starts, LENGTH)
    rows = (batch[name].tolist() for name in ("input_ids", "shift_labels"))
    for start, inputs, labels in zip(starts, *rows, strict=True):
        window = tokens[start : start + LENGTH + 1]
        assert inputs == (window[:-1] if begin is None else [begin, *window[1:-1]])
        unpredicted = begin is not None and begin != end
        assert labels == [IGNORED if unpredicted and token == begin else token for token in window[1:]]
    calibration = calibration_tokens(data, open_causal_lm(model).config, 3 * LENGTH, LENGTH)
    assert begin is None or calibration[:, 0].tolist() == [begin] * 3
    loaded = load_model(open_causal_lm(model), torch.float64)
    losses = sequence_losses(loaded, data.train(), starts[2:], LENGTH, 1)
    logits, targets = loaded(batch["input_ids"][2:]).logits[0].float(), batch["shift_labels"][2]
    expected = torch.nn.functional.cross_entropy(logits[targets != IGNORED], targets[targets != IGNORED])
    assert losses.item() == pytest.approx(expected.item(), rel=1e-5)


def test_tokens_of_other_programs_are_begun(form, model, tmp_path):
    tokens = np.array(ids(form, WORDS * 3)[1], dtype="uint16")
    tokens.tofile(tmp_path / "tokens.bin")
    text = evaluation_text(str(tmp_path / "tokens.bin"), tokenizer=model, vocab_size=VOCABULARY)
    begin = around(form)[0]
    assert np.asarray(text.tokens).tolist() == ([] if begin is None else [begin]) + tokens.tolist()


def test_prompts_begin_once_and_do_not_end(form, model):
    loaded, (begin, _) = load_tokenizer(model), around(form)
    plain = ids(form, WORDS)[1]
    first = [] if begin is None else [begin]
    assert encode_prompt(loaded, WORDS).tolist() == [[*first, *plain]]
    if begin is not None:
        token = form.id_to_token(begin)
        assert encode_prompt(loaded, token + WORDS).tolist() == [ids(form, token + WORDS)[1]]
    assert encode_prompt(loaded, None).shape == (1, 1)


def test_the_framing_survives_saving(form, model, tmp_path):
    load_tokenizer(model).save_pretrained(tmp_path / "saved")
    assert framing(load_tokenizer(tmp_path / "saved")) == framing(load_tokenizer(model))
    for loaded in (load_tokenizer(tmp_path / "saved"), AutoTokenizer.from_pretrained(tmp_path / "saved")):
        assert [ids(loaded, text) for text in TEXTS] == [ids(form, text) for text in TEXTS]


def test_models_are_compared_on_the_same_tokens_only(tmp_path, texts, cli):
    form = bytes_form()
    for name in ("first", "second"):
        config = tiny("llama", vocab_size=VOCABULARY, max_position_embeddings=64)
        LeanForCausalLM(config).save_pretrained(tmp_path / name)
        write(tmp_path / name, form)
        form.pre_tokenizer = pre_tokenizers.Sequence([digits, form.pre_tokenizer])  # the vocabulary stays
    arguments = ("eval", str(tmp_path / "first"), "--data", str(texts))
    code, _, message = cli(*arguments, "--against", str(tmp_path / "second"))
    assert code == 2 and "has another tokenizer" in message
    assert cli(*arguments, "--against", str(tmp_path / "first"))[0] == 0


# --- ids beyond the embedding -----------------------------------------------------------------------------------------


def test_tokens_that_never_occur_are_no_reason_to_refuse(tmp_path, texts, cli):
    form = bytes_form()
    size = form.get_vocab_size()
    LeanForCausalLM(tiny("llama", vocab_size=size, max_position_embeddings=64)).save_pretrained(tmp_path / "model")
    form.add_special_tokens([AddedToken("[PAD]", special=True)])
    form.add_tokens([AddedToken("image", special=False)])
    write(tmp_path / "model", form, pad_token="[PAD]")
    model = str(tmp_path / "model")
    assert cli("eval", model, "--data", str(texts))[0] == 0
    assert cli("generate", model, "--prompt", "def", "--max-new-tokens", "2")[0] == 0
    prepare_data(str(texts), vocab_size=size, tokenizer=model)
    texts.write_text(json.dumps({"text": "an image of"}))
    code, _, message = cli("eval", model, "--data", str(texts))
    assert code == 2 and f"document 1 of the text has token {size + 1}, 'image', and the model" in message
    with pytest.raises(LeanError, match=f"document 1 of the text has token {size + 1}, 'image'"):
        prepare_data(str(texts), vocab_size=size, tokenizer=model)


def test_the_first_number_behind_the_vocabulary_is_refused(tmp_path):
    tokenizer = load_tokenizer(write(tmp_path, bytes_form()))
    check_ids([9, 4], 10, tokenizer, "the text")
    with pytest.raises(LeanError, match=r"the text has token 10, .*, and the model's vocabulary ends at 9"):
        check_ids([10, 4], 10, tokenizer, "the text")
