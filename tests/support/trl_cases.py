"""The same step through `rloo` and through the RLOOTrainer or GRPOTrainer of TRL 1.16.0.

`rloo` samples. TRL's trainer is given a copy of the weights, the same prompts, the completions
and the reward functions, and its settings are read off the run's config. From the completions on
everything is TRL's own code: log-probabilities, reference, rewards, advantages, loss,
accumulation, clipping, optimizer, metrics. It is only looked at.
"""

import copy
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from loop_cases import apart, digits, make
from torch import Tensor
from transformers import PrinterCallback, TrainerCallback

from rloo_cli.data.batch import Batch, Group, Rollout
from rloo_cli.policy.shared_attention import native_attention
from rloo_cli.policy.vision import image_token_ids
from rloo_cli.run import Run
from rloo_cli.train.loop import run_training_loop
from rloo_cli.train.minibatches import plan_updates

Gradient = dict[str, Tensor]  # by the parameter's name
Reward = Callable[..., Any]


@dataclass
class Ours:
    """What `rloo` made of it."""

    run: Run
    batches: list[Batch] = field(default_factory=list)
    gradients: list[Gradient] = field(default_factory=list)  # of each update, before clipping

    @property
    def batch(self) -> Batch:
        return self.batches[-1]

    @property
    def row(self) -> dict[str, Any]:
        """The metrics as last logged."""
        return [r for r in self.run.log.metrics_lines if "loss" in r][-1]

    @property
    def weights(self) -> Tensor:
        return vector(dict(self.run.policy.model.named_parameters()))


@dataclass
class Theirs:
    """What TRL made of it."""

    trainer: Any = None
    prompts: list[list[int]] = field(default_factory=list)  # ids, as TRL tokenizes them
    scored: list[dict[str, Tensor]] = field(default_factory=list)  # of each step, rows in order
    micros: list[dict[str, Tensor]] = field(default_factory=list)  # as each loss got them
    parts: list[float] = field(default_factory=list)  # the loss of each micro-batch
    gradients: list[Gradient] = field(default_factory=list)  # of each update, before clipping

    @property
    def losses(self) -> list[float]:
        """Of each update: TRL divides by the number of micro-batches, so their mean."""
        n = self.trainer.args.gradient_accumulation_steps
        return [sum(self.parts[i : i + n]) / n for i in range(0, len(self.parts), n)]

    @property
    def row(self) -> dict[str, Any]:
        """The metrics as last logged."""
        return [r for r in self.trainer.state.log_history if "reward" in r][-1]

    @property
    def weights(self) -> Tensor:
        return vector(dict(self.trainer.model.named_parameters()))

    def rows(self, like: Batch) -> list[list[int]]:
        """Which rows of the last step each of its micro-batches had; none may be masked."""
        pairs = [(g.prompt_ids, r.completion_ids) for g in like.groups for r in g.rollouts]
        return [[pairs.index(pair) for pair in unpadded(micro)] for micro in self.micros]

    def advantages(self, like: Batch) -> Tensor:
        """Of the last step. -> (P, K)"""
        return self.scored[-1]["advantages"].double().view_as(like.score)


def both(
    folder: Path,
    *words: str,
    rewards: Mapping[str, Reward] | None = None,
    trl_rewards: Mapping[str, Reward] | None = None,
    completions: Sequence[Sequence[int]] | None = None,
    steps: int = 1,
    optimizer: bool = False,
    trainer: str = "RLOO",
    tools: Sequence[Callable[..., Any]] = (),
    inner: Callable[[Any], Any] | None = None,
    noise: float = 0.0,
    **theirs: Any,
) -> tuple[Ours, Theirs]:
    """`steps` steps of a run made from `words`, through both.

    `trl_rewards`: rewards for TRL where it needs what we do by ourselves. `completions`: ids in
    place of sampled ones. `tools`: the run's, for TRL; `inner` makes the sampler of the run's turns
    of its tokenizer. `noise`: by how many nats the sampler's log-probabilities are off, the same
    for both; TRL then corrects as the run's `correction` says. `optimizer`: TRL builds its own;
    otherwise plain SGD. `theirs`: TRL's settings where they are not to follow ours. With several
    mini-batches TRL cuts the step as we do: left alone it shuffles rows, and groups with them.
    """
    words = (*words, f"max_steps={steps}", f"logging.every={steps}", "data.eval_split=null")
    run = make(folder, *words, rewards=rewards)
    if completions is not None:
        replay(run, completions)
    if inner is not None:
        run.generator.inner = inner(run.tokenizer)
    with native_attention(run.policy.model):
        model = copy.deepcopy(run.policy.model)
    if hasattr(model, "rloo_native"):  # the shared layout's
        del model.rloo_native
    ours = go(run, noise)
    args = settings(run, steps) | (of_rloo if trainer == "RLOO" else of_grpo)(run)
    args |= {"output_dir": str(folder / "trl")} | theirs
    trl_rewards = trl_rewards or rewards or {"digits": digits}
    return ours, trained(ours, model, trl_rewards, args, optimizer, trainer, tools, noise > 0)


