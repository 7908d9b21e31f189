"""Weights over gloo, without vLLM: what is packed, what is sent, and where is listened."""

import copy
import itertools
import os
import threading
import time

import pytest
import torch
import transformers
from policy_cases import SIZE, fresh
from safetensors import safe_open

from rloo_cli.generation.vllm import transfer_gloo
from rloo_cli.generation.vllm.transfer_gloo import TensorSpec
from rloo_cli.generation.vllm.transfer_send import GlooSender
from rloo_cli.generation.vllm.weights import ModelWeightSource
from rloo_cli.utils import ports

HOST = "127.0.0.1"
DTYPES = ["float32", "bfloat16", "float16"]
SHAPES = [(1,), (3,), (5, 7), (), (16,), (2, 3, 5), (33,), (1, 1)]


def tensors(dtype, seed=0):
    draw = torch.Generator().manual_seed(seed)
    return [torch.randn(s, generator=draw).to(getattr(torch, dtype)) for s in SHAPES]


def shapes_of(named):
    return [TensorSpec(n, str(t.dtype).removeprefix("torch."), tuple(t.shape)) for n, t in named]


@pytest.mark.parametrize("dtype", DTYPES)
def test_what_is_unpacked_is_what_was_packed(dtype):
    named = [(f"t{i}", t) for i, t in enumerate(tensors(dtype))]
    buffer = transfer_gloo.pack_tensors([t for _, t in named])
    shapes = shapes_of(named)
    assert buffer.dtype == torch.uint8 and len(buffer) == sum(s.aligned_bytes for s in shapes)
    found = list(transfer_gloo.unpack_tensors(buffer, shapes))
    assert [name for name, _ in found] == [name for name, _ in named]
    for (_, ours), (_, theirs) in zip(named, found, strict=True):
        assert theirs.dtype == ours.dtype and torch.equal(ours, theirs)


def test_dtypes_may_be_mixed_and_a_view_is_packed_as_it_looks():
    named = [(f"{d}{i}", t) for d in DTYPES for i, t in enumerate(tensors(d))]
    named += [("turned", torch.arange(15.0).view(3, 5).t()), ("part", torch.arange(9.0)[::2])]
    found = dict(
        transfer_gloo.unpack_tensors(
            transfer_gloo.pack_tensors([t for _, t in named]), shapes_of(named)
        )
    )
    assert all(torch.equal(t, found[name]) for name, t in named)


@pytest.mark.parametrize("limit", [1, 16, 40, 64, 100, 10_000])
def test_buffers_keep_the_order_and_their_limit(limit):
    shapes = [TensorSpec(f"t{i}", DTYPES[i % 3], s) for i, s in enumerate(SHAPES)]
    runs = list(transfer_gloo.split_into_buffers(shapes, limit))
    assert [s for run in runs for s in run] == shapes
    assert all(len(run) == 1 or sum(s.aligned_bytes for s in run) <= limit for run in runs)
    assert all(  # and none is emptier than it must be
        sum(s.aligned_bytes for s in a) + b[0].aligned_bytes > limit
        for a, b in itertools.pairwise(runs)
    )


