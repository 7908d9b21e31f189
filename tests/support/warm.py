"""Everything that a run imports and computes once, done before a process is forked for it.

Forks draw no curves.png: it takes longer than all the steps of such a run, and its own tests do.
"""

import gc
import os


def warm() -> None:
    """Import it, compose a config, load nothing of the test's."""
    os.environ.setdefault("DS_ACCELERATOR", "cpu")  # else it says on stdout that it took it
    import datasets  # noqa: F401
    import deepspeed  # noqa: F401
    import torch
    from transformers import conversion_mapping
    from transformers.models.qwen3 import modeling_qwen3  # noqa: F401

    from rloo_cli.cli import main, multirun, plan, sweep, train  # noqa: F401
    from rloo_cli.config import registry
    from rloo_cli.config.compose import compose_config
    from rloo_cli.evaluation import worker as evaluation_worker  # noqa: F401
    from rloo_cli.reporting import curves
    from rloo_cli.train import worker  # noqa: F401
    from rloo_cli.train.supervised import worker as supervised_worker  # noqa: F401

    for room in registry.REGISTRIES:
        for name in registry.registry_names(room):
            registry.registered_module(room, name)
    compose_config(["+recipe=smoke"])  # Hydra and its plug-ins are imported, our recipes read
    conversion_mapping.get_checkpoint_conversion_mapping("qwen3")
    curves.draw_run_curves = lambda *given: None  # type: ignore[assignment]
    torch.set_num_threads(1)
    gc.collect()
    gc.freeze()  # a collection in a fork would touch, and so copy, everything there is
