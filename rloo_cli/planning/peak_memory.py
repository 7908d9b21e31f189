"""Bytes of one rank that come and go: activations, the head, keys and values, the optimizer's own.

Each phase of a step has a peak of its own, and the largest of them decides. What a micro-batch may
hold follows the rule by which a run cuts its batches (`policy.memory`), with these figures in the
place of measured ones.
"""

from dataclasses import dataclass, field

from rloo_cli.planning.case import MOST, SHARDED, TILE, Case
from rloo_cli.planning.static_memory import GRADIENT, States, learned, states, targeted, trained

SHARE = 0.5  # of what weights and optimizer leave, that rows may take: as `policy.memory`
FIRST = 64  # places for completions that decoding begins with
LOGITS = 16  # bytes a word of each row: the model's own, in float32, processed, probabilities
# Of a CPU, as measured (docs/plan.md): what libraries take that are loaded later, and the share of
# activations that glibc keeps in pieces which the next micro-batch does not fit into.
LATER, PIECES = 0.1 * 2**30, 0.5
Parts = dict[str, float]


@dataclass(frozen=True)
class Forward:
    """How the training forward is cut, and what it keeps."""

    rows: int  # of the fullest micro-batch
    targets: int  # completion tokens among them
    micros: int  # micro-batches of an update
    recompute: bool
    layers: float  # bytes that all layers keep
    one: float  # bytes that one layer needs beside, while its gradient is computed
    kept: float  # bytes of kept logits
    head: float  # bytes of tiles, of the head's gradient, and around it


@dataclass(frozen=True)
class Memory:
    """Peaks of one rank by phase, each as named parts in bytes."""

    phases: dict[str, Parts]
    forward: Forward
    states: States
    engine: float = 0.0  # what a vLLM engine on the same device holds while we train
    host: float = 0.0
    notes: tuple[str, ...] = field(default_factory=tuple)

    @property
    def worst(self) -> str:
        """The phase with the highest peak."""
        return max(self.phases, key=lambda name: sum(self.phases[name].values()))

    @property
    def peak(self) -> float:
        """Bytes of one rank at most."""
        return sum(self.phases[self.worst].values())


def of(case: Case) -> Memory:
    """The memory of one rank of a run, without a vLLM engine."""
    held = states(case)
    cut = forward(case, held)
    resting = {
        "weights": held.weights, "optimizer": held.optimizer, "reference": held.reference,
        "value model": held.value, "reward models": held.rewards, "buffers": held.buffers,
        "libraries": LATER if case.device.kind == "cpu" else 0.0,
    }  # fmt: skip
    phases = {"rollout": resting | _rollout(case, held)}
    if case.rewards:
        phases["reward"] = resting | _scoring(case, held)
    if case.run.model.ref_offload and case.reference is not None:
        size = case.size * case.reference.total / case.shards
        phases["reference"] = resting | {"reference": size, "rows": cut.one + cut.rows * 4.0}
    phases["update"] = resting | _update(case, held, cut)
    phases["optimizer step"] = resting | _step(case, held)
    return Memory(phases={n: _some(p) for n, p in phases.items()}, forward=cut, states=held,
                  host=held.host)  # fmt: skip


def forward(case: Case, held: States) -> Forward:
    """How micro-batches are cut, as `policy.memory.limits` does it."""
    run, longest = case.run, case.group_rows
    room = SHARE * max(case.device.memory - held.resting - held.gradients, 0.0)
    wanted = run.model.gradient_checkpointing
    recompute = bool(wanted) if case.recompute is None else case.recompute
    if wanted == "auto" and case.recompute is None:
        recompute = room / per_row(case, False) < longest
    fit = room / per_row(case, recompute)
    budget = case.budget or run.train.micro_batch_tokens or _budget(case, longest, fit)
    rows, micros = _cut(case, budget)
    k = run.algorithm.num_generations
    c = case.completion
    targets = int(rows * (k * c / longest if case.placing == "shared" else c / (case.longest + c)))
    size, model = case.size, case.model
    kept = model.sizes.layers * rows * (size * model.sizes.hidden if recompute else layer(case))
    one = rows * model.passing(size) + (rows * layer(case) if recompute else 0.0)
    whole = targets * model.sizes.vocabulary * (4 if run.model.lm_head_fp32 else size)
    keep = min(_logits_kept(case), room / 4)
    return Forward(
        rows, targets, micros, recompute, kept, one, float(whole if whole <= keep else 0),
        head=_head(case, rows, targets),
    )  # fmt: skip


def _logits_kept(case: Case) -> float:
    """Bytes of logits that the head may keep, as `policy.memory` has it."""
    if (given := case.run.train.keep_logits_gb) is not None:
        return given * 1e9
    return 0.1 * case.device.memory if case.device.kind == "cuda" else 2e9


def layer(case: Case) -> float:
    """Bytes that a layer keeps of one row, adapters' inputs in float32 among them."""
    found = case.model.kept(case.size)
    if case.size < 4:
        found += sum(4.0 * i for _, i, _ in targeted(case))
    lora = case.run.model.lora
    return found + (sum(4.0 * lora.r for _ in targeted(case)) if lora else 0.0)