class Engine:
    """`link.Control` of `count` receivers in this process, a thread each while they receive."""

    def __init__(self, count=1, refuses=""):
        self.count, self.refuses = count, refuses
        self.groups, self.received, self.said = {}, [{} for _ in range(count)], []

    def init_weight_transfer_engine(self, info):
        self.init = info
        self._each(self._join)

    def _join(self, index):
        info = self.init
        rank, world = info["rank_offset"] + index, info["world_size"]
        limit, own = info["timeout_s"], info["own_host"]
        self.groups[index] = transfer_gloo.join_transfer_group(
            info["host"], info["port"], rank, world, limit, own
        )

    def start_weight_update(self):
        self.said.append("start")

    def update_weights(self, info):
        self.said.append("update")
        if self.refuses:
            raise ValueError(self.refuses)
        self.info = info
        self._each(self._receive)

    def _receive(self, index):
        rows = zip(self.info["names"], self.info["dtypes"], self.info["shapes"], strict=True)
        shapes = [TensorSpec(name, dtype, tuple(shape)) for name, dtype, shape in rows]
        for run in transfer_gloo.split_into_buffers(shapes, self.info["buffer_bytes"]):
            buffer = torch.empty(sum(s.aligned_bytes for s in run), dtype=torch.uint8)
            transfer_gloo.broadcast_buffer(self.groups[index], buffer)
            self.received[index] |= dict(transfer_gloo.unpack_tensors(buffer, run))

    def finish_weight_update(self, weight_version=None):
        self.said.append("finish")

    def _each(self, work):
        threads = [threading.Thread(target=work, args=(i,), daemon=True) for i in range(self.count)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(30)
            assert not thread.is_alive()


def link(engine, source, limit=20.0):
    return GlooSender(engine, source, HOST, HOST, engine.count, limit)


@pytest.mark.parametrize("count", [1, 2])
@pytest.mark.parametrize("dtype", DTYPES)
def test_an_engine_receives_every_weight_as_it_is_now(dtype, count, monkeypatch):
    monkeypatch.setattr(
        transfer_gloo, "BUFFER_BYTES", 5_000
    )  # several buffers, and tensors larger than one
    model, engine = fresh("qwen3"), Engine(count)
    sender = link(engine, ModelWeightSource(model, getattr(torch, dtype)))
    try:
        for _ in range(2):
            sender.send_weights()
            expected = {n: p.to(getattr(torch, dtype)) for n, p in model.named_parameters()}
            for received in engine.received:
                assert received.keys() == expected.keys()
                assert all(torch.equal(received[n], expected[n]) for n in expected)
            with torch.no_grad():
                for weight in model.parameters():
                    weight.add_(0.5)
    finally:
        sender.shutdown()
    assert engine.said == ["start", "update", "finish"] * 2
    assert {*engine.info["dtypes"]} == {dtype}


def test_only_loopback_is_listened_on():
    def open_ones():
        return {(s.address, s.port) for s in ports.listening_sockets() if s.pid == os.getpid()}

    before, engine = open_ones(), Engine()
    sender = link(engine, ModelWeightSource(fresh("qwen3"), torch.float32))
    try:
        sender.send_weights()
        new = open_ones() - before
        assert new and {address for address, _ in new} == {HOST}
        assert engine.init["port"] in {port for _, port in new}
    finally:
        sender.shutdown()
        engine.groups.clear()


def test_a_server_without_workers_is_told_all_the_same():
    engine = Engine(0)
    link(engine, ModelWeightSource(fresh("qwen3"), torch.float32)).send_weights()
    assert engine.said == ["start", "update", "finish"] and not hasattr(engine, "init")


def test_what_the_engine_refuses_is_raised_without_a_wait():
    engine, threads = Engine(refuses="no lm_head"), threading.active_count()
    sender = link(engine, ModelWeightSource(fresh("qwen3"), torch.float32), limit=5.0)
    began = time.monotonic()
    with pytest.raises(ValueError, match="no lm_head"):
        sender.send_weights()
    assert engine.said == ["start", "update"] and time.monotonic() - began < 4
    sender.shutdown()
    engine.groups.clear()  # a thread that still sends ends with the engine's side
    while threading.active_count() > threads:
        assert time.monotonic() - began < 30
        time.sleep(0.01)


def test_an_engine_that_does_not_come_is_waited_for_until_the_limit():
    class Silent(Engine):
        def init_weight_transfer_engine(self, info):
            pass

    began = time.monotonic()
    with pytest.raises(RuntimeError):
        link(Silent(), ModelWeightSource(fresh("qwen3"), torch.float32), limit=0.5)
    assert time.monotonic() - began < 30


# What is sent: a checkpoint's names.


def moe():
    size = SIZE | {"intermediate_size": 32}
    more = {"num_key_value_heads": 2, "head_dim": 8, "num_experts": 4, "num_experts_per_tok": 2}
    torch.manual_seed(0)
    settings = transformers.Qwen3MoeConfig(**size, **more, moe_intermediate_size=16)
    return transformers.AutoModelForCausalLM.from_config(settings)


MODELS = {
    "qwen3": lambda: fresh("qwen3"),
    "qwen3, tied": lambda: fresh("qwen3", tie_word_embeddings=True),
    "gpt_neox": lambda: fresh("gpt_neox"),
    "llama": lambda: fresh("llama"),
    "a mixture of experts": moe,
}


@pytest.mark.parametrize("name", MODELS)
def test_every_weight_is_sent_once_under_its_checkpoint_s_name(name, tmp_path):
    model = MODELS[name]()
    model.save_pretrained(tmp_path)
    with safe_open(tmp_path / "model.safetensors", "pt") as file:
        saved = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118
    sent = list(ModelWeightSource(model, torch.float32))
    assert sorted(n for n, _ in sent) == sorted(saved)  # none twice
    assert all(torch.equal(t, saved[n]) for n, t in sent)
    assert ("lm_head.weight" in saved) == ("tied" not in name) or name == "gpt_neox"


@pytest.mark.parametrize("dtype", DTYPES)
def test_what_is_announced_is_what_comes_in_the_serving_dtype(dtype):
    model = fresh("qwen3")
    before = copy.deepcopy(model.state_dict())
    source = ModelWeightSource(model, getattr(torch, dtype))
    got = [(m.name, m.dtype, m.shape) for m in source.metadata()]
    assert got == [(n, t.dtype, tuple(t.shape)) for n, t in source]
    assert {d for _, d, _ in got} == {getattr(torch, dtype)}
    assert all(not t.requires_grad and t.is_contiguous() for _, t in source)
    assert all(torch.equal(v, before[n]) for n, v in model.state_dict().items())
