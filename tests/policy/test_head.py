"""The head in tiles: equal to log_softmax over all logits, in far less memory."""

from collections import Counter
from types import SimpleNamespace

import pytest
import torch
from torch._subclasses import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from rloo_cli.policy import fused_head
from rloo_cli.policy.fused_head import token_logp

N, V, H = 37, 300, 24
ROOM = 2**40
tiles = pytest.mark.parametrize("tile", [None, 1, 1000, 1500], ids=str)
keeping = pytest.mark.parametrize("keep_bytes", [0, ROOM], ids=["again", "kept"])


def case(n=N, v=V, h=H, dtype=torch.float32, bias=True):
    """hidden, weight, bias, target; and a gradient of logp."""
    drawn = torch.Generator().manual_seed(n + v)
    hidden = torch.randn(n, h, generator=drawn).to(dtype).requires_grad_()
    weight = torch.randn(v, h, generator=drawn).to(dtype).requires_grad_()
    shift = torch.randn(v, generator=drawn).to(dtype).requires_grad_() if bias else None
    target = torch.randint(0, v, (n,), generator=drawn)
    return hidden, weight, shift, target, torch.randn(n, generator=drawn)


def full(hidden, weight, bias, target, g, factor=1.0):
    """The textbook in float64: logp, entropy, and the gradients of hidden, weight and bias."""
    given = [
        x if x is None else x.detach().double().requires_grad_() for x in (hidden, weight, bias)
    ]
    logits = given[0] @ given[1].T
    every = ((logits if bias is None else logits + given[2]) * factor).log_softmax(1)
    logp = every.gather(1, target[:, None]).squeeze(1)
    (logp * g).sum().backward()
    gradients = [x if x is None else x.grad for x in given]
    return logp.detach(), -(every.exp() * every).sum(1).detach(), *gradients


def error(found, expected):
    """Relative, in norm."""
    found, expected = found.detach().double(), expected.detach()
    return float((found - expected).norm() / expected.norm().clamp(min=1e-30))


def gradients(case_, **words):
    """logp, entropy, and the gradients of hidden, weight and bias, by the head in tiles."""
    hidden, weight, bias, target, g = case_
    for x in (hidden, weight, bias):
        if x is not None:
            x.grad = None
    logp, entropy = token_logp(hidden, weight, target, bias=bias, **words)
    (logp * g).sum().backward()
    return logp, entropy, hidden.grad, weight.grad, None if bias is None else bias.grad


class Seen(TorchDispatchMode):
    """What was computed: how often each operation, and the size of the largest tensor."""

    def __init__(self):
        super().__init__()
        self.calls, self.max_logit = Counter(), 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        out = function(*args, **(kwargs or {}))
        self.calls[function.overloadpacket.__name__] += 1
        for tensor in out if isinstance(out, tuple | list) else [out]:
            if isinstance(tensor, torch.Tensor):
                self.max_logit = max(self.max_logit, tensor.numel())
        return out


def plans(monkeypatch):
    """Every plan that a call makes from now on."""
    seen = []
    apply = fused_head.TokenLogp.apply
    monkeypatch.setattr(
        fused_head.TokenLogp, "apply", lambda *args: seen.append(args[-1]) or apply(*args)
    )
    return seen


@tiles
@keeping
@pytest.mark.parametrize("want_entropy", [False, True])
def test_it_equals_log_softmax_over_all_logits(tile, keep_bytes, want_entropy):
    given = case()
    words = {"tile_logits": tile, "keep_bytes": keep_bytes, "want_entropy": want_entropy}
    logp, entropy, *found = gradients(given, scale=0.5, temperature=0.7, **words)
    expected_logp, expected_entropy, *expected = full(*given, factor=0.5 / 0.7)
    assert logp.dtype == torch.float32 and error(logp, expected_logp) <= 2e-6
    for one, other in zip(found, expected, strict=True):
        assert error(one, other) <= 2e-6
    assert (entropy is not None) == want_entropy
    if want_entropy:
        assert entropy.dtype == torch.float32 and not entropy.requires_grad
        assert error(entropy, expected_entropy) <= 2e-6


@pytest.mark.parametrize("words", [{}, {"scale": 16.0}, {"temperature": 0.3}], ids=str)
def test_scale_and_temperature_are_those_of_the_logits_without_bias_too(words):
    given = case(bias=False)
    logp, _, *found = gradients(given, tile_logits=900, **words)
    factor = words.get("scale", 1.0) / words.get("temperature", 1.0)
    expected_logp, _, *expected = full(*given, factor=factor)
    assert error(logp, expected_logp) <= 2e-6 and found[2] is None
    assert error(found[0], expected[0]) <= 5e-6 and error(found[1], expected[1]) <= 5e-6


