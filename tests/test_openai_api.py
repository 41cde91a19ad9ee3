"""What clients of OpenAI's API send and expect, in one process: fields, scores, several answers, and odd values."""

import json
import math
from types import SimpleNamespace

import openai
import pytest
import torch
from refusing import table
from serving import TEMPLATE, save
from starlette.testclient import TestClient
from transformers import PreTrainedTokenizerFast

from leanqkv import LeanForCausalLM
from leanqkv.inference.batch import Row
from leanqkv.inference.openai_api import Choice, _read_message

pytestmark = pytest.mark.slow

POSITIONS = 96
CHAT = [{"role": "user", "content": "def "}]


@pytest.fixture(scope="module")
def api(tmp_path_factory):
    from leanqkv.inference.serve import build_app

    directory = tmp_path_factory.mktemp("api")
    save(directory, TEMPLATE, positions=POSITIONS)
    model, tokenizer = (
        LeanForCausalLM.from_pretrained(directory).eval(),
        PreTrainedTokenizerFast.from_pretrained(directory),
    )
    app, generator = build_app(model, tokenizer, "random")
    with TestClient(app, raise_server_exceptions=False) as http:
        client = openai.OpenAI(base_url="http://testserver/v1", api_key="none", http_client=http, max_retries=0)
        yield SimpleNamespace(model=model, tokenizer=tokenizer, client=client, http=http, generator=generator)
    generator.close()


def complete(api, prompt="def ", **options):
    options = {"model": "random", "prompt": prompt, "max_tokens": 8, "temperature": 0, **options}
    return api.client.completions.create(**options)


def ids(api, text: str) -> list[int]:
    return api.tokenizer(text)["input_ids"]


@torch.no_grad()
def logprobs(api, tokens: list[int]) -> torch.Tensor:
    return api.model(torch.tensor([tokens])).logits[0].float().log_softmax(-1)


def generated(api, prompt: list[int], new: int = 8, **options) -> str:
    options = {"max_new_tokens": new, "do_sample": False, "eos_token_id": api.tokenizer.eos_token_id, **options}
    output = api.model.generate(torch.tensor([prompt]), **options)[0, len(prompt) :]
    return api.tokenizer.decode(output, skip_special_tokens=True)


def test_prompts_as_lists(api):
    texts = ["def ", "function(", "a"]
    expected = [complete(api, text).choices[0].text for text in texts]
    tokens = [ids(api, text) for text in texts]
    for prompts in (texts, tokens):
        answer = complete(api, prompts)
        assert [(choice.index, choice.text) for choice in answer.choices] == list(enumerate(expected))
        assert answer.usage.prompt_tokens == sum(map(len, tokens))
    assert complete(api, texts[:1]).choices == complete(api, tokens[0]).choices == complete(api, texts[0]).choices


def test_a_message_may_have_a_name():
    """Which its template may write; other fields without a value are those that clients repeat."""
    message = {"role": "user", "content": "a", "name": "ann", "refusal": None, "tool_calls": []}
    assert _read_message(message) == {"role": "user", "content": "a", "name": "ann"}


def test_a_token_that_ends_an_answer_has_no_text():
    """Even where the tokenizer does not count it among the special ones."""
    words = {5: "some", 7: "end"}
    text = SimpleNamespace(add=words.get, finish=lambda: "", stopped=False)
    row = Row(torch.tensor([1]), 4, ends=[7])
    choice = Choice(0, row, text)
    row.tokens, row.ended = [5, 7], True
    assert "".join(choice.take(token)[0] for token in (5, 7, None)) == "some"
    assert (choice.new_tokens, choice.finish_reason) == (2, "stop")


def test_several_answers(api):
    """Each is sampled with a seed of its own, counted on from the request's; streamed they are the same."""
    options = {"n": 3, "temperature": 1, "seed": 5}
    whole = complete(api, ["a", "def "], **options)
    assert [choice.index for choice in whole.choices] == list(range(6))
    for prompt, choices in (("a", whole.choices[:3]), ("def ", whole.choices[3:])):
        alone = [complete(api, prompt, temperature=1, seed=5 + n).choices[0].text for n in range(3)]
        assert [choice.text for choice in choices] == alone
        assert len(set(alone)) == 3
    texts, ended = [""] * 6, [0] * 6
    for piece in complete(api, ["a", "def "], stream=True, **options):
        (choice,) = piece.choices
        texts[choice.index] += choice.text
        ended[choice.index] += choice.finish_reason is not None
    assert (texts, ended) == ([choice.text for choice in whole.choices], [1] * 6)
    answer = api.client.chat.completions.create(model="random", messages=CHAT, max_tokens=4, n=2, seed=1)
    assert len({choice.message.content for choice in answer.choices}) == 2


