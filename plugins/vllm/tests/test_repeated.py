"""Steps whose layers make the calls of kernels of an earlier one again: their tokens are those of steps as written."""

from pathlib import Path
from typing import Any

import pytest
import torch
from engines import core_of, engine, expected, generate, prompts_of_uneven_length
from leanqkv_vllm.repeated import RepeatedRows
from product.mechanisms import CASES

from leanqkv.inference.repeat import Calls

FIELDS = {"hidden_size": 128, "intermediate_size": 128, "max_position_embeddings": 256}
# Heads so narrow that vLLM's kernel does not take them, with bits; latents in every form; and whether all is repeated.
KINDS = (
    ("baseline", "4", True),
    ("values-from-keys", None, True),
    ("latent-keys", None, True),
    ("latent-keys:before_rotary=true", None, True),
    ("skipv1", "8/4", True),
    ("yoco:local=true", None, True),  # windows
    ("resformer", "4", False),  # a mixer
)


@pytest.fixture
def repeated(monkeypatch: pytest.MonkeyPatch) -> list[Calls]:
    """The calls of layers that were made again, as often as they were."""
    found: list[Calls] = []
    repeat = Calls.repeat

    def counted(self: Calls, *given: Any) -> None:
        found.append(self)
        return repeat(self, *given)

    monkeypatch.setattr(Calls, "repeat", counted)
    return found


@pytest.mark.parametrize(("name", "bits", "all_of_it"), KINDS, ids=[f"{name} {bits}" for name, bits, _ in KINDS])
def test_repeated_steps(
    name: str, bits: str | None, all_of_it: bool, tmp_path: Path, repeated: list[Calls], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows that come and go, at first more and then fewer, beside pieces of prompts."""
    model = next(case for case in CASES if case.name == name).model(**FIELDS, num_attention_heads=8).float()
    model.save_pretrained(tmp_path)
    prompts = prompts_of_uneven_length(model.config.vocab_size, 8, 100)
    options: dict[str, Any] = {"block_size": 64, "additional_config": {"cache_bits": bits}} if bits else {}
    with engine(tmp_path, **options) as llm:
        assert core_of(llm).model_executor.driver_worker.worker.model_runner.model.kernel is None
        found = [generate(llm, prompts, new) for new in (70, 24)]
        count, layers = len(repeated), model.config.num_hidden_layers
        assert count > 60 * layers if all_of_it else count == 0
        monkeypatch.setattr(RepeatedRows, "begin", lambda *given: False)
        assert [generate(llm, prompts, new) for new in (70, 24)] == found
        assert len(repeated) == count
    if bits is None:
        assert found == [expected(model, prompts, new) for new in (70, 24)]


def test_memory_is_kept_until_it_is_too_small() -> None:
    rows = RepeatedRows(1, None)  # type: ignore[arg-type]
    first = rows.keep("lengths", torch.arange(6).view(3, 2))
    assert rows.keep("lengths", torch.arange(2)[None]).data_ptr() == first.data_ptr()
    other = rows.keep("lengths", torch.arange(40).view(20, 2))
    assert other.data_ptr() != first.data_ptr() and other.equal(torch.arange(40).view(20, 2))
    assert first.equal(torch.tensor([[0, 1], [2, 3], [4, 5]]).index_put((torch.tensor([0]),), torch.tensor([0, 1])))