def test_odd_tiles_divide_neither_rows_nor_words():
    assert fused_head.tile_shape(N, V, 1) == (1, 64)
    for tile in (1000, 1500):
        rows, words = fused_head.tile_shape(N, V, tile)
        assert N % rows and V % words and rows * words <= tile
    assert fused_head.tile_shape(0, V, 1000) == (1, V)
    assert fused_head.tile_shape(10, 40, 2**20) == (10, 40)
    assert fused_head.tile_shape(10**6, 151936, 2**25) == (5760, 5760)


@keeping
def test_without_rows_gradients_are_zeros(keep_bytes):
    given = case(n=0)
    logp, entropy, *found = gradients(given, keep_bytes=keep_bytes, want_entropy=True)
    assert logp.shape == entropy.shape == (0,)
    assert [g.shape for g in found] == [(0, H), (V, H), (V,)]
    assert not any(g.any() for g in found)


@pytest.mark.parametrize(
    ("frozen", "products"), [((), 3), ((1, 2), 2), ((0,), 2), ((0, 1), 1)], ids=str
)
def test_what_is_frozen_costs_no_product(frozen, products):
    given = case()
    for index in frozen:
        given[index].requires_grad_(False)
    logp, _ = token_logp(given[0], given[1], given[3], bias=given[2], tile_logits=1000)
    with Seen() as seen:
        (logp * given[4]).sum().backward()
    rows, words = fused_head.tile_shape(N, V, 1000)
    assert seen.calls["addmm"] == products * -(-N // rows) * -(-V // words)
    expected = full(*given)[2:]
    for index in range(3):
        assert (given[index].grad is None) == (index in frozen)
        assert index in frozen or error(given[index].grad, expected[index]) <= 2e-6


def test_kept_exponentials_save_a_product_of_each_tile():
    hidden, weight, _, target, _ = case()
    calls = []
    for keep_bytes in (0, N * V * 4 - 1, N * V * 4):
        logp, _ = token_logp(hidden, weight, target, tile_logits=1000, keep_bytes=keep_bytes)
        with Seen() as seen:
            logp.sum().backward()
        calls.append(seen.calls["addmm"])
    assert calls[0] == calls[1] and 3 * calls[2] == 2 * calls[0]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_kept_and_computed_again_are_the_same(dtype):
    given = case(dtype=dtype)
    again = gradients(given, tile_logits=1500, want_entropy=True)
    kept = gradients(given, tile_logits=1500, want_entropy=True, keep_bytes=ROOM)
    assert torch.equal(again[0], kept[0]) and torch.equal(again[1], kept[1])
    for one, other in zip(again[2:], kept[2:], strict=True):
        assert error(other, one.double()) <= (1e-6 if dtype == torch.float32 else 3e-3)


@keeping
def test_gradients_of_two_calls_add_up(keep_bytes):
    given, words = case(), {"tile_logits": 1000, "keep_bytes": keep_bytes}
    _, _, *once = gradients(given, **words)
    hidden, weight, bias, target, g = given
    logp, _ = token_logp(hidden, weight, target, bias=bias, **words)
    once = [x.clone() for x in once]
    (logp * g).sum().backward()
    for x, one in zip((hidden, weight, bias), once, strict=True):
        assert error(x.grad, 2 * one.double()) <= 1e-6


def test_a_second_backward_through_kept_tiles_computes_them_again():
    given = case()
    _, _, *once = gradients(given)
    hidden, weight, bias, target, g = given
    once = [x.clone() for x in once]
    logp, _ = token_logp(hidden, weight, target, bias=bias, tile_logits=1000, keep_bytes=ROOM)
    for _ in range(2):
        (logp * g).sum().backward(retain_graph=True)
    for x, one in zip((hidden, weight, bias), once, strict=True):
        assert error(x.grad, 3 * one.double()) <= 1e-6


def test_in_bfloat16_logits_and_sums_are_float32():
    given = case(n=512, dtype=torch.bfloat16)
    hidden, weight, bias, target, g = given
    logp, _, dhidden, dweight, dbias = gradients(given, tile_logits=1024)
    expected_logp, _, *expected = full(*given)
    assert logp.dtype == torch.float32 and error(logp, expected_logp) <= 2e-6
    assert {dhidden.dtype, dweight.dtype, dbias.dtype} == {torch.bfloat16}
    # the same gradient summed in bfloat16, 16 rows at a time
    summed = torch.zeros_like(dweight)
    for start in range(0, 512, 16):
        part = slice(start, start + 16)
        summed += full(hidden[part], weight, bias, target[part], g[part])[3].to(torch.bfloat16)
    assert error(dweight, expected[1]) <= 2.5e-3  # one rounding: 2^-9 at most
    assert error(summed, expected[1]) >= 2 * error(dweight, expected[1])


def test_float32_is_float32_whatever_is_given(monkeypatch):
    seen = plans(monkeypatch)
    given = case(dtype=torch.bfloat16)
    logp, _ = token_logp(given[0], given[1], given[3], float32=True, keep_bytes=N * V * 4)
    assert seen[0].compute_dtype == seen[0].saved_dtype == torch.float32
    assert error(logp, full(given[0], given[1], None, *given[3:])[0]) <= 2e-6
    token_logp(given[0], given[1].float(), given[3], keep_bytes=N * V * 4)
    assert seen[1].compute_dtype == seen[1].saved_dtype == torch.float32
    token_logp(given[0], given[1], given[3], keep_bytes=N * V * 2)
    assert seen[2].saved_dtype == torch.bfloat16


@keeping
def test_no_tensor_is_as_large_as_all_logits(keep_bytes):
    given = case(n=300, v=2000, h=4)
    with Seen() as seen:
        gradients(given, tile_logits=128 * 128, want_entropy=True, keep_bytes=keep_bytes)
    assert seen.max_logit == 128 * 128 < 300 * 2000 / 30


def test_without_gradient_nothing_is_kept(monkeypatch):
    seen = plans(monkeypatch)
    hidden, weight, bias, target, _ = case()
    with torch.no_grad():
        logp, _ = token_logp(hidden, weight, target, bias=bias, keep_bytes=ROOM)
    token_logp(hidden.detach(), weight.detach(), target, keep_bytes=ROOM)
    token_logp(hidden, weight, target, keep_bytes=ROOM)
    assert [plan.saved_dtype for plan in seen] == [None, None, torch.float32]
    assert not logp.requires_grad


def test_logits_too_large_for_an_exponential_are_no_trouble():
    hidden, weight, bias, target, g = case()
    given = ((100 * hidden).detach().requires_grad_(), weight, bias, target, g)
    logp, entropy, *found = gradients(given, tile_logits=1000, want_entropy=True)
    expected_logp, _, *expected = full(*given)
    assert error(logp, expected_logp) <= 2e-6 and bool((entropy >= -1e-6).all())
    for one, other in zip(found, expected, strict=True):
        assert error(one, other) <= 1e-4  # logits near 1000 have no more digits


@pytest.mark.parametrize("outside", [-100, V])
def test_a_target_outside_the_vocabulary_is_nan_and_spoils_no_other(outside):
    hidden, weight, _, target, _ = case()
    expected, _ = token_logp(hidden, weight, target, tile_logits=1000)
    target[5] = outside
    logp, _ = token_logp(hidden, weight, target, tile_logits=1000)
    assert logp.isnan().nonzero().tolist() == [[5]]
    assert torch.equal(logp[6:], expected[6:])


def test_what_is_compiled_says_what_is_done_in_place():
    z, lse = torch.randn(7, 64), torch.randn(7, 1)
    for entropy, keep in ((False, None), (True, torch.bfloat16), (False, torch.float32)):
        one = fused_head._reduce_tile(z, entropy, keep)
        other = fused_head._reduce_tile_in_place(z.clone(), entropy, keep)
        for a, b in zip(one, other, strict=True):
            assert (a is None and b is None) or torch.equal(a, b)
    softmax = fused_head._softmax(z, lse, torch.bfloat16)
    assert torch.equal(softmax, fused_head._softmax_in_place(z.clone(), lse, torch.bfloat16))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("tile", [2**20, 1024], ids=["one block", "tiles"])
def test_memory_that_holds_nan_does_not_reach_a_gradient(tile, dtype):
    given = case(n=64, dtype=dtype)
    expected = gradients(given, tile_logits=tile)
    torch.use_deterministic_algorithms(True)  # then new memory is filled with NaN
    try:
        found = gradients(given, tile_logits=tile)
    finally:
        torch.use_deterministic_algorithms(False)
    for one, other in zip(found, expected, strict=True):
        assert one is other is None or torch.equal(one, other)


def test_with_one_block_of_tokens_the_weights_gradient_is_written_at_once():
    given = case(n=64, dtype=torch.bfloat16, bias=False)
    exact = full(*given)[3]
    for tile, added in ((2**20, 0), (64 * 128, 0), (1024, 1)):
        blocks = [
            -(-a // b) for a, b in zip((64, V), fused_head.tile_shape(64, V, tile), strict=True)
        ]
        logp, _ = token_logp(given[0], given[1], given[3], tile_logits=tile)
        given[1].grad = None
        with Seen() as seen:
            (logp * given[4]).sum().backward()
        tiles = blocks[0] * blocks[1]
        assert (blocks[0] > 1) == bool(added)
        # of each tile: the logits again and the hidden states' gradient, and where tiles are added
        # in float32 the weight's
        assert seen.calls["addmm"] == (2 + added) * tiles
        assert seen.calls["mm"] == (1 - added) * tiles
        assert error(given[1].grad, exact) <= 2.5e-3  # one rounding


@pytest.mark.parametrize("keep_bytes", [0, ROOM], ids=["again", "kept"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_compiled_or_not_the_numbers_are_the_same(dtype, keep_bytes, monkeypatch):
    given, compiled = case(dtype=dtype), Counter()
    words = {"tile_logits": 1500, "want_entropy": True, "keep_bytes": keep_bytes}
    plain = gradients(given, **words)
    apply = fused_head.TokenLogp.apply

    def compiling(*args):
        return apply(*args[:-1], args[-1]._replace(compiled=True))

    def keep(function):
        compiled[function.__name__] += 1
        return function

    monkeypatch.setattr(fused_head.TokenLogp, "apply", compiling)
    monkeypatch.setattr(fused_head, "compile_kernel", keep)
    found = gradients(given, **words)
    assert compiled["_reduce_tile"] and bool(compiled["_softmax"]) == (not keep_bytes)
    for one, other in zip(found, plain, strict=True):
        assert torch.equal(one, other)


H100_L2, A100_L2, T4_L2 = 50 * 2**20, 40 * 2**20, 4 * 2**20


def test_on_a_gpu_only_a_large_pass_is_compiled_and_a_tile_fits_the_cache(monkeypatch):
    seen = []
    facts = SimpleNamespace(L2_cache_size=H100_L2)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: facts)
    monkeypatch.setattr(
        fused_head.TokenLogp, "apply", lambda *args: seen.append(args[-1]) or (1, 2)
    )
    with FakeTensorMode():
        for tokens, words in ((4096, 49152), (8192, 49152), (2**13, 2**15)):
            hidden, weight = (
                torch.empty(n, 8, device="cuda", dtype=torch.bfloat16) for n in (tokens, words)
            )
            token_logp(hidden, weight, torch.empty(tokens, device="cuda", dtype=torch.long))
            token_logp(hidden, weight, torch.empty(0), row_index=torch.empty(7), tile_logits=2**22)
    large, few = seen[::2], seen[1::2]
    assert [plan.compiled for plan in large] == [False, True, True]
    assert not any(plan.compiled for plan in few) and {plan.tile_tokens for plan in few} == {7}
    assert all(2**22 < plan.tile_tokens * plan.tile_vocab <= 2**23 for plan in large)


def test_a_tile_is_the_largest_power_of_two_that_stays_in_the_cache():
    size = fused_head.gpu_tile_logits
    assert size(H100_L2, 2) == 2**23 and size(H100_L2, 4) == size(A100_L2, 2) == 2**22
    assert size(2**40, 2) == size(0, 2) == size(T4_L2, 2) == fused_head.GPU_TILE_LOGITS
    assert fused_head._device_tile_logits(torch.device("cpu"), torch.float32) == 2**20


@pytest.mark.parametrize("layout", ["shared", "packed"])
def test_what_only_a_gpu_runs_of_the_fast_path_can_still_be_called(layout, monkeypatch):
    import test_fast_path_gpu as on_gpu

    monkeypatch.setattr(on_gpu, "DEVICE", "cpu")
    on_gpu.test_float32_layouts_agree_on_a_gpu(layout)
    on_gpu.test_the_fused_head_is_log_softmax_in_float64(torch.float32, 0, 5000, 37)
