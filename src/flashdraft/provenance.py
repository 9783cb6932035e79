"""What a draft was made for, against what it is used with.

training.json beside a draft's weights says which target, chat template and weights it belongs to. Another one
costs accepted tokens and never a token of the text, so whoever uses a draft is told, and not stopped.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from . import checkpoint
from .text import template_warning

if TYPE_CHECKING:
    from .target import Target


def draft_warnings(folder: Path, target: Target, thinking: bool | None = None) -> list[str]:
    """A sentence for each of weights, target and chat template that is not what the folder's training.json says;
    none without that file. `thinking`: of the chats that will be drafted; None leaves it to the template.

    Raises FlashdraftError for a file that cannot be read.
    """
    training = checkpoint.read_training(folder)
    found = (
        checkpoint.draft_warning(training, folder),
        checkpoint.target_warning(training, target),
        template_warning(training, target.tokenizer, thinking),
    )
    return [sentence for sentence in found if sentence]