def go(run: Run, noise: float = 0.0) -> Ours:
    """Train as `rloo train` does, watched."""
    ours, advance, draw = Ours(run), run.optimizer.step, run.rollouts.next_batch

    def step(norm: Tensor) -> None:
        ours.gradients.append(gradient(run.policy.model))
        advance(norm)

    def drawn(*args: Any) -> Batch:
        ours.batches.append(draw(*args))
        if noise:
            mistake_sampler(ours.batch, noise)
        return ours.batch

    run.optimizer.step, run.rollouts.next_batch = step, drawn
    run_training_loop(run)
    return ours


def mistake_sampler(batch: Batch, noise: float) -> None:
    """Let the sampler's log-probabilities be off by up to `noise` nats a token, either way."""
    random = torch.Generator().manual_seed(5)
    for group in batch.groups:
        for rollout in group.rollouts:
            assert rollout.behaviour_logp is not None
            off = (2 * torch.rand(len(rollout.behaviour_logp), generator=random) - 1) * noise
            pairs = zip(rollout.behaviour_logp, off.tolist(), strict=True)
            rollout.behaviour_logp = [logp + error for logp, error in pairs]


def corrects(trainer: Any, run: Run) -> None:
    """Let TRL correct for its sampler as the run does: its switches without its vLLM."""
    rule = run.config.algorithm.correction
    trainer.use_vllm = trainer.vllm_importance_sampling_correction = True
    trainer.vllm_importance_sampling_mode = f"{rule.level}_{rule.mode}"
    trainer.vllm_importance_sampling_clip_max = rule.cap
    trainer.vllm_importance_sampling_clip_min = rule.floor or None


def replay(run: Run, completions: Sequence[Sequence[int]]) -> None:
    """Let the run's sampler say these ids, prompt after prompt, ended by its own stop rule."""
    rule, said = run.generator.stop_rule, iter(completions)

    def rollout(seed: int) -> Rollout:
        ids = list(next(said))
        reason = rule.finish_reason(ids)
        assert reason is not None, f"{ids} is not complete"
        return Rollout(ids, rule.text(ids), reason, rule.terminated(ids, reason), seed, 0)

    def generate(groups: list[Group], seeds: list[list[int]], arrived: Any) -> None:
        for at, (group, own) in enumerate(zip(groups, seeds, strict=True)):
            group.rollouts = [rollout(seed) for seed in own]
            arrived(at)

    run.rollouts.generator = SimpleNamespace(generate=generate, metrics={}, samples_on_rank0=False)


def settings(run: Run, steps: int) -> dict[str, Any]:
    """TRL's names for what the run's config says."""
    a, g, t = run.config.algorithm, run.config.generation, run.config.train
    rows = t.prompts_per_step * a.num_generations
    micro = t.micro_batch_size or rows
    return {
        "num_generations": a.num_generations,
        "per_device_train_batch_size": micro,
        "steps_per_generation": rows // micro,
        "gradient_accumulation_steps": rows // micro // a.num_minibatches,
        "max_steps": steps * run.config.updates_per_step,
        "logging_steps": steps * run.config.updates_per_step,
        "num_iterations": a.num_iterations,
        "beta": a.beta,
        "epsilon": a.epsilon,
        "epsilon_high": a.epsilon_high,
        "mask_truncated_completions": a.mask_truncated_completions,
        "reward_weights": [r.config.weight for r in run.rewards],
        "temperature": g.temperature,
        "max_completion_length": g.max_completion_length,
        "learning_rate": t.learning_rate,
        "max_grad_norm": t.max_grad_norm or 0.0,
        "lr_scheduler_type": t.lr_scheduler,
        "weight_decay": t.weight_decay,
        **{"use_cpu": True, "bf16": False, "gradient_checkpointing": False},
        **{"shuffle_dataset": False, "save_strategy": "no"},
        **{"report_to": "none", "disable_tqdm": True},
    }


