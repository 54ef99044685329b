"""Writes what chat fine-tuning needs into a folder, without a network: conversations and a tokenizer with a template.

python examples/chat/make.py chat      ->  chat/conversations.jsonl  chat/tokenizer/
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

NUM_CONVERSATIONS = 2000
TEMPLATE = (
    "{% for message in messages %}<|{{ message.role }}|>{{ message.content }}<|end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
VOCABULARY = 384


def conversation(number: int) -> list[dict[str, str]]:
    """Two questions about a number, and their answers."""
    after = number + 1
    parity = "even" if after % 2 == 0 else "odd"
    says = "Yes" if parity == "even" else "No"
    turns = (
        ("user", f"What comes after {number}?"),
        ("assistant", f"After {number} comes {after}."),
        ("user", "Is that number even?"),
        ("assistant", f"{says}, {after} is {parity}."),
    )
    return [{"role": role, "content": content} for role, content in turns]


def tokenizer(texts: list[str]) -> PreTrainedTokenizerFast:
    """Byte-level BPE in which each digit is a token of its own, so that numbers can be counted."""
    bpe = Tokenizer(models.BPE())
    digits = pre_tokenizers.Digits(individual_digits=True)
    bpe.pre_tokenizer = pre_tokenizers.Sequence([digits, pre_tokenizers.ByteLevel(add_prefix_space=False)])
    bpe.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=["<|end|>", "<|user|>", "<|assistant|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    bpe.train_from_iterator(texts, trainer)
    return PreTrainedTokenizerFast(tokenizer_object=bpe, eos_token="<|end|>", chat_template=TEMPLATE)


def make(folder: Path) -> None:
    """Write both into the folder."""
    rows = [conversation(number) for number in range(NUM_CONVERSATIONS)]
    folder.mkdir(parents=True, exist_ok=True)
    lines = "".join(json.dumps({"messages": row}) + "\n" for row in rows)
    (folder / "conversations.jsonl").write_text(lines)
    tokenizer([message["content"] for row in rows for message in row]).save_pretrained(folder / "tokenizer")


if __name__ == "__main__":
    make(Path(sys.argv[1]))
