"""A model to serve, and a chat template."""

from pathlib import Path

from shapes import randomize, tiny

from leanqkv import LeanForCausalLM

# So many that an answer over all of them takes minutes: whoever waits for its end does not get there.
POSITIONS = 100_000
TEMPLATE = "{% for m in messages %}{{ m.role }}:{{ m.content }}\n{% endfor %}{{ undefined_function() if fail else '' }}"


def save(directory: Path, chat_template: str | None = None, positions: int = POSITIONS) -> None:
    from leanqkv.data.tokenizer import train_tokenizer

    model = randomize(
        LeanForCausalLM(tiny("gpt", "skipv1", vocab_size=300, max_position_embeddings=positions)), std=0.2
    )
    model.save_pretrained(directory)
    tokenizer = train_tokenizer(iter(["def function(argument): return argument\n"] * 50), 300)
    tokenizer.chat_template = chat_template
    tokenizer.save_pretrained(directory)