@pytest.mark.parametrize("max_tokens", [0, 1])
def test_scores_of_a_prompt(api, max_tokens):
    """As lm-eval's local-completions asks for them, and reads them."""
    contexts, continuations = ["def function", "return"], [" argument(", "x" * 20]
    prompts = [ids(api, a) + ids(api, b) for a, b in zip(contexts, continuations, strict=True)]
    answer = complete(api, prompts, max_tokens=max_tokens, logprobs=1, echo=True, seed=1234)
    for prompt, choice in zip(prompts, answer.choices, strict=True):
        found, expected = choice.logprobs, logprobs(api, prompt)
        assert len(found.tokens) == len(found.token_logprobs) == len(found.text_offset) == len(prompt) + max_tokens
        assert (found.token_logprobs[0], found.top_logprobs[0]) == (None, None)
        rows = expected[:-1].gather(-1, torch.tensor(prompt[1:])[:, None])[:, 0].tolist()
        assert found.token_logprobs[1 : len(prompt)] == pytest.approx(rows, abs=1e-4)
        best = expected[:-1].max(-1).values.tolist()
        assert [max(top.values()) for top in found.top_logprobs[1 : len(prompt)]] == pytest.approx(best, abs=1e-4)
        assert choice.text.startswith(api.tokenizer.decode(prompt))
        assert (choice.text == api.tokenizer.decode(prompt)) == (max_tokens == 0)
    options = {"max_tokens": max_tokens, "logprobs": 1, "echo": True}
    told = [piece.choices[0] for piece in complete(api, prompts[0], stream=True, **options)]
    assert "".join(piece.text for piece in told) == answer.choices[0].text
    scores = [piece.logprobs for piece in told if piece.logprobs]
    assert [token for one in scores for token in one.tokens] == answer.choices[0].logprobs.tokens
    assert [place for one in scores for place in one.text_offset] == answer.choices[0].logprobs.text_offset


def test_scores_that_fill_the_memory_are_refused(api, monkeypatch):
    monkeypatch.setattr("leanqkv.inference.openai_api.MAX_SCORES", 40)
    with pytest.raises(openai.BadRequestError, match="up to 40 logprobs, found 42; ask for fewer"):
        complete(api, n=3, logprobs=1, max_tokens=7)
    assert complete(api, n=2, logprobs=1, max_tokens=7) and complete(api, n=3, max_tokens=30)


def test_the_text_of_a_prompt_is_echoed_as_it_was(api):
    assert complete(api, " é\u0301\n def", echo=True, max_tokens=1).choices[0].text.startswith(" é\u0301\n def")


def test_scores_of_an_answer(api):
    """They are the model's own, whatever the sampling; greedy tokens are the likeliest."""
    prompt = ids(api, "def ")
    for options in ({}, {"temperature": 2, "top_k": 9, "presence_penalty": 2, "seed": 3}):
        choice = complete(api, logprobs=3, max_tokens=6, extra_body=options).choices[0]
        found = choice.logprobs
        assert all(3 <= len(top) <= 4 or len(set(top)) < 4 for top in found.top_logprobs)
        if not options:
            assert [max(top.values()) for top in found.top_logprobs] == found.token_logprobs
    expected = logprobs(api, prompt)[-1].topk(2)
    answer = api.client.chat.completions.create(
        model="random", messages=CHAT, temperature=0, max_tokens=2, logprobs=True, top_logprobs=2
    )
    entry = answer.choices[0].logprobs.content[0]
    chat = logprobs(api, ids(api, "user:def \n"))[-1].topk(2)
    assert [top.logprob for top in entry.top_logprobs] == pytest.approx(chat.values.tolist(), abs=1e-4)
    assert entry.logprob == entry.top_logprobs[0].logprob
    first = complete(api, logprobs=2, max_tokens=1).choices[0].logprobs
    assert first.token_logprobs[0] == pytest.approx(float(expected.values[0]), abs=1e-4)


