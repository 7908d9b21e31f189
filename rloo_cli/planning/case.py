"""The numbers of a run that the arithmetic reads: config, models, device, ranks, lengths."""

from dataclasses import dataclass, field, replace
from typing import Any

from rloo_cli.config import prompt_limit, value_model
from rloo_cli.config.schema import RunConfig
from rloo_cli.distributed import device_count
from rloo_cli.planning import model_facts
from rloo_cli.planning.device import Device
from rloo_cli.planning.model_facts import Facts

SIZES = {"float32": 4, "bfloat16": 2, "float16": 2}
SHARDED = ("zero3", "fsdp2")  # engines that keep a part of the weights on each rank
MOST = {"cpu": 1024, "cuda": 32768}  # rows of a forward: as `policy.memory`
TILE = {"cpu": 2**20, "cuda": 2**25}  # logits at once: as `policy.head`
AGAIN = 4  # times as many rows in a pass without gradient: as `policy.memory`


@dataclass(frozen=True)
class Case:
    """One run on one kind of device."""

    run: RunConfig
    model: Facts
    device: Device
    ranks: int  # processes that train, over all machines
    longest: int  # tokens of the longest prompt
    reference: Facts | None = None  # a second model in memory; None = there is none
    value: Facts | None = None  # a value model, which learns too
    rewards: dict[str, Facts] = field(default_factory=dict)
    budget: int | None = None  # rows of a forward, where a run has settled them
    recompute: bool | None = None  # likewise gradient checkpointing
    layout: str = ""  # likewise the layout

    @property
    def size(self) -> int:
        """Bytes of a working weight."""
        return self.bytes_of(self.run.model.dtype)

    @property
    def engine(self) -> str:
        return self.run.distributed.engine

    @property
    def shards(self) -> int:
        """Parts the weights are in."""
        return self.ranks if self.engine in SHARDED else 1

    @property
    def completion(self) -> int:
        return self.run.generation.max_completion_length

    @property
    def groups(self) -> int:
        """Most groups of one rank in one optimizer update."""
        each = -(-self.run.train.prompts_per_step // self.run.algorithm.num_minibatches)
        return -(-each // self.ranks)

    @property
    def prompts(self) -> int:
        """Prompts of one rank in one step."""
        return -(-self.run.train.prompts_per_step // self.ranks)

    @property
    def group_rows(self) -> int:
        """Places of a forward over one group of the longest prompt and completions."""
        k, p, c = self.run.algorithm.num_generations, self.longest, self.completion
        return p + k * c if self.placing == "shared" else k * (p + c)

    @property
    def placing(self) -> str:
        """The layout of rows."""
        wanted = self.layout or self.run.train.layout
        return self.model.family.layout if wanted == "auto" else wanted

    def bytes_of(self, dtype: str) -> int:
        """Bytes of a number of a dtype's name; auto is bfloat16 on a GPU."""
        if dtype == "auto":
            return 2 if self.device.kind == "cuda" else 4
        return SIZES[dtype]

    def on(self, count: int) -> "Case":
        """The same run on another number of ranks."""
        return replace(self, ranks=count)


def of(run: RunConfig, device: Device, count: int | None = None) -> Case:
    """The case of a config. `count`: ranks; None = as the config says, or this machine's GPUs.

    Raises MachineError where the facts of a model are not to be had.
    """
    model = model_facts.of(run.model.path, run.model.revision)
    training = [*run.data.sources.values()] or [run.data]
    judged = {name: e for name, e in run.rewards.items() if e.type == "model"}
    return Case(
        run=run,
        model=model,
        device=device,
        ranks=count or device_count.total(run),
        longest=prompt_limit.longest_prompt(run, training, model.context),
        reference=reference_of(run, model),
        value=value_of(run),
        rewards={n: _reward(n, entry) for n, entry in judged.items()},
    )


def reference_of(run: RunConfig, model: Facts) -> Facts | None:
    """The frozen model beside the one that learns; None without KL, and where an adapter that is
    switched off gives the same numbers."""
    settings, own = run.algorithm, run.model
    if not settings.needs_reference:
        return None
    if own.ref_path is not None:
        return model_facts.of(own.ref_path, None, "model.ref_path")
    if own.lora is not None and not own.ref_sync.every:
        return None
    return model


def value_of(run: RunConfig) -> Facts | None:
    """The value model that learns beside the policy; None for algorithms that have none."""
    if not value_model.wanted(run):
        return None
    start = value_model.beginning(run, model_facts.values)
    return model_facts.of(start.path, start.revision, start.key)


def _reward(name: str, entry: Any) -> Facts:
    return model_facts.of(entry.path, entry.revision, f"reward.{name}.path")
