"""Reads a config file of `accelerate config` (`distributed.accelerate_config`), without accelerate.

Its distributed type, processes, machines and offload become the keys of `distributed`. Settings
that exist elsewhere in our config (gradient clipping, half precision, checkpointing) are compared
with it, and a file that differs is refused. Settings that do not change results are ignored:
`IGNORED` gives the reasons.
"""

import json
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import yaml

from rloo_cli.utils.errors import ConfigError, Problem, refuse
from rloo_cli.utils.files import JsonObject

KEY = "distributed.accelerate_config"
ENGINES = {"NO": "single", "MULTI_GPU": "ddp", "MULTI_CPU": "ddp", "FSDP": "fsdp2"}
ZERO_ENGINES = {0: "ddp", 1: "zero1", 2: "zero2", 3: "zero3"}
HALF_PRECISION = {"bf16": "bfloat16", "fp16": "float16"}
SHARDED_STRATEGIES = ("FULL_SHARD", "HYBRID_SHARD", "1", "4", "None")
# Settings of a file that we can ignore: how it was created, things that rloo does by itself
# (micro-batches, gathering, wrapping decoder layers, loading on rank 0), and other hardware's.
IGNORED = frozenset({
    "compute_environment", "debug", "downcast_bf16", "enable_cpu_affinity", "gpu_ids",
    "machine_rank", "main_training_function", "rdzv_backend", "same_network", "use_cpu",
    "tpu_env", "tpu_use_cluster", "tpu_use_sudo", "tpu_name", "tpu_zone", "commands",
    "command_file", "dynamo_config", "ipex_config",
})  # fmt: skip
KNOWN = frozenset({
    "distributed_type", "num_processes", "num_machines", "main_process_ip", "main_process_port",
    "mixed_precision", "deepspeed_config", "fsdp_config",
})  # fmt: skip


def apply_accelerate_file(values: JsonObject, overrides: Iterable[str]) -> JsonObject:
    """The config with the keys from `distributed.accelerate_config` filled in.

    A key on the command line wins over the file. The result no longer names the file: it contains
    its settings, wherever it is read again. Raises ConfigError.
    """
    distributed = values.get("distributed")
    name = distributed.get("accelerate_config") if isinstance(distributed, dict) else None
    if not isinstance(distributed, dict) or not isinstance(name, str):
        return values
    file = AccelerateFile(name)
    given = {override.partition("=")[0].lstrip("+") for override in overrides}
    if "distributed" in given and file.keys["engine"] != distributed.get("engine"):
        why = f"{name} sets {file.keys['engine']}, the command line {distributed.get('engine')}"
        fix = f"remove one of the two; distributed.engine={distributed.get('engine')} wins"
        refuse(KEY, "the engine is set twice", fix, why)
    if problems := [*file.contradictions(values)]:
        raise ConfigError(*problems)
    keys = {k: v for k, v in file.keys.items() if f"distributed.{k}" not in given}
    return values | {"distributed": distributed | keys | {"accelerate_config": None}}


