"""What only a GPU shows of the fast path: torch's own flash kernels, the head's products, memory.

A kernel in bfloat16 is judged beside plain attention in bfloat16, both against float64 of the same
numbers: it may be 1.5 times as far off, and a little.
"""

from itertools import accumulate

import pytest
import torch
from policy_cases import fresh, rollout
from test_head import case, error, full, gradients
from transformers import AutoModelForCausalLM, Qwen3Config

from rloo_cli.data.batch import Group
from rloo_cli.data.packing import pack_micro_batch, whole_group_slices
from rloo_cli.policy import fused_head, layouts
from rloo_cli.policy.model import Policy
from rloo_cli.policy.shared_attention import CascadeAttention

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU"),
]
DEVICE = "cuda"
TIMES, PLUS = 1.5, 2e-3  # of relative errors
SHAPES = {  # prompts, and their completions
    "two groups": ((7, 130), ((5, 1, 33), (140, 6, 4))),
    "one completion": ((20,), ((9,),)),
    "one completion each": ((20, 3), ((9,), (150,))),
    "a completion of one token": ((20, 5), ((1, 9), (3, 1))),
    "a group of single tokens": ((20, 5, 9), ((4, 9), (1, 1), (8, 2))),
    "nothing but single tokens": ((20, 5), ((1, 1), (1,))),
    "longer than a block": ((300, 200), ((270, 129, 128), (1, 257))),
}
shapes = pytest.mark.parametrize("name", list(SHAPES))
heads = pytest.mark.parametrize("size", [64, 128, 256])
grouped = pytest.mark.parametrize("kv", [8, 2, 1], ids=["mha", "gqa", "mqa"])


def groups(name):
    """Groups of these lengths, of random ids."""
    drawn = torch.Generator().manual_seed(3)

    def ids(count):
        return torch.randint(4, 40, (count,), generator=drawn).tolist()

    return [
        Group(i, {}, "", ids(p), [rollout(ids(c)) for c in cs])
        for i, (p, cs) in enumerate(zip(*SHAPES[name], strict=True))
    ]


def plan_of(name):
    """The plan of a shared row, and which rows of it a row sees. (T, T) bool"""
    found = groups(name)
    plan = pack_micro_batch(
        found, whole_group_slices(found, range(len(found))), device=DEVICE, layout="shared"
    ).shared_layout
    owner = [*range(len(found)), *(i for i, g in enumerate(found) for _ in g.rollouts)]
    starts = list(accumulate(plan.segment_lengths, initial=0))
    sees = torch.zeros(starts[-1], starts[-1], dtype=torch.bool)
    for s, n in enumerate(plan.segment_lengths):
        rows = slice(starts[s], starts[s] + n)
        sees[rows, rows] = torch.ones(n, n).tril().bool()
        if s >= len(found):
            prompt = owner[s]
            sees[rows, starts[prompt] : starts[prompt] + plan.segment_lengths[prompt]] = True
    return plan, sees.to(DEVICE)


def inputs(rows, size, kv, dtype=torch.bfloat16):
    """q, k, v and a gradient of the output: q and k as rotary embedding leaves them, v a part of
    a wider row. (T, H, D), (T, G, D) twice, (T, H, D)
    """
    torch.manual_seed(rows + size)
    wide = torch.randn(rows, 8 + 2 * kv, size, device=DEVICE).to(dtype)
    q, k, v = wide.split((8, kv, kv), 1)
    q, k = (t.transpose(0, 1).contiguous().transpose(0, 1) for t in (q, k))
    given = [t.detach().requires_grad_() for t in (q, k, v)]
    return given, torch.randn(rows, 8, size, device=DEVICE).to(dtype)