def test_processors_are_those_of_transformers(api):
    prompt = ids(api, "def ")
    assert complete(api, extra_body={"repetition_penalty": 1.5}).choices[0].text == generated(
        api, prompt, repetition_penalty=1.5
    )
    likeliest = int(logprobs(api, prompt)[-1].argmax())
    banned = complete(api, logit_bias={str(likeliest): -100}).choices[0].text
    assert banned == generated(api, prompt, sequence_bias=[[[likeliest], -100.0]]) != complete(api).choices[0].text
    for body in ({"top_k": 4}, {"min_p": 0.2}, {"top_k": -1}):
        torch.manual_seed(7)
        options = {"do_sample": True, "top_k": 0} | {name: max(value, 0) for name, value in body.items()}
        expected = generated(api, prompt, **options)
        assert complete(api, temperature=1, seed=7, extra_body=body).choices[0].text == expected


def test_penalties_are_for_tokens_of_the_answer(api):
    likeliest = str(int(logprobs(api, ids(api, "def "))[-1].argmax()))
    text = complete(api, logit_bias={likeliest: 100}).choices[0].text
    assert len(set(text)) == 1
    again = complete(api, logit_bias={likeliest: 5}, frequency_penalty=2, presence_penalty=2).choices[0].text
    assert again[0] == text[0] and again != text


def test_the_model_has_a_say_in_penalties(api, monkeypatch):
    monkeypatch.setattr(api.model.generation_config, "repetition_penalty", 1.5)
    assert complete(api).choices[0].text == generated(api, ids(api, "def "), repetition_penalty=1.5)
    assert complete(api, extra_body={"repetition_penalty": 1}).choices[0].text != complete(api).choices[0].text


def test_usage_is_told_if_it_is_asked_for(api):
    whole = api.client.chat.completions.create(model="random", messages=CHAT, temperature=0, max_tokens=4)
    options = {"model": "random", "messages": CHAT, "temperature": 0, "max_tokens": 4, "stream": True}
    *pieces, last = api.client.chat.completions.create(**options, stream_options={"include_usage": True})
    assert (last.choices, last.usage) == ([], whole.usage)
    assert all(len(piece.choices) == 1 and piece.usage is None for piece in pieces)
    assert all(piece.usage is None and piece.choices for piece in api.client.chat.completions.create(**options))


def test_answers_and_their_pieces_say_what_they_are(api):
    options = {"model": "random", "max_tokens": 2}
    for create, text, kinds in (
        (api.client.completions.create, {"prompt": "def "}, ("text_completion", "text_completion")),
        (api.client.chat.completions.create, {"messages": CHAT}, ("chat.completion", "chat.completion.chunk")),
    ):
        assert create(**options, **text).object == kinds[0]
        assert {piece.object for piece in create(**options, **text, stream=True)} == {kinds[1]}


def test_a_turn_ends_with_the_end_of_the_tokenizer_too(api):
    text = generated(api, ids(api, "user:def \n"), eos_token_id=None)
    name = api.tokenizer.convert_ids_to_tokens(int(logprobs(api, ids(api, "user:def \n"))[-1].argmax()))
    options = {"model": "random", "messages": CHAT, "temperature": 0, "max_tokens": 8}
    assert api.client.chat.completions.create(**options).choices[0].message.content == text
    end, api.tokenizer.eos_token = api.tokenizer.eos_token, name
    try:
        answer = api.client.chat.completions.create(**options)
    finally:
        api.tokenizer.eos_token = end
    assert (answer.choices[0].finish_reason, answer.usage.completion_tokens) == ("stop", 1)


@pytest.mark.parametrize(
    "fields",
    [
        {"modalities": ["text"], "prompt_cache_key": "a", "safety_identifier": "b", "tool_choice": "none"},
        {"repetition_penalty": 1, "response_format": {"type": "text"}, "n": 1, "store": True, "metadata": {"a": "b"}},
        {"frequency_penalty": 0, "presence_penalty": 0.0, "logit_bias": {}, "top_logprobs": 0, "logprobs": False},
        {"tools": [], "parallel_tool_calls": True, "service_tier": "auto", "user": "me", "stop": [], "top_k": -1},
    ],
)
def test_fields_that_ask_for_nothing_change_nothing(api, fields):
    options = {"model": "random", "messages": CHAT, "temperature": 0, "max_tokens": 4}
    expected = api.client.chat.completions.create(**options).choices
    assert api.client.chat.completions.create(**options, extra_body=fields).choices == expected