class AccelerateFile:
    """One config file of accelerate. Raises ConfigError if it is unreadable or unsupported.

    `keys`: the keys of `distributed` that it sets.
    """

    def __init__(self, name: str):
        self.name = name
        self.content = _read_mapping(Path(name).expanduser(), name)
        unknown = sorted(set(self.content) - IGNORED - KNOWN)
        filled = [key for key in unknown if self.content[key] not in (None, "", {}, "no")]
        if filled:
            why = f"{filled[0]} = {self.content[filled[0]]!r}: rloo does not support this"
            raise self._error(f"{filled[0]} is not supported", why, "remove it from the file")
        self.deepspeed = self._section("deepspeed_config")
        self.fsdp = self._section("fsdp_config")
        self.zero = self._read_deepspeed_file()
        self.keys = self._read_keys()

    def contradictions(self, values: JsonObject) -> Iterator[Problem]:
        """The file's settings outside `distributed` that differ from the config."""
        clip = self.deepspeed.get("gradient_clipping", self.zero.get("gradient_clipping"))
        said: list[tuple[str, str, object]] = []
        if isinstance(clip, int | float):
            said.append(("train.max_grad_norm", "gradient_clipping", float(clip) or None))
        precision = str(self.content.get("mixed_precision"))
        if precision in HALF_PRECISION:
            said.append(("model.dtype", "mixed_precision", HALF_PRECISION[precision]))
        elif precision not in ("no", "None", "False"):
            yield self._problem(f"mixed_precision: {precision}", "not supported", "no or bf16")
        if self.fsdp.get("fsdp_activation_checkpointing") is True:
            name = "fsdp_activation_checkpointing"
            said.append(("model.gradient_checkpointing", name, True))
        for key, setting, value in said:
            section, _, leaf = key.partition(".")
            ours = (values.get(section) or {}).get(leaf)
            if ours != value and ours != "auto":
                shown = "null" if value is None else str(value).lower()
                why = f"the file has {value}, the config {ours}"
                fix = f"{key}={shown}, or remove {setting} from the file"
                yield self._problem(f"{setting} and {key} differ", why, fix)

    def _read_keys(self) -> JsonObject:
        kind = str(self.content.get("distributed_type") or "NO").upper()
        machines = self._count("num_machines")
        keys: JsonObject = {"num_nodes": machines}
        if kind == "DEEPSPEED":
            keys |= {"engine": self._zero_engine(), "offload": self._zero_offload()}
        elif kind in ENGINES:
            keys["engine"] = ENGINES[kind]
            if kind == "FSDP":
                self._check_fsdp()
                offload = self.fsdp.get("fsdp_offload_params") is True
                keys["offload"] = "parameters" if offload else "none"
        else:
            fix = f"one of {', '.join([*ENGINES, 'DEEPSPEED'])}"
            raise self._error(f"distributed_type: {kind}", "unknown engine", fix)
        # TRL's file for one GPU says NO and num_processes: 8; accelerate starts one.
        processes = 1 if keys["engine"] == "single" else self._count("num_processes")
        if processes % machines:
            why = f"num_processes: {processes} is the total, over num_machines: {machines}"
            fix = f"num_processes: {max(machines, processes - processes % machines)}"
            raise self._error("machines would have different numbers of processes", why, fix)
        keys["num_processes"] = processes // machines
        address, port = (self.content.get(f"main_process_{part}") for part in ("ip", "port"))
        if machines > 1 and address and port:
            keys["rdzv"] = f"{address}:{port}"
        return keys

    def _zero_engine(self) -> str:
        zero = self.zero.get("zero_optimization") or {}
        stage = self.deepspeed.get("zero_stage", zero.get("stage"))
        if stage not in ZERO_ENGINES or isinstance(stage, bool):
            why = f"zero_stage: {stage}"
            raise self._error("unknown DeepSpeed stage", why, "zero_stage: 1, 2 or 3")
        return ZERO_ENGINES[stage]

    def _zero_offload(self) -> str:
        zero, devices = self.zero.get("zero_optimization") or {}, {}
        for part in ("optimizer", "param"):
            inside = zero.get(f"offload_{part}") or {}
            device = self.deepspeed.get(f"offload_{part}_device", inside.get("device"))
            devices[part] = str(device or "none")
            if devices[part] not in ("none", "cpu"):
                why = f"offload_{part}_device: {device}"
                raise self._error("offload only supports CPU memory", why, "cpu or none")
        if devices["param"] == "cpu":
            return "parameters"
        return "optimizer" if devices["optimizer"] == "cpu" else "none"

    def _check_fsdp(self) -> None:
        strategy = str(self.fsdp.get("fsdp_sharding_strategy"))
        if strategy not in SHARDED_STRATEGIES:
            why = f"fsdp_sharding_strategy: {strategy}; fsdp2 shards weights and optimizer"
            raise self._error("this strategy is not supported", why, "FULL_SHARD, or zero_stage: 2")

    def _count(self, key: str) -> int:
        value = self.content.get(key)
        if value is None:
            return 1
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise self._error(f"{key} is not a valid number", f"{key}: {value!r}", "1 or more")
        return value

    def _section(self, key: str) -> JsonObject:
        section = self.content.get(key) or {}
        if not isinstance(section, dict):
            fix = f"`name: value` lines below {key}, or omit it"
            raise self._error(f"{key} is not a section", f"{key}: {section!r}", fix)
        return section

    def _read_deepspeed_file(self) -> JsonObject:
        """DeepSpeed's own JSON, if the file names one; "auto" leaves a value to rloo."""
        name = self.deepspeed.get("deepspeed_config_file")
        if not name:
            return {}
        return _without_auto(_read_mapping(Path(str(name)).expanduser(), f"{self.name}, {name}"))

    def _problem(self, what: str, why: str, fix: str) -> Problem:
        return Problem(f"{self.name}: {what}", KEY, why, fix)

    def _error(self, what: str, why: str, fix: str) -> ConfigError:
        return ConfigError(self._problem(what, why, fix))


def _read_mapping(path: Path, name: str) -> JsonObject:
    """The content of a YAML or JSON file. Raises ConfigError."""
    try:
        text = path.read_text()
        content = json.loads(text) if path.suffix == ".json" else yaml.safe_load(text)
    except (OSError, ValueError, yaml.YAMLError) as error:
        why = getattr(error, "strerror", None) or str(error).partition("\n")[0]
        fix = "the file that `accelerate config` wrote"
        refuse(KEY, f"{name} cannot be read", fix, why)
    if not isinstance(content, dict):
        why, fix = "expected `name: value`", "the file that `accelerate config` wrote"
        refuse(KEY, f"{name} is not a mapping of settings", fix, why)
    return content


def _without_auto(content: Mapping[str, Any]) -> JsonObject:
    plain = {k: _without_auto(v) if isinstance(v, dict) else v for k, v in content.items()}
    return {k: v for k, v in plain.items() if v != "auto"}
