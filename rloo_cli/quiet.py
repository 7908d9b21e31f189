"""What libraries say on their own is not what a run has to say."""

import logging
import os

import torch
import transformers


def libraries() -> None:
    """Keep transformers, DeepSpeed and bitsandbytes from talking, in this process and its children.

    transformers imports the other two where they are installed, whether they are used or not.
    """
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    logging.getLogger("bitsandbytes").setLevel(logging.ERROR)
    if not torch.cuda.is_available():
        os.environ.setdefault("DS_ACCELERATOR", "cpu")  # it would look for others, and say so