def of_rloo(run: Run) -> dict[str, Any]:
    """Those that only RLOOConfig has."""
    a = run.config.algorithm
    return {
        "normalize_advantages": a.normalize_advantages,
        "reward_clip_range": a.reward_clip_range,
    }


def of_grpo(run: Run) -> dict[str, Any]:
    """Those that only GRPOConfig has."""
    a = run.config.algorithm
    several = {"sum": "sum_then_normalize", "normalize_then_sum": "normalize_then_sum"}
    adaptive: dict[str, Any] = {}
    if (rule := a.adaptive_entropy) is not None:
        named = {"entropy_target": rule.target, "entropy_coef_delta": rule.delta}
        named |= {"entropy_coef_min": rule.min, "entropy_coef_max": rule.max}
        adaptive = {"use_adaptive_entropy": True, **named}
    return {
        **adaptive,
        "top_entropy_quantile": a.top_entropy_quantile,
        "loss_type": "grpo" if a.loss_type == "gspo" else a.loss_type,
        "importance_sampling_level": {"token": "token", "geometric": "sequence"}[a.ratio_level],
        "scale_rewards": a.advantage_scale,
        "multi_objective_aggregation": several[a.multi_reward],
        "delta": a.delta,
        "use_bias_correction_kl": a.kl_ratio_weighted,
        "entropy_coef": a.entropy_coef,
        "off_policy_mask_threshold": a.off_policy_threshold,
    }


class Watch(TrainerCallback):
    """Copies the gradient as the optimizer is about to see it."""

    def __init__(self, found: list[Gradient]):
        self.found = found

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.found.append(gradient(kwargs["model"]))


def trained(
    ours: Ours,
    model: Any,
    rewards: Mapping[str, Reward],
    args: dict[str, Any],
    optimizer: bool,
    kind: str,
    tools: Sequence[Callable[..., Any]] = (),
    corrected: bool = False,
) -> Theirs:
    """Train `model` with TRL on what `ours` sampled."""
    import trl
    from datasets import Dataset

    run, theirs = ours.run, Theirs()
    if tools:
        run.tokenizer.response_template = {}  # TRL then asks its parser, which the test replaces
    else:
        stops = sorted(run.generator.stop_rule.stop_ids)
        model.generation_config.eos_token_id = stops
    groups = [g for batch in ours.batches for g in batch.groups]
    functions = [named(name, function) for name, function in rewards.items()]
    sgd = torch.optim.SGD(model.parameters(), lr=args["learning_rate"])
    constant = torch.optim.lr_scheduler.LambdaLR(sgd, lambda _: 1.0)
    with mock.patch.dict(os.environ, CI="1"):  # or it reports its use over the network
        trainer = getattr(trl, f"{kind}Trainer")(
            model=model,
            reward_funcs=functions,
            args=getattr(trl, f"{kind}Config")(**args),
            train_dataset=Dataset.from_list([asked(g) for g in groups]),
            processing_class=processor(run),
            callbacks=[Watch(theirs.gradients)],
            **({"tools": [*tools]} if tools else {}),
            **({} if optimizer else {"optimizers": (sgd, constant)}),
        )
    theirs.trainer = trainer
    for one in (model, trainer.ref_model):
        leave_images_out(one)
    rollouts = [r for g in groups for r in g.rollouts]
    watch(trainer, theirs, said_by_turn(rollouts), rollouts if corrected else None)
    if corrected:
        corrects(trainer, run)
    with ordered(ours, kind):
        trainer.train()
    return theirs


def asked(group: Group) -> dict[str, Any]:
    """A prompt as TRL's data sets have it: the images are beside the words."""
    if not any(isinstance(m, dict) and isinstance(m["content"], list) for m in group.prompt):
        return {"prompt": group.prompt, **group.example}
    words = [
        {"role": m["role"], "content": "".join(part.get("text", "") for part in m["content"])}
        for m in group.prompt
        if isinstance(m, dict)
    ]
    images = [] if group.media is None else group.media.images
    return {"prompt": words, "images": images, **group.example}


def processor(run: Run) -> Any:
    """What TRL's trainer makes ids with: the tokenizer, or the processor where there are images."""
    shown = next((media for media in run.prompts.media if media is not None), None)
    if shown is None:
        return run.tokenizer
    shown.vision.processor.chat_template = run.tokenizer.chat_template
    run.tokenizer.padding_side = "left"  # as TRL loads one
    return shown.vision.processor


