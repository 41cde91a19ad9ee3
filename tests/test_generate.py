"""`leanqkv generate`, once and prompt by prompt."""

import io
import re
import signal
import sys

import pytest
import torch
from shapes import randomize, tiny

from leanqkv import LeanForCausalLM, cache_bytes
from leanqkv.checkpoints.tokenizer import load_tokenizer

GREEDY = ("--temperature", "0", "--max-new-tokens", "12")
REMARK = r"(\d+) new tokens, [\d,.]+ tokens/s, KV cache ([\d,]+) bytes of tokens in ([\d,]+) allocated\n"


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    from leanqkv.data.tokenizer import train_tokenizer

    directory = tmp_path_factory.mktemp("generate") / "model"
    model = randomize(LeanForCausalLM(tiny("gpt", "skipv1", vocab_size=300, max_position_embeddings=40)), std=0.2)
    model.save_pretrained(directory)
    train_tokenizer(iter(["def function(argument): return argument\n"] * 50), 300).save_pretrained(directory)
    return directory


def answer(directory, prompt: str, new: int = 12) -> tuple[str, int]:
    """Text and bytes of the cache that `model.generate` comes to."""
    model, tokenizer = LeanForCausalLM.from_pretrained(directory).eval(), load_tokenizer(directory)
    ids = tokenizer(prompt, return_tensors="pt")["input_ids"]
    output = model.generate(ids, max_new_tokens=new, do_sample=False, return_dict_in_generate=True)
    text = tokenizer.decode(output.sequences[0, ids.shape[1] :], skip_special_tokens=True)
    return text, cache_bytes(output.past_key_values)


@pytest.fixture
def talk(cli, model, monkeypatch):
    """Runs `generate --interactive` on these lines."""

    def run(lines: str, *arguments: str) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "stdin", io.StringIO(lines))
        return cli("generate", str(model), "--interactive", *(arguments or GREEDY))

    return run


def test_text_and_nothing_else_on_the_standard_output(cli, model):
    text, held = answer(model, "def ")
    code, out, err = cli("generate", str(model), "--prompt", "def ", *GREEDY)
    assert (code, out) == (0, f"def {text}\n")
    remark = re.fullmatch(REMARK, err)
    assert (remark[1], remark[2].replace(",", "")) == ("12", str(held))


def test_a_prompt_begins_as_the_tokenizer_has_it(cli, model, tmp_path):
    """As LLaMA's tokenizer does, which puts a token before every text."""
    from tokenizers.processors import TemplateProcessing

    from leanqkv.checkpoints.tokenizer import load_tokenizer

    LeanForCausalLM.from_pretrained(model).save_pretrained(tmp_path)
    tokenizer = load_tokenizer(model)
    first = tokenizer.eos_token_id
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(single="<s> $A", special_tokens=[("<s>", first)])
    tokenizer.save_pretrained(tmp_path)
    text, held = answer(tmp_path, "def ")
    assert text != answer(model, "def ")[0]
    code, out, err = cli("generate", str(tmp_path), "--prompt", "def ", *GREEDY)
    assert (code, out) == (0, f"def {text}\n")
    assert re.fullmatch(REMARK, err)[2].replace(",", "") == str(held)


def test_each_line_is_a_prompt_of_its_own(talk, cli, model):
    code, out, err = talk("def \na(\ndef \n")
    expected = [answer(model, prompt)[0] + "\n" for prompt in ("def ", "a(", "def ")]
    assert (code, out) == (0, "".join(expected))
    assert re.fullmatch(REMARK * 3, err)
    # With the same seed, too.
    sampled = ("--max-new-tokens", "12", "--seed", "5")
    alone = cli("generate", str(model), "--prompt", "def ", *sampled)[1].removeprefix("def ")
    assert len(alone) > 3 and talk("a(\ndef \n", *sampled)[1].endswith(alone)


def test_a_backslash_goes_on_in_the_next_line(talk, model):
    assert talk("def \\\n  a(\\\n\n")[:2] == (0, answer(model, "def \n  a(\n")[0] + "\n")