# Those that YAML does not hold, and those in refusals/api.
REFUSED = [
    ("completions", {"prompt": "a\ud800"}, "half of a surrogate pair"),
    ("completions", {"prompt": ["a", "\udfff"]}, "half of a surrogate pair"),
    ("completions", {"prompt": "a", "stop": "\ud800"}, "half of a surrogate pair"),
    ("completions", {"prompt": "a", "\ud800": 1}, "half of a surrogate pair"),
    ("chat/completions", {"messages": [{"role": "user", "content": "\ud83d"}]}, "half of a surrogate pair"),
    ("completions", {"prompt": "a", "max_tokens": 10**20}, f"{POSITIONS} positions"),
    ("completions", {"prompt": "a", "max_tokens": 10**400}, f"{POSITIONS} positions"),
    ("completions", {"prompt": "a", "temperature": 10**400}, "temperature is a number"),
    ("completions", {"prompt": ["a"] * 300}, "up to 256 answers"),
    ("completions", {"prompt": ["a"] * 20, "n": 20}, "up to 256 answers"),
    *table("api/bodies"),
]


@pytest.mark.parametrize(("path", "body", "message"), REFUSED)
def test_refusals(api, path, body, message):
    answer = api.http.post(f"/v1/{path}", content=json.dumps(body), headers={"content-type": "application/json"})
    error = answer.json()["error"]
    assert (answer.status_code, error["type"]) == (400, "invalid_request_error")
    assert message in error["message"]


def test_paths_and_models_that_there_are_not(api):
    answer = api.http.get("/v1/files/3")
    error = answer.json()["error"]
    assert (answer.status_code, error["type"], error["code"]) == (404, "invalid_request_error", "unknown_url")
    assert "GET /v1/files/3" in error["message"] and "/v1/chat/completions" in error["message"]
    assert api.client.models.retrieve("random").id == "random"
    with pytest.raises(openai.NotFoundError) as caught:
        api.client.models.retrieve("other/model")
    assert (caught.value.code, caught.value.param) == ("model_not_found", "model")


def test_a_prompt_that_is_too_long_is_refused_before_it_is_tokenized(api, monkeypatch):
    def never(*_args, **_options):
        raise AssertionError("this text was tokenized")

    monkeypatch.setattr(type(api.tokenizer), "__call__", never)
    for path, body in (
        ("completions", {"prompt": "x" * 9000}),
        ("chat/completions", {"messages": [{"role": "user", "content": "x" * 9000}]}),
    ):
        answer = api.http.post(f"/v1/{path}", json=body).json()
        assert answer["error"]["code"] == "context_length_exceeded"
        assert f"does not fit the model's {POSITIONS} positions" in answer["error"]["message"]


NUMBERS = [0, 1, -1, 10**20, -(10**400), 0.5, 1e308, math.nan, -math.inf, True, False]
OTHERS = ["", "a", "\ud800", [], [1, "a"], [[]], [None], {}, {"a": 1}, {"0": "a"}]
LISTS = [
    *([1.5], [10**20], [[10**20]], [{}], [[[]]], ["a", ["a"]], [True], ["\x00"], {"\ud800": 1}),
    *(
        [{"role": ["user"]}],
        [{"role": "user", "content": 3}],
        [{"role": "user", "content": ["a"]}],
        [{"role": "user"}, 3],
    ),
    *(
        [{"type": "text", "text": 3}],
        [{"role": "user", "content": [{"type": "text", "text": 3}]}],
        [{"type": ["text"]}],
    ),
]


@pytest.mark.parametrize("path", ["completions", "chat/completions"])
def test_no_value_of_a_field_is_the_fault_of_the_server(api, path):
    """OpenAI's client would send what gets a 5xx again and again."""
    from leanqkv.inference.api_fields import COMMON_FIELDS
    from leanqkv.inference.openai_api import ENDPOINTS

    text = {"completions": "prompt", "chat/completions": "messages"}[path]
    rules = ENDPOINTS[f"/v1/{path}"].fields | (COMMON_FIELDS if path == "completions" else {})
    statuses = set()
    for name in [*rules, *(["user", "tools"] if path == "completions" else [])]:
        structured = name in (text, "stop", "logit_bias", "chat_template_kwargs", "stream_options")
        for value in [*NUMBERS, *OTHERS, *(LISTS if structured else [])]:
            body = {"max_tokens": 1, text: CHAT if text == "messages" else "a", name: value}
            content = json.dumps(body).encode()
            answer = api.http.post(f"/v1/{path}", content=content, headers={"content-type": "application/json"})
            statuses.add(answer.status_code)
            assert answer.status_code < 500, (name, value, answer.text)
            if answer.status_code != 200:
                error = answer.json()["error"]
                assert error["type"] == "invalid_request_error" and 0 < len(error["message"]) < 900
    assert statuses >= {200, 400}