def dense(q, k, v, sees):
    """Attention with a mask, by torch. -> (T, H, D)"""
    q, k, v = (t.transpose(0, 1)[None] for t in (q, k, v))
    k, v = (t.repeat_interleave(q.shape[1] // t.shape[1], 1) for t in (k, v))
    out = torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=sees)
    return out[0].transpose(0, 1)


def with_gradients(attend, given, g):
    """The output and the gradients of q, k and v."""
    out = attend(*given)
    return [out, *torch.autograd.grad(out, given, g.to(out.dtype))]


def far(found, exact):
    """Relative errors."""
    return [error(a.detach(), b) for a, b in zip(found, exact, strict=True)]


@shapes
@heads
@grouped
def test_the_cascade_is_attention_with_a_mask(name, size, kv):
    plan, sees = plan_of(name)
    given, g = inputs(len(sees), size, kv)
    exact = with_gradients(
        lambda *t: dense(*t, sees), [t.detach().double().requires_grad_() for t in given], g
    )
    plain = far(with_gradients(lambda *t: dense(*t, sees), given, g), exact)
    ours = far(
        with_gradients(lambda *t: CascadeAttention.apply(*t, plan, size**-0.5), given, g), exact
    )
    for what, a, b in zip(("out", "dq", "dk", "dv"), ours, plain, strict=True):
        assert a <= TIMES * b + PLUS, f"{what}: off by {a:.1e}, plain attention by {b:.1e}"


@shapes
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_the_cascade_without_a_flash_kernel_is_exact(name, dtype):
    plan, sees = plan_of(name)
    given, g = inputs(len(sees), 64, 2, dtype)
    exact = with_gradients(
        lambda *t: dense(*t, sees), [t.detach().double().requires_grad_() for t in given], g
    )
    ours = far(with_gradients(lambda *t: CascadeAttention.apply(*t, plan, 0.125), given, g), exact)
    assert max(ours) < (1e-5 if dtype is torch.float32 else 1e-12), ours


@pytest.mark.parametrize("name", ["two groups", "a group of single tokens"])
def test_deterministic_kernels_give_the_same_bits_twice(name):
    plan, sees = plan_of(name)
    given, g = inputs(len(sees), 64, 2)
    torch.use_deterministic_algorithms(True)
    try:
        first, again = (
            with_gradients(lambda *t: CascadeAttention.apply(*t, plan, 0.125), given, g)
            for _ in range(2)
        )
    finally:
        torch.use_deterministic_algorithms(False)
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))


def model(dtype=torch.bfloat16, size=64, layers=2, words=512):
    """A random Qwen3 on the GPU; its rotary frequencies stay float32."""
    torch.manual_seed(0)
    made = AutoModelForCausalLM.from_config(
        Qwen3Config(
            vocab_size=words, hidden_size=256, num_hidden_layers=layers, num_attention_heads=4,
            num_key_value_heads=2, head_dim=size, intermediate_size=512, initializer_range=0.05,
            max_position_embeddings=1024, tie_word_embeddings=True, bos_token_id=None,
        )
    )  # fmt: skip
    for weight in made.parameters():
        weight.data = weight.bfloat16().to(dtype)
    return made.to(DEVICE)


def test_a_tiny_qwen3_in_bfloat16_lands_on_shared_rows_and_the_fused_head():
    policy = Policy(fresh("qwen3").bfloat16().to(DEVICE), 1.0)
    assert layouts.choose_policy_layout(policy, "auto", 64) == layouts.LayoutChoice(
        "shared", "fused", ""
    )


@pytest.mark.parametrize("size", [64, 128, 256])
def test_larger_heads_land_there_too(size):
    policy = Policy(model(size=size), 1.0)
    assert layouts.choose_policy_layout(policy, "auto", 1024) == layouts.LayoutChoice(
        "shared", "fused", ""
    )


def test_float32_lands_on_shared_rows_without_a_flash_kernel():
    policy = Policy(model(torch.float32), 1.0)
    assert layouts.choose_policy_layout(policy, "auto", 1024) == layouts.LayoutChoice(
        "shared", "fused", ""
    )