def test_a_prompt_that_is_too_long_ends_nothing(talk, model):
    code, out, err = talk("x" * 35 + "\n" + "x" * 40 + "\ndef \n")
    assert (code, out) == (0, answer(model, "def ")[0] + "\n")
    first, second, last = err.splitlines(keepends=True)
    assert "takes 35 of the model's 40 positions: --max-new-tokens can be 5 at most, found 12" in first
    assert "takes 40 of the model's 40 positions: shorten it" in second
    assert re.fullmatch(REMARK, last)


@pytest.mark.parametrize(("new", "warned"), [(30, False), (39, True)])
def test_rotary_positions_beyond_those_of_training_are_told(cli, model, tmp_path, new, warned):
    LeanForCausalLM(tiny("llama", vocab_size=300, max_position_embeddings=40)).save_pretrained(tmp_path)
    load_tokenizer(model).save_pretrained(tmp_path)
    how = ("--temperature", "0", "--max-new-tokens", str(new))
    code, _, err = cli("generate", str(tmp_path), "--prompt", "def a", *how)
    told = "tokens are longer than the model's 40 positions; it was not trained on what lies behind them\n"
    assert code == 0
    assert (told in err) == warned


@pytest.fixture
def interrupted(monkeypatch):
    """Ctrl-C in the third forward pass of the process, the second new token of the first answer being out."""
    forward, calls = LeanForCausalLM.forward, []

    def counted(*args, **kwargs):
        calls.append(None)
        if len(calls) == 3:
            signal.raise_signal(signal.SIGINT)
        return forward(*args, **kwargs)

    monkeypatch.setattr(LeanForCausalLM, "forward", counted)
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs ignore it
    yield
    signal.signal(signal.SIGINT, before)


def test_ctrl_c_stops_one_answer(talk, model, interrupted):
    code, out, err = talk("def \na(\n")
    cut, whole = answer(model, "def ")[0], answer(model, "a(")[0] + "\n"
    assert code == 0
    assert out.endswith("\n" + whole)
    assert cut.startswith(out.removesuffix("\n" + whole)), "part of the first answer"
    assert re.fullmatch("stopped\n" + REMARK, err)


def test_ctrl_c_ends_a_single_one(cli, model, interrupted):
    code, out, err = cli("generate", str(model), "--prompt", "def ", *GREEDY)
    assert (code, err) == (130, "")
    assert out.startswith("def ")


def test_bytes_of_tokens_and_the_room_for_more_are_told_apart(cli, model, tmp_path):
    """An answer that ends early has room left."""
    from leanqkv.checkpoints.tokenizer import load_tokenizer

    ids = load_tokenizer(model)("def ", return_tensors="pt")["input_ids"]
    stopped = LeanForCausalLM.from_pretrained(model).eval()
    output = stopped.generate(ids, max_new_tokens=12, do_sample=False)[0, ids.shape[1] :].tolist()
    new = output.index(output[3]) + 1
    stopped.generation_config.eos_token_id = output[3]
    stopped.save_pretrained(tmp_path)
    load_tokenizer(model).save_pretrained(tmp_path)
    err = cli("generate", str(tmp_path), "--prompt", "def ", *GREEDY)[2]
    count, held, allocated = (int(found.replace(",", "")) for found in re.fullmatch(REMARK, err).groups())
    assert count == new
    per_token = stopped.config.plan.kv_bytes(1, torch.float32)
    length = ids.shape[1]
    assert (held, allocated) == (per_token * (length + new - 1), per_token * (length + 12 - 1))


@pytest.fixture
def assistant(model, tmp_path):
    """The same model, with a chat template."""
    from leanqkv.checkpoints.tokenizer import load_tokenizer

    LeanForCausalLM.from_pretrained(model).save_pretrained(tmp_path)
    tokenizer = load_tokenizer(model)
    tokenizer.chat_template = "{% for m in messages %}{{ m.role }}:{{ m.content }};{% endfor %}"
    tokenizer.save_pretrained(tmp_path)
    return tmp_path


def test_chat_puts_the_prompt_into_the_template(cli, assistant):
    text, held = answer(assistant, "user:def ;")
    code, out, err = cli("generate", str(assistant), "--prompt", "def ", "--chat", *GREEDY)
    assert (code, out) == (0, f"{text}\n")
    assert re.fullmatch(REMARK, err)[2].replace(",", "") == str(held)


