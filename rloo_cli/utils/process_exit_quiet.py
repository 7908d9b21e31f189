"""What libraries say on their own is not what a run has to say."""

import os

import torch
import transformers


def libraries() -> None:
    """Keep transformers and DeepSpeed from talking, in this process and its children.

    transformers imports DeepSpeed where it is installed, whether it is used or not.
    """
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    if not torch.cuda.is_available():
        os.environ.setdefault("DS_ACCELERATOR", "cpu")  # it would look for others, and say so