def test_heads_that_no_kernel_takes_land_on_packed_rows_and_say_so():
    level = layouts.choose_policy_layout(Policy(model(size=288), 1.0), "auto", 1024)
    assert (level.layout, level.head) == ("packed", "fused")
    assert "not shared: " in level.why


def phase(layout, dtype=torch.bfloat16, gc=False, name="two groups"):
    """Log-probabilities and the gradient of a weighted sum of them, by parameter."""
    policy = Policy(model(dtype), 0.7)
    level = layouts.choose_policy_layout(policy, layout, 1024)
    assert (level.layout, level.head) == (layout, "fused")
    if gc:
        policy.model.train().gradient_checkpointing_enable({"use_reentrant": False})
    for weight in policy.model.parameters():
        if weight.dtype != torch.float32:
            weight.grad_dtype = torch.float32
    found = groups(name)
    micro = policy.pack(found, whole_group_slices(found, range(len(found))))
    logp = policy.logp(micro).logp
    weights = torch.linspace(-1, 1, len(logp), device=DEVICE)
    (logp * weights).sum().backward()
    return torch.cat([logp.detach(), *(w.grad.flatten() for w in policy.model.parameters())])


@pytest.mark.parametrize("name", ["two groups", "one completion", "a group of single tokens"])
@pytest.mark.parametrize("gc", [False, True], ids=["kept", "gc"])
def test_a_models_gradient_on_shared_rows_is_as_near_to_float32s_as_on_padded_ones(name, gc):
    exact = phase("padded", torch.float32, name=name)
    plain, ours = (error(phase(x, gc=gc, name=name), exact) for x in ("padded", "shared"))
    assert ours <= TIMES * plain + PLUS, f"off by {ours:.1e}, padded by {plain:.1e}"


@pytest.mark.parametrize("layout", ["shared", "packed"])
def test_float32_layouts_agree_on_a_gpu(layout):
    assert error(phase(layout, torch.float32), phase("padded", torch.float32)) < 2e-5


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("keep", [0, 2**30], ids=["again", "kept"])
@pytest.mark.parametrize("tile", [None, 5000], ids=["tile", "tiles"])
@pytest.mark.parametrize("n", [1, 37, 700])
def test_the_fused_head_is_log_softmax_in_float64(dtype, keep, tile, n):
    hidden, weight, bias, target, g = (
        t.detach().to(DEVICE) for t in case(n, v=3001, h=64, dtype=dtype)
    )
    given = (*(t.requires_grad_() for t in (hidden, weight, bias)), target, g)
    found = gradients(given, want_entropy=True, tile_logits=tile, keep_bytes=keep)
    limits = [1e-5] * 5 if dtype is torch.float32 else [1e-4, 1e-4, 1e-2, 1e-2, 1e-2]
    off = far(found, full(*given))
    assert all(a <= b for a, b in zip(off, limits, strict=True)), off


@pytest.mark.parametrize("keep", [0, 2**30], ids=["again", "kept"])
def test_the_fused_head_is_log_softmax_where_it_is_compiled_too(keep, monkeypatch):
    monkeypatch.setattr(fused_head, "MIN_COMPILED_LOGITS", 0)
    test_the_fused_head_is_log_softmax_in_float64(torch.bfloat16, keep, None, 700)


def peak(layout):
    """The most bytes of a forward and a backward pass above what was there."""
    policy = Policy(model(layers=4, words=4096), 1.0)
    layouts.choose_policy_layout(policy, layout, 1024)
    ids = list(range(4, 260))
    each = [Group(i, {}, "", ids, [rollout(ids[:16]) for _ in range(8)]) for i in range(4)]
    micro = policy.pack(each, whole_group_slices(each, range(len(each))))
    policy.logp(micro).logp.sum().backward()  # compiles, and leaves gradients
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    policy.logp(micro).logp.sum().backward()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before


def test_shared_rows_take_less_memory_than_padded_ones():
    assert peak("shared") < 0.5 * peak("padded")  # rows: 4 * 376 against 4 * 8 * 272
