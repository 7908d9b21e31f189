"""What the KL is measured to: it stands, it follows by a formula, it lives elsewhere."""

from pathlib import Path

import pytest
import torch
from loop_cases import apart, flat, make, sampled, step, updated
from lora_cases import move
from policy_cases import fresh, groups
from torch import Tensor

from rloo_cli.data.batch import Batch
from rloo_cli.data.packing import whole_group_slices
from rloo_cli.policy import load, lora
from rloo_cli.policy.reference import AdapterReference, Reference
from rloo_cli.run import Run

pytestmark = pytest.mark.wide

WORDS = ("data.eval_split=null", "train.learning_rate=0.01", "train.lr_scheduler=constant")

CUT = ("algorithm.num_generations=4", "train.micro_batch_size=4")  # a micro-batch is one group


def ref_logp(run: Run, batch: Batch) -> Tensor:
    """What the reference says of a batch."""
    assert run.reference is not None
    micro = run.policy.pack(
        batch.groups, whole_group_slices(batch.groups, range(len(batch.groups)))
    )
    return run.reference.frozen_logp(micro).logp


def copied(named: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: tensor.detach().clone() for name, tensor in named.items()}


def test_a_reference_that_moves_is_the_average_that_its_keys_say(tmp_path: Path) -> None:
    run = make(tmp_path, "model.ref_sync.every=2", "model.ref_sync.alpha=0.3", *WORDS)
    assert run.reference is not None
    model = run.reference.model
    for number in range(1, 5):
        before = copied(dict(model.named_parameters()))
        step(run)
        now = dict(run.policy.model.named_parameters())
        share = 0.3 if number % 2 == 0 else 0.0
        for name, tensor in model.named_parameters():
            expected = share * now[name] + (1 - share) * before[name]
            assert torch.equal(tensor, expected), (number, name)
    assert not any(p.requires_grad for p in model.parameters())


def test_of_an_adapter_each_factor_is_averaged_and_the_base_stands(tmp_path: Path) -> None:
    words = ("lora=default", "model.ref_sync.every=1", "model.ref_sync.alpha=0.25")
    run = make(tmp_path, *words, *WORDS, noise=0.0)
    model, reference = run.policy.model, run.reference
    assert reference is not None and reference.model is model
    learns = [n for n, p in model.named_parameters() if p.requires_grad]
    assert learns and not any(lora.REFERENCE_ADAPTER in n for n in learns)
    first = sampled(run)
    start = ref_logp(run, first)
    for _ in range(3):
        before = copied(lora.adapter_tensors(model, lora.REFERENCE_ADAPTER))
        step(run)
        now = lora.adapter_tensors(model)
        for name, tensor in lora.adapter_tensors(model, lora.REFERENCE_ADAPTER).items():
            assert torch.equal(tensor, 0.25 * now[name] + 0.75 * before[name]), name
    assert (ref_logp(run, first) - start).abs().max() > 1e-4


def test_a_reference_that_stands_is_never_touched(tmp_path: Path) -> None:
    run = make(tmp_path, *WORDS)
    assert run.reference is not None and not run.reference.state()
    before = copied(dict(run.reference.model.named_parameters()))
    step(run)
    after = dict(run.reference.model.named_parameters())
    assert all(torch.equal(after[name], tensor) for name, tensor in before.items())


def test_training_from_an_adapter_measures_to_that_adapter(tmp_path: Path) -> None:
    (tmp_path / "made").mkdir()
    made = make(tmp_path / "made", "lora=default", noise=0.0)
    move(made.policy.model)
    lora.save_adapter(made.policy.model, tmp_path / "adapter")
    path = f"model.lora.path={tmp_path}/adapter"
    run = make(tmp_path, "lora=default", path, *WORDS, noise=0.0)
    batch = sampled(run)
    micro = run.policy.pack(
        batch.groups, whole_group_slices(batch.groups, range(len(batch.groups)))
    )
    start = ref_logp(run, batch)
    assert torch.equal(run.policy.frozen_logp(micro).logp, start)
    with lora.use_adapter(lora.adapter_layers(run.policy.model), None):
        assert (run.policy.frozen_logp(micro).logp - start).abs().max() > 1e-3
    updated(run, batch)
    assert torch.equal(ref_logp(run, batch), start)
    assert (run.policy.frozen_logp(micro).logp - start).abs().max() > 1e-4


def test_an_adapter_may_be_measured_to_a_model_of_its_own(tmp_path: Path) -> None:
    run = make(tmp_path, "lora=default", "model.ref_path=make:tiny", *WORDS, noise=0.0)
    assert type(run.reference) is Reference and run.reference.model is not run.policy.model
    batch = sampled(run)
    move(run.policy.model)
    with lora.use_adapter(lora.adapter_layers(run.policy.model), None):
        micro = run.policy.pack(
            batch.groups, whole_group_slices(batch.groups, range(len(batch.groups)))
        )
        base = run.policy.frozen_logp(micro).logp
    assert torch.equal(ref_logp(run, batch), base)


@pytest.mark.parametrize("more", [("algorithm.num_minibatches=2", "model.ref_sync.every=1"),
                                  ("model.ref_path=make:tiny", "lora=default")])  # fmt: skip
def test_a_reference_that_is_kept_elsewhere_gives_the_same_updates_in_one_visit_a_batch(
    tmp_path: Path, more: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    moves: list[bool] = []
    move_it = Reference._move_weights
    monkeypatch.setattr(
        Reference, "_move_weights", lambda self, d: (moves.append(d is not None), move_it(self, d))
    )
    ends = []
    for number, offload in enumerate(("true", "false")):
        (tmp_path / offload).mkdir()
        run = make(tmp_path / offload, f"model.ref_offload={offload}", *WORDS, *CUT, *more)
        assert run.reference is not None and run.reference.offloaded is (offload == "true")
        moves.clear()
        for _ in range(2):
            step(run)
        assert moves == ([True, False] * 2 if not number else [])
        ends.append((flat(run), run.log.metrics_lines[-1]["kl"]))
    assert apart(ends[0][0], ends[1][0]) < 1e-6
    assert ends[0][1] == pytest.approx(ends[1][1], rel=1e-5)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
def test_weights_that_are_kept_elsewhere_leave_the_device_between_passes() -> None:
    device = torch.device("cuda")
    reference = Reference(fresh(), 1.0, offload_from=device)
    chosen = groups()
    micro = reference.pack(chosen, whole_group_slices(chosen, range(3)))
    assert micro.input_ids.is_cuda and not next(reference.model.parameters()).is_cuda
    found = reference.frozen_logp(micro).logp
    assert found.is_cuda and not next(reference.model.parameters()).is_cuda
    with reference.on_device():
        assert next(reference.model.parameters()).is_cuda


def test_what_the_reference_of_an_adapter_computes_by_leaves_the_policy_as_it_was(
    tmp_path: Path,
) -> None:
    run = make(tmp_path, "lora=default", "model.ref_sync.every=1", *WORDS, noise=0.0)
    assert type(run.reference) is AdapterReference
    move(run.policy.model)
    batch = sampled(run)
    micro = run.policy.pack(
        batch.groups, whole_group_slices(batch.groups, range(len(batch.groups)))
    )
    before = run.policy.frozen_logp(micro).logp
    ref_logp(run, batch)
    assert torch.equal(run.policy.frozen_logp(micro).logp, before)
    assert load.resolve_dtype("auto", run.world.device) is torch.float32