def per_row(case: Case, recompute: bool) -> float:
    """Bytes that one row of a training forward keeps, the head's among them."""
    s, size = case.model.sizes, case.size
    each = size * s.hidden if recompute else layer(case)
    return s.layers * each + 3 * size * s.hidden


def _budget(case: Case, longest: int, fit: float) -> int:
    wanted = max(MOST[case.device.kind], longest)
    return wanted if wanted <= fit else max(64, 1 << (int(max(fit, 1)).bit_length() - 1))


def _cut(case: Case, budget: int) -> tuple[int, int]:
    """Rows of the fullest micro-batch, and how many there are: whole groups where they fit, as
    many in each as in the others.
    """
    size, each = case.run.train.micro_batch_size, case.group_rows
    if size is None and each > budget:
        rows = max(min(each, budget), _alone(case))
        return rows, case.groups * -(-each // rows)
    many = max(1, budget // each if size is None else size // case.run.algorithm.num_generations)
    micros = -(-case.groups // many)
    return -(-case.groups // micros) * each, micros


def _alone(case: Case) -> int:
    """Rows of one completion with its prompt: what no budget cuts."""
    return case.longest + case.completion


def _head(case: Case, rows: int, targets: int) -> float:
    """The head's tiles, hidden states in float32 with their gradient, and the last norm's."""
    s, size = case.model.sizes, case.size
    tile = min(TILE[case.device.kind], max(targets, 1) * s.vocabulary)
    work = size if case.device.kind == "cuda" else 4
    return (
        tile * (4.0 + work) + targets * s.hidden * (size + 4 + work) + 3.0 * rows * size * s.hidden
    )


def _update(case: Case, held: States, cut: Forward) -> Parts:
    """Forward and backward of the fullest micro-batch.

    As a backward pass begins, everything is kept that the forward kept, with the gradients of
    earlier micro-batches; as it ends, the gradients are whole. In between one falls as the other
    grows.
    """
    adapter = trained(case)[1]
    table = 0.0 if adapter else float(case.size * case.model.table)
    begin: Parts = {
        # A value model's backward pass comes first: its gradients are there by then.
        "gradients": held.gradients if cut.micros > 1 else GRADIENT * float(learned(case)),
        "gathered": held.gathered,
        "activations": cut.layers + cut.one,
        "kept logits": cut.kept,
        "head": cut.head + table,
        "in pieces": PIECES * (cut.layers + cut.kept) if case.device.kind == "cpu" else 0.0,
    }
    end: Parts = {
        "gradients": held.gradients,
        "gathered": held.gathered,
        "activations": cut.one,
        # The gradient of a head that is the token table waits for the table's own.
        "head": table * ((cut.micros > 1) + (not case.model.head)),
    }
    return max((begin, end), key=lambda parts: sum(parts.values()))


def _step(case: Case, held: States) -> Parts:
    """Clipping and Adam: on a GPU square roots of all second moments at once, on a CPU of one."""
    if case.run.distributed.offload != "none":
        return {"gradients": held.gradients}
    count = sum(trained(case)) + learned(case)
    parts = case.ranks if case.engine.startswith("zero") or case.engine in SHARDED else 1
    widest = case.model.table if not trained(case)[1] else case.model.sizes.hidden**2
    extra = GRADIENT * count / parts if case.device.kind == "cuda" else 2.0 * GRADIENT * widest
    return {"gradients": held.gradients, "temporary": extra}


def _rollout(case: Case, held: States) -> Parts:
    """Decoding by the trainer's own weights; nothing where vLLM samples."""
    run, model, size = case.run, case.model, case.size
    if run.generation.backend != "transformers":
        return {}
    found: Parts = {}
    if case.shards > 1:  # a whole copy: decoding token by token would gather it for each token
        found["replica"] = size * model.total * (1.0 if case.shards > 1 else 0.0)
    k, p, c = run.algorithm.num_generations, case.longest, case.completion
    prompts, rows = case.prompts, case.prompts * k
    most = getattr(run.generation, "transformers").batch_tokens  # noqa: B009
    if most is not None:
        rows = min(rows, max(1, most // (p + c)))
        prompts = -(-rows // k)
    copies = prompts if case.placing == "shared" else rows
    places = min(c, 1 << max(c - 1, 1).bit_length()) if c > FIRST else c
    found["KV cache"] = float(model.kv(size) * (copies * p + rows * places))
    prefill = prompts * p * (model.passing(size) + 2 * size * model.sizes.hidden)
    sampling = rows * model.sizes.vocabulary * LOGITS
    found["prefill and sampling"] = float(max(prefill, sampling))
    return found


def _scoring(case: Case, held: States) -> Parts:
    """A reward model at work: those that are brought for it, and one batch of rows."""
    found = rows = 0.0
    for name, model in case.rewards.items():
        entry = case.run.rewards[name]
        size = case.bytes_of(entry.dtype)  # type: ignore[attr-defined]
        if getattr(entry, "offload", False) and case.device.kind == "cuda":
            found += size * (model.total - model.head)
        places = getattr(entry, "batch_size", 16) * (case.longest + case.completion)
        rows = max(rows, places * (model.passing(size) + 2.0 * size * model.sizes.hidden))
    return {"reward models": held.rewards + found, "rows": rows}


def _some(parts: Parts) -> Parts:
    return {name: value for name, value in parts.items() if value > 0}