def leave_images_out(model: Any) -> None:
    """Take tokens that stand for images out of the distribution, as ours is without them.

    TRL does so where it samples, and not where it trains.
    """
    ids = sorted(image_token_ids(model.config)) if model is not None else []
    if ids:  # its head is fused, and reads weight and bias
        head = model.get_output_embeddings()
        bias = torch.zeros(len(head.weight)).index_fill(0, torch.tensor(ids), -1e4)
        head.bias = torch.nn.Parameter(bias, requires_grad=False)


def ordered(ours: Ours, kind: str) -> AbstractContextManager[Any]:
    """Lets TRL cut a step into our mini-batches."""
    algorithm = ours.run.config.algorithm
    if algorithm.num_minibatches == 1:
        return nullcontext()
    k, plans = algorithm.num_generations, plan_updates(ours.run, ours.batch, 0)
    order = [p for plan in plans for index in plan.micro_batches for p, _ in index]
    rows = [p * k + j for p in order for j in range(k)]
    return mock.patch(
        f"trl.trainer.{kind.lower()}_trainer.shuffle_sequence_dict",
        lambda columns: {
            n: column[rows] if column.ndim else column for n, column in columns.items()
        },
    )


def said_by_turn(rollouts: Sequence[Rollout]) -> list[list[int]]:
    """What was sampled, in the order in which it is asked for: all first turns, then all second."""
    turns = [[r.completion_ids] if r.turns is None else [t.sampled_ids for t in r.turns]
             for r in rollouts]  # fmt: skip
    return [own[t] for t in range(max(map(len, turns))) for own in turns if len(own) > t]


def watch(
    trainer: Any,
    theirs: Theirs,
    said: Iterable[list[int]],
    sampled: Iterable[Rollout] | None = None,
) -> None:
    """Put the completions in the place of sampling, and note what passes by.

    `sampled`: rollouts whose sampler's log-probabilities are handed over too.
    """
    said, sampled = iter(said), None if sampled is None else iter(sampled)
    score, loss = trainer._generate_and_score_completions, trainer.compute_loss

    def generated(prompt_ids: list[list[int]], *_: Any, **__: Any) -> Any:
        theirs.prompts += prompt_ids
        found = [next(said) for _ in prompt_ids]
        logps = None if sampled is None else [next(sampled).behaviour_logp for _ in prompt_ids]
        return (found, logps) if "GRPO" in type(trainer).__name__ else found

    def scored(inputs: Any) -> Any:
        theirs.scored.append(score(inputs))
        return theirs.scored[-1]

    def measured(model: Any, inputs: Any, **kwargs: Any) -> Tensor:
        theirs.micros.append(inputs)
        value = loss(model, inputs, **kwargs)
        theirs.parts.append(float(value.detach()))
        return value

    trainer._generate_single_turn = generated
    trainer._generate_and_score_completions = scored
    trainer.compute_loss = measured
    trainer.remove_callback(PrinterCallback)


def named(name: str, function: Reward) -> Reward:
    """The function under the name that it has in the run: TRL's metrics bear it."""

    def wrapped(**kwargs: Any) -> Any:
        return function(**kwargs)

    wrapped.__name__ = name
    return wrapped


def unpadded(micro: Mapping[str, Tensor]) -> Iterable[tuple[list[int], list[int]]]:
    """Prompt and completion of each row of one of TRL's micro-batches."""
    names = ("prompt_ids", "prompt_mask", "completion_ids", "completion_mask")
    for prompt, before, completion, after in zip(*(micro[n] for n in names), strict=True):
        yield prompt[before > 0].tolist(), completion[after > 0].tolist()


def gradient(model: Any) -> Gradient:
    """As it stands, copied."""
    return {n: w.grad.clone() for n, w in model.named_parameters() if w.grad is not None}


def vector(found: Mapping[str, Tensor]) -> Tensor:
    """All of it as one vector, in the order of the names."""
    return torch.cat([found[n].detach().double().reshape(-1) for n in sorted(found)])


def gaps(ours: Ours, theirs: Theirs) -> list[float]:
    """Relative distance of each update's gradient, whole or of the worst parameter."""
    found = []
    for mine, other in zip(ours.gradients, theirs.gradients, strict=True):
        assert mine.keys() == other.keys()
        each = [apart(mine[name], other[name]) for name in mine]
        found.append(max(apart(vector(mine), vector(other)), *each))
    return found


def sums(batch: Batch) -> Tensor:
    """old_logp of each completion, NaN where it was not forwarded. -> (P, K)"""
    blank = [torch.tensor(float("nan"))] * batch.score.shape[1]
    return torch.stack([torch.stack([t.sum() for t in g.old_logp or blank]) for g in batch.groups])
