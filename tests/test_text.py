"""New tokens as the text behind their prompt, for every form of tokenizer; chat templates that cannot be applied."""

import pytest
from text_tokenizers import sentencepiece
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import GenerationConfig, PreTrainedTokenizerFast

from leanqkv.errors import LeanError
from leanqkv.inference.text import (
    TextStream,
    check_chat_template,
    encode_chat,
    end_tokens,
    longest_token,
    render_chat,
    token_text,
)

TEXTS = ["the lazy dogs jump over the lazy dogs", "naïve café, 你好世界, привет", "a\n\n  b\tc", "👩‍👩‍👧 and 🙂🙂"]
IM_END = "<|im_end|>"


def metaspace() -> Tokenizer:
    tokenizer = Tokenizer(models.Unigram())
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.Metaspace(), decoders.Metaspace()
    trainer = trainers.UnigramTrainer(vocab_size=90, special_tokens=["<unk>"], unk_token="<unk>", show_progress=False)
    tokenizer.train_from_iterator(TEXTS * 9, trainer)
    return tokenizer


def byte_level() -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=300, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator(TEXTS * 9, trainer)
    return tokenizer


def wordpiece() -> Tokenizer:
    tokenizer = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.Whitespace(), decoders.WordPiece(cleanup=False)
    trainer = trainers.WordPieceTrainer(vocab_size=90, special_tokens=["[UNK]"], show_progress=False)
    tokenizer.train_from_iterator(TEXTS * 9, trainer)
    return tokenizer


FORMS = [sentencepiece, metaspace, byte_level, wordpiece]


@pytest.fixture(scope="module", params=FORMS, ids=lambda form: form.__name__)
def tokenizer(request):
    backend = request.param()
    backend.add_special_tokens([IM_END, "<s>"])
    return PreTrainedTokenizerFast(tokenizer_object=backend, eos_token=IM_END, bos_token="<s>")


def streamed(tokenizer, prompt, new, stops=()) -> str:
    stream = TextStream(tokenizer, prompt, stops)
    text = ""
    for token in new:
        text += stream.add(token)
        if stream.stopped:
            return text
    return text + stream.finish()


def test_the_first_of_several_stops_counts(tokenizer):
    """Also where one token brings both."""
    ordinary = set(tokenizer.get_vocab().values()) - set(tokenizer.all_special_ids)
    pieces = {token: streamed(tokenizer, [], [token]) for token in ordinary}
    token = max(pieces, key=lambda token: len(set(pieces[token])))
    first, *_, last = dict.fromkeys(pieces[token])
    assert streamed(tokenizer, [], [token], [last, first]) == streamed(tokenizer, [], [token], [first, last]) == ""


def test_text_is_what_the_new_tokens_add_to_the_prompt(tokenizer):
    """At every place of a text, within a character too, except where a byte changes how those before it are written."""
    for text in TEXTS:
        ids = tokenizer(text, add_special_tokens=False)["input_ids"]
        whole = tokenizer.decode(ids)
        for place in range(1, len(ids)):
            before = tokenizer.decode(ids[:place])
            if before.endswith("\ufffd") and getattr(tokenizer.backend_tokenizer.model, "byte_fallback", False):
                continue
            found = streamed(tokenizer, ids[:place], ids[place:])
            assert before.rstrip("\ufffd") + found == whole
            assert streamed(tokenizer, [tokenizer.bos_token_id, *ids[:place]], ids[place:]) == found


def test_the_first_word_is_not_glued_to_the_prompt(tokenizer):
    if tokenizer.backend_tokenizer.pre_tokenizer.__class__.__name__ == "ByteLevel":
        pytest.skip("its spaces are in the tokens themselves")
    prompt, new = (tokenizer(text, add_special_tokens=False)["input_ids"] for text in ("the lazy dogs", "the lazy"))
    assert streamed(tokenizer, prompt, new) == " the lazy"
    assert streamed(tokenizer, [], new) == "the lazy"


def test_stop_strings_are_found_in_special_tokens_and_special_tokens_are_not_shown(tokenizer):
    ids = tokenizer("the lazy", add_special_tokens=False)["input_ids"]
    end = tokenizer.eos_token_id
    text = streamed(tokenizer, ids, ids)
    assert streamed(tokenizer, ids, [*ids, end], ["never"]) == text
    assert streamed(tokenizer, ids, [*ids, end, *ids]) == 2 * text
    for stop in (IM_END, "<|im_", f"y{IM_END}"):
        assert streamed(tokenizer, ids, [*ids, end, *ids], [stop]) == text.removesuffix(stop.partition("<")[0])


def test_bytes_that_make_up_no_character_do_not_hold_the_text_back():
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=sentencepiece())
    byte, word = tokenizer.convert_tokens_to_ids(["<0xF0>", "▁the"])
    prompt = tokenizer("你好", add_special_tokens=False)["input_ids"]
    stream = TextStream(tokenizer, prompt)
    assert stream.add(byte) == ""
    assert stream.add(word) == "\ufffd the"
    assert sum(len(stream.add(byte)) for _ in range(40)) > 30
    assert stream.add(10**6) in ("", "\ufffd" * 8)  # a token that the tokenizer does not have