def test_a_template_that_is_not_applied_is_told(cli, assistant, model):
    code, out, err = cli("generate", str(assistant), "--prompt", "def ", *GREEDY)
    assert (code, out) == (0, f"def {answer(model, 'def ')[0]}\n")
    assert "has a chat template" in err and "--chat applies it" in err
    code, out, err = cli("generate", str(model), "--prompt", "def ", "--chat", *GREEDY)
    assert (code, out) == (2, "") and "has no chat template" in err


def with_tokenizer(model, directory, chat_template: str | None = None, **special: str):
    """The same model with a tokenizer as LLaMA's; returns the tokenizer."""
    from text_tokenizers import sentencepiece
    from transformers import PreTrainedTokenizerFast

    LeanForCausalLM.from_pretrained(model).save_pretrained(directory)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=sentencepiece(), **{"eos_token": "</s>", **special})
    tokenizer.chat_template = chat_template
    tokenizer.save_pretrained(directory)
    return tokenizer


@pytest.mark.parametrize("interactive", [False, True])
def test_the_first_word_is_not_glued_to_the_prompt(cli, model, tmp_path, monkeypatch, interactive):
    tokenizer = with_tokenizer(model, tmp_path)
    words = iter(tokenizer.convert_tokens_to_ids(["▁lazy", "▁the", "the", "▁lazy"]))

    def step(_, tokens, *args, **options):
        logits = torch.zeros(tokens.shape[0], 1, 300)
        logits[:, :, next(words)] = 1
        return logits

    monkeypatch.setattr("leanqkv.inference.decoder.Decoder._forward", step)
    monkeypatch.setattr(sys, "stdin", io.StringIO("the\n"))
    how = ["--interactive"] if interactive else ["--prompt", "the"]
    code, out, err = cli("generate", str(tmp_path), *how, "--temperature", "0", "--max-new-tokens", "4")
    assert (code, out) == (0, ("" if interactive else "the") + " lazy thethe lazy\n"), err


def test_an_answer_ends_with_the_end_of_the_tokenizer_too(cli, model, tmp_path, monkeypatch):
    tokenizer = with_tokenizer(model, tmp_path)
    ids = tokenizer("the", return_tensors="pt")["input_ids"]
    first = int(
        LeanForCausalLM.from_pretrained(tmp_path).eval().generate(ids, max_new_tokens=1, do_sample=False)[0, -1]
    )
    with_tokenizer(model, tmp_path, eos_token=tokenizer.convert_ids_to_tokens(first) or "the")
    code, _, err = cli("generate", str(tmp_path), "--prompt", "the", *GREEDY)
    assert code == 0 and err.startswith("1 new tokens, ")


@pytest.mark.parametrize("template", ["{% for m in messages %}", "{{ nothing.here }}", "{{ ''.__class__.mro() }}"])
def test_a_chat_template_that_cannot_be_applied_is_one_line(cli, model, tmp_path, template):
    with_tokenizer(model, tmp_path, template)
    for command in (["generate", str(tmp_path), "--chat", "--prompt", "the"], ["serve", str(tmp_path), "--port", "0"]):
        code, out, err = cli(*command)
        assert (code, out, err.count("\n")) == (2, "", 1)
        assert err.startswith("error: the model's chat template cannot be applied: ")


def test_a_prompt_with_a_token_that_the_model_lacks_is_refused(cli, model, tmp_path, monkeypatch):
    tokenizer = with_tokenizer(model, tmp_path)
    tokenizer.add_tokens([f"<extra_{n}>" for n in range(20)], special_tokens=True)
    tokenizer.save_pretrained(tmp_path)
    monkeypatch.setattr("leanqkv.commands.generating.load_tokenizer", lambda name: tokenizer)
    code, out, err = cli("generate", str(tmp_path), "--prompt", "the <extra_19>", *GREEDY)
    assert (code, out) == (2, "")
    assert "the prompt has token 309, '<extra_19>', and the model's vocabulary ends at 299" in err
    assert cli("generate", str(tmp_path), "--prompt", "the", *GREEDY)[0] == 0
