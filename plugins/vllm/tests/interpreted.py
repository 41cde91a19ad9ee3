"""The Triton kernels under Triton's interpreter on a CPU, against loops in float64; test_triton.py starts it."""

import os

os.environ["TRITON_INTERPRET"] = "1"

from types import SimpleNamespace

from triton.backends import backends

# vLLM for CPUs turns Triton off where it has no backend for them; the interpreter needs none.
backends["cpu"] = SimpleNamespace(driver=SimpleNamespace(is_active=lambda: True))

import torch
from leanqkv_vllm.kernel_triton import attend, store
from leanqkv_vllm.paged import Call, Heads

BLOCK, DIM, PAGES = 16, 32, 12


def pages_of(heads: int, others: int) -> torch.Tensor:
    """Heads in pages that hold `others` heads more."""
    page = (heads + others) * BLOCK * DIM
    memory = torch.randn(PAGES, page)
    return memory.as_strided((PAGES, heads, BLOCK, DIM), (page, BLOCK * DIM, DIM, 1), others * BLOCK * DIM)


def check_store() -> None:
    cache, new = pages_of(2, 3), torch.randn(5, 4, DIM)[:, 1:3]
    slots = torch.tensor([0, 17, -1, 191, 35])
    wanted = cache.clone()
    for token, slot in enumerate(slots.tolist()):
        if slot >= 0:
            wanted[slot // BLOCK, :, slot % BLOCK] = new[token]
    store(new, cache, slots)
    assert torch.equal(cache, wanted)


def check_attend(window: int | None, group: int) -> None:
    """Two requests: one decodes, one goes on with its prompt."""
    heads = 2
    keys, values = pages_of(heads, 1), pages_of(heads, 4)
    lengths, new = [37, 21], [1, 6]
    table = torch.tensor([[3, 7, 1], [5, 0, 9]], dtype=torch.int32)
    queries = torch.randn(sum(new), heads * group, DIM)
    call = Call(slice(0, heads * group), Heads(0, "keys", 0, heads), Heads(1, "values", 0, heads), 0.2, window)
    starts = torch.tensor([0, 1, 7], dtype=torch.int32)
    common = SimpleNamespace(
        query_start_loc=starts,
        max_query_len=6,
        seq_lens=torch.tensor(lengths, dtype=torch.int32),
        max_seq_len=37,
        block_table_tensor=table,
    )
    output = torch.empty_like(queries)
    attend(call, queries, keys, values, output, SimpleNamespace(common=common))
    for request, (length, count) in enumerate(zip(lengths, new, strict=True)):
        for token in range(count):
            place = length - count + token
            seen = range(0 if window is None else max(0, place - window + 1), place + 1)
            for head in range(heads * group):
                query = queries[int(starts[request]) + token, head].double()
                rows = [(int(table[request, at // BLOCK]), head // group, at % BLOCK) for at in seen]
                scores = torch.stack([query @ keys[row].double() for row in rows]) * 0.2
                wanted = scores.softmax(0) @ torch.stack([values[row].double() for row in rows])
                found = output[int(starts[request]) + token, head].double()
                torch.testing.assert_close(found, wanted, rtol=0, atol=2e-6)


if __name__ == "__main__":
    torch.manual_seed(0)
    check_store()
    for window in (None, 8):
        for group in (1, 3):
            check_attend(window, group)
    print("RIGHT")