def test_a_long_answer_takes_time_by_the_token():
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=byte_level())
    stream = TextStream(tokenizer, [200] * 5000, ["\ufffd" * 3 + "a"])
    for token in [200, *tokenizer("word ")["input_ids"]] * 300:
        stream.add(token)
        assert len(stream._ids) < 1100 and len(stream._text) < 20


def test_token_texts(tokenizer):
    the = tokenizer("the lazy the", add_special_tokens=False)["input_ids"][-1]
    assert token_text(tokenizer, the) in (" the", "the", "e", "he")
    assert token_text(tokenizer, tokenizer.eos_token_id).strip() == IM_END


def test_ends_are_those_of_the_model_and_of_its_tokenizer(tokenizer):
    end = tokenizer.eos_token_id
    assert end_tokens(GenerationConfig(), tokenizer) == [end]
    assert end_tokens(GenerationConfig(eos_token_id=3), tokenizer) == [3, end]
    assert end_tokens(GenerationConfig(eos_token_id=[end, 5]), tokenizer) == [end, 5]


@pytest.mark.parametrize(
    ("form", "longest"), [(sentencepiece, 6), (metaspace, None), (byte_level, 4), (wordpiece, None)]
)
def test_the_bound_for_the_characters_of_a_token_holds(form, longest):
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=form())
    found = longest_token(tokenizer)
    assert (found is None) == (longest is None)
    if found is not None:
        assert found >= longest
        for text in [*TEXTS, "x" * 99, " " * 99, "e\u0301" * 50, "\U0001f642" * 50]:
            assert len(tokenizer(text, add_special_tokens=False)["input_ids"]) * found >= len(text)
        tokenizer.backend_tokenizer.normalizer = normalizers.Strip()
        assert longest_token(tokenizer) is None
        tokenizer.backend_tokenizer.normalizer = normalizers.NFC()
        assert longest_token(tokenizer) == 4 * max(map(len, tokenizer.get_vocab()))
        tokenizer.add_tokens([AddedToken("<end>", rstrip=True)])
        assert longest_token(tokenizer) is None


BROKEN = {
    "syntax": ("{% for m in messages %}{{ m.content }}", "TemplateSyntaxError"),
    "undefined": ("{{ nothing.of.this }}", "UndefinedError: 'nothing' is undefined"),
    "undefined function": ("{{ nothing() }}", "UndefinedError"),
    "sandbox": ("{{ messages.__class__.__mro__[1].__subclasses__() }}", "SecurityError"),
    "changes a list": ("{% set _ = messages.append(3) %}", "SecurityError"),
}


@pytest.mark.parametrize("case", BROKEN)
def test_a_template_that_cannot_be_applied_is_refused_in_one_line(case):
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=byte_level())
    tokenizer.chat_template, message = BROKEN[case]
    for check in (check_chat_template, lambda one: render_chat(one, [{"role": "user", "content": "a"}])):
        with pytest.raises(LeanError, match=f"chat template cannot be applied: {message}") as caught:
            check(tokenizer)
        assert "\n" not in str(caught.value)


def test_a_template_may_refuse_a_conversation():
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=byte_level())
    tokenizer.chat_template = "{{ raise_exception('a system message must come first') }}"
    check_chat_template(tokenizer)
    with pytest.raises(LeanError, match="TemplateError: a system message must come first"):
        render_chat(tokenizer, [{"role": "user", "content": "a"}])
    tokenizer.chat_template = "{{ messages[0].content + 3 }}"
    with pytest.raises(LeanError, match="TypeError"):
        render_chat(tokenizer, [{"role": "user", "content": "a"}])


def test_a_conversation_begins_once():
    """A template that writes the token that begins texts, and a tokenizer that puts it before every text."""
    from shapes import tiny
    from tokenizers.processors import TemplateProcessing

    from leanqkv.inference.openai_api import PromptReader

    backend = byte_level()
    backend.add_special_tokens(["<s>"])
    begin = backend.token_to_id("<s>")
    backend.post_processor = TemplateProcessing(single="<s> $A", special_tokens=[("<s>", begin)])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<s>")
    tokenizer.chat_template = "{{ bos_token }}{{ messages[0].content }}"
    reader = PromptReader(tokenizer, tiny("llama", vocab_size=400))
    ids = reader.chat([{"role": "user", "content": "the"}], {}).tolist()
    assert ids == reader.text("the").tolist() == [begin, *tokenizer("the", add_special_tokens=False)["input_ids"]]


def test_a_conversation_whose_pattern_backtracks_without_end_is_refused():
    from tokenizers import Regex

    backend = byte_level()
    split = pre_tokenizers.Split(Regex("(a+a+)+x"), "isolated")
    backend.pre_tokenizer = pre_tokenizers.Sequence([split, backend.pre_tokenizer])
    with pytest.raises(LeanError, match="the conversation cannot be tokenized"):
        encode_chat(PreTrainedTokenizerFast(tokenizer_object=backend), "a" * 40)
